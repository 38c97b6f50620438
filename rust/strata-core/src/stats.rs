//! What Core counts, for `/metrics` and `/cache`.

use std::time::Duration;
use strata_control::{ControlStats, TierStats};
use strata_sched::cost::CostReport;
use strata_sched::{Counts, Why};
use strata_types::RequestId;

/// Counters and gauges at one moment.
#[derive(Clone, Debug, Default)]
pub struct CoreStats {
    /// Requests in the queue.
    pub waiting: usize,
    /// Of those, held back by a prefetch.
    pub held: usize,
    /// Requests that hold device pages.
    pub running: usize,
    /// Requests that were admitted, again after a preemption included.
    pub admissions: u64,
    /// Requests that ended on their own.
    pub finished: u64,
    /// Requests that were aborted.
    pub aborted: u64,
    /// Requests that were refused.
    pub refused: u64,
    /// Running requests that gave up their pages for older ones.
    pub preemptions: u64,
    /// Plans formed.
    pub plans: u64,
    /// Plans that failed or were thrown away with one that did.
    pub plans_discarded: u64,
    /// Prefetches that were cut: they were late, or slower than computing.
    pub prefetch_timeouts: u64,
    /// Prompt tokens by source: device, host, disk, computed.
    pub prompt_tokens: [u64; 4],
    /// Per tier, tokens that it held and that were computed all the same: that was quicker, or the tier was late.
    pub recomputed_tokens: [u64; 3],
    /// Deferrals that have ended.
    pub deferrals: u64,
    /// How long those lasted together.
    pub deferral: Duration,
    /// What decisions did to waiting requests.
    pub rounds: RoundStats,
    /// Loads that were begun for requests that wait.
    pub early_loads: u64,
    /// How long steps waited for loads.
    pub load_stall: Duration,
    /// What was learnt of the hardware.
    pub costs: Option<CostReport>,
    /// Tokens generated.
    pub generated_tokens: u64,
    /// The controller's counters.
    pub control: ControlStats,
    /// Gauges by tier.
    pub tiers: [TierStats; 3],
    /// Transfers in flight.
    pub transfers_in_flight: usize,
}

/// What decisions did to waiting requests, counted once a decision and request.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RoundStats {
    /// Passed over since another computes what they need.
    pub deferred: u64,
    /// Passed over at first since they would have made the batch loading-bound.
    pub set_aside: u64,
    /// Went before their turn since they had waited for too long.
    pub aged: u64,
    /// Went to compute what their owner did not.
    pub taken_over: u64,
}

impl RoundStats {
    /// Adds a decision.
    pub(crate) fn add(&mut self, counts: &Counts) {
        self.deferred += u64::from(counts.deferred);
        self.set_aside += u64::from(counts.set_aside);
        self.aged += u64::from(counts.aged);
        self.taken_over += u64::from(counts.taken_over);
    }
}

/// One who waits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WaitingReport {
    /// The request.
    pub request: RequestId,
    /// Since it was submitted.
    pub waited: Duration,
    /// Why; to be shown as a sentence.
    pub why: Why,
}
