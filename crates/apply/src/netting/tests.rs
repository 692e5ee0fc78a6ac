//! Netted batches against the same changes one by one.

use super::*;
use std::collections::BTreeMap;

/// A row of (key, small value, large value that updates may leave out).
type Row = (u8, u8, u8);

fn value(byte: &u8) -> Value<'_> {
    Value::Binary(std::slice::from_ref(byte))
}

fn tuple(row: &Row, large: bool) -> Bytes {
    let large = if large { value(&row.2) } else { Value::Unchanged };
    encode::tuple(&[value(&row.0), value(&row.1), large]).into()
}

fn key(key: u8) -> Bytes {
    encode::tuple(&[value(&key), Value::Null, Value::Null]).into()
}

fn parse(tuple: &Bytes) -> Tuple<'_> {
    Tuple::parse(tuple).unwrap()
}

fn bytes_of(tuple: &Bytes) -> Vec<Option<u8>> {
    parse(tuple)
        .values()
        .map(|value| match value {
            Value::Binary(bytes) => Some(bytes[0]),
            Value::Unchanged => None,
            Value::Null | Value::Text(_) => panic!("{value:?}"),
        })
        .collect()
}

fn row_of(tuple: &Bytes) -> Row {
    let bytes = bytes_of(tuple);
    (bytes[0].unwrap(), bytes[1].unwrap(), bytes[2].expect("a whole row"))
}

const TABLE: NetTable =
    NetTable { columns: 3, key: vec![], whole_old_rows: false, moves_in_place: false };

fn netting() -> Netting {
    Netting::new(NetTable { key: vec![0], ..TABLE })
}

fn netting_of_whole_rows() -> Netting {
    Netting::new(NetTable { key: vec![0], whole_old_rows: true, ..TABLE })
}

/// What the target does with a batch; panics where it would refuse it.
fn apply(target: &mut BTreeMap<u8, Row>, netting: &mut Netting) {
    let key_of = |net: &Net| match parse(&net.identity).values().next() {
        Some(Value::Binary(bytes)) => bytes[0],
        other => panic!("{other:?}"),
    };
    for net in netting.nets() {
        let is_old = !matches!(net.effect, Effect::Insert(_) | Effect::Nothing);
        if is_old && netting.table().whole_old_rows {
            assert_eq!(target.get(&key_of(net)), Some(&row_of(&net.identity)), "not the old row");
        }
        if matches!(net.effect, Effect::Delete | Effect::Replace(_)) {
            target.remove(&key_of(net)).expect("deletes one row");
        }
    }
    for net in netting.nets() {
        if let Effect::Update(row) = &net.effect {
            let values = bytes_of(row);
            let row = target.get_mut(&key_of(net)).expect("updates one row");
            row.1 = values[1].unwrap();
            row.2 = values[2].unwrap_or(row.2);
        }
    }
    for net in netting.nets() {
        if let Effect::Insert(row) | Effect::Replace(row) = &net.effect {
            let row = row_of(row);
            assert!(target.insert(row.0, row).is_none(), "inserts a key twice");
        }
    }
    netting.clear();
}

/// A change as the publisher would send it, and what to do when it is handed back.
enum Change {
    Insert(Row),
    Update { old: Option<u8>, new: Row, large: bool },
    Delete(u8),
}

impl Change {
    /// Offers it with the whole row that it changes.
    fn offer_whole(&self, before: &BTreeMap<u8, Row>, netting: &mut Netting) -> Taken {
        let whole = |key: &u8| tuple(&before[key], true);
        match self {
            Change::Insert(_) => self.offer(netting),
            Change::Update { old, new, large } => {
                let (old, new) = (whole(&old.unwrap_or(new.0)), tuple(new, *large));
                let body: Bytes = [&old[..], &new[..]].concat().into();
                let (old, new) = body.split_at(old.len());
                let old = OldTuple::Full(Tuple::parse(old).unwrap());
                netting.update(old, Tuple::parse(new).unwrap(), &body)
            }
            Change::Delete(old) => {
                let old = whole(old);
                netting.delete(OldTuple::Full(parse(&old)), &old)
            }
        }
    }

