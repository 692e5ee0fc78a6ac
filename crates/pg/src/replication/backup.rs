//! BASE_BACKUP: a server's files, as tar archives, while it runs. Up to PostgreSQL 14 each archive
//! is a COPY of its own; later all are in one, each piece behind a byte that says what it is.

use super::quote_string;
use crate::connection::{Connection, Unfinished};
use crate::query::Row;
use crate::{Error, ResultSet};
use bytes::{Buf, Bytes};
use farshore_model::Lsn;
use farshore_wire::backend::Message;
use farshore_wire::frontend;
use std::sync::Arc;

/// The first version that sends everything in one COPY.
const ONE_COPY: u32 = 150_000;

/// How a base backup is taken.
#[derive(Clone, Debug)]
pub struct BackupOptions {
    /// What the server calls it, in its backup label.
    pub label: String,
    /// At most so many kilobytes per second are read; 32 to 1048576. Without it, as fast as it
    /// goes.
    pub max_rate_kb: Option<u32>,
}

/// A part of the backup: the main data directory, or a tablespace.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Tablespace {
    /// A tablespace's object id and its directory on the server; `None` for the data directory.
    pub location: Option<(u32, String)>,
    /// Its size, estimated, in bytes.
    pub bytes: u64,
}

/// What comes next.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum BackupMessage {
    /// A tar archive begins: of the part with this number in [`BaseBackup::tablespaces`].
    Archive(usize),
    /// The backup manifest begins.
    Manifest,
    /// The next piece of what began last.
    Data(Bytes),
}

/// A base backup that is being taken. Dropping it ends it on the server.
#[derive(Debug)]
pub struct BaseBackup {
    connection: Connection,
    /// Where the log begins that the backup needs.
    pub start: Lsn,
    /// On which timeline.
    pub timeline: u32,
    /// Its parts. The data directory is the last one, and comes last.
    pub tablespaces: Vec<Tablespace>,
    archives: usize,
    /// In a COPY.
    is_copying: bool,
    columns: Arc<[String]>,
    end: Option<Lsn>,
}

fn command(options: &BackupOptions, server_version: u32) -> Result<String, Error> {
    let label = quote_string(&options.label)?;
    let rate = options.max_rate_kb;
    Ok(if server_version < ONE_COPY {
        let rate = rate.map(|rate| format!(" MAX_RATE {rate}")).unwrap_or_default();
        format!(
            "BASE_BACKUP LABEL {label} PROGRESS FAST NOWAIT{rate} MANIFEST 'yes' \
             MANIFEST_CHECKSUMS 'SHA256'"
        )
    } else {
        let rate = rate.map(|rate| format!(", MAX_RATE {rate}")).unwrap_or_default();
        format!(
            "BASE_BACKUP (LABEL {label}, PROGRESS, CHECKPOINT 'fast', WAIT false{rate}, \
             MANIFEST 'yes', MANIFEST_CHECKSUMS 'SHA256')"
        )
    })
}

fn unexpected(what: &dyn std::fmt::Debug) -> Error {
    Error::Protocol(format!("{what:?} in BASE_BACKUP"))
}

impl Connection {
    /// Begins a base backup, after a checkpoint that is made at once. Checksums in its manifest are
    /// SHA-256.
    ///
    /// # Errors
    /// The server's. The connection is closed then.
    pub async fn base_backup(mut self, options: &BackupOptions) -> Result<BaseBackup, Error> {
        self.settle().await?;
        let sql = command(options, self.server_version())?;
        self.encode(|out| frontend::query(out, &sql))?;
        self.unfinished = Unfinished::Answer;
        let begin = self.backup_result("where it begins").await?;
        let parts = self.backup_result("its parts").await?;
        let begin = begin.rows.first().ok_or_else(|| unexpected(&begin.tag))?;
        let (start, timeline) = (begin.parse(0)?, begin.parse(1)?);
        let mut tablespaces = Vec::new();
        for part in &parts.rows {
            let location = match (part.get(0), part.get(1)) {
                (Some(_), Some(path)) => Some((part.parse(0)?, path.to_owned())),
                _ => None,
            };
            let kilobytes: u64 = part.get(2).and_then(|text| text.parse().ok()).unwrap_or(0);
            tablespaces.push(Tablespace { location, bytes: kilobytes << 10 });
        }
        Ok(BaseBackup {
            connection: self,
            start,
            timeline,
            tablespaces,
            archives: 0,
            is_copying: false,
            columns: Arc::new([]),
            end: None,
        })
    }

