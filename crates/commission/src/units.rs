//! Sizes and figures as people write and read them.

/// Reads a size: digits, then nothing or `B`, `kB`, `MB`, `GB`, `TB` (powers of 1,024, as
/// PostgreSQL's settings have them; `KiB` and the like mean the same).
///
/// # Errors
/// Says what a size looks like.
pub fn parse_bytes(text: &str) -> Result<u64, String> {
    let text = text.trim();
    let end = text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len());
    let (digits, unit) = text.split_at(end);
    let shift = match unit.trim().to_ascii_lowercase().as_str() {
        "" | "b" => 0,
        "k" | "kb" | "kib" => 10,
        "m" | "mb" | "mib" => 20,
        "g" | "gb" | "gib" => 30,
        "t" | "tb" | "tib" => 40,
        _ => return Err(format!("\"{text}\" is no size; write for instance 512MB or 4GB")),
    };
    digits
        .parse::<u64>()
        .ok()
        .and_then(|number| number.checked_mul(1 << shift))
        .ok_or_else(|| format!("\"{text}\" is no size; write for instance 512MB or 4GB"))
}

/// A size, exact where it is a whole number of a unit: `4 KiB`, `1.5 GiB`.
pub fn bytes(size: u64) -> String {
    const UNITS: [&str; 5] = ["B", "KiB", "MiB", "GiB", "TiB"];
    let mut value = size as f64;
    let mut unit = 0;
    while value >= 1_024.0 && unit + 1 < UNITS.len() {
        value /= 1_024.0;
        unit += 1;
    }
    if value.fract() == 0.0 || value >= 100.0 {
        format!("{value:.0} {}", UNITS[unit])
    } else {
        format!("{value:.1} {}", UNITS[unit])
    }
}

/// A whole number with its thousands apart: `100,000`.
pub fn count(number: u64) -> String {
    let digits = number.to_string();
    let mut out = String::with_capacity(digits.len() + digits.len() / 3);
    for (at, digit) in digits.chars().enumerate() {
        if at > 0 && (digits.len() - at).is_multiple_of(3) {
            out.push(',');
        }
        out.push(digit);
    }
    out
}

/// A figure with three digits that count: `0.0123`, `4.57`, `1,235`.
pub fn figure(value: f64) -> String {
    let size = value.abs();
    if !value.is_finite() {
        "–".to_owned()
    } else if size >= 99.95 {
        let sign = if value < 0.0 { "-" } else { "" };
        format!("{sign}{}", count(size.round() as u64))
    } else if size >= 9.995 {
        format!("{value:.1}")
    } else if size >= 0.9995 || size == 0.0 {
        format!("{value:.2}")
    } else {
        format!("{value:.3}")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_read_and_written() {
        for (text, size) in
            [("0", 0), ("512", 512), ("4kB", 4_096), ("1 GB", 1 << 30), ("2TiB", 2 << 40)]
        {
            assert_eq!(parse_bytes(text).unwrap(), size, "{text}");
        }
        for wrong in ["", "GB", "-1", "1.5GB", "1 XB", "99999999999TB"] {
            assert!(parse_bytes(wrong).is_err(), "{wrong}");
        }
        for (size, text) in
            [(0, "0 B"), (4_096, "4 KiB"), (3 << 29, "1.5 GiB"), (1_000_000, "977 KiB")]
        {
            assert_eq!(bytes(size), text);
        }
    }

    #[test]
    fn figures_have_three_digits() {
        for (value, text) in [
            (0.0, "0.00"),
            (0.0123, "0.012"),
            (4.567, "4.57"),
            (45.67, "45.7"),
            (1_234.5, "1,235"),
            (-1_234_567.0, "-1,234,567"),
            (f64::NAN, "–"),
        ] {
            assert_eq!(figure(value), text);
        }
        assert_eq!(count(100_000), "100,000");
    }
}
