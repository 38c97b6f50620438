//! A `Mover` executes transfers across one edge of the hierarchy. What it guarantees:
//! - `submit` never blocks; a full queue hands the descriptor back.
//! - each accepted transfer ends in exactly one completion per shard, also when it fails or is cancelled, and
//!   only after the Mover has let go of every byte of source and destination;
//! - `pages_whole` pages, counted from the first, are whole at the destination when the completion arrives.

use crossbeam_channel::{bounded, Receiver, Sender};
use strata_types::{TransferCompletion, TransferDescriptor, TransferId};
use thiserror::Error;

/// Where Movers report. Bounded: a Mover waits when Core is behind, Core never waits for a Mover.
pub type CompletionSender = Sender<TransferCompletion>;
/// Where Core's driver reads what Movers report.
pub type CompletionReceiver = Receiver<TransferCompletion>;

/// The queue of completions of one or several Movers.
pub fn completion_queue(capacity: usize) -> (CompletionSender, CompletionReceiver) {
    bounded(capacity)
}

/// Why a Mover did not take a transfer. The descriptor comes back unchanged.
#[derive(Debug, Error)]
pub enum SubmitError {
    /// Too many transfers are waiting; try again after a completion.
    #[error("the mover's queue is full")]
    Full(Box<TransferDescriptor>),
    /// The Mover is shut down or out of service; the transfer has to be aborted.
    #[error("the mover is closed")]
    Closed(Box<TransferDescriptor>),
}

/// Executes plain transfer descriptors.
pub trait Mover: Send + Sync {
    /// Queues a transfer.
    fn submit(&self, transfer: TransferDescriptor) -> Result<(), SubmitError>;

    /// Asks for a transfer to end early. Its completion still comes, and may still report success. Unknown and
    /// finished transfers are ignored.
    fn cancel(&self, id: TransferId);
}
