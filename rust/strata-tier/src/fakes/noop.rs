//! Completes every transfer at once and moves no byte: for tests of decisions and for the simulator's ends.

use crate::{CompletionSender, Mover, SubmitError};
use strata_types::{ShardId, TransferCompletion, TransferDescriptor, TransferId};

/// A Mover without memory.
pub struct NoopMover {
    completions: CompletionSender,
}

impl NoopMover {
    /// A Mover that reports into the given queue.
    pub fn new(completions: CompletionSender) -> Self {
        NoopMover { completions }
    }
}

impl Mover for NoopMover {
    fn submit(&self, transfer: TransferDescriptor) -> Result<(), SubmitError> {
        if self.completions.is_full() {
            return Err(SubmitError::Full(Box::new(transfer)));
        }
        if let Some(ticket) = &transfer.ticket {
            ticket.advance(ticket.layers());
        }
        let completion = TransferCompletion {
            id: transfer.id,
            shard: ShardId(0),
            pages_whole: transfer.pages.len(),
            error: None,
            bytes: 0,
            busy_ns: 0,
        };
        self.completions.send(completion).map_err(|_| SubmitError::Closed(Box::new(transfer)))
    }

    fn cancel(&self, _id: TransferId) {}
}
