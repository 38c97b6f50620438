//! "Never worse than no cache" over disks of which nothing is known at the start: on a clock of the test's own, a page
//! takes as long to read as the disk's speed says, and as long to compute as a model that makes 12 MB of KV a second.
#![allow(clippy::unwrap_used, clippy::panic, clippy::expect_used)]

mod machine;

use machine::{oracle, Machine, Prefetch, Setup, PROMPTS, VOCABULARY};
use std::collections::VecDeque;
use std::time::Duration;
use strata_core::Sources;
use strata_types::{RequestId, TierId, Time, Token, TransferDescriptor, TransferKind};

const MB: f64 = 1e6;
const PAGE_BYTES: u64 = 737_280;
const PAGE_SIZE: usize = 2;
/// A page in so many seconds.
const COMPUTE: f64 = PAGE_BYTES as f64 / (12.0 * MB);
const PROMPT: usize = 2 * 90 + 1;
/// What computing such a prompt takes.
const COLD: Duration = Duration::from_millis((COMPUTE * 90.5 * 1000.0) as u64);
/// The machine's clock goes on by itself with every event.
const TICKS: Duration = Duration::from_millis(60);

struct Disk {
    machine: Machine,
    /// Bytes a second, and when the disk will have done what it was asked for.
    speed: f64,
    free: Time,
    reads: VecDeque<(Time, TransferDescriptor)>,
    asked: u64,
}

/// What a request saw.
#[derive(Debug)]
struct Seen {
    ttft: Duration,
    sources: Sources,
    recomputed: u64,
}

impl Disk {
    /// A prompt lies on disk alone, and nothing was ever read from it.
    fn new(speed: f64) -> Disk {
        let setup = Setup {
            page_size: PAGE_SIZE,
            pages: [120, 120, 128],
            outstanding: 1,
            page_bytes: PAGE_BYTES,
            prefetch: Prefetch::Patient,
            ..Setup::default()
        };
        PROMPTS.with(|prompts| prompts.borrow_mut().clear());
        let mut machine = Machine::new(setup, 23);
        machine.core.measured(64, 0, Duration::from_secs_f64(COMPUTE * 32.0));
        let mut disk = Disk { machine, speed, free: Time(0), reads: VecDeque::new(), asked: 1000 };
        disk.write();
        disk
    }

    /// Computes the prompt and moves it to disk.
    fn write(&mut self) {
        self.machine.arrive(RequestId(1), prompt(), 1, "", 0);
        self.machine.settle();
        while let Some(plan) = self.machine.plans.front() {
            self.machine.busy = computing(plan.rows.iter().map(|row| row.length).sum());
            self.machine.compute_one();
            self.machine.settle();
        }
        self.empty_tiers();
    }

    /// Nothing but the disk holds anything.
    fn empty_tiers(&mut self) {
        self.machine.drain();
        let (reply, _answer) = crossbeam_channel::bounded(1);
        let tiers = vec![TierId::DEVICE, TierId::HOST];
        self.machine.core.demote(self.machine.now + Duration::from_secs(1), tiers, reply);
        self.machine.settle();
        self.machine.drain();
        let tiers = self.machine.core.stats().tiers;
        assert_eq!((tiers[0].resident, tiers[1].resident), (0, 0));
    }

    /// Takes what the machine was asked to read; the disk reads one after the other.
    fn take_reads(&mut self) {
        let reads = |transfer: &TransferDescriptor| transfer.kind == TransferKind::Prefetch;
        while let Some(index) = self.machine.transfers.iter().position(reads) {
            let transfer = self.machine.transfers.remove(index).unwrap();
            let bytes = transfer.pages.len() as f64 * PAGE_BYTES as f64;
            let span = Duration::try_from_secs_f64(bytes / self.speed).unwrap_or(Duration::MAX);
            self.free = self.free.max(self.machine.now) + span;
            self.reads.push_back((self.free, transfer));
        }
    }

    /// Asks for the prompt; everything but reading and computing takes no time.
    fn ask(&mut self) -> Seen {
        self.asked += 1;
        let (id, asked) = (RequestId(self.asked), self.machine.now);
        let before = self.machine.core.stats().recomputed_tokens[2];
        self.machine.arrive(id, prompt(), 1, "", 0);
        self.machine.settle();
        let (mut sources, mut ttft) = (None, None);
        while ttft.is_none() {
            self.take_reads();
            if self.machine.transfers.iter().any(|transfer| transfer.kind == TransferKind::Load) {
                while self.machine.move_one() {}
            } else if let Some(plan) = self.machine.plans.front() {
                let tokens = plan.rows.iter().map(|row| row.length).sum();
                sources = sources.or(plan.rows[0].admitted.map(|admission| admission.sources));
                self.machine.busy = computing(tokens);
                self.machine.now = self.machine.now + computing(tokens);
                self.machine.compute_one();
                ttft = self.machine.done.get(&id).map(|_| self.machine.now.since(asked));
            } else {
                let deadline = self.machine.core.next_deadline();
                let due = self.reads.front().map(|(due, _)| *due);
                let next = deadline.into_iter().chain(due).min().expect("somebody wakes Core");
                self.machine.now = self.machine.now.max(next);
                if due.is_some_and(|due| due <= self.machine.now) {
                    let (_, transfer) = self.reads.pop_front().unwrap();
                    let whole = transfer.pages.len();
                    self.machine.finish(transfer, whole, None);
                }
            }
            self.machine.settle();
        }
        assert_eq!(self.machine.done[&id], oracle(&prompt(), 1));
        let recomputed = self.machine.core.stats().recomputed_tokens[2] - before;
        Seen { ttft: ttft.unwrap(), sources: sources.unwrap(), recomputed }
    }

