//! A machine made of plain vectors for Core to drive. A page's "KV" at a position is the hash of all tokens up to it,
//! so any page that is reused too early, loaded to the wrong place or matched before it is whole shows as a wrong hash
//! under some row.
#![allow(
    dead_code,
    clippy::unwrap_used,
    clippy::panic,
    clippy::expect_used,
    clippy::field_reassign_with_default
)]

pub mod checked;
mod setup;
pub mod timed;
mod transfers;

pub use setup::*;

use checked::Checked;
use crossbeam_channel::Receiver;
use std::cell::RefCell;
use std::collections::{BTreeMap, HashMap, VecDeque};
use std::ops::Range;
use std::time::Duration;
use strata_control::{ControlAction, ControlConfig};
use strata_core::{
    Action, Core, CoreConfig, MaintenanceReport, NewRequest, Plan, PlanKind, PlanRow, RefusalKind, RowResult,
    Sources, StepFailure, StepTime,
};
use strata_sched::Limits;
use strata_types::{
    GroupId, Namespace, PageId, PageRecord, RequestId, Time, Token, TransferCompletion, TransferDescriptor,
    TransferError, TransferKind,
};

pub const VOCABULARY: u32 = 11;
pub const END: Token = 7;
const SAVE_PATIENCE: Duration = Duration::from_millis(20);
/// Pages that any tier may grow to.
pub const MOST_PAGES: u32 = 128;

pub fn hash(previous: u64, token: Token) -> u64 {
    (previous ^ u64::from(token).wrapping_add(0x9e37_79b9))
        .wrapping_mul(0x0000_0100_0000_01b3)
        .rotate_left(17)
}

pub fn sample(state: u64) -> Token {
    ((state >> 13) % u64::from(VOCABULARY)) as Token
}

/// What the request must answer, computed without any cache.
pub fn oracle(prompt: &[Token], max_new: usize) -> Vec<Token> {
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

pub struct Machine {
    pub core: Core,
    pub setup: Setup,
    pub memory: [Vec<Vec<u64>>; 3],
    pub transfers: VecDeque<TransferDescriptor>,
    /// Loads that have ended, and Core does not know yet.
    untold: Vec<TransferCompletion>,
    /// The disk hangs: what it has begun does not end, and cannot be ended, until it answers again.
    pub disk_hangs: bool,
    pub hanging: Vec<TransferDescriptor>,
    /// A disk that hung may have cost requests their room.
    pub ever_hung: bool,
    /// Something was reported to Core since the last tick.
    news: bool,
    pub plans: VecDeque<Plan>,
    pub epoch: u64,
    pub now: Time,
    pub streams: HashMap<RequestId, Vec<Token>>,
    pub last: HashMap<RequestId, Token>,
    pub done: HashMap<RequestId, Vec<Token>>,
    /// What was sampled for requests that are gone: rows planned before that are still computed.
    pub left: HashMap<RequestId, Vec<Token>>,
    pub refused: HashMap<RequestId, RefusalKind>,
    pub noise: u64,
    /// No token ends an answer.
    pub endless: bool,
    /// What a scan of the disk would find: the records whose headers are whole.
    pub records: BTreeMap<PageId, PageRecord>,
    /// Stretches of the disk that a scan under way has not reported yet.
    pub to_scan: Vec<Range<u32>>,
    /// Whether there is a disk, and the answer to being asked to go.
    pub attached: bool,
    pub found_again: u32,
    pub detaching: Option<Receiver<MaintenanceReport>>,
    /// One in so many requests asks for nothing of it to be kept; 0: none.
    pub unkept_every: u64,
    /// What a step takes by the machine's own account.
    pub busy: Duration,
    /// Every plan that came.
    pub formed: Vec<Formed>,
}

/// What a plan computes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Formed {
    pub kind: PlanKind,
    pub at: Time,
    pub rows: Vec<FormedRow>,
}

/// What a row computes, and where.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FormedRow {
    pub id: u64,
    pub tokens: Range<usize>,
    pub pages: Vec<PageId>,
    pub sources: Option<Sources>,
}

impl Formed {
    fn of(plan: &Plan, at: Time) -> Formed {
        let row = |row: &PlanRow| FormedRow {
            id: row.request.0,
            tokens: row.start..row.start + row.length,
            pages: row.pages.clone(),
            sources: row.admitted.map(|admission| admission.sources),
        };
        Formed { kind: plan.kind, at, rows: plan.rows.iter().map(row).collect() }
    }
}

