//! The disk store: opens a root, admits transfers, reports them, closes. `submit` and `cancel` never wait for the
//! disk; whatever the disk does, each admitted transfer completes exactly once, when the kernel has let go of its
//! memory.

use crate::background::Background;
use crate::capacity::available;
use crate::chain::Job;
use crate::config::DiskConfig;
use crate::engine::{probe_io_uring, start_engine, IoEngine, SegmentFile};
use crate::error::at;
use crate::geometry::Geometry;
use crate::health::{DiskStats, Health, Monitor};
use crate::memory::PageMemory;
use crate::recovery::{self, Recovery};
use crate::registry::{Admission, Registry};
use crate::root::Root;
use crate::scan::scan;
use crate::segments::Segments;
use crate::ticker::Ticker;
use crate::transfer::{disk_end, Transfer};
use crate::watch::Watch;
use crate::DiskError;
use crossbeam_channel::{SendTimeoutError, TrySendError};
use std::collections::HashSet;
use std::io;
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::{Duration, Instant};
use strata_tier::{CompletionSender, Mover, SubmitError};
use strata_types::{TransferCompletion, TransferDescriptor, TransferError, TransferId, TransferKind};

/// The making of a segment, which is where a full disk shows.
pub(crate) const ALLOCATION: &str = "allocation";
/// Where a full disk shows that promised more than it has.
const SYNC: &str = "sync";

/// The disk tier of one fingerprint: a Mover for spill, prefetch and erase.
pub struct DiskStore {
    pub(crate) shared: Arc<Shared>,
    ticker: Ticker,
    watch: Watch,
    recovery: Background,
    /// Held by the one who sets another cap.
    pub(crate) resizing: Mutex<()>,
}

/// What the engine's threads, the ticker and the callers share.
pub(crate) struct Shared {
    pub config: DiskConfig,
    pub memory: Arc<dyn PageMemory>,
    pub engine: Arc<dyn IoEngine>,
    pub segments: Segments,
    pub monitor: Monitor,
    /// The next header's.
    pub sequence: AtomicU64,
    /// The last batch of recovery is on its way.
    pub recovered: AtomicBool,
    pub registry: Registry,
    completions: CompletionSender,
    /// When `close` was first called.
    closing: OnceLock<Instant>,
    /// Owned until closed; longer if the kernel holds on to an I/O, which may still change the disk.
    root: Mutex<Option<Root>>,
}

impl DiskStore {
    /// Opens a root with the engine that suits the machine, in milliseconds: what lies there comes batch by batch.
    /// Until a batch has named a page, transfers that touch it complete with an error.
    pub fn open(
        config: DiskConfig,
        memory: Arc<dyn PageMemory>,
        completions: CompletionSender,
    ) -> Result<(DiskStore, Recovery), DiskError> {
        let asked = config.clone();
        DiskStore::open_with(config, memory, completions, |file| start_engine(&asked, file, probe_io_uring))
    }

    /// Opens a root with another engine. `engine` is given a file of the root's file system to try.
    pub fn open_with(
        config: DiskConfig,
        memory: Arc<dyn PageMemory>,
        completions: CompletionSender,
        engine: impl FnOnce(&Path) -> Result<Arc<dyn IoEngine>, DiskError>,
    ) -> Result<(DiskStore, Recovery), DiskError> {
        config.validate()?;
        if memory.page_bytes() != config.page_bytes as usize {
            let memory_bytes = memory.page_bytes();
            return Err(DiskError::PageBytes { memory_bytes, page_bytes: config.page_bytes });
        }
        let root = Root::claim(&config.root, config.made_on)?;
        let available = available(&config, config.cap_bytes)?;
        let folder = root.folder(&config.fingerprint)?;
        let engine = engine(&root.marker())?;
        let Some(scan) = scan(&config, &folder, available, engine.as_ref())? else {
            let value = available.to_string();
            return Err(DiskError::Config { field: "cap_bytes", value, remedy: "raise --disk-capacity" });
        };
        let count = scan.superblock.geometry.segments_within(available) as usize;
        let segments = Segments::new(scan.superblock, config.root.clone(), folder, config.cap_bytes, count);
        engine.remove(&segments.scratch()).map_err(at("delete what a trial left in", segments.folder()))?;
        segments.evict_stale(engine.as_ref(), 0).map_err(at("keep under its cap", &config.root))?;
        let shared = Arc::new(Shared {
            monitor: Monitor::new(&config),
            config,
            memory,
            engine,
            segments,
            sequence: AtomicU64::new(1),
            recovered: AtomicBool::new(false),
            registry: Registry::default(),
            completions,
            closing: OnceLock::new(),
            root: Mutex::new(Some(root)),
        });
        shared.look();
        let (thread, recovery) = recovery::start(&shared, scan.files)?;
        let (ticker, watch) = (Ticker::start(&shared)?, Watch::start(&shared)?);
        Ok((DiskStore { shared, ticker, watch, recovery: thread, resizing: Mutex::new(()) }, recovery))
    }

