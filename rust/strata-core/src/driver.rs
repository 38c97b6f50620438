//! The thread that drives Core in a server: plan N+1 is formed while N runs, prefetches go on during a step.
//! Requests, answers and completions come in through bounded lock-free queues, plans go out through one. The
//! thread never takes Python's lock and never waits for a Mover or the engine; whoever waits for it has a bound.

mod handle;

pub(crate) use handle::{Command, ANSWER};
pub use handle::{DriverError, DriverHandle, Work};

use crate::answer::answer;
use crate::core::Core;
use crate::plan::Action;
use crate::CoreError;
use crossbeam_channel::{bounded, select, unbounded, Receiver, Sender, TrySendError};
use std::collections::VecDeque;
use std::panic::{catch_unwind, AssertUnwindSafe};
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};
use strata_control::ControlAction;
use strata_tier::{CompletionReceiver, Mover, SubmitError};
use strata_types::{RequestId, Time, TransferDescriptor, TransferError, TransferId, TransferKind};

/// How often a full Mover is asked again.
const RETRY: Duration = Duration::from_millis(1);
/// The longest sleep: bounds what a lost wake-up can cost.
const LONGEST_SLEEP: Duration = Duration::from_millis(500);
/// How long nothing must have happened before the books are proven: the proof takes a while in a large tree.
const IDLE_BEFORE_CHECK: Duration = Duration::from_secs(5);

/// Who carries out transfers.
#[derive(Clone)]
pub struct Movers {
    /// Between device and host.
    pub device: Arc<dyn Mover>,
    /// Between host and disk, if there is one.
    pub disk: Option<Arc<dyn Mover>>,
}

impl Movers {
    fn of(&self, kind: TransferKind) -> Option<&Arc<dyn Mover>> {
        match kind {
            TransferKind::Load | TransferKind::Backup => Some(&self.device),
            TransferKind::Spill | TransferKind::Prefetch | TransferKind::Erase => self.disk.as_ref(),
        }
    }
}

/// The thread itself. Dropping it stops it.
pub struct Driver {
    handle: DriverHandle,
    thread: Option<JoinHandle<()>>,
}

impl Driver {
    /// Starts to drive `core`.
    pub fn start(
        core: Core,
        movers: Movers,
        completions: CompletionReceiver,
        plans: usize,
    ) -> std::io::Result<Driver> {
        let (commands, command_queue) = bounded(handle::COMMANDS);
        let (work, work_queue) = bounded(plans + 1024);
        let (closed_leases, closed_queue) = unbounded();
        let (end_giver, end) = answer();
        let handle = DriverHandle { commands, work: work_queue, closed_leases, end };
        let looping = Loop {
            core,
            movers,
            commands: command_queue,
            closed_leases: closed_queue,
            completions,
            work,
            backlog: VecDeque::new(),
            refused_by_mover: VecDeque::new(),
            start: Instant::now(),
            last_event: Instant::now(),
            proven: false,
        };
        let thread = std::thread::Builder::new().name("strata-core".into()).spawn(move || {
            let mut looping = looping;
            let why = match catch_unwind(AssertUnwindSafe(|| looping.run())) {
                Ok(Ok(())) => "it was closed".into(),
                Ok(Err(error)) => error.to_string(),
                Err(_) => "its thread panicked".into(),
            };
            // Before Core is let go of: then whoever waits asks why.
            let _only_here = end_giver.give(why);
        })?;
        Ok(Driver { handle, thread: Some(thread) })
    }

    /// A caller's end.
    pub fn handle(&self) -> DriverHandle {
        self.handle.clone()
    }

    /// Stops the thread; what it had not done yet is left undone.
    pub fn stop(&mut self) {
        if let Some(thread) = self.thread.take() {
            // A full queue is drained within microseconds by the living thread; a dead one has no queue.
            let _disconnected = self.handle.commands.send_timeout(Command::Stop, ANSWER);
            let _panicked = thread.join();
        }
    }
}

impl Drop for Driver {
    fn drop(&mut self) {
        self.stop();
    }
}

