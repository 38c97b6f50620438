//! The simulator, by JSON: a configuration goes in, a report comes out, and between the two nothing holds the
//! interpreter's lock. Equal configurations give equal text.

use crate::error::{Failure, Outcome};
use crate::gate::released;
use pyo3::prelude::*;
use serde_json::{json, Value};
use strata_sim::{simulate_with, Constants, SimulationConfig};

/// Runs one simulation: `{"report": .., "timeline": ..}`, the timeline as Chrome's trace events if the configuration
/// asks for it, else null. Raises ConfigError, and StrataError if it comes to no end.
#[pyfunction]
#[pyo3(signature = (config, policy = None))]
pub fn simulate(py: Python<'_>, config: &str, policy: Option<Py<PyAny>>) -> Outcome<String> {
    if policy.is_some() {
        return Err(Failure::Config("a policy in Python is not built yet: leave it out".into()));
    }
    released(py, || {
        let config = SimulationConfig::from_json(config)?;
        let (report, timeline) = simulate_with(&config, None)?;
        let trace = if config.timeline { timeline.trace() } else { Value::Null };
        Ok(json!({"report": written(&report)?, "timeline": trace}).to_string())
    })
}

/// A simulation by names out of a table of constants, with `overrides` (JSON) laid over it field by field. Raises
/// ConfigError.
#[pyfunction]
pub fn simulation_config(
    table: &str,
    hardware: &str,
    model: &str,
    system: &str,
    workload: &str,
    overrides: &str,
) -> Outcome<String> {
    let overrides: Value = serde_json::from_str(overrides)
        .map_err(|error| Failure::Config(format!("the overrides are no JSON: {error}")))?;
    let config = Constants::parse(table)?.simulation(hardware, model, system, workload, &overrides)?;
    Ok(written(&config)?.to_string())
}

fn written(what: &impl serde::Serialize) -> Outcome<Value> {
    serde_json::to_value(what)
        .map_err(|error| Failure::Stopped(format!("it cannot be written as JSON: {error}")))
}
