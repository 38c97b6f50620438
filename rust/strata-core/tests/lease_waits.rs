//! Questions of leases that wait: each is answered when it should be, by whatever becomes of Core, of whoever asked and of
//! the room that it waits for; and nothing is left of one that was given up.
#![allow(clippy::unwrap_used, clippy::panic, clippy::expect_used)]

mod machine;

use crossbeam_channel::{bounded, Receiver, Sender};
use machine::{Machine, Setup, Write, PROMPTS};
use std::sync::Arc;
use std::time::{Duration, Instant};
use strata_core::{
    answer, Answer, Driver, DriverError, DriverHandle, LeaseError, LeaseLoad, Movers, NewRequest, NoAnswer,
    StepTime,
};
use strata_tier::{completion_queue, CompletionSender, Mover, SubmitError};
use strata_types::{
    Namespace, PageId, PlanId, RequestId, ShardId, TierId, Token, TransferCompletion, TransferDescriptor,
    TransferError, TransferId, TransferKind, WaitOutcome,
};

const SOON: Duration = Duration::from_secs(20);

fn tokens(number: Token, pages: usize) -> Vec<Token> {
    (0..2 * pages as Token).map(|index| (number + index) % machine::VOCABULARY).collect()
}

/// A machine of two-token pages, and what a foreign engine asks of it.
struct World(Machine);

impl World {
    fn new(pages: [u32; 3], write: Write) -> World {
        PROMPTS.with(|prompts| prompts.borrow_mut().clear());
        World(Machine::new(Setup { pages, write: [write; 2], ..Setup::default() }, 3))
    }

    fn open(&mut self, tokens: &[Token]) -> RequestId {
        self.0.core.open_lease(self.0.now, Namespace::new("", ""), tokens.to_vec()).unwrap().id
    }

    fn ask(&mut self, id: RequestId, count: u32) -> Answer<Result<Vec<PageId>, LeaseError>> {
        self.ask_within(id, count, Duration::ZERO)
    }

    fn ask_within(
        &mut self,
        id: RequestId,
        count: u32,
        limit: Duration,
    ) -> Answer<Result<Vec<PageId>, LeaseError>> {
        let (giver, answer) = answer();
        self.0.core.reserve_lease(self.0.now, id, count, limit, giver);
        self.0.settle();
        answer
    }

    fn reserve(&mut self, id: RequestId, count: u32) -> Vec<PageId> {
        self.ask(id, count).take(Duration::ZERO).unwrap().unwrap()
    }

    fn load(&mut self, id: RequestId, limit: Duration) -> Answer<Result<LeaseLoad, LeaseError>> {
        let (giver, answer) = answer();
        self.0.core.load_lease(self.0.now, id, u32::MAX, limit, giver);
        self.0.settle();
        answer
    }

    fn commit(
        &mut self,
        id: RequestId,
        tokens: &[Token],
        pages: &[PageId],
    ) -> Result<Vec<PageId>, LeaseError> {
        self.0.core.commit_lease(self.0.now, id, tokens.to_vec(), pages).unwrap()
    }

    fn close(&mut self, id: RequestId) {
        self.0.core.close_lease(self.0.now, id).unwrap();
        self.0.settle();
    }

    fn cache(&mut self, tokens: &[Token]) {
        let id = self.open(tokens);
        let pages = self.reserve(id, tokens.len() as u32 / 2);
        self.commit(id, tokens, &pages).unwrap();
        self.close(id);
    }

    fn move_all(&mut self) {
        self.0.settle();
        while self.0.move_one() {
            self.0.settle();
        }
    }

    fn demote(&mut self, tiers: &[TierId]) {
        let (reply, _answer) = bounded(1);
        self.0.core.demote(self.0.now + SOON, tiers.to_vec(), reply);
        self.move_all();
    }

    fn expect_idle(&mut self) {
        self.move_all();
        assert!(self.0.core.is_idle(), "{:?}", self.0.core.stats());
        self.0.core.check().unwrap();
    }
}

#[test]
fn a_lease_that_nobody_takes_is_closed() {
    let mut world = World::new([8, 0, 0], Write::Through);
    let open = |world: &mut World, giver| {
        let (now, namespace) = (world.0.now, Namespace::new("", ""));
        world.0.core.open_lease_for(now, namespace, tokens(1, 2), &giver).unwrap();
    };
    let (giver, found) = answer();
    assert_eq!(found.take(Duration::ZERO), Err(NoAnswer::Late));
    open(&mut world, giver);
    world.expect_idle();
    let (giver, found) = answer();
    open(&mut world, giver);
    let found = found.take(Duration::ZERO).unwrap();
    assert!(!world.0.core.is_idle());
    world.close(found.id);
    world.expect_idle();
}

