//! How fast the tree is on this machine: match + unpin and insert against memcmp of the same tokens, medians.
//! Run with `cargo run --release -p strata-radix --example tree_speed`.
#![allow(clippy::unwrap_used)]

use std::hint::black_box;
use std::time::Instant;
use strata_radix::{HiRadixTree, TreeConfig};
use strata_types::{GroupId, Namespace, PageId, TierId, Token};

const GROUP: GroupId = GroupId(0);

fn median_us(rounds: usize, mut work: impl FnMut(usize)) -> f64 {
    let mut spans: Vec<f64> = (0..rounds)
        .map(|round| {
            let start = Instant::now();
            work(round);
            start.elapsed().as_secs_f64() * 1e6
        })
        .collect();
    spans.sort_by(f64::total_cmp);
    spans[rounds / 2]
}

fn document(seed: u32, tokens: usize) -> Vec<Token> {
    let mut state = u64::from(seed) * 2 + 1;
    let mut next = || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 40) as u32 % 50_000
    };
    (0..tokens).map(|_| next()).collect()
}

fn tree(page_size: u32) -> HiRadixTree {
    HiRadixTree::new(TreeConfig { page_size, groups: 1, tiers: 3, ghost_pages: 65_536 }).unwrap()
}

fn insert(tree: &mut HiRadixTree, name: &Namespace, tokens: &[Token], next: &mut u32) {
    let pages = (tokens.len() / tree.page_size()) as u32;
    let slots: Vec<PageId> = (*next..*next + pages).map(PageId).collect();
    *next += pages;
    tree.insert(name, GROUP, tokens, TierId::DEVICE, &slots, 0).unwrap();
}

fn measure(page_size: u32, length: usize, documents: usize) {
    let name = Namespace::new("", "");
    let mut tree = tree(page_size);
    let mut next = 0;
    for seed in 0..documents as u32 {
        insert(&mut tree, &name, &document(seed, length), &mut next);
    }
    // The query is the last one inserted; every document of the cold figure has fallen out of the caches.
    let query = document(documents as u32 - 1, length);
    let copy = query.clone();
    let mut out = Vec::with_capacity(length);
    let rounds = if length > 50_000 { 301 } else { 2001 };
    let memcmp = median_us(rounds, |_| {
        black_box(black_box(&query) == black_box(&copy));
    });
    let matched = median_us(rounds, |_| {
        out.clear();
        let pin = tree.match_into(&name, GROUP, &query, TierId::DEVICE, &mut out).unwrap();
        tree.unpin(pin).unwrap();
    });
    assert_eq!(out.len(), length / page_size as usize);
    let fresh: Vec<Vec<Token>> = (0..64).map(|seed| document(1_000_000 + seed, length)).collect();
    let slots: Vec<Vec<PageId>> = (0..64u32)
        .map(|index| {
            let first = next + index * (length as u32 / page_size);
            (first..first + length as u32 / page_size).map(PageId).collect()
        })
        .collect();
    let inserted = median_us(64, |round| {
        tree.insert(&name, GROUP, &fresh[round], TierId::DEVICE, &slots[round], 0).unwrap();
    });
    let recycled = measure_recycled(page_size, &fresh);
    tree.check().unwrap();
    println!(
        "page {page_size:>2}  {length:>6} tokens  tree {:>8}  memcmp {memcmp:>7.2} us  match+unpin {matched:>7.2} us  \
         insert {inserted:>7.2} us, into recycled memory {recycled:>7.2} us",
        documents * length
    );
}

/// Inserts when the tree is as large as it gets: what an eviction has freed is there to be used again.
fn measure_recycled(page_size: u32, fresh: &[Vec<Token>]) -> f64 {
    let name = Namespace::new("", "");
    let config = TreeConfig { page_size, groups: 1, tiers: 3, ghost_pages: 0 };
    let mut tree = HiRadixTree::new(config).unwrap();
    let slots: Vec<PageId> = (0..fresh[0].len() as u32 / page_size).map(PageId).collect();
    let mut spans: Vec<f64> = (0..640)
        .map(|round| {
            let start = Instant::now();
            tree.insert(&name, GROUP, &fresh[round % 64], TierId::DEVICE, &slots, 0).unwrap();
            let span = start.elapsed().as_secs_f64() * 1e6;
            tree.evict(GROUP, TierId::DEVICE, usize::MAX).unwrap();
            span
        })
        .collect();
    spans.sort_by(f64::total_cmp);
    spans[320]
}

fn measure_cold(page_size: u32, length: usize, documents: usize) {
    let name = Namespace::new("", "");
    let mut tree = tree(page_size);
    let mut next = 0;
    let all: Vec<Vec<Token>> = (0..documents as u32).map(|seed| document(seed, length)).collect();
    for tokens in &all {
        insert(&mut tree, &name, tokens, &mut next);
    }
    let mut out = Vec::with_capacity(length);
    let matched = median_us(documents * 3, |round| {
        out.clear();
        let query = &all[round * 7919 % documents];
        let pin = tree.match_into(&name, GROUP, query, TierId::DEVICE, &mut out).unwrap();
        tree.unpin(pin).unwrap();
    });
    println!("page {page_size:>2}  {length:>6} tokens  {documents} documents in turn: match+unpin {matched:>7.2} us");
}

fn measure_eviction(page_size: u32, length: usize, documents: usize) {
    let name = Namespace::new("", "");
    let mut tree = tree(page_size);
    let mut next = 0;
    for seed in 0..documents as u32 {
        insert(&mut tree, &name, &document(seed, length), &mut next);
    }
    let start = Instant::now();
    let mut pages = 0;
    loop {
        let evicted = tree.evict(GROUP, TierId::DEVICE, 32).unwrap().len();
        if evicted == 0 {
            break;
        }
        pages += evicted;
    }
    let each = start.elapsed().as_secs_f64() * 1e9 / pages as f64;
    println!("page {page_size:>2}  {length:>6} tokens  evict by 32: {each:.0} ns a page ({pages} pages)");
}

fn measure_generation(page_size: u32, tokens: usize) {
    let name = Namespace::new("", "");
    let mut tree = tree(page_size);
    let mut next = 0;
    let all = document(7, tokens);
    let prompt = tokens / 2;
    insert(&mut tree, &name, &all[..prompt], &mut next);
    let found = tree.match_prefix(&name, GROUP, &all).unwrap();
    let mut pin = tree.pin(found.handle, TierId::DEVICE).unwrap();
    let size = page_size as usize;
    let start = Instant::now();
    for page in prompt / size..tokens / size {
        let slots = [PageId(next)];
        next += 1;
        let part = &all[page * size..(page + 1) * size];
        let done = tree.extend(pin.handle(), GROUP, part, TierId::DEVICE, &slots).unwrap();
        let longer = tree.pin(done.handle, TierId::DEVICE).unwrap();
        tree.unpin(std::mem::replace(&mut pin, longer)).unwrap();
    }
    let each = start.elapsed().as_secs_f64() * 1e6 / ((tokens - prompt) / size) as f64;
    tree.unpin(pin).unwrap();
    tree.check().unwrap();
    println!(
        "page {page_size:>2}  generated page after {prompt} tokens: {each:.2} us, nodes {}",
        tree.stats().nodes
    );
}

fn main() {
    for page_size in [16, 1] {
        for (length, documents) in [(4_096, 2), (4_096, 256), (131_072, 1), (131_072, 8)] {
            measure(page_size, length, documents);
        }
        measure_cold(page_size, 4_096, 256);
        measure_eviction(page_size, 4_096, 256);
        measure_generation(page_size, 8_192);
    }
}
