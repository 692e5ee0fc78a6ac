//! A seeded schedule of crashes among farshore, publisher and subscriber, and its execution.

use crate::postgres::Cluster;
use crate::process::{Farshore, FarshoreBuilder};
use crate::wait::wait_until;
use anyhow::{Context, Result};
use postgres::{Client, NoTls};
use rand::rngs::StdRng;
use rand::seq::{IndexedRandom, SliceRandom};
use rand::{RngExt, SeedableRng};
use std::fmt;
use std::time::{Duration, Instant};

/// How long progress may take after a crash, restarts and back-off included.
const PROGRESS_TIMEOUT: Duration = Duration::from_secs(60);
/// How long a crash point may take to be reached.
pub const POINT_TIMEOUT: Duration = Duration::from_secs(40);

/// A place in farshore's code at which it ends itself by SIGKILL.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CrashPoint {
    /// Its name, as `farshore fault-points` lists it.
    pub name: String,
    /// At which passage, from 1.
    pub nth: u32,
    /// Whether the bytes that no fsync has covered are lost too, as in a power cut.
    pub cut: bool,
}

impl fmt::Display for CrashPoint {
    /// The form of the environment variable `FARSHORE_CRASH`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let CrashPoint { name, nth, cut } = self;
        write!(f, "{name}:{nth}{}", if *cut { ":cut" } else { "" })
    }
}

impl CrashPoint {
    /// Whether the point is passed only before a subscription streams: while the slot is made
    /// and the tables are copied.
    pub fn is_before_streaming(name: &str) -> bool {
        name.starts_with("snapshot.") || name.ends_with("-slot-created")
    }
}

/// Who crashes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Victim {
    /// Farshore, at any moment.
    Farshore,
    /// Farshore, at a certain point.
    FarshoreAt(CrashPoint),
    /// Every process of the publisher.
    Publisher,
    /// Every process of the subscriber.
    Subscriber,
}

impl fmt::Display for Victim {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Victim::Farshore => f.write_str("farshore"),
            Victim::FarshoreAt(point) => write!(f, "farshore at {point}"),
            Victim::Publisher => f.write_str("the publisher"),
            Victim::Subscriber => f.write_str("the subscriber"),
        }
    }
}

/// One crash.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Kill {
    /// Who.
    pub victim: Victim,
    /// Whether something must have been applied since the crash before.
    pub after_progress: bool,
    /// Time to let pass then.
    pub delay: Duration,
    /// Time until the restart.
    pub down: Duration,
}

/// Crashes in order.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Schedule {
    /// The crashes.
    pub kills: Vec<Kill>,
}

impl Schedule {
    /// Draws `kills` crashes: one at each of `points` (as far as `kills` reaches), the others of
    /// farshore, publisher and subscriber at random moments, all mixed.
    pub fn draw(seed: u64, kills: usize, points: &[String]) -> Schedule {
        let mut rng = StdRng::seed_from_u64(seed);
        let mut points: Vec<&String> = points.iter().collect();
        points.shuffle(&mut rng);
        let at_points = points.into_iter().map(Some).chain(std::iter::repeat(None));
        let mut victims: Vec<Victim> = at_points
            .take(kills)
            .map(|point| match point {
                Some(name) => Victim::FarshoreAt(draw_point(&mut rng, name)),
                None => [Victim::Farshore, Victim::Publisher, Victim::Subscriber]
                    .choose(&mut rng)
                    .cloned()
                    .unwrap_or(Victim::Farshore),
            })
            .collect();
        victims.shuffle(&mut rng);
        Schedule::of(&mut rng, victims)
    }

    /// These victims in this order, at random moments.
    pub fn of_victims(seed: u64, victims: Vec<Victim>) -> Schedule {
        Schedule::of(&mut StdRng::seed_from_u64(seed), victims)
    }

    fn of(rng: &mut StdRng, victims: Vec<Victim>) -> Schedule {
        let mut millis = |max: u64| Duration::from_millis(rng.random_range(0..=max));
        let kill = |victim| {
            let (delay, down) = (millis(300), millis(200));
            // Half of the crashes come while the one before is still being recovered from.
            let after_progress = millis(1) == Duration::ZERO;
            Kill { victim, after_progress, delay, down }
        };
        Schedule { kills: victims.into_iter().map(kill).collect() }
    }
}

