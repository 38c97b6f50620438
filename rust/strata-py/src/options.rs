//! What a `Runtime` is made with, read off the keyword arguments of its constructor.

use crate::error::{Failure, Outcome};
use crate::memory::LayerHold;
use pyo3::prelude::*;
use std::num::NonZeroU64;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;
use strata_control::{Back, Selective, Through, WritePolicy};
use strata_copy::{BandwidthLimit, NoThrottle, Throttle};
use strata_core::{Adaptive, BestEffort, PrefetchPolicy, Timeout, WaitForAll};
use strata_disk::{DiskConfig, DiskEngine};
use strata_sched::{
    Balanced, BalancedOptions, FirstComeFirstServed, Limits, LongestPrefixFirst, Predicted, Ratio,
};
use strata_types::Fingerprint;

/// Every field is required, so that defaults live in one place: `strata.config`.
#[derive(Clone, FromPyObject)]
#[pyo3(from_item_all)]
pub struct Options {
    pub page_size: u32,
    pub layers: u32,
    pub parts: u32,
    pub token_bytes: u32,
    pub device_pages: u32,
    pub host_pages: u32,
    pub host_pages_most: u32,
    pub disk_path: Option<PathBuf>,
    pub disk_capacity: u64,
    pub fingerprint: [u8; 32],
    pub write_policy: String,
    pub disk_write_policy: String,
    pub selective_accesses: u32,
    pub policy: String,
    pub scheduler_off: Vec<String>,
    pub deferral_tokens: u32,
    pub deferral_factor: f64,
    pub load_ratio: f64,
    pub early_share: f64,
    pub max_wait_s: f64,
    pub max_decode_stall_ms: u64,
    pub batch_tokens: u32,
    pub max_running: u32,
    pub max_waiting: usize,
    pub outstanding_plans: usize,
    pub prefetch_policy: String,
    pub prefetch_timeout_s: f64,
    pub prefetch_timeout_per_1k_s: f64,
    pub prefetch_share: f64,
    pub disk_bytes_per_day: u64,
    pub copy_threads: usize,
    pub disk_threads: usize,
    pub disk_engine: String,
    pub disk_depth: usize,
    pub disk_bandwidth: u64,
    pub load_policy: String,
    pub backup_niceness: u8,
    pub copy_bandwidth: u64,
}

/// How long `--prefetch-policy wait` waits without news: twice the deadline of a disk's I/O.
const DISK_SILENCE: Duration = Duration::from_secs(10);

fn span(flag: &str, value: f64) -> Outcome<Duration> {
    Duration::try_from_secs_f64(value)
        .map_err(|_| Failure::Config(format!("{flag} {value} is no time to wait: use 0 or more seconds")))
}

impl Options {
    /// The digest that pages on disk must carry.
    pub fn fingerprint(&self) -> Fingerprint {
        Fingerprint(self.fingerprint)
    }

    /// A fresh write policy by its name.
    pub fn write_policy(&self, flag: &str, name: &str) -> Outcome<Box<dyn WritePolicy>> {
        match name {
            "back" => Ok(Box::new(Back)),
            "through" => Ok(Box::new(Through)),
            "selective" => Ok(Box::new(Selective { accesses: self.selective_accesses })),
            other => Err(Failure::Config(format!(
                "{flag} {other:?} is unknown: choose back, through or selective"
            ))),
        }
    }

    /// The order of the queue.
    pub fn policy(&self) -> Outcome<Box<dyn strata_sched::Policy>> {
        let max_wait = span("--max-wait-s", self.max_wait_s)?;
        let parts = self.scheduler_parts(max_wait)?;
        match self.policy.as_str() {
            "fcfs" => Ok(Box::new(FirstComeFirstServed::new(max_wait))),
            "lpm" => Ok(Box::new(LongestPrefixFirst::new(max_wait))),
            "static" => {
                let ratio = Ratio { loaded_per_computed: self.load_ratio };
                Ok(Box::new(Balanced::new(ratio, parts)))
            }
            "adaptive" => Ok(Box::new(Balanced::new(Predicted, parts))),
            other => Err(Failure::Config(format!(
                "--policy {other:?} is unknown: choose adaptive, static, lpm or fcfs"
            ))),
        }
    }

