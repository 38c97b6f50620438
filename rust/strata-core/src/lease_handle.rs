//! Leases from the caller's side of Core's thread. What holds: an answer that comes after its question was given up leaves
//! nothing behind, and whoever waits hears at once when Core stops.

use crate::answer::{answer, Giver, NoAnswer};
use crate::core::Core;
use crate::driver::{Command, DriverError, DriverHandle, ANSWER};
use crate::lease::{LeaseError, LeaseFound, LoadAnswer, LONGEST_SAVE};
use crate::CoreError;
use std::time::Duration;
use strata_types::{Namespace, PageId, RequestId, Time, Token};

/// Something to do with a lease, on Core's thread.
pub(crate) type LeaseCall = Box<dyn FnOnce(&mut Core, Time) -> Result<(), CoreError> + Send>;

impl DriverHandle {
    /// Carries `call` out on Core's thread and waits for what it gives.
    fn on_core<T: Send + 'static>(
        &self,
        limit: Duration,
        call: impl FnOnce(&mut Core, Time, Giver<T>) -> Result<(), CoreError> + Send + 'static,
    ) -> Result<T, DriverError> {
        let (giver, answer) = answer();
        self.send_surely(Command::Lease(Box::new(move |core, now| call(core, now, giver))))?;
        answer.take(limit).map_err(|none| match none {
            NoAnswer::Late => DriverError::NoAnswer(limit),
            NoAnswer::Lost => self.stopped(),
        })
    }

    /// Looks a sequence up and keeps what is found where it is.
    pub fn open_lease(&self, namespace: Namespace, tokens: Vec<Token>) -> Result<LeaseFound, DriverError> {
        self.on_core(ANSWER, move |core, now, giver| core.open_lease_for(now, namespace, tokens, &giver))
    }

    /// Begins to bring the first `pages` pages of what was found to the device. The answer comes when the last page that
    /// had to be read from disk is there, or `limit` has passed; later only for room, as for `reserve_lease`. It is lost
    /// when Core stops.
    pub fn load_lease(&self, id: RequestId, pages: u32, limit: Duration) -> Result<LoadAnswer, DriverError> {
        let (giver, answer) = answer();
        let call = move |core: &mut Core, now| {
            core.load_lease(now, id, pages, limit, giver);
            Ok(())
        };
        self.send_surely(Command::Lease(Box::new(call)))?;
        Ok(answer)
    }

    /// Pages to compute into. Waits for room until `limit` has passed; longer, up to `LONGEST_SAVE` in all, only while
    /// pages that are on their way down will make enough of it.
    pub fn reserve_lease(
        &self,
        id: RequestId,
        count: u32,
        limit: Duration,
    ) -> Result<Result<Vec<PageId>, LeaseError>, DriverError> {
        self.on_core(limit.max(LONGEST_SAVE) + ANSWER, move |core, now, giver| {
            core.reserve_lease(now, id, count, limit, giver);
            Ok(())
        })
    }

    /// Refuses every lease that waits, and those that come to wait: the cache is being closed.
    pub fn refuse_waiting_leases(&self) -> Result<(), DriverError> {
        let call = |core: &mut Core, _| {
            core.refuse_waiting_leases();
            Ok(())
        };
        self.send_surely(Command::Lease(Box::new(call)))
    }

    /// Makes reserved pages match. Returns those for which the cache had others.
    pub fn commit_lease(
        &self,
        id: RequestId,
        tokens: Vec<Token>,
        pages: Vec<PageId>,
    ) -> Result<Result<Vec<PageId>, LeaseError>, DriverError> {
        self.on_core(ANSWER, move |core, now, giver| {
            // Whoever asked may have given up waiting; the pages match all the same.
            let _gone = giver.give(core.commit_lease(now, id, tokens, &pages)?);
            Ok(())
        })
    }

    /// Gives reserved pages back.
    pub fn abort_lease(
        &self,
        id: RequestId,
        pages: Vec<PageId>,
    ) -> Result<Result<(), LeaseError>, DriverError> {
        self.on_core(ANSWER, move |core, now, giver| {
            let _gone = giver.give(core.abort_lease(now, id, &pages)?);
            Ok(())
        })
    }

    /// Lets everything go. Never waits and never fails: what comes later finds it done, and a Core that has stopped keeps
    /// nothing.
    pub fn close_lease(&self, id: RequestId) {
        let _stopped = self.closed_leases.send(id);
    }
}
