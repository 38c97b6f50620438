//! What a decision costs Core with many waiting requests, all of whose prompts lie in host memory alone and would make
//! a batch loading-bound, half of them about one document: so a decision looks at everybody, sets all but the head
//! aside, and fills its batch with those. Then that one document is evicted. Core is driven by hand: what it plans is
//! computed, and what it moves is moved, at once and in no time.

use crate::error::{Failure, Outcome};
use crate::gate::released;
use crossbeam_channel::{bounded, Receiver};
use pyo3::prelude::*;
use std::collections::VecDeque;
use std::time::{Duration, Instant};
use strata_control::{Back, ControlAction, ControlConfig, Through};
use strata_core::{Action, BestEffort, Core, CoreConfig, MaintenanceReport, NewRequest, RowResult, StepTime};
use strata_sched::cost::{CostPrior, LinkCost, StepCost};
use strata_sched::{Adaptive, FirstComeFirstServed, Limits, LongestPrefixFirst, Policy, Static, Waiting};
use strata_types::{
    GroupId, Namespace, PlanId, RequestId, ShardId, TierId, Time, Token, TransferCompletion,
    TransferDescriptor, TransferKind,
};

const PAGE_SIZE: usize = 16;
const PAGE_BYTES: u64 = 1 << 16;
/// Pages of a document that one request asks about, and of the one that half of them ask about. One token is left to
/// compute: loading-bound by the paper's ratio too.
const OWN_PAGES: usize = 8;
const SHARED_PAGES: usize = 64;
const DEVICE_PAGES: u32 = 8192;
const MAX_RUNNING: u32 = 64;
/// Loading takes half as long as computing: it pays, and one computed token does not hide it.
const STEP: StepCost = StepCost { per_step: 1e-3, per_token: 1e-3, per_pair: 0.0 };
const LOAD: LinkCost = LinkCost { latency: 0.0, per_byte: 0.5e-3 * PAGE_SIZE as f64 / PAGE_BYTES as f64 };
const WARM_UP: usize = 20;
const A_MINUTE: Duration = Duration::from_secs(60);

/// Microseconds of each of `decisions` decisions with `waiting` requests in the queue, one leaving and one coming
/// before each; then, for each request that the eviction of the shared document concerns, the microseconds until that
/// is done and the queue is up to date. Raises ConfigError, and StorageError if Core does not get into the state that
/// is measured.
#[pyfunction]
pub fn measure_decisions(
    py: Python<'_>,
    waiting: u64,
    policy: &str,
    decisions: usize,
) -> Outcome<(Vec<f64>, f64)> {
    let policy = policy_of(policy)?;
    released(py, || {
        let mut bench = Bench::new(policy, waiting)?;
        bench.fill_host()?;
        bench.queue_up()?;
        Ok((bench.decide(decisions)?, bench.evict()?))
    })
}

fn policy_of(name: &str) -> Outcome<Box<dyn Policy>> {
    match name {
        "fcfs" => Ok(Box::new(FirstComeFirstServed::default())),
        "lpm" => Ok(Box::new(LongestPrefixFirst::default())),
        "static" => Ok(Box::new(Static::default())),
        "adaptive" => Ok(Box::new(Adaptive::default())),
        other => Err(Failure::Config(format!(
            "--policy {other:?} is unknown: choose fcfs, lpm, static or adaptive"
        ))),
    }
}

/// A Core and how far it has come.
struct Bench {
    core: Core,
    now: Time,
    waiting: u64,
    next: u64,
    /// Who waits, in order, and what they ask.
    queue: VecDeque<(RequestId, u64)>,
}

