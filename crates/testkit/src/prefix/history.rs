//! The publisher's states, commit by commit.

use super::decoding::{Change, Datum, DecodedTransaction};
use super::schema::{TABLES, table_index};
use super::state::{Row, RowChange, State, StateHash};
use anyhow::{Context, Result, bail};
use std::collections::HashMap;

/// What one commit did to the state.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Step {
    /// Transaction id at the publisher, for messages.
    pub xid: u64,
    /// Rows that went and rows that came, in order.
    pub changes: Vec<RowChange>,
}

impl Step {
    /// The numbers that this commit entered into the ledger.
    pub fn ledger_numbers(&self) -> impl Iterator<Item = &str> {
        let ledger = table_index("ledger");
        self.changes.iter().filter_map(move |change| match change {
            RowChange::Added(row) if Some(row.table()) == ledger => row.values()[0].as_deref(),
            RowChange::Added(_) | RowChange::Removed(_) => None,
        })
    }
}

/// All commits in order. Prefix 0 is the empty state, prefix `n` the state after `n` commits.
#[derive(Debug, Clone)]
pub struct History {
    steps: Vec<Step>,
    hashes: Vec<StateHash>,
    prefixes: HashMap<StateHash, Vec<usize>>,
}

impl History {
    /// A history of these commits, beginning with empty tables.
    pub fn new(steps: Vec<Step>) -> History {
        let mut state = State::default();
        let mut hashes = vec![state.hash()];
        for step in &steps {
            state.apply(&step.changes);
            hashes.push(state.hash());
        }
        let mut prefixes: HashMap<StateHash, Vec<usize>> = HashMap::new();
        for (prefix, hash) in hashes.iter().enumerate() {
            prefixes.entry(*hash).or_default().push(prefix);
        }
        History { steps, hashes, prefixes }
    }

    /// Replays decoded transactions on empty tables.
    ///
    /// # Errors
    /// When a change does not fit the state it meets: then the oracle itself is wrong.
    pub fn replay(transactions: Vec<DecodedTransaction>) -> Result<History> {
        let mut tables = Tables::default();
        let mut steps = Vec::with_capacity(transactions.len());
        for transaction in transactions {
            let mut changes = Vec::new();
            for change in transaction.changes {
                tables
                    .apply(change, &mut changes)
                    .with_context(|| format!("oracle, transaction {}", transaction.xid))?;
            }
            steps.push(Step { xid: transaction.xid, changes });
        }
        Ok(History::new(steps))
    }

    /// The commits.
    pub fn steps(&self) -> &[Step] {
        &self.steps
    }

    /// The number of prefixes: one more than commits.
    pub fn prefixes(&self) -> usize {
        self.hashes.len()
    }

    /// The hash of a prefix's state.
    ///
    /// # Panics
    /// When there is no such prefix.
    pub fn hash(&self, prefix: usize) -> StateHash {
        self.hashes[prefix]
    }

    /// The hash of the last state.
    pub fn final_hash(&self) -> StateHash {
        self.hashes.last().copied().unwrap_or_default()
    }

    /// All prefixes with this state, ascending: a state can come again.
    pub fn prefixes_with(&self, hash: StateHash) -> &[usize] {
        self.prefixes.get(&hash).map_or(&[], Vec::as_slice)
    }

    /// The state after `prefix` commits, built anew.
    pub fn state(&self, prefix: usize) -> State {
        let mut state = State::default();
        for step in self.steps.iter().take(prefix) {
            state.apply(&step.changes);
        }
        state
    }

    /// The prefix whose state has the fewest rows different from `state`, and how many.
    pub fn nearest(&self, state: &State) -> (usize, usize) {
        // Rows by which the prefix's state exceeds the given one; negative where it lacks them.
        let mut surplus: HashMap<&Row, i64> = HashMap::new();
        for row in state.rows() {
            *surplus.entry(row).or_default() -= 1;
        }
        let mut distance: i64 = surplus.values().map(|n| n.abs()).sum();
        let mut best = (0, distance);
        for (index, step) in self.steps.iter().enumerate() {
            for change in &step.changes {
                let (row, by) = match change {
                    RowChange::Added(row) => (row, 1),
                    RowChange::Removed(row) => (row, -1),
                };
                let count = surplus.entry(row).or_default();
                distance += (*count + by).abs() - count.abs();
                *count += by;
            }
            // Later prefixes win ties: a lost change is told from where it was lost on.
            if distance <= best.1 {
                best = (index + 1, distance);
            }
        }
        (best.0, best.1.max(0) as usize)
    }
}

/// Current rows by identity.
#[derive(Default)]
struct Tables {
    keyed: HashMap<(usize, Vec<Box<str>>), Row>,
    keyless: Vec<Row>,
}

impl Tables {
    fn apply(&mut self, change: Change, changes: &mut Vec<RowChange>) -> Result<()> {
        match change {
            Change::Insert { table, row } => {
                let row = complete(table, row, None)?;
                self.insert(row, changes)
            }
            Change::Update { table, old_identity, row } => {
                let identity = match old_identity {
                    Some(identity) => identity,
                    None => identity_of_datums(table, &row)?,
                };
                let old = self.take(table, identity, changes)?;
                let row = complete(table, row, Some(&old))?;
                self.insert(row, changes)
            }
            Change::Delete { table, identity } => self.take(table, identity, changes).map(drop),
            Change::Truncate { tables } => {
                let gone = self.keyed.extract_if(|key, _| tables.contains(&key.0));
                changes.extend(gone.map(|(_, row)| RowChange::Removed(row)));
                let gone = self.keyless.extract_if(.., |row| tables.contains(&row.table()));
                changes.extend(gone.map(RowChange::Removed));
                Ok(())
            }
        }
    }

