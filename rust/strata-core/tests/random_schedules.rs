//! Random requests, aborts, transfers, failures and plans on tiny pools, against the machine of `machine`: every
//! finished stream must equal the oracle, `check()` must hold after every step, and nothing may be left at the end.
#![allow(clippy::unwrap_used, clippy::panic, clippy::expect_used)]

mod machine;

use machine::{oracle, Formed, Machine, Prefetch, Schedule, Setup, Speeds, Write, PROMPTS, VOCABULARY};
use proptest::prelude::*;
use proptest::test_runner::{RngAlgorithm, TestRng, TestRunner};
use std::cell::RefCell;
use std::collections::{BTreeMap, HashMap};
use std::time::Duration;
use strata_core::{CoreStats, PlanKind, RefusalKind};
use strata_types::{RequestId, TierId, Token, TransferKind};

#[derive(Clone, Debug)]
enum Step {
    Arrive {
        document: u8,
        length: usize,
        tail: usize,
        max_new: usize,
        salt: bool,
        priority: i32,
    },
    Abort(usize),
    Move,
    Compute,
    Demote(u8),
    Flush(u8),
    Resize(u8, u32),
    PlugDisk,
    /// The disk hangs, or answers again.
    Hang(bool),
    Scan,
    /// So many milliseconds.
    Wait(u64),
    /// Everything under way ends.
    Drain,
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let step = prop_oneof![
        8 => (0u8..3, 0usize..26, 0usize..6, 1usize..9, prop::bool::weighted(0.1), 0i32..2).prop_map(
            |(document, length, tail, max_new, salt, priority)| Step::Arrive {
                document, length, tail, max_new, salt, priority
            }
        ),
        4 => (0usize..8).prop_map(Step::Abort),
        12 => Just(Step::Move),
        16 => Just(Step::Compute),
        4 => (1u8..8).prop_map(Step::Demote),
        2 => (1u8..8).prop_map(Step::Flush),
        1 => (0u8..3, 0u32..50).prop_map(|(tier, pages)| Step::Resize(tier, pages)),
        2 => Just(Step::PlugDisk),
        2 => prop::bool::weighted(0.4).prop_map(Step::Hang),
        2 => Just(Step::Scan),
        4 => prop::sample::select(vec![35u64, 120, 120]).prop_map(Step::Wait),
        6 => Just(Step::Drain),
    ];
    prop::collection::vec(step, 1..120)
}

fn setups() -> impl Strategy<Value = Setup> {
    let write = || prop::sample::select(vec![Write::Through, Write::Selective, Write::Back]);
    let prefetch =
        vec![Prefetch::Adaptive, Prefetch::Adaptive, Prefetch::BestEffort, Prefetch::Wait, Prefetch::Timeout];
    let sizes = (
        10u32..24,
        prop::sample::select(vec![0u32, 5, 12, 40, 40]),
        prop::sample::select(vec![0u32, 5, 60, 60]),
        1u32..7,
    );
    let policies = ([write(), write()], prop::sample::select(prefetch));
    (
        prop::sample::select(vec![1usize, 2, 4]),
        sizes,
        policies,
        1usize..3,
        prop::sample::select(vec![3u32, 8, 64]),
        prop::sample::select(vec![0u8, 20, 20]),
        (
            prop::sample::select(vec![5u8, 60, 60, 60, 100]),
            prop::sample::select(vec![None, None, Some(2000u64)]),
            prop_oneof![
                4 => Just(Speeds::Unknown),
                1 => Just(Speeds::SlowHost),
                1 => Just(Speeds::SlowDisk),
                4 => Just(Speeds::Fast),
            ],
            // Large pages are read in steps of one.
            prop::sample::select(vec![64u64, 64, 1 << 20]),
        ),
        (
            prop::sample::select(vec![
                Schedule::Fcfs,
                Schedule::Lpm,
                Schedule::Static,
                Schedule::Static,
                Schedule::Static,
                Schedule::Adaptive,
                Schedule::Adaptive,
                Schedule::Adaptive,
                Schedule::Adaptive,
            ]),
            prop::sample::select(vec![0u32, 0, 0, 3, 100]),
            prop::sample::select(vec![None, None, Some(Duration::from_millis(4))]),
        ),
    )
        .prop_map(
            |(page_size, sizes, policies, outstanding, batch_tokens, fault_percent, more, schedule)| {
                let (device, host, disk, staging) = sizes;
                let device = device * 4 / page_size as u32 + 4;
                Setup {
                    page_size,
                    pages: [device, host, disk],
                    write: policies.0,
                    prefetch: policies.1,
                    staging,
                    outstanding,
                    batch_tokens,
                    fault_percent,
                    share_percent: more.0,
                    disk_bytes_per_day: more.1,
                    speeds: more.2,
                    page_bytes: more.3,
                    schedule: schedule.0,
                    threshold: schedule.1,
                    max_decode_stall: schedule.2,
                    ..Setup::default()
                }
            },
        )
}