impl Machine {
    pub fn new(setup: Setup, noise: u64) -> Machine {
        let control = ControlConfig {
            page_size: setup.page_size as u32,
            group: GroupId(0),
            layers: 2,
            page_bytes: setup.page_bytes,
            record_bytes: 64,
            pages: setup.pages,
            device_shards: 1,
            staging_pages: setup.staging,
            backup: setup.write[0].policy(),
            spill: setup.write[1].policy(),
            save_patience: SAVE_PATIENCE,
            disk_bytes_per_day: setup.disk_bytes_per_day,
            transfer_pages: 3,
            ghost_pages: 50,
        };
        let core = Core::new(CoreConfig {
            control,
            policy: Box::new(Checked(setup.schedule.policy(setup.threshold))),
            limits: Limits {
                batch_tokens: setup.batch_tokens,
                max_running: setup.max_running,
                max_decode_stall: setup.max_decode_stall,
            },
            early_share: 0.3,
            deferral_factor: 2.0,
            outstanding_plans: setup.outstanding,
            max_waiting: 100,
            prefetch_policy: setup.prefetch.policy(),
            prefetch_share: f64::from(setup.share_percent) / 100.0,
            costs: setup.speeds.prior(),
            always_loads: false,
        })
        .unwrap();
        let memory = setup.pages.map(|_| vec![vec![0; setup.page_size]; MOST_PAGES as usize]);
        Machine {
            core,
            setup,
            memory,
            transfers: VecDeque::new(),
            untold: Vec::new(),
            disk_hangs: false,
            hanging: Vec::new(),
            ever_hung: false,
            news: false,
            plans: VecDeque::new(),
            epoch: 0,
            now: Time(0),
            streams: HashMap::new(),
            last: HashMap::new(),
            done: HashMap::new(),
            left: HashMap::new(),
            refused: HashMap::new(),
            noise,
            endless: false,
            records: BTreeMap::new(),
            to_scan: Vec::new(),
            attached: true,
            found_again: 0,
            detaching: None,
            unkept_every: 0,
            busy: Duration::from_millis(2),
            formed: Vec::new(),
        }
    }

    pub fn random(&mut self, below: usize) -> usize {
        self.noise = self.noise.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        (self.noise >> 33) as usize % below.max(1)
    }

    pub fn settle(&mut self) {
        self.now = self.now + Duration::from_millis(1);
        self.tick();
        // An eviction that waits for write-back may find other victims each time that it is tried.
        if !self.news && !self.setup.write.contains(&Write::Back) {
            // Nobody wakes Core without news before its deadline: whatever could be computed has been planned.
            let planned = self.plans.len();
            self.tick();
            let late = self.plans.range(planned..);
            assert_eq!(late.len(), 0, "left undone until something else happens: {late:?}");
        }
        self.expect_nothing_idles();
        if let Some(Ok(report)) = self.detaching.as_ref().map(|answer| answer.try_recv()) {
            self.attached &= report.timed_out;
            self.detaching = None;
        }
        self.core.check().unwrap();
    }

    /// Whoever runs is being computed, or something moves that it waits for: what has arrived is consumed. A wait for
    /// write-back ends by itself.
    fn expect_nothing_idles(&self) {
        let running = self.core.stats().running;
        if running == 0 || !self.plans.is_empty() {
            return;
        }
        let moves = |transfer: &TransferDescriptor| {
            matches!(transfer.kind, TransferKind::Load | TransferKind::Backup | TransferKind::Spill)
        };
        let under_way = !self.untold.is_empty() || self.transfers.iter().chain(&self.hanging).any(moves);
        let soon = self.core.next_deadline().is_some_and(|end| end <= self.now + SAVE_PATIENCE);
        // With no host tier, copies down may stand behind a prefetch in the staging: patience ends that too, if it hangs.
        let staged = self.setup.pages[1] == 0 && !(self.transfers.is_empty() && self.hanging.is_empty());
        let saves = soon && (self.setup.write.contains(&Write::Back) || staged);
        assert!(under_way || saves, "{running} run and nothing happens");
    }

