//! How the publisher's values of a column get into the target's column: decided once for each
//! relation version, from the two types alone, so that values themselves need not be looked at.
//!
//! ```text
//! publisher's type          target's type                plan
//! ─────────────────────────────────────────────────────────────────────────────
//! built in                  the same                     Verbatim
//! built in                  one that holds more          Cast
//! domain                    as its base type             as its base type
//! anything                  domain                       as the domain's base type
//! enum                      enum, text, varchar, name    Verbatim (it travels as its label)
//! text, varchar, name       enum, citext                 Verbatim
//! extension type, range,    of the same name             Verbatim
//!   multirange, composite
//! array                     array                        Verbatim where the elements are, and
//!                                                        Cast between built-in ones
//! otherwise                                              none: it is refused before a row moves
//! ```
//!
//! "The same" needs more than the OID where a type modifier of the target would round values
//! without an error (`numeric(10,2)`, `timestamp(0)`).

use farshore_model::{FIRST_UNSTABLE_OID, TypeKind, UserType};

/// What may be done with a value that came in binary. A value that came as text is always given to
/// the target as text, of type [`ValuePlan::parameter_type`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ValuePlan {
    /// The value's bytes are a binary value of the target column's own type: they may be sent as a
    /// parameter of it, as an element of an array of it, or in a binary COPY.
    Verbatim {
        /// The publisher's type where it is built in, or else zero.
        from: u32,
    },
    /// The value's bytes are a binary value of this built-in type, which the target must cast to
    /// the column's. INSERT and UPDATE do so by themselves; a binary COPY into the column cannot.
    Cast {
        /// The publisher's type.
        from: u32,
    },
}

impl ValuePlan {
    /// The type to declare a parameter with: zero leaves it to the target, which then takes the
    /// column's type.
    pub fn parameter_type(self) -> u32 {
        match self {
            ValuePlan::Verbatim { from } | ValuePlan::Cast { from } => from,
        }
    }

    /// Whether the bytes are a binary value of the target column's own type.
    pub fn is_verbatim(self) -> bool {
        matches!(self, ValuePlan::Verbatim { .. })
    }
}

/// A column's type on one side, with what is known of user-defined types there.
#[derive(Clone, Copy, Debug)]
pub struct ColumnType<'a> {
    /// OID.
    pub oid: u32,
    /// `atttypmod`.
    pub modifier: i32,
    /// Sorted by OID.
    pub types: &'a [UserType],
}

impl<'a> ColumnType<'a> {
    fn known(self, oid: u32) -> Option<&'a UserType> {
        self.types.binary_search_by_key(&oid, |known| known.oid).ok().map(|at| &self.types[at])
    }

    /// The type below all domains.
    fn base(self) -> ColumnType<'a> {
        let mut oid = self.oid;
        // A domain's chain is finite; the bound is for descriptions that are damaged.
        for _ in 0..=self.types.len() {
            match self.known(oid).map(|known| &known.kind) {
                Some(TypeKind::Domain { base }) => oid = *base,
                _ => break,
            }
        }
        ColumnType { oid, ..self }
    }

    fn part(self, oid: u32) -> ColumnType<'a> {
        ColumnType { oid, modifier: -1, ..self }
    }
}

/// The plan for a column, or `None` when values could be lost, changed or misread on the way.
pub fn value_plan(publisher: ColumnType<'_>, target: ColumnType<'_>) -> Option<ValuePlan> {
    let (from, to) = (publisher.base(), target.base());
    let declared = if publisher.oid < FIRST_UNSTABLE_OID { publisher.oid } else { 0 };
    let verbatim = Some(ValuePlan::Verbatim { from: declared });
    // The bytes are read as the column's type.
    let as_target = Some(ValuePlan::Verbatim { from: 0 });
    match (from.oid < FIRST_UNSTABLE_OID, to.oid < FIRST_UNSTABLE_OID) {
        (true, true) if from.oid == to.oid => {
            (!rounds(from.oid, publisher.modifier, target.modifier)).then_some(verbatim)?
        }
        // A parameter of type text would be cut off to fit a name.
        (true, true) if is_text(from.oid) && is_text(to.oid) && to.oid != NAME => verbatim,
        (true, true) if holds_more(from.oid, to.oid) => Some(ValuePlan::Cast { from: from.oid }),
        (true, true) => None,
        (true, false) => match &to.known(to.oid)?.kind {
            TypeKind::Enum if is_text(from.oid) => as_target,
            TypeKind::Base if is_text(from.oid) && is_citext(to) => as_target,
            TypeKind::Array { element } => {
                let element_plan = value_plan(from.part(element_of(from.oid)?), to.part(*element));
                element_plan.filter(|plan| plan.is_verbatim()).and(as_target)
            }
            _ => None,
        },
        (false, to_built_in) => {
            // Definitions stored by earlier versions say nothing of types; those sent values of
            // user-defined types in binary only where the bytes are those of the base type.
            let Some(known) = from.known(from.oid) else { return as_target };
            match &known.kind {
                TypeKind::Unknown => as_target,
                TypeKind::Enum if to_built_in => is_text(to.oid).then_some(as_target)?,
                TypeKind::Base if to_built_in && is_citext(from) => {
                    is_text(to.oid).then_some(as_target)?
                }
                TypeKind::Array { element } => {
                    let to_element = if to_built_in {
                        element_of(to.oid)?
                    } else {
                        match &to.known(to.oid)?.kind {
                            TypeKind::Array { element } => *element,
                            _ => return None,
                        }
                    };
                    let element_plan = value_plan(from.part(*element), to.part(to_element));
                    element_plan.filter(|plan| plan.is_verbatim()).and(as_target)
                }
                _ if to_built_in => None,
                kind => {
                    let there = to.known(to.oid)?;
                    let fits = match (kind, &there.kind) {
                        (TypeKind::Enum, TypeKind::Enum) => true,
                        (TypeKind::Range { subtype: a }, TypeKind::Range { subtype: b })
                        | (
                            TypeKind::Multirange { subtype: a },
                            TypeKind::Multirange { subtype: b },
                        ) => {
                            value_plan(from.part(*a), to.part(*b)).is_some_and(|p| p.is_verbatim())
                        }
                        (TypeKind::Base, TypeKind::Base)
                        | (TypeKind::Composite, TypeKind::Composite) => known.name == there.name,
                        (_, _) => false,
                    };
                    fits.then_some(as_target)?
                }
            }
        }
    }
}

