//! `CopyEngine`: the Mover of the edge device <-> host on a CPU. What it adds to the trait's guarantees:
//! - loads go first: a thread that backs up turns to a waiting load after each step and while it is throttled;
//! - a load's ticket counts a layer when every piece of it, by whichever thread, is in place;
//! - a cancelled, failed or panicked transfer is reported once no thread touches its pages any more;
//! - `close` (and drop) ends every outstanding transfer as cancelled and stops the threads within a bound.

use crate::job::{Job, Step};
use crate::kernel::publish;
use crate::pages::Edge;
use crate::{CopyError, LayerWork, Region, Throttle};
use crossbeam_channel::{bounded, select_biased, Receiver, SendTimeoutError, Sender};
use std::collections::hash_map::Entry;
use std::collections::HashMap;
use std::panic::{catch_unwind, AssertUnwindSafe};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, RwLock};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};
use strata_tier::{CompletionSender, Mover, SubmitError};
use strata_types::{
    KvLayout, TransferCompletion, TransferDescriptor, TransferError, TransferId, TransferKind,
};

/// More threads than this never help: a few saturate a socket's memory.
pub const MAX_THREADS: usize = 16;
/// The weakest claim on a core that the system knows.
pub const MAX_NICENESS: u8 = 19;
/// Room for more waiting transfers than this would only hide that Core is ahead.
const MAX_QUEUE: usize = 1 << 16;
/// How long a throttled or blocked thread sleeps between two looks at what else there is to do.
const NAP: Duration = Duration::from_millis(1);
/// How long `close` waits: a few layers' copies, and for somebody to read the last completions.
const CLOSE_LIMIT: Duration = Duration::from_secs(2);

/// What a `CopyEngine` works on.
pub struct CopyConfig {
    /// The device tier's memory.
    pub device: Region,
    /// Where pages lie in it.
    pub device_layout: KvLayout,
    /// The host tier's memory.
    pub host: Region,
    /// Where pages lie in it.
    pub host_layout: KvLayout,
    /// Copy threads, 1 to `MAX_THREADS`.
    pub threads: usize,
    /// 0: every thread loads and backs up. 1 to `MAX_NICENESS`: that many threads for loads alone, and as many for
    /// backups alone that yield to computing threads by this niceness. Loads never yield: a request waits for them.
    pub backup_niceness: u8,
    /// Transfers of each kind that may wait.
    pub queue_capacity: usize,
    /// What slows transfers down.
    pub throttle: Arc<dyn Throttle>,
}

/// One direction's totals.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DirectionStats {
    /// Transfers reported.
    pub transfers: u64,
    /// Bytes moved.
    pub bytes: u64,
    /// Nanoseconds that transfers took from their first step to their last, throttling included.
    pub busy_ns: u64,
}

/// Totals since the engine started.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CopyStats {
    /// Host to device.
    pub load: DirectionStats,
    /// Device to host.
    pub backup: DirectionStats,
    /// Completions that nobody was there to read: the receiver was gone, or full for too long during `close`.
    pub completions_lost: u64,
}

#[derive(Default)]
struct Totals {
    transfers: AtomicU64,
    bytes: AtomicU64,
    busy_ns: AtomicU64,
}

impl Totals {
    fn add(&self, done: &TransferCompletion) {
        self.transfers.fetch_add(1, Ordering::Relaxed);
        self.bytes.fetch_add(done.bytes, Ordering::Relaxed);
        self.busy_ns.fetch_add(done.busy_ns, Ordering::Relaxed);
    }

    fn read(&self) -> DirectionStats {
        DirectionStats {
            transfers: self.transfers.load(Ordering::Relaxed),
            bytes: self.bytes.load(Ordering::Relaxed),
            busy_ns: self.busy_ns.load(Ordering::Relaxed),
        }
    }
}

/// What the threads share with the engine.
struct Shared {
    edge: Edge,
    throttle: Arc<dyn Throttle>,
    completions: CompletionSender,
    /// Every accepted transfer that has not been reported, so that a cancel finds it and finds nothing else.
    outstanding: Mutex<HashMap<TransferId, Arc<Job>>>,
    /// Set once, by `close`: until when a completion may wait for room.
    closing: OnceLock<Instant>,
    loads: Totals,
    backups: Totals,
    completions_lost: AtomicU64,
}

