//! Matching: the longest prefix of a token sequence that the tree knows. Whole pages only; one compare and one copy
//! per node, never a step per page.

use crate::arena::NodeId;
use crate::error::RadixError;
use crate::handle::{Handle, Pin};
use crate::tree::HiRadixTree;
use crate::values::{MatchResult, MatchRun, TransientRun};
use strata_types::{GroupId, Namespace, PageId, TierId, Token};

/// How far a token sequence leads into the tree.
#[derive(Clone, Copy, Debug)]
pub(crate) struct PathEnd {
    /// The last node with a matching page.
    pub node: NodeId,
    /// How many of its pages match.
    pub local: u32,
    /// How many pages match in all.
    pub pages: u32,
}

/// Tokens that are compared at once while looking for the first difference.
const BLOCK: usize = 512;

/// How many whole pages two token sequences share.
pub(crate) fn common_pages(left: &[Token], right: &[Token], page_size: usize) -> u32 {
    let length = left.len().min(right.len()) / page_size * page_size;
    let (left, right) = (&left[..length], &right[..length]);
    if left == right {
        return (length / page_size) as u32;
    }
    let blocks = left.chunks(BLOCK).zip(right.chunks(BLOCK));
    let alike = blocks.take_while(|(left, right)| left == right).count() * BLOCK;
    let rest = left[alike..].iter().zip(&right[alike..]);
    ((alike + rest.take_while(|(left, right)| left == right).count()) / page_size) as u32
}

impl HiRadixTree {
    /// Follows the tokens as far as the tree knows them, whoever holds the pages, or nobody.
    pub(crate) fn walk(&self, namespace: &Namespace, tokens: &[Token]) -> Option<PathEnd> {
        let root = *self.roots.get(namespace)?;
        Some(self.walk_from(root, 0, tokens)).filter(|end| end.pages > 0)
    }

    /// Follows the tokens that come after the first `local` pages of a node.
    pub(crate) fn walk_from(&self, from: NodeId, local: u32, tokens: &[Token]) -> PathEnd {
        let page_size = self.page_size();
        let node = &self.nodes[from];
        let mut end = PathEnd { node: from, local, pages: node.start + local };
        let mut rest = tokens;
        let within = common_pages(&node.tokens[local as usize * page_size..], rest, page_size);
        end.local += within;
        end.pages += within;
        rest = &rest[within as usize * page_size..];
        while end.local == self.nodes[end.node].pages && rest.len() >= page_size {
            let Some(id) = self.children.get(&self.nodes, end.node, &rest[..page_size]) else { break };
            let node = &self.nodes[id];
            let local = common_pages(&node.tokens, rest, page_size);
            end = PathEnd { node: id, local, pages: node.start + local };
            rest = &rest[local as usize * page_size..];
        }
        end
    }

    /// The nodes of a path, first to last.
    pub(crate) fn path(&self, end: NodeId) -> Vec<NodeId> {
        let mut path: Vec<NodeId> = self.ascend(end).collect();
        path.reverse();
        path
    }

    /// Everything that is known about a token sequence; changes nothing. Tokens after the last whole page are
    /// ignored.
    ///
    /// # Errors
    /// `UnknownPlace` for a group that the tree does not have.
    pub fn match_prefix(
        &self,
        namespace: &Namespace,
        group: GroupId,
        tokens: &[Token],
    ) -> Result<MatchResult, RadixError> {
        let first = self.place(group, TierId::DEVICE)?;
        let tiers = self.group_of(first);
        let mut result = MatchResult { tiers: vec![Vec::new(); tiers.len()], ..MatchResult::default() };
        let Some(end) = self.walk(namespace, tokens) else { return Ok(result) };
        for id in self.path(end.node) {
            let node = &self.nodes[id];
            let limit = if id == end.node { end.local } else { node.pages };
            let held = node.covered(tiers.clone()).min(limit);
            if result.pages == node.start && held > 0 {
                result.pages = node.start + held;
                result.handle = self.handle(id, result.pages);
                for (tier, runs) in result.tiers.iter_mut().enumerate() {
                    self.append_run(id, first + tier, held, runs);
                }
            }
            result.transient.extend(self.transient_part(id, limit));
        }
        Ok(result)
    }

