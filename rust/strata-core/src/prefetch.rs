//! Reading from disk for requests that wait: in queue order, within a share of the tier that it lands in (who comes
//! later never takes from the share of who comes first), and held only as long as the policy says. Whatever ends it,
//! admission, abort or a late disk, what has arrived stays.
//!
//! A prefetch is read in steps, each short beside computing the whole, and judged again after each: so a disk of
//! unknown speed is found out before it has cost much, and one that becomes slow costs little more than a step.

use crate::core::{in_order, Core};
use crate::prefetch_policy::{risk, PrefetchView};
use crate::request::{Phase, Request};
use crate::CoreError;
use std::collections::HashSet;
use std::ops::Range;
use std::time::Duration;
use strata_control::Prefetch;
use strata_radix::{MatchResult, Pin};
use strata_types::{RequestId, TierId, Time, TransferId};

/// Prefetches that are started for one request: its pages may sink to disk again while it waits, but not for ever.
const MAX_PREFETCHES: u32 = 4;
/// Waiting requests that are looked at for what the device has to do before another one's turn.
const MOST_AHEAD: usize = 256;

/// A request's prefetch, from its beginning until the request is admitted or gone.
#[derive(Debug)]
pub(crate) struct Prefetching {
    /// What is still under way.
    pub waits: HashSet<TransferId>,
    /// The pages that are to come from disk, and any between them.
    pub pages: Range<u32>,
    /// Up to where they have been asked for.
    pub asked: u32,
    /// Keeps what has arrived where it is.
    pub pin: Pin,
    pub since: Time,
    /// When the step that is being read should be over.
    pub due: Time,
    /// Until when the request is held back.
    pub until: Option<Time>,
}

impl Core {
    /// Begins prefetches for those who may need one, the first in the queue first. Together they stay within their
    /// share; a request that is alone may fill the tier, or its prompt would be cut where nobody else gains by it.
    pub(crate) fn pump_prefetches(&mut self) -> Result<(), CoreError> {
        if self.to_prefetch.is_empty() {
            return Ok(());
        }
        let lands = if self.control.is_staged() { TierId::DEVICE } else { TierId::HOST };
        let capacity = self.control.capacity(lands);
        let share = (f64::from(capacity) * self.prefetch_share) as u32;
        // A disk that hangs keeps what was given up too.
        let mut taken = self.pages_prefetched() + self.control.abandoned_pages() as u32;
        let room_beside = |taken| if taken == 0 { capacity } else { share.saturating_sub(taken) };
        if room_beside(taken) == 0 {
            // Asked at every decision: ten thousand are not sorted for nothing.
            return Ok(());
        }
        for id in self.next_to_prefetch() {
            let room = room_beside(taken);
            if room == 0 {
                break;
            }
            if !self.begin_prefetch(id, room, share)? {
                // Nobody behind it may take what it waits for.
                break;
            }
            self.to_prefetch.remove(&id);
            let prefetch = self.requests.get(&id).and_then(|request| request.prefetch.as_ref());
            taken += prefetch.map_or(0, |prefetch| prefetch.pages.len() as u32);
        }
        let requests = &self.requests;
        self.to_prefetch.retain(|id| requests.contains_key(id));
        Ok(())
    }

    /// Those who may need a prefetch, in the order of the queue.
    fn next_to_prefetch(&self) -> Vec<RequestId> {
        if self.control.is_staged() {
            // Pages land on the device, where those who wait must not keep each other from being admitted.
            let first = self.queue.iter().next().map(|waiting| waiting.id);
            return first.filter(|id| self.to_prefetch.contains(id)).into_iter().collect();
        }
        let mut next: Vec<RequestId> = self.to_prefetch.iter().copied().collect();
        self.queue.sort(&mut next);
        next
    }

    /// Pages that prefetches have brought or are bringing for requests that wait.
    fn pages_prefetched(&self) -> u32 {
        let prefetches = self.prefetching.iter().filter_map(|id| self.requests.get(id)?.prefetch.as_ref());
        prefetches.map(|prefetch| prefetch.pages.end - prefetch.pages.start).sum()
    }

