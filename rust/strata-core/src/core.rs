//! Core's state and its events. Each event leaves actions in the outbox; none waits.

use crate::config::CoreConfig;
use crate::costs::Costs;
use crate::lease::{Ask, Lease};
use crate::maintenance::Maintenance;
use crate::plan::{Action, Plan, Refusal, RefusalKind, RowResult, StepFailure, StepTime};
use crate::prefetch_policy::PrefetchPolicy;
use crate::request::{Ending, NewRequest, Phase, Request};
use crate::stats::CoreStats;
use crate::CoreError;
use std::collections::{BTreeSet, HashMap, HashSet, VecDeque};
use std::time::Duration;
use strata_control::{CacheController, ControlAction, Effect};
use strata_sched::cost::StepShape;
use strata_sched::{Limits, Policy, Queue};
use strata_types::{PlanId, RequestId, TierId, Time, TransferCompletion, TransferError, TransferId};

/// How long the next to go waits for room while nothing runs and no transfer ends, before it is refused.
pub(crate) const BLOCKED: Duration = Duration::from_secs(30);

/// The one writer: tree, controller and scheduler of one engine.
pub struct Core {
    pub(crate) control: CacheController,
    pub(crate) policy: Box<dyn Policy>,
    pub(crate) limits: Limits,
    pub(crate) outstanding_plans: usize,
    max_waiting: usize,
    pub(crate) prefetch_policy: Box<dyn PrefetchPolicy>,
    pub(crate) prefetch_share: f64,
    pub(crate) costs: Costs,
    pub(crate) always_loads: bool,
    pub(crate) now: Time,
    pub(crate) requests: HashMap<RequestId, Request>,
    /// Waiting requests, in the order in which they go.
    pub(crate) queue: Queue,
    /// Requests that have a prefetch.
    pub(crate) prefetching: BTreeSet<RequestId>,
    /// Waiting requests whose load was begun, with the device pages that it takes.
    pub(crate) early: HashMap<RequestId, u32>,
    pub(crate) early_share: f64,
    pub(crate) deferral_factor: f64,
    /// When the first of those deferred may go on its own.
    pub(crate) deferred_until: Option<Time>,
    /// What the prefill steps planned since the last decode step will take.
    pub(crate) decode_gap: Duration,
    /// Running requests, in order of admission.
    pub(crate) running: Vec<RequestId>,
    /// Outstanding plans, the oldest first.
    pub(crate) plans: VecDeque<Plan>,
    /// When the oldest of them could begin.
    pub(crate) front_since: Time,
    pub(crate) next_plan: u64,
    pub(crate) epoch: u64,
    /// Someone could not grow: no new plan until the outstanding ones are done and pages were freed.
    pub(crate) short_of_pages: bool,
    /// A request gave back what it held.
    pub(crate) gave_back: bool,
    /// Since when nothing has run or moved although somebody could go.
    pub(crate) blocked: Option<Time>,
    /// Requests that may need pages from disk.
    pub(crate) to_prefetch: HashSet<RequestId>,
    pub(crate) maintenance: VecDeque<Maintenance>,
    /// What engines hold that schedule for themselves, and what they wait for.
    pub(crate) leases: HashMap<RequestId, Lease>,
    pub(crate) asks: VecDeque<Ask>,
    /// The cache is being closed: nobody comes to wait any more.
    pub(crate) refuses_asks: bool,
    pub(crate) next_lease: u64,
    pub(crate) outbox: VecDeque<Action>,
    pub(crate) stats: CoreStats,
}

impl Core {
    /// A Core with an empty cache.
    pub fn new(config: CoreConfig) -> Result<Core, CoreError> {
        Ok(Core {
            control: CacheController::new(config.control)?,
            queue: Queue::new(config.policy.deferral_threshold()),
            policy: config.policy,
            limits: config.limits,
            outstanding_plans: config.outstanding_plans.clamp(1, 2),
            max_waiting: config.max_waiting,
            prefetch_policy: config.prefetch_policy,
            prefetch_share: config.prefetch_share.clamp(0.0, 1.0),
            costs: Costs::new(config.costs, config.limits.batch_tokens),
            always_loads: config.always_loads,
            now: Time::default(),
            requests: HashMap::new(),
            prefetching: BTreeSet::new(),
            early: HashMap::new(),
            early_share: config.early_share.clamp(0.0, 1.0),
            deferral_factor: config.deferral_factor.max(0.0),
            deferred_until: None,
            decode_gap: Duration::ZERO,
            running: Vec::new(),
            plans: VecDeque::new(),
            front_since: Time::default(),
            next_plan: 0,
            epoch: 0,
            short_of_pages: false,
            gave_back: false,
            blocked: None,
            to_prefetch: HashSet::new(),
            maintenance: VecDeque::new(),
            leases: HashMap::new(),
            asks: VecDeque::new(),
            refuses_asks: false,
            next_lease: 0,
            outbox: VecDeque::new(),
            stats: CoreStats::default(),
        })
    }

