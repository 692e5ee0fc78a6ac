//! The command line: wrong arguments, and site files whose names look like options.

use anyhow::{Result, ensure};
use farshore_testkit::process::faults_binary;
use std::net::TcpListener;
use std::os::unix::net::UnixListener;
use std::process::{Command, Stdio};

/// Arguments, and what the first line of the answer and the tip say.
const CASES: &[(&[&str], &str)] = &[
    (
        &["rnu", "site.toml"],
        "error: unrecognized subcommand 'rnu'\n\n  tip: a similar subcommand exists: 'run'\n",
    ),
    (
        &["chekc"],
        "error: unrecognized subcommand 'chekc'\n\n  tip: a similar subcommand exists: 'check'\n",
    ),
    (&["frobnicate"], "error: unrecognized subcommand 'frobnicate'\n\nUsage:"),
    (&["check"], "error: the following required arguments were not provided:\n  <SITE>\n"),
    (
        &["check", "site.toml", "--jsn"],
        "error: unexpected argument '--jsn' found\n\n  tip: a similar argument exists: '--json'\n",
    ),
    (&["run", "a.toml", "b.toml"], "error: unexpected argument 'b.toml' found\n"),
    (
        &["run", "-x.toml"],
        "error: unexpected argument '-x' found\n\n  tip: to pass '-x' as a value, use '-- -x'\n",
    ),
    (
        &["status", "--watch=often", "site.toml"],
        "error: unexpected value 'often' for '--watch' found; no more were expected\n",
    ),
    (
        &["skip", "site.toml", "--subscription", "s", "--lsn", "nowhere"],
        "error: invalid value 'nowhere' for '--lsn <LSN>': \"nowhere\" is not an LSN",
    ),
    (
        &["skip", "site.toml", "--subscription", "s", "--lsn", "0/0"],
        "error: invalid value '0/0' for '--lsn <LSN>': 0/0 is no transaction's",
    ),
    (
        &["initialise", "site.toml", "--subscription", "s", "--lsn", "nonsense"],
        "error: invalid value 'nonsense' for '--lsn <LSN>': ",
    ),
    (
        &["browse", "site.toml", "--publication", "p", "--from", "yesterday"],
        "error: invalid value 'yesterday' for '--from <FROM>': \"yesterday\" is not a time in UTC",
    ),
    (
        &["browse", "site.toml", "--publication", "p", "--to", "0/x"],
        "error: invalid value '0/x' for '--to <TO>': \"0/x\" is not an LSN",
    ),
    (
        &["resync", "site.toml", "--subscription", "s", "--table", "orders"],
        "error: invalid value 'orders' for '--table <TABLE>': ",
    ),
    (&[], "Carries PostgreSQL databases to far sites\n\nUsage: "),
];

fn farshore(arguments: &[&str]) -> Result<(Option<i32>, String, String)> {
    let output = Command::new(faults_binary()?).args(arguments).stdin(Stdio::null()).output()?;
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    Ok((output.status.code(), text(&output.stdout), text(&output.stderr)))
}

#[test]
fn wrong_arguments() -> Result<()> {
    for (arguments, wanted) in CASES {
        let (code, _, said) = farshore(arguments)?;
        ensure!(code == Some(2), "{arguments:?}: exit code {code:?}");
        ensure!(said.starts_with(wanted), "{arguments:?}:\n{said}\nnot:\n{wanted}");
    }
    Ok(())
}

#[test]
fn help_names_verbs_and_exit_codes() -> Result<()> {
    let (code, help, _) = farshore(&["--help"])?;
    ensure!(code == Some(0), "{code:?}");
    for word in ["run", "check", "status", "demo", "Exit status", "farshore check site.toml"] {
        ensure!(help.contains(word), "{word} is not in\n{help}");
    }
    for verb in ["run", "check", "status"] {
        let (code, help, _) = farshore(&["help", verb])?;
        let words = help.split_whitespace().collect::<Vec<_>>().join(" ");
        ensure!(code == Some(0) && words.contains("with 2 when"), "{verb}: {code:?}\n{help}");
    }
    Ok(())
}

#[test]
fn a_site_file_may_be_called_anything() -> Result<()> {
    let folder = tempfile::Builder::new().prefix("far shore'\"%s").tempdir()?;
    let name = "-x \"site\" 100%\n.toml";
    std::fs::write(folder.path().join(name), "[site]\nname = \"x\"\ndata_dir = \"d\"\n")?;
    let output = Command::new(faults_binary()?)
        .args(["check", "--", name])
        .current_dir(folder.path())
        .output()?;
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    let wanted = format!("farshore: site file {name}, [site]: no publication is configured");
    ensure!(output.status.code() == Some(2) && said.starts_with(&wanted), "{said}");
    Ok(())
}

/// Another program's port is named before the start; while this site's own node has it, all is well.
#[test]
fn a_port_that_is_in_use_is_named() -> Result<()> {
    let folder = tempfile::tempdir()?;
    let other = TcpListener::bind("127.0.0.1:0")?;
    let address = other.local_addr()?;
    let site = format!(
        "[site]\nname = \"x\"\ndata_dir = \"d\"\nmonitor = \"{address}\"\n[publication.p]\n\
         source = \"postgres://127.0.0.1:1/none\"\ntables = [\"public.*\"]\n"
    );
    std::fs::write(folder.path().join("site.toml"), site)?;
    let path = folder.path().join("site.toml").display().to_string();
    let wanted = format!("[site] monitor: {address} is in use, so there will be no monitor");
    let (_, said, _) = farshore(&["check", &path])?;
    ensure!(said.contains(&wanted), "{said}");
    std::fs::create_dir(folder.path().join("d"))?;
    let _own = UnixListener::bind(folder.path().join("d/control.sock"))?;
    let (_, said, _) = farshore(&["check", &path])?;
    ensure!(!said.contains("is in use"), "{said}");
    Ok(())
}

/// Where the monitor, or a mirror's standbys, could not be let in, is named before the start.
#[test]
fn an_address_of_another_machine_is_named() -> Result<()> {
    let folder = tempfile::tempdir()?;
    let certificates = folder.path().join("certificates").display().to_string();
    let (code, said, why) = farshore(&["site-cert", "issue", "--dir", &certificates, "x"])?;
    ensure!(code == Some(0), "{said}{why}");
    std::fs::write(folder.path().join("token"), "a token of some length\n")?;
    let busy = TcpListener::bind("127.0.0.1:0")?;
    let standbys = busy.local_addr()?;
    // For documentation (RFC 5737).
    let site = format!(
        "[site]\nname = \"x\"\ndata_dir = \"d\"\nmonitor = \"192.0.2.1:80\"\n\
         monitor_token = \"token\"\nmonitor_certificate = \"{certificates}/x.crt\"\n\
         monitor_key = \"{certificates}/x.key\"\n[mirror.m]\n\
         principal = \"postgres://127.0.0.1:1/none\"\nlisten = \"{standbys}\"\n"
    );
    std::fs::write(folder.path().join("site.toml"), site)?;
    let path = folder.path().join("site.toml").display().to_string();
    let (_, said, why) = farshore(&["check", &path])?;
    for wanted in [
        "[site] monitor: 192.0.2.1:80 cannot be listened on, so there will be no monitor: Cannot \
         assign",
        &format!("[mirror.m] listen: {standbys} is in use, so no standby could connect"),
    ] {
        ensure!(said.contains(wanted), "{wanted}: {said}{why}");
    }
    Ok(())
}
