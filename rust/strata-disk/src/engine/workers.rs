//! Threads that take work from two lanes: reads go before writes, but writes do not starve. An engine's threads do
//! whatever may block; putting work in never does.

use super::{Io, Lane};
use crossbeam_channel::{bounded, select_biased, unbounded, Receiver, Sender};
use std::io;
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::{Builder, JoinHandle};
use std::time::{Duration, Instant};

/// Reads that may overtake a waiting write.
pub(super) const MOST_READS_IN_A_ROW: u32 = 16;

/// A fixed number of threads.
pub(super) struct Workers<W> {
    reads: Sender<W>,
    writes: Sender<W>,
    running: Mutex<Option<Running>>,
}

struct Running {
    /// Dropped to make the threads end.
    alive: Sender<()>,
    handles: Vec<JoinHandle<()>>,
}

impl<W: Send + 'static> Workers<W> {
    /// Starts the threads, each of which does `work` with what it takes.
    pub fn start(threads: usize, work: impl Fn(W) + Send + Sync + 'static) -> io::Result<Workers<W>> {
        let (reads, read_queue) = unbounded();
        let (writes, write_queue) = unbounded();
        let (alive, closed) = bounded(0);
        let work = Arc::new(work);
        let handles = (0..threads)
            .map(|number| {
                let lanes =
                    Lanes { reads: read_queue.clone(), writes: write_queue.clone(), closed: closed.clone() };
                let work = Arc::clone(&work);
                let name = format!("strata-disk-{number}");
                Builder::new().name(name).spawn(move || lanes.each(work.as_ref()))
            })
            .collect::<io::Result<Vec<_>>>()?;
        Ok(Workers { reads, writes, running: Mutex::new(Some(Running { alive, handles })) })
    }

    /// Hands work over; it comes back if every thread is gone.
    pub fn put(&self, lane: Lane, work: W) -> Result<(), W> {
        let queue = if lane == Lane::Read { &self.reads } else { &self.writes };
        queue.send(work).map_err(|refused| refused.0)
    }

    /// Lets the threads do what is queued and end; false if they did not in time.
    pub fn stop(&self, deadline: Duration) -> bool {
        let running = self.running.lock().unwrap_or_else(PoisonError::into_inner).take();
        let Some(Running { alive, handles }) = running else { return true };
        drop(alive);
        join_all(handles, deadline)
    }
}

/// Waits for threads that are about to end; false if they did not in time, or panicked.
pub(super) fn join_all(handles: Vec<JoinHandle<()>>, deadline: Duration) -> bool {
    let until = Instant::now() + deadline;
    while handles.iter().any(|handle| !handle.is_finished()) {
        if Instant::now() >= until {
            return false;
        }
        std::thread::sleep(Duration::from_millis(1));
    }
    handles.into_iter().all(|handle| handle.join().is_ok())
}

/// Ends a chain whose engine is gone.
pub(super) fn abandon(io: Io) {
    let mut next = Some(io);
    while let Some(io) = next {
        next = (io.then)(Err(io::ErrorKind::BrokenPipe.into()));
    }
}

struct Lanes<W> {
    reads: Receiver<W>,
    writes: Receiver<W>,
    closed: Receiver<()>,
}

impl<W> Lanes<W> {
    fn each(self, work: &impl Fn(W)) {
        let mut reads_in_a_row = 0;
        while let Some((lane, taken)) = self.next(reads_in_a_row) {
            reads_in_a_row = if lane == Lane::Read { reads_in_a_row + 1 } else { 0 };
            work(taken);
        }
    }

    fn next(&self, reads_in_a_row: u32) -> Option<(Lane, W)> {
        if reads_in_a_row >= MOST_READS_IN_A_ROW {
            if let Ok(work) = self.writes.try_recv() {
                return Some((Lane::Write, work));
            }
        }
        select_biased! {
            recv(self.reads) -> work => work.ok().map(|work| (Lane::Read, work)),
            recv(self.writes) -> work => work.ok().map(|work| (Lane::Write, work)),
            recv(self.closed) -> _ => None,
        }
    }
}
