//! The loop: what has happened goes to Core, what Core asks for goes to the machine, and the clock goes on to what
//! happens next.

use crate::clients::Clients;
use crate::config::SimulationConfig;
use crate::device::Finished;
use crate::error::SimulationError;
use crate::machine::Machine;
use crate::model::Model;
use crate::report::{Ended, Report, Tally};
use crate::timeline::{Timeline, Track};
use crate::workload::{After, RequestSpec, Segment};
use crossbeam_channel::bounded;
use std::collections::HashSet;
use std::time::Duration;
use strata_control::ControlAction;
use strata_core::{Action, Core, MaintenanceReport, StepTime};
use strata_sched::Policy;
use strata_types::{TierId, Time};

/// Rounds at one moment of the clock, after which something goes in circles.
const MOST_ROUNDS: u32 = 1_000_000;
/// How far the clock goes for a deadline of Core's that is past.
const PAST: Duration = Duration::from_millis(1);
/// Virtual time to empty the device before a warm start.
const DEMOTION: Duration = Duration::from_secs(86_400);

/// Runs a simulation.
pub fn simulate(config: &SimulationConfig) -> Result<Report, SimulationError> {
    Ok(simulate_with(config, None)?.0)
}

/// As `simulate`, with another order of the queue, and with the timeline.
pub fn simulate_with(
    config: &SimulationConfig,
    policy: Option<Box<dyn Policy>>,
) -> Result<(Report, Timeline), SimulationError> {
    simulate_until(config, policy, &mut || false)
}

/// As `simulate_with`, but it ends with `Stopped` once `stop` says so, which is asked at each step of the clock.
pub fn simulate_until(
    config: &SimulationConfig,
    policy: Option<Box<dyn Policy>>,
    stop: &mut dyn FnMut() -> bool,
) -> Result<(Report, Timeline), SimulationError> {
    let model = Model::from_config(&config.model, config.tensor_parallel)?;
    let mut sizes = config.system.sizes(&config.hardware, &model)?;
    sizes.pages = config.pages.unwrap_or(sizes.pages);
    let core = Core::new(config.system.core(sizes, model.layers, policy)?)?;
    let timeline = Timeline::new(config.timeline);
    let machine = Machine::new(&config.hardware, &model, &config.system, sizes.page_bytes, timeline)?;
    let specs = config.workload.requests(config.seed)?;
    let mut simulation = Simulation { core, machine, now: Time(0), checks: config.checks, stop };
    if config.warm {
        simulation.warm(&specs)?;
    }
    let start = simulation.now;
    let before = simulation.core.stats();
    let moved = simulation.machine.link_busy();
    let mut clients = Clients::new(specs, 0, config.max_in_flight, start);
    clients.limits_answers = config.limited_answers;
    simulation.run(&mut clients, None)?;
    let after = simulation.core.stats();
    let links = simulation.machine.link_busy();
    let report = Report::of(&Ended {
        system: &config.system.name,
        hardware: &config.hardware.name,
        seed: config.seed,
        start,
        clients: &clients,
        tally: &simulation.machine.tally,
        links: [0, 1, 2, 3].map(|link: usize| links[link] - moved[link]),
        before: &before,
        after: &after,
        lists_requests: config.list_requests,
    });
    Ok((report, simulation.machine.timeline))
}

type Emptied = crossbeam_channel::Receiver<MaintenanceReport>;

struct Simulation<'a> {
    core: Core,
    machine: Machine,
    now: Time,
    checks: bool,
    stop: &'a mut dyn FnMut() -> bool,
}

