//! The commands of the streaming replication protocol, as a server reads them (PostgreSQL docs:
//! "55.4. Streaming Replication Protocol"). Physical replication only.
//!
//! Total: every text gives a command or a [`CommandError`].

use crate::base_backup::BackupOptions;
use farshore_model::Lsn;

/// What a physical receiver may ask for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ReplicationCommand {
    /// Who the server is, and where its log is.
    IdentifySystem,
    /// The value of a setting.
    Show(String),
    /// The log from a position on.
    StartPhysical {
        /// The slot to stream from.
        slot: Option<String>,
        /// First byte wanted.
        start: Lsn,
        /// On which timeline; the current one if it is not said.
        timeline: Option<u32>,
    },
    /// How a timeline came about.
    TimelineHistory(u32),
    /// A physical slot is to be made.
    CreatePhysicalSlot {
        /// Its name.
        name: String,
        /// It ends with the session.
        temporary: bool,
        /// It keeps the log from now on, and not only from its first use.
        reserve_wal: bool,
    },
    /// What a slot holds.
    ReadSlot(String),
    /// A slot is to be dropped.
    DropSlot(String),
    /// The server's files.
    BaseBackup(BackupOptions),
}

/// Why a command is not carried out.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum CommandError {
    /// It does not parse.
    #[error("syntax error in a replication command: {0}")]
    Syntax(String),
    /// PostgreSQL understands it, and it has no meaning here.
    #[error("{0}")]
    Unsupported(String),
}

#[derive(Debug, Clone, PartialEq, Eq)]
enum Token {
    /// Upper-cased for comparison, and as it was written.
    Word(String, String),
    Quoted(String),
    Text(String),
    Mark(char),
}

fn tokens(text: &str) -> Result<Vec<Token>, CommandError> {
    let mut tokens = Vec::new();
    let mut rest = text.trim_start();
    while let Some(first) = rest.chars().next() {
        match first {
            '"' | '\'' => {
                let mut value = String::new();
                let mut chars = rest.char_indices().skip(1).peekable();
                let end = loop {
                    match chars.next() {
                        Some((_, c))
                            if c == first && chars.peek().is_some_and(|n| n.1 == first) =>
                        {
                            value.push(c);
                            chars.next();
                        }
                        Some((at, c)) if c == first => break at + 1,
                        Some((_, c)) => value.push(c),
                        None => return Err(CommandError::Syntax("a quote is not closed".into())),
                    }
                };
                tokens.push(if first == '"' { Token::Quoted(value) } else { Token::Text(value) });
                rest = &rest[end..];
            }
            '(' | ')' | ',' | ';' => {
                tokens.push(Token::Mark(first));
                rest = &rest[1..];
            }
            _ => {
                let ends = |c: char| c.is_whitespace() || "\"'(),;".contains(c);
                let end = rest.find(ends).unwrap_or(rest.len());
                let word = &rest[..end];
                tokens.push(Token::Word(word.to_ascii_uppercase(), word.to_owned()));
                rest = &rest[end..];
            }
        }
        rest = rest.trim_start();
    }
    Ok(tokens)
}

struct Parser {
    tokens: std::iter::Peekable<std::vec::IntoIter<Token>>,
}

impl Parser {
    fn syntax<T>(&mut self, expected: &str) -> Result<T, CommandError> {
        let found = match self.tokens.peek() {
            Some(token) => format!("{token:?}"),
            None => "the end".to_owned(),
        };
        Err(CommandError::Syntax(format!("expected {expected}, found {found}")))
    }

    fn take(&mut self, keyword: &str) -> bool {
        let is_next = matches!(self.tokens.peek(), Some(Token::Word(word, _)) if word == keyword);
        if is_next {
            self.tokens.next();
        }
        is_next
    }

    fn take_mark(&mut self, mark: char) -> bool {
        let is_next = self.tokens.peek() == Some(&Token::Mark(mark));
        if is_next {
            self.tokens.next();
        }
        is_next
    }

    fn name(&mut self) -> Result<String, CommandError> {
        match self.tokens.peek() {
            Some(Token::Quoted(name)) | Some(Token::Word(_, name)) => {
                let name = name.clone();
                self.tokens.next();
                Ok(name)
            }
            _ => self.syntax("a name"),
        }
    }

    fn parsed<T: std::str::FromStr>(&mut self, what: &str) -> Result<T, CommandError> {
        if let Some(Token::Word(_, word)) = self.tokens.peek()
            && let Ok(value) = word.parse()
        {
            self.tokens.next();
            return Ok(value);
        }
        self.syntax(what)
    }

