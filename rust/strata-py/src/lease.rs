//! `Lease`: what an engine that schedules for itself holds of the cache, for one sequence.

use crate::error::{Failure, Outcome};
use crate::gate::released;
use crate::runtime::seconds;
use crate::tickets;
use numpy::{PyArray1, PyReadonlyArray1};
use pyo3::prelude::*;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant};
use strata_core::{DriverHandle, LeaseError, LeaseFound, LeaseLoad, LoadAnswer, NoAnswer};
use strata_types::{Namespace, PageId, Token};

/// A sequence that an engine works on: cached pages, loads, reservations. Safe to share between threads.
#[pyclass(frozen, module = "strata._core")]
pub struct Lease {
    handle: DriverHandle,
    found: LeaseFound,
    page_size: usize,
    /// The lock is held for a look and never while anything is waited for: whoever has it may have the interpreter's too.
    asked: Mutex<Asked>,
    loaded: OnceLock<LeaseLoad>,
    closed: AtomicBool,
}

/// Whether a load was asked for.
enum Asked {
    No,
    /// Somebody is about to.
    Claimed,
    Yes(LoadAnswer),
}

impl Asked {
    /// Whether `load` may be called: for the first time, or since the device had no room for what it was to bring.
    fn is_open(&self) -> bool {
        match self {
            Asked::No => true,
            Asked::Claimed => false,
            Asked::Yes(answer) => matches!(answer.wait(Duration::ZERO), Ok(Err(LeaseError::NoRoom(_)))),
        }
    }
}

fn numbers(pages: &[PageId]) -> Vec<u32> {
    pages.iter().map(|page| page.0).collect()
}

fn slots(pages: &PyReadonlyArray1<'_, u32>) -> PyResult<Vec<PageId>> {
    Ok(pages.as_slice()?.iter().map(|page| PageId(*page)).collect())
}

impl Lease {
    /// Looks `tokens` up and keeps what is found where it is.
    pub fn open(
        handle: DriverHandle,
        page_size: usize,
        namespace: Namespace,
        tokens: Vec<Token>,
    ) -> Outcome<Lease> {
        let found = handle.open_lease(namespace, tokens)?;
        let (asked, closed) = (Mutex::new(Asked::No), AtomicBool::new(false));
        Ok(Lease { handle, found, page_size, asked, loaded: OnceLock::new(), closed })
    }

    fn asked(&self) -> MutexGuard<'_, Asked> {
        // It is set in one step.
        self.asked.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn close(&self) {
        if !self.closed.swap(true, Ordering::AcqRel) {
            self.handle.close_lease(self.found.id);
        }
    }

    /// The loaded prefix, if it is known by now.
    fn known(&self) -> Option<&LeaseLoad> {
        if self.loaded.get().is_none() {
            if let Asked::Yes(answer) = &*self.asked() {
                if let Ok(Ok(load)) = answer.wait(Duration::ZERO) {
                    self.loaded.get_or_init(|| load);
                }
            }
        }
        self.loaded.get()
    }

    /// The loaded prefix, once it is known. None within the limit.
    fn loaded(&self, py: Python<'_>, limit: Duration) -> Outcome<Option<&LeaseLoad>> {
        if let Some(load) = self.loaded.get() {
            return Ok(Some(load));
        }
        let answer = match &*self.asked() {
            Asked::Yes(answer) => Some(answer.clone()),
            Asked::No | Asked::Claimed => None,
        };
        let Some(answer) = answer else {
            return Err(Failure::Request(
                "nothing was loaded: call load() before its pages are asked for".into(),
            ));
        };
        match released(py, || answer.wait(limit)) {
            Err(NoAnswer::Late) => Ok(None),
            Err(NoAnswer::Lost) => Err(released(py, || self.handle.stopped()).into()),
            Ok(Err(error)) => Err(error.into()),
            Ok(Ok(load)) => Ok(Some(self.loaded.get_or_init(|| load))),
        }
    }
}

#[pymethods]
impl Lease {
    /// Pages found on the device, in host memory alone, on disk alone.
    #[getter]
    fn found(&self) -> (u32, u32, u32) {
        self.found.pages.into()
    }

    /// Seconds that bringing all of them to the device is predicted to take; None while too little is known.
    #[getter]
    fn load_s(&self) -> Option<f64> {
        self.found.load.map(|span| span.as_secs_f64())
    }

