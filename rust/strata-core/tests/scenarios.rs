//! Situations that once went wrong, each set up on the machine of `machine`.
#![allow(clippy::unwrap_used, clippy::panic, clippy::expect_used)]

mod machine;

use machine::{oracle, Machine, Prefetch, Setup, Write, PROMPTS, VOCABULARY};
use std::time::Duration;
use strata_core::StepFailure;
use strata_types::{RequestId, TierId, Token, TransferKind};

/// A link on which every load is late must not hold a request for ever: it is computed instead.
#[test]
fn a_late_load_is_not_tried_again() {
    let setup = Setup {
        page_size: 2,
        pages: [40, 40, 0],
        write: [Write::Through; 2],
        prefetch: Prefetch::Adaptive,
        staging: 0,
        outstanding: 2,
        batch_tokens: 64,
        fault_percent: 0,
    };
    PROMPTS.with(|prompts| prompts.borrow_mut().clear());
    let mut machine = Machine::new(setup, 7);
    let prompt: Vec<Token> = (0..21).map(|index| index % VOCABULARY).collect();
    let answer = oracle(&prompt, 4);
    let ask = |machine: &mut Machine, number| {
        machine.arrive(RequestId(number), prompt.clone(), 4, "", 0);
        machine.settle();
    };
    ask(&mut machine, 1);
    machine.drain();
    let (reply, _answer) = crossbeam_channel::bounded(1);
    machine.core.demote(machine.now + Duration::from_secs(1), vec![TierId::DEVICE], reply);
    machine.settle();
    ask(&mut machine, 2);
    assert_eq!(machine.core.stats().control.edge(TransferKind::Load).started, 1);
    let plan = machine.plans.pop_front().unwrap();
    machine.epoch = plan.epoch + 1;
    machine.core.plan_failed(machine.now, plan.id, StepFailure::LateLoad).unwrap();
    machine.plans.clear();
    machine.settle();
    machine.drain();
    assert_eq!(machine.done[&RequestId(2)], answer);
    let loads = *machine.core.stats().control.edge(TransferKind::Load);
    assert_eq!((loads.started, loads.cancelled), (1, 1));
    machine.core.check().unwrap();
}

/// Two requests that do not fit together: the younger gives way and stays away until there is room to grow.
#[test]
fn a_preempted_request_does_not_take_its_pages_back_at_once() {
    let setup = Setup {
        page_size: 16,
        pages: [10, 0, 0],
        write: [Write::Through; 2],
        prefetch: Prefetch::Adaptive,
        staging: 0,
        outstanding: 2,
        batch_tokens: 64,
        fault_percent: 0,
    };
    PROMPTS.with(|prompts| prompts.borrow_mut().clear());
    let mut machine = Machine::new(setup, 3);
    for number in 1..=2u32 {
        let id = RequestId(u64::from(number));
        // The younger is in the middle of a page whenever the older needs one.
        let prompt: Vec<Token> =
            (0..56 - 8 * number).map(|index| (index * number + number) % VOCABULARY).collect();
        machine.arrive(id, prompt, 90, "", 0);
    }
    machine.endless = true;
    machine.settle();
    machine.drain();
    let stats = machine.core.stats();
    assert_eq!(stats.finished, 2);
    assert!((1..=2).contains(&stats.preemptions), "{} preemptions", stats.preemptions);
}