fn tiers(mask: u8, setup: &Setup) -> Vec<TierId> {
    (0..3).filter(|bit| mask & (1 << bit) != 0 && setup.pages[usize::from(*bit)] > 0).map(TierId).collect()
}

fn run(setup: Setup, steps: Vec<Step>, noise: u64) -> (CoreStats, u32, Vec<Formed>) {
    PROMPTS.with(|prompts| prompts.borrow_mut().clear());
    let mut machine = Machine::new(setup, noise);
    machine.unkept_every = 7;
    let mut wanted: HashMap<RequestId, Vec<Token>> = HashMap::new();
    let mut next = 0;
    for step in steps {
        match step {
            Step::Arrive { document, length, tail, max_new, salt, priority } => {
                let id = RequestId(next);
                next += 1;
                let mut prompt: Vec<Token> = (0..length as u32).map(|index| index % VOCABULARY).collect();
                prompt.extend((0..=tail as u32).map(|index| (index + u32::from(document)) % VOCABULARY));
                wanted.insert(id, oracle(&prompt, max_new));
                let salt = if salt { "other" } else { "" };
                machine.arrive(id, prompt, max_new, salt, priority);
            }
            Step::Abort(index) => {
                let mut ids: Vec<RequestId> = machine.streams.keys().copied().collect();
                ids.sort_unstable();
                if let Some(id) = ids.get(index).copied() {
                    wanted.remove(&id);
                    machine.abort(id);
                }
            }
            Step::Move => drop(machine.move_one()),
            Step::Compute => drop(machine.compute_one()),
            Step::Demote(mask) | Step::Flush(mask) => {
                let tiers = tiers(mask, &machine.setup);
                let deadline = machine.now + Duration::from_millis(40);
                let (reply, _answer) = crossbeam_channel::bounded(1);
                if matches!(step, Step::Demote(_)) {
                    machine.core.demote(deadline, tiers, reply);
                } else {
                    machine.core.flush(deadline, tiers, reply);
                }
            }
            Step::Resize(tier, pages) => {
                // A device of a page or two refuses nearly everything.
                let least = if tier == 0 { 6 } else { 0 };
                if tier != 2 || (machine.attached && machine.detaching.is_none()) {
                    let (reply, _answer) = crossbeam_channel::bounded(1);
                    let deadline = machine.now + Duration::from_millis(40);
                    machine.core.resize(deadline, TierId(tier), pages.max(least), reply);
                }
            }
            Step::PlugDisk => machine.plug_disk(30),
            Step::Hang(hangs) => machine.hang_disk(hangs),
            Step::Scan => machine.scan_one(),
            Step::Drain => machine.drain(),
            Step::Wait(span) => machine.now = machine.now + Duration::from_millis(span),
        }
        machine.settle();
    }
    // Every request is answered, whatever the disk does.
    machine.drain();
    expect_each_token_once(&machine.formed);
    let unanswered: Vec<&RequestId> = machine.streams.keys().collect();
    assert!(unanswered.is_empty(), "{unanswered:?} wait for ever: {:?}", machine.core.stats());
    machine.hang_disk(false);
    machine.drain();
    assert!(machine.core.is_idle(), "not idle: {:?}", machine.core.stats());
    machine.core.check().unwrap();
    for (id, answer) in wanted {
        match machine.refused.get(&id) {
            Some(RefusalKind::Busy) => assert!(machine.ever_hung, "request {id} found no room"),
            Some(kind) => assert_eq!(*kind, RefusalKind::Invalid),
            None => assert_eq!(machine.done.get(&id), Some(&answer), "request {id}"),
        }
    }
    let (stats, found_again, formed) = (machine.core.stats(), machine.found_again, machine.formed.clone());
    expect_warm(&mut machine, next);
    (stats, found_again, formed)
}

