//! After a restart: the records that a scan of the disk finds become pages of the tree again while the store serves.
//! A record is taken in once its parent is known. One that comes before its parent waits in a bounded index, its page
//! withheld; what still waits when the scan ends is given back.

use crate::controller::CacheController;
use crate::ControlError;
use std::collections::{BTreeSet, HashMap, HashSet};
use std::ops::Range;
use strata_radix::{Handle, RadixError};
use strata_tier::PageState;
use strata_types::{PageId, PageKey, PageRecord, TierId, Token};

/// Records that may wait for their parents; more are given back at once.
const MOST_ORPHANS: usize = 1 << 18;
/// Pages taken in whose children can be recognised later.
const MOST_PATHS: usize = 1 << 20;

/// What a recovery under way has to remember; the default is that none is.
#[derive(Default)]
pub(crate) struct Recovery {
    /// From the attach of the disk, or the first batch, until the last batch.
    under_way: bool,
    /// Records by the key of their parent.
    orphans: HashMap<PageKey, Vec<(PageId, PageRecord)>>,
    waiting: usize,
    /// The path of each page that was taken in.
    paths: HashMap<PageKey, Handle>,
    /// The disk was flushed meanwhile: what is found from now on is erased.
    flushed: bool,
}

impl Recovery {
    /// A recovery of which nothing has come yet.
    pub fn begun() -> Recovery {
        Recovery { under_way: true, ..Recovery::default() }
    }

    /// Whether batches are still to come.
    pub fn is_under_way(&self) -> bool {
        self.under_way
    }

    /// The records that wait for this parent.
    fn take(&mut self, parent: &PageKey) -> Vec<(PageId, PageRecord)> {
        let children = self.orphans.remove(parent).unwrap_or_default();
        self.waiting -= children.len();
        children
    }

    /// The pages of everything that waits, which is forgotten. What is found later is to be erased.
    pub fn flush(&mut self) -> Vec<PageId> {
        self.waiting = 0;
        self.flushed = true;
        pages_of(std::mem::take(&mut self.orphans))
    }
}

/// The pages of records, in order.
fn pages_of(orphans: HashMap<PageKey, Vec<(PageId, PageRecord)>>) -> Vec<PageId> {
    let mut pages: Vec<PageId> = orphans.into_values().flatten().map(|(page, _)| page).collect();
    pages.sort_unstable();
    pages
}

impl CacheController {
    /// Takes in what a scan found in a stretch of the disk; `last` ends the recovery. Records that lie about their key
    /// are left out, and with them everything that hangs below them. Returns how many pages match that did not before.
    pub fn recovered(
        &mut self,
        pages: Range<u32>,
        found: Vec<(PageId, PageRecord)>,
        last: bool,
    ) -> Result<u32, ControlError> {
        let mut recovery = std::mem::take(&mut self.recovery);
        if recovery.flushed {
            let unwanted: Vec<PageId> =
                found.into_iter().map(|(page, _)| page).filter(|page| self.is_unclaimed(*page)).collect();
            self.erase_withheld(&unwanted)?;
            self.offer(pages);
            if !last {
                self.recovery = Recovery { flushed: true, ..Recovery::begun() };
            }
            return Ok(0);
        }
        let mut starts = BTreeSet::new();
        let mut waits = HashSet::new();
        for (page, record) in found {
            if !self.is_sound(page, &record) || recovery.waiting >= MOST_ORPHANS {
                continue;
            }
            starts.insert((record.parent, record.namespace));
            waits.insert(page);
            recovery.waiting += 1;
            recovery.orphans.entry(record.parent).or_default().push((page, record));
        }
        pages.filter(|page| !waits.contains(&PageId(*page))).for_each(|page| self.offer(page..page + 1));
        let mut taken = 0;
        for (parent, namespace) in starts {
            let tokens = match recovery.paths.get(&parent) {
                _ if parent == namespace.root_key(self.config.group) => Vec::new(),
                // A path that was evicted meanwhile can take no children: they wait in vain and are given back.
                Some(path) => match self.tree.page_path(*path) {
                    Ok(tokens) => tokens,
                    Err(_) => continue,
                },
                None => continue,
            };
            taken += self.take_in(&mut recovery, parent, tokens)?;
        }
        if last {
            for page in pages_of(recovery.orphans) {
                self.offer(page.0..page.0 + 1);
            }
        } else {
            self.recovery = Recovery { under_way: true, ..recovery };
        }
        Ok(taken)
    }