    fn insert(&mut self, row: Row, changes: &mut Vec<RowChange>) -> Result<()> {
        let spec = &TABLES[row.table()];
        if spec.identity.is_empty() {
            self.keyless.push(row.clone());
        } else {
            let identity = spec.identity.iter().map(|index| row.values()[*index].clone());
            let identity: Option<Vec<Box<str>>> = identity.collect();
            let identity = identity.with_context(|| format!("null in the identity of {row}"))?;
            let key = (row.table(), identity);
            if let Some(there) = self.keyed.insert(key, row.clone()) {
                bail!("{row} meets {there}, which has the same identity");
            }
        }
        changes.push(RowChange::Added(row));
        Ok(())
    }

    fn take(
        &mut self,
        table: usize,
        identity: Vec<Box<str>>,
        changes: &mut Vec<RowChange>,
    ) -> Result<Row> {
        let name = TABLES[table].name;
        let key = (table, identity);
        let row = self.keyed.remove(&key);
        let row = row.with_context(|| format!("no row of {name} has identity {:?}", key.1))?;
        changes.push(RowChange::Removed(row.clone()));
        Ok(row)
    }
}

fn identity_of_datums(table: usize, row: &[Datum]) -> Result<Vec<Box<str>>> {
    let value = |index: &usize| match &row[*index] {
        Datum::Value(Some(text)) => Ok(text.clone()),
        Datum::Value(None) | Datum::Unchanged => {
            bail!("no identity in a row of {}", TABLES[table].name)
        }
    };
    TABLES[table].identity.iter().map(value).collect()
}

fn complete(table: usize, row: Vec<Datum>, old: Option<&Row>) -> Result<Row> {
    let value = |(index, datum): (usize, Datum)| match (datum, old) {
        (Datum::Value(value), _) => Ok(value),
        (Datum::Unchanged, Some(old)) => Ok(old.values()[index].clone()),
        (Datum::Unchanged, None) => bail!("an inserted row of {} is cut", TABLES[table].name),
    };
    Ok(Row::new(table, row.into_iter().enumerate().map(value).collect::<Result<_>>()?))
}

#[cfg(test)]
mod tests {
    use super::super::decoding::decode;
    use super::super::state::tests::{counter, row};
    use super::*;

    #[test]
    fn replay_follows_keys_unchanged_values_and_truncation() {
        let transactions = decode([
            "BEGIN 1",
            "table prefix.document: INSERT: id[bigint]:1 revision[bigint]:1 body[text]:'long'",
            "table prefix.trail: INSERT: txid[bigint]:1 writer[integer]:1",
            "table prefix.trail: INSERT: txid[bigint]:1 writer[integer]:1",
            "COMMIT 1",
            "BEGIN 2",
            "table prefix.document: UPDATE: old-key: id[bigint]:1 new-tuple: id[bigint]:2 \
             revision[bigint]:9 body[text]:unchanged-toast-datum",
            "table prefix.trail: TRUNCATE: (no-flags)",
            "COMMIT 2",
            "BEGIN 3",
            "table prefix.document: DELETE: id[bigint]:2",
            "COMMIT 3",
        ])
        .unwrap();
        let history = History::replay(transactions).unwrap();
        assert_eq!(history.prefixes(), 4);
        assert_eq!(history.state(1).rows().count(), 3);
        let second: Vec<Row> = history.state(2).rows().cloned().collect();
        assert_eq!(second, [row("document", &["2", "9", "long"])]);
        // Empty at the beginning and again at the end.
        assert_eq!(history.prefixes_with(history.final_hash()), [0, 3]);
    }

    #[test]
    fn changes_that_do_not_fit_are_errors_of_the_oracle() {
        for lines in [
            &["table prefix.counter: UPDATE: id[integer]:1 n[bigint]:2"][..],
            &["table prefix.counter: DELETE: id[integer]:1"],
            &[
                "table prefix.counter: INSERT: id[integer]:1 n[bigint]:2",
                "table prefix.counter: INSERT: id[integer]:1 n[bigint]:3",
            ],
            &["table prefix.list: INSERT: id[integer]:1 items[text]:unchanged-toast-datum"],
        ] {
            let all = ["BEGIN 1"].iter().chain(lines).chain(&["COMMIT 1"]).copied();
            assert!(History::replay(decode(all).unwrap()).is_err(), "{lines:?}");
        }
    }

    #[test]
    fn the_nearest_prefix_has_the_fewest_differences() {
        let step = |n: u64| {
            let mut changes = vec![
                RowChange::Added(counter(1, n)),
                RowChange::Added(row("ledger", &[&n.to_string(), "1"])),
            ];
            if n > 1 {
                changes.insert(0, RowChange::Removed(counter(1, n - 1)));
            }
            Step { xid: n, changes }
        };
        let history = History::new((1..=9).map(step).collect());
        let mut state = history.state(5);
        assert_eq!(history.nearest(&state), (5, 0));
        state.remove(&row("ledger", &["2", "1"]));
        assert_eq!(history.nearest(&state), (5, 1));
        let numbers: Vec<_> = history.steps()[4].ledger_numbers().collect();
        assert_eq!(numbers, ["5"]);
    }
}
