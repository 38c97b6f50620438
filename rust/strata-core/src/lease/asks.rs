//! What a lease asks for and may have to wait for: a load, for the disk or for room, and pages to compute into. Each is
//! answered by its deadline; later, and within `LONGEST_SAVE` of the question, only while pages that are on their way down
//! will make all the room that it needs. When Core ends, its giver tells.

use super::{Held, LeaseError, LoadGiver, ReserveGiver};
use crate::core::Core;
use crate::CoreError;
use std::time::Duration;
use strata_types::{RequestId, TierId, Time};

/// The longest that room is waited for, from the question on, because copies to lower tiers are about to make it.
pub(crate) const LONGEST_SAVE: Duration = Duration::from_secs(10);

/// A question that waits.
#[derive(Debug)]
pub(crate) struct Ask {
    pub(super) lease: RequestId,
    pub(super) want: Want,
    pub(super) since: Time,
    pub(super) until: Time,
}

#[derive(Debug)]
pub(super) enum Want {
    Load(u32, LoadGiver),
    Reserve(u32, ReserveGiver),
}

impl Ask {
    pub(super) fn refuse(&self, error: LeaseError) {
        // Whoever asked may have given up waiting.
        let _gone = match &self.want {
            Want::Load(_, giver) => giver.give(Err(error)).is_ok(),
            Want::Reserve(_, giver) => giver.give(Err(error)).is_ok(),
        };
    }

    /// True: that is an answer.
    fn refuse_released(&self) -> bool {
        self.refuse(LeaseError::Misuse("the match was released meanwhile".into()));
        true
    }
}

impl Core {
    pub(super) fn take_ask(&mut self, ask: Ask) {
        match self.refuses_asks {
            true => ask.refuse(LeaseError::Closed),
            false => self.asks.push_back(ask),
        }
    }

    /// Answers whoever waits, and whoever will, that the cache is closed.
    pub fn refuse_waiting_leases(&mut self) {
        self.refuses_asks = true;
        for ask in std::mem::take(&mut self.asks) {
            ask.refuse(LeaseError::Closed);
        }
    }

    /// Answers what can be answered now.
    pub(crate) fn answer_leases(&mut self) -> Result<(), CoreError> {
        for ask in std::mem::take(&mut self.asks) {
            let answered = match &ask.want {
                Want::Load(pages, giver) => self.try_load(&ask, *pages, giver)?,
                Want::Reserve(count, giver) => self.try_reserve(&ask, *count, giver)?,
            };
            if !answered {
                self.asks.push_back(ask);
            }
        }
        Ok(())
    }

    /// Whether a question may go on waiting for room for so many pages.
    fn waits_for_room(&self, ask: &Ask, pages: u32) -> Result<bool, CoreError> {
        if self.now < ask.until {
            return Ok(true);
        }
        let saving = self.control.making_room(TierId::DEVICE) && self.now.since(ask.since) < LONGEST_SAVE;
        Ok(saving && self.control.available_after_copies(TierId::DEVICE)? >= pages)
    }

    fn no_room(&self, wanted: &str) -> LeaseError {
        LeaseError::NoRoom(format!(
            "no room on the device for {wanted}: of its {} pages, {} are neither pinned nor reserved; release matches, \
             wait with timeout_s, or make the pool larger",
            self.control.capacity(TierId::DEVICE),
            self.control.available(TierId::DEVICE),
        ))
    }

    fn try_reserve(&mut self, ask: &Ask, count: u32, giver: &ReserveGiver) -> Result<bool, CoreError> {
        let Some(lease) = self.leases.get_mut(&ask.lease) else { return Ok(ask.refuse_released()) };
        let mut pages = Vec::new();
        if self.control.reserve_device(count, &mut pages)? {
            lease.reserved.extend(&pages);
            if let Err(Ok(pages)) = giver.give(Ok(pages)) {
                lease.reserved.retain(|page| !pages.contains(page));
                self.control.free_device(&pages)?;
            }
            return Ok(true);
        }
        if self.waits_for_room(ask, count)? {
            return Ok(false);
        }
        ask.refuse(self.no_room(&format!("{count} pages to compute into")));
        Ok(true)
    }

    fn try_load(&mut self, ask: &Ask, most: u32, giver: &LoadGiver) -> Result<bool, CoreError> {
        let id = ask.lease;
        let late = self.now >= ask.until;
        let Some(lease) = self.leases.get_mut(&id) else { return Ok(ask.refuse_released()) };
        let usable = most.min(lease.found);
        match &lease.prefetch {
            Some(prefetch) if !prefetch.waits.is_empty() && !late => return Ok(false),
            None if !late => {
                lease.prefetch = self.control.prefetch(id, &lease.namespace, &lease.tokens, usable)?;
                if lease.prefetch.is_some() {
                    return Ok(false);
                }
            }
            _ => {}
        }
        // What has come is all that comes: with the prefix that is there now, the rest is computed.
        let there = self.control.above_disk(&lease.namespace, &lease.tokens, usable)?;
        let admitted = self.control.admit(id, &lease.namespace, &lease.tokens, there, there, true, 0)?;
        let Some(admitted) = admitted else {
            let wanted = self.control.pages_to_load(&lease.namespace, &lease.tokens, there)?;
            if self.waits_for_room(ask, wanted)? {
                return Ok(false);
            }
            self.forget_load(id)?;
            ask.refuse(self.no_room(&format!("{wanted} cached pages")));
            return Ok(true);
        };
        let (held, load) = Held::of(admitted);
        let Some(lease) = self.leases.get_mut(&id) else { return Ok(true) };
        lease.held = Some(held);
        let (pins, prefetch) = (std::mem::take(&mut lease.pins), lease.prefetch.take());
        for pin in pins {
            self.control.unpin(pin)?;
        }
        self.end_lease_prefetch(id, prefetch)?;
        // The lease has it, whether or not anybody waits for it.
        let _gone = giver.give(Ok(load));
        Ok(true)
    }

    /// The lease is as it was before it was asked to load.
    fn forget_load(&mut self, id: RequestId) -> Result<(), CoreError> {
        let Some(lease) = self.leases.get_mut(&id) else { return Ok(()) };
        lease.asked = false;
        let prefetch = lease.prefetch.take();
        self.end_lease_prefetch(id, prefetch)
    }

    /// When a question of a lease has to be answered.
    pub(crate) fn next_lease_deadline(&self) -> Option<Time> {
        let ends = self.asks.iter().flat_map(|ask| [ask.until, ask.since + LONGEST_SAVE]);
        ends.filter(|end| *end > self.now).min()
    }
}
