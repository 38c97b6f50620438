//! What a policy sees and what it answers.

use strata_types::{RequestId, Time};

/// Where the tokens of a waiting prompt are now. The five sum to the prompt.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Need {
    /// On the device: free.
    pub device: u32,
    /// In host memory: a load.
    pub host: u32,
    /// On disk: a prefetch and a load.
    pub disk: u32,
    /// Owned by another request that computes or will compute them.
    pub transient: u32,
    /// Nowhere: to be computed.
    pub compute: u32,
}

/// A request in the queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Waiting {
    /// The request.
    pub id: RequestId,
    /// When it was submitted.
    pub arrived: Time,
    /// Higher goes first.
    pub priority: i32,
    /// Where its tokens are.
    pub need: Need,
    /// Device pages it has to be given before its prefill can end.
    pub pages: u32,
    /// Held back until its prefetch ends; not a candidate, not even for the head.
    pub held: bool,
}

/// A request whose prompt is not fully planned yet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Prefilling {
    /// The request.
    pub id: RequestId,
    /// Prompt tokens left to plan.
    pub remaining: u32,
}

/// Fixed bounds of a batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Tokens of one prefill batch.
    pub batch_tokens: u32,
    /// Requests that hold device pages at a time.
    pub max_running: u32,
}

/// Everything that a decision depends on.
#[derive(Clone, Copy, Debug)]
pub struct View<'a> {
    /// Now.
    pub now: Time,
    /// The front of the queue, in order of priority, then arrival; requests that were put back have their old place.
    pub waiting: &'a [Waiting],
    /// Admitted requests with prompt left to compute, in order of admission.
    pub prefilling: &'a [Prefilling],
    /// Requests whose next token can be computed now.
    pub decodable: &'a [RequestId],
    /// Requests that hold device pages, the above included.
    pub running: u32,
    /// Device pages that are free or can be evicted.
    pub available_pages: u32,
    /// The bounds.
    pub limits: Limits,
}

/// A part of an admitted request's prompt to compute.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Chunk {
    /// The request.
    pub id: RequestId,
    /// At most this many tokens.
    pub tokens: u32,
}

/// A waiting request to give pages to, and the budget of its first chunk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Admission {
    /// The request.
    pub id: RequestId,
    /// At most this many tokens in its first chunk.
    pub tokens: u32,
}

/// The next batch.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Decision {
    /// Compute parts of prompts: of running requests first, then of newly admitted ones.
    Prefill {
        /// Parts of requests that hold pages already.
        chunks: Vec<Chunk>,
        /// Requests to admit, in order; the first that does not fit ends the list.
        admissions: Vec<Admission>,
    },
    /// Compute one token of each of these.
    Decode(Vec<RequestId>),
    /// Nothing can be done until something changes.
    Idle,
}