    /// What has to be done outside, in order.
    pub fn take_actions(&mut self) -> VecDeque<Action> {
        self.collect_control();
        std::mem::take(&mut self.outbox)
    }

    pub(crate) fn collect_control(&mut self) {
        for action in self.control.take_actions() {
            if let ControlAction::Submit(transfer) = &action {
                self.costs.started(transfer.kind, self.now);
            }
            self.outbox.push_back(Action::Control(action));
        }
    }

    /// Every event begins with the time.
    pub(crate) fn at(&mut self, now: Time) {
        self.now = self.now.max(now);
        self.control.advance(now);
    }

    pub(crate) fn page_size(&self) -> usize {
        self.control.config().page_size as usize
    }

    /// A request came in.
    pub fn arrived(&mut self, now: Time, new: NewRequest) -> Result<(), CoreError> {
        self.at(now);
        if let Some(refusal) = self.refusal(&new) {
            self.stats.refused += 1;
            self.outbox.push_back(Action::Refuse(refusal));
            return Ok(());
        }
        let id = new.id;
        self.requests.insert(id, Request::new(new, now));
        self.enqueue(id)?;
        self.to_prefetch.insert(id);
        Ok(())
    }

    fn refusal(&self, new: &NewRequest) -> Option<Refusal> {
        let refuse = |kind, reason| Some(Refusal { request: new.id, kind, reason });
        if new.prompt.is_empty() || new.max_new_tokens == 0 {
            return refuse(
                RefusalKind::Invalid,
                "a request needs a prompt token and a token to generate".into(),
            );
        }
        if self.requests.contains_key(&new.id) || self.leases.contains_key(&new.id) {
            return refuse(RefusalKind::Invalid, format!("request {} exists already", new.id));
        }
        if let Some(reason) = self.unfit(new.prompt.len(), new.max_new_tokens) {
            return refuse(RefusalKind::Invalid, reason);
        }
        // Counted together: a burst arrives before any of it can have been admitted.
        let most = self.max_waiting + self.limits.max_running as usize;
        if self.requests.len() >= most {
            let reason = format!(
                "{} requests run or wait already (--max-running + --max-waiting = {most}): try again later",
                self.requests.len()
            );
            return refuse(RefusalKind::Busy, reason);
        }
        None
    }

    /// Why a request can never fit the device, if so. The last token generated is never computed from, so it needs no
    /// place.
    fn unfit(&self, prompt: usize, max_new_tokens: usize) -> Option<String> {
        let places = prompt + max_new_tokens - 1;
        let room = self.control.capacity(TierId::DEVICE) as usize * self.page_size();
        (places.div_ceil(self.page_size()) * self.page_size() > room).then(|| {
            format!(
                "{places} tokens (prompt {prompt} + {max_new_tokens} to generate) can never fit the device pool of \
                 {room} tokens: ask for fewer or raise --device-memory"
            )
        })
    }

    /// Refuses those who wait and, now that the device has shrunk, can never fit. Who runs may go on.
    pub(crate) fn refuse_unfit(&mut self) -> Result<(), CoreError> {
        for id in self.in_queue(|_| true) {
            self.refuse_if_unfit(id)?;
        }
        Ok(())
    }

    /// Those in the queue whose request is like this, in order.
    pub(crate) fn in_queue(&self, like: impl Fn(&Request) -> bool) -> Vec<RequestId> {
        let ids = self.queue.iter().map(|waiting| waiting.id);
        ids.filter(|id| self.requests.get(id).is_some_and(&like)).collect()
    }

    /// As `refuse_unfit`, for one who waits.
    pub(crate) fn refuse_if_unfit(&mut self, id: RequestId) -> Result<(), CoreError> {
        let Some(request) = self.requests.get(&id) else { return Ok(()) };
        match self.unfit(request.prompt, request.max_new_tokens) {
            Some(reason) => self.give_up(id, RefusalKind::Invalid, reason),
            None => Ok(()),
        }
    }

    /// Pages of a hit that are of use: the last token is always computed, for its logits.
    pub(crate) fn usable_pages(&self, request: &Request) -> u32 {
        ((request.tokens.len() - 1) / self.page_size()) as u32
    }

    /// The client is gone. What no plan uses is given back now, the rest when the plan is done.
    pub fn aborted(&mut self, now: Time, id: RequestId) -> Result<(), CoreError> {
        self.at(now);
        let Some(request) = self.requests.get_mut(&id) else { return Ok(()) };
        if request.ending != Some(Ending::Finished) {
            request.ending = Some(Ending::Aborted);
        }
        self.end_if_free(id)
    }

