//! Requests as data: when each is submitted, what its prompt is made of, how long its answer is. Every generator is a
//! pure function of its parameters and a seed.

mod agents;
mod conversations;
mod documents;
mod explicit;
mod trace;

pub use agents::{shared_within, ToolAgents};
pub use conversations::Conversations;
pub use documents::{Documents, Order};
pub use explicit::Explicit;
pub use trace::{Trace, TraceRecord};

use crate::error::SimulationError;
use crate::random::Random;
use serde::{Deserialize, Serialize};
use strata_types::Token;

/// A stretch of tokens. Equal numbers are equal tokens, so two prompts share what they begin with alike.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, Serialize)]
pub struct Segment {
    /// Which tokens.
    pub id: u64,
    /// How many of them.
    pub tokens: usize,
}

/// A request that is submitted once another is answered.
#[derive(Clone, Copy, Debug, PartialEq, Deserialize, Serialize)]
pub struct After {
    /// The other's place in the list.
    pub request: usize,
    /// Seconds between.
    pub think_s: f64,
}

/// One request.
#[derive(Clone, Debug, PartialEq, Deserialize, Serialize)]
pub struct RequestSpec {
    /// Seconds from the start, not before which it is submitted.
    pub arrival_s: f64,
    /// Whom it follows.
    #[serde(default)]
    pub after: Option<After>,
    /// The prompt.
    pub prompt: Vec<Segment>,
    /// Tokens of the answer.
    pub output: usize,
    /// The segment whose tokens the answer is made of.
    pub answer: u64,
}

impl RequestSpec {
    /// Tokens of the prompt.
    pub fn prompt_tokens(&self) -> usize {
        self.prompt.iter().map(|segment| segment.tokens).sum()
    }

    /// The prompt's tokens.
    pub fn tokens(&self) -> Vec<Token> {
        let mut tokens = Vec::with_capacity(self.prompt_tokens());
        for segment in &self.prompt {
            let first = first_token(segment.id);
            tokens.extend((0..segment.tokens).map(|place| token_after(first, place)));
        }
        tokens
    }

    /// The token at this place of the answer.
    pub fn answer_token(&self, place: usize) -> Token {
        token_after(first_token(self.answer), place)
    }
}

/// Spreads a number over all bits.
fn mix(number: u64) -> u64 {
    let mut mixed = number.wrapping_add(0x9e37_79b9_7f4a_7c15);
    mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    mixed ^ (mixed >> 31)
}

/// A segment's number from what it is.
pub(crate) fn segment_id(kind: &str, first: usize, second: usize) -> u64 {
    let named = kind.bytes().fold(0u64, |hash, byte| mix(hash ^ u64::from(byte)));
    mix(mix(named ^ first as u64) ^ second as u64)
}

fn first_token(segment: u64) -> u32 {
    mix(segment) as u32
}

fn token_after(first: u32, place: usize) -> Token {
    first.wrapping_add((place as u32).wrapping_mul(0x9e37_79b1))
}

/// A workload by its kind.
#[derive(Clone, Debug, Deserialize, Serialize)]
#[serde(tag = "kind", rename_all = "snake_case")]
pub enum Workload {
    /// Questions about long documents.
    Documents(Documents),
    /// Rounds of conversations.
    Conversations(Conversations),
    /// A recorded trace of hashed blocks.
    Trace(Trace),
    /// Agents that call tools.
    ToolAgents(ToolAgents),
    /// Requests given one by one.
    Explicit(Explicit),
}

impl Workload {
    /// The requests.
    pub fn requests(&self, seed: u64) -> Result<Vec<RequestSpec>, SimulationError> {
        let requests = match self {
            Workload::Documents(documents) => documents.requests(seed),
            Workload::Conversations(conversations) => conversations.requests(seed),
            Workload::Trace(trace) => trace.requests()?,
            Workload::ToolAgents(agents) => agents.requests(seed),
            Workload::Explicit(explicit) => explicit.requests(seed),
        };
        for (index, request) in requests.iter().enumerate() {
            if request.after.is_some_and(|after| after.request >= index) {
                return Err(SimulationError::config(format!(
                    "request {index} follows one that is not before it"
                )));
            }
            if request.prompt_tokens() == 0
                || request.output == 0
                || request.arrival_s.is_nan()
                || request.arrival_s < 0.0
            {
                return Err(SimulationError::config(format!(
                    "request {index} needs a prompt, an answer and an arrival of 0 or more seconds"
                )));
            }
        }
        Ok(requests)
    }
}

/// Arrival times of a Poisson process; all at once where the rate is not finite.
pub(crate) fn poisson(random: &mut Random, rate: f64, count: usize) -> Vec<f64> {
    let mut now = 0.0;
    (0..count)
        .map(|_| {
            now += if rate.is_finite() && rate > 0.0 { random.exponential(1.0 / rate) } else { 0.0 };
            now
        })
        .collect()
}
