//! Engines that schedule for themselves, against the machine of `machine`: whatever is opened, loaded, reserved,
//! committed, given back and evicted in whatever order, beside requests and faults, a page that was found and loaded holds
//! exactly what was committed for its tokens; every question is answered; nothing is left when all is released.
#![allow(clippy::unwrap_used, clippy::panic, clippy::expect_used)]

mod machine;

use machine::{hash, Machine, Setup, Write, PROMPTS, VOCABULARY};
use proptest::prelude::*;
use std::cell::RefCell;
use std::collections::BTreeMap;
use std::time::Duration;
use strata_core::{answer, Answer, LeaseError, LeaseLoad, LoadAnswer};
use strata_types::{Namespace, PageId, RequestId, TicketState, TierId, Token};

#[derive(Clone, Debug)]
enum Step {
    Open { document: u8, length: usize, salt: bool },
    Load { index: usize, share: u32, patience_ms: u64 },
    Reserve { index: usize, count: u32, patience_ms: u64 },
    Commit { index: usize, pages: usize },
    Abort { index: usize },
    Close { index: usize },
    Arrive { document: u8, length: usize },
    Move,
    Compute,
    Empty { demote: bool, mask: u8 },
    Hang(bool),
    PlugDisk,
    Scan,
    Wait(u64),
    Drain,
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let patience = || prop::sample::select(vec![0u64, 0, 5, 200]);
    let step = prop_oneof![
        10 => (0u8..3, 1usize..24, prop::bool::weighted(0.1))
            .prop_map(|(document, length, salt)| Step::Open { document, length, salt }),
        12 => (0usize..4, 1u32..12, patience())
            .prop_map(|(index, share, patience_ms)| Step::Load { index, share, patience_ms }),
        12 => (0usize..4, 0u32..9, patience())
            .prop_map(|(index, count, patience_ms)| Step::Reserve { index, count, patience_ms }),
        14 => (0usize..4, 1usize..9).prop_map(|(index, pages)| Step::Commit { index, pages }),
        3 => (0usize..6).prop_map(|index| Step::Abort { index }),
        6 => (0usize..6).prop_map(|index| Step::Close { index }),
        3 => (0u8..3, 1usize..20).prop_map(|(document, length)| Step::Arrive { document, length }),
        14 => Just(Step::Move),
        5 => Just(Step::Compute),
        8 => (prop::bool::weighted(0.8), 1u8..8).prop_map(|(demote, mask)| Step::Empty { demote, mask }),
        1 => prop::bool::weighted(0.4).prop_map(Step::Hang),
        1 => Just(Step::PlugDisk),
        2 => Just(Step::Scan),
        4 => prop::sample::select(vec![2u64, 35, 300]).prop_map(Step::Wait),
        4 => Just(Step::Drain),
    ];
    prop::collection::vec(step, 1..100)
}

fn setups() -> impl Strategy<Value = Setup> {
    let write = || prop::sample::select(vec![Write::Through, Write::Selective, Write::Back]);
    let sizes = (8u32..20, prop::sample::select(vec![0u32, 5, 40]), prop::sample::select(vec![0u32, 5, 60]));
    let pages = prop::sample::select(vec![1usize, 2, 4]);
    (pages, sizes, [write(), write()], prop::sample::select(vec![0u8, 20, 20]), 1u32..5).prop_map(
        |(page_size, (device, host, disk), write, fault_percent, staging)| Setup {
            page_size,
            pages: [device, host, disk],
            write,
            fault_percent,
            staging,
            ..Setup::default()
        },
    )
}

/// One sequence as a foreign engine keeps it.
struct Sequence {
    id: RequestId,
    tokens: Vec<Token>,
    found: u32,
    load: Option<LoadAnswer>,
    loaded: Option<LeaseLoad>,
    asked: Option<Answer<Result<Vec<PageId>, LeaseError>>>,
    /// Pages that hold this sequence whole, from the first.
    table: Vec<PageId>,
    own: Vec<PageId>,
}

