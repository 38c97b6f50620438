//! The proof that the tree is whole. Slow, for tests and for idle moments; it looks at everything and trusts nothing
//! that is counted elsewhere.

use crate::arena::{Node, NodeId, UNCHANGED};
use crate::order::EvictionOrder;
use crate::tree::HiRadixTree;
use foldhash::quality::RandomState;
use hashbrown::{HashMap, HashSet};

type Map<K, V> = HashMap<K, V, RandomState>;

/// Fails with a sentence unless the condition holds.
macro_rules! ensure {
    ($condition:expr, $($message:tt)+) => {
        if !$condition {
            return Err(format!($($message)+));
        }
    };
}

impl HiRadixTree {
    /// Proves every invariant of the tree.
    ///
    /// # Errors
    /// A sentence that names the first node and the invariant that does not hold.
    pub fn check(&self) -> Result<(), String> {
        let nodes = self.collect()?;
        for id in &nodes {
            self.check_node(*id).map_err(|problem| format!("node {}: {problem}", id.0))?;
            self.check_pins(*id).map_err(|problem| format!("node {}: {problem}", id.0))?;
        }
        self.check_counts(&nodes)?;
        for place in 0..self.places.len() {
            let (group, tier) = self.names(place);
            self.check_place(&nodes, place).map_err(|problem| format!("group {group}, {tier}: {problem}"))?;
        }
        self.check_owners(&nodes)?;
        self.check_watchers(&nodes)
    }

    /// All nodes but the roots, parents first, reached from the roots; checks the links on the way.
    fn collect(&self) -> Result<Vec<NodeId>, String> {
        let mut found = Vec::new();
        for (namespace, root) in &self.roots {
            let node = &self.nodes[*root];
            let named = node.alive && node.namespace.as_deref() == Some(namespace);
            ensure!(named && node.parent.is_nil() && node.pages == 0, "root {} is no root", root.0);
            ensure!(!node.first_child.is_nil(), "root {} has no pages", root.0);
            let mut next = found.len();
            self.collect_children(*root, *root, &mut found)?;
            while let Some(id) = found.get(next).copied() {
                self.collect_children(id, *root, &mut found)?;
                next += 1;
            }
        }
        let known = found.len() + self.roots.len();
        ensure!(known == self.nodes.len(), "{known} nodes are reachable of {}", self.nodes.len());
        ensure!(self.children.len() == found.len(), "the child table holds {} nodes", self.children.len());
        Ok(found)
    }

    fn collect_children(&self, parent: NodeId, root: NodeId, found: &mut Vec<NodeId>) -> Result<(), String> {
        let (mut child, mut previous) = (self.nodes[parent].first_child, NodeId::NIL);
        while !child.is_nil() {
            ensure!(found.len() < self.nodes.len(), "the children of node {} form a ring", parent.0);
            let node = &self.nodes[child];
            let linked = node.alive
                && node.parent == parent
                && node.previous_sibling == previous
                && node.root == root
                && node.start == self.nodes[parent].end();
            ensure!(linked, "node {} is badly linked below {}", child.0, parent.0);
            found.push(child);
            (previous, child) = (child, node.next_sibling);
        }
        ensure!(
            self.nodes[parent].last_child == previous,
            "the last child of node {} is not its last",
            parent.0
        );
        Ok(())
    }

    fn check_node(&self, id: NodeId) -> Result<(), String> {
        let node = &self.nodes[id];
        let page_size = self.page_size();
        ensure!(node.pages > 0, "has no pages");
        ensure!(node.tokens.len() == node.pages as usize * page_size, "has {} tokens", node.tokens.len());
        let found = self.children.get(&self.nodes, node.parent, &node.tokens[..page_size]);
        ensure!(found == Some(id), "its parent and first page lead to {found:?}");
        for run in &node.runs {
            ensure!(run.end() <= node.pages, "run {run:?} passes its {} pages", node.pages);
            ensure!(!run.is_empty() || run.start == 0, "an empty run starts at {}", run.start);
        }
        if let Some(transient) = node.transient {
            let from = transient.from;
            ensure!(from < node.pages && from >= self.held(id), "transient from {from} on, but held before");
        }
        ensure!(node.ghosts == self.count_ghosts(id), "counts {} ghosts", node.ghosts);
        ensure!(self.ghosts.contains(id) == (node.ghosts > 0), "is wrongly in or out of the ghost list");
        self.check_prefix_closure(node)
    }

