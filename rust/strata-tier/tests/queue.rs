//! `TransferQueue` under the suite of Movers, with a stand-in for the executor, and where an executor misbehaves.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::Duration;
use strata_tier::conformance::{run_all, MoverHarness};
use strata_tier::{
    completion_queue, CompletionReceiver, Mover, QueueStats, Report, SubmitError, TransferQueue,
};
use strata_types::{
    GroupId, LoadTicket, PageId, PageMove, TicketState, TransferDescriptor, TransferError, TransferId,
    TransferKind,
};

const LAYERS: u32 = 3;
const PAGE_BYTES: usize = 48;
const NOW: Duration = Duration::ZERO;

type Memory = Arc<Mutex<Vec<[u8; PAGE_BYTES]>>>;

/// An executor that copies pages on a thread of its own, layer by layer, `window` transfers at a time.
struct Executor {
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Executor {
    fn start(queue: Arc<TransferQueue>, device: Memory, host: Memory, window: usize) -> Executor {
        let stop = Arc::new(AtomicBool::new(false));
        let stopped = Arc::clone(&stop);
        let work = move || {
            let mut taken = Vec::new();
            while !stopped.load(Ordering::Relaxed) {
                taken.extend(queue.take(Duration::from_millis(1)));
                if taken.len() >= window || queue.outstanding() == taken.len() {
                    // The latest first: completions need not come in order.
                    while let Some(transfer) = taken.pop() {
                        execute(&queue, &transfer, &device, &host);
                    }
                }
            }
        };
        Executor { stop, thread: Some(std::thread::spawn(work)) }
    }
}

fn execute(queue: &TransferQueue, transfer: &strata_tier::Taken, device: &Memory, host: &Memory) {
    let (source, target) = match transfer.kind {
        TransferKind::Load => (host, device),
        _ => (device, host),
    };
    for layer in 0..LAYERS as usize {
        if queue.is_cancelled(transfer.id) {
            let error = Some(TransferError::Cancelled);
            return queue.done(transfer.id, Report { error, ..Report::default() });
        }
        let bytes = PAGE_BYTES / LAYERS as usize;
        for PageMove { from, to } in &transfer.pages {
            let page = source.lock().unwrap()[from.0 as usize];
            let part = layer * bytes..(layer + 1) * bytes;
            target.lock().unwrap()[to.0 as usize][part.clone()].copy_from_slice(&page[part]);
        }
        queue.layers_ready(transfer.id, layer as u32 + 1);
    }
    let (pages_whole, bytes) = (transfer.pages.len(), (transfer.pages.len() * PAGE_BYTES) as u64);
    queue.done(transfer.id, Report { pages_whole, bytes, busy: NOW, error: None });
}

impl Drop for Executor {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            let _panicked = thread.join();
        }
    }
}

struct Harness {
    queue: Arc<TransferQueue>,
    completions: CompletionReceiver,
    device: Memory,
    _executor: Executor,
}

impl Harness {
    fn new(capacity: usize, window: usize) -> Harness {
        let memory = || Arc::new(Mutex::new(vec![[0; PAGE_BYTES]; 16]));
        let (device, host): (Memory, Memory) = (memory(), memory());
        let (sender, completions) = completion_queue(64);
        let queue = Arc::new(TransferQueue::new(capacity));
        assert!(queue.connect(sender));
        let executor = Executor::start(Arc::clone(&queue), Arc::clone(&device), host, window);
        Harness { queue, completions, device, _executor: executor }
    }
}

impl MoverHarness for Harness {
    fn mover(&self) -> &dyn Mover {
        &*self.queue
    }
    fn completions(&self) -> &CompletionReceiver {
        &self.completions
    }
    fn edge(&self) -> (TransferKind, TransferKind) {
        (TransferKind::Backup, TransferKind::Load)
    }
    fn layers(&self) -> u32 {
        LAYERS
    }
    fn page_size(&self) -> usize {
        4
    }
    fn pages(&self) -> u32 {
        16
    }
    fn write_upper(&mut self, page: PageId, bytes: &[u8]) {
        self.device.lock().unwrap()[page.0 as usize].copy_from_slice(bytes);
    }
    fn read_upper(&self, page: PageId) -> Vec<u8> {
        self.device.lock().unwrap()[page.0 as usize].to_vec()
    }
    fn page_bytes(&self) -> usize {
        PAGE_BYTES
    }
}

#[test]
fn the_queue_passes_the_suite_of_movers() {
    for (capacity, window) in [(1, 1), (4, 2), (64, 1), (64, 7)] {
        run_all(|| Harness::new(capacity, window));
    }
}

