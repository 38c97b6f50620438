//! What holds of every system, whatever its numbers.
#![allow(clippy::unwrap_used)]

mod common;

use common::{config, documents, table};
use serde_json::{json, Value};
use strata_sim::{simulate, simulate_with, Constants, Report, Workload};

const POLICIES: [&str; 4] = ["fcfs", "lpm", "static", "adaptive"];

fn run(value: &Value) -> Report {
    simulate(&config(value)).unwrap()
}

fn sums_up(report: &Report, value: &Value) {
    let workload: Workload = serde_json::from_value(value["workload"].clone()).unwrap();
    let requests = workload.requests(value["seed"].as_u64().unwrap()).unwrap();
    let prompts: usize = requests.iter().map(|request| request.prompt_tokens()).sum();
    let found = report.prompt_tokens;
    assert_eq!((found.device + found.host + found.disk + found.computed) as usize, prompts);
    assert_eq!((report.finished, report.refused), (requests.len(), 0));
    let output: usize = requests.iter().map(|request| request.output).sum();
    assert!((report.output_tokens_per_s * report.duration_s - output as f64).abs() < 1e-6);
}

#[test]
fn every_request_ends_and_every_token_has_a_source() {
    for policy in POLICIES {
        for page_size in [1, 4] {
            let mut value = documents(policy);
            value["system"]["page_size"] = json!(page_size);
            let report = run(&value);
            sums_up(&report, &value);
            assert!(report.prompt_tokens.host > 0, "{policy}: the device holds three of ten");
        }
    }
}

#[test]
fn a_disk_serves_what_the_host_has_no_room_for() {
    for (policy, prefetch) in [("static", "best_effort"), ("adaptive", "adaptive"), ("fcfs", "wait")] {
        let mut value = documents(policy);
        value["hardware"]["host_bytes"] = json!(400_000.0);
        value["hardware"]["disk"] = json!({"bytes": 4e6, "read": 3e6, "write": 3e6, "per_operation_s": 1e-5});
        value["system"]["disk"] = json!(true);
        value["system"]["prefetch_policy"] = json!(prefetch);
        let report = run(&value);
        sums_up(&report, &value);
        assert!(report.prompt_tokens.disk > 0 && report.link_busy_s[2] > 0.0, "{policy}");
    }
}

/// Sixty questions at once about thirty documents, of which the host holds a few and the disk the rest. To compute one
/// takes 40 ms, to read one 4 ms; three fit into the share for those that wait. What has no room now is read later.
#[test]
fn of_a_burst_nobody_computes_what_there_is_no_room_to_read_yet() {
    let computed = |prefetch: &str| {
        let mut value = documents("adaptive");
        value["hardware"]["peak_flops"] = json!(3e8);
        value["hardware"]["host_bytes"] = json!(5e5);
        value["hardware"]["disk"] = json!({"bytes": 4e6, "read": 2e7, "write": 2e7, "per_operation_s": 1e-6});
        value["workload"]["contexts"] = json!(30);
        value["workload"]["queries"] = json!(60);
        value["workload"]["rate"] = json!(null);
        value["warm"] = json!(true);
        value["max_in_flight"] = json!(60);
        value["system"]["disk"] = json!(true);
        value["system"]["prefetch_policy"] = json!(prefetch);
        value["system"]["prefetch_timeout_s"] = json!(60.0);
        let report = run(&value);
        sums_up(&report, &value);
        assert!(report.prompt_tokens.disk > 0);
        report.prompt_tokens.computed
    };
    // What `wait` computes is on no tier.
    let [adaptive, least] = ["adaptive", "wait"].map(computed);
    assert!(adaptive as f64 <= 1.1 * least as f64, "{adaptive} tokens computed, {least} are on no tier");
}

