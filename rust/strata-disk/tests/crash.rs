//! A crash at any moment. The log of every write is replayed up to each prefix:
//! - with the last write torn, as when a process dies: every record that a recovery lists is whole;
//! - with the writes since the last sync reordered, torn and lost, as after a power loss: every record that a recovery
//!   lists is whole or seen to be corrupt, and what was synced and not written since is there.
//!
//! `STRATA_SOAK=1` tries a hundred times as many power losses.
#![allow(clippy::unwrap_used, clippy::panic)]
mod common;

use common::{chain, config, pattern, Rig};
use std::collections::HashMap;
use std::path::Path;
use std::sync::{Arc, Mutex};
use strata_disk::{DiskConfig, Fate, Geometry, IoEngine, LoggedWrite, RecordingEngine, Replay};
use strata_types::{PageRecord, TransferError};

const PAGE_BYTES: u32 = 8192;

fn small(root: &Path) -> DiskConfig {
    DiskConfig { threads: 1, depth: 1, ..config(root, 400_000, 4, PAGE_BYTES) }
}

/// What a store did in its life.
struct Life {
    log: Vec<LoggedWrite>,
    geometry: Geometry,
    /// Lengths of the log at which everything before was safe against power loss.
    safe: Vec<usize>,
}

/// Spills, overwrites, erases, copies of one record in two places, two syncs.
fn life(root: &Path) -> Life {
    let made: Mutex<Option<Arc<RecordingEngine>>> = Mutex::new(None);
    let mut rig = Rig::try_open(small(root), &|engine| {
        let engine = Arc::new(RecordingEngine::new(engine));
        *made.lock().unwrap() = Some(Arc::clone(&engine));
        engine as Arc<dyn IoEngine>
    })
    .unwrap();
    let engine = made.lock().unwrap().take().unwrap();
    let geometry = rig.store.geometry();
    let mut safe = vec![0];
    assert_eq!(rig.spill(&[0, 1, 2, 7, 8], &chain(1, 5, 4)).error, None);
    assert_eq!(rig.spill(&[1, 2], &chain(2, 2, 4)).error, None);
    rig.store.sync().unwrap();
    safe.push(engine.log().len());
    assert_eq!(rig.erase(&[0, 7]).error, None);
    assert_eq!(rig.spill(&[0, 1, 3], &chain(3, 3, 4)).error, None);
    rig.store.sync().unwrap();
    safe.push(engine.log().len());
    assert_eq!(rig.spill(&[9], &chain(1, 1, 4)).error, None);
    assert_eq!(rig.spill(&[4, 5], &chain(3, 2, 4)).error, None);
    assert_eq!(rig.erase(&[8]).error, None);
    assert_eq!(rig.spill(&[8], &chain(4, 1, 4)).error, None);
    drop(rig);
    Life { log: engine.log(), geometry, safe }
}

/// Opens what a crash left. Every listed record must be whole, unless `may_be_corrupt`, when it may be a miss. Returns
/// those that are whole.
fn survivors(root: &Path, may_be_corrupt: bool) -> HashMap<u32, PageRecord> {
    let mut rig = Rig::open(small(root));
    let mut whole = HashMap::new();
    for found in rig.recovered.records.clone() {
        // `prefetch` proves the bytes of what it reports as whole.
        let done = rig.prefetch(&[found.page.0], std::slice::from_ref(&found.record));
        match done.error {
            None => assert!(whole.insert(found.page.0, found.record).is_none()),
            Some(TransferError::Corrupt { .. }) if may_be_corrupt => {}
            Some(error) => panic!("record {}: {error}", found.page),
        }
    }
    let again = chain(5, 3, 4);
    assert_eq!(rig.spill(&[0, 1, 2], &again).error, None, "the root is usable");
    assert_eq!(rig.prefetch(&[0, 1, 2], &again).error, None);
    whole
}

impl Life {
    /// The pages whose header or payload a change touches.
    fn touched(&self, change: &LoggedWrite) -> Vec<u32> {
        let LoggedWrite::Write { path, offset, bytes } = change else { return Vec::new() };
        let number: usize = path.file_stem().unwrap().to_str().unwrap()["segment-".len()..].parse().unwrap();
        let (headers, end) = (path.extension().unwrap() == "kh", offset + bytes.len() as u64);
        let overlaps = |index: &u32| {
            let (start, length) = match headers {
                true => (self.geometry.header_offset(*index), self.geometry.header_slot()),
                false => (self.geometry.payload_offset(*index), self.geometry.payload_slot()),
            };
            start < end && *offset < start + length
        };
        let indices = (0..self.geometry.records_per_segment).filter(overlaps);
        indices.map(|index| self.geometry.page(number, index)).collect()
    }
}

