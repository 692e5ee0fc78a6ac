//! The binary form of arrays: dimensions, whether there are NULLs, the element type, and the
//! elements, each with its length (`src/backend/utils/adt/arrayfuncs.c`, `array_send`).

use super::{binary_text, hexadecimal, known, oid, travels_as};
use bytes::Buf;
use farshore_model::{TypeKind, UserType};

/// Most dimensions an array has (`MAXDIM`).
const DIMENSIONS_MAX: usize = 6;

/// Array types and their elements.
const ARRAYS: &[(u32, u32)] = &[
    (199, oid::JSON),
    (1000, oid::BOOL),
    (1001, oid::BYTEA),
    (1003, oid::NAME),
    (1005, oid::INT2),
    (1007, oid::INT4),
    (1009, oid::TEXT),
    (1014, oid::BPCHAR),
    (1015, oid::VARCHAR),
    (1016, oid::INT8),
    (1021, oid::FLOAT4),
    (1022, oid::FLOAT8),
    (1028, oid::OID),
    (1041, oid::INET),
    (1115, oid::TIMESTAMP),
    (1182, oid::DATE),
    (1183, oid::TIME),
    (1185, oid::TIMESTAMPTZ),
    (1187, oid::INTERVAL),
    (1231, oid::NUMERIC),
    (2951, oid::UUID),
    (3807, oid::JSONB),
];

/// As PostgreSQL prints it, but for lower bounds other than 1; `None` when the bytes are not an
/// array of that type, or the type is not known here.
pub(super) fn text(bytes: &[u8], type_oid: u32, types: &[UserType]) -> Option<String> {
    let element = match known(type_oid, types).map(|known| &known.kind) {
        Some(TypeKind::Array { element }) => *element,
        _ => ARRAYS.iter().find(|(array, _)| *array == type_oid)?.1,
    };
    let mut rest = bytes;
    let dimensions = usize::try_from(rest.try_get_i32().ok()?).ok()?;
    let (_has_nulls, element_oid) = (rest.try_get_i32().ok()?, rest.try_get_u32().ok()?);
    if dimensions > DIMENSIONS_MAX || element_oid != element {
        return None;
    }
    if dimensions == 0 {
        return Some("{}".to_owned());
    }
    let mut lengths = Vec::new();
    for _ in 0..dimensions {
        lengths.push(usize::try_from(rest.try_get_i32().ok()?).ok()?);
        let _lower_bound = rest.try_get_i32().ok()?;
    }
    // Every element has a length, so that the bytes bound their number.
    let elements = lengths.iter().try_fold(1_usize, |all, length| all.checked_mul(*length))?;
    if elements == 0 || elements > rest.len() / 4 {
        return None;
    }
    let mut out = String::new();
    let element = travels_as(element, types);
    // Without the types: an array within an array (a domain makes one) would go on without a bound.
    push_dimension(&mut out, &lengths, &mut rest, &|value| {
        binary_text(value, element, &[]).unwrap_or_else(|| hexadecimal(value))
    })?;
    rest.is_empty().then_some(out)
}

fn push_dimension(
    out: &mut String,
    lengths: &[usize],
    rest: &mut &[u8],
    element: &dyn Fn(&[u8]) -> String,
) -> Option<()> {
    let (length, inner) = lengths.split_first()?;
    out.push('{');
    for n in 0..*length {
        if n > 0 {
            out.push(',');
        }
        if !inner.is_empty() {
            push_dimension(out, inner, rest, element)?;
            continue;
        }
        let len = rest.try_get_i32().ok()?;
        if len == -1 {
            out.push_str("NULL");
            continue;
        }
        let (value, after) = rest.split_at_checked(usize::try_from(len).ok()?)?;
        *rest = after;
        push_element(out, &element(value));
    }
    out.push('}');
    Some(())
}

fn push_element(out: &mut String, text: &str) {
    let plain = !text.is_empty()
        && !text.eq_ignore_ascii_case("null")
        && !text.contains(|c: char| c.is_whitespace() || "{},\"\\".contains(c));
    if plain {
        out.push_str(text);
        return;
    }
    out.push('"');
    for c in text.chars() {
        if matches!(c, '"' | '\\') {
            out.push('\\');
        }
        out.push(c);
    }
    out.push('"');
}

#[cfg(test)]
mod tests {
    fn text(bytes: &[u8], type_oid: u32) -> Option<String> {
        super::text(bytes, type_oid, &[])
    }

    fn array(dimensions: &[i32], element: u32, values: &[Option<&[u8]>]) -> Vec<u8> {
        let mut bytes = Vec::new();
        bytes.extend((dimensions.len() as i32).to_be_bytes());
        bytes.extend(1_i32.to_be_bytes());
        bytes.extend(element.to_be_bytes());
        for length in dimensions {
            bytes.extend(length.to_be_bytes());
            bytes.extend(1_i32.to_be_bytes());
        }
        for value in values {
            bytes.extend(value.map_or(-1, |value| value.len() as i32).to_be_bytes());
            bytes.extend(value.unwrap_or_default());
        }
        bytes
    }

    #[test]
    fn arrays_print_as_postgres_prints_them() {
        let texts = array(&[3], 25, &[Some(b"a b"), None, Some(b"c")]);
        assert_eq!(text(&texts, 1009).as_deref(), Some("{\"a b\",NULL,c}"));
        let grid = array(&[2, 1], 21, &[Some(&[0, 1]), Some(&[0, 2])]);
        assert_eq!(text(&grid, 1005).as_deref(), Some("{{1},{2}}"));
        assert_eq!(text(&array(&[], 23, &[]), 1007).as_deref(), Some("{}"));
        for len in 0..texts.len() {
            assert_eq!(text(&texts[..len], 1009), None, "{len}");
        }
        // Dimensions that the bytes cannot hold.
        assert_eq!(text(&array(&[i32::MAX, i32::MAX], 21, &[]), 1005), None);
        assert_eq!(text(&array(&[i32::MAX, 0], 21, &[]), 1005), None);
    }
}
