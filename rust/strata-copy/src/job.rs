//! `Job`: one transfer while copy threads work on it. Its steps are claimed by any number of threads; each is
//! copied by one. A layer (of a load) or a page (of a backup) counts only when all its steps are whole, and the
//! completion exists only once: when no step is in anyone's hands and none will be claimed any more.

use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Instant;
use strata_types::{KvShape, ShardId, TransferCompletion, TransferDescriptor, TransferError, TransferKind};

/// What a thread copies between two looks at the queues, where pieces are small enough: long enough that claiming
/// costs nothing, short enough (some 40 us) that a load never waits for long.
const STEP_BYTES: usize = 256 << 10;

/// Pieces that one thread copies at a time.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Step {
    index: usize,
    pub(crate) layers: Range<u32>,
    pub(crate) pages: Range<usize>,
}

/// How a transfer is cut into steps. A load goes layer after layer, a backup page after page; what becomes whole
/// together (a layer, or a few pages) is a unit.
#[derive(Debug)]
struct Plan {
    by_layer: bool,
    layers: u32,
    pages: usize,
    layers_per_step: u32,
    pages_per_step: usize,
    steps_per_unit: usize,
    units: usize,
}

impl Plan {
    fn new(kind: TransferKind, shape: KvShape, pages: usize) -> Plan {
        let layer_bytes = shape.parts as usize * shape.piece_bytes();
        let by_layer = kind == TransferKind::Load;
        let (layers_per_step, pages_per_step) = if by_layer {
            (1, (STEP_BYTES / layer_bytes).max(1))
        } else {
            let layers = ((STEP_BYTES / layer_bytes) as u32).clamp(1, shape.layers);
            (layers, (STEP_BYTES / shape.page_bytes()).max(1))
        };
        let page_steps = pages.div_ceil(pages_per_step);
        let layer_steps = shape.layers.div_ceil(layers_per_step) as usize;
        let (units, steps_per_unit) =
            if by_layer { (layer_steps, page_steps) } else { (page_steps, layer_steps) };
        Plan { by_layer, layers: shape.layers, pages, layers_per_step, pages_per_step, steps_per_unit, units }
    }

    fn steps(&self) -> usize {
        self.units * self.steps_per_unit
    }

    fn unit(&self, step: usize) -> usize {
        step / self.steps_per_unit
    }

    fn step(&self, index: usize) -> Step {
        let (unit, inside) = (index / self.steps_per_unit, index % self.steps_per_unit);
        let (layer, page) = if self.by_layer { (unit, inside) } else { (inside, unit) };
        let first_layer = layer as u32 * self.layers_per_step;
        let first_page = page * self.pages_per_step;
        Step {
            index,
            layers: first_layer..(first_layer + self.layers_per_step).min(self.layers),
            pages: first_page..(first_page + self.pages_per_step).min(self.pages),
        }
    }

    fn pages_whole(&self, units_whole: usize) -> usize {
        match (self.by_layer, units_whole == self.units) {
            (_, true) => self.pages,
            (true, false) => 0,
            (false, false) => units_whole * self.pages_per_step,
        }
    }
}

#[derive(Debug)]
struct Progress {
    started: Option<Instant>,
    next: usize,
    in_flight: usize,
    /// Steps of each unit that are not whole.
    missing: Vec<usize>,
    /// Units whole, counted from the first.
    units_whole: usize,
    bytes: u64,
    error: Option<TransferError>,
    reported: bool,
}

/// A transfer and how far it is.
#[derive(Debug)]
pub(crate) struct Job {
    pub(crate) transfer: TransferDescriptor,
    plan: Plan,
    cancelled: AtomicBool,
    progress: Mutex<Progress>,
}

impl Job {
    pub(crate) fn new(transfer: TransferDescriptor, shape: KvShape) -> Job {
        let plan = Plan::new(transfer.kind, shape, transfer.pages.len());
        let progress = Progress {
            started: None,
            next: 0,
            in_flight: 0,
            missing: vec![plan.steps_per_unit; plan.units],
            units_whole: 0,
            bytes: 0,
            error: None,
            reported: false,
        };
        Job { transfer, plan, cancelled: AtomicBool::new(false), progress: Mutex::new(progress) }
    }

    pub(crate) fn into_transfer(self) -> TransferDescriptor {
        self.transfer
    }

    pub(crate) fn cancel(&self) {
        self.cancelled.store(true, Ordering::Release);
    }

    pub(crate) fn is_cancelled(&self) -> bool {
        self.cancelled.load(Ordering::Acquire)
    }

    /// Whether a second thread could help.
    pub(crate) fn is_divisible(&self) -> bool {
        self.plan.steps() > 1
    }

    fn progress(&self) -> MutexGuard<'_, Progress> {
        // Nothing under this lock can panic half-way through a change.
        self.progress.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Runs `check` before the first step, once.
    pub(crate) fn start(&self, check: impl FnOnce(&TransferDescriptor) -> Result<(), TransferError>) {
        let mut progress = self.progress();
        if progress.started.is_none() {
            progress.started = Some(Instant::now());
            progress.error = check(&self.transfer).err();
        }
    }

    /// The next step, unless there is none or the transfer has failed. `finish` must follow.
    pub(crate) fn claim(&self) -> Option<Step> {
        let mut progress = self.progress();
        if progress.error.is_some() || progress.next >= self.plan.steps() {
            return None;
        }
        if self.is_cancelled() {
            progress.error = Some(TransferError::Cancelled);
            return None;
        }
        let step = self.plan.step(progress.next);
        progress.next += 1;
        progress.in_flight += 1;
        Some(step)
    }

