//! Memory that crosses the language border: the device pool that Python owns, and the host arena that the disk
//! reads and writes.

use crate::error::{Failure, Outcome};
use crate::gate::released;
use crate::measure::edge_kind;
use pyo3::prelude::*;
use std::ptr::NonNull;
use std::sync::Arc;
use std::time::Duration;
use strata_copy::{HoldLayer, Region};
use strata_disk::PageMemory;
use strata_types::{KvLayout, PageId};

/// The device pool: memory of a Python object that is kept alive with it.
pub fn device_region(address: usize, bytes: usize, owner: Py<PyAny>) -> Outcome<Region> {
    let start = NonNull::new(address as *mut u8)
        .ok_or_else(|| Failure::Config("device_address is null: pass the pool's data_ptr()".into()))?;
    // SAFETY: the caller passes the address and size of memory that `owner` keeps alive and never moves (a torch
    // tensor's data_ptr and nbytes); the region holds `owner` for as long as anything can reach the memory. Who may
    // touch which page when is Core's business, or that of a `CopyMover`'s books: a page is written by one plan or one
    // transfer at a time.
    Ok(unsafe { Region::from_raw(start, bytes, Arc::new(owner)) })
}

/// The host arena as the disk store sees it.
pub struct HostPages {
    /// The arena, which the region keeps mapped.
    pub region: Region,
    /// Where pages lie in it, page-first.
    pub layout: KvLayout,
}

// SAFETY: `region` covers the arena and keeps it mapped; `page_first` layouts give each page its own span
// of `page_bytes` at the same place every time, and `pointer` checks that the span lies inside.
unsafe impl PageMemory for HostPages {
    fn page_bytes(&self) -> usize {
        self.layout.shape.page_bytes()
    }

    fn page_ptr(&self, page: PageId) -> Option<NonNull<u8>> {
        if page.0 >= self.layout.pages {
            return None;
        }
        self.region.pointer(self.layout.offset(0, 0, page.0), self.page_bytes()).ok()
    }
}

/// Holds transfers of one kind before one layer, so that a test can see what is ready below it.
#[pyclass(frozen, module = "strata._core")]
pub struct LayerHold {
    pub(crate) hold: Arc<HoldLayer>,
}

#[pymethods]
impl LayerHold {
    /// Holds every `load` or `backup` before `layer` until `release`, at most `limit_s` seconds.
    #[new]
    fn new(kind: &str, layer: u32, limit_s: f64) -> Outcome<LayerHold> {
        let kind = edge_kind(kind)?;
        let hold = HoldLayer::new(kind, layer, Duration::from_secs_f64(limit_s.clamp(0.0, 3600.0)));
        Ok(LayerHold { hold: Arc::new(hold) })
    }

    /// Lets the held transfers, and all later ones, go on.
    fn release(&self) {
        self.hold.release();
    }

    /// Waits until a transfer is held; False if none was within `timeout_s` seconds.
    fn wait_until_held(&self, py: Python<'_>, timeout_s: f64) -> bool {
        let limit = Duration::from_secs_f64(timeout_s.clamp(0.0, 3600.0));
        released(py, || self.hold.wait_until_held(limit))
    }
}
