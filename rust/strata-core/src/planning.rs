//! Plans: the policy's decision becomes rows with tokens, positions and page tables. Up to `outstanding_plans`
//! are formed ahead; a row may need the token that the plan before it samples.

use crate::core::Core;
use crate::loads_in_order::LoadsInOrder;
use crate::plan::{Action, Plan, PlanKind, PlanRow, RowResult};
use crate::request::{Ending, Phase};
use crate::stats::WaitingReport;
use crate::CoreError;
use std::time::Duration;
use strata_sched::{Admission, Chunk, Decision, Policy, Prefilling, Prices, Step, StepShape, View, Why};
use strata_types::{PlanId, RequestId, TicketState, TierId, Time};

/// Waiting requests whose pages are looked after before their turn comes.
const NEXT_FEW: usize = 4;

impl Core {
    /// Forms plans until enough are outstanding or nothing can be done.
    pub(crate) fn form_plans(&mut self, now: Time) -> Result<(), CoreError> {
        self.form_possible_plans(now)?;
        while self.refuse_blocked()? {
            self.form_possible_plans(now)?;
        }
        Ok(())
    }

    fn form_possible_plans(&mut self, now: Time) -> Result<(), CoreError> {
        while self.plans.len() < self.outstanding_plans {
            if self.short_of_pages {
                if !self.plans.is_empty() {
                    return Ok(());
                }
                self.short_of_pages = !self.make_room()?;
            }
            let decision = self.decide(now)?;
            let (kind, rows) = match decision.step {
                Step::Idle if self.make_way()? => continue,
                Step::Idle => return Ok(()),
                Step::Prefill(chunks) => {
                    let rows = self.prefill_rows(&chunks, &decision.admissions)?;
                    if rows.is_empty() {
                        // No admission could be carried out: running requests go on meanwhile.
                        (PlanKind::Decode, self.decode_rows(&self.decodable())?)
                    } else {
                        (PlanKind::Prefill, rows)
                    }
                }
                Step::Decode(ids) => {
                    self.admit_to_load(&decision.admissions)?;
                    (PlanKind::Decode, self.decode_rows(&ids)?)
                }
            };
            self.load_early(&decision.early)?;
            if rows.is_empty() {
                let waits = self.control.making_room(TierId::DEVICE);
                if self.short_of_pages && self.plans.is_empty() && !waits {
                    continue;
                }
                return Ok(());
            }
            self.hand_out(kind, rows);
        }
        Ok(())
    }

    /// The decision that the next plan would be formed by, not carried out: for measurements.
    pub fn next_decision(&mut self, now: Time) -> Result<Decision, CoreError> {
        self.decide(now)
    }

    fn decide(&mut self, now: Time) -> Result<Decision, CoreError> {
        self.refresh_queue()?;
        // Pages of the next few may have sunk to disk while they waited.
        let next = self.queue.iter().take(NEXT_FEW);
        let sunk = next.filter(|waiting| waiting.standing.need.disk > 0 && !waiting.held);
        self.to_prefetch.extend(sunk.map(|waiting| waiting.id));
        self.pump_prefetches()?;
        let decision = self.with_view(now, |policy, view| policy.decide(view));
        self.stats.rounds.add(&decision.counts);
        self.deferred_until = decision.next_deadline;
        Ok(decision)
    }

    /// Why each waiting request waits, in the order of the queue.
    pub fn explain(&mut self, now: Time) -> Result<Vec<WaitingReport>, CoreError> {
        self.refresh_queue()?;
        let reasons = self.with_view(now, |policy, view| policy.explain(view));
        let report = |(request, why): (RequestId, Why)| {
            let waited = self.queue.get(request).map(|waiting| now.since(waiting.arrived));
            WaitingReport { request, waited: waited.unwrap_or_default(), why }
        };
        Ok(reasons.into_iter().map(report).collect())
    }

