use super::*;
use std::sync::Mutex;

/// A line that carries what it is said to.
struct Made {
    ends: End,
    mb_per_s: f64,
    log_mb_per_s: f64,
    round_trip: Duration,
    open: Mutex<Vec<u32>>,
}

struct MadeSession<'a>(&'a Made, u32);

impl<'a> Line for &'a Made {
    type Session = MadeSession<'a>;
    type Log = Vec<u8>;

    async fn open(&self, connections: u32) -> Result<MadeSession<'a>, Error> {
        self.open.lock().unwrap().push(connections);
        Ok(MadeSession(self, connections))
    }

    fn compress(&self, log: &Vec<u8>, _: Duration) -> Vec<Compressed> {
        assert_eq!(log, b"log");
        let how = |how: &str, ratio| Compressed { how: how.to_owned(), ratio, bytes_per_s: 1e8 };
        vec![how("each, level 1", 2.0), how("packs, level 6", 3.0)]
    }
}

impl Session for MadeSession<'_> {
    type Log = Vec<u8>;

    fn there(&self) -> End {
        self.0.ends.clone()
    }

    async fn round_trip(&mut self) -> Result<Duration, Error> {
        Ok(self.0.round_trip)
    }

    async fn receive(&mut self, time: Duration) -> Result<Filled, Error> {
        let bytes_per_s = self.0.mb_per_s * 1e6 * if self.1 == 1 { 0.5 } else { 1.0 };
        let bytes = (bytes_per_s * time.as_secs_f64()) as u64;
        let round_trip = Some((self.0.round_trip * 10, self.0.round_trip * 12));
        Ok(Filled { bytes_per_s, bytes, segments: Some((200, 10)), round_trip })
    }

    async fn send(&mut self, time: Duration) -> Result<Filled, Error> {
        self.receive(time).await
    }

    async fn replay(&mut self, _: &Content, time: Duration) -> Result<(Replayed, Vec<u8>), Error> {
        let log = self.0.log_mb_per_s * 1e6;
        let replayed = Replayed {
            log_bytes_per_s: log,
            link_bytes_per_s: log / 2.0,
            log_bytes: (log * time.as_secs_f64()) as u64,
            link_bytes: (log / 2.0 * time.as_secs_f64()) as u64,
            cpu_here: time / 10,
            cpu_there: time / 2,
        };
        Ok((replayed, b"log".to_vec()))
    }

    async fn finish(self) -> Result<(), Error> {
        Ok(())
    }
}

fn line(mb_per_s: f64, log_mb_per_s: f64) -> Made {
    let ends = End {
        farshore: "1".into(),
        cores: 2,
        receive_buffer_max: Some(6 << 20),
        send_buffer_max: Some(4 << 20),
        compression: 1,
        publications: vec!["sales".into()],
        ..End::default()
    };
    let round_trip = Duration::from_millis(20);
    Made { ends, mb_per_s, log_mb_per_s, round_trip, open: Mutex::default() }
}

fn options() -> LinkOptions {
    LinkOptions {
        subject: "here and there".into(),
        site: "there".into(),
        connections: vec![1, 4],
        duration: Duration::from_secs(1),
        repeats: 3,
        bytes_max: 1 << 40,
        content: Some(Content::Publication("sales".into())),
        drain: Drain::default(),
    }
}

async fn measured(line: &Made, options: &LinkOptions) -> Report {
    let (_handle, stop) = Stop::new();
    measure(&line, options, &stop, &|_| {}).await.unwrap()
}

