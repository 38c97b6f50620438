//! Balanced batches, the policies `static` and `adaptive`. (1) Delay hits wait for their owner. (2) The head goes
//! first, then who shares its load, then each that does not make the batch loading-bound, then the rest in order.
//! (3) A batch that is loading-bound all the same starts its loads, and running streams decode until the rest of a
//! load hides behind the compute that waits for it. The head always goes if there is room, and with `static` nobody
//! passes one for which there is none. Prompts that run go on before all of these, but for short followers whose wait
//! is over.
//!
//! `adaptive` goes on where the paper stops, at the link that is the bottleneck. Whose load does not hide goes before
//! the head if its load is worth more: requests that wait for it, times how long, for each token loaded (R x W as for
//! data on a broadcast, Aksoy and Franklin, 1999, with more weight on the wait). Worth grows with waiting, so everyone's
//! turn comes. And once a batch is loading-bound, of the rest only those go whose load takes less than the step that
//! they save: for any other the whole batch would wait. Whoever lacks room may be passed for a while by those who need next to none: what they read is
//! on the device, where it costs nothing, and may not be once their turn has come.

use crate::balance::{Balance, Bar, Predicted, Ratio, Scale};
use crate::batch::{Batch, Part, Row};
use crate::fcfs::decode;
use crate::glance::Glance;
use crate::order::{Order, Position, Rules, Stretch};
use crate::queue::Slot;
use crate::why::{Reasons, Recorder, Silent, Why};
use crate::{Decision, Policy, Step, View, DEFAULT_MAX_WAIT};
use std::time::Duration;
use strata_types::RequestId;

/// Places of those who could go instead that a decision looks at, so that its time stays bounded.
const WINDOW: usize = 256;

/// Loads that one decision begins early.
const MOST_EARLY: usize = 32;

/// Who lacks room is passed only by those who need less than this part of what it needs,
const SMALL: u32 = 10;
/// and only until it has waited for this part of what is too long.
const PATIENCE: u32 = 2;

/// The parts of the policy, each of which can be turned off, and their bounds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BalancedOptions {
    /// Delay hits wait.
    pub defer: bool,
    /// Followers go beside running prompts once what they waited for is published.
    pub followers: bool,
    /// More transient tokens of another owner than these make a delay hit.
    pub threshold: u32,
    /// Requests that would make the batch loading-bound are set aside.
    pub balance: bool,
    /// Requests that share a load go together.
    pub bundles: bool,
    /// Running streams decode while a batch loads.
    pub bubbles: bool,
    /// Loads begin while their requests wait, where the balance allows it.
    pub early_loads: bool,
    /// The load that is worth most goes first, where the balance allows it.
    pub worth: bool,
    /// Those who need next to no room pass one that lacks it, where the balance allows it.
    pub passing: bool,
    /// Whoever has waited for longer goes before any priority.
    pub max_wait: Duration,
    /// A prompt that loads yields to decode steps for at most twice the predicted rest of its batch's loads and this.
    pub grace: Duration,
}

impl Default for BalancedOptions {
    fn default() -> BalancedOptions {
        BalancedOptions {
            defer: true,
            followers: true,
            threshold: 100,
            balance: true,
            bundles: true,
            bubbles: true,
            early_loads: true,
            worth: true,
            passing: true,
            max_wait: DEFAULT_MAX_WAIT,
            grace: Duration::from_millis(100),
        }
    }
}

impl BalancedOptions {
    /// Turns a part off by its name. False if there is none of that name.
    pub fn turn_off(&mut self, part: &str) -> bool {
        let part = match part {
            "defer" => &mut self.defer,
            "followers" => &mut self.followers,
            "balance" => &mut self.balance,
            "bundles" => &mut self.bundles,
            "bubbles" => &mut self.bubbles,
            "early-loads" => &mut self.early_loads,
            "worth" => &mut self.worth,
            "passing" => &mut self.passing,
            _ => return false,
        };
        *part = false;
        true
    }
}

/// The policies `static` and `adaptive`, by their balance.
#[derive(Debug)]
pub struct Balanced<B> {
    balance: B,
    options: BalancedOptions,
    scale: Scale,
    order: Order,
    /// The place of the first for which there was no room.
    blocked: Option<usize>,
    /// What ended the batch, told of all who were not reached.
    rest: Option<Why>,
}

/// The policy `static`.
pub type Static = Balanced<Ratio>;
/// The policy `adaptive`.
pub type Adaptive = Balanced<Predicted>;

