//! What a queue of watchers costs on this machine: to join it, to be told of a change, to read the new standing.
//! 10,000 requests wait, half of them share one document of 4,000 tokens, which is then evicted; medians over rounds.
//! Run with `cargo run --release -p strata-radix --example watch_speed`.
#![allow(clippy::unwrap_used)]

use std::hint::black_box;
use std::time::Instant;
use strata_radix::{HiRadixTree, TreeConfig};
use strata_types::{GroupId, Namespace, PageId, RequestId, TierId, Token};

const GROUP: GroupId = GroupId(0);
const WAITING: u64 = 10_000;
const DOCUMENT: u32 = 4_000;
const TAIL: u32 = 64;
const ROUNDS: usize = 21;

/// What one round took, in microseconds: a watch (own document, shared document), an evicted page, a collected
/// watcher, a standing, a claim again, a hand-over by follower, an unwatch.
type Spans = [f64; 8];

const NAMES: [&str; 8] = [
    "watch, document of its own",
    "watch, shared document",
    "evict, per page, page by page",
    "take_changed, per watcher",
    "standing, per watcher",
    "claim_again of the document",
    "release to an heir, per follower",
    "unwatch",
];

fn tokens(seed: u64, length: u32) -> Vec<Token> {
    let mut state = seed.wrapping_mul(2) + 1;
    let mut next = || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 40) as u32 % 50_000
    };
    (0..length).map(|_| next()).collect()
}

fn span_us(count: usize, work: impl FnOnce()) -> f64 {
    let start = Instant::now();
    work();
    start.elapsed().as_secs_f64() * 1e6 / count as f64
}

fn round(page_size: u32) -> Spans {
    let name = Namespace::new("", "");
    let config = TreeConfig { page_size, groups: 1, tiers: 3, ghost_pages: 65_536 };
    let mut tree = HiRadixTree::new(config).unwrap();
    let pages = DOCUMENT / page_size;
    let shared = tokens(1, DOCUMENT);
    let slots: Vec<PageId> = (0..pages).map(PageId).collect();
    tree.insert(&name, GROUP, &shared, TierId::DEVICE, &slots, 0).unwrap();
    let half = WAITING as usize / 2;
    // In turn, as a queue fills: one with the shared document, one with its own.
    let prompts: Vec<Vec<Token>> = (0..WAITING)
        .map(|request| match request % 2 {
            0 => [shared.as_slice(), &tokens(request + 2, TAIL)].concat(),
            _ => tokens(request + 2, DOCUMENT / 8),
        })
        .collect();
    let mut watched = [0.0; 2];
    for (request, prompt) in prompts.iter().enumerate() {
        watched[request % 2] += span_us(half, || {
            tree.watch(&name, prompt, RequestId(request as u64)).unwrap();
        });
    }
    black_box(tree.take_changed());
    let evicted = span_us(pages as usize, || {
        for _ in 0..pages {
            assert_eq!(tree.evict(GROUP, TierId::DEVICE, 1).unwrap().len(), 1);
        }
    });
    let mut told = Vec::new();
    let collected = span_us(half, || told = tree.take_changed());
    assert_eq!(told.len(), half);
    let mut unowned = 0;
    let usable = (DOCUMENT + TAIL - 1) / page_size;
    let read = span_us(half, || {
        for request in &told {
            unowned += tree.standing(*request, GROUP, usable).unwrap().unowned as usize;
        }
    });
    assert_eq!(unowned, half * pages as usize);
    let claimed = span_us(1, || {
        tree.claim_again(RequestId(0)).unwrap();
    });
    let handed = span_us(half, || {
        tree.release(RequestId(0), |followers| followers.iter().min().copied()).unwrap();
    });
    tree.check().unwrap();
    let left = span_us(WAITING as usize, || {
        for request in 0..WAITING {
            tree.unwatch(RequestId(request));
        }
    });
    [watched[1], watched[0], evicted, collected, read, claimed, handed, left]
}

fn main() {
    for page_size in [16, 1] {
        let mut rounds: Vec<Spans> = (0..ROUNDS).map(|_| round(page_size)).collect();
        for (index, what) in NAMES.iter().enumerate() {
            rounds.sort_by(|left, right| left[index].total_cmp(&right[index]));
            let (median, most) = (rounds[ROUNDS / 2][index], rounds[ROUNDS - 1][index]);
            println!("page {page_size:>2}  {what:<34} {median:>8.3} us  (slowest round {most:.3})");
        }
    }
}
