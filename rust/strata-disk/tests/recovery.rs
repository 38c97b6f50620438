//! Recovery while the store serves: what is delivered when, what may be used before, and how it ends. And caps that
//! are set at run time.
#![allow(clippy::unwrap_used, clippy::panic)]
mod common;

use common::{chain, config, wait_for, Rig, PATIENCE};
use std::collections::{HashMap, HashSet};
use std::fs;
use std::path::Path;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};
use strata_disk::{
    disk_usage, DiskConfig, DiskError, Fault, FaultyEngine, Health, IoEngine, RecordHeader, RecoveryBatch,
};
use strata_types::{Fingerprint, GroupId, Namespace, PageId, PageRecord, ShardId, TransferKind};

/// A rig whose recovery nobody has waited for, over an engine that can be told to fail.
fn serving(config: DiskConfig, script: impl Fn(&FaultyEngine)) -> (Rig, Arc<FaultyEngine>) {
    let made: Mutex<Option<Arc<FaultyEngine>>> = Mutex::new(None);
    let rig = Rig::serving(config, &|engine| {
        let engine = Arc::new(FaultyEngine::new(engine));
        script(&engine);
        *made.lock().unwrap() = Some(Arc::clone(&engine));
        engine as Arc<dyn IoEngine>
    })
    .unwrap();
    let engine = made.lock().unwrap().take().unwrap();
    (rig, engine)
}

fn small(root: &Path) -> DiskConfig {
    config(root, 2 << 20, 16, 12_288)
}

/// Sixty records over several segments, and where each lies.
fn filled(root: &Path) -> (Vec<PageRecord>, u32) {
    let records = chain(1, 60, 16);
    let mut rig = Rig::open(small(root));
    let places: Vec<u32> = (0..60).collect();
    assert_eq!(rig.spill(&places, &records).error, None);
    (records, rig.store.geometry().records_per_segment)
}

fn batches(rig: &Rig) -> Vec<RecoveryBatch> {
    let receiver = rig.recovery.as_ref().unwrap().batches();
    let mut all = Vec::new();
    loop {
        let batch = receiver.recv_timeout(PATIENCE).unwrap();
        let last = batch.last;
        all.push(batch);
        if last {
            return all;
        }
    }
}

#[test]
fn batches_name_every_page_once_and_every_record() {
    let root = tempfile::tempdir().unwrap();
    let (records, _) = filled(root.path());
    let (rig, _) = serving(small(root.path()), |_| {});
    let all = batches(&rig);
    let mut pages: Vec<u32> = all.iter().flat_map(|batch| batch.pages.clone()).collect();
    pages.sort_unstable();
    assert_eq!(pages, (0..rig.store.capacity()).collect::<Vec<_>>());
    let mut found = HashMap::new();
    for batch in &all {
        assert!(batch.records.iter().all(|record| batch.pages.contains(&record.page.0)));
        found.extend(batch.records.iter().map(|record| (record.page.0, record.record.clone())));
    }
    assert_eq!(found, (0..60).zip(records).collect::<HashMap<_, _>>());
    assert_eq!(rig.recovery.as_ref().unwrap().batches().recv().ok(), None, "nothing comes after the last");
}

