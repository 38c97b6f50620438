//! The segment files of one fingerprint: created one by one, never past the root's cap; whatever is deleted under us
//! becomes a miss and then a new, blank segment. Also what the store remembers of each header.

use crate::engine::{IoEngine, SegmentBytes, SegmentFile};
use crate::format::Superblock;
use crate::geometry::{Geometry, BLOCK};
use crate::health::is_full;
use crate::usage::{segment_name, survey, StaleSegment, SCRATCH};
use std::fs::{self, DirBuilder, File};
use std::io;
use std::ops::Range;
use std::os::unix::fs::{DirBuilderExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};

/// What a header says, as far as a reader has to compare it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Entry {
    /// Namespace, parent, key and tokens, in one digest.
    pub identity: [u8; 32],
    /// xxh3-128 of the payload, little-endian.
    pub checksum: [u8; 16],
}

/// What the store knows of the header of a record.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum Slot {
    /// It is zero on disk.
    #[default]
    Blank,
    /// Something is there that no longer counts: to be cleared before the payload is touched.
    Stale,
    /// It describes a whole page.
    Whole(Entry),
}

/// A segment that exists.
struct Segment {
    file: Arc<SegmentFile>,
    slots: Mutex<Vec<Slot>>,
    /// Written to since the last sync.
    dirty: AtomicBool,
}

/// Where a segment may be.
#[derive(Clone, Default)]
struct Place {
    segment: Option<Arc<Segment>>,
    /// Records, counted from the first, of which recovery has said what they are: the others are not to be touched.
    looked_at: u32,
}

/// All segments of a store.
pub(crate) struct Segments {
    pub geometry: Geometry,
    superblock: Superblock,
    root: PathBuf,
    folder: PathBuf,
    cap_bytes: AtomicU64,
    /// Segments that may be used; fewer than there are places while a smaller cap is being set.
    usable: AtomicUsize,
    places: RwLock<Vec<Place>>,
    /// Held by the worker that allocates a segment; others that need one wait for it. Core's threads never take it.
    creation: Mutex<()>,
    /// A file came or went since the last sync.
    folder_dirty: AtomicBool,
}

impl Segments {
    pub fn new(
        superblock: Superblock,
        root: PathBuf,
        folder: PathBuf,
        cap_bytes: u64,
        count: usize,
    ) -> Segments {
        Segments {
            geometry: superblock.geometry,
            superblock,
            root,
            folder,
            cap_bytes: AtomicU64::new(cap_bytes),
            usable: AtomicUsize::new(count),
            places: RwLock::new(vec![Place::default(); count]),
            creation: Mutex::new(()),
            folder_dirty: AtomicBool::new(true),
        }
    }

