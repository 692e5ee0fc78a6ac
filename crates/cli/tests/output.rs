//! Output that does not get out is a failure, and a reader that has seen enough is none.

use anyhow::Result;
use std::fs::File;
use std::path::Path;
use std::process::{Command, Output, Stdio};

fn farshore(arguments: &[&str], folder: &Path, stdout: impl Into<Stdio>) -> Result<Output> {
    let mut command = Command::new(env!("CARGO_BIN_EXE_farshore"));
    command.args(arguments).current_dir(folder).stdin(Stdio::null());
    Ok(command.stdout(stdout).stderr(Stdio::piped()).spawn()?.wait_with_output()?)
}

#[test]
fn what_does_not_fit_on_the_disk_ends_with_a_failure() -> Result<()> {
    let folder = tempfile::tempdir()?;
    // Nothing of it is connected to.
    let site = "[site]\nname = \"a\"\ndata_dir = \"data\"\n[publication.p]\n\
                source = \"postgres://u@127.0.0.1:1/d\"\ntables = [\"public.*\"]\n";
    std::fs::write(folder.path().join("site.toml"), site)?;
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
