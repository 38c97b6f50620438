//! `TransferQueue`: a Mover whose work is done by somebody else, an executor that takes transfers and reports. What it
//! adds to the trait's guarantees:
//! - loads are handed out before backups;
//! - a transfer that nobody took ends at once when it is cancelled or the queue is closed;
//! - one that was taken ends when its executor says so or says that what executed it is torn down, and by nothing else:
//!   until then a device may touch its pages, so they stay reserved even if the executor has died (quarantine);
//! - a report about a transfer that is unknown or has ended is counted and changes nothing.

use crate::{CompletionSender, Mover, SubmitError};
use crossbeam_channel::{bounded, select_biased, Receiver, Sender, TrySendError};
use std::collections::{HashMap, VecDeque};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant};
use strata_types::{
    PageMove, ShardId, TransferCompletion, TransferDescriptor, TransferError, TransferId, TransferKind,
};

/// How long `torn_down` waits for somebody to read the last completions.
const LAST_WORDS: Duration = Duration::from_secs(2);
/// How often it looks.
const NAP: Duration = Duration::from_millis(1);

/// A transfer as its executor sees it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Taken {
    /// The number to report it by.
    pub id: TransferId,
    /// The edge.
    pub kind: TransferKind,
    /// What moves where.
    pub pages: Vec<PageMove>,
}

/// How a transfer went, in the words of its executor.
#[derive(Clone, Debug, Default)]
pub struct Report {
    /// Pages, counted from the first, that are whole at the destination.
    pub pages_whole: usize,
    /// Bytes that were moved.
    pub bytes: u64,
    /// From the start of the work to its end.
    pub busy: Duration,
    /// Why it is not all of them.
    pub error: Option<TransferError>,
}

/// What did not go by the book.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct QueueStats {
    /// Completions that nobody was there to read.
    pub completions_lost: u64,
    /// Reports about transfers that were unknown or had ended.
    pub unknown_reports: u64,
}

struct Entry {
    transfer: TransferDescriptor,
    taken: bool,
    cancelled: bool,
    /// Why it will not end well, known before its executor has let go of it.
    doomed: Option<TransferError>,
}

#[derive(Default)]
struct State {
    /// Accepted and not ended.
    outstanding: HashMap<TransferId, Entry>,
    /// Ended, while the completions' reader has no room.
    ended: VecDeque<TransferCompletion>,
    closed: bool,
}

/// Numbers of transfers of one direction that nobody took yet. Some may have ended since.
struct Waiting {
    entrance: Sender<TransferId>,
    exit: Receiver<TransferId>,
}

impl Waiting {
    fn new(capacity: usize) -> Waiting {
        let (entrance, exit) = bounded(capacity);
        Waiting { entrance, exit }
    }
}

/// Hands transfers to an executor. All methods may be called from any thread, and none but `take` and `torn_down` waits.
pub struct TransferQueue {
    capacity: usize,
    completions: OnceLock<CompletionSender>,
    loads: Waiting,
    backups: Waiting,
    state: Mutex<State>,
    completions_lost: AtomicU64,
    unknown_reports: AtomicU64,
}

impl TransferQueue {
    /// A queue of at most `capacity` transfers that have not ended, at least one.
    pub fn new(capacity: usize) -> TransferQueue {
        let capacity = capacity.max(1);
        TransferQueue {
            capacity,
            completions: OnceLock::new(),
            loads: Waiting::new(capacity),
            backups: Waiting::new(capacity),
            state: Mutex::default(),
            completions_lost: AtomicU64::new(0),
            unknown_reports: AtomicU64::new(0),
        }
    }

    /// Says where to report; before that every transfer is refused. False if it was said before.
    pub fn connect(&self, completions: CompletionSender) -> bool {
        self.completions.set(completions).is_ok()
    }

