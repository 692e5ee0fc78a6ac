use std::io::{ErrorKind, Write};
use std::process::ExitCode;

/// What became of a text that was to be printed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use]
pub(crate) enum Printed {
    /// It is out.
    Whole,
    /// Who reads through a pipe has seen enough, which is no error.
    Unread,
    /// It did not get out, as to a file on a full disk; that was said.
    Failed,
}

impl Printed {
    /// The exit status of a verb that ends with `status` where its output got out.
    pub(crate) fn or_failure(self, status: ExitCode) -> ExitCode {
        match self {
            Printed::Whole | Printed::Unread => status,
            Printed::Failed => ExitCode::FAILURE,
        }
    }
}

/// Prints to standard output.
pub(crate) fn print(text: &str) -> Printed {
    print_to(&mut std::io::stdout().lock(), text)
}

fn print_to(out: &mut impl Write, text: &str) -> Printed {
    match out.write_all(text.as_bytes()).and_then(|()| out.flush()) {
        Ok(()) => Printed::Whole,
        Err(error) if error.kind() == ErrorKind::BrokenPipe => Printed::Unread,
        Err(error) => {
            eprintln!("farshore: cannot print: {error}");
            Printed::Failed
        }
    }
}

#[cfg(test)]
mod tests {
    use super::{Printed, print_to};
    use std::io::{BufWriter, ErrorKind, Write};

    struct Refuses(ErrorKind);

    impl Write for Refuses {
        fn write(&mut self, _: &[u8]) -> std::io::Result<usize> {
            Err(self.0.into())
        }

        fn flush(&mut self) -> std::io::Result<()> {
            Ok(())
        }
    }

    #[test]
    fn only_a_reader_that_has_seen_enough_is_no_failure() {
        let to = |kind| print_to(&mut BufWriter::new(Refuses(kind)), "text\n");
        assert_eq!(to(ErrorKind::StorageFull), Printed::Failed);
        assert_eq!(to(ErrorKind::BrokenPipe), Printed::Unread);
        let mut kept = Vec::new();
        assert_eq!(print_to(&mut kept, "text\n"), Printed::Whole);
        assert_eq!(kept, b"text\n");
    }
}
