//! The words that every Strata crate shares, and nothing else: ids, layouts, keys, tickets and transfer
//! descriptors. No I/O, no policy, no tensor.
#![forbid(unsafe_code)]

mod ids;
mod key;
mod layout;
mod ticket;
mod time;
mod transfer;

pub use ids::{GroupId, PageId, PlanId, RequestId, ShardId, TierId, Token, TransferId};
pub use key::{Fingerprint, KeyHasher, Namespace, PageKey};
pub use layout::{InnerOrder, KvLayout, KvShape, LayoutError, ShardSplit};
pub use ticket::{LoadTicket, TicketState, WaitOutcome};
pub use time::Time;
pub use transfer::{
    PageMove, PageRecord, TransferCompletion, TransferDescriptor, TransferError, TransferKind,
};
