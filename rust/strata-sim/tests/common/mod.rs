//! Small machines and loads with round numbers.
#![allow(dead_code)]

use serde_json::{json, Value};
use strata_sim::{plain, SimulationConfig};

/// A step of one token after 16 computes each of three layers in 1 ms and the head in 1 ms; a page of four tokens is
/// 3,072 bytes, which the link brings in 1.5 ms.
pub fn three_layers() -> Value {
    let copy = json!({"operation": "layer", "per_operation_s": 0.0, "to_device": 2_048_000.0, "to_host": 2_048_000.0,
                      "prefill_share": 0.0, "decode_share": 0.0});
    json!({
        "hardware": {
            "name": "small", "peak_flops": 61_696_000.0, "memory_bandwidth": 1e30, "prefill_efficiency": 1.0,
            "decode_efficiency": 1.0, "step_overhead_s": 0.0005, "device_bytes": 1_000_000.0, "device_share": 1.0,
            "host_bytes": 1_000_000.0, "copies": {"link": copy},
        },
        "model": {"hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 1, "num_key_value_heads": 1,
                  "intermediate_size": 64, "vocab_size": 482, "torch_dtype": "bfloat16", "tie_word_embeddings": true},
        "system": system("fcfs"),
        "workload": {"kind": "explicit", "requests": [
            {"arrival_s": 0.0, "prompt": [{"id": 1, "tokens": 16}, {"id": 2, "tokens": 1}], "output": 1, "answer": 9},
        ]},
        "max_in_flight": 8, "warm": true, "timeline": true, "checks": true,
    })
}

/// A system that does as it is told.
pub fn system(policy: &str) -> Value {
    json!({
        "name": policy, "page_size": 4, "hierarchy": true, "copy": "link", "overlap": "layers", "merge_loads": true,
        "disk_order": "page_first", "policy": policy, "load_ratio": 100.0, "deferral_tokens": 10,
        "deferral_factor": 2.0, "early_share": 0.1, "max_wait_s": 60.0, "write_policy": "through",
        "disk_write_policy": "through", "selective_accesses": 2, "prefetch_policy": "best_effort",
        "prefetch_timeout_s": 1.0, "prefetch_timeout_per_1k_s": 0.1, "prefetch_share": 0.5, "always_loads": true,
        "outstanding_plans": 1, "batch_tokens": 256, "max_running": 16, "max_decode_stall_ms": 0,
    })
}

/// A hundred questions about ten documents, of which the device holds three.
pub fn documents(policy: &str) -> Value {
    let mut config = three_layers();
    config["system"] = system(policy);
    config["system"]["outstanding_plans"] = json!(2);
    config["hardware"]["device_bytes"] = json!(350_000.0);
    config["hardware"]["host_bytes"] = json!(2_000_000.0);
    config["hardware"]["peak_flops"] = json!(2e9);
    config["workload"] = json!({
        "kind": "documents", "contexts": 10, "queries": 100, "context_tokens": {"law": "constant", "mean": 100.0},
        "question_tokens": {"law": "log_normal", "mean": 8.0, "sigma": 0.5},
        "output_tokens": {"law": "exponential", "mean": 5.0}, "order": "shuffle", "rate": 20.0,
    });
    (config["warm"], config["timeline"], config["seed"]) = (json!(false), json!(false), json!(7));
    config
}

pub fn config(value: &Value) -> SimulationConfig {
    serde_json::from_value(plain(value)).unwrap()
}

pub fn table() -> String {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../python/strata/simulate/data/constants.json");
    std::fs::read_to_string(path).unwrap()
}
