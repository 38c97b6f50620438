//! The outstanding transfers, and the order among those that touch the same record: each starts only after every
//! earlier one that shares a record with it. So an erase never overtakes a spill, and no two of them mix their bytes.

use crate::transfer::Transfer;
use std::collections::HashMap;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;
use strata_types::{PageId, TransferId};

/// Numbers transfers in order of admission; ids are their submitter's and may repeat.
type Number = u64;

#[derive(Default)]
pub(crate) struct Registry {
    state: Mutex<State>,
    emptied: Condvar,
}

#[derive(Default)]
struct State {
    numbered: Number,
    entries: HashMap<Number, Entry>,
    by_id: HashMap<TransferId, Number>,
    /// The last admitted transfer that touches each record.
    last_user: HashMap<PageId, Number>,
    /// Transfers whose completion has not been begun to be handed over: whoever receives one no longer counts it.
    outstanding: usize,
    /// Transfers whose completion has not been handed over.
    unreported: usize,
    closed: bool,
}

struct Entry {
    transfer: Arc<Transfer>,
    /// Earlier transfers that it waits for.
    blockers: usize,
    /// Later transfers that wait for it.
    dependants: Vec<Number>,
}

/// What became of an admission.
pub(crate) enum Admission {
    /// Start it now.
    Start(Number, Arc<Transfer>),
    /// `settle` of another will say when.
    Waits,
    /// Too many are outstanding.
    Full(Transfer),
    /// The store is closed.
    Closed(Transfer),
}

impl Registry {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes a transfer in; its records must differ from each other.
    pub fn admit(&self, transfer: Transfer, most: usize) -> Admission {
        let mut guard = self.state();
        let state = &mut *guard;
        if state.closed {
            return Admission::Closed(transfer);
        }
        if state.entries.len() >= most {
            return Admission::Full(transfer);
        }
        state.numbered += 1;
        let number = state.numbered;
        let mut blockers = 0;
        for index in 0..transfer.len() {
            let before = state.last_user.insert(transfer.disk_page(index), number);
            if let Some(entry) = before.and_then(|before| state.entries.get_mut(&before)) {
                entry.dependants.push(number);
                blockers += 1;
            }
        }
        let transfer = Arc::new(transfer);
        state.by_id.insert(transfer.id(), number);
        state
            .entries
            .insert(number, Entry { transfer: Arc::clone(&transfer), blockers, dependants: Vec::new() });
        state.outstanding += 1;
        state.unreported += 1;
        if blockers == 0 {
            Admission::Start(number, transfer)
        } else {
            Admission::Waits
        }
    }

    pub fn cancel(&self, id: TransferId) {
        let state = self.state();
        if let Some(entry) = state.by_id.get(&id).and_then(|number| state.entries.get(number)) {
            entry.transfer.cancel();
        }
    }

    /// All that are outstanding, oldest first.
    pub fn all(&self) -> Vec<Arc<Transfer>> {
        let state = self.state();
        let mut entries: Vec<_> = state.entries.iter().collect();
        entries.sort_by_key(|(number, _)| **number);
        entries.into_iter().map(|(_, entry)| Arc::clone(&entry.transfer)).collect()
    }

    /// Whether a transfer touches a record from `first` on.
    pub fn is_used_from(&self, first: u32) -> bool {
        self.state().last_user.keys().any(|record| record.0 >= first)
    }

    /// A transfer has let go of everything: forgets it and returns those that may start now; `None` if it was not
    /// outstanding.
    pub fn settle(&self, number: Number) -> Option<Vec<(Number, Arc<Transfer>)>> {
        let mut guard = self.state();
        let state = &mut *guard;
        let entry = state.entries.remove(&number)?;
        let id = entry.transfer.id();
        if state.by_id.get(&id) == Some(&number) {
            state.by_id.remove(&id);
        }
        for index in 0..entry.transfer.len() {
            let record = entry.transfer.disk_page(index);
            if state.last_user.get(&record) == Some(&number) {
                state.last_user.remove(&record);
            }
        }
        let mut ready = Vec::new();
        for dependant in entry.dependants {
            if let Some(waiting) = state.entries.get_mut(&dependant) {
                waiting.blockers -= 1;
                if waiting.blockers == 0 {
                    ready.push((dependant, Arc::clone(&waiting.transfer)));
                }
            }
        }
        Some(ready)
    }

    /// A completion is about to be handed over.
    pub fn reporting(&self) {
        let mut state = self.state();
        state.outstanding = state.outstanding.saturating_sub(1);
    }

    /// A completion was handed over, or given up.
    pub fn reported(&self) {
        let mut state = self.state();
        state.unreported = state.unreported.saturating_sub(1);
        if state.unreported == 0 {
            self.emptied.notify_all();
        }
    }

    pub fn outstanding(&self) -> usize {
        self.state().outstanding
    }

    /// Admits no more.
    pub fn close(&self) {
        self.state().closed = true;
    }

    /// Waits until every completion was handed over; false if that takes too long.
    pub fn wait_until_empty(&self, deadline: Duration) -> bool {
        let wait = self.emptied.wait_timeout_while(self.state(), deadline, |state| state.unreported > 0);
        let (state, _) = wait.unwrap_or_else(PoisonError::into_inner);
        state.unreported == 0
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use strata_types::{GroupId, PageMove, TransferDescriptor, TransferKind};

    fn transfer(id: u64, records: &[u32]) -> Transfer {
        let pages = records.iter().map(|r| PageMove { from: PageId(*r), to: PageId(*r) }).collect();
        Transfer::new(TransferDescriptor {
            id: TransferId(id),
            kind: TransferKind::Erase,
            group: GroupId(0),
            pages,
            records: Vec::new(),
            ticket: None,
        })
    }

    fn started(admission: Admission) -> u64 {
        match admission {
            Admission::Start(number, _) => number,
            _ => panic!("not started"),
        }
    }

    #[test]
    fn transfers_of_a_record_go_one_after_the_other() {
        let registry = Registry::default();
        let one = started(registry.admit(transfer(1, &[1, 2]), 8));
        assert!(matches!(registry.admit(transfer(2, &[2, 1, 3]), 8), Admission::Waits));
        let other = started(registry.admit(transfer(3, &[9]), 8));
        assert!(matches!(registry.admit(transfer(4, &[3, 9]), 8), Admission::Waits));
        assert!(matches!(registry.admit(transfer(5, &[50]), 4), Admission::Full(_)));
        let ids = |ready: &[(u64, Arc<Transfer>)]| ready.iter().map(|(_, t)| t.id().0).collect::<Vec<_>>();
        let ready = registry.settle(one).unwrap();
        assert!(registry.settle(one).is_none(), "settled before");
        assert_eq!(ids(&ready), [2]);
        assert!(registry.settle(other).unwrap().is_empty());
        let last = registry.settle(ready[0].0).unwrap();
        assert!(registry.is_used_from(9) && !registry.is_used_from(10));
        assert_eq!(ids(&last), [4]);
        assert!(registry.settle(last[0].0).is_some());
        assert_eq!(registry.outstanding(), 4);
        (0..4).for_each(|_| registry.reporting());
        assert!(registry.outstanding() == 0 && !registry.wait_until_empty(Duration::ZERO));
        (0..4).for_each(|_| registry.reported());
        assert!(registry.wait_until_empty(Duration::ZERO));
        assert!(registry.state().last_user.is_empty() && registry.state().by_id.is_empty());
        registry.close();
        assert!(matches!(registry.admit(transfer(6, &[1]), 8), Admission::Closed(_)));
    }
}
