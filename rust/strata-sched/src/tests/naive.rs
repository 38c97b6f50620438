//! `static` and `adaptive` as straight-line models: no index, no scratch, no early exit; what the algorithm says,
//! step by step.

use super::*;
use std::collections::{BTreeMap, BTreeSet};

/// One part of the model's batch.
#[derive(Clone, Copy, Debug)]
pub struct Part {
    pub id: RequestId,
    pub tokens: u32,
    load: f64,
    /// When it was admitted; none if it would be now.
    since: Option<Time>,
}

#[derive(Default)]
pub struct Model {
    pub parts: Vec<Part>,
    nodes: BTreeSet<u64>,
    load: f64,
    compute: f64,
    pages: u32,
    running: u32,
    tokens: u32,
}

/// Loaded tokens that hide behind a computed one, those that hide anyway, those that load while a step of its own would
/// run, those that load during a decode step, whether helpers may join, whether the load that is worth most goes first,
/// and whether small ones pass.
#[derive(Clone, Copy)]
pub struct Rule {
    pub ratio: f64,
    pub hidden: f64,
    pub own_step: f64,
    pub decode_step: f64,
    pub helpers: bool,
    pub worth: bool,
    pub passing: bool,
}

#[derive(PartialEq)]
enum Outcome {
    Joined,
    /// No tokens, or as many run as may.
    Full,
    NoRoom,
}

impl Model {
    fn chunk(&self, waiting: &Waiting) -> u32 {
        let need = waiting.standing.need;
        (need.compute + need.transient + need.disk).max(1).min(self.tokens)
    }

    fn shared(&self, waiting: &Waiting) -> u32 {
        let runs = waiting.standing.loads.iter().filter(|run| self.nodes.contains(&run.node));
        runs.map(|run| run.tokens).sum()
    }

    fn is_bound_with(&self, rule: Rule, waiting: &Waiting) -> bool {
        let load = f64::from(waiting.load_tokens() - self.shared(waiting));
        let compute = f64::from(self.chunk(waiting));
        let helps = rule.helpers && load <= rule.ratio * compute;
        !helps && self.load + load > rule.hidden + rule.ratio * (self.compute + compute)
    }

    fn join(&mut self, view: &View<'_>, waiting: &Waiting) -> Outcome {
        let shared = self.shared(waiting);
        let pages = waiting.standing.pages.saturating_sub(shared / view.page_size);
        let tokens = self.chunk(waiting);
        if tokens == 0 || self.running >= view.limits.max_running {
            return Outcome::Full;
        }
        if pages + self.running > self.pages {
            return Outcome::NoRoom;
        }
        self.pages -= pages;
        self.running += 1;
        self.tokens -= tokens;
        self.load += f64::from(waiting.load_tokens() - shared);
        self.compute += f64::from(tokens);
        self.nodes.extend(waiting.standing.loads.iter().map(|run| run.node));
        self.parts.push(Part { id: waiting.id, tokens, load: f64::from(waiting.load_tokens()), since: None });
        Outcome::Joined
    }

    fn has(&self, waiting: &Waiting) -> bool {
        self.parts.iter().any(|part| part.id == waiting.id)
    }
}

/// Who may go, in order: not held, not deferred, one successor for each overdue owner.
fn candidates<'a>(view: &View<'a>) -> Vec<&'a Waiting> {
    let mut successors: BTreeMap<RequestId, RequestId> = BTreeMap::new();
    let mut candidates = Vec::new();
    for waiting in view.waiting.iter().filter(|waiting| !waiting.held) {
        let standing = &waiting.standing;
        if let (true, Some(until)) = (standing.need.transient > 100, standing.defer_until) {
            if view.now < until {
                continue;
            }
            let Some(owner) = standing.follows else { continue };
            if *successors.entry(owner).or_insert(waiting.id) != waiting.id {
                continue;
            }
        }
        candidates.push(waiting);
    }
    // Stable: those who were deferred come before the others of their priority.
    candidates.sort_by_key(|waiting| (-waiting.priority, !deferred_before(view, waiting)));
    candidates
}