    /// Appends what a place holds of the first `held` pages of a node; a run that touches the last one prolongs it.
    fn append_run(&self, id: NodeId, place: usize, held: u32, runs: &mut Vec<MatchRun>) {
        let node = &self.nodes[id];
        let run = &node.runs[place];
        let count = held.min(run.end()).saturating_sub(run.start) as usize;
        if count == 0 {
            return;
        }
        let start_page = node.start + run.start;
        match runs.last_mut() {
            Some(last) if last.pages().end == start_page => last.slots.extend_from_slice(&run.slots[..count]),
            _ => runs.push(MatchRun { start_page, slots: run.slots[..count].to_vec() }),
        }
    }

    /// The transient pages among the first `limit` pages of a node.
    pub(crate) fn transient_part(&self, id: NodeId, limit: u32) -> Option<TransientRun> {
        let node = &self.nodes[id];
        let transient = node.transient.filter(|transient| transient.from < limit)?;
        let pages = node.start + transient.from..node.start + limit;
        Some(TransientRun { owner: transient.owner, state: transient.state, pages })
    }

    /// The hot path: appends to `out` the slots of the longest prefix that one tier holds, counts an access to it,
    /// makes it the most recently used, and pins it in that tier. The pin says how many pages that were.
    ///
    /// # Errors
    /// `UnknownPlace`, or `Full` if the tree cannot split a node any more; `out` is then as it was.
    pub fn match_into(
        &mut self,
        namespace: &Namespace,
        group: GroupId,
        tokens: &[Token],
        tier: TierId,
        out: &mut Vec<PageId>,
    ) -> Result<Pin, RadixError> {
        let place = self.place(group, tier)?;
        let before = out.len();
        let Some(end) = self.gather(namespace, tokens, place, out) else {
            return Ok(Pin { handle: Handle::EMPTY, tier });
        };
        let node = match end.local < self.nodes[end.node].pages {
            false => end.node,
            true => self.split(end.node, end.local).inspect_err(|_| out.truncate(before))?,
        };
        self.use_path(node, Some(tier), true);
        Ok(Pin { handle: self.handle(node, end.pages), tier })
    }

    /// Appends the slots of the longest prefix that a place holds.
    fn gather(
        &self,
        namespace: &Namespace,
        tokens: &[Token],
        place: usize,
        out: &mut Vec<PageId>,
    ) -> Option<PathEnd> {
        let page_size = self.page_size();
        let mut parent = *self.roots.get(namespace)?;
        let mut rest = tokens;
        let mut end = None;
        while rest.len() >= page_size {
            let Some(id) = self.children.get(&self.nodes, parent, &rest[..page_size]) else { break };
            let node = &self.nodes[id];
            let run = &node.runs[place];
            if run.start > 0 || run.is_empty() {
                break;
            }
            let resident = &node.tokens[..run.slots.len() * page_size];
            let local = common_pages(resident, rest, page_size);
            out.extend_from_slice(&run.slots[..local as usize]);
            end = Some(PathEnd { node: id, local, pages: node.start + local });
            if local < node.pages {
                break;
            }
            rest = &rest[local as usize * page_size..];
            parent = id;
        }
        end
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn common_pages_counts_whole_equal_pages(length in 0usize..2000, other in 0usize..2000,
                                                 difference in 0usize..2500, page_size in 1usize..20) {
            let left: Vec<Token> = (0..length as u32).collect();
            let mut right: Vec<Token> = (0..other as u32).collect();
            if let Some(token) = right.get_mut(difference) {
                *token += 1;
            }
            let expected = length.min(other).min(difference) / page_size;
            prop_assert_eq!(common_pages(&left, &right, page_size) as usize, expected);
        }
    }
}
