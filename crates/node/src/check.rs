//! Preflight: what will not work, on which object, and what to do, before anything starts.
//!
//! ```text
//! publisher   its settings, rights and free places, and the slot
//! published   the tables that are to be published
//! target      its rights, and what earlier subscriptions left there
//! tables      what a server's catalogue says of tables; read in one go, however many there are
//! columns     a table on both sides: columns, types, keys
//! labels      those of enums on both sides
//! creation    tables that are to be created, and their names
//! restored    a target that waits for its backup: what that will hold beyond what is published
//! firing      whether triggers and foreign keys of the target fire for replicated rows
//! mirrors     the principal of a near end, and the room of a far end
//! both        two servers side by side: the same database, encodings, clocks
//! running     agents of this site's node that have stopped
//! site        the data folder, and addresses to listen on
//! gate        the same questions when a node starts an agent
//! ```
//!
//! An error is what would stop the agent that meets it; `run` asks the same questions with the same
//! code and stops that agent before it has changed anything ([`gate`]).

mod adopted;
mod both;
mod columns;
mod creation;
mod firing;
pub mod gate;
mod labels;
mod mirrors;
mod published;
mod publisher;
mod restored;
mod running;
mod server;
mod site;
mod sites;
mod tables;
mod target;

use crate::config::SiteConfig;
use serde::Serialize;
use std::collections::HashSet;

/// How bad a finding is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Severity {
    /// Fine; said so that the reader knows that it was looked at, or how it will be done.
    Note,
    /// Works, with a drawback.
    Warning,
    /// Will not work.
    Error,
}

/// One thing that was looked at.
#[derive(Clone, Debug, Serialize)]
pub struct Finding {
    /// How bad.
    pub severity: Severity,
    /// For instance `publication "sales"`.
    pub object: String,
    /// What was found.
    pub what: String,
    /// What to do about it: SQL or a setting wherever that is possible.
    pub remedy: Option<String>,
    /// An error that may end without anybody changing the site file or the schema.
    #[serde(skip)]
    pub passes: bool,
}

impl std::fmt::Display for Finding {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}: {}", self.object, self.what)?;
        match &self.remedy {
            Some(remedy) => write!(f, ". {remedy}"),
            None => Ok(()),
        }
    }
}

/// Gathers findings about one object.
struct Findings {
    all: Vec<Finding>,
    object: String,
}

impl Findings {
    fn about(object: String) -> Findings {
        Findings { all: Vec::new(), object }
    }

    fn publication(name: &str) -> Findings {
        Findings::about(format!("publication \"{name}\""))
    }

    fn subscription(name: &str) -> Findings {
        Findings::about(format!("subscription \"{name}\""))
    }

    fn note(&mut self, what: impl Into<String>) {
        self.add(Severity::Note, what.into(), None);
    }

    fn warning(&mut self, what: impl Into<String>, remedy: impl Into<String>) {
        self.add(Severity::Warning, what.into(), Some(remedy.into()));
    }

    fn error(&mut self, what: impl Into<String>, remedy: impl Into<String>) {
        self.add(Severity::Error, what.into(), Some(remedy.into()));
    }

    /// An error that an agent waits out.
    fn passing_error(&mut self, what: impl Into<String>, remedy: impl Into<String>) {
        self.error(what, remedy);
        if let Some(last) = self.all.last_mut() {
            last.passes = true;
        }
    }

    /// A server that answered, but not to the end.
    fn cannot_look(&mut self, kind: &str, error: &dyn std::fmt::Display, passes: bool) {
        self.error(format!("cannot look at the {kind}: {error}"), "Look into that server's log");
        if let Some(last) = self.all.last_mut() {
            last.passes = passes;
        }
    }

    /// An agent's own words: its message names the object first and ends with the remedy.
    fn agent_error(&mut self, error: &dyn std::fmt::Display, passes: bool) {
        let text = error.to_string();
        let text = text.strip_prefix(&format!("{}: ", self.object)).unwrap_or(&text);
        let (what, remedy) = match text.rsplit_once(". ") {
            Some((what, remedy)) => (what.to_owned(), Some(remedy.to_owned())),
            None => (text.to_owned(), None),
        };
        self.add(Severity::Error, what, remedy);
        if let Some(last) = self.all.last_mut() {
            last.passes = passes;
        }
    }

    /// As [`Findings::agent_error`], of what an agent says when it comes to it.
    fn agent_warning(&mut self, error: &dyn std::fmt::Display) {
        self.agent_error(error, false);
        if let Some(last) = self.all.last_mut() {
            last.severity = Severity::Warning;
        }
    }