struct Loop {
    /// Dropped before Core, which may take long: what is sent meanwhile is refused and not kept.
    commands: Receiver<Command>,
    core: Core,
    movers: Movers,
    closed_leases: Receiver<RequestId>,
    completions: CompletionReceiver,
    work: Sender<Work>,
    /// Work that the engine has no room for yet.
    backlog: VecDeque<Work>,
    /// Transfers that their Mover has no room for yet, in order.
    refused_by_mover: VecDeque<TransferDescriptor>,
    start: Instant,
    last_event: Instant,
    /// Whether the books were proven since the last event.
    proven: bool,
}

impl Drop for Loop {
    fn drop(&mut self) {
        // A channel keeps what nobody reads: whoever asked is told now.
        while self.commands.try_recv().is_ok() {}
        // Some loads no Mover has seen, and of none will anybody hear.
        self.core.fail_loads();
    }
}

impl Loop {
    fn now(&self) -> Time {
        Time(0) + self.start.elapsed()
    }

    fn run(&mut self) -> Result<(), CoreError> {
        loop {
            let patience = self.patience();
            let mut stop = false;
            let (commands, completions) = (self.commands.clone(), self.completions.clone());
            let closed_leases = self.closed_leases.clone();
            select! {
                recv(commands) -> command => match command {
                    Ok(command) => stop = self.handle(command)?,
                    Err(_) => return Ok(()),
                },
                recv(closed_leases) -> lease => if let Ok(lease) = lease {
                    self.core.close_lease(self.now(), lease)?;
                },
                recv(completions) -> completion => if let Ok(completion) = completion {
                    self.core.transfer_done(self.now(), completion)?;
                } else {
                    std::thread::sleep(RETRY);
                },
                default(patience) => {
                self.prove_when_idle()?;
                self.core.tick(self.now())?;
                self.carry_out()?;
                continue;
            }
            }
            (self.last_event, self.proven) = (Instant::now(), false);
            // Whatever else has come meanwhile belongs to the same decision.
            while let (false, Ok(command)) = (stop, commands.try_recv()) {
                stop = self.handle(command)?;
            }
            self.close_leases()?;
            while let Ok(completion) = completions.try_recv() {
                self.core.transfer_done(self.now(), completion)?;
            }
            if stop {
                return Ok(());
            }
            self.core.tick(self.now())?;
            self.carry_out()?;
        }
    }

    /// Once in each idle spell: a defect in the books stops Core before it can become a wrong answer.
    fn prove_when_idle(&mut self) -> Result<(), CoreError> {
        if self.proven || self.last_event.elapsed() < IDLE_BEFORE_CHECK || !self.core.is_idle() {
            return Ok(());
        }
        self.proven = true;
        self.core.check()
    }

    fn patience(&self) -> Duration {
        if !self.refused_by_mover.is_empty() || !self.backlog.is_empty() {
            return RETRY;
        }
        let until = self.core.next_deadline().map(|deadline| deadline.since(self.now()));
        until.unwrap_or(LONGEST_SLEEP).clamp(RETRY, LONGEST_SLEEP)
    }

    fn close_leases(&mut self) -> Result<(), CoreError> {
        while let Ok(lease) = self.closed_leases.try_recv() {
            self.core.close_lease(self.now(), lease)?;
        }
        Ok(())
    }

