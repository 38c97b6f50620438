//! The device: plans in order, each layer by layer. A layer begins when the one before is done and what it reads is
//! loaded; the gaps that this leaves are stalls. A copy by a kernel takes its share of the speed while it is under way.

use crate::model::StepCost;
use crate::timeline::{Timeline, Track};
use std::collections::VecDeque;
use strata_core::{Plan, PlanKind};
use strata_types::{Time, TransferId};

/// When a layer of a load may be read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ready {
    /// Now: all of the load is there.
    Whole,
    /// From this time on, which may be past.
    At(Time),
    /// Not known yet.
    Later,
}

/// A plan and what it takes.
#[derive(Debug)]
pub struct Step {
    /// The plan.
    pub plan: Plan,
    /// Its cost on an idle link.
    pub cost: StepCost,
    /// The loads that it reads.
    pub loads: Vec<TransferId>,
}

/// A stretch of computing without a gate inside.
#[derive(Clone, Copy, Debug)]
struct Segment {
    from: Time,
    /// Up to when it is accounted for.
    since: Time,
    /// Nanoseconds of computing left at full speed.
    left: f64,
    /// Layers that are done when it is.
    layers: u32,
    last: bool,
}

#[derive(Debug)]
struct Running {
    step: Step,
    layers: u32,
    segment: Option<Segment>,
    stalled_since: Option<Time>,
    busy: u64,
    stalled: u64,
}

/// A plan that was carried out.
#[derive(Debug)]
pub struct Finished {
    /// The plan.
    pub plan: Plan,
    /// Nanoseconds of computing, slowed or not.
    pub busy: u64,
    /// Nanoseconds of waiting for loads.
    pub stalled: u64,
}

/// One device.
#[derive(Debug)]
pub struct Device {
    layers: u32,
    /// What a copy under way leaves of the speed of prefill and of decode.
    left_by_copies: [f64; 2],
    copying: bool,
    queue: VecDeque<Step>,
    running: Option<Running>,
}

fn nanoseconds(seconds: f64) -> f64 {
    seconds * 1e9
}

impl Device {
    /// An idle device that computes so many layers.
    pub fn new(layers: u32, prefill_share: f64, decode_share: f64) -> Device {
        Device {
            layers,
            left_by_copies: [1.0 - prefill_share, 1.0 - decode_share],
            copying: false,
            queue: VecDeque::new(),
            running: None,
        }
    }

    /// Queues a step.
    pub fn submit(&mut self, step: Step) {
        self.queue.push_back(step);
    }

    /// Whether nothing is to be done.
    pub fn is_idle(&self) -> bool {
        self.running.is_none() && self.queue.is_empty()
    }

    fn speed(&self, kind: PlanKind) -> f64 {
        match (self.copying, kind) {
            (false, _) => 1.0,
            (true, PlanKind::Prefill) => self.left_by_copies[0],
            (true, PlanKind::Decode) => self.left_by_copies[1],
        }
    }

    /// From now on copies are under way, or not.
    pub fn set_copying(&mut self, now: Time, copying: bool) {
        if copying == self.copying {
            return;
        }
        if let Some(running) = &self.running {
            let speed = self.speed(running.step.plan.kind);
            if let Some(segment) = self.running.as_mut().and_then(|running| running.segment.as_mut()) {
                segment.left = (segment.left - (now.0 - segment.since.0) as f64 * speed).max(0.0);
                segment.since = now;
            }
        }
        self.copying = copying;
    }

    /// When there will be news of the running plan, as far as that is known.
    pub fn next(&self, ready: impl Fn(TransferId, u32) -> Ready) -> Option<Time> {
        let running = self.running.as_ref()?;
        if let Some(segment) = running.segment {
            return Some(ends(&segment, self.speed(running.step.plan.kind)));
        }
        let gates = running.step.loads.iter().map(|load| ready(*load, running.layers));
        let mut latest = Some(Time(0));
        for gate in gates {
            match gate {
                Ready::Whole => {}
                Ready::At(time) => latest = latest.map(|latest| latest.max(time)),
                Ready::Later => latest = None,
            }
        }
        latest
    }

    /// Goes on as far as it can be by now. Some once a plan is done.
    pub fn go_on(
        &mut self,
        now: Time,
        ready: impl Fn(TransferId, u32) -> Ready,
        timeline: &mut Timeline,
    ) -> Option<Finished> {
        loop {
            if self.running.is_none() {
                let step = self.queue.pop_front()?;
                self.running = Some(Running {
                    step,
                    layers: 0,
                    segment: None,
                    stalled_since: None,
                    busy: 0,
                    stalled: 0,
                });
                self.begin(now, &ready);
                continue;
            }
            let layers = self.layers;
            let speed = self.running.as_ref().map_or(1.0, |running| self.speed(running.step.plan.kind));
            let running = self.running.as_mut()?;
            match running.segment {
                Some(segment) if ends(&segment, speed) > now => return None,
                Some(segment) => {
                    running.busy += now.0 - segment.from.0;
                    timeline.add(Track::Compute, segment.from, now, || {
                        let (plan, done) = (&running.step.plan, running.layers);
                        format!("{:?} {} layers {done}..{} of {layers}", plan.kind, plan.id, segment.layers)
                    });
                    running.layers = segment.layers;
                    running.segment = None;
                    if segment.last {
                        let Running { step, busy, stalled, .. } = self.running.take()?;
                        return Some(Finished { plan: step.plan, busy, stalled });
                    }
                }
                None => {
                    let waits = running.step.loads.iter().any(|load| match ready(*load, running.layers) {
                        Ready::Whole => false,
                        Ready::At(time) => time > now,
                        Ready::Later => true,
                    });
                    if waits {
                        running.stalled_since.get_or_insert(now);
                        return None;
                    }
                    if let Some(since) = running.stalled_since.take() {
                        running.stalled += now.0 - since.0;
                        let layer = running.layers;
                        timeline.add(Track::Stall, since, now, || format!("load of layer {layer}"));
                    }
                    self.compute(now, &ready);
                }
            }
        }
    }

    /// What a step takes before its first layer comes first, so that it can hide some of a load.
    fn begin(&mut self, now: Time, ready: &impl Fn(TransferId, u32) -> Ready) {
        self.keep_unready(ready);
        let Some(running) = &mut self.running else { return };
        if !running.step.loads.is_empty() {
            let left = nanoseconds(running.step.cost.overhead);
            running.step.cost.overhead = 0.0;
            running.segment = Some(Segment { from: now, since: now, left, layers: 0, last: false });
        }
    }

    fn keep_unready(&mut self, ready: &impl Fn(TransferId, u32) -> Ready) {
        if let Some(running) = &mut self.running {
            running.step.loads.retain(|load| ready(*load, 0) != Ready::Whole);
        }
    }

    /// The next layer; all that are left once nothing is waited for any more.
    fn compute(&mut self, now: Time, ready: &impl Fn(TransferId, u32) -> Ready) {
        self.keep_unready(ready);
        let whole = self.layers;
        let Some(running) = &mut self.running else { return };
        let count = if running.step.loads.is_empty() { whole - running.layers } else { 1 };
        let last = running.layers + count == whole;
        let cost = &running.step.cost;
        let seconds = cost.overhead + cost.layer * f64::from(count) + if last { cost.head } else { 0.0 };
        let layers = running.layers + count;
        running.segment = Some(Segment { from: now, since: now, left: nanoseconds(seconds), layers, last });
        running.step.cost.overhead = 0.0;
    }
}

fn ends(segment: &Segment, speed: f64) -> Time {
    Time(segment.since.0 + (segment.left / speed).ceil() as u64)
}
