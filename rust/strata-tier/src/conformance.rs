//! The suite that every Mover passes. A harness lends it a Mover with real pages at both ends; each check panics
//! with what was broken, as tests do. Call `run_all` from the tests of the crate that implements the Mover.
#![allow(clippy::panic, clippy::expect_used, clippy::unwrap_used)]

use crate::{CompletionReceiver, Mover, SubmitError};
use std::collections::HashSet;
use std::fmt::Debug;
use std::sync::Arc;
use std::time::{Duration, Instant};
use strata_types::{
    GroupId, LoadTicket, Namespace, PageId, PageMove, PageRecord, TicketState, TierId, TransferCompletion,
    TransferDescriptor, TransferId, TransferKind,
};

/// Far longer than any transfer of the suite takes: only a hang reaches it.
const PATIENCE: Duration = Duration::from_secs(30);

/// What the suite needs of an implementation under test.
pub trait MoverHarness {
    /// The Mover.
    fn mover(&self) -> &dyn Mover;
    /// Where it reports.
    fn completions(&self) -> &CompletionReceiver;
    /// The kind that moves pages down and the kind that brings them back up.
    fn edge(&self) -> (TransferKind, TransferKind);
    /// Layers of a page, for tickets.
    fn layers(&self) -> u32;
    /// Tokens of a page.
    fn page_size(&self) -> usize;
    /// Pages at each end, at least 16.
    fn pages(&self) -> u32;
    /// Writes a page of the upper tier; `bytes` is in page-first order.
    fn write_upper(&mut self, page: PageId, bytes: &[u8]);
    /// Reads a page of the upper tier in page-first order.
    fn read_upper(&self, page: PageId) -> Vec<u8>;
    /// Bytes of a page.
    fn page_bytes(&self) -> usize;
}

/// Runs every check, each on a fresh harness.
pub fn run_all<H: MoverHarness>(mut fresh: impl FnMut() -> H) {
    a_round_trip_returns_every_byte_and_touches_no_other(&mut fresh());
    every_transfer_completes_exactly_once(&mut fresh());
    cancel_of_unknown_and_finished_transfers_is_harmless(&mut fresh());
    cancelled_transfers_still_complete(&mut fresh());
    tickets_end_complete_or_failed(&mut fresh());
}

/// A harness whose device can be made to misbehave.
pub trait FaultyHarness: MoverHarness {
    /// What can go wrong.
    type Fault: Copy + Debug;
    /// From now on every access to the device goes wrong like this.
    fn inject(&mut self, fault: Self::Fault);
    /// Whether an access is held up that only `heal` lets go.
    fn is_hanging(&self) -> bool;
    /// From now on nothing goes wrong, and what was held up answers.
    fn heal(&mut self);
}

/// Runs every kind of transfer into every fault, each on a fresh harness; `hangs` are faults that hold accesses up.
pub fn run_under_faults<H: FaultyHarness>(
    faults: &[H::Fault],
    hangs: &[H::Fault],
    mut fresh: impl FnMut() -> H,
) {
    let (down, up) = fresh().edge();
    let erase = (down == TransferKind::Spill).then_some(TransferKind::Erase);
    for kind in [down, up].into_iter().chain(erase) {
        for fault in faults {
            a_fault_costs_pages_and_nothing_else(&mut fresh(), kind, *fault, false);
        }
        for fault in hangs {
            a_fault_costs_pages_and_nothing_else(&mut fresh(), kind, *fault, true);
        }
    }
}

fn pattern(page: u32, bytes: usize) -> Vec<u8> {
    (0..bytes).map(|index| (index as u32).wrapping_mul(31).wrapping_add(page * 17 + 1) as u8).collect()
}

fn records<H: MoverHarness>(harness: &H, kind: TransferKind, count: usize) -> Vec<PageRecord> {
    if !matches!(kind, TransferKind::Spill | TransferKind::Prefetch) {
        return Vec::new();
    }
    let namespace = Namespace::new("conformance", "");
    let mut parent = namespace.root_key(GroupId(0));
    (0..count as u32)
        .map(|page| {
            let tokens: Vec<u32> = (0..harness.page_size() as u32).map(|index| page * 1000 + index).collect();
            let record = PageRecord { namespace, parent, key: parent.child(&tokens), tokens };
            parent = record.key;
            record
        })
        .collect()
}

/// Page `from` of the source goes to page `to(from)`; records follow the lower page's order.
fn transfer<H: MoverHarness>(
    harness: &H,
    id: u64,
    kind: TransferKind,
    moves: &[(u32, u32)],
) -> TransferDescriptor {
    let ticket =
        (kind == TransferKind::Load).then(|| Arc::new(LoadTicket::new(TransferId(id), harness.layers())));
    let pages = moves.iter().map(|(from, to)| PageMove { from: PageId(*from), to: PageId(*to) }).collect();
    let records = records(harness, kind, moves.len());
    TransferDescriptor { id: TransferId(id), kind, group: GroupId(0), pages, records, ticket }
}

