//! Decodes what a real server's pgoutput produces, with a throwaway cluster of its own.
//!
//! Uses the newest server under `/usr/lib/postgresql`, or the one whose programs are in the folder
//! `FARSHORE_TEST_PG_BIN`; skipped by name if there is none. With `FARSHORE_RECORD` set the
//! recordings in `tests/vectors` are written anew.

mod recorded;

use recorded::Kinds;
use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

struct Cluster {
    bin: PathBuf,
    folder: tempfile::TempDir,
}

/// PostgreSQL refuses to run as root: then its programs run as the user `postgres`.
fn unprivileged(program: &Path) -> Command {
    if fs::metadata("/proc/self").is_ok_and(|own| own.uid() == 0) {
        let mut command = Command::new("setpriv");
        command.args(["--reuid=postgres", "--regid=postgres", "--init-groups"]).arg(program);
        command
    } else {
        Command::new(program)
    }
}

fn done(output: Output) -> String {
    let text = |bytes: Vec<u8>| String::from_utf8(bytes).unwrap();
    assert!(output.status.success(), "{}{}", text(output.stdout), text(output.stderr));
    text(output.stdout)
}

fn run(command: &mut Command) -> String {
    done(command.output().unwrap())
}

impl Cluster {
    fn start() -> Option<Cluster> {
        let bin = match std::env::var_os("FARSHORE_TEST_PG_BIN") {
            Some(bin) => PathBuf::from(bin),
            None => newest_server()?,
        };
        let folder = tempfile::tempdir().unwrap();
        // The unprivileged user must be able to make its own folder in ours.
        let everyone = std::os::unix::fs::PermissionsExt::from_mode(0o777);
        fs::set_permissions(folder.path(), everyone).unwrap();
        let cluster = Cluster { bin, folder };
        run(unprivileged(&cluster.bin.join("initdb"))
            .args(["--username=postgres", "--auth=trust", "--encoding=UTF8", "--locale=C"])
            .args(["--no-sync", "--pgdata"])
            .arg(cluster.data()));
        let settings = format!(
            "listen_addresses=''\nunix_socket_directories='{}'\nwal_level=logical\nfsync=off\n\
             logical_decoding_work_mem=64kB\nmax_prepared_transactions=5\nautovacuum=off\n",
            cluster.folder.path().display()
        );
        let file = cluster.data().join("postgresql.conf");
        let all = fs::read_to_string(&file).unwrap() + &settings;
        fs::write(&file, all).unwrap();
        // A server that inherited our pipes would keep `output` waiting: hence `status`.
        let started = cluster
            .control()
            .args(["--wait", "--silent", "start", "--log"])
            .arg(cluster.folder.path().join("log"))
            .stdout(std::process::Stdio::null())
            .status()
            .unwrap();
        let log = || fs::read_to_string(cluster.folder.path().join("log")).unwrap_or_default();
        assert!(started.success(), "{}", log());
        Some(cluster)
    }

    fn data(&self) -> PathBuf {
        self.folder.path().join("data")
    }

    fn control(&self) -> Command {
        let mut command = unprivileged(&self.bin.join("pg_ctl"));
        command.arg("--pgdata").arg(self.data());
        command
    }

    fn sql(&self, script: &str) -> String {
        run(Command::new("psql")
            .args(["-XqAt", "-U", "postgres", "-d", "postgres", "-v", "ON_ERROR_STOP=1", "-h"])
            .arg(self.folder.path())
            .args(["-c", script])
            .env("PGCLIENTENCODING", "UTF8"))
    }

    fn version(&self) -> u32 {
        self.sql("SHOW server_version_num").trim().parse::<u32>().unwrap() / 10_000
    }

    fn record(&self, slot: &str, protocol: u8, options: &str) -> String {
        let parallel = options.contains("'parallel'");
        let hex = self.sql(&format!(
            "SELECT encode(data, 'hex') FROM pg_logical_slot_peek_binary_changes('{slot}', NULL, \
             NULL, 'proto_version', '{protocol}', 'publication_names', 'everything'{options})"
        ));
        format!(
            "# PostgreSQL {} slot {slot}{options}\n# protocol {protocol} parallel {parallel}\n{hex}",
            self.version()
        )
    }
}

impl Drop for Cluster {
    fn drop(&mut self) {
        // A failure here must not hide the one that may be unwinding.
        let _ = self.control().args(["--wait", "--silent", "--mode=immediate", "stop"]).status();
    }
}

fn newest_server() -> Option<PathBuf> {
    let versions = fs::read_dir("/usr/lib/postgresql").ok()?;
    versions
        .filter_map(|entry| entry.ok()?.file_name().into_string().ok()?.parse::<u32>().ok())
        .max()
        .map(|version| PathBuf::from(format!("/usr/lib/postgresql/{version}/bin")))
}

const SCHEMA: &str = r#"
CREATE TYPE mood AS ENUM ('sad', 'ok');
CREATE TABLE plain (id int PRIMARY KEY, name text, at timestamptz, amount numeric(10,2));
CREATE TABLE "Größe ""x""" ("Schlüssel" text PRIMARY KEY, feeling mood, list int[]);
CREATE TABLE whole (a int, b text); ALTER TABLE whole REPLICA IDENTITY FULL;
CREATE TABLE indexed (a int NOT NULL, b text, big text);
CREATE UNIQUE INDEX indexed_a ON indexed (a);
ALTER TABLE indexed REPLICA IDENTITY USING INDEX indexed_a;
ALTER TABLE indexed ALTER big SET STORAGE EXTERNAL;
CREATE TABLE keyless (a int);
CREATE TABLE child (id int PRIMARY KEY, plain_id int REFERENCES plain (id));
CREATE TABLE empty_row ();
CREATE PUBLICATION everything FOR ALL TABLES;
SELECT pg_replication_origin_create('elsewhere');
"#;

