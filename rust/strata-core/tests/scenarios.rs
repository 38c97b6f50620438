//! Situations that once went wrong, each set up on the machine of `machine`.
#![allow(clippy::unwrap_used, clippy::panic, clippy::expect_used)]

mod machine;

use machine::{oracle, Machine, Prefetch, Setup, Speeds, Write, PROMPTS, VOCABULARY};
use std::time::Duration;
use strata_core::StepFailure;
use strata_types::{RequestId, TierId, Token, TransferDescriptor, TransferError, TransferKind};

/// A link on which every load is late must not hold a request for ever: it is computed instead.
#[test]
fn a_late_load_is_not_tried_again() {
    let setup = Setup::default();
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
    let setup = Setup { pages: [40, 0, 0], outstanding: 1, ..Setup::default() };
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
    let setup = Setup { page_size: 16, pages: [10, 0, 0], ..Setup::default() };
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
        prefetch: Prefetch::Wait,
        outstanding: 1,
        ..Setup::default()
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

/// Twelve documents that lie on disk alone, asked for at once, all through one page of staging.
#[test]
fn twelve_loads_pass_through_one_page_of_staging() {
    for prefetch in [Prefetch::Wait, Prefetch::Adaptive, Prefetch::BestEffort, Prefetch::Timeout] {
        let setup =
            Setup { pages: [30, 0, 100], write: [Write::Back; 2], prefetch, staging: 1, ..Setup::default() };
        PROMPTS.with(|prompts| prompts.borrow_mut().clear());
        let mut machine = Machine::new(setup, 9);
        let prompt = |number: u64| -> Vec<Token> {
            (0..13).map(|index| (index * (number as u32 % 5 + 1) + number as u32) % VOCABULARY).collect()
        };
        let ask_all = |machine: &mut Machine, from: u64| {
            for number in 0..12 {
                machine.arrive(RequestId(from + number), prompt(number), 2, "", 0);
            }
            machine.drain();
            assert!(machine.core.is_idle(), "{prefetch:?}: {:?}", machine.core.stats());
            for number in 0..12 {
                let answer = machine.done.get(&RequestId(from + number));
                assert_eq!(answer, Some(&oracle(&prompt(number), 2)), "request {number}");
            }
        };
        ask_all(&mut machine, 0);
        let (reply, _answer) = crossbeam_channel::bounded(2);
        let again = reply.clone();
        machine.core.demote(machine.now + Duration::from_secs(60), vec![TierId::DEVICE], again);
        machine.settle();
        machine.drain();
        let before = machine.core.stats();
        assert_eq!((before.tiers[0].resident, before.tiers[1].resident), (0, 0));
        ask_all(&mut machine, 100);
        // One after the other: each of its pages is a load of its own, and all wait for the one page.
        machine.core.demote(machine.now + Duration::from_secs(60), vec![TierId::DEVICE], reply);
        machine.settle();
        machine.drain();
        let long: Vec<Token> = (0..27).map(|index| index * 7 % VOCABULARY).collect();
        for number in 200..203 {
            machine.arrive(RequestId(number), long.clone(), 2, "", 0);
            machine.drain();
            assert_eq!(machine.done.get(&RequestId(number)), Some(&oracle(&long, 2)));
            let (reply, _answer) = crossbeam_channel::bounded(1);
            machine.core.demote(machine.now + Duration::from_secs(60), vec![TierId::DEVICE], reply);
            machine.settle();
            machine.drain();
        }
        if matches!(prefetch, Prefetch::Wait) {
            let stats = machine.core.stats();
            assert!(stats.prompt_tokens[2] >= 2 * 26, "{:?} tokens came from the disk", stats.prompt_tokens);
            let loads = stats.control.edge(TransferKind::Load);
            assert!(
                loads.completed >= 2 * 13 && loads.pages == loads.completed,
                "{loads:?}: a page at a time"
            );
        }
    }
}

/// A disk that never answers again: whoever waits for it goes on at the policy's bound, and nobody behind it is kept.
#[test]
fn a_hung_disk_delays_no_request_past_its_bound() {
    let bound = Duration::from_millis(30);
    for prefetch in [Prefetch::Adaptive, Prefetch::BestEffort, Prefetch::Timeout] {
        for pages in [[30, 30, 60], [30, 0, 60]] {
            let setup = Setup { pages, prefetch, staging: 4, ..Setup::default() };
            PROMPTS.with(|prompts| prompts.borrow_mut().clear());
            let mut machine = Machine::new(setup, 11);
            let prompt =
                |step: u32| -> Vec<Token> { (0..13).map(|index| index * step % VOCABULARY).collect() };
            for number in 0..4 {
                machine.arrive(RequestId(number), prompt(number as u32 + 1), 2, "", 0);
            }
            machine.drain();
            let (reply, _answer) = crossbeam_channel::bounded(1);
            let tiers = if pages[1] == 0 { vec![TierId::DEVICE] } else { vec![TierId::DEVICE, TierId::HOST] };
            machine.core.demote(machine.now + Duration::from_secs(60), tiers, reply);
            machine.settle();
            machine.drain();
            assert_eq!(machine.core.stats().tiers[0].resident, 0);
            let asked = machine.now;
            for number in 0..5 {
                machine.arrive(RequestId(10 + number), prompt(number as u32 + 1), 2, "", 0);
            }
            let waits = |machine: &Machine| machine.core.stats().waiting;
            while waits(&machine) > 0 && machine.now < asked + 4 * bound {
                // Whatever has to do with the disk hangs; the machine's clock goes on by a millisecond a round.
                let hung = |transfer: &strata_types::TransferDescriptor| {
                    matches!(transfer.kind, TransferKind::Prefetch | TransferKind::Spill)
                };
                while let Some(index) = machine.transfers.iter().position(|transfer| !hung(transfer)) {
                    let transfer = machine.transfers.remove(index).unwrap();
                    let whole = transfer.pages.len();
                    machine.finish(transfer, whole, None);
                }
                machine.compute_one();
                machine.settle();
            }
            let stats = machine.core.stats();
            let noticed = match prefetch {
                Prefetch::Adaptive | Prefetch::Timeout => stats.prefetch_timeouts > 0,
                _ => stats.control.edge(TransferKind::Prefetch).started > 0,
            };
            assert!(noticed, "{prefetch:?} over {pages:?}: nobody wanted the disk");
            assert_eq!(waits(&machine), 0, "{prefetch:?} over {pages:?}: {:?}", machine.core.stats());
            // Five prompts, each a step of computing or two, besides the bound.
            assert!(machine.now.since(asked) <= bound + Duration::from_millis(25), "{prefetch:?} {pages:?}");
            machine.drain();
            for number in 0..5 {
                let answer = machine.done.get(&RequestId(10 + number));
                assert_eq!(answer, Some(&oracle(&prompt(number as u32 + 1), 2)));
            }
        }
    }
}

/// Without a host tier a prefetch lands on the device and stays pinned there until its request is admitted. Who comes
/// before that request and needs the whole device must get it, or neither would ever run.
#[test]
fn what_a_waiting_request_has_on_the_device_keeps_nobody_out() {
    let setup = Setup {
        page_size: 1,
        pages: [20, 0, 40],
        staging: 6,
        prefetch: Prefetch::Wait,
        outstanding: 1,
        ..Setup::default()
    };
    PROMPTS.with(|prompts| prompts.borrow_mut().clear());
    let mut machine = Machine::new(setup, 5);
    let prompt = |length: u32, step: u32| -> Vec<Token> {
        (0..length).map(|index| index * step % VOCABULARY).collect()
    };
    machine.arrive(RequestId(1), prompt(12, 1), 1, "", 0);
    machine.settle();
    machine.drain();
    let (reply, _answer) = crossbeam_channel::bounded(1);
    machine.core.demote(machine.now + Duration::from_secs(1), vec![TierId::DEVICE], reply);
    machine.settle();
    machine.drain();
    machine.arrive(RequestId(2), prompt(13, 1), 1, "", 0);
    machine.settle();
    assert_eq!(machine.core.stats().held, 1, "{:?}", machine.core.stats().tiers);
    machine.arrive(RequestId(3), prompt(20, 3), 1, "", 1);
    machine.settle();
    machine.drain();
    for (id, prompt) in [(2, prompt(13, 1)), (3, prompt(20, 3))] {
        assert_eq!(machine.done.get(&RequestId(id)), Some(&oracle(&prompt, 1)), "request {id}");
    }
    machine.core.check().unwrap();
}

/// A disk that hangs keeps what it has begun for ever. Whoever comes later is answered all the same, and what the hung
/// reads keep of the device is bounded.
#[test]
fn a_disk_that_hangs_costs_its_own_pages_and_no_answer() {
    for (host, staging) in [(0, 6), (24, 0)] {
        let setup = Setup { page_size: 1, pages: [24, host, 60], staging, ..Setup::default() };
        PROMPTS.with(|prompts| prompts.borrow_mut().clear());
        let mut machine = Machine::new(setup, 11);
        let prompt =
            |step: u32| -> Vec<Token> { (0..12).map(|index| (index + 1) * step % VOCABULARY).collect() };
        let ask = |machine: &mut Machine, number: u32, step: u32| {
            machine.arrive(RequestId(u64::from(number)), prompt(step), 1, "", 0);
            machine.settle();
            machine.drain();
        };
        for step in 1..=4 {
            ask(&mut machine, step, step);
        }
        let (reply, _answer) = crossbeam_channel::bounded(1);
        let tiers = vec![TierId::DEVICE, TierId::HOST];
        machine.core.demote(machine.now + Duration::from_secs(1), tiers, reply);
        machine.settle();
        machine.drain();
        machine.hang_disk(true);
        for number in 5..=20u32 {
            let step = 1 + number % 4;
            ask(&mut machine, number, step);
            let answer = machine.done.get(&RequestId(u64::from(number)));
            assert_eq!(answer, Some(&oracle(&prompt(step), 1)), "request {number}, a host tier of {host}");
        }
        machine.hang_disk(false);
        machine.drain();
        assert!(machine.core.is_idle(), "{:?}", machine.core.stats());
        machine.core.check().unwrap();
    }
}

/// A copy to the host that arrives when the host tier has just been taken away must not stay: its pages are staging now.
#[test]
fn a_host_tier_that_is_gone_keeps_nothing_that_was_on_its_way() {
    let setup = Setup { pages: [40, 40, 40], staging: 6, ..Setup::default() };
    PROMPTS.with(|prompts| prompts.borrow_mut().clear());
    let mut machine = Machine::new(setup, 13);
    let prompt: Vec<Token> = (0..21).map(|index| index % VOCABULARY).collect();
    machine.arrive(RequestId(1), prompt.clone(), 1, "", 0);
    machine.settle();
    machine.compute_one();
    machine.settle();
    assert!(machine.transfers.iter().any(|transfer| transfer.kind == TransferKind::Backup));
    let (reply, answer) = crossbeam_channel::bounded(1);
    machine.core.resize(machine.now + Duration::from_millis(5), TierId::HOST, 0, reply);
    machine.settle();
    machine.now = machine.now + Duration::from_millis(10);
    machine.settle();
    let _early = answer.try_recv();
    machine.drain();
    machine.now = machine.now + Duration::from_millis(200);
    machine.settle();
    assert_eq!(machine.core.stats().tiers[1].resident, 0, "{:?}", machine.core.stats().tiers);
    // And the way through staging is open.
    machine.arrive(RequestId(2), (0..21).map(|index| index * 3 % VOCABULARY).collect(), 1, "", 0);
    machine.settle();
    machine.drain();
    assert!(machine.core.stats().control.staged_pages > 0);
    machine.core.check().unwrap();
}

/// Write-back waits for a tier that hangs once, not once for each eviction.
#[test]
fn write_back_waits_for_a_hung_disk_once() {
    let setup = Setup {
        page_size: 1,
        pages: [20, 12, 60],
        write: [Write::Back; 2],
        outstanding: 1,
        ..Setup::default()
    };
    PROMPTS.with(|prompts| prompts.borrow_mut().clear());
    let mut machine = Machine::new(setup, 17);
    machine.hang_disk(true);
    let mut waits = Vec::new();
    for number in 1..=16u32 {
        let prompt: Vec<Token> =
            (0..14).map(|index| (index * index + index * number + number) % VOCABULARY).collect();
        let asked = machine.now;
        machine.arrive(RequestId(u64::from(number)), prompt.clone(), 1, "", 0);
        machine.settle();
        while machine.streams.contains_key(&RequestId(u64::from(number))) {
            machine.move_one();
            machine.compute_one();
            machine.settle();
            let state = (number, machine.core.stats(), &machine.transfers, &machine.hanging, &machine.plans);
            assert!(machine.now.since(asked) < Duration::from_secs(1), "{state:?}");
        }
        assert_eq!(machine.done[&RequestId(u64::from(number))], oracle(&prompt, 1));
        waits.push(machine.now.since(asked));
    }
    // The patience of this machine is 20 ms.
    let waited = waits.iter().filter(|wait| **wait >= Duration::from_millis(20)).count();
    assert!((1..=2).contains(&waited), "once for each tier: {waits:?}");
    machine.hang_disk(false);
    machine.drain();
    assert!(machine.core.is_idle());
    machine.core.check().unwrap();
}

/// Copies that hang are not waited for by those who run and need room: one of them gives way.
#[test]
fn runners_do_not_wait_for_copies_that_hang() {
    for (host, staging) in [(0, 1), (1, 0)] {
        let setup =
            Setup { page_size: 1, pages: [16, host, 30], staging, outstanding: 1, ..Setup::default() };
        PROMPTS.with(|prompts| prompts.borrow_mut().clear());
        let mut machine = Machine::new(setup, 19);
        machine.hang_disk(true);
        let prompt = |number: u32| -> Vec<Token> { (0..8).map(|index| index * number % 5).collect() };
        for number in 1..=2u32 {
            machine.arrive(RequestId(u64::from(number)), prompt(number), 8, "", 0);
        }
        let asked = machine.now;
        while !machine.streams.is_empty() {
            machine.move_one();
            machine.compute_one();
            machine.settle();
            // The patience of this machine is 20 ms; nobody waits for it more than once or twice.
            assert!(machine.now.since(asked) < Duration::from_millis(200), "{:?}", machine.core.stats());
        }
        for number in 1..=2u32 {
            assert_eq!(machine.done[&RequestId(u64::from(number))], oracle(&prompt(number), 8));
        }
        assert!(machine.core.stats().preemptions > 0, "both found room: {:?}", machine.core.stats());
        machine.hang_disk(false);
        machine.drain();
        assert!(machine.core.is_idle());
        machine.core.check().unwrap();
    }
}

/// Room for a request whose prefix lies on the host is made by backups, which make room on the host: not by the very
/// pages that the request is about to load.
#[test]
fn room_is_not_made_of_what_is_about_to_be_loaded() {
    let setup = Setup {
        page_size: 1,
        pages: [14, 10, 60],
        write: [Write::Back, Write::Through],
        prefetch: Prefetch::BestEffort,
        speeds: Speeds::Fast,
        outstanding: 1,
        ..Setup::default()
    };
    PROMPTS.with(|prompts| prompts.borrow_mut().clear());
    let mut machine = Machine::new(setup, 23);
    let prompt = |first: Token, length: u32| -> Vec<Token> {
        (0..length).map(|index| (first + index * index) % VOCABULARY).collect()
    };
    let mut asked = 0;
    let mut ask = |machine: &mut Machine, prompt: Vec<Token>| {
        asked += 1;
        machine.arrive(RequestId(asked), prompt.clone(), 1, "", 0);
        machine.drain();
        assert_eq!(machine.done[&RequestId(asked)], oracle(&prompt, 1));
    };
    let demote = |machine: &mut Machine| {
        let (reply, _answer) = crossbeam_channel::bounded(1);
        machine.core.demote(machine.now + Duration::from_secs(60), vec![TierId::DEVICE], reply);
        machine.settle();
        machine.drain();
    };
    ask(&mut machine, prompt(1, 4));
    demote(&mut machine);
    ask(&mut machine, prompt(2, 6));
    demote(&mut machine);
    ask(&mut machine, prompt(3, 4));
    ask(&mut machine, prompt(2, 6));
    // The oldest on the host are the first request's pages, the oldest on the device are on it alone.
    ask(&mut machine, prompt(1, 9));
    let loads = *machine.core.stats().control.edge(TransferKind::Load);
    assert!(loads.pages >= 5 + 4, "nothing was loaded in the end: {loads:?}");
    machine.core.check().unwrap();
}

/// A file system that is smaller than the disk tier may be: what is new takes the place of what is old, as in a full
/// tier, and the rest of the tier is used once there is room for it.
#[test]
fn a_full_file_system_keeps_what_was_used_last() {
    const ROOM: u32 = 12;
    for staged in [false, true] {
        let host = if staged { 0 } else { 40 };
        let setup = Setup { pages: [40, host, 40], staging: 8, outstanding: 1, ..Setup::default() };
        PROMPTS.with(|prompts| prompts.borrow_mut().clear());
        let mut machine = Machine::new(setup, 3);
        let mut full = true;
        let ask = |machine: &mut Machine, number: u32, full: bool| {
            let prompt: Vec<Token> = (0..9).map(|index| (index * number + number) % VOCABULARY).collect();
            machine.arrive(RequestId(u64::from(number)), prompt, 1, "", 0);
            machine.settle();
            loop {
                let beyond = |transfer: &TransferDescriptor| {
                    transfer.kind == TransferKind::Spill
                        && transfer.pages.iter().any(|step| step.to.0 >= ROOM)
                };
                if let Some(index) = machine.transfers.iter().position(beyond).filter(|_| full) {
                    let transfer = machine.transfers.remove(index).unwrap();
                    let whole = transfer.pages.iter().take_while(|step| step.to.0 < ROOM).count();
                    let (operation, reason) = ("allocation".into(), "ENOSPC".into());
                    let error = TransferError::NoRoom { operation, reason, pages: vec![ROOM..20, 20..40] };
                    machine.finish(transfer, whole, Some(error));
                } else if !machine.move_one() && !machine.compute_one() {
                    break;
                }
                machine.settle();
            }
        };
        for number in 1..=12 {
            ask(&mut machine, number, full);
        }
        let stats = machine.core.stats();
        let spills = *stats.control.edge(TransferKind::Spill);
        assert_eq!(spills.pages, 12 * 4, "every page found room: {spills:?}");
        assert_eq!((stats.tiers[2].resident, stats.tiers[2].evicted), (ROOM, 12 * 4 - ROOM as u64));
        assert!(spills.failed <= 3, "the same is not tried again and again: {spills:?}");
        machine.core.check().unwrap();
        full = false;
        machine.now = machine.now + Duration::from_secs(10);
        for number in 13..=15 {
            ask(&mut machine, number, full);
        }
        assert_eq!(machine.core.stats().tiers[2].resident, ROOM + 3 * 4);
        machine.core.check().unwrap();
    }
}
