//! The streaming replication protocol (PostgreSQL docs: "55.4. Streaming Replication Protocol").

mod backup;
mod slot;
mod stream;

pub use backup::{BackupMessage, BaseBackup, PassedBackup, Tablespace};
pub use slot::{CreatedSlot, IdentifySystem, PhysicalSlot, SlotOptions, SlotSnapshot};
pub use stream::{ReplicationStream, StreamMessage, TimelineSwitch};

use crate::Error;
use farshore_wire::frontend::EncodeError;

/// Quotes an identifier for a replication command, whose grammar has other keywords than SQL's.
fn quote_name(name: &str) -> String {
    format!("\"{}\"", name.replace('"', "\"\""))
}

/// Quotes a string for a replication command, whose grammar knows no backslash escapes.
fn quote_string(text: &str) -> Result<String, Error> {
    if text.contains('\0') {
        return Err(EncodeError::ZeroByte { what: "a replication option" }.into());
    }
    Ok(format!("'{}'", text.replace('\'', "''")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quoting_is_the_replication_grammars() {
        assert_eq!(quote_name("slot"), "\"slot\"");
        assert_eq!(quote_name("a\"b"), "\"a\"\"b\"");
        assert_eq!(quote_string("it's \\").unwrap(), "'it''s \\'");
        assert!(quote_string("\0").is_err());
    }
}
