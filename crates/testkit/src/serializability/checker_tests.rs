use super::*;

fn append(key: i64, element: i64) -> Operation {
    Operation::Append { key, element }
}

fn read(key: i64, elements: &[i64]) -> Operation {
    Operation::Read { key, elements: elements.to_vec() }
}

fn returned(from: Moment, to: Moment, operations: &[Operation]) -> Transaction {
    let outcome = Outcome::Returned(to);
    Transaction { client: 0, invoked: from, outcome, operations: operations.to_vec() }
}

fn unknown(from: Moment, operations: &[Operation]) -> Transaction {
    let outcome = Outcome::Unknown;
    Transaction { client: 1, invoked: from, outcome, operations: operations.to_vec() }
}

fn aborted(from: Moment, operations: &[Operation]) -> Transaction {
    let outcome = Outcome::Aborted;
    Transaction { client: 2, invoked: from, outcome, operations: operations.to_vec() }
}

fn anomaly(history: &[Transaction]) -> Anomaly {
    let violation = check(history).expect_err("it was accepted");
    println!("{violation}");
    violation.anomaly
}

#[test]
fn one_after_another_and_side_by_side() {
    let history = [
        returned(0, 10, &[append(1, 1), read(1, &[1])]),
        returned(20, 30, &[read(1, &[1]), append(2, 2), append(1, 3), read(1, &[1, 3])]),
        // Both at once: either order will do, and this one was taken.
        returned(40, 60, &[read(2, &[2, 5]), append(1, 4)]),
        returned(40, 60, &[read(1, &[1, 3]), append(2, 5)]),
        aborted(41, &[append(1, 99), read(2, &[77])]),
        returned(70, 80, &[read(1, &[1, 3, 4]), read(2, &[2, 5]), read(3, &[])]),
    ];
    let expected = Summary { returned: 5, aborted: 1, lists: 3, ..Summary::default() };
    assert_eq!(check(&history).unwrap(), expected);
    assert_eq!(check(&[]).unwrap(), Summary::default());
}

#[test]
fn what_has_an_unknown_outcome_may_have_happened_or_not() {
    let mut history = vec![
        returned(0, 10, &[append(1, 1)]),
        unknown(20, &[append(1, 2)]),
        unknown(20, &[append(1, 3)]),
    ];
    // Also late, after others returned that did not see it.
    history.push(returned(30, 40, &[read(1, &[1])]));
    history.push(returned(50, 60, &[read(1, &[1, 3])]));
    let expected = Summary { returned: 3, happened: 1, unseen: 1, lists: 1, ..Summary::default() };
    assert_eq!(check(&history).unwrap(), expected);
    // But not undone.
    history.push(returned(70, 80, &[read(1, &[1])]));
    assert_eq!(anomaly(&history), Anomaly::Cycle);
}

/// Each element of these was there, and the end of what returned is not: weaker checks pass it.
#[test]
fn a_lost_acknowledged_tail_is_caught() {
    let history = [
        returned(0, 10, &[append(1, 1)]),
        returned(20, 30, &[append(1, 2)]),
        // The mirror was promoted without the second one.
        returned(40, 50, &[read(1, &[1]), append(2, 3)]),
    ];
    assert_eq!(anomaly(&history), Anomaly::Cycle);
    // Side by side with it, it need not have seen it.
    let mut overlapping = history.clone();
    overlapping[2].invoked = 30;
    check(&overlapping).unwrap();
    // The whole list is gone, and new elements come in its place.
    let history =
        [returned(0, 10, &[append(1, 1)]), returned(20, 30, &[append(1, 2), read(1, &[2])])];
    assert_eq!(anomaly(&history), Anomaly::Cycle);
    // Another list tells: the transaction that was read there is lost here.
    let history = [
        unknown(0, &[append(1, 1), append(2, 2)]),
        returned(10, 20, &[read(2, &[2])]),
        returned(30, 40, &[read(1, &[])]),
    ];
    assert_eq!(anomaly(&history), Anomaly::Cycle);
}

#[test]
fn a_read_that_goes_back_is_caught() {
    let history = [
        returned(0, 100, &[append(1, 1)]),
        returned(10, 20, &[read(1, &[1])]),
        returned(30, 40, &[read(1, &[])]),
    ];
    assert_eq!(anomaly(&history), Anomaly::Cycle);
}

#[test]
fn a_doubled_write_is_caught() {
    let history = [returned(0, 10, &[append(1, 1)]), returned(20, 30, &[read(1, &[1, 1])])];
    assert_eq!(anomaly(&history), Anomaly::Doubled);
}

