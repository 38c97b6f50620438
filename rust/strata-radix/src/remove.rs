//! Removing copies that turned out bad, in use or not.

use crate::error::RadixError;
use crate::tree::HiRadixTree;
use crate::values::Evicted;
use std::ops::Range;
use strata_types::{GroupId, Namespace, TierId, Token};

impl HiRadixTree {
    /// Drops one tier's copies of some pages of a sequence (a corrupt record, a failed device), pinned or not, and
    /// whatever else the group holds only after a page that no tier holds any more. Copies whose path is pinned come
    /// back with `in_use`: the caller must not use their slots again before the users have finished. Pins stay.
    ///
    /// # Errors
    /// `UnknownPlace`, or `Full` if the tree cannot split a node any more.
    pub fn remove(
        &mut self,
        namespace: &Namespace,
        group: GroupId,
        tokens: &[Token],
        tier: TierId,
        pages: Range<u32>,
    ) -> Result<Vec<Evicted>, RadixError> {
        let place = self.place(group, tier)?;
        let mut out = Vec::new();
        let Some(end) = self.walk(namespace, tokens) else { return Ok(out) };
        let (mut id, mut to) = (end.node, end.pages.min(pages.end));
        while to > pages.start {
            let (first, parent) = (self.nodes[id].start, self.nodes[id].parent);
            if to > first {
                let (from, until) = (pages.start.max(first) - first, to - first);
                let run = &self.nodes[id].runs[place];
                let inside = from > run.start && until < run.end();
                let node = if inside { self.split(id, until)? } else { id };
                let held = self.nodes[node].covered(self.group_of(place));
                self.take(node, place, from, until, &mut out);
                self.restore_prefix(node, place, held, &mut out);
                to = first;
            }
            id = parent;
        }
        self.trim_ghosts();
        Ok(out)
    }
}
