use std::fmt;
use std::str::FromStr;

/// A position in a publisher's write-ahead log, in bytes.
///
/// PostgreSQL docs: "8.20. pg_lsn Type". Printed and parsed as PostgreSQL does, `16/B374D848`.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct Lsn(pub u64);

impl Lsn {
    /// PostgreSQL's `InvalidXLogRecPtr`: before every position.
    pub const ZERO: Lsn = Lsn(0);
    /// After every position.
    pub const MAX: Lsn = Lsn(u64::MAX);

    /// Bytes of log from `earlier` to `self`; zero when `earlier` is ahead.
    pub fn bytes_since(self, earlier: Lsn) -> u64 {
        self.0.saturating_sub(earlier.0)
    }
}

impl fmt::Display for Lsn {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:X}/{:X}", self.0 >> 32, self.0 & 0xFFFF_FFFF)
    }
}

impl fmt::Debug for Lsn {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// The text was not an LSN of the form `16/B374D848`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct InvalidLsn(pub String);

impl fmt::Display for InvalidLsn {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "\"{}\" is not an LSN (expected two hexadecimal numbers such as 16/B374D848)",
            self.0
        )
    }
}

impl std::error::Error for InvalidLsn {}

impl FromStr for Lsn {
    type Err = InvalidLsn;

    fn from_str(text: &str) -> Result<Self, InvalidLsn> {
        let invalid = || InvalidLsn(text.to_owned());
        let (high, low) = text.split_once('/').ok_or_else(invalid)?;
        let half = |part: &str| {
            if part.is_empty() || part.len() > 8 || !part.bytes().all(|b| b.is_ascii_hexdigit()) {
                return Err(invalid());
            }
            u64::from_str_radix(part, 16).map_err(|_| invalid())
        };
        Ok(Lsn((half(high)? << 32) | half(low)?))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn prints_and_parses_as_postgres_does() {
        for text in ["0/0", "16/B374D848", "FFFFFFFF/FFFFFFFF", "1/2"] {
            assert_eq!(text.parse::<Lsn>().unwrap().to_string(), text);
        }
        assert_eq!("16/b374d848".parse::<Lsn>().unwrap(), Lsn(0x16_B374_D848));
    }

    #[test]
    fn refuses_what_is_not_an_lsn() {
        for text in ["", "/", "1", "1/", "/1", "1/123456789", "+1/1", "1/ 1", "x/1", "1/2/3"] {
            assert!(text.parse::<Lsn>().is_err(), "{text:?}");
        }
    }
}
