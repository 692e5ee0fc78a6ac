//! The PostgreSQL publication behind a Farshore publication.

mod columns;
mod labels;
mod members;
mod ours;
mod preflight;
mod user_types;

pub use columns::{AddedColumn, DroppedColumns, GrownTable, OldValue, partition_root};
pub use labels::{EnumLabel, enum_labels};
pub use members::{Wanted, columns_sent};

use crate::CaptureError;
use crate::types::TypeCatalog;
use farshore_model::{UserType, quote_identifier};
use farshore_pg::{Config, Connection, Row, partition_tree};
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet, HashMap};

/// What to publish, as configured.
#[derive(Clone, Debug)]
pub struct PublicationSpec {
    /// Farshore's name of the publication.
    pub name: String,
    /// The publisher.
    pub source: Config,
    /// Table patterns: `schema.table`, `schema.*`, `*.*`.
    pub tables: Vec<TablePattern>,
    /// Row filters and column lists, by table.
    pub articles: BTreeMap<TableName, Article>,
    /// Changes of partitions are published as changes of the table they are partitions of.
    pub via_partition_root: bool,
    /// PostgreSQL publication to use as it is, instead of one of our own.
    pub adopt_publication: Option<String>,
    /// Replication slot to use as it is, instead of one of our own.
    pub adopt_slot: Option<String>,
}

/// What of one table is published.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Article {
    /// Published columns; all when absent.
    pub columns: Option<Vec<String>>,
    /// SQL condition that a row must meet; every row when absent.
    pub row_filter: Option<String>,
}

/// A table's schema and name, unquoted.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct TableName {
    /// Schema.
    pub schema: String,
    /// Table.
    pub name: String,
}

impl std::fmt::Display for TableName {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}.{}", quote_identifier(&self.schema), quote_identifier(&self.name))
    }
}

/// One entry of `tables = […]`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TablePattern {
    /// Schema; any when absent.
    pub schema: Option<String>,
    /// Table; any when absent.
    pub name: Option<String>,
}

impl TablePattern {
    /// Parses `schema.table`, `schema.*` or `*.*`; parts may be quoted as in SQL.
    pub fn parse(text: &str) -> Result<TablePattern, String> {
        let parts = split_qualified(text)?;
        let [schema, name] = <[Option<String>; 2]>::try_from(parts)
            .map_err(|_| format!("\"{text}\" is not of the form schema.table, schema.* or *.*"))?;
        if schema.is_none() && name.is_some() {
            return Err(format!("\"{text}\": name the schema too, or use *.*"));
        }
        Ok(TablePattern { schema, name })
    }

    /// Whether it names `table`.
    pub fn matches(&self, table: &TableName) -> bool {
        self.schema.as_ref().is_none_or(|schema| *schema == table.schema)
            && self.name.as_ref().is_none_or(|name| *name == table.name)
    }
}

impl TableName {
    /// Parses `schema.table`; parts may be quoted as in SQL.
    pub fn parse(text: &str) -> Result<TableName, String> {
        match TablePattern::parse(text)? {
            TablePattern { schema: Some(schema), name: Some(name) } => {
                Ok(TableName { schema, name })
            }
            _ => Err(format!("\"{text}\" must name one table, schema.table")),
        }
    }
}

/// Splits at dots outside quotes; `*` becomes `None`.
fn split_qualified(text: &str) -> Result<Vec<Option<String>>, String> {
    let mut parts = Vec::new();
    let mut rest = text;
    loop {
        let part;
        if let Some(quoted) = rest.strip_prefix('"') {
            let mut value = String::new();
            let mut chars = quoted.char_indices().peekable();
            let end = loop {
                match chars.next() {
                    None => return Err(format!("\"{text}\" has a quote that is not closed")),
                    Some((_, '"')) if chars.peek().is_some_and(|(_, c)| *c == '"') => {
                        chars.next();
                        value.push('"');
                    }
                    Some((at, '"')) => break at + 1,
                    Some((_, c)) => value.push(c),
                }
            };
            part = Some(value);
            rest = &quoted[end..];
        } else {
            let end = rest.find('.').unwrap_or(rest.len());
            let word = &rest[..end];
            if word.is_empty() {
                return Err(format!("\"{text}\" has an empty part"));
            }
            part = (word != "*").then(|| word.to_owned());
            rest = &rest[end..];
        }
        parts.push(part);
        match rest.strip_prefix('.') {
            Some(after) => rest = after,
            None if rest.is_empty() => return Ok(parts),
            None => return Err(format!("\"{text}\" has text after a closing quote")),
        }
    }
}

