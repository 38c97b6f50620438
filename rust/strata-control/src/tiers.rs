//! Tiers that change while they serve. A tier that shrinks gives its high pages up as fast as their users let go; a
//! disk that is detached is forgotten, not erased: what it holds is found again when it is attached.

use crate::controller::CacheController;
use crate::recover::Recovery;
use crate::ControlError;
use strata_types::{TierId, TransferKind};

impl CacheController {
    /// Changes the number of a tier's pages. True once no page is left beyond it; to be called again until then.
    /// Without a host tier the host keeps its staging pages.
    pub fn resize(&mut self, tier: TierId, pages: u32) -> Result<bool, ControlError> {
        let index = tier.index();
        let staging = if tier == TierId::HOST && pages == 0 { self.config.staging_pages } else { 0 };
        self.config.pages[index] = pages;
        if tier == TierId::HOST {
            // Pages that wait for more staging than there will be would wait for ever.
            self.drop_relays()?;
        }
        if self.pools[index].capacity() != pages.max(staging) {
            self.pools[index].resize(pages.max(staging));
        }
        let gone = self.tree.evict_slots(self.config.group, tier, pages)?;
        self.stats.evicted[index] += gone.iter().filter(|copy| copy.tier == tier).count() as u64;
        self.take_back(&gone)?;
        let left = pages == 0 && self.tree.resident_pages(self.config.group, tier) > 0;
        Ok(!left && self.pools[index].is_settled())
    }

    /// A disk of this many pages is there. They are withheld until a recovery has looked at them.
    pub fn attach_disk(&mut self, pages: u32) -> Result<(), ControlError> {
        let disk = TierId::DISK.index();
        self.config.pages[disk] = pages;
        self.pools[disk].resize(pages);
        self.pools[disk].withhold(0..pages)?;
        self.recovery = Recovery::default();
        self.disk_leaves = false;
        Ok(())
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
        let disk = TierId::DISK.index();
        self.config.pages[disk] = 0;
        self.pools[disk].resize(0);
        Ok(self.pools[disk].is_settled())
    }
}