const CHAR: u32 = 18;
const NAME: u32 = 19;
const INT8: u32 = 20;
const INT2: u32 = 21;
const INT4: u32 = 23;
const TEXT: u32 = 25;
const OID: u32 = 26;
const JSON: u32 = 114;
const XML: u32 = 142;
const CIDR: u32 = 650;
const FLOAT4: u32 = 700;
const FLOAT8: u32 = 701;
const INET: u32 = 869;
const BPCHAR: u32 = 1042;
const VARCHAR: u32 = 1043;
const DATE: u32 = 1082;
const TIME: u32 = 1083;
const TIMESTAMP: u32 = 1114;
const TIMESTAMPTZ: u32 = 1184;
const INTERVAL: u32 = 1186;
const TIMETZ: u32 = 1266;
const BIT: u32 = 1560;
const VARBIT: u32 = 1562;
const NUMERIC: u32 = 1700;
const UUID: u32 = 2950;
const JSONB: u32 = 3802;

/// Built-in arrays and their elements, as far as they can be cast to one another or to arrays of
/// user-defined types.
const ARRAYS: [(u32, u32); 22] = [
    (1002, CHAR),
    (1003, NAME),
    (1016, INT8),
    (1005, INT2),
    (1007, INT4),
    (1009, TEXT),
    (1028, OID),
    (199, JSON),
    (143, XML),
    (651, CIDR),
    (1021, FLOAT4),
    (1022, FLOAT8),
    (1041, INET),
    (1014, BPCHAR),
    (1015, VARCHAR),
    (1182, DATE),
    (1115, TIMESTAMP),
    (1185, TIMESTAMPTZ),
    (1561, BIT),
    (1231, NUMERIC),
    (2951, UUID),
    (3807, JSONB),
];

fn element_of(array: u32) -> Option<u32> {
    ARRAYS.iter().find(|(oid, _)| *oid == array).map(|(_, element)| *element)
}

/// The binary form is the text itself, in the client's encoding, and any text may stand in it.
fn is_text(oid: u32) -> bool {
    matches!(oid, TEXT | VARCHAR | NAME)
}

fn is_citext(of: ColumnType<'_>) -> bool {
    of.known(of.oid).is_some_and(|known| known.name == "citext")
}

/// Whether there is an assignment cast that keeps every value or fails, whatever the settings.
fn holds_more(from: u32, to: u32) -> bool {
    if let (Some(from), Some(to)) = (element_of(from), element_of(to)) {
        return holds_more(from, to);
    }
    match to {
        INT2 => matches!(from, INT4 | INT8),
        INT4 => matches!(from, INT2 | INT8),
        INT8 => matches!(from, INT2 | INT4 | OID),
        NUMERIC => matches!(from, INT2 | INT4 | INT8),
        FLOAT4 => from == INT2,
        FLOAT8 => matches!(from, INT2 | INT4 | FLOAT4),
        TIMESTAMP => from == DATE,
        INET => from == CIDR,
        BIT => from == VARBIT,
        VARBIT => from == BIT,
        JSON => from == JSONB,
        JSONB => from == JSON,
        TEXT | VARCHAR => matches!(
            from,
            BPCHAR
                | CHAR
                | INT2
                | INT4
                | INT8
                | NUMERIC
                | UUID
                | DATE
                | TIMESTAMP
                | INET
                | CIDR
                | JSON
                | JSONB
                | XML
        ),
        _ => false,
    }
}

/// Whether the target's modifier rounds values that the publisher's allows, without an error. (One
/// that is too short for a text or a number makes an error.)
fn rounds(oid: u32, publisher: i32, target: i32) -> bool {
    if target < 0 || publisher == target {
        return false;
    }
    match oid {
        // ((precision << 16) | (scale & 0x7ff)) + 4, the scale signed since 15
        NUMERIC => publisher < 0 || scale(target) < scale(publisher),
        TIME | TIMETZ | TIMESTAMP | TIMESTAMPTZ => {
            target < if publisher < 0 { 6 } else { publisher }
        }
        INTERVAL => true,
        _ => false,
    }
}

