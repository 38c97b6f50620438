//! The tree against the naive one: the same random operations, the same answers, and a whole tree after every step.
#![allow(missing_docs, clippy::unwrap_used)]

mod naive;
mod watching;

use naive::{Key, Naive, TIERS};
use proptest::prelude::*;
use std::collections::BTreeSet;
use strata_radix::{Claim, Direction, Evicted, HiRadixTree, Pin, RadixError, TransientState, TreeConfig};
use strata_types::{GroupId, Namespace, PageId, RequestId, TierId};
use watching::Watching;

const GROUP: GroupId = GroupId(0);
const REQUESTS: u64 = 5;

#[derive(Clone, Debug)]
struct Sequence {
    namespace: u8,
    tokens: Vec<u32>,
}

#[derive(Clone, Debug)]
enum Step {
    Insert(Sequence, usize, usize),
    MatchInto(Sequence, usize),
    Touch(Sequence),
    Pin(Sequence, usize),
    Unpin(usize),
    Evict(usize, usize),
    EvictSlots(usize, u32),
    Clear(usize),
    Remove(Sequence, usize, usize, usize),
    Claim(Sequence, u64),
    PinClaimed(Sequence, u64, usize),
    Start(u64),
    Release(u64, Option<u64>),
    Watch(Sequence, u64, usize, bool),
    Unwatch(u64),
    ClaimAgain(u64),
    TakeOver(u64, bool),
    TakeChanged,
    Generate(Sequence, usize, usize),
    Compute(Sequence, u64, usize, usize),
}

fn sequence() -> impl Strategy<Value = Sequence> {
    // Few tokens, mostly the same one: long common prefixes and many branches.
    let token = prop_oneof![5 => Just(0u32), 1 => 1u32..3];
    (0u8..2, prop::collection::vec(token, 0..14))
        .prop_map(|(namespace, tokens)| Sequence { namespace, tokens })
}

fn step() -> impl Strategy<Value = Step> {
    let tier = || 0..TIERS;
    let owner = || 0u64..REQUESTS;
    prop_oneof![
        6 => (sequence(), tier(), 0usize..14).prop_map(|(s, t, from)| Step::Insert(s, t, from)),
        3 => (sequence(), tier()).prop_map(|(s, t)| Step::MatchInto(s, t)),
        1 => sequence().prop_map(Step::Touch),
        1 => (sequence(), tier()).prop_map(|(s, t)| Step::Pin(s, t)),
        4 => (0usize..8).prop_map(Step::Unpin),
        4 => (tier(), 0usize..7).prop_map(|(t, pages)| Step::Evict(t, pages)),
        2 => (tier(), 0u32..60).prop_map(|(t, first)| Step::EvictSlots(t, first)),
        1 => tier().prop_map(Step::Clear),
        1 => (sequence(), tier(), 0usize..8, 0usize..8).prop_map(|(s, t, a, b)| Step::Remove(s, t, a, b)),
        3 => (sequence(), owner()).prop_map(|(s, o)| Step::Claim(s, o)),
        1 => (sequence(), owner(), tier()).prop_map(|(s, o, t)| Step::PinClaimed(s, o, t)),
        1 => owner().prop_map(Step::Start),
        2 => (owner(), prop::option::weighted(0.8, 0u64..7)).prop_map(|(o, order)| Step::Release(o, order)),
        5 => (sequence(), owner(), 0usize..3, any::<bool>()).prop_map(|(s, r, c, only)| Step::Watch(s, r, c, only)),
        1 => owner().prop_map(Step::Unwatch),
        2 => owner().prop_map(Step::ClaimAgain),
        2 => (owner(), any::<bool>()).prop_map(|(r, even_started)| Step::TakeOver(r, even_started)),
        6 => Just(Step::TakeChanged),
        2 => (sequence(), tier(), 1usize..5).prop_map(|(s, t, pages)| Step::Generate(s, t, pages)),
        2 => (sequence(), owner(), tier(), 1usize..4).prop_map(|(s, o, t, pages)| Step::Compute(s, o, t, pages)),
    ]
}

