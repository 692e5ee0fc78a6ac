//! Input that is wrong before the node starts.

use crate::case::{AS_CHECKED, Case, Then, as_plain, pair, run_all, start_with};
use anyhow::Result;
use farshore_testkit::postgres::{Cluster, Installation, StopMode};
use farshore_tests::{DATABASE, Pair, subscriber_cluster};

const AT_THE_PUBLISHER: &[Case] = &[
    Case {
        name: "wal_level",
        spoil: |pair| {
            pair.publisher.connect()?.batch_execute("ALTER SYSTEM SET wal_level = replica")?;
            pair.publisher.restart()
        },
        check: &[
            "publication \"p\": wal_level = replica on the publisher → ALTER SYSTEM SET wal_level = logical, and restart that server",
        ],
        run: AS_CHECKED,
        then: Then::Stops,
        mend: |pair| {
            pair.publisher.connect()?.batch_execute("ALTER SYSTEM RESET wal_level")?;
            pair.publisher.restart()
        },
    },
    Case {
        name: "no such table on the publisher",
        spoil: |pair| pair.site.replace("'public.*'", "'public.*', 'public.nope'"),
        check: &[
            "publication \"p\": there is no table public.nope on the publisher → Create it, or correct `tables` in the site file",
        ],
        run: AS_CHECKED,
        then: Then::Stops,
        mend: |pair| pair.site.replace(", 'public.nope'", ""),
    },
    Case {
        name: "a pattern that matches nothing",
        spoil: |pair| pair.site.replace("'public.*'", "'public.*', '\"No\".*'"),
        check: &[
            "publication \"p\": no table on the publisher matches \"\"No\".*\" → Create one, or correct `tables` in the site file",
        ],
        run: AS_CHECKED,
        then: Then::Stops,
        mend: |pair| pair.site.replace(", '\"No\".*'", ""),
    },
    Case {
        name: "an article that is not published",
        spoil: |pair| {
            pair.site.replace(
                "[subscription.s]",
                "[publication.p.article.\"x.y\"]\nwhere = \"true\"\n[subscription.s]",
            )
        },
        check: &[
            "publication \"p\": article x.y is not among its tables → Add it to `tables`, or remove the article",
        ],
        run: AS_CHECKED,
        then: Then::Stops,
        mend: |pair| pair.site.replace("[publication.p.article.\"x.y\"]\nwhere = \"true\"\n", ""),
    },
    Case {
        name: "an article of a partition whose rows are published as its root's",
        spoil: |pair| {
            pair.on_both(
                "CREATE TABLE pr (id integer PRIMARY KEY, v text) PARTITION BY RANGE (id); \
                 CREATE TABLE pr_a PARTITION OF pr FOR VALUES FROM (0) TO (100)",
            )?;
            pair.site.replace(
                "[subscription.s]",
                "publish_via_partition_root = true\n\
                 [publication.p.article.\"public.pr_a\"]\nwhere = \"id > 1\"\n[subscription.s]",
            )
        },
        check: &[
            "publication \"p\": article public.pr_a would have no effect: its rows are published as those of public.pr (publish_via_partition_root), and by the article of that alone → Write it for public.pr, or leave it out",
        ],
        run: AS_CHECKED,
        then: Then::Stops,
        mend: |pair| pair.site.replace("article.\"public.pr_a\"", "article.\"public.pr\""),
    },
    Case {
        name: "a row filter that is no SQL",
        spoil: |pair| {
            pair.site.replace(
                "[subscription.s]",
                "[publication.p.article.\"public.t\"]\nwhere = \"id >\"\n[subscription.s]",
            )
        },
        check: &[
            "publication \"p\": PUBLISHER cannot publish public.t WHERE (id >): ERROR 42601: syntax error at or near \")\" → Correct its tables and articles in the site file",
        ],
        run: AS_CHECKED,
        then: Then::Stops,
        mend: |pair| {
            pair.site.replace("[publication.p.article.\"public.t\"]\nwhere = \"id >\"\n", "")
        },
    },
    Case {
        name: "a column that is not there",
        spoil: |pair| {
            pair.site.replace(
                "[subscription.s]",
                "[publication.p.article.\"public.t\"]\ncolumns = [\"id\", \"nope\"]\n[subscription.s]",
            )
        },
        check: &[
            "publication \"p\": PUBLISHER cannot publish public.t (id, nope): ERROR 42703: column \"nope\" of relation \"t\" does not exist → Correct its tables and articles in the site file",
        ],
        run: AS_CHECKED,
        then: Then::Stops,
        mend: |pair| {
            let article = "[publication.p.article.\"public.t\"]\ncolumns = [\"id\", \"nope\"]\n";
            pair.site.replace(article, "")
        },
    },
    Case {
        name: "no REPLICATION",
        spoil: |pair| {
            pair.publish(
                "CREATE ROLE plain LOGIN; GRANT CREATE ON DATABASE postgres TO plain; \
                 ALTER TABLE t OWNER TO plain; ALTER TABLE u OWNER TO plain; \
                 ALTER SCHEMA farshore_marks OWNER TO plain; ALTER TABLE farshore_marks.mark OWNER TO plain",
            )?;
            as_plain(pair, true)
        },
        check: &[
            "publication \"p\": role plain may not replicate: FATAL 42501: must be superuser or replication role to start walsender → ALTER ROLE plain REPLICATION (on Amazon RDS: GRANT rds_replication TO plain)",
        ],
        run: AS_CHECKED,
        then: Then::Stops,
        mend: |pair| pair.publish("ALTER ROLE plain REPLICATION"),
    },
    Case {
        name: "no rights on the tables",
        spoil: |pair| {
            pair.publish("CREATE ROLE plain LOGIN REPLICATION")?;
            as_plain(pair, true)
        },
        check: &[
            "publication \"p\": role plain may not create publication farshore_p in database postgres → GRANT CREATE ON DATABASE postgres TO plain; or let the tables' owner CREATE PUBLICATION, and set adopt_publication to its name",
            "publication \"p\": role plain may not look into schema farshore_marks, where farshore_marks.mark is → GRANT USAGE ON SCHEMA farshore_marks TO plain",
            "publication \"p\": role plain may not read public.t, as the initial copy has to → GRANT SELECT ON public.t TO plain",
            "publication \"p\": role plain does not own public.t, so it cannot publish it → ALTER TABLE public.t OWNER TO plain, or to a role that plain is one of; or let postgres CREATE PUBLICATION, and set adopt_publication to its name",
            "publication \"p\": role plain may not read public.u, as the initial copy has to → GRANT SELECT ON public.u TO plain",
            "publication \"p\": role plain does not own public.u, so it cannot publish it → ALTER TABLE public.u OWNER TO plain, or to a role that plain is one of; or let postgres CREATE PUBLICATION, and set adopt_publication to its name",
        ],
        run: AS_CHECKED,
        then: Then::Stops,
        mend: |pair| {
            pair.publish(
                "GRANT CREATE ON DATABASE postgres TO plain; ALTER TABLE t OWNER TO plain; \
                 ALTER TABLE u OWNER TO plain; ALTER SCHEMA farshore_marks OWNER TO plain; \
                 ALTER TABLE farshore_marks.mark OWNER TO plain",
            )
        },
    },
    Case {
        name: "no such role",
        spoil: |pair| as_plain(pair, true),
        check: &[
            "publication \"p\": publisher PUBLISHER: authentication with PUBLISHER failed: FATAL 28000: role \"plain\" does not exist → Create the role there (or let it log in: ALTER ROLE … LOGIN), or correct `source`; or let it in with a line in pg_hba.conf",
        ],
        run: AS_CHECKED,
        then: Then::Stops,
        mend: |pair| pair.publish("CREATE ROLE plain LOGIN SUPERUSER"),
    },
    Case {
        name: "no such database",
        spoil: |pair| {
            let url = pair.publisher.url(DATABASE);
            pair.site.replace(&url, &pair.publisher.url("nope"))
        },
        check: &[
            "publication \"p\": publisher postgres://postgres@PUBLISHER_ADDRESS/nope: FATAL 3D000: database \"nope\" does not exist → Create the database, or correct `source`",
        ],
        run: AS_CHECKED,
        then: Then::Stops,
        mend: |pair| {
            let url = pair.publisher.url(DATABASE);
            pair.site.replace(&pair.publisher.url("nope"), &url)
        },
    },
    Case {
        name: "the publisher is down",
        spoil: |pair| pair.publisher.stop(StopMode::Fast),
        check: &[
            "publication \"p\": publisher PUBLISHER: cannot connect to PUBLISHER: PUBLISHER_ADDRESS: Connection refused (os error 111) → Correct `source`, or start that server",
        ],
        run: AS_CHECKED,
        then: Then::Retries,
        mend: |pair| pair.publisher.start(),
    },
    Case {
        name: "the slot is somebody else's",
        spoil: |pair| {
            let create = "SELECT pg_create_logical_replication_slot('farshore_p', 'pgoutput')";
            pair.publish(create)
        },
        check: &[
            "publication \"p\": replication slot \"farshore_p\" already exists on PUBLISHER and was not made for this store → If this site's data_dir was lost, drop the slot and start, then farshore resync and farshore resume for each of its subscriptions; if another site uses it, give this publication another name; or set adopt_slot = \"farshore_p\"",
        ],
        run: AS_CHECKED,
        then: Then::Stops,
        mend: |pair| pair.publish("SELECT pg_drop_replication_slot('farshore_p')"),
    },
    Case {
        name: "an adopted slot that is not there",
        spoil: |pair| pair.site.replace("tables =", "adopt_slot = \"nope\"\ntables ="),
        check: &[
            "publication \"p\": the publisher has no slot named \"nope\" to adopt → Create it with plugin pgoutput, or remove `adopt_slot`",
        ],
        run: AS_CHECKED,
        then: Then::Stops,
        mend: |pair| pair.publish("SELECT pg_create_logical_replication_slot('nope', 'pgoutput')"),
    },
    Case {
        name: "an adopted slot of another plugin",
        spoil: |pair| {
            pair.publish("SELECT pg_create_logical_replication_slot('other', 'test_decoding')")?;
            pair.site.replace("tables =", "adopt_slot = \"other\"\ntables =")
        },
        check: &[
            "publication \"p\": slot \"other\" uses plugin test_decoding; pgoutput is needed → Name another slot",
        ],
        run: AS_CHECKED,
        then: Then::Stops,
        mend: |pair| pair.site.replace("adopt_slot = \"other\"\n", ""),
    },
    Case {
        name: "an adopted publication that is not there",
        spoil: |pair| pair.site.replace("tables =", "adopt_publication = \"nope\"\ntables ="),
        check: &[
            "publication \"p\": the publisher has no publication named \"nope\" to adopt → Create it, or remove `adopt_publication`",
        ],
        run: AS_CHECKED,
        then: Then::Stops,
        mend: |pair| pair.publish("CREATE PUBLICATION nope FOR TABLE t, u, farshore_marks.mark"),
    },
    Case {
        name: "no slot is free",
        spoil: |pair| {
            pair.publisher
                .connect()?
                .batch_execute("ALTER SYSTEM SET max_replication_slots = 1")?;
            pair.publisher.restart()?;
            pair.publish("SELECT pg_create_physical_replication_slot('in_the_way')")
        },
        check: &[
            "publication \"p\": 0 replication slots are free on the publisher, 2 needed → ALTER SYSTEM SET max_replication_slots to more and restart that server, or drop slots that nothing uses (SELECT slot_name FROM pg_replication_slots WHERE NOT active)",
        ],
        run: AS_CHECKED,
        then: Then::Retries,
        mend: |pair| {
            pair.publisher.connect()?.batch_execute("ALTER SYSTEM RESET max_replication_slots")?;
            pair.publisher.restart()
        },
    },
];

