//! How transient runs change hands: an owner that ends leaves them to whoever waits for them, or gives them up; a
//! request that has waited long enough takes them.

use crate::arena::{NodeId, Transient};
use crate::error::RadixError;
use crate::tree::HiRadixTree;
use crate::values::TransientState;
use crate::watch::Watched;
use strata_types::RequestId;

/// Who inherited a node: the heir and the nodes of his path, first to last.
struct Succession {
    node: NodeId,
    heir: Option<(RequestId, Vec<NodeId>)>,
}

impl HiRadixTree {
    /// The owner will not publish the rest of its runs. The followers of a run are the requests, other than the owner,
    /// whose watched paths lead through it; `choose_heir` picks one of them, who gets the run, queued. Without followers,
    /// or if none is picked, the run becomes what it was: ghosts, or unknown. Returns how many pages changed hands or
    /// were given up.
    ///
    /// Runs go first to last. Whoever inherits one also gets those after it that lie on its path, unasked: the first of
    /// all followers is the first of fewer.
    ///
    /// # Errors
    /// `Full` if the tree cannot split a node any more.
    pub fn release(
        &mut self,
        owner: RequestId,
        mut choose_heir: impl FnMut(&[RequestId]) -> Option<RequestId>,
    ) -> Result<usize, RadixError> {
        let Some(mut nodes) = self.owners.remove(&owner) else { return Ok(0) };
        nodes.sort_unstable_by_key(|id| (self.nodes[*id].start, *id));
        let (mut pages, mut given_up) = (0, Vec::new());
        let mut last = None;
        for id in nodes {
            let now = self.succession(id, owner, last, &mut choose_heir);
            match &now.heir {
                Some((heir, _)) => pages += self.hand_over(id, *heir),
                None => given_up.push(id),
            }
            last = Some(now);
        }
        for id in given_up.into_iter().rev() {
            pages += self.give_up(id)?;
        }
        self.trim_ghosts();
        Ok(pages)
    }

    /// A request makes the runs of others on its watched path its own, queued: those that were not started, and the
    /// started ones too if `even_started`. Returns how many pages those were.
    ///
    /// # Errors
    /// `Unwatched`.
    pub fn take_over(&mut self, request: RequestId, even_started: bool) -> Result<usize, RadixError> {
        let mut pages = 0;
        for id in self.path(self.watcher(request)?.node) {
            let Some(Transient { owner, state, .. }) = self.nodes[id].transient else { continue };
            if owner != request && (even_started || state == TransientState::Queued) {
                self.disown(id, owner);
                pages += self.hand_over(id, request);
            }
        }
        Ok(pages)
    }

    /// Takes a node from the list of its owner's.
    pub(crate) fn disown(&mut self, id: NodeId, owner: RequestId) {
        let Some(nodes) = self.owners.get_mut(&owner) else { return };
        nodes.retain(|other| *other != id);
        if nodes.is_empty() {
            self.owners.remove(&owner);
        }
    }

    /// Finds the heir of a node, given what was found for the one before.
    fn succession(
        &self,
        node: NodeId,
        owner: RequestId,
        last: Option<Succession>,
        choose_heir: &mut impl FnMut(&[RequestId]) -> Option<RequestId>,
    ) -> Succession {
        if let Some(last) = last.filter(|last| self.is_below(node, last.node)) {
            // As many watchers as above, so the same ones, or an heir among them: nothing to ask.
            let alike = self.nodes[node].watched == self.nodes[last.node].watched;
            if alike || last.heir.as_ref().is_some_and(|(_, path)| self.leads_through(path, node)) {
                return Succession { node, ..last };
            }
        }
        let mut followers = Vec::with_capacity(self.nodes[node].watched as usize);
        if self.nodes[node].watched > 0 {
            let mut walk = Watched::below(node);
            while let Some(id) = walk.next(&self.nodes) {
                followers.extend(self.nodes[id].watchers.iter().filter(|follower| **follower != owner));
            }
        }
        let heir = if followers.is_empty() { None } else { choose_heir(&followers) };
        let path = |heir| self.watchers.get(&heir).map_or(Vec::new(), |watcher| self.path(watcher.node));
        Succession { node, heir: heir.map(|heir| (heir, path(heir))) }
    }

    /// Whether a node is another one or lies below it.
    fn is_below(&self, id: NodeId, top: NodeId) -> bool {
        self.ascend(id).find(|above| self.nodes[*above].start <= self.nodes[top].start) == Some(top)
    }

    fn leads_through(&self, path: &[NodeId], node: NodeId) -> bool {
        let start = |id: &NodeId| self.nodes[*id].start;
        path.binary_search_by_key(&start(&node), start).is_ok_and(|index| path[index] == node)
    }

    fn hand_over(&mut self, id: NodeId, heir: RequestId) -> usize {
        let node = &mut self.nodes[id];
        let Some(transient) = &mut node.transient else { return 0 };
        (transient.owner, transient.state) = (heir, TransientState::Queued);
        let pages = (node.pages - transient.from) as usize;
        self.owners.entry(heir).or_default().push(id);
        self.mark_changed(id);
        pages
    }

    fn give_up(&mut self, id: NodeId) -> Result<usize, RadixError> {
        let Some(Transient { from, .. }) = self.nodes[id].transient else { return Ok(0) };
        if from > 0 {
            // Only the lower half gives back the access that came with the first publish.
            self.split(id, from)?;
        }
        let node = &mut self.nodes[id];
        node.transient = None;
        let pages = node.pages as usize;
        self.transient_pages -= pages;
        self.mark_changed(id);
        self.recount_ghosts(id);
        self.forget_unneeded(id);
        Ok(pages)
    }
}
