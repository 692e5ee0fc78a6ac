//! What both gears of capture share: messages in, batches to the store.

use super::gears::Traffic;
use super::{Capture, LOOK_EVERY};
use crate::CaptureError;
use crate::assembler::Assembler;
use crate::slot::Server;
use farshore_model::{Durable, Lsn, PgTime, Received};
use farshore_pg::{Connection, Mode};
use farshore_store::{Batch, LogStore, StoreError};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;
use tokio::sync::watch;
use tokio::time::Instant;

/// A batch is handed over at this size even if more is waiting, in bytes.
pub(super) const BATCH_BYTES: usize = 256 << 10;

/// After batches that led to nothing the stream is kept for this long, and then twice as long.
const STREAM_FOR_MIN: Duration = Duration::from_secs(if cfg!(feature = "faults") { 1 } else { 60 });
const STREAM_FOR_MAX: Duration = Duration::from_secs(3600);

/// Tracer tokens that the status remembers.
const TRACERS_KEPT: usize = 8;

/// Messages that were taken.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Counted {
    pub messages: u64,
    /// Of all of them.
    pub bytes: u64,
}

impl Counted {
    pub fn since(self, before: Counted) -> Counted {
        Counted { messages: self.messages - before.messages, bytes: self.bytes - before.bytes }
    }
}

/// From pgoutput messages to the store.
pub(super) struct Intake<'a> {
    pub capture: &'a Capture,
    pub assembler: Assembler,
    pub durable: watch::Receiver<Durable>,
    /// Values come in binary where their types have a binary form.
    pub binary: bool,
    /// What was taken on this connection.
    pub counted: Counted,
    /// What the log was made of lately.
    pub traffic: Traffic,
    /// The publisher is so close that a flood of messages gathers there.
    pub publisher_is_close: bool,
    /// The publisher's server whose history was held against the store.
    pub server: Server,
    /// The stream is not left for batches before, and how long that was put off last.
    stream_until: Option<(Instant, Duration)>,
    /// When something was last handed to the store.
    pub handed_over_at: Instant,
    /// For questions about types, once there was one.
    catalog: Option<Connection>,
    pub stop: watch::Receiver<bool>,
}

