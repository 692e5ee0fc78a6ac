//! What travels inside CopyData while replication runs, in both directions
//! (PostgreSQL docs: "55.4. Streaming Replication Protocol", `START_REPLICATION`).
//!
//! Total: every input gives a message or a [`ReplicationError`].

use farshore_model::{Lsn, PgTime};

/// From the walsender.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FromServer<'a> {
    /// `w`
    XLogData(XLogData<'a>),
    /// `k`
    PrimaryKeepalive(PrimaryKeepalive),
}

/// From the receiver.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FromClient {
    /// `r`
    StandbyStatusUpdate(StandbyStatusUpdate),
    /// `h`
    HotStandbyFeedback(HotStandbyFeedback),
}

/// A piece of log, or one message of a logical decoding plugin.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct XLogData<'a> {
    /// Where the data starts in the log. Zero for some logical messages.
    pub wal_start: Lsn,
    /// End of the log on the server now.
    pub wal_end: Lsn,
    /// The server's clock.
    pub send_time: PgTime,
    /// Log bytes, or a pgoutput message.
    pub data: &'a [u8],
}

/// The server is alive.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PrimaryKeepalive {
    /// End of the log on the server now; from a logical walsender, what it has decoded.
    pub wal_end: Lsn,
    /// The server's clock.
    pub send_time: PgTime,
    /// Answer at once, or the server may give up the connection.
    pub reply_requested: bool,
}

/// What the receiver has done with the log.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StandbyStatusUpdate {
    /// The byte after the last one received.
    pub written: Lsn,
    /// The byte after the last one that survives a crash of the receiver. A logical slot is
    /// confirmed up to here: nothing before it will be sent again.
    pub flushed: Lsn,
    /// The byte after the last one applied.
    pub applied: Lsn,
    /// The receiver's clock.
    pub client_time: PgTime,
    /// The server shall answer at once.
    pub reply_requested: bool,
}

/// Rows that the receiver's queries still need. All zero: the feedback is withdrawn.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HotStandbyFeedback {
    /// The receiver's clock.
    pub client_time: PgTime,
    /// Oldest transaction needed, catalogs apart.
    pub xmin: u32,
    /// Epoch of `xmin`.
    pub xmin_epoch: u32,
    /// Oldest transaction needed by slots on the receiver, in catalogs.
    pub catalog_xmin: u32,
    /// Epoch of `catalog_xmin`.
    pub catalog_xmin_epoch: u32,
}

/// Why bytes are not the message that they should be.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum ReplicationError {
    /// No bytes at all.
    #[error("replication message is empty: expected a tag")]
    Empty,
    /// No message in this direction has this tag.
    #[error("replication message has the unknown tag {tag:#04x}")]
    UnknownTag {
        /// First byte.
        tag: u8,
    },
    /// Too short, or longer than its kind can be.
    #[error("replication message '{}' has {found} bytes, expected {expected}", char::from(*.tag))]
    Length {
        /// First byte.
        tag: u8,
        /// The length its kind has, at least so for `w`; the tag included.
        expected: usize,
        /// Length in bytes, the tag included.
        found: usize,
    },
    /// The flag in the last byte is neither 0 nor 1.
    #[error("replication message '{}' asks for a reply with {found:#04x}, expected 0 or 1", char::from(*.tag))]
    Flag {
        /// First byte.
        tag: u8,
        /// The byte.
        found: u8,
    },
}

/// Bytes before the data of an [`XLogData`].
pub const XLOG_DATA_HEADER_LEN: usize = 25;
const PRIMARY_KEEPALIVE_LEN: usize = 18;
const STANDBY_STATUS_UPDATE_LEN: usize = 34;
const HOT_STANDBY_FEEDBACK_LEN: usize = 25;

