//! Foreign keys of a database, and the order in which tables can be filled while they hold.
//!
//! Where the target's role may not set `session_replication_role`, foreign keys are checked for
//! every row that we write. Then parents are copied before their children, tables that refer to
//! each other in a circle in one transaction with their constraints deferred, and a table that
//! refers to itself in one statement.

use farshore_capture::publication::TableName;
use farshore_pg::{Connection, Error, Row};
use std::collections::{BTreeSet, HashMap, HashSet};

/// One foreign key.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ForeignKey {
    /// Constraint name.
    pub name: String,
    /// The table that refers.
    pub child: TableName,
    /// The table that is referred to.
    pub parent: TableName,
    /// Referring columns, in the key's order.
    pub columns: Vec<String>,
    /// What they refer to, likewise.
    pub parent_columns: Vec<String>,
    /// Each has the type of what it refers to, and equals it (a period does not).
    pub same_types: bool,
    /// It can be checked at the end of the transaction.
    pub deferrable: bool,
    /// `pg_constraint.confdeltype`: `a` no action, `r` restrict, `c` cascade, `n` set null, `d` set
    /// default.
    pub on_delete: char,
    /// `pg_constraint.confupdtype`, likewise.
    pub on_update: char,
    child_root: u32,
    parent_root: u32,
}

impl ForeignKey {
    /// The SQL that lets it be checked at the end of the transaction.
    pub fn make_deferrable(&self) -> String {
        format!("ALTER TABLE {} ALTER CONSTRAINT {} DEFERRABLE", self.child, self.quoted_name())
    }

    /// The table that is referred to, or the one at the top of its partition tree, by OID.
    pub fn parent_root(&self) -> u32 {
        self.parent_root
    }

    /// The constraint and its table, for messages.
    pub fn on_table(&self) -> String {
        format!("{} of {}", self.quoted_name(), self.child)
    }

    /// Its name as SQL writes it.
    pub fn quoted_name(&self) -> String {
        farshore_model::quote_identifier(&self.name)
    }

    /// A delete of a parent's row deletes or changes rows of the child.
    pub fn acts_on_delete(&self) -> bool {
        matches!(self.on_delete, 'c' | 'n' | 'd')
    }

    /// A new key of a parent's row changes rows of the child.
    pub fn acts_on_update(&self) -> bool {
        matches!(self.on_update, 'c' | 'n' | 'd')
    }
}

/// The foreign keys that are enforced in a database.
#[derive(Clone, Debug, Default)]
pub struct ForeignKeys {
    /// All of them, those of partitioned tables once.
    pub keys: Vec<ForeignKey>,
    /// The table at the top of each table's partition tree, by OID; its own without one.
    roots: HashMap<TableName, u32>,
}

/// Where a table stands among those that foreign keys tie together.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Place {
    /// No key is on it, or refers to it.
    Free,
    /// Behind all that it refers to, apart from itself; they have lower numbers.
    Behind(u32),
    /// It refers to itself through others, or to tables that do.
    InCircle,
}

/// The places of all tables.
#[derive(Clone, Debug, Default)]
pub struct Places {
    roots: HashMap<TableName, u32>,
    /// By root; those in circles have none.
    numbers: HashMap<u32, Option<u32>>,
    parents: HashSet<u32>,
}

impl Places {
    /// Where a table stands.
    pub fn of(&self, table: &TableName) -> Place {
        match self.roots.get(table).and_then(|root| self.numbers.get(root)) {
            None => Place::Free,
            Some(None) => Place::InCircle,
            Some(Some(number)) => Place::Behind(*number),
        }
    }

    /// Whether a key refers to the table.
    pub fn is_parent(&self, table: &TableName) -> bool {
        self.roots.get(table).is_some_and(|root| self.parents.contains(root))
    }
}

/// What can be copied by itself, and what has to be copied in one transaction.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum CopyUnit {
    /// Range by range, side by side with others.
    Apart(usize),
    /// All of these tables in one transaction with constraints deferred, each in one statement, in
    /// this order.
    Together(Vec<usize>),
}

