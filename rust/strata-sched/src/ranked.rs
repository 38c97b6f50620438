//! An order of somebody else's, for research: who goes next is a `Ranking`'s to say, everything else about the batch is
//! as with `fcfs`. Whoever has waited for too long goes first whatever it says, so that it can starve nobody.

use crate::fcfs::in_order;
use crate::order::{Order, Rules};
use crate::queue::Slot;
use crate::why::{Reasons, Recorder, Silent, Why};
use crate::{Decision, Policy, View, Waiting};
use std::mem::replace;
use std::time::Duration;
use strata_types::{RequestId, Time};

/// A request that may go.
#[derive(Clone, Copy, Debug)]
pub struct Candidate<'a> {
    /// The request.
    pub waiting: &'a Waiting,
    /// Another computes, or will compute, more of its tokens than the threshold, and the time to wait for that is not
    /// over. If it goes all the same, it computes them itself.
    pub deferred: bool,
}

/// An order of the queue.
pub trait Ranking: Send {
    /// Which of the candidates, who come in the queue's order, are to be tried now, the first first: their places among
    /// them. The first for whom there is no room ends the batch; who is left out waits. Where nothing runs, somebody
    /// who is not deferred has to be named, or nothing may ever happen again.
    fn rank(&mut self, view: &View<'_>, candidates: &[Candidate<'_>]) -> Vec<usize>;
}

/// The policy that follows a ranking.
#[derive(Debug)]
pub struct Ranked<R> {
    ranking: R,
    threshold: u32,
    max_wait: Duration,
    order: Order,
}

impl<R: Ranking> Ranked<R> {
    /// More transient tokens of another owner than `threshold` make a candidate deferred; whoever has waited for longer
    /// than `max_wait` goes first.
    pub fn new(ranking: R, threshold: u32, max_wait: Duration) -> Ranked<R> {
        Ranked { ranking, threshold, max_wait, order: Order::default() }
    }

    fn run<N: Recorder>(&mut self, view: &View<'_>, recorder: &mut N) -> (Decision, Why) {
        self.order.form(view, Rules { threshold: None, max_wait: self.max_wait }, recorder);
        self.rank(view, recorder);
        in_order(&mut self.order, view, recorder)
    }

    /// Brings those who have not waited for too long into the ranking's order.
    fn rank<N: Recorder>(&mut self, view: &View<'_>, recorder: &mut N) {
        let slots = view.waiting.slots();
        let places: Vec<usize> = self.order.stretches.drain(self.order.aged..).flatten().collect();
        let candidates: Vec<Candidate<'_>> =
            places.iter().map(|&place| self.candidate(&slots[place], view.now)).collect();
        if candidates.is_empty() {
            return;
        }
        let mut left_out = vec![true; places.len()];
        for choice in self.ranking.rank(view, &candidates) {
            if left_out.get_mut(choice).is_some_and(|left_out| replace(left_out, false)) {
                self.order.stretches.push(places[choice]..places[choice] + 1);
            }
        }
        for (candidate, _) in candidates.iter().zip(left_out).filter(|(_, left_out)| *left_out) {
            self.leave_out(candidate, view.now, recorder);
        }
    }

    fn candidate<'a>(&self, slot: &'a Slot, now: Time) -> Candidate<'a> {
        let standing = &slot.waiting.standing;
        let waits = standing.defer_until.is_some_and(|until| now < until);
        Candidate { waiting: &slot.waiting, deferred: waits && standing.need.transient > self.threshold }
    }

    fn leave_out<N: Recorder>(&mut self, candidate: &Candidate<'_>, now: Time, recorder: &mut N) {
        let Waiting { id, standing, .. } = candidate.waiting;
        let Some(until) = standing.defer_until.filter(|_| candidate.deferred) else {
            recorder.note(*id, || Why::LeftOut);
            return;
        };
        self.order.counts.deferred += 1;
        let next = self.order.next_deadline.map_or(until, |first| first.min(until));
        self.order.next_deadline = Some(next);
        let (owner, tokens) = (standing.follows, standing.need.transient);
        recorder.note(*id, || Why::Deferred { owner, tokens, left: until.since(now) });
    }
}

impl<R: Ranking> Policy for Ranked<R> {
    fn name(&self) -> &'static str {
        "ranked"
    }

    fn deferral_threshold(&self) -> Option<u32> {
        Some(self.threshold)
    }

    fn decide(&mut self, view: &View<'_>) -> Decision {
        self.run(view, &mut Silent).0
    }

    fn explain(&mut self, view: &View<'_>) -> Vec<(RequestId, Why)> {
        Reasons::of(view, |reasons| self.run(view, reasons).1)
    }
}
