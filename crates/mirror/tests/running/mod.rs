//! A mirror in this process: both ends, the link between them, and the server for standbys.
#![allow(dead_code, reason = "each test file uses its own part")]

use anyhow::{Context, Result};
use farshore_link::certificates::Authority;
use farshore_link::{Dialer, Identity, IdentityFiles, LinkOptions, Listener, Session};
use farshore_mirror::MirrorError;
use farshore_mirror::keep::Far;
use farshore_mirror::receive::{BegunAnew, Near, Promise, Turns};
use farshore_mirror::relay::compression::{Compression, Method};
use farshore_mirror::seed::BackupRequest;
use farshore_mirror::serve::{Access, NearEnd, Server};
use farshore_mirror::spool::{Positions, Spool};
use farshore_testkit::postgres::Cluster;
use farshore_testkit::wait::wait_until;
use futures_util::future::BoxFuture;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::{Arc, Mutex};
use std::time::Duration;
use tempfile::TempDir;
use tokio::runtime::Runtime;
use tokio::task::JoinHandle;

pub const LONG: Duration = Duration::from_secs(120);
pub const NAME: &str = "m";
pub const APPLICATION_NAME: &str = "farshore_m";
pub const SLOT: &str = "farshore_mirror_m";

pub struct Mirror {
    pub near: Arc<Near>,
    pub far: Arc<Far>,
    /// What standbys connect to.
    pub port: u16,
    near_task: JoinHandle<()>,
    far_task: Option<JoinHandle<()>>,
    server_task: JoinHandle<()>,
    dialer: Dialer,
    /// The far end asks as one does that cannot restore reduced log.
    pub asks_as_before: Arc<AtomicBool>,
    /// What the far end was told last that was refused, and whether it may pass.
    said: Arc<Mutex<Option<(String, bool)>>>,
    pub folder: TempDir,
    // Dropped last.
    runtime: Runtime,
}

fn identity(folder: &Path, authority: &Authority, site: &str) -> Result<Arc<Identity>> {
    let folder = folder.join(site);
    std::fs::create_dir_all(&folder)?;
    let made = authority.issue(site, 30, &folder)?;
    Ok(Arc::new(Identity::load(&IdentityFiles {
        certificate: made.certificate,
        key: made.key,
        authorities: authority.certificate(),
        revoked: Some(authority.revoked()),
    })?))
}

impl Mirror {
    pub fn start(principal_url: &str, promise: Promise) -> Result<Mirror> {
        let runtime =
            tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build()?;
        let folder = tempfile::tempdir()?;
        let authority = Authority::create(&folder.path().join("authority"))?;
        let near_identity = identity(folder.path(), &authority, "near")?;
        let far_identity = identity(folder.path(), &authority, "far")?;
        let near = Arc::new(Near {
            name: NAME.to_owned(),
            principal: farshore_pg::Config::parse(principal_url)?,
            slot: SLOT.to_owned(),
            application_name: APPLICATION_NAME.to_owned(),
            promise,
            compression: Compression::Fixed(Method::Zstd(1)),
            begun_anew: BegunAnew::noted_in(folder.path().join("near.begun")),
            turns: Arc::new(Turns::noted_in(folder.path().join("near.turn"))),
            status: Mutex::default(),
        });
        let options = LinkOptions { connections: 2, ..LinkOptions::default() };
        let bound = Listener::bind("127.0.0.1:0", near_identity, options.clone());
        let listener = runtime.block_on(bound)?;
        let address = listener.local_address().to_string();
        let dialer = Dialer::new(&address, "near", &far_identity, options.clone())?;
        let serving = near.clone();
        let near_task = runtime.spawn(async move {
            loop {
                let incoming = listener.next().await;
                let request = serde_json::from_slice(&incoming.request).expect("request");
                let Ok(session) = incoming.accept(options.clone()).await else { continue };
                if let Err(error) = serving.serve(session, request).await {
                    eprintln!("near: {error}");
                }
            }
        });
        let far = Arc::new(Far::open(NAME, folder.path().join("spool"))?);
        let server = runtime.block_on(bind(&far, &Access::default()))?;
        let port = server.local_address().port();
        let server_task = runtime.spawn(server.run());
        let mut mirror = Mirror {
            near,
            far,
            port,
            near_task,
            far_task: None,
            server_task,
            dialer,
            asks_as_before: Arc::default(),
            said: Arc::default(),
            folder,
            runtime,
        };
        mirror.connect_far();
        Ok(mirror)
    }

    /// Serves the same standbys at one more address, for as long as the mirror lives; its port.
    pub fn serve_too(&self, access: &Access) -> Result<u16> {
        let server = self.runtime.block_on(bind(&self.far, access))?;
        let port = server.local_address().port();
        self.runtime.spawn(server.run());
        Ok(port)
    }