    /// The union of a group's tiers has no gap in the node, nor between the node and its parent.
    fn check_prefix_closure(&self, node: &Node) -> Result<(), String> {
        for first in (0..self.places.len()).step_by(usize::from(self.config.tiers)) {
            let group = self.group_of(first);
            let covered = node.covered(group.clone());
            let last = node.runs[group.clone()].iter().map(|run| run.end()).max().unwrap_or(0);
            ensure!(covered == last, "page {covered} is held by no tier, but later pages are");
            let parent = &self.nodes[node.parent];
            ensure!(covered == 0 || parent.covered(group) == parent.pages, "is held, its parent not wholly");
        }
        Ok(())
    }

    /// Whoever pins a child pins its parent.
    fn check_pins(&self, id: NodeId) -> Result<(), String> {
        let mut sums = vec![0u64; usize::from(self.config.tiers)];
        let mut child = self.nodes[id].first_child;
        while !child.is_nil() {
            for (sum, pins) in sums.iter_mut().zip(&self.nodes[child].pins) {
                *sum += u64::from(*pins);
            }
            child = self.nodes[child].next_sibling;
        }
        let pins = &self.nodes[id].pins;
        let enough = pins.iter().zip(&sums).all(|(own, sum)| u64::from(*own) >= *sum);
        ensure!(enough, "has pins {pins:?}, its children {sums:?}");
        Ok(())
    }

    /// Every watcher is where it says, counted on its whole path, and marked nodes are listed.
    fn check_watchers(&self, nodes: &[NodeId]) -> Result<(), String> {
        let mut listed = 0;
        for id in nodes {
            let node = &self.nodes[*id];
            for (index, request) in node.watchers.iter().enumerate() {
                let known = self.watchers.get(request);
                let right = known.is_some_and(|watcher| (watcher.node, watcher.index) == (*id, index));
                ensure!(right, "node {} lists watcher {request}, which is {known:?}", id.0);
            }
            listed += node.watchers.len();
            let (below, sorted) = self.watched_below(*id);
            let count = node.watchers.len() + below;
            ensure!(node.watched as usize == count, "node {} counts {} watchers", id.0, node.watched);
            ensure!(sorted, "a child of node {} without watchers comes before one with some", id.0);
            let unlisted = self.changed.get(node.change as usize) != Some(id);
            ensure!(node.change == UNCHANGED || !unlisted, "node {} is marked and not listed", id.0);
            ensure!(node.change == UNCHANGED || count > 0, "node {} is marked, but unwatched", id.0);
        }
        for root in self.roots.values() {
            let node = &self.nodes[*root];
            ensure!(node.watched == 0 && node.watchers.is_empty(), "root {} is watched", root.0);
            ensure!(self.watched_below(*root).1, "a child of root {} is on the wrong side", root.0);
        }
        let empty = self.watchers.values().filter(|watcher| watcher.node.is_nil()).count();
        let known = self.watchers.len();
        ensure!(listed + empty == known, "{listed} watchers are listed, {empty} watch no page, of {known}");
        let marked = nodes.iter().filter(|id| self.is_changed(**id)).count();
        ensure!(marked == self.changed.len(), "{marked} nodes are marked, {} listed", self.changed.len());
        Ok(())
    }

    /// The watchers that the children of a node count, and whether those that have some come first.
    fn watched_below(&self, id: NodeId) -> (usize, bool) {
        let first = self.nodes.get(self.nodes[id].first_child).map(|_| self.nodes[id].first_child);
        let next = |child: &NodeId| Some(self.nodes[*child].next_sibling).filter(|next| !next.is_nil());
        let counts: Vec<u32> =
            std::iter::successors(first, next).map(|child| self.nodes[child].watched).collect();
        let sorted = counts.is_sorted_by_key(|count| *count == 0);
        (counts.iter().map(|count| *count as usize).sum(), sorted)
    }

