//! Emptying tiers on request: flush forgets, demote moves down first. Each ends by its deadline at the latest.

use crate::core::Core;
use crate::CoreError;
use crossbeam_channel::Sender;
use strata_control::Emptied;
use strata_types::{TierId, Time, TransferKind};

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

/// A demotion or a flush under way.
#[derive(Debug)]
pub(crate) struct Maintenance {
    /// Tiers still to empty, the next one first.
    tiers: Vec<TierId>,
    /// Whether to copy downward before dropping.
    keep: bool,
    pushed: bool,
    pub deadline: Time,
    /// Failures to erase before this job.
    failures_before: u64,
    report: MaintenanceReport,
    reply: Sender<MaintenanceReport>,
}

impl Core {
    /// Forgets every page that nothing uses, in these tiers.
    pub fn flush(&mut self, deadline: Time, tiers: Vec<TierId>, reply: Sender<MaintenanceReport>) {
        self.begin(deadline, tiers, false, reply);
    }

    /// Empties these tiers downward.
    pub fn demote(&mut self, deadline: Time, tiers: Vec<TierId>, reply: Sender<MaintenanceReport>) {
        self.begin(deadline, tiers, true, reply);
    }

    fn begin(
        &mut self,
        deadline: Time,
        mut tiers: Vec<TierId>,
        keep: bool,
        reply: Sender<MaintenanceReport>,
    ) {
        tiers.sort_unstable();
        tiers.dedup();
        if !keep {
            // From the bottom up, so that nothing is dropped as a page without its prefix.
            tiers.reverse();
        }
        let report = MaintenanceReport::default();
        let failures_before = self.failed_erasures();
        let work = Maintenance { tiers, keep, pushed: false, deadline, failures_before, report, reply };
        self.maintenance.push_back(work);
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
        while let Some(tier) = work.tiers.first().copied() {
            let late = now >= work.deadline;
            if !work.keep {
                // A copy under way would put back below what is forgotten above.
                self.control.hold_copies(true);
                let copying =
                    [TierId::DEVICE, TierId::HOST].iter().any(|tier| self.control.copies_under_way(*tier));
                if copying && !late {
                    return Ok(false);
                }
                work.report.timed_out |= copying;
            }
            if work.keep {
                if !work.pushed && !late {
                    work.report.moved[tier.index()] += self.control.push_down(tier)?;
                    work.pushed = true;
                }
                if self.control.copies_under_way(tier) && !late {
                    return Ok(false);
                }
            }
            if late && work.keep {
                work.report.timed_out = true;
                return Ok(true);
            }
            work.report.emptied[tier.index()] = match work.keep {
                true => self.control.empty_downward(tier)?,
                false => self.control.empty(tier)?,
            };
            work.pushed = false;
            work.tiers.remove(0);
        }
        self.control.hold_copies(false);
        // Records on disk are gone only when their headers are.
        let erasing = self.control.transfers_of(TransferKind::Erase) > 0;
        let late = now >= work.deadline;
        work.report.timed_out |= erasing && late;
        work.report.not_erased = self.failed_erasures() - work.failures_before;
        Ok(!erasing || late)
    }
}