#[test]
fn a_page_is_refused_until_its_batch_and_served_from_then_on() {
    let root = tempfile::tempdir().unwrap();
    let (records, in_segment) = filled(root.path());
    let segments = 60_u32.div_ceil(in_segment) as usize;
    assert!(segments >= 3);
    // The second pass reads one segment and hangs in the next.
    let good = vec![Fault::None; segments + 1];
    let (mut rig, engine) = serving(small(root.path()), |engine| {
        engine.on_reads(good.iter().copied().chain([Fault::Hold]));
    });
    wait_for(|| engine.held() == 1);
    let arrived: Vec<_> = rig.recovery.as_ref().unwrap().batches().try_iter().collect();
    let named: HashSet<u32> = arrived.iter().flat_map(|batch| batch.pages.clone()).collect();
    assert!(named.contains(&0) && named.contains(&(rig.store.capacity() - 1)), "missing segments are free");
    assert!(!named.contains(&in_segment) && !arrived.iter().any(|batch| batch.last));
    assert_eq!(rig.prefetch(&[0, 1], &records[..2]).error, None, "what was found is served");
    let free = rig.store.capacity() - 1;
    assert_eq!(rig.spill(&[free], &chain(2, 1, 16)).error, None);
    let other = chain(3, 1, 16);
    for (kind, moves, records) in [
        (TransferKind::Spill, vec![(0, in_segment)], &other[..]),
        (TransferKind::Prefetch, vec![(in_segment, 0)], &records[in_segment as usize..][..1]),
        (TransferKind::Erase, vec![(in_segment, in_segment)], &[]),
    ] {
        let error = rig.run(kind, &moves, records).error.unwrap().to_string();
        assert!(error.contains(&format!("record {in_segment} has not been looked at")), "{error}");
    }
    assert!(matches!(rig.store.set_cap(3 << 20), Err(DiskError::Recovering { .. })));
    rig.store.sync().unwrap();
    engine.release();
    batches(&rig);
    assert_eq!(rig.prefetch(&[in_segment], &records[in_segment as usize..][..1]).error, None);
    drop(rig);
    let rig = Rig::open(small(root.path()));
    let newest = rig.recovered.records.iter().max_by_key(|record| record.sequence).unwrap();
    assert_eq!(newest.page.0, free, "what was written during recovery is newer than all that it found");
}

#[test]
fn closing_stops_a_recovery_that_nobody_takes_or_that_hangs() {
    let root = tempfile::tempdir().unwrap();
    filled(root.path());
    for hangs in [false, true] {
        let mut config = small(root.path());
        config.close_deadline = Duration::from_secs(20);
        let (rig, engine) = serving(config, |engine| {
            if hangs {
                engine.on_reads([Fault::None, Fault::None, Fault::Lose]);
            }
        });
        if hangs {
            wait_for(|| engine.lost() == 1);
        }
        let begun = Instant::now();
        let closed = rig.store.close();
        assert!(begun.elapsed() < PATIENCE);
        assert_eq!(closed.is_err(), hangs, "an I/O that hangs is told: {closed:?}");
        assert_eq!(rig.store.health(), Health::Closed);
        engine.release_lost();
    }
    assert_eq!(Rig::open(small(root.path())).recovered.records.len(), 60);
}

#[test]
fn a_recovery_that_nobody_wants_frees_every_page() {
    let root = tempfile::tempdir().unwrap();
    filled(root.path());
    let (mut rig, _) = serving(small(root.path()), |_| {});
    drop(rig.recovery.take());
    wait_for(|| rig.store.set_cap(2 << 20).is_ok());
    let records = chain(4, 60, 16);
    let places: Vec<u32> = (0..60).collect();
    assert_eq!(rig.spill(&places, &records).error, None);
    assert_eq!(rig.prefetch(&places, &records).error, None);
}

#[test]
fn headers_that_cannot_be_read_are_damaged_and_the_rest_is_found() {
    let root = tempfile::tempdir().unwrap();
    let (_, in_segment) = filled(root.path());
    let (mut rig, _) = serving(small(root.path()), |engine| {
        engine.on_reads([Fault::None, Fault::Error(libc::EIO), Fault::Short(100)]);
    });
    let all = batches(&rig);
    let damaged: u32 = all.iter().map(|batch| batch.damaged).sum();
    let found: usize = all.iter().map(|batch| batch.records.len()).sum();
    assert_eq!(damaged, 2 * in_segment);
    assert_eq!(found as u32, 60 - 2 * in_segment);
    let records = chain(5, 1, 16);
    assert_eq!(rig.spill(&[in_segment], &records).error, None, "damaged records are reused");
    assert_eq!(rig.prefetch(&[in_segment], &records).error, None);
}

