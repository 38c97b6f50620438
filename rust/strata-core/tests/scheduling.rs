//! What the scheduler promises, situation by situation, on the machine of `machine`: who computes what, who waits for
//! whom and for how long, and what the queue says of it. Every answer equals the oracle.
#![allow(clippy::unwrap_used, clippy::panic, clippy::expect_used)]

mod machine;

use machine::timed::Timed;
use machine::{oracle, Machine, Prefetch, Schedule, Setup, Speeds, PROMPTS, VOCABULARY};
use std::time::Duration;
use strata_core::PlanKind;
use strata_sched::Why;
use strata_types::{RequestId, TierId, Token, TransferKind};

const PAGE: usize = 16;

/// Tokens that two different seeds have hardly in common.
fn text(seed: u32, length: usize) -> Vec<Token> {
    let mut state = seed.wrapping_mul(2_654_435_761).wrapping_add(12345);
    let mut next = || {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        (state >> 16) % VOCABULARY
    };
    (0..length).map(|_| next()).collect()
}

/// A question about a document.
fn question(document: &[Token], number: u32, length: usize) -> Vec<Token> {
    [document, &text(1000 + number, length)].concat()
}

fn setup() -> Setup {
    Setup {
        page_size: PAGE,
        pages: [120, 120, 0],
        schedule: Schedule::Adaptive,
        threshold: 20,
        outstanding: 1,
        batch_tokens: 1024,
        max_running: 64,
        ..Setup::default()
    }
}

fn machine(setup: Setup) -> Machine {
    PROMPTS.with(|prompts| prompts.borrow_mut().clear());
    Machine::new(setup, 5)
}

fn ask(machine: &mut Machine, id: u64, prompt: &[Token], priority: i32) {
    machine.arrive(RequestId(id), prompt.to_vec(), 2, "", priority);
    machine.settle();
}

/// The next plan is carried out; what is to be moved is moved.
fn step(machine: &mut Machine) {
    while machine.move_one() {}
    assert!(machine.compute_one(), "nothing to compute");
    machine.settle();
}

/// Everything ends, everybody is answered and right, and nothing is left over.
fn finish(machine: &mut Machine) {
    machine.drain();
    assert!(machine.core.is_idle(), "{:?}", machine.core.stats());
    machine.core.check().unwrap();
    assert!(machine.streams.is_empty() && machine.refused.is_empty());
    for (id, answer) in &machine.done {
        let (prompt, most) = PROMPTS.with(|prompts| prompts.borrow()[id].clone());
        assert_eq!(*answer, oracle(&prompt, most), "request {id}");
    }
}

/// Prompt tokens that plans computed for these requests.
fn computed(machine: &Machine, ids: impl Fn(u64) -> bool) -> usize {
    let prefills = machine.formed.iter().filter(|plan| plan.kind == PlanKind::Prefill);
    prefills.flat_map(|plan| &plan.rows).filter(|row| ids(row.id)).map(|row| row.tokens.len()).sum()
}

/// The first position that a request computed, and the number of the plan.
fn first_row(machine: &Machine, id: u64) -> (usize, usize) {
    let plans = machine.formed.iter().enumerate();
    let mut rows = plans.flat_map(|(number, plan)| plan.rows.iter().map(move |row| (number, row)));
    rows.find(|(_, row)| row.id == id).map(|(number, row)| (number, row.tokens.start)).expect("never ran")
}

/// Why a request waits. What is said reads as a sentence.
fn why(machine: &mut Machine, id: u64) -> Why {
    let reasons = machine.core.explain(machine.now).unwrap();
    let why = reasons.into_iter().find(|report| report.request.0 == id).expect("does not wait").why;
    assert!(why.to_string().len() > 10);
    why
}

fn defers_to(why: Why) -> Option<u64> {
    match why {
        Why::Deferred { owner, .. } => owner.map(|owner| owner.0),
        _ => None,
    }
}

/// Empties these tiers downward.
fn demote(machine: &mut Machine, tiers: &[TierId]) {
    let (reply, _answer) = crossbeam_channel::bounded(1);
    machine.core.demote(machine.now + Duration::from_secs(60), tiers.to_vec(), reply);
    machine.settle();
    machine.drain();
}

