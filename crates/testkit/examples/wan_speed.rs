//! What the emulated line gives and costs: time there and back, throughput of one and of four TCP
//! connections, and CPU time of the emulator. Prints one line per case.
//!
//! `cargo run --release -p farshore-testkit --example wan_speed -- [RTT_MS [MBIT [SECONDS]]]`
//!
//! With this machine's buffers a single connection may not fill the line: it can have no more under
//! way than they hold. So both are shown, as they are and wide enough.

use anyhow::{Context, Result};
use farshore_testkit::wan::{Wan, WanConfig};
use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::time::{Duration, Instant};

const WIDE_BUFFERS: &str = "4096 131072 67108864";

fn main() -> Result<()> {
    let given: Vec<f64> = std::env::args()
        .skip(1)
        .map(|word| word.parse().with_context(|| format!("{word} is no number")))
        .collect::<Result<_>>()?;
    let rtt_ms = given.first().copied().unwrap_or(77.0);
    let mbit = given.get(1).copied().unwrap_or(1000.0);
    let time = Duration::from_secs_f64(given.get(2).copied().unwrap_or(10.0));
    let config = WanConfig {
        rtt: Duration::from_secs_f64(rtt_ms / 1e3),
        bits_per_second: (mbit > 0.0).then_some((mbit * 1e6) as u64),
        ..WanConfig::default()
    };
    let control = std::fs::read_to_string("/proc/sys/net/ipv4/tcp_congestion_control")?;
    println!("{rtt_ms} ms, {mbit} Mbit/s, congestion control {}", control.trim());
    ping(&Wan::start(config)?)?;
    for connections in [1, 4] {
        let wan = Wan::start(config)?;
        transfer(&wan, "this machine's buffers", connections, time)?;
    }
    for connections in [1, 4] {
        let wan = Wan::start(config)?;
        for place in [wan.near(), wan.far()] {
            place.sysctl("ipv4.tcp_wmem", WIDE_BUFFERS)?;
            place.sysctl("ipv4.tcp_rmem", WIDE_BUFFERS)?;
        }
        transfer(&wan, "buffers wide enough", connections, time)?;
    }
    Ok(())
}

fn connect(wan: &Wan) -> Result<(TcpStream, TcpStream)> {
    let address = (wan.near_address(), 0);
    let listener = wan.near().enter(|| TcpListener::bind(address))??;
    let address = listener.local_addr()?;
    let near = std::thread::spawn(move || listener.accept());
    let far = wan.far().enter(|| TcpStream::connect(address))??;
    let (near, _) = near.join().expect("accept does not panic")?;
    far.set_nodelay(true)?;
    near.set_nodelay(true)?;
    Ok((near, far))
}

fn ping(wan: &Wan) -> Result<()> {
    let (mut near, mut far) = connect(wan)?;
    let mut times = Vec::new();
    std::thread::spawn(move || {
        let mut byte = [0];
        while near.read_exact(&mut byte).and_then(|()| near.write_all(&byte)).is_ok() {}
    });
    for _ in 0..50 {
        let begin = Instant::now();
        far.write_all(b"x")?;
        far.read_exact(&mut [0])?;
        times.push(begin.elapsed().as_secs_f64() * 1e3);
    }
    times.sort_by(f64::total_cmp);
    println!("rtt: min {:.2} median {:.2} max {:.2} ms", times[0], times[25], times[49]);
    Ok(())
}

fn transfer(wan: &Wan, buffers: &str, connections: usize, time: Duration) -> Result<()> {
    let pairs = (0..connections).map(|_| connect(wan)).collect::<Result<Vec<_>>>()?;
    let cpu_before = wan.cpu();
    let begin = Instant::now();
    let mut receivers = Vec::new();
    for (mut near, mut far) in pairs {
        std::thread::spawn(move || {
            let block = vec![7; 1 << 18];
            while begin.elapsed() < time && near.write_all(&block).is_ok() {}
        });
        receivers.push(std::thread::spawn(move || {
            // Bytes in all, and those of the second half, when every connection is at speed.
            let (mut all, mut late) = (0_u64, 0_u64);
            let mut block = vec![0; 1 << 18];
            while let Ok(len @ 1..) = far.read(&mut block) {
                all += len as u64;
                let now = begin.elapsed();
                late += if now > time / 2 && now <= time { len as u64 } else { 0 };
            }
            (all, late)
        }));
    }
    let (mut all, mut late) = (0, 0);
    for receiver in receivers {
        let (more, more_late) = receiver.join().expect("a receiver does not panic");
        all += more;
        late += more_late;
    }
    let seconds = begin.elapsed().as_secs_f64();
    let cpu = (wan.cpu() - cpu_before).as_secs_f64();
    let flow = wan.traffic().near_to_far;
    println!(
        "{buffers}, {connections} TCP: {:.0} Mbit/s in all, {:.0} in the second half; \
         emulator {:.2} CPU s per GB ({:.0} % of a core); dropped {} of {} packets",
        all as f64 * 8e-6 / seconds,
        late as f64 * 8e-6 / (time.as_secs_f64() / 2.0),
        cpu / (all as f64 / 1e9),
        cpu / seconds * 100.0,
        flow.dropped,
        flow.packets + flow.dropped,
    );
    Ok(())
}
