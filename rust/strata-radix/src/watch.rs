//! Watched paths: which waiting requests a change concerns, without a look at any of the others.
//!
//! A watched path ends with a node. Each node counts the watchers at or below it; a change marks its node, in O(1), and
//! the watchers are collected only when somebody asks, from the marked nodes down, each once. So a document that goes
//! page by page under many watchers costs its pages plus its watchers, not their product.

use crate::arena::{Arena, NodeId, UNCHANGED};
use crate::error::RadixError;
use crate::tree::HiRadixTree;
use crate::values::Claim;
use strata_types::{Namespace, RequestId, Token};

/// Where a request's watched path ends.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Watcher {
    /// The last node of the path, which ends with it; NIL for the path of no pages.
    pub node: NodeId,
    /// The index among the watchers of that node.
    pub index: usize,
}

/// A walk over the nodes with watchers, from one node down, each before those below it.
pub(crate) struct Watched {
    top: NodeId,
    rest: Vec<NodeId>,
}

impl Watched {
    pub fn below(top: NodeId) -> Watched {
        Watched { top, rest: vec![top] }
    }

    pub fn next(&mut self, nodes: &Arena) -> Option<NodeId> {
        let id = self.rest.pop()?;
        let node = &nodes[id];
        let sibling = if id == self.top { NodeId::NIL } else { node.next_sibling };
        // Siblings with watchers come first, so one without ends the row.
        let watched = |id: &NodeId| nodes.get(*id).is_some_and(|node| node.watched > 0);
        self.rest.extend([sibling, node.first_child].into_iter().filter(watched));
        Some(id)
    }
}

impl HiRadixTree {
    /// As `claim`; besides, the request watches the path of all whole pages of the sequence from now on: its nodes stay
    /// known, `take_changed` names the request when something changes on it, and `standing` answers without the tokens.
    /// A request watches one path: an earlier one is given up.
    ///
    /// # Errors
    /// `Full` if the tree cannot take more nodes or pages.
    pub fn watch(
        &mut self,
        namespace: &Namespace,
        tokens: &[Token],
        request: RequestId,
    ) -> Result<Claim, RadixError> {
        self.unwatch(request);
        let claim = self.claim(namespace, tokens, request)?;
        let end = if claim.handle.is_empty() { NodeId::NIL } else { self.boundary(claim.handle)? };
        self.add_watcher(request, end);
        Ok(claim)
    }

    /// As `watch`, for a request that will publish nothing: it claims nothing.
    ///
    /// # Errors
    /// `Full` if the tree cannot take more nodes or pages.
    pub fn watch_only(
        &mut self,
        namespace: &Namespace,
        tokens: &[Token],
        request: RequestId,
    ) -> Result<(), RadixError> {
        self.unwatch(request);
        let end = match self.make_known(namespace, tokens)? {
            Some(known) => self.open_end(known)?,
            None => NodeId::NIL,
        };
        self.add_watcher(request, end);
        Ok(())
    }

    /// The request watches no more; what it claimed stays its own. Does nothing for a request that watches nothing.
    pub fn unwatch(&mut self, request: RequestId) {
        let Some(Watcher { node: end, index }) = self.watchers.remove(&request) else { return };
        let Some(node) = self.nodes.get_mut(end) else { return };
        node.watchers.swap_remove(index);
        if let Some(watcher) = node.watchers.get(index).and_then(|moved| self.watchers.get_mut(moved)) {
            watcher.index = index;
        }
        let mut id = end;
        while !self.nodes[id].parent.is_nil() {
            self.nodes[id].watched -= 1;
            if self.nodes[id].watched == 0 {
                self.mark_unchanged(id);
                self.change_sides(id);
            }
            id = self.nodes[id].parent;
        }
        self.join_with_child(end);
        self.forget_unneeded(end);
        self.trim_ghosts();
    }

    /// The requests on whose watched paths something has changed since the last call, each once: a page came into a tier
    /// or left one, a transient run began, started, grew shorter, changed hands or ended, or pages that have to be loaded
    /// are counted under other nodes. Equal histories give equal orders.
    pub fn take_changed(&mut self) -> Vec<RequestId> {
        let mut changed = std::mem::take(&mut self.changed);
        // The upper ones first: they cover those below them.
        changed.sort_unstable_by_key(|id| (self.nodes[*id].start, *id));
        let mut requests = Vec::new();
        for top in changed {
            if !self.is_changed(top) {
                continue;
            }
            let mut walk = Watched::below(top);
            while let Some(id) = walk.next(&self.nodes) {
                let node = &mut self.nodes[id];
                node.change = UNCHANGED;
                requests.extend_from_slice(&node.watchers);
            }
        }
        requests
    }

    pub(crate) fn watcher(&self, request: RequestId) -> Result<Watcher, RadixError> {
        self.watchers.get(&request).copied().ok_or(RadixError::Unwatched { request })
    }

    /// Something that a standing shows has changed in a node.
    pub(crate) fn mark_changed(&mut self, id: NodeId) {
        let node = &mut self.nodes[id];
        if node.watched > 0 && node.change == UNCHANGED {
            node.change = self.changed.len() as u32;
            self.changed.push(id);
        }
    }

    pub(crate) fn is_changed(&self, id: NodeId) -> bool {
        self.nodes[id].change != UNCHANGED
    }

    pub(crate) fn mark_unchanged(&mut self, id: NodeId) {
        let change = std::mem::replace(&mut self.nodes[id].change, UNCHANGED);
        if change == UNCHANGED {
            return;
        }
        self.changed.swap_remove(change as usize);
        if let Some(moved) = self.changed.get(change as usize) {
            self.nodes[*moved].change = change;
        }
    }

    fn add_watcher(&mut self, request: RequestId, end: NodeId) {
        let index = self.nodes.get(end).map_or(0, |node| node.watchers.len());
        self.watchers.insert(request, Watcher { node: end, index });
        let Some(node) = self.nodes.get_mut(end) else { return };
        node.watchers.push(request);
        let mut id = end;
        while !self.nodes[id].parent.is_nil() {
            self.nodes[id].watched += 1;
            if self.nodes[id].watched == 1 {
                self.change_sides(id);
            }
            id = self.nodes[id].parent;
        }
    }

    /// A node has got its first watcher or lost its last one.
    fn change_sides(&mut self, id: NodeId) {
        self.leave_siblings(id);
        self.enter_siblings(id);
        self.recount_ghosts(id);
    }
}
