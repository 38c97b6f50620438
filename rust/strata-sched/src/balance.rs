//! When a batch is loading-bound: when its load outlasts what its compute can hide. Every balance is a linear scale,
//! fixed for a decision, so that weighing a candidate takes a handful of multiplications.

use crate::{Prices, Work};

/// What hides load and what has to be hidden, in any one unit: seconds, or loaded tokens. The default hides
/// everything.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Scale {
    /// What a step hides, whatever it computes.
    pub per_step: f64,
    /// What a computed token hides.
    pub per_token: f64,
    /// What a pair of a computed token and one that it attends to hides.
    pub per_pair: f64,
    /// What has to be hidden of any load, whatever its size.
    pub latency: f64,
    /// What has to be hidden of a loaded token.
    pub per_loaded: f64,
    /// Whether those who bring more compute than load may join a batch that is loading-bound anyway.
    pub takes_helpers: bool,
    /// What a request saves that joins a batch instead of having a step of its own.
    pub own_step: f64,
    /// What a decode step of those who run hides, and what whoever then goes on loading waits for.
    pub decode_step: f64,
}

impl Scale {
    /// What is left to hide further load behind; negative: some load sticks out.
    #[inline]
    fn margin(&self, work: &Work) -> f64 {
        let step = if work.compute > 0.0 { self.per_step } else { 0.0 };
        let latency = if work.load > 0.0 { self.latency } else { 0.0 };
        step - latency + self.brings(work)
    }

    #[inline]
    fn brings(&self, work: &Work) -> f64 {
        self.per_token * work.compute + self.per_pair * work.pairs - self.per_loaded * work.load
    }

    /// Whether the load of this batch, or of this part of one, outlasts its compute.
    #[inline]
    pub fn is_loading_bound(&self, work: &Work) -> bool {
        self.margin(work) < 0.0
    }

    /// Whether streams had better decode while this batch loads: where nobody `queues` behind it, only if the device
    /// would otherwise stand still for longer than the batch then waits.
    #[inline]
    pub fn is_bubble(&self, work: &Work, queues: bool) -> bool {
        self.margin(work) < if queues { 0.0 } else { -self.decode_step }
    }

    /// Whether a load takes less than what its request saves by joining a batch: else all of the batch had better not
    /// wait for it.
    #[inline]
    pub fn saves_a_step(&self, part: &Work) -> bool {
        let latency = if part.load > 0.0 { self.latency } else { 0.0 };
        latency + self.per_loaded * part.load <= self.own_step
    }

    /// Whether a request may join a batch before the rest.
    #[inline]
    pub fn welcomes(&self, batch: &Work, part: &Work) -> bool {
        self.margin(&batch.plus(*part)) >= 0.0 || (self.takes_helpers && self.brings(part) >= 0.0)
    }
}

/// What a request has to bring to one batch, as it is, to join it before the rest: [`Scale::welcomes`] with the batch's
/// side reckoned once for all who ask. The batch computes something.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Bar {
    scale: Scale,
    /// For those who load nothing.
    without_load: f64,
    /// For those who load.
    with_load: f64,
}

impl Bar {
    pub fn of(scale: Scale, batch: &Work) -> Bar {
        let missing = -scale.per_step - scale.brings(batch);
        // Whoever helps is welcome however much is missing.
        let bar =
            |latency: f64| if scale.takes_helpers { (missing + latency).min(0.0) } else { missing + latency };
        let latency = if batch.load > 0.0 { scale.latency } else { 0.0 };
        Bar { scale, without_load: bar(latency), with_load: bar(scale.latency) }
    }

    #[inline]
    pub fn is_reached(&self, part: &Work) -> bool {
        let bar = if part.load > 0.0 { self.with_load } else { self.without_load };
        self.scale.brings(part) >= bar
    }
}

/// The weighing of load against compute.
pub trait Balance: Send {
    /// The name of the policy that weighs like this.
    fn name(&self) -> &'static str;

    /// The scale at these prices.
    fn scale(&self, prices: &Prices) -> Scale;

    /// Whether a request that shares so many tokens of its load with a batch, and adds so many, goes along with it.
    fn is_bundle(&self, shared: u32, _added: f64) -> bool {
        shared > 0
    }

    /// Whether the load that is worth most goes before the head.
    fn goes_by_worth(&self) -> bool {
        false
    }

    /// Whether loads may begin while their requests wait.
    fn loads_early(&self) -> bool {
        false
    }

    /// Whether those who need next to no room pass one that lacks it.
    fn passes(&self) -> bool {
        false
    }
}

/// The paper's: a fixed ratio of loaded to computed tokens.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Ratio {
    /// Tokens that load while one is computed.
    pub loaded_per_computed: f64,
}

impl Default for Ratio {
    fn default() -> Ratio {
        Ratio { loaded_per_computed: 100.0 }
    }
}

impl Balance for Ratio {
    fn name(&self) -> &'static str {
        "static"
    }

    fn scale(&self, _: &Prices) -> Scale {
        // The paper fills up the batch whatever it loads.
        let own_step = f64::INFINITY;
        Scale { per_token: self.loaded_per_computed, per_loaded: 1.0, own_step, ..Scale::default() }
    }
}

/// Predicted time against predicted time. Without a prediction nothing is loading-bound.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Predicted;

impl Balance for Predicted {
    fn name(&self) -> &'static str {
        "adaptive"
    }

    fn scale(&self, prices: &Prices) -> Scale {
        let (Some(load), Some(prefill)) = (prices.load, prices.prefill) else { return Scale::default() };
        Scale {
            per_step: prefill.per_step + prices.head_start,
            per_token: prefill.per_token,
            per_pair: prefill.per_pair,
            latency: load.latency,
            per_loaded: load.per_token,
            takes_helpers: true,
            own_step: prefill.per_step,
            decode_step: prices.decode_step.unwrap_or_default(),
        }
    }

    /// A request that shares no more than a system prompt with the batch is not bundled with it for that.
    fn is_bundle(&self, shared: u32, added: f64) -> bool {
        shared > 0 && f64::from(shared) >= added
    }

    fn goes_by_worth(&self) -> bool {
        true
    }

    fn loads_early(&self) -> bool {
        true
    }

    fn passes(&self) -> bool {
        true
    }
}