#[test]
fn a_segment_deleted_during_recovery_is_free() {
    let root = tempfile::tempdir().unwrap();
    let (_, in_segment) = filled(root.path());
    let segments = 60_usize.div_ceil(in_segment as usize);
    let mut quick = small(root.path());
    quick.sync_interval = Duration::from_millis(10);
    let (mut rig, engine) = serving(quick, |engine| {
        engine.on_reads(vec![Fault::None; segments].into_iter().chain([Fault::Hold]));
    });
    wait_for(|| engine.held() == 1);
    let folder = root.path().join(Fingerprint([1; 32]).to_hex());
    fs::remove_file(folder.join("segment-000001.kh")).unwrap();
    wait_for(|| rig.store.stats().segments as usize == segments - 1);
    engine.release();
    let found: Vec<u32> = batches(&rig).iter().flat_map(|b| b.records.iter().map(|r| r.page.0)).collect();
    assert!(found.iter().all(|page| !(in_segment..2 * in_segment).contains(page)), "{found:?}");
    let records = chain(6, 1, 16);
    assert_eq!(rig.spill(&[in_segment], &records).error, None);
    assert_eq!(rig.prefetch(&[in_segment], &records).error, None);
}

#[test]
fn a_root_that_is_in_use_can_be_opened_later_by_the_same_process() {
    let root = tempfile::tempdir().unwrap();
    let first = Rig::open(small(root.path()));
    for _ in 0..50 {
        let refused = Rig::try_open(small(root.path()), &|engine| engine).err().unwrap();
        assert!(matches!(refused, DiskError::Locked { .. }), "{refused}");
    }
    let descriptors = || fs::read_dir("/proc/self/fd").unwrap().count();
    let before = descriptors();
    for _ in 0..50 {
        assert!(Rig::try_open(small(root.path()), &|engine| engine).is_err());
    }
    assert!(descriptors() < before + 50, "refused opens leave nothing behind");
    drop(first);
    Rig::open(small(root.path()));
}

/// Writes headers as the store would, without their payloads: enough for recovery.
fn write_headers(root: &Path, config: &DiskConfig, count: u32) {
    let geometry = {
        let mut rig = Rig::open(config.clone());
        let geometry = rig.store.geometry();
        let records = chain(9, 1, config.page_size);
        for first in (0..count).step_by(geometry.records_per_segment as usize) {
            assert_eq!(rig.spill(&[first], &records).error, None);
        }
        geometry
    };
    let namespace = Namespace::new("many", "");
    let mut parent = namespace.root_key(GroupId(0));
    let folder = root.join(config.fingerprint.to_hex());
    for number in 0..count.div_ceil(geometry.records_per_segment) {
        let path = folder.join(format!("segment-{number:06}.kh"));
        let mut bytes = fs::read(&path).unwrap();
        for index in 0..geometry.records_per_segment {
            let page = geometry.page(number as usize, index);
            let tokens: Vec<u32> = (0..config.page_size).map(|token| page * 16 + token).collect();
            let record = PageRecord { namespace, parent, key: parent.child(&tokens), tokens };
            parent = record.key;
            let header = RecordHeader {
                sequence: u64::from(page) + 10,
                payload_bytes: u64::from(config.page_bytes),
                payload_checksum: 0,
                group: GroupId(0),
                shard: ShardId(0),
                fingerprint: config.fingerprint,
                record,
            };
            let at = geometry.header_offset(index) as usize;
            header.encode(&mut bytes[at..at + geometry.header_slot() as usize]);
        }
        fs::write(&path, bytes).unwrap();
    }
}

#[test]
fn a_hundred_thousand_headers_arrive_while_the_store_is_open() {
    let root = tempfile::tempdir().unwrap();
    let config = config(root.path(), 460 << 20, 16, 64);
    write_headers(root.path(), &config, 100_000);
    let begun = Instant::now();
    let (rig, _) = serving(config, |_| {});
    let opened = begun.elapsed();
    let all = batches(&rig);
    let recovered = begun.elapsed();
    let found: usize = all.iter().map(|batch| batch.records.len()).sum();
    assert!(found >= 100_000, "{found}");
    assert!(all.iter().all(|batch| batch.records.len() <= 4096), "batches are bounded");
    eprintln!("{found} headers: open {opened:?}, all delivered {recovered:?}, in {} batches", all.len());
}

