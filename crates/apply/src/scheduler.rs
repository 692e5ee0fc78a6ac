//! How many consecutive source transactions make one target transaction. Pure: inputs in,
//! decisions out.
//!
//! A target commit costs an fsync and a round trip, so while more is at hand transactions are
//! grouped; when the log runs dry the group is committed: at once when the target is up to date,
//! and when it is behind after a moment in which more usually comes. (While the publisher decodes
//! its next batch, nothing comes for longer, and nothing is gained by waiting.) A group of
//! consecutive transactions is a prefix step, so readers still see only prefixes of the publisher's
//! commit order.

use farshore_model::DictionaryId;
use std::time::Duration;

/// When groups are written as batches: netted per key and in bulk, instead of change by change.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Batches {
    /// When the target is behind, and for large transactions.
    #[default]
    Auto,
    /// All groups.
    Always,
    /// None.
    Never,
}

/// Bounds of one target transaction.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GroupLimits {
    /// When groups are written as batches.
    pub batches: Batches,
    /// As [`GroupLimits::commands_max`], for a batch.
    pub batch_commands_max: u64,
    /// As [`GroupLimits::transactions_max`], for a batch: usually it is commands that count, and a
    /// transaction without one counts as one.
    pub batch_transactions_max: u64,
    /// Commands from which on a transaction is written as a batch even when nothing is behind.
    pub batch_from_commands: u64,
    /// Commands in a group from which on groups are written as batches even when nothing is
    /// behind: so much comes between two commits that change by change is about to fall behind.
    pub crowded_from_commands: u64,
    /// Commands after which a group is committed.
    pub commands_max: u64,
    /// Payload bytes after which a group is committed.
    pub bytes_max: u64,
    /// Source transactions after which a group is committed.
    pub transactions_max: u64,
    /// Tables after which a group is committed; of those that [`Tables::count`] tells apart.
    pub tables_max: usize,
    /// Lag from which on the target counts as behind.
    pub behind_after: Duration,
    /// How long a group may stay open on a dry log while the target is behind.
    pub open_max: Duration,
    /// How long the log may be dry meanwhile.
    pub dry_max: Duration,
}

impl Default for GroupLimits {
    fn default() -> Self {
        GroupLimits {
            batches: Batches::Auto,
            batch_commands_max: 20_000,
            batch_transactions_max: u64::MAX,
            batch_from_commands: 500,
            crowded_from_commands: 1_000,
            commands_max: 5_000,
            bytes_max: 4 << 20,
            transactions_max: 5_000,
            tables_max: usize::MAX,
            behind_after: Duration::from_millis(500),
            open_max: Duration::from_millis(50),
            dry_max: Duration::from_millis(10),
        }
    }
}

impl GroupLimits {
    /// For a target that is far: every group is a connection's start from rest (TCP forgets how
    /// much a line takes while it waits for an answer), so there is more in each.
    pub fn for_far_target(self) -> GroupLimits {
        GroupLimits {
            bytes_max: self.bytes_max * 2,
            batch_commands_max: self.batch_commands_max * 4,
            ..self
        }
    }

    /// For a target that has too few locks, or too little memory, for a group of the usual size:
    /// halved so many times. At last a group is one transaction.
    pub fn halved(self, times: u32) -> GroupLimits {
        if times == 0 {
            return self;
        }
        let half = |limit: u64| limit.checked_shr(times).unwrap_or(0).max(1);
        GroupLimits {
            batch_commands_max: half(self.batch_commands_max),
            commands_max: half(self.commands_max),
            bytes_max: half(self.bytes_max),
            tables_max: TABLES_TOLD_APART.checked_shr(times).unwrap_or(0).max(1),
            ..self
        }
    }
}

/// Commands of the largest batch.
const COMMANDS_MOST: u64 = 320_000;

/// Bytes of the largest batch that has more than one transaction.
const BYTES_MOST: u64 = 64 << 20;

