//! What works with a drawback: it is said beforehand, and does not stop anything.

use crate::case::{compare, normal, said};
use anyhow::{Result, ensure};
use farshore_tests::{Direction, Pair, Site};
use std::os::unix::fs::PermissionsExt;

const ON_BOTH: &str = "
CREATE TABLE keyless (v text);
CREATE TABLE deferred (id integer PRIMARY KEY DEFERRABLE);
CREATE TABLE nothing (id integer PRIMARY KEY);
CREATE TABLE whole (a integer, b text);
CREATE TABLE indexless (id integer);
CREATE TABLE narrow (id bigint PRIMARY KEY, code character varying(20), at timestamp(3), v text);
CREATE TABLE quiet (id integer PRIMARY KEY);
CREATE TYPE \"Mood\" AS ENUM ('fine');
CREATE TABLE felt (id integer PRIMARY KEY, how \"Mood\");
CREATE FUNCTION nop() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RETURN NULL; END $$;
CREATE TRIGGER ordinary AFTER INSERT ON quiet FOR EACH ROW EXECUTE FUNCTION nop();
CREATE TRIGGER \"al'ways\" AFTER INSERT ON quiet FOR EACH ROW EXECUTE FUNCTION nop();
ALTER TABLE quiet ENABLE ALWAYS TRIGGER \"al'ways\";
";

const AT_THE_PUBLISHER: &str = "
ALTER TABLE nothing REPLICA IDENTITY NOTHING;
ALTER TABLE whole REPLICA IDENTITY FULL;
ALTER TABLE indexless ADD PRIMARY KEY (id);
CREATE UNLOGGED TABLE scratch (id integer PRIMARY KEY);
CREATE VIEW seen AS SELECT * FROM quiet;
ALTER TYPE \"Mood\" ADD VALUE 'so ''so';
ALTER TYPE \"Mood\" ADD VALUE 'bad' BEFORE 'fine';
";

const AT_THE_TARGET: &str = "
ALTER TABLE narrow ALTER id TYPE integer, ALTER code TYPE character varying(10),
  ALTER at TYPE timestamp(6), ALTER v SET NOT NULL;
ALTER TABLE keyless SET UNLOGGED;
";

const WARNINGS: &[&str] = &[
    "publication \"p\": max_slot_wal_keep_size = 10GB (and wal_keep_size = 0): a slot that falls further behind is invalidated, and everything must be copied anew → Make it larger than what the publisher writes in the longest time that Farshore may be stopped, or ALTER SYSTEM SET max_slot_wal_keep_size = -1",
    "publication \"p\": idle_replication_slot_timeout = 1d: a slot that Farshore does not read for that long is invalidated, and everything must be copied anew → Make it longer than Farshore may be stopped, or ALTER SYSTEM SET idle_replication_slot_timeout = 0",
    "publication \"p\": unlogged tables are not published: public.scratch → ALTER TABLE public.scratch SET LOGGED, if its rows are wanted",
    "publication \"p\": table public.deferred has only a deferrable primary key, which is no identity: inserts flow, but the publisher will refuse every UPDATE and DELETE of it → Make the primary key anew, NOT DEFERRABLE, or ALTER TABLE public.deferred REPLICA IDENTITY FULL",
    "publication \"p\": table public.keyless has no primary key or other replica identity: inserts flow, but the publisher will refuse every UPDATE and DELETE of it → ALTER TABLE public.keyless ADD PRIMARY KEY (…), or ALTER TABLE public.keyless REPLICA IDENTITY FULL",
    "publication \"p\": table public.nothing has REPLICA IDENTITY NOTHING: inserts flow, but the publisher will refuse every UPDATE and DELETE of it → ALTER TABLE public.nothing REPLICA IDENTITY DEFAULT (its primary key, if that is not deferrable), or ALTER TABLE public.nothing REPLICA IDENTITY FULL",
    "subscription \"s\": type public.\"Mood\" on the target lacks labels that the publisher's has: 'bad', 'so ''so'. A row with one stops the subscription → On the target: ALTER TYPE public.\"Mood\" ADD VALUE 'bad' BEFORE 'fine'; ALTER TYPE public.\"Mood\" ADD VALUE 'so ''so' AFTER 'fine'",
    "subscription \"s\": public.indexless on the target has no index on its key (id): every UPDATE and DELETE reads the whole table → ALTER TABLE public.indexless ADD PRIMARY KEY (id)",
    "subscription \"s\": public.keyless on the target is unlogged: a crash there empties it, and changes of rows that are gone stop the subscription → ALTER TABLE public.keyless SET LOGGED",
    "subscription \"s\": column public.narrow.id is bigint on the publisher and integer on the target: a value that does not fit stops the subscription → On the target: ALTER TABLE public.narrow ALTER COLUMN id TYPE bigint",
    "subscription \"s\": column public.narrow.code is character varying(20) on the publisher and character varying(10) on the target: a value that does not fit stops the subscription, but for spaces at its end beyond that length, which are cut off → On the target: ALTER TABLE public.narrow ALTER COLUMN code TYPE character varying(20)",
    "subscription \"s\": public.narrow on the target takes no NULL in v, where the publisher does: a NULL stops the subscription → ALTER TABLE public.narrow ALTER COLUMN v DROP NOT NULL",
    "subscription \"s\": public.whole has REPLICA IDENTITY FULL, and no primary key on the target: every UPDATE and DELETE reads the whole table → ALTER TABLE public.whole ADD PRIMARY KEY (…) on the target",
    "subscription \"s\": these triggers fire all the same, since they are ENABLE ALWAYS or REPLICA: \"al'ways\" on public.quiet → ALTER TABLE public.quiet DISABLE TRIGGER \"al'ways\", if replicated rows should not meet it",
];

/// Who adopts a publication may not know what it leaves out.
#[test]
fn what_an_adopted_publication_leaves_out_is_said() -> Result<()> {
    let schema = "CREATE TABLE t (id integer PRIMARY KEY)";
    let mut pair = Pair::new(Direction::UP, &["public.t"], schema)?;
    pair.publish("CREATE PUBLICATION \"Their\" FOR TABLE t WITH (publish = 'insert, truncate')")?;
    pair.publish("ALTER PUBLICATION \"Their\" ADD TABLE farshore_marks.mark")?;
    let tables = "tables = ['public.t', 'farshore_marks.mark']";
    pair.site.replace(tables, "adopt_publication = \"Their\"")?;
    let wanted =
        "publication \"Their\" does not publish UPDATE, DELETE: none of it reaches a target";
    let check = pair.site.verb("check", &["--json"])?;
    ensure!(check.code == Some(0), "{check:?}");
    let warnings = said(&check, "warning")?;
    ensure!(warnings.iter().any(|said| said.contains(wanted)), "{warnings:?}");
    pair.site.start()?;
    pair.site.await_log(wanted, std::time::Duration::from_secs(30))?;
    pair.site.stop().map(drop)
}

#[test]
fn warnings_are_said_and_stop_nothing() -> Result<()> {
    let mut pair = Pair::new(Direction::DOWN, &["public.*"], ON_BOTH)?;
    pair.publish(AT_THE_PUBLISHER)?;
    pair.subscriber.execute_script(AT_THE_TARGET)?;
    let mut publisher = pair.publisher.connect()?;
    for setting in ["max_slot_wal_keep_size = '10GB'", "idle_replication_slot_timeout = '1d'"] {
        publisher.batch_execute(&format!("ALTER SYSTEM SET {setting}"))?;
    }
    publisher.batch_execute("SELECT pg_reload_conf()")?;
    pair.publisher.restart()?;
    let check = pair.site.verb("check", &["--json"])?;
    ensure!(check.code == Some(0), "{check:?}");
    let warnings: Vec<String> =
        said(&check, "warning")?.iter().map(|text| normal(&pair, text)).collect();
    compare("warnings", &warnings, WARNINGS)?;
    pair.publish(
        "INSERT INTO keyless VALUES ('v'), (NULL); INSERT INTO whole VALUES (1, 'b'), (1, 'b'); \
         INSERT INTO narrow VALUES (1, 'short', now(), 'v'); INSERT INTO quiet VALUES (1); \
         INSERT INTO indexless VALUES (1), (2); INSERT INTO nothing VALUES (1); INSERT INTO deferred VALUES (1)",
    )?;
    pair.site.start()?;
    pair.await_arrival()?;
    pair.publish(
        "UPDATE whole SET b = 'c'; DELETE FROM indexless WHERE id = 1; INSERT INTO keyless VALUES ('w'); \
         INSERT INTO nothing VALUES (2); UPDATE narrow SET code = 'other'",
    )?;
    pair.await_arrival()?;
    for (query, wanted) in [
        ("SELECT string_agg(b, ',') FROM whole", "c,c"),
        ("SELECT string_agg(id::text, ',') FROM indexless", "2"),
        ("SELECT count(*) FROM keyless", "3"),
        ("SELECT count(*) FROM nothing", "2"),
        ("SELECT code FROM narrow", "other"),
    ] {
        let said = pair.subscriber_says(query)?;
        ensure!(said == wanted, "{query}: {said}, not {wanted}");
    }
    pair.site.stop().map(drop)
}

/// As libpq says of its password file; a node that ran before goes on all the same.
#[test]
fn secrets_that_everybody_can_read_are_told_of() -> Result<()> {
    let mut site = Site::new()?;
    site.add(
        "[publication.p]\nsource = \"postgres://a:geheim@127.0.0.1:1/d\"\ntables = ['public.t']\n",
    )?;
    let wanted = "site.toml, which holds a server's password";
    let folder = site.directory().to_owned();
    let set = |name: &str, mode| {
        std::fs::set_permissions(folder.join(name), std::fs::Permissions::from_mode(mode))
    };
    set("", 0o755)?;
    for (mode, is_told) in [(0o600, false), (0o644, true)] {
        set("site.toml", mode)?;
        let check = site.verb("check", &["--json"])?;
        let warnings = said(&check, "warning")?;
        let told =
            warnings.iter().any(|said| said.contains(wanted) && said.contains("chmod o-rwx"));
        ensure!(told == is_told && !check.stdout.contains("geheim"), "{check:?}");
    }
    site.start()?;
    let told = site.await_log(wanted, std::time::Duration::from_secs(30))?;
    ensure!(told.contains("chmod o-rwx"), "{told}");
    ensure!(!site.log().contains("geheim"), "{}", site.log());
    site.stop().map(drop)
}
