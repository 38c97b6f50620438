//! What the disk bench and the doctor measure: pages that go through the disk store's whole path, reserve, move,
//! checksum and commit, as transfers like those of a server.

use crate::error::{Failure, Outcome};
use crate::gate::released;
use crate::memory::HostPages;
use numpy::PyReadonlyArray1;
use pyo3::prelude::*;
use std::collections::HashMap;
use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};
use strata_copy::{Arena, Region};
use strata_disk::{DiskConfig, DiskEngine, DiskStore};
use strata_tier::{completion_queue, CompletionReceiver, Mover, SubmitError};
use strata_types::{
    Fingerprint, GroupId, KvLayout, KvShape, Namespace, PageId, PageMove, PageRecord, TransferDescriptor,
    TransferId, TransferKind,
};

const PAGE_SIZE: u32 = 16;
/// Host pages lie where O_DIRECT takes them.
const ALIGNMENT: u64 = 4096;
/// Bytes of a transfer, those of a stretch of a long prompt.
const TRANSFER_BYTES: usize = 4 << 20;
/// Transfers at once, each with host pages of its own: enough for the depth of any queue here, and little memory, since
/// what it is compared with uses little too.
const WINDOWS: usize = 12;
/// Far longer than a transfer of this size takes on any disk that is worth a measurement.
const PATIENCE: Duration = Duration::from_secs(120);
/// Beyond its payloads, what headers and file systems need at most.
const SPARE_BYTES: u64 = 64 << 20;

/// A disk store, and host pages for the transfers that go on at once.
#[pyclass(frozen, module = "strata._core")]
pub struct DiskMeter {
    store: DiskStore,
    completions: Mutex<CompletionReceiver>,
    records: Vec<PageRecord>,
    pages_per_transfer: usize,
    next: AtomicU64,
}

#[pymethods]
impl DiskMeter {
    /// Opens a store of `pages` pages of `page_bytes` bytes under `root`, which should be empty. `engine` is `auto`,
    /// `io_uring` or `threads`.
    #[new]
    fn new(
        py: Python<'_>,
        root: PathBuf,
        page_bytes: u32,
        pages: u32,
        engine: &str,
        depth: usize,
        threads: usize,
    ) -> Outcome<DiskMeter> {
        let engine = match engine {
            "auto" => DiskEngine::Auto,
            "io_uring" => DiskEngine::IoUring,
            "threads" => DiskEngine::Threads,
            other => {
                let choice = "choose auto, io_uring or threads";
                return Err(Failure::Config(format!("--disk-engine {other:?} is unknown: {choice}")));
            }
        };
        let cap = u64::from(page_bytes) * u64::from(pages) * 9 / 8 + SPARE_BYTES;
        let config = DiskConfig {
            engine,
            depth,
            threads,
            ..DiskConfig::new(root, cap, Fingerprint([0; 32]), PAGE_SIZE, page_bytes)
        };
        released(py, || DiskMeter::open(config, pages))
    }

    /// What executes its I/O.
    fn describe(&self) -> String {
        self.store.describe()
    }

    /// Spills the pages in this order; returns the seconds from the first submission to the last completion.
    fn write(&self, py: Python<'_>, order: PyReadonlyArray1<'_, u32>) -> PyResult<f64> {
        Ok(self.pass(py, TransferKind::Spill, order.as_slice()?)?)
    }

    /// Prefetches them.
    fn read(&self, py: Python<'_>, order: PyReadonlyArray1<'_, u32>) -> PyResult<f64> {
        Ok(self.pass(py, TransferKind::Prefetch, order.as_slice()?)?)
    }

    /// Ends its threads and unlocks its root.
    fn close(&self, py: Python<'_>) -> Outcome<()> {
        Ok(released(py, || self.store.close())?)
    }
}

/// Longest wait for what lies in the root: a meter's own is empty.
const RECOVERY_LIMIT: Duration = Duration::from_secs(60);

