//! The questions of [`check_site`](super::check_site), asked once when a node starts an agent: what
//! `farshore check` calls an error stops the agent in the same words, before it has changed
//! anything. One thing does not: a named table that is gone, of a publication that was carried before.

use super::adopted::Adopted;
use super::published::Published;
use super::{Finding, Findings, Severity, publisher, target};
use crate::config::{Publication, SiteConfig, Subscription};
use farshore_apply::postgres::session::Session;
use farshore_capture::slot::Begun;
use farshore_capture::source::{Arrival, SharedAnswer};
use farshore_pg::Connection;
use std::convert::Infallible;
use std::sync::{Arc, Mutex};

/// What a look at a publisher found.
pub struct PublisherLook {
    findings: Vec<Finding>,
    /// What it would publish, if it could be asked.
    published: Option<Published>,
    /// The connection on which it was asked, until capture takes it; it ends with the look, which
    /// is kept for as long as somebody waits for it.
    asked_on: Mutex<Option<Connection>>,
}

/// A look at a publisher, taken once for all agents that start together.
pub type PublisherAsked = SharedAnswer<PublisherLook>;

/// Findings that are told in full.
const TOLD_MAX: usize = 3;

/// Whether an agent may start.
pub enum Gate {
    /// Nothing is wrong.
    Open,
    /// A server that has to be asked does not answer: the agent finds out by itself.
    Unknown,
    /// Something is wrong.
    Shut {
        /// What, and what to do.
        why: String,
        /// It may end by itself.
        passes: bool,
    },
}

/// Looks at the publisher, or takes another agent's look.
async fn look(
    publication: &Publication,
    begun: Begun,
    asked: &PublisherAsked,
    came: Arrival,
) -> Arc<PublisherLook> {
    let ask = async {
        let mut findings = Findings::publication(&publication.spec.name);
        let found = publisher::check_soon(publication, begun, &mut findings).await;
        let (published, asked_on) = found.unzip();
        let asked_on = Mutex::new(asked_on);
        Ok::<_, Infallible>(PublisherLook { findings: findings.all, published, asked_on })
    };
    match asked.get_since(came, ask).await {
        Ok(look) => look,
        Err(never) => match never {},
    }
}

/// Whether capture of a publication may start, and a connection to its publisher that was asked:
/// making one takes several round trips, and its first questions are slower. `begun` tells what was
/// done with its slot before.
pub async fn publication(
    publication: &Publication,
    begun: Begun,
    asked: &PublisherAsked,
    came: Arrival,
) -> (Gate, Option<Connection>) {
    let look = look(publication, begun, asked, came).await;
    let gate = decide(&look.findings, look.published.is_some());
    let asked_on = look.asked_on.lock().unwrap_or_else(|poisoned| poisoned.into_inner()).take();
    (gate, asked_on)
}

/// A subscription's publication, as its gate asks about it.
pub struct OwnPublication<'a> {
    /// As configured.
    pub publication: &'a Publication,
    /// What was done with its slot before.
    pub begun: Begun,
    /// Where its agents ask together.
    pub asked: &'a PublisherAsked,
}

/// Whether a subscription may start, and the connection to its target that was asked: making one
/// takes several round trips. `own` is its publication, unless another site has that.
pub async fn subscription(
    config: &SiteConfig,
    subscription: &Subscription,
    own: Option<OwnPublication<'_>>,
    came: Arrival,
) -> (Gate, Option<Session>) {
    let look = match own {
        Some(own) => Some(look(own.publication, own.begun, own.asked, came).await),
        // Another site has the publisher: the copy finds out what is published.
        None => None,
    };
    if let Some(look) = &look
        && Arc::strong_count(look) == 1
    {
        // Capture is not among those that wait for it.
        drop(look.asked_on.lock().unwrap_or_else(|poisoned| poisoned.into_inner()).take());
    }
    let published = look.as_ref().map(|look| look.published.as_ref());
    // What is wrong there stops capture, and the subscription waits for it.
    if let Some(None) = published {
        return (Gate::Unknown, None);
    }
    let application_name = subscription.spec.application_name();
    let mut findings = Findings::subscription(&subscription.spec.name);
    let published = published.flatten();
    // What other adopted publications bring there only `farshore check` looks at: it asks publishers
    // that this start should not wait for.
    let adopted = Adopted::default();
    let site = (config, &adopted);
    let session =
        target::check(site, subscription, published, &application_name, &mut findings).await;
    (decide(&findings.all, true), session)
}

fn decide(findings: &[Finding], complete: bool) -> Gate {
    let errors: Vec<&Finding> =
        findings.iter().filter(|finding| finding.severity == Severity::Error).collect();
    if errors.is_empty() {
        return if complete { Gate::Open } else { Gate::Unknown };
    }
    let passes = errors.iter().all(|error| error.passes);
    let told: Vec<String> =
        errors.iter().take(TOLD_MAX).map(|finding| finding.to_string()).collect();
    let mut why = told.join(" — ");
    if errors.len() > TOLD_MAX {
        why.push_str(&format!(
            " — and {} more: `farshore check` lists them all",
            errors.len() - TOLD_MAX
        ));
    }
    Gate::Shut { why, passes }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_gate_is_shut_by_errors_alone() {
        let mut findings = Findings::publication("p");
        findings.note("fine");
        findings.warning("so so", "nothing");
        assert!(matches!(decide(&findings.all, true), Gate::Open));
        assert!(matches!(decide(&findings.all, false), Gate::Unknown));
        findings.passing_error("busy", "Wait");
        let Gate::Shut { why, passes } = decide(&findings.all, true) else {
            panic!("open");
        };
        assert_eq!((why.as_str(), passes), ("publication \"p\": busy. Wait", true));
        for _ in 0..3 {
            findings.error("wrong", "Mend it");
        }
        let Gate::Shut { why, passes } = decide(&findings.all, true) else { panic!("open") };
        assert!(!passes && why.ends_with("and 1 more: `farshore check` lists them all"), "{why}");
    }
}
