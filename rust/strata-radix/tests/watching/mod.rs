//! Watched paths against the naive tree: after every step each standing is the naive one, and whoever's standing is
//! another one than when he was last told is told.

use crate::naive::Snapshot;
use crate::{namespace, Pair, Sequence, GROUP};
use std::collections::{BTreeMap, BTreeSet};
use strata_radix::{RadixError, Standing};
use strata_types::RequestId;

/// What each watcher knew when it was last told, and how many pages are of use to it.
#[derive(Debug, Default)]
pub struct Watching {
    known: BTreeMap<u64, (usize, Standing, Snapshot)>,
    /// Who began to watch since: the node may have been marked before.
    fresh: BTreeSet<u64>,
    /// Steps since the watchers were last told.
    steps: usize,
}

/// The first in some order of the requests, with one that never wants.
fn choose_heir(followers: &[u64], order: Option<u64>) -> Option<u64> {
    let order = order?;
    followers.iter().copied().min_by_key(|id| (id * 3 + order) % 7).filter(|id| *id != 4)
}

fn to_load(snapshot: &Snapshot) -> bool {
    snapshot.iter().any(|(slots, _)| slots[0].is_none() && slots[1].is_some())
}

impl Pair {
    fn standing(&self, request: u64, usable: usize) -> Standing {
        self.tree.standing(RequestId(request), GROUP, usable as u32).unwrap()
    }

    fn learn(&mut self, request: u64, usable: usize) {
        let known = (usable, self.standing(request, usable), self.naive.snapshot(request));
        self.watching.known.insert(request, known);
    }

    pub fn watch(&mut self, s: &Sequence, request: u64, cut: usize, only: bool) {
        let path = self.naive.path(s.namespace, &s.tokens);
        let (name, id) = (namespace(s.namespace), RequestId(request));
        if only {
            self.tree.watch_only(&name, &s.tokens, id).unwrap();
        } else {
            let claim = self.tree.watch(&name, &s.tokens, id).unwrap();
            assert_eq!(claim.handle.pages() as usize, path.len());
            self.compare_claim(&claim, &path, request);
        }
        let usable = path.len().saturating_sub(cut);
        self.naive.watched.insert(request, path);
        self.learn(request, usable);
        self.watching.fresh.insert(request);
    }

    pub fn unwatch(&mut self, request: u64) {
        self.tree.unwatch(RequestId(request));
        self.naive.watched.remove(&request);
        self.watching.known.remove(&request);
    }

    pub fn claim_again(&mut self, request: u64) {
        let claim = self.tree.claim_again(RequestId(request));
        match self.naive.watched.get(&request).cloned() {
            Some(path) => self.compare_claim(&claim.unwrap(), &path, request),
            None => assert_eq!(claim, Err(RadixError::Unwatched { request: RequestId(request) })),
        }
    }

    pub fn take_over(&mut self, request: u64, even_started: bool) {
        let taken = self.tree.take_over(RequestId(request), even_started);
        match self.naive.watched.contains_key(&request) {
            true => assert_eq!(taken, Ok(self.naive.take_over(request, even_started))),
            false => assert_eq!(taken, Err(RadixError::Unwatched { request: RequestId(request) })),
        }
    }

    pub fn release(&mut self, owner: u64, order: Option<u64>) {
        let released = self.tree.release(RequestId(owner), |followers| {
            let ids: Vec<u64> = followers.iter().map(|follower| follower.0).collect();
            let set: BTreeSet<u64> = ids.iter().copied().collect();
            assert!(set.len() == ids.len() && !set.is_empty() && !set.contains(&owner));
            choose_heir(&ids, order).map(RequestId)
        });
        assert_eq!(released, Ok(self.naive.release(owner, |followers| choose_heir(followers, order))));
    }

    /// Whoever changed is told, each once, and nobody else but those whose pages to load moved between nodes.
    pub fn take_changed(&mut self) {
        let changed = self.tree.take_changed();
        let told: BTreeSet<u64> = changed.iter().map(|request| request.0).collect();
        assert_eq!(told.len(), changed.len(), "a watcher is named twice");
        for (request, (usable, before, snapshot)) in std::mem::take(&mut self.watching.known) {
            let now = self.naive.snapshot(request);
            if !told.contains(&request) {
                assert_eq!(self.standing(request, usable), before, "request {request} was not told");
                assert_eq!(now, snapshot, "request {request} was not told");
            } else if now == snapshot && self.watching.steps == 1 && !self.watching.fresh.contains(&request) {
                // After more steps, what came and went again would leave no trace.
                assert!(to_load(&now), "request {request} was told for nothing");
            }
            self.learn(request, usable);
        }
        self.watching.steps = 0;
        self.watching.fresh.clear();
        assert_eq!(self.tree.take_changed(), []);
    }

    pub fn compare_watched(&mut self) {
        self.watching.steps += 1;
        for (request, (usable, ..)) in &self.watching.known {
            let found = self.standing(*request, *usable);
            let loads: u32 = found.loads.iter().map(|(_, pages)| pages).sum();
            assert_eq!(loads, found.host);
            let expected = self.naive.standing(*request, *usable);
            assert_eq!(Standing { loads: Vec::new(), ..found }, expected, "request {request}");
            let path = &self.naive.watched[request];
            if let Some((namespace_of, tokens)) = path.last() {
                let known = self.tree.access_counts(&namespace(*namespace_of), tokens);
                assert_eq!(known.len(), path.len(), "a watched page is unknown");
            }
        }
        self.compare_shared_loads();
    }

    /// What two requests would load alike is what their loads have in common by node.
    fn compare_shared_loads(&self) {
        for (one, (usable_one, ..)) in &self.watching.known {
            let loads = self.standing(*one, *usable_one).loads;
            for (other, (usable_other, ..)) in &self.watching.known {
                let others: BTreeMap<u64, u32> =
                    self.standing(*other, *usable_other).loads.into_iter().collect();
                let shared = loads.iter().filter_map(|(node, pages)| Some((*others.get(node)?).min(*pages)));
                let paths = self.naive.watched[one].iter().zip(&self.naive.watched[other]);
                let alike =
                    paths.take(*usable_one.min(usable_other)).take_while(|(left, right)| left == right);
                let pages = alike.map(|(key, _)| self.naive.page(key).slots);
                let expected = pages.filter(|slots| slots[0].is_none() && slots[1].is_some()).count();
                assert_eq!(shared.sum::<u32>() as usize, expected);
            }
        }
    }
}
