//! What has come from the peer and was not taken: pieces, perhaps out of order. Pure; the session's
//! tasks share it behind a lock. Bounded by the credit granted, which the peer cannot exceed.

use crate::frame;
use bytes::{Bytes, BytesMut};
use std::collections::BTreeMap;

/// A piece as it came.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Arrived {
    /// `Some` with the message's length on its first piece.
    pub(crate) message_bytes: Option<u32>,
    pub(crate) payload: Bytes,
}

/// What a new piece changes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct News {
    /// It is the one that is taken next.
    pub(crate) is_next: bool,
    /// The peer's end is known, and everything before it is here.
    pub(crate) is_complete: bool,
}

/// See the module.
#[derive(Debug)]
pub(crate) struct Arrivals {
    pieces: BTreeMap<u64, Arrived>,
    /// Number of the piece that is taken next.
    next: u64,
    /// Number that no piece reaches.
    end: Option<u64>,
    window_bytes: u64,
    /// Credit granted, used by pieces that came, and by those of them that were taken, since the
    /// session began.
    granted: u64,
    used: u64,
    taken: u64,
}

impl Arrivals {
    pub(crate) fn new(window_bytes: u64) -> Arrivals {
        Arrivals {
            pieces: BTreeMap::new(),
            next: 0,
            end: None,
            window_bytes,
            granted: window_bytes,
            used: 0,
            taken: 0,
        }
    }

    /// Keeps a piece. The error says what rule it breaks.
    pub(crate) fn insert(&mut self, number: u64, piece: Arrived) -> Result<News, String> {
        if number < self.next || self.pieces.contains_key(&number) {
            return Err(format!("piece {number} came twice"));
        }
        if let Some(end) = self.end.filter(|end| number >= *end) {
            return Err(format!("piece {number} came although {end} was named as the end"));
        }
        self.used += frame::cost(piece.payload.len());
        if self.used > self.granted {
            return Err(format!(
                "piece {number} exceeds the credit: {} bytes used of {}",
                self.used, self.granted
            ));
        }
        self.pieces.insert(number, piece);
        Ok(News { is_next: number == self.next, is_complete: self.is_complete() })
    }

    /// No piece will have this number or a higher one. The error says what rule it breaks.
    pub(crate) fn set_end(&mut self, end: u64) -> Result<News, String> {
        let highest = self.pieces.last_key_value().map(|(number, _)| *number);
        if self.end.is_some() || end < self.next || highest.is_some_and(|highest| highest >= end) {
            return Err(format!("{end} is named as the end, and that has been passed"));
        }
        self.end = Some(end);
        Ok(News { is_next: end == self.next, is_complete: self.is_complete() })
    }

    /// The next piece in order, and credit to tell the peer of, if it is worth a frame.
    pub(crate) fn take(&mut self) -> Option<(Arrived, Option<u64>)> {
        let piece = self.pieces.remove(&self.next)?;
        self.next += 1;
        self.taken += frame::cost(piece.payload.len());
        let total = self.taken + self.window_bytes;
        // The peer never lacks more than this, so it always has room for the largest piece.
        let is_worth_it = total - self.granted >= self.window_bytes / 8;
        if is_worth_it {
            self.granted = total;
        }
        Some((piece, is_worth_it.then_some(total)))
    }

    /// Everything has been taken, and nothing will follow.
    pub(crate) fn is_at_end(&self) -> bool {
        self.end == Some(self.next)
    }

    /// Everything has come, if not been taken.
    pub(crate) fn is_complete(&self) -> bool {
        // Numbers are distinct and within [next, end).
        self.end.is_some_and(|end| end - self.next == self.pieces.len() as u64)
    }

    /// Credit that pieces hold here, in bytes of [`frame::cost`]: at most the window.
    pub(crate) fn held_bytes(&self) -> u64 {
        self.used - self.taken
    }
}

/// A message whose pieces come one by one, in order.
#[derive(Debug)]
pub(crate) struct Assembly {
    /// Longer messages are not taken.
    message_bytes_max: u32,
    /// Bytes missing of the message begun.
    missing: Option<usize>,
    bytes: BytesMut,
}

impl Assembly {
    pub(crate) fn new(message_bytes_max: u32) -> Assembly {
        Assembly { message_bytes_max, missing: None, bytes: BytesMut::new() }
    }

