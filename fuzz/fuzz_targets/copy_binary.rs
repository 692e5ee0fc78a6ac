#![no_main]

use farshore_wire::copy_binary::{self, CopyError, RowReader};
use libfuzzer_sys::fuzz_target;

/// The rows before the first error, and the error.
fn read<'a>(chunks: impl Iterator<Item = &'a [u8]>) -> (Vec<Vec<u8>>, Result<(), CopyError>) {
    let mut reader = RowReader::new();
    let mut found = Vec::new();
    for chunk in chunks {
        let mut rows = reader.feed(chunk);
        loop {
            match rows.next_row() {
                Ok(Some(row)) => {
                    assert_eq!(row.fields().count(), row.len());
                    let mut again = Vec::new();
                    copy_binary::row(&mut again, row.len() as u16);
                    row.fields().for_each(|field| copy_binary::field(&mut again, field));
                    assert_eq!(again, row.as_bytes());
                    found.push(again);
                }
                Ok(None) => break,
                Err(error) => return (found, Err(error)),
            }
        }
    }
    (found, reader.finish())
}

fuzz_target!(|input: &[u8]| {
    let Some((size, data)) = input.split_first() else { return };
    let whole = read(std::iter::once(data));
    let cut = read(data.chunks(usize::from(*size) + 1));
    assert_eq!(whole.0, cut.0);
    // How many bytes follow the trailer is counted per chunk, hence no more than the place.
    assert_eq!(whole.1.map_err(|error| error.offset), cut.1.map_err(|error| error.offset));
});
