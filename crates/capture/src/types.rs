//! What types are made of, asked from a server, and whether values of theirs may travel in binary.
//!
//! A binary value means the same on every server if it carries no OID of something in the
//! publisher's database. Arrays and composites do name the types of their parts, but receivers
//! (PostgreSQL 14 and later: `array_recv`, `record_recv`) pass over those that are not built in, and
//! an enum travels as its label. What is left are the OID aliases (`regclass` and its like), alone
//! or within other types: their text form is a name.

use farshore_model::{Attribute, FIRST_UNSTABLE_OID, TypeKind, UserType};
use farshore_pg::{Connection, Error};
use std::collections::{BTreeMap, BTreeSet};

/// `regproc`, `regprocedure`, `regoper`, `regoperator`, `regclass`, `regtype`, `regrole`,
/// `regnamespace`, `regconfig`, `regdictionary`, `regcollation`, and their arrays.
const NAMES_BY_OID: [u32; 22] = [
    24, 2202, 2203, 2204, 2205, 2206, 4096, 4089, 3734, 3769, 4191, 1008, 2207, 2208, 2209, 2210,
    2211, 4097, 4090, 3735, 3770, 4192,
];

/// Whether a type is PostgreSQL's own and its values name nothing of the server's catalogs.
pub(crate) fn is_built_in_value(oid: u32) -> bool {
    oid < FIRST_UNSTABLE_OID && !NAMES_BY_OID.contains(&oid)
}

/// `aclitem` and `gtsvector`: built-in types that have no binary form. pgoutput sends them as text
/// by itself, but fails on arrays and composites of them.
const WITHOUT_BINARY_FORM: [u32; 2] = [1033, 3642];
/// `aclitem[]` and `gtsvector[]`.
const ARRAYS_WITHOUT_BINARY_FORM: [u32; 2] = [1034, 3644];

/// `int2vector`, `oidvector`, `tsquery` and their arrays: PostgreSQL does not take back what it
/// sends for an empty one ("invalid oidvector data", "malformed tsquery: operand not found").
const ONE_WAY_BINARY_FORM: [u32; 6] = [22, 30, 3615, 1006, 1013, 3645];

/// User-defined types of one server by OID, as far as it was asked.
#[derive(Clone, Debug, Default)]
pub struct TypeCatalog {
    described: BTreeMap<u32, Described>,
    /// Schema and name, as pgoutput's Type messages said.
    named: BTreeMap<u32, (String, String)>,
    /// What is described may be otherwise by now.
    stale: bool,
}

#[derive(Clone, Debug)]
struct Described {
    known: UserType,
    /// It has a send and a receive function.
    binary_form: bool,
    /// Types that its values are made of.
    parts: Vec<u32>,
}

/// Every type that values of the types in `$1` are made of.
const DESCRIBE: &str = "WITH RECURSIVE part(oid) AS ( \
      SELECT t.oid FROM pg_catalog.pg_type t WHERE t.oid = ANY ($1::text::oid[]) \
      UNION \
      SELECT x.oid FROM part p JOIN pg_catalog.pg_type t ON t.oid = p.oid CROSS JOIN LATERAL ( \
        SELECT t.typbasetype AS oid WHERE t.typtype = 'd' \
        UNION ALL SELECT t.typelem \
          WHERE t.typtype = 'b' AND t.typcategory = 'A' AND t.typelem <> 0 \
        UNION ALL SELECT r.rngsubtype FROM pg_catalog.pg_range r \
          WHERE t.oid IN (r.rngtypid, r.rngmultitypid) \
        UNION ALL SELECT a.atttypid FROM pg_catalog.pg_attribute a \
          WHERE t.typtype = 'c' AND a.attrelid = t.typrelid AND a.attnum > 0 \
          AND NOT a.attisdropped) x) \
    SELECT t.oid, n.nspname, t.typname, \
      CASE WHEN t.typtype = 'b' AND t.typcategory = 'A' AND t.typelem <> 0 THEN 'a' \
        ELSE t.typtype::text END, \
      t.typsend::oid <> 0 AND t.typreceive::oid <> 0, \
      coalesce(CASE t.typtype \
        WHEN 'd' THEN t.typbasetype::text \
        WHEN 'b' THEN CASE WHEN t.typcategory = 'A' AND t.typelem <> 0 THEN t.typelem::text END \
        WHEN 'c' THEN (SELECT string_agg(a.atttypid::text, ' ' ORDER BY a.attnum) \
          FROM pg_catalog.pg_attribute a \
          WHERE a.attrelid = t.typrelid AND a.attnum > 0 AND NOT a.attisdropped) \
        ELSE (SELECT r.rngsubtype::text FROM pg_catalog.pg_range r \
          WHERE t.oid IN (r.rngtypid, r.rngmultitypid)) END, ''), \
      coalesce(CASE t.typtype WHEN 'd' THEN t.typtypmod::text \
        WHEN 'c' THEN (SELECT string_agg(a.atttypmod::text, ' ' ORDER BY a.attnum) \
          FROM pg_catalog.pg_attribute a \
          WHERE a.attrelid = t.typrelid AND a.attnum > 0 AND NOT a.attisdropped) END, '') \
    FROM part p JOIN pg_catalog.pg_type t ON t.oid = p.oid \
    JOIN pg_catalog.pg_namespace n ON n.oid = t.typnamespace \
    WHERE t.oid >= 10000";