#[test]
fn of_two_misses_on_one_context_the_second_waits_and_computes_its_own_tail() {
    let mut machine = machine(Setup { outstanding: 2, ..setup() });
    let document = text(1, 8 * PAGE);
    machine.arrive(RequestId(1), question(&document, 1, 9), 2, "", 0);
    ask(&mut machine, 2, &question(&document, 2, 9), 0);
    assert_eq!(defers_to(why(&mut machine, 2)), Some(1));
    assert_eq!(
        why(&mut machine, 2).to_string().split(';').next(),
        Some("deferred: request 1 computes 128 of its tokens")
    );
    finish(&mut machine);
    assert_eq!(first_row(&machine, 2).1, document.len());
    assert_eq!(computed(&machine, |id| id == 2), 9);
    let stats = machine.core.stats();
    assert_eq!(stats.deferrals, 1);
    assert!(stats.deferral > Duration::ZERO && stats.rounds.deferred > 0);
}

#[test]
fn eight_misses_on_one_document_compute_it_once() {
    let document = text(1, 135);
    let total = |threshold, batch_tokens| {
        let mut machine = machine(Setup { threshold, batch_tokens, outstanding: 2, ..setup() });
        for id in 1..=8 {
            machine.arrive(RequestId(id), question(&document, id as u32, 11), 2, "", 0);
        }
        machine.settle();
        finish(&mut machine);
        computed(&machine, |_| true)
    };
    let least = document.len() + 8 * 11;
    for batch_tokens in [1024, 64] {
        let (total, most) = (total(20, batch_tokens), least + 8 * PAGE);
        assert!((least..=most).contains(&total), "{total} of at most {most}");
    }
    assert_eq!(total(u32::MAX, 4096), 8 * (document.len() + 11), "without deferral each computes all");
}

#[test]
fn the_next_follower_in_order_takes_over_from_an_owner_that_is_aborted_in_the_queue() {
    let mut machine = machine(setup());
    let document = text(1, 8 * PAGE);
    ask(&mut machine, 100, &text(2, 20), 0);
    for id in [1, 2, 3, 4] {
        ask(&mut machine, id, &question(&document, id as u32, 9), i32::from(id == 3));
    }
    // The third has a higher priority: the first inherits it, and it is the third that takes over.
    assert_eq!([2, 3, 4].map(|id| defers_to(why(&mut machine, id))), [Some(1); 3]);
    machine.abort(RequestId(1));
    assert_eq!([2, 4].map(|id| defers_to(why(&mut machine, id))), [Some(3); 2]);
    assert!(matches!(why(&mut machine, 3), Why::Next { .. }));
    finish(&mut machine);
    assert_eq!(computed(&machine, |id| id != 100), document.len() + 3 * 9, "and nothing twice");
}

#[test]
fn a_follower_goes_on_where_an_owner_was_aborted_in_flight() {
    let mut machine = machine(Setup { batch_tokens: 32, ..setup() });
    let document = text(1, 8 * PAGE);
    for id in [1, 2, 3] {
        ask(&mut machine, id, &question(&document, id as u32, 9), 0);
    }
    step(&mut machine);
    step(&mut machine);
    machine.abort(RequestId(1));
    machine.settle();
    assert_eq!(defers_to(why(&mut machine, 2)), Some(1), "its third chunk is being computed");
    step(&mut machine);
    assert_eq!(first_row(&machine, 2).1, 96, "what was published stays");
    assert_eq!(defers_to(why(&mut machine, 3)), Some(2));
    finish(&mut machine);
    assert_eq!(computed(&machine, |_| true), document.len() + 2 * 9);
}

#[test]
fn an_owner_whose_step_fails_keeps_what_it_claimed() {
    let mut machine = machine(Setup { batch_tokens: 32, ..setup() });
    let document = text(1, 8 * PAGE);
    for id in [1, 2] {
        ask(&mut machine, id, &question(&document, id as u32, 9), 0);
    }
    step(&mut machine);
    let lost = machine.plans.pop_front().unwrap();
    machine.epoch = lost.epoch + 1;
    machine.core.plan_failed(machine.now, lost.id, strata_core::StepFailure::Step).unwrap();
    machine.settle();
    assert_eq!(defers_to(why(&mut machine, 2)), Some(1));
    finish(&mut machine);
    assert_eq!(
        computed(&machine, |_| true),
        document.len() + 2 * 9 + 32,
        "only what was lost is computed twice"
    );
}

