//! What is said when the target's rows are not what the publisher's changes expect.

use farshore_model::Relation;
use farshore_wire::pgoutput::{OldTuple, Tuple, Value, stored::Stored};

/// Longest key value shown in a message, in characters.
const SHOWN_CHARS_MAX: usize = 80;

/// The remedy for an update or delete that found no row.
pub const ROW_MISSING: &str = "The row is not on the target: something else changed the target. \
     Put the row back and start this node again, or copy anew: empty the target's tables and DROP \
     SCHEMA farshore CASCADE there";

/// The remedy for an insert that inserted nothing.
pub const NOT_INSERTED: &str = "A trigger or rule on the target took the row. Remove it (or let the \
     role set session_replication_role) and start this node again";

/// The remedy for a change that the target refused.
pub const REFUSED: &str = "Mend the target (the message above names the constraint or type) and \
     start this node again: the subscription goes on with this change";

/// The word for a stored change's kind.
pub fn operation(change: &Stored<'_>) -> &'static str {
    match change {
        Stored::Insert { .. } => "INSERT",
        Stored::Update { .. } => "UPDATE",
        Stored::Delete { .. } => "DELETE",
        Stored::Truncate { .. } => "TRUNCATE",
        Stored::Message { .. } => "MESSAGE",
        Stored::SubtransactionMark(_) => "SUBTRANSACTION",
    }
}

/// The row's key as `column=value, …`, for messages.
pub fn readable_key(change: &Stored<'_>, relation: &Relation) -> String {
    let tuple = match change {
        Stored::Insert { new, .. } => new,
        Stored::Update { old: OldTuple::Key(old) | OldTuple::Full(old), .. }
        | Stored::Delete { old: OldTuple::Key(old) | OldTuple::Full(old), .. } => old,
        Stored::Update { new, old: OldTuple::None, .. } => new,
        Stored::Delete { old: OldTuple::None, .. }
        | Stored::Truncate { .. }
        | Stored::Message { .. }
        | Stored::SubtransactionMark(_) => return "none".to_owned(),
    };
    let keyed = relation.columns.iter().any(|column| column.key);
    let shown: Vec<String> = relation
        .columns
        .iter()
        .zip(tuple.values())
        .filter(|(column, _)| column.key || !keyed)
        .map(|(column, value)| {
            format!("{}={}", column.name, readable_value(value, column.type_oid))
        })
        .collect();
    shown.join(", ")
}

fn readable_value(value: Value<'_>, type_oid: u32) -> String {
    let text = match value {
        Value::Null => return "NULL".to_owned(),
        Value::Unchanged => return "(unchanged)".to_owned(),
        Value::Text(text) => String::from_utf8_lossy(text).into_owned(),
        Value::Binary(bytes) => match (type_oid, bytes.len()) {
            (21, 2) | (23, 4) | (20, 8) => {
                let negative = bytes.first().is_some_and(|byte| byte & 0x80 != 0);
                let start = if negative { -1_i64 } else { 0 };
                bytes.iter().fold(start, |n, byte| (n << 8) | i64::from(*byte)).to_string()
            }
            // text, varchar, bpchar, name
            (25 | 1043 | 1042 | 19, _) => String::from_utf8_lossy(bytes).into_owned(),
            (2950, 16) => bytes.iter().map(|byte| format!("{byte:02x}")).collect(),
            (_, _) => format!(
                "\\x{}",
                bytes.iter().take(40).map(|byte| format!("{byte:02x}")).collect::<String>()
            ),
        },
    };
    match text.char_indices().nth(SHOWN_CHARS_MAX) {
        None => text,
        Some((end, _)) => format!("{}…", &text[..end]),
    }
}

/// The values that identify the row: the old tuple where the publisher sent one, else the new.
pub fn identifying_tuple<'a>(old: OldTuple<'a>, new: Option<Tuple<'a>>) -> Option<Tuple<'a>> {
    match old {
        OldTuple::Key(tuple) | OldTuple::Full(tuple) => Some(tuple),
        OldTuple::None => new,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_are_readable() {
        assert_eq!(readable_value(Value::Binary(&[0xff, 0xff, 0xff, 0xfe]), 23), "-2");
        assert_eq!(readable_value(Value::Binary(&[0, 0, 1, 0]), 23), "256");
        assert_eq!(readable_value(Value::Binary("é".as_bytes()), 25), "é");
        assert_eq!(readable_value(Value::Binary(&[1, 2]), 1700), "\\x0102");
        let long = "x".repeat(200);
        assert_eq!(readable_value(Value::Text(long.as_bytes()), 25).chars().count(), 81);
    }
}
