//! The table of constants: hardware, models, systems and workloads by name, each number with its unit and source. It is
//! data of its own, so that changing one entry changes everything that is drawn from it.

use crate::config::{plain, SimulationConfig};
use crate::error::SimulationError;
use serde_json::{json, Map, Value};

/// Systems that extend one another, at most.
const LONGEST_CHAIN: usize = 16;

/// A table.
#[derive(Clone, Debug)]
pub struct Constants(Value);

impl Constants {
    /// Reads a table.
    pub fn parse(text: &str) -> Result<Constants, SimulationError> {
        let parsed: Value = serde_json::from_str(text).map_err(|error| {
            SimulationError::config(format!("the table of constants is no JSON: {error}"))
        })?;
        Ok(Constants(plain(&parsed)))
    }

    /// The names in a section.
    pub fn names(&self, section: &str) -> Vec<String> {
        let fields = self.0.get(section).and_then(Value::as_object);
        fields.into_iter().flat_map(Map::keys).cloned().collect()
    }

    /// An entry with all that it extends filled in.
    pub fn entry(&self, section: &str, name: &str) -> Result<Value, SimulationError> {
        let mut whole = Map::new();
        let mut next = Some(name.to_string());
        for _ in 0..LONGEST_CHAIN {
            let Some(name) = next.take() else { break };
            let found = self.0.get(section).and_then(|entries| entries.get(&name)).and_then(Value::as_object);
            let fields = found.ok_or_else(|| {
                let known = self.names(section);
                SimulationError::config(format!("{section} {name:?} is not in the table: it has {known:?}"))
            })?;
            for (field, value) in fields {
                match field.as_str() {
                    "extends" => next = value.as_str().map(str::to_string),
                    _ => drop(whole.entry(field.clone()).or_insert_with(|| value.clone())),
                }
            }
        }
        Ok(Value::Object(whole))
    }

    /// A simulation by names. `overrides` is laid over it field by field, as deep as it goes.
    pub fn simulation(
        &self,
        hardware: &str,
        model: &str,
        system: &str,
        workload: &str,
        overrides: &Value,
    ) -> Result<SimulationConfig, SimulationError> {
        let model = self.entry("models", model)?;
        let mut named = self.entry("systems", system)?;
        named["name"] = json!(system);
        let mut whole = json!({
            "hardware": self.entry("hardware", hardware)?,
            "model": model.get("config"),
            "tensor_parallel": model.get("tensor_parallel").cloned().unwrap_or(json!(1)),
            "system": named,
            "workload": self.entry("workloads", workload)?,
            "max_in_flight": self.0.get("clients").and_then(|clients| clients.get("max_in_flight")),
        });
        lay_over(&mut whole, overrides);
        SimulationConfig::from_value(&whole)
    }
}

/// What names the shape of the fields beside it: where it changes, the fields of the other shape go.
const SHAPES: [&str; 2] = ["law", "kind"];

fn lay_over(below: &mut Value, above: &Value) {
    match (below, above) {
        (Value::Object(fields), Value::Object(changes)) => {
            let differs =
                |name: &str| changes.get(name).is_some_and(|change| fields.get(name) != Some(change));
            if SHAPES.iter().any(|name| differs(name)) {
                fields.clear();
            }
            for (name, change) in changes {
                lay_over(fields.entry(name.clone()).or_insert(Value::Null), change);
            }
        }
        (_, Value::Null) => {}
        (below, above) => *below = above.clone(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_change_is_laid_over_field_by_field_and_another_law_replaces_all() {
        let below = json!({"seed": 1, "tokens": {"law": "log_normal", "mean": 5, "sigma": 1}});
        let laid = |change: Value| {
            let mut whole = below.clone();
            lay_over(&mut whole, &change);
            whole
        };
        let wider = json!({"seed": 1, "tokens": {"law": "log_normal", "mean": 5, "sigma": 2}});
        assert_eq!(laid(json!({"tokens": {"sigma": 2}})), wider);
        assert_eq!(laid(json!({"tokens": {"law": "log_normal", "sigma": 2}})), wider);
        let constant = json!({"law": "constant", "mean": 7});
        assert_eq!(laid(json!({"tokens": constant})), json!({"seed": 1, "tokens": constant}));
    }
}