#[test]
fn what_was_rolled_back_or_never_was_is_caught() {
    let history = [aborted(0, &[append(1, 1)]), returned(20, 30, &[read(1, &[1])])];
    assert_eq!(anomaly(&history), Anomaly::AbortedRead);
    assert_eq!(anomaly(&[returned(20, 30, &[read(1, &[1])])]), Anomaly::FromNowhere);
    // Seen only by somebody who was seen.
    let history = [unknown(0, &[read(1, &[7]), append(2, 2)]), returned(20, 30, &[read(2, &[2])])];
    assert_eq!(anomaly(&history), Anomaly::FromNowhere);
}

/// Two servers took writes: each was fine by itself.
#[test]
fn two_primaries_are_caught() {
    let history = [
        returned(0, 10, &[append(1, 1)]),
        returned(20, 30, &[append(1, 2), read(1, &[1, 2])]),
        returned(20, 31, &[append(1, 3), read(1, &[1, 3])]),
    ];
    assert_eq!(anomaly(&history), Anomaly::Disagreement);
    let history = [
        returned(0, 10, &[append(1, 1)]),
        returned(20, 30, &[append(1, 2)]),
        returned(40, 50, &[append(1, 3), read(1, &[1, 3])]),
    ];
    assert_eq!(anomaly(&history), Anomaly::Cycle);
}

#[test]
fn a_transaction_sees_itself_and_one_state() {
    let history = [returned(0, 10, &[append(1, 1), read(1, &[])])];
    assert_eq!(anomaly(&history), Anomaly::Internal);
    let history =
        [returned(0, 30, &[read(1, &[]), read(1, &[1])]), returned(0, 20, &[append(1, 1)])];
    assert_eq!(anomaly(&history), Anomaly::Internal);
}

/// Serializable is more than a snapshot: each read what the other had not done yet.
#[test]
fn write_skew_is_caught() {
    let history = [
        returned(0, 10, &[read(1, &[]), append(2, 2)]),
        returned(0, 10, &[read(2, &[]), append(1, 1)]),
        returned(20, 30, &[read(1, &[1]), read(2, &[2])]),
    ];
    assert_eq!(anomaly(&history), Anomaly::Cycle);
    // Half of a transaction.
    let history = [
        returned(0, 10, &[append(1, 1), append(2, 2)]),
        returned(0, 10, &[read(1, &[1]), read(2, &[])]),
    ];
    assert_eq!(anomaly(&history), Anomaly::Cycle);
}

#[test]
fn what_is_no_history_is_refused() {
    assert_eq!(anomaly(&[returned(10, 5, &[])]), Anomaly::NoHistory);
    let twice = [returned(0, 1, &[append(1, 1)]), aborted(2, &[append(1, 1)])];
    assert_eq!(anomaly(&twice), Anomaly::NoHistory);
}

/// What a serial execution gives is accepted at any size, and each fault put into it is not.
#[test]
fn a_long_history_with_one_fault() {
    let mut lists: BTreeMap<i64, Vec<i64>> = BTreeMap::new();
    let mut history = Vec::new();
    for number in 0..5_000 {
        let (key, other) = (number * 7 % 13, number * 5 % 13);
        let before = lists.get(&other).cloned().unwrap_or_default();
        lists.entry(key).or_default().push(number);
        // Overlapping the two before and the two after it.
        let (from, to) = (number as Moment * 10, number as Moment * 10 + 25);
        history.push(returned(from, to, &[read(other, &before), append(key, number)]));
    }
    let all: Vec<Operation> = lists.iter().map(|(key, list)| read(*key, list)).collect();
    history.push(returned(60_000, 60_010, &all));
    assert_eq!(check(&history).unwrap().returned, 5_001);
    // The last one to append is lost.
    let mut lost = history.clone();
    let last = lists.iter().find(|(_, list)| list.last() == Some(&4_999)).unwrap();
    lost[5_000].operations.retain(|operation| *operation != read(*last.0, last.1));
    lost[5_000].operations.push(read(*last.0, &last.1[..last.1.len() - 1]));
    assert_eq!(anomaly(&lost), Anomaly::Cycle);
    // One of them returned only after it was read by one that had returned.
    history[100].invoked = 59_000;
    history[100].outcome = Outcome::Returned(59_010);
    assert_eq!(anomaly(&history), Anomaly::Cycle);
}
