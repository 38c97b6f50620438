//! An order of the queue in Python. What it raises, or an answer that makes no sense, is kept for whoever runs the
//! simulation and ends it; it is never a panic, and nothing is asked afterwards.

use crate::error::StrataError;
use crate::gate::held;
use pyo3::exceptions::PyException;
use pyo3::prelude::*;
use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};
use strata_sched::{Candidate, Ranking, View};

/// The first exception of a run.
#[derive(Clone, Default)]
pub struct Raised(Arc<Mutex<Option<PyErr>>>);

impl Raised {
    /// Keeps it, unless there is one.
    pub fn set(&self, error: PyErr) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert(error);
    }

    /// Whether there is one.
    pub fn is_set(&self) -> bool {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).is_some()
    }

    /// Hands it over.
    pub fn take(&self) -> Option<PyErr> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).take()
    }
}

/// A waiting request for Python: id, arrived and waited in seconds, tokens to compute, tokens on device, host and disk,
/// transient tokens, whether deferred.
type Row = (u64, f64, f64, u32, u32, u32, u32, u32, bool);

/// Calls `order(rows, now)` with a row for each request that may go, in the queue's order, and tries the ids that it
/// answers.
pub struct PythonOrder {
    order: Py<PyAny>,
    raised: Raised,
}

impl PythonOrder {
    /// What goes wrong is kept in `raised`.
    pub fn new(order: Py<PyAny>, raised: Raised) -> PythonOrder {
        PythonOrder { order, raised }
    }

    fn ask(&self, py: Python<'_>, view: &View<'_>, candidates: &[Candidate<'_>]) -> PyResult<Vec<usize>> {
        let now_s = view.now.0 as f64 / 1e9;
        let rows: Vec<Row> = candidates.iter().map(|candidate| row(candidate, view)).collect();
        let answer = self.order.call1(py, (rows, now_s)).and_then(|answer| answer.extract::<Vec<u64>>(py));
        let ids = answer.map_err(|cause| failed(py, cause, now_s, candidates.len()))?;
        let mut places: HashMap<u64, usize> =
            candidates.iter().enumerate().map(|(place, candidate)| (candidate.waiting.id.0, place)).collect();
        let mut chosen = Vec::with_capacity(ids.len());
        for id in ids {
            chosen.push(places.remove(&id).ok_or_else(|| {
                StrataError::new_err(format!(
                    "the policy's order names request {id}, which is not among those that it was given or comes twice: \
                     name each of their ids once at most"
                ))
            })?);
        }
        if chosen.is_empty() && view.running == 0 && candidates.iter().any(|candidate| !candidate.deferred) {
            return Err(StrataError::new_err(format!(
                "at {now_s:.3} s the policy's order names nobody while nothing runs and {} requests wait: name one that \
                 is not deferred",
                candidates.len()
            )));
        }
        Ok(chosen)
    }
}

impl Ranking for PythonOrder {
    fn rank(&mut self, view: &View<'_>, candidates: &[Candidate<'_>]) -> Vec<usize> {
        if self.raised.is_set() {
            return Vec::new();
        }
        held(|py| self.ask(py, view, candidates)).unwrap_or_else(|error| {
            self.raised.set(error);
            Vec::new()
        })
    }
}

fn row(candidate: &Candidate<'_>, view: &View<'_>) -> Row {
    let waiting = candidate.waiting;
    let need = &waiting.standing.need;
    (
        waiting.id.0,
        waiting.arrived.0 as f64 / 1e9,
        view.now.since(waiting.arrived).as_secs_f64(),
        need.to_compute(),
        need.device,
        need.host,
        need.disk,
        need.transient,
        candidate.deferred,
    )
}

/// An interrupt as it is; anything else as the cause of an error that says where it happened.
fn failed(py: Python<'_>, cause: PyErr, now_s: f64, waiting: usize) -> PyErr {
    if !cause.is_instance_of::<PyException>(py) {
        return cause;
    }
    let error = StrataError::new_err(format!(
        "the policy's order failed at {now_s:.3} s with {waiting} requests to choose from: {cause}"
    ));
    error.set_cause(py, Some(cause));
    error
}