    fn places(&self) -> RwLockReadGuard<'_, Vec<Place>> {
        self.places.read().unwrap_or_else(PoisonError::into_inner)
    }

    fn places_mut(&self) -> RwLockWriteGuard<'_, Vec<Place>> {
        self.places.write().unwrap_or_else(PoisonError::into_inner)
    }

    /// What every segment's first block says.
    pub fn superblock(&self) -> &Superblock {
        &self.superblock
    }

    /// Takes over a segment that exists; of its records nothing is known until `look`.
    pub fn adopt(&self, number: usize, file: Arc<SegmentFile>) {
        let slots = vec![Slot::Stale; self.geometry.records_per_segment as usize];
        self.put(number, Segment { file, slots: Mutex::new(slots), dirty: AtomicBool::new(true) });
    }

    fn put(&self, number: usize, segment: Segment) {
        if let Some(place) = self.places_mut().get_mut(number) {
            place.segment = Some(Arc::new(segment));
        }
    }

    /// Recovery says what the records of `file` from `index` on are; false if the file is no longer the segment's.
    pub fn look(&self, number: usize, index: u32, file: &Arc<SegmentFile>, slots: Vec<Slot>) -> bool {
        let mut places = self.places_mut();
        let Some(place) = places.get_mut(number) else { return false };
        place.looked_at = place.looked_at.max(index + slots.len() as u32);
        let segment = place.segment.as_ref().filter(|segment| Arc::ptr_eq(&segment.file, file));
        if let Some(segment) = segment {
            slots_of(segment)[index as usize..index as usize + slots.len()].copy_from_slice(&slots);
        }
        segment.is_some()
    }

    /// Recovery says that there is no such segment.
    pub fn look_at_nothing(&self, number: usize) {
        if let Some(place) = self.places_mut().get_mut(number) {
            place.looked_at = self.geometry.records_per_segment;
        }
    }

    /// Whether recovery has said what this record is.
    pub fn is_looked_at(&self, page: u32) -> bool {
        let (number, index) = self.geometry.locate(page);
        self.places().get(number).is_some_and(|place| index < place.looked_at)
    }

    fn get(&self, number: usize) -> Option<Arc<Segment>> {
        self.places().get(number).and_then(|place| place.segment.clone())
    }

    pub fn file(&self, number: usize) -> Option<Arc<SegmentFile>> {
        self.get(number).map(|segment| Arc::clone(&segment.file))
    }

    pub fn path(&self, number: usize) -> PathBuf {
        self.folder.join(segment_name(number))
    }

    /// Where a trial of a disk that failed may write.
    pub fn scratch(&self) -> PathBuf {
        self.folder.join(SCRATCH)
    }

    pub fn folder(&self) -> &Path {
        &self.folder
    }

    /// Segments that exist.
    pub fn count(&self) -> usize {
        self.existing().len()
    }

    /// Records that the cap holds.
    pub fn capacity(&self) -> u32 {
        self.usable.load(Ordering::Acquire) as u32 * self.geometry.records_per_segment
    }

    pub fn cap_bytes(&self) -> u64 {
        self.cap_bytes.load(Ordering::Acquire)
    }

    /// How many segments may be used from now on, of those that have a place.
    pub fn limit(&self, segments: usize) {
        self.usable.store(segments.min(self.places().len()), Ordering::Release);
    }

    /// Sets another cap, of so many segments: deletes what lies beyond, and stale segments where even that is not
    /// enough. No transfer may touch the segments beyond. Blocks.
    pub fn set_cap(&self, engine: &dyn IoEngine, cap_bytes: u64, segments: usize) -> io::Result<()> {
        let _creating = self.creation.lock().unwrap_or_else(PoisonError::into_inner);
        let before = self.places().len();
        for number in (segments..before).rev() {
            engine.remove(&self.path(number))?;
            if let Some(place) = self.places_mut().get_mut(number) {
                place.segment = None;
            }
            self.folder_dirty.store(true, Ordering::Release);
        }
        let looked_at = self.geometry.records_per_segment;
        self.places_mut().resize(segments, Place { segment: None, looked_at });
        self.limit(segments);
        self.cap_bytes.store(cap_bytes, Ordering::Release);
        self.evict_stale(engine, 0)
    }

    /// The pages whose segments do not exist: they take nothing where there is no room for a segment.
    pub fn missing(&self) -> Vec<Range<u32>> {
        let places = self.places();
        let missing = places.iter().enumerate().filter(|(_, place)| place.segment.is_none());
        missing.map(|(number, _)| self.geometry.page(number, 0)..self.geometry.page(number + 1, 0)).collect()
    }

    /// Copies what is known of `count` records from `index` on; blank where there is no segment.
    pub fn slots(&self, number: usize, index: u32, count: usize) -> Vec<Slot> {
        let Some(segment) = self.get(number) else { return vec![Slot::Blank; count] };
        let slots = slots_of(&segment);
        slots[index as usize..index as usize + count].to_vec()
    }

    /// Notes what is on disk now.
    pub fn set_slots(&self, number: usize, index: u32, values: impl IntoIterator<Item = Slot>) {
        if let Some(segment) = self.get(number) {
            let mut slots = slots_of(&segment);
            for (slot, value) in slots[index as usize..].iter_mut().zip(values) {
                *slot = value;
            }
            segment.dirty.store(true, Ordering::Release);
        }
    }

    /// The segment, created if it does not exist. Blocks; for engine threads.
    pub fn create(&self, number: usize, engine: &dyn IoEngine) -> io::Result<Arc<SegmentFile>> {
        if let Some(file) = self.file(number) {
            return Ok(file);
        }
        let _creating = self.creation.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(file) = self.file(number) {
            return Ok(file);
        }
        if number >= self.places().len() {
            return Err(self.past_cap(self.cap_bytes()));
        }
        self.make_folder()?;
        self.make_room(engine)?;
        let path = self.path(number);
        engine.remove(&path)?;
        let file = self.create_file(&path, engine)?;
        let total = survey(&self.root, &self.folder)?.total;
        if total > self.cap_bytes() {
            engine.remove(&path)?;
            return Err(self.past_cap(total));
        }
        let file = Arc::new(file);
        let slots = Mutex::new(vec![Slot::Blank; self.geometry.records_per_segment as usize]);
        self.put(number, Segment { file: Arc::clone(&file), slots, dirty: AtomicBool::new(true) });
        self.folder_dirty.store(true, Ordering::Release);
        Ok(file)
    }

    /// Makes the files of a segment. A full disk gives stale segments up, as a full cap does, if they are room enough.
    fn create_file(&self, path: &Path, engine: &dyn IoEngine) -> io::Result<SegmentFile> {
        let create = || engine.create(path, bytes_of(&self.geometry), &self.superblock.encode());
        let error = match create() {
            Err(error) if is_full(&error) => error,
            made => return made,
        };
        let stale = survey(&self.root, &self.folder)?.stale;
        if stale.iter().map(|segment| segment.bytes).sum::<u64>() < self.geometry.segment_bytes() {
            return Err(error);
        }
        let mut made = Err(error);
        for segment in &stale {
            remove_stale(engine, segment)?;
            made = create();
            if !made.as_ref().is_err_and(is_full) {
                break;
            }
        }
        made
    }

    /// The folder, made anew if somebody deleted it. Not so the root, which is locked and marked when it is made.
    pub fn make_folder(&self) -> io::Result<()> {
        match DirBuilder::new().mode(0o700).create(&self.folder) {
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => Ok(()),
            made => made,
        }
    }

    /// Deletes stale segments, oldest first, until one more segment fits under the cap.
    fn make_room(&self, engine: &dyn IoEngine) -> io::Result<()> {
        // What segments that exist may still grow by: extent blocks are allocated as records are written.
        let existing = self.count() as u64;
        let growth = (self.geometry.segment_cost() - self.geometry.segment_bytes()) * existing;
        let wanted = self.geometry.segment_cost() + growth;
        self.evict_stale(engine, wanted)
    }

    /// Deletes stale segments, oldest first, until `wanted` more bytes fit under the cap.
    pub fn evict_stale(&self, engine: &dyn IoEngine, wanted: u64) -> io::Result<()> {
        let usage = survey(&self.root, &self.folder)?;
        let mut total = usage.total;
        for segment in &usage.stale {
            if total + wanted <= self.cap_bytes() {
                return Ok(());
            }
            total -= segment.bytes;
            if remove_stale(engine, segment)? {
                total = total.saturating_sub(BLOCK);
            }
        }
        // The last segment of a full cap may be due growth that was counted twice: only what exists must fit now.
        if total + self.geometry.segment_bytes().min(wanted) > self.cap_bytes() {
            return Err(self.past_cap(total + wanted));
        }
        Ok(())
    }

    fn past_cap(&self, total: u64) -> io::Error {
        let message = format!(
            "the root would occupy {total} bytes of a cap of {} (--disk-capacity); files of others in it count too",
            self.cap_bytes()
        );
        io::Error::new(io::ErrorKind::StorageFull, message)
    }

    /// Forgets segments whose file was deleted under us. Returns how many.
    pub fn forget_deleted(&self) -> usize {
        let mut forgotten = 0;
        for segment in self.existing() {
            let linked = |file: &File| file.metadata().is_ok_and(|metadata| metadata.nlink() > 0);
            if linked(&segment.file.headers) && linked(&segment.file.cached) {
                continue;
            }
            let mut places = self.places_mut();
            let is_it =
                |place: &&mut Place| place.segment.as_ref().is_some_and(|held| Arc::ptr_eq(held, &segment));
            if let Some(place) = places.iter_mut().find(is_it) {
                place.segment = None;
                forgotten += 1;
            }
        }
        forgotten
    }

    fn existing(&self) -> Vec<Arc<Segment>> {
        self.places().iter().filter_map(|place| place.segment.clone()).collect()
    }

    /// Makes everything written before the call safe against power loss; returns how many segments were synced and
    /// the first error. Blocks.
    pub fn sync(&self, engine: &dyn IoEngine) -> (u64, Option<(PathBuf, io::Error)>) {
        let (mut synced, mut failure) = (0, None);
        for segment in self.existing() {
            if segment.dirty.swap(false, Ordering::AcqRel) {
                match engine.sync(&segment.file) {
                    Ok(()) => synced += 1,
                    Err(error) => {
                        segment.dirty.store(true, Ordering::Release);
                        failure.get_or_insert((segment.file.path.clone(), error));
                    }
                }
            }
        }
        if self.folder_dirty.swap(false, Ordering::AcqRel) {
            let sync = |folder: &PathBuf| match File::open(folder) {
                // Deleted under us: there is nothing to make safe, and whoever makes it anew says so.
                Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
                opened => opened?.sync_all(),
            };
            if let Err(error) = sync(&self.folder).and_then(|()| sync(&self.root)) {
                self.folder_dirty.store(true, Ordering::Release);
                failure.get_or_insert((self.folder.clone(), error));
            }
        }
        (synced, failure)
    }

    /// What the whole root occupies.
    pub fn disk_usage(&self) -> io::Result<u64> {
        crate::usage::disk_usage(&self.root)
    }
}

/// Deletes a segment of another fingerprint; true if its folder went with it.
fn remove_stale(engine: &dyn IoEngine, segment: &StaleSegment) -> io::Result<bool> {
    engine.remove(&segment.path)?;
    let Some(folder) = segment.path.parent() else { return Ok(false) };
    // Left by a process that died while it tried its disk; counted with the folder.
    engine.remove(&folder.join(SCRATCH))?;
    // Fails while anything is left in it, as it should.
    Ok(fs::remove_dir(folder).is_ok())
}

pub(crate) fn bytes_of(geometry: &Geometry) -> SegmentBytes {
    SegmentBytes { headers: geometry.header_bytes(), payloads: geometry.payload_bytes() }
}

fn slots_of(segment: &Segment) -> MutexGuard<'_, Vec<Slot>> {
    segment.slots.lock().unwrap_or_else(PoisonError::into_inner)
}
