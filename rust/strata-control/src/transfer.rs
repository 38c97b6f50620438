//! The transfers in flight, by number and by the page that they read, so that no page is moved twice at a time.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use strata_radix::Pin;
use strata_types::{
    LoadTicket, Namespace, PageId, PageMove, RequestId, TierId, Token, TransferError, TransferId,
    TransferKind,
};

/// One transfer from reservation to completion.
#[derive(Debug)]
pub(crate) struct Transfer {
    pub kind: TransferKind,
    pub namespace: Namespace,
    /// The path from the start of the sequence to the end of the last page moved.
    pub tokens: Arc<[Token]>,
    pub first_page: u32,
    pub moves: Vec<PageMove>,
    /// Keeps the source pages where they are. `Erase` has none: its records have left the tree.
    pub source: Option<Pin>,
    /// Requests that wait for it or read its pages.
    pub users: HashSet<RequestId>,
    pub ticket: Option<Arc<LoadTicket>>,
    pub shards_left: u16,
    pub pages_whole: usize,
    pub error: Option<TransferError>,
    pub cancelled: bool,
}

/// A page on its way: the transfer and where the page will be.
#[derive(Clone, Copy, Debug)]
pub(crate) struct InFlight {
    pub transfer: TransferId,
    pub to: PageId,
}

/// All transfers in flight.
#[derive(Debug, Default)]
pub(crate) struct TransferTable {
    next: u64,
    transfers: HashMap<TransferId, Transfer>,
    by_source: HashMap<(TransferKind, PageId), InFlight>,
}

impl TransferTable {
    pub fn insert(&mut self, transfer: Transfer) -> TransferId {
        self.next += 1;
        let id = TransferId(self.next);
        for step in &transfer.moves {
            self.by_source.insert((transfer.kind, step.from), InFlight { transfer: id, to: step.to });
        }
        self.transfers.insert(id, transfer);
        id
    }

    pub fn remove(&mut self, id: TransferId) -> Option<Transfer> {
        let transfer = self.transfers.remove(&id)?;
        for step in &transfer.moves {
            let key = (transfer.kind, step.from);
            // A cancelled transfer may have a successor that moves the same page.
            if self.by_source.get(&key).is_some_and(|moving| moving.transfer == id) {
                self.by_source.remove(&key);
            }
        }
        Some(transfer)
    }

    /// Nobody joins this transfer any more: its pages may be moved again by another.
    pub fn forget_sources(&mut self, id: TransferId) {
        let Some(transfer) = self.transfers.get(&id) else { return };
        for step in &transfer.moves {
            self.by_source.remove(&(transfer.kind, step.from));
        }
    }

    pub fn get_mut(&mut self, id: TransferId) -> Option<&mut Transfer> {
        self.transfers.get_mut(&id)
    }

    pub fn get(&self, id: TransferId) -> Option<&Transfer> {
        self.transfers.get(&id)
    }

    pub fn moving(&self, kind: TransferKind, from: PageId) -> Option<InFlight> {
        self.by_source.get(&(kind, from)).copied()
    }

    /// Whether a transfer reads this page.
    pub fn reads(&self, tier: TierId, page: PageId) -> bool {
        self.transfers.values().any(|transfer| {
            transfer.kind.source() == tier && transfer.moves.iter().any(|step| step.from == page)
        })
    }

    pub fn len(&self) -> usize {
        self.transfers.len()
    }

    pub fn count(&self, kind: TransferKind) -> usize {
        self.transfers.values().filter(|transfer| transfer.kind == kind).count()
    }
}
