//! Servers, roles and settings that do not let the work be done.

use crate::case::{AS_CHECKED, Case, SCHEMA, Then, as_plain, run_all, start_with};
use anyhow::{Result, ensure};
use farshore_tests::{DATABASE, Direction, Pair};

const CASES: &[Case] = &[
    Case {
        name: "no walsender is free",
        spoil: |pair| {
            pair.publisher.connect()?.batch_execute("ALTER SYSTEM SET max_wal_senders = 0")?;
            pair.publisher.restart()
        },
        check: &[
            "publication \"p\": 0 walsenders are free on the publisher, 2 needed → ALTER SYSTEM SET max_wal_senders to more, and restart that server",
        ],
        run: AS_CHECKED,
        then: Then::Retries,
        mend: |pair| {
            pair.publisher.connect()?.batch_execute("ALTER SYSTEM RESET max_wal_senders")?;
            pair.publisher.restart()
        },
    },
    Case {
        name: "row-level security at the publisher",
        spoil: |pair| {
            pair.publish(
                "CREATE ROLE plain LOGIN REPLICATION; GRANT CREATE ON DATABASE postgres TO plain; \
                 ALTER TABLE t OWNER TO plain; ALTER TABLE u OWNER TO plain; \
                 ALTER SCHEMA farshore_marks OWNER TO plain; ALTER TABLE farshore_marks.mark OWNER TO plain; \
                 ALTER TABLE t ENABLE ROW LEVEL SECURITY, FORCE ROW LEVEL SECURITY; \
                 CREATE POLICY half ON t USING (id > 50)",
            )?;
            as_plain(pair, true)
        },
        check: &[
            "publication \"p\": row-level security hides rows of public.t from role plain: the copy would lack them → ALTER ROLE plain BYPASSRLS (as a superuser)",
        ],
        run: AS_CHECKED,
        then: Then::Stops,
        mend: |pair| pair.publish("ALTER ROLE plain BYPASSRLS"),
    },
    Case {
        name: "row-level security at the target",
        spoil: |pair| {
            pair.subscriber.execute_script(
                "CREATE ROLE plain LOGIN; GRANT CREATE ON DATABASE postgres TO plain; \
                 GRANT ALL ON SCHEMA farshore_marks TO plain; GRANT ALL ON t, u, farshore_marks.mark TO plain; \
                 ALTER TABLE t ENABLE ROW LEVEL SECURITY",
            )?;
            as_plain(pair, false)
        },
        check: &[
            "subscription \"s\": row-level security of public.t on the target holds for role plain → ALTER ROLE plain BYPASSRLS (as a superuser), or ALTER TABLE public.t OWNER TO plain, NO FORCE ROW LEVEL SECURITY",
        ],
        run: AS_CHECKED,
        then: Then::Stops,
        mend: |pair| pair.subscriber.execute_script("ALTER ROLE plain BYPASSRLS"),
    },
    Case {
        name: "some rights at the target are missing",
        spoil: |pair| {
            pair.subscriber.execute_script(
                "CREATE ROLE plain LOGIN; GRANT CREATE ON DATABASE postgres TO plain; \
                 GRANT ALL ON SCHEMA farshore_marks TO plain; \
                 GRANT SELECT, INSERT ON t, u, farshore_marks.mark TO plain; GRANT ALL ON t TO plain",
            )?;
            as_plain(pair, false)
        },
        check: &[
            "subscription \"s\": role plain lacks UPDATE, DELETE, TRUNCATE on farshore_marks.mark of the target → GRANT UPDATE, DELETE, TRUNCATE ON farshore_marks.mark TO plain",
            "subscription \"s\": role plain lacks UPDATE, DELETE, TRUNCATE on public.u of the target → GRANT UPDATE, DELETE, TRUNCATE ON public.u TO plain",
        ],
        run: AS_CHECKED,
        then: Then::Stops,
        mend: |pair| {
            pair.subscriber
                .execute_script("GRANT UPDATE, DELETE, TRUNCATE ON u, farshore_marks.mark TO plain")
        },
    },
    Case {
        name: "the schema farshore is somebody else's",
        spoil: |pair| {
            pair.subscriber.execute_script(
                "CREATE ROLE plain LOGIN; CREATE SCHEMA farshore; \
                 GRANT ALL ON SCHEMA farshore_marks TO plain; GRANT ALL ON t, u, farshore_marks.mark TO plain",
            )?;
            as_plain(pair, false)
        },
        check: &[
            "subscription \"s\": schema farshore of the target, where progress is kept, belongs to another role than plain → GRANT USAGE, CREATE ON SCHEMA farshore TO plain; GRANT SELECT, INSERT, UPDATE, DELETE ON ALL TABLES IN SCHEMA farshore TO plain",
        ],
        run: AS_CHECKED,
        then: Then::Stops,
        mend: |pair| {
            pair.subscriber.execute_script("GRANT USAGE, CREATE ON SCHEMA farshore TO plain")
        },
    },
    Case {
        name: "missing tables may not be created",
        spoil: |pair| {
            pair.subscriber.execute_script(
                "DROP TABLE t; CREATE ROLE plain LOGIN; CREATE SCHEMA farshore AUTHORIZATION plain; \
                 GRANT ALL ON SCHEMA farshore_marks TO plain; GRANT ALL ON u, farshore_marks.mark TO plain; \
                 REVOKE CREATE ON SCHEMA public FROM public",
            )?;
            pair.publish(
                "CREATE SCHEMA elsewhere; CREATE TABLE elsewhere.x (id integer PRIMARY KEY)",
            )?;
            pair.site.replace("'public.*'", "'public.*', 'elsewhere.x'")?;
            as_plain(pair, false)
        },
        check: &[
            "subscription \"s\": not on the target, and role plain may not create them in schema elsewhere: elsewhere.x → GRANT CREATE ON DATABASE postgres TO plain; or create them, and set create_tables = false",
            "subscription \"s\": not on the target, and role plain may not create them in schema public: public.t → GRANT USAGE, CREATE ON SCHEMA public TO plain; or create them, and set create_tables = false",
        ],
        run: AS_CHECKED,
        then: Then::Stops,
        mend: |pair| {
            pair.subscriber.execute_script(
                "GRANT CREATE ON DATABASE postgres TO plain; GRANT USAGE, CREATE ON SCHEMA public TO plain",
            )
        },
    },
    Case {
        name: "the target's sessions are read-only",
        spoil: |pair| {
            pair.subscriber
                .execute_script("ALTER ROLE postgres SET default_transaction_read_only = on")
        },
        check: &[
            "subscription \"s\": sessions of postgres on the target are read-only → ALTER ROLE postgres IN DATABASE postgres SET default_transaction_read_only = off",
        ],
        run: AS_CHECKED,
        then: Then::Retries,
        mend: |pair| {
            pair.subscriber.execute_script(
                "SET transaction_read_only = off; ALTER ROLE postgres RESET default_transaction_read_only",
            )
        },
    },
    Case {
        name: "source and target are one database",
        spoil: |pair| {
            let (source, target) = (pair.publisher.url(DATABASE), pair.subscriber.url(DATABASE));
            pair.site.replace(&target, &source)
        },
        check: &[
            "subscription \"s\": `source` and `target` are the same database (postgres): every change of farshore_marks.mark would be published again → Correct one of the two, or map the tables to a schema that is not published",
            "subscription \"s\": table public.t on the target has rows already, and it is to be copied (it is new here, or it left the publication or changed its filter or columns) → Empty it (TRUNCATE public.t) or take it out of the publication, and go on (farshore resume)",
        ],
        run: AS_CHECKED,
        then: Then::Stops,
        mend: |pair| {
            let (source, target) = (pair.publisher.url(DATABASE), pair.subscriber.url(DATABASE));
            pair.site.replace(
                &format!("publication = \"p\"\ntarget = \"{source}\""),
                &format!("publication = \"p\"\ntarget = \"{target}\""),
            )
        },
    },
    Case {
        name: "TLS is asked of a server that has none",
        spoil: |pair| {
            let target = pair.subscriber.url(DATABASE);
            pair.site.replace(&target, &format!("{target}?sslmode=require"))
        },
        check: &[
            "subscription \"s\": target SUBSCRIBER: TLS with SUBSCRIBER: the server does not offer TLS, and sslmode demands it; switch ssl on there, or connect with sslmode=prefer → Correct sslmode, sslrootcert, sslcert or sslkey in `target`, or the server's TLS",
        ],
        run: AS_CHECKED,
        then: Then::Stops,
        mend: |pair| pair.site.replace("?sslmode=require", ""),
    },
    Case {
        name: "an adopted slot of another database",
        spoil: |pair| {
            pair.publisher.connect()?.batch_execute("CREATE DATABASE other")?;
            pair.publisher.connect_to("other")?.batch_execute(
                "SELECT pg_create_logical_replication_slot('elsewhere', 'pgoutput')",
            )?;
            pair.site.replace("tables =", "adopt_slot = \"elsewhere\"\ntables =")
        },
        check: &[
            "publication \"p\": slot \"elsewhere\" belongs to database \"other\", not to \"postgres\" → Name another slot, or another database in `source`",
        ],
        run: AS_CHECKED,
        then: Then::Stops,
        mend: |pair| pair.site.replace("adopt_slot = \"elsewhere\"\n", ""),
    },
    Case {
        name: "an adopted slot that is physical",
        spoil: |pair| {
            pair.publish("SELECT pg_create_physical_replication_slot('bytes')")?;
            pair.site.replace("tables =", "adopt_slot = \"bytes\"\ntables =")
        },
        check: &[
            "publication \"p\": slot \"bytes\" uses plugin none: it is a physical slot; pgoutput is needed → Name another slot",
        ],
        run: AS_CHECKED,
        then: Then::Stops,
        mend: |pair| pair.site.replace("adopt_slot = \"bytes\"\n", ""),
    },
    Case {
        name: "the publication's name is taken by another role's",
        spoil: |pair| {
            pair.publish(
                "CREATE ROLE plain LOGIN REPLICATION; GRANT CREATE ON DATABASE postgres TO plain; \
                 ALTER TABLE t OWNER TO plain; ALTER TABLE u OWNER TO plain; \
                 ALTER SCHEMA farshore_marks OWNER TO plain; ALTER TABLE farshore_marks.mark OWNER TO plain; \
                 CREATE PUBLICATION farshore_p FOR TABLE t",
            )?;
            as_plain(pair, true)
        },
        check: &[
            "publication \"p\": publication farshore_p exists, publishes something else than the site file says, and belongs to postgres → ALTER PUBLICATION farshore_p OWNER TO plain; or set adopt_publication = \"farshore_p\" to use it as it is",
        ],
        run: AS_CHECKED,
        then: Then::Stops,
        mend: |pair| pair.publish("ALTER PUBLICATION farshore_p OWNER TO plain"),
    },
    Case {
        name: "two publications bring one table to one target",
        spoil: |pair| {
            let (source, target) = (pair.publisher.url(DATABASE), pair.subscriber.url(DATABASE));
            pair.site.add(&format!(
                "[publication.q]\nsource = \"{source}\"\ntables = [\"public.t\"]\n\
                 [subscription.s2]\npublication = \"q\"\ntarget = \"{target}\"\n"
            ))
        },
        check: &[
            "subscription \"s\": subscription \"s2\" brings the same tables to SUBSCRIBER: public.t → Remove one of the two, or take the tables out of one publication",
            "subscription \"s2\": subscription \"s\" brings the same tables to SUBSCRIBER: public.t → Remove one of the two, or take the tables out of one publication",
        ],
        run: "subscription \"…\": subscription \"…\" brings the same tables to SUBSCRIBER: public.t. Remove one of the two, or take the tables out of one publication",
        then: Then::Stops,
        mend: |pair| {
            let other = pair.subscriber.url("other");
            pair.subscriber.connect()?.batch_execute("CREATE DATABASE other")?;
            pair.subscriber.connect_to("other")?.batch_execute(SCHEMA)?;
            let target = pair.subscriber.url(DATABASE);
            pair.site.replace(
                &format!("publication = \"q\"\ntarget = \"{target}\""),
                &format!("publication = \"q\"\ntarget = \"{other}\""),
            )
        },
    },
];

