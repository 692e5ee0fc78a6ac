//! Column values as people and JSON read them. For messages and listings only: what is applied to
//! a target passes through as it came.

mod array;
mod numeric;

use crate::pgoutput::Value;
use farshore_model::{TypeKind, UserType, date_text, time_of_day_text, timestamp_text};
use std::fmt::Write as _;

/// A value made readable.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Readable {
    /// SQL NULL.
    Null,
    /// Not in the message: a large value that the update did not touch.
    Unchanged,
    /// Text that is JSON as it stands: a number, `true`, `false`, or a whole document. On one line.
    Json(String),
    /// Any other text.
    Text(String),
}

impl Readable {
    /// As a person reads it.
    pub fn text(&self) -> &str {
        match self {
            Readable::Null => "NULL",
            Readable::Unchanged => "(unchanged)",
            Readable::Json(text) | Readable::Text(text) => text,
        }
    }

    /// Appends it as JSON; a value that is not in the message becomes `{"unchanged": true}`.
    pub fn push_json(&self, out: &mut String) {
        match self {
            Readable::Null => out.push_str("null"),
            Readable::Unchanged => out.push_str("{\"unchanged\": true}"),
            Readable::Json(text) => out.push_str(text),
            Readable::Text(text) => push_json_string(out, text),
        }
    }
}

/// Appends `text` as a JSON string.
pub fn push_json_string(out: &mut String, text: &str) {
    out.push('"');
    for c in text.chars() {
        match c {
            '"' => out.push_str("\\\""),
            '\\' => out.push_str("\\\\"),
            '\n' => out.push_str("\\n"),
            '\r' => out.push_str("\\r"),
            '\t' => out.push_str("\\t"),
            c if c < ' ' => {
                let _ = write!(out, "\\u{:04x}", u32::from(c));
            }
            c => out.push(c),
        }
    }
    out.push('"');
}

/// Type OIDs of PostgreSQL's own types, the same on every server (`pg_type.dat`).
mod oid {
    pub const BOOL: u32 = 16;
    pub const BYTEA: u32 = 17;
    pub const CHAR: u32 = 18;
    pub const NAME: u32 = 19;
    pub const INT8: u32 = 20;
    pub const INT2: u32 = 21;
    pub const INT4: u32 = 23;
    pub const TEXT: u32 = 25;
    pub const OID: u32 = 26;
    pub const XID: u32 = 28;
    pub const JSON: u32 = 114;
    pub const XML: u32 = 142;
    pub const POINT: u32 = 600;
    pub const CIDR: u32 = 650;
    pub const FLOAT4: u32 = 700;
    pub const FLOAT8: u32 = 701;
    pub const MACADDR8: u32 = 774;
    pub const MACADDR: u32 = 829;
    pub const INET: u32 = 869;
    pub const BPCHAR: u32 = 1042;
    pub const VARCHAR: u32 = 1043;
    pub const DATE: u32 = 1082;
    pub const TIME: u32 = 1083;
    pub const TIMESTAMP: u32 = 1114;
    pub const TIMESTAMPTZ: u32 = 1184;
    pub const INTERVAL: u32 = 1186;
    pub const TIMETZ: u32 = 1266;
    pub const BIT: u32 = 1560;
    pub const VARBIT: u32 = 1562;
    pub const NUMERIC: u32 = 1700;
    pub const UUID: u32 = 2950;
    pub const PG_LSN: u32 = 3220;
    pub const JSONB: u32 = 3802;
}

/// Domains over domains that are followed; PostgreSQL sets no limit.
const DOMAINS_MAX: usize = 32;

/// The type of PostgreSQL's own whose binary form a type's values have, or the type itself. `types`
/// are those that are not its own, sorted by OID.
fn travels_as(type_oid: u32, types: &[UserType]) -> u32 {
    let mut travels_as = type_oid;
    for _ in 0..DOMAINS_MAX {
        match known(travels_as, types) {
            Some(UserType { kind: TypeKind::Domain { base, .. }, .. }) => travels_as = *base,
            Some(UserType { kind: TypeKind::Enum, .. }) => return oid::TEXT,
            Some(UserType { kind: TypeKind::Base, name, .. }) if name == "citext" => {
                return oid::TEXT;
            }
            _ => break,
        }
    }
    travels_as
}

fn known(type_oid: u32, types: &[UserType]) -> Option<&UserType> {
    let at = types.binary_search_by_key(&type_oid, |known| known.oid).ok()?;
    Some(&types[at])
}

