use super::ours::{overlooks_joins, without_writers};
use super::*;
use farshore_pg::Mode;
use farshore_testkit::postgres::{Cluster, Installation};
use tokio::runtime::Runtime;

#[test]
fn patterns_parse_as_sql_names_do() {
    let pattern = |schema: Option<&str>, name: Option<&str>| TablePattern {
        schema: schema.map(str::to_owned),
        name: name.map(str::to_owned),
    };
    for (text, parsed) in [
        ("public.orders", pattern(Some("public"), Some("orders"))),
        ("audit.*", pattern(Some("audit"), None)),
        ("*.*", pattern(None, None)),
        ("\"Odd.Schema\".\"a\"\"b\"", pattern(Some("Odd.Schema"), Some("a\"b"))),
        ("s.\"*\"", pattern(Some("s"), Some("*"))),
    ] {
        assert_eq!(TablePattern::parse(text), Ok(parsed), "{text}");
    }
    for text in ["", "orders", "a.b.c", "*.orders", "a.", ".a", "\"a.b", "\"a\"b.c"] {
        assert!(TablePattern::parse(text).is_err(), "{text}");
    }
}

fn spec(cluster: &Cluster, patterns: &[&str]) -> PublicationSpec {
    let tables = patterns.iter().map(|pattern| TablePattern::parse(pattern).unwrap());
    PublicationSpec {
        name: "p".to_owned(),
        source: Config::parse(&cluster.url("postgres")).unwrap(),
        tables: tables.collect(),
        articles: BTreeMap::new(),
        via_partition_root: false,
        adopt_publication: None,
        adopt_slot: None,
    }
}

/// Makes the publication as configured; its members with their numbers and filters.
async fn members(spec: &PublicationSpec) -> BTreeMap<String, (String, Option<String>)> {
    let mut sql = spec.connect(Mode::Sql).await.unwrap();
    spec.ensure_publication(&mut sql).await.unwrap();
    assert!(spec.is_as_configured(&mut sql, Unfit::Refuse).await.unwrap());
    members_there(&mut sql).await
}

/// The publication's members with their numbers and filters.
async fn members_there(sql: &mut Connection) -> BTreeMap<String, (String, Option<String>)> {
    let rows = sql
        .query(
            "SELECT prrelid::regclass, oid, pg_get_expr(prqual, prrelid) FROM pg_publication_rel",
            &[],
        )
        .await
        .unwrap();
    let text = |row: &Row, column| row.get(column).map(str::to_owned);
    let member = |row: &Row| (text(row, 0).unwrap(), (text(row, 1).unwrap(), text(row, 2)));
    rows.iter().map(member).collect()
}

const INHERITED: &str = "CREATE SCHEMA app; CREATE SCHEMA aside; \
    CREATE TABLE app.parent (id integer PRIMARY KEY); \
    CREATE TABLE aside.child (PRIMARY KEY (id)) INHERITS (app.parent); \
    CREATE UNLOGGED TABLE aside.unlogged () INHERITS (app.parent); \
    CREATE TABLE aside.grandchild (PRIMARY KEY (id)) INHERITS (aside.child); \
    CREATE TABLE app.other (id integer PRIMARY KEY); \
    CREATE TABLE app.root (id integer PRIMARY KEY) PARTITION BY RANGE (id); \
    CREATE TABLE aside.leaf PARTITION OF app.root FOR VALUES FROM (0) TO (9)";

/// 14 lists it once for itself and once for its root.
#[test]
fn a_partition_that_is_published_beside_its_root_has_each_column_once() {
    for major in [14, 15] {
        let installation = Installation::find(major).unwrap();
        let cluster =
            Cluster::builder(&installation).setting("wal_level", "logical").start().unwrap();
        cluster.execute_script(INHERITED).unwrap();
        let spec = spec(&cluster, &["app.root", "aside.leaf", "app.other"]);
        Runtime::new().unwrap().block_on(async {
            let mut sql = spec.connect(Mode::Sql).await.unwrap();
            spec.ensure_publication(&mut sql).await.unwrap();
            let published = spec.published_tables(&mut sql).await.unwrap();
            let columns = published.iter().map(|table| (&*table.table.name, table.columns.len()));
            assert_eq!(columns.collect::<Vec<_>>(), [("other", 1), ("leaf", 1)], "{major}");
        });
    }
}