    fn end(&mut self) -> Result<(), CommandError> {
        while self.take_mark(';') {}
        if self.tokens.peek().is_some() { self.syntax("the end") } else { Ok(()) }
    }

    fn timeline(&mut self) -> Result<u32, CommandError> {
        match self.parsed("a timeline")? {
            0 => Err(CommandError::Syntax("invalid timeline 0".into())),
            timeline => Ok(timeline),
        }
    }

    /// `( NAME [value], … )`, or bare words as servers before 15 had them; whether it names
    /// `RESERVE_WAL`, and not as false.
    fn slot_options(&mut self) -> Result<bool, CommandError> {
        if !self.take_mark('(') {
            return Ok(self.take("RESERVE_WAL"));
        }
        loop {
            if !self.take("RESERVE_WAL") {
                return self.syntax("RESERVE_WAL");
            }
            let is_off = match self.tokens.peek() {
                Some(Token::Text(value) | Token::Word(_, value)) => {
                    let is_off = ["false", "off", "0"].contains(&value.to_lowercase().as_str());
                    self.tokens.next();
                    is_off
                }
                _ => false,
            };
            if self.take_mark(')') {
                return Ok(!is_off);
            }
            if !self.take_mark(',') {
                return self.syntax(", or )");
            }
        }
    }
}

impl Parser {
    /// `( NAME [value], … )`, or bare words as servers before 15 had them.
    fn backup_options(&mut self) -> Result<BackupOptions, CommandError> {
        let mut options = BackupOptions::default();
        let in_parentheses = self.take_mark('(');
        loop {
            if !in_parentheses && matches!(self.tokens.peek(), None | Some(Token::Mark(';'))) {
                return Ok(options);
            }
            let Some(Token::Word(name, _)) = self.tokens.next() else {
                return self.syntax("an option");
            };
            self.backup_option(&name, in_parentheses, &mut options)?;
            if in_parentheses && self.take_mark(')') {
                return Ok(options);
            }
            if in_parentheses && !self.take_mark(',') {
                return self.syntax(", or )");
            }
        }
    }

    fn backup_option(
        &mut self,
        name: &str,
        in_parentheses: bool,
        options: &mut BackupOptions,
    ) -> Result<(), CommandError> {
        match (name, in_parentheses) {
            ("LABEL", _) => options.label = Some(self.text()?),
            ("MANIFEST", _) => options.manifest = Some(self.text()?),
            ("MANIFEST_CHECKSUMS", _) => options.manifest_checksums = Some(self.text()?),
            ("MAX_RATE", _) => options.max_rate_kb = Some(self.number("a rate")?),
            ("PROGRESS", _) => options.progress = self.switch(in_parentheses)?,
            ("WAL", _) => options.wal = self.switch(in_parentheses)?,
            ("TABLESPACE_MAP", _) => options.tablespace_map = self.switch(in_parentheses)?,
            ("FAST", false) => options.fast = true,
            ("NOWAIT", false) => options.wait = false,
            ("NOVERIFY_CHECKSUMS", false) => options.verify_checksums = false,
            ("CHECKPOINT", true) => options.fast = self.text()?.eq_ignore_ascii_case("fast"),
            ("WAIT", true) => options.wait = self.switch(true)?,
            ("VERIFY_CHECKSUMS", true) => options.verify_checksums = self.switch(true)?,
            ("COMPRESSION", true) => options.compression = Some(self.text()?),
            ("COMPRESSION_DETAIL", true) => options.compression_detail = Some(self.text()?),
            // Nobody has a server write files at a place of his choice by way of a mirror.
            ("TARGET", true) if self.text()? == "client" => {}
            ("TARGET" | "TARGET_DETAIL", true) => {
                return Err(CommandError::Unsupported(
                    "a backup by way of a mirror goes to the client that asks for it; for another \
                     target ask the principal"
                        .to_owned(),
                ));
            }
            ("INCREMENTAL", true) => {
                return Err(CommandError::Unsupported(
                    "incremental backups do not go through a mirror: take them from the principal"
                        .to_owned(),
                ));
            }
            _ => return Err(CommandError::Syntax(format!("unknown backup option {name}"))),
        }
        Ok(())
    }

    /// The value of an option that is text.
    fn text(&mut self) -> Result<String, CommandError> {
        match self.tokens.peek() {
            Some(Token::Text(value) | Token::Quoted(value) | Token::Word(_, value)) => {
                let value = value.clone();
                self.tokens.next();
                Ok(value)
            }
            _ => self.syntax("a value"),
        }
    }

