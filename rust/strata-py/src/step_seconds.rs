//! What the simulator says that a step takes, so that a fit to a machine's own steps reckons with the same terms.

use crate::error::{Failure, Outcome};
use pyo3::prelude::*;
use serde_json::Value;
use strata_sim::{plain, Hardware, Model, StepRow};

fn parsed(text: &str, what: &str) -> Outcome<Value> {
    let value =
        serde_json::from_str(text).map_err(|error| Failure::Config(format!("{what} is no JSON: {error}")))?;
    Ok(plain(&value))
}

/// Seconds of a step on an idle link; `rows` are (tokens to compute, tokens before them, whether one is sampled).
/// `hardware` is an entry of the table of constants, `model` a Hugging Face config.json. Raises ConfigError.
#[pyfunction]
pub fn step_seconds(hardware: &str, model: &str, rows: Vec<(u64, u64, bool)>, decode: bool) -> Outcome<f64> {
    let hardware: Hardware = serde_json::from_value(parsed(hardware, "the hardware")?)
        .map_err(|error| Failure::Config(format!("the hardware does not fit: {error}")))?;
    let model = Model::from_config(&parsed(model, "the model's config")?, 1)?;
    let row = |(tokens, context, samples)| StepRow { tokens, context, samples };
    let rows: Vec<StepRow> = rows.into_iter().map(row).collect();
    Ok(model.step(&hardware, &rows, decode).total(model.layers))
}
