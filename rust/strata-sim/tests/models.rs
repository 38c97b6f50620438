//! Parameters and KV bytes against what the models' makers state.
#![allow(clippy::unwrap_used)]

mod common;

use strata_sim::{plain, Constants, Hardware, Model, StepRow};

fn model(name: &str, devices: u32) -> Model {
    let entry = Constants::parse(&common::table()).unwrap().entry("models", name).unwrap();
    Model::from_config(&plain(&entry["config"]), devices).unwrap()
}

fn within(found: f64, stated: f64, part: f64) {
    assert!((found / stated - 1.0).abs() < part, "{found:.4e} is not {stated:.4e}");
}

#[test]
fn parameters_are_as_stated() {
    for (name, stated) in [
        ("llama-3.1-8b", 8.03e9),
        ("qwen2.5-14b", 14.77e9),
        ("mistral-24b", 23.57e9),
        ("llama-3.1-70b", 70.55e9),
        ("deepseek-v3", 671e9),
    ] {
        within(model(name, 1).parameters(), stated, 0.005);
        within(model(name, 4).parameters(), stated / 4.0, 0.005);
    }
    within(model("deepseek-v3", 1).active_parameters(), 36.6e9, 0.02);
}

#[test]
fn kv_is_as_large_as_its_heads_or_its_latent() {
    assert_eq!(model("llama-3.1-8b", 1).token_bytes(), 131_072);
    assert_eq!(model("qwen2.5-14b", 1).token_bytes(), 196_608);
    assert_eq!(model("llama-3.1-70b", 4).token_bytes(), 327_680 / 4);
    // Every device holds the whole latent.
    assert_eq!(model("deepseek-v3", 8).token_bytes(), 61 * 576 * 2);
    assert_eq!(model("deepseek-v3", 8).parts, 1);
}

#[test]
fn a_step_is_bound_by_arithmetic_or_by_memory() {
    let entry = Constants::parse(&common::table()).unwrap().entry("hardware", "h200").unwrap();
    let mut hardware: Hardware = serde_json::from_value(entry).unwrap();
    (hardware.prefill_efficiency, hardware.decode_efficiency, hardware.step_overhead_s) = (1.0, 1.0, 0.0);
    let llama = model("llama-3.1-8b", 1);
    let seconds = |row: StepRow, decode| llama.step(&hardware, &[row], decode).total(llama.layers);
    // Linear layers: 2 x 6.98e9 FLOPs a token; attention: 4 x 4096 x 32 layers a pair.
    let prefill = seconds(StepRow { tokens: 8192, context: 0, samples: false }, false);
    let flops = 2.0 * 8192.0 * 6.98e9 + 4.0 * 4096.0 * 32.0 * (8192.0 * 8193.0 / 2.0);
    within(prefill, flops / hardware.peak_flops, 0.01);
    // Weights without the input embedding, and the KV of 10,001 tokens.
    let decode = seconds(StepRow { tokens: 1, context: 10_000, samples: true }, true);
    within(decode, (2.0 * 7.50e9 + 10_001.0 * 131_072.0) / hardware.memory_bandwidth, 0.01);
    let sparse = model("deepseek-v3", 8);
    let few = sparse.step(&hardware, &[StepRow { tokens: 1, context: 1, samples: false }], true);
    let many = sparse.step(&hardware, &[StepRow { tokens: 64, context: 1, samples: false }], true);
    assert!(many.layer > 10.0 * few.layer, "more tokens read more experts: {few:?} {many:?}");
}