impl<'a> Intake<'a> {
    pub fn new(
        capture: &'a Capture,
        mut assembler: Assembler,
        binary: bool,
        publisher_is_close: bool,
        server: Server,
        stop: watch::Receiver<bool>,
    ) -> Intake<'a> {
        let durable = capture.store.durable();
        let handed_over_at = Instant::now();
        assembler.keep_tracers(capture.spec.slot_name());
        Intake {
            capture,
            assembler,
            durable,
            binary,
            counted: Counted::default(),
            traffic: Traffic::ASSUMED,
            publisher_is_close,
            server,
            stream_until: None,
            handed_over_at,
            catalog: None,
            stop,
        }
    }

    /// Batches have led to nothing: the stream is kept for a while, and each time for longer.
    pub fn keep_streaming(&mut self) {
        let before = self.stream_until.map_or(STREAM_FOR_MIN, |(_, before)| 2 * before);
        let pause = before.min(STREAM_FOR_MAX);
        self.stream_until = Some((Instant::now() + pause, pause));
    }

    /// Whether the stream may be left for batches.
    pub fn may_leave_stream(&self) -> bool {
        self.stream_until.is_none_or(|(until, _)| Instant::now() >= until)
    }

    /// Takes one message of pgoutput; `near` is where it stands in the log, for errors.
    pub async fn message(&mut self, data: &[u8], near: Lsn) -> Result<(), CaptureError> {
        self.counted.messages += 1;
        self.counted.bytes += data.len() as u64;
        let tag = data.first();
        if tag == Some(&b'R') {
            self.describe_types(data, near).await?;
        }
        // The end of a transaction or of a stream block may sync a spill.
        let taken = match tag {
            Some(b'C' | b'E' | b'c') if self.assembler.has_spills() => {
                tokio::task::block_in_place(|| self.assembler.message(data))
            }
            Some(_) | None => self.assembler.message(data),
        };
        taken.map_err(|error| error.at(self.capture.spec.source.redacted(), near))
    }

    /// Learns what the column types of a Relation message are made of, before changes that hold
    /// values of theirs are taken.
    async fn describe_types(&mut self, data: &[u8], near: Lsn) -> Result<(), CaptureError> {
        let spec = &self.capture.spec;
        let types = self.assembler.column_types(data);
        let types = types.map_err(|error| error.at(spec.source.redacted(), near))?;
        let catalog = self.assembler.types();
        if !catalog.to_ask(types.iter().copied()).is_empty() {
            if self.catalog.is_none() {
                let mut sql = spec.connect(Mode::Sql).await?;
                self.server.check(spec, &mut sql).await?;
                self.catalog = Some(sql);
            }
            let Some(sql) = &mut self.catalog else { return Ok(()) };
            let described = catalog.describe(sql, types.iter().copied()).await;
            described.map_err(|error| spec.publisher_error(error))?;
        }
        if self.binary && !types.iter().all(|oid| catalog.travels_in_binary(*oid)) {
            return Err(self.turn_to_text(&"a column's values name things by OID"));
        }
        Ok(())
    }

    pub fn turn_to_text(&self, why: &dyn std::fmt::Display) -> CaptureError {
        tracing::info!(
            publication = %self.capture.spec.name, %why,
            "values are asked for as text from here on"
        );
        self.capture.text_only.store(true, Ordering::Relaxed);
        CaptureError::TurnToText
    }

    /// The waiting entries, to be handed to the store now.
    pub fn take_batch(&mut self) -> Option<Batch> {
        let batch = self.assembler.take_batch()?;
        let received = Received(self.assembler.last_position());
        let (changes, wire_bytes) = (self.assembler.changes_assembled(), self.counted.bytes);
        let (tracers, now) = (self.assembler.take_tracers(), Instant::now());
        let (committed, at) = (self.assembler.take_committed(), PgTime::now());
        self.capture.set_status(|status| {
            for tracer in tracers {
                status.tracers.truncate(TRACERS_KEPT - 1);
                status.tracers.push_front((tracer, now.into_std()));
            }
            status.received = received;
            status.publisher_end = status.publisher_end.max(received.0);
            status.heard_at = Some(at);
            status.changes = changes;
            if let Some((position, commit_time)) = committed.newest {
                // After a batch that the store did not take the same comes once more.
                let newest = status.transactions.newest();
                if newest.is_none_or(|newest| newest.position < position) {
                    status.commands += committed.commands;
                }
                status.transactions.note(position, at, status.commands);
                status.newest = Some((commit_time, at));
            }
            status.wire_bytes = wire_bytes;
        });
        self.handed_over_at = Instant::now();
        Some(batch)
    }

    /// A stop does not wait for a disk that is full.
    pub fn check_stop(&self) -> Result<(), CaptureError> {
        let stopping = *self.stop.borrow();
        if stopping && self.capture.store.status().waiting_for_room.is_some() {
            return Err(CaptureError::Interrupted(
                "the disk is full, so what was received last is left to be sent again".to_owned(),
            ));
        }
        Ok(())
    }

    /// Hands the waiting entries to the store.
    pub async fn hand_over(&mut self) -> Result<(), CaptureError> {
        let Some(batch) = self.take_batch() else { return Ok(()) };
        let mut appended = std::pin::pin!(append_owned(self.capture.store.clone(), batch));
        loop {
            tokio::select! {
                result = &mut appended => return result,
                () = tokio::time::sleep(LOOK_EVERY) => self.check_stop()?,
            }
        }
    }

    /// Waits until all that was handed over is durable.
    pub async fn until_durable(&mut self) -> Result<(), CaptureError> {
        let (mut durable, position) = (self.durable.clone(), self.assembler.last_position());
        let mut reached = std::pin::pin!(durable.wait_for(|durable| durable.0 >= position));
        loop {
            tokio::select! {
                reached = &mut reached => {
                    return if reached.is_ok() { Ok(()) } else { Err(self.store_failure()) };
                }
                () = tokio::time::sleep(LOOK_EVERY) => self.check_stop()?,
            }
        }
    }

    /// What is asked of pgoutput, by stream or by function.
    pub fn options(&self) -> Vec<(&'static str, String)> {
        let protocol = self.assembler.context().protocol;
        let publication = farshore_model::quote_identifier(&self.capture.spec.publication_name());
        let mut options = vec![
            ("proto_version", protocol.to_string()),
            ("publication_names", publication),
            ("streaming", "on".to_owned()),
            // Tracer tokens; messages of others are passed over.
            ("messages", "on".to_owned()),
        ];
        if self.binary {
            options.push(("binary", "true".to_owned()));
        }
        options
    }

    pub fn store_failure(&self) -> CaptureError {
        store_failure(self.capture.store.as_ref())
    }

    pub fn publisher_error(&self, error: farshore_pg::Error) -> CaptureError {
        self.capture.spec.publisher_error(error)
    }
}

