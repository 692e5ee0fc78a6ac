//! `synchronous_standby_names`, read as PostgreSQL does ("20.6.2. Primary Server"): an optional
//! `FIRST n` or `ANY n` with parentheses, and names, quoted or not, compared without regard to case.
//! Pure.

/// Whether a standby of this `application_name` is one that is named; `*` names all.
pub fn includes(setting: &str, application_name: &str) -> bool {
    names(list(setting)).any(|name| name == "*" || name.eq_ignore_ascii_case(application_name))
}

/// The names, without their quotes.
pub fn named(setting: &str) -> Vec<String> {
    names(list(setting)).collect()
}

/// How many standbys commits wait for, of how many that are named.
pub fn awaited(setting: &str) -> (usize, usize) {
    let list = list(setting);
    let before = setting.split('(').next().filter(|_| list.len() < setting.len());
    let number = before.and_then(|words| words.split_ascii_whitespace().last()?.parse().ok());
    (number.unwrap_or(1), names(list).count())
}

/// The words that come before a list are no names: they stand before its parenthesis.
fn list(setting: &str) -> &str {
    match setting.find(['(', '"']) {
        Some(at) if setting[at..].starts_with('(') => {
            setting[at + 1..].trim_end().trim_end_matches(')')
        }
        Some(_) | None => setting,
    }
}

/// Names without their quotes. What cannot be read gives names that nobody has.
fn names(list: &str) -> impl Iterator<Item = String> {
    let mut rest = list;
    std::iter::from_fn(move || {
        rest = rest.trim_start_matches(|c: char| c == ',' || c.is_ascii_whitespace());
        let first = rest.chars().next()?;
        let mut name = String::new();
        if first != '"' {
            let end = rest.find(|c: char| c == ',' || c.is_ascii_whitespace());
            let (word, after) = rest.split_at(end.unwrap_or(rest.len()));
            rest = after;
            name.push_str(word);
            return Some(name);
        }
        let mut characters = rest[1..].char_indices().peekable();
        while let Some((at, character)) = characters.next() {
            match (character, characters.peek()) {
                ('"', Some((_, '"'))) => {
                    characters.next();
                    name.push('"');
                }
                ('"', _) => {
                    rest = &rest[1 + at + 1..];
                    return Some(name);
                }
                _ => name.push(character),
            }
        }
        rest = "";
        Some(name)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_read_as_the_server_reads_them() {
        let name = "farshore_dr";
        for named in [
            "farshore_dr",
            "*",
            "\"*\"",
            "FARSHORE_DR",
            " a , farshore_dr ",
            "\"Farshore_Dr\"",
            "2 (a, farshore_dr)",
            "FIRST 1 (farshore_dr, b)",
            "any 2(\"a,(b\", farshore_dr)",
            "ANY 1 (*) ",
        ] {
            assert!(includes(named, name), "{named}");
        }
        for other in [
            "",
            "farshore_dr2",
            "x_farshore_dr_y",
            "\"farshore_dr \"",
            "\"a, farshore_dr\"",
            "FIRST 1 (farshore_dr2)",
            "\"x",
            "(",
        ] {
            assert!(!includes(other, name), "{other}");
        }
        assert!(includes("FIRST 1 (\"Far Shore-\"\"x\"\"\", b)", "Far Shore-\"x\""));
        assert!(includes("\"a(b\"", "a(b"));
        assert!(!includes("FIRST 1 (a)", "first"));
        assert!(includes("b, \"é\"", "é"));
        assert_eq!(named("ANY 1 (a, \"B c\")"), ["a", "B c"]);
    }

    #[test]
    fn as_many_are_waited_for_as_the_server_waits_for() {
        for (setting, expected) in [
            ("a", (1, 1)),
            ("a, b", (1, 2)),
            ("\"a(b\", c", (1, 2)),
            ("FIRST 1 (a, b)", (1, 2)),
            ("any 2(a,b, c)", (2, 3)),
            ("2 (a, \"b,c\")", (2, 2)),
        ] {
            assert_eq!(awaited(setting), expected, "{setting}");
        }
    }
}
