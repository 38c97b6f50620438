//! Requests given one by one, as a converter wrote them: at their own times, or in their order at a rate.

use super::{poisson, RequestSpec};
use crate::random::Random;
use serde::{Deserialize, Serialize};

/// Requests as data.
#[derive(Clone, Debug, Default, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct Explicit {
    /// The requests.
    pub requests: Vec<RequestSpec>,
    /// Requests per second, by chance, in place of their own times.
    #[serde(default)]
    pub rate: Option<f64>,
    /// Whether the rate is of those that follow none: the others come when their readers have thought.
    #[serde(default)]
    pub rate_of_sessions: bool,
}

impl Explicit {
    /// The requests, in their order.
    pub fn requests(&self, seed: u64) -> Vec<RequestSpec> {
        let mut requests = self.requests.clone();
        let Some(rate) = self.rate else { return requests };
        let comes_by_rate = |request: &RequestSpec| !self.rate_of_sessions || request.after.is_none();
        let arriving = requests.iter().filter(|request| comes_by_rate(request)).count();
        let arrivals = poisson(&mut Random::new(seed, 4), rate, arriving);
        let due = requests.iter_mut().filter(|request| comes_by_rate(request));
        for (request, arrival) in due.zip(arrivals) {
            request.arrival_s = arrival;
        }
        requests
    }
}