    /// Records that fit under the cap if no other fingerprint needed room: pages are `0..capacity`.
    pub fn capacity(&self) -> u32 {
        self.shared.segments.capacity()
    }

    /// How records are laid out.
    pub fn geometry(&self) -> Geometry {
        self.shared.segments.geometry
    }

    /// The engine, for logs: `threads x4, O_DIRECT`; and how often it came back into service, if it did.
    pub fn describe(&self) -> String {
        let engine = self.shared.engine.describe();
        match self.shared.monitor.counters.returned_to_service.load(Ordering::Relaxed) {
            0 => engine,
            times => format!("{engine}, back in service for the {times}. time"),
        }
    }

    /// Whether transfers are executed.
    pub fn health(&self) -> Health {
        if self.shared.is_closing() {
            return Health::Closed;
        }
        self.shared.monitor.health()
    }

    /// Why the store will never serve again, if so, and what opens its root once that is back: somebody took it away.
    pub fn lost(&self) -> Option<(String, DiskConfig)> {
        let reason = self.shared.monitor.lost()?;
        let root = self.shared.root.lock().unwrap_or_else(PoisonError::into_inner);
        let made_on = root.as_ref().and_then(Root::device);
        let cap_bytes = self.shared.segments.cap_bytes();
        Some((reason, DiskConfig { made_on, cap_bytes, ..self.shared.config.clone() }))
    }

    /// Why some or all spills find no room, if so; records that are there are read and written all the same.
    pub fn full(&self) -> Option<String> {
        self.shared.monitor.full()
    }

    /// Counters since the store was opened.
    pub fn stats(&self) -> DiskStats {
        DiskStats {
            segments: self.shared.segments.count() as u64,
            outstanding: self.shared.registry.outstanding() as u64,
            ..self.shared.monitor.counters.snapshot()
        }
    }

    /// Takes a store that is out of service back into service at once, without a trial.
    pub fn retry(&self) {
        self.shared.monitor.retry();
    }

    /// Makes everything that has completed safe against power loss. Blocks, at most for the close deadline.
    pub fn sync(&self) -> Result<(), DiskError> {
        self.ticker.sync(self.shared.config.close_deadline)
    }

    /// Cancels what is outstanding, waits for it, syncs, ends the threads and unlocks the root; each step is bounded
    /// by the close deadline. Calling it again does nothing.
    pub fn close(&self) -> Result<(), DiskError> {
        let shared = &self.shared;
        let deadline = shared.config.close_deadline;
        let late =
            |operation| DiskError::Deadline { operation, root: shared.config.root.clone(), waited: deadline };
        shared.closing.get_or_init(Instant::now);
        shared.registry.close();
        shared.end_unbegun(&TransferError::Cancelled);
        let emptied = shared.registry.wait_until_empty(deadline);
        let let_go = self.recovery.end(deadline) && self.watch.stop(deadline);
        let synced = self.ticker.stop(deadline);
        if !emptied {
            return Err(late("the last I/O"));
        }
        if !let_go {
            return Err(late("the end of recovery and of trials"));
        }
        if !shared.engine.stop(deadline) {
            return Err(late("ending the I/O threads"));
        }
        synced?;
        drop(shared.root.lock().unwrap_or_else(PoisonError::into_inner).take());
        Ok(())
    }
}

impl Drop for DiskStore {
    fn drop(&mut self) {
        // Nobody is left to tell. What was not synced is a miss after a power loss, as it would be without `close`.
        let _unheard = self.close();
    }
}

impl Mover for DiskStore {
    fn submit(&self, transfer: TransferDescriptor) -> Result<(), SubmitError> {
        let shared = &self.shared;
        if let Some(error) = shared.refusal(&transfer) {
            return shared.refuse(transfer, error);
        }
        match shared.registry.admit(Transfer::new(transfer), shared.config.queue_depth) {
            Admission::Start(number, transfer) => {
                Job { shared: Arc::clone(shared), transfer, number }.start();
                Ok(())
            }
            Admission::Waits => Ok(()),
            Admission::Full(transfer) => Err(SubmitError::Full(Box::new(transfer.into_descriptor()))),
            Admission::Closed(transfer) => Err(SubmitError::Closed(Box::new(transfer.into_descriptor()))),
        }
    }

