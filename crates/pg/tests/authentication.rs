//! Who we are, by every method, from every place a password can be.

mod cluster;

use cluster::Cluster;
use farshore_pg::{Connection, Error, Mode};
use std::fs;
use std::os::unix::fs::PermissionsExt;

#[tokio::test]
async fn passwords_are_accepted_and_wrong_ones_explained() {
    let hba = [
        "host all scram_user 127.0.0.1/32 scram-sha-256",
        "host all md5_user 127.0.0.1/32 md5",
        "host all plain_user 127.0.0.1/32 password",
        "host replication scram_user 127.0.0.1/32 scram-sha-256",
    ];
    let Some(cluster) = Cluster::start(&hba, &[]) else { return };
    let port = cluster.port;
    let mut admin = cluster.connect().await;
    admin
        .simple_query(
            "SET password_encryption='scram-sha-256'; \
             CREATE ROLE scram_user LOGIN REPLICATION PASSWORD 'pä ss'; \
             CREATE ROLE plain_user LOGIN PASSWORD 'in clear'; \
             SET password_encryption='md5'; CREATE ROLE md5_user LOGIN PASSWORD 'five'",
        )
        .await
        .unwrap();
    for (user, password) in
        [("scram_user", "pä ss"), ("md5_user", "five"), ("plain_user", "in clear")]
    {
        let at = format!("host=127.0.0.1 port={port} user={user} dbname=postgres");
        let config = cluster.parse(&format!("{at} password='{password}'"));
        assert!(!format!("{config:?} {config}").contains(password));
        let mut connection = Connection::connect(&config, Mode::Sql).await.unwrap();
        let rows = connection.query("SELECT current_user, pg_backend_pid()", &[]).await.unwrap();
        assert_eq!(rows[0].get(0), Some(user));
        assert_eq!(rows[0].parse::<i32>(1).unwrap(), connection.backend_pid());
        connection.close().await;

        let wrong = cluster.parse(&format!("{at} password='wr0ng-secret'"));
        let error = Connection::connect(&wrong, Mode::Sql).await.unwrap_err();
        assert_eq!(error.sqlstate(), Some("28P01"), "{error}");
        assert!(!error.is_transient());
        let text = error.to_string();
        assert!(text.contains("password authentication failed") && text.contains("PGPASSWORD"));
        assert!(text.contains(user) && !text.contains("wr0ng-secret"), "{text}");

        let error = Connection::connect(&cluster.parse(&at), Mode::Sql).await.unwrap_err();
        assert!(matches!(error, Error::Auth { .. }), "{error}");
        assert!(error.to_string().contains("there is none"), "{error}");

        let bound = cluster.parse(&format!("{at} password='{password}' channel_binding=require"));
        let error = Connection::connect(&bound, Mode::Sql).await.unwrap_err();
        assert!(error.to_string().contains("channel_binding=require"), "{error}");
    }

    let unlisted = cluster.parse(&format!("host=127.0.0.1 port={port} user=postgres"));
    let error = Connection::connect(&unlisted, Mode::Sql).await.unwrap_err();
    assert_eq!(error.sqlstate(), Some("28000"));
    assert!(error.to_string().contains("pg_hba.conf"), "{error}");

    // The password file: ignored while others can read it, then used; its "replication" line is
    // for physical replication.
    let passfile = cluster.path().join(".pgpass");
    let lines = format!(
        "# comment\nother:*:*:*:no\n127.0.0.1:{port}:replication:*:wrong\n*:{port}:postgres:md5_user:five\n\
         127.0.0.1:{port}:*:scram_user:pä ss\n"
    );
    fs::write(&passfile, &lines).unwrap();
    fs::set_permissions(&passfile, PermissionsExt::from_mode(0o644)).unwrap();
    let md5 = format!("postgres://md5_user@127.0.0.1:{port}/postgres");
    let scram = format!("postgres://scram_user@127.0.0.1:{port}/postgres");
    let error = Connection::connect(&cluster.parse(&md5), Mode::Sql).await.unwrap_err();
    assert!(error.to_string().contains("chmod 0600"), "{error}");
    fs::set_permissions(&passfile, PermissionsExt::from_mode(0o600)).unwrap();
    Connection::connect(&cluster.parse(&md5), Mode::Sql).await.unwrap().close().await;
    let logical = Connection::connect(&cluster.parse(&scram), Mode::LogicalReplication).await;
    logical.unwrap().close().await;
    let physical = Connection::connect(&cluster.parse(&scram), Mode::PhysicalReplication).await;
    assert_eq!(physical.unwrap_err().sqlstate(), Some("28P01"));
    fs::write(&passfile, lines.replace(":wrong", ":pä ss")).unwrap();
    let mut physical =
        Connection::connect(&cluster.parse(&scram), Mode::PhysicalReplication).await.unwrap();
    let system = physical.identify_system().await.unwrap();
    assert_eq!((system.timeline, system.dbname), (1, None));

    // A service file over a Unix socket, with the environment filling in the rest.
    let service = cluster.path().join(".pg_service.conf");
    let text = format!(
        "# ours\n[other]\nhost=nowhere\n[mine]\nhost={}\nport={port}\nuser=postgres\n",
        cluster.path().display()
    );
    fs::write(&service, text).unwrap();
    let environment = cluster.environment().with("PGDATABASE", "template1").with("PGUSER", "x");
    let config = farshore_pg::Config::parse_in("service=mine", &environment).unwrap();
    let mut connection = Connection::connect(&config, Mode::Sql).await.unwrap();
    let rows = connection.query("SELECT current_database(), current_user", &[]).await.unwrap();
    assert_eq!((rows[0].get(0), rows[0].get(1)), (Some("template1"), Some("postgres")));
}

