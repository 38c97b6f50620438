//! The thread that looks after a store whose disk misbehaves. While nothing is executed, it ends the transfers that
//! have not been begun, so that nobody waits for a hung disk longer than its deadline; and it tries a disk that is out
//! of service from time to time, each time on a thread of its own, since a trial may hang too.

use crate::background::Background;
use crate::error::at;
use crate::store::Shared;
use crate::trial::try_disk;
use crate::DiskError;
use crossbeam_channel::{bounded, Receiver, RecvTimeoutError, Sender};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;
use strata_types::TransferError;

/// Looks in an I/O deadline, so that a hang is noticed little later than it counts as one.
const LOOKS_IN_A_DEADLINE: u32 = 8;
const SHORTEST_INTERVAL: Duration = Duration::from_millis(2);
const LONGEST_INTERVAL: Duration = Duration::from_millis(250);

pub(crate) struct Watch {
    /// Dropped to end the thread.
    alive: Mutex<Option<Sender<()>>>,
    thread: Background,
}

impl Watch {
    pub fn start(shared: &Arc<Shared>) -> Result<Watch, DiskError> {
        let (alive, closed) = bounded(0);
        let watched = Arc::clone(shared);
        let thread = Background::start("strata-disk-watch", move || run(&watched, &closed))
            .map_err(at("start the watch over", &shared.config.root))?;
        Ok(Watch { alive: Mutex::new(Some(alive)), thread })
    }

    /// Ends the thread and the trial that may be under way; false if the disk does not let go in time.
    pub fn stop(&self, deadline: Duration) -> bool {
        drop(self.alive.lock().unwrap_or_else(PoisonError::into_inner).take());
        self.thread.end(deadline)
    }
}

fn run(shared: &Arc<Shared>, closed: &Receiver<()>) {
    let config = &shared.config;
    let interval = (config.io_deadline / LOOKS_IN_A_DEADLINE)
        .min(config.first_retry / 2)
        .clamp(SHORTEST_INTERVAL, LONGEST_INTERVAL);
    let mut trial: Option<Background> = None;
    while closed.recv_timeout(interval) == Err(RecvTimeoutError::Timeout) {
        if let Some(reason) = shared.monitor.unavailable() {
            shared.end_unbegun(&TransferError::Unavailable { tier: "disk", reason });
        } else {
            shared.monitor.note_up();
        }
        if trial.as_ref().is_none_or(Background::is_finished) && shared.monitor.is_trial_due() {
            let tried = Arc::clone(shared);
            let began = Background::start("strata-disk-trial", move || {
                let path = tried.segments.scratch();
                let outcome = try_disk(&tried).map_err(|error| format!("{}: {error}", path.display()));
                tried.monitor.trial_ended(outcome);
            });
            match began {
                Ok(thread) => trial = Some(thread),
                Err(error) => shared.monitor.trial_ended(Err(format!("start of a trial: {error}"))),
            }
        }
    }
    // The root stays locked as long as a trial may write to it: the closer waits for this thread.
    while trial.as_ref().is_some_and(|trial| !trial.end(LONGEST_INTERVAL)) {}
}
