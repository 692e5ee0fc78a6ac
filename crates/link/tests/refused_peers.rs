//! Peers that must not get in, or must be thrown out; each while a good session goes on.

mod sites;

use anyhow::{Context, Result, bail, ensure};
use bytes::Bytes;
use farshore_link::certificates::Authority;
use farshore_link::frame::{self, Header, Kind, PAYLOAD_BYTES_MAX};
use farshore_link::handshake::{Answer, Hello, VERSION_MAX};
use farshore_link::{
    Dialer, Identity, IdentityFiles, LinkError, LinkOptions, Listener, Receiver, Sender,
};
use sites::log::Log;
use sites::raw::{Raw, hello};
use sites::{Sites, open, options, soon};
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;
use time::OffsetDateTime;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};

/// A listener, and a session with it that nothing may disturb.
struct Ground {
    sites: Sites,
    listener: Listener,
    log: Log,
    good: ((Sender, Receiver), (Sender, Receiver)),
}

impl Ground {
    async fn new() -> Result<Ground> {
        Ground::with(Sites::new()?, LinkOptions::default()).await
    }

    async fn with(sites: Sites, options: LinkOptions) -> Result<Ground> {
        let log = Log::catch();
        let listener =
            Listener::bind("127.0.0.1:0", sites.identity("near")?, options.clone()).await?;
        let address = listener.local_address().to_string();
        let good = open(&listener, &address, &*sites.identity("good")?, options).await?;
        let good = (good.0.split(), good.1.split());
        Ok(Ground { sites, listener, log, good })
    }

    fn address(&self) -> SocketAddr {
        self.listener.local_address()
    }

    /// The good session carries messages both ways, over all its connections.
    async fn good_goes_on(&mut self) -> Result<()> {
        let ((to_near, from_near), (to_good, from_good)) = &mut self.good;
        let message = Bytes::from(vec![1; 2 << 20]);
        let (sent, received, replied, taken) = soon("the good session goes on", async {
            tokio::join!(
                to_near.send(message.clone()),
                from_good.next(),
                to_good.send(message.clone()),
                from_near.next()
            )
        })
        .await?;
        sent?;
        replied?;
        ensure!(received? == Some(message.clone()) && taken? == Some(message));
        Ok(())
    }

    /// A dialer with these files, whoever signed them, that trusts the listener.
    async fn dial(&self, files: &IdentityFiles, expected: &str) -> Result<LinkError> {
        let identity = Identity::load(files)?;
        let address = self.address().to_string();
        let dialer = Dialer::new(&address, expected, &identity, options(4))?;
        match soon("an answer", dialer.open(b"request")).await? {
            Ok(_) => bail!("it got in"),
            Err(error) => Ok(error),
        }
    }
}

/// Who is waited for is waited for so long.
fn patient_for(seconds: u64) -> LinkOptions {
    LinkOptions { connect_timeout: Duration::from_secs(seconds), ..LinkOptions::default() }
}

fn days_ago(days: i64) -> OffsetDateTime {
    OffsetDateTime::now_utc() - time::Duration::days(days)
}

