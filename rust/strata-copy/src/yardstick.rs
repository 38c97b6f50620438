//! What a transfer is measured against: whole pools between two memories of one process, carried once by a
//! `CopyEngine` and once as one span by the same number of threads. Both sides move the same bytes between the same
//! memories, warm and far larger than any cache.

use crate::kernel::{copy_pieces, publish};
use crate::{Arena, CopyConfig, CopyEngine, CopyError, NoThrottle, Region, Stores};
use std::sync::{Arc, Barrier};
use std::time::{Duration, Instant};
use strata_tier::{completion_queue, CompletionReceiver, Mover};
use strata_types::{
    GroupId, KvLayout, KvShape, LoadTicket, PageId, PageMove, TransferDescriptor, TransferError, TransferId,
    TransferKind,
};

/// Layers of a measured page: those of a small model. K and V make two parts.
const LAYERS: u32 = 30;
const PARTS: u32 = 2;
const PAGE_SIZE: u32 = 16;
/// A transfer of a few hundred MiB takes well under a second.
const PATIENCE: Duration = Duration::from_secs(60);
/// A prime step through the pool: an order that no prefetcher guesses.
const STRIDE: u32 = 7919;
/// Pages of the arena start at multiples of this, as they do in an engine.
const ALIGNMENT: u64 = 4096;

/// What is measured.
#[derive(Clone, Copy, Debug)]
pub struct YardstickConfig {
    /// Bytes of a piece, a multiple of 64.
    pub piece_bytes: u32,
    /// Bytes of each pool, about.
    pub bytes: usize,
    /// Threads of either side.
    pub threads: usize,
    /// The engine's `backup_niceness`.
    pub backup_niceness: u8,
    /// Pages lie in the device in another order than in the host, as in a pool that has been in use for long.
    pub scattered: bool,
}

/// Spans are copied in units of this as far as possible.
const SPAN_UNIT: usize = 4096;

/// One piece size and number of threads: two memories and the engine between them.
pub struct Yardstick {
    device: (Region, KvLayout),
    host: (Region, KvLayout),
    engine: CopyEngine,
    completions: CompletionReceiver,
    moves: Vec<PageMove>,
    threads: usize,
    bytes: usize,
}

impl Yardstick {
    /// Two pools in memory, every page of one with its place in the other, and an idle engine.
    pub fn new(config: YardstickConfig) -> Result<Yardstick, CopyError> {
        let YardstickConfig { piece_bytes, bytes, threads, backup_niceness, scattered } = config;
        let shape = KvShape::new(GroupId(0), LAYERS, PARTS, PAGE_SIZE, piece_bytes / PAGE_SIZE)?;
        let pages = u32::try_from(bytes / shape.page_bytes()).unwrap_or(u32::MAX).max(1);
        // A multiple of the stride would visit few pages many times.
        let pages = if pages.is_multiple_of(STRIDE) { pages + 1 } else { pages };
        let end = |layout: KvLayout| -> Result<(Region, KvLayout), CopyError> {
            let len = usize::try_from(layout.total_bytes()).unwrap_or(usize::MAX);
            let region = Region::from_arena(Arc::new(Arena::new(len)?));
            // SAFETY: the arena was just made; nobody else knows it.
            unsafe { region.bytes_mut(0, len) }?.fill(1);
            Ok((region, layout))
        };
        let device = end(KvLayout::layer_first(shape, pages)?)?;
        let host = end(KvLayout::page_first(shape, pages, ALIGNMENT)?)?;
        let (sender, completions) = completion_queue(1);
        let config = CopyConfig {
            device: device.0.clone(),
            device_layout: device.1,
            host: host.0.clone(),
            host_layout: host.1,
            threads,
            backup_niceness,
            queue_capacity: 1,
            throttle: Arc::new(NoThrottle),
        };
        let engine = CopyEngine::new(config, sender)?;
        let from = |page: u32| {
            let far = (u64::from(page) * u64::from(STRIDE) + 13) % u64::from(pages);
            if scattered {
                far as u32
            } else {
                page
            }
        };
        let moves = (0..pages).map(|page| PageMove { from: PageId(from(page)), to: PageId(page) }).collect();
        let bytes = pages as usize * shape.page_bytes();
        Ok(Yardstick { device, host, engine, completions, moves, threads, bytes })
    }

