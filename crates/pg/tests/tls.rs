//! Each sslmode accepts what it should and refuses what it should.

mod cluster;

use cluster::Cluster;
use farshore_pg::{Connection, Error, Mode};
use rcgen::{BasicConstraints, CertificateParams, DnType, IsCa, Issuer, KeyPair, SanType};
use std::fs;
use std::os::unix::fs::PermissionsExt;

struct Authority {
    issuer: Issuer<'static, KeyPair>,
    pem: String,
}

fn authority(name: &str) -> Authority {
    let mut params = CertificateParams::new(Vec::new()).unwrap();
    params.distinguished_name.push(DnType::CommonName, name);
    params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    let key = KeyPair::generate().unwrap();
    let pem = params.self_signed(&key).unwrap().pem();
    Authority { issuer: Issuer::new(params, key), pem }
}

/// Certificate and key.
fn certificate(authority: &Authority, common_name: &str, names: &[&str]) -> (String, String) {
    let names: Vec<String> = names.iter().map(|name| (*name).to_owned()).collect();
    let mut params = CertificateParams::new(names).unwrap();
    params.distinguished_name.push(DnType::CommonName, common_name);
    if common_name == "server" {
        params.subject_alt_names.push(SanType::IpAddress("127.0.0.1".parse().unwrap()));
    }
    let key = KeyPair::generate().unwrap();
    let certificate = params.signed_by(&key, &authority.issuer).unwrap();
    (certificate.pem(), key.serialize_pem())
}