    async fn backup_result(&mut self, what: &str) -> Result<ResultSet, Error> {
        let mut columns: Arc<[String]> = Arc::new([]);
        let mut rows = Vec::new();
        loop {
            match self.receive().await? {
                Message::RowDescription(fields) => {
                    columns = fields.into_iter().map(|field| field.name).collect();
                }
                Message::DataRow(data) => rows.push(Row::new(&columns, &data)?),
                Message::CommandComplete(tag) => {
                    let columns = columns.to_vec();
                    return Ok(ResultSet { columns, rows, tag: format!("{what}: {tag:?}") });
                }
                Message::ErrorResponse(error) => return Err(self.fail(error).await),
                other => return Err(unexpected(&other)),
            }
        }
    }
}

impl BaseBackup {
    /// As log messages name the server.
    pub fn server(&self) -> &str {
        self.connection.server()
    }

    /// What comes next; `None` at the end, when [`BaseBackup::end`] is known.
    ///
    /// # Errors
    /// The server's, and lost connections.
    pub async fn next(&mut self) -> Result<Option<BackupMessage>, Error> {
        loop {
            if self.connection.unfinished == Unfinished::Nothing {
                return Ok(None);
            }
            let is_one_copy = self.connection.server_version() >= ONE_COPY;
            match self.connection.receive().await? {
                Message::CopyOutResponse(_) => {
                    self.is_copying = true;
                    if !is_one_copy {
                        return Ok(Some(self.next_archive()));
                    }
                }
                Message::CopyData(data) if self.is_copying && !is_one_copy => {
                    return Ok(Some(BackupMessage::Data(data)));
                }
                Message::CopyData(mut data) if self.is_copying && !data.is_empty() => {
                    match data.get_u8() {
                        b'n' => return Ok(Some(self.next_archive())),
                        b'm' => return Ok(Some(BackupMessage::Manifest)),
                        b'd' => return Ok(Some(BackupMessage::Data(data))),
                        // How far it is; the pieces tell as well.
                        b'p' => {}
                        other => return Err(unexpected(&char::from(other))),
                    }
                }
                Message::CopyDone => self.is_copying = false,
                Message::RowDescription(fields) => {
                    self.columns = fields.into_iter().map(|field| field.name).collect();
                }
                Message::DataRow(data) => {
                    self.end = Some(Row::new(&self.columns, &data)?.parse(0)?);
                }
                Message::CommandComplete(_) => {}
                Message::ReadyForQuery(_) => {
                    self.connection.unfinished = Unfinished::Nothing;
                    return Ok(None);
                }
                Message::ErrorResponse(error) => return Err(self.connection.fail(error).await),
                other => return Err(unexpected(&other)),
            }
        }
    }

    /// In the order of the parts; behind the last one comes the manifest.
    fn next_archive(&mut self) -> BackupMessage {
        let number = self.archives;
        self.archives += 1;
        if number < self.tablespaces.len() {
            BackupMessage::Archive(number)
        } else {
            BackupMessage::Manifest
        }
    }

    /// Up to where the log must be replayed for the backup to be consistent; known at the end.
    pub fn end(&self) -> Option<Lsn> {
        self.end
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_command_is_what_each_version_understands() {
        let options = BackupOptions { label: "a 'b'".into(), max_rate_kb: Some(1024) };
        assert_eq!(
            command(&options, 140_000).unwrap(),
            "BASE_BACKUP LABEL 'a ''b''' PROGRESS FAST NOWAIT MAX_RATE 1024 \
             MANIFEST 'yes' MANIFEST_CHECKSUMS 'SHA256'"
        );
        let options = BackupOptions { max_rate_kb: None, ..options };
        assert_eq!(
            command(&options, 180_000).unwrap(),
            "BASE_BACKUP (LABEL 'a ''b''', PROGRESS, CHECKPOINT 'fast', WAIT false, \
             MANIFEST 'yes', MANIFEST_CHECKSUMS 'SHA256')"
        );
    }
}
