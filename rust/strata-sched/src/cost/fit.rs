//! Fits `duration = coefficients . features` to a stream of measurements:
//! - coefficients are finite and never negative, so predictions never are and grow with every feature;
//! - errors count relative to the duration, so short measurements weigh as much as long ones;
//! - a few measurements that are far off, in either direction, hardly move the fit; a lasting change replaces what
//!   was measured before it, whichever of the coefficients it concerns;
//! - what the recent measurements leave open stays as it was last known.
//!
//! Deterministic; an observation costs a few microseconds and allocates nothing.

use super::solve::nonnegative;
use super::RelativeError;

/// Measurements that the fit looks at.
const WINDOW: usize = 64;
/// A measurement that is longer or shorter than predicted by this factor, less one, weighs half.
const TOLERANCE: f64 = 0.25;
/// A measurement that is further off than this factor, less one, is a surprise, unless it is usual: less than
/// `UNUSUAL` times the median.
const SURPRISE: f64 = 0.35;
const UNUSUAL: f64 = 3.0;
/// So many surprises are a change, if one fit of the latest measurements explains at least two thirds of them. Fewer
/// may be a burst of bad luck.
const SURPRISES_OF_A_CHANGE: usize = 5;
/// The spans of latest measurements in which a change is looked for: a short one for a change that all
/// measurements feel, longer ones for a change that only some feel (a link's large transfers).
const SPANS: [usize; 5] = [8, 12, 16, 24, 32];
/// The last known coefficients weigh as much as so many measurements.
const MEMORY: f64 = 4.0;
const REWEIGHTINGS: usize = 3;
/// No duration is shorter: clocks are not finer, and ratios stay finite.
const SHORTEST: f64 = 1e-9;
/// No coefficient is larger, so that no sequence of inputs overflows.
const LARGEST: f64 = 1e30;

#[derive(Clone, Copy, Debug)]
struct Sample<const N: usize> {
    features: [f64; N],
    seconds: f64,
}

impl<const N: usize> Sample<N> {
    /// By which factor, less one, it is longer or shorter than predicted.
    fn distance(&self, coefficients: &[f64; N]) -> f64 {
        let predicted = predict(coefficients, &self.features);
        (self.seconds / predicted).max(predicted / self.seconds) - 1.0
    }
}

/// The latest values, at most `WINDOW` of them.
#[derive(Clone, Debug)]
struct Latest<T> {
    values: [T; WINDOW],
    next: usize,
    count: usize,
}

impl<T: Copy> Latest<T> {
    fn new(filler: T) -> Latest<T> {
        Latest { values: [filler; WINDOW], next: 0, count: 0 }
    }

    fn push(&mut self, value: T) {
        self.values[self.next] = value;
        self.next = (self.next + 1) % WINDOW;
        self.count = (self.count + 1).min(WINDOW);
    }

    /// From the newest back, at most `span` of them.
    fn iter(&self, span: usize) -> impl Iterator<Item = &T> {
        (1..=span.min(self.count)).map(|back| &self.values[(self.next + WINDOW - back) % WINDOW])
    }

    fn forget_before(&mut self, span: usize) {
        self.count = self.count.min(span);
    }
}

/// A linear model of durations, in seconds, of `N` features.
#[derive(Clone, Debug)]
pub(super) struct Fit<const N: usize> {
    /// How the coefficients relate to each other as long as measurements do not tell.
    proportions: [f64; N],
    coefficients: Option<[f64; N]>,
    samples: Latest<Sample<N>>,
    /// Relative errors of the predictions made just before each measurement.
    errors: Latest<f64>,
    observations: u64,
    changes: u64,
}

impl<const N: usize> Fit<N> {
    /// Knows nothing yet.
    pub(super) fn new(proportions: [f64; N]) -> Fit<N> {
        Fit {
            proportions,
            coefficients: None,
            samples: Latest::new(Sample { features: [0.0; N], seconds: SHORTEST }),
            errors: Latest::new(0.0),
            observations: 0,
            changes: 0,
        }
    }

    /// Starts from known coefficients, which count as one measurement of each of `examples`.
    pub(super) fn with_prior(mut self, coefficients: [f64; N], examples: &[[f64; N]]) -> Fit<N> {
        let known = coefficients.map(|value| if value.is_finite() { value.clamp(0.0, LARGEST) } else { 0.0 });
        self.coefficients = Some(known);
        for features in examples {
            self.samples.push(Sample { features: *features, seconds: predict(&known, features) });
        }
        self
    }

    pub(super) fn coefficients(&self) -> Option<[f64; N]> {
        self.coefficients
    }

    /// Measurements so far.
    pub(super) fn observations(&self) -> u64 {
        self.observations
    }

    /// Lasting changes that were followed so far.
    pub(super) fn changes(&self) -> u64 {
        self.changes
    }

    /// |predicted - actual| / actual over the latest predictions, each made before its measurement.
    pub(super) fn relative_error(&self) -> Option<RelativeError> {
        let errors = || self.errors.iter(WINDOW).copied();
        Some(RelativeError { median: median(errors())?, p90: percentile(errors(), 90)? })
    }