/// Request 1 owns a document whose beginning is on a disk that hangs, and is held back for that; 2 and 3 follow it.
fn with_held_owner() -> Machine {
    let setup = Setup { pages: [60, 40, 60], prefetch: Prefetch::Patient, share_percent: 5, ..setup() };
    let mut machine = machine(setup);
    // Nothing is measured: nobody can say that reading is slower than computing.
    machine.busy = Duration::ZERO;
    let (beginning, document) = (text(1, 4 * PAGE), text(2, 6 * PAGE));
    ask(&mut machine, 100, &question(&beginning, 0, 3), 0);
    machine.drain();
    demote(&mut machine, &[TierId::DEVICE, TierId::HOST]);
    machine.hang_disk(true);
    let whole = [beginning, document].concat();
    for id in [1, 2, 3] {
        ask(&mut machine, id, &question(&whole, id as u32, 9), 0);
    }
    assert!(matches!(why(&mut machine, 1), Why::Held { tokens: 64 }));
    // For the second and third there is no room to read ahead in: they would compute what is on disk.
    assert_eq!([2, 3].map(|id| defers_to(why(&mut machine, id))), [Some(1); 2]);
    assert!(machine.plans.is_empty());
    machine
}

#[test]
fn an_owner_that_never_starts_is_overtaken_at_the_bound() {
    let mut machine = with_held_owner();
    let asked = machine.now;
    machine.now = machine.core.next_deadline().unwrap();
    assert!((900..1100).contains(&(machine.now.since(asked).as_millis())), "the bound is a second");
    machine.settle();
    assert_eq!(machine.formed.last().unwrap().rows[0].id, 2, "the first in order");
    assert_eq!(machine.core.stats().rounds.taken_over, 1);
    assert_eq!(defers_to(why(&mut machine, 3)), Some(2));
    assert!(matches!(why(&mut machine, 1), Why::Held { .. }));
    while machine.done.len() < 3 {
        step(&mut machine);
    }
    machine.hang_disk(false);
    finish(&mut machine);
    assert_eq!(computed(&machine, |id| id == 3), 9);
    assert!(computed(&machine, |id| id == 1) <= 9 + 4 * PAGE, "the old owner hits");
}

#[test]
fn an_old_owner_hits_what_its_follower_took_over() {
    let mut machine = with_held_owner();
    machine.now = machine.core.next_deadline().unwrap();
    machine.settle();
    assert_eq!(machine.formed.last().unwrap().rows[0].id, 2, "the first in order takes over");
    // The disk answers while the follower computes: nothing holds the old owner back now, and it waits as others do.
    machine.hang_disk(false);
    machine.settle();
    while machine.move_one() {
        machine.settle();
    }
    assert_eq!([1, 3].map(|id| defers_to(why(&mut machine, id))), [Some(2); 2]);
    finish(&mut machine);
    for id in [1, 3] {
        let rows = machine.formed.iter().flat_map(|plan| &plan.rows);
        let sources: Vec<_> = rows.filter(|row| row.id == id).filter_map(|row| row.sources).collect();
        assert_eq!(sources.len(), 1, "it is admitted once");
        assert_eq!(sources[0].computed, 9, "{sources:?}");
        assert_eq!(computed(&machine, |other| other == id), 9);
    }
    assert_eq!(machine.core.stats().rounds.taken_over, 1);
}