/// Makes a value of a type readable. `types` are those of its relation that are not PostgreSQL's
/// own, sorted by OID. Binary forms that are not known here, or that are not what their type says,
/// become hexadecimal digits behind `\x`.
pub fn readable(value: Value<'_>, type_oid: u32, types: &[UserType]) -> Readable {
    let type_oid = travels_as(type_oid, types);
    match value {
        Value::Null => Readable::Null,
        Value::Unchanged => Readable::Unchanged,
        Value::Text(text) => of_text(String::from_utf8_lossy(text).into_owned(), type_oid),
        Value::Binary(bytes) => match binary_text(bytes, type_oid, types) {
            Some(text) => of_text(text, type_oid),
            None => Readable::Text(hexadecimal(bytes)),
        },
    }
}

fn of_text(text: String, type_oid: u32) -> Readable {
    match type_oid {
        oid::BOOL if text == "t" => Readable::Json("true".to_owned()),
        oid::BOOL if text == "f" => Readable::Json("false".to_owned()),
        oid::INT2 | oid::INT4 | oid::INT8 | oid::OID | oid::FLOAT4 | oid::FLOAT8 | oid::NUMERIC
            if is_json_number(&text) =>
        {
            Readable::Json(text)
        }
        // White space of a json value may be line ends; within its strings they are escaped.
        oid::JSON | oid::JSONB => Readable::Json(text.replace(['\n', '\r', '\t'], " ")),
        _ => Readable::Text(text),
    }
}

fn is_json_number(text: &str) -> bool {
    let digits = text.strip_prefix('-').unwrap_or(text);
    digits.starts_with(|c: char| c.is_ascii_digit())
        && (!digits.starts_with('0') || !digits[1..].starts_with(|c: char| c.is_ascii_digit()))
        && digits.ends_with(|c: char| c.is_ascii_digit())
        && digits.parse::<f64>().is_ok()
        && !digits.contains(".e")
}

/// `\x` and hexadecimal digits, as PostgreSQL prints bytea.
pub fn hexadecimal(bytes: &[u8]) -> String {
    let mut text = String::with_capacity(2 + 2 * bytes.len());
    text.push_str("\\x");
    for byte in bytes {
        let _ = write!(text, "{byte:02x}");
    }
    text
}

fn integer<const N: usize>(bytes: &[u8]) -> Option<[u8; N]> {
    bytes.try_into().ok()
}

/// A value's binary form as its type prints it; `None` when it is not one of that type, or the
/// type is not known here.
fn binary_text(bytes: &[u8], type_oid: u32, types: &[UserType]) -> Option<String> {
    let utf8 = |bytes: &[u8]| String::from_utf8(bytes.to_vec()).ok();
    Some(match type_oid {
        oid::BOOL => match bytes {
            [0] => "f".to_owned(),
            [1] => "t".to_owned(),
            _ => return None,
        },
        oid::INT2 => i16::from_be_bytes(integer(bytes)?).to_string(),
        oid::INT4 => i32::from_be_bytes(integer(bytes)?).to_string(),
        oid::INT8 => i64::from_be_bytes(integer(bytes)?).to_string(),
        oid::OID | oid::XID => u32::from_be_bytes(integer(bytes)?).to_string(),
        oid::FLOAT4 => float_text(f32::from_be_bytes(integer(bytes)?)),
        oid::FLOAT8 => float_text(f64::from_be_bytes(integer(bytes)?)),
        oid::NUMERIC => numeric::text(bytes)?,
        oid::TEXT | oid::VARCHAR | oid::BPCHAR | oid::NAME | oid::CHAR | oid::JSON | oid::XML => {
            utf8(bytes)?
        }
        // The first byte is the version of the format.
        oid::JSONB => match bytes.split_first()? {
            (1, text) => utf8(text)?,
            _ => return None,
        },
        oid::BYTEA => hexadecimal(bytes),
        oid::UUID => uuid_text(integer(bytes)?),
        oid::DATE => date_text(i32::from_be_bytes(integer(bytes)?)),
        oid::TIME => time_of_day_text(i64::from_be_bytes(integer(bytes)?)),
        oid::TIMETZ => {
            let (time, zone) = bytes.split_first_chunk()?;
            let zone = zone_text(i32::from_be_bytes(integer(zone)?));
            time_of_day_text(i64::from_be_bytes(*time)) + &zone
        }
        oid::TIMESTAMP => timestamp_text(i64::from_be_bytes(integer(bytes)?), ""),
        oid::TIMESTAMPTZ => timestamp_text(i64::from_be_bytes(integer(bytes)?), "+00"),
        oid::INTERVAL => {
            let (micros, rest) = bytes.split_first_chunk()?;
            let (days, months) = rest.split_first_chunk()?;
            interval_text(
                i32::from_be_bytes(integer(months)?),
                i32::from_be_bytes(*days),
                i64::from_be_bytes(*micros),
            )
        }
        oid::INET | oid::CIDR => network_text(bytes, type_oid == oid::CIDR)?,
        oid::MACADDR | oid::MACADDR8 => {
            let groups: Vec<String> = bytes.iter().map(|byte| format!("{byte:02x}")).collect();
            groups.join(":")
        }
        oid::PG_LSN => farshore_model::Lsn(u64::from_be_bytes(integer(bytes)?)).to_string(),
        oid::POINT => {
            let (x, y) = bytes.split_first_chunk()?;
            let y = f64::from_be_bytes(integer(y)?);
            format!("({},{})", float_text(f64::from_be_bytes(*x)), float_text(y))
        }
        oid::BIT | oid::VARBIT => {
            let (len, bits) = bytes.split_first_chunk()?;
            let len = usize::try_from(i32::from_be_bytes(*len)).ok()?;
            if bits.len() != len.div_ceil(8) {
                return None;
            }
            let bit = |n: usize| if bits[n / 8] & (0x80 >> (n % 8)) == 0 { '0' } else { '1' };
            (0..len).map(bit).collect()
        }
        _ => array::text(bytes, type_oid, types)?,
    })
}

