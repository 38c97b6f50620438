//! One simulation as data: what runs, on what, under which load. The table of constants wraps each number with its unit
//! and source; `plain` takes the numbers out.

use crate::error::SimulationError;
use crate::hardware::Hardware;
use crate::system::System;
use crate::workload::Workload;
use serde::{Deserialize, Serialize};
use serde_json::Value;

fn one() -> u32 {
    1
}

/// Everything that a report depends on.
#[derive(Clone, Debug, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct SimulationConfig {
    /// The machine.
    pub hardware: Hardware,
    /// The model's `config.json`.
    pub model: Value,
    /// Devices that share the model.
    #[serde(default = "one")]
    pub tensor_parallel: u32,
    /// The serving system.
    pub system: System,
    /// The requests.
    pub workload: Workload,
    /// Pages of device, host and disk as a server had them. Without, they follow from the hardware's bytes.
    #[serde(default)]
    pub pages: Option<[u32; 3]>,
    /// Requests that clients keep in flight at most.
    pub max_in_flight: usize,
    /// Whether clients ask for no more tokens than they get, so that Core knows where an answer ends.
    #[serde(default)]
    pub limited_answers: bool,
    /// The seed of everything random.
    #[serde(default)]
    pub seed: u64,
    /// Whether the host holds every first segment of a prompt before the clock starts.
    #[serde(default)]
    pub warm: bool,
    /// Whether the timeline is kept.
    #[serde(default)]
    pub timeline: bool,
    /// Whether the report lists each request.
    #[serde(default)]
    pub list_requests: bool,
    /// Whether Core proves its books after each event: slow, for tests.
    #[serde(default)]
    pub checks: bool,
}

impl SimulationConfig {
    /// Reads a configuration in which any value may stand as `{"value": .., "unit": .., "source": ..}`.
    pub fn from_json(text: &str) -> Result<SimulationConfig, SimulationError> {
        let parsed: Value = serde_json::from_str(text)
            .map_err(|error| SimulationError::config(format!("the configuration is no JSON: {error}")))?;
        SimulationConfig::from_value(&parsed)
    }

    /// As `from_json`.
    pub fn from_value(value: &Value) -> Result<SimulationConfig, SimulationError> {
        serde_json::from_value(plain(value))
            .map_err(|error| SimulationError::config(format!("the configuration does not fit: {error}")))
    }
}

/// A value without the units and sources beside its parts.
pub fn plain(value: &Value) -> Value {
    match value {
        Value::Object(fields) => match (fields.get("value"), fields.get("source")) {
            (Some(inner), Some(_)) => plain(inner),
            _ => Value::Object(fields.iter().map(|(name, inner)| (name.clone(), plain(inner))).collect()),
        },
        Value::Array(items) => Value::Array(items.iter().map(plain).collect()),
        other => other.clone(),
    }
}
