//! A serving system as data: page size, way of copying, policies. From it the same Core is made for each.

use crate::error::SimulationError;
use crate::hardware::{CopyMethod, DiskOrder, Hardware};
use crate::model::Model;
use serde::{Deserialize, Serialize};
use std::time::Duration;
use strata_control::{Back, ControlConfig, Selective, Through, WritePolicy};
use strata_core::{Adaptive, BestEffort, CoreConfig, PrefetchPolicy, Timeout, WaitForAll};
use strata_sched::cost::CostPrior;
use strata_sched::{
    Balanced, BalancedOptions, FirstComeFirstServed, Limits, LongestPrefixFirst, Policy, Predicted, Ratio,
};
use strata_types::GroupId;

/// Bytes and pages of one transfer, as the engine cuts them.
const TRANSFER_BYTES: u64 = 24 << 20;
const MOST_TRANSFER_PAGES: u64 = 256;
/// How long an eviction waits for write-back.
const SAVE_PATIENCE: Duration = Duration::from_secs(2);
/// How long `wait` waits without news of a read.
const DISK_SILENCE: Duration = Duration::from_secs(10);

/// When a layer may read what is loaded for it.
#[derive(Clone, Copy, Debug, Deserialize, Serialize, PartialEq, Eq)]
#[serde(rename_all = "snake_case")]
pub enum Overlap {
    /// Once its own KV is there.
    Layers,
    /// Once all layers' KV is there.
    None,
}

/// One system.
#[derive(Clone, Debug, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct System {
    /// The name.
    pub name: String,
    /// Tokens of a page.
    pub page_size: u32,
    /// Whether there is anything below the device.
    pub hierarchy: bool,
    /// Whether the disk is used, where there is one.
    #[serde(default)]
    pub disk: bool,
    /// Which of the hardware's ways to copy.
    pub copy: String,
    /// Links and disk take no time.
    #[serde(default)]
    pub infinite_bandwidth: bool,
    /// When loaded layers may be read.
    pub overlap: Overlap,
    /// Whether loads that begin together bring the same layer of all before the next.
    pub merge_loads: bool,
    /// How pages lie on disk.
    pub disk_order: DiskOrder,
    /// `fcfs`, `lpm`, `static` or `adaptive`.
    pub policy: String,
    /// Parts of the policy that are off: defer, followers, balance, bundles, bubbles, early-loads, worth, passing.
    #[serde(default)]
    pub scheduler_off: Vec<String>,
    /// Loaded tokens per computed one beyond which `static` calls a batch loading-bound.
    pub load_ratio: f64,
    /// Transient tokens that make a delay hit.
    pub deferral_tokens: u32,
    /// Times what computing would take that a follower waits.
    pub deferral_factor: f64,
    /// Part of the device for early loads.
    pub early_share: f64,
    /// Whoever waited longer goes first.
    pub max_wait_s: f64,
    /// `back`, `through` or `selective`, device to host.
    pub write_policy: String,
    /// The same, host to disk.
    pub disk_write_policy: String,
    /// The access at which `selective` copies.
    pub selective_accesses: u32,
    /// `adaptive`, `best_effort`, `wait` or `timeout`.
    pub prefetch_policy: String,
    /// The longest wait of `adaptive`, the base of `timeout`.
    pub prefetch_timeout_s: f64,
    /// What `timeout` adds per thousand tokens.
    pub prefetch_timeout_per_1k_s: f64,
    /// Part of the host for prefetches.
    pub prefetch_share: f64,
    /// Load even where computing is predicted to be quicker.
    pub always_loads: bool,
    /// Plans that may be outstanding.
    pub outstanding_plans: usize,
    /// Tokens of a prefill batch.
    pub batch_tokens: u32,
    /// Requests that run at once.
    pub max_running: u32,
    /// Longest gap between a stream's tokens; 0: no bound.
    pub max_decode_stall_ms: u64,
    /// What is assumed about the system, and where that comes from. Not read.
    #[serde(default)]
    pub notes: Vec<String>,
}

/// Pages and bytes of each tier.
#[derive(Clone, Copy, Debug)]
pub struct Sizes {
    /// Pages of device, host and disk.
    pub pages: [u32; 3],
    /// Bytes of a page.
    pub page_bytes: u64,
}

fn span(name: &str, value: f64) -> Result<Duration, SimulationError> {
    Duration::try_from_secs_f64(value)
        .map_err(|_| SimulationError::config(format!("{name} {value} is no time: give 0 or more seconds")))
}

