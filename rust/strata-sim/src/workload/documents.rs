//! Questions about long documents: each context is asked about many times, in an order that sets how many others come
//! between.

use super::{poisson, segment_id, RequestSpec, Segment};
use crate::random::{Law, Random};
use serde::{Deserialize, Serialize};

/// The order of the questions.
#[derive(Clone, Copy, Debug, Deserialize, Serialize, PartialEq, Eq)]
#[serde(rename_all = "snake_case")]
pub enum Order {
    /// By chance.
    Shuffle,
    /// All questions about a context one after the other.
    Minimum,
    /// A question about each context in turn.
    Maximum,
}

/// Long documents and questions.
#[derive(Clone, Debug, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct Documents {
    /// Documents.
    pub contexts: usize,
    /// Questions about all of them together.
    pub queries: usize,
    /// Tokens of a document.
    pub context_tokens: Law,
    /// Tokens of a question.
    pub question_tokens: Law,
    /// Tokens of an answer.
    pub output_tokens: Law,
    /// The order.
    pub order: Order,
    /// Requests per second; all at once if none is given.
    #[serde(default)]
    pub rate: Option<f64>,
}

impl Documents {
    /// The requests.
    pub fn requests(&self, seed: u64) -> Vec<RequestSpec> {
        let contexts = self.contexts.max(1);
        let lengths = self.context_tokens.counts(&mut Random::new(seed, 1), contexts);
        let questions = self.question_tokens.counts(&mut Random::new(seed, 2), self.queries);
        let outputs = self.output_tokens.counts(&mut Random::new(seed, 3), self.queries);
        let arrivals = poisson(&mut Random::new(seed, 4), self.rate.unwrap_or(f64::INFINITY), self.queries);
        let mut about: Vec<usize> = (0..self.queries).map(|query| query % contexts).collect();
        match self.order {
            Order::Shuffle => Random::new(seed, 5).shuffle(&mut about),
            Order::Minimum => about.sort_unstable(),
            Order::Maximum => {}
        }
        let request = |query: usize| RequestSpec {
            arrival_s: arrivals[query],
            after: None,
            prompt: vec![
                Segment { id: segment_id("document", about[query], 0), tokens: lengths[about[query]] },
                Segment { id: segment_id("question", query, 0), tokens: questions[query] },
            ],
            output: outputs[query],
            answer: segment_id("answer", query, 0),
        };
        (0..self.queries).map(request).collect()
    }
}
