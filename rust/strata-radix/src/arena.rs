//! Nodes, by index. A freed index is used again with another generation, so an old handle never names a new node.

use crate::error::RadixError;
use crate::values::TransientState;
use std::ops::{Index, IndexMut};
use strata_types::{Namespace, PageId, RequestId, Token};

/// A node of the tree, as eviction orders see it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct NodeId(pub(crate) u32);

impl NodeId {
    pub(crate) const NIL: NodeId = NodeId(u32::MAX);

    /// A dense index, for tables by node.
    pub fn index(self) -> usize {
        self.0 as usize
    }

    pub(crate) fn is_nil(self) -> bool {
        self == NodeId::NIL
    }
}

/// The pages `start..start + slots.len()` of a node that one place holds.
#[derive(Clone, Debug, Default)]
pub(crate) struct Run {
    pub start: u32,
    pub slots: Vec<PageId>,
}

impl Run {
    pub fn end(&self) -> u32 {
        self.start + self.slots.len() as u32
    }

    pub fn is_empty(&self) -> bool {
        self.slots.is_empty()
    }

    /// Cuts the run at page `at` of its node into what lies before and what lies after, the latter counted from 0.
    pub fn cut(&mut self, at: u32) -> Run {
        if self.is_empty() || at >= self.end() {
            return std::mem::take(self);
        }
        if at <= self.start {
            self.start -= at;
            return Run::default();
        }
        let lower = self.slots.split_off((at - self.start) as usize);
        let upper = std::mem::replace(self, Run { start: 0, slots: lower });
        Run { start: upper.start, slots: upper.slots.as_slice().to_vec() }
    }
}

/// The pages from `from` to the end of a node are transient. `from` is 0 exactly if none of them has been published
/// yet; the first publish adds one access to the whole node, the pages still to come included.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Transient {
    pub owner: RequestId,
    pub state: TransientState,
    pub from: u32,
}

/// Marks a node as outside the list of changed nodes.
pub(crate) const UNCHANGED: u32 = u32::MAX;

/// A run of whole pages. A namespace's root has none, and no parent.
#[derive(Debug)]
pub(crate) struct Node {
    pub tokens: Vec<Token>,
    /// Pages of the sequence before this node.
    pub start: u32,
    /// Pages of this node.
    pub pages: u32,
    pub accesses: u32,
    /// The tree's clock at the last access, creation included.
    pub used_at: u64,
    /// Pages of this node that are counted as ghosts.
    pub ghosts: u32,
    /// Watchers of paths that end in this node or below it. Roots count none.
    pub watched: u32,
    /// Where the list of changed nodes names this one, or `UNCHANGED`.
    pub change: u32,
    /// The requests whose watched path ends with this node.
    pub watchers: Vec<RequestId>,
    pub transient: Option<Transient>,
    pub parent: NodeId,
    pub root: NodeId,
    /// Children that have watchers come before those that have none.
    pub first_child: NodeId,
    pub last_child: NodeId,
    pub next_sibling: NodeId,
    pub previous_sibling: NodeId,
    pub generation: u32,
    pub alive: bool,
    /// One per place.
    pub runs: Box<[Run]>,
    /// One per tier.
    pub pins: Box<[u32]>,
    /// Roots only.
    pub namespace: Option<Box<Namespace>>,
}

impl Node {
    pub fn end(&self) -> u32 {
        self.start + self.pages
    }

    pub fn is_leaf(&self) -> bool {
        self.first_child.is_nil()
    }

    pub fn is_pinned(&self) -> bool {
        self.pins.iter().any(|count| *count > 0)
    }

    /// The pages, counted from the first, that the runs of these places hold without a gap.
    pub fn covered(&self, places: std::ops::Range<usize>) -> u32 {
        let runs = &self.runs[places];
        let mut end = 0;
        loop {
            let next = runs.iter().filter(|run| run.start <= end).map(Run::end).max().unwrap_or(0);
            if next <= end {
                return end;
            }
            end = next;
        }
    }
}

/// All nodes.
#[derive(Debug, Default)]
pub(crate) struct Arena {
    nodes: Vec<Node>,
    free: Vec<NodeId>,
}

impl Arena {
    /// A node without pages, residency or links.
    pub fn allocate(&mut self, places: usize, tiers: usize) -> Result<NodeId, RadixError> {
        let runs = std::iter::repeat_with(Run::default).take(places).collect();
        let pins = vec![0; tiers].into_boxed_slice();
        let (id, generation) = match self.free.pop() {
            Some(id) => (id, self[id].generation),
            // Two values are kept from use: one names no node, one marks a node outside a list.
            None if self.nodes.len() >= u32::MAX as usize - 2 => {
                return Err(RadixError::Full { what: "the number of nodes" })
            }
            None => (NodeId(self.nodes.len() as u32), 0),
        };
        let node = Node {
            tokens: Vec::new(),
            start: 0,
            pages: 0,
            accesses: 0,
            used_at: 0,
            ghosts: 0,
            watched: 0,
            change: UNCHANGED,
            watchers: Vec::new(),
            transient: None,
            parent: NodeId::NIL,
            root: NodeId::NIL,
            first_child: NodeId::NIL,
            last_child: NodeId::NIL,
            next_sibling: NodeId::NIL,
            previous_sibling: NodeId::NIL,
            generation,
            alive: true,
            runs,
            pins,
            namespace: None,
        };
        match self.nodes.get_mut(id.index()) {
            Some(slot) => *slot = node,
            None => self.nodes.push(node),
        }
        Ok(id)
    }

    /// Forgets a node. Its memory goes at once, its index is used again.
    pub fn release(&mut self, id: NodeId) {
        let node = &mut self[id];
        node.alive = false;
        node.generation = node.generation.wrapping_add(1);
        node.tokens = Vec::new();
        node.watchers = Vec::new();
        node.runs = Box::default();
        node.pins = Box::default();
        node.namespace = None;
        self.free.push(id);
    }

    /// The node, if the index is in use.
    pub fn get(&self, id: NodeId) -> Option<&Node> {
        self.nodes.get(id.index()).filter(|node| node.alive)
    }

    /// The node to change, if the index is in use.
    pub fn get_mut(&mut self, id: NodeId) -> Option<&mut Node> {
        self.nodes.get_mut(id.index()).filter(|node| node.alive)
    }

    /// How many nodes are in use.
    pub fn len(&self) -> usize {
        self.nodes.len() - self.free.len()
    }
}

impl Index<NodeId> for Arena {
    type Output = Node;
    fn index(&self, id: NodeId) -> &Node {
        &self.nodes[id.index()]
    }
}

impl IndexMut<NodeId> for Arena {
    fn index_mut(&mut self, id: NodeId) -> &mut Node {
        &mut self.nodes[id.index()]
    }
}
