//! What Core is made with.

use std::time::Duration;
use strata_control::ControlConfig;
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
    pub prefetch_timeout: Duration,
}
