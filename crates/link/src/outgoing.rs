//! What one side of a session has to send: pieces in order, credit to spend on them, and what is
//! due beside them. Pure; the session's tasks share it behind a lock.

use crate::frame::{self, HEADER_BYTES, Header, Kind};
use bytes::Bytes;
use std::collections::VecDeque;

/// Pieces wait here until a connection takes them; so much may wait per connection.
const WAITING_BYTES_PER_STRIPE: usize = 256 << 10;

/// So many pieces may wait per connection, however small.
const WAITING_PIECES_PER_STRIPE: usize = 1024;

/// A connection takes no more small pieces at once, so that others have some too.
const PIECES_AT_ONCE: usize = 512;

/// A piece of a message, cut but not numbered.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Piece {
    /// `Some` with the message's length on its first piece.
    pub(crate) message_bytes: Option<u32>,
    pub(crate) parts: Vec<Bytes>,
    pub(crate) bytes: usize,
}

/// A frame ready to be encoded.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Frame {
    pub(crate) header: Header,
    pub(crate) payload: Vec<Bytes>,
}

impl Frame {
    pub(crate) fn control(kind: Kind, number: u64) -> Frame {
        Frame { header: Header { kind, number, payload_bytes: 0 }, payload: Vec::new() }
    }

    pub(crate) fn wire_bytes(&self) -> u64 {
        (HEADER_BYTES + self.header.payload_bytes as usize) as u64
    }
}

/// Why a piece has to wait.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Wait {
    /// The peer has not taken enough of what it got.
    Credit,
    /// The connections have not taken enough of what waits.
    Room,
}

/// See the module.
#[derive(Debug)]
pub(crate) struct Outgoing {
    waiting: VecDeque<Frame>,
    waiting_bytes: usize,
    waiting_bytes_max: usize,
    waiting_pieces_max: usize,
    /// Number of the next piece.
    next: u64,
    /// Credit that pieces took since the session began, and that the peer granted.
    spent: u64,
    granted: u64,
    /// Credit to tell the peer of.
    grant_due: Option<u64>,
    end_due: bool,
    ended_due: bool,
    /// No piece will follow.
    is_ended: bool,
    /// The peer has everything.
    is_confirmed: bool,
}

impl Outgoing {
    pub(crate) fn new(stripes: usize, window_bytes: u64) -> Outgoing {
        Outgoing {
            waiting: VecDeque::new(),
            waiting_bytes: 0,
            waiting_bytes_max: stripes * WAITING_BYTES_PER_STRIPE,
            waiting_pieces_max: stripes * WAITING_PIECES_PER_STRIPE,
            next: 0,
            spent: 0,
            granted: window_bytes,
            grant_due: None,
            end_due: false,
            ended_due: false,
            is_ended: false,
            is_confirmed: false,
        }
    }

    /// Takes pieces from the front of `pieces` while there is credit and room for them.
    pub(crate) fn offer(&mut self, pieces: &mut VecDeque<Piece>) -> Result<(), Wait> {
        while let Some(piece) = pieces.front() {
            let cost = frame::cost(piece.bytes);
            if self.granted - self.spent < cost {
                return Err(Wait::Credit);
            }
            // One piece always fits, however large.
            if self.waiting_bytes > 0 && self.waiting_bytes + piece.bytes > self.waiting_bytes_max
                || self.waiting.len() >= self.waiting_pieces_max
            {
                return Err(Wait::Room);
            }
            let Some(piece) = pieces.pop_front() else { break };
            self.spent += cost;
            self.waiting_bytes += piece.bytes;
            let kind = match piece.message_bytes {
                Some(message_bytes) => Kind::First { message_bytes },
                None => Kind::More,
            };
            let header = Header { kind, number: self.next, payload_bytes: piece.bytes as u32 };
            self.next += 1;
            self.waiting.push_back(Frame { header, payload: piece.parts });
        }
        Ok(())
    }

    /// Moves pieces to a connection: one, and as many more as keep within `bytes_max`.
    pub(crate) fn take_pieces(&mut self, bytes_max: usize, into: &mut Vec<Frame>) {
        let mut bytes = 0;
        while let Some(frame) = self.waiting.front() {
            let more = frame.header.payload_bytes as usize;
            if bytes > 0 && bytes + more > bytes_max || into.len() >= PIECES_AT_ONCE {
                break;
            }
            bytes += more;
            self.waiting_bytes -= more;
            into.extend(self.waiting.pop_front());
        }
    }

    pub(crate) fn has_pieces(&self) -> bool {
        !self.waiting.is_empty()
    }

    /// Moves what is due beside the pieces.
    pub(crate) fn take_due(&mut self, into: &mut Vec<Frame>) {
        if let Some(total) = self.grant_due.take() {
            into.push(Frame::control(Kind::Credit, total));
        }
        if std::mem::take(&mut self.end_due) {
            into.push(Frame::control(Kind::End, self.next));
        }
        if std::mem::take(&mut self.ended_due) {
            into.push(Frame::control(Kind::Ended, 0));
        }
    }

    /// The peer is to be told that it has been granted `total` since the session began.
    pub(crate) fn owe_grant(&mut self, total: u64) {
        self.grant_due = self.grant_due.max(Some(total));
    }

    /// The peer is to be told that all its pieces have arrived.
    pub(crate) fn owe_ended(&mut self) {
        self.ended_due = true;
    }

