//! What a store is told when it opens. Every field has a value that works; `validate` names what does not.

use crate::DiskError;
use std::num::NonZeroU64;
use std::path::PathBuf;
use std::time::Duration;
use strata_types::{Fingerprint, GroupId, ShardId};

/// The most that a power loss may cost: no sync interval may be longer.
pub const MAX_SYNC_INTERVAL: Duration = Duration::from_secs(5);

/// The most I/Os that a ring keeps in flight.
pub const MAX_DEPTH: usize = 1024;

/// Whether payloads pass the page cache by.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DirectIo {
    /// O_DIRECT where the file system takes it and pages are whole blocks; the page cache otherwise.
    Auto,
    /// The page cache.
    Off,
}

/// What executes I/O.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DiskEngine {
    /// io_uring where it and O_DIRECT work, threads elsewhere.
    Auto,
    /// io_uring, or an error that says why not.
    IoUring,
    /// Threads that call preadv and pwritev.
    Threads,
}

/// Where the store lives and what its records look like.
#[derive(Clone, Debug)]
pub struct DiskConfig {
    /// The root folder; created if it is missing.
    pub root: PathBuf,
    /// The most that the root may occupy, as `du` counts it, over all fingerprints.
    pub cap_bytes: u64,
    /// The file system (`st_dev`) on which a root that is not there may be made; none: any. For one that was lost.
    pub made_on: Option<u64>,
    /// What this store's pages share.
    pub fingerprint: Fingerprint,
    /// The group whose pages it holds.
    pub group: GroupId,
    /// The shard that it reports for.
    pub shard: ShardId,
    /// Tokens of a page.
    pub page_size: u32,
    /// Bytes of a page.
    pub page_bytes: u32,
    /// What executes I/O.
    pub engine: DiskEngine,
    /// I/O threads: of a thread pool, and so its payload I/Os in flight; or those that help a ring.
    pub threads: usize,
    /// Payload I/Os that a ring keeps in flight.
    pub depth: usize,
    /// Emulation of a slow disk: the most payload bytes that are read in a second.
    pub read_bandwidth: Option<NonZeroU64>,
    /// Emulation of a slow disk: the most payload bytes that are written in a second.
    pub write_bandwidth: Option<NonZeroU64>,
    /// Whether payloads pass the page cache by.
    pub direct: DirectIo,
    /// How often written records are made safe against power loss.
    pub sync_interval: Duration,
    /// Transfers that may be outstanding; more are handed back as `Full`.
    pub queue_depth: usize,
    /// An I/O that takes longer makes the store stalled.
    pub io_deadline: Duration,
    /// I/O failures in a row that take the store out of service.
    pub max_failures: u32,
    /// How long a store that went out of service waits before it tries its disk; twice as long after each failure.
    pub first_retry: Duration,
    /// The longest of these waits.
    pub last_retry: Duration,
    /// How long `close` waits for the kernel.
    pub close_deadline: Duration,
}

impl DiskConfig {
    /// A configuration with the defaults for everything that has one.
    pub fn new(
        root: impl Into<PathBuf>,
        cap_bytes: u64,
        fingerprint: Fingerprint,
        page_size: u32,
        page_bytes: u32,
    ) -> DiskConfig {
        DiskConfig {
            root: root.into(),
            cap_bytes,
            made_on: None,
            fingerprint,
            group: GroupId(0),
            shard: ShardId(0),
            page_size,
            page_bytes,
            engine: DiskEngine::Auto,
            threads: 4,
            depth: 32,
            read_bandwidth: None,
            write_bandwidth: None,
            direct: DirectIo::Auto,
            sync_interval: Duration::from_secs(2),
            queue_depth: 256,
            io_deadline: Duration::from_secs(5),
            max_failures: 5,
            first_retry: Duration::from_secs(1),
            last_retry: Duration::from_secs(60),
            close_deadline: Duration::from_secs(10),
        }
    }

    pub(crate) fn validate(&self) -> Result<(), DiskError> {
        let positive = [
            ("page_size", u64::from(self.page_size)),
            ("page_bytes", u64::from(self.page_bytes)),
            ("threads", self.threads as u64),
            ("depth", self.depth as u64),
            ("queue_depth", self.queue_depth as u64),
            ("max_failures", u64::from(self.max_failures)),
        ];
        if let Some((field, _)) = positive.iter().find(|(_, value)| *value == 0) {
            return Err(DiskError::Config { field, value: "0".into(), remedy: "use at least 1" });
        }
        if self.depth > MAX_DEPTH {
            let value = self.depth.to_string();
            return Err(DiskError::Config { field: "depth", value, remedy: "use at most 1024" });
        }
        if self.sync_interval > MAX_SYNC_INTERVAL {
            let value = format!("{:?}", self.sync_interval);
            return Err(DiskError::Config { field: "sync_interval", value, remedy: "use at most 5 s" });
        }
        Ok(())
    }
}
