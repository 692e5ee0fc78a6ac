//! The capture loop of one publication.
//!
//! ```text
//! intake     what both gears share: messages in, batches to the store
//! gears      which of them is better, and how large batches are
//! catch_up   the far gear: far behind, the log is read by SQL function, in large batches
//! stream     the near gear: the walsender's stream
//! ```

mod catch_up;
mod gears;
mod intake;
mod stream;

use crate::assembler::Assembler;
use crate::attendant::Attendant;
use crate::publication::PublicationSpec;
use crate::slot;
use crate::tracer::Tracer;
use crate::{CaptureError, alterations};
use farshore_model::{Durable, Lsn, PgTime, Received, Timeline};
use farshore_pg::replication::ReplicationStream;
use farshore_pg::{Connection, Mode};
use farshore_store::LogStore;
use farshore_wire::pgoutput::Context;
use intake::{Intake, store_failure};
use std::collections::VecDeque;
use std::convert::Infallible;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;
use stream::{Left, Session};
use tokio::sync::watch;

/// The publisher hears from us at least this often (its `wal_sender_timeout` is 60 s by default).
const STATUS_EVERY: Duration = Duration::from_secs(10);

/// Tables that match the patterns are looked for this often.
const TABLES_EVERY: Duration = Duration::from_secs(5);

/// Others' locks on a table hold up the rest, and whoever waits behind us, no longer.
const LOCK_WAIT: &str = "SET lock_timeout = '2s'";

/// A stream that is silent for this long is taken for dead, where the publisher sets no
/// `wal_sender_timeout` that says otherwise.
const SILENCE_MAX: Duration = Duration::from_secs(60);

/// While something is waited for, a stop is looked for this often.
const LOOK_EVERY: Duration = Duration::from_millis(500);

/// What a publication's capture is doing.
#[derive(Clone, Debug, Default)]
pub struct CaptureStatus {
    /// Whether what the publisher commits comes in, by stream or in batches.
    pub streaming: bool,
    /// What it waits for before it can begin, or before the publisher gives more, for a person.
    pub waits_for: Option<String>,
    /// Why its tables are not all that the patterns match, for a person.
    pub tables_stay: Option<String>,
    /// Which tables something else took out of the publication, where that is not ours, for a person.
    pub tables_out: Option<String>,
    /// End of the publisher's log as last heard of.
    pub publisher_end: Lsn,
    /// Newest position taken from the stream.
    pub received: Received,
    /// What the slot was told last.
    pub acknowledged: Durable,
    /// Row changes taken on this connection.
    pub changes: u64,
    /// Bytes of replication messages taken on this connection.
    pub wire_bytes: u64,
    /// When anything was last heard of the publisher.
    pub heard_at: Option<PgTime>,
    /// Commands handed to the store since the node started, of all connections.
    pub commands: u64,
    /// The newest transaction handed to the store: its commit by the publisher's clock, and when it
    /// was received by this machine's.
    pub newest: Option<(PgTime, PgTime)>,
    /// Up to which transaction the log was received when, and commands up to there.
    pub transactions: Timeline,
    /// The newest tracer tokens that came out of the log, and when; newest first.
    pub tracers: VecDeque<(Tracer, std::time::Instant)>,
}

/// Carries one publication from its slot into its store until told to stop.
pub struct Capture {
    /// What to publish.
    pub spec: PublicationSpec,
    /// Where to keep it.
    pub store: Arc<dyn LogStore>,
    /// Where to say how it goes.
    pub status: Arc<Mutex<CaptureStatus>>,
    /// Counts the connections on which the publication was as configured, the slot was there and
    /// the store covered its start. From the first on, snapshots may begin.
    pub ready: watch::Sender<u64>,
    /// The log holds values that have no binary form, or one that means something else elsewhere:
    /// all values are asked for as text. Found out on the way; false at first.
    pub text_only: AtomicBool,
    /// The publisher has refused to give batches by function. Found out on the way; false at
    /// first.
    pub stream_only: AtomicBool,
    /// A quiet log is followed at once as far as this, and only now and then otherwise.
    pub awaited: watch::Sender<Lsn>,
}

impl Capture {
    /// Runs until `stop` turns true (then everything received is made durable and acknowledged)
    /// or something fails. `connection` is one to the publisher that there is already.
    pub async fn run(
        &self,
        mut connection: Option<Connection>,
        stop: watch::Receiver<bool>,
    ) -> Result<(), CaptureError> {
        loop {
            match self.run_connection(connection.take(), stop.clone()).await {
                Err(CaptureError::TurnToText) => {}
                ended => return ended,
            }
        }
    }

