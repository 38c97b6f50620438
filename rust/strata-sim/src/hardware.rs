//! What a machine can do: plain data, no constant of its own. Numbers are of one device and its links.

use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// One device, its host's share and its disk's share.
#[derive(Clone, Debug, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct Hardware {
    /// The name.
    pub name: String,
    /// Dense FLOP/s of one device at the model's precision.
    pub peak_flops: f64,
    /// Bytes per second of device memory.
    pub memory_bandwidth: f64,
    /// The part of `peak_flops` that a step bound by arithmetic reaches.
    pub prefill_efficiency: f64,
    /// The part of `memory_bandwidth` that a step bound by memory reaches.
    pub decode_efficiency: f64,
    /// Seconds that a step takes beside its arithmetic.
    pub step_overhead_s: f64,
    /// Whether reading weights and keys hides behind arithmetic, or arithmetic behind it. Else a step takes both, one
    /// after the other, as on few cores that share one memory.
    #[serde(default = "yes")]
    pub overlaps_reads: bool,
    /// Seconds of each row beside its arithmetic.
    #[serde(default)]
    pub row_overhead_s: f64,
    /// Bytes per second at which prefill brings the context of a row together before attending to it; 0: in no time.
    #[serde(default)]
    pub prefill_gather_bandwidth: f64,
    /// The same in decode.
    #[serde(default)]
    pub decode_gather_bandwidth: f64,
    /// Bytes of device memory.
    pub device_bytes: f64,
    /// The part of `device_bytes` for weights and KV together.
    pub device_share: f64,
    /// Bytes of host memory for KV.
    pub host_bytes: f64,
    /// Ways to copy between host and device, by name.
    pub copies: BTreeMap<String, CopyMethod>,
    /// The disk, if there is one.
    #[serde(default)]
    pub disk: Option<Disk>,
}

fn yes() -> bool {
    true
}

/// What a copy is issued by.
#[derive(Clone, Copy, Debug, Deserialize, Serialize, PartialEq, Eq)]
#[serde(rename_all = "snake_case")]
pub enum Operation {
    /// One operation per page, layer and part.
    Piece,
    /// One per page.
    Page,
    /// One per layer of a transfer.
    Layer,
}

/// A way to copy between host and device.
#[derive(Clone, Debug, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct CopyMethod {
    /// What is paid for one by one.
    pub operation: Operation,
    /// Seconds of each operation, one after the other.
    pub per_operation_s: f64,
    /// Bytes per second, host to device.
    pub to_device: f64,
    /// Bytes per second, device to host.
    pub to_host: f64,
    /// The part of a prefill step's speed that a copy under way takes.
    pub prefill_share: f64,
    /// The part of a decode step's speed that a copy under way takes.
    pub decode_share: f64,
}

/// A disk.
#[derive(Clone, Debug, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct Disk {
    /// Bytes for KV.
    pub bytes: f64,
    /// Bytes per second read.
    pub read: f64,
    /// Bytes per second written.
    pub write: f64,
    /// Seconds of each operation beyond its bytes, at the depth that the engine keeps.
    pub per_operation_s: f64,
}

/// How pages lie on the disk.
#[derive(Clone, Copy, Debug, Deserialize, Serialize, PartialEq, Eq)]
#[serde(rename_all = "snake_case")]
pub enum DiskOrder {
    /// A page is one stretch: one operation per page.
    PageFirst,
    /// A page is one piece per layer and part: an operation for each.
    LayerFirst,
}
