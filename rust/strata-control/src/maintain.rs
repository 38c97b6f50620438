//! Copies to lower tiers: by policy as pages come and are used again, and all at once to empty a tier.

use crate::controller::{CacheController, Plan};
use crate::ControlError;
use std::collections::HashSet;
use std::sync::Arc;
use strata_radix::{Direction, Evicted, Pin};
use strata_types::{Namespace, PageId, PageMove, TierId, Token, TransferId, TransferKind};

/// What emptying a tier did.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Emptied {
    /// Pages that left the tier.
    pub pages: u32,
    /// Pages that stay because the tier below does not hold them, or something uses them.
    pub kept: u32,
}

impl CacheController {
    /// Copies the pages of a path to the tier below where the write policy says so. A tier without room skips
    /// them, counted; the next access tries again.
    pub(crate) fn copy_down(
        &mut self,
        tier: TierId,
        namespace: &Namespace,
        tokens: &[Token],
    ) -> Result<(), ControlError> {
        self.copy_path(tier, namespace, tokens, |control, accesses| {
            control.write_policy(tier).copies(accesses)
        })
    }

    /// Copies the pages of a path down whose access count `wanted` accepts.
    pub(crate) fn copy_path(
        &mut self,
        tier: TierId,
        namespace: &Namespace,
        tokens: &[Token],
        wanted: impl Fn(&Self, u32) -> bool,
    ) -> Result<(), ControlError> {
        let Some((below, kind)) = self.downward(tier) else { return Ok(()) };
        if self.copies_held {
            return Ok(());
        }
        let mut started = HashSet::new();
        let path = self.lookup(namespace, tokens)?.handle;
        for run in self.tree.missing_on_path(path, self.config.group, tier, below, 0)? {
            if !wanted(self, run.accesses) {
                continue;
            }
            let pages = self.not_moving(kind, run.start_page, &run.slots);
            if self.move_runs(kind, namespace, tokens, &pages, &mut started)? > 0 {
                break;
            }
        }
        Ok(())
    }

    pub(crate) fn not_moving(&self, kind: TransferKind, start: u32, slots: &[PageId]) -> Vec<(u32, PageId)> {
        let moving =
            |slot| self.transfers.moving(kind, slot).is_some() || self.relays.moving(kind, slot).is_some();
        (start..).zip(slots.iter().copied()).filter(|(_, slot)| !moving(*slot)).collect()
    }

    /// Starts to copy what the tier below does not hold to it, as much as it can hold: the coldest pages first, since
    /// only the ends of sequences can leave a tier, and since what is copied last stays longest below. Returns the
    /// number of pages on their way.
    pub fn push_down(&mut self, tier: TierId) -> Result<usize, ControlError> {
        let Some((below, kind)) = self.downward(tier) else { return Ok(0) };
        let limit = self.pools[below.index()].capacity() as usize;
        let group = self.config.group;
        let missing = self.tree.missing_in(group, tier, below, Direction::Coldest, limit)?;
        let mut started: HashSet<TransferId> = HashSet::new();
        for run in missing {
            let pages = self.not_moving(kind, run.start_page, &run.slots);
            self.move_runs(kind, &run.namespace, &run.tokens, &pages, &mut started)?;
        }
        Ok(started.iter().filter_map(|id| self.transfers.get(*id)).map(|transfer| transfer.moves.len()).sum())
    }

    /// Drops every page of a tier that nothing uses. On disk every record is cleared, those that no page matches any
    /// more too: they would be found again after a restart.
    pub fn empty(&mut self, tier: TierId) -> Result<Emptied, ControlError> {
        let gone = self.tree.clear(self.config.group, tier)?;
        let pages = gone.iter().filter(|copy| copy.tier == tier).count() as u32;
        let (disk, others): (Vec<Evicted>, Vec<Evicted>) =
            gone.into_iter().partition(|copy| copy.tier == TierId::DISK && !copy.in_use);
        self.take_back(&others)?;
        let mut records: Vec<PageId> = disk.iter().map(|copy| copy.slot).collect();
        if tier == TierId::DISK {
            self.take_back(&disk)?;
            records.clear();
            if self.recovery.is_under_way() {
                let mut waiting = self.recovery.flush();
                waiting.retain(|page| self.is_unclaimed(*page));
                self.erase_withheld(&waiting)?;
            }
            let pool = &mut self.pools[TierId::DISK.index()];
            pool.reserve(pool.free_pages(), &mut records);
        }
        self.erase(records.into_iter())?;
        Ok(Emptied { pages, kept: self.tier_stats(tier).resident })
    }

    /// Drops the pages of a tier that the tier below holds too and nothing uses. The others stay.
    pub fn empty_downward(&mut self, tier: TierId) -> Result<Emptied, ControlError> {
        let Some((below, _)) = self.downward(tier) else { return Ok(Emptied::default()) };
        let missing = self.tree.missing_in(self.config.group, tier, below, Direction::Hottest, usize::MAX)?;
        // Pins keep their whole paths: a page that stays needs the pages before it.
        let pins: Vec<Pin> =
            missing.iter().map(|run| self.tree.pin(run.handle, tier)).collect::<Result<_, _>>()?;
        let emptied = self.empty(tier);
        for pin in pins {
            self.unpin(pin)?;
        }
        emptied
    }

    /// Clears records that a recovery found and that are not wanted.
    pub(crate) fn erase_withheld(&mut self, records: &[PageId]) -> Result<(), ControlError> {
        for record in records {
            self.pools[TierId::DISK.index()].adopt(*record)?;
        }
        self.erase(records.iter().copied())
    }

    /// Clears records that have left the tree; they are in quarantine until the store has done so.
    fn erase(&mut self, records: impl Iterator<Item = PageId>) -> Result<(), ControlError> {
        let mut moves = Vec::new();
        for record in records {
            self.pools[TierId::DISK.index()].quarantine(record)?;
            moves.push(PageMove { from: record, to: record });
        }
        for chunk in moves.chunks(1024) {
            let none = Arc::from([]);
            self.start(Plan::new(TransferKind::Erase, Namespace::default(), none, 0, chunk.to_vec()))?;
        }
        Ok(())
    }
}