#[test]
fn equal_configurations_give_equal_reports() {
    for policy in POLICIES {
        let mut value = documents(policy);
        value["list_requests"] = json!(true);
        let text = || serde_json::to_string(&run(&value)).unwrap();
        assert_eq!(text(), text(), "{policy}");
        let mut other = value.clone();
        other["seed"] = json!(8);
        assert_ne!(text(), serde_json::to_string(&run(&other)).unwrap());
    }
}

#[test]
fn without_a_hierarchy_what_is_not_on_the_device_is_computed() {
    let mut value = documents("fcfs");
    value["system"]["hierarchy"] = json!(false);
    let report = run(&value);
    sums_up(&report, &value);
    assert_eq!((report.prompt_tokens.host, report.prompt_tokens.disk), (0, 0));
    assert_eq!(report.link_busy_s, [0.0; 4]);
    let with = run(&documents("fcfs"));
    assert!(report.prompt_tokens.computed > with.prompt_tokens.computed);
}

#[test]
fn nothing_is_slower_for_links_that_take_no_time() {
    for policy in POLICIES {
        let value = documents(policy);
        let mut oracle = value.clone();
        oracle["system"]["infinite_bandwidth"] = json!(true);
        let (slow, fast) = (run(&value), run(&oracle));
        assert!(fast.ttft.mean <= slow.ttft.mean, "{policy}: {} and {}", fast.ttft.mean, slow.ttft.mean);
        assert_eq!(fast.stalls.prefill_load_s, 0.0);
    }
}

#[test]
fn clients_keep_to_their_number_in_flight() {
    let mut value = documents("fcfs");
    value["max_in_flight"] = json!(1);
    let report = run(&value);
    sums_up(&report, &value);
    assert!(report.ttft_from_due.mean > report.ttft.mean, "they waited before they submitted");
}

#[test]
fn rounds_wait_for_the_answers_before_them() {
    let mut value = documents("static");
    value["list_requests"] = json!(true);
    value["workload"] = json!({
        "kind": "conversations", "sessions": 5, "rounds": 20, "opening_tokens": {"law": "constant", "mean": 40.0},
        "question_tokens": {"law": "constant", "mean": 8.0}, "output_tokens": {"law": "constant", "mean": 4.0},
        "think_s": {"law": "constant", "mean": 2.0}, "rate": 5.0, "rate_of_sessions": true,
    });
    let report = run(&value);
    sums_up(&report, &value);
    for (round, request) in report.requests.iter().enumerate().skip(5) {
        let before = &report.requests[round - 5];
        assert!((request.submitted_s - before.submitted_s - before.latency_s - 2.0).abs() < 1e-6);
    }
    // What was said before, the last page of it and the last token generated left out, is not computed again.
    assert!(
        report.requests[15..].iter().all(|request| request.computed <= 8 + 4 + 4),
        "{:?}",
        report.requests
    );
}

#[test]
fn a_policy_of_ones_own_takes_the_place_of_the_systems() {
    let value = documents("fcfs");
    let lpm: Box<dyn strata_sched::Policy> = Box::<strata_sched::LongestPrefixFirst>::default();
    let (own, _) = simulate_with(&config(&value), Some(lpm)).unwrap();
    let named = run(&documents("lpm"));
    assert_eq!((own.ttft, own.prompt_tokens), (named.ttft, named.prompt_tokens));
}

#[test]
fn every_entry_of_the_table_is_a_simulation() {
    let table = Constants::parse(&table()).unwrap();
    for hardware in table.names("hardware") {
        for system in table.names("systems").iter().filter(|system| *system != "base") {
            for workload in table.names("workloads") {
                let named =
                    table.simulation(&hardware, "llama-3.1-8b", system, &workload, &Value::Null).unwrap();
                assert_eq!((&named.system.name, &named.hardware.name), (system, &hardware));
                assert!(!named.workload.requests(1).unwrap().is_empty());
            }
        }
    }
    let error = table.simulation("h200", "llama-3.1-8b", "nobody", "loogle", &Value::Null).unwrap_err();
    assert!(error.to_string().contains("nobody") && error.to_string().contains("strata-io"), "{error}");
}