struct Pair {
    tree: HiRadixTree,
    naive: Naive,
    pins: Vec<(Pin, Vec<Key>)>,
    watching: Watching,
    next_slot: u32,
}

fn namespace(index: u8) -> Namespace {
    Namespace::new(&index.to_string(), "")
}

fn ids(slots: &[u32]) -> Vec<PageId> {
    slots.iter().copied().map(PageId).collect()
}

fn set(evicted: &[Evicted]) -> BTreeSet<(usize, u32)> {
    let set: BTreeSet<_> = evicted.iter().map(|copy| (copy.tier.index(), copy.slot.0)).collect();
    assert_eq!(set.len(), evicted.len(), "a copy came back twice");
    set
}

impl Pair {
    fn new(page_size: u32, ghost_pages: usize) -> Pair {
        let config = TreeConfig { page_size, groups: 1, tiers: TIERS as u8, ghost_pages };
        let tree = HiRadixTree::new(config).unwrap();
        let naive = Naive::new(page_size as usize);
        Pair { tree, naive, pins: Vec::new(), watching: Watching::default(), next_slot: 0 }
    }

    fn fresh(&mut self, count: usize) -> Vec<u32> {
        let first = self.next_slot;
        self.next_slot += count as u32;
        (first..self.next_slot).collect()
    }

    fn insert(&mut self, s: &Sequence, tier: usize, from: usize) {
        let path = self.naive.path(s.namespace, &s.tokens);
        let from = from.min(path.len());
        let slots = self.fresh(path.len() - from);
        let (name, at) = (namespace(s.namespace), TierId(tier as u8));
        let done = self.tree.insert(&name, GROUP, &s.tokens, at, &ids(&slots), from as u32);
        let held = self.naive.held(&path);
        if slots.is_empty() {
            assert_eq!(done, Ok(Default::default()));
        } else if from > held {
            assert_eq!(done, Err(RadixError::Gap { from_page: from as u32, held: held as u32 }));
        } else {
            let done = done.unwrap();
            let duplicates: Vec<_> = done.duplicates.iter().map(|(page, slot)| (*page, slot.0)).collect();
            assert_eq!(duplicates, self.naive.insert(&path, tier, from, &slots));
            assert_eq!(done.handle.pages() as usize, path.len());
            let tokens = self.tree.page_path(done.handle).unwrap();
            assert_eq!(Some(&tokens), path.last().map(|key| &key.1));
        }
    }

    /// As `insert`, from the pin on the first `from` pages.
    fn extend(&mut self, s: &Sequence, tier: usize, from: usize) {
        let path = self.naive.path(s.namespace, &s.tokens);
        let slots = self.fresh(path.len() - from);
        let handle = self.pins[self.pins.len() - 1].0.handle();
        let rest = &s.tokens[from * self.naive.page_size..];
        let done = self.tree.extend(handle, GROUP, rest, TierId(tier as u8), &ids(&slots));
        let held = self.naive.held(&path);
        if from == 0 {
            assert_eq!(done, Err(RadixError::Stale { pages: 0 }));
            self.insert(s, tier, from);
        } else if from > held {
            assert_eq!(done, Err(RadixError::Gap { from_page: from as u32, held: held as u32 }));
        } else {
            let done = done.unwrap();
            let duplicates: Vec<_> = done.duplicates.iter().map(|(page, slot)| (*page, slot.0)).collect();
            assert_eq!(duplicates, self.naive.insert(&path, tier, from, &slots));
            assert_eq!(Some(&self.tree.page_path(done.handle).unwrap()), path.last().map(|key| &key.1));
        }
    }

    fn match_into(&mut self, s: &Sequence, tier: usize) {
        let path = self.naive.path(s.namespace, &s.tokens);
        let expected = self.naive.resident(&path, tier);
        let mut out = ids(&[77]);
        let name = namespace(s.namespace);
        let pin = self.tree.match_into(&name, GROUP, &s.tokens, TierId(tier as u8), &mut out).unwrap();
        assert_eq!(out[1..], ids(&expected));
        assert_eq!(pin.pages() as usize, expected.len());
        let path = path[..expected.len()].to_vec();
        self.naive.touch(&path);
        self.naive.pin(&path, tier);
        self.pins.push((pin, path));
    }

