//! The one place that lets go of the interpreter's lock: every call that can block, or take over about 10 us.

use pyo3::prelude::*;

/// Runs `work` without the lock.
pub fn released<T: Send>(py: Python<'_>, work: impl Send + FnOnce() -> T) -> T {
    py.detach(work)
}