/// A published table as the publisher describes it now.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PublishedTable {
    /// Its OID on the publisher.
    pub oid: u32,
    /// Its name.
    pub table: TableName,
    /// Published columns in table order.
    pub columns: Vec<PublishedColumn>,
    /// What their types are made of, where those are not PostgreSQL's own; sorted by OID.
    #[serde(with = "user_types")]
    pub types: Vec<UserType>,
    /// The labels of the enums among those. Empty where an earlier version was asked.
    #[serde(default)]
    pub labels: Vec<EnumLabel>,
    /// Row filter as SQL, if any.
    pub row_filter: Option<String>,
    /// Names this membership in the publication: another number after the table has left and come
    /// back, or after its filter or columns were changed. Zero where the publication does not list
    /// tables one by one.
    pub membership: u32,
    /// The memberships of partitioned tables above it, which publish it too.
    pub memberships_above: Vec<u32>,
    /// For each of those a number that stands for how it is attached below that table: another one
    /// after it, or what it is attached to, was detached and attached again. Empty where an earlier
    /// version was asked.
    #[serde(default)]
    pub attached_above: Vec<u32>,
    /// The file the table is kept in: another one after anything that rewrites or empties it
    /// (TRUNCATE, VACUUM FULL, CLUSTER, some ALTER TABLE). For a partitioned table a number that
    /// stands for the files of all its partitions.
    pub file_node: u32,
    /// Blocks in the main fork, where it was [measured](crate::snapshot::SnapshotConnection::tables);
    /// else zero.
    pub blocks: u64,
    /// Bytes with TOAST and without indexes, where it was measured; else zero.
    pub bytes: u64,
    /// No binary value of a published column names something of this server by its OID.
    pub binary_safe: bool,
    /// Every published column has a binary form.
    pub binary_copy: bool,
    /// The table is partitioned itself (published through its root).
    pub partitioned: bool,
    /// A generated column that tells rows apart, and is not sent: the others may not do it alone.
    #[serde(default)]
    pub unsent_key: Option<String>,
    /// Not every update of it comes, so a row may be elsewhere in the table without a word in the
    /// log: updates are not published, or neither are inserts and deletes.
    #[serde(default)]
    pub updates_untold: bool,
    /// The table is partitioned, and a partition whose rows come through it is identified by other
    /// columns: an update may change the key without a word of the old one.
    #[serde(default)]
    pub old_keys_untold: bool,
}

/// A published column as the publisher describes it now.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PublishedColumn {
    /// Name.
    pub name: String,
    /// Type OID on the publisher.
    pub type_oid: u32,
    /// `atttypmod`, -1 when the type has none.
    pub type_modifier: i32,
    /// `attnum`: another one after it was dropped and added again. Absent where an earlier version
    /// was asked.
    #[serde(default)]
    pub number: Option<i16>,
}

impl PublishedTable {
    /// How it is attached below the table which has this membership; `None` where it is not below
    /// it, or that is not known.
    pub fn attached_by(&self, membership: u32) -> Option<u32> {
        let at = self.memberships_above.iter().position(|above| *above == membership)?;
        self.attached_above.get(at).copied()
    }
}

