//! Publishing pages: a page becomes resident in a place. The first tier to hold a page counts one access to it and
//! ends its transient state.

use crate::arena::NodeId;
use crate::error::RadixError;
use crate::handle::Handle;
use crate::matching::PathEnd;
use crate::tree::HiRadixTree;
use crate::values::InsertResult;
use strata_types::{GroupId, Namespace, PageId, TierId, Token};

impl HiRadixTree {
    /// Makes pages `from_page..from_page + slots.len()` of a sequence resident in a tier, and the path to their end
    /// the most recently used there. Serves new pages and copies of pages that another tier holds alike. Tokens
    /// after the last of those pages are ignored.
    ///
    /// Pages that the tier holds already keep their slots; the offered ones come back as duplicates. Pages that no
    /// tier held before get one access.
    ///
    /// # Errors
    /// `UnknownPlace`; `TooFewTokens`; `Gap` if no tier holds the page before `from_page`; `Full`. Only after
    /// `Full`, which takes four billion nodes or pages, may some of the pages have been published.
    pub fn insert(
        &mut self,
        namespace: &Namespace,
        group: GroupId,
        tokens: &[Token],
        tier: TierId,
        slots: &[PageId],
        from_page: u32,
    ) -> Result<InsertResult, RadixError> {
        let place = self.place(group, tier)?;
        let end_page = self.check_offer(tokens, slots, from_page, 0)?;
        if slots.is_empty() {
            return Ok(InsertResult::default());
        }
        let tokens = &tokens[..end_page as usize * self.page_size()];
        let known = match self.walk(namespace, tokens) {
            Some(known) => known,
            None if from_page > 0 => return Err(RadixError::Gap { from_page, held: 0 }),
            None => PathEnd { node: self.root(namespace)?, local: 0, pages: 0 },
        };
        let unknown = &tokens[known.pages as usize * self.page_size()..];
        self.insert_at(known, unknown, place, slots, from_page)
    }

    /// As `insert`, for the pages that follow a path: the tokens are those after it, and neither the path's tokens
    /// nor its slots are looked at. What a running request publishes costs no compare of all that it has published.
    ///
    /// # Errors
    /// As `insert`; `Stale`, also for the empty path, which belongs to no namespace.
    pub fn extend(
        &mut self,
        handle: Handle,
        group: GroupId,
        tokens: &[Token],
        tier: TierId,
        slots: &[PageId],
    ) -> Result<InsertResult, RadixError> {
        let place = self.place(group, tier)?;
        let from_page = handle.pages;
        let end_page = self.check_offer(tokens, slots, from_page, from_page)?;
        let node = self.resolve(handle)?;
        if slots.is_empty() {
            return Ok(InsertResult { handle, duplicates: Vec::new() });
        }
        let tokens = &tokens[..(end_page - from_page) as usize * self.page_size()];
        let known = self.walk_from(node, from_page - self.nodes[node].start, tokens);
        let unknown = &tokens[(known.pages - from_page) as usize * self.page_size()..];
        self.insert_at(known, unknown, place, slots, from_page)
    }

    /// Publishes the pages from `from_page` on, of which the tree knows those before `known.pages`.
    fn insert_at(
        &mut self,
        known: PathEnd,
        unknown: &[Token],
        place: usize,
        slots: &[PageId],
        from_page: u32,
    ) -> Result<InsertResult, RadixError> {
        let held = self.held_on_path(known, place);
        if from_page > held {
            return Err(RadixError::Gap { from_page, held });
        }
        let mut duplicates = Vec::new();
        let (old, new) = slots.split_at((known.pages - from_page) as usize);
        let end = if new.is_empty() {
            self.publish_path(known, place, old, from_page, &mut duplicates)?;
            known.node
        } else {
            let parent = self.open_end(known)?;
            let known = PathEnd { node: parent, local: self.nodes[parent].pages, ..known };
            self.publish_path(known, place, old, from_page, &mut duplicates)?;
            self.append(parent, place, unknown, new)?
        };
        let handle = self.handle(end, from_page + slots.len() as u32);
        let mut node = self.resolve(handle)?;
        if self.nodes[node].start + self.nodes[node].runs[place].end() > handle.pages {
            // What follows in the node was not used now, so it must not become as recent as the path.
            node = self.boundary(handle)?;
        }
        self.use_in_place(node, place);
        duplicates.sort_unstable();
        Ok(InsertResult { handle, duplicates })
    }

    /// The page after the last one offered, given the page of the first token.
    fn check_offer(
        &self,
        tokens: &[Token],
        slots: &[PageId],
        from_page: u32,
        first_page: u32,
    ) -> Result<u32, RadixError> {
        let end_page = u64::from(from_page) + slots.len() as u64;
        if end_page > u64::from(first_page) + (tokens.len() / self.page_size()) as u64 {
            let (page_size, tokens) = (self.config.page_size, tokens.len());
            return Err(RadixError::TooFewTokens { from_page, end_page, page_size, tokens });
        }
        u32::try_from(end_page).map_err(|_| RadixError::Full { what: "the number of pages of a sequence" })
    }