impl Shared {
    fn outstanding(&self) -> MutexGuard<'_, HashMap<TransferId, Arc<Job>>> {
        self.outstanding.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes a job off the list, unless its id by now means another job.
    fn forget(&self, job: &Arc<Job>) {
        if let Entry::Occupied(entry) = self.outstanding().entry(job.transfer.id) {
            if Arc::ptr_eq(entry.get(), job) {
                entry.remove();
            }
        }
    }

    fn report(&self, kind: TransferKind, completion: TransferCompletion) {
        match kind {
            TransferKind::Load => self.loads.add(&completion),
            TransferKind::Backup => self.backups.add(&completion),
            TransferKind::Spill | TransferKind::Prefetch | TransferKind::Erase => {}
        }
        let mut completion = completion;
        loop {
            completion = match self.completions.send_timeout(completion, NAP) {
                Ok(()) => return,
                Err(SendTimeoutError::Timeout(back)) if !self.is_past_closing() => back,
                Err(_) => break,
            };
        }
        self.completions_lost.fetch_add(1, Ordering::Relaxed);
    }

    fn is_past_closing(&self) -> bool {
        self.closing.get().is_some_and(|deadline| Instant::now() >= *deadline)
    }
}

/// The two queues, seen from the side that fills them.
struct Queues {
    loads: Sender<Arc<Job>>,
    backups: Sender<Arc<Job>>,
}

/// Copies pages between device and host memory on threads of its own.
pub struct CopyEngine {
    shared: Arc<Shared>,
    /// `None` once closed. The lock is held for writing only by `close`.
    queues: RwLock<Option<Queues>>,
    workers: Mutex<Vec<JoinHandle<()>>>,
    threads: usize,
}

impl CopyEngine {
    /// Checks the configuration and starts the threads.
    pub fn new(config: CopyConfig, completions: CompletionSender) -> Result<CopyEngine, CopyError> {
        let threads = in_range("--copy-threads", config.threads, MAX_THREADS)?;
        let capacity = in_range("queue_capacity", config.queue_capacity, MAX_QUEUE)?;
        let niceness = match config.backup_niceness {
            0 => 0,
            some => in_range("backup_niceness", usize::from(some), usize::from(MAX_NICENESS))? as i32,
        };
        let edge = Edge::new((config.device, config.device_layout), (config.host, config.host_layout))?;
        let shared = Arc::new(Shared {
            edge,
            throttle: config.throttle,
            completions,
            outstanding: Mutex::default(),
            closing: OnceLock::new(),
            loads: Totals::default(),
            backups: Totals::default(),
            completions_lost: AtomicU64::new(0),
        });
        // Room for a share of every waiting transfer for each thread: see `submit`.
        let (loads, load_receiver) = bounded(capacity * threads);
        let (backups, backup_receiver) = bounded(capacity * threads);
        let engine = CopyEngine {
            shared,
            queues: RwLock::new(Some(Queues { loads, backups })),
            workers: Mutex::default(),
            threads,
        };
        let crews = if niceness == 0 {
            vec![(load_receiver, backup_receiver, 0)]
        } else {
            vec![(load_receiver, ended(), 0), (ended(), backup_receiver, niceness)]
        };
        for (loads, backups, niceness) in crews {
            for index in 0..threads {
                let shared = Arc::clone(&engine.shared);
                let worker = Worker { shared, loads: loads.clone(), backups: backups.clone() };
                let handle = thread::Builder::new()
                    .name(format!("strata-copy-{index}"))
                    .spawn(move || {
                        yield_by(niceness);
                        worker.work();
                    })
                    .map_err(|reason| CopyError::Thread { index, threads, reason })?;
                engine.workers().push(handle);
            }
        }
        Ok(engine)
    }

    fn workers(&self) -> MutexGuard<'_, Vec<JoinHandle<()>>> {
        self.workers.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Transfers that were accepted and not yet reported.
    pub fn outstanding(&self) -> usize {
        self.shared.outstanding().len()
    }

