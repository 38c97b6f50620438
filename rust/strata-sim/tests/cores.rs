//! What few cores do otherwise than a GPU: arithmetic and reads one after the other, rows and contexts that cost time of
//! their own, KV in 32 bits, pools of a known size. Worked out by hand.
#![allow(clippy::unwrap_used)]

mod common;

use common::{config, three_layers};
use serde_json::json;
use strata_sim::{simulate, Hardware, Model, StepRow};

/// 3 x 64 x 64 parameters of a layer's MLP and 4 x 64 x 64 of its attention; 482 x 64 of the head.
const LAYER: f64 = 7.0 * 4096.0;
const HEAD: f64 = 482.0 * 64.0;
/// FLOPs of a pair, and bytes of a token's KV in one layer: K and V of 64 numbers.
const PAIR: f64 = 256.0;
const KV: f64 = 2.0 * 64.0 * 4.0;
const FLOPS: f64 = 1e6;
const BANDWIDTH: f64 = 1e7;
const GATHER: [f64; 2] = [1e5, 4e5];

fn parts() -> (Hardware, Model) {
    let mut value = three_layers();
    for (field, number) in [
        ("peak_flops", FLOPS),
        ("memory_bandwidth", BANDWIDTH),
        ("row_overhead_s", 0.25),
        ("prefill_gather_bandwidth", GATHER[0]),
        ("decode_gather_bandwidth", GATHER[1]),
    ] {
        value["hardware"][field] = json!(number);
    }
    value["hardware"]["overlaps_reads"] = json!(false);
    value["model"]["kv_cache_dtype"] = json!("float32");
    value["model"]["torch_dtype"] = json!("float32");
    let hardware = serde_json::from_value(value["hardware"].take()).unwrap();
    (hardware, Model::from_config(&value["model"], 1).unwrap())
}

#[test]
fn arithmetic_reads_rows_and_contexts_add_up() {
    let (hardware, model) = parts();
    let rows = [
        StepRow { tokens: 3, context: 10, samples: true },
        StepRow { tokens: 2, context: 20, samples: false },
    ];
    let pairs = 3.0 * 10.0 + 6.0 + 2.0 * 20.0 + 3.0;
    for (decode, gather) in [(false, GATHER[0]), (true, GATHER[1])] {
        let cost = model.step(&hardware, &rows, decode);
        let linear = 2.0 * 5.0 * LAYER / FLOPS + LAYER * 4.0 / BANDWIDTH;
        let attention = pairs * PAIR / FLOPS + 35.0 * KV / BANDWIDTH + 30.0 * KV / gather;
        let head = 2.0 * HEAD / FLOPS + HEAD * 4.0 / BANDWIDTH;
        for (found, expected) in
            [(cost.overhead, 0.0005 + 2.0 * 0.25), (cost.layer, linear + attention), (cost.head, head)]
        {
            assert!((found / expected - 1.0).abs() < 1e-12, "{found} is not {expected}");
        }
    }
}

#[test]
fn kv_may_be_wider_than_sixteen_bits() {
    let (_, wide) = parts();
    let narrow = Model::from_config(&three_layers()["model"], 1).unwrap();
    assert_eq!((wide.token_bytes(), narrow.token_bytes()), (3 * KV as u64, 3 * KV as u64 / 2));
    let mut unknown = three_layers()["model"].take();
    unknown["kv_cache_dtype"] = json!("int3");
    let error = Model::from_config(&unknown, 1).unwrap_err().to_string();
    assert!(error.contains("int3"), "{error}");
}

#[test]
fn pools_are_as_large_as_told() {
    let mut value = three_layers();
    value["pages"] = json!([9, 40, 0]);
    assert_eq!(simulate(&config(&value)).unwrap().pages, [9, 40, 0]);
}

#[test]
fn no_step_follows_an_answer_whose_end_is_known() {
    let steps = |limited: bool| {
        let mut value = three_layers();
        value["system"]["outstanding_plans"] = json!(2);
        value["workload"]["requests"][0]["output"] = json!(3);
        value["limited_answers"] = json!(limited);
        let report = simulate(&config(&value)).unwrap();
        assert_eq!((report.finished, report.steps[0]), (1, 1));
        report.steps[1]
    };
    assert_eq!((steps(true), steps(false)), (2, 3));
}
