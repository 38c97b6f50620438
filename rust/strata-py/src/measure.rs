//! Yardsticks for the benches: what a compare and a copy of the same bytes cost on this machine.

use crate::error::{Failure, Outcome};
use crate::gate::released;
use numpy::{PyReadonlyArray1, PyReadwriteArray1};
use pyo3::prelude::*;
use std::sync::{Mutex, MutexGuard, PoisonError};
use strata_copy::{memcmp_baseline, memcpy_baseline, Stores, Yardstick, YardstickConfig};
use strata_types::TransferKind;

/// Whether two arrays hold the same tokens: one memcmp, called as a match is called.
#[pyfunction]
pub fn same_bytes(one: PyReadonlyArray1<'_, u32>, two: PyReadonlyArray1<'_, u32>) -> PyResult<bool> {
    let (one, two) = (one.as_slice()?, two.as_slice()?);
    // A u32 slice is compared as bytes by the same memcmp that the tree's node compare compiles to.
    Ok(one.len() == two.len() && memcmp_baseline(bytes_of(one), bytes_of(two)))
}

/// Copies `source` to `destination`, bytes of equal number, with non-temporal stores if `streaming`. Lets go of the
/// lock, so that several threads can measure together.
#[pyfunction]
pub fn copy_bytes(
    py: Python<'_>,
    mut destination: PyReadwriteArray1<'_, u8>,
    source: PyReadonlyArray1<'_, u8>,
    streaming: bool,
) -> PyResult<()> {
    let stores = if streaming { Stores::Streaming } else { Stores::Cached };
    let (to, from) = (destination.as_slice_mut()?, source.as_slice()?);
    released(py, || memcpy_baseline(to, from, stores));
    Ok(())
}

/// Whole pools carried by the copy engine, beside one span of the same bytes.
#[pyclass(frozen, module = "strata._core")]
pub struct CopyYardstick {
    yardstick: Mutex<Yardstick>,
}

impl CopyYardstick {
    fn yardstick(&self) -> MutexGuard<'_, Yardstick> {
        self.yardstick.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[pymethods]
impl CopyYardstick {
    /// Two pools of about `pool_bytes` in memory, and an engine of `threads` threads between them. `scattered`
    /// pages lie in another order on the other side. Raises ConfigError, CapacityError.
    #[new]
    #[pyo3(signature = (piece_bytes, pool_bytes, threads, *, scattered = false, backup_niceness = 0))]
    fn new(
        py: Python<'_>,
        piece_bytes: u32,
        pool_bytes: usize,
        threads: usize,
        scattered: bool,
        backup_niceness: u8,
    ) -> Outcome<CopyYardstick> {
        let config = YardstickConfig { piece_bytes, bytes: pool_bytes, threads, backup_niceness, scattered };
        Ok(CopyYardstick { yardstick: Mutex::new(released(py, || Yardstick::new(config))?) })
    }

    /// Bytes that every call moves.
    #[getter]
    fn bytes(&self) -> usize {
        self.yardstick().bytes()
    }

    /// Seconds of one `load` or `backup` of every page. Raises StorageError if it fails.
    fn transfer(&self, py: Python<'_>, kind: &str) -> Outcome<f64> {
        let kind = edge_kind(kind)?;
        let elapsed = released(py, || self.yardstick().transfer(kind));
        Ok(elapsed.map_err(|error| Failure::Storage(error.to_string()))?.as_secs_f64())
    }

    /// Seconds of copying as many bytes the same way as one span: with non-temporal stores if `streaming`, else with
    /// the C library's memcpy.
    fn memcpy(&self, py: Python<'_>, kind: &str, streaming: bool) -> Outcome<f64> {
        let kind = edge_kind(kind)?;
        let stores = if streaming { Stores::Streaming } else { Stores::Cached };
        Ok(released(py, || self.yardstick().span(kind, stores))?.as_secs_f64())
    }
}

/// A direction of the edge between device and host.
pub(crate) fn edge_kind(kind: &str) -> Outcome<TransferKind> {
    match kind {
        "load" => Ok(TransferKind::Load),
        "backup" => Ok(TransferKind::Backup),
        other => Err(Failure::Config(format!("kind must be load or backup, got {other:?}"))),
    }
}

fn bytes_of(words: &[u32]) -> &[u8] {
    // SAFETY: any u32 is four initialised bytes; the length is that of the same memory, and u8 needs no alignment.
    unsafe { std::slice::from_raw_parts(words.as_ptr().cast::<u8>(), std::mem::size_of_val(words)) }
}
