//! A short measurement of the link from host to device before anything is served, so that the first decisions need
//! not guess. It uses the Mover that will serve: an emulated link is found out by what it does, like any other.
//! - It is over within `Limits::longest` and `Limits::patience`, whatever the Mover does.
//! - When it returns a result, good or bad, nothing of it is under way: no byte of it lands in a page later.
//! - It reads no clock of its own and tells Core nothing but the cost that it found.

use std::sync::Arc;
use std::time::Duration;
use strata_sched::cost::LinkCost;
use strata_tier::{CompletionReceiver, Mover};
use strata_types::{
    GroupId, LoadTicket, PageId, PageMove, Time, TransferCompletion, TransferDescriptor, TransferError,
    TransferId, TransferKind,
};
use thiserror::Error;

/// Transfers of one page, for what a transfer costs whatever its size; medians count, since the first also wakes the
/// threads and others may be disturbed.
const SMALL: usize = 5;
/// Large transfers, for what a byte costs.
const LARGE: usize = 3;
/// What a large transfer should take: well above a scheduler's time slice, well below what a start may cost.
const LARGE_SPAN: Duration = Duration::from_millis(20);

/// What is measured.
#[derive(Clone, Copy, Debug)]
pub struct LinkTrial {
    /// The group whose pages move.
    pub group: GroupId,
    /// Its layers.
    pub layers: u32,
    /// Pages from the first that transfers are spread over: mapped memory that nobody uses yet.
    pub host_pages: u32,
    /// The same on the device.
    pub device_pages: u32,
    /// Pages of the largest transfer.
    pub transfer_pages: u32,
    /// How long it may take.
    pub limits: TrialLimits,
}

/// Bounds of a measurement.
#[derive(Clone, Copy, Debug)]
pub struct TrialLimits {
    /// What has not come by then is cancelled, and what came of it is the measurement.
    pub longest: Duration,
    /// How long a cancelled transfer may still take to end.
    pub patience: Duration,
}

impl Default for TrialLimits {
    fn default() -> TrialLimits {
        TrialLimits { longest: Duration::from_millis(150), patience: Duration::from_secs(10) }
    }
}

/// Why a link was not measured.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
pub enum TrialError {
    /// The link is learnt from its first transfers instead.
    #[error("{0}")]
    Failed(String),
    /// A Mover may still write to memory that Core would give to others.
    #[error("a cancelled transfer of {pages} pages did not end within {patience:?}")]
    Stuck {
        /// Its pages.
        pages: usize,
        /// How long it was waited for.
        patience: Duration,
    },
}

impl LinkTrial {
    /// Measures. `completions` is the Mover's queue, which nobody else reads yet.
    pub fn run(
        &self,
        mover: &dyn Mover,
        completions: &CompletionReceiver,
        clock: &dyn Fn() -> Time,
    ) -> Result<LinkCost, TrialError> {
        let deadline = clock() + self.limits.longest;
        let mut samples: Vec<(u64, Duration)> = Vec::new();
        for turn in 0..SMALL + LARGE {
            let quickest = samples.iter().map(|sample| sample.1).min();
            let pages = if turn < SMALL { 1 } else { self.large(quickest.unwrap_or_default()) };
            let began = clock();
            let done =
                self.transfer(TransferId(turn as u64), pages, mover, completions, deadline.since(began))?;
            let took = clock().since(began);
            let cut = done.error == Some(TransferError::Cancelled);
            if let Some(error) = done.error.filter(|_| !cut) {
                return Err(TrialError::Failed(error.to_string()));
            }
            // A part says less than what was whole before it, but more than nothing.
            if done.bytes > 0 && !took.is_zero() && (!cut || samples.is_empty()) {
                samples.push((done.bytes, took));
            }
            if cut || clock() >= deadline {
                break;
            }
        }
        cost(&samples).ok_or_else(|| {
            TrialError::Failed(format!("no byte came through within {:?}", self.limits.longest))
        })
    }

    /// Pages of a large transfer, given what one page takes.
    fn large(&self, page: Duration) -> u32 {
        let most = self.transfer_pages.min(self.host_pages).min(self.device_pages);
        let pages = LARGE_SPAN.as_nanos() / page.as_nanos().max(1);
        u32::try_from(pages).unwrap_or(u32::MAX).clamp(1, most.max(1))
    }

