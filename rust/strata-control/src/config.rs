//! The sizes that the controller works with.

use crate::write::WritePolicy;
use strata_types::{GroupId, TierId};

/// Sizes and policies of the hierarchy. A tier of zero pages is off; the device tier always exists.
pub struct ControlConfig {
    /// Tokens of a page.
    pub page_size: u32,
    /// The group whose pages these are.
    pub group: GroupId,
    /// Layers of the group, for tickets.
    pub layers: u32,
    /// Bytes of a page.
    pub page_bytes: u64,
    /// Pages of each tier, from the device down.
    pub pages: [u32; 3],
    /// Shards that report each device transfer.
    pub device_shards: u16,
    /// When device pages are copied to the host.
    pub backup: Box<dyn WritePolicy>,
    /// When host pages are copied to disk.
    pub spill: Box<dyn WritePolicy>,
    /// Pages of one transfer at most; a long run becomes several, each committed on its own.
    pub transfer_pages: u32,
    /// Pages forgotten by every tier whose access counts are kept.
    pub ghost_pages: usize,
}

impl ControlConfig {
    /// Whether a tier exists and has room for anything.
    pub fn has(&self, tier: TierId) -> bool {
        self.pages.get(tier.index()).is_some_and(|pages| *pages > 0)
    }

    /// The tier below, if there is one that is on.
    pub fn below(&self, tier: TierId) -> Option<TierId> {
        let below = TierId(tier.0 + 1);
        self.has(below).then_some(below)
    }
}