impl Simulation<'_> {
    /// Computes what each prompt begins with, twice, so that every write policy has copied it down, and empties the
    /// device: the clock starts with a full host.
    fn warm(&mut self, specs: &[RequestSpec]) -> Result<(), SimulationError> {
        let mut seen = HashSet::new();
        let mut contexts: Vec<RequestSpec> = Vec::new();
        for spec in specs.iter().filter(|spec| spec.prompt.len() > 1) {
            for time in 0..if seen.insert(spec.prompt[0].id) { 2 } else { 0 } {
                contexts.push(RequestSpec {
                    arrival_s: 0.0,
                    after: contexts.len().checked_sub(1).map(|request| After { request, think_s: 0.0 }),
                    prompt: vec![spec.prompt[0], Segment { id: spec.answer, tokens: 1 + time }],
                    output: 1,
                    answer: spec.answer,
                });
            }
        }
        let mut clients = Clients::new(contexts, specs.len() as u64, 1, self.now);
        self.run(&mut clients, None)?;
        let (reply, emptied) = bounded(1);
        self.core.demote(self.now + DEMOTION, vec![TierId::DEVICE], reply);
        self.run(&mut clients, Some(&emptied))?;
        self.machine.tally = Tally::default();
        self.machine.timeline.spans.clear();
        Ok(())
    }

    /// Until all requests have ended and nothing is under way, and what was asked for besides has been answered.
    fn run(&mut self, clients: &mut Clients, emptied: Option<&Emptied>) -> Result<(), SimulationError> {
        let mut rounds = 0;
        loop {
            if (self.stop)() {
                return Err(SimulationError::Stopped { now_s: self.now.0 as f64 / 1e9 });
            }
            self.deliver(clients)?;
            self.core.tick(self.now)?;
            self.carry_out(clients)?;
            self.machine.start(self.now);
            if let Some(finished) = self.machine.computed(self.now) {
                self.report_plan(finished, clients)?;
                continue;
            }
            if self.checks {
                self.core.check()?;
            }
            let answered = emptied.is_none_or(|emptied| !emptied.is_empty());
            if clients.unfinished() == 0 && answered && self.core.is_idle() {
                return Ok(());
            }
            let next = self.next(clients)?;
            rounds = if next > self.now { 0 } else { rounds + 1 };
            if rounds > MOST_ROUNDS {
                return Err(self.stuck(clients, "the clock does not go on"));
            }
            self.pass_to(next, clients);
        }
    }

    /// Everything that is due.
    fn deliver(&mut self, clients: &mut Clients) -> Result<(), SimulationError> {
        for completion in self.machine.moved(self.now) {
            self.core.transfer_done(self.now, completion)?;
        }
        if let Some(finished) = self.machine.computed(self.now) {
            self.report_plan(finished, clients)?;
        }
        while let Some(request) = clients.submit(self.now) {
            self.core.arrived(self.now, request)?;
        }
        Ok(())
    }

    fn report_plan(&mut self, finished: Finished, clients: &mut Clients) -> Result<(), SimulationError> {
        let results: Vec<_> = finished.plan.rows.iter().map(|row| clients.answer(self.now, row)).collect();
        let (busy, stalled) = (Duration::from_nanos(finished.busy), Duration::from_nanos(finished.stalled));
        Ok(self.core.plan_done(self.now, finished.plan.id, &results, StepTime { busy, stalled })?)
    }

    fn carry_out(&mut self, clients: &mut Clients) -> Result<(), SimulationError> {
        loop {
            let actions = self.core.take_actions();
            if actions.is_empty() {
                return Ok(());
            }
            for action in actions {
                match action {
                    Action::Plan(plan) => self.machine.compute(plan),
                    Action::Refuse(refusal) => clients.refused(self.now, refusal.request),
                    Action::Control(ControlAction::Submit(transfer)) => {
                        self.machine.submit(self.now, transfer)
                    }
                    Action::Control(ControlAction::Cancel(kind, id)) => {
                        if let Some(completion) = self.machine.cancel(self.now, kind, id) {
                            self.core.transfer_done(self.now, completion)?;
                        }
                    }
                }
            }
        }
    }

    fn next(&self, clients: &Clients) -> Result<Time, SimulationError> {
        let deadline = self.core.next_deadline();
        // One that has passed is looked at again soon, not at once.
        let deadline = deadline.map(|at| if at > self.now { at } else { self.now + PAST });
        let next = self.machine.next().into_iter().chain(clients.next()).chain(deadline).min();
        next.map(|next| next.max(self.now)).ok_or_else(|| self.stuck(clients, "nothing is under way"))
    }

    /// Lets time pass; what the device does not use of it is counted by its cause.
    fn pass_to(&mut self, next: Time, clients: &Clients) {
        if self.machine.computes_nothing() && next > self.now {
            let (from, span) = (self.now, next.0 - self.now.0);
            if clients.in_flight() > 0 {
                self.machine.tally.waiting += span;
                self.machine.timeline.add(Track::Stall, from, next, || "requests wait, none can go".into());
            } else {
                self.machine.tally.empty += span;
                self.machine.timeline.add(Track::Stall, from, next, || "no requests".into());
            }
        }
        self.now = next;
    }

    fn stuck(&self, clients: &Clients, why: &str) -> SimulationError {
        let stats = self.core.stats();
        SimulationError::Stuck {
            now_s: self.now.0 as f64 / 1e9,
            left: clients.unfinished(),
            detail: format!(
                "{why}; {} wait, {} run, {} transfers in flight",
                stats.waiting, stats.running, stats.transfers_in_flight
            ),
        }
    }
}
