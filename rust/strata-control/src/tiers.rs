//! Tiers that change while they serve. A tier that shrinks gives its high pages up as fast as their users let go; a
//! disk that is detached is forgotten, not erased: what it holds is found again when it is attached.

use crate::controller::CacheController;
use crate::recover::Recovery;
use crate::room::NoRoom;
use crate::ControlError;
use std::time::Duration;
use strata_types::{TierId, Time, TransferKind};

const TIERS: [TierId; 3] = [TierId::DEVICE, TierId::HOST, TierId::DISK];
/// How often a tier that is still too large is looked at: each look passes over the whole tier.
const SHRINK_AGAIN: Duration = Duration::from_millis(100);

impl CacheController {
    /// Changes the number of a tier's pages. True once no page is left beyond it; to be called again until then.
    /// Without a host tier the host keeps its staging pages.
    pub fn resize(&mut self, tier: TierId, pages: u32) -> Result<bool, ControlError> {
        let index = tier.index();
        let staging = if tier == TierId::HOST && pages == 0 { self.config.staging_pages } else { 0 };
        let before = std::mem::replace(&mut self.config.pages[index], pages);
        if tier == TierId::HOST && before != pages {
            // Pages that wait for more staging than there will be would wait for ever.
            self.drop_relays()?;
        }
        if self.pools[index].capacity() != pages.max(staging) {
            self.pools[index].resize(pages.max(staging));
        }
        self.shrink(tier)?;
        Ok(!self.is_too_large(tier))
    }

    /// Evicts what a tier holds beyond its size, as far as nothing uses it.
    fn shrink(&mut self, tier: TierId) -> Result<(), ControlError> {
        let pages = self.config.pages[tier.index()];
        let gone = self.tree.evict_slots(self.config.group, tier, pages)?;
        self.stats.evicted[tier.index()] += gone.iter().filter(|copy| copy.tier == tier).count() as u64;
        self.take_back(&gone)?;
        // Staging may have been full of pages of a host tier that is gone.
        self.pump_relays()
    }

    /// Whether a tier has pages beyond its size. A host tier that is gone has none, though its staging pages are left.
    fn is_too_large(&self, tier: TierId) -> bool {
        let index = tier.index();
        let none = self.config.pages[index] == 0;
        none && self.tree.resident_pages(self.config.group, tier) > 0 || !self.pools[index].is_settled()
    }

    /// Goes on with tiers whose pages were still used, or still on their way, when they were given a smaller size: long
    /// after whoever asked for it has stopped waiting.
    pub fn keep_shrinking(&mut self) -> Result<(), ControlError> {
        if self.now.since(self.shrunk) < SHRINK_AGAIN {
            return Ok(());
        }
        for tier in TIERS {
            if self.is_too_large(tier) {
                self.shrunk = self.now;
                self.shrink(tier)?;
            }
        }
        Ok(())
    }

    /// When `keep_shrinking` has to be called again.
    pub(crate) fn next_shrink(&self) -> Option<Time> {
        TIERS.iter().any(|tier| self.is_too_large(*tier)).then(|| self.shrunk + SHRINK_AGAIN)
    }

    /// A disk of this many pages is there. They are withheld until a recovery has looked at them. False if a disk is
    /// there already, or something still uses what was: then nothing has changed.
    pub fn attach_disk(&mut self, pages: u32) -> Result<bool, ControlError> {
        let disk = TierId::DISK.index();
        if self.pools[disk].capacity() > 0 || !self.pools[disk].is_settled() {
            return Ok(false);
        }
        self.config.pages[disk] = pages;
        self.pools[disk].resize(pages);
        self.pools[disk].withhold(0..pages)?;
        self.recovery = Recovery::begun();
        self.no_room = NoRoom::default();
        self.disk_leaves = false;
        Ok(true)
    }

    /// The disk is to go: nothing new begins, what is under way is cancelled. True once it is forgotten; to be called
    /// again until then.
    pub fn detach_disk(&mut self) -> Result<bool, ControlError> {
        self.disk_leaves = true;
        self.drop_relays()?;
        let disk = [TransferKind::Spill, TransferKind::Prefetch, TransferKind::Erase];
        for id in self.transfers.of_kinds(&disk) {
            if self
                .transfers
                .get(id)
                .is_some_and(|transfer| !transfer.cancelled && transfer.kind != TransferKind::Erase)
            {
                self.cancel(id)?;
            }
        }
        if disk.iter().any(|kind| self.transfers.count(*kind) > 0) || !self.relays.is_empty() {
            return Ok(false);
        }
        let gone = self.tree.clear(self.config.group, TierId::DISK)?;
        self.take_back(&gone)?;
        self.recovery = Recovery::default();
        self.no_room = NoRoom::default();
        let disk = TierId::DISK.index();
        self.config.pages[disk] = 0;
        self.pools[disk].resize(0);
        Ok(self.pools[disk].is_settled())
    }
}
