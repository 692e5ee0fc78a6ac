//! Markers: one row that is updated at a steady rate, a transaction each time, between all the
//! others. When a reader of the target sees number N, all up to N have become visible.

use crate::backlog::SCHEMA;
use crate::contest::{Contender, Ground};
use anyhow::{Context, Result};
use postgres::{Client, Statement};
use std::time::SystemTime;

/// Markers per second.
pub const PER_SECOND: f64 = 200.0;
/// The table of the one row.
const TABLE: &str = "beat";

/// The table's DDL.
pub fn schema() -> String {
    format!(
        "CREATE TABLE {SCHEMA}.{TABLE} (id int PRIMARY KEY, number bigint NOT NULL, \
         committed timestamptz NOT NULL);"
    )
}

/// The row as it is before replication begins: number 0.
pub fn preload() -> String {
    format!("INSERT INTO {SCHEMA}.{TABLE} VALUES (1, 0, now())")
}

/// A marker: its number and the publisher's clock right before its commit, in microseconds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Beat {
    pub number: i64,
    pub committed: i64,
    /// Where the publisher's log ended then.
    pub position: u64,
}

/// Commits markers.
pub struct Beats<'a> {
    source: &'a mut Client,
    update: Statement,
}

impl Beats<'_> {
    /// On a connection to the publisher.
    pub fn of(source: &mut Client) -> Result<Beats<'_>> {
        let update = source.prepare(&format!(
            "UPDATE {SCHEMA}.{TABLE} SET number = $1, committed = clock_timestamp() \
             RETURNING (extract(epoch FROM committed) * 1000000)::bigint, \
             (pg_current_wal_insert_lsn() - '0/0')::bigint"
        ))?;
        Ok(Beats { source, update })
    }

    /// Commits one.
    pub fn commit(&mut self, number: i64) -> Result<Beat> {
        let row = self.source.query_one(&self.update, &[&number]).context("commit a marker")?;
        let position = row.get::<_, i64>(1).unsigned_abs();
        Ok(Beat { number, committed: row.get(0), position })
    }
}

/// What a reader of the target has seen, and when.
pub struct Sightings {
    client: Client,
    query: Statement,
    seen: Vec<(i64, i64)>,
}

impl Sightings {
    /// Connects to a contender's database.
    pub fn connect(ground: &Ground<'_>, contender: Contender) -> Result<Sightings> {
        let [database] = &ground.targets(contender)[..] else {
            anyhow::bail!("latency is measured on one subscriber");
        };
        let mut client = ground.target(database)?;
        let query = client.prepare(&format!("SELECT number FROM {SCHEMA}.{TABLE}"))?;
        Ok(Sightings { client, query, seen: Vec::new() })
    }

    /// The newest marker that is visible now; -1 before there is any.
    pub fn newest(&mut self) -> Result<i64> {
        let row = self.client.query_opt(&self.query, &[])?;
        Ok(row.map_or(-1, |row| row.get(0)))
    }

    /// Looks, and remembers if there is a new one. Returns the newest.
    pub fn look(&mut self) -> Result<i64> {
        let number = self.newest()?;
        if self.seen.last().is_none_or(|(last, _)| number > *last) {
            self.seen.push((number, now_micros()));
        }
        Ok(number)
    }

    /// From commit to the first sight of it or of a later one, in milliseconds, sorted; without
    /// the markers of the first `warm_up` seconds, and without those never seen.
    pub fn latencies_ms(&self, beats: &[Beat], warm_up: f64) -> Vec<f64> {
        latencies_ms(beats, &self.seen, warm_up)
    }
}

/// This machine's clock, which is the publisher's too, in microseconds.
pub fn now_micros() -> i64 {
    let since = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH);
    since.map_or(0, |since| since.as_micros() as i64)
}

fn latencies_ms(beats: &[Beat], seen: &[(i64, i64)], warm_up: f64) -> Vec<f64> {
    let Some(first) = beats.first() else { return Vec::new() };
    let from = first.committed + (warm_up * 1e6) as i64;
    let mut seen = seen.iter();
    let mut sight = seen.next();
    let mut latencies = Vec::with_capacity(beats.len());
    for beat in beats {
        while sight.is_some_and(|(number, _)| *number < beat.number) {
            sight = seen.next();
        }
        if let Some((_, at)) = sight
            && beat.committed >= from
        {
            latencies.push((at - beat.committed) as f64 / 1_000.0);
        }
    }
    latencies.sort_by(f64::total_cmp);
    latencies
}

/// The smallest value that this share of all does not exceed. 0 of none.
pub fn quantile(sorted: &[f64], share: f64) -> f64 {
    let rank = (share * sorted.len() as f64).ceil() as usize;
    sorted.get(rank.saturating_sub(1)).copied().unwrap_or(0.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_marker_is_visible_once_it_or_a_later_one_is_seen() {
        let beats: Vec<Beat> = (1..=4)
            .map(|number| Beat { number, committed: number * 1_000_000, position: 0 })
            .collect();
        let seen = [(0, 10), (1, 1_002_000), (3, 3_005_000), (4, 4_001_000)];
        assert_eq!(latencies_ms(&beats, &seen, 0.0), [1.0, 2.0, 5.0, 1_005.0]);
        assert_eq!(latencies_ms(&beats, &seen, 1.5), [1.0, 5.0]);
        assert!(latencies_ms(&beats, &[], 0.0).is_empty());
    }

    #[test]
    fn quantiles_are_values_that_were_measured() {
        let sorted: Vec<f64> = (1..=200).map(f64::from).collect();
        assert_eq!(quantile(&sorted, 0.5), 100.0);
        assert_eq!(quantile(&sorted, 0.99), 198.0);
        assert_eq!(quantile(&sorted, 1.0), 200.0);
        assert_eq!(quantile(&[], 0.5), 0.0);
    }
}
