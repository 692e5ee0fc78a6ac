//! What a session does beside the stream, on a connection of its own: keep the slot's
//! `restart_lsn` moving, and see whether the publication was altered and how far behind the slot is.

use crate::alterations::Watch;
use crate::publication::PublicationSpec;
use crate::slot::{Place, Server};
use crate::{CaptureError, slot};
use farshore_model::Lsn;
use farshore_pg::{Connection, Mode};
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::{Mutex, mpsc, watch};

/// WAL bytes after which the publisher is asked to write a record that `restart_lsn` can move to.
const NUDGE_BYTES: u64 = 8 << 20;
/// WAL bytes after which the attendant is told how far capture has come.
const TOLD_BYTES: u64 = NUDGE_BYTES / 8;
/// How often publication and slot are looked at; in tests with fault injection so often that the
/// gear is changed in the middle of everything.
const LOOK_EVERY: Duration =
    Duration::from_millis(if cfg!(feature = "faults") { 150 } else { 2_000 });

/// Ends with the session.
pub(crate) struct Attendant {
    spec: PublicationSpec,
    sql: Arc<Mutex<Connection>>,
    reached: Follower,
    /// The last position that was worth telling.
    told: Lsn,
    found: mpsc::Receiver<CaptureError>,
    places: watch::Receiver<Option<Place>>,
    task: tokio::task::JoinHandle<()>,
}

impl Attendant {
    /// Begins at `start`, on `sql`, which leads to `server`.
    pub fn start(
        spec: PublicationSpec,
        (sql, server): (Connection, Server),
        start: Lsn,
        watch: Watch,
    ) -> Attendant {
        let (reached, watched) = watch::channel(start);
        let (report, found) = mpsc::channel(1);
        let (place, places) = watch::channel(None);
        let sql = Arc::new(Mutex::new(sql));
        let work = Work {
            spec: spec.clone(),
            sql: sql.clone(),
            server,
            watch,
            place,
            nudged_at: start,
            written_at: Lsn::ZERO,
            complained: false,
        };
        let task = tokio::spawn(work.run(watched, report));
        Attendant { spec, sql, reached: Follower(reached), told: start, found, places, task }
    }

    /// The stream has come to `position`.
    pub fn reached(&mut self, position: Lsn) {
        if position.bytes_since(self.told) >= TOLD_BYTES {
            self.told = position;
            self.reached.reached(position);
        }
    }

    /// Tells the attendant how far capture has come, from elsewhere.
    pub fn follower(&self) -> Follower {
        self.reached.clone()
    }

    /// Where the slot and the publisher's log stood at each look.
    pub fn places(&self) -> watch::Receiver<Option<Place>> {
        self.places.clone()
    }

    /// Asks where the slot and the publisher's log stand now; `None` if the slot is gone or lost.
    pub async fn place(&self) -> Result<Option<Place>, CaptureError> {
        slot::place(&self.spec, &mut *self.sql.lock().await).await
    }

    /// Waits for something that capture must not go on with. Cancel-safe.
    pub async fn finds(&mut self) -> CaptureError {
        match self.found.recv().await {
            Some(found) => found,
            // Its connection is gone; the stream will notice too.
            None => std::future::pending().await,
        }
    }
}

/// Tells an attendant how far capture has come.
#[derive(Clone)]
pub(crate) struct Follower(watch::Sender<Lsn>);

impl Follower {
    /// Capture has come to `position`.
    pub fn reached(&self, position: Lsn) {
        self.0.send_if_modified(|at| {
            let far = position.bytes_since(*at) >= TOLD_BYTES;
            if far {
                *at = position;
            }
            far
        });
    }
}

impl Drop for Attendant {
    fn drop(&mut self) {
        self.task.abort();
    }
}

struct Work {
    spec: PublicationSpec,
    sql: Arc<Mutex<Connection>>,
    server: Server,
    watch: Watch,
    place: watch::Sender<Option<Place>>,
    nudged_at: Lsn,
    written_at: Lsn,
    complained: bool,
}

impl Work {
    async fn run(mut self, mut reached: watch::Receiver<Lsn>, report: mpsc::Sender<CaptureError>) {
        let mut look = tokio::time::interval(LOOK_EVERY);
        look.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        loop {
            let nudged_at = self.nudged_at;
            let far = async {
                let far = reached.wait_for(|at| at.bytes_since(nudged_at) >= NUDGE_BYTES).await;
                far.ok().map(|at| *at)
            };
            let done = tokio::select! {
                far = far => {
                    let Some(at) = far else { return };
                    self.nudged_at = at;
                    self.nudge().await
                }
                _ = look.tick() => match self.look().await {
                    Ok(()) => Ok(()),
                    Err(CaptureError::Publisher { error, .. }) => Err(error),
                    Err(found) => {
                        // The session may be gone already.
                        let _ = report.send(found).await;
                        return;
                    }
                },
            };
            match done {
                Ok(()) | Err(farshore_pg::Error::Server(_)) => {}
                Err(_connection_lost) => match self.reconnect().await {
                    Ok(fresh) => *self.sql.lock().await = fresh,
                    Err(found @ CaptureError::Interrupted(_)) => {
                        let _ = report.send(found).await;
                        return;
                    }
                    // The next look tries again.
                    Err(error) => {
                        tracing::debug!(publication = %self.spec.name, %error, "attendant")
                    }
                },
            }
        }
    }

    async fn reconnect(&self) -> Result<Connection, CaptureError> {
        let mut fresh = self.spec.connect(Mode::Sql).await?;
        self.server.check(&self.spec, &mut fresh).await?;
        Ok(fresh)
    }

    async fn look(&mut self) -> Result<(), CaptureError> {
        let mut sql = self.sql.lock().await;
        self.watch.look(&self.spec, &mut sql).await?;
        let place = slot::place(&self.spec, &mut sql).await?;
        self.place.send_replace(place);
        Ok(())
    }

    async fn nudge(&mut self) -> Result<(), farshore_pg::Error> {
        let mut sql = self.sql.lock().await;
        let nudged = slot::nudge(&self.spec, &mut sql, self.written_at, NUDGE_BYTES).await;
        drop(sql);
        match nudged {
            Ok(written) => {
                self.written_at = written.unwrap_or(self.written_at);
                Ok(())
            }
            Err(error) => {
                // Not fatal: PostgreSQL writes such a record every 15 s by itself.
                if !std::mem::replace(&mut self.complained, true) {
                    tracing::warn!(
                        publication = %self.spec.name, %error,
                        "cannot ask the publisher for a running-transactions record; the slot \
                         will hold back more log under load"
                    );
                }
                Err(error)
            }
        }
    }
}
