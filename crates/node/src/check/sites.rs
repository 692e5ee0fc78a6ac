//! Other sites: who this one is to them, and what it receives from there.

use super::{Finding, Findings};
use crate::config::SiteConfig;
use crate::mirrors::NearSide;
use crate::sites::protocol::{AskEnd, Wanted};
use crate::sites::renewal::{Lifetime, RENEW};
use crate::sites::{SourceOpener, dialer};
use farshore_capture::publication::PublishedTable;
use farshore_capture::source::{Remote, Source};
use farshore_link::{Dialer, Identity};
use farshore_mirror::relay::end::{PrincipalsLog, hear_end};
use std::collections::HashMap;
use std::sync::Arc;
use std::time::SystemTime;

/// What other sites give this one: tables by publication.
pub type Given = HashMap<String, Vec<PublishedTable>>;

/// Looks at the certificates here, and asks every upstream site for what is received from it.
pub async fn check(config: &SiteConfig, given: &mut Given) -> Vec<Finding> {
    let Some(files) = &config.sites.identity else { return Vec::new() };
    let mut about = Findings::about(format!("site \"{}\"", config.name));
    let identity = match Identity::load(files) {
        Ok(identity) if identity.site() == config.name => identity,
        Ok(identity) => {
            about.error(
                format!(
                    "its certificate {} is for site \"{}\"",
                    files.certificate.display(),
                    identity.site()
                ),
                "Name its own under [site] certificate and key (farshore site-cert makes one)",
            );
            return about.all;
        }
        Err(error) => {
            about.agent_error(&error, false);
            return about.all;
        }
    };
    let certificate = files.certificate.display();
    match identity.doubt() {
        None => match Lifetime::of(&identity).warning(SystemTime::now()) {
            None => about.note(format!("its certificate {certificate} can be used")),
            Some(ends) => about.warning(format!("its certificate {certificate} {ends}"), RENEW),
        },
        Some((doubt, by_all)) => {
            let (why, remedy) = doubt.split_once(". ").unwrap_or((&doubt, "Make another"));
            let what = format!("other sites will refuse its certificate {certificate}: {why}");
            if by_all {
                about.error(what, remedy);
            } else {
                about.warning(format!("{what}, if they trust the same authorities"), remedy);
            }
        }
    }
    let mut all = about.all;
    for received in &config.sites.received {
        let mut findings = Findings::publication(&received.name);
        let dialer = match dialer(&config.sites, &received.upstream, &identity) {
            Ok(Some(dialer)) => dialer,
            Ok(None) => continue,
            Err(error) => {
                findings.agent_error(&error, false);
                all.append(&mut findings.all);
                continue;
            }
        };
        let opener = SourceOpener { dialer, publication: received.publication.clone() };
        match Remote::new(&received.upstream, Arc::new(opener)).published_tables().await {
            Ok(tables) => {
                findings.note(format!(
                    "site \"{}\" gives it: {} tables",
                    received.upstream,
                    tables.len()
                ));
                given.insert(received.name.clone(), tables);
            }
            Err(error) => findings.agent_error(&error, error.is_transient()),
        }
        all.append(&mut findings.all);
    }
    for mirror in &config.mirrors.far {
        let Some(upstream) = &mirror.upstream else { continue };
        let mut findings = Findings::about(format!("mirror \"{}\"", mirror.name));
        match dialer(&config.sites, upstream, &identity) {
            Ok(Some(dialer)) => near_end(&mirror.name, upstream, dialer, &mut findings).await,
            Ok(None) => {}
            Err(error) => findings.agent_error(&error, false),
        }
        all.append(&mut findings.all);
    }
    all
}

/// Asks the site that has a mirror's near end.
async fn near_end(mirror: &str, site: &str, dialer: Dialer, findings: &mut Findings) {
    let wanted = Wanted::MirrorEnd(AskEnd::of(mirror));
    let asked = NearSide::Link(dialer).talk(wanted, hear_end).await;
    match asked.map(|answer| answer.map(|answer| answer.log)) {
        Ok(Ok(PrincipalsLog::EndsAt { end, .. })) => findings
            .note(format!("site \"{site}\" has its near end, whose principal's log ends at {end}")),
        Ok(Ok(PrincipalsLog::Unknown { why })) => findings.warning(
            format!("its near end at site \"{site}\" does not reach its principal: {why}"),
            "Run farshore check there",
        ),
        Ok(Err(error)) => findings.agent_error(&error, true),
        Err(error) => findings.agent_error(&error, error.may_pass()),
    }
}
