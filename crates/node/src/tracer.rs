//! Tracer tokens: posted on the publisher, and waited for on every leg.

use crate::agents::{PublicationAgent, lock};
use crate::report::{TracerArrival, TracerReport};
use crate::site::Site;
use farshore_capture::tracer;
use farshore_model::{Lsn, PgTime};
use farshore_store::LogStore;
use std::hash::{BuildHasher, RandomState};
use std::time::{Duration, Instant};

/// The legs are looked at this often: what is told is right to about this.
const LOOK_EVERY: Duration = Duration::from_millis(1);
/// So often after [`SOON`]: what takes longer is told as exactly as that.
const LOOK_LATER_EVERY: Duration = Duration::from_millis(50);
const SOON: Duration = Duration::from_secs(1);
/// The token before is waited for at most so long.
const TURN_MAX: Duration = Duration::from_secs(5);
/// A token is waited for at most so long.
const WAIT_MAX: Duration = Duration::from_secs(600);
/// Tokens that a site remembers.
const KEPT: usize = 32;

impl Site {
    /// Posts a token of one publication and waits until it has arrived everywhere, or no longer.
    pub(crate) async fn tracer(
        &self,
        publication: &str,
        wait: Duration,
    ) -> Result<TracerReport, String> {
        let agent = self.publication(publication)?;
        // One at a time until it is in the store: each would wait for the one before it there, and be
        // told the later for it. A target that is held up is no reason to refuse the next one.
        let turn = tokio::time::timeout(wait.min(TURN_MAX), agent.tracing.lock()).await;
        let turn = turn.map_err(|_| {
            format!(
                "a token of publication \"{publication}\" is on its way already; post another later"
            )
        })?;
        let token = RandomState::new().hash_one(PgTime::now().0);
        let spec = &agent.capture.spec;
        let post = tokio::time::timeout(wait, tracer::prepare(spec, token)).await;
        let post =
            post.map_err(|_| format!("{} did not answer within {wait:?}", spec.source.redacted()))?;
        let post = post.map_err(|error| error.to_string())?;
        let mut report = TracerReport {
            publication: publication.to_owned(),
            posted_at: PgTime::now().unix_seconds(),
            subscriptions: self.followers(publication).map(arrival).collect(),
            downstreams: self.durable_downstream(publication).into_keys().map(arrival).collect(),
            ..TracerReport::default()
        };
        let mut way = Way { agent, token, position: None, begun: Instant::now() };
        // The token may come out of the log before the answer to COMMIT is here.
        let mut posting = std::pin::pin!(post.commit());
        let (until, mut posted) = (way.begun + wait.min(WAIT_MAX), None);
        let mut turn = Some(turn);
        while Instant::now() < until && !(posted.is_some() && report.is_complete()) {
            let pause = if way.begun.elapsed() < SOON { LOOK_EVERY } else { LOOK_LATER_EVERY };
            tokio::select! {
                ended = &mut posting, if posted.is_none() => {
                    posted = Some(ended.map_err(|error| error.to_string())?);
                }
                () = tokio::time::sleep(pause) => {}
            }
            self.look(&mut way, &mut report);
            if posted.is_some() && report.durable_ms.is_some() {
                turn = None;
            }
        }
        drop(turn);
        let Some(posted) = posted else {
            let server = agent.capture.spec.source.redacted();
            return Err(format!("{server} did not answer the token's COMMIT within {wait:?}"));
        };
        // Times are counted from when COMMIT was sent, which is a moment after this began.
        let late = milliseconds(posted.sent.saturating_duration_since(way.begun));
        let shift = |at: &mut Option<f64>| *at = at.map(|at| (at - late).max(0.0));
        shift(&mut report.received_ms);
        shift(&mut report.durable_ms);
        report.subscriptions.iter_mut().for_each(|a| shift(&mut a.arrived_ms));
        report.downstreams.iter_mut().for_each(|a| shift(&mut a.arrived_ms));
        report.committed_ms = milliseconds(posted.answered.duration_since(posted.sent));
        self.say_what_holds(&mut report);
        let mut kept = lock(&self.tracers);
        kept.truncate(KEPT - 1);
        kept.push_front(report.clone());
        Ok(report)
    }

    /// The tokens that were posted here, the newest first.
    pub(crate) fn tracers(&self) -> Vec<TracerReport> {
        lock(&self.tracers).iter().cloned().collect()
    }

    fn look(&self, way: &mut Way<'_>, report: &mut TracerReport) {
        if way.position.is_none() {
            let status = lock(&way.agent.capture.status);
            let found = status.tracers.iter().find(|(tracer, _)| tracer.token == way.token);
            let Some((tracer, received)) = found else { return };
            way.position = Some(tracer.position);
            report.position = Some(tracer.position.to_string());
            let received = received.saturating_duration_since(way.begun);
            report.received_ms = Some(milliseconds(received));
        }
        let Some(position) = way.position else { return };
        let now = || Some(milliseconds(way.begun.elapsed()));
        if report.durable_ms.is_none() && way.agent.store.durable().borrow().0 >= position {
            report.durable_ms = now();
        }
        for arrival in report.subscriptions.iter_mut().filter(|a| a.arrived_ms.is_none()) {
            if self.applied(&arrival.name).is_some_and(|applied| applied >= position) {
                arrival.arrived_ms = now();
            }
        }
        if report.downstreams.iter().any(|arrival| arrival.arrived_ms.is_none()) {
            let durable = self.durable_downstream(&report.publication);
            for arrival in report.downstreams.iter_mut().filter(|a| a.arrived_ms.is_none()) {
                if durable.get(&arrival.name).is_some_and(|durable| *durable >= position) {
                    arrival.arrived_ms = now();
                }
            }
        }
    }

    fn applied(&self, subscription: &str) -> Option<Lsn> {
        let agent = self.subscription(subscription).ok()?;
        Some(lock(&agent.subscription.status).applied.0)
    }

    fn say_what_holds(&self, report: &mut TracerReport) {
        for arrival in report.subscriptions.iter_mut().filter(|a| a.arrived_ms.is_none()) {
            let agent = self.subscription(&arrival.name);
            arrival.state = agent.ok().map(|agent| agent.report().state);
        }
        let downstreams = self.report().downstreams;
        for arrival in report.downstreams.iter_mut().filter(|a| a.arrived_ms.is_none()) {
            let is_this = |d: &&crate::report::DownstreamReport| {
                d.site == arrival.name && d.publication == report.publication
            };
            let found = downstreams.iter().find(is_this);
            let connected = found.is_some_and(|downstream| downstream.connected);
            arrival.state = Some(if connected { "connected" } else { "away" }.to_owned());
        }
    }

    fn publication(&self, name: &str) -> Result<&PublicationAgent, String> {
        if let Some(received) = self.config.sites.received(name) {
            return Err(format!(
                "publication \"{name}\" is received here: post the token at site \"{}\", as \
                 publication \"{}\"",
                received.upstream, received.publication
            ));
        }
        let found = self.publication_agents().iter().find(|agent| agent.name == name);
        found.ok_or_else(|| self.no_publication(name))
    }
}

/// A token on its way.
struct Way<'a> {
    agent: &'a PublicationAgent,
    token: u64,
    /// Once it has come out of the log.
    position: Option<Lsn>,
    begun: Instant,
}

fn arrival(name: String) -> TracerArrival {
    TracerArrival { name, ..TracerArrival::default() }
}

fn milliseconds(duration: Duration) -> f64 {
    (duration.as_secs_f64() * 1e6).round() / 1e3
}
