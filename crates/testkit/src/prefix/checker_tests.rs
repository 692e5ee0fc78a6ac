//! The checker is fed histories that a broken replication would make, and must refuse each.

use super::super::history::Step;
use super::super::state::Row;
use super::super::state::tests::{counter, row};
use super::*;
use std::time::Duration;

fn ledger(n: u64) -> Row {
    row("ledger", &[&n.to_string(), "1"])
}

fn trail(n: u64) -> Row {
    row("trail", &[&n.to_string(), "1"])
}

fn seats(a: &str, b: &str) -> [Row; 2] {
    [row("seat", &["1", a]), row("seat", &["2", b])]
}

/// Commit `n` counts up, enters itself in ledger and trail, and swaps two seats.
fn step(n: u64) -> Step {
    let mut changes = Vec::new();
    let (old, new) =
        if n.is_multiple_of(2) { (["8", "9"], ["9", "8"]) } else { (["9", "8"], ["8", "9"]) };
    if n > 1 {
        changes.push(RowChange::Removed(counter(1, n - 1)));
        changes.extend(seats(old[0], old[1]).map(RowChange::Removed));
    }
    changes.push(RowChange::Added(counter(1, n)));
    changes.extend(seats(new[0], new[1]).map(RowChange::Added));
    changes.push(RowChange::Added(ledger(n)));
    changes.push(RowChange::Added(trail(n)));
    Step { xid: 700 + n, changes }
}

fn history() -> History {
    History::new((1..=20).map(step).collect())
}

/// Samples of several readers; each look is (begin, end, state), times in milliseconds.
fn series(readers: &[&[(u64, u64, State)]]) -> SampleSeries {
    let zero = Instant::now();
    let reader = |looks: &&[(u64, u64, State)]| {
        let mut last = State::default();
        let look = |(from, to, state): &(u64, u64, State)| {
            let changes = last.changes_to(state);
            last = state.clone();
            Sample {
                not_before: zero + Duration::from_millis(*from),
                not_after: zero + Duration::from_millis(*to),
                hash: state.hash(),
                changes,
            }
        };
        looks.iter().map(look).collect()
    };
    SampleSeries { readers: readers.iter().map(reader).collect() }
}

/// One reader that saw these states one after the other.
fn one_reader(states: Vec<State>) -> SampleSeries {
    let looks: Vec<_> = (0..).step_by(10).zip(states).map(|(at, s)| (at, at + 5, s)).collect();
    series(&[&looks])
}

fn refused(history: &History, samples: &SampleSeries) -> Violation {
    match check(history, samples) {
        Ok(summary) => panic!("not noticed: {summary}"),
        Err(violation) => *violation,
    }
}

/// The state of a subscriber that applied these commits in this order, blindly.
fn applied(commits: &[u64]) -> State {
    let mut state = State::default();
    for n in commits {
        state.apply(&step(*n).changes);
    }
    state
}

#[test]
fn true_prefixes_in_order_are_accepted_also_with_gaps_and_repeats() {
    let history = history();
    let states = [0, 3, 3, 4, 9, 20, 20].map(|prefix| history.state(prefix));
    let summary = check(&history, &one_reader(states.to_vec())).unwrap();
    assert_eq!(summary, Summary { commits: 20, samples: 7, prefixes_seen: 5, range: (0, 20) });
    check_final(&history, &history.state(20)).unwrap();
}

#[test]
fn a_lost_transaction_is_refused_and_named() {
    let violation =
        refused(&history(), &one_reader(vec![applied(&[1, 2, 3]), applied(&[1, 2, 4, 5])]));
    assert_eq!(violation.kind, ViolationKind::UnknownState);
    let text = violation.to_string();
    assert!(text.contains("transactions missing: 3 (commit 3)"), "{text}");
    assert!(text.contains("shown prefix 3"), "{text}");
}

