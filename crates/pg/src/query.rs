use crate::Error;
use crate::connection::{Connection, Unfinished};
use bytes::BytesMut;
use farshore_wire::backend::{CommandTag, DataRow, Field, Message};
use farshore_wire::frontend::{self, Bind, EncodeError, Format, Target};
use std::fmt::Display;
use std::ops::Range;
use std::str::FromStr;
use std::sync::Arc;

/// What one statement of a simple query gave.
#[derive(Debug, Clone)]
pub struct ResultSet {
    /// Names of the columns; empty if the statement returns no rows.
    pub columns: Vec<String>,
    /// The rows.
    pub rows: Vec<Row>,
    /// The command tag, as `SELECT 5`; empty for an empty statement.
    pub tag: String,
}

/// One of several questions that are sent together.
#[derive(Debug, Clone, Copy)]
pub enum Question<'a> {
    /// Statements by the simple protocol, all in one implicit transaction. The rows of all of them
    /// are the answer.
    Simple(&'a str),
    /// One statement with parameters in text form.
    Extended(&'a str, &'a [Option<&'a str>]),
}

/// A row of text values. It owns its memory: keeping it keeps nothing else alive.
#[derive(Debug, Clone)]
pub struct Row {
    columns: Arc<[String]>,
    text: String,
    values: Vec<Option<Range<usize>>>,
}

impl Row {
    pub(crate) fn new(columns: &Arc<[String]>, data: &DataRow) -> Result<Row, Error> {
        let mut bytes = Vec::with_capacity(data.storage().len());
        let values = data
            .values()
            .map(|value| {
                value.map(|value| {
                    let start = bytes.len();
                    bytes.extend_from_slice(value);
                    start..bytes.len()
                })
            })
            .collect();
        let invalid = |e: &dyn Display| {
            Error::Value(format!("a row is not UTF-8 ({e}); is the database SQL_ASCII?"))
        };
        let text = String::from_utf8(bytes).map_err(|e| invalid(&e))?;
        let row = Row { columns: columns.clone(), text, values };
        // All of it can be UTF-8 although its pieces are not.
        for range in row.values.iter().flatten() {
            if row.text.get(range.clone()).is_none() {
                return Err(invalid(&"a value ends within a character"));
            }
        }
        Ok(row)
    }

    /// How many values.
    pub fn len(&self) -> usize {
        self.values.len()
    }

    /// Whether there are no values.
    pub fn is_empty(&self) -> bool {
        self.values.is_empty()
    }

    /// The value of column `index`, from 0; `None` if it is NULL, or if there is no such column.
    pub fn get(&self, index: usize) -> Option<&str> {
        self.values.get(index)?.clone().and_then(|range| self.text.get(range))
    }

    /// The value of the first column called `name`; `None` if it is NULL, or if there is none.
    pub fn by_name(&self, name: &str) -> Option<&str> {
        self.get(self.columns.iter().position(|column| column == name)?)
    }

    /// Names of the columns.
    pub fn columns(&self) -> &[String] {
        &self.columns
    }

    /// The value of column `index` as something else. For booleans see [`Row::parse_bool`].
    ///
    /// # Errors
    /// [`Error::Value`] if it is NULL, is not there, or does not parse.
    pub fn parse<T: FromStr>(&self, index: usize) -> Result<T, Error> {
        let text = self.required(index)?;
        text.parse().map_err(|_| self.unfit(index, text, std::any::type_name::<T>()))
    }

    /// The value of column `index`, PostgreSQL's `t` or `f`.
    ///
    /// # Errors
    /// [`Error::Value`] if it is anything else.
    pub fn parse_bool(&self, index: usize) -> Result<bool, Error> {
        match self.required(index)? {
            "t" => Ok(true),
            "f" => Ok(false),
            text => Err(self.unfit(index, text, "bool")),
        }
    }

    fn required(&self, index: usize) -> Result<&str, Error> {
        self.get(index)
            .ok_or_else(|| Error::Value(format!("column {} is NULL", self.column(index))))
    }

    fn unfit(&self, index: usize, text: &str, wanted: &str) -> Error {
        Error::Value(format!("column {} is \"{text}\", not a {wanted}", self.column(index)))
    }

    fn column(&self, index: usize) -> String {
        match self.columns.get(index) {
            Some(name) => format!("{index} ({name})"),
            None => format!("{index} (the row has {})", self.len()),
        }
    }
}

/// One statement with parameters in text form, up to its Sync.
fn extended_query(
    out: &mut BytesMut,
    sql: &str,
    parameters: &[Option<&str>],
) -> Result<(), EncodeError> {
    frontend::parse(out, "", sql, &[])?;
    let mut bind = Bind::begin(out, "", "", parameters.len())?;
    for value in parameters {
        bind.parameter(Format::Text, value.map(str::as_bytes))?;
    }
    bind.finish(Format::Text)?;
    frontend::describe(out, Target::Portal(""))?;
    frontend::execute(out, "", 0)?;
    frontend::sync(out);
    Ok(())
}

fn names(fields: Vec<Field>) -> Arc<[String]> {
    fields.into_iter().map(|field| field.name).collect()
}

impl Connection {
    /// Runs statements by the simple protocol, all in one implicit transaction unless they say
    /// otherwise, and gives what each returned. Works in every [`Mode`](crate::Mode).
    ///
    /// # Errors
    /// The first failing statement's error. The session stays usable unless that was fatal.
    pub async fn simple_query(&mut self, sql: &str) -> Result<Vec<ResultSet>, Error> {
        self.settle().await?;
        self.encode(|out| frontend::query(out, sql))?;
        self.unfinished = Unfinished::Answer;
        let mut results = Vec::new();
        let mut columns: Arc<[String]> = Arc::new([]);
        let mut rows = Vec::new();
        loop {
            let tag = match self.receive().await? {
                Message::RowDescription(fields) => {
                    columns = names(fields);
                    continue;
                }
                Message::DataRow(data) => {
                    rows.push(self.row(&columns, &data).await?);
                    continue;
                }
                Message::CommandComplete(tag) => tag.as_str().to_owned(),
                Message::EmptyQueryResponse => String::new(),
                Message::ErrorResponse(error) => return Err(self.fail(error).await),
                Message::ReadyForQuery(_) => {
                    self.unfinished = Unfinished::Nothing;
                    return Ok(results);
                }
                other => return Err(self.unexpected(other).await),
            };
            let columns = std::mem::replace(&mut columns, Arc::new([]));
            let rows = std::mem::take(&mut rows);
            results.push(ResultSet { columns: columns.to_vec(), rows, tag });
        }
    }

    /// Runs one statement with parameters, all in text form, and gives its rows. The server infers
    /// the parameters' types; `$1::int8` in the SQL says more.
    ///
    /// # Errors
    /// The statement's error. The session stays usable unless that was fatal. In the replication
    /// modes PostgreSQL refuses this: use [`Connection::simple_query`].
    pub async fn query(
        &mut self,
        sql: &str,
        parameters: &[Option<&str>],
    ) -> Result<Vec<Row>, Error> {
        Ok(self.extended(sql, parameters).await?.0)
    }

    /// As [`Connection::query`], and gives how many rows the statement touched, 0 if it is not one
    /// that counts.
    ///
    /// # Errors
    /// As [`Connection::query`].
    pub async fn execute(&mut self, sql: &str, parameters: &[Option<&str>]) -> Result<u64, Error> {
        let (_, tag) = self.extended(sql, parameters).await?;
        Ok(tag.and_then(|tag| tag.rows()).unwrap_or(0))
    }

    async fn extended(
        &mut self,
        sql: &str,
        parameters: &[Option<&str>],
    ) -> Result<(Vec<Row>, Option<CommandTag>), Error> {
        self.settle().await?;
        self.encode(|out| extended_query(out, sql, parameters))?;
        self.unfinished = Unfinished::ExtendedAnswer;
        let mut columns: Arc<[String]> = Arc::new([]);
        let mut rows = Vec::new();
        let mut tag = None;
        loop {
            match self.receive().await? {
                Message::ParseComplete
                | Message::BindComplete
                | Message::NoData
                | Message::EmptyQueryResponse => {}
                Message::RowDescription(fields) => columns = names(fields),
                Message::DataRow(data) => rows.push(self.row(&columns, &data).await?),
                Message::CommandComplete(done) => tag = Some(done),
                Message::ErrorResponse(error) => return Err(self.fail(error).await),
                Message::ReadyForQuery(_) => {
                    self.unfinished = Unfinished::Nothing;
                    return Ok((rows, tag));
                }
                other => return Err(self.unexpected(other).await),
            }
        }
    }

    /// Sends questions together and waits for their answers: one round trip, however many they
    /// are. Each is run whatever became of those before it, and has its own answer. None may be a
    /// COPY.
    ///
    /// # Errors
    /// The connection is lost. What the server refuses is in that question's place.
    pub async fn ask_all(
        &mut self,
        questions: &[Question<'_>],
    ) -> Result<Vec<Result<Vec<Row>, Error>>, Error> {
        self.settle().await?;
        self.put_questions(questions)?;
        self.answers(questions.len()).await
    }

    /// Puts questions behind what waits to be written, for who knows what else is on its way: the
    /// answers to that come first, then [`Connection::answers`] takes those to the questions.
    ///
    /// # Errors
    /// What the protocol cannot carry.
    pub fn put_questions(&mut self, questions: &[Question<'_>]) -> Result<(), Error> {
        self.encode(|out| {
            for question in questions {
                match question {
                    Question::Simple(sql) => frontend::query(out, sql)?,
                    Question::Extended(sql, parameters) => extended_query(out, sql, parameters)?,
                }
            }
            Ok(())
        })
    }

    /// The answers to so many questions, which are what comes next.
    ///
    /// # Errors
    /// As [`Connection::ask_all`].
    pub async fn answers(
        &mut self,
        questions: usize,
    ) -> Result<Vec<Result<Vec<Row>, Error>>, Error> {
        if questions > 0 {
            let answers = u32::try_from(questions).unwrap_or(u32::MAX);
            self.unfinished = Unfinished::Answers(answers);
        }
        let mut answers = Vec::with_capacity(questions);
        while answers.len() < questions {
            answers.push(self.one_answer().await?);
        }
        Ok(answers)
    }

    /// The answer that ends with the next ReadyForQuery. The outer error is of the connection.
    async fn one_answer(&mut self) -> Result<Result<Vec<Row>, Error>, Error> {
        let mut columns: Arc<[String]> = Arc::new([]);
        let mut rows = Ok(Vec::new());
        loop {
            match self.receive().await? {
                Message::ParseComplete
                | Message::BindComplete
                | Message::NoData
                | Message::CommandComplete(_)
                | Message::EmptyQueryResponse => {}
                Message::RowDescription(fields) => columns = names(fields),
                Message::DataRow(data) => {
                    if let Ok(known) = &mut rows {
                        match Row::new(&columns, &data) {
                            Ok(row) => known.push(row),
                            Err(error) => rows = Err(error),
                        }
                    }
                }
                Message::ErrorResponse(error) if error.is_fatal() => {
                    return Err(Error::Server(error));
                }
                Message::ErrorResponse(error) => rows = Err(Error::Server(error)),
                Message::ReadyForQuery(_) => {
                    self.answer_ended();
                    return Ok(rows);
                }
                other => return Err(self.unexpected(other).await),
            }
        }
    }

    async fn row(&mut self, columns: &Arc<[String]>, data: &DataRow) -> Result<Row, Error> {
        match Row::new(columns, data) {
            Ok(row) => Ok(row),
            Err(error) => {
                self.receive_ready().await?;
                Err(error)
            }
        }
    }

    async fn unexpected(&mut self, message: Message) -> Error {
        match message {
            Message::CopyInResponse(_) => {
                if let Err(error) = self.refuse_copy_in() {
                    return error;
                }
                self.misplaced("COPY FROM STDIN needs Connection::copy_in".into()).await
            }
            Message::CopyOutResponse(_) => {
                self.misplaced("COPY TO STDOUT needs Connection::copy_out".into()).await
            }
            Message::CopyBothResponse(_) => {
                frontend::copy_done(self.out());
                let what = "START_REPLICATION needs Connection::start_replication";
                self.misplaced(what.into()).await
            }
            other => self.misplaced(format!("{other:?} in the answer to a query")).await,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use bytes::Bytes;
    use farshore_wire::backend::{Frame, decode};

    fn row(body: &'static [u8]) -> Result<Row, Error> {
        let columns: Arc<[String]> = ["a".to_owned(), "b".to_owned()].into();
        let frame = Frame { tag: b'D', body: Bytes::from_static(body) };
        let Message::DataRow(data) = decode(frame).unwrap() else { panic!() };
        Row::new(&columns, &data)
    }

    #[test]
    fn values_are_read_and_checked() {
        let row_of_two = row(b"\0\x02\0\0\0\x0242\xff\xff\xff\xff").unwrap();
        assert_eq!((row_of_two.get(0), row_of_two.by_name("a")), (Some("42"), Some("42")));
        assert_eq!((row_of_two.get(1), row_of_two.get(2), row_of_two.len()), (None, None, 2));
        assert_eq!(row_of_two.parse::<u8>(0).unwrap(), 42);
        let error = row_of_two.parse::<u8>(1).unwrap_err().to_string();
        assert!(error.contains("1 (b) is NULL"), "{error}");
        assert!(row_of_two.parse_bool(0).unwrap_err().to_string().contains("\"42\""));
        // One character, cut in two: valid as a whole, invalid in its pieces.
        assert!(row(b"\0\x02\0\0\0\x01\xc3\0\0\0\x01\xa9").is_err());
    }
}