    fn cancel(&self, id: TransferId) {
        self.shared.registry.cancel(id);
    }
}

impl Shared {
    pub fn is_closing(&self) -> bool {
        self.closing.get().is_some()
    }

    /// The segment, created if it does not exist: watched, since the file system may hang too.
    pub fn create_segment(&self, number: usize) -> io::Result<Arc<SegmentFile>> {
        if let Some(file) = self.segments.file(number) {
            return Ok(file);
        }
        let (flight, path) = (self.monitor.number(), self.segments.path(number));
        self.monitor.take_off(flight, ALLOCATION, &path);
        let made = self.check_root().and_then(|()| self.segments.create(number, self.engine.as_ref()));
        self.monitor.land(flight);
        match &made {
            Ok(_) => self.monitor.found_room(ALLOCATION),
            Err(error) => self.monitor.failed(ALLOCATION, &path, error),
        }
        made
    }

    /// Completes the transfers that have not been begun. Those behind them in line still wait their turn, and those
    /// that are begun complete when the kernel has let go of them.
    pub fn end_unbegun(&self, error: &TransferError) {
        for transfer in self.registry.all() {
            if transfer.end_unbegun(error.clone()) {
                self.report(self.completion(&transfer));
            }
        }
    }

    fn completion(&self, transfer: &Transfer) -> TransferCompletion {
        transfer.completion(self.config.shard, u64::from(self.config.page_bytes))
    }

    /// Why a transfer cannot even be begun.
    fn refusal(&self, transfer: &TransferDescriptor) -> Option<TransferError> {
        if self.is_closing() {
            return None;
        }
        if let Some(reason) = self.monitor.unavailable() {
            return Some(TransferError::Unavailable { tier: "disk", reason });
        }
        let reason = self.malformed(transfer)?;
        let operation = format!("{} {}", transfer.kind.name(), transfer.id);
        Some(TransferError::Io { operation, reason })
    }

    fn malformed(&self, transfer: &TransferDescriptor) -> Option<String> {
        let kind = transfer.kind;
        let records = match kind {
            TransferKind::Spill | TransferKind::Prefetch => transfer.pages.len(),
            TransferKind::Erase => 0,
            TransferKind::Load | TransferKind::Backup => {
                return Some("the disk store has no such edge".into())
            }
        };
        if transfer.group != self.config.group {
            return Some(format!("it moves group {}, the store holds {}", transfer.group, self.config.group));
        }
        if transfer.records.len() < records {
            return Some(format!("{records} pages have {} records", transfer.records.len()));
        }
        let page_size = self.config.page_size as usize;
        if let Some(record) = transfer.records.iter().find(|record| record.tokens.len() != page_size) {
            return Some(format!("a record has {} tokens, a page {page_size}", record.tokens.len()));
        }
        let capacity = self.segments.capacity();
        let mut seen = HashSet::with_capacity(transfer.pages.len());
        for page in &transfer.pages {
            let record = disk_end(kind, page);
            if record.0 >= capacity {
                return Some(format!("record {record} is beyond the {capacity} of the store"));
            }
            if !self.segments.is_looked_at(record.0) {
                return Some(format!("record {record} has not been looked at: recovery has yet to name it"));
            }
            if !seen.insert(record) {
                return Some(format!("record {record} is named twice"));
            }
        }
        None
    }

    /// Reports a transfer that was not begun, on the submitter's thread, and so without waiting.
    fn refuse(&self, transfer: TransferDescriptor, error: TransferError) -> Result<(), SubmitError> {
        let completion = TransferCompletion {
            id: transfer.id,
            shard: self.config.shard,
            pages_whole: 0,
            error: Some(error),
            bytes: 0,
            busy_ns: 0,
        };
        self.completions.try_send(completion).map_err(|error| match error {
            TrySendError::Full(_) => SubmitError::Full(Box::new(transfer)),
            TrySendError::Disconnected(_) => SubmitError::Closed(Box::new(transfer)),
        })
    }

