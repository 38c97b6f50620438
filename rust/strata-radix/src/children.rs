//! From (parent, first page) to child, for all nodes in one table. The hash only narrows the search: parent and
//! tokens are always compared. Its seed is random, so nobody can choose tokens that collide.

use crate::arena::{Arena, NodeId};
use foldhash::quality::RandomState;
use hashbrown::HashTable;
use std::hash::{BuildHasher, Hash, Hasher};
use strata_types::Token;

#[derive(Debug, Default)]
pub(crate) struct Children {
    table: HashTable<NodeId>,
    seed: RandomState,
}

fn hash_of(seed: &RandomState, parent: NodeId, page: &[Token]) -> u64 {
    let mut hasher = seed.build_hasher();
    hasher.write_u32(parent.0);
    Token::hash_slice(page, &mut hasher);
    hasher.finish()
}

fn key(nodes: &Arena, id: NodeId, page_size: usize) -> (NodeId, &[Token]) {
    let node = &nodes[id];
    (node.parent, &node.tokens[..page_size])
}

impl Children {
    /// The child of `parent` whose first page is `page`.
    pub fn get(&self, nodes: &Arena, parent: NodeId, page: &[Token]) -> Option<NodeId> {
        let hash = hash_of(&self.seed, parent, page);
        self.table.find(hash, |id| key(nodes, *id, page.len()) == (parent, page)).copied()
    }

    /// Adds a node under its parent and first page.
    pub fn insert(&mut self, nodes: &Arena, id: NodeId, page_size: usize) {
        let (parent, page) = key(nodes, id, page_size);
        let seed = &self.seed;
        self.table.insert_unique(hash_of(seed, parent, page), id, |other| {
            let (parent, page) = key(nodes, *other, page_size);
            hash_of(seed, parent, page)
        });
    }

    /// Removes a node; its parent and tokens must still be those that it was added with.
    pub fn remove(&mut self, nodes: &Arena, id: NodeId, page_size: usize) {
        let (parent, page) = key(nodes, id, page_size);
        if let Ok(entry) = self.table.find_entry(hash_of(&self.seed, parent, page), |other| *other == id) {
            entry.remove();
        }
    }

    pub fn len(&self) -> usize {
        self.table.len()
    }
}
