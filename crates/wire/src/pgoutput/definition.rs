//! A relation's definition as the log's dictionary holds it: the protocol-1 Relation message, and
//! behind it what is known of the types that are not PostgreSQL's own (`docs/formats/transaction.md`).

use super::decode::relation;
use super::encode::{self, Builder};
use super::reader::Reader;
use super::{DecodeError, Problem};
use farshore_model::{Attribute, Relation, TypeKind, UserType};
use std::fmt::Write;

/// Begins a type, as pgoutput's Type message does.
const TYPE: u8 = b'Y';

/// What no type has. Under it stands what came after the types had their form: for an earlier
/// version it is one more type that nothing is known of and nothing refers to.
const MODIFIERS: u32 = 0;

/// A relation's definition as the log's dictionary holds it. Equal definitions give equal bytes.
pub fn encode_definition(definition: &Relation) -> Vec<u8> {
    let mut message = Builder(encode::relation(definition, None));
    let modifiers = modifiers(&definition.types);
    if !modifiers.is_empty() {
        message = message.byte(TYPE).u32(MODIFIERS).string("").string(&modifiers).byte(b'?');
    }
    definition.types.iter().fold(message, user_type).done()
}

fn user_type(built: Builder, known: &UserType) -> Builder {
    let built = built.byte(TYPE).u32(known.oid).string(&known.schema).string(&known.name);
    match &known.kind {
        TypeKind::Base => built.byte(b'b'),
        TypeKind::Enum => built.byte(b'e'),
        TypeKind::Domain { base, modifier: _ } => built.byte(b'd').u32(*base),
        TypeKind::Array { element } => built.byte(b'a').u32(*element),
        TypeKind::Range { subtype } => built.byte(b'r').u32(*subtype),
        TypeKind::Multirange { subtype } => built.byte(b'm').u32(*subtype),
        TypeKind::Composite { attributes: _ } => built.byte(b'c'),
        TypeKind::Unknown => built.byte(b'?'),
    }
}

/// What is known of the modifiers of domains (`20001:655366`) and of the attributes of composites,
/// each with its type and modifier (`20002:1700.655366,25.-1`), separated by spaces.
fn modifiers(types: &[UserType]) -> String {
    let mut text = String::new();
    for known in types {
        let space = if text.is_empty() { "" } else { " " };
        match &known.kind {
            TypeKind::Domain { modifier: Some(modifier), .. } => {
                let _ = write!(text, "{space}{}:{modifier}", known.oid);
            }
            TypeKind::Composite { attributes: Some(attributes) } => {
                let _ = write!(text, "{space}{}:", known.oid);
                for (number, Attribute { type_oid, type_modifier }) in attributes.iter().enumerate()
                {
                    let comma = if number == 0 { "" } else { "," };
                    let _ = write!(text, "{comma}{type_oid}.{type_modifier}");
                }
            }
            _ => {}
        }
    }
    text
}

/// Gives the types what [`modifiers`] has written; `None` where it is not of these types.
fn read_modifiers(text: &str, types: &mut [UserType]) -> Option<()> {
    for told in text.split(' ') {
        let (oid, of) = told.split_once(':')?;
        let oid: u32 = oid.parse().ok()?;
        let at = types.binary_search_by_key(&oid, |known| known.oid).ok()?;
        match &mut types.get_mut(at)?.kind {
            TypeKind::Domain { modifier, .. } => *modifier = Some(of.parse().ok()?),
            TypeKind::Composite { attributes } => {
                let attribute = |text: &str| {
                    let (oid, modifier) = text.split_once('.')?;
                    let (type_oid, type_modifier) = (oid.parse().ok()?, modifier.parse().ok()?);
                    Some(Attribute { type_oid, type_modifier })
                };
                let told = of.split(',').filter(|_| !of.is_empty());
                *attributes = Some(told.map(attribute).collect::<Option<_>>()?);
            }
            _ => return None,
        }
    }
    (modifiers(types) == text).then_some(())
}

/// Reads what [`encode_definition`] has written, with or without types.
///
/// # Errors
/// Whatever is not a well-formed Relation message with types behind it, sorted by OID.
pub fn decode_definition(definition: &[u8]) -> Result<Relation, DecodeError> {
    let (tag, mut reader) = Reader::new(definition)?;
    let r = &mut reader;
    if tag != b'R' {
        let problem = Problem::Unexpected { what: "'R', a Relation message", found: tag };
        return Err(r.error_at(0, problem));
    }
    let mut decoded = relation(r)?;
    let mut modifiers = None;
    while !r.rest().is_empty() {
        const WHAT: &str = "'Y', a type with a higher OID than the one before it";
        let at = r.offset();
        let found = r.u8(WHAT)?;
        let known = read_user_type(r)?;
        let first = decoded.types.is_empty() && modifiers.is_none();
        if found == TYPE && known.oid == MODIFIERS && first && known.kind == TypeKind::Unknown {
            modifiers = Some((at, known));
            continue;
        }
        let last = decoded.types.last().map_or(MODIFIERS, |last| last.oid);
        let in_order = last < known.oid;
        if found != TYPE || !in_order {
            return Err(r.error_at(at, Problem::Unexpected { what: WHAT, found }));
        }
        decoded.types.push(known);
    }
    if let Some((at, said)) = modifiers {
        const WHAT: &str = "modifiers of the types that follow";
        let problem = Problem::Unexpected { what: WHAT, found: TYPE };
        let read = said.schema.is_empty().then(|| read_modifiers(&said.name, &mut decoded.types));
        read.flatten().ok_or_else(|| r.error_at(at, problem))?;
    }
    Ok(decoded)
}

