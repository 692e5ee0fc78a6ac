//! Connection strings, service files and the environment mean what they mean to libpq.

use farshore_pg::config::{Address, ChannelBinding, Environment, Password, SslMode, TargetSession};
use farshore_pg::{Config, ConfigError};
use proptest::prelude::*;
use std::fs;
use std::path::PathBuf;
use std::time::Duration;

fn environment() -> Environment {
    Environment::default().with("USER", "me")
}

fn parse(text: &str) -> Config {
    Config::parse_in(text, &environment()).unwrap_or_else(|e| panic!("{text}: {e}"))
}

fn error(text: &str) -> ConfigError {
    Config::parse_in(text, &environment()).expect_err(text)
}

fn tcp(name: &str) -> Address {
    Address::Tcp(name.into())
}

#[test]
fn urls() {
    let config = parse(
        "postgresql://us%40er:p%3Aw%20@db.example:6543/my%2Fdb?sslmode=verify-full&application_name=a+b",
    );
    assert_eq!((config.user.as_str(), config.dbname.as_str()), ("us@er", "my/db"));
    assert_eq!(config.password, Some(Password::new("p:w ")));
    assert_eq!(config.hosts[0].address, tcp("db.example"));
    assert_eq!((config.hosts[0].port, config.sslmode), (6543, SslMode::VerifyFull));
    assert_eq!(config.application_name, "a+b");
    assert_eq!(config.redacted(), "postgres://us@er@db.example:6543/my/db");

    let config = parse("postgres://u:a@b@h/d");
    assert_eq!(config.password.unwrap().expose(), "a@b");

    let config = parse("postgres:///d?host=/var/run/x&port=7&user=u");
    assert_eq!(config.hosts[0].address, Address::Unix("/var/run/x".into()));
    assert_eq!(config.redacted(), "postgres://u@/d?host=/var/run/x&port=7");
    assert_eq!(parse("postgres://u@%2Fsock/d").hosts[0].address, Address::Unix("/sock".into()));

    let config = parse("postgres://u@[::1]:5433,b,c:99/d?target_session_attrs=primary");
    let hosts: Vec<_> = config.hosts.iter().map(ToString::to_string).collect();
    assert_eq!(hosts, ["[::1]:5433", "b:5432", "c:99"]);
    assert_eq!(config.target_session, TargetSession::Primary);

    let config = parse("postgres://h");
    assert_eq!((config.user.as_str(), config.dbname.as_str()), ("me", "me"));
    assert_eq!((config.sslmode, config.application_name.as_str()), (SslMode::Prefer, "farshore"));
    assert_eq!(config.connect_timeout, Duration::from_secs(10));
    assert_eq!(config.with_application_name("x").application_name, "x");
    assert_eq!(parse("postgres://h?ssl=true").sslmode, SslMode::Require);
}

#[test]
fn keywords_and_values() {
    let config = parse(
        "host = h1,h2 hostaddr=127.0.0.1,::1 port=1,2 dbname='my \\'db\\'' password = \\'x\\\\ \
         connect_timeout=3 keepalives_idle=7 keepalives=0 tcp_user_timeout=250 \
         channel_binding=disable options='-c a=b' user=''",
    );
    assert_eq!((config.dbname.as_str(), config.user.as_str()), ("my 'db'", "me"));
    assert_eq!(config.password.clone().unwrap().expose(), "'x\\");
    assert_eq!(config.hosts[1].address, tcp("h2"));
    assert_eq!((config.hosts[1].ip, config.hosts[1].port), ("::1".parse().ok(), 2));
    assert_eq!(config.connect_timeout, Duration::from_secs(3));
    assert_eq!(config.keepalive.idle, Duration::from_secs(7));
    assert!(!config.keepalive.enabled);
    assert_eq!(config.keepalive.user_timeout, Duration::from_millis(250));
    assert_eq!(config.channel_binding, ChannelBinding::Disable);
    assert_eq!(config.options.as_deref(), Some("-c a=b"));
    assert_eq!(parse("host=h connect_timeout=0").connect_timeout, Duration::from_secs(10));
    assert_eq!(parse("host=h sslrootcert=system").sslmode, SslMode::VerifyFull);
}

