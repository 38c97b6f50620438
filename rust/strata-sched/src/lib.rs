//! Decides what the next batch holds. Pure: what waits, what runs and what is free come in, a decision goes out;
//! no clock, no tree, no page. The engine, the property tests and the simulator drive the same policies. `cost`
//! predicts from measurements what compute and transfers will take.
#![forbid(unsafe_code)]

mod balance;
mod balanced;
mod batch;
mod bounds;
pub mod cost;
mod fcfs;
mod glance;
mod lpm;
mod order;
mod prices;
mod queue;
mod ranked;
#[cfg(test)]
mod tests;
mod view;
mod waiting;
mod why;

pub use balance::{Balance, Predicted, Ratio, Scale};
pub use balanced::{Adaptive, Balanced, BalancedOptions, Static};
pub use cost::{CostModel, CostPrior, CostReport, LinkCost, Measured, RelativeError, StepCost, StepShape};
pub use fcfs::FirstComeFirstServed;
pub use lpm::LongestPrefixFirst;
pub use prices::{LoadPrice, Prices, Work};
pub use queue::Queue;
pub use ranked::{Candidate, Ranked, Ranking};
pub use view::{Admission, Chunk, Counts, Decision, Limits, Prefilling, Step, View};
pub use waiting::{LoadRun, Need, Standing, Waiting};
pub use why::Why;

use std::time::Duration;
use strata_types::RequestId;

/// Whoever has waited for longer goes before everyone else.
pub const DEFAULT_MAX_WAIT: Duration = Duration::from_secs(60);

/// One order of the queue. Equal views give equal decisions: nothing is remembered but memory to reuse.
pub trait Policy: Send {
    /// The name that flags and metrics use.
    fn name(&self) -> &'static str;

    /// More transient tokens of another owner than these defer a request; none: they never do. The queue is made
    /// with it.
    fn deferral_threshold(&self) -> Option<u32> {
        None
    }

    /// Decides the next batch. The caller may fail to carry out an admission (pages were pinned meanwhile) and
    /// asks again later; nothing is remembered as done until the view says so.
    fn decide(&mut self, view: &View<'_>) -> Decision;

    /// Why each request waits, in the queue's order: the very decision that `decide` makes, with its reasons.
    fn explain(&mut self, view: &View<'_>) -> Vec<(RequestId, Why)>;
}