#[test]
fn pages_that_nobody_waits_for_are_free_again() {
    let mut world = World::new([4, 0, 0], Write::Through);
    let (one, other) = (world.open(&[1]), world.open(&[1]));
    let held = world.reserve(one, 4);
    let late = world.ask_within(other, 3, SOON);
    assert_eq!(late.take(Duration::ZERO), Err(NoAnswer::Late));
    world.0.core.abort_lease(world.0.now, one, &held).unwrap().unwrap();
    world.0.settle();
    assert_eq!(world.reserve(one, 4).len(), 4);
}

/// With a time limit of zero there is a wait only for copies under way that make all the room that is wanted.
#[test]
fn a_wait_for_room_is_prolonged_only_if_copies_make_enough() {
    let mut world = World::new([8, 8, 0], Write::Back);
    world.cache(&tokens(1, 5));
    let held = world.open(&[1]);
    world.reserve(held, 3);
    let [enough, all, too_much] = [world.open(&[1]), world.open(&[1]), world.open(&[1])];
    let enough = world.ask(enough, 3);
    let all_of_it = world.ask(all, 5);
    let too_much = world.ask(too_much, 6);
    assert_eq!(enough.wait(Duration::ZERO), Err(NoAnswer::Late), "its victims are on their way down");
    // All five are pinned by the copy of three of them, and free for whoever comes after it.
    assert_eq!(all_of_it.wait(Duration::ZERO), Err(NoAnswer::Late));
    let refused = too_much.wait(Duration::ZERO).unwrap().unwrap_err();
    assert!(refused.to_string().contains("no room on the device for 6 pages"), "{refused}");
    world.move_all();
    assert_eq!(enough.wait(Duration::ZERO).unwrap().unwrap().len(), 3);
    assert!(matches!(all_of_it.wait(Duration::ZERO), Ok(Err(LeaseError::NoRoom(_)))), "three of it are gone");
}

/// The same of a load, and what its device pages keep is not counted as room.
#[test]
fn a_load_waits_for_copies_only_if_they_make_enough() {
    let mut world = World::new([6, 16, 0], Write::Back);
    world.cache(&tokens(1, 5));
    world.demote(&[TierId::DEVICE]);
    world.cache(&tokens(2, 3));
    let held = world.open(&[1]);
    world.reserve(held, 3);
    let (saver, loader) = (world.open(&[1]), world.open(&tokens(1, 5)));
    let saved = world.ask(saver, 2);
    assert_eq!(saved.wait(Duration::ZERO), Err(NoAnswer::Late));
    let load = world.load(loader, Duration::ZERO);
    let refused = load.wait(Duration::ZERO).unwrap().unwrap_err();
    assert!(refused.to_string().contains("no room on the device for 5 cached pages"), "{refused}");
    world.move_all();
    assert_eq!(saved.wait(Duration::ZERO).unwrap().unwrap().len(), 2);
}

#[test]
fn a_match_that_had_no_room_to_load_commits_or_loads_again() {
    let document = tokens(1, 3);
    let mut world = World::new([4, 8, 8], Write::Through);
    world.cache(&document);
    world.demote(&[TierId::DEVICE]);
    let held = world.open(&[1]);
    world.reserve(held, 4);
    let [computes, loads] = [world.open(&document), world.open(&document)];
    for id in [computes, loads] {
        let refused = world.load(id, Duration::ZERO).wait(Duration::ZERO).unwrap().unwrap_err();
        assert!(matches!(refused, LeaseError::NoRoom(_)), "{refused}");
    }
    world.close(held);
    let pages = world.reserve(computes, 3);
    world.commit(computes, &document, &pages).unwrap();
    world.close(computes);
    world.demote(&[TierId::DEVICE]);
    let load = world.load(loads, Duration::ZERO).wait(Duration::ZERO).unwrap().unwrap();
    assert_eq!(load.pages.len(), 3);
    world.move_all();
    world.close(loads);
    world.expect_idle();
}