    /// The peer granted `total` since the session began. Grants may overtake each other.
    pub(crate) fn grant(&mut self, total: u64) {
        self.granted = self.granted.max(total);
    }

    /// No piece will follow.
    pub(crate) fn end(&mut self) {
        self.is_ended = true;
        self.end_due = true;
    }

    /// The peer says that it has everything. False if it cannot know that.
    pub(crate) fn confirm(&mut self) -> bool {
        self.is_confirmed = self.is_ended && !self.end_due && self.waiting.is_empty();
        self.is_confirmed
    }

    pub(crate) fn is_confirmed(&self) -> bool {
        self.is_confirmed
    }

    pub(crate) fn is_ended(&self) -> bool {
        self.is_ended
    }

    pub(crate) fn waiting_bytes(&self) -> usize {
        self.waiting_bytes
    }
}

/// Cuts a message that lies in `parts`. Every piece but the last has `piece_bytes_max`; an empty
/// message is one empty piece.
pub(crate) fn cut(parts: &[Bytes], message_bytes: u32, piece_bytes_max: usize) -> VecDeque<Piece> {
    let mut pieces = VecDeque::with_capacity(message_bytes as usize / piece_bytes_max + 1);
    let mut piece = Piece { message_bytes: Some(message_bytes), parts: Vec::new(), bytes: 0 };
    for part in parts {
        let mut rest = part.clone();
        while !rest.is_empty() {
            if piece.bytes == piece_bytes_max {
                let empty = Piece { message_bytes: None, parts: Vec::new(), bytes: 0 };
                pieces.push_back(std::mem::replace(&mut piece, empty));
            }
            let taken = rest.split_to(rest.len().min(piece_bytes_max - piece.bytes));
            piece.bytes += taken.len();
            piece.parts.push(taken);
        }
    }
    pieces.push_back(piece);
    pieces
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parts(sizes: &[usize]) -> (Vec<Bytes>, u32) {
        let parts: Vec<_> = sizes.iter().map(|size| Bytes::from(vec![7; *size])).collect();
        (parts, sizes.iter().sum::<usize>() as u32)
    }

    #[test]
    fn messages_are_cut_across_their_parts() {
        for (sizes, expected) in [
            (&[][..], &[0][..]),
            (&[0, 0], &[0]),
            (&[10], &[10]),
            (&[4, 6], &[10]),
            (&[10, 1], &[10, 1]),
            (&[25, 0, 7], &[10, 10, 10, 2]),
        ] {
            let (parts, message_bytes) = parts(sizes);
            let pieces = cut(&parts, message_bytes, 10);
            let found: Vec<_> = pieces.iter().map(|piece| piece.bytes).collect();
            assert_eq!(found, expected, "{sizes:?}");
            for (at, piece) in pieces.iter().enumerate() {
                assert_eq!(piece.message_bytes, (at == 0).then_some(message_bytes));
                assert_eq!(piece.parts.iter().map(Bytes::len).sum::<usize>(), piece.bytes);
            }
        }
    }

    #[test]
    fn pieces_wait_for_credit_then_for_room() {
        let mut outgoing = Outgoing::new(1, 1 << 20);
        let (parts, message_bytes) = parts(&[2 << 20]);
        let mut pieces = cut(&parts, message_bytes, 256 << 10);
        assert_eq!(outgoing.offer(&mut pieces), Err(Wait::Room));
        assert_eq!(pieces.len(), 7);
        let mut taken = Vec::new();
        // The fourth does not fit into the credit: each costs more than its bytes.
        for expected in [(Wait::Room, 6), (Wait::Credit, 5), (Wait::Credit, 5)] {
            outgoing.take_pieces(1, &mut taken);
            let wait = outgoing.offer(&mut pieces).unwrap_err();
            assert_eq!((wait, pieces.len()), expected);
        }
        outgoing.grant(4 << 20);
        outgoing.take_pieces(1, &mut taken);
        assert_eq!(outgoing.offer(&mut pieces), Err(Wait::Room));
        assert_eq!(taken.iter().map(|frame| frame.header.number).collect::<Vec<_>>(), [0, 1, 2]);
    }

    #[test]
    fn grants_that_overtake_each_other_are_counted_once() {
        let mut outgoing = Outgoing::new(1, 100);
        outgoing.grant(300);
        outgoing.grant(200);
        assert_eq!(outgoing.granted, 300);
        outgoing.owe_grant(700);
        outgoing.owe_grant(600);
        let mut due = Vec::new();
        outgoing.take_due(&mut due);
        assert_eq!(due, [Frame::control(Kind::Credit, 700)]);
    }

    #[test]
    fn an_end_is_confirmed_only_after_everything_went() {
        let mut outgoing = Outgoing::new(1, 1 << 20);
        let (parts, message_bytes) = parts(&[5]);
        outgoing.offer(&mut cut(&parts, message_bytes, 10)).unwrap();
        outgoing.end();
        assert!(!outgoing.confirm());
        let mut frames = Vec::new();
        outgoing.take_due(&mut frames);
        assert!(!outgoing.confirm());
        assert_eq!(frames, [Frame::control(Kind::End, 1)]);
        outgoing.take_pieces(1, &mut frames);
        assert!(outgoing.confirm());
    }
}
