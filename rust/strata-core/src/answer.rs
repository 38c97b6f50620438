//! An answer that is given later, once. Whoever waits for it has a bound, and hears at once that it will never come if its
//! giver is gone. Whoever gives it learns whether it can still be taken.

use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::time::{Duration, Instant};

#[derive(Debug)]
enum State<T> {
    Open,
    Given(T),
    /// Its giver is gone.
    Lost,
    /// It was taken, or whoever asked has gone without it.
    Gone,
}

#[derive(Debug)]
struct Shared<T> {
    state: Mutex<State<T>>,
    changed: Condvar,
}

impl<T> Shared<T> {
    fn guard(&self) -> MutexGuard<'_, State<T>> {
        // The state is set in one step, so a panic elsewhere leaves nothing half-written behind it.
        self.state.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    /// The state once it is no longer open, or after the limit.
    fn settled(&self, limit: Duration) -> MutexGuard<'_, State<T>> {
        let start = Instant::now();
        let mut state = self.guard();
        while matches!(*state, State::Open) {
            let Some(left) = limit.checked_sub(start.elapsed()).filter(|left| !left.is_zero()) else { break };
            state = match self.changed.wait_timeout(state, left) {
                Ok((state, _)) => state,
                Err(poisoned) => poisoned.into_inner().0,
            };
        }
        state
    }
}

/// Why there is no answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NoAnswer {
    /// It was not there in time.
    Late,
    /// It will never come: whoever was to give it is gone.
    Lost,
}

/// An answer and who gives it.
pub fn answer<T>() -> (Giver<T>, Answer<T>) {
    let shared = Arc::new(Shared { state: Mutex::new(State::Open), changed: Condvar::new() });
    (Giver(Arc::clone(&shared)), Answer(shared))
}

/// The end that gives. Dropped without having given, it tells whoever waits.
#[derive(Debug)]
pub struct Giver<T>(Arc<Shared<T>>);

impl<T> Giver<T> {
    /// Gives the answer, once. It comes back if nobody can take it any more.
    pub fn give(&self, value: T) -> Result<(), T> {
        let mut state = self.0.guard();
        if !matches!(*state, State::Open) {
            return Err(value);
        }
        *state = State::Given(value);
        drop(state);
        self.0.changed.notify_all();
        Ok(())
    }
}

impl<T> Drop for Giver<T> {
    fn drop(&mut self) {
        let mut state = self.0.guard();
        if matches!(*state, State::Open) {
            *state = State::Lost;
            drop(state);
            self.0.changed.notify_all();
        }
    }
}

/// The end that waits. Clones wait for the same answer.
#[derive(Debug)]
pub struct Answer<T>(Arc<Shared<T>>);

impl<T> Clone for Answer<T> {
    fn clone(&self) -> Self {
        Answer(Arc::clone(&self.0))
    }
}

impl<T> Answer<T> {
    /// The answer, or none within the limit: then it can no longer be given.
    pub fn take(self, limit: Duration) -> Result<T, NoAnswer> {
        let mut state = self.0.settled(limit);
        match std::mem::replace(&mut *state, State::Gone) {
            State::Given(value) => Ok(value),
            State::Lost => Err(NoAnswer::Lost),
            State::Open | State::Gone => Err(NoAnswer::Late),
        }
    }
}

impl<T: Clone> Answer<T> {
    /// The answer, or none within the limit. It may be read any number of times.
    pub fn wait(&self, limit: Duration) -> Result<T, NoAnswer> {
        match &*self.0.settled(limit) {
            State::Given(value) => Ok(value.clone()),
            State::Lost => Err(NoAnswer::Lost),
            State::Open | State::Gone => Err(NoAnswer::Late),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SOON: Duration = Duration::from_secs(20);

    #[test]
    fn the_first_answer_stays_and_a_wait_has_a_bound() {
        let (giver, answer) = answer();
        assert_eq!(answer.wait(Duration::ZERO), Err(NoAnswer::Late));
        assert_eq!(answer.wait(Duration::from_millis(1)), Err(NoAnswer::Late));
        let waiting = answer.clone();
        let thread = std::thread::spawn(move || waiting.wait(SOON));
        assert_eq!(giver.give(1), Ok(()));
        assert_eq!(thread.join().unwrap(), Ok(1));
        assert_eq!(giver.give(2), Err(2));
        drop(giver);
        assert_eq!(answer.wait(Duration::ZERO), Ok(1));
        assert_eq!(answer.take(Duration::ZERO), Ok(1));
    }

    #[test]
    fn whoever_waits_hears_that_it_will_never_come() {
        let (giver, answer) = answer::<u32>();
        let waiting = answer.clone();
        let thread = std::thread::spawn(move || waiting.wait(SOON));
        drop(giver);
        assert_eq!(thread.join().unwrap(), Err(NoAnswer::Lost));
        assert_eq!(answer.take(SOON), Err(NoAnswer::Lost));
    }

    #[test]
    fn what_nobody_can_take_any_more_comes_back() {
        let (giver, answer) = answer();
        assert_eq!(answer.take(Duration::ZERO), Err(NoAnswer::Late));
        assert_eq!(giver.give(1), Err(1));
    }
}
