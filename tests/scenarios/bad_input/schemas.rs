//! Tables that cannot be published, or cannot take what is published.

use crate::case::{AS_CHECKED, Case, Then, run_all, start_with};
use anyhow::Result;

const CASES: &[Case] = &[
    Case {
        name: "a view is named",
        spoil: |pair| {
            pair.publish("CREATE VIEW w AS SELECT * FROM t")?;
            pair.site.replace("'public.*'", "'public.*', 'public.w'")
        },
        check: &[
            "publication \"p\": public.w is a view, and views have no changes of their own → Publish the tables behind it: correct `tables` in the site file",
        ],
        run: AS_CHECKED,
        then: Then::Stops,
        mend: |pair| pair.site.replace(", 'public.w'", ""),
    },
    Case {
        name: "a materialized view is named",
        spoil: |pair| {
            pair.publish("CREATE MATERIALIZED VIEW w AS SELECT * FROM t")?;
            pair.site.replace("'public.*'", "'public.*', 'public.w'")
        },
        check: &[
            "publication \"p\": public.w is a view, and views have no changes of their own → Publish the tables behind it: correct `tables` in the site file",
        ],
        run: AS_CHECKED,
        then: Then::Stops,
        mend: |pair| pair.site.replace(", 'public.w'", ""),
    },
    Case {
        name: "an unlogged table is named",
        spoil: |pair| {
            pair.publish("CREATE UNLOGGED TABLE w (id integer PRIMARY KEY)")?;
            pair.site.replace("'public.*'", "'public.*', 'public.w'")
        },
        check: &[
            "publication \"p\": public.w is unlogged, and the log does not have its changes → ALTER TABLE public.w SET LOGGED, or correct `tables` in the site file",
        ],
        run: AS_CHECKED,
        then: Then::Stops,
        mend: |pair| {
            pair.subscriber.execute_script("CREATE TABLE w (id integer PRIMARY KEY)")?;
            pair.publish("ALTER TABLE public.w SET LOGGED")
        },
    },
    Case {
        name: "a table of PostgreSQL's own is named",
        spoil: |pair| pair.site.replace("'public.*'", "'public.*', 'pg_catalog.pg_class'"),
        check: &[
            "publication \"p\": pg_catalog.pg_class belongs to PostgreSQL itself → Correct `tables` in the site file",
        ],
        run: AS_CHECKED,
        then: Then::Stops,
        mend: |pair| pair.site.replace(", 'pg_catalog.pg_class'", ""),
    },
    Case {
        name: "a sequence is named",
        spoil: |pair| {
            pair.publish("CREATE SEQUENCE q")?;
            pair.site.replace("'public.*'", "'public.*', 'public.q'")
        },
        check: &["publication \"p\": public.q is not a table → Correct `tables` in the site file"],
        run: AS_CHECKED,
        then: Then::Stops,
        mend: |pair| pair.site.replace(", 'public.q'", ""),
    },
    Case {
        name: "a view stands in the target table's place",
        spoil: |pair| {
            pair.subscriber.execute_script(
                "ALTER TABLE t RENAME TO behind; CREATE VIEW t AS SELECT * FROM behind",
            )
        },
        check: &[
            "subscription \"s\": public.t on the target is a view, and a table is needed → Rename it, and create a table of that name",
        ],
        run: AS_CHECKED,
        then: Then::Stops,
        mend: |pair| pair.subscriber.execute_script("DROP VIEW t; ALTER TABLE behind RENAME TO t"),
    },
    Case {
        name: "a column of the target that nobody fills",
        spoil: |pair| pair.subscriber.execute_script("ALTER TABLE u ADD COLUMN must text NOT NULL"),
        check: &[
            "subscription \"s\": public.u on the target has columns that are not published, take no NULL and have no default: must → ALTER TABLE public.u ALTER COLUMN must SET DEFAULT …, or DROP NOT NULL",
        ],
        run: AS_CHECKED,
        then: Then::Stops,
        mend: |pair| pair.subscriber.execute_script("ALTER TABLE u DROP COLUMN must"),
    },
    Case {
        name: "a column list of an adopted publication that the target lacks",
        spoil: |pair| {
            pair.publish("CREATE PUBLICATION narrow FOR TABLE t, u, farshore_marks.mark")?;
            pair.subscriber.execute_script("ALTER TABLE t RENAME COLUMN v TO w")?;
            pair.site.replace("tables =", "adopt_publication = \"narrow\"\ntables =")
        },
        check: &[
            "subscription \"s\": table public.t on the target has no writable column v → Add it there, or publish the table without it",
        ],
        run: AS_CHECKED,
        then: Then::Stops,
        mend: |pair| pair.subscriber.execute_script("ALTER TABLE t RENAME COLUMN w TO v"),
    },
    Case {
        name: "a column of the target that cuts spaces off",
        spoil: |pair| {
            pair.subscriber.execute_script("ALTER TABLE t ALTER COLUMN v TYPE varchar(3)")
        },
        check: &[
            "subscription \"s\": column v of public.t is character varying(3) on the target, which cannot hold every value of the publisher's type as it is (spaces at the end of longer values would be cut off, without an error) → Give it the publisher's type (ALTER TABLE public.t ALTER COLUMN v TYPE …), or publish the table without it",
        ],
        run: AS_CHECKED,
        then: Then::Stops,
        mend: |pair| pair.subscriber.execute_script("ALTER TABLE t ALTER COLUMN v TYPE text"),
    },
    Case {
        name: "hostile names that the target lacks",
        spoil: |pair| {
            pair.publish(
                "CREATE SCHEMA \"Robert'); DROP TABLE t;--\"; \
                 CREATE TABLE \"Robert'); DROP TABLE t;--\".\"100%s \"\"x\"\".\\\n$1\" \
                   (\"ид'\" integer PRIMARY KEY, \"--\" text)",
            )?;
            pair.subscriber.execute_script(
                "CREATE SCHEMA \"Robert'); DROP TABLE t;--\"; \
                 CREATE TABLE \"Robert'); DROP TABLE t;--\".\"100%s \"\"x\"\".\\\n$1\" \
                   (\"ид'\" integer PRIMARY KEY)",
            )?;
            pair.site.replace("'public.*'", "'*.*'")
        },
        check: &[
            "subscription \"s\": table \"Robert'); DROP TABLE t;--\".\"100%s \"\"x\"\".\\\n$1\" on the target has no writable column \"--\" → Add it there, or publish the table without it",
        ],
        run: AS_CHECKED,
        then: Then::Stops,
        mend: |pair| {
            pair.subscriber.execute_script(
                "ALTER TABLE \"Robert'); DROP TABLE t;--\".\"100%s \"\"x\"\".\\\n$1\" ADD \"--\" text",
            )
        },
    },
];

#[test]
fn wrong_schemas() -> Result<()> {
    run_all(CASES, start_with)
}
