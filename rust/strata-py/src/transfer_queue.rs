//! Transfers between device and host for an executor in Python, in place of the copy threads. `strata_tier` has the
//! rules; here they cross the language border.

use crate::error::{Failure, Outcome};
use crate::gate::released;
use numpy::PyArray1;
use pyo3::prelude::*;
use std::sync::Arc;
use std::time::Duration;
use strata_tier::Report;
use strata_types::{PageId, PageMove, TransferError, TransferId};

/// A transfer to execute: (id, `load` or `backup`, source pages, destination pages), both uint32 and of one length.
type Taken<'py> = (u64, &'static str, Bound<'py, PyArray1<u32>>, Bound<'py, PyArray1<u32>>);

/// The queue and its executor's side. Whoever drops it without `close(torn_down=True)` leaves the pages of what it took
/// reserved for good: a device may still touch them.
#[pyclass(frozen, module = "strata._core")]
pub struct TransferQueue {
    pub(crate) queue: Arc<strata_tier::TransferQueue>,
}

fn seconds(value: f64) -> Duration {
    Duration::try_from_secs_f64(value.clamp(0.0, 3600.0)).unwrap_or_default()
}

fn column<'py>(
    py: Python<'py>,
    pages: &[PageMove],
    side: impl Fn(&PageMove) -> PageId,
) -> Bound<'py, PyArray1<u32>> {
    PyArray1::from_iter(py, pages.iter().map(|page| side(page).0))
}

#[pymethods]
impl TransferQueue {
    /// A queue of at most `capacity` transfers that have not ended; one `Runtime` fills it.
    #[new]
    fn new(capacity: usize) -> Outcome<TransferQueue> {
        if capacity == 0 {
            return Err(Failure::Config("a transfer queue needs a capacity of at least 1, got 0".into()));
        }
        Ok(TransferQueue { queue: Arc::new(strata_tier::TransferQueue::new(capacity)) })
    }

    /// The next transfer, loads first; None within `timeout_s` seconds.
    fn take<'py>(&self, py: Python<'py>, timeout_s: f64) -> Option<Taken<'py>> {
        let limit = seconds(timeout_s);
        let taken = released(py, || self.queue.take(limit))?;
        let (from, to) =
            (column(py, &taken.pages, |page| page.from), column(py, &taken.pages, |page| page.to));
        Some((taken.id.0, taken.kind.name(), from, to))
    }

    /// Whether a taken transfer need not be begun, or gone on with.
    fn is_cancelled(&self, transfer: u64) -> bool {
        self.queue.is_cancelled(TransferId(transfer))
    }

    /// Layers `0..ready` of a load are whole on the device.
    fn layers_ready(&self, transfer: u64, ready: u32) {
        self.queue.layers_ready(TransferId(transfer), ready);
    }

    /// A taken transfer will not end well: whoever waits for it is told now. `done` must follow once the device has let
    /// go of its pages.
    fn doom(&self, transfer: u64, reason: String) {
        self.queue.doom(TransferId(transfer), device_error(reason));
    }

    /// A taken transfer is over and the device has let go of its pages: `pages_whole` of them, from the first, are at
    /// their destination. `error` says why it is not all of them.
    #[pyo3(signature = (transfer, pages_whole, bytes, busy_s, error = None))]
    fn done(&self, transfer: u64, pages_whole: usize, bytes: u64, busy_s: f64, error: Option<String>) {
        let error = error.map(device_error);
        self.queue.done(TransferId(transfer), Report { pages_whole, bytes, busy: seconds(busy_s), error });
    }

    /// A taken transfer that was cancelled is over, short.
    fn cancelled(&self, transfer: u64, busy_s: f64) {
        let error = Some(TransferError::Cancelled);
        let report = Report { busy: seconds(busy_s), error, ..Report::default() };
        self.queue.done(TransferId(transfer), report);
    }

    /// Refuses new transfers and ends those that nobody took. With `torn_down` the executor vouches that nothing can
    /// touch any page of theirs any more, and the others end too. May be called again.
    #[pyo3(signature = (*, torn_down = false))]
    fn close(&self, py: Python<'_>, torn_down: bool) {
        released(py, || if torn_down { self.queue.torn_down() } else { self.queue.close() });
    }

    /// Transfers that were accepted and have not ended.
    #[getter]
    fn outstanding(&self) -> usize {
        self.queue.outstanding()
    }

    /// Reports about transfers that were unknown or had ended.
    #[getter]
    fn unknown_reports(&self) -> u64 {
        self.queue.stats().unknown_reports
    }
}

fn device_error(reason: String) -> TransferError {
    TransferError::Io { operation: "a transfer between device and host".into(), reason }
}

impl Drop for TransferQueue {
    fn drop(&mut self) {
        self.queue.close();
    }
}
