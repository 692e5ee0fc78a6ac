/// Quotes an SQL string literal. With a backslash in it, it becomes an `E''` string, so that it
/// means the same whatever `standard_conforming_strings` is.
///
/// A zero byte cannot be part of any PostgreSQL string and is refused when the SQL is sent.
pub fn quote_literal(text: &str) -> String {
    let doubled = text.replace('\'', "''");
    if doubled.contains('\\') {
        format!("E'{}'", doubled.replace('\\', "\\\\"))
    } else {
        format!("'{doubled}'")
    }
}

#[cfg(test)]
mod tests {
    use super::quote_literal;

    #[test]
    fn literals_are_quoted_for_either_setting() {
        for (text, quoted) in [
            ("", "''"),
            ("a", "'a'"),
            ("it's", "'it''s'"),
            ("a\\b", "E'a\\\\b'"),
            ("\\'", "E'\\\\'''"),
        ] {
            assert_eq!(quote_literal(text), quoted);
        }
    }
}
