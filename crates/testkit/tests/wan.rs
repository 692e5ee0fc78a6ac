//! The emulated line. Lower bounds of time are strict: nothing comes early. Upper bounds are
//! generous: a busy machine is late, and that is no defect.

use anyhow::{Context, Result, ensure};
use farshore_testkit::postgres::{Cluster, Installation};
use farshore_testkit::process::Farshore;
use farshore_testkit::wait::wait_until;
use farshore_testkit::wan::{Direction, Flow, Namespace, Queue, Wan, WanConfig};
use postgres::{Client, NoTls};
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};
use std::io::{ErrorKind, Read, Write};
use std::net::{TcpListener, TcpStream, UdpSocket};
use std::os::unix::fs::MetadataExt;
use std::os::unix::process::ExitStatusExt;
use std::process::Command;
use std::time::{Duration, Instant};

/// Late by more than this is a defect, not a busy machine.
const LATE_MAX: Duration = Duration::from_secs(2);
const PATIENCE: Duration = Duration::from_secs(60);

fn is_available(test: &str) -> bool {
    match Wan::available() {
        Ok(()) => true,
        Err(reason) => {
            farshore_testkit::skip::skipped(test, &reason.to_string());
            false
        }
    }
}

/// A TCP connection: near's end and far's.
fn connect(wan: &Wan) -> Result<(TcpStream, TcpStream)> {
    let address = (wan.near_address(), 0);
    let listener = wan.near().enter(|| TcpListener::bind(address))??;
    let address = listener.local_addr()?;
    let near = std::thread::spawn(move || listener.accept());
    let far = wan.far().enter(|| TcpStream::connect(address))??;
    let (near, _) = near.join().expect("accept does not panic")?;
    for end in [&near, &far] {
        end.set_nodelay(true)?;
        end.set_read_timeout(Some(PATIENCE))?;
        end.set_write_timeout(Some(PATIENCE))?;
    }
    Ok((near, far))
}

/// A byte there and back.
fn round_trip(near: &mut TcpStream, far: &mut TcpStream) -> Result<Duration> {
    let begin = Instant::now();
    far.write_all(b"?")?;
    near.read_exact(&mut [0])?;
    near.write_all(b"!")?;
    far.read_exact(&mut [0])?;
    Ok(begin.elapsed())
}

/// Sends bytes from near to far, and returns what arrived and how long it took.
fn carry(near: &mut TcpStream, far: &mut TcpStream, bytes: &[u8]) -> Result<(Vec<u8>, Duration)> {
    let mut arrived = vec![0; bytes.len()];
    let begin = Instant::now();
    std::thread::scope(|scope| -> Result<()> {
        let sender = scope.spawn(|| near.write_all(bytes));
        far.read_exact(&mut arrived)?;
        Ok(sender.join().expect("a write does not panic")?)
    })?;
    Ok((arrived, begin.elapsed()))
}

fn random_bytes(len: usize) -> Vec<u8> {
    let mut bytes = vec![0; len];
    StdRng::seed_from_u64(len as u64).fill_bytes(&mut bytes);
    bytes
}

#[test]
fn nothing_arrives_before_its_time() -> Result<()> {
    if !is_available("nothing_arrives_before_its_time") {
        return Ok(());
    }
    let rtt = Duration::from_millis(60);
    let wan = Wan::start(WanConfig { rtt, ..WanConfig::default() })?;
    let begin = Instant::now();
    let (mut near, mut far) = connect(&wan)?;
    ensure!(begin.elapsed() >= rtt, "connected within {:?}", begin.elapsed());
    let mut times = Vec::new();
    for _ in 0..10 {
        times.push(round_trip(&mut near, &mut far)?);
    }
    let (least, most) = (times.iter().min().unwrap(), times.iter().max().unwrap());
    println!("round trips of {rtt:?}: {least:?} to {most:?}");
    ensure!(*least >= rtt, "{least:?}");
    ensure!(*least < rtt + LATE_MAX, "{least:?}");

    // Each way has its half.
    for _ in 0..3 {
        let (_, there) = carry(&mut near, &mut far, b"x")?;
        let (_, back) = carry(&mut far, &mut near, b"x")?;
        ensure!(there >= rtt / 2 && back >= rtt / 2, "{there:?} there and {back:?} back");
    }

    let longer = Duration::from_millis(150);
    wan.set_delay(longer);
    let time = round_trip(&mut near, &mut far)?;
    ensure!(time >= longer && time < longer + LATE_MAX, "{time:?}");
    Ok(())
}

