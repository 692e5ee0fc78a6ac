//! `commission link`: hands the way to the other site, which the node knows, to what measures it.

use super::{
    Output, ProgressLine, ensure_writable, publish, seconds, start_runtime, stop_on_signals,
};
use clap::Args;
use farshore_commission::Error;
use farshore_commission::link::{
    Compressed, Content, Drain, End, Filled, Line, LinkOptions, Replayed, Sample, Session, measure,
};
use farshore_commission::log::LogOptions;
use farshore_commission::units::parse_bytes;
use farshore_node::config::SiteConfig;
use farshore_node::measure::{self as node, Compression, Upstream};
use std::path::PathBuf;
use std::time::Duration;

/// Ways to compress that are tried.
const WAYS: [(Compression, &str); 5] = [
    (Compression::Each(1), "each block, level 1"),
    (Compression::Packs(3), "packs, level 3"),
    (Compression::Packs(6), "packs, level 6"),
    (Compression::Packs(12), "packs, level 12"),
    (Compression::Packs(19), "packs, level 19"),
];

/// Arguments of `commission link`.
#[derive(Args)]
pub struct LinkArguments {
    /// Site file of this site
    pub site: PathBuf,
    /// The other site: NAME as in [upstream.NAME]
    upstream: String,
    /// Connections of a session; by default 1 and as many as the site file has
    #[arg(long, value_delimiter = ',')]
    connections: Vec<u32>,
    /// Seconds that each figure is measured each time
    #[arg(long, default_value_t = 3.0, value_parser = step_seconds)]
    seconds: f64,
    /// How often each figure is measured; compare needs 3
    #[arg(long, default_value_t = 3, value_parser = clap::value_parser!(u32).range(1..=100))]
    repeats: u32,
    /// Bytes that cross in all, about, at most
    #[arg(long, value_name = "SIZE", default_value = "16GB", value_parser = parse_bytes)]
    max_bytes: u64,
    /// Have some of this publication's stored log sent: NAME as it is called at the other site
    #[arg(long, value_name = "NAME")]
    publication: Option<String>,
    /// Or rows of the largest tables of this database (a URL, a conninfo string, or service=NAME)
    #[arg(long, value_name = "URL", conflicts_with = "publication")]
    sample: Option<String>,
    /// MB/s of log that the publisher decodes and its site stores
    #[arg(long, value_name = "MB/S")]
    source_rate: Option<f64>,
    /// MB/s of rows that the target takes, as commission log measures it there
    #[arg(long, value_name = "MB/S")]
    target_rate: Option<f64>,
    /// Where both sites and servers share this machine: processor seconds per GB beside the link
    #[arg(long, value_name = "SECONDS")]
    shared_cpu: Option<f64>,
    /// Bytes of a row; by default as in the sample, or 1000
    #[arg(long, value_name = "BYTES")]
    row_size: Option<u64>,
    /// MB/s that the publisher writes: what lag it would have
    #[arg(long, value_name = "MB/S")]
    load: Option<f64>,
    #[command(flatten)]
    output: Output,
}

fn step_seconds(text: &str) -> Result<f64, String> {
    seconds(text)
        .ok()
        .filter(|value| *value <= 30.0)
        .ok_or_else(|| "a number above 0, at most 30, is wanted".to_owned())
}

/// Measures the line to an upstream site.
pub fn measure_link(config: &SiteConfig, arguments: LinkArguments) -> Result<(), Error> {
    let upstream = Upstream::of(config, &arguments.upstream).map_err(refused)?;
    ensure_writable(arguments.output.html.as_deref())?;
    let mut connections = arguments.connections;
    if connections.is_empty() {
        connections = vec![1, u32::try_from(upstream.connections()).unwrap_or(1)];
        connections.dedup();
    }
    let runtime = start_runtime()?;
    let stop = stop_on_signals(&runtime)?;
    let progress = ProgressLine::new();
    let say = |line: &str| progress.say(line);
    let report = runtime.block_on(async {
        let content = match (arguments.publication, arguments.sample) {
            (Some(publication), _) => Some(Content::Publication(publication)),
            (None, Some(url)) => {
                let server = LogOptions::server(&url)?;
                say("reading rows for a sample");
                let sample = tokio::select! {
                    sample = Sample::read(&server) => sample?,
                    () = stop.requested() => return Err(Error::Interrupted),
                };
                Some(Content::Sample(sample))
            }
            (None, None) => None,
        };
        let options = LinkOptions {
            subject: upstream.name(),
            site: upstream.site().to_owned(),
            connections,
            duration: Duration::from_secs_f64(arguments.seconds),
            repeats: arguments.repeats,
            bytes_max: arguments.max_bytes,
            content,
            drain: Drain {
                source_mb_per_s: arguments.source_rate,
                target_mb_per_s: arguments.target_rate,
                shared_cpu_s_per_gb: arguments.shared_cpu,
                row_bytes: arguments.row_size,
                load_mb_per_s: arguments.load,
            },
        };
        measure(&Way(&upstream), &options, &stop, &say).await
    });
    progress.end();
    publish(&report?, &arguments.output)
}