impl Bench {
    fn new(policy: Box<dyn Policy>, waiting: u64) -> Outcome<Bench> {
        let most = u64::from(u32::MAX) / (2 * OWN_PAGES as u64);
        if waiting < 2 || waiting > most {
            return Err(Failure::Config(format!("--waiting {waiting} is out of range: give 2 to {most}")));
        }
        let host = waiting.div_ceil(2) as u32 * OWN_PAGES as u32 + SHARED_PAGES as u32;
        let control = ControlConfig {
            page_size: PAGE_SIZE as u32,
            group: GroupId(0),
            layers: 1,
            page_bytes: PAGE_BYTES,
            record_bytes: PAGE_BYTES,
            pages: [DEVICE_PAGES, host, 0],
            staging_pages: 0,
            device_shards: 1,
            backup: Box::new(Through),
            spill: Box::new(Back),
            save_patience: A_MINUTE,
            disk_bytes_per_day: None,
            transfer_pages: 64,
            ghost_pages: 1024,
        };
        let mut costs = CostPrior::default().with_link(TransferKind::Load, LOAD);
        costs.prefill = Some(STEP);
        let core = Core::new(CoreConfig {
            control,
            policy,
            limits: Limits { batch_tokens: 8192, max_running: MAX_RUNNING, max_decode_stall: None },
            outstanding_plans: 1,
            max_waiting: waiting as usize + 1,
            prefetch_policy: Box::new(BestEffort),
            prefetch_share: 1.0,
            costs,
            always_loads: false,
            early_share: 0.25,
            deferral_factor: 2.0,
        })?;
        Ok(Bench { core, now: Time::default(), waiting, next: 0, queue: VecDeque::new() })
    }

    fn ask(&mut self, prompt: Vec<Token>, max_new_tokens: usize, priority: i32) -> Outcome<()> {
        let (id, namespace) = (RequestId(self.next), Namespace::new("", ""));
        self.next += 1;
        let new = NewRequest { id, namespace, prompt, max_new_tokens, priority, keep: true };
        self.now = self.now + Duration::from_nanos(1);
        Ok(self.core.arrived(self.now, new)?)
    }

    /// The document that half of them ask about, then one for each of the others; all sink to the host.
    fn fill_host(&mut self) -> Outcome<()> {
        self.ask(prompt_of(1), 1, 0)?;
        // On its own, so that it is the oldest there.
        self.work()?;
        for number in (0..self.waiting).step_by(2) {
            self.ask(prompt_of(number), 1, 0)?;
            if self.next.is_multiple_of(u64::from(MAX_RUNNING)) {
                self.work()?;
            }
        }
        self.work()?;
        let (reply, answer) = bounded(1);
        self.core.demote(self.now + A_MINUTE, vec![TierId::DEVICE], reply);
        self.work()?;
        self.expect_answer(&answer)
    }

    /// Everyone asks, while a plan for somebody else is being computed, so that no plan is formed meanwhile. Once it is
    /// computed, it will need as many pages in the host as the shared document has.
    fn queue_up(&mut self) -> Outcome<()> {
        self.ask(text(u64::MAX, SHARED_PAGES * PAGE_SIZE), 1000, 0)?;
        self.core.tick(self.now)?;
        // Who shares comes first: the document is then the least recently asked for.
        for number in (1..self.waiting).step_by(2).chain((0..self.waiting).step_by(2)) {
            self.wait(number)?;
        }
        self.core.next_decision(self.now)?;
        let loading = self.core.queue().iter().filter(|waiting| waiting.load_tokens() > 0).count() as u64;
        if loading < self.waiting {
            return Err(unready(format!("{loading} of {} requests are to load", self.waiting)));
        }
        Ok(())
    }

    fn decide(&mut self, decisions: usize) -> Outcome<Vec<f64>> {
        let mut spans = Vec::with_capacity(decisions);
        for turn in 0..WARM_UP + decisions {
            self.replace_one()?;
            let begun = Instant::now();
            let decision = self.core.next_decision(self.now)?;
            let span = begun.elapsed();
            if decision.admissions.is_empty() {
                return Err(unready("a decision admitted nobody".into()));
            }
            if turn >= WARM_UP {
                spans.push(micros(span));
            }
        }
        Ok(spans)
    }

    fn wait(&mut self, number: u64) -> Outcome<()> {
        self.queue.push_back((RequestId(self.next), number));
        // The head asks about its own document, or those who share the other would fill the batch at once.
        self.ask(prompt_of(number), 1, i32::from(number == 0))
    }