#[test]
fn jitter_only_adds() -> Result<()> {
    if !is_available("jitter_only_adds") {
        return Ok(());
    }
    let (rtt, jitter) = (Duration::from_millis(10), Duration::from_millis(40));
    let wan = Wan::start(WanConfig { rtt, jitter, seed: 3, ..WanConfig::default() })?;
    let (mut near, mut far) = connect(&wan)?;
    let mut times = Vec::new();
    for _ in 0..20 {
        times.push(round_trip(&mut near, &mut far)?);
    }
    let (least, most) = (times.iter().min().unwrap(), times.iter().max().unwrap());
    ensure!(*least >= rtt && *most >= rtt + jitter / 4, "{least:?} to {most:?}");
    let bytes = random_bytes(1 << 20);
    ensure!(carry(&mut near, &mut far, &bytes)?.0 == bytes);
    Ok(())
}

#[test]
fn no_direction_is_faster_than_its_rate_and_data_arrive_whole() -> Result<()> {
    if !is_available("no_direction_is_faster_than_its_rate_and_data_arrive_whole") {
        return Ok(());
    }
    let rtt = Duration::from_millis(10);
    // From whole super-segments to single packets.
    for (mbit, len) in [(2_000, 40 << 20), (300, 8 << 20), (40, 2 << 20), (4, 200 << 10)] {
        let rate = mbit * 1_000_000;
        let wan =
            Wan::start(WanConfig { rtt, bits_per_second: Some(rate), ..WanConfig::default() })?;
        let (mut near, mut far) = connect(&wan)?;
        let bytes = random_bytes(len);
        let before = wan.traffic();
        let (arrived, time) = carry(&mut near, &mut far, &bytes)?;
        ensure!(arrived == bytes, "other bytes at {mbit} Mbit/s");
        let flow = wan.traffic().near_to_far;
        // What was dropped was sent again, so it is in the bytes; the last acknowledged bytes may
        // still count a packet that was sent for nothing.
        let carried = flow.bytes - before.near_to_far.bytes;
        ensure!(carried > len as u64, "{carried} of {len}");
        let least = Duration::from_secs_f64(len as f64 * 8.0 / rate as f64) + rtt / 2;
        println!(
            "{len} bytes at {mbit} Mbit/s: {time:?}, at least {least:?}; {carried} bytes on the \
             wire, {} of {} packets dropped",
            flow.dropped, flow.packets
        );
        ensure!(time >= least, "{time:?} at {mbit} Mbit/s");
        ensure!(flow.packets >= (len / 1460) as u64);
        ensure!(flow.bytes / flow.packets <= 1500, "{flow:?}");
    }
    Ok(())
}

#[test]
fn a_rate_can_be_changed() -> Result<()> {
    if !is_available("a_rate_can_be_changed") {
        return Ok(());
    }
    let wan = Wan::start(WanConfig::default())?;
    let (mut near, mut far) = connect(&wan)?;
    let bytes = random_bytes(500_000);
    carry(&mut near, &mut far, &bytes)?;
    wan.set_rate(Some(8_000_000));
    let (_, time) = carry(&mut near, &mut far, &bytes)?;
    ensure!(time >= Duration::from_millis(500), "{time:?}");
    wan.set_rate(None);
    let (arrived, _) = carry(&mut near, &mut far, &bytes)?;
    ensure!(arrived == bytes);
    Ok(())
}

