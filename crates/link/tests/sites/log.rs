//! What is logged, as text.

use anyhow::Result;
use std::io;
use std::sync::Arc;
use tokio::sync::watch;
use tracing::subscriber::DefaultGuard;
use tracing_subscriber::fmt::MakeWriter;

#[derive(Clone)]
pub struct Log(Arc<watch::Sender<String>>);

impl Log {
    /// Catches what this thread logs until the guard is dropped.
    pub fn catch() -> (Log, DefaultGuard) {
        let log = Log(Arc::new(watch::Sender::new(String::new())));
        let subscriber = tracing_subscriber::fmt()
            .with_ansi(false)
            .without_time()
            .with_target(false)
            .with_writer(log.clone())
            .finish();
        (log, tracing::subscriber::set_default(subscriber))
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

impl io::Write for Log {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.send_modify(|text| text.push_str(&String::from_utf8_lossy(bytes)));
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl<'a> MakeWriter<'a> for Log {
    type Writer = Log;

    fn make_writer(&'a self) -> Log {
        self.clone()
    }
}
