//! Who may stream a mirror's log: PostgreSQL's own clients against a server that asks.

mod running;

use anyhow::{Context, Result, ensure};
use farshore_mirror::receive::Promise;
use farshore_mirror::serve::Access;
use farshore_pg::{Config, Connection, Mode};
use farshore_testkit::postgres::{Cluster, Installation};
use farshore_testkit::wait::wait_until;
use running::{LONG, Mirror, SLOT, flush_position};
use std::os::unix::fs::PermissionsExt;
use std::time::Duration;
use tokio::io::{AsyncReadExt, AsyncWriteExt};

const PASSWORD: &str = "s3cret/+=";

struct Guarded {
    mirror: Mirror,
    principal: Cluster,
    port: u16,
}

fn guarded(major: u32, tls: bool) -> Result<Guarded> {
    let principal = Cluster::builder(&Installation::find(major)?)
        .setting("wal_level", "replica")
        .setting("wal_keep_size", "1GB")
        .start()?;
    principal.execute_script("CREATE TABLE t AS SELECT g AS id FROM generate_series(1, 1000) g")?;
    let mirror = Mirror::start(&principal.url("postgres"), Promise::Far)?;
    let folder = mirror.folder.path();
    let password = folder.join("password");
    std::fs::write(&password, format!("{PASSWORD}\n"))?;
    std::fs::set_permissions(&password, std::fs::Permissions::from_mode(0o600))?;
    let files = (folder.join("far/far.crt"), folder.join("far/far.key"));
    let access = Access { password: Some(password), tls: tls.then_some(files) };
    let port = mirror.serve_too(&access)?;
    mirror.spool()?;
    Ok(Guarded { mirror, principal, port })
}

impl Guarded {
    /// What PostgreSQL's own client says; nothing if it was let in.
    fn receivewal(&self, conninfo: &str) -> Result<Option<String>> {
        let command = self.principal.installation().command("pg_receivewal");
        let output = std::process::Command::new(command.get_program())
            .args(["--no-loop", "--no-password", "--slot", "s", "--create-slot"])
            .args(["--if-not-exists", "-d"])
            .arg(format!("host=127.0.0.1 port={} user=anyone {conninfo}", self.port))
            .env("PGCONNECT_TIMEOUT", "60")
            .output()?;
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        Ok((!output.status.success()).then_some(said))
    }

    /// What our own client says, which reads the log of principals and of other mirrors.
    fn ours(&self, parameters: &str) -> Result<(), farshore_pg::Error> {
        let url = format!("host=127.0.0.1 port={} user=anyone {parameters}", self.port);
        let config = Config::parse(&url).expect("a conninfo string");
        self.mirror.block_on(async {
            let mut connection = Connection::connect(&config, Mode::PhysicalReplication).await?;
            connection.identify_system().await.map(drop)
        })
    }
}

const KNOWN: &str = "password=s3cret/+=";

#[test]
fn clients_are_asked_for_a_password() -> Result<()> {
    let guarded = guarded(15, true)?;
    for way in [
        "sslmode=require channel_binding=require",
        "sslmode=require channel_binding=disable",
        "sslmode=prefer",
        // On this machine.
        "sslmode=disable",
    ] {
        let said = guarded.receivewal(&format!("{KNOWN} {way}"))?;
        ensure!(said.is_none(), "{way}: {said:?}");
        guarded.ours(&format!("{KNOWN} {way}")).with_context(|| way.to_owned())?;
        for wrong in ["password=wrong", "password=''"] {
            let said = guarded.receivewal(&format!("{wrong} {way}"))?.context("it was let in")?;
            ensure!(said.contains("password"), "{way}: {said}");
            let error = guarded.ours(&format!("{wrong} {way}")).expect_err("it was let in");
            ensure!(error.to_string().contains("password"), "{way}: {error}");
        }
    }
    // Nobody's: nothing was made for whoever was not let in.
    let reports = guarded.mirror.far.standbys.reports();
    ensure!(reports.is_empty(), "{reports:?}");
    Ok(())
}