const AT_THE_SUBSCRIBER: &[Case] = &[
    Case {
        name: "no table on the target",
        spoil: |pair| {
            pair.site
                .replace("publication = \"p\"", "publication = \"p\"\ncreate_tables = false")?;
            pair.subscriber.execute_script("DROP TABLE t")
        },
        check: &[
            "subscription \"s\": table public.t is not on the target → Create it there (for instance: pg_dump --schema-only --table='public.t' … | psql …)",
        ],
        run: AS_CHECKED,
        then: Then::Stops,
        mend: |pair| {
            pair.subscriber
                .execute_script("CREATE TABLE t (id integer PRIMARY KEY, code text, v text)")
        },
    },
    Case {
        name: "no column on the target",
        spoil: |pair| {
            pair.subscriber.execute_script("ALTER TABLE t DROP COLUMN v, DROP COLUMN code")
        },
        check: &[
            "subscription \"s\": table public.t on the target has no writable column code, v → Add it there, or publish the table without it",
        ],
        run: AS_CHECKED,
        then: Then::Stops,
        mend: |pair| {
            pair.subscriber.execute_script("ALTER TABLE t ADD COLUMN v text, ADD COLUMN code text")
        },
    },
    Case {
        name: "a column that cannot be written",
        spoil: |pair| {
            pair.subscriber.execute_script(
                "ALTER TABLE t DROP COLUMN v; ALTER TABLE t ADD COLUMN v text GENERATED ALWAYS AS ('x') STORED",
            )
        },
        check: &[
            "subscription \"s\": column v of public.t is generated on the target, and its values are published → Make it a plain one there (ALTER TABLE public.t ALTER COLUMN v DROP EXPRESSION), or publish the table without it",
        ],
        run: AS_CHECKED,
        then: Then::Stops,
        mend: |pair| {
            pair.subscriber.execute_script("ALTER TABLE public.t ALTER COLUMN v DROP EXPRESSION")
        },
    },
    Case {
        name: "rows on the target",
        spoil: |pair| {
            pair.subscriber.execute_script("INSERT INTO t VALUES (7, 'mine', 'precious')")
        },
        check: &[
            "subscription \"s\": table public.t on the target has rows already, and it is to be copied (it is new here, or it left the publication or changed its filter or columns) → Empty it (TRUNCATE public.t) or take it out of the publication, and go on (farshore resume)",
        ],
        run: AS_CHECKED,
        then: Then::Stops,
        mend: |pair| {
            anyhow::ensure!(
                pair.subscriber_says("SELECT v FROM t")? == "precious",
                "the row was touched"
            );
            pair.subscriber.execute_script("TRUNCATE t")
        },
    },
    Case {
        name: "no rights on the target",
        spoil: |pair| {
            pair.subscriber.execute_script("CREATE ROLE plain LOGIN")?;
            as_plain(pair, false)
        },
        check: &[
            "subscription \"s\": role plain may not create the schema farshore, where progress is kept → GRANT CREATE ON DATABASE postgres TO plain, or CREATE SCHEMA farshore AUTHORIZATION plain",
            "subscription \"s\": role plain may not look into schema farshore_marks of the target, where farshore_marks.mark is → GRANT USAGE ON SCHEMA farshore_marks TO plain",
            "subscription \"s\": role plain lacks SELECT, INSERT, UPDATE, DELETE, TRUNCATE on public.t of the target → GRANT SELECT, INSERT, UPDATE, DELETE, TRUNCATE ON public.t TO plain",
            "subscription \"s\": role plain lacks SELECT, INSERT, UPDATE, DELETE, TRUNCATE on public.u of the target → GRANT SELECT, INSERT, UPDATE, DELETE, TRUNCATE ON public.u TO plain",
        ],
        run: AS_CHECKED,
        then: Then::Stops,
        mend: |pair| pair.subscriber.execute_script("ALTER ROLE plain SUPERUSER"),
    },
    Case {
        name: "the subscriber is down",
        spoil: |pair| pair.subscriber.stop(StopMode::Fast),
        check: &[
            "subscription \"s\": target SUBSCRIBER: cannot connect to SUBSCRIBER: SUBSCRIBER_ADDRESS: Connection refused (os error 111) → Correct `target`, or start that server",
        ],
        run: AS_CHECKED,
        then: Then::Retries,
        mend: |pair| pair.subscriber.start(),
    },
    Case {
        name: "the subscription's name is taken on the target",
        spoil: |pair| {
            pair.site.start()?;
            pair.await_arrival()?;
            pair.site.stop()?;
            pair.site.replace("name = \"t1\"", "name = \"t2\"")
        },
        check: &[
            "subscription \"s\": the target's subscription of that name follows publication \"t1/p\", not \"t2/p\" → If it is the same subscription, and a site was renamed or the log comes another way, run on the target: UPDATE farshore.subscription SET publication = 't2/p' WHERE name = 's'. Otherwise rename one of the two",
        ],
        run: AS_CHECKED,
        then: Then::Stops,
        mend: |pair| pair.site.replace("name = \"t2\"", "name = \"t1\""),
    },
];