    fn tick(&mut self) {
        self.news = false;
        self.core.tick(self.now).unwrap();
        for action in self.core.take_actions() {
            match action {
                Action::Plan(plan) => {
                    self.expect_own_pages(&plan);
                    self.formed.push(Formed::of(&plan, self.now));
                    self.plans.push_back(plan);
                }
                Action::Refuse(refusal) => {
                    self.left.extend(self.streams.remove_entry(&refusal.request));
                    self.refused.insert(refusal.request, refusal.kind);
                }
                Action::Control(ControlAction::Submit(transfer)) => {
                    self.expect_untouched(&transfer);
                    self.transfers.push_back(transfer);
                }
                Action::Control(ControlAction::Cancel(_, id)) => {
                    if let Some(index) = self.transfers.iter().position(|transfer| transfer.id == id) {
                        let transfer = self.transfers.remove(index).unwrap();
                        let whole = self.random(transfer.pages.len());
                        self.finish(transfer, whole, Some(TransferError::Cancelled));
                    }
                }
            }
        }
    }

    /// Carries out the oldest plan as an engine would.
    pub fn compute_one(&mut self) -> bool {
        let Some(plan) = self.plans.pop_front() else { return false };
        if plan.epoch < self.epoch {
            return true;
        }
        let ready = plan.tickets.iter().all(|ticket| ticket.is_complete());
        let failed = plan.tickets.iter().any(|ticket| ticket.state() == strata_types::TicketState::Failed);
        if failed || self.random(200) < usize::from(self.setup.fault_percent) {
            let why = [StepFailure::Load, StepFailure::LateLoad][self.random(2)];
            self.epoch = plan.epoch + 1;
            self.news = true;
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
            if let Some(admission) = &row.admitted {
                let Sources { device, host, disk, computed } = admission.sources;
                let prompt = PROMPTS.with(|prompts| prompts.borrow()[&row.request].0.len());
                assert_eq!(device + host + disk + computed, prompt, "{:?}", admission.sources);
            }
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
        let time = StepTime { busy: self.busy, ..StepTime::default() };
        self.core.plan_done(self.now, plan.id, &results, time).unwrap();
        true
    }

    /// Lets everything end; a machine that never becomes idle is found by the caller. Without news the time goes on to
    /// Core's own deadline: what nothing wakes sleeps for ever.
    pub fn drain(&mut self) {
        for _ in 0..60_000 {
            self.scan_one();
            let moved = self.move_one();
            let computed = self.compute_one();
            self.settle();
            if moved || computed || self.news || !self.transfers.is_empty() {
                continue;
            }
            let deadline = self.core.next_deadline().filter(|at| *at < Time(u64::MAX));
            match deadline {
                _ if self.core.is_idle() && self.to_scan.is_empty() => break,
                _ if !self.hanging.is_empty() && self.streams.is_empty() => break,
                Some(at) => self.now = self.now.max(at),
                None if self.plans.is_empty() => break,
                None => {}
            }
        }
    }

    pub fn known(&self, id: RequestId) -> Vec<Token> {
        let mut tokens = PROMPTS.with(|prompts| prompts.borrow()[&id].0.clone());
        let gone = || self.done.get(&id).or_else(|| self.left.get(&id));
        let stream = self.streams.get(&id).or_else(gone);
        tokens.extend(stream.into_iter().flatten());
        tokens
    }
}

thread_local! {
    pub static PROMPTS: RefCell<HashMap<RequestId, (Vec<Token>, usize)>> = RefCell::default();
}

impl Machine {
    /// The client goes away.
    pub fn abort(&mut self, id: RequestId) {
        self.left.extend(self.streams.remove_entry(&id));
        self.core.aborted(self.now, id).unwrap();
    }

    /// A request arrives; its answer is read from `done` once it is there.
    pub fn arrive(
        &mut self,
        id: RequestId,
        prompt: Vec<Token>,
        max_new_tokens: usize,
        salt: &str,
        priority: i32,
    ) {
        PROMPTS.with(|prompts| prompts.borrow_mut().insert(id, (prompt.clone(), max_new_tokens)));
        self.streams.insert(id, Vec::new());
        let namespace = Namespace::new(salt, "");
        // What is not to be kept must not change what anybody reads.
        let keep = self.unkept_every == 0 || id.0 % self.unkept_every != 3;
        let new = NewRequest { id, namespace, prompt, max_new_tokens, priority, keep };
        self.core.arrived(self.now, new).unwrap();
    }
}
