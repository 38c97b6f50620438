//! Leases: what an engine that schedules for itself holds of the cache, one for each sequence that it works on. They use
//! the pins, loads, reservations and write policies that requests use; no queue and no plan is involved.
//!
//! What holds: a lease keeps what it found where it was until it has loaded it or is closed; its pages match for others
//! only once they are committed; what it reserved and did not commit is free again when it closes. What has to wait is
//! asked (`asks`).

mod asks;

pub(crate) use asks::{Ask, LONGEST_SAVE};

use crate::answer::{Answer, Giver};
use crate::core::Core;
use crate::CoreError;
use asks::Want;
use std::collections::HashSet;
use std::sync::Arc;
use std::time::Duration;
use strata_control::{Admitted, Prefetch};
use strata_radix::Pin;
use strata_types::{LoadTicket, Namespace, PageId, RequestId, TicketState, TierId, Time, Token, TransferId};
use thiserror::Error;

/// Leases are numbered from here on, requests by their submitters.
const FIRST_LEASE: u64 = 1 << 63;

/// Why a lease does not do what it was asked to.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
pub enum LeaseError {
    /// The call makes no sense now.
    #[error("{0}")]
    Misuse(String),
    /// The device has no room.
    #[error("{0}")]
    NoRoom(String),
    /// The cache is being closed.
    #[error("the cache was closed while this waited")]
    Closed,
}

/// A lease and what it found, in pages from the start of the sequence, by the fastest tier that holds each.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LeaseFound {
    /// Its number.
    pub id: RequestId,
    /// Pages on the device, in host memory alone, on disk alone.
    pub pages: [u32; 3],
    /// How long bringing all of them to the device will take, as far as that is known.
    pub load: Option<Duration>,
}

/// Cached pages on the device, or on their way to it.
#[derive(Clone, Debug)]
pub struct LeaseLoad {
    /// The page table of the prefix.
    pub pages: Vec<PageId>,
    /// What has to be waited for, layer by layer, before the pages are read.
    pub tickets: Vec<Arc<LoadTicket>>,
}

/// Where the answer to a load goes.
pub type LoadGiver = Giver<Result<LeaseLoad, LeaseError>>;
/// Where it is waited for.
pub type LoadAnswer = Answer<Result<LeaseLoad, LeaseError>>;
/// Where the answer to a reservation goes.
pub type ReserveGiver = Giver<Result<Vec<PageId>, LeaseError>>;

/// One sequence of a foreign engine.
#[derive(Debug)]
pub(crate) struct Lease {
    namespace: Namespace,
    /// What was looked up; the sequence so far once something is committed.
    tokens: Vec<Token>,
    /// Pages that were found.
    found: u32,
    /// Keep them where they are until they are loaded.
    pins: Vec<Pin>,
    prefetch: Option<Prefetch>,
    /// A load was asked for.
    asked: bool,
    held: Option<Held>,
    /// Device pages that only this lease knows.
    reserved: HashSet<PageId>,
}

/// What a lease holds on the device.
#[derive(Debug)]
struct Held {
    pin: Pin,
    /// Pages of the sequence that are cached, from the first.
    published: u32,
    /// Pages that it reads and the tree has others for.
    duplicates: Vec<PageId>,
    loads: Vec<TransferId>,
    tickets: Vec<Arc<LoadTicket>>,
    failed: bool,
}

impl Held {
    fn of(admitted: Admitted) -> (Held, LeaseLoad) {
        let Admitted { pin, pages, tickets, loads, .. } = admitted;
        let published = pages.len() as u32;
        let load = LeaseLoad { pages, tickets: tickets.clone() };
        (Held { pin, published, duplicates: Vec::new(), loads, tickets, failed: false }, load)
    }

    /// Whether everything that was to be loaded is there.
    fn is_whole(&self) -> Result<(), LeaseError> {
        let state = |wanted: fn(&LoadTicket) -> bool| self.tickets.iter().any(|ticket| wanted(ticket));
        if self.failed || state(|ticket| ticket.state() == TicketState::Failed) {
            return misuse(
                "its load failed, so what was computed on it is void: release the match and match again",
            );
        }
        if state(|ticket| !ticket.is_complete()) {
            return misuse("its load is not over: wait for the last layer first");
        }
        Ok(())
    }
}

fn misuse<T>(text: impl Into<String>) -> Result<T, LeaseError> {
    Err(LeaseError::Misuse(text.into()))
}

impl Core {
    /// Looks a sequence up and keeps what is found of its whole pages where it is.
    pub fn open_lease(
        &mut self,
        now: Time,
        namespace: Namespace,
        tokens: Vec<Token>,
    ) -> Result<LeaseFound, CoreError> {
        self.at(now);
        let found = self.control.lookup(&namespace, &tokens)?;
        let mut pages = [0u32; 3];
        for (run, tier) in found.fastest() {
            pages[tier.index()] += run.end - run.start;
        }
        let mut pins = Vec::new();
        for tier in [TierId::DEVICE, TierId::HOST] {
            pins.push(self.control.pin(&namespace, &tokens, found.pages, tier)?);
        }
        let id = RequestId(FIRST_LEASE + self.next_lease);
        self.next_lease += 1;
        let lease = Lease {
            namespace,
            tokens,
            found: found.pages,
            pins,
            prefetch: None,
            asked: false,
            held: None,
            reserved: HashSet::new(),
        };
        self.leases.insert(id, lease);
        Ok(LeaseFound { id, pages, load: self.lease_load_time(pages) })
    }

