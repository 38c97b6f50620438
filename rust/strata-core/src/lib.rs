//! Core is the one writer of Strata's state. Every transition is a method that takes `now` and an event and leaves
//! actions to carry out: plan a batch, start a transfer, refuse a request. It never waits, never reads a clock and
//! never does I/O, so a server thread, a caller's thread and a simulator can drive the same code.
#![forbid(unsafe_code)]

mod admission;
mod answer;
mod config;
mod core;
mod costs;
mod driver;
mod ending;
mod lease;
mod lease_handle;
mod link_trial;
mod loads_in_order;
mod maintenance;
mod plan;
mod planning;
mod prefetch;
mod prefetch_policy;
mod request;
mod stats;
mod waiting;

pub use crate::core::Core;
pub use answer::{answer, Answer, Giver, NoAnswer};
pub use config::CoreConfig;
pub use driver::{Driver, DriverError, DriverHandle, Movers, Work};
pub use lease::{LeaseError, LeaseFound, LeaseLoad, LoadAnswer, LoadGiver, ReserveGiver};
pub use link_trial::{LinkTrial, TrialError, TrialLimits};
pub use maintenance::MaintenanceReport;
pub use plan::{Action, Plan, PlanKind, PlanRow, Refusal, RefusalKind, RowResult, StepFailure, StepTime};
pub use prefetch_policy::{Adaptive, BestEffort, PrefetchPolicy, PrefetchView, Timeout, WaitForAll};
pub use request::{Admission, NewRequest, Sources};
pub use stats::{CoreStats, RoundStats, WaitingReport};

use thiserror::Error;

/// What stops Core. Each is a defect in Strata: requests are refused afterwards rather than answered wrongly.
#[derive(Debug, Error)]
pub enum CoreError {
    /// The cache controller found its books in disorder.
    #[error(transparent)]
    Control(#[from] strata_control::ControlError),
    /// A driver reported something that Core never asked for.
    #[error("the driver broke the protocol: {0}")]
    Protocol(String),
}
