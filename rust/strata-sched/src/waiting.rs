//! A request that waits, as policies see it. Core keeps it current by tree events; nothing here looks anything up.

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

impl Need {
    /// Tokens that an admission now computes: a load brings no compute, but the last token is always computed.
    pub fn to_compute(&self) -> u32 {
        self.compute.saturating_add(self.transient).saturating_add(self.disk).max(1)
    }

    /// Tokens that precede those.
    pub fn context(&self) -> u32 {
        self.device.saturating_add(self.host)
    }
}

/// A run of a request's path that only the host holds. Two requests share its load exactly where they share the node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LoadRun {
    /// The tree's name of it.
    pub node: u64,
    /// Its tokens.
    pub tokens: u32,
}

/// What tree events change about a waiting request.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Standing {
    /// Where its tokens are.
    pub need: Need,
    /// Device pages it has to be given before its prefill can end.
    pub pages: u32,
    /// What only the host holds of its path, from the first run to the last. Two requests that share any share the
    /// first.
    pub loads: Box<[LoadRun]>,
    /// The first other owner on its path.
    pub follows: Option<RequestId>,
    /// Until then it may be deferred in favour of the owner; afterwards it takes the run over. Never deferred without.
    pub defer_until: Option<Time>,
}

/// A request in the queue.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Waiting {
    /// The request.
    pub id: RequestId,
    /// When it was submitted.
    pub arrived: Time,
    /// Its own priority or a higher one that it inherited from a follower. Higher goes first.
    pub priority: i32,
    /// Held back until its prefetch ends; not a candidate, not even for the head.
    pub held: bool,
    /// Its load has begun while it waits.
    pub early: bool,
    /// Where its tokens are and whom it follows.
    pub standing: Standing,
}

impl Waiting {
    /// A request that has just come in and is held back by nothing.
    pub fn new(id: RequestId, arrived: Time, priority: i32, standing: Standing) -> Waiting {
        Waiting { id, arrived, priority, held: false, early: false, standing }
    }

    /// Tokens that it needs and only the host holds.
    pub fn load_tokens(&self) -> u32 {
        self.standing.loads.iter().fold(0, |sum, run| sum.saturating_add(run.tokens))
    }
}
