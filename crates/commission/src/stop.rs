use crate::Error;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use tokio::sync::watch;

/// Asks a measurement to end.
#[derive(Debug)]
pub struct StopHandle {
    sender: watch::Sender<bool>,
    flag: Arc<AtomicBool>,
}

impl StopHandle {
    /// Asks. Once asked it stays so.
    pub fn stop(&self) {
        // No order with other memory: whoever sees it only ends.
        self.flag.store(true, Ordering::Relaxed);
        self.sender.send_replace(true);
    }
}

/// Whether a measurement has been asked to end; without its handle it never is.
#[derive(Debug, Clone)]
pub struct Stop {
    receiver: watch::Receiver<bool>,
    /// The same, for threads that look before each write: the receiver has a lock in it.
    flag: Arc<AtomicBool>,
}

impl Stop {
    /// The two ends.
    pub fn new() -> (StopHandle, Stop) {
        let (sender, receiver) = watch::channel(false);
        let flag = Arc::new(AtomicBool::new(false));
        (StopHandle { sender, flag: Arc::clone(&flag) }, Stop { receiver, flag })
    }

    /// Whether it has been asked.
    pub fn is_requested(&self) -> bool {
        self.flag.load(Ordering::Relaxed)
    }

    /// Ends the caller if it has been asked.
    ///
    /// # Errors
    /// [`Error::Interrupted`].
    pub fn check(&self) -> Result<(), Error> {
        if self.is_requested() { Err(Error::Interrupted) } else { Ok(()) }
    }

    /// Returns when it is asked. Cancel-safe.
    pub async fn requested(&self) {
        let mut receiver = self.receiver.clone();
        if receiver.wait_for(|requested| *requested).await.is_err() {
            // The handle is gone: nobody can ask any more.
            std::future::pending::<()>().await;
        }
    }
}
