//! The binary form of `numeric`: base-10,000 digits with a weight, a sign and a display scale
//! (`src/backend/utils/adt/numeric.c`, `numeric_send`).

const NEGATIVE: u16 = 0x4000;
const NOT_A_NUMBER: u16 = 0xC000;
const INFINITY: u16 = 0xD000;
const NEGATIVE_INFINITY: u16 = 0xF000;

/// As PostgreSQL prints it; `None` when the bytes are not a numeric.
pub(super) fn text(bytes: &[u8]) -> Option<String> {
    let (head, digits) = bytes.split_first_chunk::<8>()?;
    let field = |n: usize| u16::from_be_bytes([head[2 * n], head[2 * n + 1]]);
    let (count, weight, sign, scale) = (field(0), field(1) as i16, field(2), field(3));
    if digits.len() != usize::from(count) * 2 {
        return None;
    }
    match sign {
        NOT_A_NUMBER => return Some("NaN".to_owned()),
        INFINITY => return Some("Infinity".to_owned()),
        NEGATIVE_INFINITY => return Some("-Infinity".to_owned()),
        0 | NEGATIVE => {}
        _ => return None,
    }
    // Groups before the first digit and after the last are zero.
    let digit = |at: i32| {
        let at = usize::try_from(at).ok().filter(|at| *at < usize::from(count));
        at.map_or(0, |at| u16::from_be_bytes([digits[2 * at], digits[2 * at + 1]]))
    };
    let mut out = String::new();
    if sign == NEGATIVE {
        out.push('-');
    }
    let weight = i32::from(weight);
    let mut whole = String::new();
    for at in 0..=weight {
        whole.push_str(&format!("{:04}", digit(at)));
    }
    let whole = whole.trim_start_matches('0');
    out.push_str(if whole.is_empty() { "0" } else { whole });
    if scale > 0 {
        let mut fraction = String::new();
        let mut at = weight + 1;
        while fraction.len() < usize::from(scale) {
            fraction.push_str(&format!("{:04}", digit(at)));
            at += 1;
        }
        fraction.truncate(usize::from(scale));
        out.push('.');
        out.push_str(&fraction);
    }
    Some(out)
}

#[cfg(test)]
mod tests {
    use super::text;

    fn numeric(weight: i16, sign: u16, scale: u16, digits: &[u16]) -> Vec<u8> {
        let head = [digits.len() as u16, weight as u16, sign, scale];
        head.iter().chain(digits).flat_map(|field| field.to_be_bytes()).collect()
    }

    #[test]
    fn numerics_print_as_postgres_prints_them() {
        for (bytes, wanted) in [
            (numeric(0, 0, 2, &[12, 5000]), "12.50"),
            (numeric(1, 0x4000, 0, &[1, 2]), "-10002"),
            (numeric(-1, 0, 4, &[1]), "0.0001"),
            (numeric(-2, 0, 6, &[100]), "0.000001"),
            (numeric(2, 0, 0, &[1]), "100000000"),
            (numeric(0, 0, 3, &[]), "0.000"),
            (numeric(0, 0xC000, 0, &[]), "NaN"),
        ] {
            assert_eq!(text(&bytes).as_deref(), Some(wanted));
        }
        assert_eq!(text(&[0, 1, 0, 0, 0, 0, 0, 0]), None);
        // The longest that the head can name does not print for ever.
        assert!(text(&numeric(i16::MIN, 0, u16::MAX, &[1])).is_some());
    }
}