/// Whatever has happened before, what was asked alone is on the device, every whole page of it.
fn expect_warm(machine: &mut Machine, first: u64) {
    // A device that shrinks goes on with it in its own time.
    for _ in 0..10 {
        machine.now = machine.now + Duration::from_secs(1);
        machine.settle();
    }
    let device = machine.core.stats().tiers[0];
    assert!(device.used <= device.capacity, "{device:?}");
    let room = device.capacity as usize;
    machine.setup.fault_percent = 0;
    machine.unkept_every = 0;
    let page_size = machine.setup.page_size;
    let mut prompts: Vec<_> = PROMPTS
        .with(|prompts| prompts.borrow().iter().map(|(id, (prompt, _))| (*id, prompt.clone())).collect());
    prompts.sort_unstable();
    for (place, (_, prompt)) in prompts.into_iter().enumerate() {
        if prompt.len() / page_size + 2 > room {
            continue;
        }
        for again in [0, 1] {
            let id = RequestId(first + 2 * place as u64 + again);
            machine.arrive(id, prompt.clone(), 1, "", 0);
            machine.settle();
            machine.drain();
            assert!(machine.done.contains_key(&id), "request {id}: {:?}", machine.refused.get(&id));
            if again == 1 {
                let mut rows = machine.formed.iter().flat_map(|plan| &plan.rows);
                let row = rows.find(|row| row.id == id.0).unwrap();
                let hit = (prompt.len() - 1) / page_size * page_size;
                assert_eq!(row.sources.map(|sources| sources.device), Some(hit), "request {id}: {row:?}");
            }
        }
    }
}

/// From one admission to the next a request's rows follow each other: nothing is left out or computed twice.
fn expect_each_token_once(plans: &[Formed]) {
    let mut ends: HashMap<u64, usize> = HashMap::new();
    for row in plans.iter().flat_map(|plan| &plan.rows) {
        let before = ends.insert(row.id, row.tokens.end).filter(|_| row.sources.is_none());
        let begins = row.sources.is_some() || before == Some(row.tokens.start);
        assert!(begins, "request {} goes on at {} after {before:?}", row.id, row.tokens.start);
    }
}

/// Plans in which somebody begins although the prompt that goes on there goes on in another.
fn went_beside(plans: &[Formed]) -> u64 {
    let goes_on = |plan: &Formed, id: u64| {
        let row = plan.rows.iter().find(|row| row.id == id)?;
        Some(plan.kind == PlanKind::Prefill && row.sources.is_none())
    };
    let is_beside = |(number, plan): &(usize, &Formed)| {
        let Some((first, rest)) = plan.rows.split_first() else { return false };
        goes_on(plan, first.id) == Some(true)
            && rest.iter().any(|row| row.sources.is_some())
            && plans[number + 1..].iter().find_map(|later| goes_on(later, first.id)) == Some(true)
    };
    plans.iter().enumerate().filter(is_beside).count() as u64
}