fn read_user_type(r: &mut Reader<'_>) -> Result<UserType, DecodeError> {
    const KIND: &str = "a kind of type: 'b', 'e', 'd', 'a', 'r', 'm', 'c' or '?'";
    const PART: &str = "the type that a type is made of";
    let oid = r.u32("the OID of a type")?;
    let schema = r.string("the schema of a type")?.to_owned();
    let name = r.string("the name of a type")?.to_owned();
    let kind = match r.u8(KIND)? {
        b'b' => TypeKind::Base,
        b'e' => TypeKind::Enum,
        b'd' => TypeKind::Domain { base: r.u32(PART)?, modifier: None },
        b'a' => TypeKind::Array { element: r.u32(PART)? },
        b'r' => TypeKind::Range { subtype: r.u32(PART)? },
        b'm' => TypeKind::Multirange { subtype: r.u32(PART)? },
        b'c' => TypeKind::Composite { attributes: None },
        b'?' => TypeKind::Unknown,
        found => {
            return Err(r.error_at(r.offset() - 1, Problem::Unexpected { what: KIND, found }));
        }
    };
    Ok(UserType { oid, schema, name, kind })
}

#[cfg(test)]
mod tests {
    use super::*;
    use farshore_model::{Column, ReplicaIdentity};

    fn definition() -> Relation {
        let kinds = [
            TypeKind::Base,
            TypeKind::Enum,
            TypeKind::Domain { base: 23, modifier: None },
            TypeKind::Array { element: 20_001 },
            TypeKind::Range { subtype: 1700 },
            TypeKind::Multirange { subtype: 1700 },
            TypeKind::Composite { attributes: None },
            TypeKind::Unknown,
        ];
        let types = (20_000..).zip(kinds).map(|(oid, kind)| UserType {
            oid,
            schema: "public".into(),
            name: format!("t{oid}"),
            kind,
        });
        Relation {
            oid: 7,
            schema: "s".into(),
            name: "t".into(),
            identity: ReplicaIdentity::Full,
            columns: vec![Column {
                key: true,
                name: "v".into(),
                type_oid: 20_006,
                type_modifier: -1,
            }],
            types: types.collect(),
        }
    }

    #[test]
    fn definitions_round_trip_with_their_types() {
        let all = definition();
        let bytes = encode_definition(&all);
        assert_eq!(decode_definition(&bytes).unwrap(), all);
        assert_eq!(all.user_type(20_004), Some(&all.types[4]));
        assert_eq!(all.user_type(20_008), None);
        for len in 0..bytes.len() {
            if let Ok(cut) = decode_definition(&bytes[..len]) {
                assert_eq!(encode_definition(&cut), &bytes[..len], "only whole types are left out");
            }
        }
    }

    #[test]
    fn definitions_without_types_are_plain_messages() {
        let plain = Relation { types: vec![], ..definition() };
        assert_eq!(encode_definition(&plain), encode::relation(&plain, None));
    }

    #[test]
    fn types_out_of_order_are_refused() {
        let mut twice = definition();
        twice.types.push(twice.types[0].clone());
        assert!(decode_definition(&encode_definition(&twice)).is_err());
    }

    fn with_modifiers() -> Relation {
        let mut all = definition();
        all.types[2].kind = TypeKind::Domain { base: 1700, modifier: Some(655_366) };
        let attributes = vec![
            Attribute { type_oid: 1700, type_modifier: -1 },
            Attribute { type_oid: 20_002, type_modifier: 14 },
        ];
        all.types[6].kind = TypeKind::Composite { attributes: Some(attributes) };
        all.types.push(UserType {
            oid: u32::MAX,
            schema: "s".into(),
            name: "empty".into(),
            kind: TypeKind::Composite { attributes: Some(vec![]) },
        });
        all
    }

    #[test]
    fn modifiers_come_along() {
        let all = with_modifiers();
        let bytes = encode_definition(&all);
        assert_eq!(decode_definition(&bytes).unwrap(), all);
        let told = "20002:655366 20006:1700.-1,20002.14 4294967295:";
        let told = [b"Y\0\0\0\0\0", told.as_bytes(), b"\0?Y"].concat();
        let at = encode::relation(&all, None).len();
        assert!(bytes[at..].starts_with(&told), "as docs/formats say, before the types");
        for len in at + 1..bytes.len() {
            assert!(decode_definition(&bytes[..len]).is_err(), "cut at {len}");
        }
    }

    #[test]
    fn modifiers_of_other_types_are_refused() {
        let all = with_modifiers();
        for told in [
            "",
            "20002",
            "20002:",
            "20002:x",
            "20002:+1",
            "20001:1",
            "20009:1",
            "20006:1700",
            "20006:1700.1 20002:1",
            "20002:1 ",
            "20002:1 20002:1",
        ] {
            let note = Builder(encode::relation(&all, None)).byte(TYPE).u32(0).string("");
            let note = note.string(told).byte(b'?');
            let bytes = all.types.iter().fold(note, user_type).done();
            assert!(decode_definition(&bytes).is_err(), "{told}");
        }
    }
}
