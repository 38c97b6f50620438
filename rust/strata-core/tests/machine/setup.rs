//! What a machine is made of: tiers, policies, faults, and what Core is told of the hardware.

use std::time::Duration;
use strata_control::{Back, Selective, Through, WritePolicy};
use strata_core::{Adaptive, BestEffort, PrefetchPolicy, Timeout, WaitForAll};
use strata_sched::cost::{CostPrior, LinkCost, StepCost};
use strata_sched::{
    Balanced, BalancedOptions, FirstComeFirstServed, LongestPrefixFirst, Policy, Predicted, Ratio,
};
use strata_types::TransferKind;

#[derive(Clone, Debug)]
pub struct Setup {
    pub page_size: usize,
    pub pages: [u32; 3],
    /// Device to host, host to disk.
    pub write: [Write; 2],
    pub prefetch: Prefetch,
    pub staging: u32,
    pub outstanding: usize,
    pub batch_tokens: u32,
    pub fault_percent: u8,
    /// The part of a tier that prefetches may fill.
    pub share_percent: u8,
    pub disk_bytes_per_day: Option<u64>,
    pub speeds: Speeds,
    pub schedule: Schedule,
    /// Deferral from so many transient tokens on.
    pub threshold: u32,
    pub max_decode_stall: Option<Duration>,
    pub page_bytes: u64,
    pub max_running: u32,
}

impl Default for Setup {
    /// All tiers, no faults.
    fn default() -> Setup {
        Setup {
            page_size: 2,
            pages: [40, 40, 40],
            write: [Write::Through; 2],
            prefetch: Prefetch::Adaptive,
            staging: 0,
            outstanding: 2,
            batch_tokens: 64,
            fault_percent: 0,
            share_percent: 60,
            disk_bytes_per_day: None,
            speeds: Speeds::Unknown,
            schedule: Schedule::Fcfs,
            threshold: 100,
            max_decode_stall: None,
            page_bytes: 64,
            max_running: 6,
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Schedule {
    Fcfs,
    Lpm,
    Static,
    Adaptive,
}

impl Schedule {
    pub(super) fn policy(self, threshold: u32) -> Box<dyn Policy> {
        let max_wait = Duration::from_millis(60);
        let options = BalancedOptions { threshold, max_wait, ..BalancedOptions::default() };
        match self {
            Schedule::Fcfs => Box::new(FirstComeFirstServed::new(max_wait)),
            Schedule::Lpm => Box::new(LongestPrefixFirst::new(max_wait)),
            Schedule::Static => Box::new(Balanced::new(Ratio { loaded_per_computed: 0.5 }, options)),
            Schedule::Adaptive => Box::new(Balanced::new(Predicted, options)),
        }
    }
}

/// What Core believes of the hardware.
#[derive(Clone, Copy, Debug)]
pub enum Speeds {
    Unknown,
    /// A load takes longer than to compute.
    SlowHost,
    /// A read takes longer than to compute.
    SlowDisk,
    /// All links are much quicker than computing.
    Fast,
    /// Seconds of a prefill step, of each of its tokens, and of each byte of a load.
    Given {
        per_step: f64,
        per_token: f64,
        per_byte: f64,
    },
}

impl Speeds {
    pub(super) fn prior(self) -> CostPrior {
        let link = |per_byte| LinkCost { latency: 0.0, per_byte };
        let (load, read) = match self {
            Speeds::Unknown => return CostPrior::default(),
            Speeds::SlowHost => (1.0, 1e-9),
            Speeds::SlowDisk => (1e-9, 1.0),
            Speeds::Fast => (1e-9, 1e-9),
            Speeds::Given { per_byte, .. } => (per_byte, 1e-9),
        };
        let (per_step, per_token) = match self {
            Speeds::Given { per_step, per_token, .. } => (per_step, per_token),
            _ => (1e-3, 1e-3),
        };
        let step = StepCost { per_step, per_token, per_pair: 0.0 };
        let mut prior = CostPrior::default();
        prior.prefill = Some(step);
        prior.with_link(TransferKind::Load, link(load)).with_link(TransferKind::Prefetch, link(read))
    }
}

#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Write {
    Through,
    Selective,
    Back,
}

impl Write {
    pub(super) fn policy(self) -> Box<dyn WritePolicy> {
        match self {
            Write::Through => Box::new(Through),
            Write::Selective => Box::new(Selective { accesses: 2 }),
            Write::Back => Box::new(Back),
        }
    }
}

#[derive(Clone, Copy, Debug)]
pub enum Prefetch {
    Adaptive,
    /// As `Adaptive`, with a deadline that nothing reaches.
    Patient,
    BestEffort,
    Wait,
    Timeout,
}

impl Prefetch {
    pub(super) fn policy(self) -> Box<dyn PrefetchPolicy> {
        let limit = Duration::from_millis(30);
        match self {
            Prefetch::Adaptive => Box::new(Adaptive { deadline: limit }),
            Prefetch::Patient => Box::new(Adaptive { deadline: Duration::from_secs(600) }),
            Prefetch::BestEffort => Box::new(BestEffort),
            Prefetch::Wait => Box::new(WaitForAll { patience: limit }),
            Prefetch::Timeout => Box::new(Timeout { base: limit, per_thousand_tokens: limit }),
        }
    }
}
