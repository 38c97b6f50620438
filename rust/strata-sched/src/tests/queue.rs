//! The queue against a list that is sorted anew each time.

use super::*;
use proptest::prelude::*;
use std::cmp::Reverse;

#[derive(Clone, Debug)]
enum Event {
    Push(u64, i32, u64, u32),
    Remove(u64),
    Update(u64, u32, u64),
    Hold(u64, bool),
    Raise(u64, i32),
}

fn events() -> impl Strategy<Value = Event> {
    let id = 0u64..40;
    prop_oneof![
        4 => (id.clone(), 0i32..3, 0u64..6, 0u32..200).prop_map(|(id, p, at, t)| Event::Push(id, p, at, t)),
        3 => id.clone().prop_map(Event::Remove),
        3 => (id.clone(), 0u32..200, 0u64..5).prop_map(|(id, t, node)| Event::Update(id, t, node)),
        1 => (id.clone(), any::<bool>()).prop_map(|(id, held)| Event::Hold(id, held)),
        1 => (id, 0i32..5).prop_map(|(id, p)| Event::Raise(id, p)),
    ]
}

fn standing(transient: u32, node: u64) -> Standing {
    let loads = [LoadRun { node, tokens: 5 }].into_iter().filter(|run| run.node > 0).collect();
    Standing { need: Need { transient, ..Need::default() }, loads, ..Standing::default() }
}

#[derive(Default)]
struct Naive {
    all: Vec<(Waiting, Option<Time>)>,
    deferrals: u64,
    deferral: Duration,
}

impl Naive {
    fn account(&mut self, place: usize, now: Time) {
        let (waiting, since) = &mut self.all[place];
        if waiting.standing.need.transient > 100 {
            since.get_or_insert(now);
        } else if let Some(since) = since.take() {
            self.deferrals += 1;
            self.deferral += now.since(since);
        }
    }

    fn remove(&mut self, id: u64, now: Time) -> Option<Waiting> {
        let place = self.all.iter().position(|(waiting, _)| waiting.id.0 == id)?;
        let (waiting, since) = self.all.remove(place);
        if let Some(since) = since {
            self.deferrals += 1;
            self.deferral += now.since(since);
        }
        Some(waiting)
    }

    fn apply(&mut self, event: &Event, now: Time) -> Option<Waiting> {
        let find =
            |all: &Vec<(Waiting, _)>, id: &u64| all.iter().position(|(waiting, _)| waiting.id.0 == *id);
        match event {
            Event::Push(id, priority, arrived, transient) => {
                self.remove(*id, now);
                let new =
                    Waiting::new(RequestId(*id), Time(*arrived), *priority, standing(*transient, id % 4));
                self.all.push((new, None));
                self.account(self.all.len() - 1, now);
            }
            Event::Remove(id) => return self.remove(*id, now),
            Event::Update(id, transient, node) => {
                if let Some(place) = find(&self.all, id) {
                    self.all[place].0.standing = standing(*transient, *node);
                    self.account(place, now);
                }
            }
            Event::Hold(id, held) => {
                find(&self.all, id).into_iter().for_each(|place| self.all[place].0.held = *held);
            }
            Event::Raise(id, priority) => {
                if let Some(place) = find(&self.all, id) {
                    self.all[place].0.priority = self.all[place].0.priority.max(*priority);
                }
            }
        }
        None
    }

    fn sorted(&self) -> Vec<Waiting> {
        let mut sorted: Vec<Waiting> = self.all.iter().map(|(waiting, _)| waiting.clone()).collect();
        sorted.sort_by_key(|waiting| (Reverse(waiting.priority), waiting.arrived, waiting.id));
        sorted
    }
}

fn apply(queue: &mut Queue, event: &Event, now: Time) -> Option<Waiting> {
    match event {
        Event::Push(id, priority, arrived, transient) => {
            let new = Waiting::new(RequestId(*id), Time(*arrived), *priority, standing(*transient, id % 4));
            queue.push(now, new);
        }
        Event::Remove(id) => return queue.remove(now, RequestId(*id)),
        Event::Update(id, transient, node) => {
            queue.update(RequestId(*id), now, standing(*transient, *node));
        }
        Event::Hold(id, held) => {
            queue.set_held(RequestId(*id), *held);
        }
        Event::Raise(id, priority) => {
            queue.raise_priority(RequestId(*id), *priority);
        }
    }
    None
}

proptest! {
    #[test]
    fn the_queue_is_a_sorted_list(events in prop::collection::vec(events(), 0..400)) {
        let (mut queue, mut naive) = (Queue::new(Some(100)), Naive::default());
        for (now, event) in (0..).map(Time).zip(&events) {
            prop_assert_eq!(apply(&mut queue, event, now), naive.apply(event, now));
            let sorted = naive.sorted();
            prop_assert_eq!(queue.len(), sorted.len());
            prop_assert!(queue.iter().eq(&sorted));
            prop_assert_eq!((queue.deferrals, queue.deferral), (naive.deferrals, naive.deferral));
            for (first, second) in sorted.iter().zip(sorted.iter().skip(1)) {
                prop_assert!(queue.before(first.id, second.id) && !queue.before(second.id, first.id));
                prop_assert_eq!(queue.get(first.id), Some(first));
            }
            for node in 0..5 {
                let sharers = queue.sharers(node).map(|place| &queue.slots()[place].waiting);
                let expected = sorted.iter().filter(|waiting| waiting.standing.loads.iter().any(|run| run.node == node));
                prop_assert!(sharers.eq(expected));
            }
        }
    }
}