    async fn run_connection(
        &self,
        connection: Option<Connection>,
        mut stop: watch::Receiver<bool>,
    ) -> Result<(), CaptureError> {
        // What an earlier connection handed over must be durable before another one goes on: the
        // stream is asked for from the durable end.
        let (accepted, mut durable) = (self.store.accepted_end(), self.store.durable());
        tokio::select! {
            reached = durable.wait_for(|durable| durable.0 >= accepted) => if reached.is_err() {
                return Err(store_failure(self.store.as_ref()));
            },
            _ = stop.wait_for(|stop| *stop) => return Ok(()),
        }
        let mut sql = match connection {
            Some(sql) => sql,
            None => self.spec.connect(Mode::Sql).await?,
        };
        let silence_max = check_settings(&self.spec, &mut sql).await?;
        let ensured = self.ensure_publication(&mut sql, &mut stop).await?;
        let Some(left_out) = ensured else { return Ok(()) };
        let out = alterations::told_out(&self.spec, &mut sql, self.store.as_ref()).await?;
        self.set_status(|status| {
            status.tables_stay = together(left_out);
            status.tables_out = together(out);
        });
        let tell = |why| self.set_status(|status| status.waits_for = why);
        tell(None);
        let store = self.store.as_ref();
        let ensured = slot::ensure_slot(&self.spec, &mut sql, store, stop.clone(), tell).await?;
        let Some(start) = ensured else { return Ok(()) };
        let context = Context {
            protocol: match sql.server_version() {
                ..150_000 => 2,
                150_000..160_000 => 3,
                _ => 4,
            },
            in_stream: false,
            parallel_streaming: false,
        };
        let is_close = sql.is_close();
        let server = slot::Server::ask(&self.spec, &mut sql).await?;
        let place = slot::place(&self.spec, &mut sql).await?;
        let cancel = sql.cancel_token();
        let prepare = async {
            let binary = !self.text_only.load(Ordering::Relaxed)
                && self.may_come_in_binary(&mut sql).await?;
            let seen = match &place {
                // The server may have much to decode for it.
                Some(place) => {
                    let checked =
                        slot::check_overlap(&self.spec, &mut sql, &self.store, place, tell);
                    let checked = tokio::select! {
                        checked = checked => Some(checked?),
                        _ = stop.wait_for(|stop| *stop) => None,
                    };
                    match checked {
                        Some(seen) => seen,
                        // Or it would go on, with the slot, when nobody waits for it any more.
                        None => {
                            if let Err(error) = cancel.cancel().await {
                                tracing::debug!(%error, "not cancelled");
                            }
                            return Err(None);
                        }
                    }
                }
                None => {
                    slot::Overlap::NotLooked { why: "the slot has gone".to_owned(), passes: true }
                }
            };
            Ok::<_, Option<CaptureError>>((binary, seen))
        };
        // Connections take as long to make as all that is asked here.
        let connect =
            async { Ok(catch_up::connect_if_far(self, place.as_ref(), start, is_close).await) };
        let ((binary, seen), far) = match tokio::try_join!(prepare, connect) {
            Ok(prepared) => prepared,
            Err(None) => return Ok(()),
            Err(Some(error)) => return Err(error),
        };
        slot::settle_loss(&self.spec, self.store.as_ref(), seen)?;
        let held = self.store.durable().borrow().0;
        if let Err(error) = self.store.discard_unnamed_spills() {
            tracing::warn!(publication = %self.spec.name, "left on the disk: {error}");
        }
        let assembler = Assembler::new(self.store.clone(), context, held);
        let mut intake = Intake::new(self, assembler, binary, is_close, server.clone(), stop);
        // What is counted is what comes after this.
        self.set_status(|status| {
            let commands = status.commands;
            status.transactions.note(held, PgTime::now(), commands);
        });
        let watch = alterations::Watch::new(self.store.clone());
        // From before any subscription looks: what joins from here on is told.
        let members = self.spec.membership_signature(&mut sql).await?;
        let mut attendant =
            Attendant::start(self.spec.clone(), (sql, server.clone()), start, watch);
        // An empty store covers nothing; this entry says where its log begins.
        intake.assembler.watermark(start);
        intake.hand_over().await?;
        intake.until_durable().await?;
        let result = tokio::select! {
            result = self.carry(intake, &mut attendant, far, silence_max) => result,
            never = self.watch_tables(members, &server) => match never {},
        };
        self.set_status(|status| status.streaming = false);
        result
    }