    /// Adds a piece; returns the message if it is whole. Memory grows with what has come, not with
    /// what was announced. The error says what rule the piece breaks.
    pub(crate) fn add(&mut self, piece: Arrived) -> Result<Option<Bytes>, String> {
        let missing = match (self.missing, piece.message_bytes) {
            (None, Some(message_bytes)) if message_bytes <= self.message_bytes_max => {
                message_bytes as usize
            }
            (None, Some(message_bytes)) => {
                return Err(format!(
                    "a message of {message_bytes} bytes was announced; {} are allowed",
                    self.message_bytes_max
                ));
            }
            (Some(missing), None) => missing,
            (None, None) => return Err("a message began in its middle".to_owned()),
            (Some(missing), Some(_)) => {
                return Err(format!("a message began while one lacked {missing} bytes"));
            }
        };
        let Some(missing) = missing.checked_sub(piece.payload.len()) else {
            return Err("a message got more bytes than were announced".to_owned());
        };
        if missing > 0 {
            self.missing = Some(missing);
            self.bytes.extend_from_slice(&piece.payload);
            return Ok(None);
        }
        self.missing = None;
        if self.bytes.is_empty() {
            return Ok(Some(piece.payload));
        }
        self.bytes.extend_from_slice(&piece.payload);
        // A new buffer next time: the old one's memory goes with the message.
        Ok(Some(std::mem::take(&mut self.bytes).freeze()))
    }

    /// Whether a message has been begun.
    pub(crate) fn is_begun(&self) -> bool {
        self.missing.is_some()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn piece(message_bytes: Option<u32>, bytes: usize) -> Arrived {
        Arrived { message_bytes, payload: Bytes::from(vec![1; bytes]) }
    }

    #[test]
    fn rules_that_pieces_break() {
        let mut arrivals = Arrivals::new(1000);
        arrivals.insert(1, piece(None, 10)).unwrap();
        assert!(arrivals.insert(1, piece(None, 10)).unwrap_err().contains("twice"));
        arrivals.insert(0, piece(Some(20), 10)).unwrap();
        arrivals.take().unwrap();
        assert!(arrivals.insert(0, piece(None, 10)).unwrap_err().contains("twice"));
        assert!(arrivals.set_end(1).unwrap_err().contains("passed"));
        arrivals.set_end(3).unwrap();
        assert!(arrivals.set_end(3).unwrap_err().contains("passed"));
        assert!(arrivals.insert(3, piece(None, 10)).unwrap_err().contains("end"));
        assert!(arrivals.insert(2, piece(None, 900)).unwrap_err().contains("credit"));
    }

    #[test]
    fn credit_comes_back_as_pieces_are_taken_and_never_before() {
        let mut arrivals = Arrivals::new(1600);
        for number in 0..10 {
            arrivals.insert(number, piece(Some(36), 36)).unwrap();
        }
        assert_eq!(arrivals.held_bytes(), 1000);
        let grants: Vec<_> = (0..10).map(|_| arrivals.take().unwrap().1).collect();
        let worth = [None, Some(1800)].repeat(5);
        let expected: Vec<_> =
            worth.iter().enumerate().map(|(n, w)| w.map(|_| 1600 + (n as u64 + 1) * 100)).collect();
        assert_eq!(grants, expected);
        assert_eq!(arrivals.take(), None);
        assert_eq!(arrivals.held_bytes(), 0);
    }

    #[test]
    fn a_message_needs_its_pieces_in_order_and_exactly() {
        let mut assembly = Assembly::new(1000);
        assert!(assembly.add(piece(None, 1)).unwrap_err().contains("middle"));
        assert_eq!(assembly.add(piece(Some(3), 2)), Ok(None));
        assert!(assembly.add(piece(Some(3), 2)).unwrap_err().contains("lacked 1"));
        assert!(assembly.add(piece(None, 2)).unwrap_err().contains("more bytes"));
        let mut assembly = Assembly::new(1000);
        assert!(assembly.add(piece(Some(1001), 2)).unwrap_err().contains("announced"));
        assert_eq!(assembly.add(piece(Some(0), 0)), Ok(Some(Bytes::new())));
    }

    proptest! {
        #[test]
        fn any_order_of_arrival_gives_the_order_of_sending(
            order in Just((0..40_u64).collect::<Vec<_>>()).prop_shuffle(),
            end_after in 0..40_usize,
        ) {
            let mut arrivals = Arrivals::new(1 << 20);
            let (mut taken, mut completions) = (Vec::new(), 0);
            for (at, number) in order.into_iter().enumerate() {
                if at == end_after {
                    completions += usize::from(arrivals.set_end(40).unwrap().is_complete);
                }
                let payload = Bytes::copy_from_slice(&number.to_le_bytes());
                let news = arrivals.insert(number, Arrived { message_bytes: None, payload });
                let news = news.unwrap();
                prop_assert_eq!(news.is_next, number == taken.len() as u64);
                completions += usize::from(news.is_complete);
                while let Some((piece, _)) = arrivals.take() {
                    taken.push(piece.payload);
                }
            }
            prop_assert_eq!(completions, 1);
            prop_assert!(arrivals.is_at_end());
            let expected: Vec<_> =
                (0..40_u64).map(|number| Bytes::copy_from_slice(&number.to_le_bytes())).collect();
            prop_assert_eq!(taken, expected);
        }
    }
}
