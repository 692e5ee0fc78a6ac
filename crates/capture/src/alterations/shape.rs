//! What the catalog says of a publication, and what it means that it says something else.

use std::collections::BTreeMap;

/// How a shape tells that partitions are published as their roots.
pub(super) const VIA_ROOTS: &str = " via partition roots";

/// What the catalog says of a publication.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Shape {
    /// Another number after it was dropped and made again.
    pub(super) oid: String,
    /// The transaction that wrote its catalog row last: adding and removing tables does not.
    pub(super) version: String,
    pub(super) owner: String,
    /// Which operations it publishes, and how.
    pub(super) publishes: String,
    /// Numbers of memberships by the OIDs of tables.
    pub(super) members: BTreeMap<u32, u32>,
    /// The server's hash of the members.
    pub(super) members_hash: String,
    /// Schemas of which it publishes all tables, or did.
    pub(super) schemas: BTreeMap<u32, InSchema>,
    /// Tables that it publishes with a schema or with all, by OID, and whether it does still: they
    /// have no membership of their own that would tell of one that has left and come back.
    pub(super) tables: BTreeMap<u32, bool>,
    /// The server's hash of those that it publishes.
    pub(super) tables_hash: String,
}

/// The membership of a schema (`FOR TABLES IN SCHEMA`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct InSchema {
    /// Another number after it has left and come back.
    pub(super) number: u32,
    /// It has not left.
    pub(super) is_in: bool,
}

/// What an altered publication means.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Alteration {
    /// Changes may be missing that nobody can tell.
    Gap(String),
    /// Tables that are members no longer, or became members anew.
    TakenOut(Vec<u32>),
    /// Schemas that are members no longer.
    SchemasTakenOut(Vec<u32>),
    /// Tables without a membership of their own that are published again.
    CameBack(Vec<u32>),
}

impl Shape {
    /// The form of the note in the store.
    pub(super) fn encode(&self) -> String {
        let members: Vec<String> =
            self.members.iter().map(|(table, number)| format!("{table}:{number}")).collect();
        let schemas = self.schemas.iter().map(|(schema, InSchema { number, is_in })| {
            format!("{schema}:{number}:{}", if *is_in { "in" } else { "out" })
        });
        let schemas: Vec<String> = schemas.collect();
        let tables = self.tables.iter().map(|(table, is_in)| match is_in {
            true => table.to_string(),
            false => format!("{table}:out"),
        });
        let tables: Vec<String> = tables.collect();
        let Shape { oid, version, owner, publishes, members_hash, tables_hash, .. } = self;
        let (members, schemas, tables) = (members.join(","), schemas.join(","), tables.join(","));
        format!(
            "{oid};{version};{owner};{publishes};{members_hash};{members};{schemas};{tables_hash};\
             {tables}"
        )
    }

    pub(super) fn decode(note: &str) -> Option<Shape> {
        let mut fields = note.split(';').map(str::to_owned);
        let [oid, version, owner, publishes, members_hash, members] =
            std::array::from_fn(|_| fields.next());
        Some(Shape {
            oid: oid?,
            version: version?,
            owner: owner?,
            publishes: publishes?,
            members_hash: members_hash?,
            members: decode_members(&members?)?,
            // Notes of earlier versions end before.
            schemas: decode_schemas(&fields.next().unwrap_or_default())?,
            tables_hash: fields.next().unwrap_or_default(),
            tables: decode_tables(&fields.next().unwrap_or_default())?,
        })
    }

    /// Tables without a membership of their own that are published no longer.
    pub(super) fn tables_left(&self, now: &Shape) -> Vec<u32> {
        let is_in = |shape: &Shape, table: &u32| shape.tables.get(table) == Some(&true);
        let has_left = |t: &&u32| is_in(self, t) && !is_in(now, t) && !now.members.contains_key(t);
        self.tables.keys().filter(has_left).copied().collect()
    }

    /// Remembers schemas that `before` had, and tables but for those that are `gone`: what comes back
    /// has missed changes.
    pub(super) fn remember(&mut self, before: &Shape, gone: &[u32]) {
        // One that has a membership of its own by now: that tells of it.
        let is_told = |table: &u32| gone.contains(table) || self.members.contains_key(table);
        let out: Vec<u32> = before.tables.keys().filter(|t| !is_told(t)).copied().collect();
        for table in out {
            self.tables.entry(table).or_insert(false);
        }
        for (schema, known) in &before.schemas {
            self.schemas.entry(*schema).or_insert(InSchema { is_in: false, ..*known });
        }
    }

    pub(super) fn is_via_roots(&self) -> bool {
        self.publishes.contains(VIA_ROOTS)
    }

    /// Takes it for our own doing that `now` publishes partitions as their roots, or does not, if we
    /// were about to set that.
    pub(super) fn accept_own(&mut self, now: &Shape, via_roots: bool) {
        let otherwise = |shape: &Shape| shape.publishes.replace(VIA_ROOTS, "");
        let is_own = now.oid == self.oid
            && now.is_via_roots() == via_roots
            && self.is_via_roots() != via_roots
            && otherwise(now) == otherwise(self);
        if is_own {
            self.publishes.clone_from(&now.publishes);
            self.version.clone_from(&now.version);
        }
    }

