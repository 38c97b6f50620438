//! What the engine promises while transfers run: layers become ready in order, an abort touches nobody else's
//! bytes, loads overtake backups, a panic stays with its transfer, and closing ends everything.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod common;

use common::{assert_unchanged_but, naive, shape, transfer, Bench, PATIENCE};
use std::collections::HashMap;
use std::num::NonZeroU64;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::Arc;
use std::time::{Duration, Instant};
use strata_copy::{
    Arena, BandwidthLimit, CopyConfig, CopyEngine, CopyError, HoldLayer, LayerWork, NoThrottle, Region,
    Throttle,
};
use strata_tier::{completion_queue, Mover, SubmitError};
use strata_types::{KvLayout, TicketState, TransferError, TransferId, TransferKind, WaitOutcome};

/// Long enough for a copy that wrongly goes on to be seen.
const A_WHILE: Duration = Duration::from_millis(30);

fn hold(kind: TransferKind, layer: u32) -> Arc<HoldLayer> {
    Arc::new(HoldLayer::new(kind, layer, PATIENCE * 4))
}

fn moves(count: u32) -> Vec<(u32, u32)> {
    (0..count).map(|page| (page, (page * 5 + 3) % 16)).collect()
}

#[test]
fn layers_below_a_delayed_one_are_ready_and_it_is_not() {
    for threads in [1, 2] {
        let held = hold(TransferKind::Load, 3);
        let bench = Bench::new(shape(5, 2, 16, 768), threads, held.clone());
        let moves = moves(14);
        let before = bench.device.snapshot();
        let wanted = naive(&bench.host, &bench.device, &before, &moves);
        let ticket = bench.submit(1, TransferKind::Load, &moves).unwrap();
        assert_eq!(ticket.wait_layer(2, PATIENCE), WaitOutcome::Ready);
        assert!(held.wait_until_held(PATIENCE));
        assert_eq!(ticket.wait_layer(3, A_WHILE), WaitOutcome::TimedOut);
        let layout = bench.device.layout;
        let boundary = layout.offset(3, 0, 0) as usize;
        let now = bench.device.snapshot();
        assert!(now[..boundary] == wanted[..boundary], "a layer was called ready before it was whole");
        assert!(now[boundary..] == before[boundary..], "the delayed layer was written");
        held.release();
        assert_eq!(ticket.wait_layer(4, PATIENCE), WaitOutcome::Ready);
        assert_eq!(bench.done().error, None);
        assert!(bench.device.snapshot() == wanted);
    }
}

#[test]
fn an_abort_in_the_middle_touches_no_other_byte_and_is_reported_after_the_last_one() {
    for (threads, kind) in [
        (1, TransferKind::Load),
        (2, TransferKind::Load),
        (1, TransferKind::Backup),
        (2, TransferKind::Backup),
    ] {
        let held = hold(kind, 2);
        let bench = Bench::new(shape(5, 2, 16, 768), threads, held.clone());
        let (source, destination) = bench.ends(kind);
        let (source_before, before) = (source.snapshot(), destination.snapshot());
        let moves = moves(9);
        let ticket = bench.submit(1, kind, &moves);
        assert!(held.wait_until_held(PATIENCE));
        assert!(bench.completions.recv_timeout(A_WHILE).is_err(), "reported while its pages are in use");
        bench.engine.cancel(TransferId(1));
        let done = bench.done();
        assert_eq!((done.id, done.error), (TransferId(1), Some(TransferError::Cancelled)));
        assert_eq!(done.pages_whole, 0);
        assert_eq!(bench.engine.outstanding(), 0);
        assert!(ticket.is_none_or(|ticket| ticket.state() == TicketState::Failed));
        let after = destination.snapshot();
        assert!(before != after, "the abort came before the middle: nothing had moved");
        assert_unchanged_but(destination, &before, &after, moves.iter().map(|(_, to)| *to));
        assert!(source.snapshot() == source_before, "the source was written");
        held.release();
        std::thread::sleep(A_WHILE);
        assert!(destination.snapshot() == after, "a byte moved after the completion");
        bench.submit(2, kind, &moves);
        assert_eq!(bench.done().error, None);
        assert!(destination.snapshot() == naive(source, destination, &after, &moves));
    }
}

