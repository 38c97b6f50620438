//! Situations that once went wrong, each set up on the machine of `machine`.
#![allow(clippy::unwrap_used, clippy::panic, clippy::expect_used)]

mod machine;

use machine::{oracle, Machine, Prefetch, Setup, Write, PROMPTS, VOCABULARY};
use std::time::Duration;
use strata_core::StepFailure;
use strata_types::{RequestId, TierId, Token, TransferError, TransferKind};

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

/// A hit's age is the time since its pages were last accessed.
#[test]
fn ages_of_hits_are_counted() {
    let setup = Setup {
        page_size: 2,
        pages: [40, 0, 0],
        write: [Write::Through; 2],
        prefetch: Prefetch::Adaptive,
        staging: 0,
        outstanding: 1,
        batch_tokens: 64,
        fault_percent: 0,
    };
    PROMPTS.with(|prompts| prompts.borrow_mut().clear());
    let mut machine = Machine::new(setup, 1);
    for (id, pause) in [(1, 0), (2, 30), (3, 7000), (4, 0)] {
        machine.now = machine.now + Duration::from_secs(pause);
        machine.arrive(RequestId(id), (0..9).collect(), 2, "", 0);
        machine.settle();
        machine.drain();
    }
    let ages = machine.core.stats().control.hit_ages;
    assert_eq!(ages.hits, [1, 0, 1, 0, 0, 1]);
    assert_eq!(ages.total_ns / 1_000_000_000, 7030);
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

/// A prefetch pins its whole path; where the device holds the only copy of that path's first pages, those cannot be
/// evicted. A request that needs the whole device must get it all the same, or nobody would ever run again.
#[test]
fn a_waiting_prefetch_does_not_keep_the_head_of_the_queue_out() {
    let setup = Setup {
        page_size: 1,
        pages: [20, 40, 40],
        write: [Write::Through; 2],
        prefetch: Prefetch::Wait,
        staging: 0,
        outstanding: 1,
        batch_tokens: 64,
        fault_percent: 0,
    };
    PROMPTS.with(|prompts| prompts.borrow_mut().clear());
    let mut machine = Machine::new(setup, 5);
    let prompt = |length: u32, step: u32| -> Vec<Token> {
        (0..length).map(|index| index * step % VOCABULARY).collect()
    };
    let ask = |machine: &mut Machine, number, prompt: Vec<Token>, priority| {
        machine.arrive(RequestId(number), prompt, 1, "", priority);
        machine.settle();
    };
    // The first pages are never backed up, what comes after them is, and goes to disk.
    ask(&mut machine, 1, prompt(6, 1), 0);
    let first_pages: Vec<u32> = machine.plans[0].rows[0].pages.iter().map(|page| page.0).collect();
    let pump = |machine: &mut Machine| {
        while machine.compute_one() || !machine.transfers.is_empty() {
            while let Some(transfer) = machine.transfers.pop_front() {
                let source = transfer.pages[0].from.0;
                let fails = transfer.kind == TransferKind::Backup && first_pages.contains(&source);
                let error = TransferError::Io { operation: "backup".into(), reason: "EIO".into() };
                let whole = if fails { 0 } else { transfer.pages.len() };
                machine.finish(transfer, whole, fails.then_some(error));
            }
            machine.settle();
        }
    };
    pump(&mut machine);
    ask(&mut machine, 2, prompt(12, 1), 0);
    pump(&mut machine);
    let (reply, _answer) = crossbeam_channel::bounded(1);
    let tiers = vec![TierId::DEVICE, TierId::HOST];
    machine.core.demote(machine.now + Duration::from_secs(1), tiers, reply);
    machine.settle();
    pump(&mut machine);
    ask(&mut machine, 4, prompt(13, 1), 0);
    assert_eq!(machine.core.stats().held, 1, "{:?}", machine.core.stats().tiers);
    ask(&mut machine, 5, prompt(20, 3), 1);
    machine.drain();
    for (id, prompt) in [(4, prompt(13, 1)), (5, prompt(20, 3))] {
        assert_eq!(machine.done.get(&RequestId(id)), Some(&oracle(&prompt, 1)), "request {id}");
    }
    machine.core.check().unwrap();
}
