//! Who may go, in order: those who have waited for too long, the oldest first; then by priority, and within one
//! priority those who were deferred before the others. Nobody who is held or deferred.

use crate::queue::Slot;
use crate::why::{Recorder, Why};
use crate::{Counts, View};
use std::collections::HashSet;
use std::time::Duration;
use strata_types::{RequestId, Time};

/// What a request in the queue is to this decision.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum State {
    /// Nobody, or one that may not go now.
    Out,
    /// May go.
    Candidate,
    /// May go, before its turn.
    Aged,
    /// Goes.
    Taken,
}

/// One that may go: what the scan of a decision asks, close together.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Candidate {
    /// Its place in the queue.
    pub place: u32,
    /// Tokens to load.
    pub load: u32,
    /// Tokens to compute.
    pub compute: u32,
    /// Tokens before those.
    pub context: u32,
    /// The node of its first load, if it has any.
    pub node: u64,
}

impl Candidate {
    #[inline]
    fn new(place: usize, slot: &Slot) -> Candidate {
        let need = &slot.waiting.standing.need;
        Candidate {
            place: place as u32,
            load: slot.load,
            compute: need.to_compute(),
            context: need.context(),
            node: slot.first_load.unwrap_or(0),
        }
    }
}

/// What keeps requests out or puts them first.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Rules {
    /// More transient tokens than these defer a request; none: never.
    pub threshold: Option<u32>,
    /// Whoever has waited for longer goes first.
    pub max_wait: Duration,
}

/// The order of one decision. Kept only for its memory.
#[derive(Debug, Default)]
pub(crate) struct Order {
    /// In the order in which they may go.
    pub candidates: Vec<Candidate>,
    states: Vec<State>,
    aged: Vec<Candidate>,
    deferred_before: Vec<Candidate>,
    overdue_owners: HashSet<RequestId>,
    rules: Option<Rules>,
    pub counts: Counts,
    pub next_deadline: Option<Time>,
}

impl Order {
    pub fn form<R: Recorder>(&mut self, view: &View<'_>, rules: Rules, recorder: &mut R) {
        let slots = view.waiting.slots();
        self.clear(slots.len(), rules);
        let aged_before = Time(view.now.0.saturating_sub(rules.max_wait.as_nanos() as u64));
        let mut class = (0, 0);
        for (place, slot) in slots.iter().enumerate() {
            let Some(waiting) = slot.live() else { continue };
            if waiting.held {
                recorder.note(waiting.id, || Why::Held { tokens: waiting.standing.need.disk });
                continue;
            }
            if self.defers(slot, view.now, recorder) {
                self.counts.deferred += 1;
                continue;
            }
            if waiting.priority != class.0 {
                self.end_class(class.1);
                class = (waiting.priority, self.candidates.len());
            }
            self.states[place] = State::Candidate;
            let candidate = Candidate::new(place, slot);
            if waiting.arrived < aged_before {
                self.states[place] = State::Aged;
                self.aged.push(candidate);
            } else if slot.deferred_before && rules.threshold.is_some() {
                self.deferred_before.push(candidate);
            } else {
                self.candidates.push(candidate);
            }
        }
        self.end_class(class.1);
        if !self.aged.is_empty() {
            let age = |aged: &Candidate| {
                let waiting = &slots[aged.place as usize].waiting;
                (waiting.arrived, waiting.id)
            };
            self.aged.sort_by_key(age);
            self.candidates.splice(0..0, self.aged.drain(..));
        }
    }

    fn clear(&mut self, places: usize, rules: Rules) {
        self.candidates.clear();
        self.states.clear();
        self.states.resize(places, State::Out);
        self.aged.clear();
        self.deferred_before.clear();
        self.overdue_owners.clear();
        self.rules = Some(rules);
        self.counts = Counts::default();
        self.next_deadline = None;
    }

    fn end_class(&mut self, start: usize) {
        if !self.deferred_before.is_empty() {
            self.candidates.splice(start..start, self.deferred_before.drain(..));
        }
    }

    /// Whether a request waits for another one to compute what it needs. Of those whose owner is overdue only the
    /// first goes; it becomes the owner of the others.
    fn defers<R: Recorder>(&mut self, slot: &Slot, now: Time, recorder: &mut R) -> bool {
        if !self.is_delay_hit(slot) {
            return false;
        }
        let (id, standing) = (slot.waiting.id, &slot.waiting.standing);
        let Some(until) = standing.defer_until else { return false };
        if now < until {
            self.next_deadline = Some(self.next_deadline.map_or(until, |first| first.min(until)));
            let (owner, tokens) = (standing.follows, standing.need.transient);
            recorder.note(id, || Why::Deferred { owner, tokens, until });
            return true;
        }
        let Some(owner) = standing.follows else { return false };
        let is_first = self.overdue_owners.insert(owner);
        if !is_first {
            recorder.note(id, || Why::TakenOver { owner });
        }
        !is_first
    }

    fn is_delay_hit(&self, slot: &Slot) -> bool {
        let threshold = self.rules.and_then(|rules| rules.threshold);
        threshold.is_some_and(|most| slot.waiting.standing.need.transient > most)
    }

    /// Whether it may go and does not go yet.
    #[inline]
    pub fn is_open(&self, place: usize) -> bool {
        matches!(self.states[place], State::Candidate | State::Aged)
    }

    /// Whether it goes before its turn.
    pub fn is_aged(&self, place: usize) -> bool {
        self.states[place] == State::Aged
    }

    /// Notes that a request goes.
    pub fn take(&mut self, place: usize, slot: &Slot) {
        self.counts.aged += u32::from(self.states[place] == State::Aged);
        self.counts.taken_over += u32::from(self.is_delay_hit(slot));
        self.states[place] = State::Taken;
    }
}
