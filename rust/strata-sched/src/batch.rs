//! The batch being formed: what it loads and computes so far, and what it has room for. A load that two of its
//! requests share counts once. Never exceeds its tokens, its pages or the number of runners. Prompts that run go
//! before those that wait; a policy may let short ones go beside them, in half of the batch at most.

use crate::balance::Bar;
use crate::bounds::StallBound;
use crate::glance::Glance;
use crate::queue::Slot;
use crate::why::Why;
use crate::{Admission, Chunk, View, Work};
use strata_types::{RequestId, Time};

/// One request's part of the batch.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Row {
    pub id: RequestId,
    /// Tokens of its chunk.
    pub tokens: u32,
    /// What its chunk waits for and computes; shared loads are waited for by everyone who shares them.
    pub own: Work,
    /// When it was admitted; none if it would be now.
    pub since: Option<Time>,
}

impl Row {
    pub fn chunk(&self) -> Chunk {
        Chunk { id: self.id, tokens: self.tokens }
    }

    pub fn admission(&self) -> Admission {
        Admission { id: self.id, tokens: self.tokens }
    }
}

/// What a waiting request would add.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Part {
    pub tokens: u32,
    /// Tokens of its load that the batch loads anyway.
    pub shared: u32,
    pub work: Work,
}

/// A share of a batch.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Share {
    tokens: u32,
    bound: StallBound,
}

/// The batch so far.
pub(crate) struct Batch<'a> {
    view: &'a View<'a>,
    /// Those who run and those to admit, each in order.
    pub rows: Vec<Row>,
    pub work: Work,
    pub bound: StallBound,
    nodes: Nodes,
    tokens_left: u32,
    pages_left: u32,
    running: u32,
}

