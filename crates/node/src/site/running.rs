//! How each agent of a site is kept running: it passes its gate, runs, and is tried again.

use super::Site;
use crate::agents::{self, AgentFailure, lock};
use crate::check::gate::{self, Gate, OwnPublication, PublisherAsked};
use crate::sites::receive::Receive;
use crate::supervisor::{LINK_BACK_OFF_MAX, Notice, Outcome, SERVER_BACK_OFF_MAX, supervise};
use farshore_apply::{Initialise, Phase, Subscription};
use farshore_capture::source::Arrival;
use farshore_capture::{Capture, slot};
use farshore_store::LogStore;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;
use tokio::sync::watch;

pub(super) async fn run_receive(
    name: String,
    receive: Arc<Receive>,
    failure: Arc<Mutex<AgentFailure>>,
    stop: watch::Receiver<bool>,
) {
    lock(&failure).begin();
    let agent = || {
        let (receive, stop) = (receive.clone(), stop.clone());
        let failure = failure.clone();
        async move {
            let begun = *receive.ready.borrow();
            match receive.run(stop).await {
                Ok(()) => Outcome::Done,
                Err(error) => {
                    if *receive.ready.borrow() > begun {
                        lock(&failure).had_begun();
                    }
                    outcome(error.is_transient(), &error)
                }
            }
        }
    };
    let progress = || (receive.store.durable().borrow().0, receive.blocks_coming());
    let notice = |notice: Notice<'_>| agents::note(&failure, &notice);
    supervise(("receiver", LINK_BACK_OFF_MAX), name, stop.clone(), agent, progress, notice).await;
}

/// A publication of this site, as gates ask about it; `None` if another site has the publisher.
fn own_publication<'a>(site: &'a Site, name: &str) -> Option<OwnPublication<'a>> {
    let publication = site.config.publication(name)?;
    let agent = site.publications.iter().find(|agent| agent.name == name)?;
    let begun = slot::begun(|key| agent.store.note(key));
    Some(OwnPublication { publication, begun, asked: &agent.asked_by_gates })
}

/// Whether an agent has passed its [`gate`]; it is asked again only until then.
#[derive(Default)]
struct Passed {
    passed: AtomicBool,
    tried: AtomicBool,
}

/// Agents are taken to start together within this time of the node's start.
const TOGETHER: Duration = Duration::from_secs(5);

impl Passed {
    /// Agents that start with the node take the answer that the first of them gets; later each
    /// attempt asks anew, and so does an agent that is resumed.
    fn came(&self, site: &Site, asked: &PublisherAsked) -> Arrival {
        let again = self.tried.swap(true, Ordering::Relaxed);
        if again || site.started.elapsed() > TOGETHER { asked.arrive() } else { Arrival::FIRST }
    }

    async fn or_asked(&self, ask: impl Future<Output = Gate>) -> Result<(), Outcome> {
        if self.passed.load(Ordering::Relaxed) {
            return Ok(());
        }
        match ask.await {
            Gate::Open => self.passed.store(true, Ordering::Relaxed),
            Gate::Unknown => {}
            Gate::Shut { why, passes: true } => return Err(Outcome::Transient(why)),
            Gate::Shut { why, passes: false } => return Err(Outcome::Permanent(why)),
        }
        Ok(())
    }
}

pub(super) async fn run_capture(
    site: Arc<Site>,
    capture: Arc<Capture>,
    failure: Arc<Mutex<AgentFailure>>,
    stop: watch::Receiver<bool>,
) {
    let name = capture.spec.name.clone();
    lock(&failure).begin();
    let passed = Arc::new(Passed::default());
    let agent = || {
        let (capture, mut stop) = (capture.clone(), stop.clone());
        let (site, passed, failure) = (site.clone(), passed.clone(), failure.clone());
        async move {
            let mut connection = None;
            if let Some(own) = own_publication(&site, &capture.spec.name) {
                let came = passed.came(&site, own.asked);
                let asked = async {
                    let (gate, asked_on) =
                        gate::publication(own.publication, own.begun, own.asked, came).await;
                    connection = asked_on;
                    gate
                };
                let asked = passed.or_asked(asked);
                if let Err(outcome) = unless_stopped(&mut stop, asked).await {
                    return outcome;
                }
            }
            let begun = *capture.ready.borrow();
            match capture.run(connection, stop).await {
                Ok(()) => Outcome::Done,
                Err(error) => {
                    if *capture.ready.borrow() > begun {
                        lock(&failure).had_begun();
                    }
                    outcome(error.is_transient(), &error)
                }
            }
        }
    };
    let progress = || (capture.store.durable().borrow().0, 0);
    let notice = |notice: Notice<'_>| agents::note(&failure, &notice);
    supervise(("capture", SERVER_BACK_OFF_MAX), name, stop.clone(), agent, progress, notice).await;
}

/// Asks, but for a stop: then there is nothing more to do.
async fn unless_stopped(
    stop: &mut watch::Receiver<bool>,
    asked: impl Future<Output = Result<(), Outcome>>,
) -> Result<(), Outcome> {
    tokio::select! {
        biased;
        _ = stop.wait_for(|stop| *stop) => Err(Outcome::Done),
        answer = asked => answer,
    }
}

pub(super) async fn run_subscription(
    site: Arc<Site>,
    subscription: Arc<Subscription>,
    failure: Arc<Mutex<AgentFailure>>,
    stop: watch::Receiver<bool>,
) {
    let name = subscription.spec.name.clone();
    lock(&failure).begin();
    let passed = Arc::new(Passed::default());
    let agent = || {
        let (subscription, mut stop) = (subscription.clone(), stop.clone());
        let (site, passed, failure) = (site.clone(), passed.clone(), failure.clone());
        async move {
            // The log is kept from before the backup is taken, whether or not there is a target yet.
            if subscription.spec.initialise == Initialise::Backup
                && let Err(error) = subscription.store.register_cursor(&subscription.spec.name)
            {
                tracing::warn!(subscription = %subscription.spec.name, "the log is not kept: {error}");
            }
            let mut session = None;
            if let Some(configured) = site.config.subscription(&subscription.spec.name) {
                let own = own_publication(&site, &configured.publication);
                let came = own.as_ref().map_or(Arrival::FIRST, |own| passed.came(&site, own.asked));
                let asked = async {
                    let (gate, asked_on) =
                        gate::subscription(&site.config, configured, own, came).await;
                    session = asked_on;
                    gate
                };
                let asked = passed.or_asked(asked);
                if let Err(outcome) = unless_stopped(&mut stop, asked).await {
                    return outcome;
                }
            }
            match subscription.run(session, stop).await {
                Ok(()) => Outcome::Done,
                Err(error) => {
                    let phase = &mut lock(&subscription.status).phase;
                    if agents::is_live(std::mem::replace(phase, Phase::Starting)) {
                        lock(&failure).had_begun();
                    }
                    if error.is_clash() {
                        Outcome::Clash(error.to_string())
                    } else {
                        outcome(error.is_transient(), &error)
                    }
                }
            }
        }
    };
    let progress = || agents::subscription_progress(&lock(&subscription.status));
    let notice = |notice: Notice<'_>| agents::note(&failure, &notice);
    supervise(("subscription", SERVER_BACK_OFF_MAX), name, stop.clone(), agent, progress, notice)
        .await;
}

fn outcome(transient: bool, error: &dyn std::fmt::Display) -> Outcome {
    if transient {
        Outcome::Transient(error.to_string())
    } else {
        Outcome::Permanent(error.to_string())
    }
}
