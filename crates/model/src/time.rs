use std::fmt;
use std::str::FromStr;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

/// PostgreSQL's `TimestampTz`: microseconds since 2000-01-01 00:00:00 UTC.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct PgTime(pub i64);

/// Seconds from the Unix epoch to PostgreSQL's.
const POSTGRES_EPOCH_UNIX_SECONDS: u64 = 946_684_800;

impl PgTime {
    /// This machine's clock now.
    pub fn now() -> PgTime {
        PgTime::from(SystemTime::now())
    }

    /// Microseconds from `earlier` to `self`; negative when the clocks disagree.
    pub fn micros_since(self, earlier: PgTime) -> i64 {
        self.0.saturating_sub(earlier.0)
    }

    /// Seconds since the Unix epoch, with fractions.
    pub fn unix_seconds(self) -> f64 {
        self.0 as f64 / 1e6 + POSTGRES_EPOCH_UNIX_SECONDS as f64
    }
}

impl From<SystemTime> for PgTime {
    fn from(time: SystemTime) -> PgTime {
        let epoch = UNIX_EPOCH + Duration::from_secs(POSTGRES_EPOCH_UNIX_SECONDS);
        match time.duration_since(epoch) {
            Ok(after) => PgTime(i64::try_from(after.as_micros()).unwrap_or(i64::MAX)),
            Err(before) => {
                PgTime(i64::try_from(before.duration().as_micros()).map_or(i64::MIN, |m| -m))
            }
        }
    }
}

/// Days from 0000-03-01 to 2000-01-01 in the proleptic Gregorian calendar.
const POSTGRES_EPOCH_FROM_MARCH_0: i64 = 730_425;
/// Days in 400 years.
const DAYS_OF_400_YEARS: i64 = 146_097;
const MICROS_PER_DAY: i64 = 86_400_000_000;

/// A day as PostgreSQL prints it in ISO style (`2026-11-21`, `0044-03-15 BC`), and the BC apart.
fn date_parts(days: i64) -> (String, bool) {
    // Years that begin in March: leap days come last ("days_from_civil", H. Hinnant).
    let days = days + POSTGRES_EPOCH_FROM_MARCH_0;
    let era = days.div_euclid(DAYS_OF_400_YEARS);
    let of_era = days.rem_euclid(DAYS_OF_400_YEARS);
    let year_of_era = (of_era - of_era / 1_460 + of_era / 36_524 - of_era / 146_096) / 365;
    let of_year = of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let month_from_march = (5 * of_year + 2) / 153;
    let day = of_year - (153 * month_from_march + 2) / 5 + 1;
    let month = if month_from_march < 10 { month_from_march + 3 } else { month_from_march - 9 };
    let year = year_of_era + era * 400 + i64::from(month <= 2);
    let (year, before_christ) = if year <= 0 { (1 - year, true) } else { (year, false) };
    (format!("{year:04}-{month:02}-{day:02}"), before_christ)
}

/// PostgreSQL's `date` (days since 2000-01-01) as it prints it in ISO style.
pub fn date_text(days: i32) -> String {
    match days {
        i32::MAX => "infinity".to_owned(),
        i32::MIN => "-infinity".to_owned(),
        days => {
            let (date, before_christ) = date_parts(i64::from(days));
            if before_christ { date + " BC" } else { date }
        }
    }
}

/// PostgreSQL's `time` (microseconds since midnight) as it prints it.
pub fn time_of_day_text(micros: i64) -> String {
    let (seconds, fraction) = (micros.div_euclid(1_000_000), micros.rem_euclid(1_000_000));
    let clock = format!("{:02}:{:02}:{:02}", seconds / 3_600, seconds / 60 % 60, seconds % 60);
    if fraction == 0 {
        return clock;
    }
    let digits = format!("{fraction:06}");
    format!("{clock}.{}", digits.trim_end_matches('0'))
}

/// PostgreSQL's `timestamp` (microseconds since 2000-01-01), with `zone` behind it, in ISO style.
pub fn timestamp_text(micros: i64, zone: &str) -> String {
    match micros {
        i64::MAX => return "infinity".to_owned(),
        i64::MIN => return "-infinity".to_owned(),
        _ => {}
    }
    let (date, before_christ) = date_parts(micros.div_euclid(MICROS_PER_DAY));
    let clock = time_of_day_text(micros.rem_euclid(MICROS_PER_DAY));
    let era = if before_christ { " BC" } else { "" };
    format!("{date} {clock}{zone}{era}")
}

impl fmt::Display for PgTime {
    /// As PostgreSQL prints a `timestamptz` in time zone UTC.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&timestamp_text(self.0, "+00"))
    }
}

