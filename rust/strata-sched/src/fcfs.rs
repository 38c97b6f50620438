//! First come, first served: prefill before decode, the queue in order of priority and arrival, the head never
//! passed by. The yardstick for every other policy.

use crate::batch::{Batch, Row};
use crate::order::{Order, Position, Rules};
use crate::why::{Reasons, Recorder, Silent, Why};
use crate::{Decision, Policy, Step, View, DEFAULT_MAX_WAIT};
use std::time::Duration;
use strata_types::RequestId;

/// The policy `fcfs`.
#[derive(Debug)]
pub struct FirstComeFirstServed {
    max_wait: Duration,
    order: Order,
}

impl Default for FirstComeFirstServed {
    fn default() -> FirstComeFirstServed {
        FirstComeFirstServed::new(DEFAULT_MAX_WAIT)
    }
}

impl FirstComeFirstServed {
    /// Whoever has waited for longer than `max_wait` goes before any priority.
    pub fn new(max_wait: Duration) -> FirstComeFirstServed {
        FirstComeFirstServed { max_wait, order: Order::default() }
    }

    fn run<R: Recorder>(&mut self, view: &View<'_>, recorder: &mut R) -> (Decision, Why) {
        self.order.form(view, Rules { threshold: None, max_wait: self.max_wait }, recorder);
        in_order(&mut self.order, view, recorder)
    }
}

impl Policy for FirstComeFirstServed {
    fn name(&self) -> &'static str {
        "fcfs"
    }

    fn decide(&mut self, view: &View<'_>) -> Decision {
        self.run(view, &mut Silent).0
    }

    fn explain(&mut self, view: &View<'_>) -> Vec<(RequestId, Why)> {
        Reasons::of(view, |reasons| self.run(view, reasons).1)
    }
}

/// Admits in the order that was formed until somebody does not fit; what was said of the rest comes second.
pub(crate) fn in_order<R: Recorder>(order: &mut Order, view: &View<'_>, recorder: &mut R) -> (Decision, Why) {
    let mut batch = Batch::new(view);
    batch.go_on();
    let mut rest = None;
    let slots = view.waiting.slots();
    let mut at = Position::default();
    while let Some(place) = order.next(&mut at) {
        let slot = &slots[place];
        let Some(part) = batch.part(slot) else { break };
        if let Some(full) = batch.runners_full() {
            rest = Some(full);
            break;
        }
        if let Some(why) = batch.lacks_room(slot, &part) {
            recorder.note(slot.waiting.id, || why);
            rest = Some(Why::Behind { id: slot.waiting.id });
            break;
        }
        batch.admit(slot, part);
        order.take(place, slot);
    }
    let rest = rest.unwrap_or(batch.full());
    let mut decision = Decision {
        early: Vec::new(),
        admissions: Vec::new(),
        step: Step::Idle,
        counts: order.counts,
        next_deadline: order.next_deadline,
    };
    if batch.rows.is_empty() || batch.bound.decode_first() {
        for row in batch.rows.iter().filter(|row| row.since.is_none()) {
            recorder.note(row.id, || Why::DecodeFirst);
        }
        decision.step = decode(view);
        return (decision, rest);
    }
    let (running, new) = batch.rows.split_at(batch.rows.partition_point(|row| row.since.is_some()));
    for row in new {
        recorder.note(row.id, || Why::Next { tokens: row.tokens });
    }
    decision.admissions = new.iter().map(Row::admission).collect();
    decision.step = Step::Prefill(running.iter().map(Row::chunk).collect());
    (decision, rest)
}

/// One token of each that can have one.
pub(crate) fn decode(view: &View<'_>) -> Step {
    match view.decodable {
        [] => Step::Idle,
        ids => Step::Decode(ids.to_vec()),
    }
}