/// How many times the usual a batch over this many tables may be.
///
/// Each table of a batch takes a few statements, however few its rows are: with many tables a usual
/// batch would be a statement for every few rows.
pub fn batch_factor(tables: usize) -> u64 {
    let of_dozens = tables.div_ceil(32).clamp(1, 4);
    let of_hundreds = (tables / 64).min(16);
    of_dozens.max(of_hundreds) as u64
}

/// How many tables [`Tables`] tells apart.
const TABLES_TOLD_APART: usize = 1024;

/// Which tables changes are for, told apart as far as [`batch_factor`] needs it: by the numbers of
/// their definitions, modulo 1,024.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Tables([u64; TABLES_TOLD_APART / 64]);

impl Tables {
    /// Adds a table.
    pub fn add(&mut self, relation: DictionaryId) {
        let [first, second, ..] = relation.0.to_le_bytes();
        let bit = u16::from_le_bytes([first, second]) % TABLES_TOLD_APART as u16;
        if let Some(word) = self.0.get_mut(usize::from(bit / 64)) {
            *word |= 1 << (bit % 64);
        }
    }

    /// Adds those of `other`.
    pub fn add_all(&mut self, other: &Tables) {
        self.0.iter_mut().zip(other.0).for_each(|(word, other)| *word |= other);
    }

    /// How many there are, 1,024 at most.
    pub fn count(&self) -> usize {
        self.0.iter().map(|word| word.count_ones() as usize).sum()
    }
}

/// What happened.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Input {
    /// The next source transaction is at hand, with this many commands and payload bytes.
    Transaction {
        /// Commands in its body.
        commands: u64,
        /// Bytes of its body.
        bytes: u64,
        /// It committed on the publisher longer ago than [`GroupLimits::behind_after`].
        behind: bool,
        /// It takes locks that keep readers out (TRUNCATE): held together with those of other
        /// transactions, or for long, they deadlock with readers.
        barrier: bool,
        /// Tables that it changes.
        tables: Tables,
    },
    /// Nothing more is at hand now.
    Dry {
        /// The newest transaction committed on the publisher longer ago than
        /// [`GroupLimits::behind_after`].
        behind: bool,
        /// How long the open group has been open.
        open_for: Duration,
        /// For how long nothing has been at hand.
        dry_for: Duration,
    },
}

/// What to do, in order.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Decision {
    /// Commit the open group first.
    pub commit_before: bool,
    /// Begin a target transaction.
    pub begin: bool,
    /// What is begun is a batch.
    pub batch: bool,
    /// Apply the transaction of the input.
    pub apply: bool,
    /// Commit the group that the transaction went into.
    pub commit_after: bool,
}

/// Decides group by group.
#[derive(Clone, Debug)]
pub struct Scheduler {
    limits: GroupLimits,
    open: Option<Group>,
    /// The last group that was committed had as much as makes batches worthwhile.
    crowded: bool,
}

#[derive(Clone, Copy, Debug, Default)]
struct Group {
    batch: bool,
    commands: u64,
    bytes: u64,
    transactions: u64,
    tables: Tables,
}

impl Scheduler {
    /// Nothing is open.
    pub fn new(limits: GroupLimits) -> Scheduler {
        Scheduler { limits, open: None, crowded: false }
    }

    /// What holds from now on. Given between groups: an open one would grow under way.
    pub fn set_limits(&mut self, limits: GroupLimits) {
        self.limits = limits;
    }

    /// Whether a target transaction is open.
    pub fn is_open(&self) -> bool {
        self.open.is_some()
    }

    /// Nothing is at hand, and nothing is waited for.
    pub const DONE: Input =
        Input::Dry { behind: false, open_for: Duration::ZERO, dry_for: Duration::ZERO };

