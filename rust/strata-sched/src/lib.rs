//! Decides what the next batch holds. Pure: what waits, what runs and what is free come in, a decision goes out;
//! no clock, no tree, no page. The engine, the property tests and the simulator drive the same policies. `cost`
//! predicts from measurements what compute and transfers will take.
#![forbid(unsafe_code)]

pub mod cost;
mod fcfs;
mod view;

pub use cost::{CostModel, CostPrior, CostReport, LinkCost, Measured, StepCost, StepShape};
pub use fcfs::FirstComeFirstServed;
pub use view::{Admission, Chunk, Decision, Limits, Need, Prefilling, View, Waiting};

/// One order of the queue. Equal views give equal decisions.
pub trait Policy: Send {
    /// The name that flags and metrics use.
    fn name(&self) -> &'static str;

    /// Decides the next batch. The caller may fail to carry out an admission (pages were pinned meanwhile) and
    /// asks again later; nothing is remembered as done until the view says so.
    fn decide(&mut self, view: &View<'_>) -> Decision;
}
