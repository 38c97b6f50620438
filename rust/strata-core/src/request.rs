//! A request from arrival to release.

use crate::prefetch::Prefetching;
use std::ops::Range;
use std::sync::Arc;
use strata_radix::Pin;
use strata_types::{LoadTicket, Namespace, PageId, RequestId, TicketState, Time, Token, TransferId};

/// A request as it arrives.
#[derive(Clone, Debug)]
pub struct NewRequest {
    /// Its number, never used before.
    pub id: RequestId,
    /// Whose pages it may match.
    pub namespace: Namespace,
    /// The prompt, at least one token.
    pub prompt: Vec<Token>,
    /// Tokens to generate at most, at least one.
    pub max_new_tokens: usize,
    /// Higher goes first.
    pub priority: i32,
    /// Whether what it computes may be kept for others and written to lower tiers. What is cached is read either way.
    pub keep: bool,
}

/// Where a prompt's tokens came from. The four sum to the prompt.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Sources {
    /// Found on the device.
    pub device: usize,
    /// Loaded from host memory.
    pub host: usize,
    /// Read from disk and loaded.
    pub disk: usize,
    /// Computed.
    pub computed: usize,
}

/// What an admission found.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Admission {
    /// Where the prompt's tokens came from.
    pub sources: Sources,
    /// How often the request gave its pages up for older ones before.
    pub preemptions: u32,
}

/// What a running request holds.
#[derive(Debug)]
pub(crate) struct Running {
    pub pin: Pin,
    /// The page table.
    pub pages: Vec<PageId>,
    /// Pages of the table that the tree knows as this sequence, from the first.
    pub published: u32,
    /// Pages of the table below `published` that are this request's own: the tree holds other copies.
    pub duplicates: Vec<PageId>,
    pub loads: Vec<TransferId>,
    pub tickets: Vec<Arc<LoadTicket>>,
    /// Pages that its loads had to bring when it was admitted.
    pub pages_to_load: u32,
    /// Positions whose KV some plan writes, or that were hit.
    pub planned: usize,
    /// Positions whose KV is there.
    pub computed: usize,
    /// Samples that outstanding plans will bring.
    pub samples_due: usize,
    /// Outstanding plans with a row of this request.
    pub outstanding: usize,
    /// Told with the first row.
    pub admission: Option<Admission>,
    /// When it was admitted.
    pub since: Time,
    /// When others last had news of it: it was admitted, or published a chunk.
    pub progress: Time,
}

/// Why a request leaves the running set once no plan holds it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Ending {
    Finished,
    Aborted,
    /// Back to the front of the queue: a load failed, or a step did.
    Requeue,
}

#[derive(Debug)]
pub(crate) enum Phase {
    Waiting,
    Running(Box<Running>),
}

#[derive(Debug)]
pub(crate) struct Request {
    pub id: RequestId,
    pub namespace: Namespace,
    pub priority: i32,
    pub arrived: Time,
    /// The prompt, then what was generated.
    pub tokens: Vec<Token>,
    pub prompt: usize,
    pub max_new_tokens: usize,
    pub phase: Phase,
    pub keep: bool,
    pub prefetch: Option<Prefetching>,
    /// Pages that were on disk alone when it arrived.
    pub from_disk: Range<u32>,
    /// Pages that were loaded for it while it waited.
    pub loaded_early: Vec<Range<u32>>,
    pub ending: Option<Ending>,
    /// A load failed under it: the next admission computes instead.
    pub loads_failed: bool,
    /// Steps in a row that went wrong with it alone on board.
    pub step_failures: u32,
    /// A step went wrong with others on board: it runs alone until it has brought a token, so that whoever is at
    /// fault is found and nobody else pays.
    pub alone: bool,
    /// Prefetches that were started for it, and whether one was cut: then it goes on with what is there.
    pub prefetches: u32,
    pub prefetch_cut: bool,
    pub sources_told: bool,
    pub preemptions: u32,
    /// Since when it has waited for what others compute.
    pub follows_since: Option<Time>,
}

impl Request {
    pub fn new(new: NewRequest, now: Time) -> Request {
        Request {
            id: new.id,
            namespace: new.namespace,
            priority: new.priority,
            arrived: now,
            prompt: new.prompt.len(),
            tokens: new.prompt,
            max_new_tokens: new.max_new_tokens,
            phase: Phase::Waiting,
            keep: new.keep,
            prefetch: None,
            from_disk: 0..0,
            loaded_early: Vec::new(),
            ending: None,
            loads_failed: false,
            step_failures: 0,
            alone: false,
            prefetches: 0,
            prefetch_cut: false,
            sources_told: false,
            preemptions: 0,
            follows_since: None,
        }
    }

    /// Until when its prefetch holds it back; none if nothing does.
    pub fn held_until(&self) -> Option<Time> {
        self.prefetch.as_ref().filter(|prefetch| !prefetch.waits.is_empty())?.until
    }

    pub fn running(&self) -> Option<&Running> {
        match &self.phase {
            Phase::Running(running) => Some(running),
            Phase::Waiting => None,
        }
    }

    pub fn running_mut(&mut self) -> Option<&mut Running> {
        match &mut self.phase {
            Phase::Running(running) => Some(running),
            Phase::Waiting => None,
        }
    }

    /// Whether it reads pages that are still on their way.
    pub fn is_loading(&self) -> bool {
        self.running().is_some_and(|running| running.tickets.iter().any(|ticket| !ticket.is_complete()))
    }

    /// Whether a load under it has failed.
    pub fn load_has_failed(&self) -> bool {
        let failed = |ticket: &Arc<LoadTicket>| ticket.state() == TicketState::Failed;
        self.running().is_some_and(|running| running.tickets.iter().any(failed))
    }

    /// Tokens known or due from outstanding plans.
    pub fn expected(&self) -> usize {
        self.tokens.len() + self.running().map_or(0, |running| running.samples_due)
    }

    /// Prompt tokens that no plan computes yet; generated tokens count after a preemption.
    pub fn prefill_left(&self) -> usize {
        self.running().map_or(0, |running| self.tokens.len().saturating_sub(running.planned))
    }

    /// Whether one more token can be planned, in place of `prefill_left`'s chunks.
    pub fn decodable(&self) -> bool {
        let Some(running) = self.running() else { return false };
        self.ending.is_none()
            && running.planned + 1 == self.expected()
            && running.planned >= self.prompt
            && self.expected() - self.prompt < self.max_new_tokens
    }

    /// Whether prompt is left to plan.
    pub fn prefilling(&self) -> bool {
        self.ending.is_none() && self.running().is_some() && self.prefill_left() > 0 && !self.decodable()
    }
}
