//! A relation's definition as the log's dictionary holds it: the protocol-1 Relation message, and
//! behind it what is known of the types that are not PostgreSQL's own (`docs/formats/transaction.md`).

use super::decode::relation;
use super::encode::{self, Builder};
use super::reader::Reader;
use super::{DecodeError, Problem};
use farshore_model::{Relation, TypeKind, UserType};

/// Begins a type, as pgoutput's Type message does.
const TYPE: u8 = b'Y';

/// A relation's definition as the log's dictionary holds it. Equal definitions give equal bytes.
pub fn encode_definition(definition: &Relation) -> Vec<u8> {
    let message = Builder(encode::relation(definition, None));
    definition.types.iter().fold(message, user_type).done()
}

fn user_type(built: Builder, known: &UserType) -> Builder {
    let built = built.byte(TYPE).u32(known.oid).string(&known.schema).string(&known.name);
    match &known.kind {
        TypeKind::Base => built.byte(b'b'),
        TypeKind::Enum => built.byte(b'e'),
        TypeKind::Domain { base } => built.byte(b'd').u32(*base),
        TypeKind::Array { element } => built.byte(b'a').u32(*element),
        TypeKind::Range { subtype } => built.byte(b'r').u32(*subtype),
        TypeKind::Multirange { subtype } => built.byte(b'm').u32(*subtype),
        TypeKind::Composite => built.byte(b'c'),
        TypeKind::Unknown => built.byte(b'?'),
    }
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
    while !r.rest().is_empty() {
        const WHAT: &str = "'Y', a type with a higher OID than the one before it";
        let at = r.offset();
        let found = r.u8(WHAT)?;
        let known = read_user_type(r)?;
        let in_order = decoded.types.last().is_none_or(|last| last.oid < known.oid);
        if found != TYPE || !in_order {
            return Err(r.error_at(at, Problem::Unexpected { what: WHAT, found }));
        }
        decoded.types.push(known);
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
        b'd' => TypeKind::Domain { base: r.u32(PART)? },
        b'a' => TypeKind::Array { element: r.u32(PART)? },
        b'r' => TypeKind::Range { subtype: r.u32(PART)? },
        b'm' => TypeKind::Multirange { subtype: r.u32(PART)? },
        b'c' => TypeKind::Composite,
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
            TypeKind::Domain { base: 23 },
            TypeKind::Array { element: 20_001 },
            TypeKind::Range { subtype: 1700 },
            TypeKind::Multirange { subtype: 1700 },
            TypeKind::Composite,
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
}
