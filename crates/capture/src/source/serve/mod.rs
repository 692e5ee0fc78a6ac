//! The publisher's side of a channel: answers for one publication, and for nothing but that.
//!
//! The other side is not trusted. It names tables by OID, columns and types by name, snapshots by
//! an id that it was given; each is looked up in what the publisher itself says of the
//! publication, and the SQL is made from what was found there. Row filters and column lists are
//! the publisher's. What is out of bounds is refused, and logged.

mod registry;
mod session;

pub use registry::Registry;

use super::channel::{Channel, ChannelError};
use super::frame::{self, ReceiveError, Received};
use super::message::{Answer, REQUEST_BYTES_MAX, Request, decode_request, encode_answer};
use super::{AddedColumn, Direct, DroppedColumns, GrownTable, Key, OldValue, Source};
use crate::CaptureError;
use crate::publication::{PublicationSpec, PublishedTable, TableName};
use crate::schema::Definitions;
use crate::snapshot::StillSnapshot;
use farshore_pg::Connection;
use registry::Registered;
use session::Session;
use std::collections::HashSet;
use tokio::sync::watch;

/// Answers what comes on one channel, until the other side ends it or `stop` turns true. Then
/// everything that the channel stands for has ended on the publisher. What channels with clones of
/// one `direct` ask at the same time, the publisher is asked once.
///
/// # Errors
/// The channel's; and what the other side sent that it may not send at all, after which nothing
/// else is taken from it. What it asks and may not have is refused with an answer instead.
pub async fn serve(
    direct: &Direct,
    snapshots: &Registry,
    channel: &mut dyn Channel,
    mut stop: watch::Receiver<bool>,
) -> Result<(), ChannelError> {
    let server = Server { spec: direct.spec(), snapshots, direct };
    let served = tokio::select! {
        biased;
        // The site's end is a stop, too.
        _ = stop.wait_for(|stop| *stop) => return Ok(()),
        served = server.run(channel) => served,
    };
    match served {
        Ok(()) | Err(Ended::ByTheOther) => Ok(()),
        Err(Ended::Broken(error)) => Err(error),
    }
}

/// Why nothing more is answered.
enum Ended {
    ByTheOther,
    Broken(ChannelError),
}

impl From<ChannelError> for Ended {
    fn from(error: ChannelError) -> Ended {
        Ended::Broken(error)
    }
}

/// Why something is not answered.
enum Failure {
    /// The publisher's trouble.
    Capture(CaptureError),
    /// It is not for the other side to have.
    Refused {
        what: String,
        /// It may be there again.
        transient: bool,
    },
}

impl From<CaptureError> for Failure {
    fn from(error: CaptureError) -> Failure {
        Failure::Capture(error)
    }
}

/// Columns that a table may have (PostgreSQL docs: "Appendix K. PostgreSQL Limits").
const COLUMNS_MAX: usize = 1600;

/// Characters of what the other side sent that are shown.
const SHOWN_MAX: usize = 300;

/// What is refused, for the other side and for the log: what it sent may be in it.
fn refused(what: impl AsRef<str>) -> Failure {
    Failure::Refused { what: shown(what.as_ref()), transient: false }
}

/// One line, and no long one.
fn shown(what: &str) -> String {
    let one_line = |c: char| if c.is_control() { ' ' } else { c };
    what.chars().take(SHOWN_MAX).map(one_line).collect()
}

/// What a channel stands for.
enum Role<'a> {
    Questions,
    Snapshot(Box<Exporting<'a>>),
    Session(Box<Session<'a>>),
}

/// A snapshot that lives as long as its channel.
struct Exporting<'a> {
    /// Goes before the snapshot does: nobody is sent to one that has gone.
    registered: Registered<'a>,
    snapshot: StillSnapshot,
}

struct Server<'a> {
    spec: &'a PublicationSpec,
    snapshots: &'a Registry,
    direct: &'a Direct,
}

impl<'a> Server<'a> {
    async fn run(&self, channel: &mut dyn Channel) -> Result<(), Ended> {
        let mut role = Role::Questions;
        loop {
            let (request, keys) = self.request(channel).await?;
            match (request, &mut role) {
                (Request::CopyRange { table, range, plan, counted }, Role::Session(session)) => {
                    let copied = session.copy_range(channel, table, range, plan, counted).await?;
                    self.end_data(channel, copied).await?;
                }
                (Request::LookUp { table, plan, key_columns }, Role::Session(session)) => {
                    let wanted = session::Wanted { table, plan, key_columns, keys };
                    let found = session.look_up(channel, wanted).await?;
                    self.end_data(channel, found).await?;
                }
                (Request::Close, _) => {
                    match std::mem::replace(&mut role, Role::Questions) {
                        Role::Questions => {}
                        Role::Snapshot(exporting) => {
                            let Exporting { registered, snapshot } = *exporting;
                            drop(registered);
                            snapshot.close().await;
                        }
                        Role::Session(session) => session.close().await,
                    }
                    self.send(channel, &Answer::Done).await?;
                    return Ok(());
                }
                (request, _) => {
                    let answer = while_open(channel, self.answer(&mut role, request)).await?;
                    self.end_data(channel, answer).await?;
                }
            }
        }
    }