impl ForeignKeys {
    /// Reads a database's foreign keys.
    pub async fn load(sql: &mut Connection) -> Result<ForeignKeys, Error> {
        let rows = sql
            .query(
                "SELECT n.nspname, c.relname, \
                   coalesce(pg_catalog.pg_partition_root(c.oid)::oid, c.oid) \
                 FROM pg_catalog.pg_class c \
                 JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace \
                 WHERE c.relkind IN ('r', 'p') AND n.nspname !~ '^pg_' \
                 AND n.nspname <> 'information_schema'",
                &[],
            )
            .await?;
        let mut roots = HashMap::new();
        for row in &rows {
            roots.insert(table_name(row, 0), row.parse(2)?);
        }
        // NOT ENFORCED came with 18.
        let rows = sql
            .query(
                "SELECT cn.nspname, c.relname, pn.nspname, p.relname, k.conname, k.condeferrable, \
                   k.confdeltype, k.confupdtype, \
                   coalesce(pg_catalog.pg_partition_root(c.oid)::oid, c.oid), \
                   coalesce(pg_catalog.pg_partition_root(p.oid)::oid, p.oid), \
                   at.columns, at.parent_columns, at.same_types \
                 FROM pg_catalog.pg_constraint k \
                 JOIN pg_catalog.pg_class c ON c.oid = k.conrelid \
                 JOIN pg_catalog.pg_namespace cn ON cn.oid = c.relnamespace \
                 JOIN pg_catalog.pg_class p ON p.oid = k.confrelid \
                 JOIN pg_catalog.pg_namespace pn ON pn.oid = p.relnamespace \
                 CROSS JOIN LATERAL ( \
                   SELECT string_agg(ca.attname, chr(1) ORDER BY n) AS columns, \
                     string_agg(pa.attname, chr(1) ORDER BY n) AS parent_columns, \
                     bool_and(ca.atttypid = pa.atttypid) \
                       AND NOT coalesce((to_jsonb(k) ->> 'conperiod')::bool, false) AS same_types \
                   FROM ROWS FROM (unnest(k.conkey), unnest(k.confkey)) \
                     WITH ORDINALITY AS u (child, parent, n) \
                   JOIN pg_catalog.pg_attribute ca \
                     ON ca.attrelid = k.conrelid AND ca.attnum = u.child \
                   JOIN pg_catalog.pg_attribute pa \
                     ON pa.attrelid = k.confrelid AND pa.attnum = u.parent) AS at \
                 WHERE k.contype = 'f' AND k.conparentid = 0 AND cn.nspname <> 'farshore' \
                 AND coalesce((pg_catalog.to_jsonb(k) ->> 'conenforced')::bool, true) \
                 ORDER BY 1, 2, 5",
                &[],
            )
            .await?;
        let letter = |row: &Row, i: usize| row.get(i).and_then(|t| t.chars().next()).unwrap_or('a');
        let mut keys = Vec::new();
        for row in &rows {
            let columns = |i: usize| {
                row.get(i).unwrap_or_default().split('\u{1}').map(str::to_owned).collect()
            };
            keys.push(ForeignKey {
                name: row.get(4).unwrap_or_default().to_owned(),
                child: table_name(row, 0),
                parent: table_name(row, 2),
                columns: columns(10),
                parent_columns: columns(11),
                same_types: row.parse_bool(12)?,
                deferrable: row.parse_bool(5)?,
                on_delete: letter(row, 6),
                on_update: letter(row, 7),
                child_root: row.parse(8)?,
                parent_root: row.parse(9)?,
            });
        }
        Ok(ForeignKeys { keys, roots })
    }

    /// Where tables stand when parents come before their children.
    pub fn places(&self) -> Places {
        let mut numbers: HashMap<u32, Option<u32>> = self
            .keys
            .iter()
            .flat_map(|key| [(key.child_root, None), (key.parent_root, None)])
            .collect();
        loop {
            let mut placed = Vec::new();
            for root in numbers.iter().filter(|(_, number)| number.is_none()).map(|(root, _)| *root)
            {
                let mut parents = self
                    .keys
                    .iter()
                    .filter(|key| key.child_root == root && key.parent_root != root)
                    .map(|key| numbers.get(&key.parent_root).copied().flatten());
                let number = parents.try_fold(0, |at, parent| Some(at.max(parent? + 1)));
                placed.extend(number.map(|number| (root, Some(number))));
            }
            if placed.is_empty() {
                break;
            }
            numbers.extend(placed);
        }
        let parents = self.keys.iter().map(|key| key.parent_root).collect();
        Places { roots: self.roots.clone(), numbers, parents }
    }

    fn root(&self, table: &TableName) -> Option<u32> {
        self.roots.get(table).copied()
    }