impl<B: Balance + Default> Default for Balanced<B> {
    fn default() -> Balanced<B> {
        Balanced::new(B::default(), BalancedOptions::default())
    }
}

impl<B: Balance> Balanced<B> {
    /// The policy with these parts.
    pub fn new(balance: B, options: BalancedOptions) -> Balanced<B> {
        let (scale, order) = (Scale::default(), Order::default());
        Balanced { balance, options, scale, order, blocked: None, rest: None }
    }

    fn run<R: Recorder>(&mut self, view: &View<'_>, recorder: &mut R) -> (Decision, Why) {
        let rules = Rules { threshold: self.threshold(), max_wait: self.options.max_wait };
        self.order.form(view, rules, recorder);
        let mut batch = Batch::new(view);
        let mut reached = Position::default();
        (self.blocked, self.rest) = (None, None);
        self.scale = self.balance.scale(&view.prices);
        self.admit_freed(&mut batch, &mut reached);
        batch.go_on();
        self.fill(&mut batch, reached, recorder);
        self.pass(&mut batch);
        let mut decision = self.conclude(&batch, view, recorder);
        decision.early = self.early_loads(&mut batch, view);
        decision.counts = self.order.counts;
        (decision, self.rest.unwrap_or(batch.full()))
    }

    fn threshold(&self) -> Option<u32> {
        self.options.defer.then_some(self.options.threshold)
    }

    /// Followers whose owner has published what they waited for go beside prompts that outlast the batch, the owner's
    /// own tail for one: they waited for the sake of the run, not of that tail, and would else end later than if
    /// nobody had deferred them. Only whole ones: a longer one would get a first chunk and then stand behind the same
    /// prompts, to end no sooner, and hold up those who wait for these. Nobody else passes a running prompt.
    fn admit_freed(&mut self, batch: &mut Batch<'_>, reached: &mut Position) {
        let Some(mut share) = batch.beside().filter(|_| self.options.followers) else { return };
        let slots = batch.view().waiting.slots();
        let mut next = *reached;
        while let Some(place) = self.order.next(&mut next) {
            let slot = &slots[place];
            if !self.order.is_free(slot) || !batch.admit_beside(slot, &mut share) {
                return;
            }
            self.order.take(place, slot);
            *reached = next;
        }
    }

    fn fill<R: Recorder>(&mut self, batch: &mut Batch<'_>, mut reached: Position, recorder: &mut R) {
        let slots = batch.view().waiting.slots();
        let start = reached;
        let Some(head) = self.order.next(&mut reached) else { return };
        let first = self.worth_most(batch, head, reached);
        if first != head {
            reached = start;
        }
        // Nobody passes the first.
        if !self.admit(batch, first, &slots[first], recorder) {
            return;
        }
        self.bundle(batch, &slots[first], slots, recorder);
        while let Some(place) = self.next_welcome(batch, &mut reached, recorder) {
            if !self.admit(batch, place, &slots[place], recorder) {
                break;
            }
            self.bundle(batch, &slots[place], slots, recorder);
        }
        self.fill_with_the_rest(batch, reached, slots, recorder);
    }

    /// Who goes first: the head, or where its load does not hide, and it has not waited for too long, the one of its
    /// priority whose load, which does not hide either, is worth more.
    fn worth_most(&self, batch: &Batch<'_>, head: usize, mut next: Position) -> usize {
        let view = batch.view();
        let slots = view.waiting.slots();
        let sticks_out = |place: usize| {
            let part = batch.part(&slots[place]);
            part.is_some_and(|part| self.scale.is_loading_bound(&batch.work.plus(part.work)))
        };
        let by_worth = self.options.worth && self.balance.goes_by_worth();
        if !by_worth || self.order.is_first_aged() || !sticks_out(head) {
            return head;
        }
        let (mut first, mut most) = (head, view.worth(head));
        for _ in 0..WINDOW {
            let Some(place) = self.order.next(&mut next) else { break };
            if slots[place].waiting.priority != slots[head].waiting.priority {
                break;
            }
            if self.order.is_open(place) && sticks_out(place) {
                let worth = view.worth(place);
                if worth > most {
                    (first, most) = (place, worth);
                }
            }
        }
        first
    }

