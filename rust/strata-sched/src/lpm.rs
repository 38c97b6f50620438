//! Longest prefix first: within a priority, who has most of its prompt cached goes first, wherever it is cached.
//! Whoever has waited for too long goes before. A yardstick: it spares compute and does not look at loads.

use crate::fcfs::in_order;
use crate::order::{Candidate, Order, Rules};
use crate::queue::Slot;
use crate::why::{Reasons, Recorder, Silent, Why};
use crate::{Decision, Policy, View, DEFAULT_MAX_WAIT};
use std::cmp::Reverse;
use std::time::Duration;
use strata_types::RequestId;

/// The policy `lpm`.
#[derive(Debug)]
pub struct LongestPrefixFirst {
    max_wait: Duration,
    order: Order,
}

impl Default for LongestPrefixFirst {
    fn default() -> LongestPrefixFirst {
        LongestPrefixFirst::new(DEFAULT_MAX_WAIT)
    }
}

impl LongestPrefixFirst {
    /// Whoever has waited for longer than `max_wait` goes first.
    pub fn new(max_wait: Duration) -> LongestPrefixFirst {
        LongestPrefixFirst { max_wait, order: Order::default() }
    }

    fn run<R: Recorder>(&mut self, view: &View<'_>, recorder: &mut R) -> (Decision, Why) {
        self.order.form(view, Rules { threshold: None, max_wait: self.max_wait }, recorder);
        let slots = view.waiting.slots();
        let is_aged = |candidate: &&Candidate| self.order.is_aged(candidate.place as usize);
        let aged = self.order.candidates.iter().take_while(is_aged).count();
        let rank = |candidate: &Candidate| (rank(&slots[candidate.place as usize]), candidate.place);
        let free = &mut self.order.candidates[aged..];
        // No more than these can go: the rest need not be in order.
        let most = view.limits.max_running.saturating_sub(view.running) as usize;
        if most > 0 && most < free.len() {
            free.select_nth_unstable_by_key(most - 1, rank);
            free[..most].sort_unstable_by_key(rank);
        } else {
            free.sort_unstable_by_key(rank);
        }
        in_order(&mut self.order, view, recorder)
    }
}

fn rank(slot: &Slot) -> (Reverse<i32>, Reverse<u32>) {
    let need = &slot.waiting.standing.need;
    (Reverse(slot.waiting.priority), Reverse(need.context().saturating_add(need.disk)))
}

impl Policy for LongestPrefixFirst {
    fn name(&self) -> &'static str {
        "lpm"
    }

    fn decide(&mut self, view: &View<'_>) -> Decision {
        self.run(view, &mut Silent).0
    }

    fn explain(&mut self, view: &View<'_>) -> Vec<(RequestId, Why)> {
        let mut reasons = Reasons::default();
        let (_, rest) = self.run(view, &mut reasons);
        reasons.of(view, rest)
    }
}
