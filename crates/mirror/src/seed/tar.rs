//! Tar archives as a server's base backup has them (POSIX ustar; no extensions), piece by piece.

use bytes::{Buf, Bytes, BytesMut};

const BLOCK_BYTES: usize = 512;

/// What stands in an archive, in its order.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Entry {
    /// A file begins; exactly `bytes` of [`Entry::Data`] follow.
    File {
        /// Relative.
        path: String,
        /// Permission bits.
        mode: u32,
        /// Size.
        bytes: u64,
    },
    /// A piece of the file that began last.
    Data(Bytes),
    /// A directory.
    Directory {
        /// Relative.
        path: String,
        /// Permission bits.
        mode: u32,
    },
    /// A symbolic link.
    Link {
        /// Relative.
        path: String,
    },
}

/// Bytes that are no such archive.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("the server's archive is malformed: {0}")]
pub struct TarError(&'static str);

/// Takes an archive apart as it comes.
#[derive(Debug, Default)]
pub struct Reader {
    waiting: BytesMut,
    /// Of the file that is being read.
    file_left: u64,
    padding_left: usize,
}

impl Reader {
    /// Adds what came.
    pub fn push(&mut self, data: &[u8]) {
        self.waiting.extend_from_slice(data);
    }

    /// What stands next; `None` until more has come.
    ///
    /// # Errors
    /// [`TarError`].
    pub fn next_entry(&mut self) -> Result<Option<Entry>, TarError> {
        loop {
            if self.file_left > 0 {
                if self.waiting.is_empty() {
                    return Ok(None);
                }
                let here =
                    self.waiting.len().min(usize::try_from(self.file_left).unwrap_or(usize::MAX));
                self.file_left -= here as u64;
                return Ok(Some(Entry::Data(self.waiting.split_to(here).freeze())));
            }
            if self.padding_left > 0 {
                let here = self.waiting.len().min(self.padding_left);
                self.waiting.advance(here);
                self.padding_left -= here;
                if self.padding_left > 0 {
                    return Ok(None);
                }
            }
            if self.waiting.len() < BLOCK_BYTES {
                return Ok(None);
            }
            let header = self.waiting.split_to(BLOCK_BYTES);
            // Zeros fill an archive up to its end.
            if header.iter().all(|byte| *byte == 0) {
                continue;
            }
            return self.entry(&header).map(Some);
        }
    }

    /// The archive has ended: whether it ended where one may.
    ///
    /// # Errors
    /// [`TarError`].
    pub fn finish(&mut self) -> Result<(), TarError> {
        if self.file_left > 0 || self.padding_left > 0 || self.waiting.iter().any(|byte| *byte != 0)
        {
            return Err(TarError("it ends within a file"));
        }
        self.waiting.clear();
        Ok(())
    }

    fn entry(&mut self, header: &[u8]) -> Result<Entry, TarError> {
        let field = |at: usize, len: usize| header.get(at..at + len).unwrap_or_default();
        let stated = number(field(148, 8))?;
        let sum: u64 = header
            .iter()
            .enumerate()
            .map(|(at, byte)| if (148..156).contains(&at) { 32 } else { u64::from(*byte) })
            .sum();
        if sum != stated {
            return Err(TarError("a header's checksum is wrong"));
        }
        let name = text(field(0, 100))?;
        let prefix = text(field(345, 155))?;
        let path = if prefix.is_empty() { name } else { format!("{prefix}/{name}") };
        // The server names some from the data directory on.
        let path = path.trim_start_matches("./").trim_end_matches('/').to_owned();
        let mode = u32::try_from(number(field(100, 8))? & 0o777).unwrap_or(0o600);
        let bytes = number(field(124, 12))?;
        match field(156, 1) {
            b"0" | b"\0" => {
                self.file_left = bytes;
                let over = (bytes % BLOCK_BYTES as u64) as usize;
                self.padding_left = if over == 0 { 0 } else { BLOCK_BYTES - over };
                Ok(Entry::File { path, mode, bytes })
            }
            b"5" => Ok(Entry::Directory { path, mode }),
            b"2" => Ok(Entry::Link { path }),
            _ => Err(TarError("an entry of an unknown kind")),
        }
    }
}

fn text(field: &[u8]) -> Result<String, TarError> {
    let end = field.iter().position(|byte| *byte == 0).unwrap_or(field.len());
    let text = std::str::from_utf8(field.get(..end).unwrap_or_default());
    text.map(str::to_owned).map_err(|_| TarError("a file's name is not UTF-8"))
}

/// Octal, or for what is larger, big-endian behind a byte with its highest bit set.
fn number(field: &[u8]) -> Result<u64, TarError> {
    if field.first().is_some_and(|first| first & 0x80 != 0) {
        let low = field.len().saturating_sub(8);
        let low: [u8; 8] =
            field.get(low..).and_then(|low| low.try_into().ok()).ok_or(TarError("a number"))?;
        let mut low = u64::from_be_bytes(low);
        if field.len() == 8 {
            low &= u64::MAX >> 1;
        }
        return Ok(low);
    }
    let digits = field.iter().filter(|byte| !matches!(byte, b' ' | 0));
    digits.copied().try_fold(0_u64, |number, digit| match digit {
        b'0'..=b'7' => number
            .checked_mul(8)
            .and_then(|number| number.checked_add(u64::from(digit - b'0')))
            .ok_or(TarError("a number is too large")),
        _ => Err(TarError("a number is not octal")),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn header(name: &str, kind: u8, size: u64) -> Vec<u8> {
        let mut header = vec![0; BLOCK_BYTES];
        header[..name.len()].copy_from_slice(name.as_bytes());
        header[100..107].copy_from_slice(b"0000600");
        header[124..135].copy_from_slice(format!("{size:011o}").as_bytes());
        header[156] = kind;
        header[257..262].copy_from_slice(b"ustar");
        header[148..156].fill(b' ');
        let sum: u64 = header.iter().map(|byte| u64::from(*byte)).sum();
        header[148..155].copy_from_slice(format!("{sum:06o}\0").as_bytes());
        header
    }

    fn archive() -> Vec<u8> {
        let mut all = header("./pg_wal/", b'5', 0);
        all.extend(header("base/1", b'0', 700));
        all.extend(vec![7; 700]);
        all.extend(vec![0; 1024 - 700]);
        all.extend(header("empty", b'0', 0));
        all.extend(header("pg_tblspc/1", b'2', 0));
        all.extend(vec![0; 1024]);
        all
    }

    fn read(all: &[u8], step: usize) -> Result<Vec<Entry>, TarError> {
        let (mut reader, mut entries) = (Reader::default(), Vec::new());
        for piece in all.chunks(step) {
            reader.push(piece);
            while let Some(entry) = reader.next_entry()? {
                match (entries.last_mut(), entry) {
                    (Some(Entry::Data(data)), Entry::Data(more)) => {
                        *data = [&data[..], &more[..]].concat().into();
                    }
                    (_, entry) => entries.push(entry),
                }
            }
        }
        reader.finish().map(|()| entries)
    }

    #[test]
    fn an_archive_is_read_however_it_is_cut() {
        let expected = vec![
            Entry::Directory { path: "pg_wal".into(), mode: 0o600 },
            Entry::File { path: "base/1".into(), mode: 0o600, bytes: 700 },
            Entry::Data(vec![7; 700].into()),
            Entry::File { path: "empty".into(), mode: 0o600, bytes: 0 },
            Entry::Link { path: "pg_tblspc/1".into() },
        ];
        for step in [1, 7, 512, 513, 10_000] {
            assert_eq!(read(&archive(), step).unwrap(), expected, "{step}");
        }
    }

    #[test]
    fn what_is_no_archive_is_refused() {
        let all = archive();
        assert!(read(&all[..1_100], 64).is_err(), "it ends within a file");
        for at in [0, 100, 130, 150, 156] {
            let mut broken = all.clone();
            broken[at] ^= 0x15;
            assert!(read(&broken, 512).is_err(), "{at}");
        }
        assert_eq!(number(&[0x80, 0, 0, 0, 0, 0, 0, 2, 0, 0, 0, 1]), Ok((2 << 32) + 1));
    }
}
