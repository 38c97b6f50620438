//! The cap, set at start and changed while the store runs. By `du` the root never passes the cap once it was set.

use crate::config::DiskConfig;
use crate::error::at;
use crate::geometry::Geometry;
use crate::store::{DiskStore, ALLOCATION};
use crate::usage::survey;
use crate::DiskError;
use std::path::Path;
use std::sync::atomic::Ordering;
use std::sync::PoisonError;
use std::time::{Duration, Instant};

/// How often a smaller cap looks whether the last transfers beyond it have ended.
const GLANCE: Duration = Duration::from_millis(1);

/// What a cap leaves to the store beside the files of others.
pub(crate) fn available(config: &DiskConfig, cap_bytes: u64) -> Result<u64, DiskError> {
    let foreign = survey(&config.root, Path::new("")).map_err(at("survey", &config.root))?.foreign;
    let needed = Geometry::least_cap(config.page_size, config.page_bytes) + foreign;
    if cap_bytes < needed {
        return Err(too_small(config, cap_bytes, foreign, needed));
    }
    Ok(cap_bytes - foreign)
}

fn too_small(config: &DiskConfig, cap_bytes: u64, foreign_bytes: u64, needed_bytes: u64) -> DiskError {
    let (root, page_bytes) = (config.root.clone(), config.page_bytes);
    DiskError::CapTooSmall { root, cap_bytes, foreign_bytes, page_bytes, needed_bytes }
}

impl DiskStore {
    /// Records that another cap would hold. Looks at the whole root, so it blocks.
    pub fn capacity_under(&self, cap_bytes: u64) -> Result<u32, DiskError> {
        let geometry = self.shared.segments.geometry;
        Ok(self.segments_under(cap_bytes)? * geometry.records_per_segment)
    }

    fn segments_under(&self, cap_bytes: u64) -> Result<u32, DiskError> {
        let (config, geometry) = (&self.shared.config, self.shared.segments.geometry);
        let available = available(config, cap_bytes)?;
        let count = geometry.most_segments(available);
        if count == 0 {
            // Segments keep the size that they were made with, which may be more than a record's.
            let foreign = cap_bytes - available;
            return Err(too_small(config, cap_bytes, foreign, geometry.cap_of_one() + foreign));
        }
        Ok(count as u32)
    }

    /// Sets another cap and returns how many records it holds; pages are `0..capacity`. A larger cap takes effect
    /// bit by bit, as segments are needed. For a smaller one, first empty the pages from `capacity_under` on: their
    /// segments are deleted, whatever they hold. Blocks, at most for the close deadline while transfers that touch
    /// them end; an error leaves the old cap, unless it says that files of others take the room. A root
    /// that was lost is refused: nothing is deleted in what another process may own by now.
    pub fn set_cap(&self, cap_bytes: u64) -> Result<u32, DiskError> {
        let _alone = self.resizing.lock().unwrap_or_else(PoisonError::into_inner);
        let (shared, segments) = (&self.shared, &self.shared.segments);
        if !shared.recovered.load(Ordering::Acquire) {
            return Err(DiskError::Recovering { root: shared.config.root.clone() });
        }
        let records = segments.geometry.records_per_segment;
        let (before, count) = (segments.capacity() / records, self.segments_under(cap_bytes)?);
        segments.limit(before.min(count) as usize);
        let deadline = shared.config.close_deadline;
        let until = Instant::now() + deadline;
        while shared.registry.is_used_from(count * records) {
            if Instant::now() >= until {
                segments.limit(before as usize);
                let operation = "the last transfer beyond the new --disk-capacity";
                let root = shared.config.root.clone();
                return Err(DiskError::Deadline { operation, root, waited: deadline });
            }
            std::thread::sleep(GLANCE);
        }
        let set = shared
            .check_root()
            .and_then(|()| segments.set_cap(shared.engine.as_ref(), cap_bytes, count as usize));
        if set.is_err() && segments.cap_bytes() != cap_bytes {
            segments.limit(before as usize);
        }
        set.map_err(at("set another cap of", &shared.config.root))?;
        shared.look();
        if segments.missing().is_empty() {
            // No segment will be made any more, which is what else shows that there is room.
            shared.monitor.found_room(ALLOCATION);
        }
        Ok(segments.capacity())
    }
}