const SLOTS: &str = "
SELECT pg_create_logical_replication_slot('plain', 'pgoutput');
SELECT pg_create_logical_replication_slot('prepared', 'pgoutput', false, true);
";

/// Statements of one session, one by one: some cannot run inside a transaction block.
const LOAD: &[&str] = &[
    "INSERT INTO plain VALUES (1, 'one', '2026-01-01', 1.50), (2, NULL, NULL, -0.01)",
    "UPDATE plain SET name = 'eins' WHERE id = 1; UPDATE plain SET id = 3 WHERE id = 2;
     DELETE FROM plain WHERE id = 3",
    r#"INSERT INTO "Größe ""x""" VALUES ('Zwölf', 'sad', '{1,NULL,3}')"#,
    "INSERT INTO whole VALUES (1, NULL); UPDATE whole SET b = 'x'; DELETE FROM whole",
    "INSERT INTO indexed VALUES (1, 'b', repeat('0123456789', 300))",
    "UPDATE indexed SET b = 'c'; UPDATE indexed SET a = 2; DELETE FROM indexed",
    "INSERT INTO keyless VALUES (1); INSERT INTO empty_row DEFAULT VALUES",
    "SELECT pg_logical_emit_message(true, 'outbox', 'inside'), \
     pg_logical_emit_message(false, 'outbox', 'at once')",
    "TRUNCATE plain, child RESTART IDENTITY; TRUNCATE whole; TRUNCATE plain CASCADE",
    "SELECT pg_replication_origin_session_setup('elsewhere');
     BEGIN; SELECT pg_replication_origin_xact_setup('1/2', now());
     INSERT INTO keyless VALUES (2); COMMIT; SELECT pg_replication_origin_session_reset()",
];

/// Large enough to be streamed, or prepared. Statements of one session, one by one.
const STREAMED_LOAD: &[&str] = &[
    // Sub-transactions that roll back before and after they were streamed.
    "BEGIN; INSERT INTO keyless SELECT generate_series(1, 900);
     SAVEPOINT a; INSERT INTO keyless SELECT generate_series(1, 900);
     SELECT pg_logical_emit_message(true, 'outbox', 'rolled back');
     INSERT INTO keyless SELECT generate_series(1, 900); ROLLBACK TO a;
     SAVEPOINT b; INSERT INTO keyless VALUES (3); ROLLBACK TO b;
     SAVEPOINT c; INSERT INTO whole SELECT n, 'x' FROM generate_series(1, 400) n;
     SELECT pg_logical_emit_message(true, 'outbox', 'streamed'); RELEASE c;
     INSERT INTO \"Größe \"\"x\"\"\" VALUES ('Elf', 'ok', NULL);
     UPDATE whole SET b = 'y' WHERE a < 300; TRUNCATE child; COMMIT",
    "BEGIN; INSERT INTO keyless SELECT generate_series(1, 1500); ROLLBACK",
    "BEGIN; INSERT INTO keyless VALUES (4); PREPARE TRANSACTION 'small'",
    "COMMIT PREPARED 'small'",
    "BEGIN; INSERT INTO keyless VALUES (5); PREPARE TRANSACTION 'Rücktritt'",
    "ROLLBACK PREPARED 'Rücktritt'",
    "BEGIN; INSERT INTO keyless SELECT generate_series(1, 1500); PREPARE TRANSACTION 'large'",
    "COMMIT PREPARED 'large'",
];

#[test]
fn what_a_server_sends_is_decoded() {
    let Some(cluster) = Cluster::start() else {
        println!("skipped: no PostgreSQL server under /usr/lib/postgresql");
        return;
    };
    let version = cluster.version();
    cluster.sql(SCHEMA);
    cluster.sql(SLOTS);
    let load = |all: &[&str]| {
        for statements in all {
            cluster.sql(statements);
        }
    };
    let check = |name: &str, slot: &str, protocol: u8, options: &str, wanted: &str| {
        let recording = cluster.record(slot, protocol, options);
        if std::env::var_os("FARSHORE_RECORD").is_some() {
            let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/vectors");
            fs::write(folder.join(format!("pg{version}-{name}.hex")), &recording).unwrap();
        }
        let kinds: Kinds = recorded::replay(&recording);
        println!("{name}: {kinds:?}");
        for kind in wanted.split(' ') {
            assert!(kinds.contains_key(kind), "{name} has no {kind}: {kinds:?}");
        }
    };
    load(LOAD);
    let changes = "B C D I R T U Uk Y";
    check("v1-text", "plain", 1, ", 'messages', 'true'", &format!("{changes} M O"));
    check("v1-binary", "plain", 1, ", 'binary', 'true'", changes);
    load(STREAMED_LOAD);
    // From 18 on, a server does not stream what it already knows to have rolled back as a whole.
    let streamed = if version < 18 { "A A/ S E c B C I" } else { "A/ S E c B C I" };
    let streaming = ", 'messages', 'true', 'streaming', 'on'";
    check("v2-streamed", "plain", 2, streaming, &format!("{streamed} M Uo"));
    let two_phase = ", 'streaming', 'on', 'two_phase', 'on'";
    check("v3-prepared", "prepared", 3, two_phase, &format!("{streamed} K P b p r"));
    if version >= 16 {
        let parallel = ", 'messages', 'true', 'streaming', 'parallel', 'two_phase', 'on', \
                        'binary', 'true'";
        check("v4-parallel", "prepared", 4, parallel, &format!("{streamed} K M P b p r"));
    }
}
