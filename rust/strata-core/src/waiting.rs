//! The queue: who waits, where the tokens of each are, whom it follows and for how long it may. Kept by what the tree
//! reports; nobody in the queue is matched again.

use crate::core::Core;
use crate::request::Request;
use crate::CoreError;
use std::time::Duration;
use strata_sched::{LoadRun, Need, Queue, Standing, Waiting};
use strata_types::{RequestId, TierId, Time};

/// A follower whose wait cannot be reckoned may wait this long without news of its owner.
const UNKNOWN_DEFERRAL: Duration = Duration::from_secs(1);
/// The shortest such wait: below it a busy machine would count as a lost owner.
const SHORTEST_DEFERRAL: Duration = Duration::from_millis(100);
/// Owners that may follow one another, for priorities: longer chains do not inherit to their end.
const LONGEST_CHAIN: usize = 64;

impl Core {
    /// Who waits, in order, as they stood at the last decision.
    pub fn queue(&self) -> &Queue {
        &self.queue
    }

    /// Into the queue: before lower priorities, and before everyone of its own who came later.
    pub(crate) fn enqueue(&mut self, id: RequestId) -> Result<(), CoreError> {
        let Some(request) = self.requests.get_mut(&id) else { return Ok(()) };
        request.follows_since = None;
        self.control.watch(id, &request.namespace, &request.tokens, request.keep)?;
        let (arrived, priority) = (request.arrived, request.priority);
        let standing = self.stand(id)?;
        self.queue.push(self.now, Waiting::new(id, arrived, priority, standing));
        self.inherit(id);
        self.note_held(id);
        Ok(())
    }

    /// Out of the queue.
    pub(crate) fn leave_queue(&mut self, id: RequestId) {
        self.queue.remove(self.now, id);
        self.control.unwatch(id);
        self.early.remove(&id);
    }

    /// Brings up to date those whom something has changed for. Pages that are nobody's any more go to the first who
    /// needs them.
    pub fn refresh_queue(&mut self) -> Result<(), CoreError> {
        loop {
            let mut changed = self.control.take_changed();
            if changed.is_empty() {
                return Ok(());
            }
            changed.retain(|id| self.queue.get(*id).is_some());
            let mut lost = Vec::new();
            for id in &changed {
                let Some(request) = self.requests.get(id).filter(|request| request.keep) else { continue };
                if self.control.standing(*id, self.usable_pages(request))?.unowned > 0 {
                    lost.push(*id);
                }
            }
            self.queue.sort(&mut lost);
            for id in lost {
                self.control.claim_again(id)?;
            }
            for id in changed {
                let standing = self.stand(id)?;
                self.queue.update(id, self.now, standing);
                self.inherit(id);
            }
        }
    }

    /// Where a waiting request stands now.
    fn stand(&mut self, id: RequestId) -> Result<Standing, CoreError> {
        let Some(request) = self.requests.get(&id) else { return Ok(Standing::default()) };
        let found = self.control.standing(id, self.usable_pages(request))?;
        let page_size = self.page_size() as u32;
        let total = request.tokens.len() as u32;
        let mut need = Need {
            device: found.device * page_size,
            host: found.host * page_size,
            disk: found.disk * page_size,
            transient: found.foreign * page_size,
            compute: 0,
        };
        let mut loads: Box<[LoadRun]> = Box::default();
        let pays = || self.loading_pays(found.device..found.device + found.host, found.host);
        if found.host > 0 && (request.loads_failed || !pays()) {
            need.host = 0;
        } else {
            let runs = found.loads.iter();
            loads = runs.map(|(node, pages)| LoadRun { node: *node, tokens: pages * page_size }).collect();
        }
        need.compute = total - (need.device + need.host + need.disk + need.transient).min(total);
        let follows = found.foreign_owner;
        let now = self.now;
        let since = self.requests.get_mut(&id).map(|request| match follows {
            Some(_) => *request.follows_since.get_or_insert(now),
            None => {
                request.follows_since = None;
                now
            }
        });
        let defer_until = follows.map(|owner| self.defer_until(owner, since.unwrap_or(now), &need));
        let pages = total.div_ceil(page_size) - found.device;
        Ok(Standing { need, pages, loads, follows, defer_until })
    }

    /// How long a follower may wait for its owner without news: from when it began to follow, and from each chunk that
    /// the owner publishes, the given multiple of what computing what it waits for would take.
    fn defer_until(&self, owner: RequestId, since: Time, need: &Need) -> Time {
        let context = u64::from(need.device + need.host + need.disk);
        // The owner's next news is a chunk away, however little is left.
        let tokens = need.transient.max(self.limits.batch_tokens);
        let alone = self.costs.compute(u64::from(tokens), context);
        let patience = alone.map_or(UNKNOWN_DEFERRAL, |alone| alone.mul_f64(self.deferral_factor));
        let news = self.requests.get(&owner).and_then(Request::running).map(|running| running.progress);
        news.map_or(since, |news| news.max(since)) + patience.max(SHORTEST_DEFERRAL)
    }

    /// Whom a request follows goes no later than it does.
    fn inherit(&mut self, follower: RequestId) {
        let Some(priority) = self.queue.get(follower).map(|waiting| waiting.priority) else { return };
        let mut next = follower;
        for _ in 0..LONGEST_CHAIN {
            let Some(owner) = self.queue.get(next).and_then(|waiting| waiting.standing.follows) else {
                return;
            };
            if !self.queue.raise_priority(owner, priority) {
                return;
            }
            next = owner;
        }
    }

    /// Tells the queue whether a prefetch holds a request back.
    pub(crate) fn note_held(&mut self, id: RequestId) {
        let Some(request) = self.requests.get(&id) else { return };
        self.queue.set_held(id, request.held_until().is_some());
    }

    /// The request ends or computes no more: what it was to publish goes to the first of those who wait for it.
    pub(crate) fn hand_over(&mut self, id: RequestId) -> Result<(), CoreError> {
        let queue = &self.queue;
        let first = |ids: &[RequestId]| {
            let waiting = ids.iter().copied().filter(|id| queue.get(*id).is_some());
            waiting.reduce(|first, other| if queue.before(other, first) { other } else { first })
        };
        Ok(self.control.give_up_claim(id, first)?)
    }

    /// Starts loads for requests that wait, within the share of the device that they may take.
    pub(crate) fn load_early(&mut self, ids: &[RequestId]) -> Result<(), CoreError> {
        for id in ids {
            let Some(request) = self.requests.get(id) else { continue };
            let usable = self.usable_pages(request);
            let runs = self.control.load_early(&request.namespace, &request.tokens, usable)?;
            let pages = runs.iter().map(|run| run.end - run.start).sum();
            // Marked even where there was no room after all: it is not tried at each decision.
            self.queue.set_early(*id, true);
            if pages > 0 {
                self.early.insert(*id, pages);
                self.stats.early_loads += 1;
            }
            if let Some(request) = self.requests.get_mut(id) {
                request.loaded_early.extend(runs);
            }
        }
        Ok(())
    }

    /// Device pages that early loads may still take.
    pub(crate) fn early_pages(&self) -> u32 {
        let capacity = self.control.capacity(TierId::DEVICE);
        let taken: u32 = self.early.values().sum();
        ((f64::from(capacity) * self.early_share) as u32).saturating_sub(taken)
    }
}
