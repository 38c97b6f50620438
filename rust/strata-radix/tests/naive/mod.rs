//! A tree without a tree: a map from a page's whole prefix to what is known of the page, and a stamp for every use.
//! Slow and plain, so that it can be believed.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;
use strata_radix::Standing;
use strata_types::RequestId;

pub const TIERS: usize = 3;

/// A page: its namespace and all tokens up to its end.
pub type Key = (u8, Vec<u32>);

/// The slots and the owner of each page of a path.
pub type Snapshot = Vec<([Option<u32>; TIERS], Option<(u64, bool)>)>;

#[derive(Clone, Debug, Default)]
pub struct Page {
    pub slots: [Option<u32>; TIERS],
    pub pins: [u32; TIERS],
    pub stamps: [u64; TIERS],
    pub accesses: u32,
    pub owner: Option<(u64, bool)>,
}

impl Page {
    pub fn held(&self) -> bool {
        self.slots.iter().any(Option::is_some)
    }
}

#[derive(Debug)]
pub struct Naive {
    pub page_size: usize,
    pub pages: BTreeMap<Key, Page>,
    /// The watched paths.
    pub watched: BTreeMap<u64, Vec<Key>>,
    clock: u64,
}

impl Naive {
    pub fn new(page_size: usize) -> Naive {
        Naive { page_size, pages: BTreeMap::new(), watched: BTreeMap::new(), clock: 0 }
    }

    /// The keys of the whole pages of a sequence.
    pub fn path(&self, namespace: u8, tokens: &[u32]) -> Vec<Key> {
        let pages = tokens.len() / self.page_size;
        (1..=pages).map(|page| (namespace, tokens[..page * self.page_size].to_vec())).collect()
    }

    pub fn page(&self, key: &Key) -> Page {
        self.pages.get(key).cloned().unwrap_or_default()
    }

    pub fn held(&self, path: &[Key]) -> usize {
        path.iter().take_while(|key| self.page(key).held()).count()
    }

    pub fn resident(&self, path: &[Key], tier: usize) -> Vec<u32> {
        path.iter().map_while(|key| self.page(key).slots[tier]).collect()
    }

    fn stamp(&mut self, path: &[Key], tiers: Range<usize>) {
        for key in path.iter().rev() {
            self.clock += 1;
            let page = self.pages.entry(key.clone()).or_default();
            page.stamps[tiers.clone()].fill(self.clock);
        }
    }

    /// Returns the duplicates.
    pub fn insert(&mut self, path: &[Key], tier: usize, from: usize, slots: &[u32]) -> Vec<(u32, u32)> {
        let mut duplicates = Vec::new();
        for (index, slot) in slots.iter().enumerate() {
            let page = self.pages.entry(path[from + index].clone()).or_default();
            if page.slots[tier].is_some() {
                duplicates.push(((from + index) as u32, *slot));
                continue;
            }
            if !page.held() {
                page.accesses += 1;
                page.owner = None;
            }
            page.slots[tier] = Some(*slot);
        }
        self.stamp(path, tier..tier + 1);
        duplicates
    }

    pub fn touch(&mut self, path: &[Key]) {
        for key in path {
            self.pages.entry(key.clone()).or_default().accesses += 1;
        }
        self.stamp(path, 0..TIERS);
    }

    pub fn pin(&mut self, path: &[Key], tier: usize) {
        for key in path {
            self.pages.entry(key.clone()).or_default().pins[tier] += 1;
        }
    }

    pub fn unpin(&mut self, path: &[Key], tier: usize) {
        for key in path.iter().rev() {
            self.clock += 1;
            let clock = self.clock;
            let page = self.pages.get_mut(key).unwrap();
            page.pins[tier] -= 1;
            if page.pins[tier] == 0 {
                page.stamps[tier] = clock;
            }
        }
    }

    fn below<'a>(&'a self, key: &'a Key) -> impl Iterator<Item = &'a Key> {
        self.pages.keys().filter(move |other| {
            other.0 == key.0 && other.1.len() > key.1.len() && other.1.starts_with(&key.1)
        })
    }

    /// Drops what hangs below a page that nobody holds any more.
    fn cascade(&mut self, key: &Key, out: &mut BTreeSet<(usize, u32)>) {
        if self.page(key).held() {
            return;
        }
        for other in self.below(key).cloned().collect::<Vec<_>>() {
            let slots = std::mem::take(&mut self.pages.get_mut(&other).unwrap().slots);
            out.extend(slots.iter().enumerate().filter_map(|(tier, slot)| Some((tier, (*slot)?))));
        }
    }

    pub fn evict(&mut self, tier: usize, pages: usize) -> BTreeSet<(usize, u32)> {
        self.evict_among(tier, pages, |_| true)
    }

    pub fn evict_slots(&mut self, tier: usize, first: u32) -> BTreeSet<(usize, u32)> {
        let high = |page: &Page| page.slots[tier].is_some_and(|slot| slot >= first) && page.pins[tier] == 0;
        let doomed: Vec<Key> =
            self.pages.iter().filter(|(_, page)| high(page)).map(|(key, _)| key.clone()).collect();
        let below = |key: &Key| doomed.iter().any(|above| key.0 == above.0 && key.1.starts_with(&above.1));
        self.evict_among(tier, usize::MAX, below)
    }

