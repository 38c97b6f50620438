//! What the tree answers with: plain data, no reference into the tree.

use crate::handle::Handle;
use std::ops::Range;
use strata_types::{GroupId, Namespace, PageId, RequestId, TierId, Token};

/// Consecutive pages of a path that one tier holds.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MatchRun {
    /// The first page, counted from the start of the sequence.
    pub start_page: u32,
    /// The slot of each page.
    pub slots: Vec<PageId>,
}

impl MatchRun {
    /// The pages of the run.
    pub fn pages(&self) -> Range<u32> {
        self.start_page..self.start_page + self.slots.len() as u32
    }
}

/// What the tree knows about a token sequence.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct MatchResult {
    /// The end of the matched path; empty if nothing matched.
    pub handle: Handle,
    /// Pages matched: the longest prefix that the union of the tiers holds.
    pub pages: u32,
    /// Per tier, by its index: the runs that it holds of those pages, in order, touching runs joined.
    pub tiers: Vec<Vec<MatchRun>>,
    /// Transient runs after the matched pages, in order.
    pub transient: Vec<TransientRun>,
}

impl MatchResult {
    /// The slots of the longest prefix that this tier alone holds: the page table of a device hit.
    pub fn prefix(&self, tier: TierId) -> &[PageId] {
        match self.tiers.get(tier.index()).and_then(|runs| runs.first()) {
            Some(run) if run.start_page == 0 => &run.slots,
            _ => &[],
        }
    }

    /// The slot of one page in one tier.
    pub fn slot(&self, tier: TierId, page: u32) -> Option<PageId> {
        let runs = self.tiers.get(tier.index())?;
        let index = runs.partition_point(|run| run.start_page <= page).checked_sub(1)?;
        runs[index].slots.get((page - runs[index].start_page) as usize).copied()
    }

    /// The matched pages cut into runs, each with the fastest tier that holds it.
    pub fn fastest(&self) -> Vec<(Range<u32>, TierId)> {
        let mut cut: Vec<(Range<u32>, TierId)> = Vec::new();
        let mut page = 0;
        while page < self.pages {
            let mut end = self.pages;
            let mut found = None;
            for (tier, runs) in self.tiers.iter().enumerate() {
                let index = runs.partition_point(|run| run.pages().end <= page);
                let Some(run) = runs.get(index) else { continue };
                if run.start_page <= page {
                    end = end.min(run.pages().end);
                    found = Some(TierId(tier as u8));
                    break;
                }
                end = end.min(run.start_page);
            }
            let Some(tier) = found else { break };
            cut.push((page..end, tier));
            page = end;
        }
        cut
    }
}

/// What an insert has done.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct InsertResult {
    /// The end of the inserted path.
    pub handle: Handle,
    /// Pages that the tier held already, with the offered slot that was therefore not taken: the caller frees it.
    pub duplicates: Vec<(u32, PageId)>,
}

/// A copy that has left the tree.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Evicted {
    /// The tier that it was in.
    pub tier: TierId,
    /// The slot that it had.
    pub slot: PageId,
    /// Whether its path was pinned in that tier. Only `remove` takes such a copy: its slot must not be used again
    /// before the plans and transfers that use it have finished.
    pub in_use: bool,
}

/// How far a transient run is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum TransientState {
    /// A waiting request will compute it.
    Queued,
    /// It is being computed.
    InFlight,
}

/// Pages that are known by their tokens and held by no tier yet.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TransientRun {
    /// The request that computes, or will compute, the run.
    pub owner: RequestId,
    /// How far it is.
    pub state: TransientState,
    /// The pages, counted from the start of the sequence. `pages.start` is the owner's published watermark here.
    pub pages: Range<u32>,
}

/// What a claim found and took.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Claim {
    /// The end of the claimed path: all whole pages of the sequence.
    pub handle: Handle,
    /// Pages that some tier holds, from the start of the sequence.
    pub held: u32,
    /// The pages that the claiming request owns now, in order, touching runs joined.
    pub own: Vec<Range<u32>>,
    /// The pages that others own.
    pub foreign: Vec<TransientRun>,
}

/// From which end of the eviction order to look.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Direction {
    /// Next to be evicted first; a run that passes the limit gives its last pages.
    Coldest,
    /// Last to be evicted first; a run that passes the limit gives its first pages.
    Hottest,
}

/// Pages that one tier holds and another does not.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MissingRun {
    /// The namespace of the sequence.
    pub namespace: Namespace,
    /// The end of the run, for pinning and for `page_path`.
    pub handle: Handle,
    /// The first page, counted from the start of the sequence.
    pub start_page: u32,
    /// The slots in the tier that holds the pages.
    pub slots: Vec<PageId>,
    /// How often the pages were accessed, creation included.
    pub accesses: u32,
    /// The tokens from the start of the sequence to the end of the run; empty where the caller gave the path.
    pub tokens: Vec<Token>,
}

/// How a watched path stands: where each of its pages is, or who will compute it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Standing {
    /// Pages of the hit that the device holds.
    pub device: u32,
    /// Pages of the hit that the host holds and the device lacks.
    pub host: u32,
    /// Pages of the hit that only tiers below the host hold.
    pub disk: u32,
    /// The pages counted in `host`, first to last, by the node that they are in. The first number names the node for as
    /// long as it lives, so what two paths would load alike is under the same number: the smaller count of the two.
    pub loads: Vec<(u64, u32)>,
    /// Pages that others compute or will compute.
    pub foreign: u32,
    /// Who owns the first of those.
    pub foreign_owner: Option<RequestId>,
    /// Whether some of those have not been started.
    pub foreign_queued: bool,
    /// Whether some of those are being computed.
    pub foreign_in_flight: bool,
    /// Pages that the watching request owns.
    pub own: u32,
    /// Pages that no tier holds and nobody owns.
    pub unowned: u32,
}

/// The pages of one place.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PlaceStats {
    /// The group.
    pub group: GroupId,
    /// The tier.
    pub tier: TierId,
    /// Pages that the place holds.
    pub resident: usize,
    /// Of those, the pages that no pin keeps.
    pub evictable: usize,
    /// Of those, the pages that a pin keeps.
    pub pinned: usize,
}

/// The size of the tree.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct TreeStats {
    /// Nodes, the namespaces' roots left out.
    pub nodes: usize,
    /// Namespaces that have pages.
    pub namespaces: usize,
    /// Pages that no tier holds, nobody will compute and nobody watches.
    pub ghost_pages: usize,
    /// Requests that watch a path.
    pub watchers: usize,
    /// Pages that some request will compute or is computing.
    pub transient_pages: usize,
    /// One per place, by group, then tier.
    pub places: Vec<PlaceStats>,
}
