//! What a tier is to the rest of Strata: a pool of pages that are reserved, committed and released, and a Mover
//! that carries pages across one edge. Fakes stand beside the real ones, and one conformance suite judges all.
#![forbid(unsafe_code)]

pub mod conformance;
pub mod fakes;
mod mover;
mod pool;
mod queue;

pub use mover::{completion_queue, CompletionReceiver, CompletionSender, Mover, SubmitError};
pub use pool::{Misuses, PagePool, PageState, PoolError};
pub use queue::{QueueStats, Report, Taken, TransferQueue};