    /// The engine carried out the oldest outstanding plan; one result per row.
    pub fn plan_done(
        &mut self,
        now: Time,
        id: PlanId,
        results: &[RowResult],
        time: StepTime,
    ) -> Result<(), CoreError> {
        self.at(now);
        let Some(plan) = self.take_front(id)? else { return Ok(()) };
        if results.len() != plan.rows.len() {
            let counts = format!("plan {id} has {} rows, {} results came", plan.rows.len(), results.len());
            return Err(CoreError::Protocol(counts));
        }
        self.costs.computed(&plan.rows, time.busy);
        self.stats.load_stall += time.stalled;
        for (row, result) in plan.rows.iter().zip(results) {
            self.row_done(row.request, row.start + row.length, row.sample, *result)?;
            self.end_if_free(row.request)?;
        }
        Ok(())
    }

    /// The oldest outstanding plan, if this is it. None for a plan that was discarded with a failed one: nobody
    /// waits for its results.
    fn take_front(&mut self, id: PlanId) -> Result<Option<Plan>, CoreError> {
        if self.plans.front().is_some_and(|plan| plan.id == id) {
            self.front_since = self.now;
            return Ok(self.plans.pop_front());
        }
        if id.0 >= self.next_plan {
            return Err(CoreError::Protocol(format!("plan {id} was never handed out")));
        }
        Ok(None)
    }

    /// The oldest outstanding plan failed. It and every plan after it are void: nothing that they wrote is
    /// committed, and their requests go back to the front of the queue.
    pub fn plan_failed(&mut self, now: Time, id: PlanId, why: StepFailure) -> Result<(), CoreError> {
        self.at(now);
        let Some(failed) = self.take_front(id)? else { return Ok(()) };
        for row in &failed.rows {
            let Some(request) = self.requests.get_mut(&row.request) else { continue };
            match why {
                StepFailure::Step if failed.rows.len() > 1 => request.alone = true,
                StepFailure::Step => request.step_failures += 1,
                // The engine may report before the Mover does; the Mover then finds the request gone.
                StepFailure::Load => request.loads_failed |= request.load_has_failed(),
                // Loading again would be late again: without this a slow link could hold a request for ever.
                StepFailure::LateLoad => request.loads_failed |= request.is_loading(),
            }
        }
        self.epoch += 1;
        let mut plans = std::mem::take(&mut self.plans);
        plans.push_front(failed);
        self.stats.plans_discarded += plans.len() as u64;
        let mut touched: Vec<RequestId> = Vec::new();
        for row in plans.iter().flat_map(|plan| &plan.rows) {
            let Some(request) = self.requests.get_mut(&row.request) else { continue };
            request.ending.get_or_insert(Ending::Requeue);
            if let Some(running) = request.running_mut() {
                running.outstanding = 0;
                running.samples_due = 0;
            }
            if !touched.contains(&row.request) {
                touched.push(row.request);
            }
        }
        for request in touched {
            self.end_if_free(request)?;
        }
        Ok(())
    }

    /// A step of so many tokens of one request, after so many before them, took this long outside any plan.
    pub fn measured(&mut self, tokens: usize, context: usize, busy: Duration) {
        self.costs.measured(&StepShape::row(tokens as u64, context as u64), busy);
    }

    /// A Mover has finished with a transfer.
    pub fn transfer_done(&mut self, now: Time, completion: TransferCompletion) -> Result<(), CoreError> {
        self.at(now);
        self.blocked = None;
        if let Some(kind) = self.control.kind_of(completion.id) {
            self.costs.ended(kind, completion.bytes, self.now);
        }
        self.control.completed(completion)?;
        self.apply()
    }

    /// Loads that are not over fail: nobody will hear how they end.
    pub fn fail_loads(&self) {
        self.control.fail_loads();
    }

    /// No Mover takes this transfer.
    pub fn transfer_rejected(
        &mut self,
        now: Time,
        id: TransferId,
        error: TransferError,
    ) -> Result<(), CoreError> {
        self.at(now);
        if let Some(kind) = self.control.kind_of(id) {
            self.costs.ended(kind, 0, self.now);
        }
        self.control.rejected(id, error)?;
        self.apply()
    }

