//! `CopyMover`: the copy threads alone, for whoever has pages in two layouts and decides for itself which to move.

use crate::error::{Failure, Outcome};
use crate::gate::released;
use crate::measure::edge_kind;
use crate::memory::device_region;
use crate::runtime::seconds;
use numpy::PyReadonlyArray1;
use pyo3::prelude::*;
use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};
use strata_copy::{CopyConfig, CopyEngine, NoThrottle};
use strata_core::Answer;
use strata_tier::{completion_queue, CompletionReceiver, Mover, SubmitError};
use strata_types::{
    GroupId, KvLayout, KvShape, LoadTicket, PageId, PageMove, TransferCompletion, TransferDescriptor,
    TransferId, TransferKind, WaitOutcome,
};

/// Transfers of each kind that may wait, and completions that may wait for a reader: more than there can be transfers.
const QUEUE: usize = 1024;
const COMPLETIONS: usize = 4 * QUEUE;
/// How long one look for completions lasts: another waiter may have read the one that is waited for.
const LOOK: Duration = Duration::from_millis(2);

type Done = Arc<Answer<TransferCompletion>>;

/// What ends transfers: whoever waits reads completions for all.
struct Endings {
    completions: CompletionReceiver,
    waiting: Mutex<HashMap<TransferId, Done>>,
}

impl Endings {
    fn waiting(&self) -> MutexGuard<'_, HashMap<TransferId, Done>> {
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Hands out completions that come within the limit.
    fn look(&self, limit: Duration) {
        let mut next = self.completions.recv_timeout(limit);
        while let Ok(completion) = next {
            let done = self.waiting().remove(&completion.id);
            if let Some(done) = done {
                done.give(completion);
            }
            next = self.completions.try_recv().map_err(|_| crossbeam_channel::RecvTimeoutError::Timeout);
        }
    }
}

/// Copy threads between a layer-first pool and page-first memory. Safe to share between threads.
#[pyclass(frozen, module = "strata._core")]
pub struct CopyMover {
    engine: Arc<CopyEngine>,
    endings: Arc<Endings>,
    layers: u32,
    next: AtomicU64,
}

/// A transfer under way.
#[pyclass(frozen, module = "strata._core")]
pub struct Movement {
    engine: Arc<CopyEngine>,
    endings: Arc<Endings>,
    id: TransferId,
    pages: usize,
    ticket: Option<Arc<LoadTicket>>,
    done: Done,
}

#[pymethods]
impl CopyMover {
    /// `shape` is (layers, parts, page_size, token_bytes); `pool` and `host` are (address, bytes, pages, owner) of memory
    /// that is layer-first and page-first without gaps. Raises ConfigError, CapacityError.
    #[new]
    fn new(
        shape: (u32, u32, u32, u32),
        pool: (usize, usize, u32, Py<PyAny>),
        host: (usize, usize, u32, Py<PyAny>),
        threads: usize,
    ) -> Outcome<CopyMover> {
        let (layers, parts, page_size, token_bytes) = shape;
        let shape = KvShape::new(GroupId(0), layers, parts, page_size, token_bytes)?;
        let (pool_layout, host_layout) =
            (KvLayout::layer_first(shape, pool.2)?, KvLayout::page_first(shape, host.2, 1)?);
        let (sender, completions) = completion_queue(COMPLETIONS);
        let config = CopyConfig {
            device: device_region(pool.0, pool.1, pool.3)?,
            device_layout: pool_layout,
            host: device_region(host.0, host.1, host.3)?,
            host_layout,
            threads,
            backup_niceness: 0,
            queue_capacity: QUEUE,
            throttle: Arc::new(NoThrottle),
        };
        let engine = Arc::new(CopyEngine::new(config, sender)?);
        let endings = Arc::new(Endings { completions, waiting: Mutex::default() });
        Ok(CopyMover { engine, endings, layers, next: AtomicU64::new(1) })
    }