    /// Totals so far.
    pub fn stats(&self) -> CopyStats {
        CopyStats {
            load: self.shared.loads.read(),
            backup: self.shared.backups.read(),
            completions_lost: self.shared.completions_lost.load(Ordering::Relaxed),
        }
    }

    /// Refuses new transfers, ends the outstanding ones as cancelled and stops the threads. Waits at most about
    /// two seconds; again does nothing. Threads that outlive the wait keep the memory alive and end by themselves.
    pub fn close(&self) -> Result<(), CopyError> {
        let deadline = Instant::now() + CLOSE_LIMIT;
        // Dropping the queues' entrances lets the threads end once they have drained them.
        drop(self.queues.write().unwrap_or_else(PoisonError::into_inner).take());
        self.shared.closing.get_or_init(|| deadline);
        for job in self.shared.outstanding().values() {
            job.cancel();
        }
        // Completions give up at the deadline, so a thread needs a moment after it to get out.
        let patience = deadline + CLOSE_LIMIT / 4;
        let mut workers = self.workers();
        while workers.iter().any(|worker| !worker.is_finished()) && Instant::now() < patience {
            thread::sleep(NAP);
        }
        let (ended, running): (Vec<_>, Vec<_>) = workers.drain(..).partition(|worker| worker.is_finished());
        for worker in ended {
            // A worker catches the panics of transfers; one of its own leaves nothing to clean up here.
            let _ended_either_way = worker.join();
        }
        match running.len() {
            0 => Ok(()),
            threads => Err(CopyError::StillRunning { threads, seconds: CLOSE_LIMIT.as_secs() }),
        }
    }
}

fn in_range(flag: &'static str, value: usize, most: usize) -> Result<usize, CopyError> {
    if (1..=most).contains(&value) {
        Ok(value)
    } else {
        Err(CopyError::Count { flag, value, most })
    }
}

/// A queue that no job will ever come from.
fn ended() -> Receiver<Arc<Job>> {
    bounded(0).1
}

/// Lowers the calling thread's claim on a core.
fn yield_by(niceness: i32) {
    if niceness > 0 {
        // SAFETY: a system call without pointers. On Linux `0` is the calling thread alone; asking for less never
        // needs a right, so there is no failure to handle, and one would cost fairness only.
        unsafe { libc::setpriority(libc::PRIO_PROCESS, 0, niceness) };
    }
}

impl Mover for CopyEngine {
    /// Every thread is offered a share of the transfer; the first share decides whether it is accepted, the others
    /// only invite help. A thread that takes a share too late finds nothing left to claim.
    fn submit(&self, transfer: TransferDescriptor) -> Result<(), SubmitError> {
        let queues = self.queues.read().unwrap_or_else(PoisonError::into_inner);
        let Some(queues) = queues.as_ref() else {
            return Err(SubmitError::Closed(Box::new(transfer)));
        };
        let queue = if transfer.kind == TransferKind::Load { &queues.loads } else { &queues.backups };
        let job = Arc::new(Job::new(transfer, self.shared.edge.shape()));
        // Listed first: once queued, a thread may finish it before this one goes on.
        self.shared.outstanding().entry(job.transfer.id).or_insert_with(|| Arc::clone(&job));
        if queue.try_send(Arc::clone(&job)).is_err() {
            self.shared.forget(&job);
            let transfer = match Arc::try_unwrap(job) {
                Ok(job) => job.into_transfer(),
                Err(shared) => shared.transfer.clone(),
            };
            return Err(SubmitError::Full(Box::new(transfer)));
        }
        if job.is_divisible() {
            for _ in 1..self.threads {
                let _help_or_none = queue.try_send(Arc::clone(&job));
            }
        }
        Ok(())
    }

    fn cancel(&self, id: TransferId) {
        if let Some(job) = self.shared.outstanding().get(&id) {
            job.cancel();
        }
    }
}

impl Drop for CopyEngine {
    fn drop(&mut self) {
        // Threads that still run hold everything they use; there is nobody left to tell.
        let _stopped_or_detached = self.close();
    }
}

