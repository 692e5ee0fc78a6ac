//! A session whose two sides are in one process: no network, no frames, the same promises.

use crate::LinkError;
use crate::frame::MESSAGE_BYTES_MAX;
use crate::meter::Meter;
use bytes::Bytes;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use tokio::sync::mpsc;
use tokio::task::coop::consume_budget;

/// The sending half.
pub(crate) struct WithinSender {
    messages: mpsc::Sender<Vec<Bytes>>,
    /// The direction has ended in order.
    ended: Arc<AtomicBool>,
    side: Side,
}

/// The receiving half.
pub(crate) struct WithinReceiver {
    messages: mpsc::Receiver<Vec<Bytes>>,
    ended: Arc<AtomicBool>,
    side: Side,
}

#[derive(Clone)]
struct Side {
    site: Arc<str>,
    meter: Arc<Meter>,
}

/// Both sides.
pub(crate) fn pair(site: &str, messages_max: usize) -> [(WithinSender, WithinReceiver); 2] {
    let site: Arc<str> = site.into();
    let sides = [(); 2].map(|()| Side { site: site.clone(), meter: Arc::default() });
    let [(to_far, from_near), (to_near, from_far)] = [(); 2].map(|()| mpsc::channel(messages_max));
    let ends = [(); 2].map(|()| Arc::new(AtomicBool::new(false)));
    let sender = |messages, end: usize, side: usize| WithinSender {
        messages,
        ended: ends[end].clone(),
        side: sides[side].clone(),
    };
    let receiver = |messages, end: usize, side: usize| WithinReceiver {
        messages,
        ended: ends[end].clone(),
        side: sides[side].clone(),
    };
    [
        (sender(to_far, 0, 0), receiver(from_far, 1, 0)),
        (sender(to_near, 1, 1), receiver(from_near, 0, 1)),
    ]
}

impl WithinSender {
    /// [`crate::Sender::send_parts`].
    pub async fn send_parts(&mut self, parts: &[Bytes]) -> Result<(), LinkError> {
        let length: u64 = parts.iter().map(|part| part.len() as u64).sum();
        if length > u64::from(MESSAGE_BYTES_MAX) {
            return Err(LinkError::Options(format!(
                "a message of {length} bytes is too long for a link; {MESSAGE_BYTES_MAX} are allowed"
            )));
        }
        self.messages.send(parts.to_vec()).await.map_err(|_| LinkError::OtherSideEnded)?;
        self.side.meter.messages_sent.fetch_add(1, Ordering::Relaxed);
        self.side.meter.message_bytes_sent.fetch_add(length, Ordering::Relaxed);
        Ok(())
    }

    /// [`crate::Sender::finish`].
    pub async fn finish(self) -> Result<(), LinkError> {
        // There is room for all again when all has been taken.
        let all = self.messages.reserve_many(self.messages.max_capacity()).await;
        all.map(drop).map_err(|_| LinkError::OtherSideEnded)?;
        // Seen by who finds the channel at its end, which comes after this.
        self.ended.store(true, Ordering::Release);
        Ok(())
    }

    /// [`crate::Sender::over`].
    pub async fn over(&mut self) -> Result<(), LinkError> {
        self.messages.closed().await;
        Ok(())
    }

    pub fn meter(&self) -> &Arc<Meter> {
        &self.side.meter
    }

    pub fn peer_site(&self) -> &str {
        &self.side.site
    }
}

impl WithinReceiver {
    /// [`crate::Receiver::next_parts`].
    pub async fn next_parts(&mut self) -> Result<Option<Vec<Bytes>>, LinkError> {
        consume_budget().await;
        match self.messages.recv().await {
            Some(parts) => {
                let meter = &self.side.meter;
                let length: u64 = parts.iter().map(|part| part.len() as u64).sum();
                meter.messages_received.fetch_add(1, Ordering::Relaxed);
                meter.message_bytes_received.fetch_add(length, Ordering::Relaxed);
                Ok(Some(parts))
            }
            None if self.ended.load(Ordering::Acquire) => Ok(None),
            None => Err(LinkError::OtherSideEnded),
        }
    }

    pub fn meter(&self) -> &Arc<Meter> {
        &self.side.meter
    }

    pub fn peer_site(&self) -> &str {
        &self.side.site
    }
}

#[cfg(test)]
mod tests {
    use crate::{LinkError, Session};
    use bytes::Bytes;

    #[tokio::test]
    async fn messages_pass_both_ways_in_order_up_to_the_end() {
        let (near, far) = Session::within("tukwila", 2);
        assert_eq!((near.peer_site(), near.peer()), ("tukwila", None));
        let (mut to_far, mut from_far) = near.split();
        let (mut to_near, mut from_near) = far.split();
        to_far.send(Bytes::from_static(b"one")).await.unwrap();
        to_far.send_parts(&[Bytes::from_static(b"t"), Bytes::from_static(b"wo")]).await.unwrap();
        to_near.send(Bytes::from_static(b"back")).await.unwrap();
        let finishing = tokio::spawn(to_far.finish());
        for expected in ["one", "two"] {
            tokio::task::yield_now().await;
            assert!(!finishing.is_finished(), "{expected} has not been taken");
            assert_eq!(from_near.next().await.unwrap().unwrap(), expected);
        }
        finishing.await.unwrap().unwrap();
        assert!(from_near.next().await.unwrap().is_none());
        assert_eq!(from_far.next().await.unwrap().unwrap(), "back");
        assert_eq!(from_far.meter().traffic().messages_sent, 2);
        assert_eq!(from_far.meter().traffic().message_bytes_received, 4);
    }

    #[tokio::test]
    async fn a_side_that_is_dropped_is_no_orderly_end() {
        let (near, far) = Session::within("tukwila", 2);
        let (mut to_far, mut from_far) = near.split();
        to_far.send(Bytes::from_static(b"lost")).await.unwrap();
        drop(far);
        assert!(matches!(from_far.next().await, Err(LinkError::OtherSideEnded)));
        assert!(matches!(to_far.send(Bytes::new()).await, Err(LinkError::OtherSideEnded)));
        assert!(matches!(to_far.finish().await, Err(LinkError::OtherSideEnded)));
    }
}