#[test]
fn wrong_servers() -> Result<()> {
    run_all(CASES, start_with)
}

/// Each of two publications has enough by itself; together they leave no slot for a copy.
#[test]
fn slots_are_counted_for_all_publications_of_a_server() -> Result<()> {
    let mut pair = Pair::new(Direction::UP, &["public.t"], SCHEMA)?;
    pair.publish("INSERT INTO t VALUES (1, 'c1', 'v')")?;
    pair.add_publication("q", &["public.u"], "")?;
    let set_slots = |pair: &mut Pair, slots: u32| {
        let set = format!("ALTER SYSTEM SET max_replication_slots = {slots}");
        pair.publisher.connect()?.batch_execute(&set)?;
        pair.publisher.restart()
    };
    set_slots(&mut pair, 3)?;
    let checked = pair.site.verb("check", &[])?;
    ensure!(checked.code == Some(0), "{checked:?}");
    set_slots(&mut pair, 2)?;
    let checked = pair.site.verb("check", &[])?;
    let said = "2 replication slots are free, 3 needed for its 2 publications together: p, q";
    ensure!(checked.code == Some(1) && checked.stdout.contains(said), "{checked:?}");
    pair.site.start()?;
    let (state, error) = pair.site.await_trouble("s", "Raise max_replication_slots")?;
    ensure!(state == "retrying" && error.contains("53400"), "{state}: {error}");
    set_slots(&mut pair, 3)?;
    pair.assert_equal(&["public"])
}