#[test]
fn a_load_overtakes_a_running_backup_and_waiting_ones() {
    let held = hold(TransferKind::Backup, 1);
    let bench = Bench::new(shape(3, 2, 16, 768), 1, held.clone());
    bench.submit(1, TransferKind::Backup, &[(0, 0), (1, 1)]);
    assert!(held.wait_until_held(PATIENCE));
    bench.submit(2, TransferKind::Backup, &[(2, 2)]);
    bench.submit(3, TransferKind::Load, &[(3, 3), (4, 4)]);
    let first = bench.done();
    assert_eq!(
        (first.id, first.error),
        (TransferId(3), None),
        "the only thread was in the middle of a backup"
    );
    held.release();
    assert_eq!([bench.done().id, bench.done().id], [TransferId(1), TransferId(2)]);
}

#[test]
fn waiting_loads_go_before_a_backup_that_came_earlier() {
    let held = hold(TransferKind::Load, 0);
    let bench = Bench::new(shape(3, 2, 16, 768), 1, held.clone());
    bench.submit(1, TransferKind::Load, &[(0, 0)]);
    assert!(held.wait_until_held(PATIENCE));
    bench.submit(2, TransferKind::Backup, &[(5, 5)]);
    bench.submit(3, TransferKind::Load, &[(1, 1)]);
    held.release();
    let order: Vec<u64> = (0..3).map(|_| bench.done().id.0).collect();
    assert_eq!(order, [1, 3, 2]);
}

#[test]
fn a_full_queue_hands_the_descriptor_back_and_recovers() {
    for threads in [1, 2] {
        let held = hold(TransferKind::Load, 0);
        let bench = Bench::new(shape(2, 2, 16, 768), threads, held.clone());
        let mut accepted = 0;
        let back = loop {
            let moves = [(accepted, accepted % 16)];
            match bench.engine.submit(transfer(u64::from(accepted), TransferKind::Load, &moves, 2)) {
                Ok(()) => accepted += 1,
                Err(SubmitError::Full(back)) => break back,
                Err(SubmitError::Closed(_)) => panic!("closed"),
            }
            assert!(accepted < 100, "a queue of 16 that never fills");
        };
        assert!(accepted >= 16, "{accepted}");
        assert_eq!(back.id, TransferId(u64::from(accepted)));
        assert_eq!(bench.engine.outstanding(), accepted as usize);
        held.release();
        for _ in 0..accepted {
            // Some name pages that do not exist: they complete all the same.
            bench.done();
        }
        assert_eq!(bench.engine.outstanding(), 0);
        bench.engine.submit(*back).unwrap();
        bench.done();
    }
}

struct PanicAt(u32);

impl Throttle for PanicAt {
    fn is_held(&self, work: &LayerWork) -> bool {
        assert!(work.id != TransferId(13) || work.layer != self.0, "scripted");
        false
    }
}

#[test]
fn a_panic_fails_its_transfer_and_nothing_else() {
    for threads in [1, 2] {
        let bench = Bench::new(shape(4, 2, 16, 768), threads, Arc::new(PanicAt(2)));
        for (id, kind) in [(13, TransferKind::Load), (13, TransferKind::Backup)] {
            let ticket = bench.submit(id, kind, &moves(16));
            let done = bench.done();
            let message = done.error.unwrap().to_string();
            assert!(message.contains("copy thread") && message.contains("panicked: scripted"), "{message}");
            assert_eq!(done.pages_whole, 0);
            assert!(ticket.is_none_or(|ticket| ticket.state() == TicketState::Failed));
        }
        for id in 14..24 {
            bench.submit(id, TransferKind::Load, &moves(16));
            assert_eq!(bench.done().error, None);
        }
    }
}

#[test]
fn closing_cancels_everything_and_refuses_more() {
    for threads in [1, 2] {
        let held = hold(TransferKind::Load, 1);
        let bench = Bench::new(shape(4, 2, 16, 768), threads, held.clone());
        let tickets: Vec<_> =
            (0..6).map(|id| bench.submit(id, TransferKind::Load, &[(1, id as u32)]).unwrap()).collect();
        bench.submit(6, TransferKind::Backup, &moves(16));
        assert!(held.wait_until_held(PATIENCE));
        bench.engine.close().unwrap();
        bench.engine.close().unwrap();
        let mut seen: Vec<u64> = Vec::new();
        for done in bench.completions.try_iter() {
            assert!(done.error == Some(TransferError::Cancelled) || done.id == TransferId(6));
            seen.push(done.id.0);
        }
        seen.sort_unstable();
        assert_eq!(seen, [0, 1, 2, 3, 4, 5, 6]);
        assert!(tickets.iter().all(|ticket| ticket.state() == TicketState::Failed));
        let refused = bench.engine.submit(transfer(9, TransferKind::Load, &[(0, 0)], 4));
        assert!(matches!(refused, Err(SubmitError::Closed(back)) if back.id == TransferId(9)));
    }
}

