//! The timelines that a publisher has been on (PostgreSQL docs: "27.3.5 Timelines"), and where a
//! server that was made of a physical backup of it has left them.

use crate::CaptureError;
use crate::publication::PublicationSpec;
use farshore_model::Lsn;
use farshore_pg::Mode;
use serde::{Deserialize, Serialize};

/// Where a publisher is, and how it came there.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Timelines {
    /// Its timeline now.
    pub current: u32,
    /// That timeline's history file; empty for the first timeline.
    pub history: String,
}

impl PublicationSpec {
    /// Asks the publisher.
    pub(crate) async fn timelines(&self) -> Result<Timelines, CaptureError> {
        let failed = |error| self.publisher_error(error);
        let mut replication = self.connect(Mode::LogicalReplication).await?;
        let identified = replication.simple_query("IDENTIFY_SYSTEM").await.map_err(failed)?;
        let timeline = identified.first().and_then(|set| set.rows.first()?.get(1)?.parse().ok());
        let timeline: u32 = timeline.ok_or_else(|| {
            CaptureError::Protocol("no timeline in the answer to IDENTIFY_SYSTEM".to_owned())
        })?;
        let history = if timeline > 1 {
            let told = replication.simple_query(&format!("TIMELINE_HISTORY {timeline}")).await;
            let told = told.map_err(failed)?;
            let content = told.first().and_then(|set| set.rows.first()?.get(1));
            history_text(content.unwrap_or_default())
        } else {
            String::new()
        };
        replication.close().await;
        Ok(Timelines { current: timeline, history })
    }
}

/// A history's text as `TIMELINE_HISTORY` gives it: bytea may come in its hexadecimal form.
pub(crate) fn history_text(content: &str) -> String {
    let decoded = content.strip_prefix("\\x").and_then(|digits| {
        let bytes: Option<Vec<u8>> = (0..digits.len())
            .step_by(2)
            .map(|at| u8::from_str_radix(digits.get(at..at + 2)?, 16).ok())
            .collect();
        String::from_utf8(bytes?).ok()
    });
    decoded.unwrap_or_else(|| content.to_owned())
}

/// A history's lines: a timeline, and where it was left for the next one.
fn switches(history: &str) -> Vec<(u32, Lsn)> {
    let of_line = |line: &str| {
        let mut fields = line.split_whitespace();
        Some((fields.next()?.parse().ok()?, fields.next()?.parse().ok()?))
    };
    history.lines().filter_map(of_line).collect()
}

impl Timelines {
    /// Where the server with this history left the publisher's timelines; `None` if it has not, or
    /// left them at a place where the publisher has no longer been.
    pub fn left_at(&self, history: &str) -> Option<Lsn> {
        let (own, theirs) = (switches(&self.history), switches(history));
        let common = own.iter().zip(&theirs).take_while(|(own, theirs)| own == theirs).count();
        let (timeline, at) = *theirs.get(common)?;
        match own.get(common) {
            Some((left, until)) => (*left == timeline && at <= *until).then_some(at),
            None => (self.current == timeline).then_some(at),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_server_leaves_the_publisher_where_their_histories_part() {
        let timelines =
            |timeline, history: &str| Timelines { current: timeline, history: history.to_owned() };
        let first = timelines(1, "");
        assert_eq!(
            first.left_at("1\t0/3000158\tno recovery target specified\n"),
            Some(Lsn(0x300_0158))
        );
        // Promoted again since: it is the first time that counts.
        assert_eq!(first.left_at("1\t0/30\tx\n\n2\t0/50\tx\n"), Some(Lsn(0x30)));
        // Never promoted.
        assert_eq!(first.left_at(""), None);
        let second = timelines(2, "1\t0/30\tx\n");
        assert_eq!(second.left_at("1\t0/30\tx\n"), None);
        assert_eq!(second.left_at("1\t0/30\tx\n2\t0/50\tafter x\n"), Some(Lsn(0x50)));
        // Left before the publisher did.
        assert_eq!(second.left_at("1\t0/20\tx\n"), Some(Lsn(0x20)));
        // And after it: of another server.
        assert_eq!(second.left_at("1\t0/40\tx\n"), None);
        // Numbers that are the same by chance.
        assert_eq!(second.left_at("1\t0/20\tx\n2\t0/60\tx\n"), Some(Lsn(0x20)));
        assert_eq!(second.left_at("# nothing\n1\tx\ty\n"), None);
        assert_eq!(history_text("\\x3109302f33"), "1\t0/3");
        assert_eq!(history_text("1\t0/3"), "1\t0/3");
    }
}