    /// Tells requests what became of transfers.
    pub(crate) fn apply(&mut self) -> Result<(), CoreError> {
        for effect in self.control.take_effects() {
            match effect {
                Effect::Loaded { transfer, users, duplicates } => {
                    for id in users {
                        self.lease_loaded(id, transfer, &duplicates);
                        let request = self.requests.get_mut(&id);
                        if let Some(running) = request.and_then(Request::running_mut) {
                            running.loads.retain(|load| *load != transfer);
                            running.tickets.retain(|ticket| !ticket.is_complete());
                            running.duplicates.extend(&duplicates);
                        }
                    }
                }
                Effect::LoadFailed { transfer, users } => {
                    for id in in_order(users) {
                        self.lease_load_failed(id, transfer);
                        let Some(request) = self.requests.get_mut(&id) else { continue };
                        request.loads_failed = true;
                        request.ending.get_or_insert(Ending::Requeue);
                        if let Some(running) = request.running_mut() {
                            running.loads.retain(|load| *load != transfer);
                        }
                        self.end_if_free(id)?;
                    }
                }
                Effect::Prefetched { transfer, users } => self.prefetched(transfer, users)?,
            }
        }
        Ok(())
    }

    /// Time has passed, or events came: cuts what is past its deadline, goes on with maintenance, forms plans.
    pub fn tick(&mut self, now: Time) -> Result<(), CoreError> {
        self.at(now);
        self.cut_late_prefetches()?;
        self.pump_prefetches()?;
        self.control.keep_shrinking()?;
        self.gave_back = false;
        loop {
            self.maintain(now)?;
            self.apply()?;
            self.answer_leases()?;
            self.form_plans(now)?;
            // Forming plans may end somebody's wait, or preempt somebody whose pages a resize or a lease waits for: that
            // is news for the next plan. Each prefetch ends but once.
            let wanted = !self.maintenance.is_empty() || !self.asks.is_empty();
            let goes_on = std::mem::take(&mut self.gave_back) && wanted;
            if !goes_on && !self.control.has_effects() {
                // Staging may have been full of pages of a host tier that is gone.
                return Ok(self.control.pump_relays()?);
            }
        }
    }

    /// When `tick` has to be called next, if nothing happens before.
    pub fn next_deadline(&self) -> Option<Time> {
        let holds = self.prefetching.iter().filter_map(|id| self.requests.get(id)?.held_until());
        let maintenance = self.maintenance.iter().map(|work| work.deadline);
        let blocked = self.blocked.map(|since| since + BLOCKED);
        // Once it has passed, the next decision knows.
        let deferred = self.deferred_until.filter(|until| *until > self.now);
        let leases = self.next_lease_deadline();
        let waits = holds.chain(maintenance).chain(blocked).chain(deferred).chain(leases);
        waits.chain(self.control.next_deadline()).min()
    }

    /// Whether nobody waits, runs or holds a lease, and nothing moves.
    pub fn is_idle(&self) -> bool {
        let nobody = self.requests.is_empty() && self.leases.is_empty();
        nobody && self.plans.is_empty() && self.control.transfers_in_flight() == 0
    }

    /// Proves that tree, pools and requests agree; when idle, that nothing is pinned or reserved.
    pub fn check(&self) -> Result<(), CoreError> {
        self.control.check(self.is_idle())?;
        let queued = self.in_queue(|request| matches!(request.phase, Phase::Waiting)).len();
        if queued != self.queue.len() || queued + self.running.len() != self.requests.len() {
            let counts = (self.queue.len(), self.running.len(), self.requests.len());
            return Err(CoreError::Protocol(format!("queue, running and all requests disagree: {counts:?}")));
        }
        let watchers = self.control.watchers();
        if watchers != self.queue.len() || self.early.keys().any(|id| self.queue.get(*id).is_none()) {
            let counts = (watchers, self.queue.len(), self.early.len());
            return Err(CoreError::Protocol(format!("watchers, queue and early loads disagree: {counts:?}")));
        }
        for id in &self.running {
            if !self.requests.get(id).is_some_and(|request| matches!(request.phase, Phase::Running(_))) {
                return Err(CoreError::Protocol(format!("request {id} is listed as running and is not")));
            }
        }
        Ok(())
    }

    /// The counters and gauges.
    pub fn stats(&self) -> CoreStats {
        let mut stats = self.stats.clone();
        stats.waiting = self.queue.len();
        stats.held = self.queue.iter().filter(|waiting| waiting.held).count();
        (stats.deferrals, stats.deferral) = (self.queue.deferrals, self.queue.deferral);
        stats.running = self.running.len();
        stats.costs = Some(self.costs.report());
        stats.control = self.control.stats().clone();
        stats.tiers = [TierId::DEVICE, TierId::HOST, TierId::DISK].map(|tier| self.control.tier_stats(tier));
        stats.transfers_in_flight = self.control.transfers_in_flight();
        stats
    }
}

/// Sets have an order of their own in each process; what is done must not depend on it.
pub(crate) fn in_order<T: Ord>(set: impl IntoIterator<Item = T>) -> BTreeSet<T> {
    set.into_iter().collect()
}