    /// Learns that something with these features took `seconds`.
    pub(super) fn observe(&mut self, features: [f64; N], seconds: f64) {
        let seconds = seconds.max(SHORTEST);
        if let Some(known) = &self.coefficients {
            self.errors.push((predict(known, &features) - seconds).abs() / seconds);
        }
        self.samples.push(Sample { features, seconds });
        self.observations += 1;
        let known = self.coefficients.unwrap_or(self.proportions);
        let steady = self.refit(&known, WINDOW);
        let coefficients = self.changed(&known, &steady).unwrap_or(steady);
        self.coefficients = Some(coefficients);
    }

    /// The coefficients after a lasting change, if the latest measurements show one; what came before is forgotten.
    fn changed(&mut self, known: &[f64; N], steady: &[f64; N]) -> Option<[f64; N]> {
        if self.surprises(steady, SURPRISE, WINDOW) < SURPRISES_OF_A_CHANGE {
            return None;
        }
        let distances = self.samples.iter(WINDOW).map(|sample| sample.distance(steady));
        let threshold = SURPRISE.max(UNUSUAL * median(distances).unwrap_or(0.0));
        for span in SPANS.into_iter().filter(|span| *span < self.samples.count) {
            let surprises = self.surprises(steady, threshold, span);
            if surprises < SURPRISES_OF_A_CHANGE {
                continue;
            }
            let candidate = self.refit(known, span);
            if self.surprises(&candidate, threshold, span) * 3 <= surprises {
                self.samples.forget_before(span);
                self.changes += 1;
                return Some(candidate);
            }
        }
        None
    }

    fn surprises(&self, coefficients: &[f64; N], threshold: f64, span: usize) -> usize {
        self.samples.iter(span).filter(|sample| sample.distance(coefficients) > threshold).count()
    }

    /// Fits the latest `span` samples by reweighted least squares, from `known` raised or lowered to their level.
    fn refit(&self, known: &[f64; N], span: usize) -> [f64; N] {
        let ratios = self.samples.iter(span).map(|sample| sample.seconds / predict(known, &sample.features));
        let level = median(ratios).unwrap_or(1.0);
        let start = known.map(|value| (value * level).clamp(0.0, LARGEST));
        // The first round trusts all alike, or a fit far from the truth would trust only what agrees with it.
        let all = self.reweighted(&start, &start, span, false);
        (0..REWEIGHTINGS).fold(all, |from, _| self.reweighted(&from, &start, span, true))
    }

    /// One round: weights by `from`, what the samples leave open in the proportions of `known`.
    fn reweighted(&self, from: &[f64; N], known: &[f64; N], span: usize, wary: bool) -> [f64; N] {
        let (mut gram, mut right, mut total) = ([[0.0; N]; N], [0.0; N], 0.0);
        for sample in self.samples.iter(span) {
            let doubt = if wary { sample.distance(from) / TOLERANCE } else { 0.0 };
            let weight = 1.0 / (1.0 + doubt * doubt);
            // Relative to the longer of both: no measurement gets leverage by being far too short.
            let scale = 1.0 / sample.seconds.max(predict(from, &sample.features));
            let row = sample.features.map(|feature| feature * scale);
            for (index, value) in row.iter().enumerate() {
                right[index] += weight * value * sample.seconds * scale;
                for (column, other) in row.iter().enumerate() {
                    gram[index][column] += weight * value * other;
                }
            }
            total += weight;
        }
        let anchor = at_level(known, &gram, &right);
        let pull = MEMORY / total.max(f64::MIN_POSITIVE);
        nonnegative(&gram, &right, &anchor, pull).map(|value| value.clamp(0.0, LARGEST))
    }
}

/// `known` times the one factor that fits best. Without it noise would move what the samples leave open.
fn at_level<const N: usize>(known: &[f64; N], gram: &[[f64; N]; N], right: &[f64; N]) -> [f64; N] {
    let dot = |row: &[f64; N]| -> f64 { row.iter().zip(known).map(|(value, known)| value * known).sum() };
    let square: f64 = gram.iter().zip(known).map(|(row, known)| dot(row) * known).sum();
    let level = dot(right) / square;
    match level.is_finite() {
        true => known.map(|value| (value * level).clamp(0.0, LARGEST)),
        false => *known,
    }
}

fn predict<const N: usize>(coefficients: &[f64; N], features: &[f64; N]) -> f64 {
    let seconds: f64 = coefficients.iter().zip(features).map(|(value, feature)| value * feature).sum();
    seconds.max(SHORTEST)
}

/// The middle one; the lower of two, since what disturbs a measurement makes it longer.
fn median(values: impl Iterator<Item = f64>) -> Option<f64> {
    percentile(values, 50)
}

/// The smallest value that this part of them, in percent, does not exceed.
fn percentile(values: impl Iterator<Item = f64>, percent: usize) -> Option<f64> {
    let (mut sorted, mut count) = ([0.0; WINDOW], 0usize);
    for (place, value) in sorted.iter_mut().zip(values) {
        *place = value;
        count += 1;
    }
    let place = (count * percent).div_ceil(100).checked_sub(1)?;
    Some(*sorted[..count].select_nth_unstable_by(place, f64::total_cmp).1)
}
