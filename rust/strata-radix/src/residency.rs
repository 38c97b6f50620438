//! The one place where a node's slots, its place's counts and its place's order change together.

use crate::arena::{NodeId, Run};
use crate::error::RadixError;
use crate::tree::HiRadixTree;
use crate::values::Evicted;
use strata_types::PageId;

impl HiRadixTree {
    /// Gives the pages `start..start + slots.len()` of a node their slots in a place. Pages that have one keep it
    /// and are reported. Splits the node where its run would get a gap; the lower part keeps the node's id.
    pub(crate) fn put(
        &mut self,
        id: NodeId,
        place: usize,
        start: u32,
        slots: &[PageId],
        duplicates: &mut Vec<(u32, PageId)>,
    ) -> Result<(), RadixError> {
        let end = start + slots.len() as u32;
        let run = &self.nodes[id].runs[place];
        if run.is_empty() {
            return self.put_run(id, place, Run { start, slots: slots.to_vec() });
        }
        if start > run.end() {
            self.split(id, start)?;
            return self.put(id, place, 0, slots, duplicates);
        }
        if end < run.start {
            let upper = self.split(id, end)?;
            return self.put(upper, place, start, slots, duplicates);
        }
        let (run_start, run_end, first) = (run.start, run.end(), self.nodes[id].start);
        let offered = |from: u32, to: u32| &slots[(from - start) as usize..(to - start) as usize];
        let (from, to) = (start.max(run_start), end.min(run_end));
        if from < to {
            duplicates.extend((first + from..first + to).zip(offered(from, to).iter().copied()));
        }
        let (before, after) = (start.min(run_start), end.max(run_end));
        let run = &mut self.nodes[id].runs[place];
        if after > run_end {
            run.slots.extend_from_slice(offered(run_end, after));
        }
        if before < run_start {
            run.slots.splice(0..0, offered(before, run_start).iter().copied());
            run.start = before;
        }
        let added = (run_start - before) + (after - run_end);
        self.grow(place, self.nodes[id].pins[self.tier_of(place)] == 0, added as usize);
        if added > 0 {
            self.mark_changed(id);
        }
        Ok(())
    }

    fn put_run(&mut self, id: NodeId, place: usize, run: Run) -> Result<(), RadixError> {
        let (start, end) = (run.start, run.end());
        let free = self.nodes[id].pins[self.tier_of(place)] == 0;
        self.grow(place, free, run.slots.len());
        self.nodes[id].runs[place] = run;
        if free && start < end {
            self.places[place].order.insert(id);
        }
        if start < end {
            self.mark_changed(id);
        }
        Ok(())
    }

    fn grow(&mut self, place: usize, free: bool, pages: usize) {
        self.places[place].resident += pages;
        if free {
            self.places[place].evictable += pages;
        }
    }

    /// Takes the pages `from..to` of a node from a place; what stays must be one run.
    pub(crate) fn take(&mut self, id: NodeId, place: usize, from: u32, to: u32, out: &mut Vec<Evicted>) {
        let (_, tier) = self.names(place);
        let node = &mut self.nodes[id];
        let in_use = node.pins[tier.index()] > 0;
        let run = &mut node.runs[place];
        let (from, to) = (from.max(run.start), to.min(run.end()));
        if from >= to {
            return;
        }
        let taken = (from - run.start) as usize..(to - run.start) as usize;
        debug_assert!(taken.start == 0 || taken.end == run.slots.len());
        out.extend(run.slots[taken.clone()].iter().map(|slot| Evicted { tier, slot: *slot, in_use }));
        if taken.len() == run.slots.len() {
            *run = Run::default();
        } else if taken.start > 0 {
            run.slots.truncate(taken.start);
        } else {
            run.slots.drain(..taken.end);
            run.start = to;
        }
        let (empty, pages) = (run.is_empty(), (to - from) as usize);
        let counts = &mut self.places[place];
        counts.resident -= pages;
        if !in_use {
            counts.evictable -= pages;
            if empty {
                counts.order.remove(id);
            }
        }
        self.mark_changed(id);
    }

    /// Drops the copies that some page before them no longer holds up: those after the first page of the node that
    /// no tier of the group holds, and all those below the node. `held` is what the group held before.
    pub(crate) fn restore_prefix(&mut self, id: NodeId, place: usize, held: u32, out: &mut Vec<Evicted>) {
        let group = self.group_of(place);
        let covered = self.nodes[id].covered(group.clone());
        if covered < held {
            for other in group.clone() {
                self.take(id, other, covered, u32::MAX, out);
            }
            if held == self.nodes[id].pages {
                self.drop_descendants(id, group, out);
            }
        }
        self.recount_ghosts(id);
    }

    /// Drops every copy of the group below a node, leaves first.
    fn drop_descendants(&mut self, id: NodeId, group: std::ops::Range<usize>, out: &mut Vec<Evicted>) {
        // Only nodes whose first page is held can have copies at or below them.
        let mut found = Vec::new();
        let mut next = 0;
        let mut parent = id;
        loop {
            let mut child = self.nodes[parent].first_child;
            while !child.is_nil() {
                if self.nodes[child].covered(group.clone()) > 0 {
                    found.push(child);
                }
                child = self.nodes[child].next_sibling;
            }
            let Some(node) = found.get(next) else { break };
            parent = *node;
            next += 1;
        }
        for node in found.into_iter().rev() {
            for place in group.clone() {
                self.take(node, place, 0, u32::MAX, out);
            }
            self.recount_ghosts(node);
        }
    }
}
