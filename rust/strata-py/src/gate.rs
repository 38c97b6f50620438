//! The one place that lets go of the interpreter's lock, in every call that can block or take over about 10 us, and that
//! takes it again for what such a call asks of Python.

use pyo3::prelude::*;

/// Tokens above which a call on the tree takes longer than letting go of the lock costs.
const MANY_TOKENS: usize = 8192;

/// Runs work on this many tokens, without the lock if they are many.
pub fn released_if_many<T: Send>(py: Python<'_>, tokens: usize, work: impl Send + FnOnce() -> T) -> T {
    if tokens > MANY_TOKENS {
        released(py, work)
    } else {
        work()
    }
}

/// Runs `work` without the lock.
pub fn released<T: Send>(py: Python<'_>, work: impl Send + FnOnce() -> T) -> T {
    py.detach(work)
}

/// Asks Python something, from within `released`.
pub fn held<T>(ask: impl FnOnce(Python<'_>) -> T) -> T {
    Python::attach(ask)
}
