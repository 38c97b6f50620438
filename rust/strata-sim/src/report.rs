//! What a run came to. Equal runs give equal reports, byte for byte.

use crate::clients::{Clients, Record};
use serde::Serialize;
use strata_core::CoreStats;
use strata_types::Time;

/// Mean and quantiles of a set of seconds (or of ratios).
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct Distribution {
    /// How many.
    pub count: usize,
    /// The mean.
    pub mean: f64,
    /// The median.
    pub p50: f64,
    /// Nine in ten are no larger.
    pub p90: f64,
    /// Ninety-nine in a hundred are no larger.
    pub p99: f64,
    /// The largest.
    pub max: f64,
}

impl Distribution {
    /// Of these values; quantiles by nearest rank.
    pub fn of(mut values: Vec<f64>) -> Distribution {
        if values.is_empty() {
            return Distribution::default();
        }
        values.sort_by(f64::total_cmp);
        let rank =
            |part: f64| values[((values.len() as f64 * part).ceil() as usize).clamp(1, values.len()) - 1];
        Distribution {
            count: values.len(),
            mean: values.iter().sum::<f64>() / values.len() as f64,
            p50: rank(0.5),
            p90: rank(0.9),
            p99: rank(0.99),
            max: rank(1.0),
        }
    }
}

/// Prompt tokens by where they came from.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct TokensBySource {
    /// Found on the device.
    pub device: u64,
    /// Loaded from the host.
    pub host: u64,
    /// Read from disk.
    pub disk: u64,
    /// Computed.
    pub computed: u64,
}

/// Seconds in which the device did not compute, by cause.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct Stalls {
    /// Within a prefill step, for a layer's load.
    pub prefill_load_s: f64,
    /// Within a decode step, for a layer's load.
    pub decode_load_s: f64,
    /// Requests were there and nothing was planned.
    pub waiting_s: f64,
    /// No request was there.
    pub empty_s: f64,
}

/// One batch's load beside its compute.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct Batch {
    pub loaded: u64,
    pub computed: u64,
}

/// What was summed up while the run went on.
#[derive(Clone, Debug, Default)]
pub(crate) struct Tally {
    pub stalls: [u64; 2],
    pub busy: [u64; 2],
    pub waiting: u64,
    pub empty: u64,
    pub plans: [u64; 2],
    pub batches: Vec<Batch>,
}

/// One request.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct RequestReport {
    /// Seconds from the start of the run until it was submitted.
    pub submitted_s: f64,
    /// Seconds until its first token.
    pub ttft_s: f64,
    /// Seconds until its last token.
    pub latency_s: f64,
    /// Tokens of its prompt that were computed.
    pub computed: usize,
}

/// The report.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Report {
    /// The system.
    pub system: String,
    /// The hardware.
    pub hardware: String,
    /// The seed.
    pub seed: u64,
    /// Requests that were answered.
    pub finished: usize,
    /// Requests that were refused, or came after one that was.
    pub refused: usize,
    /// Virtual seconds from the start to the last token.
    pub duration_s: f64,
    /// Seconds from submission to the first token.
    pub ttft: Distribution,
    /// As `ttft`, from when the client was ready to submit.
    pub ttft_from_due: Distribution,
    /// Seconds between tokens after the first.
    pub time_per_output_token: Distribution,
    /// Answered requests per second.
    pub requests_per_s: f64,
    /// Generated tokens per second.
    pub output_tokens_per_s: f64,
    /// Prompt tokens by source.
    pub prompt_tokens: TokensBySource,
    /// Loaded tokens per computed token, of each prefill batch.
    pub load_per_compute: Distribution,
    /// The part of the prefill batches whose ratio is 0, at most 200, and at most 500.
    pub load_per_compute_at: [f64; 3],
    /// Seconds of computing in prefill steps.
    pub prefill_busy_s: f64,
    /// Seconds of computing in decode steps.
    pub decode_busy_s: f64,
    /// Seconds without computing, by cause.
    pub stalls: Stalls,
    /// Stalls for loads, of the time of prefill steps.
    pub prefill_stall_share: f64,
    /// Computing, of the whole run.
    pub device_busy_share: f64,
    /// Seconds in which each link moved something: to the device, to the host, disk read, disk written.
    pub link_busy_s: [f64; 4],
    /// Prefill and decode steps.
    pub steps: [u64; 2],
    /// Requests that gave up their pages for others.
    pub preemptions: u64,
    /// Loads that began while their requests waited.
    pub early_loads: u64,
    /// Pages of device, host and disk.
    pub pages: [u32; 3],
    /// Each request, if asked for.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub requests: Vec<RequestReport>,
}