/// The text was not a time in UTC.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct InvalidTime(pub String);

impl fmt::Display for InvalidTime {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "\"{}\" is not a time in UTC (expected 2026-11-21, 2026-11-21 14:05 or \
             2026-11-21T14:05:09.25Z)",
            self.0
        )
    }
}

impl std::error::Error for InvalidTime {}

impl FromStr for PgTime {
    type Err = InvalidTime;

    /// Reads `2026-11-21`, with or without `14:05`, `14:05:09` or `14:05:09.25` behind a space or
    /// `T`, with or without `Z` or `+00`. Always UTC.
    fn from_str(text: &str) -> Result<PgTime, InvalidTime> {
        parse_utc(text).map(PgTime).ok_or_else(|| InvalidTime(text.to_owned()))
    }
}

fn parse_utc(text: &str) -> Option<i64> {
    let text = text.strip_suffix('Z').or_else(|| text.strip_suffix("+00")).unwrap_or(text);
    let (date, clock) = match text.split_once([' ', 'T']) {
        Some((date, clock)) => (date, clock),
        None => (text, "00:00"),
    };
    let number = |text: &str, digits: usize, max: i64| -> Option<i64> {
        let fits = text.len() == digits && text.bytes().all(|b| b.is_ascii_digit());
        fits.then(|| text.parse().ok()).flatten().filter(|n| *n <= max)
    };
    let mut parts = date.split('-');
    let (year, month, day) = (parts.next()?, parts.next()?, parts.next()?);
    let (year, month, day) = (number(year, 4, 9999)?, number(month, 2, 12)?, number(day, 2, 31)?);
    if parts.next().is_some() || month < 1 || day < 1 {
        return None;
    }
    let march_year = year - i64::from(month <= 2);
    let era = march_year.div_euclid(400);
    let year_of_era = march_year.rem_euclid(400);
    let month_from_march = if month > 2 { month - 3 } else { month + 9 };
    let of_year = (153 * month_from_march + 2) / 5 + day - 1;
    let of_era = year_of_era * 365 + year_of_era / 4 - year_of_era / 100 + of_year;
    let days = era * DAYS_OF_400_YEARS + of_era - POSTGRES_EPOCH_FROM_MARCH_0;
    // The 31st of a month of 30 days would be another day.
    if date_parts(days).0 != date {
        return None;
    }
    let mut parts = clock.split(':');
    let (hours, minutes) = (number(parts.next()?, 2, 23)?, number(parts.next()?, 2, 59)?);
    let (seconds, fraction) = match parts.next() {
        None => (0, 0),
        Some(seconds) => {
            let (whole, fraction) = seconds.split_once('.').unwrap_or((seconds, "0"));
            if fraction.is_empty() || fraction.len() > 6 {
                return None;
            }
            let micros = number(&format!("{fraction:0<6}"), 6, 999_999)?;
            (number(whole, 2, 59)?, micros)
        }
    };
    if parts.next().is_some() {
        return None;
    }
    let seconds = (days * 24 + hours) * 3_600 + minutes * 60 + seconds;
    Some(seconds * 1_000_000 + fraction)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_print_and_parse_as_postgres_does() {
        for (micros, text) in [
            (0, "2000-01-01 00:00:00+00"),
            (-1, "1999-12-31 23:59:59.999999+00"),
            (5_097_600_000_000, "2000-02-29 00:00:00+00"),
            (845_818_097_120_000, "2026-10-20 13:28:17.12+00"),
            (i64::MAX, "infinity"),
            (i64::MIN, "-infinity"),
            (-63_112_780_800_000_000, "0001-01-14 00:00:00+00 BC"),
        ] {
            assert_eq!(PgTime(micros).to_string(), text);
            if (0..=9_999).contains(&micros.saturating_div(31_556_952_000_000))
                && micros != i64::MAX
            {
                assert_eq!(text.parse(), Ok(PgTime(micros)), "{text}");
            }
        }
        for day in -2_500_000..2_500_000 {
            if day % 37 == 0 {
                let text = date_text(day);
                let parsed = text.parse::<PgTime>().map(|time| time.0 / MICROS_PER_DAY);
                let has_four_digits = text.len() == 10;
                assert_eq!(parsed == Ok(i64::from(day)), has_four_digits, "{text}");
            }
        }
        assert_eq!("2000-01-01T00:01Z".parse(), Ok(PgTime(60_000_000)));
        for wrong in ["", "2026-02-30", "2026-1-01", "2026-01-01 24:00", "2026-01-01 1:00", "now"] {
            assert!(wrong.parse::<PgTime>().is_err(), "{wrong}");
        }
    }
}