    fn offer(&self, netting: &mut Netting) -> Taken {
        match self {
            Change::Insert(row) => {
                let row = tuple(row, true);
                netting.insert(parse(&row), &row)
            }
            Change::Update { old: None, new, large } => {
                let new = tuple(new, *large);
                netting.update(OldTuple::None, parse(&new), &new)
            }
            Change::Update { old: Some(old), new, large } => {
                let (old, new) = (key(*old), tuple(new, *large));
                let body: Bytes = [&old[..], &new[..]].concat().into();
                let (old, new) = body.split_at(old.len());
                netting.update(
                    OldTuple::Key(Tuple::parse(old).unwrap()),
                    Tuple::parse(new).unwrap(),
                    &body,
                )
            }
            Change::Delete(old) => {
                let old = key(*old);
                netting.delete(OldTuple::Key(parse(&old)), &old)
            }
        }
    }

    fn apply_alone(&self, target: &mut BTreeMap<u8, Row>) {
        match self {
            Change::Insert(row) => assert!(target.insert(row.0, *row).is_none()),
            Change::Update { old, new, large } => {
                let before = target.remove(&old.unwrap_or(new.0)).expect("updates one row");
                let kept = if *large { new.2 } else { before.2 };
                assert!(target.insert(new.0, (new.0, new.1, kept)).is_none());
            }
            Change::Delete(old) => {
                target.remove(old).expect("deletes one row");
            }
        }
    }
}

#[test]
fn a_batch_gives_what_its_changes_give_one_by_one() {
    assert_same_as_one_by_one(netting, |change, _, netting| change.offer(netting));
}

#[test]
fn a_batch_of_whole_old_rows_gives_what_its_changes_give_one_by_one() {
    assert_same_as_one_by_one(netting_of_whole_rows, Change::offer_whole);
}

fn assert_same_as_one_by_one(
    empty: fn() -> Netting,
    offer: fn(&Change, &BTreeMap<u8, Row>, &mut Netting) -> Taken,
) {
    for seed in 0..300_u64 {
        let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
        let mut next = move |bound: usize| {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            (state >> 33) as usize % bound
        };
        let (mut publisher, mut target) = (BTreeMap::new(), BTreeMap::new());
        let mut netting = empty();
        let mut taken = 0;
        for _ in 0..400 {
            let there: Vec<u8> = publisher.keys().copied().collect();
            let free: Vec<u8> = (0..12).filter(|key| !publisher.contains_key(key)).collect();
            let (small, large) = (next(250) as u8, next(250) as u8);
            let change = match next(10) {
                0..=3 if !free.is_empty() => Change::Insert((free[next(free.len())], small, large)),
                4..=6 if !there.is_empty() => {
                    let new = (there[next(there.len())], small, large);
                    Change::Update { old: None, new, large: next(2) == 0 }
                }
                7 if !there.is_empty() && !free.is_empty() => {
                    let old = Some(there[next(there.len())]);
                    let new = (free[next(free.len())], small, large);
                    Change::Update { old, new, large: next(2) == 0 }
                }
                _ if !there.is_empty() => Change::Delete(there[next(there.len())]),
                _ => continue,
            };
            let offered = offer(&change, &publisher, &mut netting);
            change.apply_alone(&mut publisher);
            match offered {
                Taken::In => taken += 1,
                Taken::Barrier => {
                    apply(&mut target, &mut netting);
                    change.apply_alone(&mut target);
                    assert_eq!(target, publisher, "seed {seed}, after a barrier");
                }
            }
            if next(30) == 0 {
                apply(&mut target, &mut netting);
                assert_eq!(target, publisher, "seed {seed}");
            }
        }
        assert!(taken > 200, "seed {seed}: only {taken} changes could be netted");
    }
}

