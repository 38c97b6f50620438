//! Core against a machine made of plain vectors. A page's "KV" at a position is the hash of all tokens up to it, so
//! any page that is reused too early, loaded to the wrong place or matched before it is whole shows as a wrong hash
//! under some row. Requests, aborts, transfers, failures and plans happen in random order on tiny pools; every
//! finished stream must equal the oracle, `check()` must hold after every step, and nothing may be left at the end.
#![allow(clippy::unwrap_used, clippy::panic, clippy::expect_used)]

use proptest::prelude::*;
use proptest::test_runner::{RngAlgorithm, TestRng, TestRunner};
use std::cell::RefCell;
use std::collections::{BTreeMap, HashMap, VecDeque};
use std::time::Duration;
use strata_control::{ControlAction, ControlConfig, Selective, Through, WritePolicy};
use strata_core::{
    Action, Core, CoreConfig, CoreStats, NewRequest, Plan, RefusalKind, RowResult, StepFailure,
};
use strata_sched::{FirstComeFirstServed, Limits};
use strata_types::{
    GroupId, Namespace, RequestId, ShardId, TierId, Time, Token, TransferCompletion, TransferDescriptor,
    TransferError, TransferKind,
};

const VOCABULARY: u32 = 11;
const END: Token = 7;

fn hash(previous: u64, token: Token) -> u64 {
    (previous ^ u64::from(token).wrapping_add(0x9e37_79b9))
        .wrapping_mul(0x0000_0100_0000_01b3)
        .rotate_left(17)
}

fn sample(state: u64) -> Token {
    ((state >> 13) % u64::from(VOCABULARY)) as Token
}

/// What the request must answer, computed without any cache.
fn oracle(prompt: &[Token], max_new: usize) -> Vec<Token> {
    let mut state = prompt.iter().fold(1, |state, token| hash(state, *token));
    let mut answer = Vec::new();
    while answer.len() < max_new {
        let token = sample(state);
        answer.push(token);
        if token == END {
            break;
        }
        state = hash(state, token);
    }
    answer
}

#[derive(Clone, Debug)]
struct Setup {
    page_size: usize,
    pages: [u32; 3],
    selective: u32,
    outstanding: usize,
    batch_tokens: u32,
    fault_percent: u8,
}

struct Machine {
    core: Core,
    setup: Setup,
    memory: [Vec<Vec<u64>>; 3],
    transfers: VecDeque<TransferDescriptor>,
    plans: VecDeque<Plan>,
    epoch: u64,
    now: Time,
    streams: HashMap<RequestId, Vec<Token>>,
    last: HashMap<RequestId, Token>,
    done: HashMap<RequestId, Vec<Token>>,
    refused: HashMap<RequestId, RefusalKind>,
    noise: u64,
    /// No token ends an answer.
    endless: bool,
}

impl Machine {
    fn new(setup: Setup, noise: u64) -> Machine {
        let policy = |n| -> Box<dyn WritePolicy> {
            if n <= 1 {
                Box::new(Through)
            } else {
                Box::new(Selective { accesses: n })
            }
        };
        let control = ControlConfig {
            page_size: setup.page_size as u32,
            group: GroupId(0),
            layers: 2,
            page_bytes: 64,
            pages: setup.pages,
            device_shards: 1,
            backup: policy(setup.selective),
            spill: policy(setup.selective),
            transfer_pages: 3,
            ghost_pages: 50,
        };
        let core = Core::new(CoreConfig {
            control,
            policy: Box::new(FirstComeFirstServed),
            limits: Limits { batch_tokens: setup.batch_tokens, max_running: 6 },
            outstanding_plans: setup.outstanding,
            max_waiting: 100,
            prefetch_timeout: Duration::from_millis(30),
        })
        .unwrap();
        let memory = setup.pages.map(|pages| vec![vec![0; setup.page_size]; pages as usize]);
        Machine {
            core,
            setup,
            memory,
            transfers: VecDeque::new(),
            plans: VecDeque::new(),
            epoch: 0,
            now: Time(0),
            streams: HashMap::new(),
            last: HashMap::new(),
            done: HashMap::new(),
            refused: HashMap::new(),
            noise,
            endless: false,
        }
    }

