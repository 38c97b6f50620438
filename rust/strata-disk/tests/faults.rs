//! What happens when the disk misbehaves: errors, short writes, flipped bits, a full disk, hangs.
#![allow(clippy::unwrap_used, clippy::panic)]
mod common;

use common::{chain, config, pattern, wait_for, Rig};
use std::sync::{Arc, Mutex};
use std::time::Duration;
use strata_disk::{DiskConfig, DiskError, Fault, FaultyEngine, Health, IoEngine};
use strata_tier::Mover;
use strata_types::{Fingerprint, TransferError, TransferKind};

fn faulty(config: DiskConfig) -> (Rig, Arc<FaultyEngine>) {
    let made: Mutex<Option<Arc<FaultyEngine>>> = Mutex::new(None);
    let rig = Rig::try_open(config, &|engine| {
        let engine = Arc::new(FaultyEngine::new(engine));
        *made.lock().unwrap() = Some(Arc::clone(&engine));
        engine as Arc<dyn IoEngine>
    })
    .unwrap();
    let engine = made.lock().unwrap().take().unwrap();
    (rig, engine)
}

fn single(root: &std::path::Path) -> DiskConfig {
    DiskConfig { threads: 1, depth: 1, ..config(root, 4 << 20, 16, 65_536) }
}

#[test]
fn failed_and_short_writes_leave_cleared_headers() {
    let records = chain(1, 2, 16);
    let other = chain(2, 2, 16);
    let faults = [
        vec![Fault::Error(libc::EIO)],
        vec![Fault::None, Fault::Error(libc::EIO)],
        vec![Fault::None, Fault::Short(70_000)],
        vec![Fault::None, Fault::None, Fault::Error(libc::EIO)],
        vec![Fault::None, Fault::None, Fault::Short(100)],
    ];
    for (case, script) in faults.into_iter().enumerate() {
        let root = tempfile::tempdir().unwrap();
        let (mut rig, engine) = faulty(single(root.path()));
        rig.spill(&[0, 1], &records);
        engine.on_writes(script);
        let done = rig.spill(&[0, 1], &other);
        assert_eq!(done.pages_whole, 0);
        let error = done.error.unwrap().to_string();
        assert!(error.contains("segment-000000.kv") && error.contains("record 0"), "{error}");
        assert!(rig.prefetch(&[0], &records[..1]).error.is_some(), "case {case}");
        assert!(rig.prefetch(&[0], &other[..1]).error.is_some(), "case {case}");
        drop(rig);
        let (mut rig, _) = faulty(single(root.path()));
        // Where clearing itself failed, the old pages are still there, whole; else a short header is damaged.
        let found = rig.recovered.records.len();
        assert_eq!(found, if case == 0 { 2 } else { 0 }, "case {case}");
        assert_eq!(rig.spill(&[0, 1], &other).error, None);
        assert_eq!(rig.prefetch(&[0, 1], &other).pages_whole, 2);
    }
}

#[test]
fn bad_reads_stop_at_the_first_bad_page() {
    let root = tempfile::tempdir().unwrap();
    let (mut rig, engine) = faulty(single(root.path()));
    let records = chain(1, 4, 16);
    rig.spill(&[0, 1, 2, 3], &records);
    engine.on_reads([Fault::Short(150_000)]);
    let done = rig.prefetch(&[0, 1, 2, 3], &records);
    assert_eq!(done.pages_whole, 2);
    assert!(matches!(done.error, Some(TransferError::Corrupt { record, .. }) if record.0 == 2));
    engine.on_reads([Fault::FlipBit((65_536 + 9) * 8 + 3)]);
    let done = rig.prefetch(&[0, 1, 2, 3], &records);
    assert_eq!((done.pages_whole, rig.store.stats().checksum_failures), (1, 1));
    assert!(matches!(done.error, Some(TransferError::Corrupt { record, .. }) if record.0 == 1));
    engine.on_reads([Fault::Error(libc::EIO)]);
    let done = rig.prefetch(&[0, 1, 2, 3], &records);
    assert!(matches!(done.error, Some(TransferError::Io { .. })) && done.pages_whole == 0);
    engine.on_reads([Fault::Slow(Duration::from_millis(30))]);
    assert_eq!(rig.prefetch(&[0, 1, 2, 3], &records).pages_whole, 4);
    assert_eq!((rig.store.health(), rig.store.stats().io_errors), (Health::Up, 1));
}