#[tokio::test]
async fn the_first_host_that_answers_is_taken() {
    let Some(cluster) = Cluster::start(&["host all all 127.0.0.1/32 trust"], &[]) else { return };
    // A listener that never answers: the timeout has to end it.
    let silent = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let silent_port = silent.local_addr().unwrap().port();
    let config = cluster.parse(&format!(
        "postgres://postgres@127.0.0.1:1,127.0.0.1:{silent_port},127.0.0.1:{}/postgres?connect_timeout=1",
        cluster.port
    ));
    let mut connection = Connection::connect(&config, Mode::Sql).await.unwrap();
    assert!(connection.server().contains(&cluster.port.to_string()));
    assert!(connection.server_version() >= 140_000);
    assert_eq!(connection.parameter("client_encoding"), Some("UTF8"));
    assert_eq!(connection.parameter("DateStyle"), Some("ISO, MDY"));

    let standby = config.to_string();
    let standby =
        cluster.parse(&format!("{standby}?target_session_attrs=standby&connect_timeout=1"));
    let error = Connection::connect(&standby, Mode::Sql).await.unwrap_err();
    assert!(error.is_transient() && error.to_string().contains("writable primary"), "{error}");

    let only_silent =
        cluster.parse(&format!("postgres://postgres@127.0.0.1:{silent_port}/x?connect_timeout=1"));
    let error = Connection::connect(&only_silent, Mode::Sql).await.unwrap_err();
    assert!(matches!(error, Error::Timeout { .. }), "{error}");

    let refused = cluster.parse("postgres://postgres@127.0.0.1:1/x");
    let error = Connection::connect(&refused, Mode::Sql).await.unwrap_err();
    assert!(matches!(error, Error::Connect { .. }) && error.is_transient(), "{error}");

    // The server ends the session: its parting words are the error.
    let victim = connection.backend_pid().to_string();
    let mut admin = cluster.connect().await;
    admin.query("SELECT pg_terminate_backend($1)", &[Some(&victim)]).await.unwrap();
    let error = connection.query("SELECT 1", &[]).await.unwrap_err();
    assert_eq!(error.sqlstate(), Some("57P01"), "{error}");
    assert!(error.is_transient());
    let error = connection.query("SELECT 1", &[]).await.unwrap_err();
    assert!(matches!(error, Error::Closed { .. } | Error::Io { .. }), "{error}");
}