impl TypeCatalog {
    /// Those of `oids` that are not PostgreSQL's own and have not been described.
    pub fn missing(&self, oids: impl IntoIterator<Item = u32>) -> BTreeSet<u32> {
        oids.into_iter()
            .filter(|oid| *oid >= FIRST_UNSTABLE_OID && !self.described.contains_key(oid))
            .collect()
    }

    /// What has been described is asked about once more before the next types are: they may have other
    /// names by now.
    pub fn expire(&mut self) {
        self.stale = !self.described.is_empty();
    }

    /// What the server is to be asked about before `oids` are used: those that are
    /// [missing](TypeCatalog::missing), and all that has [expired](TypeCatalog::expire).
    pub fn to_ask(&self, oids: impl IntoIterator<Item = u32>) -> BTreeSet<u32> {
        let mut to_ask = self.missing(oids);
        if self.stale {
            to_ask.extend(self.described.keys());
        }
        to_ask
    }

    /// Asks the server about `oids`, as far as there is something [to ask](TypeCatalog::to_ask). What is
    /// known of a type that is gone stays known.
    ///
    /// # Errors
    /// The server's.
    pub async fn describe(
        &mut self,
        sql: &mut Connection,
        oids: impl IntoIterator<Item = u32>,
    ) -> Result<(), Error> {
        let to_ask = self.to_ask(oids);
        if to_ask.is_empty() {
            return Ok(());
        }
        let to_ask: Vec<String> = to_ask.iter().map(u32::to_string).collect();
        let list = format!("{{{}}}", to_ask.join(","));
        for row in sql.query(DESCRIBE, &[Some(&list)]).await? {
            let oid = row.parse(0)?;
            let parts = row.get(5).unwrap_or_default().split(' ');
            let parts: Vec<u32> = parts.filter_map(|part| part.parse().ok()).collect();
            let part = parts.first().copied().unwrap_or_default();
            // Of each part, where a part can have one.
            let modifiers = row.get(6).unwrap_or_default().split(' ');
            let modifiers: Vec<i32> = modifiers.filter_map(|text| text.parse().ok()).collect();
            let attribute = |(type_oid, type_modifier)| Attribute { type_oid, type_modifier };
            let kind = match row.get(3) {
                Some("b") => TypeKind::Base,
                Some("e") => TypeKind::Enum,
                Some("c") => TypeKind::Composite {
                    attributes: Some(parts.iter().copied().zip(modifiers).map(attribute).collect()),
                },
                Some("d") => TypeKind::Domain { base: part, modifier: modifiers.first().copied() },
                Some("a") => TypeKind::Array { element: part },
                Some("r") => TypeKind::Range { subtype: part },
                Some("m") => TypeKind::Multirange { subtype: part },
                _ => TypeKind::Unknown,
            };
            let schema = row.get(1).unwrap_or_default().to_owned();
            let name = row.get(2).unwrap_or_default().to_owned();
            let known = UserType { oid, schema, name, kind };
            let binary_form = row.get(4) == Some("t");
            self.described.insert(oid, Described { known, binary_form, parts });
        }
        self.stale = false;
        Ok(())
    }

    /// Keeps a name that pgoutput told, for types that are gone when the server is asked. Another one
    /// than it told before lets what is described [expire](TypeCatalog::expire).
    pub fn name(&mut self, oid: u32, schema: &str, name: &str) {
        let name = (schema.to_owned(), name.to_owned());
        let before = self.named.insert(oid, name.clone());
        if before.is_some_and(|before| before != name) {
            self.expire();
        }
    }

    /// What is known of a type.
    pub fn get(&self, oid: u32) -> Option<&UserType> {
        self.described.get(&oid).map(|described| &described.known)
    }

