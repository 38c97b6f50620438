//! From a prompt to pages: what is hit, what is loaded, what has to be computed.

use crate::controller::{CacheController, ControlAction, Plan};
use crate::ControlError;
use std::collections::HashSet;
use std::ops::Range;
use std::sync::Arc;
use strata_radix::{MatchResult, Pin};
use strata_types::{
    LoadTicket, Namespace, PageId, PageMove, RequestId, TierId, Token, TransferId, TransferKind,
};

/// Where a hit page was found when its request was admitted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PageSource {
    /// On the device.
    Device,
    /// In host memory; loaded, or on its way already.
    Host,
}

/// An admitted request's hold on the device. Given back with `release`.
#[derive(Debug)]
pub struct Admitted {
    /// Keeps the hit path on the device.
    pub pin: Pin,
    /// The page table: hit pages, then pages to compute into.
    pub pages: Vec<PageId>,
    /// Where each hit page was, from the first.
    pub sources: Vec<PageSource>,
    /// Loads whose layers must be ready before they are read.
    pub tickets: Vec<Arc<LoadTicket>>,
    /// Those loads.
    pub loads: Vec<TransferId>,
}

/// A prefetch under way for a waiting request.
#[derive(Debug)]
pub struct Prefetch {
    /// The transfers to wait for.
    pub waits: HashSet<TransferId>,
    /// The pages that were on disk alone, and any between them.
    pub pages: Range<u32>,
    /// Keeps the path in host memory until the request is admitted.
    pub host_pin: Pin,
}

/// A run of hit pages that no load brings yet.
struct ToLoad {
    first_page: u32,
    host: Vec<PageId>,
}

impl CacheController {
    /// What the tree holds of the whole pages of a prompt, without touching anything.
    pub fn lookup(&self, namespace: &Namespace, tokens: &[Token]) -> Result<MatchResult, ControlError> {
        let pages = self.whole_pages(tokens.len());
        Ok(self.tree.match_prefix(namespace, self.config.group, self.head(tokens, pages))?)
    }

    /// A request that will compute these tokens: whole pages that no tier holds and nobody else owns are known by
    /// its name from now on, so that others can see what is coming.
    pub fn claim(
        &mut self,
        request: RequestId,
        namespace: &Namespace,
        tokens: &[Token],
    ) -> Result<(), ControlError> {
        self.tree.claim(namespace, tokens, request)?;
        Ok(())
    }

    /// The request has begun to compute what it claimed.
    pub fn begin_claimed(&mut self, request: RequestId) {
        self.tree.start(request);
    }

    /// The request will not publish the rest of what it claimed.
    pub fn give_up_claim(&mut self, request: RequestId) -> Result<(), ControlError> {
        self.tree.release(request, None)?;
        Ok(())
    }

    /// Pins what is cached of the first `usable` pages, starts the loads and reserves the rest up to `total`
    /// pages, leaving `headroom` pages for those who run already to grow into: without it a request that gave its
    /// pages up for an older one would take them back at once. None if the device has no room: nothing has changed.
    #[allow(clippy::too_many_arguments)]
    pub fn admit(
        &mut self,
        request: RequestId,
        namespace: &Namespace,
        tokens: &[Token],
        usable: u32,
        total: u32,
        allow_loads: bool,
        headroom: u32,
    ) -> Result<Option<Admitted>, ControlError> {
        let found = self.lookup(namespace, self.head(tokens, usable))?;
        let (mut pages, sources, runs, mut loads) = self.cut(&found, allow_loads);
        let hit = pages.len() as u32;
        let pin = self.pin(namespace, tokens, hit, TierId::DEVICE)?;
        let to_load: u32 = runs.iter().map(|run| run.host.len() as u32).sum();
        let mut fresh = Vec::new();
        let wanted = to_load + total - hit;
        // What is hit counts as evictable until it is pinned, so only now can the room be measured.
        if self.available(TierId::DEVICE) < wanted + headroom
            || !self.reserve(TierId::DEVICE, wanted, &mut fresh)?
        {
            self.unpin(pin)?;
            return Ok(None);
        }
        let rest = fresh.split_off(to_load as usize);
        let mut slots = fresh.into_iter();
        for run in runs {
            let moves: Vec<PageMove> =
                run.host.iter().zip(slots.by_ref()).map(|(from, to)| PageMove { from: *from, to }).collect();
            for (index, step) in moves.iter().enumerate() {
                pages[run.first_page as usize + index] = step.to;
            }
            let end = run.first_page + moves.len() as u32;
            let plan = Plan {
                kind: TransferKind::Load,
                namespace: *namespace,
                tokens: Arc::from(self.head(tokens, end)),
                first_page: run.first_page,
                moves,
                users: HashSet::new(),
            };
            loads.push(self.start(plan)?.0);
        }
        let tickets = self.join(request, &loads);
        self.holds += 1;
        pages.extend(rest);
        self.tree.touch(pin.handle())?;
        self.copy_down(TierId::DEVICE, namespace, self.head(tokens, hit))?;
        self.copy_down(TierId::HOST, namespace, self.head(tokens, hit))?;
        Ok(Some(Admitted { pin, pages, sources, tickets, loads }))
    }

