//! Progress of the demo: a line per finished step, and one that changes while a step is going on
//! (on a terminal; elsewhere it is printed anew every few seconds).

use std::io::{IsTerminal, Write};
use std::time::{Duration, Instant};

/// How often a changing line is printed where it cannot be changed.
const REPEAT_EVERY: Duration = Duration::from_secs(3);
/// How often it changes on a terminal.
const REDRAW_EVERY: Duration = Duration::from_millis(100);

/// Where progress goes: standard output, or standard error when the report is JSON.
pub struct Screen {
    begin: Instant,
    to_stderr: bool,
    is_terminal: bool,
    drawn: Option<Instant>,
}

impl Screen {
    /// Time starts now.
    pub fn new(to_stderr: bool) -> Screen {
        let is_terminal = if to_stderr {
            std::io::stderr().is_terminal()
        } else {
            std::io::stdout().is_terminal()
        };
        Screen { begin: Instant::now(), to_stderr, is_terminal, drawn: None }
    }

    /// Seconds since the demo began.
    pub fn elapsed(&self) -> f64 {
        self.begin.elapsed().as_secs_f64()
    }

    fn put(&self, text: &str) {
        // Whoever closed the other end does not want to hear it.
        let _ = if self.to_stderr {
            let mut out = std::io::stderr().lock();
            out.write_all(text.as_bytes()).and_then(|()| out.flush())
        } else {
            let mut out = std::io::stdout().lock();
            out.write_all(text.as_bytes()).and_then(|()| out.flush())
        };
    }

    fn styled(&self, code: &str, text: &str) -> String {
        if self.is_terminal { format!("\x1b[{code}m{text}\x1b[0m") } else { text.to_owned() }
    }

    /// A heading.
    pub fn title(&self, text: &str) {
        self.put(&format!("\n{}\n\n", self.styled("1", text)));
    }

    /// A step is done or an event has happened.
    pub fn step(&mut self, name: &str, what: &str) {
        let clear = if self.is_terminal { "\r\x1b[K" } else { "" };
        let time = self.styled("2", &format!("{:6.1} s", self.elapsed()));
        let name = self.styled("1", &format!("{name:<10}"));
        self.put(&format!("{clear}{time}  {name}  {what}\n"));
        self.drawn = None;
    }

    /// Something is going on.
    pub fn going_on(&mut self, name: &str, what: impl FnOnce() -> String) {
        let every = if self.is_terminal { REDRAW_EVERY } else { REPEAT_EVERY };
        match self.drawn {
            // A step that is over quickly needs no line of its own where lines stay.
            None if !self.is_terminal => self.drawn = Some(Instant::now()),
            Some(drawn) if drawn.elapsed() < every => {}
            None | Some(_) => {
                let text = what();
                if self.is_terminal {
                    // No wrapped lines, which could not be cleared.
                    let line: String = format!("{:6.1} s  {name:<10}  {text}", self.elapsed())
                        .chars()
                        .take(100)
                        .collect();
                    self.put(&format!("\r\x1b[K{line}"));
                } else {
                    self.put(&format!("{:6.1} s  {name:<10}  … {text}\n", self.elapsed()));
                }
                self.drawn = Some(Instant::now());
            }
        }
    }

    /// The report's lines, and the verdict below them.
    pub fn report(&self, lines: &[(&str, String)], verdict: &str, is_good: bool) {
        self.put("\n");
        for (name, text) in lines {
            self.put(&format!("  {}  {text}\n", self.styled("2", &format!("{name:<10}"))));
        }
        let colour = if is_good { "1;32" } else { "1;31" };
        self.put(&format!("\n  {}\n\n", self.styled(colour, verdict)));
    }
}

/// `1,234,567`.
pub fn grouped(number: u64) -> String {
    let digits = number.to_string();
    let mut out = String::new();
    for (index, digit) in digits.chars().enumerate() {
        if index > 0 && (digits.len() - index).is_multiple_of(3) {
            out.push(',');
        }
        out.push(digit);
    }
    out
}

/// `12.3 MB`, in powers of 1,024.
pub fn megabytes(bytes: u64) -> String {
    format!("{:.1} MB", bytes as f64 / 1_048_576.0)
}

/// Milliseconds with as many decimals as mean something.
pub fn milliseconds(duration: Duration) -> String {
    let ms = duration.as_secs_f64() * 1_000.0;
    if ms < 100.0 { format!("{ms:.1} ms") } else { format!("{ms:.0} ms") }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_easy_to_read() {
        assert_eq!(grouped(0), "0");
        assert_eq!(grouped(999), "999");
        assert_eq!(grouped(1_000), "1,000");
        assert_eq!(grouped(12_345_678), "12,345,678");
        assert_eq!(megabytes(3 << 19), "1.5 MB");
        assert_eq!(milliseconds(Duration::from_micros(12_340)), "12.3 ms");
        assert_eq!(milliseconds(Duration::from_micros(1_234_500)), "1234 ms");
    }
}