#[derive(Default)]
struct Counts(BTreeMap<&'static str, u64>);

impl Counts {
    fn add(&mut self, what: &'static str, count: u64) {
        *self.0.entry(what).or_default() += count;
    }
}

struct World {
    machine: Machine,
    sequences: Vec<Sequence>,
    counts: Counts,
    next: u64,
}

fn document(number: u8, length: usize) -> Vec<Token> {
    let shared = (0..(length as u32).min(7)).map(|index| index % VOCABULARY);
    let own = (7..length as u32).map(|index| (index * (u32::from(number) + 1)) % VOCABULARY);
    shared.chain(own).collect()
}

impl World {
    fn states(tokens: &[Token]) -> Vec<u64> {
        let step = |state: &mut u64, token: &Token| {
            *state = hash(*state, *token);
            Some(*state)
        };
        tokens.iter().scan(1, step).collect()
    }

    fn open(&mut self, tokens: Vec<Token>, salt: &str) {
        let namespace = Namespace::new(salt, "");
        let now = self.machine.now;
        let found = self.machine.core.open_lease(now, namespace, tokens.clone()).unwrap();
        self.sequences.push(Sequence {
            id: found.id,
            tokens,
            found: found.pages.iter().sum(),
            load: None,
            loaded: None,
            asked: None,
            table: Vec::new(),
            own: Vec::new(),
        });
    }

    /// Takes in answers and compares every byte that may be read.
    fn look(&mut self) {
        let size = self.machine.setup.page_size;
        let mut gone = Vec::new();
        for (index, sequence) in self.sequences.iter_mut().enumerate() {
            if sequence.loaded.is_none() {
                match sequence.load.as_ref().and_then(|answer| answer.wait(Duration::ZERO).ok()) {
                    Some(Ok(load)) => {
                        assert!(load.pages.len() <= sequence.found as usize);
                        sequence.table = load.pages.clone();
                        sequence.loaded = Some(load);
                    }
                    Some(Err(error)) => {
                        // The lease is as it was: it loads again, commits, or closes.
                        assert!(matches!(error, LeaseError::NoRoom(_)), "{error}");
                        self.counts.add("loads without room", 1);
                        sequence.load = None;
                    }
                    None => {}
                }
            }
            if let Some(answer) = sequence.asked.as_ref().and_then(|answer| answer.wait(Duration::ZERO).ok())
            {
                sequence.asked = None;
                match answer {
                    Ok(pages) => sequence.own.extend(pages),
                    Err(error) => {
                        self.counts.add("no room", 1);
                        assert!(matches!(error, LeaseError::NoRoom(_)), "{error}");
                    }
                }
            }
            let tickets = sequence.loaded.iter().flat_map(|load| &load.tickets);
            let states: Vec<TicketState> = tickets.map(|ticket| ticket.state()).collect();
            if states.contains(&TicketState::Failed) {
                self.counts.add("loads failed", 1);
                gone.push(index);
            } else if states.iter().all(|state| *state == TicketState::Ready(2)) {
                let expected = World::states(&sequence.tokens);
                for (number, page) in sequence.table.iter().enumerate() {
                    let held = &self.machine.memory[0][page.0 as usize];
                    let wanted = &expected[number * size..(number + 1) * size];
                    assert_eq!(held[..], *wanted, "page {number} of {:?} at {page}", sequence.tokens);
                }
                if !states.is_empty() {
                    self.counts.add("pages compared after a load", sequence.table.len() as u64);
                }
            }
        }
        gone.dedup();
        for index in gone.into_iter().rev() {
            self.close(index);
        }
    }

    fn is_loading(&self, index: usize) -> bool {
        let sequence = &self.sequences[index];
        match &sequence.loaded {
            Some(load) => !load.tickets.iter().all(|ticket| ticket.is_complete()),
            None => sequence.load.is_some(),
        }
    }

    /// Computes pages after those that are there, as many as are reserved, and commits them.
    fn commit(&mut self, index: usize, most: usize) {
        let size = self.machine.setup.page_size;
        let loading = self.is_loading(index);
        let sequence = &mut self.sequences[index];
        let before = sequence.table.len();
        let count = most.min(sequence.own.len());
        let mut tokens = sequence.tokens[..sequence.tokens.len().min(before * size)].to_vec();
        let longer = sequence.tokens.get(before * size..).unwrap_or_default();
        let more = longer.iter().copied().chain((0..).map(|index| index % VOCABULARY));
        tokens.extend(more.take(count * size));
        let pages: Vec<PageId> = sequence.own[..count].to_vec();
        let (id, now) = (sequence.id, self.machine.now);
        let states = World::states(&tokens);
        if !loading {
            for (number, page) in pages.iter().enumerate() {
                let start = (before + number) * size;
                self.machine.memory[0][page.0 as usize] = states[start..start + size].to_vec();
            }
        }
        let done = self.machine.core.commit_lease(now, id, tokens.clone(), &pages).unwrap();
        let sequence = &mut self.sequences[index];
        match done {
            Ok(_) => {
                assert!(!loading);
                sequence.own.drain(..count);
                sequence.table.extend(&pages);
                if tokens.len() > sequence.tokens.len() || count > 0 {
                    let rest = sequence.tokens.get(tokens.len()..).unwrap_or_default().to_vec();
                    sequence.tokens = tokens;
                    sequence.tokens.extend(rest);
                }
                self.counts.add("pages committed", count as u64);
            }
            Err(error) => {
                assert!(loading && matches!(error, LeaseError::Misuse(_)), "{error}");
                self.counts.add("commits refused", 1);
            }
        }
    }

    fn close(&mut self, index: usize) {
        let sequence = self.sequences.remove(index);
        self.machine.core.close_lease(self.machine.now, sequence.id).unwrap();
        self.machine.core.close_lease(self.machine.now, sequence.id).unwrap();
    }

    fn step(&mut self, step: Step) {
        let count = self.sequences.len();
        let at = |index: usize| Some(index).filter(|index| *index < count);
        let now = self.machine.now;
        match step {
            Step::Open { document: number, length, salt } if count < 6 => {
                self.open(document(number, length), if salt { "other" } else { "" });
            }
            Step::Open { .. } => {}
            Step::Load { index, share, patience_ms } => {
                let Some(sequence) = at(index).map(|index| &mut self.sequences[index]) else { return };
                if sequence.load.is_some() || !sequence.table.is_empty() {
                    return;
                }
                let (giver, answer) = answer();
                let limit = Duration::from_millis(patience_ms);
                self.machine.core.load_lease(now, sequence.id, share, limit, giver);
                sequence.load = Some(answer);
            }
            Step::Reserve { index, count, patience_ms } => {
                let Some(sequence) = at(index).map(|index| &mut self.sequences[index]) else { return };
                if sequence.asked.is_none() {
                    let (giver, answer) = answer();
                    let limit = Duration::from_millis(patience_ms);
                    self.machine.core.reserve_lease(now, sequence.id, count, limit, giver);
                    sequence.asked = Some(answer);
                }
            }
            Step::Commit { index, pages } if at(index).is_some() => self.commit(index, pages),
            Step::Abort { index } if at(index).is_some() => {
                let sequence = &mut self.sequences[index];
                let own = std::mem::take(&mut sequence.own);
                let id = sequence.id;
                self.machine.core.abort_lease(now, id, &own).unwrap().unwrap();
                if let Some(page) = own.first() {
                    let again = self.machine.core.abort_lease(now, id, &[*page]).unwrap();
                    assert!(matches!(again, Err(LeaseError::Misuse(_))));
                }
            }
            Step::Close { index } if at(index).is_some() => self.close(index),
            Step::Commit { .. } | Step::Abort { .. } | Step::Close { .. } => {}
            Step::Arrive { document: number, length } => {
                let id = RequestId(self.next);
                self.next += 1;
                self.machine.arrive(id, document(number, length), 2, "", 0);
            }
            Step::Move => drop(self.machine.move_one()),
            Step::Compute => drop(self.machine.compute_one()),
            Step::Empty { demote, mask } => {
                let there =
                    |tier: &u8| mask & (1 << tier) != 0 && self.machine.setup.pages[usize::from(*tier)] > 0;
                let tiers: Vec<TierId> = (0..3).filter(there).map(TierId).collect();
                let (reply, _answer) = crossbeam_channel::bounded(1);
                let deadline = now + Duration::from_millis(40);
                match demote {
                    true => self.machine.core.demote(deadline, tiers, reply),
                    false => self.machine.core.flush(deadline, tiers, reply),
                }
            }
            Step::Hang(hangs) => self.machine.hang_disk(hangs),
            Step::PlugDisk => self.machine.plug_disk(30),
            Step::Scan => self.machine.scan_one(),
            Step::Wait(span) => self.machine.now = now + Duration::from_millis(span),
            Step::Drain => self.machine.drain(),
        }
    }
}

fn run(setup: Setup, steps: Vec<Step>, noise: u64) -> Counts {
    PROMPTS.with(|prompts| prompts.borrow_mut().clear());
    let machine = Machine::new(setup, noise);
    let mut world = World { machine, sequences: Vec::new(), counts: Counts::default(), next: 0 };
    let prelude = (0..3u8).flat_map(|number| {
        let steps = [
            Step::Open { document: number, length: 20, salt: false },
            Step::Reserve { index: 0, count: 5, patience_ms: 0 },
            Step::Commit { index: 0, pages: 5 },
            Step::Close { index: 0 },
        ];
        steps.into_iter().chain(std::iter::repeat_n(Step::Move, 6))
    });
    // Most of what is looked up later lies below the device.
    for step in prelude.chain([Step::Empty { demote: true, mask: 1 }]).chain(steps) {
        world.step(step);
        world.machine.settle();
        world.look();
    }
    // Whatever hangs, every question is answered by its deadline.
    world.machine.now = world.machine.now + Duration::from_secs(11);
    world.machine.settle();
    world.look();
    for sequence in &world.sequences {
        assert!(sequence.asked.is_none(), "a reservation was never answered");
        assert!(sequence.load.is_none() || sequence.loaded.is_some(), "a load was never answered");
    }
    while !world.sequences.is_empty() {
        world.close(0);
    }
    world.machine.hang_disk(false);
    world.machine.drain();
    assert!(world.machine.core.is_idle(), "not idle: {:?}", world.machine.core.stats());
    world.machine.core.check().unwrap();
    world.counts
}

#[test]
fn what_is_found_and_loaded_is_what_was_committed() {
    let config = ProptestConfig { cases: cases(), failure_persistence: None, ..ProptestConfig::default() };
    let mut runner = proptest::test_runner::TestRunner::new(config);
    let totals = RefCell::new(Counts::default());
    let outcome = runner.run(&(setups(), steps(), any::<u64>()), |(setup, steps, noise)| {
        for (what, count) in run(setup, steps, noise).0 {
            totals.borrow_mut().add(what, count);
        }
        Ok(())
    });
    if let Err(failure) = outcome {
        panic!("{failure}");
    }
    let totals = totals.into_inner().0;
    println!("{totals:?}");
    for what in [
        "no room",
        "loads failed",
        "loads without room",
        "pages compared after a load",
        "pages committed",
        "commits refused",
    ] {
        assert!(totals.get(what).is_some_and(|count| *count >= 10), "too few {what}: {totals:?}");
    }
}

/// `STRATA_SOAK_CASES` makes the long version.
fn cases() -> u32 {
    std::env::var("STRATA_SOAK_CASES").ok().and_then(|cases| cases.parse().ok()).unwrap_or(1200)
}

fn taken<T: Clone>(answer: &Answer<Result<T, LeaseError>>) -> Result<T, LeaseError> {
    answer.wait(Duration::ZERO).expect("no answer")
}

/// A lease that found something keeps it against eviction before it loads; a disk's page comes up through the host.
#[test]
fn a_lease_keeps_what_it_found_and_loads_it_from_disk() {
    PROMPTS.with(|prompts| prompts.borrow_mut().clear());
    let machine = Machine::new(Setup { pages: [4, 4, 8], ..Setup::default() }, 3);
    let mut world = World { machine, sequences: Vec::new(), counts: Counts::default(), next: 0 };
    let settle = |world: &mut World| {
        world.machine.settle();
        while world.machine.move_one() {
            world.machine.settle();
        }
    };
    let reserve = |world: &mut World, id, count| {
        let (giver, answer) = answer();
        world.machine.core.reserve_lease(world.machine.now, id, count, Duration::ZERO, giver);
        world.machine.settle();
        taken(&answer)
    };
    world.open(document(0, 6), "");
    let id = world.sequences[0].id;
    world.sequences[0].own = reserve(&mut world, id, 3).unwrap();
    world.commit(0, 3);
    settle(&mut world);
    world.close(0);
    let (reply, _answer) = crossbeam_channel::bounded(1);
    let tiers = vec![TierId::DEVICE, TierId::HOST];
    world.machine.core.demote(world.machine.now + Duration::from_secs(1), tiers, reply);
    settle(&mut world);
    let now = world.machine.now;
    let found = world.machine.core.open_lease(now, Namespace::new("", ""), document(0, 6)).unwrap();
    assert_eq!(found.pages, [0, 0, 3]);
    let (giver, answer) = answer();
    let limit = Duration::from_secs(5);
    world.machine.core.load_lease(now, found.id, 3, limit, giver);
    world.machine.settle();
    assert!(answer.wait(Duration::ZERO).is_err(), "the disk has not read yet");
    settle(&mut world);
    let load = taken(&answer).unwrap();
    assert_eq!(load.pages.len(), 3);
    assert!(load.tickets.iter().all(|ticket| ticket.is_complete()));
    let error = reserve(&mut world, found.id, 2).unwrap_err();
    assert!(error.to_string().contains("no room on the device for 2 pages"), "{error}");
    assert_eq!(reserve(&mut world, found.id, 1).unwrap().len(), 1);
    world.machine.core.close_lease(world.machine.now, found.id).unwrap();
    settle(&mut world);
    assert!(world.machine.core.is_idle());
    world.machine.core.check().unwrap();
}

/// What it needs room for is saved through a staging that a prefetch of another holds.
#[test]
fn a_request_may_wait_behind_anothers_prefetch() {
    let setup = Setup { page_size: 1, pages: [14, 0, 5], staging: 1, max_running: 6, ..Setup::default() };
    let steps = vec![
        Step::Arrive { document: 0, length: 6 },
        Step::Move,
        Step::Arrive { document: 0, length: 9 },
        Step::Drain,
    ];
    run(setup, steps, 73504658657169794);
}
