//! Two guarded memories with an engine between them, and the naive copy that it is judged against.
#![allow(dead_code)]

use std::collections::HashSet;
use std::sync::Arc;
use std::time::Duration;
use strata_copy::{Arena, CopyConfig, CopyEngine, NoThrottle, Region, Throttle};
use strata_tier::{completion_queue, CompletionReceiver, Mover};
use strata_types::{
    GroupId, KvLayout, KvShape, LoadTicket, PageId, PageMove, TransferCompletion, TransferDescriptor,
    TransferId, TransferKind,
};

/// Only a hang takes this long.
pub const PATIENCE: Duration = Duration::from_secs(30);
/// Bytes before and after a pool that no copy may touch; odd, so that pools start anywhere.
pub const GUARD: u64 = 4100;

/// One end: its memory, with guards around the pages.
pub struct Memory {
    pub region: Region,
    pub layout: KvLayout,
}

impl Memory {
    /// Filled with bytes that differ from place to place and from `seed` to `seed`.
    pub fn new(mut layout: KvLayout, seed: u32) -> Memory {
        layout.base += GUARD;
        let len = (layout.total_bytes() + GUARD) as usize;
        let region = Region::from_arena(Arc::new(Arena::new(len).unwrap()));
        // SAFETY: the arena was just made, nobody else knows it.
        for (index, byte) in unsafe { region.bytes_mut(0, len) }.unwrap().iter_mut().enumerate() {
            let mixed = (index as u32).wrapping_add(seed.wrapping_mul(7919)).wrapping_mul(2_654_435_761);
            *byte = (mixed >> 24) as u8;
        }
        Memory { region, layout }
    }

    /// A copy of everything. Bytes that a transfer is writing may be old or new.
    pub fn snapshot(&self) -> Vec<u8> {
        // SAFETY: callers compare either settled memory or bytes outside the running transfer's pages.
        unsafe { self.region.bytes(0, self.region.len()) }.unwrap().to_vec()
    }

    /// Where one page's pieces lie, in page-first order.
    pub fn pieces(&self, page: u32) -> Vec<(usize, usize)> {
        let KvShape { layers, parts, .. } = self.layout.shape;
        let bytes = self.layout.shape.piece_bytes();
        (0..layers)
            .flat_map(|layer| (0..parts).map(move |part| (layer, part)))
            .map(|(layer, part)| (self.layout.offset(layer, part, page) as usize, bytes))
            .collect()
    }

    pub fn read(&self, page: PageId) -> Vec<u8> {
        let all = self.snapshot();
        self.pieces(page.0).into_iter().flat_map(|(at, len)| all[at..at + len].to_vec()).collect()
    }

    pub fn write(&self, page: PageId, bytes: &[u8]) {
        let mut rest = bytes;
        for (at, len) in self.pieces(page.0) {
            let (piece, after) = rest.split_at(len);
            rest = after;
            // SAFETY: tests write a page only while no transfer has it.
            unsafe { self.region.bytes_mut(at as u64, len) }.unwrap().copy_from_slice(piece);
        }
    }
}

/// An engine between two memories.
pub struct Bench {
    pub device: Memory,
    pub host: Memory,
    pub engine: CopyEngine,
    pub completions: CompletionReceiver,
}

impl Bench {
    pub fn with_layouts(
        device: KvLayout,
        host: KvLayout,
        threads: usize,
        throttle: Arc<dyn Throttle>,
    ) -> Bench {
        Bench::with_niceness(device, host, threads, 0, throttle)
    }

    pub fn with_niceness(
        device: KvLayout,
        host: KvLayout,
        threads: usize,
        backup_niceness: u8,
        throttle: Arc<dyn Throttle>,
    ) -> Bench {
        let (device, host) = (Memory::new(device, 1), Memory::new(host, 2));
        let (sender, completions) = completion_queue(256);
        let config = CopyConfig {
            device: device.region.clone(),
            device_layout: device.layout,
            host: host.region.clone(),
            host_layout: host.layout,
            threads,
            backup_niceness,
            queue_capacity: 16,
            throttle,
        };
        let engine = CopyEngine::new(config, sender).unwrap();
        Bench { device, host, engine, completions }
    }

    /// Device layer-first, host page-first at 4 KiB, pools of different sizes.
    pub fn new(shape: KvShape, threads: usize, throttle: Arc<dyn Throttle>) -> Bench {
        let device = KvLayout::layer_first(shape, 16).unwrap();
        let host = KvLayout::page_first(shape, 19, 4096).unwrap();
        Bench::with_layouts(device, host, threads, throttle)
    }

    pub fn plain(shape: KvShape, threads: usize) -> Bench {
        Bench::new(shape, threads, Arc::new(NoThrottle))
    }

    pub fn submit(&self, id: u64, kind: TransferKind, moves: &[(u32, u32)]) -> Option<Arc<LoadTicket>> {
        let descriptor = transfer(id, kind, moves, self.device.layout.shape.layers);
        let ticket = descriptor.ticket.clone();
        self.engine.submit(descriptor).unwrap();
        ticket
    }

    pub fn done(&self) -> TransferCompletion {
        self.completions.recv_timeout(PATIENCE).expect("a completion for every transfer")
    }

    /// (source, destination) of a kind.
    pub fn ends(&self, kind: TransferKind) -> (&Memory, &Memory) {
        match kind {
            TransferKind::Load => (&self.host, &self.device),
            _ => (&self.device, &self.host),
        }
    }
}

pub fn transfer(id: u64, kind: TransferKind, moves: &[(u32, u32)], layers: u32) -> TransferDescriptor {
    let ticket = (kind == TransferKind::Load).then(|| Arc::new(LoadTicket::new(TransferId(id), layers)));
    let pages = moves.iter().map(|(from, to)| PageMove { from: PageId(*from), to: PageId(*to) }).collect();
    TransferDescriptor { id: TransferId(id), kind, group: GroupId(0), pages, records: Vec::new(), ticket }
}

/// What the destination has to look like: the moves, piece by piece, on a copy of it.
pub fn naive(source: &Memory, destination: &Memory, before: &[u8], moves: &[(u32, u32)]) -> Vec<u8> {
    let (from_bytes, mut wanted) = (source.snapshot(), before.to_vec());
    for (from, to) in moves {
        for ((from_at, len), (to_at, _)) in source.pieces(*from).into_iter().zip(destination.pieces(*to)) {
            wanted[to_at..to_at + len].copy_from_slice(&from_bytes[from_at..from_at + len]);
        }
    }
    wanted
}

/// Asserts that two snapshots agree everywhere but in these pages.
pub fn assert_unchanged_but(memory: &Memory, before: &[u8], after: &[u8], pages: impl Iterator<Item = u32>) {
    let spared: HashSet<usize> =
        pages.flat_map(|page| memory.pieces(page)).flat_map(|(at, len)| at..at + len).collect();
    let strayed = (0..before.len()).find(|at| before[*at] != after[*at] && !spared.contains(at));
    assert_eq!(strayed, None, "a byte outside the destination pages changed");
}

pub fn shape(layers: u32, parts: u32, page_size: u32, token_bytes: u32) -> KvShape {
    KvShape::new(GroupId(0), layers, parts, page_size, token_bytes).unwrap()
}
