//! The transfers in flight, by number and by the page that they read, so that no page is moved twice at a time.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use strata_radix::Pin;
use strata_types::{
    LoadTicket, Namespace, PageId, PageMove, RequestId, TicketState, TierId, Token, TransferError,
    TransferId, TransferKind,
};

/// Which part of a page's way a transfer is.
#[derive(Debug)]
pub(crate) enum Leg {
    /// All of it.
    Whole,
    /// Into the staging area, with the pages reserved at the far end.
    First(Vec<PageId>),
    /// Out of the staging area.
    Second,
}

/// One transfer from reservation to completion.
#[derive(Debug)]
pub(crate) struct Transfer {
    pub kind: TransferKind,
    pub leg: Leg,
    /// The number by which requests know it: a second leg keeps that of the first.
    pub origin: TransferId,
    pub namespace: Namespace,
    /// The path from the start of the sequence to the end of the last page moved.
    pub tokens: Arc<[Token]>,
    pub first_page: u32,
    pub moves: Vec<PageMove>,
    /// Keeps the source pages where they are. What leaves the tree or the staging area has none.
    pub source: Option<Pin>,
    /// Requests that wait for it or read its pages.
    pub users: HashSet<RequestId>,
    pub ticket: Option<Arc<LoadTicket>>,
    pub shards_left: u16,
    pub pages_whole: usize,
    pub error: Option<TransferError>,
    pub cancelled: bool,
}

impl Transfer {
    /// Whether a load has brought every layer, whether or not its completion is here.
    pub fn is_loaded(&self) -> bool {
        self.ticket.as_ref().is_some_and(|ticket| ticket.state() == TicketState::Ready(ticket.layers()))
    }
}

/// A page on its way: the transfer and where the page will be.
#[derive(Clone, Copy, Debug)]
pub(crate) struct InFlight {
    pub transfer: TransferId,
    pub to: PageId,
}

/// Of a page that is not on its way.
const NOWHERE: InFlight = InFlight { transfer: TransferId(0), to: PageId(u32::MAX) };

/// Where pages are going, by kind and by the page that is read: looked at for every page that moves, and pages that move
/// together lie together. Grows to the highest page that was ever moved.
#[derive(Debug, Default)]
struct Sources([Vec<InFlight>; TransferKind::COUNT]);

impl Sources {
    fn get(&self, kind: TransferKind, from: PageId) -> Option<InFlight> {
        let found = self.0[kind.index()].get(from.0 as usize).copied();
        found.filter(|moving| moving.transfer != NOWHERE.transfer)
    }

    fn set(&mut self, kind: TransferKind, from: PageId, moving: InFlight) {
        let pages = &mut self.0[kind.index()];
        let place = from.0 as usize;
        if place >= pages.len() {
            pages.resize(place + 1, NOWHERE);
        }
        pages[place] = moving;
    }

    fn clear(&mut self, kind: TransferKind, from: PageId) {
        if let Some(moving) = self.0[kind.index()].get_mut(from.0 as usize) {
            *moving = NOWHERE;
        }
    }
}

/// All transfers in flight.
#[derive(Debug, Default)]
pub(crate) struct TransferTable {
    next: u64,
    transfers: HashMap<TransferId, Transfer>,
    by_source: Sources,
    /// Second legs by the number of their first.
    legs: HashMap<TransferId, TransferId>,
    counts: HashMap<TransferKind, usize>,
}

impl TransferTable {
    /// A number that no transfer has.
    pub fn next_id(&mut self) -> TransferId {
        self.next += 1;
        TransferId(self.next)
    }

    /// The transfer that is under way now for what requests know as `origin`.
    pub fn current(&self, origin: TransferId) -> TransferId {
        self.legs.get(&origin).copied().unwrap_or(origin)
    }

    /// Takes a transfer in; `id` comes from `next_id`.
    pub fn insert(&mut self, id: TransferId, transfer: Transfer) {
        if transfer.origin != id {
            self.legs.insert(transfer.origin, id);
        }
        for step in &transfer.moves {
            self.by_source.set(transfer.kind, step.from, InFlight { transfer: id, to: step.to });
        }
        *self.counts.entry(transfer.kind).or_default() += 1;
        self.transfers.insert(id, transfer);
    }

    pub fn remove(&mut self, id: TransferId) -> Option<Transfer> {
        let transfer = self.transfers.remove(&id)?;
        if let Some(count) = self.counts.get_mut(&transfer.kind) {
            *count -= 1;
        }
        self.legs.remove(&transfer.origin);
        for step in &transfer.moves {
            // A cancelled transfer may have a successor that moves the same page.
            let moving = self.by_source.get(transfer.kind, step.from);
            if moving.is_some_and(|moving| moving.transfer == id) {
                self.by_source.clear(transfer.kind, step.from);
            }
        }
        Some(transfer)
    }

    /// Nobody joins this transfer any more: its pages may be moved again by another.
    pub fn forget_sources(&mut self, id: TransferId) {
        let Some(transfer) = self.transfers.get(&id) else { return };
        for step in &transfer.moves {
            self.by_source.clear(transfer.kind, step.from);
        }
    }

    pub fn get_mut(&mut self, id: TransferId) -> Option<&mut Transfer> {
        self.transfers.get_mut(&id)
    }

    pub fn get(&self, id: TransferId) -> Option<&Transfer> {
        self.transfers.get(&id)
    }

    pub fn moving(&self, kind: TransferKind, from: PageId) -> Option<InFlight> {
        self.by_source.get(kind, from)
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

    /// The transfers of some kinds.
    pub fn of_kinds(&self, kinds: &[TransferKind]) -> Vec<TransferId> {
        let found = self.transfers.iter().filter(|(_, transfer)| kinds.contains(&transfer.kind));
        let mut found: Vec<TransferId> = found.map(|(id, _)| *id).collect();
        found.sort_unstable();
        found
    }

    /// What transfers pin.
    pub fn sources(&self) -> impl Iterator<Item = &Pin> {
        self.transfers.values().filter_map(|transfer| transfer.source.as_ref())
    }

    /// The tickets of loads.
    pub fn tickets(&self) -> impl Iterator<Item = &Arc<LoadTicket>> {
        self.transfers.values().filter_map(|transfer| transfer.ticket.as_ref())
    }

    pub fn count(&self, kind: TransferKind) -> usize {
        self.counts.get(&kind).copied().unwrap_or(0)
    }

    /// Pages that transfers of a kind move.
    pub fn pages(&self, kind: TransferKind) -> usize {
        let moving = self.transfers.values().filter(|transfer| transfer.kind == kind);
        moving.map(|transfer| transfer.moves.len()).sum()
    }

    /// Pages that cancelled transfers of a kind keep until their Mover lets go.
    pub fn cancelled_pages(&self, kind: TransferKind) -> usize {
        let cancelled =
            self.transfers.values().filter(|transfer| transfer.cancelled && transfer.kind == kind);
        cancelled.map(|transfer| transfer.moves.len()).sum()
    }
}
