//! The shape of the tree: making, splitting, joining and removing nodes. Nothing here changes which page is where,
//! or in which order pages go.

use crate::arena::{Node, NodeId, Run, Transient};
use crate::error::RadixError;
use crate::order::EvictionOrder;
use crate::tree::HiRadixTree;
use strata_types::{Namespace, Token};

impl HiRadixTree {
    /// The root of a namespace, made if there is none yet.
    pub(crate) fn root(&mut self, namespace: &Namespace) -> Result<NodeId, RadixError> {
        if let Some(root) = self.roots.get(namespace) {
            return Ok(*root);
        }
        let root = self.allocate()?;
        self.nodes[root].root = root;
        self.nodes[root].namespace = Some(Box::new(*namespace));
        self.roots.insert(*namespace, root);
        Ok(root)
    }

    fn allocate(&mut self) -> Result<NodeId, RadixError> {
        self.nodes.allocate(self.places.len(), usize::from(self.config.tiers))
    }

    /// A new leaf below `parent`, with no residency and no access.
    pub(crate) fn create(&mut self, parent: NodeId, tokens: &[Token]) -> Result<NodeId, RadixError> {
        let id = self.allocate()?;
        let (root, start) = (self.nodes[parent].root, self.nodes[parent].end());
        let pages = (tokens.len() / self.page_size()) as u32;
        let node = &mut self.nodes[id];
        (node.root, node.start, node.pages) = (root, start, pages);
        node.tokens = tokens.to_vec();
        self.link(id, parent);
        Ok(id)
    }

    fn link(&mut self, id: NodeId, parent: NodeId) {
        self.nodes[id].parent = parent;
        self.enter_siblings(id);
        self.children.insert(&self.nodes, id, self.page_size());
    }

    fn unlink(&mut self, id: NodeId) {
        self.children.remove(&self.nodes, id, self.page_size());
        self.leave_siblings(id);
    }

    /// Makes a node the first child of its parent if it has watchers, the last one if not.
    pub(crate) fn enter_siblings(&mut self, id: NodeId) {
        let Node { parent, watched, .. } = self.nodes[id];
        let (previous, next) = match watched > 0 {
            true => (NodeId::NIL, self.nodes[parent].first_child),
            false => (self.nodes[parent].last_child, NodeId::NIL),
        };
        let node = &mut self.nodes[id];
        (node.previous_sibling, node.next_sibling) = (previous, next);
        *self.link_after(parent, previous) = id;
        *self.link_before(parent, next) = id;
    }

    pub(crate) fn leave_siblings(&mut self, id: NodeId) {
        let Node { parent, previous_sibling: previous, next_sibling: next, .. } = self.nodes[id];
        *self.link_after(parent, previous) = next;
        *self.link_before(parent, next) = previous;
    }

    /// The link to what follows a child; for no child, the link to the first one.
    fn link_after(&mut self, parent: NodeId, child: NodeId) -> &mut NodeId {
        match child.is_nil() {
            true => &mut self.nodes[parent].first_child,
            false => &mut self.nodes[child].next_sibling,
        }
    }

    /// The link to what precedes a child; for no child, the link to the last one.
    fn link_before(&mut self, parent: NodeId, child: NodeId) -> &mut NodeId {
        match child.is_nil() {
            true => &mut self.nodes[parent].last_child,
            false => &mut self.nodes[child].previous_sibling,
        }
    }

    /// Makes page `at` of a node the first of its lower half and returns the new upper half. The node itself becomes
    /// the lower half, so its children and every handle to its end stay as they are.
    pub(crate) fn split(&mut self, id: NodeId, at: u32) -> Result<NodeId, RadixError> {
        let upper = self.allocate()?;
        self.unlink(id);
        let cut = at as usize * self.page_size();
        let node = &mut self.nodes[id];
        let tokens = node.tokens[..cut].to_vec();
        node.tokens = node.tokens[cut..].to_vec();
        let (parent, root, start, accesses) = (node.parent, node.root, node.start, node.accesses);
        let (used_at, watched) = (node.used_at, node.watched);
        (node.start, node.pages) = (start + at, node.pages - at);
        let pins = node.pins.clone();
        let runs: Box<[Run]> = node.runs.iter_mut().map(|run| run.cut(at)).collect();
        let transient = cut_transient(node, at);

        let node = &mut self.nodes[upper];
        (node.root, node.start, node.pages, node.accesses) = (root, start, at, accesses);
        (node.tokens, node.pins, node.runs, node.transient) = (tokens, pins, runs, transient);
        // Whoever watches ends with the lower half or below it, and what has changed is marked there.
        (node.used_at, node.watched) = (used_at, watched);
        if let Some(Transient { owner, .. }) = transient {
            self.owners.entry(owner).or_default().push(upper);
        }
        self.link(upper, parent);
        self.link(id, upper);
        for place in 0..self.places.len() {
            let order = &mut self.places[place].order;
            share_membership(order.as_mut(), id, upper, |node| !self.nodes[node].runs[place].is_empty());
        }
        self.share_ghosts(id, upper);
        if self.is_to_load(id) || self.is_to_load(upper) {
            self.mark_changed(id);
        }
        Ok(upper)
    }