    /// The next request.
    async fn request(&self, channel: &mut dyn Channel) -> Result<(Request, Vec<Key>), Ended> {
        let decoded = match frame::receive(channel, REQUEST_BYTES_MAX).await {
            Ok(Received::Message(message)) => decode_request(message),
            Ok(Received::Data(_)) => Err("data came where a request was expected".to_owned()),
            Ok(Received::End) => return Err(Ended::ByTheOther),
            Err(ReceiveError::Malformed(what)) => Err(what),
            Err(ReceiveError::Channel(error)) => return Err(error.into()),
        };
        match decoded {
            Ok(decoded) => Ok(decoded),
            Err(what) => {
                // It is told why; nothing else that it sends is looked at.
                self.end_data(channel, Err(refused(&what))).await?;
                Err(ChannelError::permanent(format!("it sent {}", shown(&what))).into())
            }
        }
    }

    /// Sends an answer, or why there is none.
    async fn end_data(
        &self,
        channel: &mut dyn Channel,
        answer: Result<Answer, Failure>,
    ) -> Result<(), Ended> {
        let answer = answer.unwrap_or_else(|failure| match failure {
            Failure::Capture(error) => {
                Answer::Failed { message: error.to_string(), transient: error.is_transient() }
            }
            Failure::Refused { what, transient } => {
                let publication = &self.spec.name;
                tracing::warn!(%publication, "refused to another site: {what}");
                let message = format!("publication \"{publication}\": refused: {what}");
                Answer::Failed { message, transient }
            }
        });
        self.send(channel, &answer).await
    }

    async fn send(&self, channel: &mut dyn Channel, answer: &Answer) -> Result<(), Ended> {
        let message = encode_answer(answer).map_err(ChannelError::permanent)?;
        Ok(frame::send(channel, &message).await?)
    }

    async fn answer(&self, role: &mut Role<'a>, request: Request) -> Result<Answer, Failure> {
        match role {
            Role::Session(session) => session.answer(request).await,
            Role::Snapshot(_) => Err(refused("a question on the channel that keeps a snapshot")),
            Role::Questions => match request {
                Request::Export { reader, followed } => {
                    let followed = followed.into_iter().collect();
                    let taken = StillSnapshot::take(self.spec, &reader, &followed, &|_| ());
                    let snapshot = taken.await?;
                    self.direct.awaited().send_replace(snapshot.consistent_point());
                    let (name, seen) = (snapshot.name(), snapshot.seen());
                    let added = self.snapshots.add(&self.spec.name, name, seen);
                    let registered = added.ok_or_else(|| Failure::Refused {
                        what: "a snapshot, because this system gives no random bytes".to_owned(),
                        transient: true,
                    })?;
                    let answer = Answer::Exported {
                        consistent_point: snapshot.consistent_point().0,
                        snapshot: registered.id.clone(),
                    };
                    *role = Role::Snapshot(Box::new(Exporting { registered, snapshot }));
                    Ok(answer)
                }
                Request::Open { snapshot } => {
                    let found = self.snapshots.find(&self.spec.name, &snapshot);
                    // The channel that kept it may have ended: then it is to be made anew.
                    let (name, seen) = found.ok_or_else(|| Failure::Refused {
                        what: "a session in a snapshot that this publication does not have (any \
                               more)"
                            .to_owned(),
                        transient: true,
                    })?;
                    let session = Session::open(self.spec, self.snapshots, snapshot, &name, seen);
                    let session = session.await?;
                    *role = Role::Session(Box::new(session));
                    Ok(Answer::Done)
                }
                question => self.answer_question(question).await,
            },
        }
    }

    async fn answer_question(&self, question: Request) -> Result<Answer, Failure> {
        Ok(match question {
            Request::PublishedTables => Answer::Tables(self.direct.published_tables().await?),
            Request::PartitionedTables => Answer::Oids(self.direct.partitioned_tables().await?),
            Request::Partitions => Answer::Partitions(self.direct.partitions().await?),
            Request::Timelines => Answer::Timelines(self.direct.timelines().await?),
            Request::Sequences => Answer::Sequences(self.direct.sequences().await?),
            Request::Definitions { tables } => {
                Answer::Definitions(self.definitions(&tables).await?)
            }
            Request::DroppedColumns { table, gone } => {
                Answer::Dropped(self.dropped_columns(&table, &gone).await?)
            }
            Request::OldValues { table, columns, oid, copied_from, columns_now } => {
                let table = GrownTable { table, oid, copied_from, columns: columns_now };
                Answer::OldValues(self.old_values(&table, &columns).await?)
            }
            Request::Tables
            | Request::HoldStill { .. }
            | Request::IsInTheWay { .. }
            | Request::CopyRange { .. }
            | Request::LookUp { .. }
            | Request::Digest { .. } => {
                return Err(refused("a question that only a session in a snapshot answers"));
            }
            Request::Export { .. } | Request::Open { .. } | Request::Close => {
                return Err(refused("a request that is no question"));
            }
        })
    }

