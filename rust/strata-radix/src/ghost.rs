//! Ghosts: pages that no tier holds and nobody will compute, kept for their access count. Bounded; the ones that
//! became ghosts first go first, last page first.

use crate::arena::NodeId;
use crate::order::EvictionOrder;
use crate::tree::HiRadixTree;

/// How many ghosts that cannot go yet are passed over before a call gives up; they are looked at again later.
const MOST_PASSED_OVER: usize = 64;

impl HiRadixTree {
    /// The pages of a node that are ghosts.
    pub(crate) fn count_ghosts(&self, id: NodeId) -> u32 {
        let node = &self.nodes[id];
        let end = node.transient.map_or(node.pages, |transient| transient.from);
        end.saturating_sub(self.held(id))
    }

    /// Counts the ghosts of a node anew, after its residency or its transient run has changed.
    pub(crate) fn recount_ghosts(&mut self, id: NodeId) {
        let ghosts = self.count_ghosts(id);
        let before = std::mem::replace(&mut self.nodes[id].ghosts, ghosts);
        self.ghost_pages = self.ghost_pages - before as usize + ghosts as usize;
        match (before > 0, ghosts > 0) {
            (false, true) => self.ghosts.insert(id),
            (true, false) => self.ghosts.remove(id),
            _ => {}
        }
    }

    /// Forgets ghosts until they keep their bound, or until only such are left as something hangs on.
    pub(crate) fn trim_ghosts(&mut self) {
        let mut passed_over = 0;
        while self.ghost_pages > self.config.ghost_pages && passed_over < MOST_PASSED_OVER {
            let Some(id) = self.ghosts.first() else { return };
            let node = &self.nodes[id];
            if !node.first_child.is_nil() || node.transient.is_some() || node.is_pinned() {
                self.ghosts.touch(id);
                passed_over += 1;
                continue;
            }
            let excess = self.ghost_pages - self.config.ghost_pages;
            self.shorten(id, node.ghosts.min(u32::try_from(excess).unwrap_or(u32::MAX)));
        }
    }
}