    fn random(&mut self, below: usize) -> usize {
        self.noise = self.noise.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        (self.noise >> 33) as usize % below.max(1)
    }

    fn settle(&mut self) {
        self.now = self.now + Duration::from_millis(1);
        self.core.tick(self.now).unwrap();
        for action in self.core.take_actions() {
            match action {
                Action::Plan(plan) => self.plans.push_back(plan),
                Action::Refuse(refusal) => {
                    self.streams.remove(&refusal.request);
                    self.refused.insert(refusal.request, refusal.kind);
                }
                Action::Control(ControlAction::Submit(transfer)) => self.transfers.push_back(transfer),
                Action::Control(ControlAction::Cancel(_, id)) => {
                    if let Some(index) = self.transfers.iter().position(|transfer| transfer.id == id) {
                        let transfer = self.transfers.remove(index).unwrap();
                        let whole = self.random(transfer.pages.len());
                        self.finish(transfer, whole, Some(TransferError::Cancelled));
                    }
                }
            }
        }
        self.core.check().unwrap();
    }

    fn finish(&mut self, transfer: TransferDescriptor, whole: usize, error: Option<TransferError>) {
        let (from, to) = (transfer.kind.source().index(), transfer.kind.destination().index());
        for (index, step) in transfer.pages.iter().enumerate() {
            if transfer.kind == TransferKind::Erase {
                continue;
            }
            let bytes = self.memory[from][step.from.0 as usize].clone();
            // A transfer that fails may have scribbled over any part of its destination.
            let written = if index < whole { bytes } else { vec![0xdead; self.setup.page_size] };
            self.memory[to][step.to.0 as usize] = written;
        }
        if let Some(ticket) = &transfer.ticket {
            match error {
                None => ticket.advance(ticket.layers()),
                Some(_) => ticket.fail(),
            }
        }
        let completion = TransferCompletion {
            id: transfer.id,
            shard: ShardId(0),
            pages_whole: whole,
            error,
            bytes: 1,
            busy_ns: 1,
        };
        self.core.transfer_done(self.now, completion.clone()).unwrap();
        if self.random(10) == 0 {
            self.core.transfer_done(self.now, completion).unwrap();
        }
    }

    fn move_one(&mut self) -> bool {
        if self.transfers.is_empty() {
            return false;
        }
        let index = self.random(self.transfers.len());
        let transfer = self.transfers.remove(index).unwrap();
        let pages = transfer.pages.len();
        if self.random(100) < usize::from(self.setup.fault_percent) {
            let whole = self.random(pages);
            let error = match transfer.kind {
                TransferKind::Prefetch => {
                    TransferError::Corrupt { record: transfer.pages[whole].from, reason: "checksum".into() }
                }
                kind => TransferError::Io { operation: kind.name().into(), reason: "EIO".into() },
            };
            self.finish(transfer, whole, Some(error));
        } else {
            self.finish(transfer, pages, None);
        }
        true
    }

