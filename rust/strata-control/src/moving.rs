//! Runs of pages on their way: cut into transfers, reserved at their destination, sent. Without a host tier a page
//! passes through a small staging area in two legs: its far end is reserved first and staging last, so that every
//! page that has a place in staging can leave it, and any number of transfers pass through a single page. Staged
//! pages are never in the tree.

use crate::controller::{CacheController, Plan};
use crate::settle::Effect;
use crate::transfer::{Leg, Transfer};
use crate::ControlError;
use std::collections::{HashMap, HashSet, VecDeque};
use std::sync::Arc;
use strata_types::{Namespace, PageId, PageMove, RequestId, TierId, Token, TransferId, TransferKind};

/// Relays that may wait for a place in staging; more backups are skipped.
const MOST_RELAYS: usize = 4096;

/// Pages that wait for a place in staging, from their source to their far end.
pub(crate) struct Relay {
    id: TransferId,
    kind: TransferKind,
    namespace: Namespace,
    tokens: Arc<[Token]>,
    first_page: u32,
    moves: Vec<PageMove>,
    users: HashSet<RequestId>,
}

/// Relays in order of their turn, and what all relays on their way move, their second legs included.
#[derive(Default)]
pub(crate) struct Relays {
    queue: VecDeque<Relay>,
    sources: HashMap<TransferId, (TransferKind, Vec<PageId>)>,
    by_source: HashMap<(TransferKind, PageId), TransferId>,
}

impl Relays {
    fn enter(&mut self, relay: Relay) {
        let sources: Vec<PageId> = relay.moves.iter().map(|step| step.from).collect();
        self.by_source.extend(sources.iter().map(|source| ((relay.kind, *source), relay.id)));
        self.sources.insert(relay.id, (relay.kind, sources));
        self.queue.push_back(relay);
    }

    /// A relay is over: its pages may be moved by another.
    fn end(&mut self, id: TransferId) {
        let Some((kind, sources)) = self.sources.remove(&id) else { return };
        for source in sources {
            if self.by_source.get(&(kind, source)) == Some(&id) {
                self.by_source.remove(&(kind, source));
            }
        }
    }

    /// The relay that moves a page.
    pub fn moving(&self, kind: TransferKind, from: PageId) -> Option<TransferId> {
        self.by_source.get(&(kind, from)).copied()
    }

    /// Pages of the relays of this kind, those that wait included.
    fn pages(&self, kind: TransferKind) -> usize {
        self.sources.values().filter(|(other, _)| *other == kind).map(|(_, pages)| pages.len()).sum()
    }

    /// Whether any relay of this kind waits or moves.
    fn any(&self, kind: TransferKind) -> bool {
        self.sources.values().any(|(other, _)| *other == kind)
    }

    /// Whether nothing waits or moves.
    pub fn is_empty(&self) -> bool {
        self.sources.is_empty()
    }
}

/// Where a relay ends. The tiers may have changed since it began.
fn relay_end(kind: TransferKind) -> TierId {
    if kind == TransferKind::Backup {
        TierId::DISK
    } else {
        TierId::DEVICE
    }
}

impl CacheController {
    /// Whether pages pass between device and disk through staging.
    pub fn is_staged(&self) -> bool {
        self.config.pages[TierId::HOST.index()] == 0
            && self.config.staging_pages > 0
            && self.has(TierId::DISK)
    }

    fn is_relayed(&self, kind: TransferKind) -> bool {
        self.is_staged() && matches!(kind, TransferKind::Backup | TransferKind::Prefetch)
    }

    /// Where pages end up that a transfer of this kind begins to move.
    pub(crate) fn far_end(&self, kind: TransferKind) -> TierId {
        if self.is_relayed(kind) {
            relay_end(kind)
        } else {
            kind.destination()
        }
    }

