//! One transfer on its way: which pages are started, where the first bad one is, who works on it. Runs are started in
//! prefix order and none after a failure, so the pages before the first bad one are whole once the last chain ends.

use crate::geometry::Geometry;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Instant;
use strata_types::{
    PageId, PageMove, PageRecord, ShardId, TransferCompletion, TransferDescriptor, TransferError, TransferId,
    TransferKind,
};

/// Most bytes of a merged I/O.
const MOST_RUN_BYTES: u64 = 1 << 20;
/// Runs are not made smaller than this to give every thread one.
const LEAST_RUN_BYTES: u64 = 256 << 10;
/// Most pages of a merged I/O: each may need two vectors.
const MOST_RUN_PAGES: usize = 512;

/// Adjacent records of one segment, and the pages of the transfer that they belong to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Run {
    /// Index of the first page in the transfer.
    pub first: usize,
    pub count: usize,
    pub segment: usize,
    /// Index of the first record in the segment.
    pub index: u32,
}

impl Run {
    /// The indices of its pages in the transfer.
    pub fn pages(&self) -> std::ops::Range<usize> {
        self.first..self.first + self.count
    }
}

/// A transfer that was admitted.
#[derive(Debug)]
pub(crate) struct Transfer {
    descriptor: TransferDescriptor,
    progress: Mutex<Progress>,
    cancelled: AtomicBool,
    chains: AtomicUsize,
    began: OnceLock<Instant>,
}

#[derive(Debug, Default)]
struct Progress {
    next: usize,
    failure: Option<(usize, TransferError)>,
    /// Its completion was handed over, or is about to be.
    reported: bool,
}

impl Transfer {
    pub fn new(descriptor: TransferDescriptor) -> Transfer {
        Transfer {
            descriptor,
            progress: Mutex::default(),
            cancelled: AtomicBool::new(false),
            chains: AtomicUsize::new(0),
            began: OnceLock::new(),
        }
    }

    pub fn into_descriptor(self) -> TransferDescriptor {
        self.descriptor
    }

    pub fn id(&self) -> TransferId {
        self.descriptor.id
    }

    pub fn kind(&self) -> TransferKind {
        self.descriptor.kind
    }

    pub fn len(&self) -> usize {
        self.descriptor.pages.len()
    }

    /// The record on disk of page `index`.
    pub fn disk_page(&self, index: usize) -> PageId {
        disk_end(self.descriptor.kind, &self.descriptor.pages[index])
    }

    /// The page of host memory of page `index`.
    pub fn host_page(&self, index: usize) -> PageId {
        let page = &self.descriptor.pages[index];
        if self.descriptor.kind == TransferKind::Spill {
            page.from
        } else {
            page.to
        }
    }

    pub fn record(&self, index: usize) -> &PageRecord {
        &self.descriptor.records[index]
    }

    pub fn cancel(&self) {
        self.cancelled.store(true, Ordering::Release);
    }

    pub fn is_cancelled(&self) -> bool {
        self.cancelled.load(Ordering::Acquire)
    }

    fn progress(&self) -> MutexGuard<'_, Progress> {
        self.progress.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Notes that page `index` is bad; no run is started any more.
    pub fn fail(&self, index: usize, error: TransferError) {
        let mut progress = self.progress();
        if progress.failure.as_ref().is_none_or(|(first, _)| index < *first) {
            progress.failure = Some((index, error));
        }
    }

    /// Ends a transfer that has not touched a byte, and never will; true if it is to be reported now, by the caller.
    pub fn end_unbegun(&self, error: TransferError) -> bool {
        let mut progress = self.progress();
        if progress.next > 0 || progress.failure.is_some() || progress.reported {
            return false;
        }
        progress.failure = Some((0, error));
        progress.reported = true;
        true
    }

    /// True for the one who is to report it.
    pub fn claim_report(&self) -> bool {
        !std::mem::replace(&mut self.progress().reported, true)
    }

    /// Takes the next run; `interruption` says why there should be none, if so.
    pub fn take_run(
        &self,
        geometry: &Geometry,
        depth: usize,
        interruption: impl FnOnce() -> Option<TransferError>,
    ) -> Option<Run> {
        self.began.get_or_init(Instant::now);
        let mut progress = self.progress();
        let first = progress.next;
        if first >= self.len() || progress.failure.is_some() {
            return None;
        }
        if let Some(error) = interruption() {
            progress.failure = Some((first, error));
            return None;
        }
        let page = self.disk_page(first).0;
        let (segment, index) = geometry.locate(page);
        let most = self.most_pages(geometry, depth).min((geometry.records_per_segment - index) as usize);
        let adjacent = |count: &usize| {
            first + count < self.len()
                && u64::from(self.disk_page(first + count).0) == u64::from(page) + *count as u64
        };
        let count = 1 + (1..most).take_while(adjacent).count();
        progress.next += count;
        Some(Run { first, count, segment, index })
    }