#[tokio::test]
async fn certificates_that_do_not_do() -> Result<()> {
    let sites = Sites::new()?;
    let folder = sites.folder("bad")?;
    let between = |site: &str, from, to| -> Result<IdentityFiles> {
        let made = sites.authority.issue_between(site, days_ago(from), days_ago(to), &folder)?;
        Ok(sites.files_of(&made.certificate, &made.key))
    };
    let expired = between("expired", 40, 10)?;
    // Not a whole number of days: the words must stay the same while the test runs, since one line
    // is said per reason.
    let half = time::Duration::hours(12);
    let made =
        sites.authority.issue_between("early", days_ago(-10) + half, days_ago(-40), &folder)?;
    let early = sites.files_of(&made.certificate, &made.key);
    let revoked = between("revoked", 1, -10)?;
    sites.authority.revoke("revoked")?;
    let other = Authority::create(&sites.folder("other")?)?;
    let made = other.issue("foreign", 10, &folder)?;
    let foreign = sites.files_of(&made.certificate, &made.key);
    let right = sites.files("right")?;

    let mut ground = Ground::with(sites, LinkOptions::default()).await?;
    for (files, expected, error_words, log_words) in [
        (&expired, "near", "expired or not valid yet", &["its certificate", "expired 10 days ago"]),
        (
            &early,
            "near",
            "expired or not valid yet",
            &["its certificate", "will be valid in 10 days"],
        ),
        (&revoked, "near", "it has been revoked", &["its certificate", "it has been revoked"]),
        (
            &foreign,
            "near",
            "no authority that it trusts",
            &["its certificate", "no authority that this"],
        ),
        (
            &right,
            "elsewhere",
            "it is site near's, and site elsewhere",
            &["it refused", "certificate"],
        ),
    ] {
        let error = ground.dial(files, expected).await?;
        let text = error.to_string();
        println!("{text}");
        assert!(text.contains(error_words), "{text}");
        let is_ours = expected == "elsewhere";
        assert_eq!(matches!(error, LinkError::Untrusted { .. }), is_ours, "{error:?}");
        assert_eq!(matches!(error, LinkError::Rejected { .. }), !is_ours, "{error:?}");
        assert!(!error.may_pass());
        let line = ground.log.line_with(log_words).await?;
        println!("{line}");
        assert!(line.contains("WARN") && line.contains("peer=127.0.0.1:"), "{line}");
        ground.good_goes_on().await?;
        // One line per dialer that is turned away, not one per connection.
        assert!(!ground.log.text().contains("turned"), "{}", ground.log.text());
    }
    Ok(())
}

#[tokio::test]
async fn a_listener_whose_certificate_does_not_do() -> Result<()> {
    let sites = Sites::new()?;
    let folder = sites.folder("bad")?;
    let (from, to) = (days_ago(40), days_ago(10));
    let expired = sites.authority.issue_between("expired", from, to, &folder)?;
    let revoked = sites.authority.issue("revoked", 10, &folder)?;
    let before = sites.identity("dialer")?;
    sites.authority.revoke("revoked")?;
    let (certificate, key) =
        (sites.folder("dialer")?.join("dialer.crt"), sites.folder("dialer")?.join("dialer.key"));
    let after = Arc::new(Identity::load(&sites.files_of(&certificate, &key))?);
    let other = Authority::create(&sites.folder("other")?)?.issue("foreign", 10, &folder)?;
    assert_eq!(before.doubt(), None);
    for (site, made, words) in [
        ("expired", &expired, "it expired 10 days ago"),
        ("revoked", &revoked, "it has been revoked"),
        ("foreign", &other, "no authority that this site trusts has signed it"),
    ] {
        let identity = Identity::load(&sites.files_of(&made.certificate, &made.key))?;
        let (doubt, by_all) = identity.doubt().context("no doubt about it")?;
        assert_eq!((doubt.contains(words), by_all), (true, site != "foreign"), "{doubt}");
        let listener =
            Listener::bind("127.0.0.1:0", Arc::new(identity), LinkOptions::default()).await?;
        let address = listener.local_address().to_string();
        let dialer = Dialer::new(&address, site, &after, options(2))?;
        let error = soon("an error", dialer.open(b"")).await?.unwrap_err();
        assert!(
            matches!(&error, LinkError::Untrusted { why, .. } if why.contains(words)),
            "{error}"
        );
        if site == "revoked" {
            // What a site has not been told of, it cannot know.
            let dialer = Dialer::new(&address, site, &before, options(1))?;
            let (opened, accepted) = tokio::join!(dialer.open(b""), async {
                listener.next().await.accept(options(1)).await
            });
            opened?;
            accepted?;
        }
    }
    Ok(())
}