    fn add(&mut self, severity: Severity, what: String, remedy: Option<String>) {
        let object = self.object.clone();
        self.all.push(Finding { severity, object, what, remedy, passes: false });
    }

    fn has_errors(&self) -> bool {
        self.all.iter().any(|finding| finding.severity == Severity::Error)
    }
}

/// The first few of many names, for a message that stays readable.
fn some_of(names: &[String]) -> String {
    const SHOWN: usize = 8;
    match names.len() {
        0..=SHOWN => names.join(", "),
        count => format!("{} and {} more", names[..SHOWN].join(", "), count - SHOWN),
    }
}

/// What our connections to targets are called there.
const NAME: &str = "farshore check";

/// Looks at everything the site file names. Changes nothing anywhere.
pub async fn check_site(config: &SiteConfig) -> Vec<Finding> {
    let mut all = Vec::new();
    let adopted = adopted::Adopted::ask(config).await;
    let site = (config, &adopted);
    // Nor is it asked here how much those of other sites hold.
    let is_told_of_all = config.sites.received.is_empty();
    let (mut published_bytes, mut places) = (is_told_of_all.then_some(0), Vec::new());
    let known_slots = site::known_slots(config);
    // Of several publications of a database, one tells of its slots.
    let mut told_of_slots = HashSet::new();
    for publication in &config.publications {
        let name = &publication.spec.name;
        let mut findings = Findings::publication(name);
        let begun = site::begun(config, name, &mut findings);
        let found = publisher::check(publication, begun, &mut findings).await;
        let published = match found {
            Some((published, mut sql)) => {
                let named = tables::Named::new(published.tables.iter().map(|(name, _)| name));
                let bytes = tables::size(&mut sql, &named).await.unwrap_or_else(|error| {
                    findings.warning(
                        format!("the sizes of published tables could not be seen: {error}"),
                        "Only a note about room is made of them; look into that server's log",
                    );
                    None
                });
                let spec = &publication.spec;
                site::check_taken_out(config, spec, &mut sql, &mut findings).await;
                if told_of_slots.insert(spec.source.redacted()) {
                    publisher::check_slots_left(spec, &mut sql, &known_slots, &mut findings).await;
                }
                published_bytes = published_bytes.zip(bytes).map(|(all, more)| all + more);
                Some(published)
            }
            None => {
                published_bytes = None;
                None
            }
        };
        if let Some(published) = &published
            && let (Some(taken), Some(server)) = (published.places, &published.server)
        {
            places.push((publication, taken, server.started.clone()));
        }
        all.append(&mut findings.all);
        for subscription in &config.subscriptions {
            if subscription.publication != *name {
                continue;
            }
            let mut findings = Findings::subscription(&subscription.spec.name);
            target::check(site, subscription, published.as_ref(), NAME, &mut findings).await;
            all.append(&mut findings.all);
        }
    }
    all.append(&mut publisher::check_places(&places));
    let mut given = sites::Given::new();
    all.append(&mut sites::check(config, &mut given).await);
    all.append(&mut mirrors::check(config).await);
    for subscription in &config.subscriptions {
        if config.sites.received(&subscription.publication).is_none() {
            continue;
        }
        let mut findings = Findings::subscription(&subscription.spec.name);
        let published =
            given.get(&subscription.publication).map(|tables| published::Published::told(tables));
        target::check(site, subscription, published.as_ref(), NAME, &mut findings).await;
        all.append(&mut findings.all);
    }
    running::check(config, &mut all).await;
    let mut findings = Findings::about(format!("site \"{}\"", config.name));
    site::check(config, published_bytes, &mut findings);
    findings.all.append(&mut all);
    findings.all
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_words_of_an_agent_are_taken_apart_and_put_together_again() {
        let mut findings = Findings::publication("p");
        let said = "publication \"p\": no table matches \"a. b\". Create it, or correct `tables`";
        findings.agent_error(&said, false);
        assert_eq!(findings.all[0].what, "no table matches \"a. b\"");
        assert_eq!(findings.all[0].to_string(), said);
        findings.agent_error(&"publisher x: gone", true);
        assert_eq!(findings.all[1].to_string(), "publication \"p\": publisher x: gone");
    }

    #[test]
    fn long_lists_are_cut() {
        let names: Vec<String> = (0..20).map(|n| format!("t{n}")).collect();
        assert_eq!(some_of(&names[..2]), "t0, t1");
        assert!(some_of(&names).ends_with("t7 and 12 more"));
    }
}