    /// Starts transfers for `pages` (ascending, with their source slots), in runs of adjacent pages of at most
    /// `transfer_pages`; ends early when the destination has no room. Returns the number of pages left out.
    pub(crate) fn move_runs(
        &mut self,
        kind: TransferKind,
        namespace: &Namespace,
        tokens: &[Token],
        pages: &[(u32, PageId)],
        started: &mut HashSet<TransferId>,
    ) -> Result<usize, ControlError> {
        let destination = self.far_end(kind);
        let relayed = self.is_relayed(kind);
        let most = match relayed {
            true => self.config.transfer_pages.min(self.config.staging_pages),
            false => self.config.transfer_pages,
        } as usize;
        let mut rest = pages;
        while let Some((first_page, _)) = rest.first() {
            let adjacent =
                rest.iter().zip(*first_page..).take_while(|((page, _), index)| page == index).count();
            let room = self.available(destination) as usize;
            let count = adjacent.min(most).min(room);
            let mut slots = Vec::new();
            let full = count == 0 || (relayed && self.relays.queue.len() >= MOST_RELAYS);
            if full || !self.reserve(destination, count as u32, &mut slots)? {
                self.stats.edge_mut(kind).skipped_pages += rest.len() as u64;
                return Ok(rest.len());
            }
            let (run, later) = rest.split_at(count);
            let tokens: Arc<[Token]> = Arc::from(self.head(tokens, first_page + count as u32));
            // Reserving evicts; a source that was the victim's own copy is gone and no longer to be moved.
            if !self.holds_run(kind.source(), namespace, &tokens, run)? || !self.may_write(destination, count)
            {
                for slot in slots {
                    self.pools[destination.index()].abort(slot)?;
                }
                return Ok(rest.len());
            }
            let moves = run.iter().zip(slots).map(|((_, from), to)| PageMove { from: *from, to }).collect();
            let plan = Plan::new(kind, *namespace, tokens, *first_page, moves);
            self.begins_to_save(kind.source());
            started.insert(if relayed { self.relay(plan)? } else { self.start(plan)?.0 });
            rest = later;
        }
        Ok(0)
    }

    fn holds_run(
        &self,
        tier: TierId,
        namespace: &Namespace,
        tokens: &[Token],
        run: &[(u32, PageId)],
    ) -> Result<bool, ControlError> {
        let held = self.lookup(namespace, tokens)?;
        Ok(run.iter().all(|(page, slot)| held.slot(tier, *page) == Some(*slot)))
    }

    /// Takes the bytes of these pages from the disk's daily budget.
    fn may_write(&mut self, destination: TierId, pages: usize) -> bool {
        let bytes = pages as u64 * self.config.record_bytes;
        let may = destination != TierId::DISK || self.budget.take(self.now, bytes);
        if !may {
            self.stats.over_budget_pages += pages as u64;
        }
        may
    }

    /// Queues pages for staging. The moves lead to their far end, which is reserved.
    fn relay(&mut self, plan: Plan) -> Result<TransferId, ControlError> {
        let id = self.transfers.next_id();
        let Plan { kind, namespace, tokens, first_page, moves, users, .. } = plan;
        self.relays.enter(Relay { id, kind, namespace, tokens, first_page, moves, users });
        self.pump_relays()?;
        Ok(id)
    }

    /// Starts first legs in order, as far as staging has places.
    pub fn pump_relays(&mut self) -> Result<(), ControlError> {
        while let Some(relay) = self.relays.queue.pop_front() {
            let mut staged = Vec::new();
            if !self.pools[TierId::HOST.index()].reserve(relay.moves.len() as u32, &mut staged) {
                self.relays.queue.push_front(relay);
                return Ok(());
            }
            let run: Vec<(u32, PageId)> =
                (relay.first_page..).zip(relay.moves.iter().map(|step| step.from)).collect();
            if !self.holds_run(relay.kind.source(), &relay.namespace, &relay.tokens, &run)? {
                for slot in staged {
                    self.pools[TierId::HOST.index()].abort(slot)?;
                }
                self.drop_relay(relay)?;
                continue;
            }
            let (sources, far): (Vec<_>, Vec<_>) =
                relay.moves.iter().map(|step| (step.from, step.to)).unzip();
            let moves = sources.into_iter().zip(staged).map(|(from, to)| PageMove { from, to }).collect();
            let plan = Plan {
                leg: Leg::First(far),
                origin: Some(relay.id),
                users: relay.users,
                ..Plan::new(relay.kind, relay.namespace, relay.tokens, relay.first_page, moves)
            };
            self.start(plan)?;
        }
        Ok(())
    }

    /// A relay that does not start: its far end is given back, and who waits for it is told.
    fn drop_relay(&mut self, relay: Relay) -> Result<(), ControlError> {
        let far = relay_end(relay.kind);
        for step in &relay.moves {
            self.pools[far.index()].abort(step.to)?;
        }
        self.relay_over(relay.kind, relay.id, relay.users);
        Ok(())
    }

    /// A relay is over, for better or worse.
    pub(crate) fn relay_over(&mut self, kind: TransferKind, transfer: TransferId, users: HashSet<RequestId>) {
        self.relays.end(transfer);
        if matches!(kind, TransferKind::Prefetch | TransferKind::Load) {
            self.effects.push_back(Effect::Prefetched { transfer, users });
        }
    }