#[test]
fn a_follower_computes_before_its_owner_has_ended() {
    let document = text(1, 4 * PAGE);
    for outstanding in [1, 2] {
        let mut machine = machine(Setup { batch_tokens: 32, outstanding, ..setup() });
        // The owner goes on for long after the part that others wait for.
        machine.arrive(RequestId(1), question(&document, 1, 12 * PAGE), 2, "", 0);
        for (id, length) in [(2, 9), (3, 9), (4, 40)] {
            machine.arrive(RequestId(id), question(&document, id as u32, length), 2, "", 0);
        }
        machine.settle();
        assert_eq!([2, 3, 4].map(|id| defers_to(why(&mut machine, id))), [Some(1); 3]);
        finish(&mut machine);
        let chunks = |id: u64| -> Vec<(usize, usize)> {
            let plans = machine.formed.iter().enumerate().filter(|(_, plan)| plan.kind == PlanKind::Prefill);
            let rows = plans.flat_map(|(number, plan)| plan.rows.iter().map(move |row| (number, row)));
            rows.filter(|(_, row)| row.id == id).map(|(number, row)| (number, row.tokens.len())).collect()
        };
        let owner = chunks(1);
        let ended = owner.last().unwrap().0;
        for id in [2, 3] {
            assert_eq!(first_row(&machine, id).1, document.len(), "it waited for what it needs");
            assert_eq!(chunks(id).len(), 1, "it goes as a whole");
            assert!(first_row(&machine, id).0 + 2 <= ended, "{:?} beside {owner:?}", chunks(id));
        }
        // In all chunks but the last: the owner's part is never less than half of the batch.
        assert!(owner[..owner.len() - 1].iter().all(|(_, tokens)| *tokens >= 16), "{owner:?}");
        // More than half of a batch would have to wait for the owner's rest in the middle: it waits before it begins.
        assert!(first_row(&machine, 4).0 >= ended, "{:?} beside {owner:?}", chunks(4));
        assert_eq!(
            computed(&machine, |_| true),
            document.len() + 12 * PAGE + 9 + 9 + 40,
            "and nothing twice"
        );
    }
}

#[test]
fn an_early_follower_ends_sooner_and_its_owner_no_later_than_by_what_it_computes() {
    let ends = |threshold: u32| {
        let setup = Setup { batch_tokens: 32, threshold, pages: [120, 0, 0], ..setup() };
        let mut timed = timed(setup, &[], 1.0);
        let document = text(1, 4 * PAGE);
        timed.machine.arrive(RequestId(1), question(&document, 1, 12 * PAGE), 1, "", 0);
        timed.machine.arrive(RequestId(2), question(&document, 2, 9), 1, "", 0);
        let asked = timed.machine.now;
        timed.run(|timed| timed.machine.done.len() == 2);
        [1, 2].map(|id| timed.ran.iter().rfind(|step| step.has(id)).unwrap().to.since(asked).as_millis())
    };
    let ([owner, follower], [alone, _]) = (ends(20), ends(u32::MAX));
    assert!(follower * 2 < owner, "{follower} ms and {owner} ms");
    // A millisecond a token, and one for each event that the machine takes in.
    assert!(owner <= alone + 9 + 10, "{owner} ms with a follower, {alone} ms before it");
}

#[test]
fn an_owner_inherits_the_priority_of_a_follower() {
    let mut machine = machine(Setup { batch_tokens: 160, ..setup() });
    let document = text(1, 8 * PAGE);
    ask(&mut machine, 100, &text(2, 20), 0);
    ask(&mut machine, 1, &question(&document, 1, 32), 0);
    ask(&mut machine, 2, &text(3, 160), 1);
    assert_eq!(machine.core.explain(machine.now).unwrap()[0].request, RequestId(2));
    ask(&mut machine, 3, &question(&document, 3, 32), 2);
    let order: Vec<u64> =
        machine.core.explain(machine.now).unwrap().iter().map(|report| report.request.0).collect();
    assert_eq!(order, [1, 3, 2]);
    assert!(matches!(why(&mut machine, 2), Why::BatchFull { .. }));
    finish(&mut machine);
    let plans = [1, 3, 2].map(|id| first_row(&machine, id).0);
    assert!(plans.is_sorted(), "{plans:?}");
    assert_eq!(computed(&machine, |id| id == 3), 32);
}

#[test]
fn sharers_of_a_prefix_on_the_device_are_never_deferred() {
    let mut machine = machine(Setup { outstanding: 2, batch_tokens: 64, ..setup() });
    let document = text(1, 8 * PAGE);
    ask(&mut machine, 100, &question(&document, 0, 3), 0);
    machine.drain();
    for id in 1..=50 {
        machine.arrive(RequestId(id), question(&document, id as u32, 18), 2, "", 0);
    }
    machine.settle();
    let reasons = machine.core.explain(machine.now).unwrap();
    assert!(reasons.iter().all(|report| matches!(report.why, Why::BatchFull { .. } | Why::Next { .. })));
    finish(&mut machine);
    let stats = machine.core.stats();
    assert_eq!((stats.deferrals, stats.rounds.deferred), (0, 0));
    assert_eq!(computed(&machine, |id| id < 100), 50 * 18);
}