/// A load that waits for its disk and for room at once leaves neither pin nor read behind.
#[test]
fn a_load_without_room_lets_its_reads_go() {
    let document = tokens(1, 4);
    let mut world = World::new([4, 8, 8], Write::Through);
    world.cache(&document[..4]);
    world.demote(&[TierId::DEVICE]);
    let longer = world.open(&document);
    let load = world.load(longer, SOON).wait(Duration::ZERO).unwrap().unwrap();
    let fresh = world.reserve(longer, 2);
    world.move_all();
    world.commit(longer, &document, &fresh).unwrap();
    world.move_all();
    world.close(longer);
    assert_eq!(load.pages.len(), 2);
    world.demote(&[TierId::DEVICE, TierId::HOST]);
    let held = world.open(&document);
    let reads = world.load(held, Duration::from_millis(20));
    assert!(matches!(reads.wait(Duration::ZERO), Err(NoAnswer::Late)), "the disk has not read yet");
    let room = world.open(&[1]);
    world.reserve(room, 4);
    // The read of the first pages comes through, the other does not.
    let first = world.0.transfers.iter().position(|transfer| transfer.pages.len() == 3).unwrap();
    let first = world.0.transfers.remove(first).unwrap();
    world.0.finish(first, 3, None);
    world.0.now = world.0.now + Duration::from_millis(40);
    world.0.settle();
    let refused = reads.wait(Duration::ZERO).unwrap().unwrap_err();
    assert!(matches!(refused, LeaseError::NoRoom(_)), "{refused}");
    world.close(room);
    let pages = world.reserve(held, 4);
    world.commit(held, &document, &pages).unwrap();
    world.close(held);
    world.expect_idle();
}

#[test]
fn a_cache_that_closes_answers_whoever_waits() {
    let mut world = World::new([4, 0, 0], Write::Through);
    let id = world.open(&[1]);
    world.reserve(id, 4);
    let waiting = world.ask_within(id, 1, SOON);
    world.0.core.refuse_waiting_leases();
    assert_eq!(waiting.wait(Duration::ZERO), Ok(Err(LeaseError::Closed)));
    let late = world.ask_within(id, 1, SOON);
    assert_eq!(late.wait(Duration::ZERO), Ok(Err(LeaseError::Closed)));
    let load = world.load(id, SOON);
    assert!(matches!(load.wait(Duration::ZERO), Ok(Err(LeaseError::Closed))));
    world.close(id);
    world.expect_idle();
}

/// What a Mover does with loads.
#[derive(Clone)]
enum Loads {
    /// Nothing, ever.
    Keep,
    /// Stops the thread that asks until the other end of the channel is gone.
    Block(Receiver<()>),
    Panic,
}

/// Backs up at once.
struct Fake(CompletionSender, Loads);

impl Mover for Fake {
    fn submit(&self, transfer: TransferDescriptor) -> Result<(), SubmitError> {
        if transfer.kind == TransferKind::Load {
            match &self.1 {
                Loads::Keep => {}
                Loads::Block(gate) => drop(gate.recv()),
                Loads::Panic => panic!("a load was to be moved"),
            }
            return Ok(());
        }
        self.0.try_send(completion(transfer.id, transfer.pages.len(), None)).unwrap();
        Ok(())
    }

    fn cancel(&self, id: TransferId) {
        self.0.try_send(completion(id, 0, Some(TransferError::Cancelled))).unwrap();
    }
}

fn completion(id: TransferId, pages_whole: usize, error: Option<TransferError>) -> TransferCompletion {
    TransferCompletion { id, shard: ShardId(0), pages_whole, error, bytes: 1, busy_ns: 1 }
}

/// Core on its thread, with three pages of a document in host memory.
fn driven(loads: Loads) -> (Driver, DriverHandle) {
    let world = World::new([8, 8, 0], Write::Through);
    let (sender, completions) = completion_queue(64);
    let movers = Movers { device: Arc::new(Fake(sender, loads)), disk: None };
    let driver = Driver::start(world.0.core, movers, completions, 1).unwrap();
    let handle = driver.handle();
    let id = handle.open_lease(Namespace::new("", ""), tokens(1, 3)).unwrap().id;
    let pages = handle.reserve_lease(id, 3, SOON).unwrap().unwrap();
    handle.commit_lease(id, tokens(1, 3), pages).unwrap().unwrap();
    handle.close_lease(id);
    assert!(!handle.demote(vec![TierId::DEVICE], SOON).unwrap().timed_out);
    (driver, handle)
}