fn submit<H: MoverHarness>(harness: &H, mut descriptor: TransferDescriptor) {
    for _ in 0..3000 {
        match harness.mover().submit(descriptor) {
            Ok(()) => return,
            Err(SubmitError::Full(back)) => descriptor = *back,
            Err(SubmitError::Closed(_)) => panic!("the mover closed under the suite"),
        }
        std::thread::sleep(Duration::from_millis(10));
    }
    panic!("the mover's queue stayed full");
}

fn completion<H: MoverHarness>(harness: &H) -> TransferCompletion {
    harness.completions().recv_timeout(PATIENCE).expect("a completion for every transfer")
}

fn a_round_trip_returns_every_byte_and_touches_no_other<H: MoverHarness>(harness: &mut H) {
    let (down, up) = harness.edge();
    let bytes = harness.page_bytes();
    for page in 0..harness.pages() {
        harness.write_upper(PageId(page), &pattern(page, bytes));
    }
    let descend = [(3, 9), (1, 2), (7, 11), (0, 4)];
    submit(harness, transfer(harness, 1, down, &descend));
    let done = completion(harness);
    assert_eq!((done.id, done.pages_whole, done.error), (TransferId(1), 4, None));
    let ascend = [(9, 12), (2, 5), (11, 14), (4, 8)];
    submit(harness, transfer(harness, 2, up, &ascend));
    let done = completion(harness);
    assert_eq!((done.id, done.pages_whole, done.error), (TransferId(2), 4, None));
    for page in 0..harness.pages() {
        let origin = ascend.iter().zip(descend).find(|((_, to), _)| *to == page).map(|(_, (from, _))| from);
        let wanted = pattern(origin.unwrap_or(page), bytes);
        assert!(harness.read_upper(PageId(page)) == wanted, "page {page} of {} is wrong", up.destination());
    }
}

fn every_transfer_completes_exactly_once<H: MoverHarness>(harness: &mut H) {
    let (down, _) = harness.edge();
    for page in 0..harness.pages() {
        harness.write_upper(PageId(page), &pattern(page, harness.page_bytes()));
    }
    let mut waiting: HashSet<u64> = HashSet::new();
    for id in 0..64 {
        let page = (id % u64::from(harness.pages())) as u32;
        submit(harness, transfer(harness, id, down, &[(page, page)]));
        waiting.insert(id);
    }
    while !waiting.is_empty() {
        let done = completion(harness);
        assert!(waiting.remove(&done.id.0), "transfer {} completed twice or was never submitted", done.id);
    }
    assert!(harness.completions().recv_timeout(Duration::from_millis(20)).is_err(), "a completion too many");
}

/// Four pages lie below; a transfer of `kind` over them meets the fault. It completes once, what it reports as whole is
/// whole, nothing else changes, and once the fault is gone all is as if it had not been. One that hangs is cancelled
/// first, so that its completion comes after the abort.
fn a_fault_costs_pages_and_nothing_else<H: FaultyHarness>(
    harness: &mut H,
    kind: TransferKind,
    fault: H::Fault,
    hangs: bool,
) {
    let ((down, up), bytes) = (harness.edge(), harness.page_bytes());
    for page in 0..16 {
        harness.write_upper(PageId(page), &pattern(page, bytes));
    }
    run(harness, 1, down, &[(0, 0), (1, 1), (2, 2), (3, 3)]);
    harness.inject(fault);
    let (targets, moves): (_, Vec<(u32, u32)>) = if kind == down {
        (0..0, (0..4).map(|page| (page + 8, page)).collect())
    } else if kind == up {
        (12..16, (0..4).map(|page| (page, page + 12)).collect())
    } else {
        (0..0, (0..4).map(|page| (page, page)).collect())
    };
    submit(harness, transfer(harness, 2, kind, &moves));
    if hangs {
        let begun = Instant::now();
        while !harness.is_hanging() {
            assert!(begun.elapsed() < PATIENCE, "{kind:?} under {fault:?} never reached the device");
            std::thread::sleep(Duration::from_millis(1));
        }
        harness.mover().cancel(TransferId(2));
        assert!(
            harness.completions().try_recv().is_err(),
            "{kind:?} completed while its access was in flight"
        );
        harness.heal();
    }
    let done = completion(harness);
    harness.heal();
    check_upper(harness, &targets, &done, fault);
    check_lower(harness, kind, &done, fault);
}