    /// Keys whose referring table is `table`, or of which it is a partition.
    pub fn of_child<'a>(&'a self, table: &TableName) -> impl Iterator<Item = &'a ForeignKey> {
        let root = self.root(table);
        self.keys.iter().filter(move |key| Some(key.child_root) == root)
    }

    /// Keys that refer to `table`, or to the table of which it is a partition.
    pub fn of_parent<'a>(&'a self, table: &TableName) -> impl Iterator<Item = &'a ForeignKey> {
        let root = self.root(table);
        self.keys.iter().filter(move |key| Some(key.parent_root) == root)
    }

    /// For every table: the tables it refers to, with the key's number. A partitioned table stands
    /// for each of its partitions.
    fn parents(&self, tables: &[TableName]) -> Vec<Vec<(usize, usize)>> {
        let roots: Vec<Option<u32>> = tables.iter().map(|table| self.root(table)).collect();
        let with_root = |root: u32| {
            roots.iter().enumerate().filter(move |(_, r)| **r == Some(root)).map(|(i, _)| i)
        };
        let mut parents = vec![Vec::new(); tables.len()];
        for (number, key) in self.keys.iter().enumerate() {
            for child in with_root(key.child_root) {
                for parent in with_root(key.parent_root) {
                    parents[child].push((parent, number));
                }
            }
        }
        parents
    }

    /// Sets of tables that foreign keys bind together, however indirectly; by table, the number of
    /// its set.
    pub fn bound_together(&self, tables: &[TableName]) -> Vec<usize> {
        let mut set: Vec<usize> = (0..tables.len()).collect();
        fn find(set: &mut [usize], mut i: usize) -> usize {
            while set[i] != i {
                set[i] = set[set[i]];
                i = set[i];
            }
            i
        }
        for (child, parents) in self.parents(tables).iter().enumerate() {
            for (parent, _) in parents {
                let (a, b) = (find(&mut set, child), find(&mut set, *parent));
                set[a] = b;
            }
        }
        (0..tables.len()).map(|i| find(&mut set, i)).collect()
    }

    /// Stages in which `tables` can be copied while all foreign keys hold: what a stage refers to
    /// stands in the stages before it. If there is no such order, the keys that are in the way.
    pub fn copy_order(&self, tables: &[TableName]) -> Result<Vec<Vec<CopyUnit>>, Vec<&ForeignKey>> {
        let parents = self.parents(tables);
        let mut left: BTreeSet<usize> = (0..tables.len()).collect();
        let mut stages = Vec::new();
        while !left.is_empty() {
            let ready: Vec<usize> = left
                .iter()
                .copied()
                .filter(|i| parents[*i].iter().all(|(p, _)| p == i || !left.contains(p)))
                .collect();
            let mut stage = Vec::new();
            for i in &ready {
                let refers_to_itself = parents[*i].iter().any(|(p, _)| p == i);
                stage.push(if refers_to_itself {
                    CopyUnit::Together(vec![*i])
                } else {
                    CopyUnit::Apart(*i)
                });
            }
            if ready.is_empty() {
                for circle in first_circles(&parents, &left) {
                    stage.push(CopyUnit::Together(self.order_in_circle(&parents, &circle)?));
                }
            }
            for unit in &stage {
                match unit {
                    CopyUnit::Apart(i) => drop(left.remove(i)),
                    CopyUnit::Together(all) => left.retain(|i| !all.contains(i)),
                }
            }
            stages.push(stage);
        }
        Ok(stages)
    }

    /// Parents first, as far as keys that cannot be deferred ask for it.
    fn order_in_circle(
        &self,
        parents: &[Vec<(usize, usize)>],
        circle: &BTreeSet<usize>,
    ) -> Result<Vec<usize>, Vec<&ForeignKey>> {
        let strict = |i: usize, left: &BTreeSet<usize>| -> Vec<usize> {
            let binds = |(p, key): &&(usize, usize)| {
                *p != i && left.contains(p) && !self.keys[*key].deferrable
            };
            parents[i].iter().filter(binds).map(|(_, key)| *key).collect()
        };
        let mut left = circle.clone();
        let mut order = Vec::new();
        while !left.is_empty() {
            let Some(next) = left.iter().copied().find(|i| strict(*i, &left).is_empty()) else {
                let keys: BTreeSet<usize> = left.iter().flat_map(|i| strict(*i, &left)).collect();
                return Err(keys.into_iter().map(|key| &self.keys[key]).collect());
            };
            left.remove(&next);
            order.push(next);
        }
        Ok(order)
    }
}

/// The circles among `left` that refer to nothing outside themselves.
fn first_circles(
    parents: &[Vec<(usize, usize)>],
    left: &BTreeSet<usize>,
) -> BTreeSet<BTreeSet<usize>> {
    let reach = |from: usize| {
        let mut seen = HashSet::new();
        let mut next = vec![from];
        while let Some(i) = next.pop() {
            for (parent, _) in &parents[i] {
                if left.contains(parent) && seen.insert(*parent) {
                    next.push(*parent);
                }
            }
        }
        seen
    };
    let reached: HashMap<usize, HashSet<usize>> = left.iter().map(|i| (*i, reach(*i))).collect();
    left.iter()
        .filter(|i| reached[i].iter().all(|j| reached[j].contains(i)))
        .map(|i| reached[i].iter().copied().collect())
        .collect()
}

