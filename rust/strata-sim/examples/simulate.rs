//! Runs one simulation. `simulate CONFIG.json` with a whole configuration, or
//! `simulate TABLE.json HARDWARE MODEL SYSTEM WORKLOAD [OVERRIDES]` by names, where the overrides are JSON. The report
//! goes to standard output; with `"timeline": true` the trace goes to `trace.json`.

use std::error::Error;
use strata_sim::{simulate_with, Constants, SimulationConfig};

fn main() -> Result<(), Box<dyn Error>> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let named: Vec<&str> = arguments.iter().map(String::as_str).collect();
    let config = match named.as_slice() {
        [path] => SimulationConfig::from_json(&std::fs::read_to_string(path)?)?,
        [path, hardware, model, system, workload, overrides @ ..] => {
            let table = Constants::parse(&std::fs::read_to_string(path)?)?;
            let overrides = serde_json::from_str(overrides.first().unwrap_or(&"{}"))?;
            table.simulation(hardware, model, system, workload, &overrides)?
        }
        _ => return Err("give CONFIG.json, or TABLE.json HARDWARE MODEL SYSTEM WORKLOAD [OVERRIDES]".into()),
    };
    let (report, timeline) = simulate_with(&config, None)?;
    println!("{}", serde_json::to_string_pretty(&report)?);
    if config.timeline {
        std::fs::write("trace.json", serde_json::to_string(&timeline.trace())?)?;
    }
    Ok(())
}
