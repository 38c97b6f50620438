//! The policies in the paper's situations and in random ones.

mod golden;
mod naive;
mod properties;
mod queue;
mod ranked;

use crate::*;
use std::time::Duration;
use strata_types::{RequestId, Time};

/// 10 us to load a token, 280 us to compute one: 28 loads hide behind one.
pub(super) fn prices() -> Prices {
    Prices {
        load: Some(LoadPrice { latency: 0.0, per_token: 10e-6 }),
        prefill: Some(StepCost { per_step: 0.0, per_token: 280e-6, per_pair: 0.0 }),
        decode_step: Some(1e-3),
        head_start: 0.0,
    }
}

/// A request that loads one run of its own and computes the rest.
pub(super) fn waiting(id: u64, loads: &[(u64, u32)], compute: u32) -> Waiting {
    let loads: Box<[LoadRun]> = loads.iter().map(|&(node, tokens)| LoadRun { node, tokens }).collect();
    let host = loads.iter().map(|run| run.tokens).sum();
    let need = Need { host, compute, ..Need::default() };
    let pages = (host + compute).div_ceil(16);
    let standing = Standing { need, pages, loads, follows: None, defer_until: None };
    Waiting::new(RequestId(id), Time(id), 0, standing)
}

/// Another request, which follows `owner` for so many tokens until a time.
pub(super) fn follower(id: u64, owner: u64, transient: u32, until: u64) -> Waiting {
    let mut follower = waiting(id, &[], 10);
    follower.standing.need.transient = transient;
    follower.standing.follows = Some(RequestId(owner));
    follower.standing.defer_until = Some(Time(until));
    follower
}

pub(super) fn queue(all: impl IntoIterator<Item = Waiting>) -> Queue {
    let mut queue = Queue::new(Some(100));
    for waiting in all {
        queue.push(Time(0), waiting);
    }
    queue
}

pub(super) fn view(waiting: &Queue) -> View<'_> {
    View {
        now: Time(1000),
        waiting,
        prefilling: &[],
        decodable: &[],
        running: 0,
        available_pages: 100_000,
        early_pages: 0,
        page_size: 16,
        decode_gap: Duration::ZERO,
        prices: prices(),
        limits: Limits { batch_tokens: 512, max_running: 8, max_decode_stall: None },
    }
}

pub(super) fn fixed() -> Static {
    Static::new(Ratio::default(), BalancedOptions::default())
}

pub(super) fn adaptive() -> Adaptive {
    Adaptive::new(Predicted, BalancedOptions::default())
}

pub(super) fn admitted(decision: &Decision) -> Vec<(u64, u32)> {
    decision.admissions.iter().map(|admission| (admission.id.0, admission.tokens)).collect()
}

pub(super) fn ids(decision: &Decision) -> Vec<u64> {
    decision.admissions.iter().map(|admission| admission.id.0).collect()
}

pub(super) fn policies() -> [Box<dyn Policy>; 4] {
    [
        Box::new(FirstComeFirstServed::default()),
        Box::new(LongestPrefixFirst::default()),
        Box::new(fixed()),
        Box::new(adaptive()),
    ]
}