/// Shortest digits that read back as the same number, as PostgreSQL prints them but for the limit
/// from which on it uses an exponent.
fn float_text(number: impl Into<f64> + std::fmt::Display + std::fmt::LowerExp + Copy) -> String {
    let wide: f64 = number.into();
    if wide.is_nan() {
        "NaN".to_owned()
    } else if wide.is_infinite() {
        if wide > 0.0 { "Infinity" } else { "-Infinity" }.to_owned()
    } else if wide != 0.0 && !(1e-4..1e15).contains(&wide.abs()) {
        format!("{number:e}")
    } else {
        number.to_string()
    }
}

fn uuid_text(bytes: [u8; 16]) -> String {
    let mut text = String::with_capacity(36);
    for (at, byte) in bytes.iter().enumerate() {
        if matches!(at, 4 | 6 | 8 | 10) {
            text.push('-');
        }
        let _ = write!(text, "{byte:02x}");
    }
    text
}

/// A zone in seconds west of Greenwich.
fn zone_text(west: i32) -> String {
    let (sign, seconds) =
        if west > 0 { ('-', west.unsigned_abs()) } else { ('+', west.unsigned_abs()) };
    let mut text = format!("{sign}{:02}", seconds / 3_600);
    if seconds % 3_600 != 0 {
        let _ = write!(text, ":{:02}", seconds / 60 % 60);
    }
    if seconds % 60 != 0 {
        let _ = write!(text, ":{:02}", seconds % 60);
    }
    text
}

fn interval_text(months: i32, days: i32, micros: i64) -> String {
    let mut parts = Vec::new();
    let mut part = |number: i32, unit: &str| {
        if number != 0 {
            let plural = if number == 1 { "" } else { "s" };
            parts.push(format!("{number} {unit}{plural}"));
        }
    };
    part(months / 12, "year");
    part(months % 12, "mon");
    part(days, "day");
    if micros != 0 || parts.is_empty() {
        let sign = if micros < 0 { "-" } else { "" };
        let micros = i64::try_from(micros.unsigned_abs()).unwrap_or(i64::MAX);
        parts.push(format!("{sign}{}", time_of_day_text(micros)));
    }
    parts.join(" ")
}