    /// As `open_lease`, for someone who may have stopped waiting: a lease that nobody knows of is closed again.
    pub fn open_lease_for(
        &mut self,
        now: Time,
        namespace: Namespace,
        tokens: Vec<Token>,
        giver: &Giver<LeaseFound>,
    ) -> Result<(), CoreError> {
        let found = self.open_lease(now, namespace, tokens)?;
        match giver.give(found) {
            Ok(()) => Ok(()),
            Err(found) => self.close_lease(now, found.id),
        }
    }

    /// How long bringing so many pages up will take.
    fn lease_load_time(&self, [_, host, disk]: [u32; 3]) -> Option<Duration> {
        let bytes = |pages: u32| u64::from(pages) * self.control.config().page_bytes;
        let read = if disk == 0 { Some(Duration::ZERO) } else { self.costs.read(bytes(disk)) };
        let load = if host + disk == 0 { Some(Duration::ZERO) } else { self.costs.load(bytes(host + disk)) };
        Some(read? + load?)
    }

    /// Brings the first `pages` pages of what was found to the device, as many as come: a page that the disk does not
    /// give within `limit` ends the prefix before it. Where the device has no room for it, the lease is as it was.
    pub fn load_lease(&mut self, now: Time, id: RequestId, pages: u32, limit: Duration, giver: LoadGiver) {
        self.at(now);
        let error = match self.leases.get_mut(&id) {
            None => Some("the match was released: match again"),
            Some(lease) if lease.asked => Some("a match is loaded once: its ticket has the pages"),
            Some(lease) if lease.held.is_some() => Some("load before the first commit, or not at all"),
            Some(lease) => {
                lease.asked = true;
                None
            }
        };
        let ask = Ask { lease: id, want: Want::Load(pages, giver), since: now, until: now + limit };
        match error {
            Some(text) => ask.refuse(LeaseError::Misuse(text.into())),
            None => self.take_ask(ask),
        }
    }

    /// Reserves device pages to compute into, evicting the least recently used. Where there is no room, waits for it
    /// until `limit` has passed. Pages that whoever asked no longer waits for are free again.
    pub fn reserve_lease(
        &mut self,
        now: Time,
        id: RequestId,
        count: u32,
        limit: Duration,
        giver: ReserveGiver,
    ) {
        self.at(now);
        let ask = Ask { lease: id, want: Want::Reserve(count, giver), since: now, until: now + limit };
        let capacity = self.control.capacity(TierId::DEVICE);
        if !self.leases.contains_key(&id) {
            return ask.refuse(LeaseError::Misuse("the match was released: match again".into()));
        }
        if count > capacity {
            let text = format!(
                "{count} pages can never fit the pool of {capacity}: ask for fewer, or make it larger"
            );
            return ask.refuse(LeaseError::NoRoom(text));
        }
        self.take_ask(ask);
    }

    /// Makes reserved pages match: they hold the whole pages of `tokens` after those that the lease has loaded or
    /// committed. Returns the pages for which the cache had others already; like all, they are the lease's to read
    /// until it closes.
    pub fn commit_lease(
        &mut self,
        now: Time,
        id: RequestId,
        tokens: Vec<Token>,
        pages: &[PageId],
    ) -> Result<Result<Vec<PageId>, LeaseError>, CoreError> {
        self.at(now);
        let Some(lease) = self.leases.get(&id) else {
            return Ok(misuse("the match was released: match again"));
        };
        if let Err(error) = self.may_commit(lease, &tokens, pages) {
            return Ok(Err(error));
        }
        if pages.is_empty() {
            return Ok(Ok(Vec::new()));
        }
        if lease.held.is_none() {
            self.hold_nothing(id)?;
        }
        let page_size = self.page_size();
        let Some(lease) = self.leases.get_mut(&id) else { return Ok(misuse("the match was released")) };
        let Some(held) = lease.held.as_mut() else { return Ok(misuse("the match holds nothing")) };
        let whole = tokens.len() / page_size * page_size;
        let refused =
            self.control.publish(&mut held.pin, &lease.namespace, &tokens[..whole], held.published, pages)?;
        held.published += pages.len() as u32;
        held.duplicates.extend(&refused);
        for page in pages {
            lease.reserved.remove(page);
        }
        lease.tokens = tokens;
        Ok(Ok(refused))
    }

