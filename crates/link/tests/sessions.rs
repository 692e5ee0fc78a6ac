//! What a session carries, and how it ends.

mod sites;

use anyhow::{Context, Result, bail, ensure};
use bytes::Bytes;
use farshore_link::{Dialer, Identity, LinkError, LinkOptions, Pacer, Rates, Receiver, Sender};
use rand::rngs::StdRng;
use rand::{Rng, RngExt, SeedableRng};
use sites::relay::Relay;
use sites::{connected, near_and_far, open, options, soon};
use std::num::NonZeroU64;
use std::sync::Arc;
use std::sync::atomic::Ordering::SeqCst;
use std::time::{Duration, Instant};

/// Most are small, one in 200 takes several pieces.
fn random_message(random: &mut StdRng) -> Bytes {
    let longest = match random.random_range(0..200) {
        0 => 600_000,
        1..6 => 30_000,
        6..20 => 0,
        _ => 1_000,
    };
    let mut message = vec![0; random.random_range(0..=longest)];
    random.fill_bytes(&mut message);
    message.into()
}

async fn send_random(mut sender: Sender, seed: u64, count: usize) -> Result<()> {
    let mut random = StdRng::seed_from_u64(seed);
    for _ in 0..count {
        let message = random_message(&mut random);
        let middle = random.random_range(0..=message.len());
        sender.send_parts(&[message.slice(..middle), message.slice(middle..)]).await?;
    }
    sender.finish().await?;
    Ok(())
}

async fn expect_random(mut receiver: Receiver, seed: u64, count: usize) -> Result<()> {
    let mut random = StdRng::seed_from_u64(seed);
    for number in 0..count {
        let message = receiver.next().await?.context("it ended early")?;
        let expected = random_message(&mut random);
        let _: usize = random.random_range(0..=expected.len());
        ensure!(message == expected, "message {number} is another");
    }
    ensure!(receiver.next().await?.is_none(), "it did not end");
    Ok(())
}