/// Which of `count` datagrams arrive, and what the line counted.
fn datagrams(config: WanConfig, count: u32) -> Result<(Vec<u32>, Flow)> {
    let wan = Wan::start(config)?;
    let bind = |place: &Namespace| place.enter(|| UdpSocket::bind((place.address(), 0)));
    let (from, to) = (bind(wan.near())??, bind(wan.far())??);
    let address = to.local_addr()?;
    // The last words go the other way about: without loss, behind everything else.
    let receiver = std::thread::spawn(move || -> Result<Vec<u32>> {
        let (mut numbers, mut bytes) = (Vec::new(), [0; 100]);
        to.set_read_timeout(Some(PATIENCE))?;
        loop {
            to.recv(&mut bytes)?;
            match u32::from_le_bytes(bytes[..4].try_into()?) {
                u32::MAX => return Ok(numbers),
                number => numbers.push(number),
            }
        }
    });
    for number in 0..count {
        let mut bytes = [0; 100];
        bytes[..4].copy_from_slice(&number.to_le_bytes());
        from.send_to(&bytes, address)?;
        // No more at once than the device holds.
        let sent = number + 1;
        if sent % 100 == 0 || sent == count {
            wait_until("the datagrams to be taken", PATIENCE, &[], || {
                let flow = wan.traffic().near_to_far;
                Ok((flow.packets + flow.dropped >= u64::from(sent)).then_some(()))
            })?;
        }
    }
    wan.set_loss(0.0);
    wan.set_rate(None);
    let flow = wan.traffic().near_to_far;
    from.send_to(&[0xff; 100], address)?;
    Ok((receiver.join().expect("the receiver does not panic")?, flow))
}

#[test]
fn the_seed_decides_what_is_lost_and_it_is_counted() -> Result<()> {
    if !is_available("the_seed_decides_what_is_lost_and_it_is_counted") {
        return Ok(());
    }
    // Slow enough for a receiver that is late, with a queue for all.
    let config = WanConfig {
        rtt: Duration::from_millis(2),
        bits_per_second: Some(2_000_000),
        queue: Queue::Bytes(1 << 20),
        loss: 0.1,
        seed: 7,
        ..WanConfig::default()
    };
    let (first, flow) = datagrams(config, 1000)?;
    ensure!((flow.packets, flow.dropped) == (1000, 0), "{flow:?}");
    ensure!(flow.bytes == 1000 * (100 + 28), "{flow:?}");
    ensure!(first.len() as u64 == 1000 - flow.lost, "{} arrived: {flow:?}", first.len());
    ensure!((50..200).contains(&flow.lost), "{flow:?}");
    ensure!(first.is_sorted());
    let (again, _) = datagrams(config, 1000)?;
    ensure!(first == again, "the same seed lost others");
    let (other, _) = datagrams(WanConfig { seed: 8, ..config }, 1000)?;
    ensure!(first != other, "another seed lost the same");
    let (none, flow) = datagrams(WanConfig { loss: 1.0, ..config }, 100)?;
    ensure!(none.is_empty() && flow.lost == 100, "{flow:?}");
    Ok(())
}

#[test]
fn a_full_queue_drops_and_counts() -> Result<()> {
    if !is_available("a_full_queue_drops_and_counts") {
        return Ok(());
    }
    let (arrived, flow) = datagrams(
        WanConfig {
            bits_per_second: Some(100_000),
            queue: Queue::Bytes(1280),
            ..WanConfig::default()
        },
        200,
    )?;
    ensure!(flow.dropped > 100 && flow.packets >= 10, "{flow:?}");
    ensure!(arrived.len() as u64 == flow.packets, "{} arrived: {flow:?}", arrived.len());
    ensure!(arrived.starts_with(&[0, 1, 2, 3, 4, 5, 6, 7, 8]), "{arrived:?}");
    Ok(())
}