#[test]
fn wrong_at_the_publisher() -> Result<()> {
    run_all(AT_THE_PUBLISHER, start_with)
}

#[test]
fn wrong_at_the_subscriber() -> Result<()> {
    run_all(AT_THE_SUBSCRIBER, start_with)
}

#[test]
fn a_wrong_password() -> Result<()> {
    let publisher = Cluster::builder(&Installation::find(15)?).setting("wal_level", "logical");
    let publisher = publisher.scram_password("right").start()?;
    let mut pair = Pair::of(publisher, subscriber_cluster(18)?.start()?)?;
    pair.on_both(crate::case::SCHEMA)?;
    pair.publish(crate::case::ROWS)?;
    pair.add_publication("p", &["public.*"], "")?;
    let target = pair.subscriber.url(DATABASE);
    pair.add_subscription("s", "p", &target)?;
    pair.site.replace(":right@", ":wrong@")?;
    let case = Case {
        name: "a wrong password",
        spoil: |_| Ok(()),
        check: &[
            "publication \"p\": publisher PUBLISHER: authentication with PUBLISHER failed: FATAL 28P01: password authentication failed for user \"postgres\"; check the password in PGPASSWORD, ~/.pgpass or the service file. Once it is right: farshore resume if it is in ~/.pgpass; if it is in PGPASSWORD, the service file or the site file, which are read at the start only, restart the node → To set another: ALTER ROLE … PASSWORD on that server",
        ],
        run: AS_CHECKED,
        then: Then::Stops,
        mend: |pair| pair.site.replace(":wrong@", ":right@"),
    };
    start_with(&case, pair)
}

#[test]
fn a_server_that_cannot_be_reached() -> Result<()> {
    let mut pair = pair()?;
    // Nobody listens there: the port is reserved for another cluster, which is stopped.
    let mut other = subscriber_cluster(15)?.start()?;
    other.stop(StopMode::Immediate)?;
    let url = pair.subscriber.url(DATABASE);
    pair.site.replace(&url, &other.url(DATABASE))?;
    std::mem::swap(&mut pair.subscriber, &mut other);
    let case = Case {
        name: "a server that cannot be reached",
        spoil: |_| Ok(()),
        check: &[
            "subscription \"s\": target SUBSCRIBER: cannot connect to SUBSCRIBER: SUBSCRIBER_ADDRESS: Connection refused (os error 111) → Correct `target`, or start that server",
        ],
        run: AS_CHECKED,
        then: Then::Retries,
        mend: |pair| {
            pair.subscriber.start()?;
            pair.subscriber.execute_script(crate::case::SCHEMA)?;
            pair.subscriber.execute_script(
                "CREATE SCHEMA farshore_marks; CREATE TABLE farshore_marks.mark (id bigint PRIMARY KEY)",
            )
        },
    };
    start_with(&case, pair)
}
