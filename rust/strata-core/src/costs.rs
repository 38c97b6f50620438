//! What loading, reading and computing cost, learnt from the events that Core sees anyway. A link is measured while it
//! is busy: the bytes that came through, over the time in which something was under way.

use crate::plan::PlanRow;
use std::time::Duration;
use strata_sched::cost::{CostModel, CostPrior, CostReport, StepShape};
use strata_sched::Prices;
use strata_types::{Time, TransferKind};

/// A link that is never idle is measured this often.
const LONGEST_WINDOW: Duration = Duration::from_millis(500);

/// One link while it is busy.
#[derive(Clone, Copy, Debug, Default)]
struct Meter {
    under_way: u32,
    since: Time,
    bytes: u64,
}

/// The cost model and what feeds it.
pub(crate) struct Costs {
    model: CostModel,
    meters: [Meter; 4],
    /// Tokens of one prefill step.
    chunk: u64,
}

fn index(kind: TransferKind) -> Option<usize> {
    match kind {
        TransferKind::Load => Some(0),
        TransferKind::Backup => Some(1),
        TransferKind::Spill => Some(2),
        TransferKind::Prefetch => Some(3),
        TransferKind::Erase => None,
    }
}

impl Costs {
    pub fn new(prior: CostPrior, chunk: u32) -> Costs {
        Costs { model: CostModel::new(prior), meters: Default::default(), chunk: u64::from(chunk) }
    }

    /// A transfer was handed to its Mover.
    pub fn started(&mut self, kind: TransferKind, now: Time) {
        let Some(meter) = index(kind).map(|index| &mut self.meters[index]) else { return };
        if meter.under_way == 0 {
            (meter.since, meter.bytes) = (now, 0);
        }
        meter.under_way += 1;
    }

    /// A transfer has ended, having moved this much.
    pub fn ended(&mut self, kind: TransferKind, bytes: u64, now: Time) {
        let Some(meter) = index(kind).map(|index| &mut self.meters[index]) else { return };
        meter.under_way = meter.under_way.saturating_sub(1);
        meter.bytes += bytes;
        let span = now.since(meter.since);
        if meter.bytes > 0 && (meter.under_way == 0 || span >= LONGEST_WINDOW) {
            self.model.observe_transfer(kind, meter.bytes, span);
            (meter.since, meter.bytes) = (now, 0);
        }
    }

    /// A step was carried out, which kept the model busy for this long.
    pub fn computed(&mut self, rows: &[PlanRow], busy: Duration) {
        let mut shape = StepShape::default();
        for row in rows {
            shape.add(StepShape::row(row.length as u64, row.start as u64));
        }
        self.measured(&shape, busy);
    }

    /// A step of this shape took this long; zero if it was not measured.
    pub fn measured(&mut self, shape: &StepShape, busy: Duration) {
        if !busy.is_zero() {
            self.model.observe_step(shape, busy);
        }
    }

    /// Host to device.
    pub fn load(&self, bytes: u64) -> Option<Duration> {
        self.model.predict_transfer(TransferKind::Load, bytes)
    }

    /// Disk to host. Before anything was read, what writes took is the best guess.
    pub fn read(&self, bytes: u64) -> Option<Duration> {
        let spill = || self.model.predict_transfer(TransferKind::Spill, bytes);
        self.model.predict_transfer(TransferKind::Prefetch, bytes).or_else(spill)
    }

    /// Prefill of these tokens after a context.
    pub fn compute(&self, tokens: u64, context: u64) -> Option<Duration> {
        self.model.predict_prefill(tokens, context, self.chunk)
    }

    /// A step of this shape.
    pub fn step(&self, shape: &StepShape) -> Option<Duration> {
        self.model.predict_step(shape)
    }

    /// What a decision reckons with. `decode` is the next decode step.
    pub fn prices(&self, bytes_per_token: u64, decode: &StepShape) -> Prices {
        Prices::of(&self.model, bytes_per_token, decode)
    }

    pub fn report(&self) -> CostReport {
        self.model.report()
    }
}
