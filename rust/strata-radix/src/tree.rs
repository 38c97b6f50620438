//! The tree itself: its parts, its limits, and the small steps that every operation shares.

use crate::arena::{Arena, NodeId};
use crate::children::Children;
use crate::error::RadixError;
use crate::handle::Handle;
use crate::order::{EvictionOrder, Lru};
use crate::values::{PlaceStats, TreeStats};
use crate::watch::Watcher;
use foldhash::quality::RandomState;
use hashbrown::HashMap;
use std::ops::Range;
use strata_types::{GroupId, Namespace, RequestId, TierId};

/// What a tree is made for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TreeConfig {
    /// Tokens of a page.
    pub page_size: u32,
    /// Groups of layers that share page ids and hit rules.
    pub groups: u16,
    /// Tiers of the hierarchy.
    pub tiers: u8,
    /// How many pages that no tier holds any more may keep their tokens and access count.
    pub ghost_pages: usize,
}

/// One tier of one group: its order, and its pages counted as they change.
#[derive(Debug)]
pub(crate) struct Place {
    pub order: Box<dyn EvictionOrder>,
    pub resident: usize,
    pub evictable: usize,
}

/// Tokens to pages to residency. See the crate's documentation for what always holds.
#[derive(Debug)]
pub struct HiRadixTree {
    pub(crate) config: TreeConfig,
    pub(crate) nodes: Arena,
    pub(crate) roots: HashMap<Namespace, NodeId, RandomState>,
    pub(crate) children: Children,
    pub(crate) places: Vec<Place>,
    pub(crate) ghosts: Lru,
    pub(crate) ghost_pages: usize,
    pub(crate) transient_pages: usize,
    /// The nodes whose transient pages each request owns.
    pub(crate) owners: HashMap<RequestId, Vec<NodeId>, RandomState>,
    pub(crate) watchers: HashMap<RequestId, Watcher, RandomState>,
    /// Watched nodes that changed since the watchers were last told, each once.
    pub(crate) changed: Vec<NodeId>,
    /// Whatever the caller counts time in.
    pub(crate) clock: u64,
}

impl HiRadixTree {
    /// An empty tree that evicts the least recently used pages first.
    ///
    /// # Errors
    /// `Configuration` if a size other than `ghost_pages` is 0.
    pub fn new(config: TreeConfig) -> Result<HiRadixTree, RadixError> {
        HiRadixTree::with_order(config, |_, _| Box::new(Lru::new()))
    }

    /// An empty tree with an eviction order of the caller's for each place.
    ///
    /// # Errors
    /// `Configuration` if a size other than `ghost_pages` is 0.
    pub fn with_order(
        config: TreeConfig,
        mut order: impl FnMut(GroupId, TierId) -> Box<dyn EvictionOrder>,
    ) -> Result<HiRadixTree, RadixError> {
        let sizes = [
            ("page_size", config.page_size),
            ("groups", config.groups.into()),
            ("tiers", config.tiers.into()),
        ];
        if let Some((field, _)) = sizes.iter().find(|(_, value)| *value == 0) {
            return Err(RadixError::Configuration { field });
        }
        let mut places = Vec::new();
        for group in 0..config.groups {
            for tier in 0..config.tiers {
                places.push(Place { order: order(GroupId(group), TierId(tier)), resident: 0, evictable: 0 });
            }
        }
        Ok(HiRadixTree {
            config,
            nodes: Arena::default(),
            roots: HashMap::default(),
            children: Children::default(),
            places,
            ghosts: Lru::new(),
            ghost_pages: 0,
            transient_pages: 0,
            owners: HashMap::default(),
            watchers: HashMap::default(),
            changed: Vec::new(),
            clock: 0,
        })
    }

    /// What the tree was made for.
    pub fn config(&self) -> TreeConfig {
        self.config
    }

    /// Sets the clock by which `idle_time` counts. The order of eviction does not depend on it.
    pub fn set_clock(&mut self, clock: u64) {
        self.clock = clock;
    }