#[test]
fn a_full_disk_fails_spills_by_name_and_serves_reads() {
    let root = tempfile::tempdir().unwrap();
    let (mut rig, engine) = faulty(single(root.path()));
    let records = chain(1, 2, 16);
    rig.spill(&[0, 1], &records);
    let next = rig.store.geometry().records_per_segment;
    for (number, said) in [(libc::ENOSPC, "No space left"), (libc::EDQUOT, "quota exceeded")] {
        engine.on_create(Some(number));
        for _ in 0..8 {
            let error = rig.spill(&[next], &records[..1]).error.unwrap();
            let text = error.to_string();
            assert!(text.contains("segment-000001.kv") && text.contains(said), "{text}");
            let TransferError::NoRoom { pages, .. } = error else { panic!("{error:?}") };
            assert_eq!((pages[0].start, pages.last().unwrap().end), (next, rig.store.capacity()));
        }
        assert_eq!(rig.store.health(), Health::Up);
        let full = rig.store.full().unwrap();
        assert!(full.contains("segment-000001.kv") && full.contains(said), "{full}");
        assert_eq!(rig.prefetch(&[0, 1], &records).pages_whole, 2);
        assert_eq!(rig.spill(&[0, 1], &records).error, None, "what exists is written all the same");
        assert!(rig.store.full().is_some());
    }
    engine.on_create(None);
    assert_eq!(rig.spill(&[next], &records[..1]).error, None);
    assert_eq!(rig.store.full(), None);
    engine.on_writes([Fault::Error(libc::ENOSPC)]);
    assert!(rig.spill(&[0, 1], &records).error.is_some());
    assert!(rig.store.full().is_some_and(|full| full.contains("segment-000000.kv")));
    assert_eq!((rig.spill(&[0, 1], &records).error, rig.store.full()), (None, None));
}

#[test]
fn a_full_disk_is_no_longer_full_once_its_cap_is_what_exists() {
    let root = tempfile::tempdir().unwrap();
    let (mut rig, engine) = faulty(single(root.path()));
    let records = chain(1, 1, 16);
    let geometry = rig.store.geometry();
    rig.spill(&[0], &records);
    engine.on_create(Some(libc::ENOSPC));
    assert!(rig.spill(&[geometry.records_per_segment], &records).error.is_some());
    for (segments, full) in [(2, true), (1, false)] {
        let capacity = rig.store.set_cap(segments * geometry.cap_of_one()).unwrap();
        assert_eq!(u64::from(capacity), segments * u64::from(geometry.records_per_segment));
        assert_eq!(rig.store.full().is_some(), full, "a cap of {segments} segments, of which one exists");
    }
    assert_eq!(rig.prefetch(&[0], &records).error, None);
}

#[test]
fn a_full_disk_gives_up_what_other_fingerprints_keep() {
    let root = tempfile::tempdir().unwrap();
    let records = chain(1, 1, 16);
    let (mut rig, _) = faulty(single(root.path()));
    let in_segment = rig.store.geometry().records_per_segment;
    (0..3).for_each(|number| assert_eq!(rig.spill(&[number * in_segment], &records).error, None));
    drop(rig);
    let other = DiskConfig { fingerprint: Fingerprint([2; 32]), ..single(root.path()) };
    let (mut rig, engine) = faulty(other);
    engine.on_room(Some(3));
    (0..3).for_each(|number| assert_eq!(rig.spill(&[number * in_segment], &records).error, None));
    assert_eq!(rig.store.full(), None);
    // It keeps its own, and nothing is left of the other's.
    assert!(matches!(rig.spill(&[3 * in_segment], &records).error, Some(TransferError::NoRoom { .. })));
    assert_eq!(rig.store.stats().segments, 3);
    drop(rig);
    assert!(faulty(single(root.path())).0.recovered.records.is_empty());
}