/// One copy thread.
struct Worker {
    shared: Arc<Shared>,
    loads: Receiver<Arc<Job>>,
    backups: Receiver<Arc<Job>>,
}

impl Worker {
    fn work(&self) {
        while let Some(job) = self.next() {
            self.run(&job);
        }
    }

    /// The next job, loads first; `None` when both queues are closed and drained.
    fn next(&self) -> Option<Arc<Job>> {
        select_biased! {
            recv(self.loads) -> job => job.or_else(|_closed| self.backups.recv()).ok(),
            recv(self.backups) -> job => job.or_else(|_closed| self.loads.recv()).ok(),
        }
    }

    fn run(&self, job: &Arc<Job>) {
        job.start(|transfer| self.shared.edge.check(transfer));
        while let Some(step) = job.claim() {
            let outcome = catch_unwind(AssertUnwindSafe(|| self.copy(job, &step)));
            // Also after a failure: a store still on its way would land in a page that is somebody else's by then.
            publish();
            job.finish(&step, outcome.unwrap_or_else(|panic| Err(panicked(job, panic.as_ref()))));
        }
        if let Some(completion) = job.settle() {
            self.shared.forget(job);
            self.shared.report(job.transfer.kind, completion);
        }
    }

    /// Copies one step; says how many bytes. Layers that the throttle lets through together are copied together,
    /// so that stores follow one another in the destination; before a wait, everything let through is in place.
    fn copy(&self, job: &Job, step: &Step) -> Result<u64, TransferError> {
        let shape = self.shared.edge.shape();
        let (id, kind) = (job.transfer.id, job.transfer.kind);
        let moves = &job.transfer.pages[step.pages.clone()];
        let bytes = (moves.len() * shape.parts as usize * shape.piece_bytes()) as u64;
        // SAFETY: a step is only claimed from a job that `check` accepted, its layers are the shape's, and the
        // Mover's contract gives the transfer's pages to this engine until its completion, which `settle`
        // withholds while this step is in flight. No two steps share a destination piece.
        let copy_layers = |layers| unsafe { self.shared.edge.copy_step(kind, layers, moves) };
        if kind != TransferKind::Load {
            self.serve_loads();
        }
        let mut waiting = step.layers.start;
        for layer in step.layers.clone() {
            let work = LayerWork { id, kind, layer, bytes };
            let earliest = self.shared.throttle.earliest(&work);
            if self.wait_left(&work, earliest).is_some() {
                copy_layers(waiting..layer);
                waiting = layer;
                self.wait(job, &work, earliest)?;
            }
        }
        copy_layers(waiting..step.layers.end);
        Ok(bytes * step.layers.len() as u64)
    }

    /// How long a layer has to wait at least; `None` if the throttle lets it through.
    fn wait_left(&self, work: &LayerWork, earliest: Option<Instant>) -> Option<Duration> {
        let due = earliest.map_or(Duration::ZERO, |at| at.saturating_duration_since(Instant::now()));
        if due.is_zero() && !self.shared.throttle.is_held(work) {
            return None;
        }
        Some(if due.is_zero() { NAP } else { due.min(NAP) })
    }

    /// Waits until the throttle lets the layer through. Backups make way for loads here.
    fn wait(&self, job: &Job, work: &LayerWork, earliest: Option<Instant>) -> Result<(), TransferError> {
        while let Some(nap) = self.wait_left(work, earliest) {
            if job.is_cancelled() {
                return Err(TransferError::Cancelled);
            }
            thread::sleep(nap);
            if work.kind != TransferKind::Load {
                self.serve_loads();
            }
        }
        Ok(())
    }

    fn serve_loads(&self) {
        while let Ok(load) = self.loads.try_recv() {
            self.run(&load);
        }
    }
}

fn panicked(job: &Job, panic: &(dyn std::any::Any + Send)) -> TransferError {
    let said = panic.downcast_ref::<&str>().map(|text| (*text).to_owned());
    let reason = said.or_else(|| panic.downcast_ref::<String>().cloned());
    TransferError::Io {
        operation: format!("{} {} on a copy thread", job.transfer.kind.name(), job.transfer.id),
        reason: format!("panicked: {}", reason.as_deref().unwrap_or("without a message")),
    }
}