    /// Takes in a whole scan at once.
    pub fn recover(&mut self, found: Vec<(PageId, PageRecord)>) -> Result<u32, ControlError> {
        let pages = 0..self.pools[TierId::DISK.index()].capacity();
        self.recovered(pages, found, true)
    }

    /// Pages of the disk that hold nothing worth keeping are free from now on.
    fn offer(&mut self, pages: Range<u32>) {
        self.pools[TierId::DISK.index()].offer(pages);
    }

    /// Whether a record can be taken in: it is what its key says, and the disk has not shrunk below its page.
    fn is_sound(&self, page: PageId, record: &PageRecord) -> bool {
        self.is_unclaimed(page)
            && record.tokens.len() == self.config.page_size as usize
            && record.parent.child(&record.tokens) == record.key
    }

    pub(crate) fn is_unclaimed(&self, page: PageId) -> bool {
        matches!(self.pools[TierId::DISK.index()].state(page), Some(PageState::Withheld | PageState::Free))
    }

    /// Everything that hangs below `parent`, whose path is `tokens`: depth first along chains, each inserted as one
    /// straight run, its branches left for later.
    fn take_in(
        &mut self,
        recovery: &mut Recovery,
        parent: PageKey,
        tokens: Vec<Token>,
    ) -> Result<u32, ControlError> {
        let mut taken = 0;
        let children = recovery.take(&parent);
        let mut pending: Vec<(PageId, PageRecord, Vec<Token>)> =
            children.into_iter().map(|(page, record)| (page, record, tokens.clone())).collect();
        while let Some((page, record, mut tokens)) = pending.pop() {
            let first_page = (tokens.len() / self.config.page_size as usize) as u32;
            let mut run = Vec::new();
            let mut next = Some((page, record));
            while let Some((page, record)) = next.filter(|(page, _)| self.is_unclaimed(*page)) {
                tokens.extend_from_slice(&record.tokens);
                let mut below = recovery.take(&record.key).into_iter();
                next = below.next();
                pending.extend(below.map(|(page, record)| (page, record, tokens.clone())));
                run.push((page, record));
            }
            taken += self.adopt(recovery, &tokens, first_page, &run)?;
        }
        Ok(taken)
    }

    fn adopt(
        &mut self,
        recovery: &mut Recovery,
        tokens: &[Token],
        first_page: u32,
        run: &[(PageId, PageRecord)],
    ) -> Result<u32, ControlError> {
        let Some((_, first)) = run.first() else { return Ok(0) };
        let slots: Vec<PageId> = run.iter().map(|(page, _)| *page).collect();
        let (group, namespace) = (self.config.group, first.namespace);
        let inserted = match self.tree.insert(&namespace, group, tokens, TierId::DISK, &slots, first_page) {
            // The parent was evicted after it was taken in.
            Err(RadixError::Gap { .. }) => {
                slots.iter().for_each(|slot| self.offer(slot.0..slot.0 + 1));
                return Ok(0);
            }
            inserted => inserted?,
        };
        let mut taken = 0;
        for (number, (slot, record)) in (first_page + 1..).zip(run) {
            if inserted.duplicates.iter().any(|(_, duplicate)| duplicate == slot) {
                self.offer(slot.0..slot.0 + 1);
            } else {
                self.pools[TierId::DISK.index()].adopt(*slot)?;
                taken += 1;
            }
            if recovery.paths.len() < MOST_PATHS {
                recovery.paths.insert(record.key, inserted.handle.first(number));
            }
        }
        Ok(taken)
    }
}