    /// Takes one input.
    pub fn step(&mut self, input: Input) -> Decision {
        match input {
            Input::Dry { behind, open_for, dry_for }
                if behind && open_for < self.limits.open_max && dry_for < self.limits.dry_max =>
            {
                Decision::default()
            }
            Input::Dry { .. } => Decision { commit_before: self.commit(), ..Decision::default() },
            Input::Transaction { commands, bytes, behind, barrier, tables } => {
                let limits = &self.limits;
                let mut decision = Decision { apply: true, ..Decision::default() };
                let batch = match limits.batches {
                    Batches::Auto => {
                        let is_crowded = |group: Group| group.is_crowded(limits);
                        behind
                            || commands >= limits.batch_from_commands
                            || self.crowded
                            || self.open.is_some_and(is_crowded)
                    }
                    Batches::Always => true,
                    Batches::Never => false,
                };
                // A transaction that is large by itself does not hold back those before it.
                let large = bytes >= limits.bytes_max || commands >= limits.commands_max;
                let becomes_batch = self.open.is_some_and(|group| batch && !group.batch);
                if barrier || large || becomes_batch {
                    decision.commit_before = self.commit();
                }
                let limits = &self.limits;
                let mut group = self.open.take().unwrap_or_else(|| {
                    (decision.begin, decision.batch) = (true, batch);
                    Group { batch, ..Group::default() }
                });
                group.commands += commands.max(1);
                group.bytes = group.bytes.saturating_add(bytes);
                group.transactions += 1;
                group.tables.add_all(&tables);
                let (commands_max, transactions_max, bytes_max) = if group.batch {
                    let times = batch_factor(group.tables.count());
                    (
                        limits.batch_commands_max.saturating_mul(times).min(COMMANDS_MOST),
                        limits.batch_transactions_max,
                        limits.bytes_max.saturating_mul(times).min(BYTES_MOST),
                    )
                } else {
                    (limits.commands_max, limits.transactions_max, limits.bytes_max)
                };
                decision.commit_after = barrier
                    || group.commands >= commands_max
                    || group.bytes >= bytes_max
                    || group.transactions >= transactions_max
                    || group.tables.count() >= limits.tables_max;
                self.open = Some(group);
                if decision.commit_after {
                    self.commit();
                }
                decision
            }
        }
    }

    /// Ends the open group, if there is one.
    fn commit(&mut self) -> bool {
        let Some(group) = self.open.take() else { return false };
        self.crowded = group.is_crowded(&self.limits);
        true
    }
}

