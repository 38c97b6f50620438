//! `CopyMover`: the copy threads alone, for whoever has pages in two layouts and decides for itself which to move. What
//! holds: no page is written by a transfer while another one of this mover reads or writes it.

use crate::error::{Failure, Outcome};
use crate::gate::released;
use crate::measure::edge_kind;
use crate::memory::{device_region, LayerHold};
use crate::runtime::seconds;
use numpy::PyReadonlyArray1;
use pyo3::prelude::*;
use std::collections::hash_map::Entry;
use std::collections::{HashMap, HashSet};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};
use strata_copy::{CopyConfig, CopyEngine, HoldLayer, NoThrottle};
use strata_core::{answer, Answer, Giver};
use strata_tier::{completion_queue, CompletionReceiver, Mover, SubmitError};
use strata_types::{
    GroupId, KvLayout, KvShape, LoadTicket, PageId, PageMove, TransferCompletion, TransferDescriptor,
    TransferId, TransferKind, WaitOutcome,
};

/// Transfers whose end nobody has looked at. There is room for as many completions, so no copy thread ever waits for a
/// reader: whoever waits for layers reads none.
const MOST: usize = 4096;
/// How long one look for completions lasts: another waiter may have read the one that is waited for.
const LOOK: Duration = Duration::from_millis(2);

/// A page at one end of the mover.
type Place = (&'static str, PageId);

/// A transfer whose completion nobody has read.
struct UnderWay {
    kind: TransferKind,
    pages: Vec<PageMove>,
    ticket: Option<Arc<LoadTicket>>,
    done: Giver<TransferCompletion>,
}

impl UnderWay {
    /// Whether threads may still touch its pages. A load whose layers are all there is over, whether or not somebody has
    /// read that.
    fn is_moving(&self) -> bool {
        self.ticket.as_ref().is_none_or(|ticket| !ticket.is_complete())
    }

    fn places(&self) -> impl Iterator<Item = [Place; 2]> + '_ {
        let (from, to) = match self.kind {
            TransferKind::Load => ("host", "pool"),
            _ => ("pool", "host"),
        };
        self.pages.iter().map(move |step| [(from, step.from), (to, step.to)])
    }
}

/// What is under way, by number and by page: who uses it, and whether it is written.
#[derive(Default)]
struct Books {
    transfers: HashMap<TransferId, UnderWay>,
    users: HashMap<Place, Vec<(TransferId, bool)>>,
}

impl Books {
    /// Takes a transfer in, unless there are too many or it meets another one.
    fn enter(&mut self, id: TransferId, transfer: UnderWay) -> Outcome<()> {
        if self.transfers.len() >= MOST {
            let text = format!("{MOST} transfers have not ended: wait for some of them, then try again");
            return Err(Failure::Capacity(text));
        }
        let mut written = HashSet::new();
        for [from, to] in transfer.places() {
            if self.is_used(&from, true) || self.is_used(&to, false) {
                let (end, page) = if self.is_used(&to, false) { to } else { from };
                return Err(Failure::Request(format!(
                    "{end} page {page} is part of a transfer that has not ended: wait for it, then try again"
                )));
            }
            if !written.insert(to) {
                let text = format!("{} page {} comes twice as a destination: give each once", to.0, to.1);
                return Err(Failure::Request(text));
            }
        }
        for [from, to] in transfer.places() {
            self.users.entry(from).or_default().push((id, false));
            self.users.entry(to).or_default().push((id, true));
        }
        self.transfers.insert(id, transfer);
        Ok(())
    }

    /// Whether a transfer uses a page, or writes it.
    fn is_used(&self, place: &Place, if_written: bool) -> bool {
        self.users.get(place).is_some_and(|users| {
            let used = |(id, writes): &(TransferId, bool)| {
                (*writes || !if_written) && self.transfers.get(id).is_some_and(UnderWay::is_moving)
            };
            users.iter().any(used)
        })
    }

    /// A transfer is over, or was never begun.
    fn leave(&mut self, id: TransferId) -> Option<UnderWay> {
        let transfer = self.transfers.remove(&id)?;
        for place in transfer.places().flatten() {
            if let Entry::Occupied(mut users) = self.users.entry(place) {
                users.get_mut().retain(|(user, _)| *user != id);
                if users.get().is_empty() {
                    users.remove();
                }
            }
        }
        Some(transfer)
    }
}

/// What ends transfers: whoever waits reads completions for all.
struct Endings {
    completions: CompletionReceiver,
    books: Mutex<Books>,
}