    /// What it means that the publication looks like `now`.
    pub(super) fn compare(&self, now: Option<&Shape>) -> Option<Alteration> {
        let gap = |what: String| Some(Alteration::Gap(what));
        let Some(now) = now else { return gap("was dropped by something else".to_owned()) };
        if now.oid != self.oid {
            return gap("was dropped by something else, and made again".to_owned());
        }
        if now.publishes != self.publishes {
            return gap(format!(
                "was altered by something else: it published {}, and now {}",
                self.publishes, now.publishes
            ));
        }
        if now.version != self.version && now.owner == self.owner {
            return gap("was altered by something else, and set back".to_owned());
        }
        let came_back = self.schemas.iter().any(|(schema, known)| {
            now.schemas.get(schema).is_some_and(|now| now.is_in && now.number != known.number)
        });
        if came_back {
            return gap("had a schema taken out of it by something else, and put back".to_owned());
        }
        let back = self
            .tables
            .iter()
            .filter(|(table, is_in)| !**is_in && now.tables.get(table) == Some(&true));
        let back: Vec<u32> = back.map(|(table, _)| *table).collect();
        if !back.is_empty() {
            return Some(Alteration::CameBack(back));
        }
        let left = self
            .members
            .iter()
            .filter(|(table, number)| now.members.get(table).is_none_or(|now| now != *number));
        let left: Vec<u32> = left.map(|(table, _)| *table).collect();
        if !left.is_empty() {
            return Some(Alteration::TakenOut(left));
        }
        let is_in = |shape: &Shape, schema| shape.schemas.get(schema).is_some_and(|s| s.is_in);
        let schemas = self.schemas.keys().filter(|s| is_in(self, s) && !is_in(now, s));
        let schemas: Vec<u32> = schemas.copied().collect();
        (!schemas.is_empty()).then_some(Alteration::SchemasTakenOut(schemas))
    }
}

pub(super) fn decode_schemas(text: &str) -> Option<BTreeMap<u32, InSchema>> {
    let members = text.split(',').filter(|member| !member.is_empty());
    members
        .map(|member| {
            let mut parts = member.split(':');
            let (schema, number) = (parts.next()?.parse().ok()?, parts.next()?.parse().ok()?);
            Some((schema, InSchema { number, is_in: parts.next() != Some("out") }))
        })
        .collect()
}

pub(super) fn decode_tables(text: &str) -> Option<BTreeMap<u32, bool>> {
    let tables = text.split(',').filter(|table| !table.is_empty());
    tables
        .map(|table| match table.strip_suffix(":out") {
            Some(table) => Some((table.parse().ok()?, false)),
            None => Some((table.parse().ok()?, true)),
        })
        .collect()
}