    fn with_view<T>(&mut self, now: Time, ask: impl FnOnce(&mut dyn Policy, &View<'_>) -> T) -> T {
        let (prefilling, before) = self.still_loading();
        let decodable = self.decodable();
        let mut next_step = StepShape::default();
        for request in decodable.iter().filter_map(|id| self.requests.get(id)) {
            next_step.add(StepShape::row(1, request.tokens.len() as u64));
        }
        let page_size = self.page_size() as u32;
        let mut prices = self.costs.prices(self.bytes_per_token(), &next_step);
        prices.head_start = self.head_start(&prices, before);
        let view = View {
            now,
            waiting: &self.queue,
            prefilling: &prefilling,
            decodable: &decodable,
            running: self.running.len() as u32,
            available_pages: self.control.available(TierId::DEVICE),
            early_pages: self.early_pages(),
            page_size,
            decode_gap: self.decode_gap,
            prices,
            limits: self.limits,
        };
        ask(self.policy.as_mut(), &view)
    }

    /// Seconds for which a load that begins now is hidden before a plan that is formed now can begin. `before` is what
    /// the link still carries for the plans before.
    fn head_start(&self, prices: &Prices, before: u32) -> f64 {
        let mut plans = self.plans.iter().map(|plan| self.predicted(&plan.rows));
        let Some(front) = plans.next() else { return 0.0 };
        let ahead = front.saturating_sub(self.now.since(self.front_since)) + plans.sum::<Duration>();
        // One link: what is on its way for the plans before comes first.
        let busy = prices.load_seconds(f64::from(before)).unwrap_or_default();
        (ahead.as_secs_f64() - busy).max(0.0)
    }

    fn bytes_per_token(&self) -> u64 {
        self.control.config().page_bytes / self.page_size() as u64
    }

    /// Requests with prompt left to compute, and the tokens on their way for those with none.
    fn still_loading(&self) -> (Vec<Prefilling>, u32) {
        let price = self.costs.load_price(self.bytes_per_token());
        let mut link = LoadsInOrder::new(self.now, price);
        let (mut prefilling, mut others) = (Vec::new(), 0);
        // In order of admission, in which their loads began.
        for request in self.running.iter().filter_map(|id| self.requests.get(id)) {
            let Some(running) = request.running() else { continue };
            let page_size = self.page_size() as u32;
            let unreported = self.control.pages_loading(&running.loads) * page_size;
            // A load that several wait for is counted for each of them. Counted once, LooGLE's peak was 2 % lower, with each
            // document's questions far apart 3 %: of the loads that one link brings one after another a step hides only
            // the last layer by layer, so a batch hides less than the balance takes it to.
            let loading = link.rest(running.since, running.pages_to_load * page_size, unreported);
            if request.prefilling() {
                prefilling.push(Prefilling {
                    id: request.id,
                    remaining: request.prefill_left() as u32,
                    context: running.planned as u32,
                    loading,
                    since: running.since,
                });
            } else {
                others += loading;
            }
        }
        (prefilling, others)
    }

    fn decodable(&self) -> Vec<RequestId> {
        let running = self.running.iter().filter_map(|id| self.requests.get(id));
        running.filter(|request| request.decodable()).map(|request| request.id).collect()
    }

    /// Gives requests their pages and starts their loads; they compute later.
    fn admit_to_load(&mut self, admissions: &[Admission]) -> Result<(), CoreError> {
        for admission in admissions {
            if !self.admit(admission.id)? {
                break;
            }
        }
        Ok(())
    }

    fn prefill_rows(
        &mut self,
        chunks: &[Chunk],
        admissions: &[Admission],
    ) -> Result<Vec<PlanRow>, CoreError> {
        let mut rows = Vec::new();
        let mut budget = self.limits.batch_tokens as usize;
        for chunk in chunks {
            if !self.may_join(&rows, chunk.id) {
                return Ok(rows);
            }
            rows.extend(self.chunk_row(chunk.id, budget.min(chunk.tokens as usize)));
            budget -= rows.last().map_or(0, |row: &PlanRow| row.length).min(budget);
        }
        for admission in admissions {
            if budget == 0 || !self.may_join(&rows, admission.id) {
                break;
            }
            if !self.admit(admission.id)? && !self.admit_alone(admission.id)? {
                break;
            }
            if admission.tokens == 0 {
                continue;
            }
            let row = self.chunk_row(admission.id, budget.min(admission.tokens as usize));
            budget -= row.as_ref().map_or(0, |row| row.length);
            rows.extend(row);
        }
        Ok(rows)
    }

    /// Whether a request may share a plan with these rows: one that runs alone shares with nobody.
    fn may_join(&self, rows: &[PlanRow], id: RequestId) -> bool {
        let alone = |id: &RequestId| self.requests.get(id).is_some_and(|request| request.alone);
        rows.first().is_none_or(|row| !alone(&row.request) && !alone(&id))
    }

    /// The next part of an admitted request's prompt. Its pages were reserved at admission.
    fn chunk_row(&mut self, id: RequestId, budget: usize) -> Option<PlanRow> {
        let page_size = self.page_size();
        let request = self.requests.get_mut(&id)?;
        let known = request.tokens.len();
        let running = request.running_mut()?;
        let start = running.planned;
        let length = (known - start).min(budget);
        if length == 0 {
            return None;
        }
        let end = start + length;
        self.control.begin_claimed(id);
        running.planned = end;
        running.outstanding += 1;
        let sample = end == known;
        running.samples_due += usize::from(sample);
        let pages = running.pages[..end.div_ceil(page_size)].to_vec();
        let admitted = running.admission.take();
        let tokens = request.tokens[start..end].to_vec();
        Some(PlanRow { request: id, start, tokens, length, pages, sample, admitted })
    }

    fn decode_rows(&mut self, ids: &[RequestId]) -> Result<Vec<PlanRow>, CoreError> {
        let mut rows = Vec::new();
        let suspect = ids.iter().find(|id| self.requests.get(id).is_some_and(|request| request.alone));
        for id in suspect.map_or(ids, std::slice::from_ref) {
            match self.decode_row(*id)? {
                Some(row) => rows.push(row),
                None => self.short_of_pages = true,
            }
        }
        Ok(rows)
    }

    /// One more token of a request. None if it needs a page and there is none.
    fn decode_row(&mut self, id: RequestId) -> Result<Option<PlanRow>, CoreError> {
        let page_size = self.page_size();
        let Some(request) = self.requests.get_mut(&id) else { return Ok(None) };
        let known = request.tokens.len();
        let Some(running) = request.running_mut() else { return Ok(None) };
        let start = running.planned;
        if start >= running.pages.len() * page_size && !self.control.reserve_device(1, &mut running.pages)? {
            return Ok(None);
        }
        running.planned += 1;
        running.outstanding += 1;
        running.samples_due += 1;
        let pages = running.pages[..(start + 1).div_ceil(page_size)].to_vec();
        let admitted = running.admission.take();
        let tokens = request.tokens.get(start..known).map(<[_]>::to_vec).unwrap_or_default();
        Ok(Some(PlanRow { request: id, start, tokens, length: 1, pages, sample: true, admitted }))
    }

    fn hand_out(&mut self, kind: PlanKind, rows: Vec<PlanRow>) {
        let mut tickets = Vec::new();
        for row in &rows {
            let running = self.requests.get(&row.request).and_then(|request| request.running());
            tickets.extend(
                running
                    .into_iter()
                    .flat_map(|running| running.tickets.iter().cloned())
                    .filter(|ticket| ticket.state() != TicketState::Ready(ticket.layers())),
            );
        }
        self.decode_gap = match kind {
            PlanKind::Decode => Duration::ZERO,
            PlanKind::Prefill => self.decode_gap + self.predicted(&rows),
        };
        let plan = Plan { id: PlanId(self.next_plan), epoch: self.epoch, kind, rows, tickets };
        self.next_plan += 1;
        self.stats.plans += 1;
        if self.plans.is_empty() {
            self.front_since = self.now;
        }
        self.plans.push_back(plan.clone());
        // Loads were decided before this plan and must be under way when the engine waits for them.
        self.collect_control();
        self.outbox.push_back(Action::Plan(plan));
    }

    /// How long computing these rows will take, as far as that is known.
    fn predicted(&self, rows: &[PlanRow]) -> Duration {
        let mut shape = StepShape::default();
        for row in rows {
            shape.add(StepShape::row(row.length as u64, row.start as u64));
        }
        self.costs.step(&shape).unwrap_or_default()
    }

    /// A row of a plan has been computed up to `end`.
    pub(crate) fn row_done(
        &mut self,
        id: RequestId,
        end: usize,
        sample: bool,
        result: RowResult,
    ) -> Result<(), CoreError> {
        let Some(request) = self.requests.get_mut(&id) else { return Ok(()) };
        let finished_before = request.ending == Some(Ending::Finished);
        let Some(running) = request.running_mut() else { return Ok(()) };
        running.outstanding -= 1;
        running.samples_due -= usize::from(sample);
        if finished_before {
            // Planned before the end was known: whatever it sampled is past the end.
            return Ok(());
        }
        running.computed = running.computed.max(end);
        if sample && request.ending.is_none() {
            let Some(token) = result.token else {
                return Err(CoreError::Protocol(format!("no token came back for request {id}")));
            };
            request.tokens.push(token);
            (request.alone, request.step_failures) = (false, 0);
            self.stats.generated_tokens += 1;
            if result.finished || request.tokens.len() - request.prompt >= request.max_new_tokens {
                request.ending = Some(Ending::Finished);
            }
        }
        self.publish(id)
    }

    /// Makes the whole pages that were computed since the last time match.
    fn publish(&mut self, id: RequestId) -> Result<(), CoreError> {
        let page_size = self.page_size();
        let Some(request) = self.requests.get_mut(&id) else { return Ok(()) };
        let Some(running) = request.running() else { return Ok(()) };
        // An aborted request's last samples were not taken in: its KV may reach past the tokens known here.
        let known = running.computed.min(request.tokens.len());
        let (from, whole) = (running.published, (known / page_size) as u32);
        if whole <= from || !request.keep {
            return Ok(());
        }
        let namespace = request.namespace;
        let tokens = &request.tokens[..whole as usize * page_size];
        let Phase::Running(running) = &mut request.phase else { return Ok(()) };
        let slots = &running.pages[from as usize..whole as usize];
        let duplicates = self.control.publish(&mut running.pin, &namespace, tokens, from, slots)?;
        running.published = whole;
        running.progress = self.now;
        running.duplicates.extend(duplicates);
        Ok(())
    }
}