impl<'a> Batch<'a> {
    /// An empty batch.
    pub fn new(view: &'a View<'a>) -> Batch<'a> {
        Batch {
            view,
            rows: Vec::new(),
            work: Work::default(),
            bound: StallBound::of(view),
            nodes: Nodes::default(),
            tokens_left: view.limits.batch_tokens,
            pages_left: view.available_pages,
            running: view.running,
        }
    }

    /// The prompts that run go on.
    pub fn go_on(&mut self) {
        for row in self.view.prefilling {
            let tokens = self.chunk(row.remaining, row.context);
            if tokens == 0 {
                break;
            }
            let own = Work::new(row.loading, tokens, row.context);
            self.join(Row { id: row.id, tokens, own, since: Some(row.since) }, own, row.context);
        }
    }

    /// What may go beside the prompts that run, asked before they go on: half of the batch where they outlast it, so
    /// that they get on at half their speed at least; nothing where they leave room anyway, or where half of the time
    /// that running streams allow is too little for a chunk.
    pub fn beside(&self) -> Option<Share> {
        let first = self.view.prefilling.first()?;
        let room = self.chunk(u32::MAX, first.context);
        let wanted = self.view.prefilling.iter().fold(0, |sum: u32, row| sum.saturating_add(row.remaining));
        let share = Share { tokens: self.tokens_left / 2, bound: self.bound.half() };
        let leaves_a_chunk = share.bound.cut(first.remaining.min(share.tokens), first.context) > 0;
        (wanted > room && leaves_a_chunk).then_some(share)
    }

    /// Admits a request that fits into this share as a whole. False if it does not, or there is no room for it.
    pub fn admit_beside(&mut self, slot: &Slot, share: &mut Share) -> bool {
        let need = &slot.waiting.standing.need;
        let (tokens, context) = (need.to_compute(), need.context());
        let fits = tokens <= share.tokens && share.bound.cut(tokens, context) == tokens;
        let Some(part) = self.part(slot).filter(|_| fits) else { return false };
        if self.runners_full().is_some() || self.lacks_room(slot, &part).is_some() {
            return false;
        }
        share.tokens -= tokens;
        share.bound.spend(tokens, context);
        self.admit(slot, part);
        true
    }

    pub fn view(&self) -> &'a View<'a> {
        self.view
    }

    #[inline]
    fn chunk(&self, wanted: u32, context: u32) -> u32 {
        self.bound.cut(wanted.min(self.tokens_left), context)
    }

    fn join(&mut self, row: Row, added: Work, context: u32) {
        self.tokens_left -= row.tokens;
        self.bound.spend(row.tokens, context);
        self.work = self.work.plus(added);
        self.rows.push(row);
    }

    /// What a request would add; none if the batch has its tokens.
    #[inline]
    pub fn part(&self, slot: &Slot) -> Option<Part> {
        let need = &slot.waiting.standing.need;
        let tokens = self.chunk(need.to_compute(), need.context());
        let shared = self.shared(slot);
        let work = Work::new(slot.load - shared, tokens, need.context());
        (tokens > 0).then_some(Part { tokens, shared, work })
    }

    /// Whether a request may join before the rest.
    pub fn welcomes(&self, slot: &Slot, bar: &Bar) -> bool {
        self.part(slot).is_none_or(|part| bar.is_reached(&part.work))
    }

    /// False for most of those that are not welcome: told by what a request would compute if no stream ran and by its
    /// whole load. It shares none, and a cut chunk hides less.
    #[inline]
    pub fn may_welcome(&self, glance: &Glance, bar: &Bar) -> bool {
        let tokens = glance.compute.min(self.tokens_left);
        let most = Work::new(glance.load, tokens, glance.context);
        bar.is_reached(&most) || glance.load > 0 && self.nodes.may_contain(glance.node)
    }

    /// What it would make of the batch.
    pub fn unbalanced(&self, slot: &Slot) -> Why {
        let work = self.work.plus(self.part(slot).map_or(Work::default(), |part| part.work));
        Why::SetAside { load: work.load as u64, compute: work.compute as u64 }
    }

    #[inline]
    fn shared(&self, slot: &Slot) -> u32 {
        match slot.first_load {
            Some(node) if self.nodes.contains(node) => self.nodes.tokens(slot),
            _ => 0,
        }
    }

    /// Whether as many run as may.
    pub fn runners_full(&self) -> Option<Why> {
        let limit = self.view.limits.max_running;
        (self.running >= limit).then_some(Why::RunningFull { limit })
    }

    /// Why there is no room for a request, if so. One page for each runner to grow into, or the newcomer would be
    /// preempted at once.
    pub fn lacks_room(&self, slot: &Slot, part: &Part) -> Option<Why> {
        let pages = self.pages(slot, part).saturating_add(self.running);
        let lacks = pages > self.pages_left;
        lacks.then_some(Why::NoRoom { pages, available: self.pages_left })
    }

    /// The tokens of the batch are gone.
    pub fn full(&self) -> Why {
        Why::BatchFull { tokens: self.work.compute as u32 }
    }

    fn pages(&self, slot: &Slot, part: &Part) -> u32 {
        slot.waiting.standing.pages.saturating_sub(part.shared / self.view.page_size.max(1))
    }

    /// Admits a request for which there is room.
    pub fn admit(&mut self, slot: &Slot, part: Part) {
        self.pages_left -= self.pages(slot, &part).min(self.pages_left);
        self.running += 1;
        self.nodes.extend(slot);
        let own = Work { load: f64::from(slot.load), ..part.work };
        let row = Row { id: slot.waiting.id, tokens: part.tokens, own, since: None };
        self.join(row, part.work, slot.waiting.standing.need.context());
    }

    /// Reserves the pages that an early load takes, if it fits into these.
    pub fn load_early(&mut self, slot: &Slot, pages_left: &mut u32) -> bool {
        let tokens = slot.load - self.shared(slot);
        let pages = tokens.div_ceil(self.view.page_size.max(1));
        if pages > *pages_left || pages.saturating_add(self.running) > self.pages_left {
            return false;
        }
        *pages_left -= pages;
        self.pages_left -= pages;
        self.nodes.extend(slot);
        true
    }
}

/// The tree nodes that the batch loads. A filter answers for the many requests that share none of them.
#[derive(Default)]
struct Nodes {
    sorted: Vec<u64>,
    filter: [u64; 16],
}

impl Nodes {
    fn bit(node: u64) -> (usize, u64) {
        let hash = node.wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 54;
        ((hash >> 6) as usize, 1 << (hash & 63))
    }

    #[inline]
    fn may_contain(&self, node: u64) -> bool {
        let (word, bit) = Nodes::bit(node);
        self.filter[word] & bit != 0
    }

    fn contains(&self, node: u64) -> bool {
        self.may_contain(node) && self.sorted.binary_search(&node).is_ok()
    }

    /// Tokens of a request's load that are here.
    fn tokens(&self, slot: &Slot) -> u32 {
        let known = slot.waiting.standing.loads.iter().filter(|run| self.contains(run.node));
        known.fold(0, |sum, run| sum.saturating_add(run.tokens))
    }

    fn extend(&mut self, slot: &Slot) {
        for run in &slot.waiting.standing.loads {
            if let Err(place) = self.sorted.binary_search(&run.node) {
                self.sorted.insert(place, run.node);
                let (word, bit) = Nodes::bit(run.node);
                self.filter[word] |= bit;
            }
        }
    }
}