    fn check_counts(&self, nodes: &[NodeId]) -> Result<(), String> {
        let ghosts: usize = nodes.iter().map(|id| self.nodes[*id].ghosts as usize).sum();
        ensure!(ghosts == self.ghost_pages, "{ghosts} ghosts, but {} are counted", self.ghost_pages);
        let members = self.positions(&self.ghosts)?.len();
        let expected = nodes.iter().filter(|id| self.nodes[**id].ghosts > 0).count();
        ensure!(members == expected, "the ghost list has {members} nodes instead of {expected}");
        Ok(())
    }

    fn check_place(&self, nodes: &[NodeId], place: usize) -> Result<(), String> {
        let counts = &self.places[place];
        let tier = self.tier_of(place);
        let positions = self.positions(counts.order.as_ref())?;
        let mut slots = HashSet::with_hasher(RandomState::default());
        let (mut resident, mut evictable, mut members) = (0, 0, 0);
        // The position of the nearest member at or above each node; parents come first in `nodes`.
        let mut nearest: Map<NodeId, usize> = Map::default();
        for id in nodes {
            let node = &self.nodes[*id];
            let run = &node.runs[place];
            let member = !run.is_empty() && node.pins[tier] == 0;
            ensure!(positions.contains_key(id) == member, "node {} is wrongly in or out of the order", id.0);
            let above = nearest.get(&node.parent).copied();
            if member {
                let own = positions[id];
                ensure!(above.is_none_or(|above| own < above), "node {} goes after an ancestor", id.0);
                nearest.insert(*id, own);
                evictable += run.slots.len();
                members += 1;
            } else if let Some(above) = above {
                nearest.insert(*id, above);
            }
            resident += run.slots.len();
            for slot in &run.slots {
                ensure!(slots.insert(*slot), "slot {slot} is used twice");
            }
        }
        ensure!(members == positions.len(), "the order has {} nodes, not {members}", positions.len());
        ensure!(resident == counts.resident, "{resident} pages, but {} are counted", counts.resident);
        ensure!(evictable == counts.evictable, "{evictable} evictable, but {} counted", counts.evictable);
        Ok(())
    }

    /// Each member's position in an order, which must be the same from both ends.
    fn positions(&self, order: &dyn EvictionOrder) -> Result<Map<NodeId, usize>, String> {
        let mut positions = Map::default();
        let (mut next, mut previous) = (order.first(), None);
        while let Some(id) = next {
            ensure!(self.nodes.get(id).is_some(), "node {} is in an order, but not in the tree", id.0);
            ensure!(order.before(id) == previous, "the order's links disagree at node {}", id.0);
            ensure!(positions.insert(id, positions.len()).is_none(), "the order is a ring at node {}", id.0);
            (previous, next) = (Some(id), order.after(id));
        }
        ensure!(order.last() == previous, "the order's last node is not its last");
        Ok(positions)
    }

    fn check_owners(&self, nodes: &[NodeId]) -> Result<(), String> {
        let mut pages = 0;
        let mut runs = 0;
        for id in nodes {
            let node = &self.nodes[*id];
            let Some(transient) = node.transient else { continue };
            let listed = self
                .owners
                .get(&transient.owner)
                .map_or(0, |owned| owned.iter().filter(|other| *other == id).count());
            ensure!(listed == 1, "node {} is listed {listed} times with owner {}", id.0, transient.owner);
            pages += (node.pages - transient.from) as usize;
            runs += 1;
        }
        let listed: usize = self.owners.values().map(Vec::len).sum();
        ensure!(listed == runs, "{listed} transient runs are listed, {runs} exist");
        ensure!(pages == self.transient_pages, "{pages} transient pages, {} counted", self.transient_pages);
        Ok(())
    }
}
