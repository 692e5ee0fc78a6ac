//! Output that does not get out is a failure, and a reader that has seen enough is none.

use anyhow::{Context, Result};
use std::fs::File;
use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Command, Output, Stdio};
use tempfile::TempDir;

fn farshore(arguments: &[&str], folder: &Path, stdout: impl Into<Stdio>) -> Result<Output> {
    let mut command = Command::new(env!("CARGO_BIN_EXE_farshore"));
    command.args(arguments).current_dir(folder).stdin(Stdio::null());
    Ok(command.stdout(stdout).stderr(Stdio::piped()).spawn()?.wait_with_output()?)
}

/// A folder with a site file; nothing of it is connected to.
fn with_site() -> Result<TempDir> {
    let folder = tempfile::tempdir()?;
    let site = "[site]\nname = \"a\"\ndata_dir = \"data\"\n[publication.p]\n\
                source = \"postgres://u@127.0.0.1:1/d\"\ntables = [\"public.*\"]\n";
    std::fs::write(folder.path().join("site.toml"), site)?;
    Ok(folder)
}

#[test]
fn who_watches_sees_one_picture_after_the_other_until_nobody_reads() -> Result<()> {
    let folder = with_site()?;
    for format in [&[][..], &["--json"]] {
        let mut command = Command::new(env!("CARGO_BIN_EXE_farshore"));
        command.args(["status", "site.toml", "--watch"]).args(format).current_dir(folder.path());
        let mut watching =
            command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn()?;
        let pictures = watching.stdout.take().context("piped")?;
        let seen = BufReader::new(pictures).lines().filter(|line| {
            line.as_ref().is_ok_and(|line| line.contains("site a") || line.contains("\"a\""))
        });
        assert_eq!(seen.take(3).count(), 3, "{format:?}");
        let ended = watching.wait_with_output()?;
        assert!(ended.stderr.is_empty() && ended.status.code() == Some(3), "{format:?}: {ended:?}");
    }
    Ok(())
}

#[test]
fn what_does_not_fit_on_the_disk_ends_with_a_failure() -> Result<()> {
    let folder = with_site()?;
    let verbs: [(&[&str], i32); 2] =
        [(&["status", "site.toml"], 3), (&["site-cert", "issue", "--dir"], 0)];
    for (verb, otherwise) in verbs {
        let with = |more| match verb[0] {
            "site-cert" => [verb, &[more, "a"]].concat(),
            _ => verb.to_vec(),
        };
        let full = File::options().write(true).open("/dev/full")?;
        let full = farshore(&with("full"), folder.path(), full)?;
        assert_eq!(full.status.code(), Some(1), "{verb:?}: {full:?}");
        let said = String::from_utf8_lossy(&full.stderr);
        assert!(said.contains("farshore: cannot print: No space left"), "{verb:?}: {said}");
        let (reader, writer) = std::io::pipe()?;
        drop(reader);
        let unread = farshore(&with("unread"), folder.path(), writer)?;
        assert_eq!(unread.status.code(), Some(otherwise), "{verb:?}: {unread:?}");
        assert!(unread.stderr.is_empty(), "{verb:?}: {unread:?}");
    }
    Ok(())
}