#[test]
fn tables_that_inherit_are_published_with_what_they_inherit_from() {
    for major in [15, 18] {
        let installation = Installation::find(major).unwrap();
        let cluster =
            Cluster::builder(&installation).setting("wal_level", "logical").start().unwrap();
        cluster.execute_script(INHERITED).unwrap();
        let parent = spec(&cluster, &["app.parent", "app.root"]);
        Runtime::new().unwrap().block_on(async {
            let names = |members: &BTreeMap<String, _>| members.keys().cloned().collect::<Vec<_>>();
            let made = members(&parent).await;
            let family = ["aside.child", "aside.grandchild"];
            assert_eq!(names(&made), ["app.parent", "app.root", family[0], family[1]]);
            let mut sql = parent.connect(Mode::Sql).await.unwrap();
            let wanted = parent.would_publish(&mut sql, Unfit::Refuse).await.unwrap();
            assert_eq!(wanted.listed.len(), 4);

            // An earlier version had the server add what inherits now, and nothing else.
            let earlier = "DROP PUBLICATION farshore_p; DROP TABLE aside.unlogged; \
                CREATE PUBLICATION farshore_p FOR TABLE app.parent, app.root; \
                COMMENT ON PUBLICATION farshore_p IS 'managed by farshore: app.parent, app.root'";
            sql.simple_query(earlier).await.unwrap();
            let before = "SELECT string_agg(oid::text, ' ' ORDER BY oid) FROM pg_publication_rel";
            let numbers = sql.query(before, &[]).await.unwrap()[0].get(0).map(str::to_owned);
            let more = spec(&cluster, &["app.parent", "app.root", "app.other"]);
            let all = members(&more).await;
            let kept = all.iter().filter(|member| member.0 != "app.other");
            let mut kept: Vec<&str> = kept.map(|(_, (number, _))| number.as_str()).collect();
            kept.sort_by_key(|number| number.parse::<u32>().unwrap());
            assert_eq!(Some(kept.join(" ")), numbers);
            assert_eq!(all.len(), 5);

            // A parent of what is a member already joins and leaves by itself.
            let parents = "CREATE TABLE app.top (id integer); \
                ALTER TABLE app.parent INHERIT app.top; \
                CREATE TABLE aside.late (PRIMARY KEY (id)) INHERITS (app.top)";
            sql.simple_query(parents).await.unwrap();
            let top = spec(&cluster, &["app.*"]);
            let with_top = members(&top).await;
            assert_eq!(with_top.len(), 7);
            assert!(all.iter().all(|member| with_top.get(member.0) == Some(member.1)));
            assert_eq!(members(&more).await, all);

            let mut filtered = more.clone();
            for (table, filter) in [("app.parent", "id > 0"), ("aside.grandchild", "id > 5")] {
                let row_filter = Some(filter.to_owned());
                let article = Article { columns: None, row_filter };
                filtered.articles.insert(TableName::parse(table).unwrap(), article);
            }
            let members = members(&filtered).await;
            assert!(members["app.parent"].1.is_some());
            assert_eq!(members["aside.child"].1, members["app.parent"].1);
            assert_ne!(members["aside.grandchild"].1, members["aside.child"].1);
            assert_eq!(members["app.other"], all["app.other"]);
        });
    }
}