fn two_regions(shape: strata_types::KvShape) -> CopyConfig {
    let device_layout = KvLayout::layer_first(shape, 4).unwrap();
    let host_layout = KvLayout::page_first(shape, 4, 1).unwrap();
    let region =
        |layout: KvLayout| Region::from_arena(Arc::new(Arena::new(layout.total_bytes() as usize).unwrap()));
    CopyConfig {
        device: region(device_layout),
        device_layout,
        host: region(host_layout),
        host_layout,
        threads: 2,
        backup_niceness: 0,
        queue_capacity: 4,
        throttle: Arc::new(NoThrottle),
    }
}

#[test]
fn dropping_an_engine_that_nobody_listens_to_ends() {
    for listening in [true, false] {
        let (sender, receiver) = completion_queue(1);
        let engine = CopyEngine::new(two_regions(shape(2, 2, 4, 64)), sender).unwrap();
        for id in 0..4 {
            engine.submit(transfer(id, TransferKind::Backup, &[(0, id as u32)], 2)).unwrap();
        }
        if !listening {
            drop(receiver);
        }
        engine.close().unwrap();
        assert_eq!(engine.outstanding(), 0);
        assert_eq!(engine.stats().backup.transfers, 4);
        assert_eq!(engine.stats().completions_lost, if listening { 3 } else { 4 });
    }
}

/// Niceness of every copy thread of this process that has `name`.
#[cfg(target_os = "linux")]
fn niceness_of(name: &str) -> Vec<i32> {
    let tasks = std::fs::read_dir("/proc/self/task").unwrap();
    // Threads of other tests come and go meanwhile.
    let stats = tasks.filter_map(|task| std::fs::read_to_string(task.unwrap().path().join("stat")).ok());
    let named: Vec<String> = stats.filter(|stat| stat.contains(&format!("({name})"))).collect();
    // Field 19 of all, the 17th after the name.
    let field =
        |stat: &String| stat.rsplit(')').next().unwrap().split_whitespace().nth(16).map(str::to_owned);
    named.iter().map(|stat| field(stat).unwrap().parse().unwrap()).collect()
}

#[cfg(target_os = "linux")]
#[test]
fn polite_backups_run_on_threads_of_their_own_that_loads_never_need() {
    let config = CopyConfig { threads: 13, backup_niceness: 7, ..two_regions(shape(2, 2, 4, 64)) };
    let (sender, receiver) = completion_queue(4);
    let hold = hold(TransferKind::Backup, 0);
    let engine = CopyEngine::new(CopyConfig { throttle: hold.clone(), ..config }, sender).unwrap();
    engine.submit(transfer(1, TransferKind::Backup, &[(0, 1)], 2)).unwrap();
    assert!(hold.wait_until_held(PATIENCE));
    engine.submit(transfer(2, TransferKind::Load, &[(2, 3)], 2)).unwrap();
    assert_eq!(receiver.recv_timeout(PATIENCE).unwrap().id, TransferId(2), "a load waited for a backup");
    hold.release();
    assert_eq!(receiver.recv_timeout(PATIENCE).unwrap().id, TransferId(1));
    // No other test has as many threads, so these two are this engine's. Each names itself, then sets its
    // niceness, when it first runs, and on a busy machine that may be after all of the above.
    let deadline = Instant::now() + PATIENCE;
    loop {
        let mut all = niceness_of("strata-copy-12");
        all.sort_unstable();
        if matches!(all[..], [plain, 7] if plain < 7) {
            break;
        }
        assert!(Instant::now() < deadline, "{all:?}");
        std::thread::sleep(A_WHILE);
    }
}

#[test]
fn a_configuration_that_cannot_work_is_refused_with_the_reason() {
    let shape_a = shape(2, 2, 4, 64);
    let check = |change: &dyn Fn(&mut CopyConfig), wanted: &str| {
        let mut config = two_regions(shape_a);
        change(&mut config);
        let error = CopyEngine::new(config, completion_queue(1).0).map(drop).unwrap_err();
        assert!(error.to_string().contains(wanted), "{error}");
    };
    check(&|c| c.threads = 0, "--copy-threads must be between 1 and 16, got 0");
    check(&|c| c.threads = 99, "got 99");
    check(&|c| c.queue_capacity = 0, "queue_capacity must be between 1");
    check(&|c| c.host_layout = KvLayout::page_first(shape(2, 1, 8, 64), 4, 1).unwrap(), "pages differ");
    check(&|c| c.host_layout.pages += 1, "the host layout needs 5120 bytes, its memory has 4096");
    check(&|c| c.device_layout.base = u64::MAX, "the device layout needs");
    check(&|c| c.device_layout.layer_stride = u64::MAX, "the device layout needs");
    check(&|c| c.device_layout.page_stride -= 4, "the device layout lets pieces overlap");
    check(&|c| c.host_layout.layer_stride = 0, "the host layout lets pieces overlap");
    check(&|c| c.host = c.device.clone(), "the device and host regions overlap");
    check(
        &|c| {
            c.device_layout.shape.layers = 0;
            c.host_layout.shape.layers = 0;
        },
        "layers of at least 1",
    );
    let map = Arena::new(usize::MAX / 4).unwrap_err();
    assert!(matches!(map, CopyError::Map { .. }));
}