#[tokio::test]
async fn peers_without_a_site() -> Result<()> {
    let mut ground = Ground::new().await?;
    let mut raw = Raw::connect(ground.address(), None).await?;
    let error = soon("an end", raw.end()).await?.unwrap_err();
    assert!(error.to_string().contains("CertificateRequired"), "{error}");
    ground.log.line_with(&["its certificate does not do: it showed no certificate"]).await?;
    ground.good_goes_on().await?;

    // Signed by the right authority, for something else.
    let folder = ground.sites.folder("unnamed")?;
    let authority = ground.sites.authority.certificate();
    let ca_key =
        rcgen::KeyPair::from_pem(&std::fs::read_to_string(authority.with_extension("key"))?)?;
    let issuer = rcgen::Issuer::from_ca_cert_pem(&std::fs::read_to_string(&authority)?, ca_key)?;
    let key = rcgen::KeyPair::generate()?;
    let params = rcgen::CertificateParams::new(vec!["web.example.com".to_owned()])?;
    let certificate = params.signed_by(&key, &issuer)?;
    let files = ground.sites.files_of(&folder.join("web.crt"), &folder.join("web.key"));
    std::fs::write(&files.certificate, certificate.pem())?;
    std::fs::write(&files.key, key.serialize_pem())?;
    let mut raw = Raw::connect(ground.address(), Some(&files)).await?;
    raw.say(&hello().encode()).await?;
    let answer = soon("an answer", raw.answer()).await??;
    assert!(
        matches!(&answer, Answer::Refused { why } if why.contains("this site's certificate does not do: it names no site")),
        "{answer:?}"
    );
    ground
        .log
        .line_with(&["site=\"unknown\"", "its certificate does not do: it names no site"])
        .await?;
    ground.good_goes_on().await?;

    for (bytes, words) in [
        (&b"GET / HTTP/1.1\r\nHost: near\r\n\r\n"[..], "it does not speak TLS"),
        (&[0xff; 600], "it does not speak TLS"),
        (b"", "it closed the connection during TLS"),
        (b"\x16\x03\x01", "it closed the connection during TLS"),
    ] {
        let mut tcp = TcpStream::connect(ground.address()).await?;
        tcp.write_all(bytes).await?;
        tcp.shutdown().await?;
        // An alert perhaps, then the end.
        soon("an end", tcp.read_to_end(&mut Vec::new())).await??;
        ground.log.line_with(&["site=\"unknown\"", words]).await?;
        ground.good_goes_on().await?;
    }
    Ok(())
}

#[tokio::test]
async fn handshakes_that_break_the_rules() -> Result<()> {
    let mut ground = Ground::with(Sites::new()?, patient_for(1)).await?;
    let files = ground.sites.files("odd")?;
    let mut changed = hello().encode();
    *changed.last_mut().context("bytes")? ^= 1;
    let big = Hello { request: vec![0; (64 << 10) + 1], ..hello() };
    for (bytes, words) in [
        (Hello { version_min: 7, version_max: 9, ..hello() }.encode(), "it speaks versions 7 to 9"),
        (big.encode(), "its request has 65537 bytes; 65536 are allowed"),
        (
            Hello { stripe: 1, stripes: 2, request: vec![], ..hello() }.encode(),
            "it joins a session that is not being opened here",
        ),
        (Hello { stripes: 200, ..hello() }.encode(), "its handshake is malformed"),
        (changed, "its handshake has checksum"),
    ] {
        let mut raw = Raw::connect(ground.address(), Some(&files)).await?;
        raw.say(&bytes).await?;
        match soon("an answer", raw.answer()).await?? {
            Answer::Refused { why } => assert!(why.contains(words), "{why}"),
            answer => bail!("{answer:?}"),
        }
        soon("the end", raw.end()).await??;
        let line = ground.log.line_with(&["site=\"odd\"", words]).await?;
        println!("{line}");
        ground.good_goes_on().await?;
    }

    let mut stranger = Raw::connect(ground.address(), Some(&files)).await?;
    stranger.say(&[b'x'; 100]).await?;
    ground.log.line_with(&["site=\"odd\"", "does not speak Farshore's link protocol"]).await?;
    let mut gone = Raw::connect(ground.address(), Some(&files)).await?;
    gone.0.shutdown().await?;
    ground.log.line_with(&["site=\"odd\"", "before it said what it wants"]).await?;
    ground.good_goes_on().await?;

    let long = vec![0; (64 << 10) + 1];
    let identity = Identity::load(&files)?;
    let dialer = Dialer::new(&ground.address().to_string(), "near", &identity, options(1))?;
    let error = dialer.open(&long).await.unwrap_err();
    assert!(matches!(error, LinkError::Options(_)), "{error}");
    Ok(())
}

