//! What a policy sees and what it answers.

use crate::{Prices, Queue};
use std::time::Duration;
use strata_types::{RequestId, Time};

/// A request that holds pages and whose prompt is not fully planned yet.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Prefilling {
    /// The request.
    pub id: RequestId,
    /// Prompt tokens left to plan.
    pub remaining: u32,
    /// Tokens before the next chunk.
    pub context: u32,
    /// Tokens of its hit whose load is still under way.
    pub loading: u32,
    /// When it was admitted.
    pub since: Time,
}

/// Fixed bounds of a batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Tokens of one prefill batch.
    pub batch_tokens: u32,
    /// Requests that hold device pages at a time.
    pub max_running: u32,
    /// The longest predicted time between two tokens of a running stream. None: prefill goes first, however long.
    pub max_decode_stall: Option<Duration>,
}

/// Everything that a decision depends on.
#[derive(Clone, Copy, Debug)]
pub struct View<'a> {
    /// Now.
    pub now: Time,
    /// Who waits.
    pub waiting: &'a Queue,
    /// Admitted requests with prompt left to compute, in order of admission.
    pub prefilling: &'a [Prefilling],
    /// Requests whose next token can be computed now.
    pub decodable: &'a [RequestId],
    /// Requests that hold device pages, the above included.
    pub running: u32,
    /// Device pages that are free or can be evicted.
    pub available_pages: u32,
    /// Device pages that early loads may still take, of the available ones.
    pub early_pages: u32,
    /// Tokens of a page.
    pub page_size: u32,
    /// The predicted time that will have passed since the last decode step when this plan begins.
    pub decode_gap: Duration,
    /// What loading and computing cost.
    pub prices: Prices,
    /// The bounds.
    pub limits: Limits,
}

impl View<'_> {
    /// What the load of the request at this place is worth: those who wait for it, times the seconds that it has
    /// waited to the power of 1.5, for each token. The power of 1 makes the mean wait shorter, that of 2 the longest
    /// waits.
    pub(crate) fn worth(&self, place: usize) -> f64 {
        let slot = &self.waiting.slots()[place];
        let waited = self.now.since(slot.waiting.arrived).as_secs_f64();
        let served = slot.first_load.map_or(0, |node| self.waiting.count_sharers(node));
        f64::from(served) * waited * waited.sqrt() / f64::from(slot.load.max(1))
    }
}

/// A part of an admitted request's prompt to compute.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Chunk {
    /// The request.
    pub id: RequestId,
    /// At most this many tokens.
    pub tokens: u32,
}

/// A waiting request to give pages to, whose load starts now.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Admission {
    /// The request.
    pub id: RequestId,
    /// At most this many tokens in its first chunk, which belongs to this step. 0: no chunk yet, while it loads.
    pub tokens: u32,
}

/// What the model computes next.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Step {
    /// Parts of prompts: of these running requests, then of the admissions with tokens.
    Prefill(Vec<Chunk>),
    /// One token of each of these.
    Decode(Vec<RequestId>),
    /// Nothing, until something changes.
    Idle,
}

/// What this round did to requests that wait.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// Passed over since another computes what they need.
    pub deferred: u32,
    /// Passed over since they would have made the batch loading-bound. They may have gone after all, with the rest.
    pub set_aside: u32,
    /// Admitted before their turn since they had waited for too long.
    pub aged: u32,
    /// Admitted to compute what their owner did not.
    pub taken_over: u32,
}

/// The next batch.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Decision {
    /// Requests whose load starts while they wait, in order.
    pub early: Vec<RequestId>,
    /// Requests to admit, in order; the first that does not fit ends the list.
    pub admissions: Vec<Admission>,
    /// What the model computes.
    pub step: Step,
    /// For the counters.
    pub counts: Counts,
    /// When the first of those deferred now may go on its own.
    pub next_deadline: Option<Time>,
}