    /// Why a running transfer should start no further run.
    pub fn interruption(&self, transfer: &Transfer) -> Option<TransferError> {
        if transfer.is_cancelled() || self.is_closing() {
            return Some(TransferError::Cancelled);
        }
        self.monitor.unavailable().map(|reason| TransferError::Unavailable { tier: "disk", reason })
    }

    /// An I/O has answered: counts it and turns a short write into an error.
    pub fn account(
        &self,
        what: &'static str,
        flight: u64,
        writes: bool,
        wanted: usize,
        result: io::Result<usize>,
    ) -> io::Result<usize> {
        let (span, path) = self.monitor.land(flight);
        let counters = &self.monitor.counters;
        let busy = if writes { &counters.write_ns } else { &counters.read_ns };
        busy.fetch_add(u64::try_from(span.as_nanos()).unwrap_or(u64::MAX), Ordering::Relaxed);
        let result = match result {
            Ok(bytes) if writes && bytes < wanted => {
                let message = format!("only {bytes} of {wanted} bytes were written");
                Err(io::Error::new(io::ErrorKind::WriteZero, message))
            }
            other => other,
        };
        match &result {
            Ok(bytes) => {
                self.monitor.succeeded();
                if writes {
                    self.monitor.found_room(what);
                    counters.bytes_written.fetch_add(*bytes as u64, Ordering::Relaxed);
                }
            }
            Err(error) => self.monitor.failed(what, &path, error),
        }
        result
    }

    /// The last chain of a transfer has ended: starts those that waited for it, and reports.
    pub fn finish(self: &Arc<Self>, number: u64, transfer: &Arc<Transfer>) {
        let Some(ready) = self.registry.settle(number) else {
            self.monitor.counters.unknown_completions.fetch_add(1, Ordering::Relaxed);
            return;
        };
        for (number, transfer) in ready {
            Job { shared: Arc::clone(self), transfer, number }.start();
        }
        if transfer.claim_report() {
            self.report(self.completion(transfer));
        }
    }

    /// Hands a completion over; waits while Core is behind, unless the store closes.
    fn report(&self, completion: TransferCompletion) {
        self.registry.reporting();
        if !self.hand_over(completion) {
            self.monitor.counters.lost_completions.fetch_add(1, Ordering::Relaxed);
        }
        self.registry.reported();
    }

    fn hand_over(&self, mut completion: TransferCompletion) -> bool {
        loop {
            match self.completions.send_timeout(completion, Duration::from_millis(50)) {
                Ok(()) => return true,
                Err(SendTimeoutError::Timeout(back)) => completion = back,
                Err(SendTimeoutError::Disconnected(_)) => return false,
            }
            if self.closing.get().is_some_and(|since| since.elapsed() >= self.config.close_deadline / 2) {
                return false;
            }
        }
    }

    /// Syncs what was written; the first error, if any.
    pub fn sync_now(&self) -> Result<(), DiskError> {
        let (synced, failure) = self.segments.sync(self.engine.as_ref());
        self.monitor.counters.syncs.fetch_add(synced, Ordering::Relaxed);
        match failure {
            None => {
                self.monitor.found_room(SYNC);
                Ok(())
            }
            Some((path, source)) => {
                self.monitor.failed(SYNC, &path, &source);
                Err(DiskError::Io { operation: "sync", path, source })
            }
        }
    }

    /// Whether the root is still the folder that was claimed; a store without it is lost.
    fn look_for_root(&self) {
        let root = self.root.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(root) = root.as_ref() else { return };
        if root.is_displaced() {
            let root = self.config.root.display();
            self.monitor
                .lose(format!("disk root {root} was deleted, replaced or unmounted while it was in use"));
        } else if root.keep_marked().is_err() {
            // The next look tries again.
            self.monitor.counters.io_errors.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// Refuses to go on with a root that was lost: what lies under its name now may be another process's.
    pub fn check_root(&self) -> io::Result<()> {
        self.look_for_root();
        match self.monitor.lost() {
            Some(reason) => Err(io::Error::new(io::ErrorKind::NotFound, reason)),
            None => Ok(()),
        }
    }

    /// Looks at what others did to the root.
    pub fn look(&self) {
        self.look_for_root();
        if self.monitor.lost().is_some() {
            return;
        }
        self.segments.forget_deleted();
        match self.segments.disk_usage() {
            Ok(bytes) => self.monitor.counters.disk_usage_bytes.store(bytes, Ordering::Relaxed),
            Err(error) => self.monitor.failed("survey", &self.config.root, &error),
        }
    }
}
