//! `commission disk` beside fio, in turn, on the same disk: run by hand (`make bench-disk`), because
//! what it finds depends on who else uses the disk. It prints ratios and decides nothing.
//!
//! `FARSHORE_DISK` names the folder to measure in, otherwise it is the one for temporary files;
//! `FARSHORE_PAIRS` how many pairs are taken, 9 unless said otherwise.

use farshore_commission::Stop;
use farshore_commission::disk::{DiskOptions, measure};
use farshore_commission::report::At;
use rand::RngExt;
use serde_json::Value;
use std::io::Write;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

const SECONDS: u64 = 1;
const FILE_BYTES: u64 = 256 << 20;

/// How fio has several writes under way.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Engine {
    /// A thread for each, every one of them in a part of the file of its own; with one, `psync`.
    Threads,
    /// One thread that submits and collects.
    Libaio,
}

/// A file as ours is when it is measured: just made, written from end to end, and durable.
fn fill(path: &Path) {
    let mut file = std::fs::File::create(path).unwrap();
    let mut noise = vec![0; 1 << 20];
    rand::rng().fill(&mut noise[..]);
    for _ in 0..FILE_BYTES >> 20 {
        file.write_all(&noise).unwrap();
    }
    file.sync_all().unwrap();
}

/// Writes per second, as fio has them: the same flags, on a file of the same size and past. It is
/// gone afterwards, as ours is.
fn fio(folder: &Path, engine: Engine, size: u32, depth: u32) -> f64 {
    let path = folder.join("fio.dat");
    fill(&path);
    let iops = fio_on(&path, engine, size, depth);
    std::fs::remove_file(&path).unwrap();
    iops
}

fn fio_on(path: &Path, engine: Engine, size: u32, depth: u32) -> f64 {
    let mut command = Command::new("fio");
    command
        .args(["--name=pair", "--rw=write", "--direct=1", "--sync=dsync", "--overwrite=1"])
        .args(["--time_based", "--output-format=json", "--thread", "--group_reporting"])
        .arg(format!("--filename={}", path.display()))
        .arg(format!("--bs={size}"))
        .arg(format!("--runtime={SECONDS}"));
    match engine {
        Engine::Threads => {
            let part = FILE_BYTES / u64::from(depth);
            command.args(["--ioengine=psync", "--iodepth=1"]);
            command.arg(format!("--numjobs={depth}")).arg(format!("--size={part}"));
            command.arg(format!("--offset_increment={part}"));
        }
        Engine::Libaio => {
            command.args(["--ioengine=libaio", "--numjobs=1"]);
            command.arg(format!("--iodepth={depth}")).arg(format!("--size={FILE_BYTES}"));
        }
    }
    let output = command.output().expect("fio: scripts/setup --fio installs it");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let said: Value = serde_json::from_slice(&output.stdout).expect("fio's JSON");
    said["jobs"][0]["write"]["iops"].as_f64().expect("iops")
}

/// Writes per second, as Farshore has them.
fn farshore(folder: &Path, size: u32, depth: u32) -> f64 {
    let options = DiskOptions {
        file_bytes: FILE_BYTES,
        sizes: vec![size],
        depths: vec![depth],
        methods: Vec::new(),
        clients: Vec::new(),
        duration: Duration::from_secs(SECONDS),
        repeats: 1,
        ..DiskOptions::new(folder)
    };
    let (_handle, stop) = Stop::new();
    let report = measure(&options, &stop, &|_| {}).unwrap();
    let section = report.section("writes").unwrap();
    let row = section.row(&[At::Number(size.into()), At::Number(depth.into())]).unwrap();
    row.median("writes_per_s").unwrap()
}

#[test]
#[ignore = "a comparison of times: run it by hand"]
fn beside_fio() {
    let pairs =
        std::env::var("FARSHORE_PAIRS").ok().and_then(|text| text.parse().ok()).unwrap_or(9);
    let base = std::env::var_os("FARSHORE_DISK").map_or_else(std::env::temp_dir, Into::into);
    let folder = tempfile::Builder::new().prefix("farshore-fio").tempdir_in(base).unwrap();
    let cases = [(4 << 10, 1), (64 << 10, 1), (4 << 10, 64), (64 << 10, 64)];
    for (size, depth) in cases {
        for engine in [Engine::Threads, Engine::Libaio] {
            if depth == 1 && engine == Engine::Libaio {
                continue;
            }
            let mut ratios = Vec::new();
            let what = format!("{size} bytes, {depth} under way, fio {engine:?}");
            for pair in 0..pairs {
                // Who goes first changes from pair to pair.
                let theirs_first = (pair % 2 == 1).then(|| fio(folder.path(), engine, size, depth));
                let ours = farshore(folder.path(), size, depth);
                let theirs =
                    theirs_first.unwrap_or_else(|| fio(folder.path(), engine, size, depth));
                println!("{what}: farshore {ours:.0}/s, fio {theirs:.0}/s");
                ratios.push(ours / theirs);
            }
            ratios.sort_by(f64::total_cmp);
            println!(
                "{what}: median ratio {:.3} of {pairs} pairs, {:.3} to {:.3}",
                ratios[pairs / 2],
                ratios[0],
                ratios[pairs - 1]
            );
        }
    }
}