    fn number(&mut self, what: &str) -> Result<u32, CommandError> {
        let value = self.text()?;
        let wrong = |_| CommandError::Syntax(format!("{what} expected, not \"{value}\""));
        value.parse().map_err(wrong)
    }

    /// The value of an option that is on or off; where none may follow it is on.
    fn switch(&mut self, may_have_value: bool) -> Result<bool, CommandError> {
        let is_last = matches!(self.tokens.peek(), None | Some(Token::Mark(_)));
        if !may_have_value || is_last {
            return Ok(true);
        }
        let value = self.text()?;
        match value.to_ascii_lowercase().as_str() {
            "true" | "on" | "1" => Ok(true),
            "false" | "off" | "0" => Ok(false),
            _ => Err(CommandError::Syntax(format!("\"{value}\" is neither true nor false"))),
        }
    }
}

impl ReplicationCommand {
    /// Reads a command.
    ///
    /// # Errors
    /// What is wrong with it, and that logical replication is not for here.
    pub fn parse(text: &str) -> Result<ReplicationCommand, CommandError> {
        let unsupported = |what: &str| Err(CommandError::Unsupported(what.to_owned()));
        let mut parser = Parser { tokens: tokens(text)?.into_iter().peekable() };
        let command = if parser.take("IDENTIFY_SYSTEM") {
            ReplicationCommand::IdentifySystem
        } else if parser.take("SHOW") {
            ReplicationCommand::Show(parser.name()?)
        } else if parser.take("TIMELINE_HISTORY") {
            ReplicationCommand::TimelineHistory(parser.timeline()?)
        } else if parser.take("START_REPLICATION") {
            let slot = if parser.take("SLOT") { Some(parser.name()?) } else { None };
            if parser.take("LOGICAL") {
                return unsupported(
                    "this is a mirror's spool: it streams the log as it is (physical replication) \
                     and decodes nothing. Ask the principal for logical replication",
                );
            }
            parser.take("PHYSICAL");
            let start = parser.parsed("a position such as 16/B374D848")?;
            let timeline = if parser.take("TIMELINE") { Some(parser.timeline()?) } else { None };
            ReplicationCommand::StartPhysical { slot, start, timeline }
        } else if parser.take("CREATE_REPLICATION_SLOT") {
            let name = parser.name()?;
            let temporary = parser.take("TEMPORARY");
            if parser.take("LOGICAL") {
                return unsupported(
                    "a mirror's spool has no logical slots; make it on the principal",
                );
            }
            if !parser.take("PHYSICAL") {
                return parser.syntax("PHYSICAL");
            }
            let reserve_wal = parser.slot_options()?;
            ReplicationCommand::CreatePhysicalSlot { name, temporary, reserve_wal }
        } else if parser.take("READ_REPLICATION_SLOT") {
            ReplicationCommand::ReadSlot(parser.name()?)
        } else if parser.take("DROP_REPLICATION_SLOT") {
            let name = parser.name()?;
            parser.take("WAIT");
            ReplicationCommand::DropSlot(name)
        } else if parser.take("BASE_BACKUP") {
            ReplicationCommand::BaseBackup(parser.backup_options()?)
        } else if parser.take("UPLOAD_MANIFEST") {
            return unsupported(
                "incremental backups do not go through a mirror: take them from the principal",
            );
        } else {
            return unsupported(
                "this is a mirror's spool, not a database: it understands replication commands only",
            );
        };
        parser.end()?;
        Ok(command)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn commands_are_read_as_clients_write_them() {
        use ReplicationCommand::*;
        for (text, expected) in [
            ("IDENTIFY_SYSTEM", IdentifySystem),
            ("SHOW wal_segment_size", Show("wal_segment_size".into())),
            ("TIMELINE_HISTORY 2", TimelineHistory(2)),
            (
                "START_REPLICATION SLOT \"a\"\"b\" 16/B3000000 TIMELINE 3",
                StartPhysical {
                    slot: Some("a\"b".into()),
                    start: Lsn(0x16_B300_0000),
                    timeline: Some(3),
                },
            ),
            (
                "START_REPLICATION PHYSICAL 0/1;",
                StartPhysical { slot: None, start: Lsn(1), timeline: None },
            ),
            (
                "CREATE_REPLICATION_SLOT \"s\" TEMPORARY PHYSICAL RESERVE_WAL",
                CreatePhysicalSlot { name: "s".into(), temporary: true, reserve_wal: true },
            ),
            (
                "CREATE_REPLICATION_SLOT s PHYSICAL (RESERVE_WAL 'true')",
                CreatePhysicalSlot { name: "s".into(), temporary: false, reserve_wal: true },
            ),
            (
                "CREATE_REPLICATION_SLOT s PHYSICAL",
                CreatePhysicalSlot { name: "s".into(), temporary: false, reserve_wal: false },
            ),
            ("READ_REPLICATION_SLOT \"s\"", ReadSlot("s".into())),
            ("DROP_REPLICATION_SLOT s WAIT", DropSlot("s".into())),
        ] {
            assert_eq!(ReplicationCommand::parse(text), Ok(expected), "{text}");
        }
    }

    #[test]
    fn options_of_backups_are_read_as_they_are_written() {
        let all = BackupOptions {
            label: Some("a 'b'".into()),
            progress: true,
            fast: true,
            wal: true,
            wait: false,
            max_rate_kb: Some(1_024),
            tablespace_map: true,
            verify_checksums: false,
            manifest: Some("force-encode".into()),
            manifest_checksums: Some("SHA256".into()),
            ..BackupOptions::default()
        };
        let compressed = BackupOptions {
            compression: Some("gzip".into()),
            compression_detail: Some("level=1".into()),
            ..BackupOptions::default()
        };
        for (options, version, text) in [
            (&BackupOptions::default(), 140_000, "BASE_BACKUP"),
            (&BackupOptions::default(), 180_000, "BASE_BACKUP"),
            (
                &all,
                140_000,
                "BASE_BACKUP LABEL 'a ''b''' MANIFEST 'force-encode' MANIFEST_CHECKSUMS 'SHA256' \
                 PROGRESS FAST WAL NOWAIT TABLESPACE_MAP NOVERIFY_CHECKSUMS MAX_RATE 1024",
            ),
            (
                &all,
                150_000,
                "BASE_BACKUP (LABEL 'a ''b''', MANIFEST 'force-encode', MANIFEST_CHECKSUMS \
                 'SHA256', PROGRESS, CHECKPOINT 'fast', WAL, WAIT false, TABLESPACE_MAP, \
                 VERIFY_CHECKSUMS false, MAX_RATE 1024)",
            ),
            (
                &compressed,
                180_000,
                "BASE_BACKUP (COMPRESSION 'gzip', COMPRESSION_DETAIL 'level=1')",
            ),
        ] {
            assert_eq!(options.command(version), text);
            let read = ReplicationCommand::parse(text);
            assert_eq!(read, Ok(ReplicationCommand::BaseBackup(options.clone())), "{text}");
        }
        // As pg_basebackup writes it.
        let text = "BASE_BACKUP ( LABEL 'pg_basebackup base backup',  PROGRESS,  \
                    CHECKPOINT 'fast',  WAIT 0,  MANIFEST 'yes',  TARGET 'client')";
        let expected = BackupOptions {
            label: Some("pg_basebackup base backup".into()),
            progress: true,
            fast: true,
            wait: false,
            manifest: Some("yes".into()),
            ..BackupOptions::default()
        };
        assert_eq!(ReplicationCommand::parse(text), Ok(ReplicationCommand::BaseBackup(expected)));
    }

    #[test]
    fn anything_else_is_an_error() {
        for text in [
            "",
            "SELECT 1",
            "BASE_BACKUP (",
            "BASE_BACKUP (LABEL)",
            "BASE_BACKUP (FAST)",
            "BASE_BACKUP LABEL 'a', PROGRESS",
            "BASE_BACKUP (MAX_RATE 'fast')",
            "BASE_BACKUP (WAL maybe)",
            "BASE_BACKUP (TARGET 'server', TARGET_DETAIL '/tmp/x')",
            "BASE_BACKUP (TARGET_DETAIL '/tmp/x')",
            "BASE_BACKUP (INCREMENTAL)",
            "UPLOAD_MANIFEST",
            "START_REPLICATION",
            "START_REPLICATION 0/1 TIMELINE 0",
            "START_REPLICATION SLOT s LOGICAL 0/1",
            "START_REPLICATION \"",
            "IDENTIFY_SYSTEM again",
            "CREATE_REPLICATION_SLOT s PHYSICAL (RESERVE_WAL",
            "CREATE_REPLICATION_SLOT s PHYSICAL (NONE)",
            "TIMELINE_HISTORY -1",
        ] {
            assert!(ReplicationCommand::parse(text).is_err(), "{text}");
        }
    }
}