fn refused(error: node::MeasureError) -> Error {
    Error::Refused(error.to_string())
}

/// The way to the other site.
struct Way<'a>(&'a Upstream);

/// A session with it; the sample is handed over once.
struct Measuring {
    session: node::Measuring,
    has_sample: bool,
}

/// A log's bytes, as they came.
type Log = Vec<bytes::Bytes>;

impl Line for Way<'_> {
    type Session = Measuring;
    type Log = Log;

    async fn open(&self, connections: u32) -> Result<Measuring, Error> {
        let session = self.0.open(connections as usize).await.map_err(refused)?;
        Ok(Measuring { session, has_sample: false })
    }

    fn compress(&self, log: &Log, time: Duration) -> Vec<Compressed> {
        let tried = WAYS.into_iter().map(|(how, name)| (node::compress(log, how, time), name));
        let tried = tried.filter(|(done, _)| done.from > 0 && done.to > 0);
        tried
            .map(|(done, name)| Compressed {
                how: name.to_owned(),
                ratio: done.from as f64 / done.to as f64,
                bytes_per_s: done.from as f64 / done.time.as_secs_f64().max(f64::MIN_POSITIVE),
            })
            .collect()
    }
}

impl Session for Measuring {
    type Log = Log;

    fn there(&self) -> End {
        let host = self.session.host().clone();
        End {
            farshore: host.farshore,
            cores: u32::try_from(host.cores).unwrap_or(u32::MAX),
            receive_buffer_max: host.receive_buffer_max,
            send_buffer_max: host.send_buffer_max,
            congestion_controls: host.congestion_controls,
            compression: host.compression,
            bandwidth: host.bandwidth,
            publications: host.publications,
            following: u32::try_from(host.following).unwrap_or(u32::MAX),
        }
    }

    async fn round_trip(&mut self) -> Result<Duration, Error> {
        self.session.round_trip().await.map_err(refused)
    }

    async fn receive(&mut self, time: Duration) -> Result<Filled, Error> {
        self.session.receive(time).await.map(filled).map_err(refused)
    }

    async fn send(&mut self, time: Duration) -> Result<Filled, Error> {
        self.session.send(time).await.map(filled).map_err(refused)
    }

    async fn replay(
        &mut self,
        content: &Content,
        time: Duration,
    ) -> Result<(Replayed, Log), Error> {
        let replayed = match content {
            Content::Publication(name) => self.session.replay(name, time).await,
            Content::Sample(sample) => {
                if !self.has_sample {
                    let bytes = bytes::Bytes::copy_from_slice(&sample.bytes);
                    self.session.give_sample(&bytes).await.map_err(refused)?;
                    self.has_sample = true;
                }
                self.session.replay_sample(time).await
            }
        };
        let node::Replayed { crossed, ratio, log_bytes, cpu_here, cpu_there, kept } =
            replayed.map_err(refused)?;
        let replayed = Replayed {
            log_bytes_per_s: crossed.rate() * ratio,
            link_bytes_per_s: crossed.rate(),
            log_bytes,
            link_bytes: crossed.all_bytes,
            cpu_here,
            cpu_there,
        };
        Ok((replayed, kept))
    }

    async fn finish(self) -> Result<(), Error> {
        self.session.finish().await.map_err(refused)
    }
}

fn filled(filled: node::Filled) -> Filled {
    Filled {
        bytes_per_s: filled.flow.rate(),
        bytes: filled.flow.all_bytes,
        segments: filled.segments.map(|segments| (segments.sent, segments.resent)),
        round_trip: filled.round_trip,
    }
}
