//! BASE_BACKUP: a server's files, as tar archives, while it runs. Up to PostgreSQL 14 each archive
//! is a COPY of its own; later all are in one, each piece behind a byte that says what it is.

use crate::connection::{Connection, Unfinished};
use crate::query::Row;
use crate::{Error, ResultSet};
use bytes::{Buf, Bytes, BytesMut};
use farshore_model::Lsn;
use farshore_wire::backend::{DataRow, Message};
use farshore_wire::base_backup::{BackupOptions, ONE_COPY};
use farshore_wire::{frontend, server};
use std::sync::Arc;

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

fn unexpected(what: &dyn std::fmt::Debug) -> Error {
    Error::Protocol(format!("{what:?} in BASE_BACKUP"))
}

impl Connection {
    /// Begins a base backup, of which the archives are taken apart here: without compression by the
    /// server, and with a manifest.
    ///
    /// # Errors
    /// The server's. The connection is closed then.
    pub async fn base_backup(mut self, options: &BackupOptions) -> Result<BaseBackup, Error> {
        self.ask_for_backup(options).await?;
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

    /// Begins a base backup for somebody else.
    ///
    /// # Errors
    /// The server's. The connection is closed then.
    pub async fn pass_base_backup(
        mut self,
        options: &BackupOptions,
    ) -> Result<PassedBackup, Error> {
        self.ask_for_backup(options).await?;
        let mut read = BytesMut::new();
        loop {
            let message = self.receive().await?;
            pass_on(&message, &mut read)?;
            match message {
                Message::RowDescription(_) => {}
                Message::DataRow(row) => {
                    let columns: Arc<[String]> = row.values().map(|_| String::new()).collect();
                    let begin = Row::new(&columns, &row)?;
                    let (start, timeline) = (begin.parse(0)?, begin.parse(1)?);
                    return Ok(PassedBackup { connection: self, start, timeline, read });
                }
                Message::ErrorResponse(error) => return Err(self.fail(error).await),
                other => return Err(unexpected(&other)),
            }
        }
    }

    async fn ask_for_backup(&mut self, options: &BackupOptions) -> Result<(), Error> {
        self.settle().await?;
        let sql = options.command(self.server_version());
        self.encode(|out| frontend::query(out, &sql))?;
        self.unfinished = Unfinished::Answer;
        Ok(())
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

/// A base backup that is handed on as the server sends it. Dropping it ends it on the server.
#[derive(Debug)]
pub struct PassedBackup {
    connection: Connection,
    /// Where the log begins that the backup needs.
    pub start: Lsn,
    /// On which timeline.
    pub timeline: u32,
    /// Messages that were read, as they are for the client.
    read: BytesMut,
}

impl PassedBackup {
    /// As log messages name the server.
    pub fn server(&self) -> &str {
        self.connection.server()
    }

    /// The next messages for whoever asked: some `bytes` of them, less at the end, and `None` behind
    /// it. What only this connection is told (that the server is ready) is not among them.
    ///
    /// # Errors
    /// The server's, and lost connections.
    pub async fn next(&mut self, bytes: usize) -> Result<Option<Bytes>, Error> {
        while self.connection.unfinished != Unfinished::Nothing && self.read.len() < bytes {
            match self.connection.receive().await? {
                Message::ReadyForQuery(_) => self.connection.unfinished = Unfinished::Nothing,
                Message::ErrorResponse(error) => return Err(self.connection.fail(error).await),
                message => pass_on(&message, &mut self.read)?,
            }
        }
        Ok((!self.read.is_empty()).then(|| self.read.split().freeze()))
    }
}

/// A server's message, as it is for the client.
fn pass_on(message: &Message, out: &mut BytesMut) -> Result<(), Error> {
    match message {
        Message::RowDescription(fields) => {
            let columns: Vec<(&str, u32)> =
                fields.iter().map(|field| (&*field.name, field.type_oid)).collect();
            server::row_description(out, &columns);
        }
        Message::DataRow(row) => {
            let values: Vec<Option<&[u8]>> = DataRow::values(row).collect();
            server::data_row(out, &values);
        }
        Message::CommandComplete(tag) => server::command_complete(out, tag.as_str()),
        Message::CopyOutResponse(_) => server::copy_out_response(out),
        Message::CopyData(data) => server::copy_data(out, data)?,
        Message::CopyDone => server::copy_done(out),
        // The client is told by whoever hands it on.
        Message::ErrorResponse(_) => {}
        other => return Err(unexpected(other)),
    }
    Ok(())
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
