//! HiRadixTree: which tokens are cached, in which tiers, and in what order they may go.
//!
//! The tree compares tokens, so two sequences never share a page by accident. A node is a run of whole pages; its
//! residency in a *place* (a tier of a group) is one run of slots, its transient pages are one run with one owner.
//! Matching costs about a compare of the tokens and a copy of the slots; evicting a page is O(1), amortised.
//!
//! What holds after every call (`HiRadixTree::check` proves it):
//! - the union of the tiers is prefix-closed: a page that some tier holds follows only pages that some tier holds;
//! - no page is evicted from a place that still holds a descendant of it;
//! - no page of a pinned path is evicted from the pinned tier, nor loses its last copy to eviction in any other;
//! - no node that a watched path leads through is forgotten, and whoever watches a page that changed is told;
//! - a page's access count lives as long as the page is in the tree, a bounded number of ghosts included.
#![forbid(unsafe_code)]

mod arena;
mod check;
mod children;
mod error;
mod evict;
mod ghost;
mod handle;
mod handover;
mod insert;
mod matching;
mod order;
mod pins;
mod query;
mod remove;
mod residency;
mod shape;
mod standing;
mod transient;
mod tree;
mod values;
mod watch;

pub use arena::NodeId;
pub use error::RadixError;
pub use handle::{Handle, Pin};
pub use order::{EvictionOrder, Lru};
pub use tree::{HiRadixTree, TreeConfig};
pub use values::{
    Claim, Direction, Evicted, InsertResult, MatchResult, MatchRun, MissingRun, PlaceStats, Standing,
    TransientRun, TransientState, TreeStats,
};