    /// What is known of the user-defined types among `oids` and of those they are made of, sorted
    /// by OID.
    pub fn closure(&self, oids: impl IntoIterator<Item = u32>) -> Vec<UserType> {
        let mut found = BTreeMap::new();
        let mut left: Vec<u32> = oids.into_iter().collect();
        while let Some(oid) = left.pop() {
            if found.contains_key(&oid) {
                continue;
            }
            if let Some(Described { known, parts, .. }) = self.described.get(&oid) {
                left.extend(parts);
                found.insert(oid, known.clone());
            } else if let Some((schema, name)) = self.named.get(&oid) {
                let (schema, name) = (schema.clone(), name.clone());
                found.insert(oid, UserType { oid, schema, name, kind: TypeKind::Unknown });
            }
        }
        found.into_values().collect()
    }

    /// Whether a binary value of this type can be had and means the same on every server. Not so
    /// for a type that nothing is known of.
    pub fn travels_in_binary(&self, oid: u32) -> bool {
        self.fits(oid, false, &mut BTreeSet::new())
    }

    /// Whether a value of this type by itself has a binary form.
    pub fn has_binary_form(&self, oid: u32) -> bool {
        match self.described.get(&oid) {
            Some(described) => described.binary_form,
            None => oid < FIRST_UNSTABLE_OID && !WITHOUT_BINARY_FORM.contains(&oid),
        }
    }

    fn fits(&self, oid: u32, inside: bool, seen: &mut BTreeSet<(u32, bool)>) -> bool {
        if NAMES_BY_OID.contains(&oid)
            || ARRAYS_WITHOUT_BINARY_FORM.contains(&oid)
            || ONE_WAY_BINARY_FORM.contains(&oid)
            || inside && WITHOUT_BINARY_FORM.contains(&oid)
        {
            return false;
        }
        if oid < FIRST_UNSTABLE_OID || !seen.insert((oid, inside)) {
            return true;
        }
        let Some(Described { known, binary_form, parts }) = self.described.get(&oid) else {
            return false;
        };
        // A type without a binary form goes as text by itself; only within others it cannot.
        if !binary_form {
            return !inside;
        }
        let inside = inside || !matches!(known.kind, TypeKind::Domain { .. });
        parts.iter().all(|part| self.fits(*part, inside, seen))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn composite(of: &[u32]) -> TypeKind {
        let attribute = |oid: &u32| Attribute { type_oid: *oid, type_modifier: -1 };
        TypeKind::Composite { attributes: Some(of.iter().map(attribute).collect()) }
    }

    fn catalog() -> TypeCatalog {
        let mut catalog = TypeCatalog::default();
        let kinds = [
            (20_000, composite(&[23, 2205]), vec![23, 2205], true),
            (20_001, TypeKind::Array { element: 20_000 }, vec![20_000], true),
            (20_002, TypeKind::Domain { base: 1033, modifier: Some(-1) }, vec![1033], false),
            (20_003, TypeKind::Array { element: 20_002 }, vec![20_002], true),
            (20_004, TypeKind::Domain { base: 20_005, modifier: Some(-1) }, vec![20_005], true),
            (20_005, TypeKind::Enum, vec![], true),
            (20_006, composite(&[20_004, 20_007]), vec![20_004, 20_007], true),
            (20_007, TypeKind::Array { element: 20_006 }, vec![20_006], true),
        ];
        for (oid, kind, parts, binary_form) in kinds {
            let (schema, name) = ("public".to_owned(), format!("t{oid}"));
            let known = UserType { oid, schema, name, kind };
            catalog.described.insert(oid, Described { known, binary_form, parts });
        }
        catalog
    }

    #[test]
    fn only_what_has_no_oids_inside_travels_in_binary() {
        let catalog = catalog();
        for (oid, fits) in [
            (23, true),
            (1007, true),
            (26, true),
            (2205, false),
            (2210, false),
            (1033, true),
            (1034, false),
            (30, false),
            (20_000, false),
            (20_001, false),
            (20_002, true),
            (20_003, false),
            (20_004, true),
            (20_006, true),
            (20_007, true),
            (99_999, false),
        ] {
            assert_eq!(catalog.travels_in_binary(oid), fits, "{oid}");
        }
    }

    #[test]
    fn a_relation_takes_along_what_its_types_are_made_of() {
        let mut catalog = catalog();
        catalog.name(30_000, "gone", "mood");
        let oids = |types: Vec<UserType>| types.iter().map(|t| t.oid).collect::<Vec<_>>();
        assert_eq!(oids(catalog.closure([20_004, 23])), [20_004, 20_005]);
        assert_eq!(
            oids(catalog.closure([20_007, 30_000])),
            [20_004, 20_005, 20_006, 20_007, 30_000]
        );
        assert_eq!(catalog.closure([30_000])[0].kind, TypeKind::Unknown);
        assert_eq!(catalog.missing([20_000, 23, 40_000]), BTreeSet::from([40_000]));
    }
}
