//! Each fault, in each kind of transfer, at each of its I/Os: one completion, no wrong byte, books that agree, before
//! and after a restart.
#![allow(clippy::unwrap_used, clippy::panic)]
mod common;

use common::{chain, config, wait_for, Rig};
use std::path::Path;
use std::sync::{Arc, Mutex};
use std::time::Duration;
use strata_disk::{disk_usage, DiskConfig, Fault, FaultyEngine, Health, IoEngine};
use strata_tier::Mover;
use strata_types::{TransferError, TransferKind};

const CAP: u64 = 1 << 20;
const PLACES: [u32; 4] = [0, 1, 2, 3];

fn faults() -> Vec<Fault> {
    let lengths = [0, 1, 512, 4096, 5000, 20_000];
    let bits = [3, 8 * 600, 8 * 5000, 8 * 20_000];
    let mut all = vec![
        Fault::Error(libc::EIO),
        Fault::Error(libc::ENOSPC),
        Fault::Slow(Duration::from_millis(2)),
        Fault::Hold,
        Fault::Lose,
    ];
    all.extend(lengths.iter().flat_map(|bytes| [Fault::Short(*bytes), Fault::Torn(*bytes)]));
    all.extend(bits.map(Fault::FlipBit));
    all
}

fn open(root: &Path) -> (Rig, Arc<FaultyEngine>) {
    let made: Mutex<Option<Arc<FaultyEngine>>> = Mutex::new(None);
    let one_thread = DiskConfig { threads: 1, ..config(root, CAP, 4, 8192) };
    let rig = Rig::try_open(one_thread, &|engine| {
        let engine = Arc::new(FaultyEngine::new(engine));
        *made.lock().unwrap() = Some(Arc::clone(&engine));
        engine as Arc<dyn IoEngine>
    })
    .unwrap();
    let engine = made.lock().unwrap().take().unwrap();
    (rig, engine)
}

/// Old records lie on disk; a transfer of `kind` meets `fault` at its I/O number `position`.
fn meet(kind: TransferKind, fault: Fault, position: usize) {
    let case = format!("{kind:?} under {fault:?} at {position}");
    let root = tempfile::tempdir().unwrap();
    let (old, new) = (chain(1, 4, 4), chain(2, 4, 4));
    let (mut rig, engine) = open(root.path());
    assert_eq!(rig.spill(&PLACES, &old).error, None);
    let script = vec![Fault::None; position].into_iter().chain([fault]);
    if kind == TransferKind::Prefetch {
        engine.on_reads(script);
    } else {
        engine.on_writes(script);
    }
    for (page, record) in new.iter().enumerate() {
        rig.memory.write(page as u32, &common::pattern(record, 8192));
    }
    let (moves, records) = match kind {
        TransferKind::Spill => (PLACES.map(|place| (place, place)), new.clone()),
        TransferKind::Prefetch => (PLACES.map(|place| (place, place + 10)), old.clone()),
        _ => (PLACES.map(|place| (place, place)), Vec::new()),
    };
    let id = rig.submit(kind, &moves, &records);
    if matches!(fault, Fault::Hold | Fault::Lose) {
        wait_for(|| engine.held() + engine.lost() > 0);
        rig.store.cancel(id);
        assert!(rig.completions.try_recv().is_err(), "{case}: completed with an I/O in flight");
        engine.release();
        engine.release_lost();
    }
    let done = rig.completion();
    assert_eq!((done.id, done.error.is_none()), (id, done.pages_whole == 4), "{case}: {done:?}");
    assert_eq!(rig.store.stats().outstanding, 0, "{case}");
    let lies = matches!(fault, Fault::Torn(_) | Fault::FlipBit(_));
    engine.heal();

    // `Rig::prefetch` proves the bytes of all that is whole.
    let (as_old, as_new) = (rig.prefetch(&PLACES, &old), rig.prefetch(&PLACES, &new));
    assert!(as_old.pages_whole == 0 || as_new.pages_whole == 0, "{case}: one record is two pages");
    match kind {
        TransferKind::Spill if !lies => assert_eq!(as_new.pages_whole, done.pages_whole, "{case}"),
        TransferKind::Prefetch => assert_eq!(as_old.pages_whole, 4, "{case}: reading changed the disk"),
        TransferKind::Erase if done.error.is_none() => assert_eq!(as_old.pages_whole, 0, "{case}"),
        _ => {}
    }
    assert_eq!(rig.store.health(), Health::Up);
    assert!(rig.completions.try_recv().is_err(), "{case}: a completion too many");
    drop(rig);

    let (mut rig, _) = open(root.path());
    for found in rig.recovered.records.clone() {
        let known = old.iter().chain(&new).any(|record| *record == found.record);
        assert!(known, "{case}: record {} was never written", found.page);
        let back = rig.prefetch(&[found.page.0], std::slice::from_ref(&found.record));
        assert!(matches!(back.error, None | Some(TransferError::Corrupt { .. })), "{case}: {back:?}");
    }
    if kind == TransferKind::Erase && done.error.is_none() && !lies {
        assert!(rig.recovered.records.is_empty(), "{case}: an erased record came back");
    }
    assert_eq!(rig.spill(&PLACES, &new).error, None, "{case}");
    assert_eq!(rig.prefetch(&PLACES, &new).pages_whole, 4, "{case}");
    assert_eq!(rig.store.stats().unknown_completions, 0);
    assert!(disk_usage(root.path()).unwrap() <= CAP);
}

