//! Ghosts: pages that no tier holds, nobody will compute and nobody watches, kept for their access count. Bounded; the
//! ones that became ghosts first go first, last page first.

use crate::arena::{Node, NodeId};
use crate::order::EvictionOrder;
use crate::tree::HiRadixTree;

/// How many ghosts that cannot go yet are passed over before a call gives up; they are looked at again later.
const MOST_PASSED_OVER: usize = 64;

impl HiRadixTree {
    /// The pages of a node that are ghosts.
    pub(crate) fn count_ghosts(&self, id: NodeId) -> u32 {
        let node = &self.nodes[id];
        if node.watched > 0 {
            return 0;
        }
        let end = node.transient.map_or(node.pages, |transient| transient.from);
        end.saturating_sub(self.held(id))
    }

    /// Counts the ghosts of a node anew, after its residency, its transient run or its watchers have changed.
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

    /// Forgets a node that nothing was ever published in and that nobody needs any more, and those above it that were
    /// there only to lead to it.
    pub(crate) fn forget_unneeded(&mut self, end: NodeId) {
        let mut id = end;
        while let Some(node) = self.nodes.get(id) {
            let Node { parent, pages, .. } = *node;
            let needed = node.accesses > 0 || !node.is_leaf() || node.is_pinned() || node.ghosts < pages;
            if needed || parent.is_nil() {
                return;
            }
            self.shorten(id, pages);
            id = parent;
        }
    }

    /// Forgets ghosts until they keep their bound, or until only such are left as something hangs on.
    pub(crate) fn trim_ghosts(&mut self) {
        let mut passed_over = 0;
        while self.ghost_pages > self.config.ghost_pages && passed_over < MOST_PASSED_OVER {
            let Some(id) = self.ghosts.first() else { return };
            let node = &self.nodes[id];
            if !node.is_leaf() || node.transient.is_some() || node.is_pinned() {
                self.ghosts.touch(id);
                passed_over += 1;
                continue;
            }
            let excess = self.ghost_pages - self.config.ghost_pages;
            self.shorten(id, node.ghosts.min(u32::try_from(excess).unwrap_or(u32::MAX)));
        }
    }
}