    fn touch_or_pin(&mut self, s: &Sequence, tier: Option<usize>) {
        let path = self.naive.path(s.namespace, &s.tokens);
        let path = path[..self.naive.held(&path)].to_vec();
        let found = self.tree.match_prefix(&namespace(s.namespace), GROUP, &s.tokens).unwrap();
        assert_eq!(found.pages as usize, path.len());
        match tier {
            None => {
                self.tree.touch(found.handle).unwrap();
                self.naive.touch(&path);
            }
            Some(tier) => {
                let pin = self.tree.pin(found.handle, TierId(tier as u8)).unwrap();
                self.naive.pin(&path, tier);
                self.pins.push((pin, path));
            }
        }
    }

    fn unpin(&mut self, index: usize) {
        if !self.pins.is_empty() {
            let (pin, path) = self.pins.swap_remove(index % self.pins.len());
            let tier = pin.tier().index();
            self.tree.unpin(pin).unwrap();
            self.naive.unpin(&path, tier);
        }
    }

    fn claim(&mut self, s: &Sequence, owner: u64, pin: Option<usize>) {
        let path = self.naive.path(s.namespace, &s.tokens);
        let claim = self.tree.claim(&namespace(s.namespace), &s.tokens, RequestId(owner)).unwrap();
        self.compare_claim(&claim, &path, owner);
        if let Some(tier) = pin {
            let pin = self.tree.pin(claim.handle, TierId(tier as u8)).unwrap();
            self.naive.pin(&path, tier);
            self.pins.push((pin, path));
        }
    }

    fn compare_claim(&mut self, claim: &Claim, path: &[Key], owner: u64) {
        assert_eq!(claim.held as usize, self.naive.held(path));
        let own: Vec<u32> = claim.own.iter().cloned().flatten().collect();
        assert_eq!(own, self.naive.claim(path, owner));
        for run in &claim.foreign {
            for page in run.pages.clone() {
                let known = self.naive.page(&path[page as usize]).owner;
                assert_eq!(known, Some((run.owner.0, run.state == TransientState::InFlight)));
            }
        }
        let foreign: usize = claim.foreign.iter().map(|run| run.pages.len()).sum();
        assert_eq!(own.len() + foreign + claim.held as usize, path.len());
    }

    /// A request that publishes page by page, its pin moving along.
    fn generate(&mut self, s: &Sequence, tier: usize, pages: usize) {
        self.match_into(s, tier);
        let matched = self.pins.last().map_or(0, |(pin, _)| pin.pages() as usize);
        let size = self.naive.page_size;
        for page in matched..matched + pages {
            let mut tokens = s.tokens.clone();
            tokens.resize((page + 1) * size, 2);
            let part = Sequence { namespace: s.namespace, tokens };
            if page % 2 == 0 {
                self.insert(&part, tier, page);
            } else {
                self.extend(&part, tier, page);
            }
            self.touch_or_pin(&part, Some(tier));
            let last = self.pins.len() - 2;
            self.unpin(last);
            self.tree.check().unwrap();
        }
    }

    /// A request that publishes the rest of its sequence in chunks, except the last page.
    fn compute(&mut self, s: &Sequence, tier: usize, chunk: usize) {
        let path = self.naive.path(s.namespace, &s.tokens);
        let mut from = self.naive.held(&path);
        while from + 1 < path.len() {
            let end = (from + chunk).min(path.len() - 1);
            let tokens = s.tokens[..end * self.naive.page_size].to_vec();
            self.insert(&Sequence { namespace: s.namespace, tokens }, tier, from);
            self.tree.check().unwrap();
            from = end;
        }
    }