    /// Tokens of a page.
    pub fn page_size(&self) -> usize {
        self.config.page_size as usize
    }

    /// Pages that no pin keeps in this place. Eviction can free them all, except last copies on paths that are
    /// pinned in another tier. 0 for a place that the tree does not have.
    pub fn evictable_pages(&self, group: GroupId, tier: TierId) -> usize {
        self.place(group, tier).map_or(0, |place| self.places[place].evictable)
    }

    /// Pages that this place holds. 0 for a place that the tree does not have.
    pub fn resident_pages(&self, group: GroupId, tier: TierId) -> usize {
        self.place(group, tier).map_or(0, |place| self.places[place].resident)
    }

    /// The size of the tree, in O(places).
    pub fn stats(&self) -> TreeStats {
        let places = self.places.iter().enumerate().map(|(index, place)| {
            let (group, tier) = self.names(index);
            let Place { resident, evictable, .. } = *place;
            PlaceStats { group, tier, resident, evictable, pinned: resident - evictable }
        });
        TreeStats {
            nodes: self.nodes.len() - self.roots.len(),
            namespaces: self.roots.len(),
            ghost_pages: self.ghost_pages,
            watchers: self.watchers.len(),
            transient_pages: self.transient_pages,
            places: places.collect(),
        }
    }

    /// The index of a place in per-place tables.
    pub(crate) fn place(&self, group: GroupId, tier: TierId) -> Result<usize, RadixError> {
        let TreeConfig { groups, tiers, .. } = self.config;
        if group.0 >= groups || tier.0 >= tiers {
            return Err(RadixError::UnknownPlace { group, tier, groups, tiers });
        }
        Ok(usize::from(group.0) * usize::from(tiers) + tier.index())
    }

    /// The group and the tier of a place.
    pub(crate) fn names(&self, place: usize) -> (GroupId, TierId) {
        let tiers = usize::from(self.config.tiers);
        (GroupId((place / tiers) as u16), TierId((place % tiers) as u8))
    }

    /// All places of the group of this place.
    pub(crate) fn group_of(&self, place: usize) -> Range<usize> {
        let tiers = usize::from(self.config.tiers);
        let start = place / tiers * tiers;
        start..start + tiers
    }

    /// The tier of a place, as an index.
    pub(crate) fn tier_of(&self, place: usize) -> usize {
        place % usize::from(self.config.tiers)
    }

    /// The pages of a node, counted from its first, that some tier of some group holds.
    pub(crate) fn held(&self, id: NodeId) -> u32 {
        let tiers = usize::from(self.config.tiers);
        let node = &self.nodes[id];
        (0..self.places.len())
            .step_by(tiers)
            .map(|first| node.covered(first..first + tiers))
            .max()
            .unwrap_or(0)
    }

    /// The handle to the first `pages` pages of the path through a node.
    pub(crate) fn handle(&self, node: NodeId, pages: u32) -> Handle {
        Handle { node, generation: self.nodes[node].generation, pages }
    }

    /// The node in which a handle's path ends: splits may have moved that end up, never down.
    pub(crate) fn resolve(&self, handle: Handle) -> Result<NodeId, RadixError> {
        let stale = RadixError::Stale { pages: handle.pages };
        let mut id = handle.node;
        match self.nodes.get(id) {
            Some(node) if node.generation == handle.generation && handle.pages <= node.end() => {}
            _ => return Err(stale),
        }
        while self.nodes[id].start >= handle.pages {
            id = self.nodes[id].parent;
        }
        Ok(id)
    }

    /// Every node from the one in which the path ends up to the root, which is left out.
    pub(crate) fn ascend(&self, end: NodeId) -> impl Iterator<Item = NodeId> + '_ {
        std::iter::successors(Some(end), |id| self.nodes.get(*id).map(|node| node.parent))
            .take_while(|id| self.nodes.get(*id).is_some_and(|node| !node.parent.is_nil()))
    }
}