/// SQL of [`PublishedTable::memberships_above`] with [`PublishedTable::attached_above`], of a row `c`
/// of `pg_class`; of the rows `r` of `pg_publication_rel` with which this condition holds, and all rows
/// of `pg_inherits`. A partition that was detached keeps its OID, and the membership of what it is
/// attached to again: what tells is the transaction that wrote its row of `pg_inherits`, which nothing
/// writes but attaching and detaching. A physical copy of the server says the same. See
/// [`memberships_and_attached_above`].
pub fn above_sql(of_publication: &str) -> String {
    format!(
        "CASE WHEN c.relispartition THEN \
         (SELECT string_agg(concat(r.oid, ':', coalesce(\
            (SELECT hashtext(string_agg(concat(i.inhrelid, ' ', i.xmin), ' ' \
               ORDER BY b.level))::bigint & 4294967295 \
             FROM pg_partition_ancestors(c.oid) WITH ORDINALITY b (relid, level) \
               JOIN pg_inherits i ON i.inhrelid = b.relid WHERE b.level < a.level), 0)), \
            ',' ORDER BY r.oid) \
          FROM pg_partition_ancestors(c.oid) WITH ORDINALITY a (relid, level) \
            JOIN pg_publication_rel r ON r.prrelid = a.relid AND {of_publication} \
          WHERE a.relid <> c.oid) END"
    )
}

/// [`PublishedTable::memberships_above`] and [`PublishedTable::attached_above`] as [`above_sql`] says
/// them.
pub fn memberships_and_attached_above(said: Option<&str>) -> (Vec<u32>, Vec<u32>) {
    let pairs = said.into_iter().flat_map(|text| text.split(','));
    pairs
        .filter_map(|pair| pair.split_once(':'))
        .filter_map(|(oid, how)| oid.parse::<u32>().ok().zip(how.parse::<u32>().ok()))
        .unzip()
}

/// SQL of [`PublishedTable::file_node`], of a row of `pg_class`. The files are those of now, whatever
/// snapshot the question is asked in.
pub(crate) fn file_node(class: &str) -> String {
    format!(
        "CASE {class}.relkind WHEN 'p' THEN (SELECT pg_catalog.hashtext(pg_catalog.string_agg( \
             pg_catalog.concat(part.relid, ':', pg_catalog.pg_relation_filenode(part.relid)), ' ' \
             ORDER BY part.relid))::bigint & 4294967295 FROM {} part) \
           ELSE coalesce(pg_catalog.pg_relation_filenode({class}.oid), 0)::bigint END",
        partition_tree(&format!("{class}.oid"))
    )
}

/// SQL of the names of the columns by which rows of a row of `pg_class` are identified in the log;
/// none where they are identified as a whole, or not at all.
fn identity_key(class: &str) -> String {
    format!(
        "ARRAY(SELECT a.attname FROM pg_index i JOIN pg_attribute a ON a.attrelid = i.indrelid \
           AND a.attnum = ANY ((i.indkey::int2[])[0:i.indnkeyatts - 1]) \
         WHERE i.indrelid = {class}.oid AND i.indisvalid AND i.indimmediate AND \
           CASE {class}.relreplident WHEN 'd' THEN i.indisprimary WHEN 'i' THEN i.indisreplident \
           ELSE false END)"
    )
}

/// The schemas that `farshore commission` makes for a moment and removes again, as a regular
/// expression: what is measured there is nobody's data.
pub const SCRATCH_SCHEMAS: &str = "^farshore_commission_[0-9]+$";

/// What is done about a configured table that cannot be published.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Unfit {
    /// Nothing is published.
    Refuse,
    /// The others are.
    LeaveOut,
}

/// Tables that are to be published, and what of each.
pub type ToPublish = BTreeMap<TableName, Article>;

/// What the patterns come to.
struct Chosen {
    tables: ToPublish,
    /// What our role may not publish.
    may_not: BTreeSet<TableName>,
    /// What is left out, and why, for a person.
    told: Vec<String>,
    /// Each pattern matches something.
    all_match: bool,
}

/// The first few of many names.
fn some_of(names: &BTreeSet<TableName>) -> String {
    const SHOWN: usize = 5;
    let mut shown: Vec<String> = names.iter().take(SHOWN).map(TableName::to_string).collect();
    if names.len() > SHOWN {
        shown.push(format!("{} more", names.len() - SHOWN));
    }
    shown.join(", ")
}

impl PublicationSpec {
    /// The PostgreSQL publication's name.
    pub fn publication_name(&self) -> String {
        self.adopt_publication.clone().unwrap_or_else(|| format!("farshore_{}", self.name))
    }

