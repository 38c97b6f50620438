//! How the store does: what it has moved, what went wrong, which I/O is in flight since when. Failures in a row take
//! it out of service until a trial of the disk succeeds; an I/O past its deadline makes it stalled until the kernel
//! answers. A full disk is neither: it fails the spills that find no room, says so, and reads go on.

use crate::config::DiskConfig;
use crate::service::Service;
use std::collections::HashMap;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering::Relaxed};
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};
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
    /// Too many failures in a row: transfers complete as `Unavailable` until a trial of the disk succeeds.
    OutOfService {
        /// The last failure, and when the disk is tried next.
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
    /// Ends of transfers that were not outstanding.
    pub unknown_completions: u64,
    /// Times that the store went out of service.
    pub out_of_service: u64,
    /// Times that it came back, after failures or after a hang.
    pub returned_to_service: u64,
    /// What the whole root occupies, as of the last look (at least once in each sync interval).
    pub disk_usage_bytes: u64,
    /// Segments that exist.
    pub segments: u64,
    /// Transfers whose completion is still to come; what was received is no longer among them.
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
    pub unknown_completions: AtomicU64,
    pub out_of_service: AtomicU64,
    pub returned_to_service: AtomicU64,
    pub disk_usage_bytes: AtomicU64,
}

/// What a write that found no room was, and what the system said.
struct Full {
    operation: &'static str,
    reason: String,
}

/// Whether the disk has no room: the file system, the user's quota or the cap is used up.
pub(crate) fn is_full(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded)
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
            unknown_completions: self.unknown_completions.load(Relaxed),
            out_of_service: self.out_of_service.load(Relaxed),
            returned_to_service: self.returned_to_service.load(Relaxed),
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
    service: Mutex<Service>,
    was_stalled: AtomicBool,
    full: Mutex<Option<Full>>,
    /// Why the store will never serve again, if so.
    lost: OnceLock<String>,
    numbered: AtomicU64,
    flights: Mutex<HashMap<u64, (Instant, &'static str, PathBuf)>>,
}

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Monitor {
    pub fn new(config: &DiskConfig) -> Monitor {
        Monitor {
            counters: Counters::default(),
            deadline: config.io_deadline,
            max_failures: config.max_failures,
            failures: AtomicU32::new(0),
            service: Mutex::new(Service::new(config.first_retry, config.last_retry)),
            was_stalled: AtomicBool::new(false),
            full: Mutex::default(),
            lost: OnceLock::new(),
            numbered: AtomicU64::new(0),
            flights: Mutex::default(),
        }
    }

    /// The number of an I/O that will take off.
    pub fn number(&self) -> u64 {
        self.numbered.fetch_add(1, Relaxed)
    }

    /// Notes that an I/O takes off.
    pub fn take_off(&self, number: u64, operation: &'static str, path: &Path) {
        locked(&self.flights).insert(number, (Instant::now(), operation, path.to_owned()));
    }

    /// Notes that it has answered; returns how long it was in flight and where, nothing if it never took off.
    pub fn land(&self, number: u64) -> (Duration, PathBuf) {
        let begun = locked(&self.flights).remove(&number);
        begun.map(|(at, _, path)| (at.elapsed(), path)).unwrap_or_default()
    }

    pub fn succeeded(&self) {
        self.failures.store(0, Relaxed);
    }

    /// There is room for what is written like this: something was, or nothing is to be.
    pub fn found_room(&self, operation: &'static str) {
        let mut full = locked(&self.full);
        if full.as_ref().is_some_and(|full| full.operation == operation) {
            *full = None;
        }
    }

    /// Takes the store out of service for good.
    pub fn lose(&self, reason: String) {
        self.lost.get_or_init(|| reason);
    }

    /// Why the store will never serve again, if so.
    pub fn lost(&self) -> Option<String> {
        self.lost.get().cloned()
    }

    /// What found no room, and why, if the disk is full.
    pub fn full(&self) -> Option<String> {
        locked(&self.full).as_ref().map(|full| full.reason.clone())
    }

    /// Counts a failure; enough of them in a row take the store out of service.
    pub fn failed(&self, operation: &'static str, path: &Path, error: &io::Error) {
        self.counters.io_errors.fetch_add(1, Relaxed);
        let reason = format!("{operation} of {}: {error}", path.display());
        if is_full(error) {
            *locked(&self.full) = Some(Full { operation, reason });
            return;
        }
        let failures = self.failures.fetch_add(1, Relaxed) + 1;
        if failures >= self.max_failures {
            let reason = format!("{failures} I/O failures in a row, the last: {reason}");
            if locked(&self.service).take_out(reason, Instant::now()) {
                self.counters.out_of_service.fetch_add(1, Relaxed);
            }
        }
    }

    /// Whether a disk that is out of service should be tried now.
    pub fn is_trial_due(&self) -> bool {
        self.lost.get().is_none() && locked(&self.service).is_trial_due(Instant::now())
    }

    /// A trial has ended, well or with a reason.
    pub fn trial_ended(&self, outcome: Result<(), String>) {
        match outcome {
            Ok(()) => self.retry(),
            Err(reason) => locked(&self.service).trial_failed(&reason, Instant::now()),
        }
    }

    /// Takes the store back into service.
    pub fn retry(&self) {
        self.failures.store(0, Relaxed);
        if locked(&self.service).take_back(Instant::now()) {
            self.counters.returned_to_service.fetch_add(1, Relaxed);
        }
    }

    /// Transfers are executed: if they were not because an I/O hung, the store has come back.
    pub fn note_up(&self) {
        if self.was_stalled.swap(false, Relaxed) {
            self.counters.returned_to_service.fetch_add(1, Relaxed);
        }
    }

    /// Why nothing new is executed, if so.
    pub fn unavailable(&self) -> Option<String> {
        match self.health() {
            Health::OutOfService { reason } => Some(reason),
            Health::Stalled { operation, elapsed } => {
                self.was_stalled.store(true, Relaxed);
                Some(format!("{operation} has not answered for {:.1} s", elapsed.as_secs_f64()))
            }
            Health::Up | Health::Closed => None,
        }
    }

    pub fn health(&self) -> Health {
        if let Some(reason) = self.lost() {
            return Health::OutOfService { reason };
        }
        if let Some(reason) = locked(&self.service).out_of_service(Instant::now()) {
            return Health::OutOfService { reason };
        }
        let flights = locked(&self.flights);
        match flights.values().min_by_key(|(at, _, _)| *at) {
            Some((at, operation, path)) if at.elapsed() > self.deadline => Health::Stalled {
                operation: format!("{operation} of {}", path.display()),
                elapsed: at.elapsed(),
            },
            _ => Health::Up,
        }
    }
}
