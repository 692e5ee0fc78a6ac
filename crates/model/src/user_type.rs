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