fn replayed(
    life: &Life,
    from: &Path,
    changes: Vec<(usize, Fate)>,
    may_be_corrupt: bool,
) -> HashMap<u32, PageRecord> {
    let crashed = tempfile::tempdir().unwrap();
    Replay { log: &life.log, from, to: crashed.path() }.apply(changes).unwrap();
    survivors(crashed.path(), may_be_corrupt)
}

fn all_of(count: usize) -> Vec<(usize, Fate)> {
    (0..count).map(|index| (index, Fate::Whole)).collect()
}

#[test]
fn a_process_killed_at_any_moment_leaves_whole_records() {
    let root = tempfile::tempdir().unwrap();
    let life = life(root.path());
    let mut most = 0;
    for count in 0..=life.log.len() {
        let mut fates = vec![Fate::Whole];
        if let Some(LoggedWrite::Write { bytes, .. }) = life.log.get(count.wrapping_sub(1)) {
            let length = bytes.len();
            fates.extend([0, 1, 8, 100, length / 2, length.saturating_sub(1)].map(Fate::Front));
            fates.extend((0..3).map(|seed| Fate::Sectors(seed + count as u64)));
        }
        for fate in fates {
            let mut changes = all_of(count);
            if let Some(last) = changes.last_mut() {
                last.1 = fate;
            }
            most = most.max(replayed(&life, root.path(), changes, false).len());
        }
    }
    assert_eq!(most, 6, "the whole log gives every record that was not erased, each once");
}

/// A generator of random numbers that is the same everywhere.
struct Draw(u64);

impl Draw {
    fn next(&mut self, below: usize) -> usize {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) as usize % below.max(1)
    }
}

/// The first `count` changes, of which those from `safe` on are reordered, torn and lost at random.
fn power_loss(safe: usize, count: usize, seed: u64) -> Vec<(usize, Fate)> {
    let mut draw = Draw(seed);
    let mut changes = all_of(count);
    for (_, fate) in &mut changes[safe..] {
        *fate = match draw.next(4) {
            0 => Fate::Lost,
            1 => Fate::Sectors(draw.next(1 << 20) as u64),
            _ => Fate::Whole,
        };
    }
    if draw.next(2) == 0 {
        for last in (safe + 1..count).rev() {
            changes.swap(last, safe + draw.next(last + 1 - safe));
        }
    }
    changes
}

#[test]
fn a_power_loss_loses_nothing_that_was_synced_and_gives_no_wrong_byte() {
    let root = tempfile::tempdir().unwrap();
    let life = life(root.path());
    let seeds = if std::env::var_os("STRATA_SOAK").is_some() { 400 } else { 4 };
    let at_sync: Vec<_> =
        life.safe.iter().map(|safe| replayed(&life, root.path(), all_of(*safe), false)).collect();
    assert_eq!(at_sync.iter().map(HashMap::len).collect::<Vec<_>>(), [0, 5, 5]);
    for count in 0..=life.log.len() {
        let last = life.safe.iter().rposition(|safe| *safe <= count).unwrap();
        let safe = life.safe[last];
        let written: Vec<u32> =
            life.log[safe..count].iter().flat_map(|change| life.touched(change)).collect();
        let written_keys: Vec<_> = life.log[safe..count].iter().flat_map(keys_in).collect();
        for seed in 0..seeds {
            let changes = power_loss(safe, count, seed * 1000 + count as u64);
            let whole = replayed(&life, root.path(), changes.clone(), true);
            for (page, record) in &at_sync[last] {
                if !written.contains(page) && !written_keys.contains(&record.key.0.to_vec()) {
                    assert_eq!(whole.get(page), Some(record), "page {page} after {changes:?}");
                }
            }
        }
    }
}

/// The keys in the headers that a change writes: a record that is written again elsewhere replaces the older one.
fn keys_in(change: &LoggedWrite) -> Vec<Vec<u8>> {
    let LoggedWrite::Write { path, bytes, .. } = change else { return Vec::new() };
    if path.extension().unwrap() != "kh" {
        return Vec::new();
    }
    let starts = (0..bytes.len()).step_by(256).filter(|start| bytes[*start..].starts_with(b"STRATAKV"));
    starts.map(|start| bytes[start + 152..start + 184].to_vec()).collect()
}

#[test]
fn the_log_holds_every_byte_that_was_written() {
    let root = tempfile::tempdir().unwrap();
    let life = life(root.path());
    let payload = pattern(&chain(4, 1, 4)[0], PAGE_BYTES as usize);
    let holds =
        |change: &LoggedWrite| matches!(change, LoggedWrite::Write { bytes, .. } if *bytes == payload);
    assert_eq!(life.log.iter().filter(|change| holds(change)).count(), 1);
}