    /// Loads so many scattered pages and waits for the end.
    fn transfer(
        &self,
        id: TransferId,
        pages: u32,
        mover: &dyn Mover,
        completions: &CompletionReceiver,
        limit: Duration,
    ) -> Result<TransferCompletion, TrialError> {
        let failed = |reason: String| TrialError::Failed(reason);
        let ticket = Some(Arc::new(LoadTicket::new(id, self.layers)));
        let (kind, group, records) = (TransferKind::Load, self.group, Vec::new());
        let pages = self.scattered(pages);
        let count = pages.len();
        mover
            .submit(TransferDescriptor { id, kind, group, pages, records, ticket })
            .map_err(|error| failed(error.to_string()))?;
        if let Ok(done) = completions.recv_timeout(limit) {
            return Ok(done);
        }
        mover.cancel(id);
        let patience = self.limits.patience;
        completions.recv_timeout(patience).map_err(|_| TrialError::Stuck { pages: count, patience })
    }

    /// Pages that lie apart in both pools and in opposite order, as after long use.
    fn scattered(&self, count: u32) -> Vec<PageMove> {
        let spread = |index: u32, pages: u32| PageId(index * (pages / count).max(1));
        let to = |index| spread(count - 1 - index, self.device_pages);
        (0..count).map(|index| PageMove { from: spread(index, self.host_pages), to: to(index) }).collect()
    }
}

/// The line through the medians of the smallest and the largest transfers, as far as they tell both apart.
fn cost(samples: &[(u64, Duration)]) -> Option<LinkCost> {
    let sizes = || samples.iter().map(|sample| sample.0);
    let (few, many) = (sizes().min()?, sizes().max()?);
    let (quick, slow) = (median(samples, few)?, median(samples, many)?);
    let slope = (slow - quick) / (many - few) as f64;
    let per_byte = if slope.is_finite() && slope > 0.0 { slope } else { slow / many as f64 };
    Some(LinkCost { latency: (quick - per_byte * few as f64).max(0.0), per_byte })
}