    fn evict_among(
        &mut self,
        tier: usize,
        pages: usize,
        wanted: impl Fn(&Key) -> bool,
    ) -> BTreeSet<(usize, u32)> {
        let mut out = BTreeSet::new();
        let mut blocked: Vec<Key> = Vec::new();
        let mut left = pages;
        while left > 0 {
            let candidates = self.pages.iter().filter(|(key, page)| {
                page.slots[tier].is_some() && page.pins[tier] == 0 && !blocked.contains(key) && wanted(key)
            });
            let Some((key, page)) = candidates.min_by_key(|(_, page)| page.stamps[tier]) else { break };
            let (key, copies) = (key.clone(), page.slots.iter().flatten().count());
            if copies == 1 && page.pins.iter().any(|count| *count > 0) {
                blocked.extend((1..=key.1.len()).map(|length| (key.0, key.1[..length].to_vec())));
                continue;
            }
            assert!(self.below(&key).all(|other| self.pages[other].slots[tier].is_none()));
            let slot = self.pages.get_mut(&key).unwrap().slots[tier].take().unwrap();
            out.insert((tier, slot));
            left -= 1;
            self.cascade(&key, &mut out);
        }
        out
    }

    /// The slots of one tier whose pages another lacks.
    pub fn copies_lacking(&self, tier: usize, to: usize) -> BTreeSet<u32> {
        self.pages
            .values()
            .filter(|page| page.slots[to].is_none())
            .filter_map(|page| page.slots[tier])
            .collect()
    }

    pub fn remove(&mut self, path: &[Key], tier: usize, range: Range<usize>) -> BTreeSet<(usize, u32)> {
        let mut out = BTreeSet::new();
        for key in &path[range.start.min(path.len())..range.end.min(path.len())] {
            let Some(page) = self.pages.get_mut(key) else { continue };
            let Some(slot) = page.slots[tier].take() else { continue };
            out.insert((tier, slot));
            self.cascade(key, &mut out);
        }
        out
    }

    /// The pages that the owner has after its claim.
    pub fn claim(&mut self, path: &[Key], owner: u64) -> Vec<u32> {
        let mut own = Vec::new();
        for (index, key) in path.iter().enumerate() {
            let page = self.pages.entry(key.clone()).or_default();
            if !page.held() && page.owner.is_none() {
                page.owner = Some((owner, false));
            }
            if page.owner.is_some_and(|(other, _)| other == owner) {
                own.push(index as u32);
            }
        }
        own
    }

    pub fn start(&mut self, owner: u64) {
        for page in self.pages.values_mut().filter(|page| page.owner == Some((owner, false))) {
            page.owner = Some((owner, true));
        }
    }

    /// Page by page: each may have an heir of its own.
    pub fn release(&mut self, owner: u64, choose_heir: impl Fn(&[u64]) -> Option<u64>) -> usize {
        let mut count = 0;
        for (key, page) in &mut self.pages {
            if page.owner.is_some_and(|(other, _)| other == owner) {
                let through = self.watched.iter().filter(|(_, path)| path.contains(key));
                let followers: Vec<u64> = through.map(|(id, _)| *id).filter(|id| *id != owner).collect();
                page.owner = choose_heir(&followers).map(|heir| (heir, false));
                count += 1;
            }
        }
        count
    }

    pub fn take_over(&mut self, request: u64, even_started: bool) -> usize {
        let mut count = 0;
        for key in self.watched[&request].clone() {
            let Some(page) = self.pages.get_mut(&key) else { continue };
            if page.owner.is_some_and(|(other, started)| other != request && (even_started || !started)) {
                page.owner = Some((request, false));
                count += 1;
            }
        }
        count
    }

    /// How the first `usable` pages of a watched path stand, without the nodes that only the tree knows.
    pub fn standing(&self, request: u64, usable: usize) -> Standing {
        let mut standing = Standing::default();
        for key in self.watched[&request].iter().take(usable) {
            let Page { slots, owner, .. } = self.page(key);
            let count = match (slots, owner) {
                ([Some(_), ..], _) => &mut standing.device,
                ([_, Some(_), _], _) => &mut standing.host,
                ([_, _, Some(_)], _) => &mut standing.disk,
                (_, None) => &mut standing.unowned,
                (_, Some((owner, _))) if owner == request => &mut standing.own,
                (_, Some((owner, started))) => {
                    standing.foreign_owner.get_or_insert(RequestId(owner));
                    standing.foreign_queued |= !started;
                    standing.foreign_in_flight |= started;
                    &mut standing.foreign
                }
            };
            *count += 1;
        }
        standing
    }

    /// Everything about a watched path that a standing may depend on.
    pub fn snapshot(&self, request: u64) -> Snapshot {
        self.watched[&request].iter().map(|key| self.page(key)).map(|page| (page.slots, page.owner)).collect()
    }
}