async fn both_ways(connections: usize, window_bytes: usize) -> Result<()> {
    const COUNT: usize = 10_000;
    let seed = std::env::var("FARSHORE_SEED").ok().and_then(|seed| seed.parse().ok());
    let seed = seed.unwrap_or(7_u64);
    println!("FARSHORE_SEED={seed}");
    let options = LinkOptions { window_bytes, ..options(connections) };
    let (near, far) = connected(options).await?;
    let meters = (near.meter(), far.meter());
    let ((near_send, near_receive), (far_send, far_receive)) = (near.split(), far.split());
    let work = [
        tokio::spawn(send_random(near_send, seed, COUNT)),
        tokio::spawn(send_random(far_send, seed + 1, COUNT)),
        tokio::spawn(expect_random(near_receive, seed + 1, COUNT)),
        tokio::spawn(expect_random(far_receive, seed, COUNT)),
    ];
    for done in work {
        soon("messages go both ways", done).await???;
    }
    soon("all tasks end", meters.0.closed()).await?;
    soon("all tasks end", meters.1.closed()).await?;
    let traffic = meters.0.traffic();
    assert_eq!(traffic.messages_sent, COUNT as u64);
    assert_eq!(traffic.messages_received, COUNT as u64);
    assert!(traffic.held_bytes_peak <= window_bytes as u64, "{traffic:?}");
    assert_eq!((traffic.held_bytes, traffic.waiting_bytes), (0, 0));
    assert!(traffic.round_trip.is_some());
    Ok(())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn messages_keep_their_order_over_one_connection() -> Result<()> {
    both_ways(1, 1 << 20).await
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn messages_keep_their_order_over_four_connections() -> Result<()> {
    both_ways(4, 32 << 20).await
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn messages_keep_their_order_over_sixteen_connections() -> Result<()> {
    both_ways(16, 512 << 10).await
}

#[tokio::test]
async fn a_message_larger_than_the_window_passes() -> Result<()> {
    let window_bytes = 512 << 10;
    let (near, far) = connected(LinkOptions { window_bytes, ..options(4) }).await?;
    let ((mut send, _keep), (_also, mut receive)) = (near.split(), far.split());
    let mut message = vec![0; 20_000_001];
    StdRng::seed_from_u64(1).fill_bytes(&mut message);
    let message = Bytes::from(message);
    let (sent, received) =
        soon("it passes", async { tokio::join!(send.send(message.clone()), receive.next()) })
            .await?;
    sent?;
    assert!(received?.context("a message")? == message);
    let meter = receive.meter();
    assert!(meter.traffic().held_bytes_peak <= window_bytes as u64);
    Ok(())
}

#[tokio::test]
async fn a_message_too_long_is_refused_and_the_session_goes_on() -> Result<()> {
    let (near, far) = connected(options(2)).await?;
    let ((mut send, _keep), (_also, mut receive)) = (near.split(), far.split());
    let part = Bytes::from(vec![0; 64 << 20]);
    let error = send.send_parts(&vec![part; 17]).await.unwrap_err();
    assert!(matches!(error, LinkError::Options(_)), "{error}");
    send.send(Bytes::from_static(b"next")).await?;
    assert_eq!(receive.next().await?.as_deref(), Some(&b"next"[..]));
    Ok(())
}

/// The receiver's bound: nothing of a longer one is kept.
#[tokio::test]
async fn a_message_longer_than_the_other_side_takes_ends_the_session() -> Result<()> {
    let message_bytes_max = 1 << 20;
    let (near, far) = connected(LinkOptions { message_bytes_max, ..options(2) }).await?;
    let ((mut send, _keep), (_also, mut receive)) = (near.split(), far.split());
    send.send(Bytes::from(vec![0; 1 << 20])).await?;
    assert_eq!(receive.next().await?.map(|message| message.len()), Some(1 << 20));
    send.send(Bytes::from(vec![0; (1 << 20) + 1])).await?;
    let error = receive.next().await.unwrap_err().to_string();
    assert!(error.contains("1048577 bytes was announced; 1048576 are allowed"), "{error}");
    Ok(())
}

#[tokio::test]
async fn who_does_not_take_stops_the_sender_at_the_window_and_nobody_else() -> Result<()> {
    let window_bytes = 1 << 20;
    let options = LinkOptions { window_bytes, ..options(3) };
    let (_sites, listener, far) = near_and_far(options.clone()).await?;
    let address = listener.local_address().to_string();
    let slow = open(&listener, &address, &far, options.clone()).await?;
    let quick = open(&listener, &address, &far, options).await?;

    let ((mut send, _keep), (_also, mut receive)) = (slow.0.split(), slow.1.split());
    let (sender_meter, meter) = (send.meter(), receive.meter());
    let stuck = tokio::spawn(async move {
        for number in 0..5_000_u32 {
            let mut message = vec![0; 1_000];
            message[..4].copy_from_slice(&number.to_le_bytes());
            send.send(message.into()).await?;
        }
        send.finish().await
    });
    // Another session on the same listener carries much more meanwhile.
    let ((mut quick_send, _quick_keep), (_quick_also, mut quick_receive)) =
        (quick.0.split(), quick.1.split());
    for _ in 0..40 {
        quick_send.send(vec![1; 500_000].into()).await?;
        ensure!(quick_receive.next().await?.is_some());
    }
    // Every piece costs 64 bytes more than it has; another one would not fit.
    let full = window_bytes as u64 / 1_064 * 1_064;
    soon("the window fills", async {
        while meter.traffic().held_bytes < full {
            tokio::task::yield_now().await;
        }
    })
    .await?;
    assert_eq!(meter.traffic().held_bytes, full);
    assert_eq!(sender_meter.traffic().messages_sent, full / 1_064 + 1);
    assert!(!stuck.is_finished());

    for number in 0..5_000_u32 {
        let message = soon("messages go on", receive.next()).await??.context("a message")?;
        ensure!(message[..4] == number.to_le_bytes(), "{number}");
    }
    assert!(receive.next().await?.is_none());
    stuck.await??;
    assert_eq!(meter.traffic().held_bytes_peak, full);
    assert!(sender_meter.traffic().waited_for_peer > Duration::ZERO);
    Ok(())
}

#[tokio::test]
async fn one_direction_can_end_long_before_the_other() -> Result<()> {
    let (near, far) = connected(options(4)).await?;
    let meters = (near.meter(), far.meter());
    let ((mut send, mut take), (mut reply, mut receive)) = (near.split(), far.split());
    send.send(Bytes::from_static(b"question")).await?;
    soon("the end is confirmed", send.finish()).await??;
    assert_eq!(receive.next().await?.as_deref(), Some(&b"question"[..]));
    assert_eq!(receive.next().await?, None);
    assert_eq!(receive.next().await?, None);
    drop(receive);
    for number in 0..100_u8 {
        reply.send(vec![number; 10_000].into()).await?;
        assert_eq!(take.next().await?.context("a reply")?[0], number);
    }
    soon("the end is confirmed", reply.finish()).await??;
    assert_eq!(take.next().await?, None);
    drop(take);
    soon("all tasks end", meters.0.closed()).await?;
    soon("all tasks end", meters.1.closed()).await?;
    Ok(())
}

#[tokio::test]
async fn what_was_confirmed_is_there_although_the_peer_is_gone() -> Result<()> {
    let (near, far) = connected(options(4)).await?;
    let ((mut send, mut take), (reply, mut receive)) = (near.split(), far.split());
    for number in 0..50_u8 {
        send.send(vec![number; 10_000].into()).await?;
    }
    let meter = send.meter();
    let (ended, replied) = tokio::join!(send.finish(), reply.finish());
    ended?;
    replied?;
    assert_eq!(take.next().await?, None);
    drop(take);
    soon("all tasks end", meter.closed()).await?;
    for number in 0..50_u8 {
        assert_eq!(receive.next().await?.context("a message")?[0], number);
    }
    assert_eq!(receive.next().await?, None);
    Ok(())
}

#[tokio::test]
async fn a_dropped_half_gives_the_session_up_on_both_sides() -> Result<()> {
    for dropped in ["sender", "receiver", "both"] {
        let (near, far) = connected(options(4)).await?;
        let meters = (near.meter(), far.meter());
        let ((mut send, mut receive), (mut reply, mut take)) = (near.split(), far.split());
        send.send(Bytes::from_static(b"last")).await?;
        soon("it arrives", take.next()).await??;
        match dropped {
            "sender" => {
                drop(send);
                let error = soon("an error", receive.next()).await?.unwrap_err();
                assert!(matches!(error, LinkError::GivenUp), "{error}");
            }
            "receiver" => {
                drop(receive);
                let error = send.send(Bytes::new()).await.unwrap_err();
                assert!(matches!(error, LinkError::GivenUp), "{error}");
            }
            _ => drop((send, receive)),
        }
        let error = soon("an error", take.next()).await?.unwrap_err();
        assert!(
            matches!(&error, LinkError::PeerFailed { site, why }
                if site == "far" && why.contains("given up")),
            "{dropped}: {error}"
        );
        let error = soon("an error", reply.over()).await?.unwrap_err();
        assert!(matches!(error, LinkError::PeerFailed { .. }), "{error}");
        assert!(reply.send(Bytes::new()).await.is_err());
        soon("all tasks end", meters.0.closed()).await?;
        soon("all tasks end", meters.1.closed()).await?;
    }
    Ok(())
}

#[tokio::test]
async fn a_send_that_was_dropped_leaves_no_torn_message() -> Result<()> {
    let options = LinkOptions { window_bytes: 512 << 10, ..options(1) };
    let (near, far) = connected(options).await?;
    let ((mut send, _keep), (_also, mut receive)) = (near.split(), far.split());
    let long = Bytes::from(vec![5; 3 << 20]);
    tokio::select! {
        biased;
        _ = send.send(long.clone()) => bail!("it cannot go before anybody takes it"),
        () = tokio::task::yield_now() => {}
    }
    let next = Bytes::from_static(b"next");
    let (sent, first) = tokio::join!(send.send(next.clone()), receive.next());
    sent?;
    assert!(first?.context("a message")? == long);
    assert_eq!(receive.next().await?, Some(next));
    Ok(())
}

#[tokio::test]
async fn a_request_is_answered_in_words() -> Result<()> {
    let (_sites, listener, far) = near_and_far(options(1)).await?;
    let address = listener.local_address().to_string();
    for connections in [1, 4] {
        let dialer = Dialer::new(&address, "near", &far, options(connections))?;
        let (refused, ()) = tokio::join!(dialer.open(b"logs of sales"), async {
            let incoming = listener.next().await;
            assert_eq!((&incoming.site[..], &incoming.request[..]), ("far", &b"logs of sales"[..]));
            incoming.refuse("there is no publication sales. Known: orders").await;
        });
        let error = refused.unwrap_err();
        assert_eq!(
            error.to_string(),
            "site near refused: there is no publication sales. Known: orders"
        );
    }
    Ok(())
}

#[tokio::test]
async fn who_was_let_in_before_is_judged_anew() -> Result<()> {
    let (sites, listener, far) = near_and_far(options(1)).await?;
    let address = listener.local_address().to_string();
    let dialer = Dialer::new(&address, "near", &far, options(1))?;
    let asking = tokio::spawn({
        let dialer = dialer.clone();
        async move { dialer.open(b"a log").await }
    });
    let incoming = soon("somebody who asks", listener.next()).await?;
    let mut judged_anew = std::pin::pin!(incoming.judged_anew());
    let folder = sites.folder("near")?;
    let files = sites.files_of(&folder.join("near.crt"), &folder.join("near.key"));
    let identity = Arc::new(Identity::load(&files)?);
    // A certificate that was renewed judges nobody.
    listener.set_identity(identity.clone());
    assert_eq!(by_now(judged_anew.as_mut()).await, None);
    listener.judge_anew(identity);
    soon("to be judged anew", judged_anew).await?;
    // Also who has not been taken up by then; and not who comes after it.
    soon("the same of one more wait", incoming.judged_anew()).await?;
    drop(incoming);
    assert!(asking.await?.is_err());
    let asking = tokio::spawn(async move { dialer.open(b"a log").await });
    let incoming = soon("somebody who asks", listener.next()).await?;
    assert_eq!(by_now(std::pin::pin!(incoming.judged_anew())).await, None);
    drop(incoming);
    assert!(asking.await?.is_err());
    Ok(())
}

/// What a future has become by now, if anything.
async fn by_now<T>(future: std::pin::Pin<&mut impl Future<Output = T>>) -> Option<T> {
    tokio::select! {
        biased;
        done = future => Some(done),
        () = std::future::ready(()) => None,
    }
}

#[tokio::test]
async fn a_pacer_holds_all_sessions_of_a_link_together() -> Result<()> {
    let rates = Rates::new(NonZeroU64::new(2_000_000), Vec::new())?;
    let pacer = Arc::new(Pacer::new(rates));
    let paced = LinkOptions { pacer: Some(pacer.clone()), ..options(3) };
    let (_sites, listener, far) = near_and_far(options(3)).await?;
    let address = listener.local_address().to_string();
    let mut sessions = Vec::new();
    for _ in 0..2 {
        let dialer = Dialer::new(&address, "near", &far, paced.clone())?;
        let (dialed, accepted) = tokio::join!(dialer.open(b""), async {
            listener.next().await.accept(options(3)).await
        });
        sessions.push((dialed?.split(), accepted?.split()));
    }
    let began = Instant::now();
    let message = Bytes::from(vec![0; 600_000]);
    let [
        ((first, _first_keep), (_first_also, from_first)),
        ((second, _second_keep), (_second_also, from_second)),
    ] = &mut sessions[..]
    else {
        bail!("there are two");
    };
    soon("they arrive", async {
        let (a, b, c, d) = tokio::join!(
            first.send(message.clone()),
            second.send(message.clone()),
            from_first.next(),
            from_second.next()
        );
        a?;
        b?;
        ensure!(c?.is_some() && d?.is_some());
        Ok(())
    })
    .await??;
    // 1.2 MB at 2 MB/s, less what a pause may have earned and what goes without waiting at the end.
    let elapsed = began.elapsed();
    assert!(elapsed > Duration::from_millis(300), "{elapsed:?}");
    // Without a cap the rest goes at once; the clock does not matter then.
    pacer.set_rates(Rates::UNLIMITED);
    first.send(Bytes::from(vec![0; 20_000_000])).await?;
    Ok(())
}

#[tokio::test]
async fn a_peer_that_is_gone_in_the_middle_of_a_message_is_an_error_on_both_sides() -> Result<()> {
    let options = LinkOptions { window_bytes: 1 << 20, ..options(4) };
    let (_sites, listener, far) = near_and_far(options.clone()).await?;
    let relay = Relay::to(listener.local_address()).await?;
    let (near, far) = open(&listener, &relay.address.to_string(), &far, options).await?;
    let meters = (near.meter(), far.meter());
    let ((mut send, _keep), (_also, mut receive)) = (near.split(), far.split());
    send.send(Bytes::from_static(b"whole")).await?;
    let cut = async {
        while meters.1.traffic().wire_bytes_received < 2 << 20 {
            tokio::task::yield_now().await;
        }
        relay.cut();
    };
    let (sent, received, ()) = soon("both sides see it", async {
        tokio::join!(
            send.send(vec![3; 100 << 20].into()),
            async { (receive.next().await, receive.next().await) },
            cut
        )
    })
    .await?;
    let error = sent.unwrap_err();
    assert!(matches!(error, LinkError::Vanished { .. }), "{error}");
    assert_eq!(received.0?.as_deref(), Some(&b"whole"[..]));
    let error = received.1.unwrap_err();
    assert!(matches!(error, LinkError::Vanished { .. }), "{error}");
    soon("all tasks end", meters.0.closed()).await?;
    soon("all tasks end", meters.1.closed()).await?;
    Ok(())
}

#[tokio::test]
async fn a_network_that_swallows_everything_is_noticed() -> Result<()> {
    let dead_after = Duration::from_millis(500);
    let options = LinkOptions { keepalive: Duration::from_millis(50), dead_after, ..options(4) };
    let (_sites, listener, far) = near_and_far(options.clone()).await?;
    let relay = Relay::to(listener.local_address()).await?;
    let (near, far) = open(&listener, &relay.address.to_string(), &far, options).await?;
    let meters = (near.meter(), far.meter());
    let ((mut send, _keep), (_also, mut receive)) = (near.split(), far.split());
    // An idle session lives: pings go both ways on every connection.
    let before = relay.fate.carried.load(SeqCst);
    soon("pings", async {
        while relay.fate.carried.load(SeqCst) < before + 20_000 {
            tokio::task::yield_now().await;
        }
    })
    .await?;
    send.send(Bytes::from_static(b"alive")).await?;
    assert_eq!(receive.next().await?.as_deref(), Some(&b"alive"[..]));
    relay.fate.swallowed.store(true, SeqCst);
    let (left, right) =
        soon("silence is noticed", async { tokio::join!(send.over(), receive.next()) }).await?;
    for error in [left.unwrap_err(), right.unwrap_err()] {
        assert!(matches!(error, LinkError::Silent { after, .. } if after == dead_after), "{error}");
    }
    soon("all tasks end", meters.0.closed()).await?;
    soon("all tasks end", meters.1.closed()).await?;
    Ok(())
}

/// TLS gives nothing of a record before all of it is there. Here that takes twice as long as who is
/// dead is waited for.
#[tokio::test]
async fn a_line_so_slow_that_a_record_takes_long_is_not_a_dead_one() -> Result<()> {
    let dead_after = Duration::from_millis(400);
    let options = LinkOptions { keepalive: Duration::from_millis(100), dead_after, ..options(1) };
    let (_sites, listener, far) = near_and_far(options.clone()).await?;
    let relay = Relay::to(listener.local_address()).await?;
    let (near, far) = open(&listener, &relay.address.to_string(), &far, options).await?;
    let ((mut send, _keep), (_also, mut receive)) = (near.split(), far.split());
    let mut message = vec![0; 30_000];
    StdRng::seed_from_u64(3).fill_bytes(&mut message);
    let message = Bytes::from(message);
    relay.fate.drop_bytes.store(400, SeqCst);
    let (sent, received) =
        soon("it passes", async { tokio::join!(send.send(message.clone()), receive.next()) })
            .await?;
    sent?;
    assert!(received?.context("a message")? == message);
    Ok(())
}

#[tokio::test]
async fn a_bit_turned_over_on_the_way_is_an_error_and_never_data() -> Result<()> {
    let (_sites, listener, far) = near_and_far(options(2)).await?;
    let relay = Relay::to(listener.local_address()).await?;
    let (near, far) = open(&listener, &relay.address.to_string(), &far, options(2)).await?;
    let ((mut send, mut keep), (_also, mut receive)) = (near.split(), far.split());
    let message = Bytes::from(vec![9; 100_000]);
    let sending = async {
        for number in 0.. {
            if number == 20 {
                relay.fate.flip.store(true, SeqCst);
            }
            if send.send(message.clone()).await.is_err() {
                break;
            }
        }
    };
    let receiving = async {
        loop {
            match receive.next().await {
                Ok(received) => assert!(received.as_ref() == Some(&message)),
                Err(error) => break error,
            }
        }
    };
    let ((), error) = soon("it is noticed", async { tokio::join!(sending, receiving) }).await?;
    assert!(matches!(error, LinkError::Io { .. }), "{error}");
    let error = soon("the other side knows", keep.next()).await?.unwrap_err();
    println!("{error}");
    assert!(matches!(error, LinkError::PeerFailed { .. } | LinkError::Io { .. }), "{error}");
    Ok(())
}