#[test]
fn spills() {
    // Clearing, payload, header.
    (0..3).for_each(|position| {
        faults().into_iter().for_each(|fault| meet(TransferKind::Spill, fault, position))
    });
}

#[test]
fn prefetches() {
    faults().into_iter().for_each(|fault| meet(TransferKind::Prefetch, fault, 0));
}

#[test]
fn erases() {
    faults().into_iter().for_each(|fault| meet(TransferKind::Erase, fault, 0));
}

/// Transfers of every kind at random, each I/O with a fault at random: the bytes that come back are always those of
/// the record that was asked for (`Rig::prefetch` proves it), and every transfer completes once.
#[test]
fn a_thousand_transfers_under_random_faults() {
    let root = tempfile::tempdir().unwrap();
    let settings = DiskConfig { max_failures: u32::MAX, ..config(root.path(), CAP, 4, 8192) };
    let made: Mutex<Option<Arc<FaultyEngine>>> = Mutex::new(None);
    let mut rig = Rig::try_open(settings, &|engine| {
        let engine = Arc::new(FaultyEngine::new(engine));
        *made.lock().unwrap() = Some(Arc::clone(&engine));
        engine as Arc<dyn IoEngine>
    })
    .unwrap();
    let engine = made.lock().unwrap().take().unwrap();
    let all: Vec<Fault> =
        faults().into_iter().filter(|fault| !matches!(fault, Fault::Hold | Fault::Lose)).collect();
    let mut state = 42_u64;
    let mut draw = |below: usize| {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 33) as usize % below
    };
    let (mut whole, mut failed) = (0, 0);
    for _ in 0..1000 {
        let fault = |at: usize| if at < all.len() { all[at] } else { Fault::None };
        engine.on_reads([fault(draw(2 * all.len()))]);
        engine.on_writes([fault(draw(4 * all.len())), fault(draw(4 * all.len()))]);
        let first = draw(40) as u32;
        let places = [first, first + 1, (first + 7) % 48];
        let records = chain(draw(3) as u32, 3, 4);
        let done = match draw(5) {
            0 => rig.erase(&places),
            1 | 2 => rig.spill(&places, &records),
            _ => rig.prefetch(&places, &records),
        };
        whole += done.pages_whole;
        failed += usize::from(done.error.is_some());
        engine.heal();
    }
    assert!(whole > 300 && failed > 100, "{whole} whole, {failed} failed: the test tests too little");
    assert_eq!((rig.store.stats().outstanding, rig.store.health()), (0, Health::Up));
}
