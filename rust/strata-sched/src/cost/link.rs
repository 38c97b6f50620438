//! What a transfer over one link costs: `latency + per_byte * bytes`.

use super::fit::Fit;
use super::{seconds, Measured};
use std::time::Duration;

/// Seconds that a transfer costs.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LinkCost {
    /// Seconds per transfer, whatever its size.
    pub latency: f64,
    /// Seconds per byte.
    pub per_byte: f64,
}

impl LinkCost {
    /// Bytes per second; none if transfers take as long whatever their size.
    pub fn bandwidth(&self) -> Option<f64> {
        let bandwidth = 1.0 / self.per_byte;
        bandwidth.is_finite().then_some(bandwidth)
    }

    fn from_coefficients([latency, per_byte]: [f64; 2]) -> LinkCost {
        LinkCost { latency, per_byte }
    }

    fn duration(&self, bytes: u64) -> Duration {
        match bytes {
            0 => Duration::ZERO,
            _ => seconds(self.latency + self.per_byte * bytes as f64),
        }
    }
}

/// Until sizes differ enough to tell, a transfer costs as much extra as 128 KiB: between RAM and SSD.
const PROPORTIONS: [f64; 2] = [131_072.0, 1.0];
/// Sizes at which a prior counts as measured.
const EXAMPLES: [[f64; 2]; 3] = [[1.0, 4096.0], [1.0, 1_048_576.0], [1.0, 67_108_864.0]];

/// The cost of one link's transfers, learnt from measured ones.
#[derive(Clone, Debug)]
pub(super) struct LinkModel {
    fit: Fit<2>,
}

impl LinkModel {
    pub(super) fn new(prior: Option<LinkCost>) -> LinkModel {
        let fit = Fit::new(PROPORTIONS);
        match prior {
            Some(cost) => LinkModel { fit: fit.with_prior([cost.latency, cost.per_byte], &EXAMPLES) },
            None => LinkModel { fit },
        }
    }

    pub(super) fn observe(&mut self, bytes: u64, busy: Duration) {
        if bytes > 0 {
            self.fit.observe([1.0, bytes as f64], busy.as_secs_f64());
        }
    }

    pub(super) fn predict(&self, bytes: u64) -> Option<Duration> {
        self.cost().map(|cost| cost.duration(bytes))
    }

    pub(super) fn cost(&self) -> Option<LinkCost> {
        self.fit.coefficients().map(LinkCost::from_coefficients)
    }

    pub(super) fn measured(&self) -> Measured<LinkCost> {
        Measured::of(&self.fit, LinkCost::from_coefficients)
    }
}