#[test]
fn tcp_mends_what_is_lost() -> Result<()> {
    if !is_available("tcp_mends_what_is_lost") {
        return Ok(());
    }
    let wan = Wan::start(WanConfig {
        rtt: Duration::from_millis(4),
        bits_per_second: Some(1_000_000_000),
        loss: 0.01,
        seed: 1,
        ..WanConfig::default()
    })?;
    let (mut near, mut far) = connect(&wan)?;
    let bytes = random_bytes(8 << 20);
    let (arrived, time) = carry(&mut near, &mut far, &bytes)?;
    ensure!(arrived == bytes);
    let flow = wan.traffic().near_to_far;
    println!("with 1 % of loss: {time:?}, {flow:?}");
    ensure!((20..1000).contains(&flow.lost), "{flow:?}");
    Ok(())
}

#[test]
fn a_cut_is_silent_and_what_follows_goes_on() -> Result<()> {
    if !is_available("a_cut_is_silent_and_what_follows_goes_on") {
        return Ok(());
    }
    let rtt = Duration::from_millis(100);
    let wan = Wan::start(WanConfig { rtt, ..WanConfig::default() })?;
    let (mut near, mut far) = connect(&wan)?;
    round_trip(&mut near, &mut far)?;
    // Under way when the line is cut.
    near.write_all(b"hello")?;
    wan.cut();
    far.set_read_timeout(Some(Duration::from_millis(500)))?;
    let error = far.read(&mut [0; 10]).expect_err("nothing arrives");
    ensure!(error.kind() == ErrorKind::WouldBlock, "not silent: {error}");
    let (address, none) = ((wan.near_address(), 9), Duration::from_millis(300));
    let refused = wan.far().enter(|| TcpStream::connect_timeout(&address.into(), none))?;
    ensure!(refused.expect_err("nobody answers").kind() == ErrorKind::TimedOut);
    ensure!(wan.traffic().near_to_far.cut > 0 && wan.traffic().far_to_near.cut > 0);
    near.write_all(b" again")?;
    wan.restore();
    far.set_read_timeout(Some(PATIENCE))?;
    let mut text = [0; 11];
    far.read_exact(&mut text)?;
    ensure!(&text == b"hello again");
    round_trip(&mut near, &mut far)?;

    // One way only: what near says arrives, and nobody hears that it did.
    wan.cut_direction(Direction::FarToNear);
    near.write_all(b"x")?;
    far.read_exact(&mut [0])?;
    near.set_read_timeout(Some(Duration::from_millis(300)))?;
    far.write_all(b"y")?;
    ensure!(near.read(&mut [0]).is_err());
    wan.restore();
    near.set_read_timeout(Some(PATIENCE))?;
    near.read_exact(&mut [0])?;
    Ok(())
}

#[test]
fn a_flipped_bit_arrives_once_and_tcp_does_not_notice() -> Result<()> {
    if !is_available("a_flipped_bit_arrives_once_and_tcp_does_not_notice") {
        return Ok(());
    }
    let wan = Wan::start(WanConfig { seed: 5, ..WanConfig::default() })?;
    let (mut near, mut far) = connect(&wan)?;
    let bytes = random_bytes(1 << 20);
    let differing = |arrived: &[u8]| -> u32 {
        arrived.iter().zip(&bytes).map(|(a, b)| (a ^ b).count_ones()).sum()
    };
    wan.flip_next_bit(Direction::NearToFar);
    for bits in [1, 0] {
        let (arrived, _) = carry(&mut near, &mut far, &bytes)?;
        ensure!(differing(&arrived) == bits, "{} bits differ", differing(&arrived));
    }
    for _ in 0..3 {
        wan.flip_next_bit(Direction::FarToNear);
    }
    let (arrived, _) = carry(&mut near, &mut far, &bytes)?;
    ensure!(differing(&arrived) == 0, "the other direction");
    let (arrived, _) = carry(&mut far, &mut near, &bytes)?;
    ensure!(differing(&arrived) == 3, "{} bits differ", differing(&arrived));
    let traffic = wan.traffic();
    ensure!((traffic.near_to_far.flipped_bits, traffic.far_to_near.flipped_bits) == (1, 3));
    Ok(())
}