    /// The usable prefix of a match: a page table with holes for the pages to load, and those pages in runs.
    fn cut(
        &self,
        found: &MatchResult,
        allow_loads: bool,
    ) -> (Vec<PageId>, Vec<PageSource>, Vec<ToLoad>, Vec<TransferId>) {
        let (mut pages, mut sources) = (Vec::new(), Vec::new());
        let (mut runs, mut shared): (Vec<ToLoad>, Vec<TransferId>) = (Vec::new(), Vec::new());
        for page in 0..found.pages {
            if let Some(slot) = found.slot(TierId::DEVICE, page) {
                pages.push(slot);
                sources.push(PageSource::Device);
                continue;
            }
            let Some(host) = found.slot(TierId::HOST, page).filter(|_| allow_loads) else { break };
            sources.push(PageSource::Host);
            if let Some(moving) = self.transfers.moving(TransferKind::Load, host) {
                pages.push(moving.to);
                if !shared.contains(&moving.transfer) {
                    shared.push(moving.transfer);
                }
                continue;
            }
            pages.push(PageId(u32::MAX));
            match runs.last_mut() {
                Some(run) if run.first_page + run.host.len() as u32 == page => run.host.push(host),
                _ => runs.push(ToLoad { first_page: page, host: vec![host] }),
            }
        }
        (pages, sources, runs, shared)
    }

    fn join(&mut self, request: RequestId, loads: &[TransferId]) -> Vec<Arc<LoadTicket>> {
        let mut tickets = Vec::new();
        for id in loads {
            if let Some(transfer) = self.transfers.get_mut(*id) {
                transfer.users.insert(request);
                tickets.extend(transfer.ticket.clone());
            }
        }
        tickets
    }

    /// Gives back a request's hold: its pin, the pages that never entered the tree, and its part in the loads.
    /// A load that nobody waits for any more is cancelled.
    pub fn release(
        &mut self,
        request: RequestId,
        pin: Pin,
        private: &[PageId],
        loads: &[TransferId],
    ) -> Result<(), ControlError> {
        self.unpin(pin)?;
        self.free_device(private)?;
        for id in loads {
            self.leave(request, *id)?;
        }
        self.holds -= 1;
        self.settle_in_use()
    }

    /// Makes computed pages match: pages `from..` of the sequence lie in `slots`. The pin grows to the longer path.
    /// Returns the slots that stay the request's own because the tree has others.
    pub fn publish(
        &mut self,
        pin: &mut Pin,
        namespace: &Namespace,
        tokens: &[Token],
        from: u32,
        slots: &[PageId],
    ) -> Result<Vec<PageId>, ControlError> {
        let (path, refused) = self.insert(namespace, tokens, TierId::DEVICE, slots, from)?;
        if let Some(path) = path {
            let longer = self.tree.pin(path, TierId::DEVICE)?;
            self.tree.unpin(std::mem::replace(pin, longer))?;
            self.copy_down(TierId::DEVICE, namespace, tokens)?;
        }
        Ok(refused)
    }

