//! From the queue into the running set: claim what is cached, reserve the rest, account for where it came from.

use crate::core::{Core, BLOCKED};
use crate::plan::RefusalKind;
use crate::prefetch::count_recomputed;
use crate::request::{Admission, Phase, Request, Running, Sources};
use crate::CoreError;
use std::ops::Range;
use strata_control::PageSource;
use strata_radix::MatchResult;
use strata_types::{RequestId, TierId};

impl Core {
    /// Gives a waiting request its pages. False if the device has no room now; then nothing has changed.
    pub(crate) fn admit(&mut self, id: RequestId) -> Result<bool, CoreError> {
        let page_size = self.page_size();
        let Some(request) = self.requests.get(&id) else { return Ok(false) };
        let usable = self.usable_pages(request);
        let total = request.tokens.len().div_ceil(page_size) as u32;
        let tokens = &request.tokens;
        let found = self.control.lookup(&request.namespace, &tokens[..usable as usize * page_size])?;
        let (pages, loads) = to_load(&found);
        let allow_loads = !request.loads_failed && self.loading_pays(pages, loads);
        let headroom = self.running.len() as u32;
        let takes_over = self.takes_over(id);
        let admitted =
            self.control.admit(id, &request.namespace, tokens, usable, total, allow_loads, headroom)?;
        let Some(admitted) = admitted else { return Ok(false) };
        if takes_over {
            self.control.take_over(id)?;
        }
        let Some(request) = self.requests.get_mut(&id) else { return Ok(false) };
        let sources = sources(request, &admitted.sources, page_size);
        let hit = admitted.sources.len();
        count_recomputed(&mut self.stats.recomputed_tokens, &found, hit, page_size);
        let pages_to_load = self.control.pages_loading(&admitted.loads);
        request.phase = Phase::Running(Box::new(Running {
            pin: admitted.pin,
            pages: admitted.pages,
            published: hit as u32,
            duplicates: Vec::new(),
            loads: admitted.loads,
            tickets: admitted.tickets,
            pages_to_load,
            planned: hit * page_size,
            computed: hit * page_size,
            samples_due: 0,
            outstanding: 0,
            admission: Some(Admission { sources, preemptions: request.preemptions }),
            since: self.now,
            progress: self.now,
        }));
        if !request.sources_told {
            request.sources_told = true;
            let counts = [sources.device, sources.host, sources.disk, sources.computed];
            for (total, count) in self.stats.prompt_tokens.iter_mut().zip(counts) {
                *total += count as u64;
            }
        }
        self.stats.admissions += 1;
        self.leave_queue(id);
        self.running.push(id);
        self.end_prefetch(id)?;
        Ok(true)
    }

    /// Tries again where nobody runs: what keeps a request out then are the prefetches of others who wait, whose pages
    /// must not lose the pages before them, and without a host tier its own, which lands where it needs room itself.
    pub(crate) fn admit_alone(&mut self, id: RequestId) -> Result<bool, CoreError> {
        let own = (!self.control.is_staged()).then_some(id);
        Ok(self.running.is_empty() && self.end_prefetches(None, own)? && self.admit(id)?)
    }

    /// Whether a waiting request goes although others were to compute a part of its prompt: it does so itself.
    fn takes_over(&self, id: RequestId) -> bool {
        let transient = self.queue.get(id).map_or(0, |waiting| waiting.standing.need.transient);
        self.policy.deferral_threshold().is_some_and(|most| transient > most)
    }

    /// Ends the prefetches of all but one who wait, those before `from` left out; they may begin again later. What has
    /// arrived stays cached. False if there are none.
    pub(crate) fn end_prefetches(
        &mut self,
        from: Option<RequestId>,
        but: Option<RequestId>,
    ) -> Result<bool, CoreError> {
        let concerned =
            |id: &RequestId| Some(*id) != but && !from.is_some_and(|from| self.queue.before(*id, from));
        let ended: Vec<RequestId> = self.prefetching.iter().copied().filter(concerned).collect();
        for id in &ended {
            self.end_prefetch(*id)?;
            self.to_prefetch.insert(*id);
        }
        Ok(!ended.is_empty())
    }

    /// The first who could go now.
    fn next_to_go(&self) -> Option<RequestId> {
        self.queue.iter().find(|waiting| !waiting.held).map(|waiting| waiting.id)
    }

    /// Nothing runs, and the policy finds room for nobody: without a host tier, what the next to go and those behind it
    /// have prefetched lies on the device and is in the way. False if there was nothing to let go of.
    pub(crate) fn make_way(&mut self) -> Result<bool, CoreError> {
        let idle = self.running.is_empty() && self.plans.is_empty();
        match self.next_to_go().filter(|_| idle && self.control.is_staged()) {
            Some(next) => self.end_prefetches(Some(next), None),
            None => Ok(false),
        }
    }

    /// Refuses the next to go when it has waited long enough for room that nobody who runs has: a transfer that never
    /// ends keeps it, and everyone behind would wait for ever too. True if somebody was refused.
    pub(crate) fn refuse_blocked(&mut self) -> Result<bool, CoreError> {
        let idle = self.running.is_empty() && self.plans.is_empty();
        let Some(id) = self.next_to_go().filter(|_| idle) else {
            self.blocked = None;
            return Ok(false);
        };
        let since = *self.blocked.get_or_insert(self.now);
        if self.now.since(since) < BLOCKED {
            return Ok(false);
        }
        self.blocked = None;
        let device = self.control.tier_stats(TierId::DEVICE);
        let reason = format!(
            "no room on the device for {} s although nothing runs: {} of its {} pages are kept by transfers that do \
             not end (does the disk hang?): try again later",
            BLOCKED.as_secs(),
            device.capacity.saturating_sub(self.control.available(TierId::DEVICE)),
            device.capacity
        );
        self.give_up(id, RefusalKind::Busy, reason)?;
        Ok(true)
    }
}

/// The pages of a hit from the first that has to be loaded to the end, and how many of them have to be loaded.
fn to_load(found: &MatchResult) -> (Range<u32>, u32) {
    let on_device = |page: &u32| found.slot(TierId::DEVICE, *page).is_some();
    let hit = (0..found.pages)
        .take_while(|page| on_device(page) || found.slot(TierId::HOST, *page).is_some())
        .count() as u32;
    let first = (0..hit).find(|page| !on_device(page)).unwrap_or(hit);
    (first..hit, (first..hit).filter(|page| !on_device(page)).count() as u32)
}

/// Where the prompt's tokens came from. After a preemption the hit may reach past the prompt: that part is not its.
fn sources(request: &Request, hit: &[PageSource], page_size: usize) -> Sources {
    let mut sources = Sources::default();
    let loaded_early = |page: u32| request.loaded_early.iter().any(|run| run.contains(&page));
    let mut left = request.prompt;
    for (page, source) in hit.iter().enumerate() {
        let tokens = page_size.min(left);
        left -= tokens;
        match source {
            _ if request.from_disk.contains(&(page as u32)) => sources.disk += tokens,
            PageSource::Device if !loaded_early(page as u32) => sources.device += tokens,
            PageSource::Device | PageSource::Host => sources.host += tokens,
        }
    }
    sources.computed = left;
    sources
}
