//! Tiers that are emptied or changed on request: flush forgets, demote moves down first, resize, attach and detach
//! change what there is. Each job ends by its deadline at the latest.

use crate::core::Core;
use crate::CoreError;
use crossbeam_channel::Sender;
use std::ops::Range;
use strata_control::Emptied;
use strata_types::{PageId, PageRecord, TierId, Time, TransferKind};

/// What a flush or a demotion did, by tier from the device down.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct MaintenanceReport {
    /// Pages that were copied to the tier below on the way.
    pub moved: [usize; 3],
    /// Pages that left each tier, and that stayed.
    pub emptied: [Emptied; 3],
    /// Groups of records on disk that could not be cleared: what they hold may be found after a restart.
    pub not_erased: u64,
    /// The deadline came first: what was not moved down in time stayed where it was.
    pub timed_out: bool,
}

/// What there is to do.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Job {
    /// Forget what nothing uses.
    Flush,
    /// Copy down what the tier below lacks, then forget it here.
    Demote,
    /// Give the one tier this many pages.
    Resize(u32),
    /// Forget the disk, whose records stay.
    Detach,
}

/// A job under way.
#[derive(Debug)]
pub(crate) struct Maintenance {
    job: Job,
    /// Tiers still to do, the next one first.
    tiers: Vec<TierId>,
    pushed: bool,
    pub deadline: Time,
    /// Failures to erase before this job.
    failures_before: u64,
    report: MaintenanceReport,
    reply: Sender<MaintenanceReport>,
}

impl Core {
    /// Forgets every page that nothing uses, in these tiers.
    pub fn flush(&mut self, deadline: Time, mut tiers: Vec<TierId>, reply: Sender<MaintenanceReport>) {
        tiers.sort_unstable();
        tiers.dedup();
        // From the bottom up, so that nothing is dropped as a page without its prefix.
        tiers.reverse();
        self.begin(Job::Flush, deadline, tiers, reply);
    }

    /// Empties these tiers downward.
    pub fn demote(&mut self, deadline: Time, mut tiers: Vec<TierId>, reply: Sender<MaintenanceReport>) {
        tiers.sort_unstable();
        tiers.dedup();
        self.begin(Job::Demote, deadline, tiers, reply);
    }

    /// Gives a tier another number of pages. What it holds beyond them is evicted as its users let go.
    pub fn resize(&mut self, deadline: Time, tier: TierId, pages: u32, reply: Sender<MaintenanceReport>) {
        self.begin(Job::Resize(pages), deadline, vec![tier], reply);
    }

    /// Forgets the disk, so that it can be closed. What it holds stays there.
    pub fn detach_disk(&mut self, deadline: Time, reply: Sender<MaintenanceReport>) {
        self.begin(Job::Detach, deadline, vec![TierId::DISK], reply);
    }

    /// A disk of this many pages is there; `recovered` tells what it holds. False, and nothing has changed, while one is
    /// there already.
    pub fn attach_disk(&mut self, pages: u32) -> Result<bool, CoreError> {
        Ok(self.control.attach_disk(pages)?)
    }

    /// Takes in what a scan found in a stretch of the disk; returns how many pages match that did not before.
    pub fn recovered(
        &mut self,
        pages: Range<u32>,
        found: Vec<(PageId, PageRecord)>,
        last: bool,
    ) -> Result<u32, CoreError> {
        Ok(self.control.recovered(pages, found, last)?)
    }

    fn begin(&mut self, job: Job, deadline: Time, tiers: Vec<TierId>, reply: Sender<MaintenanceReport>) {
        let report = MaintenanceReport::default();
        let failures_before = self.failed_erasures();
        self.maintenance.push_back(Maintenance {
            job,
            tiers,
            pushed: false,
            deadline,
            failures_before,
            report,
            reply,
        });
    }

    fn failed_erasures(&self) -> u64 {
        self.control.stats().edge(TransferKind::Erase).failed
    }

    /// Takes the oldest job as far as it goes now.
    pub(crate) fn maintain(&mut self, now: Time) -> Result<(), CoreError> {
        while let Some(mut work) = self.maintenance.pop_front() {
            if !self.advance(now, &mut work)? {
                self.maintenance.push_front(work);
                return Ok(());
            }
            // Whoever asked may have given up waiting; the work is done all the same.
            let _gone = work.reply.try_send(work.report);
        }
        Ok(())
    }

    fn advance(&mut self, now: Time, work: &mut Maintenance) -> Result<bool, CoreError> {
        let late = now >= work.deadline;
        let done = match work.job {
            Job::Flush => self.advance_flush(late, work)?,
            Job::Demote => self.advance_demotion(late, work)?,
            Job::Resize(pages) => self.advance_resize(late, work, pages)?,
            Job::Detach => self.control.detach_disk()?,
        };
        work.report.timed_out |= late && !done;
        Ok(done || late)
    }

    fn advance_flush(&mut self, late: bool, work: &mut Maintenance) -> Result<bool, CoreError> {
        while let Some(tier) = work.tiers.first().copied() {
            // A copy under way would put back below what is forgotten above.
            self.control.hold_copies(true);
            let copying =
                [TierId::DEVICE, TierId::HOST].iter().any(|tier| self.control.copies_under_way(*tier));
            if copying && !late {
                return Ok(false);
            }
            work.report.timed_out |= copying;
            work.report.emptied[tier.index()] = self.control.empty(tier)?;
            work.tiers.remove(0);
        }
        self.control.hold_copies(false);
        work.report.not_erased = self.failed_erasures() - work.failures_before;
        // Records on disk are gone only when their headers are.
        Ok(self.control.transfers_of(TransferKind::Erase) == 0)
    }

    fn advance_demotion(&mut self, late: bool, work: &mut Maintenance) -> Result<bool, CoreError> {
        while let Some(tier) = work.tiers.first().copied() {
            if !self.push(late, work, tier)? {
                return Ok(false);
            }
            work.report.emptied[tier.index()] = self.control.empty_downward(tier)?;
            work.pushed = false;
            work.tiers.remove(0);
        }
        Ok(true)
    }

    /// Copies down what the tier below lacks. False until that is done.
    fn push(&mut self, late: bool, work: &mut Maintenance, tier: TierId) -> Result<bool, CoreError> {
        if !work.pushed && !late {
            work.report.moved[tier.index()] += self.control.push_down(tier)?;
            work.pushed = true;
        }
        Ok(!late && !self.control.copies_under_way(tier))
    }

    fn advance_resize(&mut self, late: bool, work: &mut Maintenance, pages: u32) -> Result<bool, CoreError> {
        let Some(tier) = work.tiers.first().copied() else { return Ok(true) };
        let shrinks = pages < self.control.capacity(tier);
        if shrinks && self.control.saves_victims(tier) && !self.push(late, work, tier)? && !late {
            return Ok(false);
        }
        let settled = self.control.resize(tier, pages)?;
        if tier == TierId::DEVICE {
            self.refuse_unfit()?;
        }
        Ok(settled)
    }
}
