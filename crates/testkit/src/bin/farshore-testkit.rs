//! The test kit for the command line.

use anyhow::{Context, Result, bail, ensure};
use farshore_testkit::wan::{Flow, Queue, Wan, WanConfig, gain_rights};
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use signal_hook::iterator::Signals;
use std::ffi::OsString;
use std::io;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::process::ExitCode;
use std::str::FromStr;
use std::time::Duration;

const USAGE: &str = "\
usage: farshore-testkit wan [OPTION...] -- COMMAND [ARGUMENT...]

Runs a command at the far end of an emulated long line.

  --rtt-ms MS      time there and back, without queues (default 0)
  --jitter-ms MS   at most this much is added to each way by chance (default 0)
  --mbit N         megabits per second each way, on the wire (default: no limit)
  --queue-ms MS    what may wait in front of the line, as time at the rate (default 100)
  --queue-bytes N  the same in bytes
  --loss P         probability that a packet of at most 1500 bytes is lost (default 0)
  --seed S         decides which packets are lost (default 0)
  --report         at the end, say on standard error what went over the line

The command's environment:
  FARSHORE_WAN_NEAR            near's address
  FARSHORE_WAN_FAR             far's address, where the command runs
  FARSHORE_WAN_NEAR_NAMESPACE  starts things at the near end:
                               nsenter --net=$FARSHORE_WAN_NEAR_NAMESPACE COMMAND

It takes root, or a kernel that lets users have namespaces, and /dev/net/tun.
Exit status: the command's; 128 and the signal's number when a signal ended it; 2 wrong arguments;
125 no line here, 126 the command cannot be started.";

const WRONG_ARGUMENTS: u8 = 2;
const NO_LINE: u8 = 125;
const NO_COMMAND: u8 = 126;

struct Arguments {
    config: WanConfig,
    is_report_wanted: bool,
    program: OsString,
    arguments: Vec<OsString>,
}

fn main() -> ExitCode {
    let given: Vec<OsString> = std::env::args_os().skip(1).collect();
    if given.is_empty()
        || given.iter().take_while(|word| *word != "--").any(|word| word == "--help")
    {
        println!("{USAGE}");
        return if given.is_empty() { WRONG_ARGUMENTS.into() } else { ExitCode::SUCCESS };
    }
    let arguments = match parse(given) {
        Ok(arguments) => arguments,
        Err(error) => {
            eprintln!("farshore-testkit: {error:#}\n\n{USAGE}");
            return WRONG_ARGUMENTS.into();
        }
    };
    // While there is one thread only. Where it is not permitted, the line says what is missing.
    let rights = gain_rights();
    match Wan::start(arguments.config) {
        Ok(wan) => run(&wan, &arguments),
        Err(error) => {
            eprintln!("farshore-testkit: {error:#}");
            if let Err(error) = rights {
                eprintln!("farshore-testkit: {error:#}");
            }
            NO_LINE.into()
        }
    }
}

fn parse(given: Vec<OsString>) -> Result<Arguments> {
    let mut words = given.into_iter();
    let verb = words.next().unwrap_or_default();
    ensure!(verb == "wan", "there is no verb {}", verb.display());
    let mut config = WanConfig::default();
    let mut is_report_wanted = false;
    loop {
        let option = words.next().context("a command is missing, after --")?;
        let option = option.to_str().context("an option is no text")?.to_owned();
        match option.as_str() {
            "--" => break,
            "--report" => is_report_wanted = true,
            "--rtt-ms" => config.rtt = milliseconds(&option, words.next())?,
            "--jitter-ms" => config.jitter = milliseconds(&option, words.next())?,
            "--queue-ms" => config.queue = Queue::Time(milliseconds(&option, words.next())?),
            "--queue-bytes" => config.queue = Queue::Bytes(value(&option, words.next())?),
            "--loss" => config.loss = value(&option, words.next())?,
            "--seed" => config.seed = value(&option, words.next())?,
            "--mbit" => {
                let megabits: f64 = value(&option, words.next())?;
                ensure!((1e-6..1e12).contains(&megabits), "--mbit {megabits} is no rate");
                config.bits_per_second = Some((megabits * 1e6) as u64);
            }
            _ => bail!("there is no option {option}"),
        }
    }
    ensure!((0.0..=1.0).contains(&config.loss), "--loss is from 0 to 1, not {}", config.loss);
    let program = words.next().context("a command is missing, after --")?;
    Ok(Arguments { config, is_report_wanted, program, arguments: words.collect() })
}