/// A machine that knows its speeds, with documents on the host: request 100 + n asked for document n.
fn with_documents(setup: Setup, documents: &[Vec<Token>]) -> Machine {
    let mut machine = machine(setup);
    // What this takes is not to be learnt from.
    machine.busy = Duration::ZERO;
    for (number, document) in documents.iter().enumerate() {
        ask(&mut machine, 100 + number as u64, &question(document, 0, 3), 0);
        machine.drain();
    }
    demote(&mut machine, &[TierId::DEVICE]);
    assert_eq!(machine.core.stats().tiers[0].resident, 0);
    machine
}

#[test]
fn loads_begin_while_requests_wait() {
    let setup = Setup { pages: [40, 120, 0], max_running: 1, speeds: Speeds::Fast, ..setup() };
    let documents: Vec<Vec<Token>> = (0..5).map(|number| text(50 + number, 4 * PAGE)).collect();
    let mut machine = with_documents(setup, &documents);
    machine.endless = true;
    machine.arrive(RequestId(1), text(1, 20), 40, "", 0);
    machine.settle();
    for (number, document) in documents.iter().enumerate() {
        machine.arrive(RequestId(10 + number as u64), question(document, 1, 5), 2, "", 0);
    }
    step(&mut machine);
    let loading = |machine: &Machine| -> usize {
        let loads = machine.transfers.iter().filter(|transfer| transfer.kind == TransferKind::Load);
        loads.map(|transfer| transfer.pages.len()).sum()
    };
    assert_eq!(loading(&machine), 12, "three documents of four pages: 30 % of the device");
    assert_eq!(machine.core.stats().early_loads, 3);
    assert!(matches!(why(&mut machine, 10), Why::RunningFull { limit: 1 }));
    machine.abort(RequestId(11));
    machine.settle();
    while machine.move_one() {}
    step(&mut machine);
    assert_eq!(loading(&machine), 4, "the share of the aborted one is free");
    let there = machine.core.stats().control.edge(TransferKind::Load).completed;
    assert!(there >= 2, "{there} loads were over while the first request still ran");
    machine.abort(RequestId(1));
    machine.endless = false;
    finish(&mut machine);
    let rows = machine.formed.iter().flat_map(|plan| &plan.rows);
    let sources = rows.filter(|row| row.id == 10).find_map(|row| row.sources).unwrap();
    // It lay on the device before its turn; where it came from is the host all the same.
    assert_eq!((sources.device, sources.host), (0, 4 * PAGE));
}

/// A millisecond a token, two a step, and a load that takes so many milliseconds a page.
fn timed(setup: Setup, documents: &[Vec<Token>], per_page: f64) -> Timed {
    let speeds = Speeds::Given { per_step: 2e-3, per_token: 1e-3, per_byte: per_page / 1e3 / 64.0 };
    Timed::new(with_documents(Setup { speeds, ..setup }, documents), 2.0, 1.0, per_page)
}

/// Starts a stream and lets it decode some tokens.
fn start_stream(timed: &mut Timed) {
    timed.machine.endless = true;
    timed.machine.arrive(RequestId(1), text(1, 20), 400, "", 0);
    timed.run(|timed| timed.ran.len() >= 6);
}

#[test]
fn streams_decode_while_a_load_cannot_be_hidden() {
    let document = text(50, 8 * PAGE);
    for with_stream in [true, false] {
        let mut timed = timed(setup(), std::slice::from_ref(&document), 8.0);
        if with_stream {
            start_stream(&mut timed);
        }
        let asked = timed.machine.now;
        timed.machine.arrive(RequestId(2), question(&document, 2, 5), 2, "", 0);
        if with_stream {
            assert_eq!(why(&mut timed.machine, 2), Why::Loads { tokens: 8 * PAGE as u32 });
        }
        timed.run(|timed| timed.ran.iter().any(|step| step.has(2)));
        let loaded = timed.loads[0];
        assert!(loaded.since(asked) < Duration::from_millis(20));
        let prefill = timed.ran.last().unwrap().clone();
        assert_eq!((prefill.kind, prefill.rows.clone()), (PlanKind::Prefill, vec![(2, 5)]));
        let between = timed.ran.iter().filter(|step| step.from >= loaded && step.to <= prefill.from);
        let decodes = between.filter(|step| step.kind == PlanKind::Decode && step.has(1)).count();
        let formed = timed.machine.formed.iter().find(|plan| plan.rows.iter().any(|row| row.id == 2));
        let waited = formed.unwrap().at.since(asked);
        match with_stream {
            true => assert!(decodes >= 5 && waited > Duration::from_millis(30), "{decodes}, {waited:?}"),
            false => assert!(waited < Duration::from_millis(3), "nothing else to do: {waited:?}"),
        }
    }
}

