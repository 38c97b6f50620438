//! Seeded randomness: PCG-64, whose stream is fixed by its definition, and the few laws that workloads need.

use rand_core::Rng as _;
use rand_pcg::Pcg64;
use serde::{Deserialize, Serialize};

/// A stream of random numbers.
pub struct Random(Pcg64);

impl Random {
    /// Streams of one seed with different numbers are independent.
    pub fn new(seed: u64, stream: u64) -> Random {
        Random(Pcg64::new(u128::from(seed), u128::from(stream)))
    }

    /// Uniform in [0, 1).
    pub fn unit(&mut self) -> f64 {
        (self.0.next_u64() >> 11) as f64 / (1u64 << 53) as f64
    }

    /// Uniform below `count`; 0 for none.
    pub fn below(&mut self, count: usize) -> usize {
        (self.unit() * count as f64) as usize
    }

    /// Exponential with this mean.
    pub fn exponential(&mut self, mean: f64) -> f64 {
        -(1.0 - self.unit()).ln() * mean
    }

    /// Standard normal.
    pub fn normal(&mut self) -> f64 {
        let radius = (-2.0 * (1.0 - self.unit()).ln()).sqrt();
        radius * (std::f64::consts::TAU * self.unit()).cos()
    }

    /// A random order.
    pub fn shuffle<T>(&mut self, items: &mut [T]) {
        for last in (1..items.len()).rev() {
            items.swap(last, self.below(last + 1));
        }
    }
}

/// A law of lengths or times.
#[derive(Clone, Copy, Debug, Deserialize, Serialize)]
#[serde(tag = "law", rename_all = "snake_case", deny_unknown_fields)]
pub enum Law {
    /// Always the mean.
    Constant {
        /// The value.
        mean: f64,
    },
    /// Log-normal with this mean; `sigma` is the deviation of the logarithm.
    LogNormal {
        /// The mean.
        mean: f64,
        /// The deviation of the logarithm.
        sigma: f64,
    },
    /// Exponential.
    Exponential {
        /// The mean.
        mean: f64,
    },
}

impl Law {
    /// One value.
    pub fn draw(&self, random: &mut Random) -> f64 {
        match *self {
            Law::Constant { mean } => mean,
            Law::LogNormal { mean, sigma } => {
                (mean.ln() - sigma * sigma / 2.0 + sigma * random.normal()).exp()
            }
            Law::Exponential { mean } => random.exponential(mean),
        }
    }

    /// As `draw`, as a whole number of at least one.
    pub fn count(&self, random: &mut Random) -> usize {
        self.draw(random).round().max(1.0) as usize
    }

    /// Values whose mean is the law's but for rounding: each draw scaled by what the sample missed.
    pub fn counts(&self, random: &mut Random, how_many: usize) -> Vec<usize> {
        let drawn: Vec<f64> = (0..how_many).map(|_| self.draw(random).max(f64::MIN_POSITIVE)).collect();
        let scale = self.mean() * how_many as f64 / drawn.iter().sum::<f64>();
        drawn.iter().map(|value| (value * scale).round().max(1.0) as usize).collect()
    }

    /// The mean.
    pub fn mean(&self) -> f64 {
        match *self {
            Law::Constant { mean } | Law::LogNormal { mean, .. } | Law::Exponential { mean } => mean,
        }
    }
}