    /// Begins to bring the first `pages` pages of what was found to the device. Does not wait. What the disk has not given
    /// within `timeout_s` seconds is left out. Raises RequestError the second time, unless the device had no room for it.
    fn load(&self, py: Python<'_>, pages: u32, timeout_s: f64) -> Outcome<()> {
        {
            let mut asked = self.asked();
            if !asked.is_open() {
                return Err(Failure::Request("a match is loaded once: its ticket has the pages".into()));
            }
            *asked = Asked::Claimed;
        }
        let limit = seconds(timeout_s);
        let answer = released(py, || self.handle.load_lease(self.found.id, pages, limit));
        // Core has heard of it or has not, and then it may be asked again.
        *self.asked() = answer.as_ref().map_or(Asked::No, |answer| Asked::Yes(answer.clone()));
        Ok(answer.map(drop)?)
    }

    /// The page table (uint32) of the prefix that is on the device or on its way there; None while it is not known after
    /// `timeout_s` seconds. Raises CapacityError if the device has no room, RequestError after `release`, StrataError with
    /// the reason once the core has stopped.
    fn pages<'py>(&self, py: Python<'py>, timeout_s: f64) -> Outcome<Option<Bound<'py, PyArray1<u32>>>> {
        let load = self.loaded(py, seconds(timeout_s))?;
        Ok(load.map(|load| PyArray1::from_vec(py, numbers(&load.pages))))
    }

    /// Waits until layer `layer` of every loaded page is on the device: `ready`, `failed` or `timeout`. Raises StrataError
    /// with the reason if it failed because the core has stopped.
    fn wait_layer(&self, py: Python<'_>, layer: u32, timeout_s: f64) -> Outcome<&'static str> {
        let deadline = Instant::now() + seconds(timeout_s);
        match self.loaded(py, seconds(timeout_s))? {
            None => Ok("timeout"),
            Some(load) => {
                let outcome = tickets::wait_layer(py, &load.tickets, layer, deadline);
                // A core that ends says so before it fails what it was loading.
                if outcome == "failed" {
                    self.handle.still_runs()?;
                }
                Ok(outcome)
            }
        }
    }

    /// The transfers that bring the prefix. Empty while they are not known.
    #[getter]
    fn loads(&self) -> Vec<u64> {
        self.known().map_or_else(Vec::new, |load| tickets::transfers(&load.tickets))
    }

    /// How one of `loads` stands, without waiting: layer `layer` is `ready`, `pending`, or the load has `failed`.
    fn load_state(&self, load: u64, layer: u32) -> &'static str {
        self.known().map_or("pending", |loaded| tickets::state(&loaded.tickets, load, layer))
    }

    /// Pages (uint32) to compute into; there may be room only after `timeout_s` seconds, or within ten if pages on their
    /// way down make it. Raises CapacityError if there is none, StrataError with the reason once the core has stopped.
    fn reserve<'py>(
        &self,
        py: Python<'py>,
        count: u32,
        timeout_s: f64,
    ) -> PyResult<Bound<'py, PyArray1<u32>>> {
        let limit = seconds(timeout_s);
        let done = released(py, || self.handle.reserve_lease(self.found.id, count, limit));
        let pages = done.map_err(Failure::from)?.map_err(Failure::from)?;
        Ok(PyArray1::from_vec(py, numbers(&pages)))
    }

    /// Makes reserved pages match: they hold the whole pages of `tokens` (uint32) after those cached before. Returns the
    /// pages for which the cache had others. Raises RequestError for pages that are not reserved, tokens that do not go
    /// on from what is held, and a load that is not over or has failed.
    fn commit(
        &self,
        py: Python<'_>,
        tokens: PyReadonlyArray1<'_, u32>,
        pages: PyReadonlyArray1<'_, u32>,
    ) -> PyResult<Vec<u32>> {
        let (tokens, pages) = (tokens.as_slice()?.to_vec(), slots(&pages)?);
        let done = released(py, || self.handle.commit_lease(self.found.id, tokens, pages));
        let refused = done.map_err(Failure::from)?.map_err(Failure::from)?;
        Ok(numbers(&refused))
    }

    /// Gives reserved pages back unused, all or none. Raises RequestError for a page that is not reserved.
    fn abort(&self, py: Python<'_>, pages: PyReadonlyArray1<'_, u32>) -> PyResult<()> {
        let pages = slots(&pages)?;
        let done = released(py, || self.handle.abort_lease(self.found.id, pages));
        Ok(done.map_err(Failure::from)?.map_err(Failure::from)?)
    }

    /// Lets all pages go: found, loaded, reserved. Never waits. Calling it again does nothing.
    fn release(&self) {
        self.close();
    }

    /// Tokens of a page.
    #[getter]
    fn page_size(&self) -> usize {
        self.page_size
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        // A lease that was never released would keep its pages for ever. Whoever forgets one holds the interpreter's lock:
        // closing never waits.
        self.close();
    }
}