    fn state(&self) -> MutexGuard<'_, State> {
        // Every step leaves the state whole before anything in it could panic.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The next transfer to execute, loads first; none within the limit, or once closed.
    pub fn take(&self, limit: Duration) -> Option<Taken> {
        self.flush(&mut self.state());
        let deadline = Instant::now() + limit;
        loop {
            let left = deadline.saturating_duration_since(Instant::now());
            let next = select_biased! {
                recv(self.loads.exit) -> id => id,
                recv(self.backups.exit) -> id => id,
                default(left) => return None,
            };
            // The queue holds both ends, so neither is ever disconnected.
            let id = next.ok()?;
            let mut state = self.state();
            if let Some(entry) = state.outstanding.get_mut(&id).filter(|entry| !entry.taken) {
                entry.taken = true;
                let TransferDescriptor { kind, pages, .. } = &entry.transfer;
                return Some(Taken { id, kind: *kind, pages: pages.clone() });
            }
        }
    }

    /// Whether a taken transfer need not be begun or gone on with. True of one that has ended.
    pub fn is_cancelled(&self, id: TransferId) -> bool {
        self.state().outstanding.get(&id).is_none_or(|entry| entry.cancelled)
    }

    /// Layers `0..ready` of a load are whole on the device.
    pub fn layers_ready(&self, id: TransferId, ready: u32) {
        match self.state().outstanding.get(&id).filter(|entry| entry.taken) {
            Some(entry) => {
                if let Some(ticket) = &entry.transfer.ticket {
                    ticket.advance(ready);
                }
            }
            None => self.count_unknown(),
        }
    }

    /// A taken transfer will not end well. Whoever waits for it is told now; it ends with `done`, once the device has let
    /// go of its pages. A load whose layers are all there, and a backup that turns out whole, end well all the same.
    pub fn doom(&self, id: TransferId, why: TransferError) {
        match self.state().outstanding.get_mut(&id).filter(|entry| entry.taken) {
            Some(entry) => doom(entry, why),
            None => self.count_unknown(),
        }
    }

    /// A taken transfer is over, and nothing touches its pages any more.
    pub fn done(&self, id: TransferId, report: Report) {
        let mut state = self.state();
        if !state.outstanding.get(&id).is_some_and(|entry| entry.taken) {
            drop(state);
            return self.count_unknown();
        }
        if let Some(entry) = state.outstanding.remove(&id) {
            state.ended.push_back(completion(entry, report));
        }
        self.flush(&mut state);
    }

    /// Refuses new transfers, ends those that nobody took, and tells whoever waits for the others that they fail.
    pub fn close(&self) {
        let mut state = self.state();
        state.closed = true;
        for entry in state.outstanding.values_mut() {
            entry.cancelled = true;
            if entry.transfer.ticket.as_ref().is_some_and(|ticket| !ticket.is_complete()) {
                doom(entry, TransferError::Cancelled);
            }
        }
        end_all(&mut state, |entry| !entry.taken);
        self.flush(&mut state);
    }

    /// What executed transfers is gone: nothing can touch any page of theirs any more. Closes the queue and ends all of
    /// them. Waits up to two seconds until their completions are on their way.
    pub fn torn_down(&self) {
        self.close();
        end_all(&mut self.state(), |_| true);
        let deadline = Instant::now() + LAST_WORDS;
        while !self.flush(&mut self.state()) && Instant::now() < deadline {
            std::thread::sleep(NAP);
        }
        let mut state = self.state();
        self.completions_lost.fetch_add(state.ended.len() as u64, Ordering::Relaxed);
        state.ended.clear();
    }

    /// Transfers that were accepted and have not ended.
    pub fn outstanding(&self) -> usize {
        self.state().outstanding.len()
    }

    /// What did not go by the book so far.
    pub fn stats(&self) -> QueueStats {
        QueueStats {
            completions_lost: self.completions_lost.load(Ordering::Relaxed),
            unknown_reports: self.unknown_reports.load(Ordering::Relaxed),
        }
    }

    fn count_unknown(&self) {
        self.unknown_reports.fetch_add(1, Ordering::Relaxed);
    }

