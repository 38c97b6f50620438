//! The thread that syncs: at most one sync interval after a write, on request, and a last time at the end. It has its
//! own thread, since a sync can take as long as the disk likes.

use crate::background::Background;
use crate::error::at;
use crate::store::Shared;
use crate::DiskError;
use crossbeam_channel::{bounded, Receiver, RecvTimeoutError, Sender};
use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

type Reply = Sender<Result<(), DiskError>>;

/// Requests that wait for the thread.
const MOST_REQUESTS: usize = 16;

pub(crate) struct Ticker {
    root: PathBuf,
    /// `None` once stopped.
    running: Mutex<Option<Running>>,
}

struct Running {
    requests: Sender<Reply>,
    thread: Background,
}

impl Ticker {
    pub fn start(shared: &Arc<Shared>) -> Result<Ticker, DiskError> {
        let root = shared.config.root.clone();
        let (requests, queue) = bounded(MOST_REQUESTS);
        let worker = Arc::clone(shared);
        let thread = Background::start("strata-disk-sync", move || run(&worker, &queue))
            .map_err(at("start the sync thread of", &root))?;
        Ok(Ticker { root, running: Mutex::new(Some(Running { requests, thread })) })
    }

    /// Syncs now.
    pub fn sync(&self, deadline: Duration) -> Result<(), DiskError> {
        let requests = {
            let running = self.running.lock().unwrap_or_else(PoisonError::into_inner);
            running.as_ref().map(|running| running.requests.clone())
        };
        match requests {
            Some(requests) => self.request(&requests, deadline),
            // A closed store has synced already.
            None => Ok(()),
        }
    }

    fn request(&self, requests: &Sender<Reply>, deadline: Duration) -> Result<(), DiskError> {
        let late = || DiskError::Deadline { operation: "sync", root: self.root.clone(), waited: deadline };
        let (reply, answer) = bounded(1);
        requests.send_timeout(reply, deadline).map_err(|_| late())?;
        answer.recv_timeout(deadline).map_err(|_| late())?
    }

    /// Syncs a last time and ends the thread, unless it hangs.
    pub fn stop(&self, deadline: Duration) -> Result<(), DiskError> {
        let running = self.running.lock().unwrap_or_else(PoisonError::into_inner).take();
        let Some(Running { requests, thread }) = running else { return Ok(()) };
        let synced = self.request(&requests, deadline);
        drop(requests);
        if !thread.end(deadline) {
            return Err(DiskError::Deadline { operation: "sync", root: self.root.clone(), waited: deadline });
        }
        synced
    }
}

fn run(shared: &Shared, queue: &Receiver<Reply>) {
    let interval = shared.config.sync_interval;
    let mut due = Instant::now() + interval;
    loop {
        match queue.recv_timeout(due.saturating_duration_since(Instant::now())) {
            Ok(reply) => {
                // Whoever asked may have stopped waiting.
                let _late = reply.try_send(shared.sync_now());
            }
            Err(RecvTimeoutError::Timeout) => {
                // Counted and reported by `health`; the segment stays dirty and is tried again.
                let _counted = shared.sync_now();
                shared.look();
                due = Instant::now() + interval;
            }
            Err(RecvTimeoutError::Disconnected) => return,
        }
    }
}