/// However a server is spelled, it is told that a change would go round, or arrive twice.
#[test]
fn both_directions_and_another_spelling_are_refused() -> Result<()> {
    let mut pair = Pair::bare(Direction::UP)?;
    pair.on_both("CREATE TABLE t (id integer PRIMARY KEY, v text)")?;
    pair.add_publication("p", &["public.*"], "")?;
    let (source, target) = (pair.publisher.url("postgres"), pair.subscriber.url("postgres"));
    pair.add_subscription("s", "p", &target)?;
    let spelled = |url: &str| url.replace("127.0.0.1", "localhost");
    ensure!(spelled(&source) != source, "{source}");
    let back = format!(
        "[publication.back]\nsource = \"{}\"\ntables = [\"public.t\"]\n\
         [subscription.back]\npublication = \"back\"\ntarget = \"{}\"\n",
        spelled(&target),
        spelled(&source)
    );
    pair.site.add(&back)?;
    let checked = pair.site.verb("check", &[])?;
    let said = "subscription \"back\" brings the same tables back to the publisher: public.t";
    ensure!(checked.code == Some(1) && checked.stdout.contains(said), "{checked:?}");
    pair.site.start()?;
    let (state, error) = pair.site.await_trouble("s", "go round for ever")?;
    ensure!(state == "stopped", "{state}: {error}");
    pair.site.stop()?;
    let twin =
        format!("[subscription.twin]\npublication = \"p\"\ntarget = \"{}\"\n", spelled(&target));
    pair.site.replace(&back, &twin)?;
    let checked = pair.site.verb("check", &[])?;
    let said = "brings publication \"p\" to";
    ensure!(checked.code == Some(2) && checked.stderr.contains(said), "{checked:?}");
    Ok(())
}
