//! How the store does: what it has moved, what went wrong, which I/O is in flight since when. Failures in a row take
//! it out of service; an I/O past its deadline makes it stalled until the kernel answers. A full disk is neither: it
//! fails the spills that need a new segment, and reads go on.

use crate::engine::SegmentFile;
use std::collections::HashMap;
use std::io;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// Whether transfers are executed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Health {
    /// Yes.
    Up,
    /// An I/O is past its deadline: new transfers complete as `Unavailable` until it answers.
    Stalled {
        /// Which.
        operation: String,
        /// For how long it has been in flight.
        elapsed: Duration,
    },
    /// Too many failures in a row: transfers complete as `Unavailable` until `DiskStore::retry`.
    OutOfService {
        /// The last failure.
        reason: String,
    },
    /// `close` was called.
    Closed,
}

/// Counters since the store was opened.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DiskStats {
    /// Payload bytes that were read.
    pub bytes_read: u64,
    /// Payload and header bytes that were written.
    pub bytes_written: u64,
    /// Nanoseconds that reads were in flight, summed over I/Os.
    pub read_ns: u64,
    /// Nanoseconds that writes were in flight, summed over I/Os.
    pub write_ns: u64,
    /// I/Os and segment operations that failed.
    pub io_errors: u64,
    /// Payloads whose checksum did not agree.
    pub checksum_failures: u64,
    /// Segments that were made safe against power loss.
    pub syncs: u64,
    /// Completions that nobody took until the store closed.
    pub lost_completions: u64,
    /// What the whole root occupies, as of the last look (at least once in each sync interval).
    pub disk_usage_bytes: u64,
    /// Segments that exist.
    pub segments: u64,
    /// Transfers that have not been reported.
    pub outstanding: u64,
}

#[derive(Default)]
pub(crate) struct Counters {
    pub bytes_read: AtomicU64,
    pub bytes_written: AtomicU64,
    pub read_ns: AtomicU64,
    pub write_ns: AtomicU64,
    pub io_errors: AtomicU64,
    pub checksum_failures: AtomicU64,
    pub syncs: AtomicU64,
    pub lost_completions: AtomicU64,
    pub disk_usage_bytes: AtomicU64,
}

impl Counters {
    pub fn snapshot(&self) -> DiskStats {
        DiskStats {
            bytes_read: self.bytes_read.load(Relaxed),
            bytes_written: self.bytes_written.load(Relaxed),
            read_ns: self.read_ns.load(Relaxed),
            write_ns: self.write_ns.load(Relaxed),
            io_errors: self.io_errors.load(Relaxed),
            checksum_failures: self.checksum_failures.load(Relaxed),
            syncs: self.syncs.load(Relaxed),
            lost_completions: self.lost_completions.load(Relaxed),
            disk_usage_bytes: self.disk_usage_bytes.load(Relaxed),
            segments: 0,
            outstanding: 0,
        }
    }
}

/// Watches the I/Os of a store.
pub(crate) struct Monitor {
    pub counters: Counters,
    deadline: Duration,
    max_failures: u32,
    failures: AtomicU32,
    out_of_service: Mutex<Option<String>>,
    numbered: AtomicU64,
    flights: Mutex<HashMap<u64, Flight>>,
}

/// Since when which operation on which segment is in flight.
type Flight = (Instant, &'static str, Arc<SegmentFile>);

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Monitor {
    pub fn new(deadline: Duration, max_failures: u32) -> Monitor {
        Monitor {
            counters: Counters::default(),
            deadline,
            max_failures,
            failures: AtomicU32::new(0),
            out_of_service: Mutex::new(None),
            numbered: AtomicU64::new(0),
            flights: Mutex::default(),
        }
    }

    /// The number of an I/O that will take off.
    pub fn number(&self) -> u64 {
        self.numbered.fetch_add(1, Relaxed)
    }

    /// Notes that an I/O takes off.
    pub fn take_off(&self, number: u64, operation: &'static str, file: Arc<SegmentFile>) {
        locked(&self.flights).insert(number, (Instant::now(), operation, file));
    }

    /// Notes that it has answered; returns how long it was in flight, nothing if it never took off.
    pub fn land(&self, number: u64) -> Duration {
        let begun = locked(&self.flights).remove(&number);
        begun.map(|(at, _, _)| at.elapsed()).unwrap_or_default()
    }

    pub fn succeeded(&self) {
        self.failures.store(0, Relaxed);
    }

    /// Counts a failure; enough of them in a row take the store out of service.
    pub fn failed(&self, operation: &str, error: &io::Error) {
        self.counters.io_errors.fetch_add(1, Relaxed);
        if error.kind() == io::ErrorKind::StorageFull {
            return;
        }
        let failures = self.failures.fetch_add(1, Relaxed) + 1;
        if failures >= self.max_failures {
            let reason = format!("{failures} I/O failures in a row, the last: {operation}: {error}");
            locked(&self.out_of_service).get_or_insert(reason);
        }
    }

    pub fn retry(&self) {
        self.failures.store(0, Relaxed);
        *locked(&self.out_of_service) = None;
    }

    /// Why nothing new is executed, if so.
    pub fn unavailable(&self) -> Option<String> {
        match self.health() {
            Health::OutOfService { reason } => Some(reason),
            Health::Stalled { operation, elapsed } => {
                Some(format!("{operation} has not answered for {:.1} s", elapsed.as_secs_f64()))
            }
            Health::Up | Health::Closed => None,
        }
    }

    pub fn health(&self) -> Health {
        if let Some(reason) = locked(&self.out_of_service).clone() {
            return Health::OutOfService { reason };
        }
        let flights = locked(&self.flights);
        match flights.values().min_by_key(|(at, _, _)| *at) {
            Some((at, operation, file)) if at.elapsed() > self.deadline => Health::Stalled {
                operation: format!("{operation} of {}", file.path.display()),
                elapsed: at.elapsed(),
            },
            _ => Health::Up,
        }
    }
}