#[test]
fn an_update_keeps_what_it_leaves_out() {
    let mut netting = netting();
    for change in [
        Change::Insert((1, 1, 7)),
        Change::Update { old: None, new: (1, 2, 0), large: false },
        Change::Update { old: Some(1), new: (2, 3, 0), large: false },
    ] {
        assert_eq!(change.offer(&mut netting), Taken::In);
    }
    assert_eq!(netting.nets()[0].effect, Effect::Nothing);
    let Effect::Insert(row) = &netting.nets()[1].effect else { panic!() };
    assert_eq!(row_of(row), (2, 3, 7));
}

#[test]
fn what_cannot_be_netted_is_handed_back() {
    let mut netting = netting();
    assert_eq!(Change::Insert((1, 1, 1)).offer(&mut netting), Taken::In);
    // The same key twice, and rows that cannot be there.
    assert_eq!(Change::Insert((1, 2, 2)).offer(&mut netting), Taken::Barrier);
    assert_eq!(Change::Delete(1).offer(&mut netting), Taken::In);
    assert_eq!(Change::Delete(1).offer(&mut netting), Taken::Barrier);
    let update = Change::Update { old: None, new: (1, 2, 2), large: true };
    assert_eq!(update.offer(&mut netting), Taken::Barrier);
    // A row that moves without all of its values.
    let moved = Change::Update { old: Some(5), new: (6, 2, 2), large: false };
    assert_eq!(moved.offer(&mut netting), Taken::Barrier);
    // Values in text.
    let text: Bytes = encode::tuple(&[Value::Text(b"1"), Value::Null, Value::Null]).into();
    assert_eq!(netting.insert(parse(&text), &text), Taken::Barrier);
    assert_eq!(netting.nets().len(), 1);
}

#[test]
fn without_a_key_only_inserts_are_netted() {
    let mut netting = Netting::new(TABLE);
    for _ in 0..2 {
        assert_eq!(Change::Insert((1, 1, 1)).offer(&mut netting), Taken::In);
    }
    assert_eq!(netting.nets().len(), 2);
    assert_eq!(Change::Delete(1).offer(&mut netting), Taken::Barrier);
}

#[test]
fn where_the_target_has_columns_of_its_own_rows_do_not_move() {
    let table = NetTable { key: vec![0], moves_in_place: true, ..TABLE };
    let mut netting = Netting::new(table);
    let moved = Change::Update { old: Some(5), new: (6, 2, 2), large: true };
    assert_eq!(moved.offer(&mut netting), Taken::Barrier);
    assert_eq!(Change::Insert((5, 1, 1)).offer(&mut netting), Taken::In);
    assert_eq!(moved.offer(&mut netting), Taken::In);
}

/// The publisher's key, if it has one, may be checked at the end of its transactions only.
#[test]
fn a_whole_old_row_that_is_not_what_was_left_is_handed_back() {
    let mut netting = netting_of_whole_rows();
    let before = BTreeMap::from([(1, (1, 1, 1)), (2, (2, 2, 2))]);
    let moves =
        |from: u8, to: u8| Change::Update { old: Some(from), new: (to, from, 0), large: false };
    assert_eq!(moves(1, 2).offer_whole(&before, &mut netting), Taken::In);
    assert_eq!(moves(2, 3).offer_whole(&before, &mut netting), Taken::Barrier);
    assert_eq!(Change::Delete(2).offer_whole(&before, &mut netting), Taken::Barrier);
    // What an update leaves out is in its old row.
    let nets: Vec<&Effect> = netting.nets().iter().map(|net| &net.effect).collect();
    assert_eq!(nets, [&Effect::Delete, &Effect::Insert(tuple(&(2, 1, 1), true))]);
    // And a key alone is not enough.
    assert_eq!(Change::Delete(1).offer(&mut netting), Taken::Barrier);
}
