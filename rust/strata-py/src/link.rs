//! What was measured of the link between device and host before serving, and what Core is told of it.

use crate::error::{Failure, Outcome};
use crate::runtime::{transfer_pages, WARM_BYTES};
use std::time::Instant;
use strata_core::{LinkTrial, TrialError, TrialLimits};
use strata_sched::cost::{CostPrior, LinkCost};
use strata_tier::{CompletionReceiver, Mover};
use strata_types::{KvShape, Time, TransferKind};

/// Bytes of the largest transfer that is measured.
const LARGEST_BYTES: u64 = 16 << 20;

/// The outcome; neither where there was nothing to measure.
#[derive(Default)]
pub struct LinkState {
    cost: Option<LinkCost>,
    problem: Option<String>,
}

impl LinkState {
    /// Measures loads through the Mover that will serve. `pages` are those of the host and of the device tier, none of
    /// them in use. Fails only if something may still write to them.
    pub fn measure(
        mover: &dyn Mover,
        completions: &CompletionReceiver,
        shape: KvShape,
        pages: [u32; 2],
    ) -> Outcome<LinkState> {
        let page_bytes = shape.page_bytes() as u64;
        // Beyond what is mapped a copy would be measured with its page faults.
        let mapped = u32::try_from(WARM_BYTES / page_bytes).unwrap_or(u32::MAX).max(1);
        let largest = u32::try_from(LARGEST_BYTES / page_bytes).unwrap_or(u32::MAX);
        let [host_pages, device_pages] = pages.map(|pages| pages.min(mapped));
        let trial = LinkTrial {
            group: shape.group,
            layers: shape.layers,
            host_pages,
            device_pages,
            transfer_pages: transfer_pages(shape).min(largest).max(1),
            limits: TrialLimits::default(),
        };
        let start = Instant::now();
        match trial.run(mover, completions, &|| Time::default() + start.elapsed()) {
            Ok(cost) => Ok(LinkState { cost: Some(cost), problem: None }),
            Err(TrialError::Failed(reason)) => Ok(LinkState { cost: None, problem: Some(reason) }),
            Err(stuck @ TrialError::Stuck { .. }) => Err(Failure::Stopped(format!(
                "transfers between host and device do not end: {stuck}; start again, with --copy-threads 1 (on a GPU: with --device cpu) if it stays so"
            ))),
        }
    }

    /// What Core starts from.
    pub fn prior(&self) -> CostPrior {
        let prior = CostPrior::default();
        self.cost.map_or(prior, |cost| prior.with_link(TransferKind::Load, cost))
    }

    /// ((seconds a transfer, seconds a byte), why it is not known).
    pub fn describe(&self) -> (Option<(f64, f64)>, Option<String>) {
        (self.cost.map(|cost| (cost.latency, cost.per_byte)), self.problem.clone())
    }
}
