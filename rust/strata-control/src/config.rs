//! The sizes that the controller works with.

use crate::write::WritePolicy;
use std::time::Duration;
use strata_types::GroupId;

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
    /// Bytes that writing a page to disk takes at most, headers and padding included.
    pub record_bytes: u64,
    /// Pages of each tier, from the device down.
    pub pages: [u32; 3],
    /// Without a host tier, pages of host memory through which pages pass between device and disk. They never match.
    pub staging_pages: u32,
    /// Shards that report each device transfer.
    pub device_shards: u16,
    /// When device pages are copied to the host.
    pub backup: Box<dyn WritePolicy>,
    /// When host pages (without a host tier: device pages) are copied to disk.
    pub spill: Box<dyn WritePolicy>,
    /// The longest that an eviction waits for its victims to be copied down; then they are lost, counted.
    pub save_patience: Duration,
    /// Bytes that may be written to disk in any 24 hours; none: no limit.
    pub disk_bytes_per_day: Option<u64>,
    /// Pages of one transfer at most; a long run becomes several, each committed on its own.
    pub transfer_pages: u32,
    /// Pages forgotten by every tier whose access counts are kept.
    pub ghost_pages: usize,
}