    fn apply(&mut self, step: &Step) {
        match step {
            Step::Insert(s, tier, from) => self.insert(s, *tier, *from),
            Step::MatchInto(s, tier) => self.match_into(s, *tier),
            Step::Touch(s) => self.touch_or_pin(s, None),
            Step::Pin(s, tier) => self.touch_or_pin(s, Some(*tier)),
            Step::Unpin(index) => self.unpin(*index),
            Step::Evict(tier, pages) => {
                // One other tier or two.
                let others = [(*tier + 1) % TIERS, (*tier + 2) % TIERS];
                let others = &others[..1 + *pages % 2];
                let below: Vec<TierId> = others.iter().map(|other| TierId(*other as u8)).collect();
                let missing = self.tree.missing_victims(GROUP, TierId(*tier as u8), &below, *pages).unwrap();
                let mut lacks = self.naive.copies_lacking(*tier, others[0]);
                for other in &others[1..] {
                    let too = self.naive.copies_lacking(*tier, *other);
                    lacks.retain(|slot| too.contains(slot));
                }
                let evicted = self.tree.evict(GROUP, TierId(*tier as u8), *pages).unwrap();
                let named: BTreeSet<u32> =
                    missing.iter().flat_map(|run| &run.slots).map(|slot| slot.0).collect();
                let gone = evicted.iter().filter(|copy| copy.tier.index() == *tier).map(|copy| copy.slot.0);
                assert_eq!(named, gone.filter(|slot| lacks.contains(slot)).collect());
                assert!(evicted.iter().all(|copy| !copy.in_use));
                assert_eq!(set(&evicted), self.naive.evict(*tier, *pages));
            }
            Step::EvictSlots(tier, first) => {
                let evicted = self.tree.evict_slots(GROUP, TierId(*tier as u8), *first).unwrap();
                assert!(evicted.iter().all(|copy| !copy.in_use));
                assert_eq!(set(&evicted), self.naive.evict_slots(*tier, *first));
            }
            Step::Clear(tier) => {
                let evicted = self.tree.clear(GROUP, TierId(*tier as u8)).unwrap();
                assert!(evicted.iter().all(|copy| !copy.in_use));
                assert_eq!(set(&evicted), self.naive.evict(*tier, usize::MAX));
            }
            Step::Remove(s, tier, start, length) => {
                let path = self.naive.path(s.namespace, &s.tokens);
                let range = *start..start + length;
                let (name, at) = (namespace(s.namespace), TierId(*tier as u8));
                let pages = range.start as u32..range.end as u32;
                let removed = self.tree.remove(&name, GROUP, &s.tokens, at, pages).unwrap();
                assert_eq!(set(&removed), self.naive.remove(&path, *tier, range));
            }
            Step::Claim(s, owner) => self.claim(s, *owner, None),
            Step::PinClaimed(s, owner, tier) => self.claim(s, *owner, Some(*tier)),
            Step::Start(owner) => {
                self.tree.start(RequestId(*owner));
                self.naive.start(*owner);
            }
            Step::Release(owner, order) => self.release(*owner, *order),
            Step::Watch(s, request, cut, only) => self.watch(s, *request, *cut, *only),
            Step::Unwatch(request) => self.unwatch(*request),
            Step::ClaimAgain(request) => self.claim_again(*request),
            Step::TakeOver(request, even_started) => self.take_over(*request, *even_started),
            Step::TakeChanged => self.take_changed(),
            Step::Generate(s, tier, pages) => self.generate(s, *tier, *pages),
            Step::Compute(s, owner, tier, pages) => {
                self.claim(s, *owner, None);
                self.compute(s, *tier, *pages);
            }
        }
    }

    fn compare(&mut self, counts: bool) {
        self.tree.check().unwrap();
        self.compare_watched();
        for key in self.naive.pages.keys() {
            self.compare_path(key, counts);
        }
        for tier in 0..TIERS {
            let pages = || self.naive.pages.values().filter(|page| page.slots[tier].is_some());
            let (group, at) = (GROUP, TierId(tier as u8));
            assert_eq!(self.tree.resident_pages(group, at), pages().count());
            let free = pages().filter(|page| page.pins[tier] == 0);
            assert_eq!(self.tree.evictable_pages(group, at), free.count());
            for other in (0..TIERS).filter(|other| *other != tier) {
                self.compare_missing(tier, other);
            }
        }
    }

