//! The suite that every Mover passes. A harness lends it a Mover with real pages at both ends; each check panics
//! with what was broken, as tests do. Call `run_all` from the tests of the crate that implements the Mover.
#![allow(clippy::panic, clippy::expect_used, clippy::unwrap_used)]

use crate::{CompletionReceiver, Mover, SubmitError};
use std::collections::HashSet;
use std::sync::Arc;
use std::time::Duration;
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
    let ticket = (kind == TransferKind::Load).then(|| Arc::new(LoadTicket::new(harness.layers())));
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
