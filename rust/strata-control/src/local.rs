//! The cache of a foreign engine: one tier of pages that the engine owns, driven on the caller's thread. Match and
//! pin, reserve, then commit or abort; the engine moves no byte through Strata here.

use crate::ControlError;
use strata_radix::{HiRadixTree, Pin, TreeConfig};
use strata_tier::PagePool;
use strata_types::{GroupId, Namespace, PageId, TierId, Token};

const GROUP: GroupId = GroupId(0);

/// A tree and a pool over pages of one tier.
pub struct LocalCache {
    tree: HiRadixTree,
    pool: PagePool,
}

impl LocalCache {
    /// An empty cache of this many pages.
    pub fn new(page_size: u32, pages: u32) -> Result<LocalCache, ControlError> {
        let config = TreeConfig { page_size, groups: 1, tiers: 1, ghost_pages: pages as usize };
        Ok(LocalCache { tree: HiRadixTree::new(config)?, pool: PagePool::new("device", pages) })
    }

    /// The longest cached prefix of whole pages: appends its page table to `out`, counts an access, pins it.
    pub fn match_into(
        &mut self,
        namespace: &Namespace,
        tokens: &[Token],
        out: &mut Vec<PageId>,
    ) -> Result<Pin, ControlError> {
        Ok(self.tree.match_into(namespace, GROUP, tokens, TierId::DEVICE, out)?)
    }

    /// Gives a pin back.
    pub fn unpin(&mut self, pin: Pin) -> Result<(), ControlError> {
        Ok(self.tree.unpin(pin)?)
    }

    /// Reserves pages, evicting the least recently used; all or none.
    pub fn reserve(&mut self, count: u32, out: &mut Vec<PageId>) -> Result<bool, ControlError> {
        let free = self.pool.free_pages();
        if count > free {
            if (count - free) as usize > self.tree.evictable_pages(GROUP, TierId::DEVICE) {
                return Ok(false);
            }
            for gone in self.tree.evict(GROUP, TierId::DEVICE, (count - free) as usize)? {
                self.pool.release(gone.slot)?;
            }
        }
        Ok(self.pool.reserve(count, out))
    }

    /// Makes reserved pages match as pages `from..` of a sequence. Pages that the cache has already are freed and
    /// returned: the caller uses the cache's copies from its next match on.
    pub fn commit(
        &mut self,
        namespace: &Namespace,
        tokens: &[Token],
        slots: &[PageId],
        from: u32,
    ) -> Result<Vec<PageId>, ControlError> {
        let inserted = self.tree.insert(namespace, GROUP, tokens, TierId::DEVICE, slots, from)?;
        let refused: Vec<PageId> = inserted.duplicates.iter().map(|(_, slot)| *slot).collect();
        for slot in slots {
            if !refused.contains(slot) {
                self.pool.commit(*slot)?;
            }
        }
        self.abort(&refused)?;
        Ok(refused)
    }

    /// Gives reserved pages back unused.
    pub fn abort(&mut self, slots: &[PageId]) -> Result<(), ControlError> {
        for slot in slots {
            self.pool.abort(*slot)?;
        }
        Ok(())
    }

    /// (capacity, free, cached, pinned) pages.
    pub fn pages(&self) -> (u32, u32, u32, u32) {
        let resident = self.tree.resident_pages(GROUP, TierId::DEVICE);
        let pinned = resident - self.tree.evictable_pages(GROUP, TierId::DEVICE);
        (self.pool.capacity(), self.pool.free_pages(), resident as u32, pinned as u32)
    }

    /// Proves that tree and pool agree.
    pub fn check(&self) -> Result<(), ControlError> {
        self.tree.check().map_err(ControlError::Inconsistent)?;
        self.pool.check().map_err(ControlError::Inconsistent)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn match_reserve_commit_and_evict() {
        let mut cache = LocalCache::new(2, 3).unwrap();
        let namespace = Namespace::default();
        let mut pages = Vec::new();
        assert!(cache.reserve(2, &mut pages).unwrap());
        assert!(cache.commit(&namespace, &[1, 2, 3, 4], &pages, 0).unwrap().is_empty());
        let mut table = Vec::new();
        let pin = cache.match_into(&namespace, &[1, 2, 3, 4, 5], &mut table).unwrap();
        assert_eq!((table, cache.pages()), (pages.clone(), (3, 1, 2, 2)));
        assert!(!cache.reserve(2, &mut pages).unwrap(), "pinned pages must stay");
        cache.unpin(pin).unwrap();
        let mut fresh = Vec::new();
        assert!(cache.reserve(2, &mut fresh).unwrap());
        let doubled = cache.commit(&namespace, &[1, 2], &fresh[..1], 0).unwrap();
        assert_eq!(doubled, fresh[..1], "the first page is still cached");
        cache.abort(&fresh[1..]).unwrap();
        cache.check().unwrap();
    }
}