#[test]
fn what_is_wrong_is_named_and_no_password_shown() {
    for (text, named) in [
        ("hots=h", "unknown connection parameter \"hots\""),
        ("postgres://h/?sslmod=x", "\"sslmod\""),
        ("host=h sslmode=on", "\"sslmode\" cannot be \"on\""),
        ("host=h port=0", "1 to 65535"),
        ("host=h port=1,2", "\"port\""),
        ("host=h,i hostaddr=127.0.0.1", "\"hostaddr\""),
        ("host=h replication=database", "leave it out"),
        ("host=h sslnegotiation=direct", "\"sslnegotiation\""),
        ("host=h sslcrl=/x", "not supported"),
        ("host=h require_auth=none", "not supported"),
        ("host=h sslmode=require sslrootcert=system", "verify-full"),
        ("host=h client_encoding=LATIN1", "\"client_encoding\""),
        ("password='s3cret", "has no end"),
        ("host s3cret", "\"=\" expected after \"host\""),
        ("http://u:s3cret@h", "postgres://"),
        ("postgres://u:s3cret%zz@h", "the password"),
        ("postgres://u:s3cret@h:99999", "99999"),
        ("postgres://u:s3cret", "the port is not a number"),
        ("postgres://u:s3cret/x@h/d", "/ is written as %2F"),
        ("postgres://u:s3cret?x@h/d", "? as %3F"),
        ("postgres://u:42/s3cret@h/d", "/ is written as %2F"),
        ("postgres://u:x@y/s3cret@h/d", "@ as %40"),
        ("postgres://u:s3cret@[::1", "]"),
        ("postgres://u:s3cret@h?x", "\"x\" has no value"),
        ("service=none", "no service \"none\""),
    ] {
        let message = error(text).to_string();
        assert!(message.contains(named), "{text}: {message}");
        assert!(!message.contains("s3cret"), "{message}");
    }
    let config = parse("postgres://u:s3cret@h/d");
    assert!(!format!("{config:?} {config} {}", config.redacted()).contains("s3cret"));
}

#[test]
fn the_string_goes_before_the_service_and_the_service_before_the_environment() {
    let home = tempfile::tempdir().unwrap();
    let service = home.path().join("services.conf");
    fs::write(&service, "[a]\nuser=service\ndbname=service\nhost=h\n\n# x\n[b]\nhots=x\n[c]\nx\n")
        .unwrap();
    let environment = environment()
        .with("HOME", home.path().to_str().unwrap())
        .with("PGSERVICEFILE", service.to_str().unwrap())
        .with("PGUSER", "environment")
        .with("PGDATABASE", "environment")
        .with("PGPASSWORD", "environment")
        .with("PGSSLMODE", "require")
        .with("PGAPPNAME", "");
    let config = Config::parse_in("service=a user=string", &environment).unwrap();
    assert_eq!((config.user.as_str(), config.dbname.as_str()), ("string", "service"));
    assert_eq!(config.password.unwrap().expose(), "environment");
    assert_eq!((config.sslmode, config.application_name.as_str()), (SslMode::Require, "farshore"));

    let named = environment.clone().with("PGSERVICE", "a");
    assert_eq!(Config::parse_in("", &named).unwrap().user, "service");
    let message = Config::parse_in("service=b", &environment).unwrap_err().to_string();
    assert!(message.contains("line 8") && message.contains("\"hots\""), "{message}");
    let message = Config::parse_in("service=c", &environment).unwrap_err().to_string();
    assert!(message.contains("line 10"), "{message}");

    // Files in the home directory are used when they are there.
    let config = Config::parse_in("host=h", &environment).unwrap();
    assert_eq!((config.passfile, config.sslrootcert), (None, None));
    fs::create_dir(home.path().join(".postgresql")).unwrap();
    fs::write(home.path().join(".postgresql/root.crt"), "").unwrap();
    fs::write(home.path().join(".pgpass"), "").unwrap();
    let config = Config::parse_in("host=h", &environment).unwrap();
    assert_eq!(config.passfile, Some(home.path().join(".pgpass")));
    assert_eq!(config.sslrootcert, Some(home.path().join(".postgresql/root.crt")));
    let config = Config::parse_in("host=h passfile=/x sslrootcert=/y", &environment).unwrap();
    assert_eq!(
        (config.passfile, config.sslrootcert),
        (Some(PathBuf::from("/x")), Some("/y".into()))
    );
}

#[test]
fn a_value_may_look_like_a_url() {
    for value in ["://*", "a://b", "p=q://r s"] {
        let config = parse(&format!("host=h password='{value}' dbname=d"));
        assert_eq!(config.password, Some(Password::new(value)));
    }
    assert_eq!(parse("application_name=http://x host=h").application_name, "http://x");
    for text in ["mysql://h/d", "://h", " postgres://h/d"] {
        assert!(error(text).to_string().contains("must begin with postgres://"), "{text}");
    }
}

proptest! {
    #[test]
    fn parsing_is_total(text in "(postgres://)?[ -~é]{0,40}") {
        let _ = Config::parse_in(&text, &environment());
    }

    #[test]
    fn quoted_values_come_back(value in "[ -~é]{1,20}") {
        let quoted = value.replace('\\', "\\\\").replace('\'', "\\'");
        let config = parse(&format!("host=h password='{quoted}' dbname=d"));
        prop_assert_eq!(config.password, Some(Password::new(value)));
        prop_assert_eq!(config.dbname, "d");
    }

    #[test]
    fn escaped_urls_come_back(value in "[ -~é]{1,20}") {
        let escaped: String = value.bytes().map(|b| format!("%{b:02X}")).collect();
        let config = parse(&format!("postgres://{escaped}:{escaped}@h/{escaped}"));
        prop_assert_eq!(config.password, Some(Password::new(value.clone())));
        prop_assert_eq!((config.user, config.dbname), (value.clone(), value));
    }
}