    /// Begins to read at most so many pages for a request, if that is of use. False if the request had better wait for
    /// more room, of the share that all have: what is left out now would be computed.
    fn begin_prefetch(&mut self, id: RequestId, most: u32, share: u32) -> Result<bool, CoreError> {
        let Some(request) = self.requests.get(&id) else { return Ok(true) };
        let may = matches!(request.phase, Phase::Waiting)
            && request.prefetch.is_none()
            && !request.prefetch_cut
            && request.prefetches < MAX_PREFETCHES;
        if !may {
            return Ok(true);
        }
        let usable = self.usable_pages(request);
        let Some(pages) = self.control.on_disk(&request.namespace, &request.tokens, usable)? else {
            return Ok(true);
        };
        if most < share.min(pages.end - pages.start) {
            return Ok(false);
        }
        let pages = pages.start..pages.end.min(pages.start + most);
        let view = self.prefetch_view(request, pages.clone(), &pages);
        let pays = self.prefetch_policy.begins(&view);
        if !pays && !self.costs.doubts_reads() {
            self.decided(id, |request| request.prefetch_cut = true);
            return Ok(true);
        }
        let step = if pays { self.step_pages(view.risk) } else { self.step_pages(Duration::ZERO) };
        if self.begin_step(id, pages.clone(), pages.start.saturating_add(step), !pays)? {
            self.decided(id, |request| request.prefetches += 1);
        }
        Ok(true)
    }

    /// Pages of a step that takes about this long: few while the disk's speed is unknown.
    fn step_pages(&self, span: Duration) -> u32 {
        let pages = self.costs.read_within(span) / self.control.config().page_bytes.max(1);
        u32::try_from(pages).unwrap_or(u32::MAX).max(1)
    }

    /// Begins to read `pages` up to `end`; those after it are for later steps. A `trial` is held as for a disk of
    /// unknown speed. False if nothing could be read.
    fn begin_step(
        &mut self,
        id: RequestId,
        pages: Range<u32>,
        end: u32,
        trial: bool,
    ) -> Result<bool, CoreError> {
        let Some(request) = self.requests.get(&id) else { return Ok(false) };
        let end = end.min(pages.end);
        let begun = self.control.prefetch(id, &request.namespace, &request.tokens, end)?;
        let Some(Prefetch { waits, pages: asked, pin }) = begun else { return Ok(false) };
        let under_way = self.pages_of(&waits) + self.pages_ahead(id);
        let takes = self.costs.read(under_way * self.control.config().page_bytes).filter(|_| !trial);
        let (since, due) = (self.now, self.now + takes.unwrap_or_default());
        self.prefetching.insert(id);
        let Some(request) = self.requests.get_mut(&id) else { return Ok(false) };
        request.from_disk = match request.from_disk.is_empty() {
            true => asked,
            false => request.from_disk.start.min(asked.start)..request.from_disk.end.max(asked.end),
        };
        let before = match &mut request.prefetch {
            Some(prefetch) => {
                (prefetch.waits, prefetch.asked, prefetch.due) = (waits, end, due);
                Some(std::mem::replace(&mut prefetch.pin, pin))
            }
            none => {
                *none = Some(Prefetching { waits, pages, asked: end, pin, since, due, until: None });
                None
            }
        };
        if let Some(pin) = before {
            self.control.unpin(pin)?;
        }
        let view = self.view_now(id).map(|view| PrefetchView { read: view.read.filter(|_| !trial), ..view });
        self.hold(id, view.and_then(|view| self.prefetch_policy.holds_until(&view)));
        Ok(true)
    }

    fn hold(&mut self, id: RequestId, until: Option<Time>) {
        if let Some(prefetch) = self.requests.get_mut(&id).and_then(|request| request.prefetch.as_mut()) {
            prefetch.until = until;
        }
        self.note_held(id);
    }

    fn decided(&mut self, id: RequestId, note: impl FnOnce(&mut Request)) {
        if let Some(request) = self.requests.get_mut(&id) {
            note(request);
        }
    }

    fn tokens_of(&self, pages: &Range<u32>) -> u64 {
        u64::from(pages.end - pages.start) * self.page_size() as u64
    }

