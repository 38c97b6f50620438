//! How long running streams may wait for prefill. While something decodes, a prefill step is cut so that it and the
//! decode step after it end within the bound; where not even the shortest chunk does, a decode step goes before it.
//! A chunk is never cut below [`SHORTEST_CHUNK`], and one follows each decode step, so that prompts get on too.

use crate::cost::StepCost;
use crate::View;

/// Tokens below which a chunk is not worth its step.
pub(crate) const SHORTEST_CHUNK: u32 = 16;

/// What the current prefill step may still cost.
#[derive(Clone, Copy, Debug)]
pub(crate) struct StallBound {
    /// Seconds left and what a step costs; none where nothing is bounded or nothing is known.
    left: Option<(f64, StepCost)>,
    /// Seconds since the last decode step.
    gap: f64,
    overdrawn: bool,
    begun: bool,
}

impl StallBound {
    pub fn of(view: &View<'_>) -> StallBound {
        let gap = view.decode_gap.as_secs_f64();
        let mut bound = StallBound { left: None, gap, overdrawn: false, begun: false };
        let Some(most) = view.limits.max_decode_stall.filter(|_| !view.decodable.is_empty()) else {
            return bound;
        };
        let most = most.as_secs_f64();
        match view.prices.prefill {
            Some(price) => {
                let decode = view.prices.decode_step.unwrap_or(0.0);
                bound.left = Some((most - gap - decode - price.per_step, price));
            }
            // Nothing to reckon with: take turns before half of the time is gone.
            None => bound.overdrawn = gap * 2.0 >= most,
        }
        bound
    }

    /// The most of these tokens that may be computed after this context; 0 if a chunk is not worth it any more.
    #[inline]
    pub fn cut(&self, tokens: u32, context: u32) -> u32 {
        let Some((left, price)) = self.left else { return tokens };
        if seconds(&price, tokens, context) <= left {
            return tokens;
        }
        let (linear, square) = slopes(&price, context);
        let root = (linear * linear + 4.0 * square * left.max(0.0)).sqrt();
        // The stable form of the quadratic's solution; the cast saturates, also where nothing costs anything.
        let most = (2.0 * left.max(0.0) / (linear + root)) as u32;
        let shortest = SHORTEST_CHUNK.min(tokens);
        match (most >= shortest, self.begun) {
            (true, _) => most.min(tokens),
            (false, false) => shortest,
            (false, true) => 0,
        }
    }

    /// The same bound with half of the time, never overdrawn.
    pub fn half(&self) -> StallBound {
        let left = self.left.map(|(left, price)| (left / 2.0, price));
        StallBound { left, begun: true, ..*self }
    }

    /// A chunk has joined the step.
    pub fn spend(&mut self, tokens: u32, context: u32) {
        if let Some((left, price)) = &mut self.left {
            let cost = seconds(price, tokens, context);
            *left -= cost;
            // Only the first chunk can overdraw. With hardly any gap there was no prefill since the last decode
            // step: then it is prefill's turn.
            let prefilled_since = self.gap >= (cost + price.per_step) / 2.0;
            self.overdrawn |= !self.begun && *left < 0.0 && prefilled_since;
        }
        self.begun = true;
    }

    /// Whether a decode step has to come first.
    pub fn decode_first(&self) -> bool {
        self.overdrawn
    }
}

fn slopes(price: &StepCost, context: u32) -> (f64, f64) {
    (price.per_token + price.per_pair * (f64::from(context) + 0.5), price.per_pair / 2.0)
}

fn seconds(price: &StepCost, tokens: u32, context: u32) -> f64 {
    let (linear, square) = slopes(price, context);
    let count = f64::from(tokens);
    (linear + square * count) * count
}
