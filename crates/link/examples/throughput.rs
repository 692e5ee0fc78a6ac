//! What a session carries over loopback, and what it costs: MB/s, CPU seconds per GB of both sides
//! together, and how long a small message takes there and back. `cargo run --release -p farshore-link --example throughput [connections [KiB
//! per message [MB in all]]]`

use farshore_link::certificates::Authority;
use farshore_link::{Dialer, Identity, IdentityFiles, LinkOptions, Listener};
use std::sync::Arc;
use std::time::Instant;

fn identity(authority: &Authority, site: &str) -> anyhow::Result<Arc<Identity>> {
    let folder = authority.certificate().with_file_name("sites");
    std::fs::create_dir_all(&folder)?;
    let files = authority.issue(site, 1, &folder)?;
    Ok(Arc::new(Identity::load(&IdentityFiles {
        certificate: files.certificate,
        key: files.key,
        authorities: authority.certificate(),
        revoked: Some(authority.revoked()),
    })?))
}

/// Seconds of CPU that this process has used, in user and system mode.
fn cpu_seconds() -> anyhow::Result<f64> {
    let stat = std::fs::read_to_string("/proc/self/stat")?;
    let (_, fields) = stat.rsplit_once(") ").unwrap_or_default();
    let ticks: Vec<f64> =
        fields.split(' ').skip(11).take(2).map(str::parse).collect::<Result<_, _>>()?;
    // Ticks of 10 ms on every Linux that matters.
    Ok(ticks.iter().sum::<f64>() / 100.0)
}

#[tokio::main]
async fn main() -> anyhow::Result<()> {
    let mut arguments = std::env::args().skip(1);
    let mut number = |default: usize| -> anyhow::Result<usize> {
        Ok(arguments.next().map(|text| text.parse()).transpose()?.unwrap_or(default))
    };
    let (connections, message_kib, total_mb) = (number(4)?, number(256)?, number(4_000)?);
    let folder = tempfile::tempdir()?;
    let authority = Authority::create(folder.path())?;
    let options = LinkOptions { connections, ..LinkOptions::default() };
    let near = identity(&authority, "near")?;
    let listener = Listener::bind("127.0.0.1:0", near, options.clone()).await?;
    let address = listener.local_address().to_string();
    let dialer = Dialer::new(&address, "near", &*identity(&authority, "far")?, options.clone())?;
    let (dialed, accepted) =
        tokio::join!(dialer.open(b""), async { listener.next().await.accept(options).await });
    let ((mut send, mut back), (mut reply, mut receive)) = (dialed?.split(), accepted?.split());

    let mut round_trips = Vec::new();
    for _ in 0..5_000 {
        let began = Instant::now();
        send.send(bytes::Bytes::from_static(&[7; 200])).await?;
        let Some(message) = receive.next().await? else { break };
        reply.send(message).await?;
        back.next().await?;
        round_trips.push(began.elapsed());
    }
    round_trips.sort_unstable();

    let message = bytes::Bytes::from(vec![0x5a; message_kib << 10]);
    let count = total_mb * 1_000_000 / message.len();
    let (began, cpu_before) = (Instant::now(), cpu_seconds()?);
    let sending = tokio::spawn(async move {
        for _ in 0..count {
            send.send(message.clone()).await?;
        }
        let traffic = send.traffic();
        send.finish().await?;
        Ok::<_, farshore_link::LinkError>(traffic)
    });
    let mut bytes = 0;
    while let Some(message) = receive.next().await? {
        bytes += message.len();
    }
    let traffic = sending.await??;
    let (seconds, cpu) = (began.elapsed().as_secs_f64(), cpu_seconds()? - cpu_before);
    let bytes = bytes as f64;
    println!(
        "{connections} connections, {message_kib} KiB per message: {:.0} MB/s, {:.2} CPU s per GB, \
         waited {:.2} s for the peer and {:.2} s for the network of {seconds:.2} s",
        bytes / 1e6 / seconds,
        cpu / (bytes / 1e9),
        traffic.waited_for_peer.as_secs_f64(),
        traffic.waited_for_network.as_secs_f64(),
    );
    println!(
        "200 bytes there and back: median {:?}, 99 % within {:?}",
        round_trips[round_trips.len() / 2],
        round_trips[round_trips.len() * 99 / 100]
    );
    Ok(())
}
