//! A session inside a snapshot, at the other end of a channel.

use super::{Site, ended, exchange};
use crate::CaptureError;
use crate::publication::PublishedTable;
use crate::schema::Definitions;
use crate::snapshot::{BlockRange, CopyPlan, Digest, DigestOf, FoundRow};
use crate::source::channel::{Channel, ChannelError};
use crate::source::frame::{self, Received};
use crate::source::message::{ANSWER_BYTES_MAX, Answer, KEYS_BYTES, Request, decode_answer};
use crate::source::rows::RowDecoder;
use crate::source::{Asked, CopyData, FoundRows, Key, LookUp, SnapshotSession};
use bytes::Bytes;
use farshore_store::BoxFuture;

/// The channel is here while nothing is under way on it; what is dropped midway takes it along.
pub(super) struct RemoteSession {
    site: Site,
    channel: Option<Box<dyn Channel>>,
}

impl RemoteSession {
    /// A channel at whose other end a session is open.
    pub fn new(site: Site, channel: Box<dyn Channel>) -> RemoteSession {
        RemoteSession { site, channel: Some(channel) }
    }

    fn take(&mut self) -> Result<Box<dyn Channel>, CaptureError> {
        let over = || self.site.error(ChannelError::away("the session is over"));
        self.channel.take().ok_or_else(over)
    }

    async fn ask(&mut self, request: &Request, keys: &[&Key]) -> Result<Answer, CaptureError> {
        let mut channel = self.take()?;
        let answer = exchange(channel.as_mut(), request, keys).await;
        let answer = answer.map_err(|error| self.site.error(error))?;
        self.channel = Some(channel);
        Ok(answer)
    }

    /// Asks for data; their channel.
    async fn begin(
        &mut self,
        request: &Request,
        keys: &[&Key],
    ) -> Result<Box<dyn Channel>, CaptureError> {
        match self.ask(request, keys).await? {
            Answer::Begins => self.take(),
            other => Err(self.site.failed(other)),
        }
    }

    async fn ask_whether(&mut self, request: &Request) -> Result<bool, CaptureError> {
        match self.ask(request, &[]).await? {
            Answer::Is(is) => Ok(is),
            other => Err(self.site.failed(other)),
        }
    }

    /// The next data of what was begun on `flow`'s channel; at the end, the channel is the
    /// session's again.
    async fn data(&mut self, flow: &mut Option<Box<dyn Channel>>) -> Result<Flow, CaptureError> {
        // Dropped here, it is gone: nobody knows how much of a message was taken.
        let Some(mut channel) = flow.take() else {
            return Err(self.site.error(ChannelError::away("the session is over")));
        };
        let received = frame::receive(channel.as_mut(), ANSWER_BYTES_MAX).await;
        match received.map_err(|error| self.site.error(error.into()))? {
            Received::Data(data) => {
                *flow = Some(channel);
                Ok(Flow::Data(data))
            }
            Received::Message(answer) => {
                let answer = decode_answer(&answer).map_err(ChannelError::permanent);
                match answer.map_err(|error| self.site.error(error))? {
                    Answer::Done => {
                        self.channel = Some(channel);
                        Ok(Flow::End { rows: None })
                    }
                    Answer::Copied { rows } => {
                        self.channel = Some(channel);
                        Ok(Flow::End { rows: Some(rows) })
                    }
                    other => {
                        self.channel = Some(channel);
                        Err(self.site.failed(other))
                    }
                }
            }
            Received::End => Err(self.site.error(ended())),
        }
    }
}

/// What comes of what was begun.
enum Flow {
    Data(Bytes),
    /// With the number of rows, where that is told.
    End {
        rows: Option<u64>,
    },
}

