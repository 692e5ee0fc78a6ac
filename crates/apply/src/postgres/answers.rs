//! Single statements with parameters as they came from the publisher, and their rows.

use bytes::Bytes;
use farshore_pg::Connection;
use farshore_wire::backend::Message;
use farshore_wire::frontend::{self, Format};

/// A row's values in text form.
pub(super) type AnswerRow = Vec<Option<Bytes>>;

/// Runs one statement and gives its rows in text form. `types` are the parameters' type OIDs, 0
/// where the server decides. After an error the session is ready for another statement.
pub(super) async fn run(
    connection: &mut Connection,
    sql: &str,
    types: &[u32],
    values: &[(Format, Option<&[u8]>)],
) -> Result<Vec<AnswerRow>, farshore_pg::Error> {
    send(connection, sql, types, values).await?;
    answers(connection).await
}

/// As [`run`], and gives how many rows the statement touched, or found if it is a SELECT.
pub(super) async fn run_counted(
    connection: &mut Connection,
    sql: &str,
    types: &[u32],
    values: &[(Format, Option<&[u8]>)],
) -> Result<u64, farshore_pg::Error> {
    send(connection, sql, types, values).await?;
    Ok(counted(connection).await?.1)
}

async fn send(
    connection: &mut Connection,
    sql: &str,
    types: &[u32],
    values: &[(Format, Option<&[u8]>)],
) -> Result<(), farshore_pg::Error> {
    let out = connection.out();
    frontend::parse(out, "", sql, types)?;
    let mut bind = frontend::Bind::begin(out, "", "", values.len())?;
    for (format, value) in values {
        bind.parameter(*format, *value)?;
    }
    bind.finish(Format::Text)?;
    frontend::execute(out, "", 0)?;
    frontend::sync(out);
    connection.flush().await
}

/// Reads up to ReadyForQuery; the first error, or all rows.
pub(super) async fn answers(
    connection: &mut Connection,
) -> Result<Vec<AnswerRow>, farshore_pg::Error> {
    Ok(counted(connection).await?.0)
}

/// As [`answers`], with the number that the last statement's command tag says.
async fn counted(connection: &mut Connection) -> Result<(Vec<AnswerRow>, u64), farshore_pg::Error> {
    let (rows, counts) = all_counted(connection).await?;
    Ok((rows, counts.last))
}

/// The rows that several statements have touched together.
pub(super) async fn count_all(connection: &mut Connection) -> Result<u64, farshore_pg::Error> {
    Ok(all_counted(connection).await?.1.all)
}

/// What command tags say.
#[derive(Default)]
struct Counts {
    last: u64,
    all: u64,
}

async fn all_counted(
    connection: &mut Connection,
) -> Result<(Vec<AnswerRow>, Counts), farshore_pg::Error> {
    let (mut rows, mut counts) = (Vec::new(), Counts::default());
    let mut failed = None;
    loop {
        match connection.receive().await? {
            Message::DataRow(row) => {
                let storage = row.storage();
                rows.push(row.values().map(|v| v.map(|v| storage.slice_ref(v))).collect());
            }
            Message::ErrorResponse(error) => {
                failed.get_or_insert(farshore_pg::Error::Server(error));
            }
            Message::ReadyForQuery(_) => break,
            Message::CommandComplete(tag) => {
                counts.last = tag.rows().unwrap_or(0);
                counts.all += counts.last;
            }
            Message::ParseComplete | Message::BindComplete => {}
            other => {
                return Err(farshore_pg::Error::Protocol(format!("unexpected {other:?}")));
            }
        }
    }
    match failed {
        None => Ok((rows, counts)),
        Some(error) => Err(error),
    }
}
