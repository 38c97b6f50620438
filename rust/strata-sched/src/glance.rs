//! What the scan of a decision asks of a place in the queue, close together: two places to a cache line, where a
//! request as a whole takes three lines.

use crate::queue::Slot;

/// How a place takes part in a decision. Places of one kind side by side are dealt with at once.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    /// May go when it is its turn.
    Plain,
    /// Needs what another computes, or did: it may have to wait, or goes before those who never did.
    Follower,
    /// Held back.
    Held,
    /// Left.
    Gap,
}

impl Kind {
    pub fn of(slot: &Slot) -> Kind {
        match slot.live() {
            None => Kind::Gap,
            Some(waiting) if waiting.held => Kind::Held,
            Some(waiting) if slot.deferred_before || waiting.standing.need.transient > 0 => Kind::Follower,
            Some(_) => Kind::Plain,
        }
    }
}

/// What one place would load and compute.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Glance {
    /// The node of its first load, if it has any.
    pub node: u64,
    /// Tokens to load.
    pub load: u32,
    /// Tokens to compute.
    pub compute: u32,
    /// Tokens before those.
    pub context: u32,
    /// Tokens that some tier holds.
    pub cached: u32,
    /// Higher goes first.
    pub priority: i32,
}

impl Glance {
    pub fn of(slot: &Slot) -> Glance {
        let need = &slot.waiting.standing.need;
        Glance {
            node: slot.first_load.unwrap_or(0),
            load: slot.load,
            compute: need.to_compute(),
            context: need.context(),
            cached: need.context().saturating_add(need.disk),
            priority: slot.waiting.priority,
        }
    }
}