#[test]
fn failures_in_a_row_take_the_store_out_of_service_until_it_is_tried_again() {
    let root = tempfile::tempdir().unwrap();
    let (mut rig, engine) = faulty(single(root.path()));
    let records = chain(1, 1, 16);
    rig.spill(&[0], &records);
    engine.on_reads(vec![Fault::Error(libc::EIO); 4]);
    (0..4).for_each(|_| assert!(rig.prefetch(&[0], &records).error.is_some()));
    assert_eq!(rig.prefetch(&[0], &records).error, None, "a success starts the count anew");
    engine.on_reads(vec![Fault::Error(libc::EIO); 5]);
    (0..5).for_each(|_| assert!(rig.prefetch(&[0], &records).error.is_some()));
    assert!(matches!(rig.store.health(), Health::OutOfService { .. }));
    let error = rig.prefetch(&[0], &records).error;
    assert!(matches!(error, Some(TransferError::Unavailable { tier: "disk", .. })), "{error:?}");
    rig.store.retry();
    assert_eq!(rig.prefetch(&[0], &records).error, None);
    assert_eq!(rig.store.health(), Health::Up);
}

/// A store that tries its disk again soon.
fn eager(root: &std::path::Path) -> DiskConfig {
    let (first_retry, last_retry) = (Duration::from_millis(10), Duration::from_millis(40));
    DiskConfig { first_retry, last_retry, ..single(root) }
}

fn scratch_files(root: &std::path::Path) -> usize {
    let folder = root.join(Fingerprint([1; 32]).to_hex());
    let names = std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().file_name());
    names.filter(|name| name.to_string_lossy().starts_with("scratch")).count()
}

#[test]
fn a_store_out_of_service_comes_back_by_itself() {
    let root = tempfile::tempdir().unwrap();
    let (mut rig, engine) = faulty(eager(root.path()));
    let records = chain(1, 1, 16);
    rig.spill(&[0], &records);
    engine.on_all_reads(Some(Fault::Error(libc::EIO)));
    (0..5).for_each(|_| assert!(rig.prefetch(&[0], &records).error.is_some()));
    assert!(matches!(rig.store.health(), Health::OutOfService { .. }));
    // The trials read too.
    wait_for(
        || matches!(rig.store.health(), Health::OutOfService { reason } if reason.contains("trial failed") && reason.contains("scratch.kv")),
    );
    assert_eq!(rig.store.stats().returned_to_service, 0);
    engine.heal();
    wait_for(|| rig.store.health() == Health::Up);
    let stats = rig.store.stats();
    assert_eq!((stats.out_of_service, stats.returned_to_service), (1, 1));
    assert!(rig.store.describe().contains("back in service"), "{}", rig.store.describe());
    assert_eq!(rig.prefetch(&[0], &records).error, None);
    wait_for(|| scratch_files(root.path()) == 0);
}

#[test]
fn a_disk_that_lies_in_its_trial_stays_out() {
    let root = tempfile::tempdir().unwrap();
    for fault in [Fault::Torn(512), Fault::FlipBit(4001), Fault::Short(512), Fault::Error(libc::EIO)] {
        let (mut rig, engine) = faulty(eager(root.path()));
        let records = chain(1, 1, 16);
        rig.spill(&[0], &records);
        // Both before the first trial, which may come at once.
        engine.on_all_writes(Some(fault));
        engine.on_reads(vec![Fault::Error(libc::EIO); 5]);
        (0..5).for_each(|_| assert!(rig.prefetch(&[0], &records).error.is_some()));
        wait_for(
            || matches!(rig.store.health(), Health::OutOfService { reason } if reason.contains("trial failed")),
        );
        engine.heal();
        wait_for(|| rig.store.health() == Health::Up);
    }
}

