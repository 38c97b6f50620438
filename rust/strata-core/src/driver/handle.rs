//! The caller's end of Core's thread: commands in, answers and work out. Nothing here waits without a bound, and whatever
//! is sent to a Core that ends is carried out or refused.

use crate::answer::Answer;
use crate::lease_handle::LeaseCall;
use crate::maintenance::MaintenanceReport;
use crate::plan::{Plan, Refusal, RowResult, StepFailure, StepTime};
use crate::request::NewRequest;
use crate::stats::{CoreStats, WaitingReport};
use crossbeam_channel::{bounded, Receiver, RecvTimeoutError, SendTimeoutError, Sender, TrySendError};
use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;
use strata_tier::Mover;
use strata_types::{PageId, PageRecord, PlanId, RequestId, TierId};
use thiserror::Error;

/// Commands that may be on their way to Core; one more is refused.
pub(super) const COMMANDS: usize = 8192;
/// How long a caller waits for an answer of Core that takes microseconds when Core lives.
pub(crate) const ANSWER: Duration = Duration::from_secs(10);

/// Something for the engine.
#[derive(Debug)]
pub enum Work {
    /// Compute this.
    Plan(Plan),
    /// Tell the client.
    Refused(Refusal),
}

/// Why Core did not answer.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
pub enum DriverError {
    /// Too many commands are on their way.
    #[error("the core's queue of {COMMANDS} commands is full: try again later")]
    Busy,
    /// Core stopped, with what stopped it.
    #[error("the core has stopped: {0}")]
    Stopped(String),
    /// There is a disk.
    #[error("a disk is attached already, or something still uses the one that was: detach it first")]
    DiskInUse,
    /// No answer in time.
    #[error("the core did not answer within {0:?}")]
    NoAnswer(Duration),
}

pub(crate) enum Command {
    Arrived(NewRequest),
    Aborted(RequestId),
    PlanDone(PlanId, Vec<RowResult>, StepTime),
    PlanFailed(PlanId, StepFailure),
    Flush(Vec<TierId>, Duration, Sender<MaintenanceReport>),
    Demote(Vec<TierId>, Duration, Sender<MaintenanceReport>),
    Resize(TierId, u32, Duration, Sender<MaintenanceReport>),
    AttachDisk(Arc<dyn Mover>, u32, Sender<bool>),
    Recovered(Range<u32>, Vec<(PageId, PageRecord)>, bool, Sender<u32>),
    DetachDisk(Duration, Sender<MaintenanceReport>),
    Measured(usize, usize, Duration),
    Check(Sender<Result<bool, String>>),
    Stats(Sender<CoreStats>),
    Explain(Sender<Vec<WaitingReport>>),
    Lease(LeaseCall),
    Stop,
}

/// The caller's end. Cheap to clone; all of it may be used from any thread.
#[derive(Clone)]
pub struct DriverHandle {
    pub(super) commands: Sender<Command>,
    pub(super) work: Receiver<Work>,
    /// Leases to close. It has no bound of its own, since it holds each lease at most once: whoever forgets one must not
    /// have to wait for that.
    pub(crate) closed_leases: Sender<RequestId>,
    /// Why Core has stopped.
    pub(super) end: Answer<String>,
}

impl DriverHandle {
    /// Why Core has stopped, or is about to: whoever asked what it failed at hears of that first.
    pub fn stopped(&self) -> DriverError {
        DriverError::Stopped(self.end.wait(ANSWER).unwrap_or_else(|_| "it does not say why".into()))
    }

    fn send(&self, command: Command) -> Result<(), DriverError> {
        let sent = self.commands.try_send(command).map_err(|error| match error {
            TrySendError::Full(_) => DriverError::Busy,
            TrySendError::Disconnected(_) => self.stopped(),
        });
        sent.and_then(|()| self.still_runs())
    }

    /// Core says that it ends before it empties its queue for the last time: what was sent before this sees no end is
    /// carried out or thrown away, and never left behind.
    pub fn still_runs(&self) -> Result<(), DriverError> {
        self.end.wait(Duration::ZERO).map_or(Ok(()), |why| Err(DriverError::Stopped(why)))
    }

    /// As `send`, but waits for room: the engine's reports and aborts must not be lost.
    pub(crate) fn send_surely(&self, command: Command) -> Result<(), DriverError> {
        let sent = self.commands.send_timeout(command, ANSWER).map_err(|error| match error {
            SendTimeoutError::Timeout(_) => DriverError::NoAnswer(ANSWER),
            SendTimeoutError::Disconnected(_) => self.stopped(),
        });
        sent.and_then(|()| self.still_runs())
    }