    fn may_commit(&self, lease: &Lease, tokens: &[Token], pages: &[PageId]) -> Result<(), LeaseError> {
        let page_size = self.page_size();
        if let Some(held) = &lease.held {
            held.is_whole()?;
        } else if lease.asked {
            return misuse("its load has not begun yet: wait for its pages first");
        }
        let before = lease.held.as_ref().map_or(0, |held| held.published as usize);
        let mut seen = HashSet::new();
        if let Some(page) = pages.iter().find(|page| !lease.reserved.contains(page) || !seen.insert(**page)) {
            return misuse(format!(
                "page {page} is not reserved by this match, was committed or given back, or comes twice: commit what \
                 `reserve` gave, once"
            ));
        }
        if before + pages.len() != tokens.len() / page_size {
            return misuse(format!(
                "{} tokens are {} whole pages of {page_size}, {before} of them are cached by this match, and {} pages \
                 came: commit one page for each of the others",
                tokens.len(),
                tokens.len() / page_size,
                pages.len()
            ));
        }
        let known = before * page_size;
        if tokens[..known] != lease.tokens[..known] {
            return misuse(format!(
                "the first {known} tokens are not those of this match: it can only be prolonged"
            ));
        }
        Ok(())
    }

    /// The lease computes all of its sequence itself.
    fn hold_nothing(&mut self, id: RequestId) -> Result<(), CoreError> {
        let Some(lease) = self.leases.get_mut(&id) else { return Ok(()) };
        let pins = std::mem::take(&mut lease.pins);
        let admitted = self.control.admit(id, &lease.namespace, &[], 0, 0, false, 0)?;
        lease.held = admitted.map(|admitted| Held::of(admitted).0);
        for pin in pins {
            self.control.unpin(pin)?;
        }
        Ok(())
    }

    /// Gives reserved pages back unused; all or none.
    pub fn abort_lease(
        &mut self,
        now: Time,
        id: RequestId,
        pages: &[PageId],
    ) -> Result<Result<(), LeaseError>, CoreError> {
        self.at(now);
        let Some(lease) = self.leases.get_mut(&id) else { return Ok(misuse("the match was released")) };
        let given: HashSet<PageId> = pages.iter().copied().collect();
        if let Some(page) = given.iter().find(|page| !lease.reserved.contains(page)) {
            return Ok(misuse(format!(
                "page {page} is not reserved by this match: give back what `reserve` gave"
            )));
        }
        lease.reserved.retain(|page| !given.contains(page));
        let given: Vec<PageId> = given.into_iter().collect();
        self.control.free_device(&given)?;
        Ok(Ok(()))
    }

    /// Lets everything go: what was found, what was loaded, what was reserved. A load under way that nobody else waits
    /// for is cancelled. Closing again does nothing.
    pub fn close_lease(&mut self, now: Time, id: RequestId) -> Result<(), CoreError> {
        self.at(now);
        for ask in std::mem::take(&mut self.asks) {
            match ask.lease == id {
                true => ask.refuse(LeaseError::Misuse("the match was released meanwhile".into())),
                false => self.asks.push_back(ask),
            }
        }
        let Some(mut lease) = self.leases.remove(&id) else { return Ok(()) };
        self.end_lease_prefetch(id, lease.prefetch.take())?;
        for pin in lease.pins {
            self.control.unpin(pin)?;
        }
        let mut own: Vec<PageId> = lease.reserved.into_iter().collect();
        match lease.held {
            Some(held) => {
                own.extend(held.duplicates);
                Ok(self.control.release(id, held.pin, &own, &held.loads)?)
            }
            None => Ok(self.control.free_device(&own)?),
        }
    }

    fn end_lease_prefetch(&mut self, id: RequestId, prefetch: Option<Prefetch>) -> Result<(), CoreError> {
        let Some(prefetch) = prefetch else { return Ok(()) };
        for transfer in crate::core::in_order(prefetch.waits) {
            self.control.leave(id, transfer)?;
        }
        Ok(self.control.unpin(prefetch.pin)?)
    }

    /// A lease's load is over and its pages are whole.
    pub(crate) fn lease_loaded(&mut self, id: RequestId, transfer: TransferId, duplicates: &[PageId]) {
        if let Some(held) = self.leases.get_mut(&id).and_then(|lease| lease.held.as_mut()) {
            held.loads.retain(|load| *load != transfer);
            held.duplicates.extend(duplicates);
        }
    }

    /// A lease's load has failed: what it computes on it is void.
    pub(crate) fn lease_load_failed(&mut self, id: RequestId, transfer: TransferId) {
        if let Some(held) = self.leases.get_mut(&id).and_then(|lease| lease.held.as_mut()) {
            held.loads.retain(|load| *load != transfer);
            held.failed = true;
        }
    }

    /// A part of a lease's prefetch is over.
    pub(crate) fn lease_prefetched(&mut self, id: RequestId, transfer: TransferId) {
        if let Some(prefetch) = self.leases.get_mut(&id).and_then(|lease| lease.prefetch.as_mut()) {
            prefetch.waits.remove(&transfer);
        }
    }
}
