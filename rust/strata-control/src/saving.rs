//! Write-back: an eviction whose victims no tier below holds waits until they are copied down. The wait is bounded:
//! where nothing can be copied, a copy fails, or patience ends, the victims are lost and counted, and the eviction
//! goes on.

use crate::controller::CacheController;
use crate::ControlError;
use std::collections::HashSet;
use strata_types::{Namespace, TierId, Time, Token, TransferKind};

/// The wait of one tier's evictions.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Saving {
    /// Since when, and when somebody last asked.
    waiting: Option<(Time, Time)>,
    /// A copy failed: the next eviction does not wait for another.
    failed: bool,
}

impl CacheController {
    /// Whether room in a tier may come from copies that are under way: an eviction that waits need not give up yet.
    pub fn making_room(&self, tier: TierId) -> bool {
        let patience = self.config.save_patience;
        let fresh = |(since, _): (Time, Time)| self.now.since(since) < patience;
        let waits = self.saving.get(tier.index()).is_some_and(|saving| saving.waiting.is_some_and(fresh));
        waits || self.copies_under_way(tier)
    }

    /// Whether pages of a tier are copied down before they are evicted.
    pub fn saves_victims(&self, tier: TierId) -> bool {
        self.downward(tier).is_some() && self.write_policy(tier).saves_victims()
    }

    /// When an eviction that waits has to be tried again at the latest.
    pub fn next_deadline(&self) -> Option<Time> {
        let ends = |(since, _): (Time, Time)| since + self.config.save_patience;
        self.saving.iter().filter_map(|saving| saving.waiting).map(ends).filter(|end| *end > self.now).min()
    }

    /// Notes that a copy out of a tier failed.
    pub(crate) fn save_failed(&mut self, kind: TransferKind) {
        if let Some(saving) = self.saving.get_mut(kind.source().index()) {
            saving.failed = true;
        }
    }

    /// Copies down what an eviction of `wanted` pages would lose, if the write policy says so. True while the eviction
    /// has to wait for that.
    pub(crate) fn save_before_eviction(&mut self, tier: TierId, wanted: usize) -> Result<bool, ControlError> {
        let Some((next, kind)) = self.downward(tier) else { return Ok(false) };
        if self.copies_held || !self.write_policy(tier).saves_victims() {
            return Ok(false);
        }
        let group = self.config.group;
        let below = self.below(tier);
        let lost = self.tree.missing_victims(group, tier, &below, wanted)?;
        let (now, patience) = (self.now, self.config.save_patience);
        let saving = &mut self.saving[tier.index()];
        if lost.is_empty() {
            saving.waiting = None;
            return Ok(false);
        }
        // Whoever waited before may have gone without asking again.
        let since =
            saving.waiting.filter(|(_, asked)| now.since(*asked) < patience).map_or(now, |wait| wait.0);
        saving.waiting = Some((since, now));
        let given_up = std::mem::take(&mut saving.failed) || now.since(since) >= patience;
        if given_up || !self.start_saving(tier, next, kind, wanted)? {
            self.saving[tier.index()].waiting = None;
            self.stats.unsaved_pages[tier.index()] +=
                lost.iter().map(|run| run.slots.len() as u64).sum::<u64>();
            return Ok(false);
        }
        Ok(true)
    }

    /// Where a copy is as good as in the next tier: a page that sank further is not brought up to be lost less.
    fn below(&self, tier: TierId) -> Vec<TierId> {
        [TierId::HOST, TierId::DISK].into_iter().filter(|other| *other > tier && self.has(*other)).collect()
    }

    fn start_saving(
        &mut self,
        tier: TierId,
        next: TierId,
        kind: TransferKind,
        wanted: usize,
    ) -> Result<bool, ControlError> {
        // More than is wanted now, so that not every page to come waits for a copy of its own.
        let count = wanted.max(self.config.transfer_pages as usize);
        let below = self.below(tier);
        let mut started = HashSet::new();
        for run in self.tree.missing_victims(self.config.group, tier, &below, count)? {
            let pages = self.not_moving(kind, run.start_page, &run.slots);
            if self.move_runs(kind, &run.namespace, &run.tokens, &pages, &mut started)? > 0 {
                break;
            }
        }
        Ok(!started.is_empty() || self.copies_under_way(tier) || self.making_room(next))
    }

    /// Copies the pages of a path down whatever the policy says: their request gives them up and comes back.
    pub fn save_path(&mut self, namespace: &Namespace, tokens: &[Token]) -> Result<(), ControlError> {
        self.copy_path(TierId::DEVICE, namespace, tokens, |_, _| true)
    }
}