/// A queue whose executor is the test itself.
fn queue(capacity: usize, completions: usize) -> (TransferQueue, CompletionReceiver) {
    let (sender, receiver) = completion_queue(completions);
    let queue = TransferQueue::new(capacity);
    assert!(queue.connect(sender.clone()) && !queue.connect(sender));
    (queue, receiver)
}

fn transfer(id: u64, kind: TransferKind, pages: u32) -> TransferDescriptor {
    let ticket = (kind == TransferKind::Load).then(|| Arc::new(LoadTicket::new(TransferId(id), LAYERS)));
    let pages = (0..pages).map(|page| PageMove { from: PageId(page), to: PageId(page + 9) }).collect();
    TransferDescriptor { id: TransferId(id), kind, group: GroupId(0), pages, records: Vec::new(), ticket }
}

fn whole(pages: usize) -> Report {
    Report { pages_whole: pages, bytes: 7, busy: Duration::from_nanos(5), error: None }
}

#[test]
fn loads_are_taken_first_and_each_transfer_once() {
    let (queue, completions) = queue(8, 8);
    for (id, kind) in [(1, TransferKind::Backup), (2, TransferKind::Load), (3, TransferKind::Load)] {
        queue.submit(transfer(id, kind, 2)).unwrap();
    }
    let taken: Vec<_> =
        std::iter::from_fn(|| queue.take(NOW)).map(|taken| (taken.id.0, taken.kind)).collect();
    assert_eq!(taken, [(2, TransferKind::Load), (3, TransferKind::Load), (1, TransferKind::Backup)]);
    queue.done(TransferId(3), whole(2));
    let done = completions.try_recv().unwrap();
    assert_eq!((done.id.0, done.pages_whole, done.bytes, done.busy_ns, done.error), (3, 2, 7, 5, None));
    assert_eq!((queue.outstanding(), completions.len()), (2, 0));
}

#[test]
fn layers_advance_the_ticket_and_doom_fails_it_before_the_end() {
    let (queue, completions) = queue(8, 8);
    let load = transfer(1, TransferKind::Load, 2);
    let ticket = load.ticket.clone().unwrap();
    queue.submit(load).unwrap();
    queue.take(NOW).unwrap();
    queue.layers_ready(TransferId(1), 2);
    assert_eq!((ticket.state(), ticket.transfer()), (TicketState::Ready(2), TransferId(1)));
    let why = TransferError::Io { operation: "launch".into(), reason: "719".into() };
    queue.doom(TransferId(1), why.clone());
    assert_eq!(
        (ticket.state(), completions.len()),
        (TicketState::Failed, 0),
        "the device has not let go yet"
    );
    queue.done(TransferId(1), whole(2));
    let done = completions.try_recv().unwrap();
    assert_eq!(done.error, Some(why));
    assert!(done.pages_whole < 2);
}

#[test]
fn what_is_whole_ends_well_although_it_was_doomed() {
    let (queue, completions) = queue(8, 8);
    let load = transfer(1, TransferKind::Load, 2);
    let ticket = load.ticket.clone().unwrap();
    queue.submit(load).unwrap();
    queue.submit(transfer(2, TransferKind::Backup, 2)).unwrap();
    for id in [1, 2] {
        queue.take(NOW).unwrap();
        queue.layers_ready(TransferId(id), ticket.layers());
        queue.doom(TransferId(id), TransferError::Cancelled);
        queue.done(TransferId(id), whole(2));
        let done = completions.try_recv().unwrap();
        assert_eq!((done.pages_whole, done.error), (2, None));
    }
    assert!(ticket.is_complete());
}

#[test]
fn a_short_report_is_an_error_and_never_more_than_was_asked_for() {
    let (queue, completions) = queue(8, 8);
    for (id, reported, counted) in [(1, 1, 1), (2, 9, 2)] {
        queue.submit(transfer(id, TransferKind::Backup, 2)).unwrap();
        queue.take(NOW).unwrap();
        queue.done(TransferId(id), whole(reported));
        let done = completions.try_recv().unwrap();
        assert_eq!((done.pages_whole, done.error.is_some()), (counted, counted < 2));
    }
}