#[tokio::test]
async fn a_connection_can_join_only_its_own_site_and_place() -> Result<()> {
    let mut ground = Ground::with(Sites::new()?, patient_for(5)).await?;
    let (odd, thief) = (ground.sites.files("odd")?, ground.sites.files("thief")?);
    let first = Hello { stripes: 3, ..hello() };
    let further = |stripe| Hello { stripe, request: vec![], ..first.clone() };
    let refused = |answer| match answer {
        Answer::Refused { why } => Ok(why),
        answer => bail!("{answer:?}"),
    };

    // It comes before the first one, which it may, and is another site's, which it may not be.
    let mut stolen = Raw::connect(ground.address(), Some(&thief)).await?;
    stolen.say(&further(1).encode()).await?;
    // This one comes before the first too.
    let mut early = Raw::connect(ground.address(), Some(&odd)).await?;
    early.say(&further(2).encode()).await?;
    let mut opening = Raw::connect(ground.address(), Some(&odd)).await?;
    opening.say(&first.encode()).await?;
    // The first of these waits for what it does not agree with, so that the second comes behind it.
    for (files, hello, words) in [
        (&odd, Hello { stripes: 4, ..further(1) }, "does not agree with the first"),
        (&odd, first.clone(), "is being opened already"),
    ] {
        let mut raw = Raw::connect(ground.address(), Some(files)).await?;
        raw.say(&hello.encode()).await?;
        let why = refused(soon("an answer", raw.answer()).await??)?;
        assert!(why.contains(words), "{why}");
        ground.log.line_with(&[words]).await?;
    }
    // None of it hurt the session that is being opened.
    let mut last = Raw::connect(ground.address(), Some(&odd)).await?;
    last.say(&further(1).encode()).await?;
    let incoming = soon("the session", ground.listener.next()).await?;
    assert_eq!((&incoming.site[..], &incoming.request[..]), ("odd", &b"please"[..]));
    let session = incoming.accept(LinkOptions::default()).await?;
    for raw in [&mut early, &mut last, &mut opening] {
        let answer = soon("an answer", raw.answer()).await??;
        assert!(matches!(answer, Answer::Accepted { version: VERSION_MAX, .. }), "{answer:?}");
    }
    drop(session);
    let words = "not being opened here";
    let why = refused(soon("an answer", stolen.answer()).await??)?;
    assert!(why.contains(words), "{why}");
    ground.log.line_with(&["site=\"thief\"", words]).await?;

    // The same place twice ends the opening.
    let first = Hello { session: [2; 16], ..first.clone() };
    let mut opening = Raw::connect(ground.address(), Some(&odd)).await?;
    opening.say(&first.encode()).await?;
    let mut twice = Vec::new();
    for _ in 0..2 {
        let mut raw = Raw::connect(ground.address(), Some(&odd)).await?;
        raw.say(&Hello { session: [2; 16], ..further(1) }.encode()).await?;
        twice.push(raw);
    }
    ground.log.line_with(&["site=\"odd\"", "its connection 1 came twice"]).await?;
    ground.good_goes_on().await
}

#[tokio::test]
async fn handshakes_that_stall() -> Result<()> {
    let connect_timeout = Duration::from_millis(700);
    let options = LinkOptions { connect_timeout, ..LinkOptions::default() };
    let mut ground = Ground::with(Sites::new()?, options.clone()).await?;
    let odd = ground.sites.files("odd")?;
    let good = ground.sites.identity("another")?;

    let mute = TcpStream::connect(ground.address()).await?;
    let after_tls = Raw::connect(ground.address(), Some(&odd)).await?;
    let mut half = Raw::connect(ground.address(), Some(&odd)).await?;
    half.say(&hello().encode()[..30]).await?;
    // Meanwhile others get in.
    let address = ground.address().to_string();
    open(&ground.listener, &address, &good, options.clone()).await?;
    for _ in 0..3 {
        ground.log.line_with(&["did not finish the handshake within 700ms"]).await?;
    }
    drop((mute, after_tls, half));

    let mut alone = Raw::connect(ground.address(), Some(&odd)).await?;
    alone.say(&Hello { stripes: 4, ..hello() }.encode()).await?;
    let words = "3 of its 4 connections did not come within 700ms";
    ground.log.line_with(&["site=\"odd\"", words]).await?;
    ground.good_goes_on().await?;

    // The other way round: what listens there says nothing, or something else, or is not there.
    let silent = TcpListener::bind("127.0.0.1:0").await?;
    let address = silent.local_addr()?.to_string();
    let error = Dialer::new(&address, "near", &good, options.clone())?.open(b"").await.unwrap_err();
    assert!(error.to_string().contains("did not answer within 700ms"), "{error}");
    assert!(error.may_pass());
    let web = tokio::spawn(async move {
        loop {
            let (mut tcp, _) = silent.accept().await?;
            tcp.write_all(b"HTTP/1.1 400 Bad Request\r\n\r\n").await?;
            tcp.read_to_end(&mut Vec::new()).await?;
            if false {
                return anyhow::Ok(());
            }
        }
    });
    // The first connection is the one given up above.
    let dialer = Dialer::new(&address, "near", &good, options.clone())?;
    let error = soon("an error", dialer.open(b"")).await?.unwrap_err();
    assert!(matches!(error, LinkError::NotALink { .. }), "{error}");
    web.abort();
    let _ = web.await;
    let error = soon("an error", dialer.open(b"")).await?.unwrap_err();
    assert!(matches!(error, LinkError::Connect { .. }), "{error}");
    // A listener that takes the connection and never answers the request.
    let dialer = Dialer::new(&ground.address().to_string(), "near", &good, options)?;
    let error = soon("an error", dialer.open(b"")).await?.unwrap_err();
    assert!(error.to_string().contains("did not answer the request within 700ms"), "{error}");
    Ok(())
}