impl<'a> FromServer<'a> {
    /// Decodes the content of a CopyData message that a walsender sent.
    ///
    /// # Errors
    /// Whatever is not one of the two kinds, well-formed.
    #[inline]
    pub fn decode(data: &'a [u8]) -> Result<FromServer<'a>, ReplicationError> {
        match data.first() {
            Some(b'w') => {
                let Some((header, payload)) = data.split_first_chunk::<XLOG_DATA_HEADER_LEN>()
                else {
                    return Err(ReplicationError::Length {
                        tag: b'w',
                        expected: XLOG_DATA_HEADER_LEN,
                        found: data.len(),
                    });
                };
                Ok(FromServer::XLogData(XLogData {
                    wal_start: Lsn(u64_at(header, 1)),
                    wal_end: Lsn(u64_at(header, 9)),
                    send_time: PgTime(u64_at(header, 17) as i64),
                    data: payload,
                }))
            }
            Some(b'k') => {
                let fields = exactly::<PRIMARY_KEEPALIVE_LEN>(data)?;
                Ok(FromServer::PrimaryKeepalive(PrimaryKeepalive {
                    wal_end: Lsn(u64_at(fields, 1)),
                    send_time: PgTime(u64_at(fields, 9) as i64),
                    reply_requested: flag(fields[0], fields[17])?,
                }))
            }
            Some(tag) => Err(ReplicationError::UnknownTag { tag: *tag }),
            None => Err(ReplicationError::Empty),
        }
    }

    /// Appends the content of the CopyData message.
    pub fn encode(&self, out: &mut Vec<u8>) {
        match self {
            FromServer::XLogData(XLogData { wal_start, wal_end, send_time, data }) => {
                out.push(b'w');
                out.extend_from_slice(&wal_start.0.to_be_bytes());
                out.extend_from_slice(&wal_end.0.to_be_bytes());
                out.extend_from_slice(&send_time.0.to_be_bytes());
                out.extend_from_slice(data);
            }
            FromServer::PrimaryKeepalive(keepalive) => {
                out.push(b'k');
                out.extend_from_slice(&keepalive.wal_end.0.to_be_bytes());
                out.extend_from_slice(&keepalive.send_time.0.to_be_bytes());
                out.push(u8::from(keepalive.reply_requested));
            }
        }
    }
}

impl FromClient {
    /// Decodes the content of a CopyData message that a receiver sent.
    ///
    /// # Errors
    /// Whatever is not one of the two kinds, well-formed.
    pub fn decode(data: &[u8]) -> Result<FromClient, ReplicationError> {
        match data.first() {
            Some(b'r') => {
                let fields = exactly::<STANDBY_STATUS_UPDATE_LEN>(data)?;
                Ok(FromClient::StandbyStatusUpdate(StandbyStatusUpdate {
                    written: Lsn(u64_at(fields, 1)),
                    flushed: Lsn(u64_at(fields, 9)),
                    applied: Lsn(u64_at(fields, 17)),
                    client_time: PgTime(u64_at(fields, 25) as i64),
                    reply_requested: flag(fields[0], fields[33])?,
                }))
            }
            Some(b'h') => {
                let fields = exactly::<HOT_STANDBY_FEEDBACK_LEN>(data)?;
                Ok(FromClient::HotStandbyFeedback(HotStandbyFeedback {
                    client_time: PgTime(u64_at(fields, 1) as i64),
                    xmin: u32_at(fields, 9),
                    xmin_epoch: u32_at(fields, 13),
                    catalog_xmin: u32_at(fields, 17),
                    catalog_xmin_epoch: u32_at(fields, 21),
                }))
            }
            Some(tag) => Err(ReplicationError::UnknownTag { tag: *tag }),
            None => Err(ReplicationError::Empty),
        }
    }

    /// Appends the content of the CopyData message.
    pub fn encode(&self, out: &mut Vec<u8>) {
        match self {
            FromClient::StandbyStatusUpdate(status) => {
                out.push(b'r');
                out.extend_from_slice(&status.written.0.to_be_bytes());
                out.extend_from_slice(&status.flushed.0.to_be_bytes());
                out.extend_from_slice(&status.applied.0.to_be_bytes());
                out.extend_from_slice(&status.client_time.0.to_be_bytes());
                out.push(u8::from(status.reply_requested));
            }
            FromClient::HotStandbyFeedback(feedback) => {
                out.push(b'h');
                out.extend_from_slice(&feedback.client_time.0.to_be_bytes());
                out.extend_from_slice(&feedback.xmin.to_be_bytes());
                out.extend_from_slice(&feedback.xmin_epoch.to_be_bytes());
                out.extend_from_slice(&feedback.catalog_xmin.to_be_bytes());
                out.extend_from_slice(&feedback.catalog_xmin_epoch.to_be_bytes());
            }
        }
    }
}

/// All of `data`, which has a tag, as its kind's fixed number of bytes.
fn exactly<const N: usize>(data: &[u8]) -> Result<&[u8; N], ReplicationError> {
    data.try_into().map_err(|_| ReplicationError::Length {
        tag: data.first().copied().unwrap_or_default(),
        expected: N,
        found: data.len(),
    })
}

fn flag(tag: u8, found: u8) -> Result<bool, ReplicationError> {
    match found {
        0 => Ok(false),
        1 => Ok(true),
        found => Err(ReplicationError::Flag { tag, found }),
    }
}

#[inline]
fn u64_at<const N: usize>(fields: &[u8; N], at: usize) -> u64 {
    u64::from_be_bytes(std::array::from_fn(|i| fields[at + i]))
}

fn u32_at<const N: usize>(fields: &[u8; N], at: usize) -> u32 {
    u32::from_be_bytes(std::array::from_fn(|i| fields[at + i]))
}
