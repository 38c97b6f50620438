//! The simulator, by JSON: a configuration goes in, a report comes out, and between the two nothing holds the
//! interpreter's lock but what Python is asked for. Equal configurations give equal text.

use crate::error::{Failure, Outcome};
use crate::gate::{held, released};
use crate::python_order::{PythonOrder, Raised};
use pyo3::prelude::*;
use serde_json::{json, Value};
use std::time::{Duration, Instant};
use strata_sched::{Policy, Ranked};
use strata_sim::{simulate_until, Constants, SimulationConfig, System};

/// How often Python is asked whether to go on.
const WATCH_EVERY: Duration = Duration::from_millis(50);

/// Runs one simulation: `{"report": .., "timeline": ..}`, the timeline as Chrome's trace events if the configuration
/// asks for it, else null. `order` is called with (rows, now in seconds) and answers ids: see `PythonOrder`. `watch` is
/// called without arguments about 20 times a second. What either raises ends the run and is raised; so does
/// KeyboardInterrupt. Raises ConfigError, and StrataError if the run comes to no end.
#[pyfunction]
#[pyo3(signature = (config, order = None, watch = None))]
pub fn simulate(
    py: Python<'_>,
    config: &str,
    order: Option<Py<PyAny>>,
    watch: Option<Py<PyAny>>,
) -> PyResult<String> {
    let raised = Raised::default();
    let outcome = released(py, || -> Outcome<String> {
        let config = SimulationConfig::from_json(config)?;
        let policy = order.map(|order| policy(order, &config.system, &raised)).transpose()?;
        let (report, timeline) = simulate_until(&config, policy, &mut watching(watch, &raised))?;
        let trace = if config.timeline { timeline.trace() } else { Value::Null };
        Ok(json!({"report": written(&report)?, "timeline": trace}).to_string())
    });
    match raised.take() {
        Some(error) => Err(error),
        None => Ok(outcome?),
    }
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

fn policy(order: Py<PyAny>, system: &System, raised: &Raised) -> Outcome<Box<dyn Policy>> {
    let max_wait = Duration::try_from_secs_f64(system.max_wait_s).map_err(|_| {
        Failure::Config(format!("max_wait_s {} is no time: give 0 or more seconds", system.max_wait_s))
    })?;
    let order = PythonOrder::new(order, raised.clone());
    Ok(Box::new(Ranked::new(order, system.deferral_tokens, max_wait)))
}

/// Whether to stop: at once when something was raised, else as Python says from time to time.
fn watching(watch: Option<Py<PyAny>>, raised: &Raised) -> impl FnMut() -> bool + '_ {
    let mut asked = Instant::now();
    move || {
        if !raised.is_set() && asked.elapsed() >= WATCH_EVERY {
            asked = Instant::now();
            let told = held(|py| {
                py.check_signals()?;
                watch.as_ref().map(|watch| watch.call0(py)).transpose()
            });
            told.map_or_else(|error| raised.set(error), drop);
        }
        raised.is_set()
    }
}

fn written(what: &impl serde::Serialize) -> Outcome<Value> {
    serde_json::to_value(what)
        .map_err(|error| Failure::Stopped(format!("it cannot be written as JSON: {error}")))
}