#[tokio::test]
async fn every_figure_is_where_it_belongs_and_the_slowest_part_counts() {
    let made = line(10.0, 18.0);
    let mut options = options();
    options.drain.load_mb_per_s = Some(9.0);
    let report = measured(&made, &options).await;
    let row = |section: &str, at: &[At]| report.section(section).unwrap().row(at).unwrap().clone();
    let word = |text: &str| At::Word(text.to_owned());
    let idle = row(ROUND_TRIP, &[word("idle")]);
    assert!((idle.median("p50_ms").unwrap() - 20.0).abs() < 0.5, "{idle:?}");
    assert_eq!(idle.median("jitter_ms"), Some(0.0));
    assert_eq!(row(ROUND_TRIP, &[word("full, to here")]).median("max_ms"), Some(240.0));
    let four = row(THROUGHPUT, &[word(DOWN), At::Number(4)]);
    assert_eq!(four.figures["mb_per_s"], [10.0; 3]);
    assert_eq!(four.median("resent_percent"), Some(5.0));
    let log = row(REPLAY, &[word("log of sales")]);
    assert_eq!((log.median("ratio"), log.median("log_mb_per_s")), (Some(2.0), Some(18.0)));
    let packs = row(COMPRESSION, &[word("packs, level 6")]);
    assert_eq!(packs.median("line_mb_per_s"), Some(30.0));
    let all = row(DRAIN, &[word(drain::ALL)]);
    assert_eq!(all.median("mb_per_s"), Some(18.0));
    let said = report.verdict.join("\n");
    for words in [
        "at 18.0 MB/s",
        "18,000 rows/s of 1,000 bytes",
        "uses 50 %",
        "caught up in 60.0 minutes",
        "Weakest part: the line.",
        "compression = 6 at the other site (1 now) makes it 3.00 times smaller",
        "5.00 % of what is sent is sent again",
        "200 ms there and back",
        "with --source-rate",
    ] {
        assert!(said.contains(words) || said.replace('\n', " ").contains(words), "{words}\n{said}");
    }
    // One for the echoes and one for each number of connections, in each round.
    assert_eq!(*made.open.lock().unwrap(), [1, 1, 4, 1, 1, 4, 1, 1, 4]);
    assert_eq!(crate::compare::compare(&report, &report).unwrap().unmatched, [""; 0]);
}

#[tokio::test]
async fn what_is_known_beside_the_link_counts() {
    let made = line(100.0, 80.0);
    let mut options = options();
    options.drain.target_mb_per_s = Some(12.0);
    options.drain.load_mb_per_s = Some(24.0);
    let report = measured(&made, &options).await;
    let said = report.verdict.join("\n");
    for words in ["at 12.0 MB/s", "Weakest part: target", "grow by 30.0 s", "60.0 minutes to drain"]
    {
        assert!(said.contains(words), "{words}\n{said}");
    }
    // 6.25 and 1.25 s of processors per GB for the link, 12.5 s for the rest, on these cores.
    options.drain = Drain { shared_cpu_s_per_gb: Some(12.5), ..Drain::default() };
    let report = measured(&made, &options).await;
    let cores = std::thread::available_parallelism().unwrap().get() as f64;
    let all = drain::all_together(&report).unwrap();
    let shared = 1e3 * drain::SHARED_USED * cores / 20.0;
    assert!((all - shared.min(80.0)).abs() < 1e-6, "{all}");

    options.content = None;
    options.drain = Drain::default();
    let report = measured(&made, &options).await;
    assert_eq!(drain::all_together(&report), Some(100.0));
    assert!(report.section(REPLAY).is_none() && report.section(COMPRESSION).is_none());
    assert!(report.remarks.iter().any(|r| r.contains("--publication")), "{:?}", report.remarks);
}

#[tokio::test]
async fn it_ends_when_enough_has_crossed() {
    let made = line(100.0, 80.0);
    let options = LinkOptions { bytes_max: 120_000_000, ..options() };
    let report = measured(&made, &options).await;
    let moved: f64 = report
        .section(THROUGHPUT)
        .unwrap()
        .rows
        .iter()
        .flat_map(|row| row.figures["moved_mb"].clone())
        .sum();
    assert!(moved <= 170.0, "{moved}");
    assert!(report.remarks.iter().any(|r| r.contains("--max-bytes")), "{:?}", report.remarks);
}

#[test]
fn wrong_wishes_are_refused() {
    let good = options();
    for (wish, said) in [
        (LinkOptions { repeats: 0, ..good.clone() }, "above 0"),
        (LinkOptions { connections: vec![17], ..good.clone() }, "1 to 16"),
        (
            LinkOptions {
                drain: Drain { load_mb_per_s: Some(f64::NAN), ..Drain::default() },
                ..good.clone()
            },
            "above 0",
        ),
    ] {
        let error = wish.check().unwrap_err().to_string();
        assert!(error.contains(said), "{error}");
    }
    good.check().unwrap();
}

#[test]
fn sockets_limit_a_connection_by_the_round_trip() {
    let end = line(1.0, 1.0).ends;
    let limit = socket_limit(&end, &end, 77.0).unwrap();
    assert!((limit - 27.2).abs() < 0.1, "{limit}");
    assert_eq!(socket_limit(&end, &End::default(), 77.0), None);
    assert_eq!(socket_limit(&end, &end, 0.0), None);
}