fn table_name(row: &Row, column: usize) -> TableName {
    TableName {
        schema: row.get(column).unwrap_or_default().to_owned(),
        name: row.get(column + 1).unwrap_or_default().to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use CopyUnit::{Apart, Together};

    fn table(name: &str) -> TableName {
        TableName { schema: "s".into(), name: name.into() }
    }

    /// Keys as `child>parent`, with a `*` when they can be deferred. Tables are single letters; a
    /// digit behind one makes it a partition of it.
    fn keys(texts: &[&str], tables: &[TableName]) -> ForeignKeys {
        let root = |name: &str| name.bytes().next().map_or(0, u32::from);
        let keys = texts.iter().map(|text| {
            let (child, parent) = text.trim_end_matches('*').split_once('>').unwrap();
            ForeignKey {
                name: (*text).to_owned(),
                child: table(child),
                parent: table(parent),
                columns: vec!["c".into()],
                parent_columns: vec!["id".into()],
                same_types: true,
                deferrable: text.ends_with('*'),
                on_delete: 'a',
                on_update: 'a',
                child_root: root(child),
                parent_root: root(parent),
            }
        });
        ForeignKeys {
            keys: keys.collect(),
            roots: tables.iter().map(|t| (t.clone(), root(&t.name))).collect(),
        }
    }

    fn order(names: &[&str], texts: &[&str]) -> Result<Vec<Vec<CopyUnit>>, Vec<String>> {
        let tables: Vec<TableName> = names.iter().map(|name| table(name)).collect();
        let keys = keys(texts, &tables);
        keys.copy_order(&tables).map_err(|keys| keys.iter().map(|k| k.name.clone()).collect())
    }

    #[test]
    fn parents_stand_before_their_children() {
        assert_eq!(order(&["a", "b"], &[]), Ok(vec![vec![Apart(0), Apart(1)]]));
        assert_eq!(
            order(&["a", "b", "c", "d"], &["a>b", "b>c", "d>c", "a>x"]),
            Ok(vec![vec![Apart(2)], vec![Apart(1), Apart(3)], vec![Apart(0)]])
        );
        assert_eq!(
            order(&["a", "b"], &["a>a", "b>a"]),
            Ok(vec![vec![Together(vec![0])], vec![Apart(1)]])
        );
    }

    #[test]
    fn places_put_parents_before_their_children() {
        let tables: Vec<TableName> =
            ["a", "b", "b1", "c", "d", "e", "x", "y", "z"].map(table).into();
        let keys = keys(&["b>a", "b>b", "c>b", "c>a", "x>y", "y>x", "z>x"], &tables);
        let places = keys.places();
        let found: Vec<Place> = tables.iter().map(|table| places.of(table)).collect();
        let in_circle = [Place::InCircle; 3];
        let behind = [0, 1, 1, 2].map(Place::Behind);
        assert_eq!(found, [&behind[..], &[Place::Free; 2], &in_circle].concat());
        let parents: Vec<bool> = tables.iter().map(|table| places.is_parent(table)).collect();
        assert_eq!(parents, [true, true, true, false, false, false, true, true, false]);
    }

    #[test]
    fn circles_are_copied_together_if_a_key_can_wait() {
        assert_eq!(
            order(&["a", "b", "c"], &["a>b", "b>a*", "c>a"]),
            Ok(vec![vec![Together(vec![1, 0])], vec![Apart(2)]])
        );
        assert_eq!(
            order(&["a", "b", "c"], &["a>b", "b>a", "c>a"]),
            Err(vec!["a>b".into(), "b>a".into()])
        );
        // Two circles, one behind the other.
        assert_eq!(
            order(&["a", "b", "c", "d"], &["a>b", "b>a*", "c>d*", "d>c", "c>a"]),
            Ok(vec![vec![Together(vec![1, 0])], vec![Together(vec![2, 3])]])
        );
    }

    #[test]
    fn a_partitioned_table_stands_for_its_partitions() {
        assert_eq!(
            order(&["p1", "p2", "q"], &["p>q", "q>r"]),
            Ok(vec![vec![Apart(2)], vec![Apart(0), Apart(1)]])
        );
        assert_eq!(order(&["p1", "p2"], &["p>p"]), Err(vec!["p>p".into()]));
        assert_eq!(order(&["p1", "p2"], &["p>p*"]), Ok(vec![vec![Together(vec![0, 1])]]));
    }

    #[test]
    fn bound_tables_are_found_through_others() {
        let tables: Vec<TableName> = ["a", "b", "c", "d"].iter().map(|n| table(n)).collect();
        let sets = keys(&["a>b", "c>b"], &tables).bound_together(&tables);
        assert_eq!(sets[0], sets[1]);
        assert_eq!(sets[0], sets[2]);
        assert_ne!(sets[0], sets[3]);
    }
}