    /// Starts to read from disk what the first `usable` pages need; none if nothing can be read.
    pub fn prefetch(
        &mut self,
        request: RequestId,
        namespace: &Namespace,
        tokens: &[Token],
        usable: u32,
    ) -> Result<Option<Prefetch>, ControlError> {
        if !self.config.has(TierId::DISK) {
            return Ok(None);
        }
        let found = self.lookup(namespace, self.head(tokens, usable))?;
        let only_disk = |page: &u32| {
            found.slot(TierId::DEVICE, *page).is_none() && found.slot(TierId::HOST, *page).is_none()
        };
        let wanted: Vec<(u32, PageId)> = (0..found.pages)
            .filter(only_disk)
            .filter_map(|page| found.slot(TierId::DISK, page).map(|slot| (page, slot)))
            .collect();
        let (Some((first, _)), Some((last, _))) = (wanted.first(), wanted.last()) else { return Ok(None) };
        let range = *first..*last + 1;
        let pin = self.pin(namespace, tokens, found.pages, TierId::HOST)?;
        let mut waits = HashSet::new();
        let mut fresh: Vec<(u32, PageId)> = Vec::new();
        for (page, slot) in wanted {
            match self.transfers.moving(TransferKind::Prefetch, slot) {
                Some(moving) => drop(waits.insert(moving.transfer)),
                None => fresh.push((page, slot)),
            }
        }
        self.move_runs(TransferKind::Prefetch, namespace, tokens, &fresh, &mut waits)?;
        for id in &waits {
            if let Some(transfer) = self.transfers.get_mut(*id) {
                transfer.users.insert(request);
            }
        }
        if waits.is_empty() {
            self.unpin(pin)?;
            return Ok(None);
        }
        Ok(Some(Prefetch { waits, pages: range, host_pin: pin }))
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
        let mut rest = pages;
        while let Some((first_page, _)) = rest.first() {
            let adjacent =
                rest.iter().zip(*first_page..).take_while(|((page, _), index)| page == index).count();
            let room = self.available(kind.destination()) as usize;
            let count = adjacent.min(self.config.transfer_pages as usize).min(room);
            let mut slots = Vec::new();
            if count == 0 || !self.reserve(kind.destination(), count as u32, &mut slots)? {
                self.stats.edge_mut(kind).skipped_pages += rest.len() as u64;
                return Ok(rest.len());
            }
            let (run, later) = rest.split_at(count);
            // Reserving evicts; a source that was the victim's own copy is gone and no longer to be moved.
            let held = self.lookup(namespace, self.head(tokens, first_page + count as u32))?;
            if run.iter().any(|(page, slot)| held.slot(kind.source(), *page) != Some(*slot)) {
                for slot in slots {
                    self.pools[kind.destination().index()].abort(slot)?;
                }
                return Ok(rest.len());
            }
            let moves = run.iter().zip(slots).map(|((_, from), to)| PageMove { from: *from, to }).collect();
            let plan = Plan {
                kind,
                namespace: *namespace,
                tokens: Arc::from(self.head(tokens, first_page + count as u32)),
                first_page: *first_page,
                moves,
                users: HashSet::new(),
            };
            started.insert(self.start(plan)?.0);
            rest = later;
        }
        Ok(0)
    }

    /// Takes a request off a transfer; the last one to leave a load or a prefetch cancels it.
    pub fn leave(&mut self, request: RequestId, id: TransferId) -> Result<(), ControlError> {
        let Some(transfer) = self.transfers.get_mut(id) else { return Ok(()) };
        transfer.users.remove(&request);
        let brings_up = matches!(transfer.kind, TransferKind::Load | TransferKind::Prefetch);
        if transfer.users.is_empty() && brings_up && !transfer.cancelled {
            self.cancel(id)?;
        }
        Ok(())
    }

    /// Asks the Mover to end a transfer early and puts a load's destination in quarantine until it has.
    pub(crate) fn cancel(&mut self, id: TransferId) -> Result<(), ControlError> {
        let Some(transfer) = self.transfers.get_mut(id) else { return Ok(()) };
        transfer.cancelled = true;
        let kind = transfer.kind;
        if kind != TransferKind::Prefetch {
            for step in &transfer.moves {
                self.pools[kind.destination().index()].quarantine(step.to)?;
            }
        }
        self.transfers.forget_sources(id);
        self.outbox.push(ControlAction::Cancel(kind, id));
        Ok(())
    }
}
