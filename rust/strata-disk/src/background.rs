//! Threads of the store's own. They are ended with a bound, since what one of them waits for may hang: it then keeps
//! what it uses, and ends when the kernel answers.

use std::io;
use std::sync::{Mutex, PoisonError};
use std::thread::{Builder, JoinHandle};
use std::time::{Duration, Instant};

/// How often a wait for an end looks again.
const GLANCE: Duration = Duration::from_millis(1);

/// A thread that ends by itself once it is told to.
pub(crate) struct Background {
    handle: Mutex<Option<JoinHandle<()>>>,
}

impl Background {
    pub fn start(name: &str, work: impl FnOnce() + Send + 'static) -> io::Result<Background> {
        let handle = Builder::new().name(name.into()).spawn(work)?;
        Ok(Background { handle: Mutex::new(Some(handle)) })
    }

    /// Whether it has ended.
    pub fn is_finished(&self) -> bool {
        let handle = self.handle.lock().unwrap_or_else(PoisonError::into_inner);
        handle.as_ref().is_none_or(JoinHandle::is_finished)
    }

    /// Waits for its end; false if that takes too long, and then it may be waited for again.
    pub fn end(&self, deadline: Duration) -> bool {
        let until = Instant::now() + deadline;
        while !self.is_finished() {
            if Instant::now() >= until {
                return false;
            }
            std::thread::sleep(GLANCE);
        }
        let handle = self.handle.lock().unwrap_or_else(PoisonError::into_inner).take();
        // A thread that panicked has ended too; what it should have done shows in its absence.
        let _panicked = handle.map(JoinHandle::join);
        true
    }
}
