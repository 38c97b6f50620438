//! Eviction: which copies a place gives up. From the front of its order, each node from its last page: O(1) for a
//! page, amortised. Never a pinned page, never a page with a descendant in the same place.

use crate::arena::NodeId;
use crate::error::RadixError;
use crate::tree::HiRadixTree;
use crate::values::{Evicted, MissingRun};
use foldhash::quality::RandomState;
use hashbrown::{HashMap, HashSet};
use std::ops::Range;
use strata_types::{GroupId, TierId};

/// How many nodes that may not go (pinned in another tier, with last copies here) one eviction passes over.
const MOST_PASSED_OVER: usize = 256;

impl HiRadixTree {
    /// Takes up to `pages` pages from a tier. Where that takes the last copy of a page, what other tiers hold of its
    /// descendants goes too and comes back with the rest, so there may be more entries than `pages`, but never more
    /// of this tier.
    ///
    /// # Errors
    /// `UnknownPlace`.
    pub fn evict(&mut self, group: GroupId, tier: TierId, pages: usize) -> Result<Vec<Evicted>, RadixError> {
        let place = self.place(group, tier)?;
        Ok(self.evict_from(place, pages, MOST_PASSED_OVER))
    }

    /// Takes every page from a tier that no pin keeps. What else comes back is as for `evict`.
    ///
    /// # Errors
    /// `UnknownPlace`.
    pub fn clear(&mut self, group: GroupId, tier: TierId) -> Result<Vec<Evicted>, RadixError> {
        let place = self.place(group, tier)?;
        Ok(self.evict_from(place, usize::MAX, usize::MAX))
    }

    /// Takes from a tier the pages whose slots are `first_slot` or higher, and those that hang below them there, unless
    /// a pin keeps them: the tier shrinks. What else comes back is as for `evict`.
    ///
    /// # Errors
    /// `UnknownPlace`.
    pub fn evict_slots(
        &mut self,
        group: GroupId,
        tier: TierId,
        first_slot: u32,
    ) -> Result<Vec<Evicted>, RadixError> {
        let place = self.place(group, tier)?;
        let victims = self.victims_by_slot(place, first_slot);
        Ok(self.take_victims(place, victims))
    }

    /// The pages that `evict` would take now and that none of the tiers `below` holds, in the order in which it would
    /// take them.
    ///
    /// # Errors
    /// `UnknownPlace`.
    pub fn missing_victims(
        &self,
        group: GroupId,
        tier: TierId,
        below: &[TierId],
        pages: usize,
    ) -> Result<Vec<MissingRun>, RadixError> {
        let source = self.place(group, tier)?;
        let lower: Vec<usize> =
            below.iter().map(|tier| self.place(group, *tier)).collect::<Result<_, _>>()?;
        let mut found = Vec::new();
        for (id, victims) in self.victims(source, pages, MOST_PASSED_OVER) {
            let mut lost = vec![victims];
            for place in &lower {
                let held = &self.nodes[id].runs[*place];
                lost = lost.into_iter().flat_map(|part| without(part, held.start..held.end())).collect();
            }
            for part in lost.into_iter().rev() {
                found.extend(self.missing_run(id, source, part, true));
            }
        }
        Ok(found)
    }

    fn evict_from(&mut self, place: usize, pages: usize, most_passed_over: usize) -> Vec<Evicted> {
        let victims = self.victims(place, pages, most_passed_over);
        self.take_victims(place, victims)
    }

    fn take_victims(&mut self, place: usize, victims: Vec<(NodeId, Range<u32>)>) -> Vec<Evicted> {
        let mut out = Vec::new();
        // Taking one victim changes none of the others: what goes with it are copies of its descendants, and those
        // come before it.
        for (id, victims) in victims {
            let held = self.nodes[id].covered(self.group_of(place));
            self.take(id, place, victims.start, victims.end, &mut out);
            self.restore_prefix(id, place, held, &mut out);
        }
        self.trim_ghosts();
        out
    }

    /// The pages to take, node by node, counted from the node's first.
    fn victims(&self, place: usize, pages: usize, most_passed_over: usize) -> Vec<(NodeId, Range<u32>)> {
        let mut found = Vec::new();
        let mut left = pages;
        let mut passed_over = 0;
        let mut blocked: HashSet<NodeId, RandomState> = HashSet::default();
        let mut next = self.places[place].order.first();
        while let Some(id) = next.filter(|_| left > 0 && passed_over <= most_passed_over) {
            next = self.places[place].order.after(id);
            let run = &self.nodes[id].runs[place];
            let (start, end) = (run.start, run.end());
            let from = if blocked.contains(&id) { end } else { self.evictable_from(id, place) };
            let count = left.min((end - from) as usize) as u32;
            left -= count as usize;
            if count > 0 {
                found.push((id, end - count..end));
            }
            if left > 0 && count < end - start {
                passed_over += 1;
                self.block_ancestors(id, &mut blocked);
            }
        }
        found
    }

    /// As `victims`, for the pages whose slots are `first_slot` or higher and all that hangs below them.
    fn victims_by_slot(&self, place: usize, first_slot: u32) -> Vec<(NodeId, Range<u32>)> {
        let order = &self.places[place].order;
        let members = || std::iter::successors(order.first(), |id| order.after(*id));
        let mut doomed: HashMap<NodeId, u32, RandomState> = HashMap::default();
        for id in members() {
            let run = &self.nodes[id].runs[place];
            if let Some(index) = run.slots.iter().position(|slot| slot.0 >= first_slot) {
                doomed.insert(id, run.start + index as u32);
            }
        }
        let mut found = Vec::new();
        let mut blocked: HashSet<NodeId, RandomState> = HashSet::default();
        for id in members().filter(|_| !doomed.is_empty()) {
            let run = &self.nodes[id].runs[place];
            let (start, end) = (run.start, run.end());
            let below = self.ascend(self.nodes[id].parent).any(|ancestor| doomed.contains_key(&ancestor));
            let Some(wanted) = below.then_some(start).or_else(|| doomed.get(&id).copied()) else { continue };
            let from = if blocked.contains(&id) { end } else { wanted.max(self.evictable_from(id, place)) };
            if from < end {
                found.push((id, from..end));
            }
            if from > start {
                self.block_ancestors(id, &mut blocked);
            }
        }
        found
    }

    /// The ancestors of a node that stays must stay too. Each is visited once in an eviction.
    fn block_ancestors(&self, id: NodeId, blocked: &mut HashSet<NodeId, RandomState>) {
        for ancestor in self.ascend(self.nodes[id].parent) {
            if !blocked.insert(ancestor) {
                return;
            }
        }
    }

    /// The first page of a node that may go, with all after it. On a path that is pinned in another tier, a page
    /// whose copy here is the last one must stay.
    fn evictable_from(&self, id: NodeId, place: usize) -> u32 {
        let node = &self.nodes[id];
        let run = &node.runs[place];
        if !node.is_pinned() {
            return run.start;
        }
        let others = || self.group_of(place).filter(|other| *other != place).map(|other| &node.runs[other]);
        let mut from = run.end();
        while let Some(lower) =
            others().filter(|other| other.end() >= from && other.start < from).map(|other| other.start).min()
        {
            from = lower;
        }
        from.max(run.start)
    }
}

/// What is left of `part` before and after `held`.
fn without(part: Range<u32>, held: Range<u32>) -> impl Iterator<Item = Range<u32>> {
    let parts = [part.start..part.end.min(held.start), part.start.max(held.end)..part.end];
    parts.into_iter().filter(|part| part.start < part.end)
}