fn draw_point(rng: &mut StdRng, name: &str) -> CrashPoint {
    let drawn = *[1, 1, 2, 3, 5].choose(rng).unwrap_or(&1);
    // Passed now and then only: a later passage might not come in time.
    let is_rare = ["-drop", "-roll", "-abort"].iter().any(|end| name.ends_with(end));
    let nth = if is_rare { 1 } else { drawn };
    CrashPoint { name: name.to_owned(), nth, cut: rng.random_bool(0.5) }
}

/// Farshore did not do its part: not an error of the test.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Trouble {
    /// It ended although nobody killed it.
    Ended(String),
    /// It runs and nothing comes through.
    NoProgress(String),
}

impl fmt::Display for Trouble {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Trouble::Ended(how) => write!(f, "farshore ended by itself: {how}"),
            Trouble::NoProgress(how) => write!(f, "farshore makes no progress: {how}"),
        }
    }
}

impl std::error::Error for Trouble {}

/// Who takes part.
pub struct Actors<'a> {
    /// The source.
    pub publisher: &'a mut Cluster,
    /// The target.
    pub subscriber: &'a mut Cluster,
    /// How to start farshore, without a crash point.
    pub builder: &'a FarshoreBuilder,
    /// Farshore as it runs now.
    pub farshore: &'a mut Farshore,
    /// A number that grows as farshore applies; `None` when it cannot be known now.
    pub progress: &'a mut dyn FnMut() -> Result<Option<u64>>,
}

/// What became of a schedule.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ChaosSummary {
    /// Crashes that took place, as they were meant to.
    pub kills: usize,
    /// Crash points that farshore did not come to in time ([`POINT_TIMEOUT`]); it was killed
    /// there and then instead, which is not counted.
    pub points_not_reached: Vec<String>,
}

impl Actors<'_> {
    /// Executes a schedule; `say` is told each crash. In the end all three run.
    ///
    /// # Errors
    /// [`Trouble`] when farshore ends by itself or makes no progress; anything else is a failure
    /// of the test's own means.
    pub fn execute(
        &mut self,
        schedule: &Schedule,
        say: &mut dyn FnMut(&str),
    ) -> Result<ChaosSummary> {
        let mut summary = ChaosSummary::default();
        let mut mark = 0;
        for (number, kill) in schedule.kills.iter().enumerate() {
            if kill.after_progress {
                self.await_progress(mark)?;
            }
            pause(kill.delay);
            self.check_running()?;
            mark = (self.progress)()?.unwrap_or(mark);
            say(&format!("kill {} of {}: {}", number + 1, schedule.kills.len(), kill.victim));
            match &kill.victim {
                Victim::Farshore => {
                    self.farshore.kill9()?;
                    pause(kill.down);
                    *self.farshore = self.builder.start()?;
                }
                Victim::FarshoreAt(point) => {
                    if !self.crash_at(point, kill.down)? {
                        say(&format!("{point} was not reached"));
                        summary.points_not_reached.push(point.name.clone());
                        continue;
                    }
                }
                Victim::Publisher => kill_and_start(self.publisher, kill.down)?,
                Victim::Subscriber => kill_and_start(self.subscriber, kill.down)?,
            }
            summary.kills += 1;
        }
        self.await_progress(mark)?;
        Ok(summary)
    }

    /// Restarts farshore such that it crashes at a point, waits for that, and starts it again.
    /// Half of the first stops are orderly.
    fn crash_at(&mut self, point: &CrashPoint, down: Duration) -> Result<bool> {
        if point.nth.is_multiple_of(2) {
            self.farshore.sigterm(Duration::from_secs(20))?;
        } else {
            self.farshore.kill9()?;
        }
        // Trouble that keeps the point from being reached is told at once.
        let progress = &mut *self.progress;
        let mut meanwhile = || progress().map(drop);
        let reached = start_and_crash(self.builder, point, POINT_TIMEOUT, &mut meanwhile)?;
        pause(down);
        *self.farshore = self.builder.start()?;
        Ok(reached)
    }

    fn check_running(&mut self) -> Result<()> {
        match self.farshore.exit_status()? {
            Some(status) => {
                Err(Trouble::Ended(format!("{status}{}", self.farshore.log_tail())).into())
            }
            None => Ok(()),
        }
    }

    /// Waits until the number is above `mark`.
    ///
    /// # Errors
    /// As [`Actors::execute`].
    pub fn await_progress(&mut self, mark: u64) -> Result<()> {
        let begin = Instant::now();
        wait_until("progress", PROGRESS_TIMEOUT * 2, &[], || {
            if (self.progress)()?.is_some_and(|now| now > mark) {
                return Ok(Some(()));
            }
            self.check_running()?;
            if begin.elapsed() > PROGRESS_TIMEOUT {
                let tail = self.farshore.log_tail();
                let how = format!("still at {mark} after {PROGRESS_TIMEOUT:?}{tail}");
                return Err(Trouble::NoProgress(how).into());
            }
            Ok(None)
        })
    }
}

