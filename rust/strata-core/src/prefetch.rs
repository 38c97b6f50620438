//! Reading from disk for requests that wait: in queue order, within a share of the tier that it lands in (who comes
//! later never takes from the share of who comes first), and held only as long as the policy says. Whatever ends it, admission, abort or a late disk, what has arrived stays.

use crate::core::Core;
use crate::request::{Phase, Request};
use crate::CoreError;
use std::collections::HashSet;
use std::ops::Range;
use std::time::Duration;
use strata_control::Prefetch;
use strata_radix::Pin;
use strata_types::{RequestId, TierId, Time, TransferId};

/// Prefetches that are started for one request: its pages may sink to disk again while it waits, but not for ever.
const MAX_PREFETCHES: u32 = 4;
/// What a wait may be longer than predicted, as a part of what computing would take, and at least.
const GRACE: (u32, Duration) = (10, Duration::from_millis(20));
/// The part of what computing would take that a disk of unknown speed is given to show what it can, and the least.
const TRIAL: (u32, Duration) = (20, Duration::from_millis(50));

/// What a policy decides by.
#[derive(Clone, Copy, Debug)]
pub struct PrefetchView {
    /// Now.
    pub now: Time,
    /// When the prefetch began.
    pub since: Time,
    /// Tokens of the prompt.
    pub prompt_tokens: u64,
    /// How long the rest of the read will take, then the load; none if nothing is known of the disk.
    pub read: Option<Duration>,
    /// How long it would take to compute what is still to be read; none if nothing is known of the model.
    pub compute: Option<Duration>,
}

/// How long a request is held back for its prefetch.
pub trait PrefetchPolicy: Send {
    /// The name that flags and metrics use.
    fn name(&self) -> &'static str;

    /// Until when the request waits from now on; none: it goes on with what is there. Asked when the prefetch begins,
    /// and at each piece of news.
    fn holds_until(&self, view: &PrefetchView) -> Option<Time>;

    /// Whether a prefetch is worth beginning.
    fn begins(&self, _view: &PrefetchView) -> bool {
        true
    }
}

/// Never held: the prefetch is cut when the request is scheduled.
#[derive(Debug, Default)]
pub struct BestEffort;

impl PrefetchPolicy for BestEffort {
    fn name(&self) -> &'static str {
        "best_effort"
    }

    fn holds_until(&self, _view: &PrefetchView) -> Option<Time> {
        None
    }
}

/// Held until all is read, for as long as the disk gives signs of life.
#[derive(Debug)]
pub struct WaitForAll {
    /// The longest wait without any news.
    pub patience: Duration,
}

impl PrefetchPolicy for WaitForAll {
    fn name(&self) -> &'static str {
        "wait"
    }

    fn holds_until(&self, view: &PrefetchView) -> Option<Time> {
        Some(view.now + self.patience)
    }
}

/// Held for a time that grows with the prompt.
#[derive(Debug)]
pub struct Timeout {
    /// For any prompt.
    pub base: Duration,
    /// For each thousand tokens of it.
    pub per_thousand_tokens: Duration,
}

impl PrefetchPolicy for Timeout {
    fn name(&self) -> &'static str {
        "timeout"
    }

    fn holds_until(&self, view: &PrefetchView) -> Option<Time> {
        let thousands = view.prompt_tokens as f64 / 1000.0;
        let grown = Duration::try_from_secs_f64(self.per_thousand_tokens.as_secs_f64() * thousands);
        Some(view.since + self.base.saturating_add(grown.unwrap_or(Duration::MAX)))
    }
}

/// Held while reading the rest is predicted to take less time than computing it, within a deadline.
#[derive(Debug)]
pub struct Adaptive {
    /// The longest hold.
    pub deadline: Duration,
}

impl PrefetchPolicy for Adaptive {
    fn name(&self) -> &'static str {
        "adaptive"
    }

    fn holds_until(&self, view: &PrefetchView) -> Option<Time> {
        let latest = view.since + self.deadline;
        let until = match (view.read, view.compute) {
            (Some(read), Some(compute)) if read >= compute => return None,
            (Some(read), Some(compute)) => view.now + read + (compute / GRACE.0).max(GRACE.1),
            (None, Some(compute)) => view.since + (compute / TRIAL.0).max(TRIAL.1),
            (_, None) => latest,
        };
        Some(until.min(latest))
    }

    fn begins(&self, view: &PrefetchView) -> bool {
        !matches!((view.read, view.compute), (Some(read), Some(compute)) if read >= compute)
    }
}

