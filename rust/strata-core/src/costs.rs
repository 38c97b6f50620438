//! What loading, reading and computing cost, learnt from the events that Core sees anyway. A link is measured while it
//! is busy: the bytes that came through, over the time in which something was under way.

use crate::plan::PlanRow;
use std::time::Duration;
use strata_sched::cost::{CostModel, CostPrior, CostReport, StepShape};
use strata_sched::{LoadPrice, Prices};
use strata_types::{Time, TransferKind};

/// A link that is never idle is measured this often at most.
const WINDOW: Duration = Duration::from_millis(500);
/// Such a link is measured once so many times more transfers have ended than are under way: those have moved a part of
/// their bytes already, which must not count for much.
const ENDED: u32 = 4;
/// Bytes that are read from a disk of unknown speed.
const FIRST_READ: u64 = 1 << 20;
/// One in so many reads that seem too slow to be worth it is tried: the disk may have become faster, or the
/// measurement was bad luck.
const DOUBT: u32 = 8;

/// One link while it is busy.
#[derive(Clone, Copy, Debug, Default)]
struct Meter {
    under_way: u32,
    /// When the measurement began, and whether the link was idle before.
    since: Time,
    from_idle: bool,
    bytes: u64,
    ended: u32,
}

impl Meter {
    fn begin(&mut self, now: Time) {
        *self = Meter {
            under_way: self.under_way,
            since: now,
            from_idle: self.under_way == 0,
            bytes: 0,
            ended: 0,
        };
    }

    fn started(&mut self, now: Time) {
        if self.under_way == 0 {
            self.begin(now);
        }
        self.under_way += 1;
    }

    /// A transfer has ended. What the link has moved in which time, if that is a measurement.
    fn ended(&mut self, bytes: u64, now: Time) -> Option<(u64, Duration)> {
        self.under_way = self.under_way.saturating_sub(1);
        self.bytes += bytes;
        self.ended += 1;
        let (moved, span) = (self.bytes, now.since(self.since));
        let long = span >= WINDOW && self.ended >= ENDED * self.under_way;
        if self.under_way > 0 && !long {
            return None;
        }
        // A short end of a long stretch tells nothing: its bytes were moved before it.
        let fair = moved > 0 && (self.from_idle || long);
        self.begin(now);
        fair.then_some((moved, span))
    }
}

/// The cost model and what feeds it.
pub(crate) struct Costs {
    model: CostModel,
    meters: [Meter; 4],
    /// Tokens of one prefill step.
    chunk: u64,
    /// Reads in a row that seemed not to be worth it.
    refused_reads: u32,
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
        let model = CostModel::new(prior);
        Costs { model, meters: Default::default(), chunk: u64::from(chunk), refused_reads: 0 }
    }

    /// A transfer was handed to its Mover.
    pub fn started(&mut self, kind: TransferKind, now: Time) {
        if let Some(index) = index(kind) {
            self.meters[index].started(now);
        }
    }

    /// A transfer has ended, having moved this much.
    pub fn ended(&mut self, kind: TransferKind, bytes: u64, now: Time) {
        let measured = index(kind).and_then(|index| self.meters[index].ended(bytes, now));
        if let Some((bytes, span)) = measured {
            self.model.observe_transfer(kind, bytes, span);
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

    /// Disk to host.
    pub fn read(&self, bytes: u64) -> Option<Duration> {
        self.model.predict_transfer(TransferKind::Prefetch, bytes)
    }

    /// Bytes that can be read from disk in about this time, some at least; few while the speed is unknown.
    pub fn read_within(&self, span: Duration) -> u64 {
        let (Some(once), Some(twice)) = (self.read(FIRST_READ), self.read(2 * FIRST_READ)) else {
            return FIRST_READ;
        };
        let (more, each) =
            (span.saturating_sub(once).as_secs_f64(), twice.saturating_sub(once).as_secs_f64());
        // Saturates, also where a read takes no time.
        FIRST_READ.saturating_add((FIRST_READ as f64 * more / each.max(f64::MIN_POSITIVE)) as u64)
    }

    /// Whether a read that seems not to be worth it should be tried all the same.
    pub fn doubts_reads(&mut self) -> bool {
        self.refused_reads = (self.refused_reads + 1) % DOUBT;
        self.refused_reads == 0
    }

    /// Prefill of these tokens after a context.
    pub fn compute(&self, tokens: u64, context: u64) -> Option<Duration> {
        self.model.predict_prefill(tokens, context, self.chunk)
    }

    /// A step of this shape.
    pub fn step(&self, shape: &StepShape) -> Option<Duration> {
        self.model.predict_step(shape)
    }

    /// Host to device, by the token.
    pub fn load_price(&self, bytes_per_token: u64) -> Option<LoadPrice> {
        LoadPrice::of(&self.model, bytes_per_token)
    }

    /// What a decision reckons with. `decode` is the next decode step.
    pub fn prices(&self, bytes_per_token: u64, decode: &StepShape) -> Prices {
        Prices::of(&self.model, bytes_per_token, decode)
    }

    pub fn report(&self) -> CostReport {
        self.model.report()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MILLISECOND: Duration = Duration::from_millis(1);

    /// What the meter says of transfers of so many bytes that start together and end at these milliseconds.
    fn measured(ends: &[(u32, u64)]) -> Vec<(u64, Duration)> {
        let mut meter = Meter::default();
        ends.iter().for_each(|_| meter.started(Time(0)));
        ends.iter().filter_map(|(at, bytes)| meter.ended(*bytes, Time(0) + *at * MILLISECOND)).collect()
    }

    #[test]
    fn transfers_that_end_together_are_measured_together() {
        let four = measured(&[(770, 10), (771, 10), (772, 10), (773, 10)]);
        assert_eq!(four, [(40, 773 * MILLISECOND)]);
        assert_eq!(measured(&[(20, 7)]), [(7, 20 * MILLISECOND)]);
        assert_eq!(measured(&[(20, 0)]), [], "nothing was moved");
        let many: Vec<(u32, u64)> = (0..50).map(|index| (580 + index, 1)).collect();
        assert_eq!(measured(&many), [(40, 619 * MILLISECOND)], "and the short end tells nothing");
    }

    #[test]
    fn a_link_that_is_never_idle_is_measured_too() {
        let mut meter = Meter::default();
        (0..2).for_each(|_| meter.started(Time(0)));
        let mut found = Vec::new();
        for tenth in 1..=20 {
            let now = Time(0) + 100 * tenth * MILLISECOND;
            found.extend(meter.ended(5, now));
            meter.started(now);
        }
        assert_eq!(found, [(25, 500 * MILLISECOND); 4]);
    }

    #[test]
    fn a_read_of_a_span_takes_about_as_long() {
        let mut costs = Costs::new(CostPrior::default(), 64);
        assert_eq!(costs.read_within(Duration::from_secs(9)), FIRST_READ, "nothing is known");
        costs.started(TransferKind::Prefetch, Time(0));
        costs.ended(TransferKind::Prefetch, FIRST_READ, Time(0) + 20 * MILLISECOND);
        for span in [Duration::from_millis(100), Duration::from_secs(4)] {
            let taken = costs.read(costs.read_within(span)).unwrap_or_default();
            assert!(taken.abs_diff(span) <= span / 100, "{taken:?} for {span:?}");
        }
        assert_eq!(costs.read_within(Duration::ZERO), FIRST_READ);
        assert_eq!((0..16).filter(|_| costs.doubts_reads()).count(), 2);
    }
}
