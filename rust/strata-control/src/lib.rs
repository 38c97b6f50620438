//! The cache controller turns decisions into transfers. What it guarantees:
//! - a page becomes resident in a tier only after a Mover said that all its bytes are there;
//! - reserve -> move -> commit | abort, each exactly once; what a transfer uses is pinned or reserved until its
//!   completion, so nothing is handed out twice; late and unknown completions are counted, never fatal;
//! - no tier passes its pool, and every byte of a pool is either free, reserved, in the tree or in quarantine.
#![forbid(unsafe_code)]

mod admit;
mod budget;
mod config;
mod controller;
mod keys;
mod local;
mod maintain;
mod moving;
mod recover;
mod room;
mod saving;
mod settle;
mod stats;
mod tiers;
mod transfer;
mod watching;
mod write;

pub use admit::{Admitted, PageSource, Prefetch};
pub use config::ControlConfig;
pub use controller::{CacheController, ControlAction};
pub use local::LocalCache;
pub use maintain::Emptied;
pub use settle::Effect;
pub use stats::{ControlStats, EdgeStats, HitAges, TierStats, HIT_AGES_S};
pub use write::{Back, Selective, Through, WritePolicy};

use thiserror::Error;

/// What the controller cannot do. All of these mean a defect in Strata, not a full tier.
#[derive(Debug, Error)]
pub enum ControlError {
    /// The tree refused.
    #[error("tree: {0}")]
    Tree(#[from] strata_radix::RadixError),
    /// A pool refused.
    #[error("pool: {0}")]
    Pool(#[from] strata_tier::PoolError),
    /// The books do not agree.
    #[error("cache state is inconsistent: {0}")]
    Inconsistent(String),
}
