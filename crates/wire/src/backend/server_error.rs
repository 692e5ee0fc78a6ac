use super::{DecodeError, Reader};
use std::fmt;

/// What a server says in an ErrorResponse or NoticeResponse (PostgreSQL docs: "55.8. Error and
/// Notice Message Fields"). Fields the server did not send are `None`, or empty where a server
/// always sends them.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct ServerError {
    /// `ERROR`, `FATAL`, `PANIC`, `WARNING`, `NOTICE`, …, not translated.
    pub severity: String,
    /// SQLSTATE, five characters.
    pub code: String,
    /// The primary message, one line, in the server's language.
    pub message: String,
    /// More about what happened.
    pub detail: Option<String>,
    /// What to do about it, the server thinks.
    pub hint: Option<String>,
    /// Where in the statement, in characters from 1.
    pub position: Option<u32>,
    /// As `position`, but in [`ServerError::internal_query`].
    pub internal_position: Option<u32>,
    /// The text of a failed command that the server generated itself.
    pub internal_query: Option<String>,
    /// Call stack: one entry per line, the innermost first (the field `where`).
    pub context: Option<String>,
    /// The schema of the object concerned.
    pub schema: Option<String>,
    /// The table concerned.
    pub table: Option<String>,
    /// The column concerned.
    pub column: Option<String>,
    /// The data type concerned.
    pub data_type: Option<String>,
    /// The constraint concerned.
    pub constraint: Option<String>,
    /// The server's source file.
    pub file: Option<String>,
    /// The line in that file.
    pub line: Option<u32>,
    /// The server's source routine.
    pub routine: Option<String>,
}

impl ServerError {
    /// Whether the server ends the session with this (`FATAL` or `PANIC`).
    pub fn is_fatal(&self) -> bool {
        matches!(self.severity.as_str(), "FATAL" | "PANIC")
    }

    pub(super) fn read(reader: &mut Reader) -> Result<ServerError, DecodeError> {
        let mut error = ServerError::default();
        let mut untranslated_severity = None;
        loop {
            let kind = reader.u8("field type")?;
            if kind == 0 {
                break;
            }
            let text = reader.lossy_string("field")?;
            match kind {
                b'S' => error.severity = text,
                b'V' => untranslated_severity = Some(text),
                b'C' => error.code = text,
                b'M' => error.message = text,
                b'D' => error.detail = Some(text),
                b'H' => error.hint = Some(text),
                b'P' => error.position = text.parse().ok(),
                b'p' => error.internal_position = text.parse().ok(),
                b'q' => error.internal_query = Some(text),
                b'W' => error.context = Some(text),
                b's' => error.schema = Some(text),
                b't' => error.table = Some(text),
                b'c' => error.column = Some(text),
                b'd' => error.data_type = Some(text),
                b'n' => error.constraint = Some(text),
                b'F' => error.file = Some(text),
                b'L' => error.line = text.parse().ok(),
                b'R' => error.routine = Some(text),
                // The documentation asks frontends to ignore fields they do not know.
                _unknown => {}
            }
        }
        if let Some(severity) = untranslated_severity {
            error.severity = severity;
        }
        Ok(error)
    }
}

impl fmt::Display for ServerError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}: {}", self.severity, self.code, self.message)?;
        for (name, value) in
            [("detail", &self.detail), ("hint", &self.hint), ("where", &self.context)]
        {
            if let Some(value) = value {
                write!(f, "; {name}: {}", value.replace('\n', " / "))?;
            }
        }
        Ok(())
    }
}

impl std::error::Error for ServerError {}
