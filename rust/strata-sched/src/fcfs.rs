//! First come, first served: prefill before decode, the queue in order of priority and arrival, the head never
//! passed by. The yardstick for every other policy.

use crate::{Admission, Chunk, Decision, Policy, View, Waiting};
use std::cmp::Reverse;

/// The policy `fcfs`.
#[derive(Debug, Default)]
pub struct FirstComeFirstServed;

impl FirstComeFirstServed {
    fn admissions(view: &View<'_>, mut budget: u32) -> Vec<Admission> {
        let mut queue: Vec<&Waiting> = view.waiting.iter().filter(|waiting| !waiting.held).collect();
        // Stable: within one priority the queue's own order stays, so put-back requests keep their place.
        queue.sort_by_key(|waiting| Reverse(waiting.priority));
        let mut admissions = Vec::new();
        let mut pages = view.available_pages;
        for (running, waiting) in (view.running..).zip(queue) {
            // One page for each runner to grow into, or the newcomer would be preempted at once.
            if budget == 0
                || running >= view.limits.max_running
                || waiting.pages.saturating_add(running) > pages
            {
                break;
            }
            // A load brings no compute, but the last token is always computed.
            let tokens = (waiting.need.compute + waiting.need.transient + waiting.need.disk).clamp(1, budget);
            admissions.push(Admission { id: waiting.id, tokens: budget });
            budget -= tokens;
            pages -= waiting.pages;
        }
        admissions
    }
}

impl Policy for FirstComeFirstServed {
    fn name(&self) -> &'static str {
        "fcfs"
    }

    fn decide(&mut self, view: &View<'_>) -> Decision {
        let mut budget = view.limits.batch_tokens;
        let mut chunks = Vec::new();
        for prefilling in view.prefilling {
            let tokens = prefilling.remaining.min(budget);
            if tokens == 0 {
                break;
            }
            chunks.push(Chunk { id: prefilling.id, tokens });
            budget -= tokens;
        }
        let admissions = Self::admissions(view, budget);
        if !chunks.is_empty() || !admissions.is_empty() {
            return Decision::Prefill { chunks, admissions };
        }
        if view.decodable.is_empty() {
            return Decision::Idle;
        }
        Decision::Decode(view.decodable.to_vec())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Limits, Need, Prefilling};
    use proptest::prelude::*;
    use strata_types::{RequestId, Time};

    fn waiting(id: u64, compute: u32, pages: u32) -> Waiting {
        let need = Need { compute, ..Need::default() };
        Waiting { id: RequestId(id), arrived: Time(id), priority: 0, need, pages, held: false }
    }

    fn view<'a>(
        waiting: &'a [Waiting],
        prefilling: &'a [Prefilling],
        decodable: &'a [RequestId],
    ) -> View<'a> {
        let limits = Limits { batch_tokens: 512, max_running: 8 };
        let running = (prefilling.len() + decodable.len()) as u32;
        View { now: Time(0), waiting, prefilling, decodable, running, available_pages: 100, limits }
    }

    fn admitted(decision: Decision) -> Vec<u64> {
        match decision {
            Decision::Prefill { admissions, .. } => {
                admissions.iter().map(|admission| admission.id.0).collect()
            }
            other => panic!("expected a prefill, got {other:?}"),
        }
    }

    #[test]
    fn running_prompts_go_on_before_new_ones_start() {
        let queue = [waiting(1, 300, 20), waiting(2, 300, 20)];
        let running = [Prefilling { id: RequestId(0), remaining: 400 }];
        let decision = FirstComeFirstServed.decide(&view(&queue, &running, &[]));
        let Decision::Prefill { chunks, admissions } = decision else { panic!("not a prefill") };
        assert_eq!(chunks, [Chunk { id: RequestId(0), tokens: 400 }]);
        assert_eq!(admissions, [Admission { id: RequestId(1), tokens: 112 }]);
    }

    #[test]
    fn a_head_that_does_not_fit_blocks_but_a_held_one_does_not() {
        let mut queue = [waiting(1, 10, 101), waiting(2, 10, 1)];
        let decodable = [RequestId(9)];
        let blocked = FirstComeFirstServed.decide(&view(&queue, &[], &decodable));
        assert_eq!(blocked, Decision::Decode(vec![RequestId(9)]));
        queue[0].held = true;
        assert_eq!(admitted(FirstComeFirstServed.decide(&view(&queue, &[], &decodable))), [2]);
    }

    #[test]
    fn priority_comes_before_arrival() {
        let mut queue = [waiting(1, 10, 1), waiting(2, 10, 1), waiting(3, 10, 1)];
        queue[2].priority = 5;
        assert_eq!(admitted(FirstComeFirstServed.decide(&view(&queue, &[], &[]))), [3, 1, 2]);
    }

    proptest! {
        #[test]
        fn budgets_hold_and_work_is_never_ignored(
            waits in prop::collection::vec((1u32..900, 1u32..60, any::<bool>()), 0..12),
            runs in prop::collection::vec(1u32..900, 0..4), decodes in 0u64..5,
        ) {
            let queue: Vec<Waiting> = waits.iter().enumerate().map(|(index, (compute, pages, held))| {
                Waiting { held: *held, ..waiting(index as u64, *compute, *pages) }
            }).collect();
            let running: Vec<Prefilling> = runs.iter().enumerate().map(|(index, remaining)| {
                Prefilling { id: RequestId(100 + index as u64), remaining: *remaining }
            }).collect();
            let decodable: Vec<RequestId> = (200..200 + decodes).map(RequestId).collect();
            let view = view(&queue, &running, &decodable);
            let decision = FirstComeFirstServed.decide(&view);
            prop_assert_eq!(&decision, &FirstComeFirstServed.decide(&view));
            match decision {
                Decision::Prefill { chunks, admissions } => {
                    let tokens: u32 = chunks.iter().map(|chunk| chunk.tokens).sum();
                    prop_assert!(tokens <= 512);
                    let pages: u32 = admissions.iter()
                        .filter_map(|a| queue.iter().find(|w| w.id == a.id)).map(|w| w.pages).sum();
                    prop_assert!(pages <= 100);
                    prop_assert!(admissions.iter().all(|a| !queue[a.id.0 as usize].held));
                }
                Decision::Decode(ids) => {
                    prop_assert!(running.is_empty());
                    prop_assert_eq!(ids, decodable);
                }
                Decision::Idle => prop_assert!(running.is_empty() && decodable.is_empty()),
            }
        }
    }
}