/// Seconds that the transfers of this size took, the lower middle one.
fn median(samples: &[(u64, Duration)], bytes: u64) -> Option<f64> {
    let of_size = samples.iter().filter(|sample| sample.0 == bytes);
    let mut spans: Vec<Duration> = of_size.map(|sample| sample.1).collect();
    spans.sort();
    spans.get(spans.len().saturating_sub(1) / 2).map(Duration::as_secs_f64)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashSet;
    use std::sync::atomic::{AtomicU64, Ordering};
    use std::sync::Mutex;
    use strata_tier::{completion_queue, CompletionSender, SubmitError};
    use strata_types::ShardId;

    const PAGE_BYTES: u64 = 700_000;

    /// How a fake link behaves from the given transfer on.
    #[derive(Clone, Copy, PartialEq)]
    enum Defect {
        None,
        /// Takes this many times as long, once.
        Late(f64),
        Fails,
        /// Ends only when it is cancelled, with this many bytes moved.
        Hangs(u64),
        Silent,
        Full,
    }

    /// A link of known cost on a clock of its own.
    struct FakeLink {
        cost: LinkCost,
        defect: (u64, Defect),
        now: AtomicU64,
        completions: CompletionSender,
        moved: Mutex<Vec<Vec<PageMove>>>,
    }

    impl FakeLink {
        fn advance(&self, seconds: f64) {
            self.now.fetch_add((seconds * 1e9) as u64, Ordering::Relaxed);
        }

        fn end(&self, id: TransferId, pages: usize, bytes: u64, error: Option<TransferError>) {
            let done =
                TransferCompletion { id, shard: ShardId(0), pages_whole: pages, error, bytes, busy_ns: 0 };
            self.completions.send(done).unwrap();
        }
    }

    impl Mover for FakeLink {
        fn submit(&self, transfer: TransferDescriptor) -> Result<(), SubmitError> {
            let (pages, bytes) = (transfer.pages.len(), transfer.pages.len() as u64 * PAGE_BYTES);
            assert_eq!((transfer.kind, transfer.ticket.as_ref().unwrap().layers()), (TransferKind::Load, 30));
            self.moved.lock().unwrap().push(transfer.pages.clone());
            let seconds = self.cost.latency + self.cost.per_byte * bytes as f64;
            match self.defect {
                (first, Defect::Late(factor)) if transfer.id.0 == first => self.advance(factor * seconds),
                (first, Defect::Fails) if transfer.id.0 >= first => {
                    let reason = "gone".into();
                    let error = TransferError::Io { operation: "copy".into(), reason };
                    self.end(transfer.id, 0, 0, Some(error));
                    return Ok(());
                }
                (first, Defect::Hangs(_) | Defect::Silent) if transfer.id.0 >= first => return Ok(()),
                (first, Defect::Full) if transfer.id.0 >= first => {
                    return Err(SubmitError::Full(Box::new(transfer)))
                }
                _ => self.advance(seconds),
            }
            self.end(transfer.id, pages, bytes, None);
            Ok(())
        }

        fn cancel(&self, id: TransferId) {
            if let (_, Defect::Hangs(bytes)) = self.defect {
                self.advance(0.15);
                self.end(id, 0, bytes, Some(TransferError::Cancelled));
            }
        }
    }

    const LINK: LinkCost = LinkCost { latency: 200e-6, per_byte: 1.0 / 2e9 };

    /// What a trial over such a link finds, how long it took and what it moved.
    fn trial(
        cost: LinkCost,
        defect: (u64, Defect),
        pages: [u32; 2],
    ) -> (Result<LinkCost, TrialError>, Duration, Vec<Vec<PageMove>>) {
        let (completions, receiver) = completion_queue(4);
        let (now, moved) = (AtomicU64::new(7), Mutex::default());
        let link = FakeLink { cost, defect, now, completions, moved };
        let limits = TrialLimits { longest: Duration::from_millis(150), patience: Duration::from_millis(30) };
        let [host_pages, device_pages] = pages;
        let (group, layers, transfer_pages) = (GroupId(0), 30, 34);
        let trial = LinkTrial { group, layers, host_pages, device_pages, transfer_pages, limits };
        let found = trial.run(&link, &receiver, &|| Time(link.now.load(Ordering::Relaxed)));
        assert!(receiver.is_empty(), "a completion is left for Core");
        let took = Time(link.now.into_inner()).since(Time(7));
        (found, took, link.moved.into_inner().unwrap())
    }

    fn assert_near(found: LinkCost, truth: LinkCost, sizes: &[u64]) {
        for bytes in sizes {
            let cost = |link: LinkCost| link.latency + link.per_byte * *bytes as f64;
            let error = (cost(found) / cost(truth) - 1.0).abs();
            assert!(error < 0.01, "{error:.3} off at {bytes} bytes: {found:?} for {truth:?}");
        }
    }

    #[test]
    fn latency_and_bandwidth_are_told_apart() {
        for cost in [
            LINK,
            LinkCost { latency: 2e-3, per_byte: 1.0 / 10e9 },
            LinkCost { latency: 0.0, per_byte: 1.0 / 0.38e9 },
        ] {
            let (found, took, moved) = trial(cost, (0, Defect::None), [400, 200]);
            assert_near(
                found.unwrap(),
                cost,
                &[PAGE_BYTES, 4 * PAGE_BYTES, 34 * PAGE_BYTES, 200 * PAGE_BYTES],
            );
            assert!(took < Duration::from_millis(150), "{took:?}");
            assert_eq!(moved.len(), SMALL + LARGE);
        }
    }

    #[test]
    fn one_transfer_that_was_disturbed_does_not_matter() {
        for late in 0..(SMALL + LARGE) as u64 {
            let (found, ..) = trial(LINK, (late, Defect::Late(6.0)), [400, 200]);
            assert_near(found.unwrap(), LINK, &[PAGE_BYTES, 34 * PAGE_BYTES]);
        }
    }

    #[test]
    fn a_slow_link_is_cut_and_what_came_through_counts() {
        let slow = LinkCost { latency: 0.0, per_byte: 1.0 / 10e6 };
        let (found, took, moved) = trial(slow, (0, Defect::None), [400, 200]);
        assert_near(found.unwrap(), slow, &[100 * PAGE_BYTES]);
        assert!(took < Duration::from_millis(300) && moved.len() < SMALL, "{took:?}");
        let (found, ..) = trial(LINK, (0, Defect::Hangs(1_500_000)), [400, 200]);
        assert_near(found.unwrap(), slow, &[100 * PAGE_BYTES]);
    }

    #[test]
    fn pages_stay_inside_both_pools_and_no_page_is_written_twice() {
        for pages in [[1, 2], [2, 2], [7, 100], [100, 5], [400, 200]] {
            let (found, _, moved) = trial(LINK, (0, Defect::None), pages);
            assert!(found.is_ok());
            for transfer in moved {
                assert!(transfer.iter().all(|page| page.from.0 < pages[0] && page.to.0 < pages[1]));
                let targets: HashSet<u32> = transfer.iter().map(|page| page.to.0).collect();
                assert_eq!(targets.len(), transfer.len());
            }
        }
    }

    #[test]
    fn whatever_fails_is_said_and_nothing_stays_under_way() {
        for (defect, words) in [
            (Defect::Fails, "gone"),
            (Defect::Hangs(0), "no byte came through"),
            (Defect::Full, "queue is full"),
            (Defect::Silent, "did not end"),
        ] {
            let (found, ..) = trial(LINK, (0, defect), [400, 200]);
            let error = found.unwrap_err();
            assert!(error.to_string().contains(words), "{error}");
            assert_eq!(matches!(error, TrialError::Stuck { .. }), defect == Defect::Silent);
        }
        // What was measured before it is not thrown away by a cut.
        let (found, ..) = trial(LINK, (5, Defect::Hangs(1_500_000)), [400, 200]);
        assert!(found.is_ok());
    }
}