fn piece(kind: Kind, number: u64, payload: &[u8]) -> Vec<u8> {
    let header = Header { kind, number, payload_bytes: payload.len() as u32 };
    let mut bytes = header.encode([payload]).to_vec();
    bytes.extend(payload);
    bytes
}

#[tokio::test]
async fn frames_that_break_the_rules() -> Result<()> {
    let mut ground = Ground::new().await?;
    let odd = ground.sites.files("odd")?;
    let first = |number, payload: &[u8]| {
        piece(Kind::First { message_bytes: payload.len() as u32 }, number, payload)
    };
    let mut changed = first(0, b"hello");
    *changed.last_mut().context("bytes")? ^= 1;
    let mut oversized = first(0, b"hello");
    oversized[4..8].copy_from_slice(&(PAYLOAD_BYTES_MAX as u32 + 1).to_le_bytes());
    let mut huge = first(0, b"hello");
    huge[16..20].copy_from_slice(&u32::MAX.to_le_bytes());
    let mut unknown = first(0, b"hello");
    unknown[0] = 77;
    let beyond: Vec<u8> =
        (1..=3).flat_map(|number| first(number, &[0; PAYLOAD_BYTES_MAX])).collect();
    for (bytes, words) in [
        (changed, "has checksum"),
        (oversized, "announces 262145 bytes"),
        (huge, "a message of 4294967295 bytes is announced"),
        (unknown, "unknown kind of frame 77"),
        (beyond, "exceeds the credit"),
        ([first(1, b"a"), first(1, b"a")].concat(), "came twice"),
        (piece(Kind::More, 0, b"a"), "began in its middle"),
        ([piece(Kind::End, 1, b""), first(1, b"a")].concat(), "named as the end"),
        (piece(Kind::Ended, 0, b""), "confirmed an end that was not sent"),
        (
            [piece(Kind::First { message_bytes: 9 }, 0, b"a"), piece(Kind::End, 1, b"")].concat(),
            "ended within a message",
        ),
    ] {
        let mut raw = Raw::connect(ground.address(), Some(&odd)).await?;
        raw.say(&hello().encode()).await?;
        let accepted = LinkOptions { window_bytes: 512 << 10, ..LinkOptions::default() };
        let session = soon("it comes", ground.listener.next()).await?.accept(accepted).await?;
        assert!(matches!(raw.answer().await?, Answer::Accepted { .. }));
        let meter = session.meter();
        let (_sender, mut receiver) = session.split();
        raw.say(&bytes).await?;
        let error = match soon("an error", receiver.next()).await? {
            Ok(message) => bail!("{words}: {message:?}"),
            Err(error) => error,
        };
        assert!(error.to_string().contains(words), "{error}");
        assert!(error.to_string().contains("site odd"), "{error}");
        let (_, why) = soon("last words", raw.frame(Kind::Close)).await??;
        assert_eq!(String::from_utf8(why)?, error.to_string());
        drop(raw);
        soon("all tasks end", meter.closed()).await?;
        assert!(meter.traffic().held_bytes_peak <= (512 << 10) + frame::cost(PAYLOAD_BYTES_MAX));
        ground.good_goes_on().await?;
    }
    Ok(())
}
