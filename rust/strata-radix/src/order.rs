//! In which order a place gives up its nodes. The tree calls leaf first, root last, so an order that keeps the
//! sequence of its calls keeps each node before its ancestors, and eviction never meets a node with descendants.

use crate::arena::NodeId;
use std::fmt;

/// The eviction order of one place. Members are the nodes with pages there that no pin keeps.
///
/// An implementation MUST keep every member before its ancestors, given that the tree uses a path from its leaf to
/// its root, and puts the upper half of a split node directly after the lower half.
pub trait EvictionOrder: fmt::Debug + Send {
    /// Adds a node that is no member, as the one just used.
    fn insert(&mut self, node: NodeId);
    /// Adds a node that is no member, directly after a member.
    fn insert_after(&mut self, node: NodeId, member: NodeId);
    /// Removes a member; does nothing to others.
    fn remove(&mut self, node: NodeId);
    /// A member was used.
    fn touch(&mut self, node: NodeId);
    /// Whether the node is a member.
    fn contains(&self, node: NodeId) -> bool;
    /// The member to evict first.
    fn first(&self) -> Option<NodeId>;
    /// The member to evict last.
    fn last(&self) -> Option<NodeId>;
    /// The member to evict after this one.
    fn after(&self, node: NodeId) -> Option<NodeId>;
    /// The member to evict before this one.
    fn before(&self, node: NodeId) -> Option<NodeId>;
}

/// Marks a link as outside the list.
const OUTSIDE: NodeId = NodeId(u32::MAX - 1);

#[derive(Clone, Copy, Debug)]
struct Link {
    before: NodeId,
    after: NodeId,
}

/// Least recently used first. A list through a table by node: no allocation but the table's growth.
#[derive(Debug)]
pub struct Lru {
    links: Vec<Link>,
    first: NodeId,
    last: NodeId,
}

impl Lru {
    /// An order without members.
    pub fn new() -> Lru {
        Lru { links: Vec::new(), first: NodeId::NIL, last: NodeId::NIL }
    }

    fn link_between(&mut self, node: NodeId, before: NodeId, after: NodeId) {
        if node.index() >= self.links.len() {
            self.links.resize(node.index() + 1, Link { before: OUTSIDE, after: OUTSIDE });
        }
        self.links[node.index()] = Link { before, after };
        self.join(before, node);
        self.join(node, after);
    }

    /// Makes `after` follow `before`; an end of the list stands in for a node that is none.
    fn join(&mut self, before: NodeId, after: NodeId) {
        match self.links.get_mut(before.index()) {
            Some(link) => link.after = after,
            None => self.first = after,
        }
        match self.links.get_mut(after.index()) {
            Some(link) => link.before = before,
            None => self.last = before,
        }
    }

    fn link(&self, node: NodeId) -> Option<Link> {
        self.links.get(node.index()).copied().filter(|link| link.before != OUTSIDE)
    }
}

impl Default for Lru {
    fn default() -> Self {
        Lru::new()
    }
}

fn some(node: NodeId) -> Option<NodeId> {
    (!node.is_nil()).then_some(node)
}

impl EvictionOrder for Lru {
    fn insert(&mut self, node: NodeId) {
        self.link_between(node, self.last, NodeId::NIL);
    }

    fn insert_after(&mut self, node: NodeId, member: NodeId) {
        let after = self.link(member).map_or(NodeId::NIL, |link| link.after);
        self.link_between(node, member, after);
    }

    fn remove(&mut self, node: NodeId) {
        let Some(link) = self.link(node) else { return };
        self.join(link.before, link.after);
        self.links[node.index()] = Link { before: OUTSIDE, after: OUTSIDE };
    }

    fn touch(&mut self, node: NodeId) {
        if self.last != node {
            self.remove(node);
            self.insert(node);
        }
    }

    fn contains(&self, node: NodeId) -> bool {
        self.link(node).is_some()
    }

    fn first(&self) -> Option<NodeId> {
        some(self.first)
    }

    fn last(&self) -> Option<NodeId> {
        some(self.last)
    }

    fn after(&self, node: NodeId) -> Option<NodeId> {
        some(self.link(node)?.after)
    }

    fn before(&self, node: NodeId) -> Option<NodeId> {
        some(self.link(node)?.before)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn members(order: &Lru) -> Vec<u32> {
        let forward: Vec<u32> =
            std::iter::successors(order.first(), |id| order.after(*id)).map(|id| id.0).collect();
        let mut back: Vec<u32> =
            std::iter::successors(order.last(), |id| order.before(*id)).map(|id| id.0).collect();
        back.reverse();
        assert_eq!(forward, back);
        forward
    }

    #[test]
    fn the_least_recently_used_is_first() {
        let mut order = Lru::new();
        assert_eq!(members(&order), []);
        for id in [3, 0, 7] {
            order.insert(NodeId(id));
        }
        order.touch(NodeId(3));
        assert_eq!(members(&order), [0, 7, 3]);
        order.insert_after(NodeId(1), NodeId(3));
        order.insert_after(NodeId(2), NodeId(0));
        assert_eq!(members(&order), [0, 2, 7, 3, 1]);
        for id in [0, 1, 1, 7, 9] {
            order.remove(NodeId(id));
        }
        assert_eq!(members(&order), [2, 3]);
        assert!(order.contains(NodeId(2)) && !order.contains(NodeId(0)) && !order.contains(NodeId(90)));
    }
}
