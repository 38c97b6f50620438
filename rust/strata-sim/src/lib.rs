//! A discrete-event simulator around the production Core. Hardware, model, system and workload come in as data; the
//! clock is virtual; every batch, eviction and publish decision is Core's own. Equal configurations give equal reports.
#![forbid(unsafe_code)]

mod clients;
mod config;
mod constants;
mod device;
mod error;
mod hardware;
mod link;
mod machine;
mod model;
mod random;
mod report;
mod run;
mod system;
mod timeline;
pub mod workload;

pub use config::{plain, SimulationConfig};
pub use constants::Constants;
pub use error::SimulationError;
pub use hardware::{CopyMethod, Disk, DiskOrder, Hardware, Operation};
pub use model::{Model, StepCost, StepRow};
pub use random::{Law, Random};
pub use report::{Distribution, Report, RequestReport, Stalls, TokensBySource};
pub use run::{simulate, simulate_until, simulate_with};
pub use system::{Overlap, Sizes, System};
pub use timeline::{Span, Timeline, Track};
pub use workload::Workload;