fn scale(modifier: i32) -> i32 {
    (((modifier - 4) & 0x7ff) ^ 1024) - 1024
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Both sides have these, under OIDs that differ by `shift`.
    fn types(shift: u32) -> Vec<UserType> {
        let kinds = [
            ("mood", TypeKind::Enum),
            ("moods", TypeKind::Array { element: 20_000 + shift }),
            ("price", TypeKind::Domain { base: NUMERIC }),
            ("dear", TypeKind::Domain { base: 20_002 + shift }),
            ("citext", TypeKind::Base),
            ("hstore", TypeKind::Base),
            ("pair", TypeKind::Composite),
            ("prices", TypeKind::Array { element: 20_003 + shift }),
            ("floats", TypeKind::Range { subtype: FLOAT8 }),
            ("other", TypeKind::Range { subtype: FLOAT8 }),
            ("dates", TypeKind::Range { subtype: DATE }),
            ("gone", TypeKind::Unknown),
        ];
        let user_type = |(oid, (name, kind)): (u32, (&str, TypeKind))| UserType {
            oid,
            schema: "public".into(),
            name: name.into(),
            kind,
        };
        (20_000 + shift..).zip(kinds).map(user_type).collect()
    }

    fn plan(from: (u32, i32), to: (u32, i32)) -> Option<ValuePlan> {
        let (here, there) = (types(0), types(100));
        value_plan(
            ColumnType { oid: from.0, modifier: from.1, types: &here },
            ColumnType { oid: to.0, modifier: to.1, types: &there },
        )
    }

    #[test]
    fn plans_follow_the_types() {
        let verbatim = |from| Some(ValuePlan::Verbatim { from });
        let cast = |from| Some(ValuePlan::Cast { from });
        for (from, to, expected) in [
            (INT4, INT4, verbatim(INT4)),
            (INT4, INT8, cast(INT4)),
            (INT4, TEXT, cast(INT4)),
            (VARCHAR, TEXT, verbatim(VARCHAR)),
            (TEXT, NAME, None),
            (BPCHAR, TEXT, cast(BPCHAR)),
            (INT8, FLOAT8, None),
            (NUMERIC, INT4, None),
            (TIMESTAMPTZ, TIMESTAMP, None),
            (1007, 1016, cast(1007)),
            (1009, 1007, None),
            // Domains, below and above, on either side.
            (20_003, 20_103, verbatim(0)),
            (20_003, NUMERIC, verbatim(0)),
            (NUMERIC, 20_103, verbatim(NUMERIC)),
            (20_002, FLOAT8, None),
            // Enums and texts.
            (20_000, 20_100, verbatim(0)),
            (20_000, TEXT, verbatim(0)),
            (TEXT, 20_100, verbatim(0)),
            (20_000, INT4, None),
            (20_000, BPCHAR, None),
            (20_004, VARCHAR, verbatim(0)),
            (TEXT, 20_104, verbatim(0)),
            // By name.
            (20_005, 20_105, verbatim(0)),
            (20_005, 20_104, None),
            (20_006, 20_106, verbatim(0)),
            (20_006, TEXT, None),
            // By what they are made of.
            (20_001, 20_101, verbatim(0)),
            (20_001, 1009, verbatim(0)),
            (1009, 20_101, verbatim(0)),
            (20_001, 1007, None),
            (20_007, 20_107, verbatim(0)),
            (20_007, 1231, verbatim(0)),
            (20_008, 20_109, verbatim(0)),
            (20_008, 20_110, None),
            (20_008, 20_100, None),
            // Nothing is known of them.
            (20_011, INT4, verbatim(0)),
            (30_000, 20_100, verbatim(0)),
        ] {
            assert_eq!(plan((from, -1), (to, -1)), expected, "{from} to {to}");
        }
    }

    #[test]
    fn modifiers_that_round_are_refused() {
        let numeric = |precision: i32, scale: i32| ((precision << 16) | (scale & 0x7ff)) + 4;
        for (oid, from, to, fits) in [
            (NUMERIC, numeric(10, 2), numeric(10, 2), true),
            (NUMERIC, numeric(10, 2), numeric(8, 4), true),
            (NUMERIC, numeric(10, 2), -1, true),
            (NUMERIC, numeric(10, 2), numeric(10, 1), false),
            (NUMERIC, numeric(3, -2), numeric(10, 0), true),
            (NUMERIC, numeric(10, 0), numeric(3, -2), false),
            (NUMERIC, -1, numeric(10, 2), false),
            (TIMESTAMP, -1, 6, true),
            (TIMESTAMP, 0, 3, true),
            (TIMESTAMPTZ, -1, 3, false),
            (VARCHAR, -1, 14, true),
        ] {
            assert_eq!(plan((oid, from), (oid, to)).is_some(), fits, "{oid}: {from} to {to}");
        }
    }
}
