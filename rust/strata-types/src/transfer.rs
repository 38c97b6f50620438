//! Transfers as plain data: what to move from which page to which page. A Mover executes a descriptor and
//! answers with a completion; neither carries a pointer, so both can cross a process boundary.

use crate::{GroupId, LoadTicket, Namespace, PageId, PageKey, ShardId, TierId, Token, TransferId};
use std::ops::Range;
use std::sync::Arc;
use thiserror::Error;

/// The edge that a transfer crosses.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum TransferKind {
    /// Host to device, layer by layer.
    Load,
    /// Device to host.
    Backup,
    /// Host to disk.
    Spill,
    /// Disk to host.
    Prefetch,
    /// Forgets records on disk, so that a restart does not find them.
    Erase,
}

impl TransferKind {
    /// How many kinds there are.
    pub const COUNT: usize = 5;

    /// Its place in a table of `COUNT` entries: the order of the variants.
    pub const fn index(self) -> usize {
        self as usize
    }

    /// The tier that is read (for `Erase`, the tier that is cleared).
    pub fn source(self) -> TierId {
        match self {
            TransferKind::Load | TransferKind::Spill => TierId::HOST,
            TransferKind::Backup => TierId::DEVICE,
            TransferKind::Prefetch | TransferKind::Erase => TierId::DISK,
        }
    }

    /// The tier that is written.
    pub fn destination(self) -> TierId {
        match self {
            TransferKind::Load => TierId::DEVICE,
            TransferKind::Backup | TransferKind::Prefetch => TierId::HOST,
            TransferKind::Spill | TransferKind::Erase => TierId::DISK,
        }
    }

    /// The name that logs and metrics use.
    pub fn name(self) -> &'static str {
        match self {
            TransferKind::Load => "load",
            TransferKind::Backup => "backup",
            TransferKind::Spill => "spill",
            TransferKind::Prefetch => "prefetch",
            TransferKind::Erase => "erase",
        }
    }
}

/// One page's way. For `Erase` both ends are the record to clear.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct PageMove {
    /// The page in the source tier.
    pub from: PageId,
    /// The page in the destination tier.
    pub to: PageId,
}

/// What a record on disk says about its page, and what a reader demands that it says.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PageRecord {
    /// The namespace of the sequence.
    pub namespace: Namespace,
    /// The key of the page before, or the namespace's root key.
    pub parent: PageKey,
    /// This page's key.
    pub key: PageKey,
    /// This page's tokens, exactly `page_size` of them.
    pub tokens: Vec<Token>,
}

/// A transfer to execute. `pages` is never empty; prefix order, so a short transfer still moves a prefix.
#[derive(Clone, Debug)]
pub struct TransferDescriptor {
    /// The number of this transfer.
    pub id: TransferId,
    /// The edge.
    pub kind: TransferKind,
    /// The group whose pages move.
    pub group: GroupId,
    /// What moves where.
    pub pages: Vec<PageMove>,
    /// One per page for `Spill` and `Prefetch`, empty otherwise.
    pub records: Vec<PageRecord>,
    /// Told layer by layer, for `Load`.
    pub ticket: Option<Arc<LoadTicket>>,
}

/// Why a transfer moved less than it was asked to.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
pub enum TransferError {
    /// Cancelled on request.
    #[error("the transfer was cancelled")]
    Cancelled,
    /// The record's checksum, header or tokens do not agree.
    #[error("record {record} does not hold the page that was asked for: {reason}")]
    Corrupt {
        /// The record on disk.
        record: PageId,
        /// What did not agree.
        reason: String,
    },
    /// The device or file system refused.
    #[error("{operation} failed: {reason}")]
    Io {
        /// What was being done, with the path.
        operation: String,
        /// What the system said.
        reason: String,
    },
    /// Nothing can be written to these pages of the destination until others let go of space.
    #[error("{operation} found no room: {reason}")]
    NoRoom {
        /// What was being done, with the path.
        operation: String,
        /// What the system said.
        reason: String,
        /// The pages.
        pages: Vec<Range<u32>>,
    },
    /// No answer within the deadline.
    #[error("{operation} did not finish within its deadline")]
    Deadline {
        /// What was being done.
        operation: String,
    },
    /// The tier is out of service.
    #[error("the {tier} tier is out of service: {reason}")]
    Unavailable {
        /// The tier.
        tier: &'static str,
        /// Why.
        reason: String,
    },
}

/// The Mover's word that it has finished with all memory of a transfer in one shard.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TransferCompletion {
    /// The transfer.
    pub id: TransferId,
    /// The shard that reports.
    pub shard: ShardId,
    /// How many pages, counted from the first, are whole at the destination.
    pub pages_whole: usize,
    /// Why it is not all of them.
    pub error: Option<TransferError>,
    /// Bytes that were moved.
    pub bytes: u64,
    /// Nanoseconds from the start of the work to its end, queueing left out.
    pub busy_ns: u64,
}
