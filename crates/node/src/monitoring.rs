//! What the monitor is given: the site's state, and what may be asked of it.

use crate::operate;
use crate::report::SiteReport;
use crate::site::Site;
use crate::supervisor::{LINK_BACK_OFF_MAX, Outcome, supervise};
use crate::tell;
use farshore_model::Lsn;
use farshore_monitor::{Action, Monitor, Question, Sampler, Settings, Source};
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::watch;
use tokio::task::JoinSet;
use tokio::time::MissedTickBehavior;

/// Runs the monitor until `stop` turns true. Whatever goes wrong with it, the site goes on.
pub(crate) async fn run(site: Arc<Site>, settings: Settings, mut stop: watch::Receiver<bool>) {
    let source: Arc<dyn Source> = Arc::new(Watched(site.clone()));
    let (sampler, snapshots) = Sampler::new(source.clone(), &settings);
    let mut parts = JoinSet::new();
    parts.spawn(sampler.run());
    if let Some(every) = site.config.tracer_every {
        for publication in &site.config.publications {
            let name = publication.spec.name.clone();
            parts.spawn(post_tracers(site.clone(), name, every));
        }
    }
    let stopped = stop.clone();
    parts.spawn(async move {
        let agent = || async {
            match Monitor::bind(&settings, source.clone(), snapshots.clone()).await {
                Ok(monitor) => {
                    tracing::info!(address = %monitor.local_address(), "monitor");
                    monitor.run().await;
                    Outcome::Done
                }
                // Another process may give the address up, and files may be mended.
                Err(error) => Outcome::Transient(error.to_string()),
            }
        };
        let kind = ("monitor", LINK_BACK_OFF_MAX);
        supervise(kind, "site".to_owned(), stopped, agent, || (Lsn::ZERO, 0), |_| {}).await;
    });
    // A sender that is gone is a stop too.
    let _ = stop.wait_for(|stop| *stop).await;
    parts.shutdown().await;
}

/// Posts a tracer token again and again. One that does not arrive in time is waited for no longer
/// than until the next is due.
async fn post_tracers(site: Arc<Site>, publication: String, every: Duration) {
    let mut due = tokio::time::interval(every);
    due.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        due.tick().await;
        if let Err(error) = site.tracer(&publication, every).await {
            tracing::debug!(%publication, "no tracer token: {error}");
        }
    }
}

/// A site as the monitor sees it.
struct Watched(Arc<Site>);

impl Source for Watched {
    fn report(&self) -> SiteReport {
        self.0.report()
    }

    fn tell(&self, question: Question) -> farshore_monitor::Outcome {
        let site = self.0.clone();
        Box::pin(async move { tell::answer(&site, question).await })
    }

    fn act(&self, action: Action) -> farshore_monitor::Outcome {
        let site = self.0.clone();
        Box::pin(async move { operate::act(&site, action).await })
    }
}
