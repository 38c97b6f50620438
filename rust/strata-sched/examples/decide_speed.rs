//! How long a decision takes when every waiting request is loading-bound: the first pass scans all, then the batch
//! fills from those set aside. Half of them share one document, which is then evicted.
//! Run with `cargo run --release -p strata-sched --example decide_speed`.

use std::hint::black_box;
use std::time::{Duration, Instant};
use strata_sched::{
    Adaptive, BalancedOptions, Limits, LoadPrice, LoadRun, Need, Policy, Predicted, Prices, Queue, Standing,
    Static, StepCost, View, Waiting,
};
use strata_types::{RequestId, Time};

const ROUNDS: usize = 2000;

fn standing(index: u64, evicted: bool) -> Standing {
    let shared = index % 2 == 1;
    let node = if shared { 1 } else { 1000 + index };
    let host = if shared && evicted { 0 } else { 20_000 };
    let loads = [LoadRun { node, tokens: host }].into_iter().filter(|run| run.tokens > 0).collect();
    let need = Need { host, disk: 20_000 - host, compute: 30, ..Need::default() };
    Standing { need, pages: 1252, loads, ..Standing::default() }
}

fn sorted_us(mut work: impl FnMut(), rounds: usize) -> Vec<f64> {
    let mut spans: Vec<f64> = (0..rounds)
        .map(|_| {
            let start = Instant::now();
            work();
            start.elapsed().as_secs_f64() * 1e6
        })
        .collect();
    spans.sort_by(f64::total_cmp);
    spans
}

fn measure(policy: &mut dyn Policy, waiting: u64) {
    let mut queue = Queue::new(policy.deferral_threshold());
    for index in 0..waiting {
        queue.push(Time(index), Waiting::new(RequestId(index), Time(index), 0, standing(index, false)));
    }
    let prices = Prices {
        load: Some(LoadPrice { latency: 20e-6, per_token: 10e-6 }),
        prefill: Some(StepCost { per_step: 1e-3, per_token: 280e-6, per_pair: 1e-9 }),
        decode_step: Some(1e-3),
        head_start: 0.0,
    };
    let decodable = [RequestId(u64::MAX)];
    let limits =
        Limits { batch_tokens: 512, max_running: 256, max_decode_stall: Some(Duration::from_millis(500)) };
    let mut decide = |queue: &Queue| {
        let view = View {
            now: Time(waiting),
            waiting: queue,
            prefilling: &[],
            decodable: &decodable,
            running: 1,
            available_pages: 100_000,
            early_pages: 10_000,
            page_size: 16,
            decode_gap: Duration::ZERO,
            prices,
            limits,
        };
        black_box(policy.decide(&view))
    };
    let decision = decide(&queue);
    let spans = sorted_us(|| drop(decide(&queue)), ROUNDS);
    let start = Instant::now();
    for index in (1..waiting).step_by(2) {
        queue.update(RequestId(index), Time(waiting), standing(index, true));
    }
    let update_us = start.elapsed().as_secs_f64() * 1e6 / (waiting / 2) as f64;
    let after = sorted_us(|| drop(decide(&queue)), ROUNDS);
    println!(
        "{:>8} {waiting:>6} waiting: decision p50 {:>6.1} us, p99 {:>6.1} us ({} set aside, {} admitted); update \
         {update_us:.2} us; after the eviction p50 {:>6.1} us, p99 {:>6.1} us",
        policy.name(),
        spans[ROUNDS / 2],
        spans[ROUNDS * 99 / 100],
        decision.counts.set_aside,
        decision.admissions.len(),
        after[ROUNDS / 2],
        after[ROUNDS * 99 / 100],
    );
}

fn main() {
    for waiting in [1_000, 10_000] {
        measure(&mut Static::default(), waiting);
        measure(&mut Adaptive::default(), waiting);
        let without = BalancedOptions { bundles: false, ..BalancedOptions::default() };
        measure(&mut Adaptive::new(Predicted, without), waiting);
        measure(&mut strata_sched::FirstComeFirstServed::default(), waiting);
        measure(&mut strata_sched::LongestPrefixFirst::default(), waiting);
    }
}
