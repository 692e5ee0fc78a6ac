//! A user's own work: SQL with the little of pgbench's language that such scripts need.

use crate::Error;
use rand::RngExt;
use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::path::Path;

/// Longer files are not scripts.
const SCRIPT_BYTES_MAX: u64 = 1 << 20;

/// Statements, with numbers to be drawn each time.
///
/// `\set name random(low, high)` and `\set name number` as in pgbench; `:name` stands for it in the
/// SQL, outside of quotes. It must not begin or end transactions: how many runs go into one is what
/// is varied.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Script {
    name: String,
    variables: Vec<(String, Value)>,
    parts: Vec<Part>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Value {
    Number(i64),
    Random(i64, i64),
}

#[derive(Debug, Clone, PartialEq, Eq)]
enum Part {
    Sql(String),
    Variable(String),
}

impl Script {
    /// Reads a file.
    ///
    /// # Errors
    /// [`Error::File`], or [`Error::Refused`] with the line that is not understood.
    pub fn read(path: &Path) -> Result<Script, Error> {
        let size = std::fs::metadata(path).map_err(Error::file("read", path))?.len();
        if size > SCRIPT_BYTES_MAX {
            return Err(Error::Refused(format!("{} is too long for a script", path.display())));
        }
        let text = std::fs::read_to_string(path).map_err(Error::file("read", path))?;
        let name = path.file_name().unwrap_or(path.as_os_str()).to_string_lossy().into_owned();
        Script::parse(&name, &text)
    }

    /// Understands a script.
    ///
    /// # Errors
    /// [`Error::Refused`] with the line that is not understood.
    pub fn parse(name: &str, text: &str) -> Result<Script, Error> {
        let mut variables: Vec<(String, Value)> = Vec::new();
        let mut sql = String::new();
        for (number, line) in text.lines().enumerate() {
            let refuse = |why: &str| Error::Refused(format!("{name}, line {}: {why}", number + 1));
            let trimmed = line.trim();
            if let Some(command) = trimmed.strip_prefix('\\') {
                variables.push(variable(command).ok_or_else(|| {
                    refuse("only \\set NAME NUMBER and \\set NAME random(LOW, HIGH) are understood")
                })?);
            } else if trimmed.starts_with("--") {
                continue;
            } else {
                let first = trimmed.split(|c: char| !c.is_ascii_alphabetic()).next();
                let first = first.unwrap_or_default().to_ascii_uppercase();
                if ["BEGIN", "START", "COMMIT", "END", "ROLLBACK", "ABORT"].contains(&&*first) {
                    return Err(refuse(
                        "leave out BEGIN and COMMIT: how many runs go into a transaction is varied",
                    ));
                }
                let _ = writeln!(sql, "{line}");
            }
        }
        if sql.trim().is_empty() {
            return Err(Error::Refused(format!("{name}: there is no statement in it")));
        }
        let parts = split(&sql, &variables);
        Ok(Script { name: name.to_owned(), variables, parts })
    }

    /// What it is called.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Adds the statements of a run to `out`, with numbers drawn anew.
    pub(crate) fn draw(&self, out: &mut String) {
        let mut rng = rand::rng();
        let drawn: BTreeMap<&str, i64> = self
            .variables
            .iter()
            .map(|(name, value)| {
                let value = match value {
                    Value::Number(number) => *number,
                    Value::Random(low, high) => rng.random_range(*low..=*high),
                };
                (name.as_str(), value)
            })
            .collect();
        for part in &self.parts {
            match part {
                Part::Sql(sql) => out.push_str(sql),
                Part::Variable(name) => {
                    let value = drawn.get(name.as_str()).copied().unwrap_or_default();
                    let _ = write!(out, "{value}");
                }
            }
        }
        // The last statement may lack it; an empty one does nothing.
        out.push(';');
    }
}

/// `set name 5` or `set name random(1, 10)`.
fn variable(command: &str) -> Option<(String, Value)> {
    let rest = command.strip_prefix("set")?.trim_start();
    let (name, value) = rest.split_once(char::is_whitespace)?;
    let is_name = |c: char| c.is_ascii_alphanumeric() || c == '_';
    if name.is_empty() || !name.chars().all(is_name) {
        return None;
    }
    let value = value.trim();
    let value = match value.parse() {
        Ok(number) => Value::Number(number),
        Err(_) => {
            let inner =
                value.strip_prefix("random")?.trim().strip_prefix('(')?.strip_suffix(')')?;
            let (low, high) = inner.split_once(',')?;
            let (low, high) = (low.trim().parse().ok()?, high.trim().parse().ok()?);
            (low <= high).then_some(Value::Random(low, high))?
        }
    };
    Some((name.to_owned(), value))
}

/// Finds `:name` of known names outside of quotes; `::type` is a cast.
fn split(sql: &str, variables: &[(String, Value)]) -> Vec<Part> {
    let mut parts = Vec::new();
    let mut text = String::new();
    let mut quote = None;
    let mut rest = sql;
    while let Some(next) = rest.chars().next() {
        let mut taken = next.len_utf8();
        match (quote, next) {
            (Some(open), _) if next == open => quote = None,
            (None, '\'' | '"') => quote = Some(next),
            (None, ':') if rest.starts_with("::") => taken = 2,
            (None, ':') => {
                let name: String = rest[1..]
                    .chars()
                    .take_while(|c| c.is_ascii_alphanumeric() || *c == '_')
                    .collect();
                if variables.iter().any(|(known, _)| *known == name) {
                    parts.push(Part::Sql(std::mem::take(&mut text)));
                    rest = &rest[1 + name.len()..];
                    parts.push(Part::Variable(name));
                    continue;
                }
            }
            _ => {}
        }
        text.push_str(&rest[..taken]);
        rest = &rest[taken..];
    }
    parts.push(Part::Sql(text));
    parts
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_drawn_into_the_statements_and_nowhere_else() {
        let script = Script::parse(
            "mine.sql",
            "-- comment\n\\set aid random(7, 7)\n\\set n -3\n\
             UPDATE t SET a = :n::int8, b = ':aid' WHERE id = :aid AND c = :other;\nSELECT 1\n",
        )
        .unwrap();
        let mut out = String::new();
        script.draw(&mut out);
        let wanted =
            "UPDATE t SET a = -3::int8, b = ':aid' WHERE id = 7 AND c = :other;\nSELECT 1\n;";
        assert_eq!(out, wanted);
        let ranged = Script::parse("r", "\\set a random(1, 3)\nSELECT :a").unwrap();
        for _ in 0..20 {
            let mut out = String::new();
            ranged.draw(&mut out);
            assert!(["SELECT 1\n;", "SELECT 2\n;", "SELECT 3\n;"].contains(&&*out), "{out}");
        }
    }

    #[test]
    fn what_is_not_understood_is_named_by_its_line() {
        for (text, said) in [
            ("SELECT 1;\n\\sleep 1", "line 2: only \\set"),
            ("\\set a random(3, 1)\nSELECT 1", "line 1"),
            ("\\set é 1\nSELECT 1", "line 1"),
            ("\\", "line 1"),
            ("SELECT 1;\n  commit;", "line 2: leave out BEGIN and COMMIT"),
            ("-- nothing\n", "no statement"),
            ("", "no statement"),
        ] {
            let error = Script::parse("x.sql", text).unwrap_err().to_string();
            assert!(error.contains(said), "{text:?}: {error}");
        }
    }
}
