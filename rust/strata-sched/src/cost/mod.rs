//! Predicts how long a model step and a transfer take, from those that were measured. No clock of its own, no
//! randomness: equal measurements in equal order give equal predictions. Nothing is predicted that was neither
//! measured nor given; a prediction is never negative and grows with tokens and bytes. A single measurement that is
//! far off hardly matters, a lasting change is followed within about ten measurements (`fit.rs`).

mod fit;
mod link;
mod solve;
mod step;
#[cfg(test)]
mod tests;

pub use link::LinkCost;
pub use step::{StepCost, StepShape};

use fit::Fit;
use link::LinkModel;
use std::time::Duration;
use step::StepModel;
use strata_types::TransferKind;

/// All links, in the order of reports.
const LINKS: [TransferKind; 5] = [
    TransferKind::Load,
    TransferKind::Backup,
    TransferKind::Spill,
    TransferKind::Prefetch,
    TransferKind::Erase,
];

/// What is known before anything is measured: by default nothing. Counts as three measurements each.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct CostPrior {
    /// Steps in which a row computes more than one token.
    pub prefill: Option<StepCost>,
    /// Steps in which each row computes one token.
    pub decode: Option<StepCost>,
    links: [Option<LinkCost>; 5],
}

impl CostPrior {
    /// Adds what is known about one link.
    pub fn with_link(mut self, link: TransferKind, cost: LinkCost) -> CostPrior {
        self.links[link.index()] = Some(cost);
        self
    }
}

/// What was learnt about one kind of work, and how far it can be trusted.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Measured<Cost> {
    /// The coefficients; none before the first measurement.
    pub cost: Option<Cost>,
    /// Measurements so far.
    pub observations: u64,
    /// Lasting changes that were noticed: what was measured before the last one is forgotten.
    pub changes: u64,
    /// How far off the latest 64 predictions were; none before the second measurement.
    pub relative_error: Option<RelativeError>,
}

/// |predicted - actual| / actual, each predicted before the measurement was known.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct RelativeError {
    /// Half of the predictions were closer.
    pub median: f64,
    /// Nine in ten were.
    pub p90: f64,
}

impl<Cost> Measured<Cost> {
    fn of<const N: usize>(fit: &Fit<N>, cost: impl FnOnce([f64; N]) -> Cost) -> Measured<Cost> {
        Measured {
            cost: fit.coefficients().map(cost),
            observations: fit.observations(),
            changes: fit.changes(),
            relative_error: fit.relative_error(),
        }
    }
}

/// All that a model has learnt.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct CostReport {
    /// Steps in which a row computes more than one token.
    pub prefill: Measured<StepCost>,
    /// Steps in which each row computes one token.
    pub decode: Measured<StepCost>,
    /// Every link.
    pub links: [(TransferKind, Measured<LinkCost>); 5],
}

/// Learns what compute and transfers cost.
#[derive(Clone, Debug)]
pub struct CostModel {
    steps: StepModel,
    links: [LinkModel; 5],
}

impl CostModel {
    /// A model that knows no more than `prior`.
    pub fn new(prior: CostPrior) -> CostModel {
        CostModel {
            steps: StepModel::new(prior.prefill, prior.decode),
            links: prior.links.map(LinkModel::new),
        }
    }

    /// Learns that a step took `busy`, waits for loads left out. A step without tokens says nothing.
    pub fn observe_step(&mut self, shape: &StepShape, busy: Duration) {
        self.steps.observe(shape, busy);
    }

    /// Learns that a transfer took `busy`, queueing left out. One that moved no byte says nothing.
    pub fn observe_transfer(&mut self, link: TransferKind, bytes: u64, busy: Duration) {
        self.links[link.index()].observe(bytes, busy);
    }

    /// How long a step will take, loads left out. A decode step is predicted from prefill until one was measured.
    pub fn predict_step(&self, shape: &StepShape) -> Option<Duration> {
        self.steps.predict(shape)
    }

    /// How long it takes to compute `new_tokens` after `context_before` tokens, `chunk` at a time (0: all at once).
    pub fn predict_prefill(&self, new_tokens: u64, context_before: u64, chunk: u64) -> Option<Duration> {
        self.steps.predict_prefill(new_tokens, context_before, chunk)
    }

    /// How long a transfer of `bytes` takes, queueing left out; nothing takes no time.
    pub fn predict_transfer(&self, link: TransferKind, bytes: u64) -> Option<Duration> {
        self.links[link.index()].predict(bytes)
    }

    /// What a transfer over one link costs, once that is known.
    pub fn link_cost(&self, link: TransferKind) -> Option<LinkCost> {
        self.links[link.index()].cost()
    }

    /// What a prefill step costs, once that is known.
    pub fn prefill_cost(&self) -> Option<StepCost> {
        self.steps.prefill_cost()
    }

    /// Bytes per second of one link, its latency left out.
    pub fn bandwidth(&self, link: TransferKind) -> Option<f64> {
        self.links[link.index()].cost().and_then(|cost| cost.bandwidth())
    }

    /// What was learnt, and how well it predicts.
    pub fn report(&self) -> CostReport {
        CostReport {
            prefill: self.steps.prefill(),
            decode: self.steps.decode(),
            links: LINKS.map(|link| (link, self.links[link.index()].measured())),
        }
    }
}

/// A span that is never negative, and the longest there is where `value` is too large for one.
fn seconds(value: f64) -> Duration {
    Duration::try_from_secs_f64(value.max(0.0)).unwrap_or(Duration::MAX)
}
