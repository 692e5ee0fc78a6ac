//! Serde's form of user-defined types; the crate they are from knows no serde.
//!
//! Sites of different versions tell each other of types: what came later (a domain's modifier, a
//! composite's attributes) stands in fields that an earlier version passes over, and need not send.

use farshore_model::{Attribute, TypeKind, UserType};
use serde::{Deserialize, Deserializer, Serialize, Serializer};

#[derive(Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
enum KindForm {
    Base,
    Enum,
    Domain {
        base: u32,
        #[serde(default)]
        modifier: Option<i32>,
    },
    Array {
        element: u32,
    },
    Range {
        subtype: u32,
    },
    Multirange {
        subtype: u32,
    },
    Composite,
    Unknown,
}

#[derive(Serialize, Deserialize)]
struct TypeForm {
    oid: u32,
    schema: String,
    name: String,
    kind: KindForm,
    /// Of a composite: type and modifier of each.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    attributes: Option<Vec<(u32, i32)>>,
}

impl From<&UserType> for TypeForm {
    fn from(known: &UserType) -> TypeForm {
        let mut form = TypeForm {
            oid: known.oid,
            schema: known.schema.clone(),
            name: known.name.clone(),
            kind: KindForm::Composite,
            attributes: None,
        };
        form.kind = match &known.kind {
            TypeKind::Base => KindForm::Base,
            TypeKind::Enum => KindForm::Enum,
            TypeKind::Domain { base, modifier } => {
                KindForm::Domain { base: *base, modifier: *modifier }
            }
            TypeKind::Array { element } => KindForm::Array { element: *element },
            TypeKind::Range { subtype } => KindForm::Range { subtype: *subtype },
            TypeKind::Multirange { subtype } => KindForm::Multirange { subtype: *subtype },
            TypeKind::Composite { attributes } => {
                let told = attributes.iter().flatten().map(|one| (one.type_oid, one.type_modifier));
                form.attributes = attributes.is_some().then(|| told.collect());
                KindForm::Composite
            }
            TypeKind::Unknown => KindForm::Unknown,
        };
        form
    }
}

impl From<TypeForm> for UserType {
    fn from(form: TypeForm) -> UserType {
        let attribute = |(type_oid, type_modifier)| Attribute { type_oid, type_modifier };
        let kind = match form.kind {
            KindForm::Base => TypeKind::Base,
            KindForm::Enum => TypeKind::Enum,
            KindForm::Domain { base, modifier } => TypeKind::Domain { base, modifier },
            KindForm::Array { element } => TypeKind::Array { element },
            KindForm::Range { subtype } => TypeKind::Range { subtype },
            KindForm::Multirange { subtype } => TypeKind::Multirange { subtype },
            KindForm::Composite => TypeKind::Composite {
                attributes: form.attributes.map(|told| told.into_iter().map(attribute).collect()),
            },
            KindForm::Unknown => TypeKind::Unknown,
        };
        UserType { oid: form.oid, schema: form.schema, name: form.name, kind }
    }
}

pub(super) fn serialize<S: Serializer>(types: &[UserType], to: S) -> Result<S::Ok, S::Error> {
    to.collect_seq(types.iter().map(TypeForm::from))
}

pub(super) fn deserialize<'de, D: Deserializer<'de>>(from: D) -> Result<Vec<UserType>, D::Error> {
    let forms = Vec::<TypeForm>::deserialize(from)?;
    Ok(forms.into_iter().map(UserType::from).collect())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::publication::{EnumLabel, PublishedColumn, PublishedTable, TableName};

    #[test]
    fn tables_come_as_they_were_sent() {
        let kinds = [
            TypeKind::Base,
            TypeKind::Enum,
            TypeKind::Domain { base: 23, modifier: None },
            TypeKind::Domain { base: 1700, modifier: Some(655_366) },
            TypeKind::Array { element: 1 },
            TypeKind::Range { subtype: 2 },
            TypeKind::Multirange { subtype: 3 },
            TypeKind::Composite { attributes: None },
            TypeKind::Composite {
                attributes: Some(vec![Attribute { type_oid: 1700, type_modifier: -1 }]),
            },
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
            columns: vec![PublishedColumn {
                name: "".into(),
                type_oid: 1,
                type_modifier: -1,
                number: Some(1),
            }],
            types: types.collect(),
            labels: vec![EnumLabel { oid: 1, type_oid: 20_001, label: "a \"b\"".into() }],
            row_filter: Some("a = '\\'".into()),
            membership: 1,
            memberships_above: vec![2, 3],
            attached_above: vec![4, u32::MAX],
            file_node: 4,
            blocks: u64::MAX,
            bytes: 5,
            binary_safe: true,
            binary_copy: false,
            partitioned: true,
            unsent_key: None,
            updates_untold: false,
            old_keys_untold: false,
        };
        let json = serde_json::to_string(&table).unwrap();
        assert_eq!(serde_json::from_str::<PublishedTable>(&json).unwrap(), table);
    }

    /// As versions before modifiers and attributes sent and read them.
    #[test]
    fn other_versions_are_understood() {
        let kind = |json: &str| {
            let form: TypeForm = serde_json::from_str(json).unwrap();
            UserType::from(form).kind
        };
        assert_eq!(
            kind(r#"{"oid":1,"schema":"s","name":"t","kind":{"domain":{"base":23}}}"#),
            TypeKind::Domain { base: 23, modifier: None }
        );
        assert_eq!(
            kind(r#"{"oid":1,"schema":"s","name":"t","kind":"composite"}"#),
            TypeKind::Composite { attributes: None }
        );
        let attributes = Some(vec![Attribute { type_oid: 23, type_modifier: -1 }]);
        let (schema, name) = ("s".to_owned(), "t".to_owned());
        let known = UserType { oid: 1, schema, name, kind: TypeKind::Composite { attributes } };
        let json = serde_json::to_value(TypeForm::from(&known)).unwrap();
        assert_eq!(json["kind"], "composite", "a word, as ever");
    }
}
