//! `LoadTicket`: a load that several requests can wait for, layer by layer. A waiter first tries an atomic and
//! only then blocks, never past its deadline. Once failed, a ticket stays failed; ready layers never shrink.

use crate::TransferId;
#[cfg(loom)]
use loom::sync::{
    atomic::{AtomicU32, Ordering},
    Condvar, Mutex, MutexGuard,
};
#[cfg(not(loom))]
use std::sync::{
    atomic::{AtomicU32, Ordering},
    Condvar, Mutex, MutexGuard,
};
use std::time::Duration;
#[cfg(not(loom))]
use std::time::Instant;

/// The counter's value once the load has failed.
const FAILED: u32 = u32::MAX;

/// A ticket as seen without waiting.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TicketState {
    /// This many layers, counted from 0, are whole on the device.
    Ready(u32),
    /// The load will never finish.
    Failed,
}

/// How a wait ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WaitOutcome {
    /// The layer is whole.
    Ready,
    /// The load failed; the step that waits must be discarded.
    Failed,
    /// The deadline passed first.
    TimedOut,
}

/// A shareable count of the layers that a load has brought.
#[derive(Debug)]
pub struct LoadTicket {
    transfer: TransferId,
    layers: u32,
    ready: AtomicU32,
    lock: Mutex<()>,
    changed: Condvar,
}

impl LoadTicket {
    /// A ticket for the load that this transfer carries out, of this many layers, none of them ready.
    pub fn new(transfer: TransferId, layers: u32) -> Self {
        let (ready, lock, changed) = (AtomicU32::new(0), Mutex::new(()), Condvar::new());
        LoadTicket { transfer, layers, ready, lock, changed }
    }

    /// The transfer that carries the load out.
    pub fn transfer(&self) -> TransferId {
        self.transfer
    }

    /// The number of layers of the load.
    pub fn layers(&self) -> u32 {
        self.layers
    }

    /// The state now.
    pub fn state(&self) -> TicketState {
        match self.ready.load(Ordering::Acquire) {
            FAILED => TicketState::Failed,
            ready => TicketState::Ready(ready),
        }
    }

    /// Whether all layers are ready.
    pub fn is_complete(&self) -> bool {
        self.state() == TicketState::Ready(self.layers)
    }

    /// Says that layers `0..ready` are whole. Smaller counts and counts after a failure change nothing.
    pub fn advance(&self, ready: u32) {
        let ready = ready.min(self.layers);
        let moved = self.ready.fetch_update(Ordering::AcqRel, Ordering::Acquire, |old| {
            (old != FAILED && ready > old).then_some(ready)
        });
        if moved.is_ok() {
            self.wake();
        }
    }

    /// Says that the load will not finish. A complete ticket stays complete.
    pub fn fail(&self) {
        let moved = self.ready.fetch_update(Ordering::AcqRel, Ordering::Acquire, |old| {
            (old != FAILED && old < self.layers).then_some(FAILED)
        });
        if moved.is_ok() {
            self.wake();
        }
    }

    fn outcome(&self, layer: u32) -> Option<WaitOutcome> {
        match self.state() {
            TicketState::Failed => Some(WaitOutcome::Failed),
            TicketState::Ready(ready) if ready > layer => Some(WaitOutcome::Ready),
            TicketState::Ready(_) => None,
        }
    }

    fn guard(&self) -> MutexGuard<'_, ()> {
        // The mutex guards no data, so a panic of another waiter leaves nothing half-written behind it.
        self.lock.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    fn wake(&self) {
        // Taking the lock orders this wake after the check of a waiter that is about to sleep.
        drop(self.guard());
        self.changed.notify_all();
    }

    /// Waits until layer `layer` is whole, the load has failed, or `limit` has passed.
    #[cfg(not(loom))]
    pub fn wait_layer(&self, layer: u32, limit: Duration) -> WaitOutcome {
        if let Some(outcome) = self.outcome(layer) {
            return outcome;
        }
        let deadline = Instant::now() + limit;
        let mut guard = self.guard();
        loop {
            if let Some(outcome) = self.outcome(layer) {
                return outcome;
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return WaitOutcome::TimedOut;
            }
            guard = match self.changed.wait_timeout(guard, left) {
                Ok((guard, _)) => guard,
                Err(poisoned) => poisoned.into_inner().0,
            };
        }
    }

    /// The model-checked wait: the same loop without a clock, which loom does not have.
    #[cfg(loom)]
    pub fn wait_layer(&self, layer: u32, _limit: Duration) -> WaitOutcome {
        let mut guard = self.guard();
        loop {
            if let Some(outcome) = self.outcome(layer) {
                return outcome;
            }
            guard = match self.changed.wait(guard) {
                Ok(guard) => guard,
                Err(poisoned) => poisoned.into_inner(),
            };
        }
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use std::sync::Arc;

    const SOON: Duration = Duration::from_secs(20);

    #[test]
    fn layers_become_ready_in_order_and_failures_stay() {
        let ticket = LoadTicket::new(TransferId(1), 3);
        assert_eq!(ticket.wait_layer(0, Duration::ZERO), WaitOutcome::TimedOut);
        ticket.advance(2);
        ticket.advance(1);
        assert_eq!(ticket.state(), TicketState::Ready(2));
        assert_eq!(ticket.wait_layer(1, Duration::ZERO), WaitOutcome::Ready);
        assert_eq!(ticket.wait_layer(2, Duration::from_millis(1)), WaitOutcome::TimedOut);
        ticket.fail();
        ticket.advance(3);
        assert_eq!(ticket.wait_layer(0, SOON), WaitOutcome::Failed);
    }

    #[test]
    fn a_complete_ticket_cannot_fail() {
        let ticket = LoadTicket::new(TransferId(1), 1);
        ticket.advance(9);
        ticket.fail();
        assert!(ticket.is_complete());
        assert_eq!(ticket.wait_layer(0, Duration::ZERO), WaitOutcome::Ready);
    }

    #[test]
    fn waiters_on_other_threads_wake() {
        let ticket = Arc::new(LoadTicket::new(TransferId(1), 2));
        let waiters: Vec<_> = (0..4)
            .map(|index| {
                let ticket = Arc::clone(&ticket);
                std::thread::spawn(move || ticket.wait_layer(index % 2, SOON))
            })
            .collect();
        ticket.advance(1);
        ticket.advance(2);
        for waiter in waiters {
            assert_eq!(waiter.join().unwrap(), WaitOutcome::Ready);
        }
    }
}

#[cfg(all(test, loom))]
mod loom_tests {
    use super::*;
    use loom::sync::Arc;

    #[test]
    fn no_wake_is_lost() {
        loom::model(|| {
            let ticket = Arc::new(LoadTicket::new(TransferId(1), 2));
            let mover = {
                let ticket = Arc::clone(&ticket);
                loom::thread::spawn(move || {
                    ticket.advance(1);
                    ticket.advance(2);
                })
            };
            assert_eq!(ticket.wait_layer(1, Duration::ZERO), WaitOutcome::Ready);
            mover.join().unwrap();
        });
    }

    #[test]
    fn a_failure_reaches_every_waiter() {
        loom::model(|| {
            let ticket = Arc::new(LoadTicket::new(TransferId(1), 2));
            let waiter = {
                let ticket = Arc::clone(&ticket);
                loom::thread::spawn(move || ticket.wait_layer(1, Duration::ZERO))
            };
            ticket.advance(1);
            ticket.fail();
            assert_eq!(waiter.join().unwrap(), WaitOutcome::Failed);
            assert_eq!(ticket.state(), TicketState::Failed);
        });
    }
}