#[test]
fn a_full_disk_comes_back_to_serve_its_reads() {
    let root = tempfile::tempdir().unwrap();
    let (mut rig, engine) = faulty(eager(root.path()));
    let records = chain(1, 1, 16);
    rig.spill(&[0], &records);
    engine.on_reads(vec![Fault::Error(libc::EIO); 5]);
    engine.on_create(Some(libc::EDQUOT));
    (0..5).for_each(|_| assert!(rig.prefetch(&[0], &records).error.is_some()));
    wait_for(|| rig.store.health() == Health::Up);
    assert_eq!(rig.prefetch(&[0], &records).error, None);
}

#[test]
fn a_hung_disk_ends_what_has_not_been_begun() {
    let root = tempfile::tempdir().unwrap();
    let (mut rig, engine) =
        faulty(DiskConfig { io_deadline: Duration::from_millis(40), threads: 1, ..single(root.path()) });
    let records = chain(1, 4, 16);
    assert_eq!(rig.spill(&[0, 1, 2, 3], &records).error, None);
    engine.on_reads([Fault::Hold]);
    let hung = rig.submit(TransferKind::Prefetch, &[(0, 5)], &records[..1]);
    wait_for(|| engine.held() == 1);
    // One waits for the only thread, one for the record, and one for that one.
    let waiting = [
        rig.submit(TransferKind::Prefetch, &[(1, 6)], &records[1..2]),
        rig.submit(TransferKind::Erase, &[(0, 0)], &[]),
        rig.submit(TransferKind::Spill, &[(1, 0)], &records[..1]),
    ];
    for id in waiting {
        let done = rig.completion();
        assert_eq!((done.id, done.pages_whole), (id, 0));
        assert!(matches!(done.error, Some(TransferError::Unavailable { .. })), "{:?}", done.error);
    }
    assert_eq!(rig.store.stats().outstanding, 1);
    engine.release();
    assert_eq!(rig.completion().id, hung);
    wait_for(|| rig.store.stats().returned_to_service == 1);
    assert_eq!(rig.prefetch(&[0, 1, 2, 3], &records).error, None, "the erase that was ended erased nothing");
    assert!(rig.completions.try_recv().is_err(), "a completion too many");
}

#[test]
fn closing_a_hung_disk_is_bounded_and_its_root_stays_locked_until_it_answers() {
    let root = tempfile::tempdir().unwrap();
    let mut config = single(root.path());
    config.close_deadline = Duration::from_millis(100);
    let (mut rig, engine) = faulty(config);
    let records = chain(1, 2, 16);
    assert_eq!(rig.spill(&[0, 1], &records).error, None);
    engine.on_writes([Fault::Lose]);
    rig.submit(TransferKind::Spill, &[(0, 0)], &records[..1]);
    wait_for(|| engine.lost() == 1);
    let waits = rig.submit(TransferKind::Prefetch, &[(0, 3)], &records[..1]);
    let refused = rig.store.close().unwrap_err();
    assert!(matches!(refused, DiskError::Deadline { .. }), "{refused}");
    let done = rig.completion();
    assert_eq!((done.id, done.error), (waits, Some(TransferError::Cancelled)));
    drop(rig);
    let locked = Rig::try_open(single(root.path()), &|engine| engine).err().unwrap();
    assert!(matches!(locked, DiskError::Locked { .. }), "the kernel may still write: {locked}");
    assert_eq!(engine.release_lost(), 1);
    drop(engine);
    wait_for(|| Rig::try_open(single(root.path()), &|engine| engine).is_ok());
}

#[test]
fn a_hang_is_told_and_its_memory_is_kept_until_the_kernel_answers() {
    let root = tempfile::tempdir().unwrap();
    let (mut rig, engine) =
        faulty(DiskConfig { io_deadline: Duration::from_millis(30), threads: 2, ..single(root.path()) });
    let records = chain(1, 2, 16);
    rig.spill(&[0, 1], &records);
    engine.on_reads([Fault::Hold]);
    let hung = rig.submit(TransferKind::Prefetch, &[(0, 5)], &records[..1]);
    wait_for(|| matches!(rig.store.health(), Health::Stalled { .. }));
    let refused = rig.submit(TransferKind::Prefetch, &[(1, 6)], &records[1..]);
    let done = rig.completion();
    assert_eq!(done.id, refused);
    assert!(matches!(done.error, Some(TransferError::Unavailable { .. })), "{:?}", done.error);
    rig.store.cancel(hung);
    assert!(rig.completions.recv_timeout(Duration::from_millis(50)).is_err(), "no completion while it hangs");
    engine.release();
    assert_eq!(rig.completion().id, hung);
    assert_eq!(rig.store.health(), Health::Up);
    assert_eq!(rig.prefetch(&[0, 1], &records).pages_whole, 2);
}