#[test]
fn a_command_runs_at_its_end() -> Result<()> {
    if !is_available("a_command_runs_at_its_end") {
        return Ok(());
    }
    let wan = Wan::start(WanConfig::default())?;
    for place in [wan.near(), wan.far()] {
        let output = place.command("cat").arg("/proc/net/fib_trie").output()?;
        let routes = String::from_utf8(output.stdout)?;
        ensure!(routes.contains(&place.address().to_string()), "{routes}");
        let status = place.command("sh").args(["-c", "exit 7"]).status()?;
        ensure!(status.code() == Some(7));
        let mut command = Command::new("sh");
        command.args(["-c", "grep -q wan0 /proc/net/dev && exit 8"]);
        let ended = place.spawn(command, libc::SIGKILL)?.wait(PATIENCE)?;
        ensure!(ended.context("it still runs")?.status.code() == Some(8));
    }
    ensure!(wan.far().enter(|| UdpSocket::bind((wan.near_address(), 0)).is_err())?);
    ensure!(UdpSocket::bind((wan.near_address(), 0)).is_err(), "the test itself is elsewhere");
    wan.far().sysctl("ipv4.tcp_congestion_control", "reno")?;
    ensure!(wan.far().sysctl("ipv4.tcp_congestion_control", "wishful").is_err());
    Ok(())
}

#[test]
fn the_verb_passes_on_what_its_command_ends_with() -> Result<()> {
    if !is_available("the_verb_passes_on_what_its_command_ends_with") {
        return Ok(());
    }
    let verb = |arguments: &[&str], script: &str| {
        Command::new(env!("CARGO_BIN_EXE_farshore-testkit"))
            .arg("wan")
            .args(arguments)
            .args(["--", "sh", "-c", script])
            .output()
    };
    let options =
        "--rtt-ms 20 --mbit 1000 --loss 0.0 --queue-ms 50 --jitter-ms 0.5 --seed 3 --report";
    let options: Vec<&str> = options.split(' ').collect();
    let script =
        "grep -q $FARSHORE_WAN_FAR /proc/net/fib_trie && echo $FARSHORE_WAN_NEAR && exit 7";
    let output = verb(&options, script)?;
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    ensure!(output.status.code() == Some(7), "{}: {said}", output.status);
    ensure!(output.stdout == b"10.77.0.1\n");
    ensure!(said.contains("near to far: 0 packets"), "{said}");
    ensure!(verb(&[], "kill -TERM $$")?.status.code() == Some(128 + libc::SIGTERM));
    ensure!(verb(&["--loss", "2"], "true")?.status.code() == Some(2));
    ensure!(verb(&["--rtt"], "true")?.status.code() == Some(2));
    let mut missing = Command::new(env!("CARGO_BIN_EXE_farshore-testkit"));
    ensure!(missing.args(["wan", "--", "/no/such/program"]).output()?.status.code() == Some(126));
    Ok(())
}

#[test]
fn namespaces_and_devices_are_gone_when_dropped() -> Result<()> {
    if !is_available("namespaces_and_devices_are_gone_when_dropped") {
        return Ok(());
    }
    let wan = Wan::start(WanConfig::default())?;
    let inodes = [wan.near(), wan.far()].map(|place| {
        place.enter(|| std::fs::metadata("/proc/thread-self/ns/net").map(|file| file.ino()))
    });
    let [near, far] = inodes.map(|inode| inode.expect("enter").expect("read the link"));
    ensure!(is_held(near) && is_held(far));
    let far_kept = wan.far().clone();
    drop(wan);
    // A thread that has ended, or a child of another test that has not yet become its program,
    // may hold on for a moment.
    let gone = |inode| move || Ok((!is_held(inode)).then_some(()));
    wait_until("the near namespace to go", PATIENCE, &[], gone(near))?;
    wait_until("the device to go", PATIENCE, &[], || {
        let devices = far_kept.enter(|| std::fs::read_to_string("/proc/thread-self/net/dev"))??;
        ensure!(devices.contains("lo:"), "{devices}");
        Ok((!devices.contains("wan0")).then_some(()))
    })?;
    drop(far_kept);
    wait_until("the far namespace to go", PATIENCE, &[], gone(far))
}