#[test]
fn a_lost_change_of_one_row_is_refused_and_shown() {
    let history = history();
    let mut state = history.state(6);
    assert!(state.remove(&counter(1, 6)));
    state.add(counter(1, 5));
    let violation = refused(&history, &one_reader(vec![state.clone()]));
    let text = violation.to_string();
    assert!(text.contains("missing: counter (id=1, n=6)"), "{text}");
    assert!(text.contains("too many: counter (id=1, n=5)"), "{text}");
    assert_eq!(check_final(&history, &state).unwrap_err().kind, ViolationKind::FinalDiffers);
}

#[test]
fn a_doubled_transaction_is_refused_and_named() {
    let history = history();
    let mut state = history.state(8);
    state.add(trail(8));
    let text = refused(&history, &one_reader(vec![state])).to_string();
    assert!(text.contains("transactions doubled: 8 (commit 8)"), "{text}");
}

#[test]
fn swapped_transactions_are_refused_while_they_are_swapped() {
    let states = vec![applied(&[1, 2]), applied(&[1, 2, 4]), applied(&[1, 2, 3, 4])];
    let violation = refused(&history(), &one_reader(states));
    assert_eq!(violation.kind, ViolationKind::UnknownState);
}

#[test]
fn a_torn_transaction_is_refused() {
    let whole = step(5).changes;
    for cut in 1..whole.len() {
        let mut state = applied(&[1, 2, 3, 4]);
        state.apply(&whole[..cut]);
        let violation = refused(&history(), &one_reader(vec![state]));
        assert_eq!(violation.kind, ViolationKind::UnknownState, "cut after {cut} changes");
    }
}

#[test]
fn going_back_is_refused_for_one_reader_and_across_readers() {
    let history = history();
    let state = |prefix| history.state(prefix);
    let violation = refused(&history, &one_reader(vec![state(5), state(4)]));
    assert_eq!(violation.kind, ViolationKind::WentBack);
    assert!(violation.to_string().contains("equals prefix 4"), "{violation}");
    assert!(violation.to_string().contains("shown prefix 5"), "{violation}");

    let one_after_the_other =
        series(&[&[(0, 5, state(9)), (30, 35, state(9))], &[(6, 9, state(8))]]);
    let violation = refused(&history, &one_after_the_other);
    assert_eq!(violation.kind, ViolationKind::WentBack);
    assert!(violation.to_string().contains("sample 0 of reader 1"), "{violation}");
}

#[test]
fn concurrent_snapshots_may_be_in_either_order() {
    let history = history();
    let state = |prefix| history.state(prefix);
    let overlapping = series(&[&[(0, 10, state(9))], &[(5, 15, state(8)), (16, 17, state(9))]]);
    check(&history, &overlapping).unwrap();
}

#[test]
fn a_state_that_comes_again_is_taken_as_the_earliest_that_fits() {
    // Prefixes 1 and 3 are equal, prefix 2 is not.
    let add = |n| Step { xid: n, changes: vec![RowChange::Added(counter(1, 1))] };
    let remove = |n| Step { xid: n, changes: vec![RowChange::Removed(counter(1, 1))] };
    let history = History::new(vec![add(1), remove(2), add(3), remove(4)]);
    let (with, without) = (history.state(1), history.state(2));
    let summary =
        check(&history, &one_reader(vec![with.clone(), without.clone(), with.clone()])).unwrap();
    assert_eq!(summary.range, (1, 3));
    let violation = refused(
        &history,
        &one_reader(vec![with.clone(), without.clone(), with, without.clone(), history.state(1)]),
    );
    assert_eq!(violation.kind, ViolationKind::WentBack);
    check_final(&history, &without).unwrap();
}

#[test]
fn an_unfinished_subscriber_is_told_where_it_stands() {
    let history = history();
    let violation = check_final(&history, &history.state(17)).unwrap_err();
    assert!(violation.to_string().contains("stands at prefix 17"), "{violation}");
    assert!(violation.to_string().contains("missing: 18 (commit 18)"), "{violation}");
}
