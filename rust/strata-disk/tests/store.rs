//! Round trips, restarts, locks, rights, caps, and what deleting, truncating and corrupting files does.
#![allow(clippy::unwrap_used, clippy::panic)]
mod common;

use common::{chain, config, HeapPages, Rig, PATIENCE};
use proptest::prelude::*;
use std::collections::HashMap;
use std::fs::{self, OpenOptions};
use std::os::unix::fs::{FileExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::time::Duration;
use strata_disk::{disk_usage, DirectIo, DiskConfig, DiskError, DiskStore, Health, LOCK_FILE, MARKER_FILE};
use strata_tier::{completion_queue, Mover};
use strata_types::{Fingerprint, PageRecord, TransferError, TransferKind};

fn segment(root: &Path, fingerprint: u8, number: usize) -> PathBuf {
    root.join(Fingerprint([fingerprint; 32]).to_hex()).join(format!("segment-{number:06}.kv"))
}

#[test]
fn every_size_of_page_returns_byte_for_byte_after_a_restart() {
    for (page_size, page_bytes) in
        [(1, 1), (1, 46_080), (16, 4096), (16, 737_280), (16, 12_289), (128, 70_000)]
    {
        let root = tempfile::tempdir().unwrap();
        let records = chain(1, 20, page_size);
        let places: Vec<u32> = [9, 8, 7, 0, 1, 2, 3, 4, 5, 6].into_iter().chain(10..20).collect();
        let mut rig = Rig::open(config(root.path(), 40 << 20, page_size, page_bytes));
        assert_eq!(rig.spill(&places, &records).error, None);
        let done = rig.prefetch(&places, &records);
        assert_eq!((done.pages_whole, done.error, done.bytes), (20, None, 20 * u64::from(page_bytes)));
        drop(rig);
        let mut rig = Rig::open(config(root.path(), 40 << 20, page_size, page_bytes));
        let found: Vec<_> = rig.recovered.records.iter().map(|r| (r.page.0, r.record.clone())).collect();
        let wanted: Vec<_> = places.iter().copied().zip(records.iter().cloned()).collect();
        assert_eq!(found, wanted, "in the order of the chain");
        assert_eq!((rig.recovered.damaged, rig.recovered.superseded), (0, 0));
        assert_eq!(rig.prefetch(&places, &records).error, None);
    }
}

#[test]
fn what_was_asked_for_must_be_what_is_there() {
    let root = tempfile::tempdir().unwrap();
    let mut rig = Rig::open(config(root.path(), 1 << 20, 16, 4096));
    let records = chain(1, 4, 16);
    rig.spill(&[0, 1, 2, 3], &records);
    let mut wrong = records.clone();
    wrong[2] = chain(2, 1, 16).remove(0);
    let done = rig.prefetch(&[0, 1, 2, 3], &wrong);
    assert_eq!(done.pages_whole, 2);
    assert!(matches!(done.error, Some(TransferError::Corrupt { record, .. }) if record.0 == 2));
    let mut forged = records[0].clone();
    forged.namespace.0[0] ^= 1;
    assert!(matches!(rig.prefetch(&[0], &[forged]).error, Some(TransferError::Corrupt { .. })));
    let blank = rig.prefetch(&[9], &records[..1]).error.unwrap().to_string();
    assert!(blank.contains("record 9") && blank.contains("no header"), "{blank}");
}

#[test]
fn malformed_transfers_complete_with_a_reason() {
    let root = tempfile::tempdir().unwrap();
    let mut rig = Rig::open(config(root.path(), 1 << 20, 16, 4096));
    let records = chain(1, 2, 16);
    let beyond = rig.store.capacity();
    for (kind, moves, records, reason) in [
        (TransferKind::Spill, vec![(0, beyond)], &records[..1], "beyond"),
        (TransferKind::Spill, vec![(0, 1), (1, 1)], &records[..], "twice"),
        (TransferKind::Spill, vec![(0, 1), (1, 2)], &records[..1], "2 pages have 1 records"),
        (TransferKind::Spill, vec![(99_999, 1)], &records[..1], "no such page"),
        (TransferKind::Backup, vec![(0, 1)], &records[..1], "no such edge"),
        (TransferKind::Prefetch, vec![(0, 1)], &chain(1, 1, 4)[..], "4 tokens"),
    ] {
        let done = rig.run(kind, &moves, records);
        let error = done.error.unwrap().to_string();
        assert!(error.contains(reason) && done.pages_whole == 0, "{error}");
    }
    assert_eq!(rig.store.health(), Health::Up);
}

#[test]
fn flipped_bits_are_misses() {
    let root = tempfile::tempdir().unwrap();
    let records = chain(1, 3, 16);
    for direct in [DirectIo::Auto, DirectIo::Off] {
        let mut config = config(root.path(), 1 << 20, 16, 4096);
        config.direct = direct;
        let mut rig = Rig::open(config.clone());
        rig.spill(&[0, 1, 2], &records);
        let geometry = rig.store.geometry();
        drop(rig);
        let flip = |extension: &str, offset: u64| {
            let path = segment(root.path(), 1, 0).with_extension(extension);
            let file = OpenOptions::new().read(true).write(true).open(path).unwrap();
            let mut byte = [0];
            file.read_exact_at(&mut byte, offset).unwrap();
            file.write_all_at(&[byte[0] ^ 4], offset).unwrap();
        };
        flip("kv", geometry.payload_offset(1) + 77);
        flip("kh", geometry.header_offset(2) + 200);
        let mut rig = Rig::open(config);
        let pages: Vec<u32> = rig.recovered.records.iter().map(|record| record.page.0).collect();
        assert_eq!((pages, rig.recovered.damaged), (vec![0, 1], 1));
        let done = rig.prefetch(&[0, 1], &records[..2]);
        assert_eq!(done.pages_whole, 1);
        assert!(matches!(done.error, Some(TransferError::Corrupt { record, .. }) if record.0 == 1));
        assert_eq!(rig.store.stats().checksum_failures, 1);
        assert_eq!(rig.spill(&[0, 1, 2], &records).error, None, "damaged records are reused");
        assert_eq!(rig.prefetch(&[0, 1, 2], &records).pages_whole, 3);
    }
}

#[test]
fn truncated_and_deleted_segments_are_misses() {
    let root = tempfile::tempdir().unwrap();
    let records = chain(1, 60, 16);
    let places: Vec<u32> = (0..60).collect();
    let mut rig = Rig::open(config(root.path(), 2 << 20, 16, 12_288));
    assert_eq!(rig.spill(&places, &records).error, None);
    let geometry = rig.store.geometry();
    let in_segment = geometry.records_per_segment;
    assert!(in_segment < 30);
    let first = segment(root.path(), 1, 0);
    let cut = geometry.payload_offset(3) + 100;
    OpenOptions::new().write(true).open(&first).unwrap().set_len(cut).unwrap();
    let done = rig.prefetch(&places[..5], &records[..5]);
    assert_eq!(done.pages_whole, 3, "{:?}", done.error);
    assert!(matches!(done.error, Some(TransferError::Corrupt { record, .. }) if record.0 == 3));
    drop(rig);
    fs::remove_file(segment(root.path(), 1, 1)).unwrap();
    fs::remove_file(segment(root.path(), 1, 2).with_extension("kh")).unwrap();
    let mut rig = Rig::open(config(root.path(), 2 << 20, 16, 12_288));
    let mut found: Vec<u32> = rig.recovered.records.iter().map(|record| record.page.0).collect();
    found.sort_unstable();
    assert_eq!(found, (0..3).chain(3 * in_segment..60).collect::<Vec<_>>());
    // A segment without its payloads counts as damaged, one without its headers as not there.
    assert_eq!(rig.recovered.damaged, in_segment - 3 + in_segment);
    let miss = rig.prefetch(&[in_segment], &records[in_segment as usize..][..1]);
    assert!(matches!(miss.error, Some(TransferError::Corrupt { .. })), "{:?}", miss.error);
    assert_eq!(rig.spill(&places, &records).error, None);
    assert_eq!(rig.prefetch(&places, &records).pages_whole, 60);
}

#[test]
fn segments_deleted_under_a_running_store_are_made_anew() {
    let root = tempfile::tempdir().unwrap();
    let records = chain(1, 4, 16);
    let mut small = config(root.path(), 1 << 20, 16, 4096);
    small.sync_interval = std::time::Duration::from_millis(20);
    let mut rig = Rig::open(small.clone());
    rig.spill(&[0, 1, 2, 3], &records);
    fs::remove_dir_all(segment(root.path(), 1, 0).parent().unwrap()).unwrap();
    let gone = std::time::Instant::now();
    while rig.store.stats().segments > 0 {
        assert!(gone.elapsed() < common::PATIENCE);
        std::thread::sleep(std::time::Duration::from_millis(5));
    }
    std::thread::sleep(8 * small.sync_interval);
    assert_eq!(rig.store.health(), Health::Up, "syncs of a folder that is gone are no failures");
    assert!(matches!(rig.prefetch(&[0], &records[..1]).error, Some(TransferError::Corrupt { .. })));
    assert_eq!(rig.spill(&[0, 1, 2, 3], &records).error, None);
    drop(rig);
    assert_eq!(Rig::open(small).recovered.records.len(), 4);
}

/// The lock lies in the root: another process may own what is found under its name afterwards.
#[test]
fn a_root_that_is_taken_away_is_lost_and_not_made_again_by_the_way() {
    let folder = tempfile::tempdir().unwrap();
    let records = chain(1, 1, 16);
    let path = folder.path().join("root");
    let slow = DiskConfig { sync_interval: Duration::from_secs(5), ..config(&path, 1 << 20, 16, 4096) };
    let quick = DiskConfig { sync_interval: Duration::from_millis(20), ..slow.clone() };
    // A spill that needs a segment notices at once, everything else at the next sync.
    for (config, deed) in [(&slow, "delete"), (&quick, "delete"), (&quick, "replace")] {
        let mut rig = Rig::open(config.clone());
        rig.store.set_cap(2 << 20).unwrap();
        fs::rename(&path, folder.path().join("elsewhere")).unwrap();
        let other = (deed == "replace").then(|| Rig::open(config.clone()));
        if config.sync_interval > Duration::from_secs(1) {
            assert!(rig.spill(&[0], &records).error.is_some());
        }
        common::wait_for(|| rig.store.lost().is_some());
        let (reason, again) = rig.store.lost().unwrap();
        assert!(reason.contains(path.to_str().unwrap()), "{reason}");
        assert_eq!(again.cap_bytes, 2 << 20, "the last cap that was set");
        assert!(matches!(rig.store.health(), Health::OutOfService { .. }));
        let error = rig.spill(&[0], &records).error;
        assert!(matches!(error, Some(TransferError::Unavailable { .. })), "{error:?}");
        assert_eq!(path.exists(), other.is_some());
        drop((rig, other));
        // What comes back is opened as any root; what does not is made anew on the same file system only.
        let elsewhere = DiskConfig { made_on: again.made_on.map(|device| device + 1), ..again.clone() };
        if deed == "delete" {
            let refused = Rig::try_open(elsewhere, &|engine| engine).err().unwrap();
            assert!(matches!(refused, DiskError::Unmounted { .. }), "{refused}");
        }
        assert_eq!(Rig::open(again).spill(&[0], &records).error, None);
        fs::remove_dir_all(&path).unwrap();
        fs::remove_dir_all(folder.path().join("elsewhere")).unwrap();
    }
}

#[test]
fn another_cap_deletes_nothing_in_a_root_that_took_the_place_of_the_own() {
    let folder = tempfile::tempdir().unwrap();
    let records = chain(1, 1, 16);
    let path = folder.path().join("root");
    let slow = DiskConfig { sync_interval: Duration::from_secs(5), ..config(&path, 2 << 20, 16, 4096) };
    let rig = Rig::open(slow.clone());
    let last = rig.store.capacity() - 1;
    fs::rename(&path, folder.path().join("elsewhere")).unwrap();
    let mut other = Rig::open(slow);
    assert_eq!(other.spill(&[last], &records).error, None);
    let file = segment(&path, 1, (last / other.store.geometry().records_per_segment) as usize);
    let refused = rig.store.set_cap(1 << 20).unwrap_err().to_string();
    assert!(refused.contains(path.to_str().unwrap()) && refused.contains("was deleted"), "{refused}");
    assert!(file.exists() && rig.store.lost().is_some());
    assert_eq!(rig.store.capacity(), last + 1, "an error leaves the old cap");
}

#[test]
fn a_marker_that_is_deleted_is_written_again() {
    let root = tempfile::tempdir().unwrap();
    let rig = Rig::open(DiskConfig {
        sync_interval: Duration::from_millis(20),
        ..config(root.path(), 1 << 20, 16, 4096)
    });
    fs::remove_file(root.path().join(MARKER_FILE)).unwrap();
    common::wait_for(|| root.path().join(MARKER_FILE).exists());
    assert_eq!(rig.store.health(), Health::Up);
}

#[test]
fn erased_records_stay_erased() {
    let root = tempfile::tempdir().unwrap();
    let records = chain(1, 6, 16);
    let mut rig = Rig::open(config(root.path(), 1 << 20, 16, 4096));
    rig.spill(&[0, 1, 2, 3, 4, 5], &records);
    let erased = rig.erase(&[4, 5, 1, 40]);
    assert_eq!((erased.pages_whole, erased.error), (4, None));
    assert!(rig.prefetch(&[4], &records[4..5]).error.is_some());
    drop(rig);
    let mut rig = Rig::open(config(root.path(), 1 << 20, 16, 4096));
    let found: Vec<u32> = rig.recovered.records.iter().map(|record| record.page.0).collect();
    assert_eq!(found, [0, 2, 3]);
    rig.erase(&[0, 2, 3]);
    drop(rig);
    assert!(Rig::open(config(root.path(), 1 << 20, 16, 4096)).recovered.records.is_empty());
    let bytes = fs::read(segment(root.path(), 1, 0).with_extension("kh")).unwrap();
    assert!(!bytes.windows(8).any(|window| window == b"STRATAKV"), "no header is left");
}

#[test]
fn the_newer_of_two_records_with_one_key_wins_and_the_older_never_returns() {
    let root = tempfile::tempdir().unwrap();
    let records = chain(1, 1, 16);
    let mut rig = Rig::open(config(root.path(), 1 << 20, 16, 4096));
    rig.spill(&[7], &records);
    rig.spill(&[3], &records);
    rig.spill(&[5], &records);
    drop(rig);
    let mut rig = Rig::open(config(root.path(), 1 << 20, 16, 4096));
    assert_eq!((rig.recovered.records.len(), rig.recovered.superseded), (1, 2));
    assert_eq!(rig.recovered.records[0].page.0, 5);
    rig.erase(&[5]);
    drop(rig);
    assert!(Rig::open(config(root.path(), 1 << 20, 16, 4096)).recovered.records.is_empty());
}

#[test]
fn a_root_has_one_owner_and_private_files() {
    let folder = tempfile::tempdir().unwrap();
    let root = folder.path().join("kv");
    let mut rig = Rig::open(config(&root, 1 << 20, 16, 4096));
    rig.spill(&[0], &chain(1, 1, 16));
    let refused = Rig::try_open(config(&root, 1 << 20, 16, 4096), &|engine| engine).err().unwrap();
    assert!(matches!(&refused, DiskError::Locked { root: named, .. } if *named == root), "{refused}");
    let mode = |path: &Path| fs::metadata(path).unwrap().permissions().mode() & 0o777;
    let kv = segment(&root, 1, 0);
    assert_eq!((mode(&root), mode(kv.parent().unwrap())), (0o700, 0o700));
    for file in [kv.with_extension("kh"), kv, root.join(MARKER_FILE), root.join(LOCK_FILE)] {
        assert_eq!(mode(&file), 0o600, "{}", file.display());
    }
    rig.store.close().unwrap();
    rig.store.close().unwrap();
    assert_eq!(rig.store.health(), Health::Closed);
    assert_eq!(Rig::open(config(&root, 1 << 20, 16, 4096)).recovered.records.len(), 1);
}

#[test]
fn other_fingerprints_and_shapes_meet_nothing() {
    let root = tempfile::tempdir().unwrap();
    let records = chain(1, 3, 16);
    let mut rig = Rig::open(config(root.path(), 1 << 20, 16, 4096));
    rig.spill(&[0, 1, 2], &records);
    drop(rig);
    let mut other = config(root.path(), 1 << 20, 16, 8192);
    other.fingerprint = Fingerprint([2; 32]);
    let rig = Rig::open(other);
    assert!(rig.recovered.records.is_empty());
    drop(rig);
    assert_eq!(Rig::open(config(root.path(), 1 << 20, 16, 4096)).recovered.records.len(), 3);
    assert!(Rig::open(config(root.path(), 1 << 20, 16, 8192)).recovered.records.is_empty());
}

#[test]
fn the_root_never_passes_its_cap_over_all_fingerprints() {
    let root = tempfile::tempdir().unwrap();
    fs::create_dir_all(root.path()).unwrap();
    let cap = 3_000_000;
    let open = |fingerprint: u8| {
        let mut config = config(root.path(), cap, 16, 12_288);
        config.fingerprint = Fingerprint([fingerprint; 32]);
        Rig::open(config)
    };
    for (round, fingerprint) in [1_u8, 2, 1, 3, 2].into_iter().enumerate() {
        let mut rig = open(fingerprint);
        fs::write(root.path().join("notes.txt"), vec![1; 50_000]).unwrap();
        let records = chain(round as u32, 1, 16);
        let capacity = rig.store.capacity();
        assert!(u64::from(capacity) * 12_288 > cap * 8 / 10, "{capacity}");
        // The second half first, every other record, so that extents are as scattered as they can be.
        let order =
            (0..capacity).filter(|page| page % 2 == 1).chain((0..capacity).filter(|page| page % 2 == 0));
        let mut refused = 0;
        for page in order {
            let done = rig.spill(&[page], &records);
            refused += u32::from(done.error.is_some());
            if page % 16 == 0 {
                let usage = disk_usage(root.path()).unwrap();
                assert!(usage <= cap, "{usage} of {cap}");
            }
        }
        rig.store.sync().unwrap();
        let usage = disk_usage(root.path()).unwrap();
        assert!(usage <= cap && usage > cap * 8 / 10, "{usage} of {cap}");
        // Somebody else's file came while the store was open: only the first round can miss it.
        assert!(refused == 0 || round == 0, "{refused} refused in round {round}");
    }
    assert_eq!(fs::read(root.path().join("notes.txt")).unwrap().len(), 50_000);
}

#[test]
fn a_cap_too_small_for_a_record_names_both_numbers_and_the_flag() {
    let root = tempfile::tempdir().unwrap();
    let refused = Rig::try_open(config(root.path(), 700_000, 16, 737_280), &|engine| engine).err().unwrap();
    let DiskError::CapTooSmall { needed_bytes, .. } = refused else { panic!("{refused}") };
    let text = refused.to_string();
    for part in ["700000", &needed_bytes.to_string(), "--disk-capacity"] {
        assert!(text.contains(part), "{text}");
    }
    let mut rig = Rig::open(config(root.path(), needed_bytes, 16, 737_280));
    assert_eq!(rig.store.capacity(), 1);
    assert_eq!(rig.spill(&[0], &chain(1, 1, 16)).error, None);
    assert!(disk_usage(root.path()).unwrap() <= needed_bytes);
}

#[test]
fn caps_shrink_and_grow_across_restarts() {
    let root = tempfile::tempdir().unwrap();
    let records = chain(1, 60, 16);
    let places: Vec<u32> = (0..60).collect();
    let mut rig = Rig::open(config(root.path(), 2 << 20, 16, 12_288));
    assert_eq!(rig.spill(&places, &records).error, None);
    drop(rig);
    let rig = Rig::open(config(root.path(), 4 << 20, 16, 12_288));
    assert_eq!(rig.recovered.records.len(), 60);
    assert!(u64::from(rig.store.capacity()) * 12_288 > 3 << 20);
    drop(rig);
    let rig = Rig::open(config(root.path(), 600_000, 16, 12_288));
    assert!(rig.recovered.records.len() < 45 && !rig.recovered.records.is_empty());
    assert!(disk_usage(root.path()).unwrap() <= 600_000);
    drop(rig);
    let rig = Rig::open(config(root.path(), 100_000, 16, 12_288));
    assert!(rig.recovered.records.is_empty(), "its segments are larger than the cap");
    assert!(disk_usage(root.path()).unwrap() <= 100_000 && rig.store.capacity() > 0);
}

#[test]
fn file_systems_in_memory_work_too() {
    // Some systems have no such folder, and then there is no file system in memory to try.
    let Ok(root) = tempfile::tempdir_in("/dev/shm") else { return };
    let records = chain(1, 9, 16);
    let places: Vec<u32> = (0..9).collect();
    let mut rig = Rig::open(config(root.path(), 4 << 20, 16, 65_536));
    assert_eq!(rig.spill(&places, &records).error, None);
    assert_eq!(rig.prefetch(&places, &records).error, None);
    let said = rig.store.describe();
    assert!(said.starts_with("threads x4, ") || said.starts_with("io_uring, depth 32, O_DIRECT"), "{said}");
}

#[test]
fn odd_pages_say_why_they_go_through_the_page_cache() {
    let root = tempfile::tempdir().unwrap();
    let rig = Rig::open(config(root.path(), 1 << 20, 16, 1000));
    assert!(rig.store.describe().contains("1000 bytes"), "{}", rig.store.describe());
}

#[test]
fn memory_of_another_shape_is_refused() {
    let root = tempfile::tempdir().unwrap();
    let (sender, _receiver) = completion_queue(1);
    let refused = DiskStore::open(config(root.path(), 1 << 20, 16, 4096), HeapPages::new(1, 8192), sender);
    assert!(matches!(refused.err(), Some(DiskError::PageBytes { memory_bytes: 8192, page_bytes: 4096 })));
}

#[test]
fn closing_completes_everything_outstanding() {
    let root = tempfile::tempdir().unwrap();
    let mut rig = Rig::open(config(root.path(), 40 << 20, 16, 737_280));
    let records = chain(1, 30, 16);
    let moves: Vec<_> = (0..30).map(|page| (page, page)).collect();
    let ids: Vec<_> = (0..20).map(|_| rig.submit(TransferKind::Spill, &moves, &records)).collect();
    rig.store.close().unwrap();
    let done: Vec<_> = rig.completions.try_iter().collect();
    assert_eq!(done.len(), ids.len());
    for completion in &done {
        let whole = completion.pages_whole == 30 && completion.error.is_none();
        assert!(whole || completion.error == Some(TransferError::Cancelled), "{completion:?}");
    }
    let transfer = strata_types::TransferDescriptor {
        id: strata_types::TransferId(99),
        kind: TransferKind::Erase,
        group: strata_types::GroupId(0),
        pages: Vec::new(),
        records: Vec::new(),
        ticket: None,
    };
    assert!(matches!(rig.store.submit(transfer), Err(strata_tier::SubmitError::Closed(_))));
}

#[test]
fn a_store_closes_even_if_nobody_takes_its_completions() {
    let root = tempfile::tempdir().unwrap();
    let mut config = config(root.path(), 1 << 20, 16, 4096);
    config.close_deadline = std::time::Duration::from_millis(600);
    let (sender, receiver) = completion_queue(1);
    let memory = HeapPages::new(4, 4096);
    let (store, recovery) = DiskStore::open(config, memory, sender).unwrap();
    recovery.wait(PATIENCE).unwrap();
    for id in 0..6 {
        let record = strata_types::PageId(id as u32);
        let erase = strata_types::TransferDescriptor {
            id: strata_types::TransferId(id),
            kind: TransferKind::Erase,
            group: strata_types::GroupId(0),
            pages: vec![strata_types::PageMove { from: record, to: record }],
            records: Vec::new(),
            ticket: None,
        };
        store.submit(erase).unwrap();
    }
    store.close().unwrap();
    assert_eq!((receiver.try_iter().count(), store.stats().lost_completions), (1, 5));
}

#[derive(Clone, Debug)]
enum Step {
    Spill(Vec<u32>, u32),
    Prefetch(u32),
    Erase(Vec<u32>),
    Reopen,
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let places = || prop::collection::hash_set(0u32..24, 1..8).prop_map(|set| set.into_iter().collect());
    let step = prop_oneof![
        4 => (places(), 0u32..5).prop_map(|(places, seed)| Step::Spill(places, seed)),
        3 => (0u32..24).prop_map(Step::Prefetch),
        1 => places().prop_map(Step::Erase),
        1 => Just(Step::Reopen),
    ];
    prop::collection::vec(step, 1..25)
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 48, failure_persistence: None, ..ProptestConfig::default() })]
    #[test]
    fn a_map_of_records_agrees(steps in steps(), odd in any::<bool>()) {
        let root = tempfile::tempdir().unwrap();
        let page_bytes = if odd { 5000 } else { 8192 };
        let open = || Rig::open(config(root.path(), 1 << 20, 4, page_bytes));
        let mut rig = open();
        // What lies where, and when it was written.
        let mut model: HashMap<u32, (PageRecord, usize)> = HashMap::new();
        for (now, step) in steps.into_iter().enumerate() {
            match step {
                Step::Spill(places, seed) => {
                    let records = chain(seed, places.len() as u32, 4);
                    prop_assert_eq!(rig.spill(&places, &records).error, None);
                    for (place, (index, record)) in places.iter().zip(records.into_iter().enumerate()) {
                        model.insert(*place, (record, now * 100 + index));
                    }
                }
                Step::Prefetch(place) => {
                    let wanted = model.get(&place).map(|(record, _)| record.clone());
                    let asked = wanted.clone().unwrap_or_else(|| chain(9, 1, 4).remove(0));
                    let done = rig.prefetch(&[place], &[asked]);
                    prop_assert_eq!(done.error.is_none(), wanted.is_some());
                }
                Step::Erase(places) => {
                    prop_assert_eq!(rig.erase(&places).error, None);
                    places.iter().for_each(|place| { model.remove(place); });
                }
                Step::Reopen => {
                    drop(rig);
                    rig = open();
                    let mut newest: HashMap<_, (u32, usize)> = HashMap::new();
                    for (place, (record, at)) in &model {
                        let held = newest.entry(record.key).or_insert((*place, *at));
                        if held.1 < *at {
                            *held = (*place, *at);
                        }
                    }
                    let kept: std::collections::HashSet<u32> = newest.values().map(|(place, _)| *place).collect();
                    model.retain(|place, _| kept.contains(place));
                    let found: HashMap<u32, PageRecord> =
                        rig.recovered.records.iter().map(|r| (r.page.0, r.record.clone())).collect();
                    let wanted: HashMap<u32, PageRecord> =
                        model.iter().map(|(place, (record, _))| (*place, record.clone())).collect();
                    prop_assert_eq!(found, wanted);
                }
            }
        }
    }
}
