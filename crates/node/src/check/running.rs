//! What the node of this site has met that nobody else can see: an agent that has stopped, with the
//! reason. Much of that is of what was compared when it ran (whose log it is, how far each has come), and
//! shows in no setting.

use super::{Finding, Findings, Severity};
use crate::config::SiteConfig;
use crate::control;

/// The word of an agent that waits for a person.
const STOPPED: &str = "stopped";

/// Adds the agents that have stopped, but for those of which an error was found that says the same.
pub async fn check(config: &SiteConfig, found: &mut Vec<Finding>) {
    // A node that does not answer is told of elsewhere.
    let Ok(Some(report)) = control::status(&config.data_dir).await else { return };
    let publications =
        report.publications.iter().map(|p| ("publication", &p.name, &p.state, &p.error));
    let subscriptions =
        report.subscriptions.iter().map(|s| ("subscription", &s.name, &s.state, &s.error));
    for (kind, name, state, error) in publications.chain(subscriptions) {
        if state == STOPPED
            && let Some(error) = error
        {
            add(format!("{kind} \"{name}\""), error, found);
        }
    }
}

fn add(object: String, error: &str, found: &mut Vec<Finding>) {
    let is_said = |finding: &Finding| {
        finding.severity == Severity::Error
            && finding.object == object
            && error.contains(&finding.what)
    };
    if found.iter().any(is_said) {
        return;
    }
    let mut findings = Findings::about(object.clone());
    let own = format!("{object}: ");
    let error = error.strip_prefix(&own).unwrap_or(error);
    findings.agent_error(&format!("{own}has stopped: {error}"), false);
    found.append(&mut findings.all);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_has_stopped_is_said_once() {
        let object = "subscription \"s\"".to_owned();
        let mut findings = Findings::about(object.clone());
        findings.error("table t is missing", "Create it");
        let mut found = findings.all;
        add(object.clone(), "subscription \"s\": table t is missing. Create it", &mut found);
        assert_eq!(found.len(), 1);
        add(object, "subscription \"s\": the log has a gap. Copy it anew", &mut found);
        assert_eq!(found[1].severity, Severity::Error);
        assert_eq!(found[1].what, "has stopped: the log has a gap");
        assert_eq!(found[1].remedy.as_deref(), Some("Copy it anew"));
    }
}
