//! Files of the store that are damaged or not what they should be: what is said, that nothing is
//! changed, and that all goes on when the file is as it was.

use crate::case::{SCHEMA, compare, normal, pair};
use anyhow::{Context, Result, bail, ensure};
use farshore_tests::{DATABASE, Direction, Pair};
use std::path::{Path, PathBuf};
use std::time::Duration;

const SOON: Duration = Duration::from_secs(30);

/// What is done to a file.
enum Damage {
    /// Its bytes are replaced from this offset on (from the end when negative).
    Bytes(i64, &'static [u8]),
    /// It is cut to this many bytes less.
    Cut(u64),
    /// It is empty.
    Emptied,
    /// It is gone.
    Removed,
    /// A folder stands in its place.
    Folder,
}

/// Which file, what is done to it, and what `run` says, or that it runs all the same.
type Case = (&'static str, Damage, Option<&'static str>);

const CASES: &[Case] = &[
    (
        "cursors",
        Damage::Bytes(40, b"garbage"),
        Some(
            "farshore: publication \"p\": store file DIRECTORY/data/publications/p/cursors is damaged: its checksum or form is wrong. Nothing was changed. Restore the file from a copy, or remove it: subscriptions then register anew, and one that has not applied all of this log may have to be copied anew (farshore resync), since nobody claims the log until it does",
        ),
    ),
    (
        "notes",
        Damage::Bytes(40, b"garbage"),
        Some(
            "farshore: publication \"p\": store file DIRECTORY/data/publications/p/notes is damaged: its checksum or form is wrong. Nothing was changed. Restore the file from a copy. Without it this log cannot be continued: everything has to be copied anew into an empty data_dir",
        ),
    ),
    (
        "notes",
        Damage::Bytes(0, b"farshore-notes 9"),
        Some(
            "farshore: publication \"p\": store file DIRECTORY/data/publications/p/notes has format version 9; this farshore reads up to 1. Run the newer farshore, or start a new data_dir.",
        ),
    ),
    (
        "notes",
        Damage::Emptied,
        Some(
            "farshore: publication \"p\": store file DIRECTORY/data/publications/p/notes is damaged: its checksum or form is wrong. Nothing was changed. Restore the file from a copy. Without it this log cannot be continued: everything has to be copied anew into an empty data_dir",
        ),
    ),
    (
        // Definitions are among it, which are read at the start.
        "oldest.seg",
        Damage::Bytes(200, &[0xa5; 20_000]),
        Some(
            "farshore: publication \"p\": store file DIRECTORY/data/publications/p/0000000000000000.seg is damaged: at byte 197: no block starts here; LSN to LSN cannot be read. Nothing was changed. Restore the file from a copy, or move the store's folder away and start a new log; its subscriptions must then be copied anew",
        ),
    ),
    (
        "oldest.seg",
        Damage::Cut(100),
        Some(
            "farshore: publication \"p\": store file DIRECTORY/data/publications/p/0000000000000000.seg is damaged: at byte …: the file ends inside a block; LSN to LSN cannot be read. Nothing was changed. Restore the file from a copy, or move the store's folder away and start a new log; its subscriptions must then be copied anew",
        ),
    ),
    (
        "oldest.seg",
        Damage::Emptied,
        Some(
            "farshore: publication \"p\": store file DIRECTORY/data/publications/p/0000000000000000.seg is damaged: the file is empty. Nothing was changed. Restore the file from a copy, or move the store's folder away and start a new log; its subscriptions must then be copied anew",
        ),
    ),
    (
        "oldest.seg",
        Damage::Bytes(0, b"NOTOURS!"),
        Some(
            "farshore: publication \"p\": store file DIRECTORY/data/publications/p/0000000000000000.seg is damaged: at byte 0: the header's checksum does not match. Nothing was changed. Restore the file from a copy, or move the store's folder away and start a new log; its subscriptions must then be copied anew",
        ),
    ),
    (
        "middle.seg",
        Damage::Removed,
        Some(
            "farshore: publication \"p\": store file DIRECTORY/data/publications/p/0000000000000000.seg is damaged: 1 segments between it and LSN are missing. Nothing was changed. Restore the file from a copy, or move the store's folder away and start a new log; its subscriptions must then be copied anew",
        ),
    ),
    (
        "middle.seg",
        Damage::Folder,
        Some(
            "farshore: publication \"p\": store file DIRECTORY/data/publications/p/0000000000000000.seg is damaged: 1 segments between it and LSN are missing. Nothing was changed. Restore the file from a copy, or move the store's folder away and start a new log; its subscriptions must then be copied anew",
        ),
    ),
    (
        "middle.seg",
        Damage::Bytes(0, b"NOTOURS!"),
        Some(
            "farshore: publication \"p\": store file DIRECTORY/data/publications/p/….seg is damaged: at byte 0: the header's checksum does not match. Nothing was changed. Restore the file from a copy, or move the store's folder away and start a new log; its subscriptions must then be copied anew",
        ),
    ),
    ("oldest.idx", Damage::Bytes(20, b"garbage"), None),
    ("oldest.idx", Damage::Removed, None),
    ("stray.txt", Damage::Emptied, None),
];

fn store(pair: &Pair) -> PathBuf {
    pair.site.directory().join("data/publications/p")
}

/// `oldest` and `middle` stand for segments that others follow.
fn file(folder: &Path, name: &str) -> Result<PathBuf> {
    let Some((place, extension)) = name.split_once('.').filter(|(place, _)| *place != "stray")
    else {
        return Ok(folder.join(name));
    };
    let mut segments: Vec<PathBuf> = std::fs::read_dir(folder)?
        .map(|entry| Ok(entry?.path()))
        .filter(|path: &Result<PathBuf>| {
            path.as_ref().is_ok_and(|path| path.extension().is_some_and(|e| e == "seg"))
        })
        .collect::<Result<_>>()?;
    segments.sort();
    ensure!(segments.len() >= 3, "{} segments", segments.len());
    let number = match place {
        "oldest" => 0,
        "middle" => 1,
        other => bail!("no place {other}"),
    };
    Ok(segments[number].with_extension(extension))
}

fn damage(path: &Path, damage: &Damage) -> Result<()> {
    let mut bytes = std::fs::read(path).unwrap_or_default();
    match damage {
        Damage::Bytes(at, new) => {
            let at = usize::try_from(*at).context("offset")?;
            ensure!(bytes.len() >= at + new.len(), "{} is short: {}", path.display(), bytes.len());
            bytes[at..at + new.len()].copy_from_slice(new);
        }
        Damage::Cut(less) => {
            let left = bytes.len().saturating_sub(usize::try_from(*less)?);
            bytes.truncate(left);
        }
        Damage::Emptied => bytes.clear(),
        Damage::Removed => return Ok(std::fs::remove_file(path)?),
        Damage::Folder => {
            std::fs::remove_file(path)?;
            return Ok(std::fs::create_dir(path)?);
        }
    }
    Ok(std::fs::write(path, bytes)?)
}

fn copy_folder(from: &Path, to: &Path) -> Result<()> {
    if to.exists() {
        std::fs::remove_dir_all(to)?;
    }
    std::fs::create_dir(to)?;
    for entry in std::fs::read_dir(from)? {
        let entry = entry?;
        if entry.file_type()?.is_file() {
            std::fs::copy(entry.path(), to.join(entry.file_name()))?;
        }
    }
    Ok(())
}

/// Every file with its bytes, but for what a running node writes.
fn contents(folder: &Path) -> Result<Vec<(PathBuf, Vec<u8>)>> {
    let mut all = Vec::new();
    for entry in std::fs::read_dir(folder)? {
        let path = entry?.path();
        if path.is_file() && path.file_name().is_none_or(|name| name != "LOCK") {
            all.push((path.clone(), std::fs::read(path)?));
        }
    }
    all.sort();
    Ok(all)
}

/// A site that is stopped, with several segments that its subscription has not applied yet.
fn stopped_behind() -> Result<Pair> {
    let mut pair = pair()?;
    pair.site.replace("tables =", "segment_size = \"64KB\"\ntables =")?;
    pair.site.start()?;
    pair.assert_equal(&["public"])?;
    let mut blocker = pair.subscriber.connect()?;
    blocker.batch_execute("BEGIN; LOCK TABLE t")?;
    let mut publisher = pair.publisher.connect()?;
    for round in 0..40 {
        publisher.batch_execute(&format!(
            "INSERT INTO t SELECT {round} * 1000 + i, '{round}-' || i, \
             md5(random()::text) || md5(random()::text) FROM generate_series(1001, 1200) AS i"
        ))?;
    }
    let written: String = pair.publisher_says("SELECT pg_current_wal_flush_lsn()")?;
    let mut asking = pair.publisher.connect()?;
    pair.site.wait_for("the store to hold it", Duration::from_secs(60), || {
        let confirmed = "SELECT FROM pg_replication_slots \
             WHERE slot_name = 'farshore_p' AND confirmed_flush_lsn >= $1::text::pg_lsn";
        Ok(asking.query_opt(confirmed, &[&written])?.map(drop))
    })?;
    pair.site.kill9()?;
    blocker.batch_execute("COMMIT")?;
    Ok(pair)
}

#[test]
fn damaged_store_files() -> Result<()> {
    let mut pair = stopped_behind()?;
    // A killed node leaves a tail to cut off; what follows starts from a store in good order.
    let kept = pair.site.directory().join("kept");
    copy_folder(&store(&pair), &kept)?;
    let mut failed = Vec::new();
    let mut runs = Vec::new();
    for (name, how, wanted) in CASES {
        copy_folder(&kept, &store(&pair))?;
        damage(&file(&store(&pair), name)?, how).with_context(|| (*name).to_owned())?;
        let Some(wanted) = wanted else {
            runs.push((name, how));
            continue;
        };
        let before = contents(&store(&pair))?;
        pair.site.start()?;
        let code = pair.site.await_exit(SOON).with_context(|| (*name).to_owned())?;
        let log = pair.site.log();
        let last = log.lines().last().unwrap_or_default();
        let outcome = compare(name, &[normal(&pair, last)], &[wanted]).and_then(|()| {
            ensure!(code == 1, "{name}: exit code {code}");
            ensure!(contents(&store(&pair))? == before, "{name}: files were changed");
            Ok(())
        });
        failed.extend(outcome.err().map(|error| format!("{error:#}")));
    }
    ensure!(failed.is_empty(), "{} failed:\n\n{}", failed.len(), failed.join("\n\n"));
    copy_folder(&kept, &store(&pair))?;
    for (name, how) in runs {
        damage(&file(&store(&pair), name)?, how).with_context(|| (*name).to_owned())?;
    }
    pair.site.start()?;
    pair.assert_equal(&["public"])?;
    let rows = pair.subscriber_says("SELECT count(*) FROM t")?;
    ensure!(rows == "8100", "{rows} rows");
    pair.site.stop().map(drop)
}

/// One log that cannot be opened stops what follows it, and nothing else of the site.
#[test]
fn one_damaged_log_stops_no_other() -> Result<()> {
    let mut pair = Pair::new(Direction::UP, &["public.t"], SCHEMA)?;
    let (source, target) = (pair.publisher.url(DATABASE), pair.subscriber.url(DATABASE));
    pair.site.add(&format!(
        "[publication.q]\nsource = \"{source}\"\ntables = [\"public.u\"]\n\
         [subscription.s2]\npublication = \"q\"\ntarget = \"{target}\"\n"
    ))?;
    pair.publish("INSERT INTO u VALUES (1)")?;
    let arrives = |pair: &mut Pair, table: &str, id: i32| -> Result<()> {
        let mut target = pair.subscriber.connect_to(DATABASE)?;
        let sql = format!("SELECT FROM {table} WHERE id = {id}");
        pair.site.wait_for("the row", SOON, || Ok(target.query_opt(&sql, &[])?.map(drop)))
    };
    pair.site.start()?;
    arrives(&mut pair, "u", 1)?;
    pair.site.stop()?;
    let cursors = pair.site.directory().join("data/publications/q/cursors");
    let sound = std::fs::read(&cursors)?;
    damage(&cursors, &Damage::Bytes(40, b"garbage"))?;
    pair.publish("INSERT INTO t VALUES (1, 'c', 'v'); INSERT INTO u VALUES (2)")?;
    pair.site.start()?;
    arrives(&mut pair, "t", 1)?;
    let status = pair.site.status()?;
    for (kind, name) in [("publications", "q"), ("subscriptions", "s2")] {
        let all = status[kind].as_array().context("a list")?;
        let found = all.iter().find(|one| one["name"] == name).context("it is told of")?;
        let error = found["error"].as_str().unwrap_or_default();
        ensure!(found["state"] == "stopped" && found["health"] == "critical", "{found}");
        ensure!(error.contains("cursors is damaged") && error.contains("start this node again"));
    }
    for (verb, arguments) in [
        ("resume", &["--publication", "q"][..]),
        ("resume", &["--subscription", "s2"]),
        ("pause", &["--subscription", "s2"]),
        ("resync", &["--subscription", "s2"]),
        ("tracer", &["q"]),
    ] {
        let refused = pair.site.verb(verb, arguments)?;
        ensure!(refused.code == Some(1), "{verb}: {refused:?}");
        ensure!(refused.stderr.contains("cursors is damaged"), "{verb}: {refused:?}");
    }
    pair.site.stop()?;
    std::fs::write(&cursors, sound)?;
    pair.site.start()?;
    arrives(&mut pair, "u", 2)?;
    pair.site.stop().map(drop)
}

/// Without its notes a log cannot be told from somebody else's: it is never continued, since the
/// changes between its end and the slot would be missing.
#[test]
fn notes_that_are_gone() -> Result<()> {
    let mut pair = stopped_behind()?;
    std::fs::remove_file(store(&pair).join("notes"))?;
    let mut said = Vec::new();
    for adopt in ["", "adopt_slot = \"farshore_p\"\n"] {
        pair.site.replace("tables =", &format!("{adopt}tables ="))?;
        pair.site.start()?;
        let line = pair.site.await_log("stopped: ", SOON)?;
        let text = line.split_once("stopped: ").map_or("", |(_, text)| text);
        said.push(normal(&pair, text.split(" agent=").next().unwrap_or_default()));
        pair.site.stop()?;
    }
    compare(
        "run",
        &said,
        &[
            "publication \"p\": replication slot \"farshore_p\" already exists on PUBLISHER and was not made for this store. If this site's data_dir was lost, drop the slot and start, then farshore resync and farshore resume for each of its subscriptions; if another site uses it, give this publication another name; or set adopt_slot = \"farshore_p\"",
            "publication \"p\": the store holds the log up to LSN, but its file `notes`, which tells the slot that fed it, is gone. Put that file back. To copy everything anew: stop this node, drop the slot, remove data_dir/publications/p, start, and for each of its subscriptions: farshore resync, then farshore resume",
        ],
    )?;
    let rows = pair.subscriber_says("SELECT count(*) FROM t")?;
    ensure!(rows == "100", "{rows} rows on the target");
    // As the message says.
    pair.drop_slot()?;
    pair.site.replace("adopt_slot = \"farshore_p\"\n", "")?;
    std::fs::remove_dir_all(store(&pair))?;
    let mut target = pair.subscriber.connect_to(DATABASE)?;
    target.batch_execute("TRUNCATE t, u, farshore_marks.mark; DROP SCHEMA farshore CASCADE")?;
    pair.site.start()?;
    pair.assert_equal(&["public"])
}
