//! Transient runs: pages that some request will compute or is computing, so that others can wait instead of
//! computing them again. A page has at most one owner, and none once a tier holds it.

use crate::arena::{Node, NodeId, Transient};
use crate::error::RadixError;
use crate::matching::PathEnd;
use crate::tree::HiRadixTree;
use crate::values::{Claim, TransientRun, TransientState};
use strata_types::{Namespace, RequestId, Token};

impl HiRadixTree {
    /// Makes `owner` the owner, queued, of every whole page of the sequence that no tier holds and nobody owns.
    /// Claiming again takes what has become free in between.
    ///
    /// # Errors
    /// `Full` if the tree cannot take more nodes or pages.
    pub fn claim(
        &mut self,
        namespace: &Namespace,
        tokens: &[Token],
        owner: RequestId,
    ) -> Result<Claim, RadixError> {
        let Some(end) = self.make_known(namespace, tokens)? else { return Ok(Claim::default()) };
        self.claim_path(end, owner)
    }

    /// As `claim`, for the path that a request watches: no token is compared.
    ///
    /// # Errors
    /// `Unwatched`; `Full` if the tree cannot split a node any more.
    pub fn claim_again(&mut self, request: RequestId) -> Result<Claim, RadixError> {
        let node = self.watcher(request)?.node;
        let Some(Node { start, pages, .. }) = self.nodes.get(node) else { return Ok(Claim::default()) };
        self.claim_path(PathEnd { node, local: *pages, pages: start + pages }, request)
    }

    /// The end of the path of all whole pages of a sequence, of which there may be none. What was unknown is there
    /// afterwards, as a ghost that was never accessed.
    pub(crate) fn make_known(
        &mut self,
        namespace: &Namespace,
        tokens: &[Token],
    ) -> Result<Option<PathEnd>, RadixError> {
        let page_size = self.page_size();
        let pages = u32::try_from(tokens.len() / page_size)
            .map_err(|_| RadixError::Full { what: "the number of pages of a sequence" })?;
        if pages == 0 {
            return Ok(None);
        }
        let end = match self.walk(namespace, tokens) {
            Some(known) => known,
            None => PathEnd { node: self.root(namespace)?, local: 0, pages: 0 },
        };
        if end.pages == pages {
            return Ok(Some(end));
        }
        let parent = self.open_end(end)?;
        let unknown = &tokens[end.pages as usize * page_size..pages as usize * page_size];
        let node = self.create(parent, unknown)?;
        self.recount_ghosts(node);
        Ok(Some(PathEnd { node, local: pages - end.pages, pages }))
    }

    fn claim_path(&mut self, end: PathEnd, owner: RequestId) -> Result<Claim, RadixError> {
        let mut claim = Claim { handle: self.handle(end.node, end.pages), ..Claim::default() };
        for id in self.path(end.node) {
            let limit = if id == end.node { end.local } else { self.nodes[id].pages };
            self.claim_node(id, limit, owner, &mut claim)?;
        }
        Ok(claim)
    }

    /// Claims the ghosts among the first `limit` pages of a node and notes what is there besides.
    fn claim_node(
        &mut self,
        id: NodeId,
        limit: u32,
        owner: RequestId,
        claim: &mut Claim,
    ) -> Result<(), RadixError> {
        let held = self.held(id).min(limit);
        let node = &self.nodes[id];
        let first = node.start;
        if held > 0 {
            claim.held = first + held;
        }
        let ghost_end = node.transient.map_or(node.pages, |transient| transient.from).min(limit);
        // Looked up before the ghosts are split off, noted after them: it follows them in the sequence.
        let run = self.transient_part(id, limit);
        self.claim_ghosts(id, held, ghost_end, owner, claim)?;
        match run {
            Some(run) if run.owner == owner => note(&mut claim.own, run.pages),
            Some(run) => note_foreign(&mut claim.foreign, run),
            None => {}
        }
        Ok(())
    }

    /// Claims the pages `from..to` of a node, all of them ghosts.
    fn claim_ghosts(
        &mut self,
        id: NodeId,
        from: u32,
        to: u32,
        owner: RequestId,
        claim: &mut Claim,
    ) -> Result<(), RadixError> {
        if from >= to {
            return Ok(());
        }
        let first = self.nodes[id].start;
        // A run begins with a node, so that the access of its first publish counts for its pages only.
        if from > 0 {
            self.split(id, from)?;
        }
        let length = to - from;
        let node = if length < self.nodes[id].pages { self.split(id, length)? } else { id };
        let state = TransientState::Queued;
        self.nodes[node].transient = Some(Transient { owner, state, from: 0 });
        self.owners.entry(owner).or_default().push(node);
        self.transient_pages += length as usize;
        self.recount_ghosts(node);
        self.mark_changed(node);
        note(&mut claim.own, first + from..first + to);
        Ok(())
    }

    /// The owner has begun to compute: its runs are in flight.
    pub fn start(&mut self, owner: RequestId) {
        for id in self.owners.get(&owner).cloned().unwrap_or_default() {
            let Some(transient) = &mut self.nodes[id].transient else { continue };
            if transient.state == TransientState::Queued {
                transient.state = TransientState::InFlight;
                self.mark_changed(id);
            }
        }
    }

    /// The transient runs of a sequence, in order; touching runs of one owner are not joined.
    pub fn transient_of(&self, namespace: &Namespace, tokens: &[Token]) -> Vec<TransientRun> {
        let Some(end) = self.walk(namespace, tokens) else { return Vec::new() };
        let limit = |id| if id == end.node { end.local } else { self.nodes[id].pages };
        self.path(end.node).into_iter().filter_map(|id| self.transient_part(id, limit(id))).collect()
    }

    /// What a request owns: how many pages it has still to publish.
    pub fn owned_pages(&self, owner: RequestId) -> usize {
        let pages = |id: &NodeId| {
            let node = &self.nodes[*id];
            node.transient.map_or(0, |transient| (node.pages - transient.from) as usize)
        };
        self.owners.get(&owner).map_or(0, |nodes| nodes.iter().map(pages).sum())
    }

    /// Pages of a node up to `end_page` are published: they are transient no more.
    pub(crate) fn advance_transient(&mut self, id: NodeId, end_page: u32) {
        let node = &mut self.nodes[id];
        let end = end_page.saturating_sub(node.start);
        let Some(transient) = &mut node.transient else { return };
        if end <= transient.from {
            return;
        }
        node.used_at = self.clock;
        if transient.from == 0 {
            node.accesses = node.accesses.saturating_add(1);
        }
        self.transient_pages -= (end - transient.from) as usize;
        transient.from = end;
        self.mark_changed(id);
        let node = &mut self.nodes[id];
        if end < node.pages {
            return;
        }
        if let Some(Transient { owner, .. }) = node.transient.take() {
            self.disown(id, owner);
        }
    }
}

/// Adds a range, joined with the last one if they touch.
fn note(ranges: &mut Vec<std::ops::Range<u32>>, range: std::ops::Range<u32>) {
    match ranges.last_mut() {
        Some(last) if last.end == range.start => last.end = range.end,
        _ => ranges.push(range),
    }
}

/// Adds a run, joined with the last one if they touch and are of one owner and state.
fn note_foreign(runs: &mut Vec<TransientRun>, run: TransientRun) {
    match runs.last_mut() {
        Some(last)
            if last.pages.end == run.pages.start && (last.owner, last.state) == (run.owner, run.state) =>
        {
            last.pages.end = run.pages.end;
        }
        _ => runs.push(run),
    }
}
