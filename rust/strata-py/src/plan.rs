//! A plan as the engine reads it: flat arrays for the model, and a wait for each layer.

use crate::tickets;
use numpy::PyArray1;
use pyo3::prelude::*;
use std::time::{Duration, Instant};
use strata_core::{PlanKind, RefusalKind};

/// A batch to compute.
#[pyclass(frozen, module = "strata._core")]
pub struct Plan {
    pub(crate) plan: strata_core::Plan,
    pub(crate) page_size: usize,
}

/// A request that will not be answered.
#[pyclass(frozen, module = "strata._core", get_all)]
pub struct Refusal {
    /// The request.
    request: u64,
    /// `invalid`, `busy` or `failed`.
    kind: &'static str,
    /// A sentence with both numbers.
    reason: String,
}

impl From<strata_core::Refusal> for Refusal {
    fn from(refusal: strata_core::Refusal) -> Refusal {
        let kind = match refusal.kind {
            RefusalKind::Invalid => "invalid",
            RefusalKind::Busy => "busy",
            RefusalKind::Failed => "failed",
        };
        Refusal { request: refusal.request.0, kind, reason: refusal.reason }
    }
}

#[pymethods]
impl Plan {
    /// The number of this plan.
    #[getter]
    fn id(&self) -> u64 {
        self.plan.id.0
    }

    /// Plans of an older epoch than the engine's are stale.
    #[getter]
    fn epoch(&self) -> u64 {
        self.plan.epoch
    }

    /// Whether this plan computes prompts; else one token of each row.
    #[getter]
    fn is_prefill(&self) -> bool {
        self.plan.kind == PlanKind::Prefill
    }

    /// The request of each row.
    #[getter]
    fn requests(&self) -> Vec<u64> {
        self.plan.rows.iter().map(|row| row.request.0).collect()
    }

    /// Tokens to compute in each row.
    #[getter]
    fn query_lengths(&self) -> Vec<usize> {
        self.plan.rows.iter().map(|row| row.length).collect()
    }

    /// Tokens in the pool after this plan, in each row.
    #[getter]
    fn context_lengths(&self) -> Vec<usize> {
        self.plan.rows.iter().map(|row| row.start + row.length).collect()
    }

    /// Whether a token is to be sampled after each row.
    #[getter]
    fn samples(&self) -> Vec<bool> {
        self.plan.rows.iter().map(|row| row.sample).collect()
    }

    /// Rows that were just admitted: (row, prompt tokens from device, host, disk, computed, preemptions so far).
    #[getter]
    fn admitted(&self) -> Vec<(usize, usize, usize, usize, usize, u32)> {
        let rows = self.plan.rows.iter().enumerate();
        rows.filter_map(|(index, row)| {
            row.admitted.map(|admission| {
                let from = admission.sources;
                (index, from.device, from.host, from.disk, from.computed, admission.preemptions)
            })
        })
        .collect()
    }

    /// int64 [N]: the tokens of all rows. -1 stands for the token that the row's request sampled last.
    fn token_ids<'py>(&self, py: Python<'py>) -> Bound<'py, PyArray1<i64>> {
        let mut tokens = Vec::new();
        for row in &self.plan.rows {
            tokens.extend(row.tokens.iter().map(|token| i64::from(*token)));
            tokens.extend(std::iter::repeat_n(-1, row.length - row.tokens.len()));
        }
        PyArray1::from_vec(py, tokens)
    }

    /// int64 [N]: the position of each token in its sequence.
    fn positions<'py>(&self, py: Python<'py>) -> Bound<'py, PyArray1<i64>> {
        let rows = self.plan.rows.iter();
        let positions = rows.flat_map(|row| row.start as i64..(row.start + row.length) as i64);
        PyArray1::from_vec(py, positions.collect())
    }

    /// int64 [N]: page x page_size + offset of each token.
    fn slot_mapping<'py>(&self, py: Python<'py>) -> Bound<'py, PyArray1<i64>> {
        let size = self.page_size;
        let slots = self.plan.rows.iter().flat_map(|row| {
            (row.start..row.start + row.length).map(move |position| {
                i64::from(row.pages[position / size].0) * size as i64 + (position % size) as i64
            })
        });
        PyArray1::from_vec(py, slots.collect())
    }

    /// int64 [pages] of each row: the pages that hold its context.
    fn page_tables<'py>(&self, py: Python<'py>) -> Vec<Bound<'py, PyArray1<i64>>> {
        let rows = self.plan.rows.iter();
        rows.map(|row| PyArray1::from_vec(py, row.pages.iter().map(|page| i64::from(page.0)).collect()))
            .collect()
    }

    /// Whether any load is still on its way.
    #[getter]
    fn loading(&self) -> bool {
        !self.plan.tickets.iter().all(|ticket| ticket.is_complete())
    }

    /// The transfers that bring what this plan reads, without those that had ended when it was formed.
    #[getter]
    fn loads(&self) -> Vec<u64> {
        tickets::transfers(&self.plan.tickets)
    }

    /// How one of `loads` stands, without waiting: layer `layer` is `ready`, `pending`, or the load has `failed`.
    fn load_state(&self, load: u64, layer: u32) -> &'static str {
        tickets::state(&self.plan.tickets, load, layer)
    }

    /// Waits until layer `layer` of every load is on the device: `ready`, `failed` or `timeout`. An atomic read
    /// where it is there already; blocks without the lock otherwise, at most `timeout_s` seconds.
    fn wait_layer(&self, py: Python<'_>, layer: u32, timeout_s: f64) -> &'static str {
        let deadline = Instant::now() + Duration::from_secs_f64(timeout_s.clamp(0.0, 3600.0));
        tickets::wait_layer(py, &self.plan.tickets, layer, deadline)
    }
}
