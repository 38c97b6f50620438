//! Questions about what is where, for those who move pages: what one tier holds and another lacks, and the tokens
//! that lead there. Nothing here changes the tree.

use crate::arena::NodeId;
use crate::error::RadixError;
use crate::handle::Handle;
use crate::tree::HiRadixTree;
use crate::values::{Direction, MissingRun};
use std::ops::Range;
use strata_types::{GroupId, Namespace, TierId, Token};

impl HiRadixTree {
    /// The tokens of a path, from the start of its sequence.
    ///
    /// # Errors
    /// `Stale`.
    pub fn page_path(&self, handle: Handle) -> Result<Vec<Token>, RadixError> {
        if handle.is_empty() {
            return Ok(Vec::new());
        }
        Ok(self.tokens_to(self.resolve(handle)?, handle.pages))
    }

    /// The namespace of a path; none for the empty path, which every namespace has.
    ///
    /// # Errors
    /// `Stale`.
    pub fn namespace_of(&self, handle: Handle) -> Result<Option<Namespace>, RadixError> {
        if handle.is_empty() {
            return Ok(None);
        }
        Ok(self.namespace(self.resolve(handle)?))
    }

    /// How often each known page of a sequence was accessed, creation included, whoever holds it.
    pub fn access_counts(&self, namespace: &Namespace, tokens: &[Token]) -> Vec<u32> {
        let Some(end) = self.walk(namespace, tokens) else { return Vec::new() };
        let mut counts = Vec::with_capacity(end.pages as usize);
        for id in self.path(end.node) {
            let node = &self.nodes[id];
            if let Some(transient) = node.transient.filter(|transient| transient.from > 0) {
                // The access of the first publish is not yet that of the pages still to come.
                counts.resize((node.start + transient.from).min(end.pages) as usize, node.accesses);
                counts.resize(node.end().min(end.pages) as usize, node.accesses.saturating_sub(1));
            }
            counts.resize(node.end().min(end.pages) as usize, node.accesses);
        }
        counts
    }

    /// The pages of a path that `from` holds and `to` lacks, accessed at least `min_accesses` times; first to last,
    /// without tokens.
    ///
    /// # Errors
    /// `UnknownPlace`; `Stale`.
    pub fn missing_on_path(
        &self,
        handle: Handle,
        group: GroupId,
        from: TierId,
        to: TierId,
        min_accesses: u32,
    ) -> Result<Vec<MissingRun>, RadixError> {
        let (source, destination) = (self.place(group, from)?, self.place(group, to)?);
        let mut found = Vec::new();
        if handle.is_empty() {
            return Ok(found);
        }
        for id in self.path(self.resolve(handle)?) {
            let node = &self.nodes[id];
            if node.accesses >= min_accesses {
                for pages in
                    self.difference(id, source, destination, handle.pages.min(node.end()) - node.start)
                {
                    found.extend(self.missing_run(id, source, pages, false));
                }
            }
        }
        Ok(found)
    }

    /// Up to `limit` pages that `from` holds and `to` lacks, from one end of `from`'s eviction order. Pinned pages
    /// are in use, so they are left out. `Hottest` names a page before its descendants, `Coldest` after them.
    ///
    /// # Errors
    /// `UnknownPlace`.
    pub fn missing_in(
        &self,
        group: GroupId,
        from: TierId,
        to: TierId,
        direction: Direction,
        limit: usize,
    ) -> Result<Vec<MissingRun>, RadixError> {
        let (source, destination) = (self.place(group, from)?, self.place(group, to)?);
        let order = &self.places[source].order;
        let mut found = Vec::new();
        let mut left = limit;
        let hot = direction == Direction::Hottest;
        let mut next = if hot { order.last() } else { order.first() };
        while let Some(id) = next.filter(|_| left > 0) {
            let mut parts = self.difference(id, source, destination, self.nodes[id].pages);
            if !hot {
                parts.reverse();
            }
            for mut pages in parts {
                let count = pages.len().min(left);
                left -= count;
                match hot {
                    true => pages.end = pages.start + count as u32,
                    false => pages.start = pages.end - count as u32,
                }
                found.extend(self.missing_run(id, source, pages, true));
            }
            next = if hot { order.before(id) } else { order.after(id) };
        }
        Ok(found)
    }

    /// The pages among the first `limit` of a node that one place holds and another does not.
    pub(crate) fn difference(
        &self,
        id: NodeId,
        source: usize,
        destination: usize,
        limit: u32,
    ) -> Vec<Range<u32>> {
        let runs = &self.nodes[id].runs;
        let (have, lack) = (&runs[source], &runs[destination]);
        let end = have.end().min(limit);
        // An empty run starts at page 0 and ends there, so everything lies after it.
        let parts = [have.start..end.min(lack.start), have.start.max(lack.end())..end];
        parts.into_iter().filter(|part| part.start < part.end).collect()
    }

    pub(crate) fn missing_run(
        &self,
        id: NodeId,
        source: usize,
        pages: Range<u32>,
        with_tokens: bool,
    ) -> Option<MissingRun> {
        if pages.is_empty() {
            return None;
        }
        let node = &self.nodes[id];
        let run = &node.runs[source];
        let end_page = node.start + pages.end;
        Some(MissingRun {
            namespace: self.namespace(id)?,
            handle: self.handle(id, end_page),
            start_page: node.start + pages.start,
            slots: run.slots[(pages.start - run.start) as usize..(pages.end - run.start) as usize].to_vec(),
            accesses: node.accesses,
            tokens: if with_tokens { self.tokens_to(id, end_page) } else { Vec::new() },
        })
    }

    fn namespace(&self, id: NodeId) -> Option<Namespace> {
        self.nodes[self.nodes[id].root].namespace.as_deref().copied()
    }

    fn tokens_to(&self, id: NodeId, pages: u32) -> Vec<Token> {
        let length = pages as usize * self.page_size();
        let mut tokens = Vec::with_capacity(length);
        for id in self.path(id) {
            let part = &self.nodes[id].tokens;
            tokens.extend_from_slice(&part[..part.len().min(length - tokens.len())]);
        }
        tokens
    }
}