impl System {
    /// The way of copying that the system uses.
    pub fn copy_method<'a>(&self, hardware: &'a Hardware) -> Result<&'a CopyMethod, SimulationError> {
        hardware.copies.get(&self.copy).ok_or_else(|| {
            let known: Vec<&str> = hardware.copies.keys().map(String::as_str).collect();
            SimulationError::config(format!(
                "system {} copies by {:?}, hardware {} knows {known:?}",
                self.name, self.copy, hardware.name
            ))
        })
    }

    /// Pages of each tier.
    pub fn sizes(&self, hardware: &Hardware, model: &Model) -> Result<Sizes, SimulationError> {
        let page_bytes = model.token_bytes() * u64::from(self.page_size);
        let device = hardware.device_bytes * hardware.device_share - model.weights();
        let host = if self.hierarchy { hardware.host_bytes } else { 0.0 };
        let disk =
            hardware.disk.as_ref().filter(|_| self.hierarchy && self.disk).map_or(0.0, |disk| disk.bytes);
        let pages = [device, host, disk].map(|bytes| (bytes.max(0.0) / page_bytes as f64) as u32);
        if pages[0] < 2 {
            return Err(SimulationError::config(format!(
                "{:.3e} of {:.3e} bytes of {} hold {:.3e} bytes of weights and no page of {page_bytes} bytes: use \
                 more devices",
                hardware.device_bytes * hardware.device_share,
                hardware.device_bytes,
                hardware.name,
                model.weights()
            )));
        }
        Ok(Sizes { pages, page_bytes })
    }

    /// Core as this system runs it. `policy` replaces the order of the queue.
    pub fn core(
        &self,
        sizes: Sizes,
        layers: u32,
        policy: Option<Box<dyn Policy>>,
    ) -> Result<CoreConfig, SimulationError> {
        let transfer = (TRANSFER_BYTES / sizes.page_bytes.max(1)).clamp(1, MOST_TRANSFER_PAGES) as u32;
        let stall = Duration::from_millis(self.max_decode_stall_ms);
        let policy = match policy {
            Some(policy) => policy,
            None => self.policy()?,
        };
        Ok(CoreConfig {
            control: ControlConfig {
                page_size: self.page_size,
                group: GroupId(0),
                layers,
                page_bytes: sizes.page_bytes,
                record_bytes: sizes.page_bytes,
                pages: sizes.pages,
                staging_pages: transfer,
                device_shards: 1,
                backup: self.write_policy(&self.write_policy)?,
                spill: self.write_policy(&self.disk_write_policy)?,
                save_patience: SAVE_PATIENCE,
                disk_bytes_per_day: None,
                transfer_pages: transfer,
                ghost_pages: 2 * sizes.pages[0] as usize,
            },
            policy,
            limits: Limits {
                batch_tokens: self.batch_tokens,
                max_running: self.max_running,
                max_decode_stall: Some(stall).filter(|stall| !stall.is_zero()),
            },
            outstanding_plans: self.outstanding_plans,
            max_waiting: usize::MAX / 2,
            prefetch_policy: self.prefetch_policy()?,
            prefetch_share: self.prefetch_share,
            costs: CostPrior::default(),
            always_loads: self.always_loads,
            early_share: self.early_share,
            deferral_factor: self.deferral_factor,
        })
    }

    fn write_policy(&self, name: &str) -> Result<Box<dyn WritePolicy>, SimulationError> {
        match name {
            "back" => Ok(Box::new(Back)),
            "through" => Ok(Box::new(Through)),
            "selective" => Ok(Box::new(Selective { accesses: self.selective_accesses })),
            other => Err(SimulationError::config(format!(
                "write policy {other:?} is unknown: choose back, through or selective"
            ))),
        }
    }

    fn policy(&self) -> Result<Box<dyn Policy>, SimulationError> {
        let max_wait = span("max_wait_s", self.max_wait_s)?;
        let mut parts =
            BalancedOptions { threshold: self.deferral_tokens, max_wait, ..BalancedOptions::default() };
        for part in &self.scheduler_off {
            if !parts.turn_off(part) {
                return Err(SimulationError::config(format!("scheduler_off {part:?} is no part")));
            }
        }
        match self.policy.as_str() {
            "fcfs" => Ok(Box::new(FirstComeFirstServed::new(max_wait))),
            "lpm" => Ok(Box::new(LongestPrefixFirst::new(max_wait))),
            "static" => Ok(Box::new(Balanced::new(Ratio { loaded_per_computed: self.load_ratio }, parts))),
            "adaptive" => Ok(Box::new(Balanced::new(Predicted, parts))),
            other => Err(SimulationError::config(format!(
                "policy {other:?} is unknown: choose adaptive, static, lpm or fcfs"
            ))),
        }
    }

    fn prefetch_policy(&self) -> Result<Box<dyn PrefetchPolicy>, SimulationError> {
        let limit = span("prefetch_timeout_s", self.prefetch_timeout_s)?;
        match self.prefetch_policy.as_str() {
            "adaptive" => Ok(Box::new(Adaptive { deadline: limit })),
            "best_effort" => Ok(Box::new(BestEffort)),
            "wait" => Ok(Box::new(WaitForAll { patience: DISK_SILENCE })),
            "timeout" => Ok(Box::new(Timeout {
                base: limit,
                per_thousand_tokens: span("prefetch_timeout_per_1k_s", self.prefetch_timeout_per_1k_s)?,
            })),
            other => Err(SimulationError::config(format!(
                "prefetch policy {other:?} is unknown: choose adaptive, best_effort, wait or timeout"
            ))),
        }
    }
}