    /// What the disk was asked for ends, then nothing but the disk holds anything again.
    fn rest(&mut self) {
        self.take_reads();
        while let Some((due, transfer)) = self.reads.pop_front() {
            // A disk that hung is tried again when it works.
            self.machine.now = self.machine.now.max(due.min(self.machine.now + Duration::from_secs(60)));
            let whole = transfer.pages.len();
            self.machine.finish(transfer, whole, None);
        }
        self.free = self.machine.now;
        self.machine.settle();
        self.empty_tiers();
    }
}

fn computing(tokens: usize) -> Duration {
    Duration::from_secs_f64(COMPUTE * tokens as f64 / PAGE_SIZE as f64)
}

fn prompt() -> Vec<Token> {
    (0..PROMPT as u32).map(|index| index * index % VOCABULARY).collect()
}

/// TTFT at most this part of computing everything, and every token accounted for.
fn expect(seen: &Seen, most: f64, what: &str) {
    assert!(seen.ttft <= COLD.mul_f64(most) + TICKS, "{what}: {seen:?}, computing takes {COLD:?}");
    let Sources { disk, computed, .. } = seen.sources;
    assert_eq!(disk + computed, PROMPT, "{what}: {seen:?}");
    // The last token is computed in any case, with no page of its own.
    assert_eq!(seen.recomputed as usize, PROMPT - 1 - disk, "{what}: {seen:?}");
}

#[test]
fn a_disk_slower_than_computing_costs_next_to_nothing() {
    for speed in [0.1, 1.0, 5.0, 8.0] {
        let mut disk = Disk::new(speed * MB);
        for turn in 1..=9 {
            let seen = disk.ask();
            expect(&seen, 1.1, &format!("{speed} MB/s, request {turn}"));
            assert!(turn == 1 || turn == 9 || seen.sources.disk == 0, "known to be slow: {seen:?}");
            disk.rest();
        }
    }
}

#[test]
fn a_disk_quicker_than_computing_is_read_from_the_first_request_on() {
    for speed in [20.0, 50.0, 500.0, 5000.0] {
        let mut disk = Disk::new(speed * MB);
        for turn in 1..=2 {
            let seen = disk.ask();
            let what = format!("{speed} MB/s, request {turn}");
            expect(&seen, 1.05 * 12.0 / speed, &what);
            assert_eq!(seen.sources.disk, PROMPT - 1, "{what}: {seen:?}");
            disk.rest();
        }
    }
}

#[test]
fn a_disk_that_hangs_costs_what_may_be_risked() {
    let mut unknown = Disk::new(0.0);
    expect(&unknown.ask(), 1.1, "hangs from the start");
    let mut known = Disk::new(50.0 * MB);
    expect(&known.ask(), 0.5, "works");
    known.rest();
    known.speed = 0.0;
    expect(&known.ask(), 1.1, "hangs now");
}

#[test]
fn a_disk_that_changes_is_followed() {
    let mut disk = Disk::new(50.0 * MB);
    expect(&disk.ask(), 0.5, "at first");
    for (speed, patience) in [(5.0, 20), (50.0, 100)] {
        disk.rest();
        disk.speed = speed * MB;
        let mut followed = false;
        for turn in 0..patience {
            let seen = disk.ask();
            expect(&seen, 1.1, &format!("{speed} MB/s now, request {turn}"));
            disk.rest();
            followed = (seen.sources.disk == PROMPT - 1) == (speed > 12.0);
            if followed && turn > 0 {
                break;
            }
        }
        assert!(followed, "{speed} MB/s was not noticed");
    }
}

/// The one small read by which a disk is first judged may be unlucky.
#[test]
fn a_disk_is_not_given_up_for_one_bad_read() {
    let mut disk = Disk::new(1.0 * MB);
    expect(&disk.ask(), 1.1, "while it is busy with something else");
    disk.rest();
    disk.speed = 50.0 * MB;
    let read = (0..9).find(|_| {
        let seen = disk.ask();
        expect(&seen, 1.1, "afterwards");
        disk.rest();
        seen.sources.disk == PROMPT - 1
    });
    assert!(read.is_some(), "it is never read again");
}