    pub fn connect_far(&mut self) {
        let (far, dialer) = (self.far.clone(), self.dialer.clone());
        let (said, asks_as_before) = (self.said.clone(), self.asks_as_before.clone());
        self.far_task = Some(self.runtime.spawn(async move {
            // As the node's supervisor does it: again and again, after a pause.
            let mut again = tokio::time::interval(Duration::from_millis(50));
            again.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
            loop {
                again.tick().await;
                let kept = async {
                    let mut request = far.request().await?;
                    request.restores &= !asks_as_before.load(Relaxed);
                    request.restores_pages &= request.restores;
                    let text = serde_json::to_vec(&request).expect("request");
                    far.keep(dialer.open(&text).await?, &request).await
                };
                if let Err(error) = kept.await {
                    eprintln!("far: {error}");
                    if let MirrorError::Refused { passes, .. } = &error {
                        *said.lock().expect("said") = Some((error.to_string(), *passes));
                    }
                }
            }
        }));
    }

    /// A session of another far end, until it ends. The mirror's own must not be connected.
    pub async fn keep(&self, far: &Far) -> Result<(), MirrorError> {
        let request = far.request().await?;
        let text = serde_json::to_vec(&request).expect("request");
        far.keep(self.dialer.open(&text).await?, &request).await
    }

    /// Why the far end cannot go on, if the near end said that it will not pass.
    pub fn said(&self) -> Option<String> {
        let said = self.said.lock().expect("said").clone();
        said.filter(|(_, passes)| !passes).map(|(why, _)| why)
    }

    /// The same, where it may pass.
    pub fn said_that_passes(&self) -> Option<String> {
        let said = self.said.lock().expect("said").clone();
        said.filter(|(_, passes)| *passes).map(|(why, _)| why)
    }

    /// The far end's folder is emptied, as by somebody while its node was stopped. No standby may
    /// stream.
    pub fn lose_spool(&mut self) -> Result<()> {
        self.disconnect_far();
        let spool = self.far.spool.send_replace(None).context("there is none")?;
        wait_until("nobody to use the spool", LONG, &[], || {
            Ok((Arc::strong_count(&spool) == 1).then_some(()))
        })?;
        drop(spool);
        std::fs::remove_dir_all(self.spool_folder())?;
        self.connect_far();
        Ok(())
    }

    /// The far end goes away in the middle of whatever it does.
    pub fn disconnect_far(&mut self) {
        if let Some(task) = self.far_task.take() {
            task.abort();
            let _ = self.runtime.block_on(task);
        }
    }

    pub fn block_on<T>(&self, future: impl Future<Output = T>) -> T {
        self.runtime.block_on(future)
    }

    pub fn spool(&self) -> Result<Arc<Spool>> {
        wait_until("the spool to begin", LONG, &[], || Ok(self.far.spool()))
    }

    pub fn positions(&self) -> Result<Positions> {
        Ok(*self.spool()?.positions().borrow())
    }

    pub fn spool_folder(&self) -> PathBuf {
        self.folder.path().join("spool")
    }

    /// Waits until everything that the server has flushed is durable in the spool.
    pub fn caught_up(&self, cluster: &Cluster) -> Result<()> {
        let end = flush_position(cluster)?;
        let spool = self.spool()?;
        let mut positions = spool.positions();
        let reached = async {
            let reached = positions.wait_for(|positions| positions.durable.0 >= end);
            tokio::time::timeout(LONG, reached).await.map(|reached| reached.is_ok())
        };
        self.runtime.block_on(reached).context("the spool never caught up")?;
        Ok(())
    }

    /// What a standby's `primary_conninfo` says.
    pub fn conninfo(&self, application_name: &str) -> String {
        format!(
            "host=127.0.0.1 port={} user=standby application_name={application_name}",
            self.port
        )
    }
}

async fn bind(far: &Far, access: &Access) -> Result<Server, MirrorError> {
    let (spool, standbys) = (far.spool.subscribe(), far.standbys.clone());
    Server::bind("127.0.0.1:0", access, NAME, spool, standbys, Arc::new(NoWay)).await
}

/// Nobody takes a base backup here; the scenarios do.
#[derive(Debug)]
struct NoWay;

impl NearEnd for NoWay {
    fn open_backup(&self, _: BackupRequest) -> BoxFuture<'_, Result<Session, String>> {
        Box::pin(async { Err("there is none in this test".to_owned()) })
    }
}

impl Drop for Mirror {
    fn drop(&mut self) {
        self.disconnect_far();
        self.near_task.abort();
        self.server_task.abort();
    }
}

pub fn flush_position(cluster: &Cluster) -> Result<u64> {
    let text: String = cluster
        .connect()?
        .query_one(
            "SELECT CASE WHEN pg_is_in_recovery() THEN pg_last_wal_replay_lsn() \
             ELSE pg_current_wal_flush_lsn() END::text",
            &[],
        )?
        .get(0);
    let position: farshore_model::Lsn = text.parse().map_err(|error| anyhow::anyhow!("{error}"))?;
    Ok(position.0)
}