    /// Carries out the oldest plan as an engine would.
    fn compute_one(&mut self) -> bool {
        let Some(plan) = self.plans.pop_front() else { return false };
        if plan.epoch < self.epoch {
            return true;
        }
        let ready = plan.tickets.iter().all(|ticket| ticket.is_complete());
        let failed = plan.tickets.iter().any(|ticket| ticket.state() == strata_types::TicketState::Failed);
        if failed || self.random(200) < usize::from(self.setup.fault_percent) {
            let why = [StepFailure::Load, StepFailure::LateLoad][self.random(2)];
            self.epoch = plan.epoch + 1;
            self.core.plan_failed(self.now, plan.id, why).unwrap();
            return true;
        }
        if !ready {
            self.plans.push_front(plan);
            return false;
        }
        let size = self.setup.page_size;
        let mut results = Vec::new();
        for row in &plan.rows {
            let at = |position: usize| (row.pages[position / size].0 as usize, position % size);
            let mut tokens = row.tokens.clone();
            if tokens.len() < row.length {
                tokens.push(self.last[&row.request]);
            }
            let mut state = 1;
            let whole: Vec<Token> = self.known(row.request);
            for (position, token) in whole.iter().take(row.start).enumerate() {
                state = hash(state, *token);
                let (page, offset) = at(position);
                assert_eq!(
                    self.memory[0][page][offset], state,
                    "request {} reads a wrong KV at position {position} of page {page}",
                    row.request
                );
            }
            for (index, token) in tokens.iter().enumerate() {
                state = hash(state, *token);
                let (page, offset) = at(row.start + index);
                self.memory[0][page][offset] = state;
            }
            let mut result = RowResult::default();
            if row.sample {
                let token = sample(state);
                result.token = Some(token);
                self.last.insert(row.request, token);
                if let Some(stream) = self.streams.get_mut(&row.request) {
                    let prompt = PROMPTS.with(|prompts| prompts.borrow()[&row.request].clone());
                    stream.push(token);
                    result.finished = token == END && !self.endless;
                    if result.finished || stream.len() >= prompt.1 {
                        let stream = self.streams.remove(&row.request).unwrap();
                        self.done.insert(row.request, stream);
                    }
                }
            }
            results.push(result);
        }
        self.core.plan_done(self.now, plan.id, &results).unwrap();
        true
    }

    /// Lets everything end; a machine that never becomes idle is found by the caller.
    fn drain(&mut self) {
        for _ in 0..60_000 {
            let moved = self.move_one();
            let computed = self.compute_one();
            self.settle();
            if !moved && !computed && self.core.is_idle() {
                break;
            }
        }
    }

    fn known(&self, id: RequestId) -> Vec<Token> {
        let mut tokens = PROMPTS.with(|prompts| prompts.borrow()[&id].0.clone());
        let stream = self.streams.get(&id).or_else(|| self.done.get(&id));
        tokens.extend(stream.into_iter().flatten());
        tokens
    }
}

thread_local! {
    static PROMPTS: RefCell<HashMap<RequestId, (Vec<Token>, usize)>> = RefCell::default();
}

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
    Wait,
    /// Everything under way ends.
    Drain,
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let step = prop_oneof![
        4 => (0u8..3, 0usize..26, 0usize..6, 1usize..9, prop::bool::weighted(0.1), 0i32..2).prop_map(
            |(document, length, tail, max_new, salt, priority)| Step::Arrive {
                document, length, tail, max_new, salt, priority
            }
        ),
        2 => (0usize..8).prop_map(Step::Abort),
        6 => Just(Step::Move),
        8 => Just(Step::Compute),
        2 => (1u8..8).prop_map(Step::Demote),
        1 => (1u8..8).prop_map(Step::Flush),
        1 => Just(Step::Wait),
        3 => Just(Step::Drain),
    ];
    prop::collection::vec(step, 1..120)
}

fn setups() -> impl Strategy<Value = Setup> {
    (
        prop::sample::select(vec![1usize, 2, 4]),
        10u32..24,
        prop::sample::select(vec![0u32, 5, 12, 40, 40]),
        prop::sample::select(vec![0u32, 5, 60, 60]),
        1u32..3,
        1usize..3,
        prop::sample::select(vec![3u32, 8, 64]),
        prop::sample::select(vec![0u8, 15]),
    )
        .prop_map(
            |(page_size, device, host, disk, selective, outstanding, batch_tokens, fault_percent)| {
                let disk = if host == 0 { 0 } else { disk };
                let device = device * 4 / page_size as u32 + 4;
                Setup {
                    page_size,
                    pages: [device, host, disk],
                    selective,
                    outstanding,
                    batch_tokens,
                    fault_percent,
                }
            },
        )
}

fn tiers(mask: u8, setup: &Setup) -> Vec<TierId> {
    (0..3).filter(|bit| mask & (1 << bit) != 0 && setup.pages[usize::from(*bit)] > 0).map(TierId).collect()
}