fn value<T: FromStr>(option: &str, word: Option<OsString>) -> Result<T> {
    let word = word.with_context(|| format!("{option} needs a value"))?;
    let number = word.to_str().and_then(|text| text.parse().ok());
    number.with_context(|| format!("{option} {} is no such number", word.display()))
}

fn milliseconds(option: &str, word: Option<OsString>) -> Result<Duration> {
    let ms: f64 = value(option, word)?;
    Duration::try_from_secs_f64(ms / 1e3).with_context(|| format!("{option} {ms} is no time"))
}

fn run(wan: &Wan, arguments: &Arguments) -> ExitCode {
    let mut command = wan.far().command(&arguments.program);
    command
        .args(&arguments.arguments)
        .env("FARSHORE_WAN_NEAR", wan.near_address().to_string())
        .env("FARSHORE_WAN_FAR", wan.far_address().to_string())
        .env("FARSHORE_WAN_NEAR_NAMESPACE", wan.near().path());
    // SAFETY: the closure runs between fork and exec and makes one system call that is
    // async-signal-safe; it neither allocates nor locks.
    unsafe {
        command.pre_exec(|| {
            // Without the line it can do nothing useful. This thread, whose end sends the signal,
            // is the process's first and last.
            if libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGTERM) != 0 {
                return Err(io::Error::last_os_error());
            }
            Ok(())
        });
    }
    // Taken over before the child is there, so that none ends this process alone.
    let signals = Signals::new([SIGHUP, SIGINT, SIGTERM]);
    let mut child = match command.spawn() {
        Ok(child) => child,
        Err(error) => {
            eprintln!("farshore-testkit: start {}: {error}", arguments.program.display());
            return NO_COMMAND.into();
        }
    };
    match signals {
        Ok(signals) => pass_on(signals, child.id() as i32),
        Err(error) => eprintln!("farshore-testkit: signals are not passed on: {error}"),
    }
    let status = match child.wait() {
        Ok(status) => status,
        Err(error) => {
            eprintln!("farshore-testkit: wait for {}: {error}", arguments.program.display());
            return NO_COMMAND.into();
        }
    };
    if arguments.is_report_wanted {
        report(wan);
    }
    let code = status.code().or_else(|| status.signal().map(|signal| 128 + signal));
    ExitCode::from(code.and_then(|code| u8::try_from(code).ok()).unwrap_or(u8::MAX))
}

fn pass_on(mut signals: Signals, pid: i32) {
    std::thread::spawn(move || {
        for signal in signals.forever() {
            // Ctrl-C reaches the child by the terminal.
            if signal != SIGINT {
                // SAFETY: kill has no memory preconditions. The child is reaped by the main
                // thread, which then ends the process: the id is not another's by then.
                unsafe { libc::kill(pid, signal) };
            }
        }
    });
}

fn report(wan: &Wan) {
    let traffic = wan.traffic();
    let line = |name: &str, flow: Flow| {
        eprintln!(
            "{name}: {} packets, {} bytes; lost {}, dropped {}",
            flow.packets, flow.bytes, flow.lost, flow.dropped
        );
    };
    line("near to far", traffic.near_to_far);
    line("far to near", traffic.far_to_near);
    eprintln!("emulator: {:.3} CPU seconds", wan.cpu().as_secs_f64());
}