pub(super) fn store_failure(store: &dyn LogStore) -> CaptureError {
    match store.failure() {
        Some(error @ StoreError::Failed(_)) => CaptureError::Store(error),
        Some(error) => CaptureError::Store(StoreError::Failed(Arc::new(error))),
        None => CaptureError::Protocol("the store closed".to_owned()),
    }
}

pub(super) async fn append_owned(
    store: Arc<dyn LogStore>,
    batch: Batch,
) -> Result<(), CaptureError> {
    store.append(batch).await.map_err(CaptureError::Store)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::publication::PublicationSpec;
    use crate::reader::CaptureStatus;
    use farshore_model::{Column, Relation, ReplicaIdentity};
    use farshore_pg::Config;
    use farshore_store::segmented::{Options, SegmentedStore};
    use farshore_testkit::postgres::{Cluster, Installation};
    use farshore_wire::pgoutput::{Context, Message, encode};
    use std::sync::Mutex;
    use std::sync::atomic::AtomicBool;
    use tokio::runtime::Runtime;

    #[test]
    fn a_relation_has_its_types_as_they_are_now() {
        let installation = Installation::find(18).unwrap();
        let cluster = Cluster::builder(&installation).start().unwrap();
        cluster
            .execute_script(
                "CREATE TYPE mood AS ENUM ('fine'); CREATE DOMAIN today AS mood; \
                 CREATE TYPE gone AS ENUM ('gone')",
            )
            .unwrap();
        let spec = PublicationSpec {
            name: "p".to_owned(),
            source: Config::parse(&cluster.url("postgres")).unwrap(),
            tables: Vec::new(),
            articles: std::collections::BTreeMap::new(),
            via_partition_root: false,
            adopt_publication: None,
            adopt_slot: None,
        };
        Runtime::new().unwrap().block_on(async {
            let mut sql = spec.connect(Mode::Sql).await.unwrap();
            let server = Server::ask(&spec, &mut sql).await.unwrap();
            let mut oids = Vec::new();
            for name in ["mood", "today", "gone"] {
                let ask = "SELECT oid FROM pg_type WHERE typname = $1";
                let rows = sql.query(ask, &[Some(name)]).await.unwrap();
                oids.push(rows[0].parse::<u32>(0).unwrap());
            }
            let column = |type_oid: &u32| Column {
                key: false,
                name: "c".into(),
                type_oid: *type_oid,
                type_modifier: -1,
            };
            let relation = Relation {
                oid: 16_500,
                schema: "public".into(),
                name: "t".into(),
                identity: ReplicaIdentity::Default,
                columns: oids[1..].iter().map(column).collect(),
                types: vec![],
            };
            let relation = encode::relation(&relation, None);

            let folder = tempfile::tempdir().unwrap();
            let (store, _) = SegmentedStore::open(folder.path(), Options::default()).unwrap();
            let capture = Capture {
                spec: spec.clone(),
                store: store.clone(),
                status: Arc::new(Mutex::new(CaptureStatus::default())),
                ready: watch::Sender::new(0),
                text_only: AtomicBool::new(true),
                stream_only: AtomicBool::new(true),
                awaited: watch::Sender::new(Lsn::ZERO),
            };
            let assembler = Assembler::new(store, Context::new(2, false), Lsn(100));
            let (_stop, stopped) = watch::channel(false);
            let mut intake = Intake::new(&capture, assembler, false, true, server, stopped);
            let told = |name: &'static str| {
                let told = Message::Type { oid: oids[1], schema: "public", name };
                encode::message(&told, None)
            };
            intake.message(&told("today"), Lsn(100)).await.unwrap();
            intake.message(&relation, Lsn(100)).await.unwrap();
            let renamed = "ALTER TYPE mood RENAME TO humour; ALTER DOMAIN today RENAME TO now_; \
                DROP TYPE gone";
            sql.simple_query(renamed).await.unwrap();
            // The publisher tells the names of the columns' types before each Relation message.
            intake.message(&told("now_"), Lsn(200)).await.unwrap();
            intake.message(&relation, Lsn(200)).await.unwrap();
            // Of what is gone that is told which is known.
            assert_eq!(names(&mut intake, &oids), ["humour", "now_", "gone"]);
            // And not those of what they are made of.
            sql.simple_query("ALTER TYPE humour RENAME TO temper").await.unwrap();
            intake.assembler.begin_again();
            intake.message(&relation, Lsn(300)).await.unwrap();
            assert_eq!(names(&mut intake, &oids), ["temper", "now_", "gone"]);
        });
    }

    fn names(intake: &mut Intake<'_>, oids: &[u32]) -> Vec<String> {
        let mut name = |oid: &u32| intake.assembler.types().get(*oid).unwrap().name.clone();
        oids.iter().map(&mut name).collect()
    }
}
