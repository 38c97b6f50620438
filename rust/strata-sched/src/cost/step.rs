//! What computing a batch costs: `per_step + per_token * new tokens + per_pair * token pairs attended`. Steps in
//! which every row computes one token (decode: bound by memory) and all others (prefill: bound by arithmetic) are
//! fitted apart, so that a thousand decode steps neither bend nor displace what is known about prefill.

use super::fit::Fit;
use super::{seconds, Measured};
use std::time::Duration;

/// The size of one model step.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct StepShape {
    /// Tokens that the step computes.
    pub new_tokens: u64,
    /// Pairs of a new token and a token that it attends to, itself included.
    pub attended: u64,
    /// Requests in the batch.
    pub rows: u32,
}

impl StepShape {
    /// One request's part of a step: `new_tokens` after a context of `context_before` tokens.
    pub fn row(new_tokens: u64, context_before: u64) -> StepShape {
        let among_new = new_tokens.saturating_mul(new_tokens.saturating_add(1)) / 2;
        let attended = new_tokens.saturating_mul(context_before).saturating_add(among_new);
        StepShape { new_tokens, attended, rows: 1 }
    }

    /// Adds a row or another batch.
    pub fn add(&mut self, other: StepShape) {
        self.new_tokens = self.new_tokens.saturating_add(other.new_tokens);
        self.attended = self.attended.saturating_add(other.attended);
        self.rows = self.rows.saturating_add(other.rows);
    }

    fn is_decode(&self) -> bool {
        self.new_tokens <= u64::from(self.rows)
    }

    fn features(&self, steps: u64) -> [f64; 3] {
        [steps as f64, self.new_tokens as f64, self.attended as f64]
    }
}

/// Seconds that a step costs.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct StepCost {
    /// Seconds per step, whatever it computes.
    pub per_step: f64,
    /// Seconds per new token.
    pub per_token: f64,
    /// Seconds per pair of a new token and a token that it attends to.
    pub per_pair: f64,
}

impl StepCost {
    fn from_coefficients([per_step, per_token, per_pair]: [f64; 3]) -> StepCost {
        StepCost { per_step, per_token, per_pair }
    }

    fn duration(&self, steps: u64, shape: &StepShape) -> Duration {
        let [steps, tokens, pairs] = shape.features(steps);
        seconds(self.per_step * steps + self.per_token * tokens + self.per_pair * pairs)
    }
}

/// What steps cost until they differ enough to tell: a step as much as 32 tokens, since the weights are read once,
/// and attention over 16k tokens as much as the rest of a token.
const PREFILL_PROPORTIONS: [f64; 3] = [32.0, 1.0, 1.0 / 16_384.0];
/// A lone token reads its whole context's KV, which no other token of the step shares.
const DECODE_PROPORTIONS: [f64; 3] = [32.0, 1.0, 1.0 / 1024.0];

/// The cost of steps, learnt from measured ones.
#[derive(Clone, Debug)]
pub(super) struct StepModel {
    prefill: Fit<3>,
    decode: Fit<3>,
}

impl StepModel {
    pub(super) fn new(prefill: Option<StepCost>, decode: Option<StepCost>) -> StepModel {
        let shapes = |tokens, rows| {
            [0, 1024, 16_384].map(|context| {
                let mut shape = StepShape::row(tokens, context);
                (1..rows).for_each(|_| shape.add(StepShape::row(tokens, context)));
                shape.features(1)
            })
        };
        let start = |proportions, prior: Option<StepCost>, examples: [[f64; 3]; 3]| match prior {
            Some(cost) => {
                Fit::new(proportions).with_prior([cost.per_step, cost.per_token, cost.per_pair], &examples)
            }
            None => Fit::new(proportions),
        };
        StepModel {
            prefill: start(PREFILL_PROPORTIONS, prefill, shapes(512, 1)),
            decode: start(DECODE_PROPORTIONS, decode, shapes(1, 8)),
        }
    }

    pub(super) fn observe(&mut self, shape: &StepShape, busy: Duration) {
        if shape.new_tokens == 0 {
            return;
        }
        let fit = if shape.is_decode() { &mut self.decode } else { &mut self.prefill };
        fit.observe(shape.features(1), busy.as_secs_f64());
    }

    pub(super) fn predict(&self, shape: &StepShape) -> Option<Duration> {
        // Prefill says more about decode (the weights are read either way) than the other way round.
        let cost = match shape.is_decode() {
            true => self.decode.coefficients().or(self.prefill.coefficients()),
            false => self.prefill.coefficients(),
        };
        let steps = u64::from(shape.new_tokens > 0);
        cost.map(|cost| StepCost::from_coefficients(cost).duration(steps, shape))
    }

    pub(super) fn predict_prefill(
        &self,
        new_tokens: u64,
        context_before: u64,
        chunk: u64,
    ) -> Option<Duration> {
        // Pairs are the same however the prompt is cut, so chunks only add steps.
        let steps = match chunk {
            0 => u64::from(new_tokens > 0),
            _ => new_tokens.div_ceil(chunk),
        };
        self.prefill_cost().map(|cost| cost.duration(steps, &StepShape::row(new_tokens, context_before)))
    }

    pub(super) fn prefill_cost(&self) -> Option<StepCost> {
        self.prefill.coefficients().map(StepCost::from_coefficients)
    }

    pub(super) fn prefill(&self) -> Measured<StepCost> {
        Measured::of(&self.prefill, StepCost::from_coefficients)
    }

    pub(super) fn decode(&self) -> Measured<StepCost> {
        Measured::of(&self.decode, StepCost::from_coefficients)
    }
}