    /// The next who may join before the rest; sets aside those who may not.
    fn next_welcome<R: Recorder>(
        &mut self,
        batch: &Batch<'_>,
        reached: &mut Position,
        recorder: &mut R,
    ) -> Option<usize> {
        let (slots, glances) = (batch.view().waiting.slots(), batch.view().waiting.glances());
        let bar = Bar::of(self.scale, &batch.work);
        while let Some(ahead) = self.order.ahead(reached) {
            let may_join = |glance: &Glance| !self.options.balance || batch.may_welcome(glance, &bar);
            let passed = glances[ahead.clone()].iter().position(may_join).unwrap_or(ahead.len());
            let next = ahead.start + passed;
            self.set_aside(ahead.start..next, batch, recorder);
            reached.pass(passed);
            if next == ahead.end {
                continue;
            }
            reached.pass(1);
            let joins = !self.options.balance || batch.welcomes(&slots[next], &bar);
            if joins && self.order.is_open(next) {
                return Some(next);
            }
            self.set_aside(next..next + 1, batch, recorder);
        }
        None
    }

    /// Passes over those of these places that are open.
    fn set_aside<R: Recorder>(&mut self, places: Stretch, batch: &Batch<'_>, recorder: &mut R) {
        let slots = &batch.view().waiting.slots()[places.clone()];
        let open = self.order.open(places);
        for (slot, _) in slots.iter().zip(open).filter(|(_, is_open)| **is_open) {
            recorder.note(slot.waiting.id, || batch.unbalanced(slot));
        }
        self.order.counts.set_aside += open.iter().map(|is_open| u32::from(*is_open)).sum::<u32>();
    }

    /// Admits, up to where the first pass came, those whom it has set aside, as far as the balance lets them.
    fn fill_with_the_rest<R: Recorder>(
        &mut self,
        batch: &mut Batch<'_>,
        reached: Position,
        slots: &[Slot],
        recorder: &mut R,
    ) {
        let (mut at, mut left_out) = (Position::default(), 0);
        while let Some(place) = self.order.next(&mut at) {
            if !self.order.is_open(place) {
                continue;
            }
            if at == reached || left_out == WINDOW {
                break;
            }
            let sticks_out = |part: Part| !self.scale.saves_a_step(&part.work);
            let is_bound = self.scale.is_loading_bound(&batch.work);
            let may_fill = !is_bound || !batch.part(&slots[place]).is_some_and(sticks_out);
            if !may_fill {
                left_out += 1;
            } else if !self.admit(batch, place, &slots[place], recorder) {
                break;
            }
        }
    }

    /// Admits those who share a load with one that has just joined.
    fn bundle<R: Recorder>(
        &mut self,
        batch: &mut Batch<'_>,
        joined: &Slot,
        slots: &[Slot],
        recorder: &mut R,
    ) {
        let Some(node) = joined.first_load.filter(|_| self.options.bundles) else { return };
        for place in batch.view().waiting.sharers(node) {
            if !self.order.is_open(place) {
                continue;
            }
            let Some(part) = batch.part(&slots[place]) else { return };
            let together = self.balance.is_bundle(part.shared, part.work.load);
            if together && !self.admit(batch, place, &slots[place], recorder) {
                return;
            }
        }
    }

    fn admit<R: Recorder>(
        &mut self,
        batch: &mut Batch<'_>,
        place: usize,
        slot: &Slot,
        recorder: &mut R,
    ) -> bool {
        let Some(part) = batch.part(slot) else { return false };
        if let Some(full) = batch.runners_full() {
            self.rest = Some(full);
            return false;
        }
        if let Some(why) = batch.lacks_room(slot, &part) {
            recorder.note(slot.waiting.id, || why);
            self.blocked.get_or_insert(place);
            self.rest = Some(Why::Behind { id: slot.waiting.id });
            return false;
        }
        batch.admit(slot, part);
        self.order.take(place, slot);
        true
    }

    /// Those of its priority who load nothing and need next to no room pass the one for which there is none, unless it
    /// has waited for long, or anybody for too long.
    fn pass(&mut self, batch: &mut Batch<'_>) {
        let off = !self.options.passing || !self.balance.passes() || self.order.is_first_aged();
        let Some(blocked) = self.blocked.filter(|_| !off) else { return };
        let view = batch.view();
        let slots = view.waiting.slots();
        let blocked = &slots[blocked].waiting;
        if view.now.since(blocked.arrived) >= self.options.max_wait / PATIENCE {
            return;
        }
        let mut next = Position::default();
        for _ in 0..WINDOW {
            let Some(place) = self.order.next(&mut next) else { break };
            let slot = &slots[place];
            if slot.waiting.priority < blocked.priority {
                break;
            }
            let is_small = slot.waiting.standing.pages.saturating_mul(SMALL) < blocked.standing.pages;
            if !self.order.is_open(place) || slot.load > 0 || !is_small {
                continue;
            }
            let Some(part) = batch.part(slot) else { break };
            if batch.runners_full().is_some() || batch.lacks_room(slot, &part).is_some() {
                break;
            }
            batch.admit(slot, part);
            self.order.take(place, slot);
        }
    }