fn run(setup: Setup, steps: Vec<Step>, noise: u64) -> CoreStats {
    PROMPTS.with(|prompts| prompts.borrow_mut().clear());
    let mut machine = Machine::new(setup, noise);
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
                PROMPTS.with(|prompts| prompts.borrow_mut().insert(id, (prompt.clone(), max_new)));
                machine.streams.insert(id, Vec::new());
                let namespace = Namespace::new(if salt { "other" } else { "" }, "");
                let new = NewRequest { id, namespace, prompt, max_new_tokens: max_new, priority };
                machine.core.arrived(machine.now, new).unwrap();
            }
            Step::Abort(index) => {
                let mut ids: Vec<RequestId> = machine.streams.keys().copied().collect();
                ids.sort_unstable();
                if let Some(id) = ids.get(index).copied() {
                    machine.streams.remove(&id);
                    wanted.remove(&id);
                    machine.core.aborted(machine.now, id).unwrap();
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
            Step::Drain => machine.drain(),
            Step::Wait => machine.now = machine.now + Duration::from_millis(35),
        }
        machine.settle();
    }
    machine.drain();
    assert!(machine.core.is_idle(), "not idle: {:?}", machine.core.stats());
    machine.core.check().unwrap();
    for (id, answer) in wanted {
        match machine.refused.get(&id) {
            Some(kind) => assert_eq!(*kind, RefusalKind::Invalid),
            None => assert_eq!(machine.done.get(&id), Some(&answer), "request {id}"),
        }
    }
    machine.core.stats()
}

#[test]
fn every_stream_equals_the_oracle() {
    let config = ProptestConfig {
        cases: cases(),
        failure_persistence: None,
        max_shrink_iters: 20_000,
        ..ProptestConfig::default()
    };
    let mut runner = TestRunner::new_with_rng(config, TestRng::deterministic_rng(RngAlgorithm::ChaCha));
    let totals = RefCell::new(Totals::default());
    let outcome = runner.run(&(setups(), steps(), any::<u64>()), |(setup, steps, noise)| {
        totals.borrow_mut().add(&run(setup, steps, noise));
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
            ("unknown completions".into(), stats.control.unknown_completions),
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

/// A link on which every load is late must not hold a request for ever: it is computed instead.
#[test]
fn a_late_load_is_not_tried_again() {
    let setup = Setup {
        page_size: 2,
        pages: [40, 40, 0],
        selective: 1,
        outstanding: 2,
        batch_tokens: 64,
        fault_percent: 0,
    };
    PROMPTS.with(|prompts| prompts.borrow_mut().clear());
    let mut machine = Machine::new(setup, 7);
    let prompt: Vec<Token> = (0..21).map(|index| index % VOCABULARY).collect();
    let answer = oracle(&prompt, 4);
    let ask = |machine: &mut Machine, number| {
        let id = RequestId(number);
        PROMPTS.with(|prompts| prompts.borrow_mut().insert(id, (prompt.clone(), 4)));
        machine.streams.insert(id, Vec::new());
        let namespace = Namespace::new("", "");
        let new = NewRequest { id, namespace, prompt: prompt.clone(), max_new_tokens: 4, priority: 0 };
        machine.core.arrived(machine.now, new).unwrap();
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
        selective: 1,
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
        PROMPTS.with(|prompts| prompts.borrow_mut().insert(id, (prompt.clone(), 90)));
        machine.streams.insert(id, Vec::new());
        let namespace = Namespace::new("", "");
        let new = NewRequest { id, namespace, prompt, max_new_tokens: 90, priority: 0 };
        machine.core.arrived(machine.now, new).unwrap();
    }
    machine.endless = true;
    machine.settle();
    machine.drain();
    let stats = machine.core.stats();
    assert_eq!(stats.finished, 2);
    assert!((1..=2).contains(&stats.preemptions), "{} preemptions", stats.preemptions);
}