    /// Makes sure that the publication is as configured, once nobody has one of its tables for himself;
    /// returns what is left out, for a person, or `None` where `stop` turned true first. Who comes
    /// behind us to a table does not wait for long.
    async fn ensure_publication(
        &self,
        sql: &mut Connection,
        stop: &mut watch::Receiver<bool>,
    ) -> Result<Option<Vec<String>>, CaptureError> {
        let failed = |error| self.spec.publisher_error(error);
        sql.simple_query(LOCK_WAIT).await.map_err(failed)?;
        loop {
            let ensure = alterations::ensure_publication(&self.spec, sql, self.store.as_ref());
            // What is given up ends there by itself, soon.
            let ensured = tokio::select! {
                ensured = ensure => ensured,
                _ = stop.wait_for(|stop| *stop) => return Ok(None),
            };
            match ensured {
                Err(error) if error.is_of_a_lock() => {
                    let why = format!("its tables cannot be published yet: {error}");
                    self.set_status(|status| {
                        if status.waits_for.as_ref() != Some(&why) {
                            tracing::warn!(publication = %self.spec.name, "{why}");
                        }
                        status.waits_for = Some(why);
                    });
                }
                Err(error) => return Err(error),
                Ok(left_out) => {
                    sql.simple_query("SET lock_timeout = 0").await.map_err(failed)?;
                    return Ok(Some(left_out));
                }
            }
            tokio::select! {
                () = tokio::time::sleep(TABLES_EVERY) => {}
                _ = stop.wait_for(|stop| *stop) => return Ok(None),
            }
        }
    }

    /// Whether no published table is known to have values that must not come in binary. One that
    /// somebody has for himself is not waited for: its columns are looked at when changes of it come.
    async fn may_come_in_binary(&self, sql: &mut Connection) -> Result<bool, CaptureError> {
        let failed = |error| self.spec.publisher_error(error);
        sql.simple_query("SET lock_timeout = '1s'").await.map_err(failed)?;
        let published = self.spec.published_tables(sql).await;
        match published {
            Err(error) if error.is_of_a_lock() => {
                tracing::info!(publication = %self.spec.name, %error, "a table is not waited for");
                sql.simple_query("SET lock_timeout = 0").await.map_err(failed)?;
                Ok(true)
            }
            Err(error) => Err(error),
            Ok(published) => {
                sql.simple_query("SET lock_timeout = 0").await.map_err(failed)?;
                Ok(published.iter().all(|table| table.binary_safe))
            }
        }
    }

    /// From gear to gear, as is worthwhile, until a stop was asked for. `far` is what batches are
    /// taken with, where those come first.
    async fn carry(
        &self,
        mut intake: Intake<'_>,
        attendant: &mut Attendant,
        mut far: Option<catch_up::Connected>,
        silence_max: Duration,
    ) -> Result<(), CaptureError> {
        let (mut announced, mut left) = (false, None);
        loop {
            if let Some(connected) = far.take() {
                self.announce_once(&mut announced);
                // What the stream waited for.
                self.set_status(|status| status.waits_for = None);
                catch_up::run(&mut intake, attendant, left, connected).await?;
                let stopping = *intake.stop.borrow();
                if stopping {
                    return Ok(());
                }
            }
            // Of what is in progress the stream gives everything anew.
            intake.assembler.begin_again();
            let (start, binary) = (intake.assembler.last_position(), intake.binary);
            let stream =
                self.start_stream(attendant, start, &intake.options(), &intake.server).await?;
            self.announce_once(&mut announced);
            tracing::info!(publication = %self.spec.name, %start, binary, "capture streaming");
            let session = Session::new(&mut intake, stream, attendant, silence_max);
            left = Some(session.walsender());
            match session.run().await? {
                Left::ToStop => return Ok(()),
                Left::FarBehind => {
                    tracing::info!(publication = %self.spec.name, "far behind: the stream is left");
                    far = Some(catch_up::connect(&self.spec).await);
                }
            }
        }
    }

    /// Snapshots may begin.
    fn announce_once(&self, announced: &mut bool) {
        if !std::mem::replace(announced, true) {
            self.ready.send_modify(|sessions| *sessions += 1);
            self.set_status(|status| status.streaming = true);
        }
    }

    /// Takes tables that match the patterns into the publication as they appear, and tells the
    /// subscriptions when anything has joined or left since `signature` was taken, or its columns are
    /// not those that they were.
    async fn watch_tables(&self, mut signature: String, server: &slot::Server) -> Infallible {
        let (mut sql, mut complained) = (None, None);
        loop {
            // The connection began with a look: `ensure_publication`.
            tokio::time::sleep(TABLES_EVERY).await;
            match self.look_at_tables(&mut sql, server).await {
                Ok((now, left_out)) => {
                    if signature != now {
                        tracing::info!(
                            publication = %self.spec.name,
                            "tables have joined or left the publication, or their columns are others"
                        );
                        self.ready.send_modify(|sessions| *sessions += 1);
                    }
                    signature = now;
                    self.note_tables(&mut complained, together(left_out));
                }
                Err(error) => {
                    sql = None;
                    let error = format!("its tables stay as they are for now: {error}");
                    self.note_tables(&mut complained, Some(error));
                }
            }
        }
    }

