//! Replication submessages: documented bytes, there and back, every tag and every length.

use farshore_model::{Lsn, PgTime};
use farshore_wire::replication::{
    FromClient, FromServer, HotStandbyFeedback, PrimaryKeepalive, ReplicationError,
    StandbyStatusUpdate, XLogData,
};
use proptest::prelude::*;

#[test]
fn documented_bytes() {
    let mut data = b"w".to_vec();
    for number in [0x16_B374_D848_u64, 0x17_0000_0000, 5] {
        data.extend_from_slice(&number.to_be_bytes());
    }
    data.extend_from_slice(b"payload");
    assert_eq!(
        FromServer::decode(&data).unwrap(),
        FromServer::XLogData(XLogData {
            wal_start: Lsn(0x16_B374_D848),
            wal_end: Lsn(0x17_0000_0000),
            send_time: PgTime(5),
            data: b"payload",
        })
    );
    assert_eq!(
        FromServer::decode(b"k\0\0\0\0\0\0\0\x01\0\0\0\0\0\0\0\x02\x01").unwrap(),
        FromServer::PrimaryKeepalive(PrimaryKeepalive {
            wal_end: Lsn(1),
            send_time: PgTime(2),
            reply_requested: true,
        })
    );
    let mut out = Vec::new();
    FromClient::StandbyStatusUpdate(StandbyStatusUpdate {
        written: Lsn(3),
        flushed: Lsn(2),
        applied: Lsn(1),
        client_time: PgTime(-1),
        reply_requested: false,
    })
    .encode(&mut out);
    let mut expected = b"r".to_vec();
    for number in [3_i64, 2, 1, -1] {
        expected.extend_from_slice(&number.to_be_bytes());
    }
    expected.push(0);
    assert_eq!(out, expected);
    assert_eq!(
        FromServer::decode(b"k\0\0\0\0\0\0\0\x01\0\0\0\0\0\0\0\x02\x02"),
        Err(ReplicationError::Flag { tag: b'k', found: 2 })
    );
}

#[test]
fn every_tag_and_length() {
    for tag in 0..=u8::MAX {
        for len in 1..64 {
            let mut data = vec![0; len];
            data[0] = tag;
            let from_server = FromServer::decode(&data);
            match tag {
                b'w' => assert_eq!(from_server.is_ok(), len >= 25),
                b'k' => assert_eq!(from_server.is_ok(), len == 18),
                tag => assert_eq!(from_server, Err(ReplicationError::UnknownTag { tag })),
            }
            let from_client = FromClient::decode(&data);
            match tag {
                b'r' => assert_eq!(from_client.is_ok(), len == 34),
                b'h' => assert_eq!(from_client.is_ok(), len == 25),
                tag => assert_eq!(from_client, Err(ReplicationError::UnknownTag { tag })),
            }
        }
    }
    assert_eq!(FromServer::decode(b""), Err(ReplicationError::Empty));
    assert_eq!(FromClient::decode(b""), Err(ReplicationError::Empty));
}

proptest! {
    #[test]
    fn what_the_server_sends_comes_back(
        [wal_start, wal_end] in any::<[u64; 2]>(), time in any::<i64>(), reply_requested: bool,
        data in prop::collection::vec(any::<u8>(), 0..50),
    ) {
        for message in [
            FromServer::XLogData(XLogData {
                wal_start: Lsn(wal_start),
                wal_end: Lsn(wal_end),
                send_time: PgTime(time),
                data: &data,
            }),
            FromServer::PrimaryKeepalive(PrimaryKeepalive {
                wal_end: Lsn(wal_end),
                send_time: PgTime(time),
                reply_requested,
            }),
        ] {
            let mut out = Vec::new();
            message.encode(&mut out);
            prop_assert_eq!(FromServer::decode(&out).unwrap(), message);
        }
    }

    #[test]
    fn what_the_client_sends_comes_back(
        [written, flushed, applied] in any::<[u64; 3]>(), time in any::<i64>(),
        reply_requested: bool,
        [xmin, xmin_epoch, catalog_xmin, catalog_xmin_epoch] in any::<[u32; 4]>(),
    ) {
        let client_time = PgTime(time);
        for message in [
            FromClient::StandbyStatusUpdate(StandbyStatusUpdate {
                written: Lsn(written),
                flushed: Lsn(flushed),
                applied: Lsn(applied),
                client_time,
                reply_requested,
            }),
            FromClient::HotStandbyFeedback(HotStandbyFeedback {
                client_time,
                xmin,
                xmin_epoch,
                catalog_xmin,
                catalog_xmin_epoch,
            }),
        ] {
            let mut out = Vec::new();
            message.encode(&mut out);
            prop_assert_eq!(FromClient::decode(&out).unwrap(), message);
        }
    }
}
