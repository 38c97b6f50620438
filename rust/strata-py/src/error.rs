//! The one map from Rust's errors to the exceptions of `strata.errors`.

use pyo3::import_exception;
use pyo3::PyErr;
use strata_control::ControlError;
use strata_copy::CopyError;
use strata_core::{CoreError, DriverError, LeaseError};
use strata_disk::DiskError;
use strata_sim::SimulationError;
use strata_types::LayoutError;

import_exception!(strata.errors, StrataError);
import_exception!(strata.errors, ConfigError);
import_exception!(strata.errors, CapacityError);
import_exception!(strata.errors, StorageError);
import_exception!(strata.errors, RequestError);

/// Any error of the core crates, on its way to Python.
#[derive(Debug)]
pub enum Failure {
    /// A setting makes no sense.
    Config(String),
    /// Something does not fit, now or ever.
    Capacity(String),
    /// A tier, or the books about it, failed.
    Storage(String),
    /// The call makes no sense.
    Request(String),
    /// The core is gone.
    Stopped(String),
}

/// What the bindings return.
pub type Outcome<T> = Result<T, Failure>;

impl From<Failure> for PyErr {
    fn from(failure: Failure) -> PyErr {
        match failure {
            Failure::Config(text) => ConfigError::new_err(text),
            Failure::Capacity(text) => CapacityError::new_err(text),
            Failure::Storage(text) => StorageError::new_err(text),
            Failure::Request(text) => RequestError::new_err(text),
            Failure::Stopped(text) => StrataError::new_err(text),
        }
    }
}

/// The words of a failure that nobody is there to be raised to.
pub fn sentence(failure: &Failure) -> &str {
    match failure {
        Failure::Config(text)
        | Failure::Capacity(text)
        | Failure::Storage(text)
        | Failure::Request(text)
        | Failure::Stopped(text) => text,
    }
}

impl From<DriverError> for Failure {
    fn from(error: DriverError) -> Failure {
        match error {
            DriverError::Busy => Failure::Capacity(error.to_string()),
            DriverError::DiskInUse => Failure::Config(error.to_string()),
            DriverError::Stopped(_) | DriverError::NoAnswer(_) => Failure::Stopped(error.to_string()),
        }
    }
}

impl From<CopyError> for Failure {
    fn from(error: CopyError) -> Failure {
        match error {
            CopyError::Map { .. } | CopyError::Thread { .. } => Failure::Capacity(error.to_string()),
            CopyError::StillRunning { .. } => Failure::Stopped(error.to_string()),
            _ => Failure::Config(error.to_string()),
        }
    }
}

impl From<DiskError> for Failure {
    fn from(error: DiskError) -> Failure {
        match error {
            DiskError::Config { .. } | DiskError::Engine { .. } => Failure::Config(error.to_string()),
            _ => Failure::Storage(error.to_string()),
        }
    }
}

impl From<ControlError> for Failure {
    fn from(error: ControlError) -> Failure {
        match error {
            ControlError::Tree(_) => Failure::Request(error.to_string()),
            ControlError::Pool(_) | ControlError::Inconsistent(_) => Failure::Storage(error.to_string()),
        }
    }
}

impl From<CoreError> for Failure {
    fn from(error: CoreError) -> Failure {
        Failure::Storage(error.to_string())
    }
}

impl From<LeaseError> for Failure {
    fn from(error: LeaseError) -> Failure {
        match error {
            LeaseError::Misuse(text) => Failure::Request(text),
            LeaseError::NoRoom(text) => Failure::Capacity(text),
            LeaseError::Closed => Failure::Stopped(error.to_string()),
        }
    }
}

impl From<LayoutError> for Failure {
    fn from(error: LayoutError) -> Failure {
        Failure::Config(error.to_string())
    }
}

impl From<SimulationError> for Failure {
    fn from(error: SimulationError) -> Failure {
        match error {
            SimulationError::Config(text) => Failure::Config(text),
            SimulationError::Core(error) => error.into(),
            SimulationError::Stopped { .. } | SimulationError::Stuck { .. } => {
                Failure::Stopped(error.to_string())
            }
        }
    }
}
