//! Times of a three-layer model worked out by hand. A context of 16 tokens lies on the host: four pages, which the link
//! brings in 6 ms, a layer each 2 ms. One token is computed: 0.5 ms before the first layer, 1 ms a layer, 1 ms the head.
#![allow(clippy::unwrap_used)]

mod common;

use common::{config, three_layers};
use serde_json::{json, Value};
use strata_sim::{simulate_with, Report, Track};

fn run(change: impl FnOnce(&mut Value)) -> (Report, Vec<(Track, u64, u64)>) {
    let mut value = three_layers();
    change(&mut value);
    let (report, timeline) = simulate_with(&config(&value), None).unwrap();
    let start = timeline.spans.iter().map(|span| span.from).min().unwrap();
    let of = |track| matches!(track, Track::Compute | Track::Stall | Track::LinkIn);
    let mut spans: Vec<_> = timeline.spans.iter().filter(|span| of(span.track)).collect();
    spans.sort_by_key(|span| (span.track != Track::LinkIn, span.from));
    let in_microseconds = |time: u64| (time - start) / 1000;
    (report, spans.iter().map(|s| (s.track, in_microseconds(s.from), in_microseconds(s.to))).collect())
}

fn close(one: f64, other: f64) {
    assert!((one - other).abs() < 1e-8, "{one} is not {other}");
}

#[test]
fn layers_wait_for_their_own_loads() {
    let (report, spans) = run(|_| {});
    let expected = [
        (Track::LinkIn, 0, 6000),
        (Track::Compute, 0, 500),
        (Track::Stall, 500, 2000),
        (Track::Compute, 2000, 3000),
        (Track::Stall, 3000, 4000),
        (Track::Compute, 4000, 5000),
        (Track::Stall, 5000, 6000),
        (Track::Compute, 6000, 8000),
    ];
    assert_eq!(spans, expected);
    close(report.ttft.mean, 0.008);
    close(report.stalls.prefill_load_s, 0.0035);
    close(report.prefill_busy_s, 0.0045);
    assert_eq!((report.prompt_tokens.host, report.prompt_tokens.computed), (16, 1));
}

#[test]
fn without_overlap_everything_is_loaded_first() {
    let (report, _) = run(|value| value["system"]["overlap"] = json!("none"));
    close(report.ttft.mean, 0.010);
    close(report.stalls.prefill_load_s, 0.0055);
}

#[test]
fn a_copy_that_takes_half_of_the_speed_doubles_compute_beside_it() {
    let (report, spans) = run(|value| value["hardware"]["copies"]["link"]["prefill_share"] = json!(0.5));
    let expected = [
        (Track::LinkIn, 0, 6000),
        (Track::Compute, 0, 1000),
        (Track::Stall, 1000, 2000),
        (Track::Compute, 2000, 4000),
        (Track::Compute, 4000, 6000),
        // The link is quiet now.
        (Track::Compute, 6000, 8000),
    ];
    assert_eq!(spans, expected);
    close(report.stalls.prefill_load_s, 0.001);
}

#[test]
fn pieces_are_paid_for_one_by_one() {
    // 4 pages x 3 layers x K and V = 24 pieces of 0.25 ms beside the 6 ms of their bytes: 12 ms, a layer each 4 ms.
    let (report, _) = run(|value| {
        value["hardware"]["copies"]["link"]["operation"] = json!("piece");
        value["hardware"]["copies"]["link"]["per_operation_s"] = json!(0.00025);
    });
    close(report.ttft.mean, 0.014);
    close(report.link_busy_s[0], 0.012);
}

#[test]
fn infinite_bandwidth_leaves_compute_alone() {
    let (report, _) = run(|value| value["system"]["infinite_bandwidth"] = json!(true));
    close(report.ttft.mean, 0.0045);
    close(report.stalls.prefill_load_s, 0.0);
}

#[test]
fn the_trace_is_what_perfetto_reads() {
    let (_, timeline) = simulate_with(&config(&three_layers()), None).unwrap();
    let trace = timeline.trace();
    let events = trace["traceEvents"].as_array().unwrap();
    let spans = events.iter().filter(|event| event["ph"] == "X");
    assert_eq!(spans.count(), timeline.spans.len());
    assert!(events.iter().any(|event| event["args"]["name"] == "device stalls"));
    let stalled: f64 =
        events.iter().filter(|event| event["tid"] == 1).filter_map(|event| event["dur"].as_f64()).sum();
    close(stalled, 3500.0);
}
