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
//! "The same" needs more than the OID where a type modifier of the target, be it the column's, a
//! domain's or an attribute's, would round values without an error (`numeric(10,2)`, `timestamp(0)`)
//! or cut them off (`varchar(3)`: spaces). Composites are compared attribute by attribute.

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

/// Why there is no plan.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Loss {
    /// The types have nothing to do with each other, or the target's has fewer values.
    OtherType,
    /// The target's modifier rounds, without an error.
    Rounded,
}

impl Loss {
    /// What stands behind "cannot hold every value of the publisher's type as it is".
    pub fn why(self) -> &'static str {
        match self {
            Loss::OtherType => "",
            Loss::Rounded => " (finer values would be rounded, without an error)",
        }
    }
}

/// A column's type, or a part of it, on one side.
#[derive(Clone, Copy)]
struct Side<'a> {
    oid: u32,
    /// That of the column, of an attribute, or of a domain that was looked through.
    modifier: i32,
    /// The column's own modifier; none of a part.
    of_column: i32,
    /// A domain was looked through, and nobody said what its modifier is.
    unknown: bool,
    types: &'a [UserType],
}

impl<'a> Side<'a> {
    fn known(self, oid: u32) -> Option<&'a UserType> {
        self.types.binary_search_by_key(&oid, |known| known.oid).ok().map(|at| &self.types[at])
    }

    /// The type below all domains. Of a chain of them, the one that names the base type has the
    /// modifier, if there is any.
    fn base(mut self) -> Side<'a> {
        // A domain's chain is finite; the bound is for descriptions that are damaged.
        for _ in 0..=self.types.len() {
            let Some(TypeKind::Domain { base, modifier }) =
                self.known(self.oid).map(|known| &known.kind)
            else {
                break;
            };
            self.oid = *base;
            match modifier {
                Some(modifier) if *modifier >= 0 => self.modifier = *modifier,
                Some(_) => {}
                None => self.unknown = true,
            }
        }
        self
    }

    /// An array's modifier is that of its elements.
    fn element(self, oid: u32) -> Side<'a> {
        Side { oid, of_column: -1, ..self }
    }

    fn part(self, oid: u32, modifier: i32) -> Side<'a> {
        Side { oid, modifier, of_column: -1, ..self }
    }
}

impl<'a> From<ColumnType<'a>> for Side<'a> {
    fn from(column: ColumnType<'a>) -> Side<'a> {
        let ColumnType { oid, modifier, types } = column;
        Side { oid, modifier, of_column: modifier, unknown: false, types }
    }
}

/// A built-in type below all domains of a column, with its modifier; none where the type is not
/// built in.
pub fn built_in_base(column: ColumnType<'_>) -> Option<(u32, i32)> {
    let base = Side::from(column).base();
    (base.oid < FIRST_UNSTABLE_OID).then_some((base.oid, base.modifier))
}

/// The plan for a column.
///
/// # Errors
/// How values could be lost, changed or misread on the way.
pub fn value_plan(publisher: ColumnType<'_>, target: ColumnType<'_>) -> Result<ValuePlan, Loss> {
    plan(publisher.into(), target.into(), &mut Vec::new())
}