/// Starts farshore such that it crashes at a point, and waits for at most `timeout` until it
/// does; else kills it and returns `false`. `meanwhile` is asked now and then.
///
/// # Errors
/// [`Trouble`] when it ends in another way, and what `meanwhile` fails with.
pub fn start_and_crash(
    builder: &FarshoreBuilder,
    point: &CrashPoint,
    timeout: Duration,
    meanwhile: &mut dyn FnMut() -> Result<()>,
) -> Result<bool> {
    const LOOK_EVERY: Duration = Duration::from_millis(250);
    let mut farshore = builder.clone().env("FARSHORE_CRASH", &point.to_string()).start()?;
    let begin = Instant::now();
    let ended = loop {
        let left = timeout.saturating_sub(begin.elapsed());
        let ended = farshore.wait(left.min(LOOK_EVERY))?;
        if ended.is_some() || left.is_zero() {
            break ended;
        }
        meanwhile()?;
    };
    match ended {
        Some(ended) if farshore.was_killed_at(&point.name, ended.status) => Ok(true),
        Some(ended) => {
            let tail = farshore.log_tail();
            Err(Trouble::Ended(format!("{} instead of at {point}{tail}", ended.status)).into())
        }
        None => {
            farshore.kill9()?;
            Ok(false)
        }
    }
}

fn kill_and_start(cluster: &mut Cluster, down: Duration) -> Result<()> {
    cluster.kill9()?;
    pause(down);
    cluster.start()
}

/// The moment of a crash is random; this lets the time until then pass.
fn pause(duration: Duration) {
    let deadline = Instant::now() + duration;
    while let Some(left) = deadline.checked_duration_since(Instant::now())
        && !left.is_zero()
    {
        std::thread::park_timeout(left);
    }
}

/// What farshore writes about a subscription in its target, `farshore.subscription`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SubscriptionState {
    /// As `streaming`.
    pub state: String,
    /// The LSN up to which commits are applied; 0 while there is none.
    pub applied_lsn: u64,
}