/// An unmodified standby streams over TLS, bound to the certificate that it sees, and large pieces
/// of log come through whole.
#[test]
fn a_standby_streams_by_tls_with_a_password() -> Result<()> {
    let mut guarded = guarded(15, true)?;
    let conninfo = format!(
        "host=127.0.0.1 port={} user=anyone application_name=s1 sslmode=require \
         channel_binding=require {KNOWN}",
        guarded.port
    );
    let settings = [
        ("primary_conninfo", conninfo.as_str()),
        ("primary_slot_name", ""),
        ("wal_retrieve_retry_interval", "100ms"),
    ];
    let standby = guarded.principal.standby(&settings, &[SLOT])?;
    let sql = "INSERT INTO t SELECT g FROM generate_series(1001, 1000000) g";
    guarded.principal.execute_script(sql)?;
    let end = flush_position(&guarded.principal)?;
    wait_until("the standby to replay", LONG, &[&standby.log_path()], || {
        Ok((flush_position(&standby)? >= end).then_some(()))
    })?;
    let sql = "SELECT count(*), sum(id) FROM t";
    let row = standby.connect()?.query_one(sql, &[])?;
    ensure!((row.get::<_, i64>(0), row.get::<_, i64>(1)) == (1_000_000, 500_000_500_000));
    Ok(())
}

/// Without a certificate there is a password all the same, and nothing is offered in its place.
#[test]
fn a_password_is_asked_for_without_tls_too() -> Result<()> {
    let guarded = guarded(15, false)?;
    ensure!(guarded.receivewal(KNOWN)?.is_none());
    let said = guarded.receivewal("password=wrong")?.context("it was let in")?;
    ensure!(said.contains("password authentication failed"), "{said}");
    let said = guarded.receivewal("")?.context("it was let in")?;
    ensure!(said.contains("no password supplied"), "{said}");
    let said = guarded.receivewal(&format!("{KNOWN} sslmode=require"))?.context("it was let in")?;
    ensure!(said.contains("SSL"), "{said}");
    Ok(())
}

/// What is no client gets nothing, costs nothing and is in nobody's way.
#[test]
fn strangers_are_shown_out() -> Result<()> {
    let guarded = guarded(15, true)?;
    let ssl_request: &[u8] = &[0, 0, 0, 8, 4, 210, 22, 47];
    let startup = b"\0\0\0\x22\0\x03\0\0user\0a\0replication\0true\0\0";
    let skipped = [&startup[..], b"Q\0\0\0\x14IDENTIFY_SYSTEM\0"].concat();
    let injected = [ssl_request, &startup[..]].concat();
    let not_sasl = [&startup[..], b"p\0\0\0\x0asecret"].concat();
    let endless = [&startup[..], b"p\0\xff\xff\xff"].concat();
    for (bytes, what) in [
        (&b"GET / HTTP/1.1\r\n\r\n"[..], "HTTP"),
        (&skipped, "a command in the password's place"),
        (&injected, "bytes behind a request for TLS"),
        (&not_sasl, "a password in clear"),
        (&endless, "a message that is too long"),
        (&[ssl_request, b"\x16\x03\x01garbage garbage garbage"].concat(), "broken TLS"),
    ] {
        let got = guarded.mirror.block_on(async {
            let mut socket = tokio::net::TcpStream::connect(("127.0.0.1", guarded.port)).await?;
            socket.write_all(bytes).await?;
            let mut got = Vec::new();
            // Reset, where something was left unread.
            let read = tokio::time::timeout(LONG, socket.read_to_end(&mut got)).await;
            read.map(|_| got).context(what)
        })?;
        let system = guarded.mirror.spool()?.identity().system_id.to_string();
        let leaked = got.windows(system.len()).any(|window| window == system.as_bytes());
        ensure!(!leaked, "{what}: {:?}", String::from_utf8_lossy(&got));
    }
    guarded.ours(KNOWN).context("afterwards")?;
    // Somebody who says nothing does not hold up the others.
    let silent = std::net::TcpStream::connect(("127.0.0.1", guarded.port))?;
    silent.set_read_timeout(Some(Duration::from_secs(1)))?;
    guarded.ours(KNOWN).context("beside somebody silent")?;
    Ok(())
}
