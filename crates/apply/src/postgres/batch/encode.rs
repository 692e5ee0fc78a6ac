//! Rows as binary COPY and as binary arrays (PostgreSQL source: `array_recv`), without decoding
//! a value.

use super::plan::BatchPlan;
use crate::netting::Net;
use crate::postgres::pipeline::PipelineError;
use bytes::{BufMut, Bytes, BytesMut};
use farshore_wire::copy_binary;
use farshore_wire::frontend::{Bind, EncodeError, Format};
use farshore_wire::pgoutput::{Tuple, Value};

/// One CopyData message ends when it has this many bytes.
const COPY_DATA_BYTES: usize = 64 << 10;

/// Bytes that an empty array keeps memory for.
pub(super) const KEPT_BYTES_MAX: usize = 1 << 10;

/// The first bytes of a row's key, zeros behind them: in this order rows are mostly where an index
/// on the key has them side by side.
pub fn key_prefix(row: &Bytes, key: &[usize]) -> [u8; 16] {
    let mut prefix = [0; 16];
    let mut room = &mut prefix[..];
    let mut key = key.iter().copied().peekable();
    for (column, value) in Tuple::walked(row).values().enumerate() {
        if key.peek().is_none() || room.is_empty() {
            break;
        }
        if key.next_if_eq(&column).is_some()
            && let Value::Binary(bytes) = value
        {
            let (taken, rest) = room.split_at_mut(bytes.len().min(room.len()));
            taken.copy_from_slice(&bytes[..taken.len()]);
            room = rest;
        }
    }
    prefix
}

/// The values of some columns over many rows: one array per column.
#[derive(Debug, Default)]
pub struct Arrays {
    columns: Vec<Array>,
    rows: u64,
}

#[derive(Debug, Default)]
struct Array {
    elements: Vec<u8>,
    has_null: bool,
}

impl Arrays {
    /// Gathers the values of `wanted` (ascending) from `rows`; returns how many rows there are.
    pub fn fill<'a>(
        &mut self,
        wanted: &[usize],
        rows: impl Iterator<Item = &'a Bytes>,
    ) -> Result<u64, PipelineError> {
        self.rows = 0;
        self.columns.resize_with(wanted.len(), Array::default);
        for array in &mut self.columns {
            array.elements.clear();
            array.has_null = false;
        }
        for row in rows {
            self.rows += 1;
            let mut columns = wanted.iter().zip(&mut self.columns).peekable();
            for (column, value) in Tuple::walked(row).values().enumerate() {
                let Some((_, array)) = columns.next_if(|(wanted, _)| **wanted == column) else {
                    if columns.peek().is_none() {
                        break;
                    }
                    continue;
                };
                match value {
                    Value::Binary(bytes) => {
                        array.elements.extend_from_slice(&(bytes.len() as u32).to_be_bytes());
                        array.elements.extend_from_slice(bytes);
                    }
                    Value::Null => {
                        array.elements.extend_from_slice(&(-1_i32).to_be_bytes());
                        array.has_null = true;
                    }
                    // Netting lets none of these pass.
                    Value::Text(_) | Value::Unchanged => {
                        let what = "a value in a batch is not in binary".to_owned();
                        return Err(PipelineError::Stored(what));
                    }
                }
            }
        }
        Ok(self.rows)
    }

    /// Gives the memory of large arrays back.
    pub fn release(&mut self) {
        for array in &mut self.columns {
            array.elements.clear();
            array.elements.shrink_to(KEPT_BYTES_MAX);
        }
    }

    /// Writes the arrays as parameters.
    pub fn write(
        &self,
        plan: &BatchPlan,
        wanted: &[usize],
        bind: &mut Bind<'_>,
    ) -> Result<(), EncodeError> {
        for (column, array) in wanted.iter().zip(&self.columns) {
            bind.parameter_with(Format::Binary, |out| {
                out.reserve(20 + array.elements.len());
                out.put_i32(1);
                out.put_i32(i32::from(array.has_null));
                out.put_u32(plan.element_type(*column));
                out.put_u32(self.rows as u32);
                out.put_i32(1);
                out.put_slice(&array.elements);
            })?;
        }
        Ok(())
    }
}

/// The stream's header.
pub fn copy_header(out: &mut BytesMut) {
    let mut header = Vec::with_capacity(copy_binary::HEADER_LEN);
    copy_binary::begin(&mut header);
    copy_data(out, |out| out.put_slice(&header));
}

/// The stream's end.
pub fn copy_trailer(out: &mut BytesMut) {
    copy_data(out, |out| out.put_i16(-1));
}

/// One message's worth of the rows that are inserted; moves on behind them and returns how many.
pub fn copy_rows(out: &mut BytesMut, nets: &mut &[Net]) -> Result<u64, PipelineError> {
    let (mut written, mut result) = (0, Ok(()));
    let start = out.len();
    copy_data(out, |out| {
        while let Some((net, rest)) = nets.split_first()
            && result.is_ok()
            && out.len() - start < COPY_DATA_BYTES
        {
            *nets = rest;
            if let Some(row) = net.effect.inserted() {
                result = copy_row(out, row);
                written += 1;
            }
        }
    });
    result.map(|()| written)
}

fn copy_row(out: &mut BytesMut, row: &Bytes) -> Result<(), PipelineError> {
    let tuple = Tuple::walked(row);
    // What is added to the bytes of the values is less than what the tuple adds.
    out.reserve(row.len());
    out.put_u16(tuple.len() as u16);
    for value in tuple.values() {
        match value {
            Value::Binary(bytes) => {
                out.put_u32(bytes.len() as u32);
                out.put_slice(bytes);
            }
            Value::Null => out.put_i32(-1),
            Value::Text(_) | Value::Unchanged => {
                return Err(PipelineError::Stored("a value in a batch is not in binary".into()));
            }
        }
    }
    Ok(())
}

/// A CopyData message whose data is written in place. Netted rows are far below its limit of 1 GiB.
fn copy_data(out: &mut BytesMut, write: impl FnOnce(&mut BytesMut)) {
    out.put_u8(b'd');
    let length_at = out.len();
    out.put_u32(0);
    write(out);
    let length = (out.len() - length_at) as u32;
    out[length_at..length_at + 4].copy_from_slice(&length.to_be_bytes());
}

#[cfg(test)]
mod tests {
    use super::*;
    use farshore_wire::pgoutput::encode;

    #[test]
    fn a_prefix_is_of_the_key_in_its_order() {
        let row = |values: &[Value<'_>]| Bytes::from(encode::tuple(values));
        let numbered = |id: i64, name: &[u8]| {
            row(&[Value::Binary(name), Value::Null, Value::Binary(&id.to_be_bytes())])
        };
        let [low, high] = [numbered(255, b"zz"), numbered(256, b"aa")];
        assert!(key_prefix(&low, &[2]) < key_prefix(&high, &[2]));
        assert!(key_prefix(&low, &[0, 2]) > key_prefix(&high, &[0, 2]));
        // Longer than there is room for, and without a value.
        let long = row(&[Value::Binary(&[7; 40])]);
        assert_eq!(key_prefix(&long, &[0]), [7; 16]);
        assert_eq!(key_prefix(&low, &[1]), [0; 16]);
        assert_eq!(key_prefix(&Bytes::from_static(b"x"), &[0]), [0; 16]);
    }
}
