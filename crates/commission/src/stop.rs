use crate::Error;
use tokio::sync::watch;

/// Asks a measurement to end.
#[derive(Debug)]
pub struct StopHandle(watch::Sender<bool>);

impl StopHandle {
    /// Asks. Once asked it stays so.
    pub fn stop(&self) {
        self.0.send_replace(true);
    }
}

/// Whether a measurement has been asked to end; without its handle it never is.
#[derive(Debug, Clone)]
pub struct Stop(watch::Receiver<bool>);

impl Stop {
    /// The two ends.
    pub fn new() -> (StopHandle, Stop) {
        let (sender, receiver) = watch::channel(false);
        (StopHandle(sender), Stop(receiver))
    }

    /// Whether it has been asked.
    pub fn is_requested(&self) -> bool {
        *self.0.borrow()
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
        let mut receiver = self.0.clone();
        if receiver.wait_for(|requested| *requested).await.is_err() {
            // The handle is gone: nobody can ask any more.
            std::future::pending::<()>().await;
        }
    }
}