    /// Bytes that each side moves.
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// Carries every page once; how long from `submit` to the completion.
    pub fn transfer(&mut self, kind: TransferKind) -> Result<Duration, TransferError> {
        let (id, group, records) = (TransferId(1), GroupId(0), Vec::new());
        let ticket = (kind == TransferKind::Load).then(|| Arc::new(LoadTicket::new(id, LAYERS)));
        let pages = self.moves.clone();
        let broken = |reason: String| TransferError::Io { operation: "measured transfer".into(), reason };
        let start = Instant::now();
        let transfer = TransferDescriptor { id, kind, group, pages, records, ticket };
        self.engine.submit(transfer).map_err(|error| broken(error.to_string()))?;
        let done = self.completions.recv_timeout(PATIENCE).map_err(|error| broken(error.to_string()))?;
        let elapsed = start.elapsed();
        done.error.map_or(Ok(elapsed), Err)
    }

    /// Copies as many bytes the same way as one span: every thread a neighbouring share.
    pub fn span(&mut self, kind: TransferKind, stores: Stores) -> Result<Duration, CopyError> {
        let (source, target) = match kind {
            TransferKind::Load => (&self.host.0, &self.device.0),
            _ => (&self.device.0, &self.host.0),
        };
        // SAFETY: the engine is idle, since `transfer` waits for its completion, and `&mut self` keeps it so.
        let (source, target) = unsafe { (source.bytes(0, self.bytes)?, target.bytes_mut(0, self.bytes)?) };
        let share = self.bytes.div_ceil(self.threads).next_multiple_of(ALIGNMENT as usize);
        let barrier = Barrier::new(self.threads);
        let spans = std::thread::scope(|scope| {
            let workers: Vec<_> = target
                .chunks_mut(share)
                .zip(source.chunks(share))
                .map(|(to, from)| {
                    let barrier = &barrier;
                    scope.spawn(move || {
                        barrier.wait();
                        let start = Instant::now();
                        memcpy_baseline(to, from, stores);
                        (start, Instant::now())
                    })
                })
                .collect();
            workers.into_iter().filter_map(|worker| worker.join().ok()).collect::<Vec<_>>()
        });
        let start = spans.iter().map(|span| span.0).min();
        let end = spans.iter().map(|span| span.1).max();
        Ok(start.zip(end).map_or(Duration::ZERO, |(start, end)| end - start))
    }
}

/// Copies as many bytes as the shorter span has, in one call: what a transfer of those bytes is measured against.
pub fn memcpy_baseline(to: &mut [u8], from: &[u8], stores: Stores) {
    let bytes = to.len().min(from.len());
    if stores == Stores::Cached {
        to[..bytes].copy_from_slice(&from[..bytes]);
        return;
    }
    // Whole lanes and the rest, so that a span is copied as well as pieces are.
    let body = bytes / SPAN_UNIT * SPAN_UNIT;
    let (head, tail) = to[..bytes].split_at_mut(body);
    for (to, from) in [(head, &from[..body]), (tail, &from[body..bytes])] {
        // SAFETY: a mutable and a shared slice never overlap, and both have as many bytes.
        unsafe { copy_pieces(std::iter::once((from.as_ptr(), to.as_mut_ptr())), to.len(), stores) };
    }
    publish();
}

/// Compares two spans with one `memcmp`: what a match of those bytes is measured against.
pub fn memcmp_baseline(one: &[u8], two: &[u8]) -> bool {
    one == two
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_sides_move_every_byte_both_ways() {
        for (threads, scattered) in [(1, false), (2, true)] {
            let mut yardstick = Yardstick::new(YardstickConfig {
                piece_bytes: 2048,
                bytes: 4 << 20,
                threads,
                backup_niceness: if scattered { 10 } else { 0 },
                scattered,
            })
            .unwrap();
            let bytes = yardstick.bytes();
            for (kind, value) in [(TransferKind::Load, 3), (TransferKind::Backup, 4)] {
                for way in 0..3 {
                    yardstick.fill(kind, value + 10 * way);
                    let elapsed = match way {
                        0 => yardstick.transfer(kind).unwrap(),
                        1 => yardstick.span(kind, Stores::Streaming).unwrap(),
                        _ => yardstick.span(kind, Stores::Cached).unwrap(),
                    };
                    assert!(elapsed > Duration::ZERO);
                    let end =
                        if kind == TransferKind::Load { &yardstick.device.0 } else { &yardstick.host.0 };
                    // SAFETY: the engine is idle.
                    let after = unsafe { end.bytes(0, bytes) }.unwrap();
                    assert!(after.iter().all(|byte| *byte == value + 10 * way), "{kind:?} {way}");
                }
            }
        }
    }

    impl Yardstick {
        /// Gives the source this value and the destination another.
        fn fill(&mut self, kind: TransferKind, value: u8) {
            let load = kind == TransferKind::Load;
            for (region, value) in
                [(&self.host.0, if load { value } else { 0 }), (&self.device.0, if load { 0 } else { value })]
            {
                // SAFETY: the engine is idle.
                unsafe { region.bytes_mut(0, region.len()) }.unwrap().fill(value);
            }
        }
    }
}