pub(super) fn decode_members(text: &str) -> Option<BTreeMap<u32, u32>> {
    let pairs = text.split(',').filter(|pair| !pair.is_empty());
    pairs
        .map(|pair| pair.split_once(':'))
        .map(|pair| {
            let (table, number) = pair?;
            Some((table.parse().ok()?, number.parse().ok()?))
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shape() -> Shape {
        Shape {
            oid: "16384".into(),
            version: "750".into(),
            owner: "10".into(),
            publishes: "insert, update, delete, truncate".into(),
            members: BTreeMap::from([(1, 100), (2, 101)]),
            members_hash: "abc".into(),
            schemas: BTreeMap::from([
                (5, InSchema { number: 200, is_in: true }),
                (6, InSchema { number: 201, is_in: false }),
            ]),
            tables: BTreeMap::from([(11, true), (12, true), (13, false)]),
            tables_hash: "def".into(),
        }
    }

    #[test]
    fn a_note_is_read_as_it_was_written() {
        assert_eq!(Shape::decode(&shape().encode()), Some(shape()));
        let empty = Shape { members: BTreeMap::new(), ..shape() };
        assert_eq!(Shape::decode(&empty.encode()), Some(empty));
        let earlier = "16384;750;10;insert, update, delete, truncate;abc;1:100,2:101";
        let none = || Shape { tables: BTreeMap::new(), tables_hash: String::new(), ..shape() };
        let without = Shape { schemas: BTreeMap::new(), ..none() };
        assert_eq!(Shape::decode(earlier), Some(without));
        let earlier = format!("{earlier};5:200:in,6:201:out");
        assert_eq!(Shape::decode(&earlier), Some(none()));
        // Nothing that was not noted has left or come back.
        assert_eq!(none().compare(Some(&shape())), None);
        assert!(none().tables_left(&shape()).is_empty());
        assert_eq!(Shape::decode("1;2;3"), None);
        assert_eq!(Shape::decode("1;2;3;4;5;6:x"), None);
    }

    #[test]
    fn only_what_can_miss_changes_is_an_alteration() {
        let is_gap =
            |now: Option<Shape>| matches!(shape().compare(now.as_ref()), Some(Alteration::Gap(_)));
        assert!(is_gap(None));
        assert!(is_gap(Some(Shape { oid: "2".into(), ..shape() })));
        assert!(is_gap(Some(Shape { publishes: "insert".into(), ..shape() })));
        assert!(is_gap(Some(Shape { version: "751".into(), ..shape() })));

        let harmless = [
            shape(),
            Shape { owner: "11".into(), version: "751".into(), ..shape() },
            Shape { members: BTreeMap::from([(1, 100), (2, 101), (3, 102)]), ..shape() },
        ];
        for now in harmless {
            assert_eq!(shape().compare(Some(&now)), None, "{now:?}");
        }
        let left = Shape { members: BTreeMap::from([(2, 103)]), ..shape() };
        assert_eq!(shape().compare(Some(&left)), Some(Alteration::TakenOut(vec![1, 2])));
    }

    #[test]
    fn a_schema_that_comes_back_has_missed_changes() {
        let schemas = |all: &[(u32, u32)]| {
            let all = all
                .iter()
                .map(|(schema, number)| (*schema, InSchema { number: *number, is_in: true }));
            let mut now = Shape { schemas: all.collect(), ..shape() };
            now.remember(&shape(), &[]);
            now
        };
        // One more, and none of them is new.
        assert_eq!(shape().compare(Some(&schemas(&[(5, 200), (7, 300)]))), None);
        let without = schemas(&[]);
        let left = Some(Alteration::SchemasTakenOut(vec![5]));
        assert_eq!(shape().compare(Some(&without)), left);
        assert_eq!(without.compare(Some(&without)), None);
        for back in [schemas(&[(5, 202)]), schemas(&[(5, 200), (6, 203)])] {
            assert!(matches!(without.compare(Some(&back)), Some(Alteration::Gap(_))), "{back:?}");
        }
    }

    #[test]
    fn a_table_that_comes_back_without_a_membership_has_missed_changes() {
        let tables = |all: &[u32], known: &Shape, gone: &[u32]| {
            let all = all.iter().map(|table| (*table, true));
            let mut now = Shape { tables: all.collect(), ..shape() };
            assert_eq!(known.tables_left(&now).is_empty(), all_in(known, &now));
            now.remember(known, gone);
            now
        };
        // One more.
        let more = tables(&[11, 12, 14], &shape(), &[]);
        assert_eq!(shape().compare(Some(&more)), None);
        assert_eq!(more.tables.get(&13), Some(&false));
        // One that left, and one that was dropped.
        assert_eq!(more.tables_left(&Shape { tables: [(14, true)].into(), ..shape() }), [11, 12]);
        let left = tables(&[14], &more, &[12]);
        assert_eq!(more.compare(Some(&left)), None);
        assert_eq!(left.tables, [(11, false), (13, false), (14, true)].into());
        // It comes back; so does what had left before. What was dropped is another one.
        let back = tables(&[11, 12, 13, 14], &left, &[]);
        assert_eq!(left.compare(Some(&back)), Some(Alteration::CameBack(vec![11, 13])));
        let other = tables(&[12, 14], &left, &[]);
        assert_eq!(left.compare(Some(&other)), None);
        // One that is listed has left neither way.
        let mut listed = Shape { tables: [(12, true)].into(), ..shape() };
        listed.members.insert(11, 300);
        assert!(shape().tables_left(&listed).is_empty());
        listed.remember(&shape(), &[]);
        assert_eq!(listed.tables, [(12, true), (13, false)].into());
    }

    fn all_in(before: &Shape, now: &Shape) -> bool {
        before.tables.iter().all(|(table, is_in)| !is_in || now.tables.contains_key(table))
    }

    #[test]
    fn what_we_were_about_to_set_is_nobody_elses_doing() {
        let set = |via_roots: bool, version: &str| {
            let roots = if via_roots { VIA_ROOTS } else { "" };
            let publishes = format!("insert, update, delete, truncate{roots}");
            Shape { publishes, version: version.into(), ..shape() }
        };
        let compared = |before: &Shape, now: &Shape, about_to: bool| {
            let mut noted = before.clone();
            noted.accept_own(now, about_to);
            noted.compare(Some(now))
        };
        assert_eq!(compared(&set(false, "750"), &set(true, "751"), true), None);
        assert_eq!(compared(&set(true, "750"), &set(false, "751"), false), None);
        // It was not come to.
        assert_eq!(compared(&set(false, "750"), &set(false, "750"), true), None);
        let is_gap = |alteration| matches!(alteration, Some(Alteration::Gap(_)));
        // Set by somebody else; set and set back; and something else set along.
        assert!(is_gap(compared(&set(false, "750"), &set(true, "751"), false)));
        assert!(is_gap(compared(&set(false, "750"), &set(false, "752"), true)));
        let more = Shape { publishes: format!("insert{VIA_ROOTS}"), ..set(true, "751") };
        assert!(is_gap(compared(&set(false, "750"), &more, true)));
        let again = Shape { oid: "2".into(), ..set(true, "751") };
        assert!(is_gap(compared(&set(false, "750"), &again, true)));
    }
}