#[test]
fn late_unknown_and_duplicate_reports_are_counted() {
    let (queue, completions) = queue(8, 8);
    queue.submit(transfer(1, TransferKind::Backup, 1)).unwrap();
    queue.done(TransferId(1), whole(1)); // nobody took it
    queue.take(NOW).unwrap();
    queue.done(TransferId(1), whole(1));
    queue.done(TransferId(1), whole(1));
    queue.layers_ready(TransferId(1), 1);
    queue.doom(TransferId(5), TransferError::Cancelled);
    assert!(queue.is_cancelled(TransferId(1)), "an ended transfer need not be gone on with");
    assert_eq!(queue.stats(), QueueStats { completions_lost: 0, unknown_reports: 4 });
    assert_eq!(completions.len(), 1);
}

#[test]
fn a_cancel_ends_what_nobody_took_and_marks_the_rest() {
    let (queue, completions) = queue(2, 8);
    for id in [1, 2] {
        queue.submit(transfer(id, TransferKind::Load, 1)).unwrap();
    }
    assert!(matches!(queue.submit(transfer(3, TransferKind::Load, 1)), Err(SubmitError::Full(_))));
    assert_eq!(queue.take(NOW).unwrap().id, TransferId(1));
    queue.cancel(TransferId(1));
    queue.cancel(TransferId(2));
    let done = completions.try_recv().unwrap();
    assert_eq!((done.id, done.error), (TransferId(2), Some(TransferError::Cancelled)));
    assert!(completions.is_empty() && queue.is_cancelled(TransferId(1)));
    assert!(queue.take(NOW).is_none());
    queue.submit(transfer(3, TransferKind::Load, 1)).unwrap();
    assert_eq!(queue.take(NOW).unwrap().id, TransferId(3));
    assert!(!queue.is_cancelled(TransferId(3)));
    queue.done(TransferId(1), whole(1));
    assert_eq!(completions.try_recv().unwrap().error, None, "a cancelled transfer may still succeed");
}

#[test]
fn what_a_device_may_touch_is_quarantined_until_it_is_torn_down() {
    let (queue, completions) = queue(8, 8);
    let (begun, waiting) = (transfer(1, TransferKind::Load, 2), transfer(2, TransferKind::Load, 2));
    let ticket = begun.ticket.clone().unwrap();
    queue.submit(begun).unwrap();
    queue.take(NOW).unwrap();
    queue.submit(waiting).unwrap();
    queue.close();
    queue.close();
    assert_eq!(completions.try_recv().unwrap().id, TransferId(2));
    assert_eq!((ticket.state(), queue.outstanding()), (TicketState::Failed, 1));
    assert!(matches!(queue.submit(transfer(3, TransferKind::Load, 1)), Err(SubmitError::Closed(_))));
    assert!(completions.recv_timeout(Duration::from_millis(20)).is_err(), "the device may still write there");
    queue.torn_down();
    let done = completions.try_recv().unwrap();
    assert_eq!((done.id, done.error), (TransferId(1), Some(TransferError::Cancelled)));
    queue.done(TransferId(1), whole(2));
    queue.torn_down();
    assert_eq!((queue.outstanding(), completions.len(), queue.stats().unknown_reports), (0, 0, 1));
}

#[test]
fn an_executor_that_ends_after_a_close_still_reports() {
    let (queue, completions) = queue(8, 8);
    queue.submit(transfer(1, TransferKind::Load, 2)).unwrap();
    queue.submit(transfer(2, TransferKind::Backup, 2)).unwrap();
    queue.take(NOW).unwrap();
    queue.take(NOW).unwrap();
    queue.close();
    queue.done(TransferId(1), whole(2));
    queue.done(TransferId(2), whole(2));
    let seen: Vec<_> = completions.try_iter().map(|done| (done.id.0, done.error)).collect();
    assert_eq!(seen, [(1, Some(TransferError::Cancelled)), (2, None)], "its ticket had failed already");
}

#[test]
fn a_reader_that_is_behind_or_gone_blocks_nobody() {
    let (queue, completions) = queue(8, 1);
    for id in 1..=4 {
        queue.submit(transfer(id, TransferKind::Backup, 1)).unwrap();
        queue.take(NOW).unwrap();
        queue.done(TransferId(id), whole(1));
    }
    for id in 1..=4 {
        assert_eq!(completions.try_recv().unwrap().id, TransferId(id));
        queue.take(NOW);
    }
    drop(completions);
    queue.submit(transfer(5, TransferKind::Backup, 1)).unwrap();
    queue.cancel(TransferId(5));
    assert_eq!(queue.stats().completions_lost, 1);
    let unconnected = TransferQueue::new(4);
    assert!(matches!(unconnected.submit(transfer(1, TransferKind::Load, 1)), Err(SubmitError::Closed(_))));
}