    async fn definitions(&self, tables: &[u32]) -> Result<Definitions, Failure> {
        let mut sql = self.spec.connect_to_ask().await?;
        let published = self.spec.published_tables(&mut sql).await?;
        let partitioned = self.spec.partitioned_tables(&mut sql).await?;
        check_members(tables, &published, &partitioned)?;
        let definitions = self.spec.definitions(&mut sql, tables).await?;
        sql.close().await;
        Ok(definitions)
    }

    async fn dropped_columns(
        &self,
        table: &TableName,
        gone: &[String],
    ) -> Result<DroppedColumns, Failure> {
        check_count(gone.len())?;
        let mut sql = self.spec.connect_to_ask().await?;
        self.publication_of(&mut sql, table, 0).await?;
        let dropped = self.spec.dropped_columns(&mut sql, table, gone).await?;
        sql.close().await;
        Ok(dropped)
    }

    async fn old_values(
        &self,
        table: &GrownTable,
        columns: &[AddedColumn],
    ) -> Result<Vec<OldValue>, Failure> {
        check_count(columns.len().max(table.columns.len()))?;
        let mut sql = self.spec.connect_to_ask().await?;
        let published = self.publication_of(&mut sql, &table.table, table.oid).await?;
        let seen = published.as_ref().map_or(&[][..], |table| &table.columns);
        let is_published = |column: &AddedColumn| seen.iter().any(|c| c.name == column.name);
        let values = self.spec.old_values(&mut sql, table, columns, is_published).await?;
        sql.close().await;
        let mut answers = Vec::new();
        for (column, value) in columns.iter().zip(values) {
            // It may be one of those that are published by now.
            let may_be_renamed = || {
                !table.columns.is_empty()
                    && seen.iter().any(|now| {
                        now.type_oid == column.type_oid && !table.columns.contains(&now.name)
                    })
            };
            answers.push(match value {
                value if is_published(column) => value,
                OldValue::UNKNOWN if may_be_renamed() => OldValue::UNKNOWN,
                OldValue::Null | OldValue::UNKNOWN => OldValue::Null,
                OldValue::Missing(_) | OldValue::Filled { .. } => {
                    let column = farshore_model::quote_identifier(&column.name);
                    let table = &table.table;
                    return Err(refused(format!("column {column} of {table}, not published now")));
                }
            });
        }
        Ok(answers)
    }

    /// The published table that changes of `table` are published as, by its OID where that is not 0;
    /// `None` if there is no such table any more, which is no secret. Refuses a table that is there and
    /// not published.
    async fn publication_of(
        &self,
        sql: &mut Connection,
        table: &TableName,
        oid: u32,
    ) -> Result<Option<PublishedTable>, Failure> {
        let lineage = self.spec.lineage(sql, table, oid).await?;
        if lineage.is_empty() {
            return Ok(None);
        }
        let published = self.spec.published_tables(sql).await?;
        let found = published.into_iter().find(|published| lineage.contains(&published.oid));
        match found {
            Some(found) => Ok(Some(found)),
            None => Err(refused(format!("table {table}, which is not published now"))),
        }
    }
}

/// Refuses more columns than there can be.
fn check_count(columns: usize) -> Result<(), Failure> {
    if columns > COLUMNS_MAX {
        return Err(refused(format!("{columns} columns of one table")));
    }
    Ok(())
}

/// Refuses what is neither published, nor a partitioned table that the publication names.
fn check_members(
    tables: &[u32],
    published: &[PublishedTable],
    partitioned: &[u32],
) -> Result<(), Failure> {
    let members: HashSet<u32> =
        published.iter().map(|table| table.oid).chain(partitioned.iter().copied()).collect();
    let is_member = |oid: &u32| members.contains(oid);
    match tables.iter().find(|oid| !is_member(oid)) {
        None => Ok(()),
        Some(oid) => Err(refused(format!("a table (OID {oid}) that is not of the publication"))),
    }
}

/// Does something that takes a while, as long as the other side waits for it.
async fn while_open<T>(
    channel: &mut dyn Channel,
    work: impl Future<Output = T>,
) -> Result<T, Ended> {
    tokio::select! {
        biased;
        done = work => Ok(done),
        came = channel.next() => Err(match came {
            Ok(None) => Ended::ByTheOther,
            Ok(Some(_)) => ChannelError::permanent("it spoke before it was answered").into(),
            Err(error) => error.into(),
        }),
    }
}
