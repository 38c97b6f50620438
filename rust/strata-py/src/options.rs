//! What a `Runtime` is made with, read off the keyword arguments of its constructor.

use crate::error::{Failure, Outcome};
use crate::memory::LayerHold;
use pyo3::prelude::*;
use std::num::NonZeroU64;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;
use strata_control::{Selective, Through, WritePolicy};
use strata_copy::{BandwidthLimit, NoThrottle, Throttle};
use strata_types::Fingerprint;

/// Every field is required, so that defaults live in one place: `strata.config`.
#[derive(FromPyObject)]
#[pyo3(from_item_all)]
pub struct Options {
    pub page_size: u32,
    pub layers: u32,
    pub parts: u32,
    pub token_bytes: u32,
    pub device_pages: u32,
    pub host_pages: u32,
    pub disk_path: Option<PathBuf>,
    pub disk_capacity: u64,
    pub fingerprint: [u8; 32],
    pub write_policy: String,
    pub selective_accesses: u32,
    pub policy: String,
    pub batch_tokens: u32,
    pub max_running: u32,
    pub max_waiting: usize,
    pub outstanding_plans: usize,
    pub prefetch_timeout_s: f64,
    pub copy_threads: usize,
    pub disk_threads: usize,
    pub copy_bandwidth: u64,
}

impl Options {
    /// The digest that pages on disk must carry.
    pub fn fingerprint(&self) -> Fingerprint {
        Fingerprint(self.fingerprint)
    }

    /// A fresh write policy; both edges use the same kind.
    pub fn write_policy(&self) -> Outcome<Box<dyn WritePolicy>> {
        match self.write_policy.as_str() {
            "through" => Ok(Box::new(Through)),
            "selective" => Ok(Box::new(Selective { accesses: self.selective_accesses })),
            other => Err(Failure::Config(format!(
                "--write-policy {other:?} is unknown: choose through or selective"
            ))),
        }
    }

    /// The order of the queue.
    pub fn policy(&self) -> Outcome<Box<dyn strata_sched::Policy>> {
        match self.policy.as_str() {
            "fcfs" => Ok(Box::new(strata_sched::FirstComeFirstServed)),
            other => Err(Failure::Config(format!("--policy {other:?} is unknown: choose fcfs"))),
        }
    }

    /// How long a request waits for its prefetch.
    pub fn prefetch_timeout(&self) -> Outcome<Duration> {
        Duration::try_from_secs_f64(self.prefetch_timeout_s).map_err(|_| {
            let value = self.prefetch_timeout_s;
            Failure::Config(format!("--prefetch-timeout-s {value} is no time to wait: use 0 or more seconds"))
        })
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