/// inet and cidr: family, bits of the mask, whether it is a cidr, bytes of the address, address.
fn network_text(bytes: &[u8], always_with_mask: bool) -> Option<String> {
    let ([_family, mask, _is_cidr, len], address) = bytes.split_first_chunk()?;
    let (address, full) = match (len, address.len()) {
        (4, 4) => (std::net::IpAddr::from(integer::<4>(address)?), 32),
        (16, 16) => (std::net::IpAddr::from(integer::<16>(address)?), 128),
        _ => return None,
    };
    let with_mask = always_with_mask || *mask != full;
    Some(if with_mask { format!("{address}/{mask}") } else { address.to_string() })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn text(bytes: &[u8], type_oid: u32) -> String {
        readable(Value::Binary(bytes), type_oid, &[]).text().to_owned()
    }

    #[test]
    fn types_of_ones_own_are_read_as_what_they_travel_as() {
        let of = |oid, name: &str, kind| UserType {
            oid,
            schema: "public".to_owned(),
            name: name.to_owned(),
            kind,
        };
        let domain = |base| TypeKind::Domain { base, modifier: None };
        let types = [
            of(90_000, "mood", TypeKind::Enum),
            of(90_001, "moods", TypeKind::Array { element: 90_000 }),
            of(90_002, "better", domain(90_000)),
            of(90_003, "count", domain(oid::INT4)),
            of(90_004, "citext", TypeKind::Base),
            of(90_005, "hstore", TypeKind::Base),
            of(90_006, "itself", domain(90_006)),
            of(90_007, "counts", domain(1007)),
        ];
        let text =
            |bytes: &[u8], oid| readable(Value::Binary(bytes), oid, &types).text().to_owned();
        assert_eq!(text(b"sad", 90_000), "sad");
        assert_eq!(text(b"sad", 90_002), "sad");
        assert_eq!(text(b"Ab", 90_004), "Ab");
        assert_eq!(text(&[0, 0, 0, 7], 90_003), "7");
        assert_eq!(text(&[0, 1], 90_005), "\\x0001");
        assert_eq!(text(&[0, 1], 90_006), "\\x0001");
        let array = |element: u32, value: &[u8]| {
            let mut bytes: Vec<u8> = [1, 0, element, 1, 1].map(u32::to_be_bytes).concat();
            bytes.extend((value.len() as u32).to_be_bytes());
            bytes.extend(value);
            bytes
        };
        assert_eq!(text(&array(90_000, b"so so"), 90_001), "{\"so so\"}");
        assert_eq!(text(&array(oid::INT4, &[0, 0, 0, 7]), 90_007), "{7}");
    }

    #[test]
    fn binary_values_are_readable() {
        assert_eq!(text(&[0xff, 0xff, 0xff, 0xfe], oid::INT4), "-2");
        assert_eq!(text("é".as_bytes(), oid::TEXT), "é");
        assert_eq!(text(&[1], oid::BOOL), "true");
        assert_eq!(text(&1.5_f64.to_be_bytes(), oid::FLOAT8), "1.5");
        assert_eq!(text(&[1, b'[', b']'], oid::JSONB), "[]");
        assert_eq!(text(&[2, 24, 0, 4, 10, 1, 2, 0], oid::INET), "10.1.2.0/24");
        assert_eq!(text(&0_i64.to_be_bytes(), oid::TIMESTAMPTZ), "2000-01-01 00:00:00+00");
        assert_eq!(text(&[0, 0, 0, 3, 0b1010_0000], oid::VARBIT), "101");
        // Unknown types and wrong lengths.
        assert_eq!(text(&[1, 2], 90_000), "\\x0102");
        assert_eq!(text(&[1, 2], oid::INT4), "\\x0102");
    }

    #[test]
    fn json_is_valid_and_on_one_line() {
        let json = |value: Value<'_>, type_oid| {
            let mut out = String::new();
            readable(value, type_oid, &[]).push_json(&mut out);
            out
        };
        assert_eq!(json(Value::Null, oid::TEXT), "null");
        assert_eq!(json(Value::Text(b"12.50"), oid::NUMERIC), "12.50");
        assert_eq!(json(Value::Text(b"NaN"), oid::NUMERIC), "\"NaN\"");
        assert_eq!(json(Value::Text(b"1e+20"), oid::FLOAT8), "1e+20");
        assert_eq!(json(Value::Text(b"12"), oid::TEXT), "\"12\"");
        assert_eq!(json(Value::Text(b"f"), oid::BOOL), "false");
        assert_eq!(json(Value::Text(b"a\"\\\n\x01"), oid::TEXT), "\"a\\\"\\\\\\n\\u0001\"");
        assert_eq!(json(Value::Text(b"{\"a\":\n1}"), oid::JSON), "{\"a\": 1}");
    }
}