impl Endings {
    fn books(&self) -> MutexGuard<'_, Books> {
        // Nothing under this lock can panic half-way through a change.
        self.books.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Hands out completions that come within the limit.
    fn look(&self, limit: Duration) {
        let mut next = self.completions.recv_timeout(limit).ok();
        while let Some(completion) = next {
            let ended = self.books().leave(completion.id);
            // Whoever began it may have forgotten it.
            let _gone = ended.map(|transfer| transfer.done.give(completion));
            next = self.completions.try_recv().ok();
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
    done: Answer<TransferCompletion>,
}

#[pymethods]
impl CopyMover {
    /// `shape` is (layers, parts, page_size, token_bytes); `pool` and `host` are (address, bytes, pages, owner) of memory
    /// that is layer-first and page-first without gaps; `hold` stops transfers for tests. Raises ConfigError, CapacityError.
    #[new]
    #[pyo3(signature = (shape, pool, host, threads, hold = None))]
    fn new(
        shape: (u32, u32, u32, u32),
        pool: (usize, usize, u32, Py<PyAny>),
        host: (usize, usize, u32, Py<PyAny>),
        threads: usize,
        hold: Option<&Bound<'_, LayerHold>>,
    ) -> Outcome<CopyMover> {
        let (layers, parts, page_size, token_bytes) = shape;
        let shape = KvShape::new(GroupId(0), layers, parts, page_size, token_bytes)?;
        let (pool_layout, host_layout) =
            (KvLayout::layer_first(shape, pool.2)?, KvLayout::page_first(shape, host.2, 1)?);
        let (sender, completions) = completion_queue(MOST);
        let config = CopyConfig {
            device: device_region(pool.0, pool.1, pool.3)?,
            device_layout: pool_layout,
            host: device_region(host.0, host.1, host.3)?,
            host_layout,
            threads,
            backup_niceness: 0,
            queue_capacity: MOST,
            throttle: match hold {
                Some(hold) => Arc::<HoldLayer>::clone(&hold.get().hold),
                None => Arc::new(NoThrottle),
            },
        };
        let engine = Arc::new(CopyEngine::new(config, sender)?);
        let endings = Arc::new(Endings { completions, books: Mutex::default() });
        Ok(CopyMover { engine, endings, layers, next: AtomicU64::new(1) })
    }

    /// Begins a `load` (host to pool) or `backup` (pool to host) of pages (uint32) to pages. Raises RequestError for pages
    /// that a transfer under way writes, or reads where this one writes; CapacityError while too many have not ended;
    /// StorageError once it is closed.
    fn start(
        &self,
        py: Python<'_>,
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
        // Its books have an entry for each page.
        Ok(released(py, || self.submit(kind, pages))?)
    }

    /// Stops the threads; what is under way ends as cancelled. The memory is the caller's again. Raises StrataError if a
    /// thread still runs after some two seconds: then it is not yet.
    fn close(&self, py: Python<'_>) -> Outcome<()> {
        Ok(released(py, || self.engine.close())?)
    }
}

impl CopyMover {
    fn submit(&self, kind: TransferKind, pages: Vec<PageMove>) -> Outcome<Movement> {
        self.endings.look(Duration::ZERO);
        let id = TransferId(self.next.fetch_add(1, Ordering::Relaxed));
        let ticket = (kind == TransferKind::Load).then(|| Arc::new(LoadTicket::new(id, self.layers)));
        let (giver, done) = answer();
        let transfer = UnderWay { kind, pages: pages.clone(), ticket: ticket.clone(), done: giver };
        self.endings.books().enter(id, transfer)?;
        let (engine, endings) = (Arc::clone(&self.engine), Arc::clone(&self.endings));
        let movement = Movement { engine, endings, id, pages: pages.len(), ticket: ticket.clone(), done };
        let (group, records) = (GroupId(0), Vec::new());
        let submitted = self.engine.submit(TransferDescriptor { id, kind, group, pages, records, ticket });
        submitted.map(|()| movement).map_err(|error| {
            drop(self.endings.books().leave(id));
            match error {
                SubmitError::Full(_) => Failure::Capacity("too many transfers wait: try again later".into()),
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
            if let Ok(ended) = self.done.wait(Duration::ZERO) {
                return Some(ended);
            }
            let left = deadline.saturating_duration_since(Instant::now());
            self.endings.look(left.min(LOOK));
            if left.is_zero() {
                return self.done.wait(Duration::ZERO).ok();
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
