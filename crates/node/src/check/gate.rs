//! The questions of [`check_site`](super::check_site), asked once when a node starts an agent: what
//! `farshore check` calls an error stops the agent in the same words, before it has changed
//! anything.

use super::published::Published;
use super::{Finding, Findings, Severity, publisher, target};
use crate::config::{Publication, SiteConfig, Subscription};
use farshore_capture::source::SharedAnswer;
use std::sync::Arc;

/// What a publisher would publish, asked once for all subscriptions that start together.
pub type PublisherAsked = SharedAnswer<Published>;

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

/// Whether capture of a publication may start. `started` tells that it has run before.
pub async fn publication(publication: &Publication, started: bool) -> Gate {
    let mut findings = Findings::publication(&publication.spec.name);
    let published = publisher::check(publication, started, &mut findings).await;
    decide(findings.all, published.is_some())
}

/// Whether a subscription may start. `asked` is its publication's.
pub async fn subscription(
    config: &SiteConfig,
    subscription: &Subscription,
    asked: Option<&PublisherAsked>,
) -> Gate {
    let Some(publication) = config.publication(&subscription.publication) else {
        // Another site has the publisher: the copy finds out what is published.
        let mut findings = Findings::subscription(&subscription.spec.name);
        target::check(config, subscription, None, &mut findings).await;
        return decide(findings.all, true);
    };
    // What is wrong there stops capture, and the subscription waits for it.
    let ask = async {
        let mut elsewhere = Findings::publication(&publication.spec.name);
        publisher::check(publication, true, &mut elsewhere).await.ok_or(())
    };
    let published = match asked {
        Some(asked) => asked.get(ask).await,
        None => ask.await.map(Arc::new),
    };
    let Ok(published) = published else { return Gate::Unknown };
    let mut findings = Findings::subscription(&subscription.spec.name);
    target::check(config, subscription, Some(&published), &mut findings).await;
    decide(findings.all, true)
}

fn decide(findings: Vec<Finding>, complete: bool) -> Gate {
    let errors: Vec<Finding> =
        findings.into_iter().filter(|finding| finding.severity == Severity::Error).collect();
    if errors.is_empty() {
        return if complete { Gate::Open } else { Gate::Unknown };
    }
    let passes = errors.iter().all(|error| error.passes);
    let told: Vec<String> = errors.iter().take(TOLD_MAX).map(Finding::to_string).collect();
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
        assert!(matches!(decide(findings.all.clone(), true), Gate::Open));
        assert!(matches!(decide(findings.all.clone(), false), Gate::Unknown));
        findings.passing_error("busy", "Wait");
        let Gate::Shut { why, passes } = decide(findings.all.clone(), true) else {
            panic!("open");
        };
        assert_eq!((why.as_str(), passes), ("publication \"p\": busy. Wait", true));
        for _ in 0..3 {
            findings.error("wrong", "Mend it");
        }
        let Gate::Shut { why, passes } = decide(findings.all, true) else { panic!("open") };
        assert!(!passes && why.ends_with("and 1 more: `farshore check` lists them all"), "{why}");
    }
}