    /// The replication slot's name (slots allow only lower-case letters, digits, underscores).
    pub fn slot_name(&self) -> String {
        self.adopt_slot.clone().unwrap_or_else(|| {
            let safe: String = self
                .name
                .chars()
                .map(|c| if c.is_ascii_lowercase() || c.is_ascii_digit() { c } else { '_' })
                .collect();
            format!("farshore_{safe}")
        })
    }

    pub(crate) fn publisher_error(&self, error: farshore_pg::Error) -> CaptureError {
        CaptureError::Publisher { server: self.source.redacted(), error }
    }

    /// An SQL connection to the publisher.
    pub async fn connect(&self, mode: farshore_pg::Mode) -> Result<Connection, CaptureError> {
        let config = self.source.clone().with_application_name(&format!("farshore {}", self.name));
        let connected = async {
            let mut connection = Connection::connect(&config, mode).await?;
            // Limits of the role's or the database's are for other sessions: a slot waits for
            // every transaction that is under way.
            if let Some(sql) = farshore_pg::no_timeouts_at_once(connection.server_version()) {
                connection.simple_query(sql).await?;
            }
            Ok(connection)
        };
        connected.await.map_err(|error| self.publisher_error(error))
    }

    /// An SQL connection on which a question that a lock on somebody's table keeps waiting is given
    /// up after a second, with a transient error: definitions of a table that is being changed can
    /// be had when it has been changed, and other tables' rows are not to wait for that.
    pub async fn connect_to_ask(&self) -> Result<Connection, CaptureError> {
        let mut sql = self.connect(farshore_pg::Mode::Sql).await?;
        let set = sql.simple_query("SET lock_timeout = '1s'").await;
        set.map_err(|error| self.publisher_error(error))?;
        Ok(sql)
    }

    /// Tables that the patterns name on the publisher now, and those that inherit from them; where
    /// others are left out, those that can be published.
    pub async fn expand_tables(
        &self,
        sql: &mut Connection,
        unfit: Unfit,
    ) -> Result<ToPublish, CaptureError> {
        self.choose(sql, unfit).await.map(|chosen| chosen.tables)
    }

    /// What there is on the publisher that our own publication should publish, whether it may or not.
    pub(crate) async fn tables_wanted(
        &self,
        sql: &mut Connection,
    ) -> Result<BTreeSet<TableName>, CaptureError> {
        let Chosen { tables, mut may_not, .. } = self.choose(sql, Unfit::LeaveOut).await?;
        may_not.extend(tables.into_keys());
        Ok(may_not)
    }

