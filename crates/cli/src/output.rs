use std::io::{ErrorKind, Write as _};

/// Prints to standard output. Says whether somebody reads it: who reads through a pipe may have seen
/// enough, which is no error.
pub(crate) fn print(text: &str) -> bool {
    let mut out = std::io::stdout().lock();
    match out.write_all(text.as_bytes()).and_then(|()| out.flush()) {
        Ok(()) => true,
        Err(error) => {
            if error.kind() != ErrorKind::BrokenPipe {
                eprintln!("farshore: cannot print: {error}");
            }
            false
        }
    }
}
