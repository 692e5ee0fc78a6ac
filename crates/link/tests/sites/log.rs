//! What is logged, as text.

use anyhow::Result;
use std::cell::RefCell;
use std::io;
use std::sync::{Arc, Once};
use tokio::sync::watch;
use tracing_subscriber::fmt::MakeWriter;

thread_local! {
    /// Whose lines this thread writes: a test's tasks all run on the test's thread.
    static CATCHING: RefCell<Option<Log>> = const { RefCell::new(None) };
}

/// One subscriber for the whole process: those of single threads lose lines while others of their
/// kind come and go.
static SUBSCRIBED: Once = Once::new();

#[derive(Clone)]
pub struct Log(Arc<watch::Sender<String>>);

impl Log {
    /// Catches what this thread logs from now on.
    pub fn catch() -> Log {
        SUBSCRIBED.call_once(|| {
            let subscriber = tracing_subscriber::fmt()
                .with_ansi(false)
                .without_time()
                .with_target(false)
                .with_writer(ToThisThread)
                .finish();
            tracing::subscriber::set_global_default(subscriber).expect("it is the only one");
        });
        let log = Log(Arc::new(watch::Sender::new(String::new())));
        CATCHING.set(Some(log.clone()));
        log
    }

    /// Waits for a line with all these words, takes it out and returns it.
    pub async fn line_with(&self, words: &[&str]) -> Result<String> {
        let find = |text: &String| {
            text.lines()
                .find(|line| words.iter().all(|word| line.contains(word)))
                .map(str::to_owned)
        };
        let what = format!("a log line with {words:?}");
        let mut text = self.0.subscribe();
        let found = super::soon(&what, text.wait_for(|text| find(text).is_some())).await;
        let line = match found {
            Ok(text) => text.map(|text| find(&text))?,
            Err(error) => return Err(error.context(format!("the log is: {}", self.text()))),
        };
        let line = line.unwrap_or_default();
        self.0.send_modify(|text| *text = text.replacen(&format!("{line}\n"), "", 1));
        Ok(line)
    }

    pub fn text(&self) -> String {
        self.0.borrow().clone()
    }
}

struct ToThisThread;

impl io::Write for ToThisThread {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        CATCHING.with_borrow(|log| {
            if let Some(Log(text)) = log {
                text.send_modify(|text| text.push_str(&String::from_utf8_lossy(bytes)));
            }
        });
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl MakeWriter<'_> for ToThisThread {
    type Writer = ToThisThread;

    fn make_writer(&self) -> ToThisThread {
        ToThisThread
    }
}