#[test]
fn what_runs_before_a_prompt_hides_its_load_too() {
    let document = text(50, 8 * PAGE);
    // Of the load's eleven milliseconds its five tokens hide seven: more is left than the three of a decode step, which a
    // bubble costs whoever has nobody behind, unless a step that runs already hides three too.
    for (outstanding, goes_at_once) in [(1, false), (2, true)] {
        let setup = Setup { outstanding, ..setup() };
        let mut timed = timed(setup, std::slice::from_ref(&document), 1.375);
        start_stream(&mut timed);
        let before = timed.machine.formed.len();
        timed.machine.arrive(RequestId(2), question(&document, 2, 5), 2, "", 0);
        timed.run(|timed| timed.ran.iter().any(|step| step.has(2)));
        let next = &timed.machine.formed[before];
        assert_eq!(next.rows.iter().any(|row| row.id == 2), goes_at_once, "{next:?}");
    }
}

#[test]
fn a_running_stream_waits_no_longer_than_the_bound_for_its_next_token() {
    let longest_gap = |max_decode_stall: Option<Duration>, outstanding| {
        let mut timed = timed(Setup { max_decode_stall, outstanding, ..setup() }, &[], 1.0);
        start_stream(&mut timed);
        for id in [2, 3] {
            timed.machine.arrive(RequestId(id), text(id as u32, 300), 2, "", 0);
        }
        let first = timed.ran.len();
        timed.run(|timed| {
            timed.ran.iter().filter(|step| step.has(3)).count() >= 2 && timed.ran.last().unwrap().has(1)
        });
        let tokens = timed.ran[first - 1..].iter().filter(|step| step.has(1));
        let ends: Vec<_> = tokens.map(|step| step.to).collect();
        let prefills = timed.ran.iter().filter(|step| step.kind == PlanKind::Prefill).count();
        (ends.windows(2).map(|pair| pair[1].since(pair[0])).max().unwrap(), prefills)
    };
    let bound = Duration::from_millis(80);
    for outstanding in [1, 2] {
        let (free, few) = longest_gap(None, outstanding);
        assert!(free > Duration::from_millis(600) && few <= 3, "{free:?} in {few} prefills");
        let (bounded, many) = longest_gap(Some(bound), outstanding);
        // A millisecond for each event that the machine takes in meanwhile.
        assert!(bounded <= bound + Duration::from_millis(6) && many > few, "{bounded:?} in {many} prefills");
    }
}

#[test]
fn decisions_follow_a_link_that_becomes_four_times_slower() {
    let documents: Vec<Vec<Token>> = (0..50).map(|number| text(50 + number, 2 * PAGE)).collect();
    let mut timed = timed(setup(), &documents, 6.0);
    let mut loads = Vec::new();
    for (number, document) in documents.iter().enumerate() {
        // Loading 32 tokens takes 12 ms, then 48; computing them takes 34.
        timed.per_page = if number < 20 { 6.0 } else { 24.0 };
        let id = number as u64 + 1;
        timed.machine.arrive(RequestId(id), question(document, 1, 3), 1, "", 0);
        timed.run(|timed| timed.machine.done.contains_key(&RequestId(id)));
        let rows = timed.machine.formed.iter().flat_map(|plan| &plan.rows);
        let sources = rows.filter(|row| row.id == id).find_map(|row| row.sources).unwrap();
        loads.push(sources.host > 0);
    }
    assert!(loads[..20].iter().all(|loads| *loads), "{loads:?}");
    assert!(loads[40..].iter().all(|loads| !loads), "{loads:?}");
}