    /// Says why the publication has not all tables that it should have.
    fn note_tables(&self, complained: &mut Option<String>, trouble: Option<String>) {
        if let Some(why) = &trouble
            && *complained != trouble
        {
            tracing::warn!(publication = %self.spec.name, "{why}");
        }
        self.set_status(|status| status.tables_stay = trouble.clone());
        *complained = trouble;
    }

    async fn look_at_tables(
        &self,
        sql: &mut Option<Connection>,
        server: &slot::Server,
    ) -> Result<(String, Vec<String>), CaptureError> {
        let connection = match sql {
            Some(connection) => connection,
            None => {
                let mut fresh = self.spec.connect(Mode::Sql).await?;
                // It may be altered.
                server.check(&self.spec, &mut fresh).await?;
                let timeout = fresh.simple_query(LOCK_WAIT).await;
                timeout.map_err(|error| self.spec.publisher_error(error))?;
                sql.insert(fresh)
            }
        };
        let left_out = self.spec.follow_tables(connection).await?;
        let out = alterations::told_out(&self.spec, connection, self.store.as_ref()).await?;
        self.set_status(|status| status.tables_out = together(out));
        Ok((self.spec.membership_signature(connection).await?, left_out))
    }

    /// Starts a stream at `start`, where the store ends.
    async fn start_stream(
        &self,
        attendant: &Attendant,
        start: Lsn,
        options: &[(&'static str, String)],
        server: &slot::Server,
    ) -> Result<ReplicationStream, CaptureError> {
        let options: Vec<(&str, &str)> =
            options.iter().map(|(key, value)| (*key, value.as_str())).collect();
        let mut connection = self.spec.connect(Mode::LogicalReplication).await?;
        let asked = server.check(&self.spec, &mut connection);
        catch_up::in_time(&self.spec, asked).await??;
        let started = connection.start_replication(&self.spec.slot_name(), start, &options).await;
        let stream = match started {
            Ok(stream) => stream,
            Err(error) => return Err(self.not_started(error).await),
        };
        // Until now nobody had the slot: a stream passes over what something else has moved it
        // past, and does not say so. From now on nothing can.
        if let Some(place) = catch_up::in_time(&self.spec, attendant.place()).await?? {
            slot::check_not_ahead(&self.spec, place.confirmed, start)?;
        }
        Ok(stream)
    }

    /// Why no stream has begun: while batches were taken, or on the way here, the slot may have been
    /// dropped or lost.
    async fn not_started(&self, error: farshore_pg::Error) -> CaptureError {
        if matches!(error.sqlstate(), Some("42704" | "55000")) {
            let look = async {
                let mut sql = self.spec.connect(Mode::Sql).await?;
                slot::check_there(&self.spec, &mut sql).await
            };
            if let Ok(Err(found @ (CaptureError::Gap(_) | CaptureError::Setup(_)))) =
                catch_up::in_time(&self.spec, look).await
            {
                return found;
            }
        }
        self.spec.publisher_error(error)
    }

    fn set_status(&self, change: impl FnOnce(&mut CaptureStatus)) {
        change(&mut self.status.lock().unwrap_or_else(|poisoned| poisoned.into_inner()));
    }
}

fn together(told: Vec<String>) -> Option<String> {
    (!told.is_empty()).then(|| told.join(" — "))
}

/// Refuses a publisher that writes no logical information; returns how long its stream may be
/// silent.
async fn check_settings(
    spec: &PublicationSpec,
    sql: &mut Connection,
) -> Result<Duration, CaptureError> {
    let query = "SELECT current_setting('wal_level'), setting FROM pg_settings \
                 WHERE name = 'wal_sender_timeout'";
    let rows = sql.query(query, &[]).await.map_err(|error| spec.publisher_error(error))?;
    let row = rows.first();
    let level = row.and_then(|row| row.get(0)).unwrap_or_default();
    if level == "logical" {
        let timeout = row.and_then(|row| row.get(1)?.parse().ok()).filter(|ms| *ms > 0);
        return Ok(timeout.map_or(SILENCE_MAX, Duration::from_millis));
    }
    Err(CaptureError::Setup(format!(
        "publication \"{}\": {} has wal_level = {level}. Set wal_level = logical and restart that \
         server",
        spec.name,
        spec.source.redacted()
    )))
}

#[cfg(test)]
mod tests;