/// The batch that the algorithm forms.
pub fn form(view: &View<'_>, rule: Rule) -> Model {
    let (mut batch, blocked) = fill(view, rule);
    let Some(blocked) = blocked.filter(|blocked| rule.passing && seconds_waited(view, blocked) < 30.0) else {
        return batch;
    };
    let need = |waiting: &Waiting| waiting.standing.pages;
    for waiting in candidates(view).into_iter().filter(|waiting| waiting.priority >= blocked.priority) {
        let is_small = need(waiting) * 10 < need(blocked) && waiting.load_tokens() == 0;
        if is_small && !batch.has(waiting) && batch.join(view, waiting) != Outcome::Joined {
            break;
        }
    }
    batch
}

fn seconds_waited(view: &View<'_>, waiting: &Waiting) -> f64 {
    view.now.since(waiting.arrived).as_secs_f64()
}

/// The batch before anybody passes, and the first for whom there was no room.
fn fill<'a>(view: &View<'a>, rule: Rule) -> (Model, Option<&'a Waiting>) {
    let mut batch = Model {
        pages: view.available_pages,
        running: view.running,
        tokens: view.limits.batch_tokens,
        ..Model::default()
    };
    let candidates = candidates(view);
    freed(&mut batch, view, &candidates);
    for row in view.prefilling {
        let tokens = row.remaining.min(batch.tokens);
        if tokens > 0 {
            batch.tokens -= tokens;
            batch.load += f64::from(row.loading);
            batch.compute += f64::from(tokens);
            let load = f64::from(row.loading);
            batch.parts.push(Part { id: row.id, tokens, load, since: Some(row.since) });
        }
    }
    let Some(first) = first(&batch, view, rule, &candidates) else { return (batch, None) };
    match batch.join(view, first) {
        Outcome::Joined => {}
        Outcome::Full => return (batch, None),
        Outcome::NoRoom => return (batch, Some(first)),
    }
    let mut blocked = bundle(&mut batch, view, rule, first, &candidates);
    let mut set_aside = Vec::new();
    for waiting in &candidates {
        if batch.has(waiting) {
            continue;
        }
        if batch.chunk(waiting) > 0 && batch.is_bound_with(rule, waiting) {
            set_aside.push(*waiting);
            continue;
        }
        match batch.join(view, waiting) {
            Outcome::Joined => {}
            Outcome::Full => break,
            Outcome::NoRoom => {
                blocked = blocked.or(Some(waiting));
                break;
            }
        }
        let in_bundle = bundle(&mut batch, view, rule, waiting, &candidates);
        blocked = blocked.or(in_bundle);
    }
    for waiting in set_aside {
        let own = f64::from(waiting.load_tokens() - batch.shared(waiting));
        let is_bound = batch.load > rule.hidden + rule.ratio * batch.compute;
        if batch.has(waiting) || (is_bound && batch.chunk(waiting) > 0 && own > rule.own_step) {
            continue;
        }
        match batch.join(view, waiting) {
            Outcome::Joined => {}
            Outcome::Full => break,
            Outcome::NoRoom => {
                blocked = blocked.or(Some(waiting));
                break;
            }
        }
    }
    (batch, blocked)
}

