//! `commission disk` beside fio, in turn, on the same disk: run by hand (`make bench-disk`), because
//! what it finds depends on who else uses the disk. It prints ratios and decides nothing.
//!
//! `FARSHORE_DISK` names the folder to measure in, otherwise it is the one for temporary files;
//! `FARSHORE_PAIRS` how many pairs are taken, 9 unless said otherwise.

use farshore_commission::Stop;
use farshore_commission::disk::{DiskOptions, measure};
use farshore_commission::report::At;
use serde_json::Value;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

const SECONDS: u64 = 2;
const FILE_BYTES: u64 = 256 << 20;

/// Writes per second, as fio has them: the same flags, a file that was written before, and the
/// engine that can have that many under way.
fn fio(folder: &Path, size: u32, depth: u32) -> f64 {
    let engine = if depth == 1 { "psync" } else { "libaio" };
    let output = Command::new("fio")
        .args(["--name=pair", "--rw=write", "--direct=1", "--sync=dsync", "--overwrite=1"])
        .args(["--time_based", "--output-format=json", "--fallocate=none"])
        .arg(format!("--filename={}", folder.join("fio.dat").display()))
        .arg(format!("--size={FILE_BYTES}"))
        .arg(format!("--bs={size}"))
        .arg(format!("--ioengine={engine}"))
        .arg(format!("--iodepth={depth}"))
        .arg(format!("--runtime={SECONDS}"))
        .output()
        .expect("fio: scripts/setup --fio installs it");
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
    for (size, depth) in [(4 << 10, 1), (64 << 10, 1), (4 << 10, 64), (64 << 10, 64)] {
        let mut ratios = Vec::new();
        for pair in 0..pairs {
            // Who goes first changes from pair to pair.
            let (ours, theirs) = if pair % 2 == 0 {
                let ours = farshore(folder.path(), size, depth);
                (ours, fio(folder.path(), size, depth))
            } else {
                let theirs = fio(folder.path(), size, depth);
                (farshore(folder.path(), size, depth), theirs)
            };
            println!("{size} bytes, {depth} under way: farshore {ours:.0}/s, fio {theirs:.0}/s");
            ratios.push(ours / theirs);
        }
        ratios.sort_by(f64::total_cmp);
        println!(
            "{size} bytes, {depth} under way: median ratio {:.3} of {pairs} pairs, {:.3} to {:.3}",
            ratios[pairs / 2],
            ratios[0],
            ratios[pairs - 1]
        );
    }
}