    /// What is computed now and what waits for its load.
    fn conclude<R: Recorder>(&mut self, batch: &Batch<'_>, view: &View<'_>, recorder: &mut R) -> Decision {
        let decode_first = batch.bound.decode_first();
        let fresh = batch.rows.iter().filter(|row| row.since.is_none()).count();
        let queues = view.waiting.len() > fresh;
        let bubble =
            self.options.bubbles && !view.decodable.is_empty() && self.scale.is_bubble(&batch.work, queues);
        let (mut chunks, mut admissions, mut computes) = (Vec::new(), Vec::new(), false);
        for row in &batch.rows {
            let waits = decode_first || bubble && self.yields(row, batch, view);
            computes |= !waits;
            match row.since {
                Some(_) if waits => {}
                Some(_) => chunks.push(row.chunk()),
                None if !waits => {
                    recorder.note(row.id, || Why::Next { tokens: row.tokens });
                    admissions.push(row.admission());
                }
                None if self.options.bubbles && row.own.load > 0.0 => {
                    recorder.note(row.id, || Why::Loads { tokens: row.own.load as u32 });
                    admissions.push(crate::Admission { id: row.id, tokens: 0 });
                }
                None => recorder.note(row.id, || Why::DecodeFirst),
            }
        }
        let step = if computes { Step::Prefill(chunks) } else { decode(view) };
        let (counts, next_deadline) = (self.order.counts, self.order.next_deadline);
        Decision { early: Vec::new(), admissions, step, counts, next_deadline }
    }

    /// Whether a row waits for the loads of its batch, so that all of them are prefilled in one step. What loads nothing
    /// does not wait, nor whoever has waited for too long.
    fn yields(&self, row: &Row, batch: &Batch<'_>, view: &View<'_>) -> bool {
        let load = view.prices.load_seconds(batch.work.load).unwrap_or(0.0);
        let patience = 2.0 * load + self.options.grace.as_secs_f64();
        let waited = row.since.map_or(0.0, |since| view.now.since(since).as_secs_f64());
        row.own.load > 0.0 && waited < patience
    }

    /// Loads for those who wait, in order, unless the batch's own keep the link busy. Where somebody lacks room,
    /// nobody behind takes any.
    fn early_loads(&mut self, batch: &mut Batch<'_>, view: &View<'_>) -> Vec<RequestId> {
        let mut early = Vec::new();
        let off = !self.options.early_loads || !self.balance.loads_early();
        if off || self.scale.is_loading_bound(&batch.work) {
            return early;
        }
        let (slots, glances) = (view.waiting.slots(), view.waiting.glances());
        let mut pages_left = view.early_pages;
        let no_room = matches!(self.rest, Some(Why::Behind { .. }));
        let (mut at, mut looked_at) = (Position::default(), 0);
        while let Some(place) = self.order.next(&mut at) {
            if !self.order.is_open(place) {
                continue;
            }
            // Of those who share a load only the first takes pages: these alone would not end the walk.
            if looked_at == WINDOW || early.len() == MOST_EARLY {
                break;
            }
            looked_at += 1;
            if glances[place].load > 0 && !slots[place].waiting.early {
                if pages_left == 0 || !batch.load_early(&slots[place], &mut pages_left) {
                    break;
                }
                early.push(slots[place].waiting.id);
            }
            if no_room {
                break;
            }
        }
        early
    }
}

impl<B: Balance> Policy for Balanced<B> {
    fn name(&self) -> &'static str {
        self.balance.name()
    }

    fn deferral_threshold(&self) -> Option<u32> {
        self.threshold()
    }

    fn decide(&mut self, view: &View<'_>) -> Decision {
        self.run(view, &mut Silent).0
    }

    fn explain(&mut self, view: &View<'_>) -> Vec<(RequestId, Why)> {
        Reasons::of(view, |reasons| self.run(view, reasons).1)
    }
}