    /// What is known of reading `rest` of the pages `whole`, and of computing them instead.
    fn prefetch_view(&self, request: &Request, rest: Range<u32>, whole: &Range<u32>) -> PrefetchView {
        let page_bytes = self.control.config().page_bytes;
        let own = u64::from(rest.end - rest.start);
        let (mut since, mut due) = (self.now, self.now);
        let mut read = self.costs.read((own + self.pages_ahead(request.id)) * page_bytes);
        if let Some(prefetch) = &request.prefetch {
            (since, due) = (prefetch.since, prefetch.due);
            // What this very read has shown so far says more than what was measured before it. Beside others' reads
            // it shows how long the disk's queue is.
            if rest.start > whole.start && self.prefetching.len() == 1 {
                let shown = f64::from(rest.end - rest.start) / f64::from(rest.start - whole.start);
                read = Duration::try_from_secs_f64(self.now.since(since).as_secs_f64() * shown).ok();
            }
        }
        let load = self.costs.load(own * page_bytes).unwrap_or_default();
        let compute = |pages: &Range<u32>| {
            self.costs.compute(self.tokens_of(pages), u64::from(pages.start) * self.page_size() as u64)
        };
        PrefetchView {
            now: self.now,
            since,
            prompt_tokens: request.tokens.len() as u64,
            read: read.map(|read| read.saturating_add(load)),
            compute: compute(&rest).map(|own| own.saturating_add(self.busy_ahead(request.id))),
            due,
            risk: compute(whole).map_or(Duration::MAX, risk),
        }
    }

    /// What is known of a prefetch that has begun.
    fn view_now(&self, id: RequestId) -> Option<PrefetchView> {
        let request = self.requests.get(&id)?;
        let prefetch = request.prefetch.as_ref()?;
        let left = (self.pages_left(request) as u32).min(prefetch.pages.end - prefetch.pages.start);
        let rest = prefetch.pages.end - left..prefetch.pages.end;
        Some(self.prefetch_view(request, rest, &prefetch.pages))
    }

    /// How long the device would compute before it came to this request, were nothing read from disk: prompts that
    /// run, and the first of those that wait before it. A read is held against this, or of a burst of requests all but
    /// the first few would give up a read that is far cheaper than the time of the device.
    fn busy_ahead(&self, id: RequestId) -> Duration {
        let running = self.running.iter().filter_map(|other| self.requests.get(other));
        let running = running.filter(|request| request.prefilling());
        let running = running.filter_map(|request| {
            let planned = request.running()?.planned;
            Some((request.prefill_left() as u32, planned as u32))
        });
        let before = self.queue.iter().take(MOST_AHEAD).take_while(|waiting| waiting.id != id);
        let waiting = before.map(|waiting| {
            let need = &waiting.standing.need;
            (need.to_compute(), need.context())
        });
        let each = |(tokens, context): (u32, u32)| self.costs.compute(tokens.into(), context.into());
        running.chain(waiting).filter_map(each).sum()
    }

    /// Pages under way for requests before this one in the queue.
    fn pages_ahead(&self, id: RequestId) -> u64 {
        let before = self.prefetching.iter().filter(|other| self.queue.before(**other, id));
        before.filter_map(|other| self.requests.get(other)).map(|request| self.pages_left(request)).sum()
    }

    /// Pages that are still to be read for a request.
    fn pages_left(&self, request: &Request) -> u64 {
        let left = |prefetch: &Prefetching| {
            self.pages_of(&prefetch.waits) + u64::from(prefetch.pages.end - prefetch.asked)
        };
        request.prefetch.as_ref().map_or(0, left)
    }

    /// Pages that transfers still bring.
    fn pages_of(&self, transfers: &HashSet<TransferId>) -> u64 {
        transfers.iter().map(|transfer| self.control.pages_of(*transfer) as u64).sum()
    }

    /// A part of somebody's prefetch is over.
    pub(crate) fn prefetched(
        &mut self,
        transfer: TransferId,
        users: HashSet<RequestId>,
    ) -> Result<(), CoreError> {
        for id in in_order(users) {
            self.lease_prefetched(id, transfer);
            let Some(prefetch) = self.requests.get_mut(&id).and_then(|request| request.prefetch.as_mut())
            else {
                continue;
            };
            prefetch.waits.remove(&transfer);
            if prefetch.waits.is_empty() {
                self.read_on(id)?;
            } else if prefetch.until.is_some() {
                self.judge_again(id)?;
            }
            self.note_held(id);
        }
        Ok(())
    }

