//! The disk tier. `DiskStore` is a Mover: it spills host pages into records, prefetches records into host pages
//! and erases records, under one root that is capped, locked and private. A record matches after a restart only if
//! its header, its key chain and its payload's checksum all agree; anything else is a miss.
//!
//! The road of a transfer: `store` admits it, `transfer` cuts it into runs of adjacent records, `chain` turns each
//! run into a chain of I/Os, an `IoEngine` executes them, `store` reports. `format` says what lies on the disk.

mod background;
mod capacity;
mod chain;
mod config;
mod engine;
mod error;
mod format;
mod geometry;
mod health;
mod inspect;
mod memory;
mod purge;
mod recovery;
mod registry;
mod root;
mod scan;
mod segments;
mod service;
mod store;
mod ticker;
mod transfer;
mod trial;
mod usage;
mod watch;

pub use config::{DirectIo, DiskConfig, DiskEngine, MAX_DEPTH, MAX_SYNC_INTERVAL};
pub use engine::{
    probe_io_uring, start_engine, Buffer, Fate, Fault, FaultyEngine, Io, IoEngine, IoUringEngine, Lane,
    LoggedWrite, Operation, Part, RecordingEngine, Replay, RingGauges, RingProbe, SegmentBytes, SegmentFile,
    Started, Then, ThreadPoolEngine, ThrottledEngine,
};
pub use error::DiskError;
pub use format::{HeaderError, RecordHeader, Superblock, FORMAT_VERSION};
pub use geometry::{Geometry, BLOCK};
pub use health::{DiskStats, Health};
pub use inspect::{inspect, FolderInspection, Inspection};
pub use memory::PageMemory;
pub use purge::{purge, Purged};
pub use recovery::{Recovered, RecoveredRecord, Recovery, RecoveryBatch};
pub use root::{LOCK_FILE, MARKER_FILE};
pub use store::DiskStore;
pub use usage::disk_usage;
