//! An answer that Core gives later, once. Whoever waits for it has a bound; it may be read any number of times.

use std::sync::{Condvar, Mutex, MutexGuard};
use std::time::{Duration, Instant};

/// A value that Core sets once.
#[derive(Debug)]
pub struct Answer<T> {
    value: Mutex<Option<T>>,
    given: Condvar,
}

impl<T> Default for Answer<T> {
    fn default() -> Self {
        Answer { value: Mutex::new(None), given: Condvar::new() }
    }
}

impl<T: Clone> Answer<T> {
    fn guard(&self) -> MutexGuard<'_, Option<T>> {
        // The value is set in one step, so a panic elsewhere leaves nothing half-written behind it.
        self.value.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    /// Gives the answer; the first one stays.
    pub fn give(&self, value: T) {
        self.guard().get_or_insert(value);
        self.given.notify_all();
    }

    /// The answer, or none within the limit.
    pub fn wait(&self, limit: Duration) -> Option<T> {
        let start = Instant::now();
        let mut value = self.guard();
        while value.is_none() {
            let left = limit.checked_sub(start.elapsed()).filter(|left| !left.is_zero())?;
            value = match self.given.wait_timeout(value, left) {
                Ok((value, _)) => value,
                Err(poisoned) => poisoned.into_inner().0,
            };
        }
        value.clone()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Arc;

    #[test]
    fn the_first_answer_stays_and_a_wait_has_a_bound() {
        let answer = Arc::new(Answer::default());
        assert_eq!(answer.wait(Duration::ZERO), None);
        assert_eq!(answer.wait(Duration::from_millis(1)), None);
        let giver = Arc::clone(&answer);
        let thread = std::thread::spawn(move || giver.give(1));
        assert_eq!(answer.wait(Duration::from_secs(10)), Some(1));
        thread.join().unwrap();
        answer.give(2);
        assert_eq!(answer.wait(Duration::ZERO), Some(1));
    }
}
