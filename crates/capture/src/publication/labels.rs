//! Labels of enums. Values travel as their labels, and rows have them by their OIDs: a label that gets
//! another name changes what rows say, without a word in the log.

use farshore_model::{TypeKind, UserType};
use farshore_pg::{Connection, Error, text_array};
use serde::{Deserialize, Serialize};
use std::collections::BTreeSet;

/// A label of an enum (PostgreSQL docs: "53.20. pg_enum").
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct EnumLabel {
    /// Its OID, which it keeps for as long as the type has it, whatever it is called.
    pub oid: u32,
    /// The enum's.
    pub type_oid: u32,
    /// What it is called.
    pub label: String,
}

/// Those of the enums among `types`, in their order. Asks nothing where there are none.
///
/// # Errors
/// The server's.
pub async fn enum_labels<'a>(
    sql: &mut Connection,
    types: impl IntoIterator<Item = &'a UserType>,
) -> Result<Vec<EnumLabel>, Error> {
    let enums = types.into_iter().filter(|known| known.kind == TypeKind::Enum);
    let oids: BTreeSet<u32> = enums.map(|known| known.oid).collect();
    if oids.is_empty() {
        return Ok(Vec::new());
    }
    let oids: Vec<String> = oids.iter().map(u32::to_string).collect();
    let rows = sql
        .query(
            "SELECT oid, enumtypid, enumlabel FROM pg_catalog.pg_enum \
             WHERE enumtypid = ANY ($1::text::oid[]) ORDER BY enumtypid, enumsortorder",
            &[Some(&text_array(oids.iter().map(String::as_str)))],
        )
        .await?;
    let label = |row: &farshore_pg::Row| {
        Ok(EnumLabel {
            oid: row.parse(0)?,
            type_oid: row.parse(1)?,
            label: row.get(2).unwrap_or_default().to_owned(),
        })
    };
    rows.iter().map(label).collect()
}
