//! The waiting requests in the order in which they would go: priority, then arrival, then id. Kept by events: nothing
//! is rebuilt for a decision, and a request that is put back has its old place. Arrays in order, so that a scan of ten
//! thousand is a walk through memory: the requests, and beside them the little that a scan asks of each. Who leaves
//! leaves a gap, which is closed when gaps become many. Accounts how often and how long requests were deferred.

use crate::glance::{Glance, Kind};
use crate::{Standing, Waiting};
use std::cmp::Reverse;
use std::collections::hash_map::Entry;
use std::collections::{BTreeSet, HashMap};
use std::time::Duration;
use strata_types::{RequestId, Time};

/// Gaps that are never worth closing.
const FEW_GAPS: usize = 64;

/// The place of a request among all.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Key {
    priority: Reverse<i32>,
    arrived: Time,
    id: RequestId,
}

impl Key {
    fn of(waiting: &Waiting) -> Key {
        Key { priority: Reverse(waiting.priority), arrived: waiting.arrived, id: waiting.id }
    }
}

/// One place of the order, or the gap that someone left.
#[derive(Clone, Debug)]
pub(crate) struct Slot {
    pub waiting: Waiting,
    /// Sum of its loads.
    pub load: u32,
    /// The node of its first load; at hand, since a scan compares it.
    pub first_load: Option<u64>,
    /// It was a delay hit at some time: it goes before those of its priority that never were.
    pub deferred_before: bool,
    deferred_since: Option<Time>,
    gone: bool,
}

impl Slot {
    fn new(waiting: Waiting) -> Slot {
        let mut slot = Slot {
            waiting,
            load: 0,
            first_load: None,
            deferred_before: false,
            deferred_since: None,
            gone: false,
        };
        slot.sum_up();
        slot
    }

    fn sum_up(&mut self) {
        self.load = self.waiting.load_tokens();
        self.first_load = self.waiting.standing.loads.first().map(|run| run.node);
    }

    /// None for a gap.
    pub fn live(&self) -> Option<&Waiting> {
        (!self.gone).then_some(&self.waiting)
    }
}

/// The waiting requests, in order.
#[derive(Debug)]
pub struct Queue {
    slots: Vec<Slot>,
    /// What a scan asks of each slot.
    glances: Vec<Glance>,
    kinds: Vec<Kind>,
    keys: HashMap<RequestId, Key>,
    /// By the node of their first load, so that all who share a load are found without a scan.
    sharers: BTreeSet<(u64, Key)>,
    /// How many those are, by node.
    sharers_of: HashMap<u64, u32>,
    gaps: usize,
    threshold: Option<u32>,
    /// Deferrals that have ended: the run was published or taken over, or the request left.
    pub deferrals: u64,
    /// How long those lasted together.
    pub deferral: Duration,
}

impl Queue {
    /// An empty queue. More than `threshold` transient tokens of another owner defer a request; none: they never do.
    pub fn new(threshold: Option<u32>) -> Queue {
        Queue {
            slots: Vec::new(),
            glances: Vec::new(),
            kinds: Vec::new(),
            keys: HashMap::new(),
            sharers: BTreeSet::new(),
            sharers_of: HashMap::new(),
            gaps: 0,
            threshold,
            deferrals: 0,
            deferral: Duration::ZERO,
        }
    }

    /// Requests that wait.
    pub fn len(&self) -> usize {
        self.slots.len() - self.gaps
    }

    /// Whether nobody waits.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Puts a request at its place; one that waits already is replaced.
    pub fn push(&mut self, now: Time, waiting: Waiting) {
        self.remove(now, waiting.id);
        let place = self.insert(Slot::new(waiting));
        self.account(place, now);
    }

    /// Takes a request out.
    pub fn remove(&mut self, now: Time, id: RequestId) -> Option<Waiting> {
        let slot = self.take(id)?;
        if let Some(since) = slot.deferred_since {
            self.end_deferral(since, now);
        }
        Some(slot.waiting)
    }

    /// A request that waits.
    pub fn get(&self, id: RequestId) -> Option<&Waiting> {
        self.place(self.keys.get(&id)?).map(|place| &self.slots[place].waiting)
    }

    /// What tree events have changed about a request. False if it does not wait.
    pub fn update(&mut self, id: RequestId, now: Time, standing: Standing) -> bool {
        let Some((key, place)) = self.locate(id) else { return false };
        let slot = &mut self.slots[place];
        let before = slot.first_load;
        slot.waiting.standing = standing;
        slot.sum_up();
        let after = slot.first_load;
        if before != after {
            self.unshare(before, key);
            self.share(after, key);
        }
        self.account(place, now);
        true
    }

    /// Holds a request back, or lets it go. False if it does not wait.
    pub fn set_held(&mut self, id: RequestId, held: bool) -> bool {
        let Some((_, place)) = self.locate(id) else { return false };
        self.slots[place].waiting.held = held;
        self.kinds[place] = Kind::of(&self.slots[place]);
        true
    }

    /// Notes whether a request's load has begun while it waits. False if it does not wait.
    pub fn set_early(&mut self, id: RequestId, early: bool) -> bool {
        self.locate(id).map(|(_, place)| self.slots[place].waiting.early = early).is_some()
    }

    /// Lets a request inherit a follower's priority, and moves it. False if it does not wait or has as high a one.
    pub fn raise_priority(&mut self, id: RequestId, priority: i32) -> bool {
        if self.keys.get(&id).is_none_or(|key| key.priority.0 >= priority) {
            return false;
        }
        let Some(mut slot) = self.take(id) else { return false };
        slot.waiting.priority = priority;
        self.insert(slot);
        true
    }

