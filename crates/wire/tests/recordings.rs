//! Replays what real servers sent (recorded by `real_server.rs`).

mod oracle;
mod recorded;

use farshore_wire::pgoutput::decode;
use pg_walstream::protocol::LogicalReplicationParser;
use std::collections::BTreeSet;

fn recordings() -> Vec<String> {
    let folder = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/vectors");
    let entries = std::fs::read_dir(folder).unwrap();
    entries.map(|entry| std::fs::read_to_string(entry.unwrap().path()).unwrap()).collect()
}

#[test]
fn every_recording_is_read_to_its_end() {
    let mut seen = BTreeSet::new();
    for recording in recordings() {
        println!("{}", recording.lines().next().unwrap_or_default());
        seen.extend(recorded::replay(&recording).into_keys());
    }
    let kinds = "A A/ B C D E I K M O P R S T U Uk Uo Y b c p r".split(' ');
    for kind in kinds {
        assert!(seen.contains(kind), "no recording has {kind}");
    }
}

#[test]
fn another_parser_reads_the_same() {
    for recording in recordings() {
        let (mut context, messages) = recorded::messages(&recording);
        let mut parser =
            LogicalReplicationParser::with_protocol_version(u32::from(context.protocol));
        for data in messages {
            let theirs = parser.parse_wal_message(&data).unwrap();
            let ours = decode(&data, &context).unwrap();
            oracle::with_ours(&theirs.message, |message| assert_eq!(ours.message, message));
            if ours.xid.is_some() {
                assert_eq!(theirs.xid, ours.xid);
            }
            context.follow(&ours.message);
        }
    }
}