    /// The parts of the scheduler that are on.
    fn scheduler_parts(&self, max_wait: Duration) -> Outcome<BalancedOptions> {
        let mut parts =
            BalancedOptions { threshold: self.deferral_tokens, max_wait, ..BalancedOptions::default() };
        for part in &self.scheduler_off {
            if !parts.turn_off(part) {
                return Err(Failure::Config(format!(
                    "--scheduler-off {part:?} is no part: name some of defer, followers, balance, bundles, bubbles, \
                     early-loads, worth, passing, with commas between"
                )));
            }
        }
        Ok(parts)
    }

    /// Bounds of a batch.
    pub fn limits(&self) -> Limits {
        let stall = Duration::from_millis(self.max_decode_stall_ms);
        Limits {
            batch_tokens: self.batch_tokens,
            max_running: self.max_running,
            max_decode_stall: Some(stall).filter(|stall| !stall.is_zero()),
        }
    }

    /// How long a request waits for its prefetch.
    pub fn prefetch_policy(&self) -> Outcome<Box<dyn PrefetchPolicy>> {
        let limit = span("--prefetch-timeout-s", self.prefetch_timeout_s)?;
        match self.prefetch_policy.as_str() {
            "adaptive" => Ok(Box::new(Adaptive { deadline: limit })),
            "best_effort" => Ok(Box::new(BestEffort)),
            "wait" => Ok(Box::new(WaitForAll { patience: DISK_SILENCE })),
            "timeout" => Ok(Box::new(Timeout {
                base: limit,
                per_thousand_tokens: span("--prefetch-timeout-per-1k-s", self.prefetch_timeout_per_1k_s)?,
            })),
            other => Err(Failure::Config(format!(
                "--prefetch-policy {other:?} is unknown: choose adaptive, best_effort, wait or timeout"
            ))),
        }
    }

    /// Whether what the host holds is loaded even where computing would be quicker.
    pub fn always_loads(&self) -> Outcome<bool> {
        match self.load_policy.as_str() {
            "quicker" => Ok(false),
            "always" => Ok(true),
            other => {
                Err(Failure::Config(format!("--load-policy {other:?} is unknown: choose quicker or always")))
            }
        }
    }

    /// What executes the disk's I/O, how deep, and how fast an emulated disk is.
    pub fn apply_to_disk(&self, config: &mut DiskConfig) -> Outcome<()> {
        config.threads = self.disk_threads;
        config.depth = self.disk_depth;
        config.engine = match self.disk_engine.as_str() {
            "auto" => DiskEngine::Auto,
            "io_uring" => DiskEngine::IoUring,
            "threads" => DiskEngine::Threads,
            other => {
                let choices = "choose auto, io_uring or threads";
                return Err(Failure::Config(format!("--disk-engine {other:?} is unknown: {choices}")));
            }
        };
        config.read_bandwidth = NonZeroU64::new(self.disk_bandwidth);
        config.write_bandwidth = NonZeroU64::new(self.disk_bandwidth);
        Ok(())
    }

    /// What slows copies down: a test's hold, an emulated link, or nothing.
    pub fn throttle(&self, hold: Option<&Bound<'_, LayerHold>>) -> Arc<dyn Throttle> {
        if let Some(hold) = hold {
            return hold.get().hold.clone();
        }
        match NonZeroU64::new(self.copy_bandwidth) {
            Some(limit) => Arc::new(BandwidthLimit::new(Some(limit), Some(limit))),
            None => Arc::new(NoThrottle),
        }
    }
}
