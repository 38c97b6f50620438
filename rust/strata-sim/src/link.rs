//! A link: one group of transfers after the other, first in first out. A group moves layer by layer at an even pace, so
//! while it is under way the time at which a layer is there is known.

use std::collections::VecDeque;
use strata_types::{Time, TransferDescriptor, TransferId};

/// Transfers that move together.
#[derive(Debug)]
struct Group {
    transfers: Vec<TransferDescriptor>,
    created: Time,
    nanoseconds: u64,
}

#[derive(Debug)]
struct UnderWay {
    group: Group,
    since: Time,
    until: Time,
}

/// Where a transfer is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Progress {
    /// Behind others.
    Queued,
    /// Moving from the first time to the second.
    Moving(Time, Time),
}

/// One direction of one link.
#[derive(Debug, Default)]
pub struct Link {
    queue: VecDeque<Group>,
    current: Option<UnderWay>,
    /// Nanoseconds in which something moved.
    pub busy: u64,
}

/// What a link finished with.
#[derive(Debug)]
pub struct Moved {
    /// The transfers, in the order in which they were handed over.
    pub transfers: Vec<TransferDescriptor>,
    /// When they began to move.
    pub since: Time,
    /// When they were there.
    pub until: Time,
}

impl Link {
    /// Hands a transfer over; `merge` lets it move together with the one before it if that came at the same time.
    pub fn submit(&mut self, now: Time, transfer: TransferDescriptor, nanoseconds: u64, merge: bool) {
        match self.queue.back_mut() {
            Some(group) if merge && group.created == now => {
                group.transfers.push(transfer);
                group.nanoseconds += nanoseconds;
            }
            _ => self.queue.push_back(Group { transfers: vec![transfer], created: now, nanoseconds }),
        }
    }

    /// Starts the next group if none is under way. Says until when it moves, if one was started.
    pub fn start(&mut self, now: Time) -> Option<Time> {
        if self.current.is_some() {
            return None;
        }
        let group = self.queue.pop_front()?;
        let until = Time(now.0 + group.nanoseconds);
        self.current = Some(UnderWay { group, since: now, until });
        Some(until)
    }

    /// The group under way, if its time has come.
    pub fn finish(&mut self, now: Time) -> Option<Moved> {
        if self.current.as_ref()?.until > now {
            return None;
        }
        let UnderWay { group, since, until } = self.current.take()?;
        self.busy += until.0 - since.0;
        Some(Moved { transfers: group.transfers, since, until })
    }

    /// Takes a transfer out. One that moves leaves the link free at once, unless others move with it.
    pub fn cancel(&mut self, now: Time, id: TransferId) -> Option<TransferDescriptor> {
        if let Some(current) = &mut self.current {
            if let Some(index) = current.group.transfers.iter().position(|transfer| transfer.id == id) {
                let transfer = current.group.transfers.remove(index);
                if current.group.transfers.is_empty() {
                    self.busy += now.0 - current.since.0;
                    self.current = None;
                }
                return Some(transfer);
            }
        }
        for place in 0..self.queue.len() {
            let group = &mut self.queue[place];
            let Some(index) = group.transfers.iter().position(|transfer| transfer.id == id) else { continue };
            let whole = group.transfers.len() as u64;
            let transfer = group.transfers.remove(index);
            group.nanoseconds -= group.nanoseconds / whole;
            if group.transfers.is_empty() {
                self.queue.remove(place);
            }
            return Some(transfer);
        }
        None
    }

    /// Where a transfer is; none if the link does not have it.
    pub fn progress(&self, id: TransferId) -> Option<Progress> {
        let holds = |group: &Group| group.transfers.iter().any(|transfer| transfer.id == id);
        if let Some(current) = self.current.as_ref().filter(|current| holds(&current.group)) {
            return Some(Progress::Moving(current.since, current.until));
        }
        self.queue.iter().any(holds).then_some(Progress::Queued)
    }

    /// Until when the group under way moves.
    pub fn until(&self) -> Option<Time> {
        self.current.as_ref().map(|current| current.until)
    }

    /// Whether something moves.
    pub fn is_busy(&self) -> bool {
        self.current.is_some()
    }
}
