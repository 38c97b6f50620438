//! A crash at any moment. The log of every write is replayed up to each prefix, with the last write torn: what a
//! recovery then lists is whole. With writes lost that no sync had made safe, as after a power loss, what it lists is
//! whole or seen to be corrupt.
#![allow(clippy::unwrap_used, clippy::panic)]
mod common;

use common::{chain, config, Rig};
use proptest::prelude::*;
use std::path::Path;
use std::sync::{Arc, Mutex};
use strata_disk::{DiskConfig, IoEngine, LoggedWrite, RecordingEngine, Replay};
use strata_types::TransferError;

fn small(root: &Path) -> DiskConfig {
    DiskConfig { threads: 1, depth: 1, ..config(root, 400_000, 4, 8192) }
}

/// A life of a store: spills, overwrites, erases, a sync in the middle.
fn life(root: &Path) -> Vec<LoggedWrite> {
    let made: Mutex<Option<Arc<RecordingEngine>>> = Mutex::new(None);
    let mut rig = Rig::try_open(small(root), &|engine| {
        let engine = Arc::new(RecordingEngine::new(engine));
        *made.lock().unwrap() = Some(Arc::clone(&engine));
        engine as Arc<dyn IoEngine>
    })
    .unwrap();
    assert_eq!(rig.spill(&[0, 1, 2, 7, 8], &chain(1, 5, 4)).error, None);
    assert_eq!(rig.spill(&[1, 2], &chain(2, 2, 4)).error, None);
    rig.store.sync().unwrap();
    assert_eq!(rig.erase(&[0, 7]).error, None);
    assert_eq!(rig.spill(&[0, 1, 3], &chain(3, 3, 4)).error, None);
    assert_eq!(rig.spill(&[9], &chain(1, 1, 4)).error, None);
    let engine = made.lock().unwrap().take().unwrap();
    drop(rig);
    engine.log()
}

/// Opens what a crash left; every listed record must be whole, unless `may_be_corrupt`, when it may be a miss.
fn survives(root: &Path, may_be_corrupt: bool) -> usize {
    let mut rig = Rig::open(small(root));
    let mut whole = 0;
    for found in rig.recovered.records.clone() {
        // `prefetch` proves the bytes of what it reports as whole.
        let done = rig.prefetch(&[found.page.0], std::slice::from_ref(&found.record));
        match done.error {
            None => whole += 1,
            Some(TransferError::Corrupt { .. }) if may_be_corrupt => {}
            Some(error) => panic!("record {}: {error}", found.page),
        }
    }
    let again = chain(5, 3, 4);
    assert_eq!(rig.spill(&[0, 1, 2], &again).error, None, "the root is usable");
    assert_eq!(rig.prefetch(&[0, 1, 2], &again).error, None);
    whole
}

#[test]
fn a_process_killed_at_any_moment_leaves_whole_records() {
    let root = tempfile::tempdir().unwrap();
    let log = life(root.path());
    let mut most = 0;
    for count in 0..=log.len() {
        let lengths: Vec<Option<usize>> = match log.get(count.wrapping_sub(1)) {
            Some(LoggedWrite::Write { bytes, .. }) => {
                let length = bytes.len();
                [0, 1, 8, 100, length / 2, length.saturating_sub(1)]
                    .map(Some)
                    .into_iter()
                    .chain([None])
                    .collect()
            }
            _ => vec![None],
        };
        for torn in lengths {
            let crashed = tempfile::tempdir().unwrap();
            let replay = Replay { log: &log, from: root.path(), to: crashed.path() };
            replay.apply(count, torn, |_| true).unwrap();
            most = most.max(survives(crashed.path(), false));
        }
    }
    assert_eq!(most, 6, "the whole log gives every record that was not erased");
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 48, failure_persistence: None, ..ProptestConfig::default() })]
    #[test]
    fn a_power_loss_gives_whole_records_or_misses(
        cut in 0.0f64..1.0, lost in prop::collection::vec(any::<bool>(), 64), torn in prop::option::of(0usize..9000),
    ) {
        let root = tempfile::tempdir().unwrap();
        let log = life(root.path());
        let count = (cut * (log.len() + 1) as f64) as usize;
        let synced = log[..count].iter().rposition(|change| matches!(change, LoggedWrite::Sync { .. })).unwrap_or(0);
        let crashed = tempfile::tempdir().unwrap();
        let keep = |index: usize| {
            index < synced || matches!(log[index], LoggedWrite::Create { .. }) || !lost[index % lost.len()]
        };
        Replay { log: &log, from: root.path(), to: crashed.path() }.apply(count, torn, keep).unwrap();
        survives(crashed.path(), true);
    }
}
