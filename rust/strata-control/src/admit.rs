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
    /// Keeps the path where it lands (in host memory; without a host tier on the device) until the request is admitted.
    pub pin: Pin,
}

/// A run of hit pages that no load brings yet.
pub(crate) struct ToLoad {
    pub first_page: u32,
    pub host: Vec<PageId>,
}

impl CacheController {
    /// What the tree holds of the whole pages of a prompt, without touching anything.
    pub fn lookup(&self, namespace: &Namespace, tokens: &[Token]) -> Result<MatchResult, ControlError> {
        let pages = self.whole_pages(tokens.len());
        Ok(self.tree.match_prefix(namespace, self.config.group, self.head(tokens, pages))?)
    }

    /// How many of the first `usable` pages come from the device or the host, up to the first that does not.
    pub fn above_disk(
        &self,
        namespace: &Namespace,
        tokens: &[Token],
        usable: u32,
    ) -> Result<u32, ControlError> {
        let found = self.lookup(namespace, self.head(tokens, usable))?;
        let above =
            |page: &u32| found.slot(TierId::DEVICE, *page).or(found.slot(TierId::HOST, *page)).is_some();
        Ok((0..found.pages).take_while(above).count() as u32)
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
        // Room on the device may be made by backups, which make room on the host: not of what is to be loaded.
        let sources_pin = self.pin(namespace, tokens, hit, TierId::HOST)?;
        let to_load: u32 = runs.iter().map(|run| run.host.len() as u32).sum();
        let mut fresh = Vec::new();
        let wanted = to_load + total - hit;
        // What is hit counts as evictable until it is pinned, so only now can the room be measured.
        if self.available(TierId::DEVICE) < wanted + headroom
            || !self.reserve(TierId::DEVICE, wanted, &mut fresh)?
        {
            self.unpin(sources_pin)?;
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
            let path = Arc::from(self.head(tokens, end));
            loads.push(self.start(Plan::new(TransferKind::Load, *namespace, path, run.first_page, moves))?.0);
        }
        self.unpin(sources_pin)?;
        let tickets = self.join(request, &loads);
        self.holds.insert(request, self.next_hold);
        self.next_hold += 1;
        pages.extend(rest);
        if hit > 0 {
            self.stats.hit_ages.count(self.tree.idle_time(pin.handle())?);
        }
        self.tree.touch(pin.handle())?;
        self.copy_down(TierId::DEVICE, namespace, self.head(tokens, hit))?;
        self.copy_down(TierId::HOST, namespace, self.head(tokens, hit))?;
        Ok(Some(Admitted { pin, pages, sources, tickets, loads }))
    }

    /// Pages of the device that `admit` would need for loads of the first `usable` pages.
    pub fn pages_to_load(
        &self,
        namespace: &Namespace,
        tokens: &[Token],
        usable: u32,
    ) -> Result<u32, ControlError> {
        let found = self.lookup(namespace, self.head(tokens, usable))?;
        Ok(self.cut(&found, true).2.iter().map(|run| run.host.len() as u32).sum())
    }

    /// Loads that are not over fail. What a Mover has of them goes on, and nobody reads it.
    pub fn fail_loads(&self) {
        for ticket in self.transfers.tickets() {
            ticket.fail();
        }
    }

    /// The usable prefix of a match: a page table with holes for the pages to load, and those pages in runs.
    pub(crate) fn cut(
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
        self.holds.remove(&request);
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

    /// The pages among the first `usable` that only the disk holds, and any between them.
    pub fn on_disk(
        &self,
        namespace: &Namespace,
        tokens: &[Token],
        usable: u32,
    ) -> Result<Option<Range<u32>>, ControlError> {
        let (_, wanted) = self.find_on_disk(namespace, tokens, usable)?;
        Ok(wanted.first().zip(wanted.last()).map(|((first, _), (last, _))| *first..*last + 1))
    }

    fn find_on_disk(
        &self,
        namespace: &Namespace,
        tokens: &[Token],
        usable: u32,
    ) -> Result<(MatchResult, Vec<(u32, PageId)>), ControlError> {
        let found = self.lookup(namespace, self.head(tokens, usable))?;
        let above = |page: u32| found.slot(TierId::DEVICE, page).or(found.slot(TierId::HOST, page)).is_some();
        let on_disk = (0..found.pages).filter(|page| self.has(TierId::DISK) && !above(*page));
        let wanted =
            on_disk.filter_map(|page| found.slot(TierId::DISK, page).map(|slot| (page, slot))).collect();
        Ok((found, wanted))
    }

    /// Starts to read from disk what the first `usable` pages need; none if nothing can be read.
    pub fn prefetch(
        &mut self,
        request: RequestId,
        namespace: &Namespace,
        tokens: &[Token],
        usable: u32,
    ) -> Result<Option<Prefetch>, ControlError> {
        let (found, wanted) = self.find_on_disk(namespace, tokens, usable)?;
        let (Some((first, _)), Some((last, _))) = (wanted.first(), wanted.last()) else { return Ok(None) };
        let range = *first..*last + 1;
        let lands = self.far_end(TransferKind::Prefetch);
        let pin = self.pin(namespace, tokens, found.pages, lands)?;
        let mut waits = HashSet::new();
        let mut fresh: Vec<(u32, PageId)> = Vec::new();
        for (page, slot) in wanted {
            let direct = self.transfers.moving(TransferKind::Prefetch, slot).map(|moving| moving.transfer);
            match direct.or_else(|| self.relays.moving(TransferKind::Prefetch, slot)) {
                Some(transfer) => drop(waits.insert(transfer)),
                None => fresh.push((page, slot)),
            }
        }
        self.move_runs(TransferKind::Prefetch, namespace, tokens, &fresh, &mut waits)?;
        // One that could not start is over already.
        waits.retain(|id| self.is_under_way(*id));
        for id in &waits {
            self.use_transfer(request, *id);
        }
        if waits.is_empty() {
            self.unpin(pin)?;
            return Ok(None);
        }
        Ok(Some(Prefetch { waits, pages: range, pin }))
    }

    /// Takes a request off a transfer; the last one to leave a load or a prefetch cancels it. A load that has ended is
    /// left to its completion: whoever computed behind it may be done before that is here.
    pub fn leave(&mut self, request: RequestId, id: TransferId) -> Result<(), ControlError> {
        let id = self.transfers.current(id);
        let Some(transfer) = self.transfers.get_mut(id) else { return self.leave_relay(request, id) };
        transfer.users.remove(&request);
        let brings_up = matches!(transfer.kind, TransferKind::Load | TransferKind::Prefetch);
        if transfer.users.is_empty() && brings_up && !transfer.cancelled && !transfer.is_loaded() {
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