/// What a reservation that waits, and a load under way, hear when `end` ends Core.
fn heard_of(loads: Loads, end: impl FnOnce(&mut Driver, &DriverHandle)) -> (String, WaitOutcome) {
    let (mut driver, handle) = driven(loads);
    let open = |tokens| handle.open_lease(Namespace::new("", ""), tokens).unwrap();
    let (found, holds, waits) = (open(tokens(1, 3)), open(vec![1]).id, open(vec![1]).id);
    assert_eq!(found.pages, [0, 3, 0]);
    handle.reserve_lease(holds, 5, SOON).unwrap().unwrap();
    let asks = handle.clone();
    let waiting = std::thread::spawn(move || asks.reserve_lease(waits, 4, SOON));
    let load = handle.load_lease(found.id, 3, SOON).unwrap().wait(SOON).unwrap().unwrap();
    end(&mut driver, &handle);
    let layer = load.tickets[0].wait_layer(0, SOON);
    match waiting.join().unwrap() {
        Err(DriverError::Stopped(why)) => (why, layer),
        other => panic!("{other:?}"),
    }
}

/// A plan that never was ends Core, and whoever reports it may hear that too.
fn break_core(handle: &DriverHandle) {
    let _heard = handle.plan_done(PlanId(99), Vec::new(), StepTime::default());
}

#[test]
fn a_core_that_ends_tells_whoever_waits_why() {
    let closed = heard_of(Loads::Keep, |driver, _| driver.stop());
    assert_eq!(closed, ("it was closed".into(), WaitOutcome::Failed));
    let (why, layer) = heard_of(Loads::Keep, |_, handle| {
        break_core(handle);
    });
    assert!(why.contains("plan 99 was never handed out"), "{why}");
    assert_eq!(layer, WaitOutcome::Failed);
    let panicked = heard_of(Loads::Panic, |_, _| {});
    assert_eq!(panicked, ("its thread panicked".into(), WaitOutcome::Failed));
}

/// Whoever asks then hears it too, whether Core sees the question or leaves it in its queue.
#[test]
fn a_question_that_breaks_core_is_told_of_it() {
    let (_driver, handle) = driven(Loads::Keep);
    // Pages that were never reserved: Core refuses them in words and lives on.
    let id = handle.open_lease(Namespace::new("", ""), tokens(1, 3)).unwrap().id;
    let refused = handle.commit_lease(id, tokens(1, 3), vec![PageId(1); 3]).unwrap();
    assert!(matches!(refused, Err(LeaseError::Misuse(_))));
    break_core(&handle);
    let Err(error) = handle.open_lease(Namespace::new("", ""), tokens(1, 3)) else { panic!("it lives") };
    assert!(error.to_string().contains("plan 99 was never handed out"), "{error}");
}

#[test]
fn what_was_closed_before_a_question_is_free_for_it() {
    let (_driver, handle) = driven(Loads::Keep);
    for _ in 0..500 {
        let id = handle.open_lease(Namespace::new("", ""), vec![1]).unwrap().id;
        assert_eq!(handle.reserve_lease(id, 8, Duration::ZERO).unwrap().unwrap().len(), 8);
        handle.close_lease(id);
    }
}

/// Whoever forgets a lease neither waits for Core nor loses the lease, however busy Core is.
#[test]
fn a_lease_closes_behind_a_full_queue() {
    let (gate, blocked) = bounded(0);
    let (_driver, handle) = driven(Loads::Block(blocked));
    let id = handle.open_lease(Namespace::new("", ""), tokens(1, 3)).unwrap().id;
    handle.load_lease(id, 3, SOON).unwrap().wait(SOON).unwrap().unwrap();
    let invalid = || NewRequest {
        id: RequestId(1),
        namespace: Namespace::new("", ""),
        prompt: Vec::new(),
        max_new_tokens: 1,
        priority: 0,
        keep: true,
    };
    while handle.submit(invalid()).is_ok() {}
    handle.close_lease(id);
    let gate: Sender<()> = gate;
    drop(gate);
    let deadline = Instant::now() + SOON;
    while handle.check().unwrap() != Ok(true) && Instant::now() < deadline {
        std::thread::sleep(Duration::from_millis(1));
    }
    assert_eq!(handle.check().unwrap(), Ok(true), "the lease is still open");
}
