//! What Core is made with.

use crate::prefetch_policy::PrefetchPolicy;
use strata_control::ControlConfig;
use strata_sched::cost::CostPrior;
use strata_sched::{Limits, Policy};

/// Sizes, bounds and policies.
pub struct CoreConfig {
    /// The hierarchy.
    pub control: ControlConfig,
    /// The order of the queue.
    pub policy: Box<dyn Policy>,
    /// Bounds of a batch.
    pub limits: Limits,
    /// Plans that may be outstanding: 1, or 2 to form the next while one runs.
    pub outstanding_plans: usize,
    /// Requests in the queue; one more is refused.
    pub max_waiting: usize,
    /// How long a request waits for its prefetch before it goes on with what is there.
    pub prefetch_policy: Box<dyn PrefetchPolicy>,
    /// The part of the tier that prefetches land in which they may fill together for requests that wait, 0 to 1.
    pub prefetch_share: f64,
    /// What is known of the hardware before anything is measured.
    pub costs: CostPrior,
    /// Load what the host holds even where computing it is predicted to be quicker.
    pub always_loads: bool,
    /// The part of the device that early loads may take for requests that wait, 0 to 1.
    pub early_share: f64,
    /// How many times what computing its missing part would take a follower waits for news of its owner.
    pub deferral_factor: f64,
}