#[test]
fn cancelled_transfers_report_a_whole_prefix() {
    let root = tempfile::tempdir().unwrap();
    let (mut rig, engine) = faulty(single(root.path()));
    let records = chain(1, 32, 16);
    let places: Vec<u32> = (0..32).collect();
    assert_eq!(rig.spill(&places, &records).error, None);
    engine.on_reads([Fault::None, Fault::Hold]);
    let moves: Vec<_> = (0..32).map(|page| (page, page + 32)).collect();
    let id = rig.submit(TransferKind::Prefetch, &moves, &records);
    wait_for(|| engine.held() == 1);
    rig.store.cancel(id);
    engine.release();
    let done = rig.completion();
    assert_eq!((done.id, done.error), (id, Some(TransferError::Cancelled)));
    assert!((1..32).contains(&done.pages_whole));
    for (page, record) in records.iter().enumerate().take(done.pages_whole) {
        assert!(rig.memory.read(page as u32 + 32) == pattern(record, 65_536), "page {page}");
    }
}

#[test]
fn transfers_that_share_a_record_keep_their_order() {
    let root = tempfile::tempdir().unwrap();
    let (mut rig, engine) = faulty(DiskConfig { threads: 4, ..single(root.path()) });
    let (old, new) = (chain(1, 1, 16), chain(2, 1, 16));
    rig.spill(&[0], &old);
    rig.memory.write(1, &pattern(&new[0], 65_536));
    engine.on_writes([Fault::Slow(Duration::from_millis(40))]);
    let erase = rig.submit(TransferKind::Erase, &[(0, 0)], &[]);
    let spill = rig.submit(TransferKind::Spill, &[(1, 0)], &new);
    let read = rig.submit(TransferKind::Prefetch, &[(0, 2)], &new);
    let mut done = [rig.completion(), rig.completion(), rig.completion()];
    done.sort_by_key(|completion| completion.id);
    assert_eq!(done.clone().map(|completion| completion.id), [erase, spill, read]);
    assert!(done.iter().all(|completion| completion.error.is_none()), "{done:?}");
    assert!(rig.memory.read(2) == pattern(&new[0], 65_536));
}

#[test]
fn reads_go_before_waiting_writes() {
    let root = tempfile::tempdir().unwrap();
    let (mut rig, engine) = faulty(DiskConfig { cap_bytes: 8 << 20, ..single(root.path()) });
    let records = chain(1, 1, 16);
    rig.spill(&[0], &records);
    engine.on_writes([Fault::Hold]);
    let many = chain(2, 30, 16);
    let moves: Vec<_> = (0..30).map(|page| (page, 2 * page + 1)).collect();
    let write = rig.submit(TransferKind::Spill, &moves, &many);
    wait_for(|| engine.held() == 1);
    let read = rig.submit(TransferKind::Prefetch, &[(0, 40)], &records);
    engine.release();
    assert_eq!([rig.completion().id, rig.completion().id], [read, write]);
}

#[test]
fn a_sync_that_fails_is_reported_and_tried_again() {
    let root = tempfile::tempdir().unwrap();
    let (mut rig, engine) = faulty(single(root.path()));
    rig.spill(&[0], &chain(1, 1, 16));
    engine.on_sync(Some(libc::EIO));
    let error = rig.store.sync().unwrap_err().to_string();
    assert!(error.contains("sync") && error.contains("segment-000000.kv"), "{error}");
    engine.on_sync(None);
    rig.store.sync().unwrap();
    assert!(rig.store.stats().syncs >= 1);
}
