//! How long a waiting request is held back for its prefetch, and whether one is worth beginning: pure functions of what
//! is known of the read and of computing instead.

use std::time::Duration;
use strata_types::Time;

/// The part of what computing would take that may be risked at a time, and the least: on a step of a read, and again
/// on a step that is late.
const RISK: (u32, Duration) = (20, Duration::from_millis(20));

/// What may be risked to save so much computing.
pub(crate) fn risk(compute: Duration) -> Duration {
    (compute / RISK.0).max(RISK.1)
}

/// What a policy decides by.
#[derive(Clone, Copy, Debug)]
pub struct PrefetchView {
    /// Now.
    pub now: Time,
    /// When the prefetch began.
    pub since: Time,
    /// Tokens of the prompt.
    pub prompt_tokens: u64,
    /// How long the rest of the read will take, then the load; none if nothing is known of the disk.
    pub read: Option<Duration>,
    /// How long it would take to compute what is still to be read; none if nothing is known of the model.
    pub compute: Option<Duration>,
    /// When the step that is read now should be over, as far as is known.
    pub due: Time,
    /// What may be risked to save computing the whole, from the first page to be read on.
    pub risk: Duration,
}

/// How long a request is held back for its prefetch.
pub trait PrefetchPolicy: Send {
    /// The name that flags and metrics use.
    fn name(&self) -> &'static str;

    /// Until when the request waits from now on; none: it goes on with what is there. Asked when a step begins, and at
    /// each piece of news.
    fn holds_until(&self, view: &PrefetchView) -> Option<Time>;

    /// Whether a prefetch is worth beginning, or going on with.
    fn begins(&self, _view: &PrefetchView) -> bool {
        true
    }
}

/// Never held: the prefetch is cut when the request is scheduled.
#[derive(Debug, Default)]
pub struct BestEffort;

impl PrefetchPolicy for BestEffort {
    fn name(&self) -> &'static str {
        "best_effort"
    }

    fn holds_until(&self, _view: &PrefetchView) -> Option<Time> {
        None
    }
}

/// Held until all is read, for as long as the disk gives signs of life.
#[derive(Debug)]
pub struct WaitForAll {
    /// The longest wait without any news.
    pub patience: Duration,
}

impl PrefetchPolicy for WaitForAll {
    fn name(&self) -> &'static str {
        "wait"
    }

    fn holds_until(&self, view: &PrefetchView) -> Option<Time> {
        Some(view.now + self.patience)
    }
}

/// Held for a time that grows with the prompt.
#[derive(Debug)]
pub struct Timeout {
    /// For any prompt.
    pub base: Duration,
    /// For each thousand tokens of it.
    pub per_thousand_tokens: Duration,
}

impl PrefetchPolicy for Timeout {
    fn name(&self) -> &'static str {
        "timeout"
    }

    fn holds_until(&self, view: &PrefetchView) -> Option<Time> {
        let thousands = view.prompt_tokens as f64 / 1000.0;
        let grown = Duration::try_from_secs_f64(self.per_thousand_tokens.as_secs_f64() * thousands);
        Some(view.since + self.base.saturating_add(grown.unwrap_or(Duration::MAX)))
    }
}

/// Held while reading the rest is predicted to take less time than computing it, each step as long as predicted and
/// what may be risked, all within a deadline.
#[derive(Debug)]
pub struct Adaptive {
    /// The longest hold.
    pub deadline: Duration,
}

impl PrefetchPolicy for Adaptive {
    fn name(&self) -> &'static str {
        "adaptive"
    }

    fn holds_until(&self, view: &PrefetchView) -> Option<Time> {
        let latest = view.since + self.deadline;
        let until = match (view.read, view.compute) {
            (Some(read), Some(compute)) if read >= compute => return None,
            (_, Some(_)) => view.due + view.risk,
            (_, None) => latest,
        };
        Some(until.min(latest))
    }

    fn begins(&self, view: &PrefetchView) -> bool {
        !matches!((view.read, view.compute), (Some(read), Some(compute)) if read >= compute)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    fn view(read: Option<Duration>, compute: Option<Duration>) -> PrefetchView {
        let since = Time(0) + SECOND;
        let risk = compute.map_or(Duration::MAX, risk);
        PrefetchView {
            now: since + SECOND,
            since,
            prompt_tokens: 2000,
            read,
            compute,
            due: since + 2 * SECOND,
            risk,
        }
    }

    #[test]
    fn the_simple_policies_hold_as_their_names_say() {
        let any = view(Some(SECOND), Some(SECOND));
        assert_eq!(BestEffort.holds_until(&any), None);
        assert_eq!(WaitForAll { patience: SECOND }.holds_until(&any), Some(any.now + SECOND));
        let timeout = Timeout { base: SECOND, per_thousand_tokens: SECOND / 2 };
        assert_eq!(timeout.holds_until(&any), Some(any.since + 2 * SECOND));
        let endless = Timeout { base: Duration::MAX, per_thousand_tokens: Duration::MAX };
        assert_eq!(endless.holds_until(&any), Some(Time(u64::MAX)));
    }

    #[test]
    fn adaptive_waits_only_while_reading_is_cheaper() {
        let adaptive = Adaptive { deadline: 5 * SECOND };
        let cheap = view(Some(SECOND), Some(2 * SECOND));
        assert!(adaptive.begins(&cheap));
        assert_eq!(
            adaptive.holds_until(&cheap),
            Some(cheap.now + SECOND + SECOND / 10),
            "a step, and the risk"
        );
        let dear = view(Some(2 * SECOND), Some(2 * SECOND));
        assert!(!adaptive.begins(&dear));
        assert_eq!(adaptive.holds_until(&dear), None);
        let long = view(Some(60 * SECOND), Some(80 * SECOND));
        assert_eq!(adaptive.holds_until(&long), Some(long.since + 5 * SECOND), "within its deadline");
        let unknown = view(None, Some(10 * SECOND));
        assert_eq!(adaptive.holds_until(&unknown), Some(unknown.due + SECOND / 2), "what is risked");
        assert_eq!(adaptive.holds_until(&view(None, None)), Some(unknown.since + 5 * SECOND));
    }
}
