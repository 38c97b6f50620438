//! Passes everything on and keeps a list of it.

use crate::{Mover, SubmitError};
use std::sync::{Mutex, PoisonError};
use strata_types::{TransferDescriptor, TransferId};

/// A Mover that remembers every transfer it passed on.
pub struct RecordingMover<M> {
    inner: M,
    log: Mutex<Vec<TransferDescriptor>>,
}

impl<M: Mover> RecordingMover<M> {
    /// Records what `inner` is given.
    pub fn new(inner: M) -> Self {
        RecordingMover { inner, log: Mutex::new(Vec::new()) }
    }

    /// The transfers so far, oldest first.
    pub fn log(&self) -> Vec<TransferDescriptor> {
        self.log.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

impl<M: Mover> Mover for RecordingMover<M> {
    fn submit(&self, transfer: TransferDescriptor) -> Result<(), SubmitError> {
        self.log.lock().unwrap_or_else(PoisonError::into_inner).push(transfer.clone());
        self.inner.submit(transfer)
    }

    fn cancel(&self, id: TransferId) {
        self.inner.cancel(id);
    }
}