#[test]
fn a_limited_link_takes_its_time_and_a_cancel_ends_the_wait() {
    let shape = shape(4, 2, 16, 768);
    let bytes = 2 * shape.page_bytes() as u64;
    let rate = NonZeroU64::new(bytes * 20).unwrap();
    let bench = Bench::new(shape, 2, Arc::new(BandwidthLimit::new(Some(rate), Some(NonZeroU64::MIN))));
    let started = Instant::now();
    bench.submit(1, TransferKind::Load, &[(0, 0), (1, 1)]);
    let done = bench.done();
    assert!(started.elapsed() >= Duration::from_millis(45), "faster than 20 times its bytes a second");
    assert!(done.busy_ns >= 45_000_000 && bench.engine.stats().load.busy_ns == done.busy_ns);
    assert_eq!((done.bytes, bench.engine.stats().load.bytes), (bytes, bytes));
    // At a byte a second this backup would outlive everybody.
    bench.submit(2, TransferKind::Backup, &[(0, 0)]);
    bench.submit(3, TransferKind::Load, &[(3, 3)]);
    assert_eq!(bench.done().id, TransferId(3));
    bench.engine.cancel(TransferId(2));
    assert_eq!(bench.done().error, Some(TransferError::Cancelled));
}

/// Lets threads meet everywhere: sleeps now and then, before any layer.
#[derive(Default)]
struct Jitter(AtomicU64);

impl Throttle for Jitter {
    fn earliest(&self, _work: &LayerWork) -> Option<Instant> {
        let turn = self.0.fetch_add(1, Ordering::Relaxed).wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 58;
        (turn == 0).then(|| Instant::now() + Duration::from_micros(300))
    }
}

#[test]
fn many_transfers_with_cancels_complete_once_and_keep_their_word() {
    for threads in [1, 2, 4] {
        let bench = Bench::new(shape(5, 2, 8, 768), threads, Arc::new(Jitter::default()));
        let mut waiting = HashMap::new();
        let (mut id, mut whole, mut cut) = (0_u64, 0, 0);
        while id < 400 || !waiting.is_empty() {
            // Device pages 0..8 are backed up into host pages 0..8, host pages 8..16 loaded into device 8..16:
            // a slot is free again when its transfer has been reported.
            let (slot, kind) = (id % 4, if id % 8 < 4 { TransferKind::Load } else { TransferKind::Backup });
            let key = (slot, kind);
            if id < 400 && !waiting.values().any(|(other, _)| *other == key) {
                let first = slot as u32 * 2 + if kind == TransferKind::Load { 8 } else { 0 };
                let pages = [(first + 1, first), (first, first + 1)];
                let ticket = bench.submit(id, kind, &pages);
                waiting.insert(TransferId(id), (key, (pages, ticket)));
                if id % 3 == 0 {
                    bench.engine.cancel(TransferId(id));
                    bench.engine.cancel(TransferId(id + 1));
                }
                id += 1;
                continue;
            }
            let done = bench.done();
            let ((_, kind), (pages, ticket)) = waiting.remove(&done.id).expect("one completion a transfer");
            let (source, destination) = bench.ends(kind);
            for (from, to) in &pages[..done.pages_whole] {
                let (from, to) = (strata_types::PageId(*from), strata_types::PageId(*to));
                assert!(source.read(from) == destination.read(to), "page {to} was called whole");
            }
            let complete = done.error.is_none();
            assert_eq!(complete, done.pages_whole == 2);
            assert!(ticket.is_none_or(|ticket| ticket.is_complete() == complete));
            if complete {
                whole += 1;
            } else {
                cut += 1;
            }
        }
        assert!(whole > 100 && whole + cut == 400, "{whole} whole, {cut} cut");
        assert_eq!(bench.engine.outstanding(), 0);
        assert!(bench.completions.recv_timeout(A_WHILE).is_err(), "a completion too many");
    }
}