    /// Begins the next step, now that one is over and more is known.
    fn read_on(&mut self, id: RequestId) -> Result<(), CoreError> {
        let Some(request) = self.requests.get(&id) else { return Ok(()) };
        let Some(prefetch) = request.prefetch.as_ref().filter(|prefetch| prefetch.asked < prefetch.pages.end)
        else {
            return Ok(());
        };
        let (asked, end) = (prefetch.asked, prefetch.pages.end);
        let missing = self.control.on_disk(&request.namespace, &request.tokens, end)?;
        // After a page that did not come, what follows is of no use.
        let next = missing.map(|pages| pages.start).filter(|first| *first >= asked);
        let (Some(next), Some(view)) = (next, self.view_now(id)) else {
            self.asks_no_more(id);
            return Ok(());
        };
        if !self.prefetch_policy.begins(&view) {
            return self.cut_prefetch(id);
        }
        let step_end = next.saturating_add(self.step_pages(view.risk));
        if !self.begin_step(id, next..end, step_end, false)? {
            self.asks_no_more(id);
        }
        Ok(())
    }

    /// What has not been asked for will not be.
    fn asks_no_more(&mut self, id: RequestId) {
        if let Some(prefetch) = self.requests.get_mut(&id).and_then(|request| request.prefetch.as_mut()) {
            prefetch.pages.end = prefetch.asked;
        }
    }

    /// Asks the policy again, now that more is known.
    fn judge_again(&mut self, id: RequestId) -> Result<(), CoreError> {
        let Some(view) = self.view_now(id) else { return Ok(()) };
        match self.prefetch_policy.holds_until(&view) {
            None => self.cut_prefetch(id),
            until => {
                self.hold(id, until);
                Ok(())
            }
        }
    }

    /// The request goes on with what is there.
    fn cut_prefetch(&mut self, id: RequestId) -> Result<(), CoreError> {
        self.asks_no_more(id);
        let Some(request) = self.requests.get_mut(&id) else { return Ok(()) };
        self.stats.prefetch_timeouts += 1;
        request.prefetch_cut = true;
        let Some(prefetch) = &mut request.prefetch else { return Ok(()) };
        prefetch.until = None;
        for transfer in in_order(std::mem::take(&mut prefetch.waits)) {
            self.control.leave(id, transfer)?;
        }
        self.note_held(id);
        Ok(())
    }

    /// Cuts what is past its time.
    pub(crate) fn cut_late_prefetches(&mut self) -> Result<(), CoreError> {
        let now = self.now;
        let late = |request: &&Request| request.held_until().is_some_and(|until| until <= now);
        let requests = self.prefetching.iter().filter_map(|id| self.requests.get(id));
        let late: Vec<RequestId> = requests.filter(late).map(|request| request.id).collect();
        for id in late {
            self.cut_prefetch(id)?;
        }
        Ok(())
    }

    /// Ends a request's prefetch: it is admitted, put back or gone.
    pub(crate) fn end_prefetch(&mut self, id: RequestId) -> Result<(), CoreError> {
        self.to_prefetch.remove(&id);
        let Some(prefetch) = self.requests.get_mut(&id).and_then(|request| request.prefetch.take()) else {
            return Ok(());
        };
        self.prefetching.remove(&id);
        self.note_held(id);
        for transfer in in_order(prefetch.waits) {
            self.control.leave(id, transfer)?;
        }
        Ok(self.control.unpin(prefetch.pin)?)
    }

    /// Whether loading what the host holds of a prompt beats computing it; `first..end` are the pages from the first
    /// that must be loaded to the end of the hit, `loads` of them to be loaded.
    pub(crate) fn loading_pays(&self, pages: Range<u32>, loads: u32) -> bool {
        let bytes = u64::from(loads) * self.control.config().page_bytes;
        let context = u64::from(pages.start) * self.page_size() as u64;
        let load = self.costs.load(bytes);
        let compute = self.costs.compute(self.tokens_of(&pages), context);
        self.always_loads || !matches!((load, compute), (Some(load), Some(compute)) if load >= compute)
    }
}

/// Counts what tiers hold of a prompt beyond its hit: it is computed all the same.
pub(crate) fn count_recomputed(counts: &mut [u64; 3], found: &MatchResult, hit: usize, page_size: usize) {
    for (pages, tier) in found.fastest() {
        let beyond = pages.end.saturating_sub(pages.start.max(hit as u32));
        if let Some(count) = counts.get_mut(tier.index()) {
            *count += u64::from(beyond) * page_size as u64;
        }
    }
}
