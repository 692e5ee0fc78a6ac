//! What the monitor's page looks for beside the state: stored commands, recorded conflicts.

use crate::operate::Ended;
use crate::site::Site;
use farshore_apply::browse::{Bound, Browse, Lines, Shown, browse};
use farshore_apply::requests::recorded_conflicts;
use farshore_model::Lsn;
use farshore_monitor::Question;
use serde_json::{Value, json};

/// Text of one answer, in bytes: what comes after is left for the next.
const ANSWER_BYTES_MAX: usize = 1 << 20;

/// Answers what is looked for on the monitor.
pub(crate) async fn answer(site: &Site, question: Question) -> Result<Value, String> {
    match question {
        Question::Changes { publication, from, limit } => {
            changes(site, &publication, from.as_deref(), limit).await
        }
        Question::Conflicts { subscription, limit } => {
            let spec = &site.subscription(&subscription)?.subscription.spec;
            let recorded = recorded_conflicts(spec, limit).await;
            let recorded = recorded.map_err(|error| error.to_string())?;
            let parsed: Result<Vec<Value>, _> =
                recorded.iter().map(|text| serde_json::from_str(text)).collect();
            Ok(json!({ "conflicts": parsed.map_err(|error| error.to_string())? }))
        }
    }
}

async fn changes(
    site: &Site,
    publication: &str,
    from: Option<&str>,
    limit: u64,
) -> Result<Value, String> {
    let store = site.store(publication)?;
    let from = from.map(str::parse::<Lsn>).transpose();
    let from = from.map_err(|error| format!("from: {error}"))?.map(Bound::Position);
    let wanted = Browse { from, limit, ..Browse::default() };
    let mut listing = Listing::default();
    let more_at = match browse(&store, &wanted, &mut listing).await {
        Ok(Shown { more_at, .. }) => more_at,
        Err(_) if listing.is_full => listing.at,
        Err(Ended(error)) => return Err(error),
    };
    let (next, is_cut) = listing.end(more_at);
    Ok(json!({
        "transactions": listing.transactions,
        "next": next.map(|next| next.to_string()),
        "is_cut": is_cut,
        "log_start": store.status().start.to_string(),
    }))
}

/// Transactions as they are listed: each a heading, and then a line for each change.
#[derive(Default)]
struct Listing {
    transactions: Vec<Value>,
    bytes: usize,
    /// The transaction that is being listed.
    at: Option<Lsn>,
    /// There was no room for more.
    is_full: bool,
}

impl Listing {
    /// Where the next answer begins, and whether the last transaction here is not shown to its end.
    /// One that did not fit begins the next answer; one that alone is too much is cut.
    fn end(&mut self, more_at: Option<Lsn>) -> (Option<Lsn>, bool) {
        let Some(more_at) = more_at else { return (None, false) };
        let is_last = self.at == Some(more_at) && !self.transactions.is_empty();
        if is_last && self.transactions.len() == 1 {
            return (Some(Lsn(more_at.0.saturating_add(1))), true);
        }
        if is_last {
            self.transactions.pop();
        }
        (Some(more_at), false)
    }
}

impl Lines for Listing {
    type Error = Ended;

    async fn line(&mut self, line: &str) -> Result<(), Ended> {
        let change = line.strip_prefix("  ");
        if change.is_none() {
            let (position, what) = line.split_once(' ').unwrap_or((line, ""));
            self.at = position.parse().ok();
            self.transactions.push(json!({ "lsn": position, "what": what, "changes": [] }));
        }
        self.bytes += line.len();
        if self.bytes > ANSWER_BYTES_MAX {
            self.is_full = true;
            return Err(Ended("there is no room for more".to_owned()));
        }
        let last = self.transactions.last_mut();
        let changes = last.and_then(|last| last["changes"].as_array_mut());
        if let (Some(changes), Some(change)) = (changes, change) {
            changes.push(Value::from(change));
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    async fn listed(lines: &[&str]) -> (Listing, bool) {
        let mut listing = Listing::default();
        for line in lines {
            if listing.line(line).await.is_err() {
                return (listing, true);
            }
        }
        (listing, false)
    }

    #[tokio::test]
    async fn what_does_not_fit_comes_next_and_what_never_fits_is_cut() {
        let two = ["0/10 committed then", "  INSERT a", "0/20 committed then", "  INSERT b"];
        let (mut listing, _) = listed(&two).await;
        assert_eq!(listing.end(None), (None, false));
        assert_eq!(listing.transactions[1]["changes"][0], "INSERT b");
        // The limit was reached within the second.
        assert_eq!(listing.end(Some(Lsn(0x20))), (Some(Lsn(0x20)), false));
        assert_eq!(listing.transactions.len(), 1);
        // And within the first.
        let (mut listing, _) = listed(&two[..2]).await;
        assert_eq!(listing.end(Some(Lsn(0x10))), (Some(Lsn(0x11)), true));
        let long = format!("  INSERT {}", "x".repeat(ANSWER_BYTES_MAX));
        let (mut listing, is_full) = listed(&["0/10 committed then", &long]).await;
        assert!(is_full && listing.is_full);
        assert_eq!(listing.end(listing.at), (Some(Lsn(0x11)), true));
    }
}
