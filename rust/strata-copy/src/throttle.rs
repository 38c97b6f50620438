//! Policies that slow transfers down. The engine asks before each layer of each transfer and does the waiting
//! itself, in short naps, so that a cancel, a shutdown or a more urgent load is never stuck behind a policy.

use std::num::NonZeroU64;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, OnceLock, PoisonError};
use std::time::{Duration, Instant};
use strata_types::{TransferId, TransferKind};

/// The pieces that one thread is about to copy: some or all pages of one layer of one transfer.
#[derive(Clone, Copy, Debug)]
pub struct LayerWork {
    /// The transfer.
    pub id: TransferId,
    /// Its kind.
    pub kind: TransferKind,
    /// The layer.
    pub layer: u32,
    /// Bytes of these pieces.
    pub bytes: u64,
}

/// Decides how long a layer waits before it is copied. Neither method may block.
pub trait Throttle: Send + Sync {
    /// Asked once for each `LayerWork`: it is not copied before this instant.
    fn earliest(&self, _work: &LayerWork) -> Option<Instant> {
        None
    }

    /// Asked until the answer is no: whether the work has to wait on.
    fn is_held(&self, _work: &LayerWork) -> bool {
        false
    }
}

/// Full speed.
#[derive(Clone, Copy, Debug, Default)]
pub struct NoThrottle;

impl Throttle for NoThrottle {}

/// Emulates links that are slower than this machine's memory. Whatever is measured with it is an emulation and
/// has to be labelled so.
#[derive(Debug)]
pub struct BandwidthLimit {
    load: Option<Link>,
    backup: Option<Link>,
}

#[derive(Debug)]
struct Link {
    bytes_per_second: NonZeroU64,
    /// When the last byte promised so far has crossed.
    busy_until: Mutex<Option<Instant>>,
}

/// How late a sleeper may wake without the link losing capacity.
const LATE_WAKE: Duration = Duration::from_millis(5);

impl BandwidthLimit {
    /// Limits each direction to this many bytes a second; `None` leaves it at full speed.
    pub fn new(load: Option<NonZeroU64>, backup: Option<NonZeroU64>) -> BandwidthLimit {
        let link = |bytes_per_second| Link { bytes_per_second, busy_until: Mutex::new(None) };
        BandwidthLimit { load: load.map(link), backup: backup.map(link) }
    }
}

impl Link {
    /// Books the link for `bytes` after everything booked before; says when they will have crossed.
    fn book(&self, bytes: u64, now: Instant) -> Instant {
        let nanoseconds = u128::from(bytes) * 1_000_000_000 / u128::from(self.bytes_per_second.get());
        // A wait of a century and one of forever are the same to a caller that can cancel.
        let crossing = Duration::from_nanos(u64::try_from(nanoseconds).unwrap_or(u64::MAX).min(1 << 61));
        let mut busy_until = self.busy_until.lock().unwrap_or_else(PoisonError::into_inner);
        let start = match *busy_until {
            Some(until) if now.saturating_duration_since(until) <= LATE_WAKE => until,
            _ => now,
        };
        let end = start.checked_add(crossing).unwrap_or(start);
        *busy_until = Some(end);
        end
    }
}

impl Throttle for BandwidthLimit {
    fn earliest(&self, work: &LayerWork) -> Option<Instant> {
        let link = match work.kind {
            TransferKind::Load => self.load.as_ref(),
            TransferKind::Backup => self.backup.as_ref(),
            TransferKind::Spill | TransferKind::Prefetch | TransferKind::Erase => None,
        };
        link.map(|link| link.book(work.bytes, Instant::now()))
    }
}

/// A fake for tests: stops transfers of one kind before a layer (and the layers after it) until it is released or
/// its time is up.
#[derive(Debug)]
pub struct HoldLayer {
    kind: TransferKind,
    layer: u32,
    limit: Duration,
    released: AtomicBool,
    first_held: OnceLock<Instant>,
}

impl HoldLayer {
    /// Holds layers from `layer` on, for at most `limit` from the first layer held.
    pub fn new(kind: TransferKind, layer: u32, limit: Duration) -> HoldLayer {
        HoldLayer { kind, layer, limit, released: AtomicBool::new(false), first_held: OnceLock::new() }
    }

    /// Lets everything go on, now and later. Again changes nothing.
    pub fn release(&self) {
        self.released.store(true, Ordering::Release);
    }

    /// Waits until a transfer has reached the held layer; false if none did within `limit`.
    pub fn wait_until_held(&self, limit: Duration) -> bool {
        let deadline = Instant::now() + limit;
        while self.first_held.get().is_none() {
            if Instant::now() >= deadline {
                return false;
            }
            std::thread::sleep(Duration::from_millis(1));
        }
        true
    }
}

impl Throttle for HoldLayer {
    fn is_held(&self, work: &LayerWork) -> bool {
        if work.kind != self.kind || work.layer < self.layer || self.released.load(Ordering::Acquire) {
            return false;
        }
        self.first_held.get_or_init(Instant::now).elapsed() < self.limit
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn work(kind: TransferKind, layer: u32) -> LayerWork {
        LayerWork { id: TransferId(1), kind, layer, bytes: 500 }
    }

    #[test]
    fn a_link_carries_its_bytes_one_after_another() {
        let now = Instant::now();
        let link = Link { bytes_per_second: NonZeroU64::new(1000).unwrap(), busy_until: Mutex::new(None) };
        assert_eq!(link.book(500, now), now + Duration::from_millis(500));
        assert_eq!(link.book(250, now), now + Duration::from_millis(750));
        let woken_late = now + Duration::from_millis(752);
        assert_eq!(link.book(250, woken_late), now + Duration::from_millis(1000));
        let idle = now + Duration::from_secs(9);
        assert_eq!(link.book(100, idle), idle + Duration::from_millis(100));
        let crawl = Link { bytes_per_second: NonZeroU64::MIN, busy_until: Mutex::new(None) };
        assert!(crawl.book(u64::MAX, now) > now + Duration::from_secs(1 << 30));
    }

    #[test]
    fn directions_are_limited_apart() {
        let limit = BandwidthLimit::new(NonZeroU64::new(1000), None);
        assert!(limit.earliest(&work(TransferKind::Load, 0)).is_some());
        assert!(limit.earliest(&work(TransferKind::Backup, 0)).is_none());
        assert!(NoThrottle.earliest(&work(TransferKind::Load, 0)).is_none());
    }

    #[test]
    fn a_hold_ends_by_release_or_by_time() {
        let hold = HoldLayer::new(TransferKind::Load, 2, Duration::from_secs(60));
        assert!(!hold.wait_until_held(Duration::from_millis(2)));
        assert!(!hold.is_held(&work(TransferKind::Load, 1)) && !hold.is_held(&work(TransferKind::Backup, 2)));
        assert!(hold.is_held(&work(TransferKind::Load, 2)) && hold.is_held(&work(TransferKind::Load, 3)));
        assert!(hold.wait_until_held(Duration::ZERO));
        hold.release();
        hold.release();
        assert!(!hold.is_held(&work(TransferKind::Load, 2)));
        let brief = HoldLayer::new(TransferKind::Load, 0, Duration::ZERO);
        assert!(!brief.is_held(&work(TransferKind::Load, 0)));
    }
}