/// The head, or where its load does not hide, of those of its priority of which this is true the one whose load is
/// worth most.
fn first<'a>(batch: &Model, view: &View<'_>, rule: Rule, candidates: &[&'a Waiting]) -> Option<&'a Waiting> {
    let left: Vec<&Waiting> = candidates.iter().copied().filter(|waiting| !batch.has(waiting)).collect();
    let head = *left.first()?;
    let sticks_out = |waiting: &Waiting| {
        let compute = batch.compute + f64::from(batch.chunk(waiting));
        let load = batch.load + f64::from(waiting.load_tokens());
        batch.chunk(waiting) > 0 && load > rule.hidden + rule.ratio * compute
    };
    if !rule.worth || !sticks_out(head) {
        return Some(head);
    }
    let node = |waiting: &Waiting| waiting.standing.loads.first().map(|run| run.node);
    let worth = |waiting: &Waiting| match node(waiting) {
        Some(wanted) => {
            let served = view.waiting.iter().filter(|other| node(other) == Some(wanted)).count();
            let waited = view.now.since(waiting.arrived).as_secs_f64();
            served as f64 * waited * waited.sqrt() / f64::from(waiting.load_tokens().max(1))
        }
        None => 0.0,
    };
    let alike = left.iter().filter(|waiting| waiting.priority == head.priority && sticks_out(waiting));
    alike.copied().reduce(|best, other| if worth(other) > worth(best) { other } else { best })
}

/// Those first in order who were deferred once, need nothing of others any more and load nothing, each as a whole, up
/// to half of a batch that the running prompts would fill and more.
fn freed(batch: &mut Model, view: &View<'_>, candidates: &[&Waiting]) {
    let wanted: u32 = view.prefilling.iter().map(|row| row.remaining).sum();
    if wanted <= batch.tokens {
        return;
    }
    let least = batch.tokens - batch.tokens / 2;
    for waiting in candidates {
        let need = waiting.standing.need;
        let free = deferred_before(view, waiting) && need.transient <= 100 && waiting.load_tokens() == 0;
        let wants = (need.compute + need.transient + need.disk).max(1);
        if !free || batch.tokens < least + wants {
            return;
        }
        if batch.join(view, waiting) != Outcome::Joined {
            return;
        }
    }
}

fn deferred_before(view: &View<'_>, waiting: &Waiting) -> bool {
    view.waiting.slots().iter().any(|slot| slot.waiting.id == waiting.id && slot.deferred_before)
}

/// Admits who shares the load of one that has just joined; the one for whom there was no room.
fn bundle<'a>(
    batch: &mut Model,
    view: &View<'_>,
    rule: Rule,
    joined: &Waiting,
    candidates: &[&'a Waiting],
) -> Option<&'a Waiting> {
    let first = joined.standing.loads.first()?;
    let shares = |other: &&Waiting| other.standing.loads.first().is_some_and(|run| run.node == first.node);
    let mut sharers: Vec<&Waiting> = candidates.iter().copied().filter(shares).collect();
    sharers.sort_by_key(|waiting| (-waiting.priority, waiting.arrived, waiting.id));
    for other in sharers {
        let shared = batch.shared(other);
        let together = !rule.helpers || shared * 2 >= other.load_tokens();
        if batch.has(other) || (batch.chunk(other) > 0 && !together) {
            continue;
        }
        match batch.join(view, other) {
            Outcome::Joined => {}
            Outcome::Full => return None,
            Outcome::NoRoom => return Some(other),
        }
    }
    None
}

/// What becomes of the batch: chunks, admissions, step.
pub fn decision(view: &View<'_>, rule: Rule, seconds_per_load: f64) -> (Step, Vec<Admission>) {
    let batch = form(view, rule);
    let fresh = batch.parts.iter().filter(|part| part.since.is_none()).count();
    let alone = view.waiting.iter().count() == fresh;
    let hidden = rule.hidden + if alone { rule.decode_step } else { 0.0 };
    let bubble = !view.decodable.is_empty() && batch.load > hidden + rule.ratio * batch.compute;
    let waits = |part: &Part| {
        let patient =
            |since: Time| view.now.since(since).as_secs_f64() < 2.0 * batch.load * seconds_per_load + 0.1;
        bubble && part.load > 0.0 && part.since.is_none_or(patient)
    };
    let tokens = |part: &Part| if waits(part) { 0 } else { part.tokens };
    let chunks: Vec<Chunk> = batch
        .parts
        .iter()
        .filter(|part| part.since.is_some() && !waits(part))
        .map(|part| Chunk { id: part.id, tokens: part.tokens })
        .collect();
    let new = batch.parts.iter().filter(|part| part.since.is_none());
    let admissions: Vec<Admission> =
        new.map(|part| Admission { id: part.id, tokens: tokens(part) }).collect();
    let computes = !chunks.is_empty() || admissions.iter().any(|admission| admission.tokens > 0);
    let step = match (computes, view.decodable) {
        (true, _) => Step::Prefill(chunks),
        (false, []) => Step::Idle,
        (false, ids) => Step::Decode(ids.to_vec()),
    };
    (step, admissions)
}
