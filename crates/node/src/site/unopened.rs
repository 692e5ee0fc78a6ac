//! Logs that could not be opened: what needs one of them stands still and says why, and everything
//! else of the site runs.

use super::SiteError;
use crate::config::SiteConfig;
use crate::report::{PublicationReport, SubscriptionReport};
use farshore_store::StoreError;

/// A log that could not be opened when the node started.
#[derive(Debug)]
pub(super) struct Unopened {
    /// Of the publication, or of the received log.
    pub name: String,
    /// Where it comes from; `None` if it is captured here.
    upstream: Option<String>,
    why: SiteError,
}

impl Unopened {
    /// `why`, where the others can run without it. One that another process has open for a while is
    /// there again at the next start.
    pub fn without(
        name: &str,
        upstream: Option<&str>,
        why: SiteError,
    ) -> Result<Unopened, SiteError> {
        if matches!(why, SiteError::Store { error: StoreError::Locked { .. }, .. }) {
            return Err(why);
        }
        Ok(Unopened { name: name.to_owned(), upstream: upstream.map(str::to_owned), why })
    }

    /// What happened and what to do, for a person.
    pub fn why(&self) -> String {
        format!(
            "{}. The rest of this site runs; start this node again (farshore run) once that is mended",
            self.why
        )
    }

    pub fn report(&self) -> PublicationReport {
        PublicationReport {
            name: self.name.clone(),
            upstream: self.upstream.clone(),
            state: "stopped".to_owned(),
            error: Some(self.why()),
            ..PublicationReport::default()
        }
    }
}

/// # Errors
/// Why the first one could not be opened, where nothing is left that runs.
pub(super) fn check_rest(
    unopened: Vec<Unopened>,
    config: &SiteConfig,
) -> Result<Vec<Unopened>, SiteError> {
    let logs = config.publications.len() + config.sites.received.len();
    let has_mirrors = !config.mirrors.near.is_empty() || !config.mirrors.far.is_empty();
    if unopened.len() == logs && !has_mirrors {
        return match unopened.into_iter().next() {
            Some(first) => Err(first.why),
            None => Ok(Vec::new()),
        };
    }
    for log in &unopened {
        tracing::error!("{}", log.why());
    }
    Ok(unopened)
}

/// What is told of the subscriptions to them.
pub(super) fn followers<'a>(
    unopened: &'a [Unopened],
    config: &'a SiteConfig,
) -> impl Iterator<Item = SubscriptionReport> + 'a {
    config.subscriptions.iter().filter_map(|subscription| {
        let log = unopened.iter().find(|log| log.name == subscription.publication)?;
        Some(SubscriptionReport {
            name: subscription.spec.name.clone(),
            publication: subscription.publication.clone(),
            state: "stopped".to_owned(),
            error: Some(log.why()),
            ..SubscriptionReport::default()
        })
    })
}