    /// All who wait, in order.
    pub fn iter(&self) -> impl Iterator<Item = &Waiting> {
        self.slots.iter().filter_map(Slot::live)
    }

    /// Whether `first` goes before `second`. False unless both wait.
    pub fn before(&self, first: RequestId, second: RequestId) -> bool {
        let keys = (self.keys.get(&first), self.keys.get(&second));
        matches!(keys, (Some(first), Some(second)) if first < second)
    }

    /// Puts these in the order of the queue; those who do not wait go first.
    pub fn sort(&self, ids: &mut [RequestId]) {
        ids.sort_unstable_by_key(|id| (self.keys.get(id), *id));
    }

    /// Places and gaps, in order.
    pub(crate) fn slots(&self) -> &[Slot] {
        &self.slots
    }

    /// What a scan asks of the places, in order.
    pub(crate) fn glances(&self) -> &[Glance] {
        &self.glances
    }

    /// How the places take part in a decision, in order.
    pub(crate) fn kinds(&self) -> &[Kind] {
        &self.kinds
    }

    /// The first place after this one that has a lower priority. Doubling steps: a class of few is found at once.
    pub(crate) fn class_end(&self, start: usize) -> usize {
        let later = &self.glances[start..];
        let is_same = |other: &Glance| other.priority == later[0].priority;
        let mut step = 1;
        while later.get(step).is_some_and(is_same) {
            step *= 2;
        }
        let within = &later[step / 2..step.min(later.len())];
        start + step / 2 + within.partition_point(is_same)
    }

    /// Where those are, in order, whose first load is this node.
    pub(crate) fn sharers(&self, node: u64) -> impl Iterator<Item = usize> + '_ {
        let first = Key { priority: Reverse(i32::MAX), arrived: Time(0), id: RequestId(0) };
        let last = Key { priority: Reverse(i32::MIN), arrived: Time(u64::MAX), id: RequestId(u64::MAX) };
        self.sharers.range((node, first)..=(node, last)).filter_map(|(_, key)| self.place(key))
    }

    /// How many there are whose first load is this node.
    pub(crate) fn count_sharers(&self, node: u64) -> u32 {
        self.sharers_of.get(&node).copied().unwrap_or(0)
    }

    fn share(&mut self, node: Option<u64>, key: Key) {
        let Some(node) = node else { return };
        if self.sharers.insert((node, key)) {
            *self.sharers_of.entry(node).or_insert(0) += 1;
        }
    }

    fn unshare(&mut self, node: Option<u64>, key: Key) {
        let Some(node) = node else { return };
        if !self.sharers.remove(&(node, key)) {
            return;
        }
        if let Entry::Occupied(mut count) = self.sharers_of.entry(node) {
            *count.get_mut() -= 1;
            if *count.get() == 0 {
                count.remove();
            }
        }
    }

    fn locate(&self, id: RequestId) -> Option<(Key, usize)> {
        let key = *self.keys.get(&id)?;
        self.place(&key).map(|place| (key, place))
    }

    fn place(&self, key: &Key) -> Option<usize> {
        self.slots.binary_search_by_key(key, |slot| Key::of(&slot.waiting)).ok()
    }

    fn insert(&mut self, slot: Slot) -> usize {
        let key = Key::of(&slot.waiting);
        self.keys.insert(key.id, key);
        self.share(slot.first_load, key);
        let is_last = self.slots.last().is_none_or(|last| Key::of(&last.waiting) < key);
        let found = match is_last {
            true => Err(self.slots.len()),
            false => self.slots.binary_search_by_key(&key, |slot| Key::of(&slot.waiting)),
        };
        match found {
            // The gap that it left itself.
            Ok(place) => {
                self.gaps -= usize::from(self.slots[place].gone);
                self.slots[place] = slot;
                self.look(place);
                place
            }
            Err(place) => {
                self.glances.insert(place, Glance::of(&slot));
                self.kinds.insert(place, Kind::of(&slot));
                self.slots.insert(place, slot);
                place
            }
        }
    }

    /// Sees what a change of a slot is to a scan.
    fn look(&mut self, place: usize) {
        self.glances[place] = Glance::of(&self.slots[place]);
        self.kinds[place] = Kind::of(&self.slots[place]);
    }

    /// Leaves a gap. Gaps keep their key, so that the array stays in order.
    fn take(&mut self, id: RequestId) -> Option<Slot> {
        let (key, place) = self.locate(id)?;
        self.keys.remove(&id);
        self.unshare(self.slots[place].first_load, key);
        let slot = &mut self.slots[place];
        let left = slot.clone();
        slot.waiting.standing.loads = Box::default();
        slot.gone = true;
        self.kinds[place] = Kind::Gap;
        self.gaps += 1;
        if self.gaps > FEW_GAPS && self.gaps * 8 > self.slots.len() {
            self.close_gaps();
        }
        Some(left)
    }

    fn close_gaps(&mut self) {
        self.slots.retain(|slot| !slot.gone);
        self.glances = self.slots.iter().map(Glance::of).collect();
        self.kinds = self.slots.iter().map(Kind::of).collect();
        self.gaps = 0;
    }

    /// Notes that a deferral begins or ends, and what a scan sees of the change.
    fn account(&mut self, place: usize, now: Time) {
        let slot = &mut self.slots[place];
        let is_delay_hit = self.threshold.is_some_and(|most| slot.waiting.standing.need.transient > most);
        if is_delay_hit {
            slot.deferred_before = true;
            slot.deferred_since.get_or_insert(now);
        } else if let Some(since) = slot.deferred_since.take() {
            self.end_deferral(since, now);
        }
        self.look(place);
    }

    fn end_deferral(&mut self, since: Time, now: Time) {
        self.deferrals += 1;
        self.deferral += now.since(since);
    }
}