impl Group {
    fn is_crowded(&self, limits: &GroupLimits) -> bool {
        self.commands >= limits.crowded_from_commands
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn transaction(commands: u64, bytes: u64, behind: bool, barrier: bool) -> Input {
        Input::Transaction { commands, bytes, behind, barrier, tables: Tables::default() }
    }

    /// Plays inputs and returns the groups as they would be committed.
    fn groups(limits: GroupLimits, inputs: &[Option<(u64, u64)>]) -> Vec<Vec<usize>> {
        let mut scheduler = Scheduler::new(limits);
        let (mut committed, mut open): (Vec<Vec<usize>>, Option<Vec<usize>>) = (Vec::new(), None);
        for (index, input) in inputs.iter().enumerate() {
            let input = match *input {
                Some((commands, bytes)) => transaction(commands, bytes, false, false),
                None => Scheduler::DONE,
            };
            let decision = scheduler.step(input);
            if decision.commit_before {
                committed.push(open.take().expect("commit of an open group"));
            }
            if decision.begin {
                assert!(open.replace(Vec::new()).is_none(), "begin inside a group");
            }
            if decision.apply {
                open.as_mut().expect("apply inside a group").push(index);
            }
            if decision.commit_after {
                committed.push(open.take().expect("commit of an open group"));
            }
            assert_eq!(scheduler.is_open(), open.is_some());
        }
        committed.extend(open);
        committed
    }

    const LIMITS: GroupLimits = GroupLimits {
        batches: Batches::Auto,
        batch_commands_max: 40,
        batch_transactions_max: 12,
        batch_from_commands: 9,
        crowded_from_commands: 8,
        commands_max: 10,
        bytes_max: 1000,
        transactions_max: 3,
        tables_max: usize::MAX,
        behind_after: Duration::from_millis(500),
        open_max: Duration::from_millis(50),
        dry_max: Duration::from_millis(10),
    };

    #[test]
    fn groups_end_when_the_log_runs_dry_or_a_limit_is_met() {
        let tx = Some((1, 10));
        assert_eq!(groups(LIMITS, &[tx, None, tx, tx, None]), [vec![0], vec![2, 3]]);
        assert_eq!(groups(LIMITS, &[tx, tx, tx, tx]), [vec![0, 1, 2], vec![3]]);
        assert_eq!(groups(LIMITS, &[Some((6, 1)), Some((6, 1)), tx]), [vec![0, 1], vec![2]]);
    }

    #[test]
    fn a_barrier_stands_alone() {
        let mut scheduler = Scheduler::new(LIMITS);
        let transaction = |barrier| transaction(1, 1, false, barrier);
        assert!(scheduler.step(transaction(false)).begin);
        let decision = scheduler.step(transaction(true));
        assert!(decision.commit_before && decision.begin && decision.commit_after);
        assert!(!scheduler.is_open());
    }

    #[test]
    fn a_target_that_is_behind_waits_a_moment_for_more() {
        let mut scheduler = Scheduler::new(LIMITS);
        scheduler.step(transaction(1, 1, false, false));
        let dry = |behind, open_for, dry_for| {
            let [open_for, dry_for] = [open_for, dry_for].map(Duration::from_millis);
            Input::Dry { behind, open_for, dry_for }
        };
        assert!(!scheduler.step(dry(true, 40, 9)).commit_before);
        assert!(scheduler.is_open());
        assert!(scheduler.step(dry(true, 50, 1)).commit_before);
        scheduler.step(transaction(1, 1, false, false));
        assert!(scheduler.step(dry(true, 12, 10)).commit_before);
        scheduler.step(transaction(1, 1, false, false));
        assert!(scheduler.step(dry(false, 0, 0)).commit_before);
        assert!(!scheduler.step(dry(false, 0, 0)).commit_before);
    }

    #[test]
    fn what_is_behind_goes_in_batches_with_limits_of_their_own() {
        let mut scheduler = Scheduler::new(LIMITS);
        let transaction = |behind, commands| transaction(commands, 1, behind, false);
        let decision = scheduler.step(transaction(false, 1));
        assert!(decision.begin && !decision.batch);
        // A batch does not go into a group that was begun row by row.
        let decision = scheduler.step(transaction(true, 1));
        assert!(decision.commit_before && decision.begin && decision.batch);
        for _ in 0..10 {
            assert!(!scheduler.step(transaction(true, 1)).commit_after);
        }
        assert!(scheduler.step(transaction(true, 1)).commit_after);
        // A large transaction is a batch whether anything is behind or not.
        assert!(scheduler.step(transaction(false, 9)).batch);
        let never = GroupLimits { batches: Batches::Never, ..LIMITS };
        assert!(!Scheduler::new(never).step(transaction(true, 9)).batch);
    }

    #[test]
    fn what_comes_too_fast_for_change_by_change_comes_in_batches() {
        let mut scheduler = Scheduler::new(LIMITS);
        let transaction = transaction(4, 1, false, false);
        let dry = Scheduler::DONE;
        for _ in 0..2 {
            assert!(!scheduler.step(transaction).batch);
        }
        // Eight are in the group: the next one begins a batch.
        let decision = scheduler.step(transaction);
        assert!(decision.commit_before && decision.begin && decision.batch);
        // A small group, and it goes change by change again.
        assert!(scheduler.step(dry).commit_before);
        let decision = scheduler.step(transaction);
        assert!(decision.begin && !decision.batch);
    }

    #[test]
    fn a_large_transaction_stands_alone() {
        let tx = Some((1, 10));
        assert_eq!(groups(LIMITS, &[tx, Some((1, 5000)), tx]), [vec![0], vec![1], vec![2]]);
        assert_eq!(groups(LIMITS, &[None, Some((50, 1)), None]), [vec![1]]);
    }

    #[test]
    fn every_transaction_is_applied_once_and_in_order() {
        let mut state = 1_u64;
        let mut next = move |bound: u64| {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            (state >> 33) % bound
        };
        for _ in 0..200 {
            let inputs: Vec<_> =
                (0..100).map(|_| (next(4) > 0).then(|| (next(12), next(1200)))).collect();
            let applied: Vec<usize> = groups(LIMITS, &inputs).concat();
            let wanted: Vec<usize> =
                inputs.iter().enumerate().filter(|(_, i)| i.is_some()).map(|(n, _)| n).collect();
            assert_eq!(applied, wanted);
        }
    }

    #[test]
    fn batches_over_many_tables_are_larger() {
        let limits = GroupLimits { batches: Batches::Always, ..GroupLimits::default() };
        let commands_in_a_group = |tables: u32, each: u32| {
            let mut scheduler = Scheduler::new(limits);
            let mut commands = 0;
            loop {
                let mut changed = Tables::default();
                (0..each).for_each(|n| changed.add(DictionaryId((commands + n) % tables)));
                commands += each;
                let input = Input::Transaction {
                    commands: u64::from(each),
                    bytes: 100,
                    behind: true,
                    barrier: false,
                    tables: changed,
                };
                if scheduler.step(input).commit_after {
                    return commands;
                }
            }
        };
        assert_eq!(commands_in_a_group(1, 100), 20_000);
        assert_eq!(commands_in_a_group(32, 100), 20_000);
        assert_eq!(commands_in_a_group(59, 100), 40_000);
        assert_eq!(commands_in_a_group(96, 100), 60_000);
        assert_eq!(commands_in_a_group(256, 100), 80_000);
        assert_eq!(commands_in_a_group(512, 100), 160_000);
        assert_eq!(commands_in_a_group(1_024, 100), 320_000);
        assert_eq!(commands_in_a_group(100_000, 100), 320_000);
        // However few a transaction has.
        assert_eq!(commands_in_a_group(1_024, 1), 320_000);
        let limits = GroupLimits { batch_transactions_max: 500, ..limits };
        let mut scheduler = Scheduler::new(limits);
        let one = transaction(1, 100, true, false);
        assert_eq!((1..).find(|_| scheduler.step(one).commit_after), Some(500));
        // Also for a far target.
        let limits = GroupLimits::default().for_far_target();
        let mut scheduler = Scheduler::new(GroupLimits { batches: Batches::Always, ..limits });
        let mut tables = Tables::default();
        (0..1_024).for_each(|n| tables.add(DictionaryId(n)));
        let input = |bytes| Input::Transaction {
            commands: 1_000,
            bytes,
            behind: true,
            barrier: false,
            tables,
        };
        let mut transactions = |bytes| (1..).find(|_| scheduler.step(input(bytes)).commit_after);
        assert_eq!(transactions(100), Some(320));
        assert_eq!(transactions(1 << 20), Some(64));
    }

    #[test]
    fn groups_are_halved_until_one_is_a_transaction() {
        let mut inputs = Vec::new();
        for n in 0..600 {
            let mut tables = Tables::default();
            (0..8).for_each(|k| tables.add(DictionaryId(n * 8 + k)));
            inputs.push(Input::Transaction {
                commands: 8,
                bytes: 8,
                behind: true,
                barrier: false,
                tables,
            });
        }
        let first_group = |times| {
            let mut scheduler = Scheduler::new(GroupLimits::default().halved(times));
            inputs.iter().position(|input| scheduler.step(*input).commit_after).map(|at| at + 1)
        };
        assert_eq!(first_group(0), None);
        assert_eq!(first_group(1), Some(64));
        assert_eq!(first_group(2), Some(32));
        assert_eq!(first_group(9), Some(1));
        assert_eq!(first_group(60), Some(1));
    }
}
