//! The clients: they submit requests when their time has come, keep so many in flight at most, and note when tokens
//! came.

use crate::workload::RequestSpec;
use std::cmp::Reverse;
use std::collections::{BinaryHeap, VecDeque};
use strata_core::{NewRequest, PlanRow, RowResult, Sources};
use strata_types::{Namespace, RequestId, Time};

/// What became of a request.
#[derive(Clone, Copy, Debug, Default)]
pub struct Record {
    /// When its client was ready to submit it.
    pub due: Time,
    /// When it was submitted.
    pub submitted: Option<Time>,
    /// When its first token came.
    pub first_token: Option<Time>,
    /// When its last token came.
    pub finished: Option<Time>,
    /// Whether it was refused.
    pub refused: bool,
    /// Tokens that came.
    pub sampled: usize,
    /// Where its prompt came from.
    pub sources: Sources,
}

/// All clients of a run.
pub struct Clients {
    specs: Vec<RequestSpec>,
    /// One for each request.
    pub records: Vec<Record>,
    first_id: u64,
    namespace: Namespace,
    most_in_flight: usize,
    in_flight: usize,
    unfinished: usize,
    /// Who is to submit, and when.
    due: BinaryHeap<Reverse<(Time, usize)>>,
    /// Who would submit if fewer were in flight.
    held: VecDeque<usize>,
    followers: Vec<Vec<usize>>,
    start: Time,
    /// Whether Core is told where answers end.
    pub limits_answers: bool,
}

fn after(time: Time, seconds: f64) -> Time {
    Time(time.0 + (seconds * 1e9).round().max(0.0) as u64)
}

impl Clients {
    /// Clients of these requests, whose seconds count from `start`.
    pub fn new(specs: Vec<RequestSpec>, first_id: u64, most_in_flight: usize, start: Time) -> Clients {
        let mut due = BinaryHeap::new();
        let mut followers = vec![Vec::new(); specs.len()];
        for (index, spec) in specs.iter().enumerate() {
            match spec.after {
                Some(before) => followers[before.request].push(index),
                None => due.push(Reverse((after(start, spec.arrival_s), index))),
            }
        }
        Clients {
            records: vec![Record::default(); specs.len()],
            unfinished: specs.len(),
            specs,
            first_id,
            namespace: Namespace::new("", ""),
            most_in_flight: most_in_flight.max(1),
            in_flight: 0,
            due,
            held: VecDeque::new(),
            followers,
            start,
            limits_answers: false,
        }
    }

    /// When the next is ready to submit.
    pub fn next(&self) -> Option<Time> {
        self.due.peek().map(|Reverse((time, _))| *time)
    }

    /// Requests that have not ended.
    pub fn unfinished(&self) -> usize {
        self.unfinished
    }

    /// Requests that were submitted and have not ended.
    pub fn in_flight(&self) -> usize {
        self.in_flight
    }

    /// The next request to submit by now, if any.
    pub fn submit(&mut self, now: Time) -> Option<NewRequest> {
        while let Some(Reverse((time, index))) = self.due.peek().copied() {
            if time > now {
                break;
            }
            self.due.pop();
            self.records[index].due = time;
            self.held.push_back(index);
        }
        if self.in_flight >= self.most_in_flight {
            return None;
        }
        let index = self.held.pop_front()?;
        self.in_flight += 1;
        self.records[index].submitted = Some(now);
        let spec = &self.specs[index];
        Some(NewRequest {
            id: RequestId(self.first_id + index as u64),
            namespace: self.namespace,
            prompt: spec.tokens(),
            // Else Core is not to know where the answer ends.
            max_new_tokens: spec.output + usize::from(!self.limits_answers),
            priority: 0,
            keep: true,
        })
    }

    fn index(&self, id: RequestId) -> usize {
        (id.0 - self.first_id) as usize
    }

    /// What the model answers in this row.
    pub fn answer(&mut self, now: Time, row: &PlanRow) -> RowResult {
        let index = self.index(row.request);
        let (spec, record) = (&self.specs[index], &mut self.records[index]);
        if let Some(admission) = &row.admitted {
            if admission.preemptions == 0 {
                record.sources = admission.sources;
            }
        }
        if !row.sample {
            return RowResult::default();
        }
        let token = Some(spec.answer_token(record.sampled));
        if record.finished.is_some() {
            // Planned before the end was known.
            return RowResult { token, finished: true };
        }
        record.sampled += 1;
        record.first_token.get_or_insert(now);
        let finished = record.sampled >= spec.output;
        if finished {
            record.finished = Some(now);
            self.end(now, index);
        }
        RowResult { token, finished }
    }

    /// A request was refused; those that follow it never come.
    pub fn refused(&mut self, now: Time, id: RequestId) {
        let index = self.index(id);
        self.records[index].refused = true;
        self.end(now, index);
    }

    fn end(&mut self, now: Time, index: usize) {
        self.in_flight -= 1;
        self.unfinished -= 1;
        for follower in std::mem::take(&mut self.followers[index]) {
            let spec = &self.specs[follower];
            let think = spec.after.map_or(0.0, |before| before.think_s);
            let time = after(now, think).max(after(self.start, spec.arrival_s));
            self.due.push(Reverse((time, follower)));
        }
    }
}
