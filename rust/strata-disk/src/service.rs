//! In service or out of it, and when a disk that is out is tried: after a first wait, then after waits that double up to
//! a last one. A disk that soon fails again goes on where its waits had ended.

use std::time::{Duration, Instant};

/// Whether the disk is used. Knows no clock: it is told what time it is.
#[derive(Debug)]
pub(crate) struct Service {
    first_wait: Duration,
    last_wait: Duration,
    /// Before the next trial, or before the next one after the next time out.
    wait: Duration,
    /// Why, and when the disk is tried, while it is out.
    out: Option<(String, Instant)>,
    came_back: Option<Instant>,
}

impl Service {
    pub fn new(first_wait: Duration, last_wait: Duration) -> Service {
        let last_wait = last_wait.max(first_wait);
        Service { first_wait, last_wait, wait: first_wait, out: None, came_back: None }
    }

    /// Takes the disk out; false if it was out.
    pub fn take_out(&mut self, reason: String, now: Instant) -> bool {
        if self.out.is_some() {
            return false;
        }
        let held = self.came_back.map(|at| now.saturating_duration_since(at));
        self.wait = match held {
            Some(held) if held < self.last_wait => (self.wait * 2).min(self.last_wait),
            _ => self.first_wait,
        };
        self.out = Some((reason, now + self.wait));
        true
    }

    pub fn is_trial_due(&self, now: Instant) -> bool {
        self.out.as_ref().is_some_and(|(_, due)| *due <= now)
    }

    pub fn trial_failed(&mut self, reason: &str, now: Instant) {
        self.wait = (self.wait * 2).min(self.last_wait);
        if let Some(out) = &mut self.out {
            *out = (format!("the last trial failed: {reason}"), now + self.wait);
        }
    }

    /// Takes the disk back; false if it was not out.
    pub fn take_back(&mut self, now: Instant) -> bool {
        self.came_back = Some(now);
        self.out.take().is_some()
    }

    /// Why it is out, if it is.
    pub fn out_of_service(&self, now: Instant) -> Option<String> {
        let (reason, due) = self.out.as_ref()?;
        let left = due.saturating_duration_since(now).as_secs_f64();
        Some(format!("{reason}; it is tried again in {left:.0} s"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn waits_double_and_start_anew_once_the_disk_has_held() {
        let seconds = Duration::from_secs;
        let begun = Instant::now();
        let mut service = Service::new(seconds(1), seconds(60));
        assert!(service.take_out("EIO".into(), begun) && !service.take_out("EIO".into(), begun));
        let mut now = begun;
        for wait in [1, 2, 4, 8, 16, 32, 60, 60] {
            assert!(!service.is_trial_due(now + seconds(wait) - Duration::from_millis(1)));
            now += seconds(wait);
            assert!(service.is_trial_due(now), "after {wait} s");
            service.trial_failed("EIO", now);
        }
        assert!(service.out_of_service(now).is_some_and(|reason| reason.contains("EIO")));
        assert!(service.take_back(now) && !service.take_back(now) && service.out_of_service(now).is_none());
        service.take_out("EIO".into(), now + seconds(5));
        assert!(!service.is_trial_due(now + seconds(64)), "it soon failed again");
        service.take_back(now + seconds(70));
        service.take_out("EIO".into(), now + seconds(200));
        assert!(service.is_trial_due(now + seconds(201)), "it had held for a while");
    }
}
