//! Write-back: an eviction whose victims no tier below holds waits until they are copied down. The wait is bounded:
//! where nothing can be copied, a copy fails, or patience ends, the victims are lost and counted, and the eviction
//! goes on. After patience has ended once nobody waits for a while, unless a copy comes through: a tier that hangs
//! costs one wait now and then, not one for each eviction.

use crate::controller::CacheController;
use crate::transfer::{Leg, Transfer};
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
    /// Patience has ended: until then no eviction waits again.
    resumes: Time,
    /// When a copy last ended, or began where none was under way.
    moved: Time,
}

/// Within so many times patience a wait is the same one.
const ASKED_AGAIN: u32 = 4;
/// For so many times as long as patience nobody waits after it has ended.
const PAUSE: u32 = 16;

impl CacheController {
    /// Whether room in a tier may come from copies that are under way: an eviction that waits need not give up yet.
    pub fn making_room(&self, tier: TierId) -> bool {
        let patience = self.config.save_patience;
        let fresh = |(since, _): (Time, Time)| self.now.since(since) < patience;
        let Some(saving) = self.saving.get(tier.index()) else { return false };
        // Copies that hang make no room.
        let moves = self.copies_under_way(tier) && self.now.since(saving.moved) < patience;
        moves || saving.waiting.is_some_and(fresh)
    }

    /// Whether pages of a tier are copied down before they are evicted.
    pub fn saves_victims(&self, tier: TierId) -> bool {
        self.downward(tier).is_some() && self.write_policy(tier).saves_victims()
    }

    /// When an eviction that waits or a tier that shrinks has to be tried again at the latest.
    pub fn next_deadline(&self) -> Option<Time> {
        let tiers = [TierId::DEVICE, TierId::HOST].into_iter().zip(&self.saving);
        let since = tiers.flat_map(|(tier, saving)| {
            let moved = self.copies_under_way(tier).then_some(saving.moved);
            saving.waiting.map(|(since, _)| since).into_iter().chain(moved)
        });
        let ends = since.map(|since| since + self.config.save_patience);
        ends.filter(|end| *end > self.now).chain(self.next_shrink()).min()
    }

    /// Notes that a copy out of a tier begins.
    pub(crate) fn begins_to_save(&mut self, tier: TierId) {
        if !self.copies_under_way(tier) {
            if let Some(saving) = self.saving.get_mut(tier.index()) {
                saving.moved = self.now;
            }
        }
    }

    /// Notes how a copy out of a tier ended. Half the way through staging proves nothing yet.
    pub(crate) fn saved(&mut self, transfer: &Transfer) {
        let tier = match (transfer.kind, &transfer.leg) {
            (TransferKind::Backup, _) | (TransferKind::Spill, Leg::Second) => TierId::DEVICE,
            (TransferKind::Spill, _) => TierId::HOST,
            _ => return,
        };
        let saving = &mut self.saving[tier.index()];
        saving.moved = self.now;
        match (&transfer.error, &transfer.leg) {
            (Some(_), _) => saving.failed = true,
            (None, Leg::First(_)) => {}
            (None, _) => saving.resumes = Time::default(),
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
        let (now, patience) = (self.now, self.config.save_patience);
        let nothing_lost = self.tree.missing_victims(group, tier, &below, wanted)?.is_empty();
        let saving = &mut self.saving[tier.index()];
        if nothing_lost {
            saving.waiting = None;
            return Ok(false);
        }
        // Whoever waited before may have gone without asking again; whoever waits asks again when patience ends.
        let asked_again = |wait: &(Time, Time)| now.since(wait.1) < patience * ASKED_AGAIN;
        let since = saving.waiting.filter(asked_again).map_or(now, |wait| wait.0);
        saving.waiting = Some((since, now));
        if now.since(since) >= patience {
            saving.resumes = now + patience * PAUSE;
        }
        let given_up = std::mem::take(&mut saving.failed) || now < saving.resumes;
        let waits = !given_up && self.start_saving(tier, next, kind, wanted)?;
        // What is on its way down is in use: what comes next in the order may be below already.
        let lost = self.tree.missing_victims(group, tier, &below, wanted)?;
        if waits && (!lost.is_empty() || self.tree.evictable_pages(group, tier) < wanted) {
            return Ok(true);
        }
        self.saving[tier.index()].waiting = None;
        self.stats.unsaved_pages[tier.index()] += lost.iter().map(|run| run.slots.len() as u64).sum::<u64>();
        Ok(false)
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
        // More than is wanted now, so that not every page to come waits for a copy of its own; but not more each time
        // that somebody asks.
        let count =
            wanted.max(self.config.transfer_pages as usize).saturating_sub(self.pages_under_way(tier, kind));
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
