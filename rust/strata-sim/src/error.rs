//! What a simulation cannot do.

use strata_core::CoreError;
use thiserror::Error;

/// Why a simulation has no report.
#[derive(Debug, Error)]
pub enum SimulationError {
    /// The configuration says something that cannot be.
    #[error("{0}")]
    Config(String),
    /// Core found a defect.
    #[error(transparent)]
    Core(#[from] CoreError),
    /// Whoever watched wanted no more of it.
    #[error("stopped at {now_s:.3} s of its clock")]
    Stopped {
        /// The virtual time in seconds.
        now_s: f64,
    },
    /// Nothing will ever happen again, and requests are left.
    #[error("at {now_s:.3} s nothing is under way and {left} requests are unfinished: {detail}")]
    Stuck {
        /// The virtual time in seconds.
        now_s: f64,
        /// Requests without an end.
        left: usize,
        /// What Core says.
        detail: String,
    },
}

impl SimulationError {
    pub(crate) fn config(message: impl Into<String>) -> SimulationError {
        SimulationError::Config(message.into())
    }
}
