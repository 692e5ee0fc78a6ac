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
    let mirrors = report.mirrors.iter().map(|m| ("mirror", &m.name, &m.state, &m.error));
    for (kind, name, state, error) in publications.chain(subscriptions).chain(mirrors) {
        if is_at_rest(state)
            && let Some(error) = error
        {
            let how = if state == STOPPED { "has stopped" } else { "waits" };
            add(format!("{kind} \"{name}\""), (how, error), found);
        }
    }
}

/// Whether it waits for somebody to mend something.
fn is_at_rest(state: &str) -> bool {
    [STOPPED, "out of room", "disk error"].contains(&state)
}

fn add(object: String, (how, error): (&str, &str), found: &mut Vec<Finding>) {
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
    findings.agent_error(&format!("{own}{how}: {error}"), false);
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
        let stopped = "has stopped";
        let missing = "subscription \"s\": table t is missing. Create it";
        add(object.clone(), (stopped, missing), &mut found);
        assert_eq!(found.len(), 1);
        let gap = "subscription \"s\": the log has a gap. Copy it anew";
        add(object, (stopped, gap), &mut found);
        assert_eq!(found[1].severity, Severity::Error);
        assert_eq!(found[1].what, "has stopped: the log has a gap");
        assert_eq!(found[1].remedy.as_deref(), Some("Copy it anew"));
    }
}