    /// Pages of a run: as large as an I/O may be, but with a run for every thread if there are pages enough.
    fn most_pages(&self, geometry: &Geometry, depth: usize) -> usize {
        if self.kind() == TransferKind::Erase {
            return usize::MAX;
        }
        let slot = geometry.payload_slot();
        let share = slot * self.len() as u64 / depth.max(1) as u64;
        let bytes = share.clamp(LEAST_RUN_BYTES, MOST_RUN_BYTES);
        ((bytes / slot) as usize).clamp(1, MOST_RUN_PAGES)
    }

    /// Sets how many chains work on it.
    pub fn enter(&self, chains: usize) {
        self.chains.store(chains, Ordering::Release);
    }

    /// A chain has no more to do. True for the last one, which completes the transfer.
    pub fn leave(&self) -> bool {
        self.chains.fetch_sub(1, Ordering::AcqRel) == 1
    }

    /// What is reported once the last chain has left.
    pub fn completion(&self, shard: ShardId, page_bytes: u64) -> TransferCompletion {
        let progress = self.progress();
        let (pages_whole, error) = match &progress.failure {
            Some((index, error)) => (*index, Some(error.clone())),
            None => (self.len(), None),
        };
        let moved = if self.kind() == TransferKind::Erase { 0 } else { pages_whole as u64 * page_bytes };
        let busy = self.began.get().map(Instant::elapsed).unwrap_or_default();
        let busy_ns = u64::try_from(busy.as_nanos()).unwrap_or(u64::MAX);
        TransferCompletion { id: self.id(), shard, pages_whole, error, bytes: moved, busy_ns }
    }
}

/// The end of a page's way that is a record.
pub(crate) fn disk_end(kind: TransferKind, page: &PageMove) -> PageId {
    if kind == TransferKind::Spill {
        page.to
    } else {
        page.from
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use strata_types::GroupId;

    fn transfer(records: &[u32]) -> Transfer {
        let pages = records.iter().map(|record| PageMove { from: PageId(*record), to: PageId(0) }).collect();
        Transfer::new(TransferDescriptor {
            id: TransferId(1),
            kind: TransferKind::Prefetch,
            group: GroupId(0),
            pages,
            records: Vec::new(),
            ticket: None,
        })
    }

    fn runs(transfer: &Transfer, geometry: &Geometry, depth: usize) -> Vec<(usize, usize, u32)> {
        let mut runs = Vec::new();
        while let Some(run) = transfer.take_run(geometry, depth, || None) {
            runs.push((run.count, run.segment, run.index));
        }
        runs
    }

    #[test]
    fn adjacent_records_merge_within_a_segment() {
        let geometry = Geometry { page_size: 1, page_bytes: 4000, records_per_segment: 8 };
        let merged = runs(&transfer(&[5, 6, 7, 8, 9, 3, 2, 12]), &geometry, 4);
        assert_eq!(merged, [(3, 0, 5), (2, 1, 0), (1, 0, 3), (1, 0, 2), (1, 1, 4)]);
    }

    #[test]
    fn runs_are_large_but_leave_work_for_every_thread() {
        let geometry = Geometry { page_size: 1, page_bytes: 1 << 16, records_per_segment: 1000 };
        let counts = |pages: u32, depth| {
            let pages: Vec<u32> = (0..pages).collect();
            runs(&transfer(&pages), &geometry, depth).iter().map(|run| run.0).collect::<Vec<_>>()
        };
        assert_eq!(counts(64, 4), [16; 4]);
        assert_eq!(counts(32, 4), [8; 4]);
        assert_eq!(counts(4, 4), [4]);
    }

    #[test]
    fn the_first_bad_page_decides_whatever_the_order() {
        let geometry = Geometry { page_size: 1, page_bytes: 1 << 20, records_per_segment: 8 };
        let transfer = transfer(&[0, 2, 4, 6]);
        for _ in 0..3 {
            transfer.take_run(&geometry, 4, || None).unwrap();
        }
        transfer.fail(2, TransferError::Cancelled);
        transfer.fail(1, TransferError::Deadline { operation: "x".into() });
        transfer.fail(2, TransferError::Cancelled);
        assert_eq!(transfer.take_run(&geometry, 4, || None), None);
        let done = transfer.completion(ShardId(0), 1 << 20);
        assert_eq!((done.pages_whole, done.bytes), (1, 1 << 20));
        assert!(matches!(done.error, Some(TransferError::Deadline { .. })));
    }
}