    pub(crate) fn ask<T>(
        &self,
        limit: Duration,
        command: impl FnOnce(Sender<T>) -> Command,
    ) -> Result<T, DriverError> {
        let (reply, answer) = bounded(1);
        // Only requests are turned away where many are on their way: what is asked for once is not asked again.
        self.send_surely(command(reply))?;
        answer.recv_timeout(limit).map_err(|error| match error {
            RecvTimeoutError::Timeout => DriverError::NoAnswer(limit),
            RecvTimeoutError::Disconnected => self.stopped(),
        })
    }

    /// Queues a request. A refusal comes back as work.
    pub fn submit(&self, request: NewRequest) -> Result<(), DriverError> {
        self.send(Command::Arrived(request))
    }

    /// Gives a request up.
    pub fn abort(&self, request: RequestId) -> Result<(), DriverError> {
        self.send_surely(Command::Aborted(request))
    }

    /// Reports a plan as carried out.
    pub fn plan_done(
        &self,
        plan: PlanId,
        results: Vec<RowResult>,
        time: StepTime,
    ) -> Result<(), DriverError> {
        self.send_surely(Command::PlanDone(plan, results, time))
    }

    /// Reports a plan as failed.
    pub fn plan_failed(&self, plan: PlanId, why: StepFailure) -> Result<(), DriverError> {
        self.send_surely(Command::PlanFailed(plan, why))
    }

    /// The next thing to do, or none within the limit.
    pub fn next_work(&self, limit: Duration) -> Result<Option<Work>, DriverError> {
        match self.work.recv_timeout(limit) {
            Ok(work) => Ok(Some(work)),
            Err(RecvTimeoutError::Timeout) => Ok(None),
            Err(RecvTimeoutError::Disconnected) => Err(self.stopped()),
        }
    }

    /// Forgets what nothing uses in these tiers.
    pub fn flush(&self, tiers: Vec<TierId>, limit: Duration) -> Result<MaintenanceReport, DriverError> {
        self.ask(limit + ANSWER, |reply| Command::Flush(tiers, limit, reply))
    }

    /// Empties these tiers downward.
    pub fn demote(&self, tiers: Vec<TierId>, limit: Duration) -> Result<MaintenanceReport, DriverError> {
        self.ask(limit + ANSWER, |reply| Command::Demote(tiers, limit, reply))
    }

    /// Gives a tier another number of pages; its memory or files must have room for them already.
    pub fn resize(
        &self,
        tier: TierId,
        pages: u32,
        limit: Duration,
    ) -> Result<MaintenanceReport, DriverError> {
        self.ask(limit + ANSWER, |reply| Command::Resize(tier, pages, limit, reply))
    }

    /// A disk of this many pages is there, none of them looked at yet.
    pub fn attach_disk(&self, disk: Arc<dyn Mover>, pages: u32) -> Result<(), DriverError> {
        match self.ask(ANSWER, |reply| Command::AttachDisk(disk, pages, reply))? {
            true => Ok(()),
            false => Err(DriverError::DiskInUse),
        }
    }

    /// Reports what a stretch of the disk holds; returns how many pages match that did not before.
    pub fn recovered(
        &self,
        pages: Range<u32>,
        found: Vec<(PageId, PageRecord)>,
        last: bool,
    ) -> Result<u32, DriverError> {
        self.ask(ANSWER, |reply| Command::Recovered(pages, found, last, reply))
    }

    /// Forgets the disk: once this returns without `timed_out`, nothing uses it any more.
    pub fn detach_disk(&self, limit: Duration) -> Result<MaintenanceReport, DriverError> {
        self.ask(limit + ANSWER, |reply| Command::DetachDisk(limit, reply))
    }

    /// Tells what a step of so many tokens after so many before them took, outside any plan.
    pub fn measured(&self, tokens: usize, context: usize, busy: Duration) -> Result<(), DriverError> {
        self.send_surely(Command::Measured(tokens, context, busy))
    }

    /// Proves that Core's books agree; says whether Core was idle, when the proof is the strictest.
    pub fn check(&self) -> Result<Result<bool, String>, DriverError> {
        self.ask(ANSWER, Command::Check)
    }

    /// Why each waiting request waits, in the order in which they would go.
    pub fn explain(&self) -> Result<Vec<WaitingReport>, DriverError> {
        self.ask(ANSWER, Command::Explain)
    }

    /// Counters and gauges.
    pub fn stats(&self) -> Result<CoreStats, DriverError> {
        self.ask(ANSWER, Command::Stats)
    }
}
