//! docs/DISK_FORMAT.md says what the code does: every row of its tables is compared with encoded bytes.
#![allow(clippy::unwrap_used, clippy::panic)]

use strata_disk::{Geometry, RecordHeader, Superblock, FORMAT_VERSION, LOCK_FILE, MARKER_FILE};
use strata_types::{Fingerprint, GroupId, Namespace, PageKey, PageRecord, ShardId};

const DOCUMENT: &str = include_str!("../../../docs/DISK_FORMAT.md");
const PAGE_SIZE: u32 = 16;

/// Offset, length and name of each field in the table below a heading.
fn table(heading: &str) -> Vec<(usize, usize, String)> {
    let section = DOCUMENT.split("\n## ").find(|section| section.starts_with(heading)).unwrap();
    let number = |text: &str| -> usize {
        let terms = text.split('+').map(|term| match term.strip_suffix('P') {
            Some(times) => times.parse::<usize>().unwrap() * PAGE_SIZE as usize,
            None => term.parse().unwrap(),
        });
        terms.sum()
    };
    let rows = section.lines().filter(|line| line.starts_with("| ") && !line.contains("---")).skip(1);
    rows.map(|row| {
        let cells: Vec<&str> = row.trim_matches('|').split('|').map(str::trim).collect();
        (number(cells[0]), number(cells[1]), cells[2].to_owned())
    })
    .collect()
}

/// Rows follow each other without a gap, hold what `value` says, and end where the bytes do.
fn compare(heading: &str, bytes: &[u8], value: impl Fn(&str) -> Vec<u8>) {
    let mut at = 0;
    for (offset, length, name) in table(heading) {
        assert_eq!(offset, at, "{heading}: {name}");
        at += length;
        if name.starts_with("checksum") {
            let sum = xxhash_rust::xxh3::xxh3_64(&bytes[..offset]).to_le_bytes();
            assert_eq!(bytes[offset..at], sum, "{heading}: {name}");
        } else {
            let mut wanted = value(&name);
            wanted.resize(length, 0);
            assert_eq!(bytes[offset..at], wanted, "{heading}: {name}");
        }
    }
    assert!(bytes[at..].iter().all(|byte| *byte == 0), "{heading}: the table ends at {at}");
}

#[test]
fn the_superblock_is_as_documented() {
    let geometry = Geometry { page_size: PAGE_SIZE, page_bytes: 0x0123_4567, records_per_segment: 0x89ab };
    let (group, shard, fingerprint) = (GroupId(0x0102), ShardId(0x0304), Fingerprint([7; 32]));
    let block = Superblock { geometry, group, shard, fingerprint }.encode();
    compare("Superblock", &block, |name| match name {
        "magic `STRATASG`" => b"STRATASG".to_vec(),
        "format version" => FORMAT_VERSION.to_le_bytes().to_vec(),
        "records of the segment" => 0x89ab_u32.to_le_bytes().to_vec(),
        "page size, in tokens" => PAGE_SIZE.to_le_bytes().to_vec(),
        "payload bytes" => 0x0123_4567_u32.to_le_bytes().to_vec(),
        "group" => 0x0102_u16.to_le_bytes().to_vec(),
        "shard" => 0x0304_u16.to_le_bytes().to_vec(),
        "zero" => Vec::new(),
        "fingerprint" => vec![7; 32],
        other => panic!("the table names {other:?}, which no superblock has"),
    });
}

#[test]
fn the_header_is_as_documented() {
    let tokens: Vec<u32> = (0..PAGE_SIZE).map(|token| token * 1000 + 5).collect();
    let namespace = Namespace([1; 32]);
    let (parent, key) = (PageKey([2; 32]), PageKey([3; 32]));
    let header = RecordHeader {
        sequence: 0x0102_0304_0506,
        payload_bytes: 0x0a0b_0c0d,
        payload_checksum: u128::MAX / 7,
        group: GroupId(0x0102),
        shard: ShardId(0x0304),
        fingerprint: Fingerprint([4; 32]),
        record: PageRecord { namespace, parent, key, tokens: tokens.clone() },
    };
    let geometry = Geometry { page_size: PAGE_SIZE, page_bytes: 1, records_per_segment: 1 };
    assert_eq!(geometry.header_slot(), 256);
    let mut bytes = vec![0xff; geometry.header_slot() as usize];
    header.encode(&mut bytes);
    let last = table("Header").pop().unwrap();
    assert_eq!(last.0 + last.1, RecordHeader::length(PAGE_SIZE));
    compare("Header", &bytes, |name| match name {
        "magic `STRATAKV`" => b"STRATAKV".to_vec(),
        "format version" => FORMAT_VERSION.to_le_bytes().to_vec(),
        "page size, in tokens" => PAGE_SIZE.to_le_bytes().to_vec(),
        "sequence: higher was written later" => header.sequence.to_le_bytes().to_vec(),
        "payload bytes" => header.payload_bytes.to_le_bytes().to_vec(),
        "payload checksum, xxh3-128" => header.payload_checksum.to_le_bytes().to_vec(),
        "group" => 0x0102_u16.to_le_bytes().to_vec(),
        "shard" => 0x0304_u16.to_le_bytes().to_vec(),
        "zero" => Vec::new(),
        "fingerprint" => vec![4; 32],
        "namespace" => vec![1; 32],
        "key of the page before, or the namespace's root key" => vec![2; 32],
        "key of this page" => vec![3; 32],
        "tokens" => tokens.iter().flat_map(|token| token.to_le_bytes()).collect(),
        other => panic!("the table names {other:?}, which no header has"),
    });
}

#[test]
fn the_folder_tree_names_what_there_is() {
    assert!(DOCUMENT.contains(&format!("Format {FORMAT_VERSION}.")));
    for name in [MARKER_FILE, LOCK_FILE, "segment-000000.kh", "segment-000000.kv", "scratch.kh"] {
        assert!(DOCUMENT.contains(&format!("  {name}")), "{name}");
    }
}