    /// Begins a `load` (host to pool) or `backup` (pool to host) of pages (uint32) to pages. Raises CapacityError while
    /// too many wait, StorageError once it is closed.
    fn start(
        &self,
        kind: &str,
        sources: PyReadonlyArray1<'_, u32>,
        destinations: PyReadonlyArray1<'_, u32>,
    ) -> PyResult<Movement> {
        let kind = edge_kind(kind)?;
        let (sources, destinations) = (sources.as_slice()?, destinations.as_slice()?);
        if sources.len() != destinations.len() || sources.is_empty() {
            let (from, to) = (sources.len(), destinations.len());
            let text =
                format!("{from} pages cannot be moved to {to} pages: give as many of both, at least one");
            return Err(Failure::Request(text).into());
        }
        let steps = sources.iter().zip(destinations);
        let pages: Vec<PageMove> =
            steps.map(|(from, to)| PageMove { from: PageId(*from), to: PageId(*to) }).collect();
        Ok(self.submit(kind, pages)?)
    }

    /// Stops the threads within a bound; what is under way ends as cancelled. The memory is the caller's again.
    fn close(&self, py: Python<'_>) -> Outcome<()> {
        Ok(released(py, || self.engine.close())?)
    }
}

impl CopyMover {
    fn submit(&self, kind: TransferKind, pages: Vec<PageMove>) -> Outcome<Movement> {
        self.endings.look(Duration::ZERO);
        let id = TransferId(self.next.fetch_add(1, Ordering::Relaxed));
        let ticket = (kind == TransferKind::Load).then(|| Arc::new(LoadTicket::new(id, self.layers)));
        let done = Done::default();
        let (engine, endings) = (Arc::clone(&self.engine), Arc::clone(&self.endings));
        let movement = Movement { engine, endings, id, pages: pages.len(), ticket, done };
        self.endings.waiting().insert(id, Arc::clone(&movement.done));
        let (group, records, ticket) = (GroupId(0), Vec::new(), movement.ticket.clone());
        let submitted = self.engine.submit(TransferDescriptor { id, kind, group, pages, records, ticket });
        submitted.map(|()| movement).map_err(|error| {
            self.endings.waiting().remove(&id);
            match error {
                SubmitError::Full(_) => Failure::Capacity(format!(
                    "{QUEUE} transfers wait already: wait for some of them, then try again"
                )),
                SubmitError::Closed(_) => Failure::Storage("the mover is closed".into()),
            }
        })
    }
}

#[pymethods]
impl Movement {
    /// Waits until layer `layer` of a load is in the pool: `ready`, `failed` or `timeout`. Of a backup all layers are
    /// there at its end.
    fn wait_layer(&self, py: Python<'_>, layer: u32, timeout_s: f64) -> Outcome<&'static str> {
        let Some(ticket) = &self.ticket else {
            return Ok(match self.wait(py, timeout_s)? {
                true => "ready",
                false => "timeout",
            });
        };
        Ok(match released(py, || ticket.wait_layer(layer, seconds(timeout_s))) {
            WaitOutcome::Ready => "ready",
            WaitOutcome::Failed => "failed",
            WaitOutcome::TimedOut => "timeout",
        })
    }

    /// Waits until no thread touches the pages any more; False if that takes longer than `timeout_s` seconds. Raises
    /// StorageError if not all of them are whole.
    fn wait(&self, py: Python<'_>, timeout_s: f64) -> Outcome<bool> {
        let deadline = Instant::now() + seconds(timeout_s);
        let ended = released(py, || loop {
            if let Some(ended) = self.done.wait(Duration::ZERO) {
                return Some(ended);
            }
            let left = deadline.saturating_duration_since(Instant::now());
            self.endings.look(left.min(LOOK));
            if left.is_zero() {
                return self.done.wait(Duration::ZERO);
            }
        });
        match ended {
            None => Ok(false),
            Some(TransferCompletion { error: Some(error), pages_whole, .. }) => {
                let text = format!("{pages_whole} of {} pages were moved: {error}", self.pages);
                Err(Failure::Storage(text))
            }
            Some(_) => Ok(true),
        }
    }

    /// Asks for an early end; `wait` says when nothing touches the pages any more.
    fn cancel(&self) {
        self.engine.cancel(self.id);
    }
}
