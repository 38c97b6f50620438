//! What Python asks of the tickets of loads, for plans and leases alike.

use crate::gate::released;
use std::sync::Arc;
use std::time::{Duration, Instant};
use strata_types::{LoadTicket, WaitOutcome};

/// The numbers of the transfers, each once, in order.
pub fn transfers(tickets: &[Arc<LoadTicket>]) -> Vec<u64> {
    let mut loads: Vec<u64> = tickets.iter().map(|ticket| ticket.transfer().0).collect();
    loads.sort_unstable();
    loads.dedup();
    loads
}

/// How one load stands, without waiting: the layer is `ready`, `pending`, or the load has `failed`.
pub fn state(tickets: &[Arc<LoadTicket>], load: u64, layer: u32) -> &'static str {
    let ticket = tickets.iter().find(|ticket| ticket.transfer().0 == load);
    match ticket.map(|ticket| ticket.wait_layer(layer, Duration::ZERO)) {
        Some(WaitOutcome::TimedOut) => "pending",
        Some(WaitOutcome::Failed) => "failed",
        Some(WaitOutcome::Ready) | None => "ready",
    }
}

/// Waits until a layer of every load is there: `ready`, `failed` or `timeout`. An atomic read where it is; blocks without
/// the lock otherwise.
pub fn wait_layer(
    py: pyo3::Python<'_>,
    tickets: &[Arc<LoadTicket>],
    layer: u32,
    deadline: Instant,
) -> &'static str {
    for ticket in tickets {
        let outcome = match ticket.wait_layer(layer, Duration::ZERO) {
            WaitOutcome::TimedOut => {
                released(py, || ticket.wait_layer(layer, deadline.saturating_duration_since(Instant::now())))
            }
            outcome => outcome,
        };
        match outcome {
            WaitOutcome::Ready => {}
            WaitOutcome::Failed => return "failed",
            WaitOutcome::TimedOut => return "timeout",
        }
    }
    "ready"
}
