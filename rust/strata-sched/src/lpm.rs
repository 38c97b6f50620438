//! Longest prefix first: within a priority, who has most of its prompt cached goes first, wherever it is cached.
//! Whoever has waited for too long goes before. A yardstick: it spares compute and does not look at loads.

use crate::fcfs::in_order;
use crate::order::{Order, Rules};
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
    /// By priority, cached tokens and place. Kept only for its memory.
    ranked: Vec<(Reverse<i32>, Reverse<u32>, usize)>,
}

impl Default for LongestPrefixFirst {
    fn default() -> LongestPrefixFirst {
        LongestPrefixFirst::new(DEFAULT_MAX_WAIT)
    }
}

impl LongestPrefixFirst {
    /// Whoever has waited for longer than `max_wait` goes first.
    pub fn new(max_wait: Duration) -> LongestPrefixFirst {
        LongestPrefixFirst { max_wait, order: Order::default(), ranked: Vec::new() }
    }

    fn run<R: Recorder>(&mut self, view: &View<'_>, recorder: &mut R) -> (Decision, Why) {
        self.order.form(view, Rules { threshold: None, max_wait: self.max_wait }, recorder);
        self.rank(view);
        in_order(&mut self.order, view, recorder)
    }

    /// Brings those who have not waited for too long into the order of their cached tokens.
    fn rank(&mut self, view: &View<'_>) {
        let glances = view.waiting.glances();
        let rank = |place: usize| {
            let glance = &glances[place];
            (Reverse(glance.priority), Reverse(glance.cached), place)
        };
        self.ranked.clear();
        self.ranked.extend(self.order.stretches.drain(self.order.aged..).flatten().map(rank));
        // No more than these can go, and what keeps the next from going is told of the rest.
        let most = view.limits.max_running.saturating_sub(view.running) as usize + 1;
        if most < self.ranked.len() {
            self.ranked.select_nth_unstable(most);
            self.ranked.truncate(most);
        }
        self.ranked.sort_unstable();
        self.order.stretches.extend(self.ranked.iter().map(|&(.., place)| place..place + 1));
    }
}

impl Policy for LongestPrefixFirst {
    fn name(&self) -> &'static str {
        "lpm"
    }

    fn decide(&mut self, view: &View<'_>) -> Decision {
        self.run(view, &mut Silent).0
    }

    fn explain(&mut self, view: &View<'_>) -> Vec<(RequestId, Why)> {
        Reasons::of(view, |reasons| self.run(view, reasons).1)
    }
}