#[tokio::test]
async fn sslmodes_check_what_they_promise() {
    let ours = authority("ours");
    let theirs = authority("theirs");
    let (server_certificate, server_key) = certificate(&ours, "server", &["db.test"]);
    let (client_certificate, client_key) = certificate(&ours, "client_user", &[]);
    let hba = [
        "hostssl all client_user 127.0.0.1/32 cert",
        "hostnossl all plain_user 127.0.0.1/32 trust",
        "hostssl all scram_user 127.0.0.1/32 scram-sha-256",
        "hostssl all postgres 127.0.0.1/32 trust",
    ];
    let settings = [
        "ssl=on",
        "ssl_cert_file='server.crt'",
        "ssl_key_file='server.key'",
        "ssl_ca_file='ca.crt'",
    ];
    let files = [
        ("server.crt", &*server_certificate),
        ("server.key", &*server_key),
        ("ca.crt", &*ours.pem),
    ];
    let Some(cluster) = Cluster::start_with_files(&hba, &settings, &files) else { return };
    let mut admin = cluster.connect().await;
    admin
        .simple_query(
            "CREATE ROLE client_user LOGIN; CREATE ROLE plain_user LOGIN; \
             CREATE ROLE scram_user LOGIN PASSWORD 'x'",
        )
        .await
        .unwrap();

    let file = |name: &str, content: &str| {
        let path = cluster.path().join(name);
        fs::write(&path, content).unwrap();
        fs::set_permissions(&path, PermissionsExt::from_mode(0o600)).unwrap();
        path.display().to_string()
    };
    let (our_ca, their_ca) = (file("our-ca.pem", &ours.pem), file("their-ca.pem", &theirs.pem));
    let (cert, key) = (file("client.crt", &client_certificate), file("client.key", &client_key));

    let port = cluster.port;
    let connect = async |host: &str, user: &str, rest: &str| -> Result<Connection, Error> {
        let config = cluster.parse(&format!(
            "host={host} hostaddr=127.0.0.1 port={port} user={user} dbname=postgres {rest}"
        ));
        Connection::connect(&config, Mode::Sql).await
    };
    let encrypted = async |host: &str, user: &str, rest: &str| {
        let mut connection =
            connect(host, user, rest).await.unwrap_or_else(|e| panic!("{rest}: {e}"));
        let rows = connection
            .query("SELECT ssl FROM pg_stat_ssl WHERE pid = pg_backend_pid()", &[])
            .await
            .unwrap();
        assert_eq!(rows[0].parse_bool(0).unwrap(), connection.is_encrypted());
        connection.is_encrypted()
    };
    let refused = async |host: &str, user: &str, rest: &str, words: &str| {
        let error = connect(host, user, rest).await.map(drop).unwrap_err();
        assert!(error.to_string().contains(words), "{rest}: {error}");
        assert!(!error.is_transient(), "{error}");
    };

    let full = format!("sslmode=verify-full sslrootcert={our_ca}");
    assert!(encrypted("db.test", "postgres", &full).await);
    assert!(encrypted("127.0.0.1", "postgres", &full).await);
    refused("other.test", "postgres", &full, "not for \"other.test\"").await;
    let their_full = format!("sslmode=verify-full sslrootcert={their_ca}");
    refused("db.test", "postgres", &their_full, "no authority in").await;

    let ca = format!("sslmode=verify-ca sslrootcert={our_ca}");
    assert!(encrypted("other.test", "postgres", &ca).await);
    let their = format!("sslmode=verify-ca sslrootcert={their_ca}");
    refused("db.test", "postgres", &their, "no authority in").await;

    assert!(encrypted("other.test", "postgres", "sslmode=require").await);
    let their = format!("sslmode=require sslrootcert={their_ca}");
    refused("db.test", "postgres", &their, "no authority in").await;
    refused("db.test", "postgres", "sslmode=disable", "pg_hba.conf").await;

    // What pg_hba.conf wants decides for prefer and allow.
    assert!(encrypted("db.test", "postgres", "sslmode=prefer").await);
    assert!(!encrypted("db.test", "plain_user", "sslmode=prefer").await);
    assert!(encrypted("db.test", "postgres", "sslmode=allow").await);
    assert!(!encrypted("db.test", "plain_user", "sslmode=allow").await);
    refused("db.test", "plain_user", "sslmode=require", "pg_hba.conf").await;

    // SCRAM bound to the channel.
    let bound = format!("{full} password=x channel_binding=require");
    assert!(encrypted("db.test", "scram_user", &bound).await);
    let unbound = format!("{full} password=x channel_binding=disable");
    assert!(encrypted("db.test", "scram_user", &unbound).await);

    // Client certificates.
    let with_certificate = format!("{full} sslcert={cert} sslkey={key}");
    assert!(encrypted("db.test", "client_user", &with_certificate).await);
    let error = connect("db.test", "client_user", &full).await.map(drop).unwrap_err();
    assert!(error.to_string().contains("certificate"), "{error}");
    fs::set_permissions(&key, PermissionsExt::from_mode(0o644)).unwrap();
    refused("db.test", "client_user", &with_certificate, "chmod 0600").await;

    // A bulk of data in both directions, and a cancel request, through TLS.
    let mut connection = connect("db.test", "postgres", &full).await.unwrap();
    connection.simple_query("CREATE TABLE bulk (t text)").await.unwrap();
    let mut copy = connection.copy_in("COPY bulk FROM STDIN").await.unwrap();
    let line = format!("{}\n", "x".repeat(999)).repeat(100);
    for _ in 0..50 {
        copy.send(line.as_bytes()).await.unwrap();
    }
    assert_eq!(copy.finish().await.unwrap(), 5000);
    let rows = connection.query("SELECT t FROM bulk", &[]).await.unwrap();
    assert_eq!(rows.iter().map(|row| row.get(0).unwrap().len()).sum::<usize>(), 5000 * 999);
    let cancel = connection.cancel_token();
    let sleeping = connection.query("SELECT pg_sleep(60)", &[]);
    let cancelling = async {
        loop {
            let asleep = "SELECT count(*) FROM pg_stat_activity WHERE wait_event = 'PgSleep'";
            if admin.query(asleep, &[]).await.unwrap()[0].get(0) == Some("1") {
                break cancel.cancel().await.unwrap();
            }
        }
    };
    let (slept, ()) = tokio::join!(sleeping, cancelling);
    assert_eq!(slept.unwrap_err().sqlstate(), Some("57014"));
    assert_eq!(connection.query("SELECT 1", &[]).await.unwrap()[0].get(0), Some("1"));
}

#[tokio::test]
async fn a_server_without_tls_is_told_so() {
    let Some(cluster) = Cluster::start(&["host all all 127.0.0.1/32 trust"], &[]) else { return };
    let at = format!("postgres://postgres@127.0.0.1:{}/postgres", cluster.port);
    let error = Connection::connect(&cluster.parse(&format!("{at}?sslmode=require")), Mode::Sql)
        .await
        .unwrap_err();
    assert!(matches!(error, Error::Tls { .. }), "{error}");
    assert!(error.to_string().contains("does not offer TLS"), "{error}");
    let config = cluster.parse(&at);
    assert!(!Connection::connect(&config, Mode::Sql).await.unwrap().is_encrypted());
}
