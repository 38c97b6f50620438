//! Runs several systems at several rates on as many threads as there are cores, and prints a line for each:
//! `sweep TABLE.json HARDWARE MODEL WORKLOAD SYSTEM,SYSTEM.. RATE,RATE.. [OVERRIDES]`. A rate of 0 is all at once.

use serde_json::{json, Value};
use std::error::Error;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::Mutex;
use std::time::Instant;
use strata_sim::{simulate, Constants, Report, SimulationConfig};

type Failure = Box<dyn Error + Send + Sync>;

fn line(system: &str, rate: &str, report: &Report, took: f64) -> String {
    let prompt = report.prompt_tokens;
    let whole = (prompt.device + prompt.host + prompt.disk + prompt.computed) as f64;
    let [zero, some, most] = report.load_per_compute_at.map(|part| 100.0 * part);
    format!(
        "{system:16} {rate:>5} req/s {:6.3} out/s {:7.2} TTFT {:8.3} p50 {:8.3} p99 {:8.3} stall {:5.1}% busy {:5.1}% \
         dev {:4.1}% host {:4.1}% comp {:4.1}% ratio {zero:3.0}/{some:3.0}/{most:3.0}% steps {:?} refused {} [{took:.1} s]",
        report.requests_per_s,
        report.output_tokens_per_s,
        report.ttft.mean,
        report.ttft.p50,
        report.ttft.p99,
        100.0 * report.prefill_stall_share,
        100.0 * report.device_busy_share,
        100.0 * prompt.device as f64 / whole,
        100.0 * (prompt.host + prompt.disk) as f64 / whole,
        100.0 * prompt.computed as f64 / whole,
        report.steps,
        report.refused,
    )
}

fn main() -> Result<(), Failure> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [table, hardware, model, workload, systems, rates, overrides @ ..] = arguments.as_slice() else {
        return Err("give TABLE.json HARDWARE MODEL WORKLOAD SYSTEMS RATES [OVERRIDES]".into());
    };
    let table = Constants::parse(&std::fs::read_to_string(table)?)?;
    let overrides: Value = serde_json::from_str(overrides.first().map_or("{}", String::as_str))?;
    let mut runs: Vec<(String, String, SimulationConfig)> = Vec::new();
    for system in systems.split(',') {
        for rate in rates.split(',') {
            let mut config = table.simulation(hardware, model, system, workload, &overrides)?;
            let mut load = serde_json::to_value(&config.workload)?;
            let number: f64 = rate.parse()?;
            load["rate"] = if number > 0.0 { json!(number) } else { Value::Null };
            config.workload = serde_json::from_value(load)?;
            runs.push((system.into(), rate.into(), config));
        }
    }
    let next = AtomicUsize::new(0);
    let lines = Mutex::new(vec![String::new(); runs.len()]);
    let threads = std::thread::available_parallelism().map_or(1, |count| count.get());
    std::thread::scope(|scope| {
        for _ in 0..threads {
            scope.spawn(|| loop {
                let index = next.fetch_add(1, Ordering::Relaxed);
                let Some((system, rate, config)) = runs.get(index) else { return };
                let began = Instant::now();
                let text = match simulate(config) {
                    Ok(report) => line(system, rate, &report, began.elapsed().as_secs_f64()),
                    Err(error) => format!("{system:16} {rate:>5} {error}"),
                };
                if let Ok(mut lines) = lines.lock() {
                    lines[index] = text;
                }
            });
        }
    });
    for text in lines.into_inner().unwrap_or_default() {
        println!("{text}");
    }
    Ok(())
}
