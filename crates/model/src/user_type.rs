//! Types that are not PostgreSQL's own: their OIDs differ from server to server.

/// OIDs below this were assigned by hand in PostgreSQL's sources and mean the same type on every
/// server of every version (`FirstGenbkiObjectId`).
pub const FIRST_UNSTABLE_OID: u32 = 10_000;

/// A type as one server knows it.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct UserType {
    /// Its OID on that server.
    pub oid: u32,
    /// Schema name.
    pub schema: String,
    /// Type name.
    pub name: String,
    /// What it is made of.
    pub kind: TypeKind,
}

/// What a type is made of; OIDs are those of the same server.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum TypeKind {
    /// A type with functions of its own (extensions have them).
    Base,
    /// `CREATE TYPE … AS ENUM`. Its binary form is the label.
    Enum,
    /// `CREATE DOMAIN`. Its values travel as those of its base type.
    Domain {
        /// The type it restricts.
        base: u32,
        /// `typtypmod`: the modifier that `base` has in it. `None` where nobody said.
        modifier: Option<i32>,
    },
    /// An array.
    Array {
        /// Type of the elements.
        element: u32,
    },
    /// A range.
    Range {
        /// Type of the bounds.
        subtype: u32,
    },
    /// A multirange.
    Multirange {
        /// Type of the bounds of its ranges.
        subtype: u32,
    },
    /// A composite type or the row type of a table.
    Composite {
        /// In their order. `None` where nobody said.
        attributes: Option<Vec<Attribute>>,
    },
    /// Nothing is known but the name: the type was gone when the server was asked.
    Unknown,
}

/// An attribute of a composite type.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Attribute {
    /// OID of its type.
    pub type_oid: u32,
    /// `atttypmod`.
    pub type_modifier: i32,
}

/// Whether values of the type `oid` have ones of the type `part` within them, or are such; `types` is
/// what both are made of.
pub fn is_made_of(types: &[UserType], oid: u32, part: u32) -> bool {
    let (mut seen, mut left) = (Vec::new(), vec![oid]);
    while let Some(oid) = left.pop() {
        if oid == part {
            return true;
        }
        if seen.contains(&oid) {
            continue;
        }
        seen.push(oid);
        match types.iter().find(|known| known.oid == oid).map(|known| &known.kind) {
            Some(TypeKind::Domain { base: within, .. })
            | Some(TypeKind::Array { element: within })
            | Some(
                TypeKind::Range { subtype: within } | TypeKind::Multirange { subtype: within },
            ) => {
                left.push(*within);
            }
            Some(TypeKind::Composite { attributes: Some(attributes) }) => {
                left.extend(attributes.iter().map(|attribute| attribute.type_oid));
            }
            Some(TypeKind::Composite { attributes: None })
            | Some(TypeKind::Base | TypeKind::Enum | TypeKind::Unknown)
            | None => {}
        }
    }
    false
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn types_are_made_of_others() {
        let known = |oid, kind| UserType { oid, schema: "s".into(), name: oid.to_string(), kind };
        let attribute = |type_oid| Attribute { type_oid, type_modifier: -1 };
        let types = [
            known(1, TypeKind::Enum),
            known(2, TypeKind::Array { element: 1 }),
            known(3, TypeKind::Domain { base: 2, modifier: None }),
            known(4, TypeKind::Composite { attributes: Some(vec![attribute(25), attribute(3)]) }),
            known(5, TypeKind::Range { subtype: 4 }),
            known(6, TypeKind::Composite { attributes: Some(vec![attribute(6), attribute(25)]) }),
        ];
        for oid in 1..=5 {
            assert!(is_made_of(&types, oid, 1), "{oid}");
        }
        for (oid, part) in [(6, 1), (25, 1), (1, 2), (9, 1)] {
            assert!(!is_made_of(&types, oid, part), "{oid} {part}");
        }
        assert!(is_made_of(&types, 5, 25));
    }
}