#[test]
fn every_stream_equals_the_oracle() {
    let config = ProptestConfig {
        cases: cases(),
        failure_persistence: None,
        max_shrink_iters: 20_000,
        ..ProptestConfig::default()
    };
    let mut runner = TestRunner::new_with_rng(config, TestRng::from_seed(RngAlgorithm::ChaCha, &seed()));
    let totals = RefCell::new(Totals::default());
    let outcome = runner.run(&(setups(), steps(), any::<u64>()), |(setup, steps, noise)| {
        let (stats, found_again, formed) = run(setup, steps, noise);
        totals.borrow_mut().add(&stats);
        let more =
            [("found again", u64::from(found_again)), ("beside a running prompt", went_beside(&formed))];
        for (path, count) in more {
            *totals.borrow_mut().0.entry(path.into()).or_default() += count;
        }
        Ok(())
    });
    if let Err(failure) = outcome {
        panic!("{failure}");
    }
    // Schedules that never load, evict or preempt would prove nothing.
    let totals = totals.into_inner();
    println!("{totals:?}");
    for (path, count) in totals.0 {
        assert!(count >= 10, "only {count} x {path} in all schedules");
    }
}

/// Equal inputs give equal decisions: nothing depends on the order in which a hash map is walked.
#[test]
fn equal_schedules_give_equal_plans() {
    let config =
        ProptestConfig { cases: cases() / 8, failure_persistence: None, ..ProptestConfig::default() };
    let mut runner = TestRunner::new_with_rng(config, TestRng::from_seed(RngAlgorithm::ChaCha, &seed()));
    let outcome = runner.run(&(setups(), steps(), any::<u64>()), |(setup, steps, noise)| {
        let (_, _, first) = run(setup.clone(), steps.clone(), noise);
        let (_, _, second) = run(setup, steps, noise);
        prop_assert_eq!(first, second);
        Ok(())
    });
    if let Err(failure) = outcome {
        panic!("{failure}");
    }
}

#[derive(Debug, Default)]
struct Totals(BTreeMap<String, u64>);

impl Totals {
    fn add(&mut self, stats: &CoreStats) {
        let kinds = [TransferKind::Load, TransferKind::Backup, TransferKind::Spill, TransferKind::Prefetch];
        let mut counts = vec![
            ("preemptions".to_string(), stats.preemptions),
            ("aborts".into(), stats.aborted),
            ("discarded plans".into(), stats.plans_discarded),
            ("cut prefetches".into(), stats.prefetch_timeouts),
            ("corrupt records".into(), stats.control.corrupt_records),
            ("pages through staging".into(), stats.control.staged_pages),
            ("victims lost".into(), stats.control.unsaved_pages.iter().sum()),
            ("unknown completions".into(), stats.control.unknown_completions),
            ("deferrals".into(), stats.deferrals),
            ("set aside".into(), stats.rounds.set_aside),
            ("aged".into(), stats.rounds.aged),
            ("taken over".into(), stats.rounds.taken_over),
            ("early loads".into(), stats.early_loads),
        ];
        for kind in kinds {
            let edge = stats.control.edge(kind);
            counts.push((format!("{} done", kind.name()), edge.completed));
            counts.push((format!("{} failed", kind.name()), edge.failed));
        }
        counts.push(("load cancelled".into(), stats.control.edge(TransferKind::Load).cancelled));
        for (tier, evicted) in ["device", "host", "disk"].iter().zip(stats.control.evicted) {
            counts.push((format!("{tier} evicted"), evicted));
        }
        for (source, tokens) in ["device", "host", "disk", "computed"].iter().zip(stats.prompt_tokens) {
            counts.push((format!("{source} tokens"), tokens));
        }
        for (path, count) in counts {
            *self.0.entry(path).or_default() += count;
        }
    }
}

/// `STRATA_SOAK_CASES` makes the long version.
fn cases() -> u32 {
    std::env::var("STRATA_SOAK_CASES").ok().and_then(|cases| cases.parse().ok()).unwrap_or(2000)
}

/// `STRATA_SOAK_SEED` makes other schedules.
fn seed() -> [u8; 32] {
    let number: u64 =
        std::env::var("STRATA_SOAK_SEED").ok().and_then(|number| number.parse().ok()).unwrap_or(0);
    let mut seed = [0; 32];
    seed[..8].copy_from_slice(&number.to_le_bytes());
    seed
}