    async fn choose(&self, sql: &mut Connection, unfit: Unfit) -> Result<Chosen, CaptureError> {
        let rows = sql
            .query(
                "SELECT n.nspname, c.relname, EXISTS (SELECT 1 FROM pg_depend d \
                   WHERE d.classid = 'pg_class'::regclass AND d.objid = c.oid \
                   AND d.deptype = 'e'), \
                   pg_has_role(c.relowner, 'USAGE') AND has_schema_privilege(n.oid, 'USAGE') OR EXISTS (SELECT FROM pg_publication p \
                     JOIN pg_publication_rel r ON r.prpubid = p.oid \
                     WHERE p.pubname = $1 AND r.prrelid = c.oid) \
                 FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace \
                 WHERE c.relkind IN ('r', 'p') AND c.relpersistence = 'p' \
                 AND n.nspname !~ '^pg_' AND n.nspname NOT IN ('information_schema', 'farshore') \
                 AND n.nspname !~ $2 ORDER BY 1, 2",
                &[Some(&self.publication_name()), Some(SCRATCH_SCHEMAS)],
            )
            .await
            .map_err(|error| self.publisher_error(error))?;
        let present: Vec<(TableName, bool, bool)> = rows
            .iter()
            .map(|row| {
                let name = TableName {
                    schema: row.get(0).unwrap_or_default().to_owned(),
                    name: row.get(1).unwrap_or_default().to_owned(),
                };
                (name, row.get(2) == Some("t"), row.get(3) == Some("t"))
            })
            .collect();
        let mut chosen = ToPublish::new();
        let (mut may_not, mut told, mut all_match) = (BTreeSet::new(), Vec::new(), true);
        for pattern in &self.tables {
            let before = chosen.len();
            let mut matched = false;
            for (table, of_extension, may) in &present {
                // What an extension fills is taken when it is named, not by a wildcard.
                if *of_extension && pattern.name.is_none() {
                    continue;
                }
                if !pattern.matches(table) {
                    continue;
                }
                matched = true;
                if *may || unfit == Unfit::Refuse {
                    let article = self.articles.get(table).cloned().unwrap_or_default();
                    chosen.insert(table.clone(), article);
                } else {
                    may_not.insert(table.clone());
                }
            }
            if !matched && chosen.len() == before {
                let missing = self.no_match(sql, pattern).await?;
                match unfit {
                    // What will be made there joins by itself.
                    Unfit::Refuse if self.may_come_to_match(sql, pattern).await? => {}
                    Unfit::Refuse => return Err(missing),
                    Unfit::LeaveOut => {
                        all_match = false;
                        told.push(missing.to_string());
                    }
                }
            }
        }
        // Who names a table means its rows, and those of tables that inherit from it are among them,
        // as in any statement. They are published as themselves, since that is how their changes are
        // logged; of each as much as of what it inherits from.
        let heirs = self.heirs(sql).await?;
        if !heirs.is_empty() {
            let rights: HashMap<&TableName, bool> =
                present.iter().map(|(table, _, may)| (table, *may)).collect();
            // One that was made since its parent was published is not: it may have no identity, and
            // then the publisher would let nobody change its rows any more.
            let members_now = match unfit {
                Unfit::Refuse => BTreeSet::new(),
                Unfit::LeaveOut => self.members_now(sql).await?,
            };
            let parent_is_member = |table: &TableName| {
                heirs.iter().any(|(heir, parent)| heir == table && members_now.contains(parent))
            };
            for (table, article) in self.with_heirs(&chosen, &heirs) {
                let is_named = chosen.contains_key(&table);
                if !is_named && !members_now.contains(&table) && parent_is_member(&table) {
                    continue;
                }
                match rights.get(&table) {
                    Some(may) if *may || unfit == Unfit::Refuse => {
                        chosen.insert(table, article);
                    }
                    Some(_) => {
                        may_not.insert(table);
                    }
                    // Another server's, or unlogged: it has no changes in this log.
                    None => {}
                }
            }
        }
        for table in self.articles.keys() {
            if !chosen.contains_key(table) && unfit == Unfit::Refuse {
                return Err(CaptureError::Setup(format!(
                    "publication \"{}\": article {table} is not among its tables. Add it to \
                     `tables`, or remove the article",
                    self.name
                )));
            }
        }
        for (table, above) in self.articles_without_effect(&chosen, sql).await? {
            let why = format!(
                "publication \"{}\": article {table} would have no effect: its rows are published \
                 as those of {above} (publish_via_partition_root), and by the article of that alone. \
                 Write it for {above}, or leave it out",
                self.name
            );
            match unfit {
                Unfit::Refuse => return Err(CaptureError::Setup(why)),
                Unfit::LeaveOut => told.push(why),
            }
        }
        if !may_not.is_empty() {
            told.push(format!(
                "publication \"{}\": its role does not own {}, so it cannot publish what is written \
                 there. `farshore check` says how to let it",
                self.name,
                some_of(&may_not),
            ));
        }
        Ok(Chosen { tables: chosen, may_not, told, all_match })
    }

    /// These tables with all that inherit from them, as `heirs` says: which from which.
    fn with_heirs(&self, tables: &ToPublish, heirs: &[(TableName, TableName)]) -> ToPublish {
        let mut all = tables.clone();
        loop {
            let before = all.len();
            for (table, parent) in heirs {
                if let (Some(article), false) = (all.get(parent), all.contains_key(table)) {
                    let article = self.articles.get(table).unwrap_or(article).clone();
                    all.insert(table.clone(), article);
                }
            }
            if all.len() == before {
                return all;
            }
        }
    }