/// Reads a subscription's row; `None` while the target is down, or there is no such table or row.
///
/// # Errors
/// When the server says something else.
pub fn subscription_state(target_url: &str, name: &str) -> Result<Option<SubscriptionState>> {
    let Ok(mut client) = Client::connect(target_url, NoTls) else { return Ok(None) };
    let query = "SELECT state::text, coalesce(applied - '0/0', 0)::bigint \
                 FROM farshore.subscription WHERE name = $1";
    match client.query_opt(query, &[&name]) {
        Ok(row) => Ok(row.map(|row| SubscriptionState {
            state: row.get(0),
            applied_lsn: row.get::<_, i64>(1).max(0) as u64,
        })),
        // 3F000 and 42P01: no schema or table yet. 57 and no code: the server went away.
        Err(error) => match error.code().map(|code| &code.code()[..2]) {
            Some("3F" | "42" | "57" | "08") | None => Ok(None),
            Some(_) => Err(error).context("read farshore.subscription"),
        },
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::postgres::Installation;
    use std::os::unix::fs::PermissionsExt;

    fn points() -> Vec<String> {
        ["a.x", "b.y", "c.z"].map(str::to_owned).to_vec()
    }

    #[test]
    fn a_seed_gives_one_schedule_that_visits_every_point() {
        let schedule = Schedule::draw(5, 30, &points());
        assert_eq!(schedule, Schedule::draw(5, 30, &points()));
        assert_ne!(schedule, Schedule::draw(6, 30, &points()));
        assert_eq!(schedule.kills.len(), 30);
        for point in points() {
            let is_at =
                |kill: &&Kill| matches!(&kill.victim, Victim::FarshoreAt(p) if p.name == point);
            assert_eq!(schedule.kills.iter().filter(is_at).count(), 1);
        }
        for victim in [Victim::Farshore, Victim::Publisher, Victim::Subscriber] {
            assert!(schedule.kills.iter().any(|kill| kill.victim == victim), "{victim}");
        }
        assert_eq!(Schedule::draw(5, 2, &points()).kills.len(), 2);
        let point = CrashPoint { name: "a.x".into(), nth: 2, cut: true };
        assert_eq!(point.to_string(), "a.x:2:cut");
    }

    /// A stand-in for the product: sleeps, dies at a.*, is killed by somebody at k.*, ends by itself
    /// at b.*.
    const STAND_IN: &str = "#!/bin/sh\ncase \"$FARSHORE_CRASH\" in\na.*) echo \"fault: SIGKILL at ${FARSHORE_CRASH%%:*} (passage 1)\"; kill -9 $$;;\nk.*) kill -9 $$;;\nb.*) exit 3;;\nesac\nexec sleep 1000\n";

    #[test]
    fn a_schedule_is_executed_and_trouble_is_told() -> Result<()> {
        let dir = tempfile::tempdir()?;
        let binary = dir.path().join("stand-in");
        std::fs::write(&binary, STAND_IN)?;
        std::fs::set_permissions(&binary, std::fs::Permissions::from_mode(0o755))?;
        let builder = Farshore::builder(&binary, &dir.path().join("site.toml"));
        let installation = Installation::find(15)?;
        let mut publisher = Cluster::builder(&installation).start()?;
        let mut subscriber = Cluster::builder(&installation).start()?;
        assert_eq!(subscription_state(&subscriber.url("postgres"), "s")?, None);
        subscriber.execute_script(
            "CREATE SCHEMA farshore; \
             CREATE TABLE farshore.subscription (name text, state text, applied pg_lsn); \
             INSERT INTO farshore.subscription VALUES ('s', 'streaming', '1/2')",
        )?;
        let state = subscription_state(&subscriber.url("postgres"), "s")?;
        let expected = SubscriptionState { state: "streaming".into(), applied_lsn: (1 << 32) + 2 };
        assert_eq!(state, Some(expected));

        let mut farshore = builder.start()?;
        let mut count = 0;
        let mut progress = || {
            count += 1;
            Ok(Some(count))
        };
        let mut actors = Actors {
            publisher: &mut publisher,
            subscriber: &mut subscriber,
            builder: &builder,
            farshore: &mut farshore,
            progress: &mut progress,
        };
        let at =
            |name: &str| Victim::FarshoreAt(CrashPoint { name: name.into(), nth: 1, cut: false });
        let victims = vec![Victim::Publisher, Victim::Farshore, at("a.x"), Victim::Subscriber];
        let mut said = Vec::new();
        let summary = actors
            .execute(&Schedule::of_victims(1, victims), &mut |line| said.push(line.to_owned()))?;
        assert_eq!(summary, ChaosSummary { kills: 4, points_not_reached: vec![] });
        assert_eq!(said.len(), 4);
        for point in ["b.y", "k.z"] {
            let schedule = Schedule::of_victims(1, vec![at(point)]);
            let error = actors.execute(&schedule, &mut |_| ()).unwrap_err();
            assert!(matches!(error.downcast_ref(), Some(Trouble::Ended(_))), "{error}");
        }
        assert!(!start_and_crash(
            &builder,
            &CrashPoint { name: "c".into(), nth: 1, cut: false },
            Duration::from_millis(50),
            &mut || Ok(())
        )?);
        assert_eq!(actors.publisher.connect()?.query_one("SELECT 1", &[])?.get::<_, i32>(0), 1);
        Ok(())
    }
}