/// A request's prefetch, from its beginning until the request is admitted or gone.
#[derive(Debug)]
pub(crate) struct Prefetching {
    /// What is still under way.
    pub waits: HashSet<TransferId>,
    /// The pages that were on disk alone, and any between them.
    pub pages: Range<u32>,
    /// Keeps what has arrived where it is.
    pub pin: Pin,
    pub since: Time,
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
        let capacity = self.control.tier_stats(lands).capacity;
        let share = (f64::from(capacity) * self.prefetch_share) as u32;
        // A disk that hangs keeps what was given up too.
        let mut taken = self.pages_prefetched() + self.control.abandoned_pages() as u32;
        for id in self.next_to_prefetch() {
            let room = if taken == 0 { capacity } else { share.saturating_sub(taken) };
            if room == 0 {
                break;
            }
            self.to_prefetch.remove(&id);
            self.begin_prefetch(id, room)?;
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

    /// Begins to read at most so many pages for a request, if that is of use.
    fn begin_prefetch(&mut self, id: RequestId, most: u32) -> Result<(), CoreError> {
        let Some(request) = self.requests.get(&id) else { return Ok(()) };
        let may = matches!(request.phase, Phase::Waiting)
            && request.prefetch.is_none()
            && !request.prefetch_cut
            && request.prefetches < MAX_PREFETCHES;
        if !may {
            return Ok(());
        }
        let usable = self.usable_pages(request);
        let on_disk = self.control.on_disk(&request.namespace, &request.tokens, usable)?;
        let Some(pages) = on_disk.map(|pages| pages.start..pages.end.min(pages.start + most)) else {
            return Ok(());
        };
        let view = self.prefetch_view(request, self.now, pages.clone(), self.pages_ahead(id));
        if !self.prefetch_policy.begins(&view) {
            self.stats.recomputed_tokens[TierId::DISK.index()] += self.tokens_of(&pages);
            self.decided(id, |request| request.prefetch_cut = true);
            return Ok(());
        }
        let tokens = &request.tokens;
        let begun = self.control.prefetch(id, &request.namespace, tokens, pages.end)?;
        let Some(Prefetch { waits, pages, pin }) = begun else { return Ok(()) };
        let until = self.prefetch_policy.holds_until(&view);
        let since = self.now;
        self.decided(id, |request| {
            request.prefetches += 1;
            if request.from_disk.is_empty() {
                request.from_disk = pages.clone();
            }
            request.prefetch = Some(Prefetching { waits, pages, pin, since, until });
        });
        self.prefetching.insert(id);
        self.note_held(id);
        Ok(())
    }

    fn decided(&mut self, id: RequestId, note: impl FnOnce(&mut Request)) {
        if let Some(request) = self.requests.get_mut(&id) {
            note(request);
        }
    }

    fn tokens_of(&self, pages: &Range<u32>) -> u64 {
        u64::from(pages.end - pages.start) * self.page_size() as u64
    }

    /// What is known of reading `pages` and of computing them instead. `ahead` pages are read before.
    fn prefetch_view(&self, request: &Request, since: Time, pages: Range<u32>, ahead: u64) -> PrefetchView {
        let own = u64::from(pages.end - pages.start);
        let page_bytes = self.control.config().page_bytes;
        let read = self.costs.read((own + ahead) * page_bytes);
        let load = self.costs.load(own * page_bytes).unwrap_or_default();
        let context = u64::from(pages.start) * self.page_size() as u64;
        PrefetchView {
            now: self.now,
            since,
            prompt_tokens: request.tokens.len() as u64,
            read: read.map(|read| read.saturating_add(load)),
            compute: self.costs.compute(self.tokens_of(&pages), context),
        }
    }

    /// Pages under way for requests before this one in the queue.
    fn pages_ahead(&self, id: RequestId) -> u64 {
        let before = self.prefetching.iter().filter(|other| self.queue.before(**other, id));
        before.filter_map(|other| self.requests.get(other)).map(|request| self.pages_left(request)).sum()
    }

    /// Pages that are still to be read for a request.
    fn pages_left(&self, request: &Request) -> u64 {
        let waits = request.prefetch.iter().flat_map(|prefetch| &prefetch.waits);
        waits.map(|transfer| self.control.pages_of(*transfer) as u64).sum()
    }

    /// A part of somebody's prefetch is over.
    pub(crate) fn prefetched(
        &mut self,
        transfer: TransferId,
        users: HashSet<RequestId>,
    ) -> Result<(), CoreError> {
        for id in users {
            let Some(prefetch) = self.requests.get_mut(&id).and_then(|request| request.prefetch.as_mut())
            else {
                continue;
            };
            prefetch.waits.remove(&transfer);
            if !prefetch.waits.is_empty() && prefetch.until.is_some() {
                self.judge_again(id)?;
            }
            self.note_held(id);
        }
        Ok(())
    }

    /// Asks the policy again, now that more is known.
    fn judge_again(&mut self, id: RequestId) -> Result<(), CoreError> {
        let Some(request) = self.requests.get(&id) else { return Ok(()) };
        let Some(prefetch) = &request.prefetch else { return Ok(()) };
        let left = self.pages_left(request) as u32;
        let rest = prefetch.pages.end.saturating_sub(left).max(prefetch.pages.start)..prefetch.pages.end;
        let mut view = self.prefetch_view(request, prefetch.since, rest, self.pages_ahead(id));
        // What this very read has shown so far says more than what was measured before it.
        let done =
            prefetch.pages.end - prefetch.pages.start - left.min(prefetch.pages.end - prefetch.pages.start);
        if done > 0 {
            let load =
                self.costs.load(u64::from(left) * self.control.config().page_bytes).unwrap_or_default();
            let elapsed = self.now.since(prefetch.since);
            view.read = Some(elapsed.mul_f64(f64::from(left) / f64::from(done)).saturating_add(load));
        }
        match self.prefetch_policy.holds_until(&view) {
            None => self.cut_prefetch(id),
            until => {
                self.decided(id, |request| {
                    if let Some(prefetch) = &mut request.prefetch {
                        prefetch.until = until;
                    }
                });
                Ok(())
            }
        }
    }

    /// The request goes on with what is there.
    fn cut_prefetch(&mut self, id: RequestId) -> Result<(), CoreError> {
        let Some(request) = self.requests.get(&id) else { return Ok(()) };
        let left = self.pages_left(request);
        self.stats.prefetch_timeouts += 1;
        self.stats.recomputed_tokens[TierId::DISK.index()] += left * self.page_size() as u64;
        let Some(request) = self.requests.get_mut(&id) else { return Ok(()) };
        request.prefetch_cut = true;
        let Some(prefetch) = &mut request.prefetch else { return Ok(()) };
        prefetch.until = None;
        for transfer in std::mem::take(&mut prefetch.waits) {
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
        for transfer in prefetch.waits {
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

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    fn view(read: Option<Duration>, compute: Option<Duration>) -> PrefetchView {
        let since = Time(0) + SECOND;
        PrefetchView { now: since + SECOND, since, prompt_tokens: 2000, read, compute }
    }

    #[test]
    fn the_simple_policies_hold_as_their_names_say() {
        let any = view(Some(SECOND), Some(SECOND));
        assert_eq!(BestEffort.holds_until(&any), None);
        assert_eq!(WaitForAll { patience: SECOND }.holds_until(&any), Some(any.now + SECOND));
        let timeout = Timeout { base: SECOND, per_thousand_tokens: SECOND / 2 };
        assert_eq!(timeout.holds_until(&any), Some(any.since + 2 * SECOND));
        let endless = Timeout { base: Duration::MAX, per_thousand_tokens: Duration::MAX };
        assert_eq!(endless.holds_until(&any), Some(Time(u64::MAX)));
    }

    #[test]
    fn adaptive_waits_only_while_reading_is_cheaper() {
        let adaptive = Adaptive { deadline: 5 * SECOND };
        let cheap = view(Some(SECOND), Some(2 * SECOND));
        assert!(adaptive.begins(&cheap));
        assert_eq!(adaptive.holds_until(&cheap), Some(cheap.now + SECOND + SECOND / 5));
        let dear = view(Some(2 * SECOND), Some(2 * SECOND));
        assert!(!adaptive.begins(&dear));
        assert_eq!(adaptive.holds_until(&dear), None);
        let long = view(Some(60 * SECOND), Some(80 * SECOND));
        assert_eq!(adaptive.holds_until(&long), Some(long.since + 5 * SECOND), "within its deadline");
        let unknown = view(None, Some(10 * SECOND));
        assert_eq!(adaptive.holds_until(&unknown), Some(unknown.since + SECOND / 2), "a trial");
        assert_eq!(adaptive.holds_until(&view(None, None)), Some(unknown.since + 5 * SECOND));
    }
}