/// Pages that a transfer brought up are whole as far as it says, and no other page has changed.
fn check_upper<H: FaultyHarness>(
    harness: &H,
    targets: &std::ops::Range<u32>,
    done: &TransferCompletion,
    fault: H::Fault,
) {
    assert_eq!(
        (done.id, done.error.is_none()),
        (TransferId(2), done.pages_whole == 4),
        "{fault:?}: {done:?}"
    );
    for page in 0..16 {
        let wanted = match targets.contains(&page) {
            true if ((page - targets.start) as usize) < done.pages_whole => page - targets.start,
            true => continue,
            false => page,
        };
        assert!(
            harness.read_upper(PageId(page)) == pattern(wanted, harness.page_bytes()),
            "{fault:?}: page {page}"
        );
    }
}

/// Below lie the old pages, the new ones or none, each whole; and the tier works again.
fn check_lower<H: FaultyHarness>(
    harness: &mut H,
    kind: TransferKind,
    done: &TransferCompletion,
    fault: H::Fault,
) {
    let ((down, up), bytes) = (harness.edge(), harness.page_bytes());
    submit(harness, transfer(harness, 3, up, &[(0, 4), (1, 5), (2, 6), (3, 7)]));
    let back = completion(harness);
    assert_eq!(back.id, TransferId(3), "{kind:?} under {fault:?} completed twice");
    let erased = kind == TransferKind::Erase && done.error.is_none();
    assert!(!erased || back.pages_whole == 0, "{fault:?}: an erased page came back");
    for page in 0..back.pages_whole as u32 {
        let found = harness.read_upper(PageId(page + 4));
        let (old, new) = (pattern(page, bytes), pattern(page + 8, bytes));
        assert!(
            found == old || (kind == down && found == new),
            "{kind:?} under {fault:?}: page {page} is wrong"
        );
    }
    run(harness, 4, down, &[(8, 0), (9, 1), (10, 2), (11, 3)]);
    run(harness, 5, up, &[(0, 12), (1, 13), (2, 14), (3, 15)]);
    for page in 0..4 {
        assert!(harness.read_upper(PageId(page + 12)) == pattern(page + 8, bytes), "{fault:?}: page {page}");
    }
    assert!(harness.completions().recv_timeout(Duration::from_millis(5)).is_err(), "a completion too many");
}

/// A transfer that must go well.
fn run<H: MoverHarness>(harness: &H, id: u64, kind: TransferKind, moves: &[(u32, u32)]) {
    submit(harness, transfer(harness, id, kind, moves));
    let done = completion(harness);
    assert_eq!((done.id, done.pages_whole, done.error), (TransferId(id), moves.len(), None));
}

fn cancel_of_unknown_and_finished_transfers_is_harmless<H: MoverHarness>(harness: &mut H) {
    let (down, _) = harness.edge();
    harness.write_upper(PageId(0), &pattern(0, harness.page_bytes()));
    harness.mover().cancel(TransferId(77));
    submit(harness, transfer(harness, 1, down, &[(0, 0)]));
    assert_eq!(completion(harness).error, None);
    harness.mover().cancel(TransferId(1));
    submit(harness, transfer(harness, 77, down, &[(0, 1)]));
    assert_eq!(completion(harness).error, None, "a cancel before the submit must not hit a later transfer");
}

fn cancelled_transfers_still_complete<H: MoverHarness>(harness: &mut H) {
    let (down, _) = harness.edge();
    for id in 0..16 {
        let moves: Vec<(u32, u32)> = (0..16).map(|page| (page, page)).collect();
        submit(harness, transfer(harness, id, down, &moves));
        harness.mover().cancel(TransferId(id));
    }
    for _ in 0..16 {
        let done = completion(harness);
        assert_eq!(done.pages_whole == 16, done.error.is_none(), "short without an error, or whole with one");
    }
}

fn tickets_end_complete_or_failed<H: MoverHarness>(harness: &mut H) {
    let (down, up) = harness.edge();
    if up.destination() != TierId::DEVICE {
        return;
    }
    let moves: Vec<(u32, u32)> = (0..16).map(|page| (page, page)).collect();
    submit(harness, transfer(harness, 1, down, &moves));
    completion(harness);
    for id in 2..10 {
        let descriptor = transfer(harness, id, up, &moves);
        let ticket = descriptor.ticket.clone().expect("loads carry a ticket");
        submit(harness, descriptor);
        if id % 2 == 0 {
            harness.mover().cancel(TransferId(id));
        }
        let done = completion(harness);
        let wanted =
            if done.error.is_none() { TicketState::Ready(harness.layers()) } else { TicketState::Failed };
        assert_eq!(ticket.state(), wanted);
    }
}
