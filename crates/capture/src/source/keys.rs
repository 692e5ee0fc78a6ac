use bytes::{Buf, Bytes};
use farshore_pg::{Connection, Error};
use farshore_wire::backend::Message;
use farshore_wire::frontend::{self, Format};

/// The values of a row's key, in column order, each in the format that it came in.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub struct Key(
    /// Of each value: a format byte, a length (32 bits), and the bytes.
    Vec<u8>,
);

impl Key {
    /// Appends a value.
    pub fn push(&mut self, format: Format, value: &[u8]) {
        let format: u8 = match format {
            Format::Text => 0,
            Format::Binary => 1,
        };
        self.0.push(format);
        self.0.extend_from_slice(&(value.len() as u32).to_be_bytes());
        self.0.extend_from_slice(value);
    }

    /// The values.
    pub fn values(&self) -> Vec<(Format, &[u8])> {
        let mut key = self.0.as_slice();
        let mut values = Vec::new();
        while key.len() >= 5 {
            let format = if key.get_u8() == 0 { Format::Text } else { Format::Binary };
            let len = (key.get_u32() as usize).min(key.len());
            let (value, rest) = key.split_at(len);
            values.push((format, value));
            key = rest;
        }
        values
    }

    /// Bytes it takes in memory.
    pub fn bytes(&self) -> usize {
        self.0.len()
    }

    /// As it travels.
    pub fn as_bytes(&self) -> &[u8] {
        &self.0
    }

    /// What [`Key::as_bytes`] gave; none if this is not what it gives.
    pub fn from_bytes(bytes: Vec<u8>) -> Option<Key> {
        let mut left = bytes.as_slice();
        while !left.is_empty() {
            let (format, rest) = left.split_first()?;
            let (len, rest) = rest.split_first_chunk::<4>()?;
            let len = usize::try_from(u32::from_be_bytes(*len)).ok()?;
            left = rest.get(len..).filter(|_| *format <= 1)?;
        }
        Some(Key(bytes))
    }
}

/// Runs one statement for each key, on any server; returns all rows. `types` are those of the
/// key's values, zero where the server is to decide.
///
/// # Errors
/// The first that the server gave; the session is ready for another statement then.
pub async fn run_for_keys(
    connection: &mut Connection,
    sql: &str,
    types: &[u32],
    keys: &[&Key],
    results: Format,
) -> Result<Vec<Vec<Option<Bytes>>>, Error> {
    put_for_keys(connection, sql, types, keys, results)?;
    connection.flush().await?;
    answers(connection).await
}

/// Puts one statement for each key, and a Sync, among what is to be written.
pub(crate) fn put_for_keys(
    connection: &mut Connection,
    sql: &str,
    types: &[u32],
    keys: &[&Key],
    results: Format,
) -> Result<(), Error> {
    frontend::parse(connection.out(), "", sql, types)?;
    for key in keys {
        let values = key.values();
        let mut bind = frontend::Bind::begin(connection.out(), "", "", values.len())?;
        for (format, value) in values {
            bind.parameter(format, Some(value))?;
        }
        bind.finish(results)?;
        frontend::execute(connection.out(), "", 0)?;
    }
    frontend::sync(connection.out());
    Ok(())
}

/// Reads up to ReadyForQuery; the first error, or all rows.
async fn answers(connection: &mut Connection) -> Result<Vec<Vec<Option<Bytes>>>, Error> {
    let mut rows = Vec::new();
    let mut failed = None;
    loop {
        match connection.receive().await? {
            Message::DataRow(row) => {
                let storage = row.storage();
                rows.push(row.values().map(|v| v.map(|v| storage.slice_ref(v))).collect());
            }
            Message::ErrorResponse(error) => {
                failed.get_or_insert(Error::Server(error));
            }
            Message::ReadyForQuery(_) => break,
            Message::ParseComplete | Message::BindComplete | Message::CommandComplete(_) => {}
            other => return Err(Error::Protocol(format!("unexpected {other:?}"))),
        }
    }
    match failed {
        None => Ok(rows),
        Some(error) => Err(error),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_give_back_their_values() {
        let mut key = Key::default();
        assert_eq!(key.values(), []);
        let values: [(Format, &[u8]); 3] =
            [(Format::Binary, b"\0\x01"), (Format::Text, b"abc"), (Format::Text, b"")];
        for (format, value) in values {
            key.push(format, value);
        }
        assert_eq!(key.values(), values);
        assert_eq!(key.bytes(), 20);
        let bytes = key.as_bytes().to_vec();
        assert_eq!(Key::from_bytes(bytes.clone()).as_ref(), Some(&key));
        let whole = [0, 7, 15];
        for end in (0..bytes.len()).filter(|end| !whole.contains(end)) {
            assert_eq!(Key::from_bytes(bytes[..end].to_vec()), None, "{end}");
        }
        assert_eq!(Key::from_bytes(vec![2, 0, 0, 0, 0]), None);
    }
}