    /// One of those who do not share goes away, and another comes who asks the same.
    fn replace_one(&mut self) -> Outcome<()> {
        // The first of these is the head.
        let place = (self.waiting / 2 + 1).min(self.waiting - 1) as usize;
        let Some((id, number)) = self.queue.remove(place) else { return Ok(()) };
        self.core.aborted(self.now, id)?;
        self.wait(number)
    }

    /// What was being computed goes to the host, which is full: the least recently used goes, the shared document.
    fn evict(&mut self) -> Outcome<f64> {
        let plan = self.core.take_actions().into_iter().find_map(|action| match action {
            Action::Plan(plan) => Some(plan),
            _ => None,
        });
        let plan = plan.ok_or_else(|| unready("no plan is being computed".into()))?;
        let begun = Instant::now();
        self.compute(plan.id, plan.rows.len())?;
        self.core.refresh_queue()?;
        let span = begun.elapsed();
        let with_load = |tokens: usize| {
            let loads = |waiting: &&Waiting| waiting.load_tokens() as usize == tokens;
            self.core.queue().iter().filter(loads).count() as u64
        };
        let (concerned, spared) = (with_load(0), with_load(OWN_PAGES * PAGE_SIZE));
        let sharers = self.waiting / 2;
        if (concerned, spared) != (sharers, self.waiting - sharers) {
            return Err(unready(format!(
                "the eviction concerned {concerned} of {sharers} sharers and left {spared} others as they were"
            )));
        }
        Ok(micros(span) / concerned as f64)
    }

    fn expect_answer(&self, answer: &Receiver<MaintenanceReport>) -> Outcome<()> {
        match answer.try_recv() {
            Ok(report) if !report.timed_out => Ok(()),
            other => Err(unready(format!("maintenance did not end: {other:?}"))),
        }
    }

    /// Computes and moves whatever is asked for.
    fn work(&mut self) -> Outcome<()> {
        loop {
            self.core.tick(self.now)?;
            let actions = self.core.take_actions();
            if actions.is_empty() {
                return Ok(());
            }
            for action in actions {
                match action {
                    Action::Plan(plan) => self.compute(plan.id, plan.rows.len())?,
                    Action::Control(ControlAction::Submit(transfer)) => self.carry(&transfer)?,
                    Action::Control(ControlAction::Cancel(..)) => {}
                    Action::Refuse(refusal) => return Err(unready(refusal.reason)),
                }
            }
        }
    }

    fn compute(&mut self, plan: PlanId, rows: usize) -> Outcome<()> {
        let results = vec![RowResult { token: Some(0), finished: true }; rows];
        Ok(self.core.plan_done(self.now, plan, &results, StepTime::default())?)
    }

    fn carry(&mut self, transfer: &TransferDescriptor) -> Outcome<()> {
        if let Some(ticket) = &transfer.ticket {
            ticket.advance(ticket.layers());
        }
        let pages = transfer.pages.len();
        let completion = TransferCompletion {
            id: transfer.id,
            shard: ShardId(0),
            pages_whole: pages,
            error: None,
            bytes: pages as u64 * PAGE_BYTES,
            busy_ns: 0,
        };
        Ok(self.core.transfer_done(self.now, completion)?)
    }
}

/// What the request of this number asks: every other one about the shared document.
fn prompt_of(number: u64) -> Vec<Token> {
    let (document, pages) = if number % 2 == 1 { (1, SHARED_PAGES) } else { (number, OWN_PAGES) };
    let mut prompt = text(document, pages * PAGE_SIZE);
    prompt.push(number as Token);
    prompt
}

/// Tokens that no other document begins with.
fn text(document: u64, length: usize) -> Vec<Token> {
    let mut state = document;
    let mut next = || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 33) as Token
    };
    (0..length).map(|_| next()).collect()
}

fn micros(span: Duration) -> f64 {
    span.as_secs_f64() * 1e6
}

fn unready(what: String) -> Failure {
    Failure::Storage(format!("the scheduler did not get into the state to be measured: {what}"))
}