fn seconds(nanoseconds: u64) -> f64 {
    nanoseconds as f64 / 1e9
}

fn between(from: Option<Time>, to: Option<Time>) -> Option<f64> {
    Some(seconds(to?.0 - from?.0))
}

pub(crate) struct Ended<'a> {
    pub system: &'a str,
    pub hardware: &'a str,
    pub seed: u64,
    pub start: Time,
    pub clients: &'a Clients,
    pub tally: &'a Tally,
    pub links: [u64; 4],
    pub before: &'a CoreStats,
    pub after: &'a CoreStats,
    pub lists_requests: bool,
}

impl Report {
    pub(crate) fn of(run: &Ended<'_>) -> Report {
        let records = &run.clients.records;
        let last = records.iter().filter_map(|record| record.finished).max().unwrap_or(run.start);
        let duration_s = seconds(last.0 - run.start.0);
        let per_second = |count: f64| if duration_s > 0.0 { count / duration_s } else { 0.0 };
        let finished = records.iter().filter(|record| record.finished.is_some()).count();
        let values =
            |of: fn(&Record) -> Option<f64>| Distribution::of(records.iter().filter_map(of).collect());
        let prompt_tokens = sum_sources(records);
        let ratios: Vec<f64> = run
            .tally
            .batches
            .iter()
            .map(|batch| batch.loaded as f64 / batch.computed.max(1) as f64)
            .collect();
        let at_most = |most: f64| {
            ratios.iter().filter(|ratio| **ratio <= most).count() as f64 / ratios.len().max(1) as f64
        };
        let [prefill_stall, decode_stall] = run.tally.stalls.map(seconds);
        let [prefill_busy_s, decode_busy_s] = run.tally.busy.map(seconds);
        let output: usize = records.iter().map(|record| record.sampled).sum();
        let share = |part: f64, whole: f64| if whole > 0.0 { part / whole } else { 0.0 };
        Report {
            system: run.system.into(),
            hardware: run.hardware.into(),
            seed: run.seed,
            finished,
            refused: records.len() - finished,
            duration_s,
            ttft: values(|record| between(record.submitted, record.first_token)),
            ttft_from_due: values(|record| between(Some(record.due), record.first_token)),
            time_per_output_token: values(|record| {
                let gaps = record.sampled.checked_sub(1).filter(|gaps| *gaps > 0)?;
                Some(between(record.first_token, record.finished)? / gaps as f64)
            }),
            requests_per_s: per_second(finished as f64),
            output_tokens_per_s: per_second(output as f64),
            prompt_tokens,
            load_per_compute_at: [at_most(0.0), at_most(200.0), at_most(500.0)],
            load_per_compute: Distribution::of(ratios),
            prefill_busy_s,
            decode_busy_s,
            stalls: Stalls {
                prefill_load_s: prefill_stall,
                decode_load_s: decode_stall,
                waiting_s: seconds(run.tally.waiting),
                empty_s: seconds(run.tally.empty),
            },
            prefill_stall_share: share(prefill_stall, prefill_stall + prefill_busy_s),
            device_busy_share: share(prefill_busy_s + decode_busy_s, duration_s),
            link_busy_s: run.links.map(seconds),
            steps: run.tally.plans,
            preemptions: run.after.preemptions - run.before.preemptions,
            early_loads: run.after.early_loads - run.before.early_loads,
            pages: run.after.tiers.map(|tier| tier.capacity),
            requests: if run.lists_requests { list(records, run.start) } else { Vec::new() },
        }
    }
}

fn sum_sources(records: &[Record]) -> TokensBySource {
    let mut sum = TokensBySource::default();
    for record in records {
        sum.device += record.sources.device as u64;
        sum.host += record.sources.host as u64;
        sum.disk += record.sources.disk as u64;
        sum.computed += record.sources.computed as u64;
    }
    sum
}

fn list(records: &[Record], start: Time) -> Vec<RequestReport> {
    let report = |record: &Record| {
        Some(RequestReport {
            submitted_s: between(Some(start), record.submitted)?,
            ttft_s: between(record.submitted, record.first_token)?,
            latency_s: between(record.submitted, record.finished)?,
            computed: record.sources.computed,
        })
    };
    records.iter().filter_map(report).collect()
}