    /// Says that this thread has let go of a step: all its bytes are published, or it failed.
    pub(crate) fn finish(&self, step: &Step, outcome: Result<u64, TransferError>) {
        let mut progress = self.progress();
        progress.in_flight -= 1;
        match outcome {
            Ok(bytes) => {
                progress.bytes += bytes;
                progress.missing[self.plan.unit(step.index)] -= 1;
                let whole = progress.missing[progress.units_whole..].iter().take_while(|left| **left == 0);
                progress.units_whole += whole.count();
            }
            Err(error) => {
                progress.error.get_or_insert(error);
            }
        }
        let (units_whole, failed) = (progress.units_whole, progress.error.is_some());
        drop(progress);
        let Some(ticket) = &self.transfer.ticket else { return };
        if failed {
            ticket.fail();
        } else if self.plan.by_layer {
            ticket.advance(units_whole as u32);
        }
    }

    /// The completion, for the one caller that finds the work over.
    pub(crate) fn settle(&self) -> Option<TransferCompletion> {
        let mut progress = self.progress();
        let over = progress.error.is_some() || progress.next >= self.plan.steps();
        if !over || progress.in_flight > 0 || progress.reported {
            return None;
        }
        progress.reported = true;
        if let Some(ticket) = &self.transfer.ticket {
            match progress.error {
                Some(_) => ticket.fail(),
                None => ticket.advance(ticket.layers()),
            }
        }
        let busy = progress.started.map_or(0, |started| started.elapsed().as_nanos());
        Some(TransferCompletion {
            id: self.transfer.id,
            shard: ShardId(0),
            pages_whole: self.plan.pages_whole(progress.units_whole),
            error: progress.error.clone(),
            bytes: progress.bytes,
            busy_ns: u64::try_from(busy).unwrap_or(u64::MAX),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::HashMap;
    use strata_types::{GroupId, PageId, PageMove, TransferId};

    fn shape(layers: u32, parts: u32, words: u32) -> KvShape {
        KvShape::new(GroupId(0), layers, parts, 1, words * 4).unwrap()
    }

    fn job(kind: TransferKind, shape: KvShape, pages: u32) -> Job {
        let pages = (0..pages).map(|page| PageMove { from: PageId(page), to: PageId(page) }).collect();
        let (id, group, records) = (TransferId(1), GroupId(0), Vec::new());
        Job::new(TransferDescriptor { id, kind, group, pages, records, ticket: None }, shape)
    }

    proptest! {
        #[test]
        fn steps_cover_every_piece_once_in_order(load in any::<bool>(), layers in 1u32..40, parts in 1u32..3,
                                                 words in 1u32..20_000, pages in 0u32..50) {
            let kind = if load { TransferKind::Load } else { TransferKind::Backup };
            let plan = Plan::new(kind, shape(layers, parts, words), pages as usize);
            let mut seen: HashMap<(u32, usize), usize> = HashMap::new();
            let mut last_unit = 0;
            for index in 0..plan.steps() {
                let step = plan.step(index);
                prop_assert!(!step.layers.is_empty() && !step.pages.is_empty());
                prop_assert!(plan.unit(index) >= last_unit);
                last_unit = plan.unit(index);
                for layer in step.layers.clone() {
                    prop_assert!(!load || layer as usize == last_unit);
                    for page in step.pages.clone() {
                        prop_assert!(seen.insert((layer, page), last_unit).is_none());
                    }
                }
            }
            prop_assert_eq!(seen.len(), (layers * pages) as usize);
            for whole in 0..=plan.units {
                // A page counts exactly when the units that hold its pieces are whole.
                for page in 0..pages as usize {
                    let complete = (0..layers).all(|layer| seen[&(layer, page)] < whole);
                    prop_assert_eq!(complete, page < plan.pages_whole(whole));
                }
            }
        }
    }

    #[test]
    fn a_later_unit_does_not_count_before_an_earlier_one() {
        let job = job(TransferKind::Backup, shape(2, 1, 100_000), 2);
        let steps: Vec<Step> = std::iter::from_fn(|| job.claim()).collect();
        assert_eq!(steps.len(), 4);
        for step in &steps[1..] {
            job.finish(step, Ok(1));
            assert_eq!(job.progress().units_whole, 0);
        }
        assert!(job.settle().is_none(), "a step is still in flight");
        job.finish(&steps[0], Ok(1));
        let done = job.settle().unwrap();
        assert_eq!((done.pages_whole, done.bytes, done.error), (2, 4, None));
        assert!(job.settle().is_none(), "a second completion");
    }

    #[test]
    fn a_cancelled_job_settles_after_its_last_step_is_let_go() {
        let job = job(TransferKind::Backup, shape(2, 1, 100_000), 2);
        let steps = [job.claim().unwrap(), job.claim().unwrap(), job.claim().unwrap()];
        job.cancel();
        assert!(job.claim().is_none() && job.settle().is_none());
        job.finish(&steps[0], Ok(1));
        job.finish(&steps[2], Err(TransferError::Cancelled));
        assert!(job.settle().is_none());
        job.finish(&steps[1], Ok(1));
        let done = job.settle().unwrap();
        assert_eq!((done.pages_whole, done.error), (1, Some(TransferError::Cancelled)));
        assert!(job.claim().is_none() && job.settle().is_none());
    }

    #[test]
    fn an_empty_job_is_whole_at_once() {
        for kind in [TransferKind::Load, TransferKind::Backup] {
            let job = job(kind, shape(3, 2, 4), 0);
            assert!(job.claim().is_none());
            assert_eq!(job.settle().unwrap().error, None);
        }
    }
}
