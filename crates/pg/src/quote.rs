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

/// The text form of an array of strings, for a parameter of type `text[]`.
pub fn text_array<'a>(elements: impl IntoIterator<Item = &'a str>) -> String {
    let mut array = String::from("{");
    for element in elements {
        if array.len() > 1 {
            array.push(',');
        }
        array.push('"');
        for character in element.chars() {
            if matches!(character, '"' | '\\') {
                array.push('\\');
            }
            array.push(character);
        }
        array.push('"');
    }
    array.push('}');
    array
}

#[cfg(test)]
mod tests {
    use super::{quote_literal, text_array};

    #[test]
    fn elements_of_arrays_are_quoted() {
        assert_eq!(text_array([]), "{}");
        assert_eq!(text_array(["a", "", "b,\"c\\ {}"]), r#"{"a","","b,\"c\\ {}"}"#);
    }

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
