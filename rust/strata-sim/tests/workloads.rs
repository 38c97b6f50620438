//! Generators keep to what they promise.
#![allow(clippy::unwrap_used)]

mod common;

use serde_json::Value;
use strata_sim::workload::{shared_within, RequestSpec};
use strata_sim::{Constants, Law, Random, Workload};

fn workload(name: &str) -> Vec<RequestSpec> {
    let table = Constants::parse(&common::table()).unwrap();
    table
        .simulation("h200", "llama-3.1-8b", "strata", name, &Value::Null)
        .unwrap()
        .workload
        .requests(3)
        .unwrap()
}

fn means(requests: &[RequestSpec]) -> (f64, f64) {
    let count = requests.len() as f64;
    let prompts: usize = requests.iter().map(RequestSpec::prompt_tokens).sum();
    let outputs: usize = requests.iter().map(|request| request.output).sum();
    (prompts as f64 / count, outputs as f64 / count)
}

#[test]
fn lengths_have_the_published_means() {
    for (name, count, prompt, output) in [
        ("loogle", 2410, 21_613.0, 15.6),
        ("narrativeqa", 1461, 54_797.0, 13.0),
        ("reviewmt", 1092, 17_708.0, 208.3),
        ("sharegpt", 4000, 680.9, 260.9),
    ] {
        let requests = workload(name);
        let (prompts, outputs) = means(&requests);
        assert_eq!(requests.len(), count);
        assert!((prompts / prompt - 1.0).abs() < 0.02, "{name}: {prompts} tokens in");
        assert!((outputs / output - 1.0).abs() < 0.05, "{name}: {outputs} tokens out");
    }
}

#[test]
fn laws_have_their_means() {
    let mut random = Random::new(1, 1);
    for law in [
        Law::Constant { mean: 7.0 },
        Law::LogNormal { mean: 7.0, sigma: 0.6 },
        Law::Exponential { mean: 7.0 },
    ] {
        let mean = (0..20_000).map(|_| law.draw(&mut random)).sum::<f64>() / 20_000.0;
        assert!((mean - 7.0).abs() < 0.2, "{law:?}: {mean}");
    }
}

#[test]
fn orders_set_the_distance_between_questions_about_one_document() {
    let about = |order: &str| {
        let value = serde_json::json!({
            "kind": "documents", "contexts": 5, "queries": 20, "context_tokens": {"law": "constant", "mean": 9.0},
            "question_tokens": {"law": "constant", "mean": 3.0}, "output_tokens": {"law": "constant", "mean": 2.0},
            "order": order, "rate": 1.0,
        });
        let requests = serde_json::from_value::<Workload>(value).unwrap().requests(1).unwrap();
        requests.iter().map(|request| request.prompt[0].id).collect::<Vec<_>>()
    };
    let changes = |ids: &[u64]| ids.windows(2).filter(|pair| pair[0] != pair[1]).count();
    assert_eq!(changes(&about("minimum")), 4);
    let maximum = about("maximum");
    assert!((5..20).all(|query| maximum[query] == maximum[query - 5]) && changes(&maximum) == 19);
    assert!((5..19).contains(&changes(&about("shuffle"))));
}

#[test]
fn equal_segments_are_equal_tokens_and_answers_come_back_in_prompts() {
    let requests = workload("reviewmt");
    let (index, follower) = requests
        .iter()
        .enumerate()
        .find_map(|(index, request)| Some((index, request.after?.request)))
        .unwrap();
    let (first, second) = (&requests[follower], &requests[index]);
    let mut known = first.tokens();
    known.extend((0..first.output).map(|place| first.answer_token(place)));
    assert_eq!(second.tokens()[..known.len()], known);
    let other = requests.iter().find(|request| request.prompt[0].id != first.prompt[0].id).unwrap();
    assert!(other.tokens().iter().zip(&known).filter(|(one, other)| one == other).count() < 2);
}

#[test]
fn traces_keep_blocks_lengths_and_times() {
    let value = serde_json::json!({
        "kind": "trace", "time_scale": 0.5, "records": [
            {"timestamp": 0, "input_length": 1500, "output_length": 10, "hash_ids": [1, 2, 3]},
            {"timestamp": 4000, "input_length": 1300, "output_length": 0, "hash_ids": [1, 2, 4]},
        ],
    });
    let requests = serde_json::from_value::<Workload>(value).unwrap().requests(0).unwrap();
    let lengths: Vec<usize> = requests.iter().map(RequestSpec::prompt_tokens).collect();
    assert_eq!((lengths.as_slice(), requests[1].arrival_s, requests[1].output), (&[1500, 1300][..], 2.0, 1));
    let (first, second) = (requests[0].tokens(), requests[1].tokens());
    assert_eq!(first[..1024], second[..1024]);
    assert_ne!(first[1024], second[1024]);
}

#[test]
fn tool_agents_share_as_they_are_calibrated_to() {
    let shared = shared_within(&workload("tool-agent"), 6000, 1.0);
    assert!((shared - 0.38).abs() < 0.02, "{shared} of the requests share 6k tokens within a second");
}

#[test]
fn requests_given_one_by_one_keep_their_times_or_come_at_a_rate() {
    let mut value = serde_json::json!({
        "kind": "explicit",
        "requests": [
            {"arrival_s": 1.0, "prompt": [{"id": 1, "tokens": 5}], "output": 2, "answer": 10},
            {"arrival_s": 2.0, "prompt": [{"id": 2, "tokens": 5}], "output": 2, "answer": 11},
            {"arrival_s": 0.0, "after": {"request": 0, "think_s": 3.0},
             "prompt": [{"id": 1, "tokens": 5}, {"id": 10, "tokens": 2}], "output": 2, "answer": 12},
        ],
    });
    let arrivals = |value: &Value| -> Vec<f64> {
        let workload: Workload = serde_json::from_value(value.clone()).unwrap();
        workload.requests(7).unwrap().iter().map(|request| request.arrival_s).collect()
    };
    assert_eq!(arrivals(&value), [1.0, 2.0, 0.0]);

    value["rate"] = serde_json::json!(4.0);
    let at_rate = arrivals(&value);
    assert!(at_rate[0] > 0.0 && at_rate[0] < at_rate[1] && at_rate[1] < at_rate[2]);
    value["rate"] = serde_json::json!(8.0);
    for (slow, fast) in at_rate.iter().zip(arrivals(&value)) {
        assert!((slow / fast - 2.0).abs() < 1e-9, "twice the rate is half the time: {slow} and {fast}");
    }

    value["rate_of_sessions"] = serde_json::json!(true);
    let of_sessions = arrivals(&value);
    assert!(of_sessions[0] < of_sessions[1]);
    assert_eq!(of_sessions[2], 0.0, "a later round comes when its reader has thought");
}
