//! Leases from the caller's side of Core's thread.

use crate::answer::Answer;
use crate::core::Core;
use crate::driver::{Command, DriverError, DriverHandle, ANSWER};
use crate::lease::{LeaseError, LeaseFound, LoadAnswer, ReserveAnswer};
use crate::CoreError;
use std::sync::Arc;
use std::time::Duration;
use strata_types::{Namespace, PageId, RequestId, Time, Token};

/// Something to do with a lease, on Core's thread.
pub(crate) type LeaseCall = Box<dyn FnOnce(&mut Core, Time) -> Result<(), CoreError> + Send>;

impl DriverHandle {
    /// Carries `call` out on Core's thread and brings its result back.
    fn on_core<T: Send + 'static>(
        &self,
        call: impl FnOnce(&mut Core, Time) -> Result<T, CoreError> + Send + 'static,
    ) -> Result<T, DriverError> {
        self.ask(ANSWER, |reply| {
            Command::Lease(Box::new(move |core, now| {
                // Whoever asked may have given up waiting.
                let _gone = reply.try_send(call(core, now)?);
                Ok(())
            }))
        })
    }

    /// Looks a sequence up and keeps what is found where it is.
    pub fn open_lease(&self, namespace: Namespace, tokens: Vec<Token>) -> Result<LeaseFound, DriverError> {
        self.on_core(move |core, now| core.open_lease(now, namespace, tokens))
    }

    /// Begins to bring the first `pages` pages of what was found to the device. The answer comes when the last page that
    /// had to be read from disk is there, or `limit` has passed.
    pub fn load_lease(&self, id: RequestId, pages: u32, limit: Duration) -> Result<LoadAnswer, DriverError> {
        let answer = Arc::new(Answer::default());
        let given = Arc::clone(&answer);
        let call = move |core: &mut Core, now| {
            core.load_lease(now, id, pages, limit, given);
            Ok(())
        };
        self.send_surely(Command::Lease(Box::new(call)))?;
        Ok(answer)
    }

    /// Asks for pages to compute into. The answer comes when there is room, or `limit` has passed.
    pub fn reserve_lease(
        &self,
        id: RequestId,
        count: u32,
        limit: Duration,
    ) -> Result<ReserveAnswer, DriverError> {
        let answer = Arc::new(Answer::default());
        let given = Arc::clone(&answer);
        let call = move |core: &mut Core, now| {
            core.reserve_lease(now, id, count, limit, given);
            Ok(())
        };
        self.send_surely(Command::Lease(Box::new(call)))?;
        Ok(answer)
    }

    /// Makes reserved pages match. Returns those for which the cache had others.
    pub fn commit_lease(
        &self,
        id: RequestId,
        tokens: Vec<Token>,
        pages: Vec<PageId>,
    ) -> Result<Result<Vec<PageId>, LeaseError>, DriverError> {
        self.on_core(move |core, now| core.commit_lease(now, id, tokens, &pages))
    }

    /// Gives reserved pages back.
    pub fn abort_lease(
        &self,
        id: RequestId,
        pages: Vec<PageId>,
    ) -> Result<Result<(), LeaseError>, DriverError> {
        self.on_core(move |core, now| core.abort_lease(now, id, &pages))
    }

    /// Lets everything go. Does not wait: what comes later finds it done.
    pub fn close_lease(&self, id: RequestId) -> Result<(), DriverError> {
        self.send_surely(Command::Lease(Box::new(move |core, now| core.close_lease(now, id))))
    }
}
