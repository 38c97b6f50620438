//! What loading and computing cost, in seconds, read off the cost model once for a decision. Plain arithmetic: the
//! inner loop of a decision asks ten thousand times. What was neither measured nor given has no price.

use crate::cost::{CostModel, LinkCost, StepCost, StepShape};
use strata_types::TransferKind;

/// Seconds that a load of tokens costs.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LoadPrice {
    /// Seconds per load.
    pub latency: f64,
    /// Seconds per token.
    pub per_token: f64,
}

impl LoadPrice {
    /// What the model knows now.
    pub fn of(model: &CostModel, bytes_per_token: u64) -> Option<LoadPrice> {
        let per_token = |cost: LinkCost| LoadPrice {
            latency: cost.latency,
            per_token: cost.per_byte * bytes_per_token as f64,
        };
        model.link_cost(TransferKind::Load).map(per_token)
    }

    /// Seconds that a load of so many tokens takes.
    pub fn seconds(&self, tokens: f64) -> f64 {
        self.latency + self.per_token * tokens
    }

    /// Tokens that have come so many seconds after a load began, if it goes as predicted.
    pub fn tokens_within(&self, seconds: f64) -> u32 {
        // What costs nothing is there at once; the cast saturates.
        ((seconds - self.latency).max(0.0) / self.per_token.max(f64::MIN_POSITIVE)) as u32
    }
}

/// The prices that a decision reckons with.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Prices {
    /// Host to device.
    pub load: Option<LoadPrice>,
    /// A prefill step.
    pub prefill: Option<StepCost>,
    /// Seconds of one decode step of those who run.
    pub decode_step: Option<f64>,
    /// Seconds for which a load that begins now is hidden before a plan that is formed now can begin: what the plans
    /// before it still take, less what the link still carries for them.
    pub head_start: f64,
}

impl Prices {
    /// What the model knows now. `decode` is the decode step of those who run.
    pub fn of(model: &CostModel, bytes_per_token: u64, decode: &StepShape) -> Prices {
        Prices {
            load: LoadPrice::of(model, bytes_per_token),
            prefill: model.prefill_cost(),
            decode_step: model.predict_step(decode).map(|span| span.as_secs_f64()),
            head_start: 0.0,
        }
    }

    /// Seconds until so many tokens are loaded.
    pub fn load_seconds(&self, tokens: f64) -> Option<f64> {
        let price = self.load?;
        Some(if tokens == 0.0 { 0.0 } else { price.seconds(tokens) })
    }
}

/// What a batch, or one request's part of it, loads and computes. Whole numbers kept as they are reckoned with.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Work {
    /// Tokens to load.
    pub load: f64,
    /// Tokens to compute.
    pub compute: f64,
    /// Pairs of a computed token and one that it attends to.
    pub pairs: f64,
}

impl Work {
    /// Computing `tokens` after `context` tokens, and loading.
    #[inline]
    pub fn new(load: u32, tokens: u32, context: u32) -> Work {
        let count = f64::from(tokens);
        let pairs = count * (f64::from(context) + (count + 1.0) / 2.0);
        Work { load: f64::from(load), compute: count, pairs }
    }

    /// Both together.
    #[inline]
    pub fn plus(self, other: Work) -> Work {
        Work {
            load: self.load + other.load,
            compute: self.compute + other.compute,
            pairs: self.pairs + other.pairs,
        }
    }
}
