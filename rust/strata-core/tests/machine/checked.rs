//! A policy under watch: what must hold of every single decision that Core asks for.

use std::collections::HashSet;
use strata_sched::{Decision, Policy, Step, View, Waiting, Why};
use strata_types::RequestId;

pub struct Checked(pub Box<dyn Policy>);

impl Policy for Checked {
    fn name(&self) -> &'static str {
        self.0.name()
    }

    fn deferral_threshold(&self) -> Option<u32> {
        self.0.deferral_threshold()
    }

    fn decide(&mut self, view: &View<'_>) -> Decision {
        let decision = self.0.decide(view);
        assert_eq!(decision, self.0.decide(view), "equal views, unequal decisions");
        self.expect_owners_first(view, &decision);
        self.expect_loads_consumed(view, &decision);
        decision
    }

    fn explain(&mut self, view: &View<'_>) -> Vec<(RequestId, Why)> {
        self.0.explain(view)
    }
}

impl Checked {
    fn is_delay_hit(&self, waiting: &Waiting) -> bool {
        self.deferral_threshold().is_some_and(|most| waiting.standing.need.transient > most)
    }

    fn may_go(&self, view: &View<'_>, waiting: &Waiting) -> bool {
        let in_time = waiting.standing.defer_until.is_some_and(|until| view.now < until);
        !(waiting.held || in_time && self.is_delay_hit(waiting))
    }

    /// Whoever needs what another computes goes after its owner has had its time, and one alone takes its place.
    fn expect_owners_first(&self, view: &View<'_>, decision: &Decision) {
        let mut owners = HashSet::new();
        for admission in &decision.admissions {
            let waiting = view.waiting.get(admission.id).expect("admits somebody who does not wait");
            assert!(
                self.may_go(view, waiting),
                "{waiting:?} goes before its owner, or though it is held back"
            );
            let owner = waiting.standing.follows.filter(|_| self.is_delay_hit(waiting));
            assert!(owner.is_none_or(|owner| owners.insert(owner)), "two take over from {owner:?}");
        }
    }

    /// Where nothing runs, somebody goes: those first whose load has ended, unless there is no room or nobody may.
    fn expect_loads_consumed(&self, view: &View<'_>, decision: &Decision) {
        if view.running > 0 || decision.step != Step::Idle {
            return;
        }
        let may_go = |waiting: &&Waiting| self.may_go(view, waiting);
        let mut able = view.waiting.iter().filter(may_go).peekable();
        let lacks_room = |waiting: &Waiting| waiting.standing.pages > view.available_pages;
        assert!(able.peek().is_none() || able.any(lacks_room), "nothing runs, and nobody goes");
    }
}