    /// Sends what has ended, as far as there is room; says whether that was all.
    fn flush(&self, state: &mut State) -> bool {
        let Some(completions) = self.completions.get() else { return state.ended.is_empty() };
        while let Some(next) = state.ended.pop_front() {
            match completions.try_send(next) {
                Ok(()) => {}
                Err(TrySendError::Full(back)) => {
                    state.ended.push_front(back);
                    return false;
                }
                Err(TrySendError::Disconnected(_)) => {
                    self.completions_lost.fetch_add(1, Ordering::Relaxed);
                }
            }
        }
        true
    }
}

impl Mover for TransferQueue {
    fn submit(&self, transfer: TransferDescriptor) -> Result<(), SubmitError> {
        let mut state = self.state();
        self.flush(&mut state);
        if state.closed || self.completions.get().is_none() {
            return Err(SubmitError::Closed(Box::new(transfer)));
        }
        let full = state.outstanding.len() + state.ended.len() >= self.capacity;
        if full || state.outstanding.contains_key(&transfer.id) {
            return Err(SubmitError::Full(Box::new(transfer)));
        }
        let queue = if transfer.kind == TransferKind::Load { &self.loads } else { &self.backups };
        // Numbers of transfers that were cancelled may still fill the queue until the executor comes by.
        if queue.entrance.try_send(transfer.id).is_err() {
            return Err(SubmitError::Full(Box::new(transfer)));
        }
        let entry = Entry { taken: false, cancelled: false, doomed: None, transfer };
        state.outstanding.insert(entry.transfer.id, entry);
        Ok(())
    }

    fn cancel(&self, id: TransferId) {
        let mut state = self.state();
        let Some(entry) = state.outstanding.get_mut(&id) else { return };
        entry.cancelled = true;
        if !entry.taken {
            end_all(&mut state, |entry| entry.transfer.id == id);
        }
        self.flush(&mut state);
    }
}

/// Ends transfers of which nothing was moved, or nothing that counts.
fn end_all(state: &mut State, which: impl Fn(&Entry) -> bool) {
    let mut ids: Vec<TransferId> =
        state.outstanding.iter().filter(|(_, entry)| which(entry)).map(|(id, _)| *id).collect();
    ids.sort_unstable();
    for id in ids {
        if let Some(entry) = state.outstanding.remove(&id) {
            let report = Report { error: Some(TransferError::Cancelled), ..Report::default() };
            state.ended.push_back(completion(entry, report));
        }
    }
}

fn doom(entry: &mut Entry, why: TransferError) {
    if let Some(ticket) = &entry.transfer.ticket {
        ticket.fail();
        if ticket.is_complete() {
            return;
        }
    }
    entry.doomed.get_or_insert(why);
}

/// Whole without an error or short with one, whatever the executor says; the ticket agrees with it.
fn completion(entry: Entry, report: Report) -> TransferCompletion {
    let pages = entry.transfer.pages.len();
    let short = (report.pages_whole < pages).then(|| TransferError::Io {
        operation: format!("{} {}", entry.transfer.kind.name(), entry.transfer.id),
        reason: format!("{} of {pages} pages were moved", report.pages_whole),
    });
    // Nobody was told of a backup's doom.
    let doomed = entry.doomed.clone().filter(|_| entry.transfer.ticket.is_some());
    let error = doomed.or(report.error).or(short);
    match (&entry.transfer.ticket, &error) {
        (Some(ticket), None) => ticket.advance(ticket.layers()),
        (Some(ticket), Some(_)) => ticket.fail(),
        (None, _) => {}
    }
    let most = if error.is_some() { pages.saturating_sub(1) } else { pages };
    TransferCompletion {
        id: entry.transfer.id,
        shard: ShardId(0),
        pages_whole: report.pages_whole.min(most),
        error,
        bytes: report.bytes,
        busy_ns: u64::try_from(report.busy.as_nanos()).unwrap_or(u64::MAX),
    }
}
