//! Who may go, in order: those who have waited for too long, the oldest first; then by priority, and within one
//! priority those who were deferred before the others. Nobody who is held or deferred. Most go as they stand in the
//! queue, so the order is a list of stretches of it, and costs little however many wait.

use crate::glance::Kind;
use crate::queue::Slot;
use crate::why::{Recorder, Why};
use crate::{Counts, View};
use std::collections::HashSet;
use std::ops::Range;
use std::time::Duration;
use strata_types::{RequestId, Time};

/// What keeps requests out or puts them first.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Rules {
    /// More transient tokens than these defer a request; none: never.
    pub threshold: Option<u32>,
    /// Whoever has waited for longer goes first.
    pub max_wait: Duration,
}

/// Places side by side in the queue.
pub(crate) type Stretch = Range<usize>;

/// How far a walk through the order has come.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Position {
    stretch: usize,
    offset: usize,
}

impl Position {
    /// Goes past so many places of those ahead.
    pub fn pass(&mut self, places: usize) {
        self.offset += places;
    }
}

/// The order of one decision. Kept only for its memory.
#[derive(Debug, Default)]
pub(crate) struct Order {
    /// Those who may go, in the order in which they may.
    pub stretches: Vec<Stretch>,
    /// How many of the stretches hold those who have waited for too long.
    pub aged: usize,
    pub counts: Counts,
    pub next_deadline: Option<Time>,
    rules: Rules,
    /// Whoever arrived before has waited for too long.
    aged_before: Time,
    /// By place: it may go and does not go yet.
    open: Vec<bool>,
    /// Of the places that are sorted out now: those who were deferred, and the rest.
    deferred_before: Vec<Stretch>,
    others: Vec<Stretch>,
    /// Those who have not waited for too long.
    timely: Vec<Stretch>,
    overdue_owners: HashSet<RequestId>,
}

impl Order {
    pub fn form<R: Recorder>(&mut self, view: &View<'_>, rules: Rules, recorder: &mut R) {
        let slots = view.waiting.slots();
        self.clear(view, rules);
        let (mut start, mut aged_classes) = (0, 0);
        while start < slots.len() {
            let end = view.waiting.class_end(start);
            let timely = start + slots[start..end].partition_point(|slot| self.is_aged(slot));
            self.sift(start..timely, view, recorder);
            aged_classes += usize::from(!self.others.is_empty());
            self.stretches.append(&mut self.others);
            self.sift(timely..end, view, recorder);
            self.timely.append(&mut self.deferred_before);
            self.timely.append(&mut self.others);
            start = end;
        }
        if aged_classes > 1 {
            self.sort_by_age(slots);
        }
        self.aged = self.stretches.len();
        self.stretches.append(&mut self.timely);
        for stretch in &self.stretches {
            self.open[stretch.clone()].fill(true);
        }
    }

    fn clear(&mut self, view: &View<'_>, rules: Rules) {
        self.stretches.clear();
        self.open.clear();
        self.open.resize(view.waiting.slots().len(), false);
        self.overdue_owners.clear();
        self.rules = rules;
        self.aged_before = Time(view.now.0.saturating_sub(rules.max_wait.as_nanos() as u64));
        self.counts = Counts::default();
        self.next_deadline = None;
    }

    fn is_aged(&self, slot: &Slot) -> bool {
        slot.waiting.arrived < self.aged_before
    }

    /// Tells those of one priority who were deferred before from the others, and drops those who may not go.
    fn sift<R: Recorder>(&mut self, places: Stretch, view: &View<'_>, recorder: &mut R) {
        let slots = view.waiting.slots();
        let mut start = places.start;
        for alike in view.waiting.kinds()[places].chunk_by(Kind::eq) {
            let stretch = start..start + alike.len();
            start = stretch.end;
            match alike[0] {
                Kind::Gap => {}
                Kind::Held => {
                    for slot in &slots[stretch] {
                        let tokens = slot.waiting.standing.need.disk;
                        recorder.note(slot.waiting.id, || Why::Held { tokens });
                    }
                }
                Kind::Follower if self.rules.threshold.is_some() => {
                    for place in stretch {
                        self.sift_follower(place, &slots[place], view.now, recorder);
                    }
                }
                Kind::Follower | Kind::Plain => self.others.push(stretch),
            }
        }
    }

    fn sift_follower<R: Recorder>(&mut self, place: usize, slot: &Slot, now: Time, recorder: &mut R) {
        if self.defers(slot, now, recorder) {
            self.counts.deferred += 1;
        } else if slot.deferred_before && !self.is_aged(slot) {
            self.deferred_before.push(place..place + 1);
        } else {
            self.others.push(place..place + 1);
        }
    }

    /// The oldest first, whatever their priority.
    fn sort_by_age(&mut self, slots: &[Slot]) {
        self.others.extend(self.stretches.drain(..).flatten().map(|place| place..place + 1));
        self.others.sort_by_key(|aged| {
            let waiting = &slots[aged.start].waiting;
            (waiting.arrived, waiting.id)
        });
        self.stretches.append(&mut self.others);
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
            recorder.note(id, || Why::Deferred { owner, tokens, left: until.since(now) });
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
        self.rules.threshold.is_some_and(|most| slot.waiting.standing.need.transient > most)
    }

    /// Whether a request was deferred and may go now: what it waited for is there, and needs no load.
    pub fn is_free(&self, slot: &Slot) -> bool {
        self.rules.threshold.is_some() && slot.deferred_before && slot.load == 0 && !self.is_delay_hit(slot)
    }

    /// Whether the first of all has waited for too long.
    pub fn is_first_aged(&self) -> bool {
        self.aged > 0
    }

    /// The places side by side that are next in the order.
    #[inline]
    pub fn ahead(&self, at: &mut Position) -> Option<Stretch> {
        loop {
            let stretch = self.stretches.get(at.stretch)?;
            let ahead = stretch.start + at.offset..stretch.end;
            if !ahead.is_empty() {
                return Some(ahead);
            }
            *at = Position { stretch: at.stretch + 1, offset: 0 };
        }
    }

    /// The place that is next in the order, and the step past it.
    #[inline]
    pub fn next(&self, at: &mut Position) -> Option<usize> {
        let ahead = self.ahead(at)?;
        at.pass(1);
        Some(ahead.start)
    }

    /// Whether it may go and does not go yet.
    #[inline]
    pub fn is_open(&self, place: usize) -> bool {
        self.open[place]
    }

    /// Of each of these places, whether it is open.
    pub fn open(&self, places: Stretch) -> &[bool] {
        &self.open[places]
    }

    /// Notes that a request goes.
    pub fn take(&mut self, place: usize, slot: &Slot) {
        self.counts.aged += u32::from(self.is_aged(slot));
        self.counts.taken_over += u32::from(self.is_delay_hit(slot));
        self.open[place] = false;
    }
}