    /// How many pages of a path, from its start, some tier of the place's group holds.
    fn held_on_path(&self, end: PathEnd, place: usize) -> u32 {
        let group = self.group_of(place);
        let mut held = 0;
        for id in self.ascend(end.node) {
            let node = &self.nodes[id];
            let limit = if id == end.node { end.local } else { node.pages };
            let covered = node.covered(group.clone()).min(limit);
            // Prefix closure: a held page vouches for all pages before it.
            if covered > 0 {
                held = node.start + covered;
                break;
            }
        }
        held
    }

    /// The node below which the unknown rest of a sequence hangs: ends where the known part ends.
    pub(crate) fn open_end(&mut self, known: PathEnd) -> Result<NodeId, RadixError> {
        match known.local < self.nodes[known.node].pages {
            true => self.split(known.node, known.local),
            false => Ok(known.node),
        }
    }

    /// Publishes the pages of a path that the tree knows, from page `from_page` on.
    fn publish_path(
        &mut self,
        end: PathEnd,
        place: usize,
        slots: &[PageId],
        from_page: u32,
        duplicates: &mut Vec<(u32, PageId)>,
    ) -> Result<(), RadixError> {
        let (mut id, mut to) = (end.node, end.pages);
        while to > from_page {
            let (first, parent) = (self.nodes[id].start, self.nodes[id].parent);
            let from = from_page.max(first);
            let part = &slots[(from - from_page) as usize..(to - from_page) as usize];
            self.publish(id, place, from - first, part, duplicates)?;
            (id, to) = (parent, first);
        }
        Ok(())
    }

    /// Publishes pages of one node, from its page `start` on. Splits off ghosts, since only they gain an access.
    fn publish(
        &mut self,
        id: NodeId,
        place: usize,
        start: u32,
        slots: &[PageId],
        duplicates: &mut Vec<(u32, PageId)>,
    ) -> Result<(), RadixError> {
        let (held, end) = (self.held(id), start + slots.len() as u32);
        let node = &self.nodes[id];
        let ghost_end = node.transient.map_or(node.pages, |transient| transient.from);
        if end <= held || held >= ghost_end {
            let end_page = node.start + end;
            self.put(id, place, start, slots, duplicates)?;
            self.advance_transient(id, end_page);
            self.recount_ghosts(id);
            return Ok(());
        }
        if held > 0 {
            let upper = self.split(id, held)?;
            let (old, new) = slots.split_at((held - start) as usize);
            if !old.is_empty() {
                self.put(upper, place, start, old, duplicates)?;
            }
            return self.publish(id, place, 0, new, duplicates);
        }
        let reach = end.min(ghost_end);
        let ghost = if reach < node.pages { self.split(id, reach)? } else { id };
        let (old, new) = slots.split_at(reach as usize);
        let clock = self.clock;
        let node = &mut self.nodes[ghost];
        node.used_at = clock;
        node.accesses = node.accesses.saturating_add(1);
        self.put(ghost, place, 0, old, duplicates)?;
        self.recount_ghosts(ghost);
        if new.is_empty() {
            return Ok(());
        }
        self.publish(id, place, 0, new, duplicates)
    }

    /// Hangs new pages below a node, or adds them to it where nothing would tell the two apart.
    fn append(
        &mut self,
        parent: NodeId,
        place: usize,
        tokens: &[Token],
        slots: &[PageId],
    ) -> Result<NodeId, RadixError> {
        let node = &mut self.nodes[parent];
        let run = &node.runs[place];
        let alike = !node.parent.is_nil()
            && node.is_leaf()
            && node.watched == 0
            && node.transient.is_none()
            && !node.is_pinned()
            && node.ghosts == 0
            && node.accesses == 1
            && (run.is_empty() || run.end() == node.pages);
        let (id, start) = if alike {
            let start = node.pages;
            node.tokens.extend_from_slice(tokens);
            node.pages += slots.len() as u32;
            node.used_at = self.clock;
            (parent, start)
        } else {
            let id = self.create(parent, tokens)?;
            (self.nodes[id].accesses, self.nodes[id].used_at) = (1, self.clock);
            (id, 0)
        };
        self.put(id, place, start, slots, &mut Vec::new())?;
        Ok(id)
    }

    /// Makes a path the most recently used in one place.
    fn use_in_place(&mut self, end: NodeId, place: usize) {
        let tier = self.tier_of(place);
        let mut id = end;
        while let Some(node) = self.nodes.get(id) {
            if !node.runs.get(place).is_none_or(|run| run.is_empty()) && node.pins[tier] == 0 {
                self.places[place].order.touch(id);
            }
            id = node.parent;
        }
    }
}
