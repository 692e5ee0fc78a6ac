//! A committed transaction as the store holds it.
//!
//! A stored transaction is a [`Header`] and a body. The body is a sequence of *commands*, each a
//! little-endian `u32` length and then that many bytes. A command is a pgoutput message in its
//! protocol-1 form (no transaction id inside) whose relation number is a [`DictionaryId`] instead
//! of an OID, or, in the body of a transaction that was streamed before it committed, a
//! [`SUBTRANSACTION_MARK`] that says which sub-transaction the commands after it belong to.
//! Drawn in `docs/formats/transaction.md`.

use crate::{Lsn, PgTime, Xid};

/// What is known of a transaction once it has committed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Header {
    /// Top-level transaction id on the publisher.
    pub xid: Xid,
    /// Start of the commit record. A snapshot taken at consistent point `c` holds exactly the
    /// transactions with `commit_lsn < c`.
    pub commit_lsn: Lsn,
    /// End of the commit record: the transaction's position in the log.
    pub end_lsn: Lsn,
    /// The publisher's clock at commit.
    pub commit_time: PgTime,
    /// Commands in the body, marks and aborted sub-transactions included.
    pub commands: u64,
    /// Sub-transactions of a streamed transaction that rolled back, ascending: their row changes
    /// are in the body and must be passed over.
    pub aborted_subtransactions: Vec<Xid>,
}

/// First byte of a command that says which sub-transaction follows (then the xid, big-endian).
pub const SUBTRANSACTION_MARK: u8 = b'x';

/// Bytes of a header without aborted sub-transactions.
pub const HEADER_LEN_MIN: usize = 4 + 8 + 8 + 8 + 8 + 4;

/// Why a stored transaction cannot be read.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Malformed {
    /// The bytes end inside a header or a command.
    Truncated,
    /// A command of zero bytes.
    EmptyCommand,
}

impl std::fmt::Display for Malformed {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Malformed::Truncated => "the stored transaction ends inside a header or command",
            Malformed::EmptyCommand => "the stored transaction has a command of zero bytes",
        })
    }
}

impl std::error::Error for Malformed {}

impl Header {
    /// Appends the header's bytes (all little-endian).
    pub fn encode(&self, out: &mut Vec<u8>) {
        out.extend_from_slice(&self.xid.to_le_bytes());
        out.extend_from_slice(&self.commit_lsn.0.to_le_bytes());
        out.extend_from_slice(&self.end_lsn.0.to_le_bytes());
        out.extend_from_slice(&self.commit_time.0.to_le_bytes());
        out.extend_from_slice(&self.commands.to_le_bytes());
        out.extend_from_slice(&(self.aborted_subtransactions.len() as u32).to_le_bytes());
        for xid in &self.aborted_subtransactions {
            out.extend_from_slice(&xid.to_le_bytes());
        }
    }

    /// Splits a stored payload into its header and its body.
    pub fn decode(payload: &[u8]) -> Result<(Header, &[u8]), Malformed> {
        let fixed = payload.get(..HEADER_LEN_MIN).ok_or(Malformed::Truncated)?;
        let u32_at = |at: usize| u32::from_le_bytes(fixed[at..at + 4].try_into().expect("4 bytes"));
        let u64_at = |at: usize| u64::from_le_bytes(fixed[at..at + 8].try_into().expect("8 bytes"));
        let aborted_len = u32_at(36) as usize;
        let aborted_end = aborted_len
            .checked_mul(4)
            .and_then(|len| len.checked_add(HEADER_LEN_MIN))
            .ok_or(Malformed::Truncated)?;
        let aborted = payload.get(HEADER_LEN_MIN..aborted_end).ok_or(Malformed::Truncated)?;
        let header = Header {
            xid: u32_at(0),
            commit_lsn: Lsn(u64_at(4)),
            end_lsn: Lsn(u64_at(12)),
            commit_time: PgTime(u64_at(20) as i64),
            commands: u64_at(28),
            aborted_subtransactions: aborted
                .chunks_exact(4)
                .map(|xid| u32::from_le_bytes(xid.try_into().expect("4 bytes")))
                .collect(),
        };
        Ok((header, &payload[aborted_end..]))
    }
}

/// Appends one command to a body.
pub fn push_command(body: &mut Vec<u8>, command: &[u8]) {
    body.extend_from_slice(&(command.len() as u32).to_le_bytes());
    body.extend_from_slice(command);
}

/// The commands of a body, in order. After an error nothing more is yielded.
pub fn commands(body: &[u8]) -> Commands<'_> {
    Commands { rest: body }
}

/// Iterator over a body's commands.
#[derive(Clone, Debug)]
pub struct Commands<'a> {
    rest: &'a [u8],
}

impl<'a> Iterator for Commands<'a> {
    type Item = Result<&'a [u8], Malformed>;

    fn next(&mut self) -> Option<Self::Item> {
        if self.rest.is_empty() {
            return None;
        }
        let split = self.rest.split_first_chunk::<4>().and_then(|(len, rest)| {
            let len = u32::from_le_bytes(*len) as usize;
            (rest.len() >= len).then(|| rest.split_at(len))
        });
        match split {
            Some((command, rest)) if !command.is_empty() => {
                self.rest = rest;
                Some(Ok(command))
            }
            Some(_) => {
                self.rest = &[];
                Some(Err(Malformed::EmptyCommand))
            }
            None => {
                self.rest = &[];
                Some(Err(Malformed::Truncated))
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn header() -> Header {
        Header {
            xid: 7,
            commit_lsn: Lsn(100),
            end_lsn: Lsn(148),
            commit_time: PgTime(-5),
            commands: 2,
            aborted_subtransactions: vec![8, 11],
        }
    }

    #[test]
    fn header_and_commands_round_trip() {
        let mut payload = Vec::new();
        header().encode(&mut payload);
        push_command(&mut payload, b"Iabc");
        push_command(&mut payload, b"D");
        let (decoded, body) = Header::decode(&payload).unwrap();
        assert_eq!(decoded, header());
        let all: Result<Vec<_>, _> = commands(body).collect();
        assert_eq!(all.unwrap(), vec![&b"Iabc"[..], &b"D"[..]]);
    }

    #[test]
    fn every_truncation_is_an_error() {
        let mut payload = Vec::new();
        header().encode(&mut payload);
        let header_len = payload.len();
        push_command(&mut payload, b"Iabc");
        for len in 0..payload.len() {
            match Header::decode(&payload[..len]) {
                Err(error) => assert_eq!(error, Malformed::Truncated),
                Ok((_, body)) => {
                    let all: Result<Vec<_>, _> = commands(body).collect();
                    assert!(len == header_len || all == Err(Malformed::Truncated), "{len}");
                }
            }
        }
    }
}