/// The plan for what need not be a whole column. Composites that are being compared are in `open`:
/// they may be made of themselves.
fn plan(
    publisher: Side<'_>,
    target: Side<'_>,
    open: &mut Vec<(u32, u32)>,
) -> Result<ValuePlan, Loss> {
    let (from, to) = (publisher.base(), target.base());
    let declared = if publisher.oid < FIRST_UNSTABLE_OID { publisher.oid } else { 0 };
    let verbatim = ValuePlan::Verbatim { from: declared };
    // The bytes are read as the column's type.
    let as_target = ValuePlan::Verbatim { from: 0 };
    // What the publisher's domain allows is not known from definitions of earlier versions. Then
    // only the column's own modifier counts, as it did for those.
    let allowed = if !from.unknown {
        to.modifier
    } else if element_of(from.oid).is_some() {
        -1
    } else {
        to.of_column
    };
    let keeps = |plan: ValuePlan| match loss((from.oid, from.modifier), (to.oid, allowed)) {
        Some(loss) => Err(loss),
        None => Ok(plan),
    };
    let refused = Err(Loss::OtherType);
    let mut as_part = |from: Side<'_>, to: Side<'_>| {
        let part = plan(from, to, open)?;
        if part.is_verbatim() { Ok(as_target) } else { refused }
    };
    match (from.oid < FIRST_UNSTABLE_OID, to.oid < FIRST_UNSTABLE_OID) {
        (true, true) if from.oid == to.oid => keeps(verbatim),
        // A parameter of type text would be cut off to fit a name.
        (true, true) if is_text(from.oid) && is_text(to.oid) && to.oid != NAME => keeps(verbatim),
        (true, true) if holds_more(from.oid, to.oid) => keeps(ValuePlan::Cast { from: from.oid }),
        (true, true) => refused,
        (true, false) => match to.known(to.oid).map(|known| &known.kind) {
            Some(TypeKind::Enum) if is_text(from.oid) => Ok(as_target),
            Some(TypeKind::Base) if is_text(from.oid) && is_citext(to) => Ok(as_target),
            Some(TypeKind::Array { element }) => match element_of(from.oid) {
                Some(of) => as_part(from.element(of), to.element(*element)),
                None => refused,
            },
            _ => refused,
        },
        (false, to_built_in) => {
            // Definitions stored by earlier versions say nothing of types; those sent values of
            // user-defined types in binary only where the bytes are those of the base type.
            let Some(known) = from.known(from.oid) else { return Ok(as_target) };
            match &known.kind {
                TypeKind::Unknown => Ok(as_target),
                // Labels are words: no length that takes them cuts anything off.
                TypeKind::Enum if to_built_in && is_text(to.oid) => Ok(as_target),
                TypeKind::Base if to_built_in && is_citext(from) && is_text(to.oid) => {
                    Ok(as_target)
                }
                TypeKind::Array { element } => {
                    let to_element = if to_built_in {
                        element_of(to.oid)
                    } else {
                        match to.known(to.oid).map(|known| &known.kind) {
                            Some(TypeKind::Array { element }) => Some(*element),
                            _ => None,
                        }
                    };
                    match to_element {
                        Some(of) => as_part(from.element(*element), to.element(of)),
                        None => refused,
                    }
                }
                _ if to_built_in => refused,
                kind => {
                    let Some(there) = to.known(to.oid) else { return refused };
                    match (kind, &there.kind) {
                        (TypeKind::Enum, TypeKind::Enum) => Ok(as_target),
                        (TypeKind::Range { subtype: a }, TypeKind::Range { subtype: b })
                        | (
                            TypeKind::Multirange { subtype: a },
                            TypeKind::Multirange { subtype: b },
                        ) => as_part(from.part(*a, -1), to.part(*b, -1)),
                        (TypeKind::Base, TypeKind::Base) if known.name == there.name => {
                            Ok(as_target)
                        }
                        (
                            TypeKind::Composite { attributes: a },
                            TypeKind::Composite { attributes: b },
                        ) if known.name == there.name => {
                            let pair = (from.oid, to.oid);
                            if open.contains(&pair) {
                                return Ok(as_target);
                            }
                            open.push(pair);
                            let (a, b) = (a.iter().flatten(), b.iter().flatten());
                            // Where there are more on one side, the target says so itself: a row
                            // of another length is an error.
                            for (a, b) in a.zip(b) {
                                // Of built-in types a row says which they are, and it must be they.
                                let named = [a.type_oid, b.type_oid];
                                let is_built_in = |oid: &u32| *oid < FIRST_UNSTABLE_OID;
                                if a.type_oid != b.type_oid && named.iter().all(is_built_in) {
                                    return refused;
                                }
                                let a = from.part(a.type_oid, a.type_modifier);
                                let b = to.part(b.type_oid, b.type_modifier);
                                if !plan(a, b, open)?.is_verbatim() {
                                    return refused;
                                }
                            }
                            Ok(as_target)
                        }
                        (_, _) => refused,
                    }
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
/// user-defined types, or have a modifier.
const ARRAYS: [(u32, u32); 26] = [
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
    (1183, TIME),
    (1270, TIMETZ),
    (1187, INTERVAL),
    (1115, TIMESTAMP),
    (1185, TIMESTAMPTZ),
    (1561, BIT),
    (1563, VARBIT),
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

fn is_citext(of: Side<'_>) -> bool {
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
        // What it says, not how it was written.
        JSONB => from == JSON,
        TEXT | VARCHAR => matches!(
            from,
            TEXT | VARCHAR
                | NAME
                | BPCHAR
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

/// What the target's modifier does without an error to values that the publisher's allows, each
/// with the type that it belongs to; of arrays, to their elements. (A number that has too many
/// digits is an error, and so is a text that is too long, but for spaces at its end.)
fn loss((from, publisher): (u32, i32), (to, target): (u32, i32)) -> Option<Loss> {
    let (from, to) = (element_of(from).unwrap_or(from), element_of(to).unwrap_or(to));
    if target < 0 || (from, publisher) == (to, target) {
        return None;
    }
    let rounds = match to {
        // ((precision << 16) | (scale & 0x7ff)) + 4, the scale signed since 15
        NUMERIC if from == NUMERIC => publisher < 0 || scale(target) < scale(publisher),
        // A whole number.
        NUMERIC => scale(target) < 0,
        TIME | TIMETZ | TIMESTAMP | TIMESTAMPTZ if from == to => {
            target < if publisher < 0 { 6 } else { publisher }
        }
        INTERVAL => true,
        _ => false,
    };
    rounds.then_some(Loss::Rounded)
}

fn scale(modifier: i32) -> i32 {
    (((modifier - 4) & 0x7ff) ^ 1024) - 1024
}

#[cfg(test)]
mod tests {
    use super::*;
    use farshore_model::Attribute;

    /// Both sides have these, under OIDs that differ by `shift`.
    fn types(shift: u32) -> Vec<UserType> {
        let domain = |base, modifier| TypeKind::Domain { base, modifier };
        let composite = |of: &[(u32, i32)]| {
            let attribute = |(type_oid, type_modifier)| Attribute { type_oid, type_modifier };
            TypeKind::Composite { attributes: Some(of.iter().copied().map(attribute).collect()) }
        };
        let kinds = [
            ("mood", TypeKind::Enum),
            ("moods", TypeKind::Array { element: 20_000 + shift }),
            ("price", domain(NUMERIC, Some(-1))),
            ("dear", domain(20_002 + shift, Some(-1))),
            ("citext", TypeKind::Base),
            ("hstore", TypeKind::Base),
            ("pair", TypeKind::Composite { attributes: None }),
            ("prices", TypeKind::Array { element: 20_003 + shift }),
            ("floats", TypeKind::Range { subtype: FLOAT8 }),
            ("other", TypeKind::Range { subtype: FLOAT8 }),
            ("dates", TypeKind::Range { subtype: DATE }),
            ("gone", TypeKind::Unknown),
            // 20,012 on
            ("cents", domain(NUMERIC, Some(numeric(10, 2)))),
            ("dear_cents", domain(20_012 + shift, Some(-1))),
            ("all_cents", TypeKind::Array { element: 20_013 + shift }),
            ("list", domain(1231, Some(numeric(10, 2)))),
            ("ranges", TypeKind::Range { subtype: 20_012 + shift }),
            ("old", domain(NUMERIC, None)),
            ("old_list", TypeKind::Array { element: 20_017 + shift }),
            // 20,019 on
            ("tree", composite(&[(INT4, -1), (20_020 + shift, -1)])),
            ("trees", TypeKind::Array { element: 20_019 + shift }),
            ("row", composite(&[(NUMERIC, numeric(10, 4)), (TEXT, -1)])),
            ("row", composite(&[(NUMERIC, numeric(10, 2)), (TEXT, -1)])),
            ("row", composite(&[(20_012 + shift, -1), (VARCHAR, 14)])),
            ("row", composite(&[(NUMERIC, -1), (TEXT, -1)])),
            ("row", composite(&[(NUMERIC, -1)])),
            ("row", composite(&[(TEXT, -1), (NUMERIC, -1)])),
            ("row", TypeKind::Composite { attributes: None }),
        ];
        let user_type = |(oid, (name, kind)): (u32, (&str, TypeKind))| UserType {
            oid,
            schema: "public".into(),
            name: name.into(),
            kind,
        };
        (20_000 + shift..).zip(kinds).map(user_type).collect()
    }

    fn numeric(precision: i32, scale: i32) -> i32 {
        ((precision << 16) | (scale & 0x7ff)) + 4
    }

    fn plan(from: (u32, i32), to: (u32, i32)) -> Result<ValuePlan, Loss> {
        let (here, there) = (types(0), types(100));
        value_plan(
            ColumnType { oid: from.0, modifier: from.1, types: &here },
            ColumnType { oid: to.0, modifier: to.1, types: &there },
        )
    }
    #[test]
    fn plans_follow_the_types() {
        let verbatim = |from| Ok(ValuePlan::Verbatim { from });
        let cast = |from| Ok(ValuePlan::Cast { from });
        let other = Err(Loss::OtherType);
        for (from, to, expected) in [
            (INT4, INT4, verbatim(INT4)),
            (INT4, INT8, cast(INT4)),
            (INT4, TEXT, cast(INT4)),
            (VARCHAR, TEXT, verbatim(VARCHAR)),
            (TEXT, NAME, other),
            (BPCHAR, TEXT, cast(BPCHAR)),
            (INT8, FLOAT8, other),
            (NUMERIC, INT4, other),
            (TIMESTAMPTZ, TIMESTAMP, other),
            (1007, 1016, cast(1007)),
            (1009, 1007, other),
            (1015, 1009, cast(1015)),
            (1009, 1015, cast(1009)),
            (1003, 1009, cast(1003)),
            // Domains, below and above, on either side.
            (20_003, 20_103, verbatim(0)),
            (20_003, NUMERIC, verbatim(0)),
            (NUMERIC, 20_103, verbatim(NUMERIC)),
            (20_002, FLOAT8, other),
            // Enums and texts.
            (20_000, 20_100, verbatim(0)),
            (20_000, TEXT, verbatim(0)),
            (TEXT, 20_100, verbatim(0)),
            (20_000, INT4, other),
            (20_000, BPCHAR, other),
            (20_004, VARCHAR, verbatim(0)),
            (TEXT, 20_104, verbatim(0)),
            // By name.
            (20_005, 20_105, verbatim(0)),
            (20_005, 20_104, other),
            (20_006, 20_106, verbatim(0)),
            (20_006, TEXT, other),
            // By what they are made of.
            (20_001, 20_101, verbatim(0)),
            (20_001, 1009, verbatim(0)),
            (1009, 20_101, verbatim(0)),
            (20_001, 1007, other),
            (20_007, 20_107, verbatim(0)),
            (20_007, 1231, verbatim(0)),
            (20_008, 20_109, verbatim(0)),
            (20_008, 20_110, other),
            (20_008, 20_100, other),
            (JSONB, JSON, cast(JSONB)),
            (JSON, JSONB, cast(JSON)),
            (199, 3807, cast(199)),
            (JSON, 3807, other),
            // A type that is made of itself.
            (20_019, 20_119, verbatim(0)),
            (20_020, 20_120, verbatim(0)),
            // Nothing is known of them.
            (20_011, INT4, verbatim(0)),
            (30_000, 20_100, verbatim(0)),
        ] {
            assert_eq!(plan((from, -1), (to, -1)), expected, "{from} to {to}");
        }
    }

    #[test]
    fn modifiers_that_lose_something_are_refused() {
        let fits = None;
        let rounded = Some(Loss::Rounded);
        for (from, to, loss) in [
            ((NUMERIC, numeric(10, 2)), (NUMERIC, numeric(10, 2)), fits),
            ((NUMERIC, numeric(10, 2)), (NUMERIC, numeric(8, 4)), fits),
            ((NUMERIC, numeric(10, 2)), (NUMERIC, -1), fits),
            ((NUMERIC, numeric(10, 2)), (NUMERIC, numeric(10, 1)), rounded),
            ((NUMERIC, numeric(3, -2)), (NUMERIC, numeric(10, 0)), fits),
            ((NUMERIC, numeric(10, 0)), (NUMERIC, numeric(3, -2)), rounded),
            ((NUMERIC, -1), (NUMERIC, numeric(10, 2)), rounded),
            ((INT8, -1), (NUMERIC, numeric(3, 0)), fits),
            ((INT8, -1), (NUMERIC, numeric(3, -2)), rounded),
            ((TIMESTAMP, -1), (TIMESTAMP, 6), fits),
            ((TIMESTAMP, 0), (TIMESTAMP, 3), fits),
            ((TIMESTAMPTZ, -1), (TIMESTAMPTZ, 3), rounded),
            ((DATE, -1), (TIMESTAMP, 0), fits),
            ((TEXT, -1), (VARCHAR, 14), fits),
            ((VARCHAR, -1), (VARCHAR, 14), fits),
            ((VARCHAR, 24), (VARCHAR, 14), fits),
            ((VARCHAR, 14), (VARCHAR, 24), fits),
            ((NAME, -1), (VARCHAR, 67), fits),
            ((NAME, -1), (VARCHAR, 66), fits),
            ((BPCHAR, 14), (BPCHAR, 9), fits),
            ((BPCHAR, 9), (BPCHAR, 14), fits),
            ((JSON, -1), (VARCHAR, 14), fits),
            ((JSONB, -1), (VARCHAR, 14), fits),
            ((INT4, -1), (VARCHAR, 5), fits),
            ((20_004, -1), (VARCHAR, 14), fits),
            // Arrays: of their elements.
            ((1231, -1), (1231, numeric(10, 2)), rounded),
            ((1231, numeric(10, 2)), (1231, numeric(10, 2)), fits),
            ((1015, 24), (1015, 14), fits),
            ((1183, -1), (1183, 0), rounded),
            ((1016, -1), (1231, numeric(3, 0)), fits),
            ((1016, -1), (1231, numeric(3, -2)), rounded),
            // Domains, on either side.
            ((NUMERIC, -1), (20_112, -1), rounded),
            ((NUMERIC, -1), (20_113, -1), rounded),
            ((20_013, -1), (20_112, -1), fits),
            ((20_013, -1), (NUMERIC, numeric(8, 2)), fits),
            ((20_013, -1), (NUMERIC, numeric(8, 1)), rounded),
            ((20_003, -1), (20_113, -1), rounded),
            ((1231, -1), (20_114, -1), rounded),
            ((1231, numeric(10, 2)), (20_114, -1), fits),
            ((20_014, -1), (1231, numeric(10, 2)), fits),
            ((20_014, -1), (1231, numeric(10, 1)), rounded),
            ((20_015, -1), (1231, numeric(10, 1)), rounded),
            ((20_015, -1), (20_114, -1), fits),
            ((20_016, -1), (20_116, -1), fits),
            // Attributes.
            ((20_021, -1), (20_121, -1), fits),
            ((20_021, -1), (20_122, -1), rounded),
            ((20_021, -1), (20_123, -1), rounded),
            // Their built-in types are named in a row, and must be those of the target.
            ((20_023, -1), (20_122, -1), Some(Loss::OtherType)),
            ((20_022, -1), (20_123, -1), Some(Loss::OtherType)),
            ((20_021, -1), (20_124, -1), fits),
            ((20_024, -1), (20_126, -1), Some(Loss::OtherType)),
            // The target refuses rows of another length by itself.
            ((20_024, -1), (20_125, -1), fits),
            // Definitions of earlier versions say nothing of domains and attributes.
            ((20_017, -1), (20_112, -1), fits),
            ((20_017, -1), (NUMERIC, numeric(10, 2)), rounded),
            ((20_018, -1), (1231, numeric(10, 2)), fits),
            ((20_018, -1), (20_114, -1), fits),
            ((20_027, -1), (20_122, -1), fits),
        ] {
            assert_eq!(plan(from, to).err(), loss, "{from:?} to {to:?}");
        }
    }
}