    /// Adds a request to those who wait for a transfer or for a relay.
    pub(crate) fn use_transfer(&mut self, request: RequestId, id: TransferId) {
        if let Some(transfer) = self.transfers.get_mut(self.transfers.current(id)) {
            transfer.users.insert(request);
        } else if let Some(relay) = self.relays.queue.iter_mut().find(|relay| relay.id == id) {
            relay.users.insert(request);
        }
    }

    /// Whether a transfer that requests know by this number is under way or will be.
    pub(crate) fn is_under_way(&self, id: TransferId) -> bool {
        self.transfers.get(self.transfers.current(id)).is_some() || self.relays.sources.contains_key(&id)
    }

    /// Pages that a transfer, known to requests by this number, still moves.
    pub fn pages_of(&self, id: TransferId) -> usize {
        match self.transfers.get(self.transfers.current(id)) {
            Some(transfer) => transfer.moves.len(),
            None => self.relays.sources.get(&id).map_or(0, |(_, sources)| sources.len()),
        }
    }

    /// What kind of transfer this is, if it is under way.
    pub fn kind_of(&self, id: TransferId) -> Option<TransferKind> {
        self.transfers.get(id).map(|transfer| transfer.kind)
    }

    /// Pages that prefetches nobody waits for any more keep until the disk lets go of them.
    pub fn abandoned_pages(&self) -> usize {
        self.transfers.cancelled_pages(TransferKind::Prefetch)
    }

    /// Pages of a tier on their way down by transfers of this kind.
    pub(crate) fn pages_under_way(&self, tier: TierId, kind: TransferKind) -> usize {
        match tier == TierId::DEVICE && self.is_staged() {
            true => self.relays.pages(kind),
            false => self.transfers.pages(kind),
        }
    }

    /// Whether pages of a tier are on their way down.
    pub fn copies_under_way(&self, tier: TierId) -> bool {
        let relayed = tier == TierId::DEVICE && self.relays.any(TransferKind::Backup);
        relayed || self.downward(tier).is_some_and(|(_, kind)| self.transfers.count(kind) > 0)
    }

    /// Takes a request off a relay that has not started; the last one ends it.
    pub(crate) fn leave_relay(&mut self, request: RequestId, id: TransferId) -> Result<(), ControlError> {
        let Some(index) = self.relays.queue.iter().position(|relay| relay.id == id) else { return Ok(()) };
        self.relays.queue[index].users.remove(&request);
        if self.relays.queue[index].users.is_empty()
            && self.relays.queue[index].kind == TransferKind::Prefetch
        {
            if let Some(relay) = self.relays.queue.remove(index) {
                self.drop_relay(relay)?;
            }
        }
        Ok(())
    }

    /// Gives up every relay that has not started.
    pub(crate) fn drop_relays(&mut self) -> Result<(), ControlError> {
        while let Some(relay) = self.relays.queue.pop_front() {
            self.drop_relay(relay)?;
        }
        Ok(())
    }

    /// The first leg is over: what arrived whole goes on, the rest of staging and of the far end is free again.
    pub(crate) fn go_on(&mut self, mut transfer: Transfer, far: Vec<PageId>) -> Result<(), ControlError> {
        let tier = relay_end(transfer.kind);
        // A disk that is to go takes nothing more.
        let stops = transfer.cancelled || (self.disk_leaves && transfer.kind == TransferKind::Backup);
        let whole = if stops { 0 } else { transfer.pages_whole.min(far.len()) };
        for (step, slot) in transfer.moves.drain(whole..).zip(&far[whole..]) {
            let staging = &mut self.pools[TierId::HOST.index()];
            match transfer.cancelled && transfer.kind != TransferKind::Prefetch {
                true => staging.settle(step.to)?,
                false => staging.abort(step.to)?,
            }
            self.pools[tier.index()].abort(*slot)?;
        }
        if whole == 0 {
            self.relay_over(transfer.kind, transfer.origin, transfer.users);
            return Ok(());
        }
        let kind =
            if transfer.kind == TransferKind::Backup { TransferKind::Spill } else { TransferKind::Load };
        let moves = transfer.moves.iter().zip(far).map(|(step, to)| PageMove { from: step.to, to }).collect();
        let tokens = Arc::from(self.head(&transfer.tokens, transfer.first_page + whole as u32));
        let plan = Plan {
            leg: Leg::Second,
            origin: Some(transfer.origin),
            users: transfer.users,
            ..Plan::new(kind, transfer.namespace, tokens, transfer.first_page, moves)
        };
        self.start(plan)?;
        Ok(())
    }
}
