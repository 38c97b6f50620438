//! Wraps a Mover and makes chosen transfers go wrong, by the order in which they are submitted.

use crate::{CompletionSender, Mover, SubmitError};
use std::collections::{HashMap, VecDeque};
use std::sync::{Mutex, MutexGuard, PoisonError};
use strata_types::{ShardId, TransferCompletion, TransferDescriptor, TransferError, TransferId};

/// What happens to one transfer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Fault {
    /// Passed on untouched.
    None,
    /// Fails without moving a byte.
    Fail,
    /// Only this many pages are moved, then it fails.
    Short(usize),
    /// Held back until `release_held`.
    Hold,
    /// Its completion comes twice.
    Twice,
}

/// A Mover with a script of faults; past its end everything goes well.
pub struct FaultyMover<M> {
    inner: M,
    completions: CompletionSender,
    state: Mutex<State>,
}

struct State {
    script: VecDeque<Fault>,
    held: HashMap<TransferId, TransferDescriptor>,
}

impl<M: Mover> FaultyMover<M> {
    /// Applies `script` to the transfers in order of submission.
    pub fn new(inner: M, completions: CompletionSender, script: Vec<Fault>) -> Self {
        let state = Mutex::new(State { script: script.into(), held: HashMap::new() });
        FaultyMover { inner, completions, state }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Passes on every transfer that was held back; says how many.
    pub fn release_held(&self) -> Result<usize, SubmitError> {
        let held: Vec<_> = self.state().held.drain().map(|(_, transfer)| transfer).collect();
        let count = held.len();
        for transfer in held {
            self.inner.submit(transfer)?;
        }
        Ok(count)
    }

    fn report(&self, transfer: &TransferDescriptor, whole: usize, error: Option<TransferError>) {
        if let (Some(ticket), true) = (&transfer.ticket, error.is_some()) {
            ticket.fail();
        }
        let completion = TransferCompletion {
            id: transfer.id,
            shard: ShardId(0),
            pages_whole: whole,
            error,
            bytes: 0,
            busy_ns: 0,
        };
        // A test that dropped its receiver no longer wants to know.
        let _gone = self.completions.send(completion);
    }
}

impl<M: Mover> Mover for FaultyMover<M> {
    fn submit(&self, mut transfer: TransferDescriptor) -> Result<(), SubmitError> {
        let fault = self.state().script.pop_front().unwrap_or(Fault::None);
        let failure = || TransferError::Io {
            operation: format!("{} (scripted fault)", transfer.kind.name()),
            reason: "EIO".into(),
        };
        match fault {
            Fault::None => self.inner.submit(transfer),
            Fault::Fail => {
                let error = failure();
                self.report(&transfer, 0, Some(error));
                Ok(())
            }
            Fault::Short(pages) => {
                let error = failure();
                transfer.pages.truncate(pages);
                self.report(&transfer, transfer.pages.len(), Some(error));
                Ok(())
            }
            Fault::Hold => {
                self.state().held.insert(transfer.id, transfer);
                Ok(())
            }
            Fault::Twice => {
                let copy = transfer.clone();
                self.inner.submit(transfer)?;
                self.report(&copy, copy.pages.len(), None);
                Ok(())
            }
        }
    }

    fn cancel(&self, id: TransferId) {
        let held = self.state().held.remove(&id);
        match held {
            Some(transfer) => self.report(&transfer, 0, Some(TransferError::Cancelled)),
            None => self.inner.cancel(id),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{completion_queue, fakes::NoopMover};
    use strata_types::{GroupId, PageId, PageMove, TransferKind};

    fn transfer(id: u64) -> TransferDescriptor {
        let pages = (0..3).map(|page| PageMove { from: PageId(page), to: PageId(page) }).collect();
        TransferDescriptor {
            id: TransferId(id),
            kind: TransferKind::Backup,
            group: GroupId(0),
            pages,
            records: Vec::new(),
            ticket: None,
        }
    }

    #[test]
    fn the_script_is_followed_in_order() {
        let (sender, receiver) = completion_queue(16);
        let script = vec![Fault::Fail, Fault::Short(2), Fault::Hold, Fault::Hold, Fault::Twice];
        let mover = FaultyMover::new(NoopMover::new(sender.clone()), sender, script);
        for id in 0..6 {
            mover.submit(transfer(id)).unwrap();
        }
        mover.cancel(TransferId(2));
        assert_eq!(mover.release_held().unwrap(), 1);
        let seen: Vec<_> = receiver.try_iter().map(|c| (c.id.0, c.pages_whole, c.error.is_none())).collect();
        let wanted = [
            (0, 0, false),
            (1, 2, false),
            (4, 3, true),
            (4, 3, true),
            (5, 3, true),
            (2, 0, false),
            (3, 3, true),
        ];
        assert_eq!(seen, wanted);
    }
}