#[test]
fn a_named_table_that_was_renamed_holds_up_no_joins() {
    const TABLES: &str = "CREATE SCHEMA s; CREATE TABLE t (i integer PRIMARY KEY); \
        CREATE TABLE s.one (i integer PRIMARY KEY)";
    let filter = Article { columns: None, row_filter: Some("i > 0".to_owned()) };
    let articles = [None, Some((TableName::parse("s.two").unwrap(), filter))];
    for (major, article) in
        [15, 18].into_iter().flat_map(|major| articles.clone().map(|article| (major, article)))
    {
        let installation = Installation::find(major).unwrap();
        let cluster =
            Cluster::builder(&installation).setting("wal_level", "logical").start().unwrap();
        cluster.execute_script(TABLES).unwrap();
        let mut spec = spec(&cluster, &["public.t", "s.*"]);
        Runtime::new().unwrap().block_on(async {
            let whole = members(&spec).await;
            assert_eq!(whole.len(), 2);
            spec.articles.extend(article);
            let mut sql = spec.connect(Mode::Sql).await.unwrap();
            let away = "ALTER TABLE t RENAME TO t_old; DROP TABLE s.one; \
                CREATE TABLE s.one (i integer PRIMARY KEY); \
                CREATE TABLE s.two (i integer PRIMARY KEY)";
            sql.simple_query(away).await.unwrap();
            let told = spec.follow_tables(&mut sql).await.unwrap();
            assert!(told.concat().contains("there is no table public.t"), "{told:?}");
            let now = members_there(&mut sql).await;
            let names: Vec<&str> = now.keys().map(String::as_str).collect();
            assert_eq!(names, ["s.one", "s.two", "t_old"]);
            assert_eq!(now["t_old"], whole["t"]);
            assert_eq!(now["s.two"].1.is_some(), !spec.articles.is_empty());

            // Nothing more is altered while it is away.
            let version = "SELECT xmin, obj_description(oid, 'pg_publication') FROM pg_publication";
            let altered = async |sql: &mut Connection| {
                let rows = sql.query(version, &[]).await.unwrap();
                (rows[0].get(0).map(str::to_owned), rows[0].get(1).map(str::to_owned))
            };
            let before = altered(&mut sql).await;
            spec.follow_tables(&mut sql).await.unwrap();
            assert_eq!(altered(&mut sql).await, before);

            // Back, it is the member that it was.
            sql.simple_query("ALTER TABLE t_old RENAME TO t").await.unwrap();
            let back = members(&spec).await;
            assert_eq!((back.len(), &back["t"]), (3, &whole["t"]));
            assert_eq!((&back["s.one"], &back["s.two"]), (&now["s.one"], &now["s.two"]));

            // What is not named any more leaves.
            sql.simple_query("ALTER TABLE t RENAME TO t_old").await.unwrap();
            spec.follow_tables(&mut sql).await.unwrap();
            assert!(members_there(&mut sql).await.contains_key("t_old"));
            spec.tables.remove(0);
            let left = members(&spec).await;
            assert_eq!(left.keys().collect::<Vec<_>>(), ["s.one", "s.two"]);
        });
    }
}

#[test]
fn versions_that_may_overlook_a_join_are_known() {
    for version in [140_017, 150_012, 160_008, 170_004] {
        assert!(overlooks_joins(version), "{version}");
        assert!(!overlooks_joins(version + 1), "{version}");
    }
    assert!(!overlooks_joins(180_000));
}

#[test]
fn a_table_joins_between_transactions_that_write_to_its_partitions() {
    let installation = Installation::find(15).unwrap();
    let cluster = Cluster::builder(&installation).setting("wal_level", "logical").start().unwrap();
    cluster
        .execute_script(
            "CREATE TABLE t (id integer); \
             CREATE TABLE root (id integer PRIMARY KEY) PARTITION BY RANGE (id); \
             CREATE TABLE leaf PARTITION OF root FOR VALUES FROM (0) TO (9)",
        )
        .unwrap();
    let spec = spec(&cluster, &["public.t"]);
    let joins = ["public.root", "public.t"].map(|table| TableName::parse(table).unwrap());
    let lock = format!("BEGIN; {}; COMMIT", without_writers(&joins.each_ref()));
    Runtime::new().unwrap().block_on(async {
        let mut writer = spec.connect(Mode::Sql).await.unwrap();
        let mut sql = spec.connect(Mode::Sql).await.unwrap();
        writer.simple_query("BEGIN; INSERT INTO leaf VALUES (1)").await.unwrap();
        let found = sql.simple_query(&lock).await.unwrap_err();
        assert_eq!(found.sqlstate(), Some("55P03"), "{found}");
        sql.simple_query("ROLLBACK").await.unwrap();
        writer.simple_query("COMMIT").await.unwrap();
        sql.simple_query(&lock).await.unwrap();
        // What is set for that is set for that alone.
        let rows = sql.query("SELECT current_setting('lock_timeout')", &[]).await.unwrap();
        assert_eq!(rows[0].get(0), Some("0"));
    });
}
