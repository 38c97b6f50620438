//! Why a request waits: told by the very decision that lets it wait. A recorder that records nothing costs nothing.

use crate::View;
use std::collections::HashMap;
use std::fmt;
use std::time::Duration;
use strata_types::RequestId;

/// What a decision does with a waiting request, and why.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Why {
    /// It goes now.
    Next {
        /// Tokens of its first chunk.
        tokens: u32,
    },
    /// It is given its pages and loads while others decode.
    Loads {
        /// Tokens to load.
        tokens: u32,
    },
    /// Its prefetch has not ended.
    Held {
        /// Tokens on disk.
        tokens: u32,
    },
    /// Another request computes, or will compute, what it needs.
    Deferred {
        /// The first of those on its path.
        owner: Option<RequestId>,
        /// Transient tokens that it needs.
        tokens: u32,
        /// In how long it may go on its own.
        left: Duration,
    },
    /// Its owner is overdue, and another follower takes its place in this round.
    TakenOver {
        /// The overdue owner.
        owner: RequestId,
    },
    /// It would make the batch loading-bound.
    SetAside {
        /// Tokens that the batch would load with it.
        load: u64,
        /// Tokens that the batch would compute with it.
        compute: u64,
    },
    /// The device has no room for it.
    NoRoom {
        /// Pages that it needs, one for each runner to grow into included.
        pages: u32,
        /// Pages that there are.
        available: u32,
    },
    /// One that goes before it has no room.
    Behind {
        /// The one before it.
        id: RequestId,
    },
    /// The batch has its tokens.
    BatchFull {
        /// Tokens of the batch, cut for running streams' sake where that is asked for.
        tokens: u32,
    },
    /// As many requests run as may.
    RunningFull {
        /// The limit.
        limit: u32,
    },
    /// Running streams have waited for as long as they may.
    DecodeFirst,
    /// The ranking does not name it now.
    LeftOut,
}

impl Why {
    /// The reason without its numbers, as one of a few words that never change: for counting.
    pub fn kind(&self) -> &'static str {
        match self {
            Why::Next { .. } => "next",
            Why::Loads { .. } => "loads",
            Why::Held { .. } => "held",
            Why::Deferred { .. } => "deferred",
            Why::TakenOver { .. } => "taken_over",
            Why::SetAside { .. } => "set_aside",
            Why::NoRoom { .. } => "no_room",
            Why::Behind { .. } => "behind",
            Why::BatchFull { .. } => "batch_full",
            Why::RunningFull { .. } => "running_full",
            Why::DecodeFirst => "decode_first",
            Why::LeftOut => "left_out",
        }
    }
}

impl fmt::Display for Why {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Why::Next { tokens } => write!(f, "goes now: {tokens} tokens in the batch being formed"),
            Why::Loads { tokens } => {
                write!(f, "its load of {tokens} tokens starts now while running streams decode")
            }
            Why::Held { tokens } => {
                write!(f, "held back until its prefetch ends: {tokens} tokens are still on disk")
            }
            Why::Deferred { owner, tokens, left } => {
                match owner {
                    Some(owner) => write!(f, "deferred: request {owner} computes {tokens} of its tokens")?,
                    None => write!(f, "deferred: another request computes {tokens} of its tokens")?,
                }
                write!(f, "; it goes on its own in {} ms", left.as_millis())
            }
            Why::TakenOver { owner } => write!(
                f,
                "deferred: request {owner} is overdue with tokens that it needs, and another that needs them too \
                 computes them first"
            ),
            Why::SetAside { load, compute } => write!(
                f,
                "set aside: with it the batch would load {load} tokens and compute {compute}, too few to hide the \
                 load behind"
            ),
            Why::NoRoom { pages, available } => {
                write!(f, "no room: it takes {pages} device pages, {available} are available")
            }
            Why::Behind { id } => write!(f, "behind request {id}, for which there is no room"),
            Why::BatchFull { tokens } => write!(f, "the batch is full: {tokens} tokens go before it"),
            Why::RunningFull { limit } => {
                write!(f, "{limit} requests run already, as many as may (--max-running)")
            }
            Why::DecodeFirst => write!(
                f,
                "running streams go first: they have waited for as long as they may (--max-decode-stall-ms)"
            ),
            Why::LeftOut => write!(f, "left out by the order that is being tried"),
        }
    }
}

/// Takes down what a decision does with whom.
pub(crate) trait Recorder {
    fn note(&mut self, id: RequestId, why: impl FnOnce() -> Why);
}

/// Takes nothing down.
pub(crate) struct Silent;

impl Recorder for Silent {
    #[inline(always)]
    fn note(&mut self, _: RequestId, _: impl FnOnce() -> Why) {}
}

/// The last that was said of each.
#[derive(Default)]
pub(crate) struct Reasons(pub HashMap<RequestId, Why>);

impl Recorder for Reasons {
    fn note(&mut self, id: RequestId, why: impl FnOnce() -> Why) {
        self.0.insert(id, why());
    }
}

impl Reasons {
    /// Everyone who waits, in order, by a decision that answers what is said of all whom it does not look at.
    pub fn of(view: &View<'_>, decide: impl FnOnce(&mut Reasons) -> Why) -> Vec<(RequestId, Why)> {
        let mut told = Reasons::default();
        let rest = decide(&mut told);
        view.waiting.iter().map(|waiting| (waiting.id, told.0.remove(&waiting.id).unwrap_or(rest))).collect()
    }
}