    fn handle(&mut self, command: Command) -> Result<bool, CoreError> {
        // Whoever closed a lease before sending this finds it closed.
        self.close_leases()?;
        let now = self.now();
        match command {
            Command::Arrived(request) => self.core.arrived(now, request)?,
            Command::Aborted(request) => self.core.aborted(now, request)?,
            Command::PlanDone(plan, results, time) => self.core.plan_done(now, plan, &results, time)?,
            Command::PlanFailed(plan, why) => self.core.plan_failed(now, plan, why)?,
            Command::Flush(tiers, limit, reply) => self.core.flush(now + limit, tiers, reply),
            Command::Demote(tiers, limit, reply) => self.core.demote(now + limit, tiers, reply),
            Command::Resize(tier, pages, limit, reply) => self.core.resize(now + limit, tier, pages, reply),
            Command::AttachDisk(disk, pages, reply) => {
                let attached = self.core.attach_disk(pages)?;
                if attached {
                    self.movers.disk = Some(disk);
                }
                let _gone = reply.try_send(attached);
            }
            Command::Recovered(pages, found, last, reply) => {
                let _gone = reply.try_send(self.core.recovered(pages, found, last)?);
            }
            Command::DetachDisk(limit, reply) => self.core.detach_disk(now + limit, reply),
            Command::Measured(tokens, context, busy) => self.core.measured(tokens, context, busy),
            Command::Check(reply) => {
                let result =
                    self.core.check().map(|()| self.core.is_idle()).map_err(|error| error.to_string());
                // Whoever asked may have given up waiting.
                let _gone = reply.try_send(result);
            }
            Command::Stats(reply) => {
                let _gone = reply.try_send(self.core.stats());
            }
            Command::Explain(reply) => {
                let _gone = reply.try_send(self.core.explain(now)?);
            }
            Command::Lease(call) => call(&mut self.core, now)?,
            Command::Stop => return Ok(true),
        }
        Ok(false)
    }

    fn carry_out(&mut self) -> Result<(), CoreError> {
        loop {
            self.submit_again()?;
            let actions = self.core.take_actions();
            if actions.is_empty() {
                break;
            }
            for action in actions {
                match action {
                    Action::Plan(plan) => self.backlog.push_back(Work::Plan(plan)),
                    Action::Refuse(refusal) => self.backlog.push_back(Work::Refused(refusal)),
                    Action::Control(ControlAction::Submit(transfer)) => self.submit(transfer)?,
                    Action::Control(ControlAction::Cancel(kind, id)) => self.cancel(kind, id)?,
                }
            }
        }
        while let Some(work) = self.backlog.pop_front() {
            match self.work.try_send(work) {
                Ok(()) => {}
                Err(TrySendError::Full(work)) => {
                    self.backlog.push_front(work);
                    break;
                }
                // Nobody computes any more; Core goes on serving stats and shutdown.
                Err(TrySendError::Disconnected(_)) => {}
            }
        }
        Ok(())
    }

    /// Offers waiting transfers to their Movers again; one that is still full is not asked twice.
    fn submit_again(&mut self) -> Result<(), CoreError> {
        let mut full = Vec::new();
        for transfer in std::mem::take(&mut self.refused_by_mover) {
            let kind = transfer.kind;
            if full.contains(&kind) {
                self.refused_by_mover.push_back(transfer);
                continue;
            }
            let waiting = self.refused_by_mover.len();
            self.submit(transfer)?;
            if self.refused_by_mover.len() > waiting {
                full.push(kind);
            }
        }
        Ok(())
    }

    fn submit(&mut self, transfer: TransferDescriptor) -> Result<(), CoreError> {
        let Some(mover) = self.movers.of(transfer.kind) else {
            let error =
                TransferError::Unavailable { tier: transfer.kind.destination().name(), reason: "off".into() };
            return self.core.transfer_rejected(self.now(), transfer.id, error);
        };
        match mover.submit(transfer) {
            Ok(()) => Ok(()),
            Err(SubmitError::Full(transfer)) => {
                self.refused_by_mover.push_back(*transfer);
                Ok(())
            }
            Err(SubmitError::Closed(transfer)) => {
                let tier = transfer.kind.destination().name();
                let error = TransferError::Unavailable { tier, reason: "its mover is closed".into() };
                self.core.transfer_rejected(self.now(), transfer.id, error)
            }
        }
    }

    fn cancel(&mut self, kind: TransferKind, id: TransferId) -> Result<(), CoreError> {
        let before = self.refused_by_mover.len();
        self.refused_by_mover.retain(|transfer| transfer.id != id);
        if self.refused_by_mover.len() < before {
            // No Mover has seen it, so none will report it.
            return self.core.transfer_rejected(self.now(), id, TransferError::Cancelled);
        }
        if let Some(mover) = self.movers.of(kind) {
            mover.cancel(id);
        }
        Ok(())
    }
}