    /// Tables that inherit, and what they inherit from, without partitions: a publication has those
    /// with what they are partitions of.
    async fn heirs(
        &self,
        sql: &mut Connection,
    ) -> Result<Vec<(TableName, TableName)>, CaptureError> {
        let rows = sql
            .query(
                "SELECT n.nspname, c.relname, pn.nspname, p.relname FROM pg_inherits i \
                 JOIN pg_class c ON c.oid = i.inhrelid AND NOT c.relispartition \
                 JOIN pg_namespace n ON n.oid = c.relnamespace \
                 JOIN pg_class p ON p.oid = i.inhparent \
                 JOIN pg_namespace pn ON pn.oid = p.relnamespace ORDER BY 1, 2, i.inhseqno",
                &[],
            )
            .await
            .map_err(|error| self.publisher_error(error))?;
        let name = |row: &Row, column: usize| TableName {
            schema: row.get(column).unwrap_or_default().to_owned(),
            name: row.get(column + 1).unwrap_or_default().to_owned(),
        };
        Ok(rows.iter().map(|row| (name(row, 0), name(row, 2))).collect())
    }

    /// The published tables as the publisher describes them in `sql`'s snapshot, without their
    /// sizes: those have to wait while somebody has a table for himself, and this is asked in the
    /// middle of the stream. A publication of all tables has those in which a publisher that is a
    /// target itself keeps its progress: they are of that server alone, and not carried.
    pub async fn published_tables(
        &self,
        sql: &mut Connection,
    ) -> Result<Vec<PublishedTable>, CaptureError> {
        // Column lists and row filters came with 15.
        let (columns, filter) = if sql.server_version() >= 150_000 {
            ("p.attnames", "p.rowfilter")
        } else {
            ("NULL::name[]", "NULL::text")
        };
        // Generated columns can be published since 18: all stored ones, or those of a column list.
        let (listed, with_stored) = if sql.server_version() >= 180_000 {
            ("m.prattrs", "pub.pubgencols = 's'")
        } else {
            ("NULL::int2vector", "false")
        };
        // On 14 the view has a partition twice that is a member beside its root.
        // Materialized, or the view makes its list of columns anew for every column that is compared
        // with it: on 18 that is cubic in a table's columns, of which there may be 1,600. And what is
        // asked of a table would be asked for each of its columns.
        let text = format!(
            "WITH p AS MATERIALIZED (SELECT DISTINCT ON (schemaname, tablename) * \
               FROM pg_publication_tables WHERE pubname = $1 AND schemaname <> 'farshore'), \
             t AS MATERIALIZED (SELECT c.oid, p.schemaname, p.tablename, {filter} AS filter, \
               c.relkind = 'p' AS partitioned, {node} AS node, \
               coalesce(m.oid, 0) AS membership, \
               {above} AS above, \
               (SELECT g.attname FROM pg_index i JOIN pg_attribute g ON g.attrelid = c.oid \
                  AND g.attnum = ANY ((i.indkey::int2[])[0:i.indnkeyatts - 1]) \
                WHERE i.indrelid = c.oid AND g.attgenerated <> '' AND \
                  CASE c.relreplident WHEN 'd' THEN i.indisprimary \
                  WHEN 'i' THEN i.indisreplident ELSE false END LIMIT 1) AS unsent_key, \
               NOT (pub.pubupdate AND (pub.pubinsert OR pub.pubdelete)) AS updates_untold, \
               c.relkind = 'p' AND EXISTS (SELECT FROM {below} part \
                 JOIN pg_class leaf ON leaf.oid = part.relid AND leaf.relkind = 'r' \
                 WHERE leaf.relreplident <> 'f' AND NOT {root_key} <@ {leaf_key}) AS old_keys_untold, \
               {columns} AS columns, {listed} AS listed, {with_stored} AS with_stored \
             FROM p \
             JOIN pg_namespace n ON n.nspname = p.schemaname \
             JOIN pg_class c ON c.relnamespace = n.oid AND c.relname = p.tablename \
             JOIN pg_publication pub ON pub.pubname = $1 \
             LEFT JOIN pg_publication_rel m ON m.prrelid = c.oid AND m.prpubid = pub.oid) \
             SELECT t.oid, t.schemaname, t.tablename, t.filter, t.partitioned, a.attname, \
               a.atttypid, a.atttypmod, t.node, t.membership, t.above, t.unsent_key, \
               t.updates_untold, t.old_keys_untold, a.attnum \
             FROM t LEFT JOIN pg_attribute a ON a.attrelid = t.oid AND a.attnum > 0 \
               AND NOT a.attisdropped \
               AND (a.attgenerated = '' OR a.attnum = ANY (t.listed) \
                 OR a.attgenerated = 's' AND t.with_stored) \
               AND (t.columns IS NULL OR a.attname = ANY (t.columns)) \
             ORDER BY t.schemaname, t.tablename, a.attnum",
            node = file_node("c"),
            below = partition_tree("c.oid"),
            root_key = identity_key("c"),
            leaf_key = identity_key("leaf"),
            above = above_sql("r.prpubid = pub.oid")
        );
        let rows = sql
            .query(&text, &[Some(&self.publication_name())])
            .await
            .map_err(|error| self.publisher_error(error))?;
        let mut tables: Vec<PublishedTable> = Vec::new();
        for row in &rows {
            let parse = |error| self.publisher_error(error);
            let oid: u32 = row.parse(0).map_err(parse)?;
            if tables.last().is_none_or(|table| table.oid != oid) {
                let (memberships_above, attached_above) =
                    memberships_and_attached_above(row.get(10));
                let own: u32 = row.parse(9).map_err(parse)?;
                let above = memberships_above.first().copied().unwrap_or(0);
                tables.push(PublishedTable {
                    oid,
                    table: TableName {
                        schema: row.get(1).unwrap_or_default().to_owned(),
                        name: row.get(2).unwrap_or_default().to_owned(),
                    },
                    columns: Vec::new(),
                    row_filter: row.get(3).map(str::to_owned),
                    partitioned: row.get(4) == Some("t"),
                    file_node: row.parse(8).map_err(parse)?,
                    membership: if own == 0 { above } else { own },
                    memberships_above,
                    attached_above,
                    blocks: 0,
                    bytes: 0,
                    types: Vec::new(),
                    labels: Vec::new(),
                    binary_safe: true,
                    binary_copy: true,
                    unsent_key: row.get(11).map(str::to_owned),
                    updates_untold: row.get(12) == Some("t"),
                    old_keys_untold: row.get(13) == Some("t"),
                });
            }
            let Some(table) = tables.last_mut() else { continue };
            if let Some(column) = row.get(5) {
                table.columns.push(PublishedColumn {
                    name: column.to_owned(),
                    type_oid: row.parse(6).map_err(parse)?,
                    type_modifier: row.parse(7).map_err(parse)?,
                    number: Some(row.parse(14).map_err(parse)?),
                });
            }
        }
        let mut catalog = TypeCatalog::default();
        let types = tables.iter().flat_map(|table| &table.columns).map(|column| column.type_oid);
        let described = catalog.describe(sql, types).await;
        described.map_err(|error| self.publisher_error(error))?;
        for table in &mut tables {
            let is_sent = |name: &String| table.columns.iter().any(|column| column.name == *name);
            table.unsent_key = table.unsent_key.take().filter(|name| !is_sent(name));
            let types = || table.columns.iter().map(|column| column.type_oid);
            table.binary_safe = types().all(|oid| catalog.travels_in_binary(oid));
            table.binary_copy = types().all(|oid| catalog.has_binary_form(oid));
            table.types = catalog.closure(types());
        }
        let labels = enum_labels(sql, tables.iter().flat_map(|table| &table.types)).await;
        let labels = labels.map_err(|error| self.publisher_error(error))?;
        for table in &mut tables {
            let is_used = |oid: u32| table.types.iter().any(|known| known.oid == oid);
            table.labels = labels.iter().filter(|label| is_used(label.type_oid)).cloned().collect();
        }
        Ok(tables)
    }
}

struct TablePatternDisplay<'a>(&'a TablePattern);

impl std::fmt::Display for TablePatternDisplay<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let part = |p: &Option<String>| p.as_deref().map_or("*".to_owned(), quote_identifier);
        write!(f, "{}.{}", part(&self.0.schema), part(&self.0.name))
    }
}

#[cfg(test)]
mod tests;
