//! An engine that wraps another and emulates a slow disk: payloads take at least as long as a bandwidth allows, reads
//! and writes each by their own limit. `submit` never blocks; one thread sleeps until the next I/O is due.

use super::workers::{abandon, join_all};
use super::{Io, IoEngine, Lane, Operation, Part, SegmentBytes, SegmentFile};
use crossbeam_channel::{unbounded, Receiver, RecvTimeoutError, Sender};
use std::collections::VecDeque;
use std::io;
use std::num::NonZeroU64;
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::{Builder, JoinHandle};
use std::time::{Duration, Instant};

/// Runs of a transfer that wait for bandwidth at once: more would only make it slower to cancel.
const MOST_CHAINS: usize = 2;

/// Wraps an engine and slows it down.
pub struct ThrottledEngine {
    inner: Arc<dyn IoEngine>,
    limits: Limits,
    /// `None` once stopped.
    queue: Arc<Mutex<Option<Sender<Io>>>>,
    thread: Mutex<Option<JoinHandle<()>>>,
}

/// Bytes per second.
#[derive(Clone, Copy)]
struct Limits {
    read: Option<NonZeroU64>,
    write: Option<NonZeroU64>,
}

impl Limits {
    /// The limit for this I/O, if it has one.
    fn of(&self, io: &Io) -> Option<NonZeroU64> {
        match &io.operation {
            Operation::Read { part: Part::Payloads, .. } => self.read,
            Operation::Write { part: Part::Payloads, .. } => self.write,
            _ => None,
        }
    }
}

impl ThrottledEngine {
    /// Limits payloads to so many bytes per second; `None` does not limit.
    pub fn new(
        inner: Arc<dyn IoEngine>,
        read: Option<NonZeroU64>,
        write: Option<NonZeroU64>,
    ) -> io::Result<ThrottledEngine> {
        let limits = Limits { read, write };
        let (sender, receiver) = unbounded();
        let queue = Arc::new(Mutex::new(Some(sender)));
        let line = Line { limits, inner: Arc::clone(&inner), queue: Arc::clone(&queue) };
        let thread =
            Builder::new().name("strata-disk-throttle".into()).spawn(move || line.release(&receiver))?;
        Ok(ThrottledEngine { inner, limits, queue, thread: Mutex::new(Some(thread)) })
    }
}

/// Sends what is limited to the throttle's thread, and the rest to the engine.
struct Line {
    limits: Limits,
    inner: Arc<dyn IoEngine>,
    queue: Arc<Mutex<Option<Sender<Io>>>>,
}

fn sender_of(queue: &Mutex<Option<Sender<Io>>>) -> Option<Sender<Io>> {
    queue.lock().unwrap_or_else(PoisonError::into_inner).clone()
}

/// Lets a chain come back to the throttle whenever its next I/O is limited.
fn wrap(limits: Limits, queue: &Arc<Mutex<Option<Sender<Io>>>>, mut io: Io) -> Io {
    let (queue, then) = (Arc::clone(queue), io.then);
    io.then = Box::new(move |result| {
        let next = then(result)?;
        if limits.of(&next).is_none() {
            return Some(wrap(limits, &queue, next));
        }
        enqueue(&queue, next);
        None
    });
    io
}

fn enqueue(queue: &Mutex<Option<Sender<Io>>>, io: Io) {
    match sender_of(queue) {
        None => abandon(io),
        Some(sender) => {
            if let Err(refused) = sender.send(io) {
                abandon(refused.0);
            }
        }
    }
}

/// I/Os of one lane and when they are due, in order.
#[derive(Default)]
struct Waiting {
    ios: VecDeque<(Instant, Io)>,
    free_at: Option<Instant>,
}

impl Waiting {
    fn add(&mut self, io: Io, limit: NonZeroU64) {
        let now = Instant::now();
        let span = Duration::from_secs_f64(io.bytes() as f64 / limit.get() as f64);
        let due = self.free_at.map_or(now, |free| free.max(now)) + span;
        self.free_at = Some(due);
        self.ios.push_back((due, io));
    }

    fn due(&self) -> Option<Instant> {
        self.ios.front().map(|(due, _)| *due)
    }

    fn pop(&mut self, now: Instant) -> Option<Io> {
        self.due().filter(|due| *due <= now)?;
        self.ios.pop_front().map(|(_, io)| io)
    }
}

impl Line {
    /// Hands I/Os to the engine when they are due, until the queue is closed and empty.
    fn release(self, queue: &Receiver<Io>) {
        let (mut reads, mut writes) = (Waiting::default(), Waiting::default());
        loop {
            let due = [reads.due(), writes.due()].into_iter().flatten().min();
            let received = match due {
                Some(due) => queue.recv_deadline(due),
                None => queue.recv().map_err(|_| RecvTimeoutError::Disconnected),
            };
            match (received, due) {
                (Ok(io), _) => match self.limits.of(&io) {
                    Some(limit) if io.lane == Lane::Read => reads.add(io, limit),
                    Some(limit) => writes.add(io, limit),
                    None => self.pass(io),
                },
                (Err(RecvTimeoutError::Timeout), _) => {}
                (Err(RecvTimeoutError::Disconnected), Some(due)) => {
                    std::thread::sleep(due.saturating_duration_since(Instant::now()));
                }
                (Err(RecvTimeoutError::Disconnected), None) => return,
            }
            let now = Instant::now();
            while let Some(io) = reads.pop(now).or_else(|| writes.pop(now)) {
                self.pass(io);
            }
        }
    }

    fn pass(&self, io: Io) {
        self.inner.submit(wrap(self.limits, &self.queue, io));
    }
}

impl IoEngine for ThrottledEngine {
    fn create(&self, path: &Path, bytes: SegmentBytes, front: &[u8]) -> io::Result<SegmentFile> {
        self.inner.create(path, bytes, front)
    }

    fn open(&self, path: &Path, bytes: SegmentBytes) -> io::Result<SegmentFile> {
        self.inner.open(path, bytes)
    }

    fn remove(&self, path: &Path) -> io::Result<()> {
        self.inner.remove(path)
    }

    fn sync(&self, file: &SegmentFile) -> io::Result<()> {
        self.inner.sync(file)
    }

    fn submit(&self, io: Io) {
        if self.limits.of(&io).is_some() {
            enqueue(&self.queue, io);
        } else {
            self.inner.submit(wrap(self.limits, &self.queue, io));
        }
    }

    fn depth(&self) -> usize {
        self.inner.depth().min(MOST_CHAINS)
    }

    fn describe(&self) -> String {
        let told = |limit: Option<NonZeroU64>| {
            limit.map_or_else(|| "unlimited".to_owned(), |limit| format!("{limit} bytes/s"))
        };
        let (read, write) = (told(self.limits.read), told(self.limits.write));
        format!("{}, slowed down (emulation: reads {read}, writes {write})", self.inner.describe())
    }

    fn stop(&self, deadline: Duration) -> bool {
        let until = Instant::now() + deadline;
        drop(self.queue.lock().unwrap_or_else(PoisonError::into_inner).take());
        let thread = self.thread.lock().unwrap_or_else(PoisonError::into_inner).take();
        join_all(thread.into_iter().collect(), deadline)
            && self.inner.stop(until.saturating_duration_since(Instant::now()))
    }
}

impl Drop for ThrottledEngine {
    fn drop(&mut self) {
        drop(self.queue.lock().unwrap_or_else(PoisonError::into_inner).take());
    }
}