impl SnapshotSession for RemoteSession {
    fn tables(&mut self) -> Asked<'_, Vec<PublishedTable>> {
        Box::pin(async move {
            match self.ask(&Request::Tables, &[]).await? {
                Answer::Tables(tables) => Ok(tables),
                other => Err(self.site.failed(other)),
            }
        })
    }

    fn hold_still<'a>(&'a mut self, tables: &'a [PublishedTable]) -> Asked<'a, bool> {
        Box::pin(async move {
            let tables = tables.iter().map(|table| table.oid).collect();
            self.ask_whether(&Request::HoldStill { tables }).await
        })
    }

    fn is_in_the_way<'a>(&'a mut self, tables: &'a [u32]) -> Asked<'a, bool> {
        Box::pin(
            async move { self.ask_whether(&Request::IsInTheWay { tables: tables.to_vec() }).await },
        )
    }

    fn definitions<'a>(&'a mut self, tables: &'a [u32]) -> Asked<'a, Definitions> {
        Box::pin(async move {
            match self.ask(&Request::Definitions { tables: tables.to_vec() }, &[]).await? {
                Answer::Definitions(definitions) => Ok(definitions),
                other => Err(self.site.failed(other)),
            }
        })
    }

    fn copy_range<'a>(
        &'a mut self,
        table: &'a PublishedTable,
        range: BlockRange,
        plan: &'a CopyPlan,
    ) -> Asked<'a, Box<dyn CopyData + 'a>> {
        Box::pin(async move {
            let (table, plan) = (table.oid, plan.clone());
            let request = Request::CopyRange { table, range, plan, counted: true };
            let flow = Some(self.begin(&request, &[]).await?);
            let copy = RemoteCopy { session: self, flow, ended: None };
            Ok(Box::new(copy) as Box<dyn CopyData + 'a>)
        })
    }

    fn look_up<'a>(&'a mut self, wanted: LookUp<'a>) -> Asked<'a, Box<dyn FoundRows + 'a>> {
        Box::pin(async move {
            let LookUp { table, plan, key_columns, keys } = wanted;
            let (plan, key_columns) = (plan.clone(), key_columns.to_vec());
            let request = Request::LookUp { table: table.oid, plan, key_columns };
            let (flow, decoder) = (None, RowDecoder::default());
            let rows = RemoteRows { session: self, request, left: keys, flow, decoder };
            Ok(Box::new(rows) as Box<dyn FoundRows + 'a>)
        })
    }

    fn digest<'a>(&'a mut self, wanted: DigestOf<'a>) -> Asked<'a, Option<Digest>> {
        Box::pin(async move {
            let DigestOf { table, types, key_columns, scope, hashing } = wanted;
            let request = Request::Digest {
                table: table.oid,
                types: types.to_vec(),
                key_columns: key_columns.to_vec(),
                scope: scope.clone(),
                hashing: hashing.clone(),
            };
            match self.ask(&request, &[]).await? {
                Answer::Digest(digest) => Ok(digest),
                other => Err(self.site.failed(other)),
            }
        })
    }

    fn close(self: Box<Self>) -> BoxFuture<'static, ()> {
        Box::pin(async move {
            let Self { site, channel } = *self;
            if let Some(channel) = channel {
                site.close(channel).await;
            }
        })
    }
}

struct RemoteCopy<'a> {
    session: &'a mut RemoteSession,
    /// Where data come; the session has it back at the end.
    flow: Option<Box<dyn Channel>>,
    /// It has, with so many rows.
    ended: Option<Option<u64>>,
}

impl CopyData for RemoteCopy<'_> {
    fn next(&mut self) -> Asked<'_, Option<Vec<Bytes>>> {
        Box::pin(async move {
            if self.ended.is_some() {
                return Ok(None);
            }
            Ok(match self.session.data(&mut self.flow).await? {
                Flow::Data(data) => Some(vec![data]),
                Flow::End { rows } => {
                    self.ended = Some(rows);
                    None
                }
            })
        })
    }

    fn rows(&self) -> Option<u64> {
        self.ended.flatten()
    }
}

struct RemoteRows<'a> {
    session: &'a mut RemoteSession,
    request: Request,
    /// Keys that were not sent yet.
    left: &'a [&'a Key],
    /// Where rows come, while they come.
    flow: Option<Box<dyn Channel>>,
    decoder: RowDecoder,
}

impl FoundRows for RemoteRows<'_> {
    fn next(&mut self) -> Asked<'_, Option<Vec<FoundRow>>> {
        Box::pin(async move {
            if self.flow.is_none() {
                if self.left.is_empty() {
                    return Ok(None);
                }
                let (now, later) = self.left.split_at(keys_at_once(self.left));
                self.flow = Some(self.session.begin(&self.request, now).await?);
                self.left = later;
            }
            let malformed = |session: &RemoteSession, what: &str| {
                Err(session.site.error(ChannelError::permanent(what)))
            };
            let mut rows = Vec::new();
            match self.session.data(&mut self.flow).await? {
                Flow::Data(data) => self.decoder.push(&data),
                Flow::End { .. } if self.decoder.is_empty() => {}
                Flow::End { .. } => return malformed(self.session, "its last row is cut off"),
            }
            loop {
                match self.decoder.next() {
                    Ok(Some(row)) => rows.push(row),
                    Ok(None) => return Ok(Some(rows)),
                    Err(what) => return malformed(self.session, what),
                }
            }
        })
    }
}

/// How many of the keys go with one request: one at least.
fn keys_at_once(keys: &[&Key]) -> usize {
    let mut bytes = 0;
    let fitting = keys.iter().take_while(|key| {
        bytes += 4 + key.bytes();
        bytes <= KEYS_BYTES
    });
    fitting.count().max(1)
}

#[cfg(test)]
mod tests {
    use super::*;
    use farshore_wire::frontend::Format;

    #[test]
    fn keys_go_in_requests_of_bounded_size() {
        let mut small = Key::default();
        small.push(Format::Text, &[b'x'; 1015]);
        let mut large = Key::default();
        large.push(Format::Text, &vec![b'x'; 2 << 20]);
        assert_eq!(keys_at_once(&vec![&small; 5000]), 1024);
        assert_eq!(keys_at_once(&[&small, &small]), 2);
        assert_eq!(keys_at_once(&[&large, &small]), 1);
        assert_eq!(keys_at_once(&[&small, &large, &small]), 1);
    }
}
