//! A pair with the prefix checker's workload running through it, and readers watching the
//! subscriber all the time.

use crate::{DATABASE, Link, Pair, Upstream};
use anyhow::{Context, Result, ensure};
use farshore_testkit::postgres::Cluster;
use farshore_testkit::prefix::{
    Oracle, Samplers, Workload, WorkloadOptions, check, create_tables, table_names,
};
use farshore_testkit::wan::Wan;
use farshore_testkit::{checksum, seed};
use std::time::Duration;

/// A pair under load: publication `p` of the workload's tables, subscription `s`.
pub struct Checked {
    // Readers and writers end before their servers.
    samplers: Samplers,
    workload: Workload,
    oracle: Oracle,
    /// The servers and the site.
    pub pair: Pair,
    /// The publication's site, where that is another one.
    pub upstream: Option<Upstream>,
}

/// Whether publication and subscription are at one site.
#[derive(Clone, Copy)]
pub enum Sites<'a> {
    /// They are.
    One,
    /// The publication's site is upstream of the subscription's.
    Two,
    /// And a line is between them.
    Across(&'a Wan),
}

impl Checked {
    /// Starts the writers, the node and, once it streams, the readers. `tables` are published
    /// beside the workload's, and `schema` makes them on both servers.
    ///
    /// # Errors
    /// When a server refuses, or the subscription does not come to stream.
    pub fn start(
        publisher: Cluster,
        subscriber: Cluster,
        tables: &[&str],
        schema: &str,
    ) -> Result<Checked> {
        Checked::start_at(Sites::One, publisher, None, subscriber, tables, schema)
    }

    /// As [`Checked::start`], with the publication at a site of its own.
    ///
    /// # Errors
    /// As [`Checked::start`].
    pub fn start_far(publisher: Cluster, subscriber: Cluster) -> Result<Checked> {
        Checked::start_at(Sites::Two, publisher, None, subscriber, &[], "")
    }

    /// As [`Checked::start_far`], with a line between the sites; the publisher is at its near end
    /// and the subscriber at its far one.
    ///
    /// # Errors
    /// As [`Checked::start`].
    pub fn start_across(wan: &Wan, publisher: Cluster, subscriber: Cluster) -> Result<Checked> {
        Checked::start_at(Sites::Across(wan), publisher, None, subscriber, &[], "")
    }

    /// As [`Checked::start`], with writers and node that reach the publisher through a link.
    ///
    /// # Errors
    /// As [`Checked::start`].
    pub fn start_through(
        publisher: Cluster,
        link: Option<&Link>,
        subscriber: Cluster,
        tables: &[&str],
        schema: &str,
    ) -> Result<Checked> {
        Checked::start_at(Sites::One, publisher, link, subscriber, tables, schema)
    }

    fn start_at(
        sites: Sites<'_>,
        publisher: Cluster,
        link: Option<&Link>,
        subscriber: Cluster,
        tables: &[&str],
        schema: &str,
    ) -> Result<Checked> {
        let source = publisher.url(DATABASE);
        let source = match link {
            Some(link) => source.replace(&publisher.port().to_string(), &link.port().to_string()),
            None => source,
        };
        let mut pair = Pair::of(publisher, subscriber)?;
        pair.on_both(schema)?;
        create_tables(&mut pair.publisher.connect()?)?;
        create_tables(&mut pair.subscriber.connect()?)?;
        let oracle = Oracle::create(&mut pair.publisher.connect()?)?;
        Workload::fill(&mut pair.publisher.connect()?)?;
        let seed = seed();
        println!("FARSHORE_SEED={seed}");
        let options = WorkloadOptions {
            writers: 2,
            interval: Duration::from_millis(15),
            ..WorkloadOptions::new(seed)
        };
        let workload = Workload::start(&source, &options);
        let patterns: Vec<&str> = tables.iter().copied().chain(["prefix.*"]).collect();
        pair.add_publication("p", &patterns, "segment_size = \"64KB\"")?;
        if link.is_some() {
            pair.site.replace(&pair.publisher.url(DATABASE), &source)?;
        }
        let target = pair.subscriber.url(DATABASE);
        let place = if let Sites::Across(wan) = sites { Some(wan.far()) } else { None };
        let target_of_site =
            place.map_or_else(|| target.clone(), |far| pair.subscriber.url_from(far, DATABASE));
        pair.add_subscription("s", "p", &target_of_site)?;
        let mut upstream = match sites {
            Sites::One => None,
            Sites::Two => Some(Upstream::split(&mut pair)?),
            Sites::Across(wan) => Some(Upstream::split_across(&mut pair, Some(wan))?),
        };
        if let Some(upstream) = &mut upstream {
            upstream.site.start()?;
        }
        pair.site.start()?;
        pair.await_arrival()?;
        let samplers = Samplers::start(&target, 1, Duration::from_millis(20));
        Ok(Checked { samplers, workload, oracle, pair, upstream })
    }

    /// Waits until the writers have committed `more` transactions.
    ///
    /// # Errors
    /// When a writer fails.
    pub fn await_commits(&mut self, more: u64) -> Result<()> {
        let goal = self.workload.summary().committed + more;
        let workload = &self.workload;
        farshore_testkit::wait::wait_until("the writers", Duration::from_secs(60), &[], || {
            workload.ensure_running()?;
            Ok((workload.summary().committed >= goal).then_some(()))
        })
    }

    /// Ends the load, waits until everything has arrived, checks all that the readers saw, and
    /// stops the node. Returns the servers.
    ///
    /// # Errors
    /// When a reader saw a state that is no prefix, or the end is not equal.
    pub fn finish(mut self) -> Result<Pair> {
        let written = self.workload.stop()?;
        self.pair.await_arrival()?;
        let source = self.pair.publisher.url(DATABASE);
        let target = self.pair.subscriber.url(DATABASE);
        checksum::assert_equal(&source, &target, &table_names())?;
        let samples = self.samplers.stop()?;
        ensure!(!samples.is_empty(), "no reader ever saw the subscriber");
        let history = self.oracle.history(&mut self.pair.publisher.connect()?)?;
        let summary = check(&history, &samples)
            .map_err(|violation| anyhow::Error::new(*violation))
            .context("what readers saw")?;
        println!("{written}; {summary}");
        self.pair.site.stop()?;
        if let Some(upstream) = &mut self.upstream {
            upstream.site.stop()?;
        }
        Ok(self.pair)
    }
}
