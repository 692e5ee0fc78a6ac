//! Settings that a standby must not have lower than its principal: the principal's log says what
//! they are, each time they change (`XLOG_PARAMETER_CHANGE`). A standby with less pauses there, and
//! shuts down if it is promoted or resumed.

use super::RM_XLOG;

const XLOG_PARAMETER_CHANGE: u8 = 0x60;
/// The record has no more than its main data, of less than 256 bytes.
const SHORT_DATA: u8 = 0xFF;
/// That, and the length of the data.
const DATA_HEADER: usize = 2;

/// Bytes behind the record's header that are looked at.
pub(super) const LOOKED_AT: usize = DATA_HEADER + 4 * NAMES.len();

/// What they are called, in the record's order (`xl_parameter_change`).
pub const NAMES: [&str; 5] = [
    "max_connections",
    "max_worker_processes",
    "max_wal_senders",
    "max_prepared_transactions",
    "max_locks_per_transaction",
];

/// Their values, in the same order.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Settings(pub [i32; NAMES.len()]);

impl Settings {
    /// Whether a record says them, by its header's fields.
    pub(super) fn are_in(info: u8, manager: u8) -> bool {
        manager == RM_XLOG && info & 0xF0 == XLOG_PARAMETER_CHANGE
    }

    /// By what follows the header of such a record; `None` if it is put together in another way.
    pub(super) fn decode(body: &[u8]) -> Option<Settings> {
        let (head, rest) = body.split_first_chunk::<DATA_HEADER>()?;
        let mut rest = rest.get(..LOOKED_AT - DATA_HEADER)?;
        if head[0] != SHORT_DATA || usize::from(head[1]) < rest.len() {
            return None;
        }
        let mut settings = Settings::default();
        for value in &mut settings.0 {
            let (word, more) = rest.split_first_chunk::<4>()?;
            (*value, rest) = (i32::from_le_bytes(*word), more);
        }
        Some(settings)
    }

    /// The higher ones of both.
    #[must_use]
    pub fn max(self, other: Settings) -> Settings {
        Settings(std::array::from_fn(|i| self.0[i].max(other.0[i])))
    }

    /// Which ones are lower than what is `needed`: name, value, and what it has to be.
    pub fn lower_than(self, needed: Settings) -> Vec<(&'static str, i32, i32)> {
        let each = NAMES.iter().zip(self.0.into_iter().zip(needed.0));
        each.filter(|(_, (has, needs))| has < needs)
            .map(|(name, (has, needs))| (*name, has, needs))
            .collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn they_are_read_as_a_server_writes_them_or_not_at_all() {
        let mut body = vec![SHORT_DATA, 28];
        for value in [200, 8, 10, 0, 64, 1, 0] {
            body.extend_from_slice(&i32::to_le_bytes(value));
        }
        let read = Settings::decode(&body).unwrap();
        assert_eq!(read, Settings([200, 8, 10, 0, 64]));
        for len in 0..LOOKED_AT {
            assert_eq!(Settings::decode(&body[..len]), None, "{len}");
        }
        for (at, other) in [(0, 0xFE), (1, 19)] {
            let mut changed = body.clone();
            changed[at] = other;
            assert_eq!(Settings::decode(&changed), None, "{at}");
        }
        let own = Settings([100, 8, 12, 0, 32]);
        assert_eq!(
            own.lower_than(read),
            [("max_connections", 100, 200), ("max_locks_per_transaction", 32, 64)]
        );
        assert_eq!(own.max(read), Settings([200, 8, 12, 0, 64]));
    }
}