    fn share_ghosts(&mut self, lower: NodeId, upper: NodeId) {
        for id in [lower, upper] {
            self.nodes[id].ghosts = self.count_ghosts(id);
        }
        share_membership(&mut self.ghosts, lower, upper, |node| self.nodes[node].ghosts > 0);
    }

    /// Joins a node with its only child where nothing tells the two apart any more, so that text published page by
    /// page ends up in one node. The child keeps its id, for the pins that end in it or below.
    pub(crate) fn join_with_child(&mut self, id: NodeId) {
        let child = self.nodes[id].first_child;
        if child.is_nil() || !self.can_join(id, child) {
            return;
        }
        self.unlink(child);
        self.unlink(id);
        for place in 0..self.places.len() {
            let order = &mut self.places[place].order;
            if order.contains(id) && !order.contains(child) {
                order.insert_after(child, id);
            }
            order.remove(id);
        }
        let upper = &mut self.nodes[id];
        let (parent, start, pages) = (upper.parent, upper.start, upper.pages);
        let (mut tokens, runs) = (std::mem::take(&mut upper.tokens), std::mem::take(&mut upper.runs));
        let lower = &mut self.nodes[child];
        tokens.extend_from_slice(&lower.tokens);
        (lower.tokens, lower.start, lower.pages) = (tokens, start, lower.pages + pages);
        for (mut above, below) in runs.into_vec().into_iter().zip(lower.runs.iter_mut()) {
            if above.is_empty() && !below.is_empty() {
                below.start += pages;
            } else if !above.is_empty() {
                above.slots.extend_from_slice(&below.slots);
                *below = above;
            }
        }
        if self.is_to_load(child) || self.is_changed(id) {
            self.mark_changed(child);
        }
        self.mark_unchanged(id);
        self.nodes.release(id);
        self.link(child, parent);
    }

    fn can_join(&self, id: NodeId, child: NodeId) -> bool {
        let (upper, lower) = (&self.nodes[id], &self.nodes[child]);
        let alike = lower.next_sibling.is_nil()
            && !upper.parent.is_nil()
            && upper.watchers.is_empty()
            && upper.pins == lower.pins
            && upper.accesses == lower.accesses
            && upper.ghosts + lower.ghosts == 0
            && upper.transient.is_none()
            && lower.transient.is_none();
        alike
            && self.places.iter().zip(upper.runs.iter().zip(&lower.runs)).all(|(place, (above, below))| {
                above.is_empty()
                    || below.is_empty()
                    || (above.end() == upper.pages
                        && below.start == 0
                        && (!place.order.contains(id) || place.order.after(child) == Some(id)))
            })
    }

    /// Removes the last `pages` pages of a leaf, and the leaf itself if they are all it has. They must be ghosts.
    pub(crate) fn shorten(&mut self, id: NodeId, pages: u32) {
        let page_size = self.page_size();
        self.ghost_pages -= pages as usize;
        let node = &mut self.nodes[id];
        node.ghosts -= pages;
        let left = node.pages - pages;
        if node.ghosts == 0 {
            self.ghosts.remove(id);
        }
        if left > 0 {
            node.pages = left;
            node.tokens.truncate(left as usize * page_size);
            if node.tokens.capacity() / 2 > node.tokens.len() {
                node.tokens.shrink_to_fit();
            }
            return;
        }
        let (parent, root) = (node.parent, node.root);
        self.unlink(id);
        self.nodes.release(id);
        if parent == root && self.nodes[root].is_leaf() {
            self.remove_root(root);
        }
    }

    /// Forgets a namespace that has no pages.
    pub(crate) fn remove_root(&mut self, root: NodeId) {
        if let Some(namespace) = self.nodes[root].namespace.take() {
            self.roots.remove(&*namespace);
        }
        self.nodes.release(root);
    }
}

/// Leaves the transient pages of a lower half with it and returns those of the upper half.
fn cut_transient(lower: &mut Node, at: u32) -> Option<Transient> {
    let whole = lower.transient?;
    let from = whole.from.saturating_sub(at);
    if whole.from > 0 && from == 0 {
        // The access that came with the first publish was not the lower half's: none of its pages is published.
        lower.accesses = lower.accesses.saturating_sub(1);
    }
    lower.transient = Some(Transient { from, ..whole });
    (whole.from < at).then_some(whole)
}

/// After a split: the upper half joins directly after the lower one, and each half stays only if it belongs.
fn share_membership(
    order: &mut dyn EvictionOrder,
    lower: NodeId,
    upper: NodeId,
    belongs: impl Fn(NodeId) -> bool,
) {
    if !order.contains(lower) {
        return;
    }
    if belongs(upper) {
        order.insert_after(upper, lower);
    }
    if !belongs(lower) {
        order.remove(lower);
    }
}
