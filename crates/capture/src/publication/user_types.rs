//! Serde's form of user-defined types; the crate they are from knows no serde.

use farshore_model::{TypeKind, UserType};
use serde::{Deserialize, Deserializer, Serialize, Serializer};

#[derive(Serialize, Deserialize)]
#[serde(remote = "TypeKind", rename_all = "snake_case")]
enum KindForm {
    Base,
    Enum,
    Domain { base: u32 },
    Array { element: u32 },
    Range { subtype: u32 },
    Multirange { subtype: u32 },
    Composite,
    Unknown,
}

#[derive(Serialize, Deserialize)]
#[serde(remote = "UserType")]
struct TypeForm {
    oid: u32,
    schema: String,
    name: String,
    #[serde(with = "KindForm")]
    kind: TypeKind,
}

#[derive(Serialize, Deserialize)]
struct Item(#[serde(with = "TypeForm")] UserType);

pub(super) fn serialize<S: Serializer>(types: &[UserType], to: S) -> Result<S::Ok, S::Error> {
    to.collect_seq(types.iter().cloned().map(Item))
}

pub(super) fn deserialize<'de, D: Deserializer<'de>>(from: D) -> Result<Vec<UserType>, D::Error> {
    let items = Vec::<Item>::deserialize(from)?;
    Ok(items.into_iter().map(|Item(known)| known).collect())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::publication::{PublishedColumn, PublishedTable, TableName};

    #[test]
    fn tables_come_as_they_were_sent() {
        let kinds = [
            TypeKind::Base,
            TypeKind::Enum,
            TypeKind::Domain { base: 23 },
            TypeKind::Array { element: 1 },
            TypeKind::Range { subtype: 2 },
            TypeKind::Multirange { subtype: 3 },
            TypeKind::Composite,
            TypeKind::Unknown,
        ];
        let types = kinds.into_iter().zip(20_000..).map(|(kind, oid)| UserType {
            oid,
            schema: "Odd \"schema\"".into(),
            name: "t\u{1f600}".into(),
            kind,
        });
        let table = PublishedTable {
            oid: u32::MAX,
            table: TableName { schema: "s".into(), name: "t".into() },
            columns: vec![PublishedColumn { name: "".into(), type_oid: 1, type_modifier: -1 }],
            types: types.collect(),
            row_filter: Some("a = '\\'".into()),
            membership: 1,
            memberships_above: vec![2, 3],
            file_node: 4,
            blocks: u64::MAX,
            bytes: 5,
            binary_safe: true,
            binary_copy: false,
            partitioned: true,
            unsent_key: None,
        };
        let json = serde_json::to_string(&table).unwrap();
        assert_eq!(serde_json::from_str::<PublishedTable>(&json).unwrap(), table);
    }
}
