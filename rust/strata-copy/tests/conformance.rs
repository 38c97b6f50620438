//! Every Mover's suite on the copy threads, and random layouts against a naive copy.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod common;

use common::{naive, shape, transfer, Bench, GUARD};
use proptest::prelude::*;
use std::sync::Arc;
use strata_copy::NoThrottle;
use strata_tier::conformance::{run_all, MoverHarness};
use strata_tier::{CompletionReceiver, Mover};
use strata_types::{KvLayout, KvShape, PageId, TransferKind};

struct Harness {
    bench: Bench,
    guards: [Vec<u8>; 2],
}

impl Harness {
    fn new(shape: KvShape, threads: usize, backup_niceness: u8) -> Harness {
        let device = KvLayout::layer_first(shape, 16).unwrap();
        let host = KvLayout::page_first(shape, 19, 4096).unwrap();
        let bench = Bench::with_niceness(device, host, threads, backup_niceness, Arc::new(NoThrottle));
        let guards = Harness::read_guards(&bench);
        Harness { bench, guards }
    }

    fn read_guards(bench: &Bench) -> [Vec<u8>; 2] {
        [&bench.device, &bench.host].map(|memory| {
            let all = memory.snapshot();
            let guard = GUARD as usize;
            [&all[..guard], &all[all.len() - guard..]].concat()
        })
    }
}

impl Drop for Harness {
    fn drop(&mut self) {
        if !std::thread::panicking() {
            self.bench.engine.close().unwrap();
            assert_eq!(self.bench.engine.outstanding(), 0);
            assert!(Harness::read_guards(&self.bench) == self.guards, "a guard zone was written");
        }
    }
}

impl MoverHarness for Harness {
    fn mover(&self) -> &dyn Mover {
        &self.bench.engine
    }
    fn completions(&self) -> &CompletionReceiver {
        &self.bench.completions
    }
    fn edge(&self) -> (TransferKind, TransferKind) {
        (TransferKind::Backup, TransferKind::Load)
    }
    fn layers(&self) -> u32 {
        self.bench.device.layout.shape.layers
    }
    fn page_size(&self) -> usize {
        self.bench.device.layout.shape.page_size as usize
    }
    fn pages(&self) -> u32 {
        16
    }
    fn write_upper(&mut self, page: PageId, bytes: &[u8]) {
        self.bench.device.write(page, bytes);
    }
    fn read_upper(&self, page: PageId) -> Vec<u8> {
        self.bench.device.read(page)
    }
    fn page_bytes(&self) -> usize {
        self.bench.device.layout.shape.page_bytes()
    }
}

#[test]
fn the_engine_passes_the_suite_of_movers() {
    // layers, parts, page size, bytes of a token: all different, so that no two can be swapped unnoticed.
    let shapes = [
        shape(5, 2, 16, 3 * 64 * 4),  // grouped heads, 12 KiB pieces
        shape(3, 2, 7, 32 * 128 * 2), // all heads, 56 KiB pieces
        shape(4, 1, 3, 576 * 2),      // one latent
        shape(3, 2, 1, 4),            // the smallest piece there is
        shape(2, 1, 1, 260 * 1024),   // pieces larger than a step
    ];
    for shape in shapes {
        for (threads, backup_niceness) in [(1, 0), (2, 0), (3, 0), (2, 10)] {
            run_all(|| Harness::new(shape, threads, backup_niceness));
        }
    }
}

fn layout(shape: KvShape, pages: u32, layer_first: bool, alignment: u64) -> KvLayout {
    if layer_first {
        KvLayout::layer_first(shape, pages).unwrap()
    } else {
        KvLayout::page_first(shape, pages, alignment).unwrap()
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(96))]
    #[test]
    fn any_layouts_any_pages_both_ways_equal_a_naive_copy(
        (layers, parts, page_size, words) in (1u32..6, 1u32..3, 1u32..20, 1u32..300),
        (device_first, host_first) in any::<(bool, bool)>(),
        alignment in prop::sample::select(vec![1u64, 4, 64, 4096]),
        order in Just((0..24u32).collect::<Vec<_>>()).prop_shuffle(),
        (count, shift, threads) in (0usize..24, 0u32..5, 1usize..4),
    ) {
        let shape = shape(layers, parts, page_size, words * 4);
        let device = layout(shape, 24, device_first, alignment);
        let host = layout(shape, 29, host_first, alignment);
        let bench = Bench::with_layouts(device, host, threads, Arc::new(NoThrottle));
        let down: Vec<(u32, u32)> = order[..count].iter().map(|page| (*page, 28 - *page)).collect();
        let up: Vec<(u32, u32)> = order.iter().skip(3).map(|page| (page + shift, *page)).collect();
        for (id, kind, moves) in [(1, TransferKind::Backup, &down), (2, TransferKind::Load, &up)] {
            let (source, destination) = bench.ends(kind);
            let (source_before, before) = (source.snapshot(), destination.snapshot());
            let wanted = naive(source, destination, &before, moves);
            let ticket = bench.submit(id, kind, moves);
            let done = bench.done();
            prop_assert_eq!((done.error, done.pages_whole), (None, moves.len()));
            prop_assert_eq!(done.bytes, (moves.len() * shape.page_bytes()) as u64);
            prop_assert!(ticket.is_none_or(|ticket| ticket.is_complete()));
            prop_assert!(destination.snapshot() == wanted, "{} wrote something else", kind.name());
            prop_assert!(source.snapshot() == source_before, "{} wrote its source", kind.name());
        }
    }
}

#[test]
fn impossible_transfers_fail_with_the_reason_and_move_nothing() {
    let shape = shape(3, 2, 4, 64);
    let bench = Bench::plain(shape, 2);
    let (device, host) = (bench.device.snapshot(), bench.host.snapshot());
    let load = |moves: &[(u32, u32)]| transfer(1, TransferKind::Load, moves, 3);
    let mut other_group = load(&[(0, 0)]);
    other_group.group = strata_types::GroupId(7);
    let cases = [
        (load(&[(0, 0), (18, 16)]), "device page 16 does not exist: the pool has 16 pages"),
        (load(&[(0, 0), (19, 1)]), "host page 19 does not exist: the pool has 19 pages"),
        (load(&[(u32::MAX, 0)]), "host page 4294967295"),
        (load(&[(0, 5), (1, 4), (2, 5)]), "device page 5 would be written twice"),
        (transfer(1, TransferKind::Load, &[(0, 0)], 4), "the ticket counts 4 layers, a page has 3"),
        (transfer(1, TransferKind::Spill, &[(0, 0)], 3), "copy threads only load and back up"),
        (transfer(1, TransferKind::Erase, &[(0, 0)], 3), "copy threads only load and back up"),
        (other_group, "group 7 asked for, group 0 here"),
    ];
    for (descriptor, reason) in cases {
        let ticket = descriptor.ticket.clone();
        bench.engine.submit(descriptor).unwrap();
        let done = bench.done();
        let message = done.error.unwrap().to_string();
        assert!(message.contains(reason), "{message}");
        assert_eq!((done.pages_whole, done.bytes), (0, 0));
        assert!(ticket.is_none_or(|ticket| ticket.state() == strata_types::TicketState::Failed));
    }
    assert!(bench.device.snapshot() == device && bench.host.snapshot() == host);
    assert_eq!(bench.engine.outstanding(), 0);
}
