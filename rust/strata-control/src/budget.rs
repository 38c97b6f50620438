//! A limit on the bytes written to disk in a day, since SSDs wear: in no 24 hours are more taken than the limit.
//! Counted by the hour, so up to an hour's writes may count longer than they have to, never shorter. Counts from
//! the start of the process: a restart begins a new day.

use strata_types::Time;

const NANOSECONDS_PER_HOUR: u64 = 3_600_000_000_000;
/// Any 24 hours touch at most so many hours of the clock.
const HOURS: usize = 25;

/// What may be written in 24 hours, and what was.
#[derive(Clone, Debug)]
pub struct WriteBudget {
    bytes_per_day: Option<u64>,
    /// Bytes by hour, each hour in the place of its number modulo `HOURS`.
    written: [u64; HOURS],
    /// The latest hour that anything was taken in.
    latest: u64,
}

impl WriteBudget {
    /// A budget of which nothing is spent; without a limit it only counts.
    pub fn new(bytes_per_day: Option<u64>) -> WriteBudget {
        WriteBudget { bytes_per_day, written: [0; HOURS], latest: 0 }
    }

    /// Takes `bytes` now, all or none. Time that runs backwards counts as standing still.
    pub fn take(&mut self, now: Time, bytes: u64) -> bool {
        let hour = self.hour(now);
        let spent = self.spent(now).saturating_add(bytes);
        if self.bytes_per_day.is_some_and(|limit| spent > limit) {
            return false;
        }
        for number in (self.latest + 1..=hour).take(HOURS) {
            self.written[place(number)] = 0;
        }
        self.latest = hour;
        self.written[place(hour)] = self.written[place(hour)].saturating_add(bytes);
        true
    }

    /// Bytes that count against the limit now.
    pub fn spent(&self, now: Time) -> u64 {
        let oldest = self.hour(now).saturating_sub(HOURS as u64 - 1);
        let kept = self.latest.saturating_sub(HOURS as u64 - 1);
        let hours = oldest.max(kept)..=self.latest;
        hours.fold(0, |sum: u64, number| sum.saturating_add(self.written[place(number)]))
    }

    fn hour(&self, now: Time) -> u64 {
        (now.0 / NANOSECONDS_PER_HOUR).max(self.latest)
    }
}

fn place(hour: u64) -> usize {
    (hour % HOURS as u64) as usize
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const HOUR: u64 = NANOSECONDS_PER_HOUR;

    #[test]
    fn what_was_written_counts_for_a_day_and_at_most_an_hour_more() {
        let mut budget = WriteBudget::new(Some(100));
        assert!(budget.take(Time(HOUR / 2), 60));
        assert!(!budget.take(Time(HOUR), 41), "all or none");
        assert!(budget.take(Time(HOUR), 40));
        assert_eq!(budget.spent(Time(24 * HOUR + HOUR / 2)), 100);
        assert!(!budget.take(Time(24 * HOUR + HOUR / 2), 1), "a day ago to the nanosecond");
        assert_eq!(budget.spent(Time(25 * HOUR)), 40);
        assert!(budget.take(Time(25 * HOUR), 60));
        assert_eq!(budget.spent(Time(1000 * HOUR)), 0);
        assert!(budget.take(Time(u64::MAX), 100));
        assert!(!budget.take(Time(0), 1), "time does not run backwards");
    }

    #[test]
    fn no_limit_only_counts_and_a_limit_of_zero_takes_nothing() {
        let mut unlimited = WriteBudget::new(None);
        assert!(unlimited.take(Time(0), u64::MAX) && unlimited.take(Time(0), u64::MAX));
        assert_eq!(unlimited.spent(Time(0)), u64::MAX);
        let mut none = WriteBudget::new(Some(0));
        assert!(none.take(Time(0), 0) && !none.take(Time(0), 1));
    }

    proptest! {
        /// Against a list of all writes: no 24 hours hold more than the limit, and nothing is refused that 25 hours
        /// would have room for.
        #[test]
        fn no_window_of_a_day_holds_more(
            limit in 0u64..1000, writes in prop::collection::vec((0u64..4 * HOUR, 0u64..300), 1..200),
            long_pause in 0u64..60 * HOUR, pause_at in 0usize..200,
        ) {
            let mut budget = WriteBudget::new(Some(limit));
            let mut taken: Vec<(u64, u64)> = Vec::new();
            let mut now = 0;
            for (index, (wait, bytes)) in writes.into_iter().enumerate() {
                now += wait + if index == pause_at { long_pause } else { 0 };
                let within = |span: u64, taken: &[(u64, u64)]| -> u64 {
                    taken.iter().filter(|(at, _)| at + span >= now).map(|(_, bytes)| bytes).sum()
                };
                let (day, hour_more) = (within(24 * HOUR, &taken), within(25 * HOUR, &taken));
                let spent = budget.spent(Time(now));
                prop_assert!(day <= spent && spent <= hour_more, "{} of {} to {}", spent, day, hour_more);
                let done = budget.take(Time(now), bytes);
                prop_assert_eq!(done, spent + bytes <= limit);
                if done {
                    taken.push((now, bytes));
                    prop_assert!(within(24 * HOUR, &taken) <= limit);
                }
            }
        }
    }
}
