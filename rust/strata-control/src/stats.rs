//! What the controller counts. Counters only grow; gauges are read off the tree and the pools.

use strata_types::TransferKind;

/// One edge of the hierarchy.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct EdgeStats {
    /// Transfers that were started.
    pub started: u64,
    /// Transfers that moved all their pages.
    pub completed: u64,
    /// Transfers that failed.
    pub failed: u64,
    /// Transfers that were cancelled.
    pub cancelled: u64,
    /// Pages that became whole.
    pub pages: u64,
    /// Bytes that were moved.
    pub bytes: u64,
    /// Nanoseconds that the Mover worked.
    pub busy_ns: u64,
    /// Pages that were not copied down because the tier below had no room.
    pub skipped_pages: u64,
}

/// One tier.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TierStats {
    /// Pages of the tier.
    pub capacity: u32,
    /// Pages that are not free.
    pub used: u32,
    /// Pages that match.
    pub resident: u32,
    /// Resident pages that are in use and cannot be evicted.
    pub pinned: u32,
    /// Pages that wait for a device to let go.
    pub quarantined: u32,
    /// Pages that were evicted for others.
    pub evicted: u64,
}

/// Upper ends of the classes of hit ages, in seconds; what is older has a class of its own.
pub const HIT_AGES_S: [u64; 5] = [1, 10, 60, 600, 3600];

/// How long the pages of hits had not been accessed before.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct HitAges {
    /// Hits by class.
    pub hits: [u64; HIT_AGES_S.len() + 1],
    /// The sum of all ages in nanoseconds.
    pub total_ns: u64,
}

impl HitAges {
    /// Counts one hit.
    pub(crate) fn count(&mut self, age_ns: u64) {
        let class = HIT_AGES_S.iter().position(|end| age_ns <= end * 1_000_000_000);
        self.hits[class.unwrap_or(HIT_AGES_S.len())] += 1;
        self.total_ns = self.total_ns.saturating_add(age_ns);
    }
}

/// All counters.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ControlStats {
    edges: [EdgeStats; TransferKind::COUNT],
    /// Per tier, pages evicted for others.
    pub evicted: [u64; 3],
    /// Per tier, pages that a write-back policy should have copied down before they were evicted, and could not.
    pub unsaved_pages: [u64; 2],
    /// Ages of hits.
    pub hit_ages: HitAges,
    /// Pages that went between device and disk without a host tier.
    pub staged_pages: u64,
    /// Pages that were not written to disk because the daily budget was spent.
    pub over_budget_pages: u64,
    /// Records that did not hold what they should.
    pub corrupt_records: u64,
    /// Completions of transfers that are not known or already ended.
    pub unknown_completions: u64,
}

impl ControlStats {
    /// The counters of one edge.
    pub fn edge(&self, kind: TransferKind) -> &EdgeStats {
        &self.edges[kind.index()]
    }

    pub(crate) fn edge_mut(&mut self, kind: TransferKind) -> &mut EdgeStats {
        &mut self.edges[kind.index()]
    }
}
