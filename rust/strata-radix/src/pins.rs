//! Use of a path: access counts, recency, pins. A path is always used from its end to its root, so that in every
//! eviction order a node stays before its ancestors.

use crate::arena::NodeId;
use crate::error::RadixError;
use crate::handle::{Handle, Pin};
use crate::tree::HiRadixTree;
use foldhash::quality::RandomState;
use hashbrown::HashMap;
use strata_types::{GroupId, TierId};

impl HiRadixTree {
    /// Counts an access to a path and makes it the most recently used in every place that holds it.
    ///
    /// # Errors
    /// `Stale`, or `Full` if the tree cannot split a node any more.
    pub fn touch(&mut self, handle: Handle) -> Result<(), RadixError> {
        if !handle.is_empty() {
            let node = self.boundary(handle)?;
            self.use_path(node, None, true);
        }
        Ok(())
    }

    /// How long ago, by the tree's clock, the last pages of a path were accessed. Zero for the empty path.
    ///
    /// # Errors
    /// `Stale`.
    pub fn idle_time(&self, handle: Handle) -> Result<u64, RadixError> {
        if handle.is_empty() {
            return Ok(0);
        }
        Ok(self.clock.saturating_sub(self.nodes[self.resolve(handle)?].used_at))
    }

    /// Pins a path in one tier: eviction takes none of its pages from that tier, whether they are there already or
    /// come later, and takes no last copy of them from any tier. Counts no access.
    ///
    /// # Errors
    /// `UnknownPlace` for a tier that the tree does not have; `Stale`; `Full` if the tree cannot split a node.
    pub fn pin(&mut self, handle: Handle, tier: TierId) -> Result<Pin, RadixError> {
        self.place(Default::default(), tier)?;
        if handle.is_empty() {
            return Ok(Pin { handle, tier });
        }
        let node = self.boundary(handle)?;
        self.use_path(node, Some(tier), false);
        Ok(Pin { handle: self.handle(node, handle.pages), tier })
    }

    /// Gives a pin back. Pages that nothing pins any more become the most recently used of their tier.
    ///
    /// # Errors
    /// `Stale` if the pin came from another tree.
    pub fn unpin(&mut self, pin: Pin) -> Result<(), RadixError> {
        let Pin { handle, tier } = pin;
        if handle.is_empty() {
            return Ok(());
        }
        let end = self.resolve(handle)?;
        let mut id = end;
        loop {
            let parent = self.nodes[id].parent;
            if parent.is_nil() {
                break;
            }
            let count = &mut self.nodes[id].pins[tier.index()];
            *count -= 1;
            if *count == 0 {
                for place in self.places_of(tier) {
                    self.enter(id, place);
                }
            }
            id = parent;
        }
        self.join_with_child(end);
        self.trim_ghosts();
        Ok(())
    }

    /// Pages of a tier that eviction may take once those of these pins that are of the tier are given back. Changes
    /// nothing; O(nodes of the paths).
    ///
    /// # Errors
    /// `UnknownPlace`; `Stale` for a pin of another tree.
    pub fn evictable_without<'a>(
        &self,
        group: GroupId,
        tier: TierId,
        pins: impl IntoIterator<Item = &'a Pin>,
    ) -> Result<usize, RadixError> {
        let place = self.place(group, tier)?;
        let mut counts: HashMap<NodeId, u32, RandomState> = HashMap::default();
        for pin in pins.into_iter().filter(|pin| pin.tier == tier && !pin.handle.is_empty()) {
            for id in self.ascend(self.resolve(pin.handle)?) {
                *counts.entry(id).or_default() += 1;
            }
        }
        let alone = counts.into_iter().filter(|(id, count)| self.nodes[*id].pins[tier.index()] == *count);
        let kept: usize = alone.map(|(id, _)| self.nodes[id].runs[place].slots.len()).sum();
        Ok(self.places[place].evictable + kept)
    }

    /// The node that ends exactly where the path ends; splits the one in which it ends if need be.
    pub(crate) fn boundary(&mut self, handle: Handle) -> Result<NodeId, RadixError> {
        let id = self.resolve(handle)?;
        let node = &self.nodes[id];
        match handle.pages - node.start {
            local if local < node.pages => self.split(id, local),
            _ => Ok(id),
        }
    }

    /// Uses a path from its end up: counts an access or not, pins it in a tier or not.
    pub(crate) fn use_path(&mut self, end: NodeId, pin: Option<TierId>, accessed: bool) {
        let tiers = usize::from(self.config.tiers);
        let mut id = end;
        loop {
            let node = &mut self.nodes[id];
            if node.parent.is_nil() {
                return;
            }
            if let Some(tier) = pin {
                let count = &mut node.pins[tier.index()];
                *count += 1;
                if *count == 1 {
                    for place in (tier.index()..self.places.len()).step_by(tiers) {
                        let pages = node.runs[place].slots.len();
                        if pages > 0 {
                            self.places[place].order.remove(id);
                            self.places[place].evictable -= pages;
                        }
                    }
                }
            }
            if accessed {
                node.used_at = self.clock;
                node.accesses = node.accesses.saturating_add(1);
                for (index, run) in node.runs.iter().enumerate() {
                    if !run.is_empty() && node.pins[index % tiers] == 0 {
                        self.places[index].order.touch(id);
                    }
                }
            }
            id = node.parent;
        }
    }

    fn places_of(&self, tier: TierId) -> impl Iterator<Item = usize> {
        (tier.index()..self.places.len()).step_by(usize::from(self.config.tiers))
    }

    /// Puts a node that no pin keeps into the order of a place that holds some of its pages.
    fn enter(&mut self, id: NodeId, place: usize) {
        let pages = self.nodes[id].runs[place].slots.len();
        if pages > 0 {
            self.places[place].order.insert(id);
            self.places[place].evictable += pages;
        }
    }
}
