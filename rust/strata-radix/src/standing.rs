//! How a watched path stands, read from its nodes, last to first: no token is compared, no page looked at by itself.

use crate::arena::{Node, NodeId, Run};
use crate::error::RadixError;
use crate::tree::HiRadixTree;
use crate::values::{Standing, TransientState};
use std::ops::Range;
use strata_types::{GroupId, RequestId, TierId};

impl HiRadixTree {
    /// How the first `usable_pages` pages of a request's watched path stand. Changes nothing; O(nodes of the path).
    ///
    /// # Errors
    /// `UnknownPlace` for a group that the tree does not have; `Unwatched`.
    pub fn standing(
        &self,
        request: RequestId,
        group: GroupId,
        usable_pages: u32,
    ) -> Result<Standing, RadixError> {
        let tiers = self.group_of(self.place(group, TierId::DEVICE)?);
        let mut standing = Standing::default();
        for id in self.ascend(self.watcher(request)?.node) {
            let node = &self.nodes[id];
            let limit = usable_pages.saturating_sub(node.start).min(node.pages);
            if limit > 0 {
                self.add_hit(&mut standing, id, tiers.clone(), limit);
                self.add_transient(&mut standing, id, request, limit);
            }
        }
        standing.loads.reverse();
        Ok(standing)
    }

    /// Counts the pages among the first `limit` of a node that the group holds. Those of all nodes are one hit, because
    /// what a group holds is prefix-closed.
    fn add_hit(&self, standing: &mut Standing, id: NodeId, tiers: Range<usize>, limit: u32) {
        let node = &self.nodes[id];
        let covered = node.covered(tiers.clone()).min(limit);
        if covered == 0 {
            return;
        }
        let device = overlap(&node.runs[tiers.start], 0..covered);
        let host = to_load(node, tiers, covered);
        standing.device += device;
        standing.host += host;
        standing.disk += covered - device - host;
        if host > 0 {
            standing.loads.push((u64::from(node.generation) << 32 | u64::from(id.0), host));
        }
    }

    /// Counts the pages among the first `limit` of a node that no tier holds.
    fn add_transient(&self, standing: &mut Standing, id: NodeId, request: RequestId, limit: u32) {
        let held = self.held(id);
        let node = &self.nodes[id];
        let unowned_end = node.transient.map_or(node.pages, |transient| transient.from).min(limit);
        standing.unowned += unowned_end.saturating_sub(held);
        let Some(run) = self.transient_part(id, limit) else { return };
        let pages = run.pages.end - run.pages.start;
        if run.owner == request {
            standing.own += pages;
            return;
        }
        standing.foreign += pages;
        // The nodes come last to first, so the last one to write is the first run.
        standing.foreign_owner = Some(run.owner);
        match run.state {
            TransientState::Queued => standing.foreign_queued = true,
            TransientState::InFlight => standing.foreign_in_flight = true,
        }
    }

    /// Whether somebody watches the node and would have to load pages of it.
    pub(crate) fn is_to_load(&self, id: NodeId) -> bool {
        let node = &self.nodes[id];
        let mut groups = (0..self.places.len()).step_by(usize::from(self.config.tiers));
        node.watched > 0 && groups.any(|first| to_load(node, self.group_of(first), node.pages) > 0)
    }
}

/// The pages among the first `limit` of a node that the host holds and the device lacks.
fn to_load(node: &Node, tiers: Range<usize>, limit: u32) -> u32 {
    let runs = &node.runs[tiers];
    let (Some(device), Some(host)) = (runs.get(TierId::DEVICE.index()), runs.get(TierId::HOST.index()))
    else {
        return 0;
    };
    overlap(host, 0..limit) - overlap(device, host.start..host.end().min(limit))
}

/// How many of the pages a run holds.
fn overlap(run: &Run, pages: Range<u32>) -> u32 {
    run.end().min(pages.end).saturating_sub(run.start.max(pages.start))
}