impl DiskMeter {
    fn open(config: DiskConfig, pages: u32) -> Outcome<DiskMeter> {
        let page_bytes = config.page_bytes as usize;
        let shape = KvShape::new(GroupId(0), 1, 1, PAGE_SIZE, config.page_bytes / PAGE_SIZE)?;
        let pages_per_transfer = (TRANSFER_BYTES / page_bytes).max(1);
        let host_pages = (WINDOWS * pages_per_transfer) as u32;
        let layout = KvLayout::page_first(shape, host_pages, ALIGNMENT)?;
        let arena = Arena::new(layout.total_bytes().next_multiple_of(ALIGNMENT) as usize)?;
        let region = Region::from_arena(Arc::new(arena));
        // SAFETY: the region is new: nobody else knows of it yet.
        fill(unsafe { region.bytes_mut(0, region.len()) }?);
        let (sender, completions) = completion_queue(2 * WINDOWS);
        let (store, recovery) = DiskStore::open(config, Arc::new(HostPages { region, layout }), sender)?;
        // Only pages that recovery has looked at may be written.
        recovery.wait(RECOVERY_LIMIT)?;
        if store.capacity() < pages {
            let capacity = store.capacity();
            return Err(Failure::Capacity(format!("the root holds {capacity} of {pages} pages: empty it")));
        }
        let (completions, next) = (Mutex::new(completions), AtomicU64::new(0));
        Ok(DiskMeter { store, completions, records: chain(pages), pages_per_transfer, next })
    }

    fn pass(&self, py: Python<'_>, kind: TransferKind, order: &[u32]) -> Outcome<f64> {
        if let Some(page) = order.iter().find(|page| **page as usize >= self.records.len()) {
            return Err(Failure::Request(format!("there is no page {page} of {}", self.records.len())));
        }
        released(py, || {
            let completions = self.completions.lock().unwrap_or_else(PoisonError::into_inner);
            let mut parts = order.chunks(self.pages_per_transfer);
            let (mut free, mut used) = ((0..WINDOWS).collect::<Vec<_>>(), HashMap::new());
            let mut failure = None;
            let begun = Instant::now();
            loop {
                while let Some(window) = free.pop() {
                    let Some(part) = parts.next().filter(|_| failure.is_none()) else {
                        free.push(window);
                        break;
                    };
                    let transfer = self.transfer(kind, part, window);
                    used.insert(transfer.id, window);
                    self.store.submit(transfer).map_err(refused)?;
                }
                if used.is_empty() {
                    return failure.map_or_else(|| Ok(begun.elapsed().as_secs_f64()), Err);
                }
                let done = completions.recv_timeout(PATIENCE).map_err(|_| {
                    Failure::Storage(format!("a {} had no answer for {PATIENCE:?}", kind.name()))
                })?;
                free.extend(used.remove(&done.id));
                // What is on its way still answers.
                failure = failure.or(done.error.map(|error| Failure::Storage(error.to_string())));
            }
        })
    }

    /// Moves records from or to the host pages of a window.
    fn transfer(&self, kind: TransferKind, records: &[u32], window: usize) -> TransferDescriptor {
        let first = (window * self.pages_per_transfer) as u32;
        let page = |(host, record): (u32, &u32)| match kind {
            TransferKind::Spill => PageMove { from: PageId(host), to: PageId(*record) },
            _ => PageMove { from: PageId(*record), to: PageId(host) },
        };
        TransferDescriptor {
            id: TransferId(self.next.fetch_add(1, Ordering::Relaxed)),
            kind,
            group: GroupId(0),
            pages: (first..).zip(records).map(page).collect(),
            records: records.iter().map(|record| self.records[*record as usize].clone()).collect(),
            ticket: None,
        }
    }
}

fn refused(error: SubmitError) -> Failure {
    let reason = match error {
        SubmitError::Full(_) => "its queue is full",
        SubmitError::Closed(_) => "it is closed",
    };
    Failure::Storage(format!("the disk store refuses a transfer: {reason}"))
}

/// Bytes that no disk can squeeze.
fn fill(bytes: &mut [u8]) {
    let mut state = 1_u64;
    for word in bytes.chunks_mut(8) {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        word.copy_from_slice(&(state ^ (state >> 29)).to_le_bytes()[..word.len()]);
    }
}

/// The records of one long document.
fn chain(pages: u32) -> Vec<PageRecord> {
    let namespace = Namespace::new("measurement", "");
    let mut parent = namespace.root_key(GroupId(0));
    (0..pages)
        .map(|page| {
            let tokens: Vec<u32> = (page * PAGE_SIZE..(page + 1) * PAGE_SIZE).collect();
            let record = PageRecord { namespace, parent, key: parent.child(&tokens), tokens };
            parent = record.key;
            record
        })
        .collect()
}