    fn compare_path(&self, key: &Key, counts: bool) {
        let path = self.naive.path(key.0, &key.1);
        let found = self.tree.match_prefix(&namespace(key.0), GROUP, &key.1).unwrap();
        assert_eq!(found.pages as usize, self.naive.held(&path));
        let cut = found.fastest();
        for (index, key) in path.iter().enumerate() {
            let page = self.naive.page(key);
            for tier in 0..TIERS {
                let slot = found.slot(TierId(tier as u8), index as u32).map(|slot| slot.0);
                assert_eq!(slot, page.slots[tier], "page {index} of {key:?} in tier {tier}");
            }
            let fastest = cut.iter().find(|(pages, _)| pages.contains(&(index as u32)));
            let expected = page.slots.iter().position(Option::is_some);
            assert_eq!(fastest.map(|(_, tier)| tier.index()), expected);
            let run = found.transient.iter().find(|run| run.pages.contains(&(index as u32)));
            assert_eq!(run.map(|run| (run.owner.0, run.state == TransientState::InFlight)), page.owner);
        }
        if counts {
            let mut known = self.tree.access_counts(&namespace(key.0), &key.1);
            known.resize(path.len(), 0);
            let expected: Vec<u32> = path.iter().map(|key| self.naive.page(key).accesses).collect();
            assert_eq!(known, expected);
        }
    }

    fn compare_missing(&self, from: usize, to: usize) {
        let expected: BTreeSet<u32> = self
            .naive
            .pages
            .values()
            .filter(|page| page.pins[from] == 0 && page.slots[to].is_none())
            .filter_map(|page| page.slots[from])
            .collect();
        for direction in [Direction::Hottest, Direction::Coldest] {
            for limit in [3, usize::MAX] {
                let (from, to) = (TierId(from as u8), TierId(to as u8));
                let runs = self.tree.missing_in(GROUP, from, to, direction, limit).unwrap();
                let slots: Vec<u32> = runs.iter().flat_map(|run| &run.slots).map(|slot| slot.0).collect();
                assert_eq!(slots.len(), expected.len().min(limit));
                assert!(slots.iter().all(|slot| expected.contains(slot)));
                for run in &runs {
                    let found = self.tree.match_prefix(&run.namespace, GROUP, &run.tokens).unwrap();
                    assert_eq!(found.slot(from, run.start_page), run.slots.first().copied());
                    assert_eq!(found.pages, run.start_page + run.slots.len() as u32);
                    assert_eq!(self.tree.page_path(run.handle).unwrap(), run.tokens);
                }
            }
        }
    }
}

fn cases() -> u32 {
    std::env::var("PROPTEST_CASES").ok().and_then(|cases| cases.parse().ok()).unwrap_or(300)
}

proptest! {
    #![proptest_config(ProptestConfig { cases: cases(), failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn the_tree_agrees_with_the_naive_one(
        page_size in prop::sample::select(vec![1u32, 2, 4]),
        ghost_pages in prop::sample::select(vec![0usize, 3, 1 << 20]),
        told_at_once in any::<bool>(),
        steps in prop::collection::vec(step(), 1..60),
    ) {
        let mut pair = Pair::new(page_size, ghost_pages);
        for step in &steps {
            pair.apply(step);
            pair.compare(ghost_pages > 1000);
            if told_at_once {
                pair.take_changed();
            }
        }
        pair.take_changed();
        while !pair.pins.is_empty() {
            pair.unpin(0);
            pair.compare(ghost_pages > 1000);
        }
        for owner in 0..REQUESTS {
            pair.apply(&Step::Release(owner, None));
            pair.apply(&Step::Unwatch(owner));
        }
        for tier in 0..TIERS {
            pair.apply(&Step::Clear(tier));
        }
        prop_assert_eq!(pair.tree.take_changed(), []);
        pair.compare(ghost_pages > 1000);
        let stats = pair.tree.stats();
        prop_assert!(stats.places.iter().all(|place| place.resident == 0), "{:?}", stats);
        prop_assert!(stats.ghost_pages <= ghost_pages && stats.transient_pages == 0, "{:?}", stats);
        if ghost_pages == 0 {
            prop_assert_eq!((stats.nodes, stats.namespaces), (0, 0));
        }
    }
}
