//! COPY's binary format: documented bytes, every cut into chunks, every truncation.

use farshore_wire::copy_binary::{self, CopyError, CopyProblem, RowReader, SIGNATURE};
use proptest::prelude::*;

type OwnedRow = Vec<Option<Vec<u8>>>;

fn write(rows: &[OwnedRow]) -> Vec<u8> {
    let mut out = Vec::new();
    copy_binary::begin(&mut out);
    for fields in rows {
        copy_binary::row(&mut out, fields.len() as u16);
        for field in fields {
            copy_binary::field(&mut out, field.as_deref());
        }
    }
    copy_binary::end(&mut out);
    out
}

fn read<'a>(chunks: impl IntoIterator<Item = &'a [u8]>) -> Result<Vec<OwnedRow>, CopyError> {
    let mut reader = RowReader::new();
    let mut found = Vec::new();
    for chunk in chunks {
        let mut rows = reader.feed(chunk);
        while let Some(row) = rows.next_row()? {
            let fields: OwnedRow = row.fields().map(|field| field.map(<[u8]>::to_vec)).collect();
            assert_eq!(fields.len(), row.len());
            assert_eq!(row.fields().len(), row.len());
            found.push(fields);
        }
    }
    reader.finish()?;
    Ok(found)
}

#[test]
fn documented_bytes() {
    let data = write(&[vec![Some(b"ab".to_vec()), None], vec![]]);
    let mut expected = b"PGCOPY\n\xff\r\n\0".to_vec();
    expected.extend_from_slice(&[0; 8]);
    expected.extend_from_slice(b"\0\x02\0\0\0\x02ab\xff\xff\xff\xff\0\0\xff\xff");
    assert_eq!(data, expected);
}

#[test]
fn a_row_within_a_chunk_is_borrowed_from_it() {
    let data = write(&[vec![Some(vec![7; 100])]]);
    let mut reader = RowReader::new();
    let mut rows = reader.feed(&data);
    let row = rows.next_row().unwrap().unwrap();
    assert!(data.as_ptr_range().contains(&row.as_bytes().as_ptr()));
}

#[test]
fn an_extension_of_the_header_is_passed_over() {
    let mut data = SIGNATURE.to_vec();
    data.extend_from_slice(&[0, 0, 0xFF, 0xFF, 0, 0, 0, 3]);
    data.extend_from_slice(b"ext\0\0\xff\xff");
    assert_eq!(read([&data[..]]).unwrap(), [vec![]]);
    assert_eq!(read(data.chunks(1)).unwrap(), [vec![]]);
}

#[test]
fn what_is_wrong_is_said_with_its_place() {
    let header = |flags: u32, extension: i32| {
        let mut data = SIGNATURE.to_vec();
        data.extend_from_slice(&flags.to_be_bytes());
        data.extend_from_slice(&extension.to_be_bytes());
        data
    };
    let mut good = header(0, 0);
    let with = |tail: &[u8]| [&header(0, 0)[..], tail].concat();
    for (data, offset, problem) in [
        (b"PGCOPZ".to_vec(), 0, CopyProblem::Signature),
        (vec![b'x'; 19], 0, CopyProblem::Signature),
        (header(0x1_0000, 0), 0, CopyProblem::Flags { found: 0x1_0000 }),
        (header(0, -1), 0, CopyProblem::ExtensionLength { found: -1 }),
        (with(b"\xff\xfe"), 19, CopyProblem::FieldCount { found: -2 }),
        (with(b"\0\x01\xff\xff\xff\xfe"), 19, CopyProblem::FieldLength { found: -2 }),
        (with(b"\0\x01\x7f\xff\xff\xff"), 19, CopyProblem::RowTooLong { len: 0x7FFF_FFFF + 6 }),
        (with(b"\xff\xffa"), 21, CopyProblem::AfterTrailer { len: 1 }),
    ] {
        assert_eq!(read([&data[..]]), Err(CopyError { offset, problem }));
        assert_eq!(read(data.chunks(1)), Err(CopyError { offset, problem }));
    }
    good.extend_from_slice(b"\0\0");
    assert_eq!(read([&good[..]]), Err(CopyError { offset: 21, problem: CopyProblem::NoTrailer }));
}

#[test]
fn rows_that_are_not_read_stop_the_reader() {
    let data = write(&[vec![None], vec![None]]);
    let mut reader = RowReader::new();
    reader.feed(&data).next_row().unwrap();
    assert_eq!(reader.finish().unwrap_err().problem, CopyProblem::Stopped);
    assert_eq!(reader.feed(b"").next_row().unwrap_err().problem, CopyProblem::Stopped);
}

fn rows() -> impl Strategy<Value = Vec<OwnedRow>> {
    let field = prop::option::of(prop::collection::vec(any::<u8>(), 0..12));
    prop::collection::vec(prop::collection::vec(field, 0..4), 0..6)
}

proptest! {
    #[test]
    fn rows_come_back_however_the_stream_is_cut(
        rows in rows(), mut cuts in prop::collection::vec(any::<prop::sample::Index>(), 0..20),
    ) {
        let data = write(&rows);
        prop_assert_eq!(&read([&data[..]]).unwrap(), &rows);
        prop_assert_eq!(&read(data.chunks(1)).unwrap(), &rows);
        let mut places: Vec<usize> = cuts.drain(..).map(|cut| cut.index(data.len())).collect();
        places.sort_unstable();
        let mut chunks = Vec::new();
        let mut start = 0;
        for place in places {
            chunks.push(&data[start..place]);
            start = place;
        }
        chunks.push(&data[start..]);
        prop_assert_eq!(&read(chunks).unwrap(), &rows);
    }

    #[test]
    fn every_truncation_is_noticed(rows in rows()) {
        let data = write(&rows);
        for len in 0..data.len() {
            prop_assert_eq!(
                read([&data[..len]]).unwrap_err().problem,
                CopyProblem::NoTrailer
            );
        }
    }

    #[test]
    fn damage_gives_the_same_however_the_stream_is_cut(
        rows in rows(), at in any::<prop::sample::Index>(), byte: u8, size in 1_usize..30,
    ) {
        let mut data = write(&rows);
        let at = at.index(data.len());
        data[at] = byte;
        let whole = read([&data[..]]);
        let cut = read(data.chunks(size));
        match (whole, cut) {
            // How many bytes follow the trailer is counted per chunk.
            (Err(whole), Err(cut)) => prop_assert_eq!(whole.offset, cut.offset),
            (whole, cut) => prop_assert_eq!(whole, cut),
        }
    }
}
