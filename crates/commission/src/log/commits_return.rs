//! Whether commits return at all: where they wait for a synchronous standby that is not there, they
//! do so for ever, and so would every figure.

use super::{Stage, connect, trying};
use crate::{Error, Progress};
use farshore_model::standby_names;
use farshore_pg::Connection;
use std::time::Duration;

/// How long a commit of next to nothing may take. Standbys on the longest lines take less.
const COMMIT_TIMEOUT: Duration = Duration::from_secs(10);

/// Commits something at each of these levels of `synchronous_commit`; `None` is the session's own.
///
/// # Errors
/// [`Error::Refused`] when one does not return within [`COMMIT_TIMEOUT`], with what it waits for. The
/// session is then left to [`super::AtWork`].
pub async fn ensure(
    stage: &mut Stage<'_>,
    levels: &[Option<&str>],
    say: Progress<'_>,
) -> Result<(), Error> {
    say("seeing whether commits return");
    let server = stage.admin.server().to_owned();
    let mut client = connect(stage.config).await?;
    stage.at_work.add(&client);
    for level in levels {
        let failed = || trying("commit something", &server);
        if let Some(level) = level {
            let set = format!("SET synchronous_commit = {level}");
            client.simple_query(&set).await.map_err(failed())?;
        }
        // No row of a table: whoever replicates all of them has no use for it.
        let name = stage.scratch.quoted();
        let sql = format!("COMMENT ON SCHEMA {name} IS 'farshore commission is at work'");
        match tokio::time::timeout(COMMIT_TIMEOUT, client.simple_query(&sql)).await {
            Ok(answer) => answer.map_err(failed())?,
            Err(_) => {
                let why = why_not(stage.admin, client.backend_pid(), *level).await;
                let why = why.map_err(trying("see what a commit waits for", &server))?;
                return Err(Error::Refused(format!("{server}: {why}")));
            }
        };
    }
    client.close().await;
    Ok(())
}

/// What the commit of a session waits for, and what to do.
async fn why_not(
    admin: &mut Connection,
    pid: i32,
    level: Option<&str>,
) -> Result<String, farshore_pg::Error> {
    let sql = format!(
        "SELECT wait_event_type, wait_event, current_setting('synchronous_standby_names') \
         FROM pg_stat_activity WHERE pid = {pid}"
    );
    let rows = admin.query(&sql, &[]).await?;
    let text = |index: usize| rows.first().and_then(|row| row.get(index)).unwrap_or_default();
    let at = level.map_or_else(String::new, |level| format!(" with synchronous_commit = {level}"));
    let late = format!("a commit of next to nothing{at} did not return within {COMMIT_TIMEOUT:?}");
    if text(1) != "SyncRep" {
        let wait = match text(0) {
            "" => "nothing that the server tells of".to_owned(),
            kind => format!("{kind}: {}", text(1)),
        };
        return Ok(format!(
            "{late} (it waited for {wait}): see what else is going on there, and try again"
        ));
    }
    let sql = "SELECT application_name, state, sync_state FROM pg_stat_replication ORDER BY 1";
    let mut connected = Vec::new();
    let mut is_seen = true;
    for row in admin.query(sql, &[]).await? {
        match (row.get(0), row.get(1)) {
            (Some(name), Some(state)) => connected.push((name.to_owned(), state.to_owned())),
            // Who may not see other sessions sees nothing but that they are there.
            (Some(_) | None, _) => is_seen = false,
        }
    }
    let setting = text(2);
    // What each level costs cannot be had without the standby.
    let remedy = match level {
        None => {
            ", or measure without it: ?options=-csynchronous_commit%3Dlocal in the URL, or \
             ALTER ROLE … SET synchronous_commit = local"
        }
        Some(_) => "",
    };
    Ok(format!(
        "{late}: it waits for a synchronous standby, and so would every other. \
         synchronous_standby_names is '{setting}'; {}. See to it that the standby is there and \
         keeps up, or take it out (ALTER SYSTEM SET synchronous_standby_names = …; \
         SELECT pg_reload_conf()){remedy}",
        standbys(setting, &connected, is_seen)
    ))
}

/// Which of the standbys that a setting names are there; with their states.
fn standbys(setting: &str, connected: &[(String, String)], is_seen: bool) -> String {
    if !is_seen {
        return "the role may not see which standbys are connected (GRANT pg_monitor to it)".into();
    }
    let states = |name: &str| -> Vec<&str> {
        let of = connected.iter().filter(|(is, _)| name == "*" || is.eq_ignore_ascii_case(name));
        of.map(|(_, state)| state.as_str()).collect()
    };
    let said: Vec<String> = standby_names::named(setting)
        .iter()
        .map(|name| match (&states(name)[..], name.as_str()) {
            ([], "*") => "none is connected".to_owned(),
            ([], name) => format!("{name} is not connected"),
            (states, "*") => format!("those that are connected are {}", states.join(", ")),
            (states, name) => format!("{name} is connected ({})", states.join(", ")),
        })
        .collect();
    said.join(", ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn standbys_that_are_waited_for_are_named_with_what_they_do() {
        let connected = [("b".to_owned(), "catchup".to_owned())];
        for (setting, is_seen, expected) in [
            ("a", true, "a is not connected"),
            ("FIRST 2 (a, B)", true, "a is not connected, B is connected (catchup)"),
            ("*", true, "those that are connected are catchup"),
            ("a", false, "GRANT pg_monitor"),
        ] {
            let said = standbys(setting, &connected, is_seen);
            assert!(said.contains(expected), "{said}");
        }
        assert_eq!(standbys("*", &[], true), "none is connected");
    }
}