/// Whether a thread of this process is in the network namespace, or a descriptor holds it.
fn is_held(inode: u64) -> bool {
    let links = |directory: &str, suffix: &str| -> Vec<_> {
        let entries = std::fs::read_dir(directory).into_iter().flatten().flatten();
        entries.map(|entry| entry.path().join(suffix)).collect()
    };
    let tasks = links("/proc/self/task", "ns/net");
    let descriptors = links("/proc/self/fd", "").into_iter().map(|path| {
        // Without the slash that joining nothing leaves.
        path.components().collect()
    });
    let name = format!("net:[{inode}]");
    tasks.into_iter().chain(descriptors).any(|path: std::path::PathBuf| {
        std::fs::read_link(path).is_ok_and(|target| target.as_os_str() == name.as_str())
    })
}

#[test]
fn servers_stand_at_both_ends() -> Result<()> {
    if !is_available("servers_stand_at_both_ends") {
        return Ok(());
    }
    let rtt = Duration::from_millis(30);
    let wan = Wan::start(WanConfig { rtt, ..WanConfig::default() })?;
    let installation = Installation::find(18)?;
    let mut near = Cluster::builder(&installation).place(wan.near()).start()?;
    let far = Cluster::builder(&installation).place(wan.far()).scram_password("s3cret").start()?;
    // This process is at neither end.
    near.execute_script("CREATE TABLE t AS SELECT 1 AS id")?;
    ensure!(Client::connect(&near.url("postgres"), NoTls).is_ok());
    // From the other end, and from the same.
    for (place, least) in [(wan.far(), rtt), (wan.near(), Duration::ZERO)] {
        let url = near.url_from(place, "postgres");
        let time = place.enter(|| -> Result<Duration> {
            let mut client = Client::connect(&url, NoTls)?;
            let begin = Instant::now();
            client.simple_query("SELECT id FROM t")?;
            Ok(begin.elapsed())
        })??;
        ensure!(time >= least, "{time:?} from {}", place.side());
    }
    near.kill9()?;
    near.start()?;
    near.restart()?;
    near.execute_script("SELECT id FROM t")?;
    ensure!(wan.traffic().near_to_far.bytes > 0);

    let right = far.url_from(wan.near(), "postgres");
    wan.near().enter(|| Client::connect(&right, NoTls).map(drop))??;
    let wrong = right.replace("s3cret", "guess");
    ensure!(wan.near().enter(|| Client::connect(&wrong, NoTls).is_err())?);
    far.execute_script("SELECT 1")?;

    // A command that changes its user (where this process may), and runs at an end.
    let mut version = installation.command("postgres");
    let output = wan.far().enter(|| version.arg("--version").output())??;
    ensure!(output.status.success());
    Ok(())
}

#[test]
fn a_farshore_stands_at_an_end() -> Result<()> {
    if !is_available("a_farshore_stands_at_an_end") {
        return Ok(());
    }
    // Any program will do.
    let directory = tempfile::tempdir()?;
    let (binary, site) = (directory.path().join("farshore"), directory.path().join("site.toml"));
    std::fs::write(&binary, "#!/bin/sh\necho $1; cat /proc/net/fib_trie\nkill -9 $$\n")?;
    Command::new("chmod").arg("+x").arg(&binary).status()?;
    let wan = Wan::start(WanConfig::default())?;
    let mut farshore = Farshore::builder(&binary, &site).place(wan.far()).start()?;
    let ended = farshore.wait(PATIENCE)?.context("it still runs")?;
    ensure!(ended.status.signal() == Some(libc::SIGKILL));
    let log = std::fs::read_to_string(farshore.log_path())?;
    ensure!(log.starts_with("run\n") && log.contains("10.77.0.2"), "{log}");
    Ok(())
}
