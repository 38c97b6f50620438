//! A link: one group of transfers after the other, first in first out. A group moves layer by layer at an even pace, so
//! while it is under way the time at which a layer is there is known.

use std::collections::VecDeque;
use strata_types::{Time, TransferDescriptor, TransferId};

/// Transfers that move together.
#[derive(Debug)]
struct Group {
    /// Each with the nanoseconds that it takes alone.
    transfers: Vec<(TransferDescriptor, u64)>,
    created: Time,
}

impl Group {
    fn place(&self, id: TransferId) -> Option<usize> {
        self.transfers.iter().position(|(transfer, _)| transfer.id == id)
    }

    fn nanoseconds(&self) -> u64 {
        self.transfers.iter().map(|(_, nanoseconds)| nanoseconds).sum()
    }
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
            Some(group) if merge && group.created == now => group.transfers.push((transfer, nanoseconds)),
            _ => self.queue.push_back(Group { transfers: vec![(transfer, nanoseconds)], created: now }),
        }
    }

    /// Starts the next group if none is under way. Says until when it moves, if one was started.
    pub fn start(&mut self, now: Time) -> Option<Time> {
        if self.current.is_some() {
            return None;
        }
        let group = self.queue.pop_front()?;
        let until = Time(now.0 + group.nanoseconds());
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
        let transfers = group.transfers.into_iter().map(|(transfer, _)| transfer).collect();
        Some(Moved { transfers, since, until })
    }

    /// Takes a transfer out. One that moves leaves the link free at once, unless others move with it.
    pub fn cancel(&mut self, now: Time, id: TransferId) -> Option<TransferDescriptor> {
        if let Some(current) = &mut self.current {
            if let Some(place) = current.group.place(id) {
                let (transfer, _) = current.group.transfers.remove(place);
                if current.group.transfers.is_empty() {
                    self.busy += now.0 - current.since.0;
                    self.current = None;
                }
                return Some(transfer);
            }
        }
        let (index, place) =
            self.queue.iter().enumerate().find_map(|(index, group)| Some((index, group.place(id)?)))?;
        let group = &mut self.queue[index];
        let (transfer, _) = group.transfers.remove(place);
        if group.transfers.is_empty() {
            self.queue.remove(index);
        }
        Some(transfer)
    }

    /// Where a transfer is; none if the link does not have it.
    pub fn progress(&self, id: TransferId) -> Option<Progress> {
        if let Some(current) = self.current.as_ref().filter(|current| current.group.place(id).is_some()) {
            return Some(Progress::Moving(current.since, current.until));
        }
        self.queue.iter().any(|group| group.place(id).is_some()).then_some(Progress::Queued)
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

#[cfg(test)]
mod tests {
    use super::*;
    use strata_types::{GroupId, PageId, PageMove, TransferKind};

    fn transfer(id: u64) -> TransferDescriptor {
        TransferDescriptor {
            id: TransferId(id),
            kind: TransferKind::Load,
            group: GroupId(0),
            pages: vec![PageMove { from: PageId(0), to: PageId(0) }],
            records: Vec::new(),
            ticket: None,
        }
    }

    fn moves(link: &mut Link, now: u64, expected: &[u64]) {
        let moved = link.finish(Time(now)).map_or(Vec::new(), |moved| moved.transfers);
        let ids: Vec<u64> = moved.iter().map(|transfer| transfer.id.0).collect();
        assert_eq!(ids.as_slice(), expected);
    }

    #[test]
    fn groups_move_one_after_the_other() {
        let mut link = Link::default();
        link.submit(Time(5), transfer(1), 10, true);
        link.submit(Time(5), transfer(2), 20, true);
        link.submit(Time(5), transfer(3), 7, false);
        assert_eq!(link.start(Time(5)), Some(Time(35)));
        assert_eq!(link.start(Time(6)), None);
        assert_eq!(link.progress(TransferId(2)), Some(Progress::Moving(Time(5), Time(35))));
        assert_eq!(link.progress(TransferId(3)), Some(Progress::Queued));
        moves(&mut link, 34, &[]);
        moves(&mut link, 35, &[1, 2]);
        assert_eq!(link.start(Time(35)), Some(Time(42)));
        moves(&mut link, 42, &[3]);
        assert_eq!((link.busy, link.is_busy(), link.progress(TransferId(3))), (37, false, None));
    }

    #[test]
    fn what_is_cancelled_takes_no_more_time() {
        let mut link = Link::default();
        (1..=3).for_each(|id| link.submit(Time(0), transfer(id), 10 * id, false));
        link.submit(Time(1), transfer(4), 40, true);
        link.submit(Time(1), transfer(5), 50, true);
        assert_eq!(link.start(Time(1)), Some(Time(11)));
        assert!(link.cancel(Time(4), TransferId(1)).is_some(), "under way, alone");
        assert!(link.cancel(Time(4), TransferId(2)).is_some(), "queued");
        assert!(link.cancel(Time(4), TransferId(4)).is_some(), "queued with another");
        assert!(link.cancel(Time(4), TransferId(9)).is_none());
        assert_eq!(link.start(Time(4)), Some(Time(34)));
        moves(&mut link, 34, &[3]);
        assert_eq!(link.start(Time(34)), Some(Time(84)));
        moves(&mut link, 84, &[5]);
        assert_eq!(link.busy, 3 + 30 + 50);
    }
}