#[test]
fn caps_grow_and_shrink_while_the_store_runs() {
    let root = tempfile::tempdir().unwrap();
    let mut rig = Rig::open(small(root.path()));
    let (first, per) = (rig.store.capacity(), rig.store.geometry().records_per_segment);
    let usage = || disk_usage(root.path()).unwrap();
    let grown = rig.store.set_cap(6 << 20).unwrap();
    assert!(grown > 2 * first && grown == rig.store.capacity() && grown.is_multiple_of(per));
    let records = chain(1, 1, 16);
    for page in 0..grown {
        assert_eq!(rig.spill(&[page], &records).error, None, "page {page} of {grown}");
    }
    assert!(usage() > 5 << 20 && usage() <= 6 << 20);
    let less = rig.store.capacity_under(1 << 20).unwrap();
    assert_eq!(rig.store.capacity(), grown, "asking changes nothing");
    assert_eq!(rig.store.set_cap(1 << 20).unwrap(), less);
    assert!(less < first && less > 0 && usage() <= 1 << 20, "{}", usage());
    assert!(rig.prefetch(&[less], &records).error.unwrap().to_string().contains("beyond"));
    assert_eq!(rig.prefetch(&[less - 1], &records).error, None, "what is left is whole");
    let refused = rig.store.set_cap(per as u64 * 12_288 / 2).unwrap_err();
    assert!(matches!(refused, DiskError::CapTooSmall { .. }), "{refused}");
    assert!(refused.to_string().contains("--disk-capacity"), "{refused}");
    assert_eq!(rig.store.capacity(), less);
    assert_eq!(rig.store.set_cap(2 << 20).unwrap(), first);
    let blank = rig.prefetch(&[less], &records).error.unwrap().to_string();
    assert!(blank.contains("no header"), "what was deleted is gone: {blank}");
    assert_eq!(rig.spill(&[less], &records).error, None);
    drop(rig);
    assert_eq!(Rig::open(small(root.path())).store.capacity(), first);
}

#[test]
fn a_smaller_cap_waits_for_transfers_beyond_it_and_gives_up_in_time() {
    let root = tempfile::tempdir().unwrap();
    let mut config = small(root.path());
    config.close_deadline = Duration::from_millis(100);
    let (mut rig, engine) = serving(config, |_| {});
    batches(&rig);
    let (capacity, records) = (rig.store.capacity(), chain(1, 1, 16));
    engine.on_writes([Fault::Hold]);
    let hung = rig.submit(TransferKind::Spill, &[(0, capacity - 1)], &records);
    wait_for(|| engine.held() == 1);
    let late = rig.store.set_cap(1 << 20).unwrap_err();
    assert!(matches!(late, DiskError::Deadline { .. }), "{late}");
    assert_eq!(rig.store.capacity(), capacity, "the old cap stays");
    engine.release();
    let done = rig.completion();
    assert_eq!((done.id, done.error), (hung, None));
    assert!(rig.store.set_cap(1 << 20).unwrap() < capacity);
    assert!(disk_usage(root.path()).unwrap() <= 1 << 20);
}

#[test]
fn a_smaller_cap_deletes_the_segments_of_others_first_to_last() {
    let root = tempfile::tempdir().unwrap();
    let mut other = config(root.path(), 2 << 20, 16, 12_288);
    other.fingerprint = Fingerprint([2; 32]);
    let mut rig = Rig::open(other);
    let records = chain(1, 60, 16);
    let places: Vec<u32> = (0..60).collect();
    assert_eq!(rig.spill(&places, &records).error, None);
    drop(rig);
    let mut rig = Rig::open(small(root.path()));
    assert_eq!(rig.spill(&places[..20], &records[..20]).error, None);
    rig.store.set_cap(1 << 20).unwrap();
    assert!(disk_usage(root.path()).unwrap() <= 1 << 20);
    assert_eq!(rig.prefetch(&places[..20], &records[..20]).error, None, "our own segments stay");
    assert_eq!(PageId(rig.store.capacity()), PageId(rig.store.capacity_under(1 << 20).unwrap()));
}
