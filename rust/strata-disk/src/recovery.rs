//! Recovery: a thread that reads the headers of every segment while the store serves, and hands over what it finds in
//! bounded batches. What it guarantees:
//! - a page that no batch has named is not written by anybody else: the store refuses it;
//! - no two records that it hands over have one key: the newest stays, the others are cleared on disk first, so that
//!   they cannot come back once the newest is erased;
//! - a header that is damaged, another's, or of a payload beyond the end of its file frees its record;
//! - it ends within moments of `close`, unless the disk hangs.
//!
//! It reads headers twice: the first time to learn which record of each key is the newest and how new the newest of all
//! is (a record that is written meanwhile must be newer), the second time to hand them over. Between the two it keeps
//! 32 bytes of each record. Parents may come after their children.

use crate::engine::{Buffer, Io, Lane, Operation, Part, SegmentFile};
use crate::error::at;
use crate::format::{identity, HeaderError, RecordHeader, Superblock};
use crate::segments::{bytes_of, Entry, Slot};
use crate::store::Shared;
use crate::DiskError;
use crossbeam_channel::{bounded, Receiver, RecvTimeoutError, SendTimeoutError, Sender};
use std::collections::{HashMap, HashSet};
use std::fs;
use std::io;
use std::ops::Range;
use std::path::PathBuf;
use std::ptr::NonNull;
use std::sync::atomic::Ordering;
use std::sync::Arc;
use std::time::{Duration, Instant};
use strata_types::{PageId, PageKey, PageRecord};

/// Bytes of headers that are read at once.
const MOST_CHUNK_BYTES: u64 = 1 << 20;
/// Records of a batch.
const MOST_CHUNK_RECORDS: u32 = 4096;
/// Batches that wait for their receiver.
const MOST_WAITING: usize = 4;
/// How soon recovery notices that the store closes.
const GLANCE: Duration = Duration::from_millis(10);

/// One page that was found.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RecoveredRecord {
    /// Where it lies on disk.
    pub page: PageId,
    /// Which page it is.
    pub record: PageRecord,
    /// Its age: higher was written later.
    pub sequence: u64,
}

/// What a stretch of the disk holds. From its arrival on these pages may be used; before, the store refuses them.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RecoveryBatch {
    /// The pages that were looked at.
    pub pages: Range<u32>,
    /// Those that hold a record; the others are free.
    pub records: Vec<RecoveredRecord>,
    /// Records whose header is damaged or whose payload is cut off; they are free.
    pub damaged: u32,
    /// Records that a newer one with the same key replaced; they are free.
    pub superseded: u32,
    /// Nothing comes after it.
    pub last: bool,
}

/// Everything that was found.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Recovered {
    /// The pages, each after its parent where that was found too; among equals, oldest first.
    pub records: Vec<RecoveredRecord>,
    /// Records whose header is damaged or whose payload is cut off; they are free.
    pub damaged: u32,
    /// Records that a newer one with the same key replaced; they are free.
    pub superseded: u32,
}

/// Where recovery delivers. Whoever drops it declines the records; the pages become usable all the same.
pub struct Recovery {
    batches: Receiver<RecoveryBatch>,
    root: PathBuf,
}

impl Recovery {
    /// The batches; the channel ends after the last, or without it if the store closed first.
    pub fn batches(&self) -> &Receiver<RecoveryBatch> {
        &self.batches
    }

    /// Waits for everything. For tests and small tools: it holds every record in memory at once.
    pub fn wait(self, deadline: Duration) -> Result<Recovered, DiskError> {
        let until = Instant::now() + deadline;
        let mut all = Recovered::default();
        loop {
            let left = until.saturating_duration_since(Instant::now());
            match self.batches.recv_timeout(left) {
                Ok(batch) => {
                    all.records.extend(batch.records);
                    all.damaged += batch.damaged;
                    all.superseded += batch.superseded;
                    if batch.last {
                        all.records = parents_first(all.records);
                        return Ok(all);
                    }
                }
                Err(RecvTimeoutError::Timeout | RecvTimeoutError::Disconnected) => {
                    return Err(DiskError::Deadline {
                        operation: "recovery",
                        root: self.root,
                        waited: deadline,
                    });
                }
            }
        }
    }
}

/// The channel of a recovery.
pub(crate) fn channel(root: PathBuf) -> (Sender<RecoveryBatch>, Recovery) {
    let (sender, batches) = bounded(MOST_WAITING);
    (sender, Recovery { batches, root })
}

/// A segment that is being recovered.
struct Found {
    number: usize,
    file: Arc<SegmentFile>,
    /// Of the payloads, before the file was made as long as it should be.
    bytes: u64,
}

/// The store closes: recovery ends where it is.
struct Stopped;

/// Recovers the segments in `files`; for a thread of its own.
pub(crate) fn run(shared: Arc<Shared>, files: Vec<(usize, PathBuf)>, batches: &Sender<RecoveryBatch>) {
    let recovering = Recovering { shared, batches, damaged_unseen: 0, superseded: HashSet::new() };
    // Whoever closed the store knows that its recovery did not end.
    let _stopped = recovering.run(files);
}

struct Recovering<'a> {
    shared: Arc<Shared>,
    batches: &'a Sender<RecoveryBatch>,
    /// Records of segments that could not even be opened.
    damaged_unseen: u32,
    superseded: HashSet<u32>,
}

impl Recovering<'_> {
    fn run(mut self, files: Vec<(usize, PathBuf)>) -> Result<(), Stopped> {
        let found = self.open(files)?;
        let unreadable = self.compare(&found)?;
        self.release_missing(&found)?;
        for segment in &found {
            for chunk in self.chunks() {
                self.hand_over(segment, chunk, &unreadable)?;
            }
        }
        let end = self.shared.segments.capacity();
        self.shared.recovered.store(true, Ordering::Release);
        self.send(RecoveryBatch {
            pages: end..end,
            damaged: self.damaged_unseen,
            last: true,
            ..RecoveryBatch::default()
        })
    }

    fn is_stopped(&self) -> Result<(), Stopped> {
        if self.shared.is_closing() {
            return Err(Stopped);
        }
        Ok(())
    }

    fn superblock(&self) -> &Superblock {
        self.shared.segments.superblock()
    }

    fn open(&mut self, files: Vec<(usize, PathBuf)>) -> Result<Vec<Found>, Stopped> {
        let geometry = self.shared.segments.geometry;
        let mut found = Vec::with_capacity(files.len());
        for (number, path) in files {
            self.is_stopped()?;
            let bytes = fs::metadata(&path).map(|metadata| metadata.len());
            let opened =
                bytes.and_then(|bytes| Ok((bytes, self.shared.engine.open(&path, bytes_of(&geometry))?)));
            // Not readable is not found: the store creates the segment anew when it needs it.
            let Ok((bytes, file)) = opened else {
                self.damaged_unseen += geometry.records_per_segment;
                continue;
            };
            let file = Arc::new(file);
            self.shared.segments.adopt(number, Arc::clone(&file));
            found.push(Found { number, file, bytes });
        }
        Ok(found)
    }

    /// Stretches of a segment that are read at once.
    fn chunks(&self) -> impl Iterator<Item = Range<u32>> {
        let geometry = self.shared.segments.geometry;
        let most = (MOST_CHUNK_BYTES / geometry.header_slot()).clamp(1, u64::from(MOST_CHUNK_RECORDS)) as u32;
        let end = geometry.records_per_segment;
        (0..end).step_by(most as usize).map(move |start| start..end.min(start.saturating_add(most)))
    }

    /// Finds out which records a newer one replaces, and what sequence comes next. Returns the first pages of the
    /// stretches that could not be read.
    fn compare(&mut self, found: &[Found]) -> Result<HashSet<u32>, Stopped> {
        let geometry = self.shared.segments.geometry;
        let mut seen: Vec<Seen> = Vec::new();
        let mut unreadable = HashSet::new();
        for segment in found {
            for chunk in self.chunks() {
                let Ok(area) = self.read(segment, &chunk)? else {
                    unreadable.insert(geometry.page(segment.number, chunk.start));
                    continue;
                };
                for index in chunk.clone() {
                    if let Ok(header) = self.decode(segment, &area, &chunk, index) {
                        let page = geometry.page(segment.number, index);
                        seen.push(Seen::new(&header.record.key, header.sequence, page));
                    }
                }
            }
        }
        let newest = seen.iter().map(|record| record.sequence).max().unwrap_or(0);
        self.shared.sequence.fetch_max(newest.saturating_add(1), Ordering::AcqRel);
        self.superseded = superseded(seen);
        Ok(unreadable)
    }

    /// The pages of segments that do not exist are free.
    fn release_missing(&self, found: &[Found]) -> Result<(), Stopped> {
        let segments = &self.shared.segments;
        let present: HashSet<usize> = found.iter().map(|segment| segment.number).collect();
        let mut missing: Range<u32> = 0..0;
        let count = segments.capacity() / segments.geometry.records_per_segment;
        for number in (0..count as usize).filter(|number| !present.contains(number)) {
            segments.look_at_nothing(number);
            let first = segments.geometry.page(number, 0);
            let end = segments.geometry.page(number + 1, 0);
            if missing.end == first {
                missing.end = end;
                continue;
            }
            self.send_free(std::mem::replace(&mut missing, first..end))?;
        }
        self.send_free(missing)
    }

    fn send_free(&self, pages: Range<u32>) -> Result<(), Stopped> {
        if pages.is_empty() {
            return Ok(());
        }
        self.send(RecoveryBatch { pages, ..RecoveryBatch::default() })
    }

    fn hand_over(
        &self,
        segment: &Found,
        chunk: Range<u32>,
        unreadable: &HashSet<u32>,
    ) -> Result<(), Stopped> {
        let geometry = self.shared.segments.geometry;
        let first = geometry.page(segment.number, chunk.start);
        let pages = first..first + chunk.len() as u32;
        let mut batch = RecoveryBatch { pages, ..RecoveryBatch::default() };
        let area = if unreadable.contains(&first) { None } else { self.read(segment, &chunk)?.ok() };
        let mut slots = Vec::with_capacity(chunk.len());
        for index in chunk.clone() {
            let header = area.as_ref().map(|area| self.decode(segment, area, &chunk, index));
            slots.push(self.judge(segment, index, header, &mut batch)?);
        }
        if !self.shared.segments.look(segment.number, chunk.start, &segment.file, slots) {
            // Deleted under us: there is nothing any more.
            batch.records.clear();
        }
        self.send(batch)
    }

    /// What a record is; what it adds to the batch.
    fn judge(
        &self,
        segment: &Found,
        index: u32,
        header: Option<Result<RecordHeader, HeaderError>>,
        batch: &mut RecoveryBatch,
    ) -> Result<Slot, Stopped> {
        let page = self.shared.segments.geometry.page(segment.number, index);
        match header {
            Some(Err(HeaderError::Blank)) => Ok(Slot::Blank),
            Some(Ok(_)) if self.superseded.contains(&page) => {
                batch.superseded += 1;
                self.clear(segment, index)
            }
            Some(Ok(header)) => {
                let checksum = header.payload_checksum.to_le_bytes();
                let entry = Entry { identity: identity(&header.record), checksum };
                let (page, record, sequence) = (PageId(page), header.record, header.sequence);
                batch.records.push(RecoveredRecord { page, record, sequence });
                Ok(Slot::Whole(entry))
            }
            Some(Err(_)) | None => {
                batch.damaged += 1;
                Ok(Slot::Stale)
            }
        }
    }

    fn decode(
        &self,
        segment: &Found,
        area: &[u8],
        chunk: &Range<u32>,
        index: u32,
    ) -> Result<RecordHeader, HeaderError> {
        let geometry = self.shared.segments.geometry;
        let start = (index - chunk.start) as usize * geometry.header_slot() as usize;
        let header = RecordHeader::decode(&area[start..], geometry.page_size)?;
        if geometry.payload_offset(index) + u64::from(geometry.page_bytes) > segment.bytes {
            return Err(HeaderError::Mismatch("payload"));
        }
        if !header.is_of(self.superblock()) {
            return Err(HeaderError::Mismatch("fingerprint, group or shard"));
        }
        Ok(header)
    }

    fn read(&self, segment: &Found, chunk: &Range<u32>) -> Result<io::Result<Vec<u8>>, Stopped> {
        let geometry = self.shared.segments.geometry;
        let bytes = vec![0; chunk.len() * geometry.header_slot() as usize];
        let offset = geometry.header_offset(chunk.start);
        let operation = Operation::Read { file: Arc::clone(&segment.file), part: Part::Headers, offset };
        self.perform("read of the headers", Lane::Read, operation, bytes)
    }

    /// Clears a header. Where that fails it stays to be cleared before the record is used again.
    fn clear(&self, segment: &Found, index: u32) -> Result<Slot, Stopped> {
        let geometry = self.shared.segments.geometry;
        let zeros = vec![0; geometry.header_slot() as usize];
        let offset = geometry.header_offset(index);
        let operation = Operation::Write { file: Arc::clone(&segment.file), part: Part::Headers, offset };
        let cleared = self.perform("clearing of a superseded header", Lane::Write, operation, zeros)?;
        Ok(if cleared.is_ok() { Slot::Blank } else { Slot::Stale })
    }

    /// One I/O, all of it or an error. Waits as long as the disk takes, or until the store closes.
    fn perform(
        &self,
        what: &'static str,
        lane: Lane,
        operation: Operation,
        mut bytes: Vec<u8>,
    ) -> Result<io::Result<Vec<u8>>, Stopped> {
        self.is_stopped()?;
        let (writes, wanted) = (matches!(operation, Operation::Write { .. }), bytes.len());
        let flight = self.shared.monitor.number();
        if let Operation::Read { file, .. } | Operation::Write { file, .. } = &operation {
            self.shared.monitor.take_off(flight, what, &file.path);
        }
        let pointer = NonNull::new(bytes.as_mut_ptr()).unwrap_or(NonNull::dangling());
        // SAFETY: `bytes` moves into the `then` below and its heap block stays where it is until that has run.
        let buffers = vec![unsafe { Buffer::new(pointer, bytes.len()) }];
        let (sender, answer) = bounded(1);
        let shared = Arc::clone(&self.shared);
        let then = Box::new(move |result: io::Result<usize>| {
            let result = shared.account(what, flight, writes, wanted, result);
            // Nobody listens only if the store closes.
            let _stopped = sender.try_send(result.map(|moved| (moved, bytes)));
            None
        });
        self.shared.engine.submit(Io { lane, operation, buffers, started: None, then });
        loop {
            match answer.recv_timeout(GLANCE) {
                Ok(Ok((moved, bytes))) if moved == wanted => return Ok(Ok(bytes)),
                Ok(Ok(_)) => return Ok(Err(io::ErrorKind::UnexpectedEof.into())),
                Ok(Err(error)) => return Ok(Err(error)),
                Err(RecvTimeoutError::Disconnected) => return Ok(Err(io::ErrorKind::BrokenPipe.into())),
                Err(RecvTimeoutError::Timeout) => self.is_stopped()?,
            }
        }
    }

    /// Hands a batch over; waits while its receiver is behind, unless the store closes.
    fn send(&self, mut batch: RecoveryBatch) -> Result<(), Stopped> {
        loop {
            self.is_stopped()?;
            match self.batches.send_timeout(batch, GLANCE) {
                Ok(()) => return Ok(()),
                Err(SendTimeoutError::Timeout(back)) => batch = back,
                // Nobody wants to know: what follows is for the store's own books.
                Err(SendTimeoutError::Disconnected(_)) => return Ok(()),
            }
        }
    }
}

/// What is kept of a header until all have been seen. Half a key: two pages with the same half are as likely as two
/// files with the same MD5 by chance, and the older of them would be computed again.
#[derive(Clone, Copy)]
struct Seen {
    key: [u8; 16],
    sequence: u64,
    page: u32,
}

impl Seen {
    fn new(key: &PageKey, sequence: u64, page: u32) -> Seen {
        let mut half = [0; 16];
        half.copy_from_slice(&key.0[..16]);
        Seen { key: half, sequence, page }
    }
}

/// The pages of all records but the newest of each key.
fn superseded(mut seen: Vec<Seen>) -> HashSet<u32> {
    seen.sort_unstable_by_key(|record| (record.key, record.sequence, record.page));
    let older = seen.windows(2).filter(|pair| pair[0].key == pair[1].key);
    older.map(|pair| pair[0].page).collect()
}

/// Puts each record behind its parent. Those whose parent is missing count as beginnings.
fn parents_first(mut records: Vec<RecoveredRecord>) -> Vec<RecoveredRecord> {
    records.sort_by_key(|record| (record.sequence, record.page));
    let index: HashMap<PageKey, usize> =
        records.iter().enumerate().map(|(index, record)| (record.record.key, index)).collect();
    let mut children: Vec<Vec<usize>> = vec![Vec::new(); records.len()];
    let mut order = Vec::with_capacity(records.len());
    for (child, record) in records.iter().enumerate() {
        match index.get(&record.record.parent) {
            Some(parent) => children[*parent].push(child),
            None => order.push(child),
        }
    }
    // A key is a digest of its parent's, so there are no cycles: what follows visits each record once.
    let mut visited = 0;
    while let Some(parent) = order.get(visited).copied() {
        order.append(&mut children[parent]);
        visited += 1;
    }
    let mut records: Vec<Option<RecoveredRecord>> = records.into_iter().map(Some).collect();
    order.into_iter().filter_map(|index| records[index].take()).collect()
}

/// Starts the thread; `at` names what could not be started.
pub(crate) fn start(
    shared: &Arc<Shared>,
    files: Vec<(usize, PathBuf)>,
) -> Result<(crate::background::Background, Recovery), DiskError> {
    let root = shared.config.root.clone();
    let (batches, recovery) = channel(root.clone());
    let shared = Arc::clone(shared);
    let thread =
        crate::background::Background::start("strata-disk-recovery", move || run(shared, files, &batches))
            .map_err(at("start the recovery thread of", &root))?;
    Ok((thread, recovery))
}

#[cfg(test)]
mod tests {
    use super::*;
    use strata_types::{GroupId, Namespace};

    #[test]
    fn parents_come_first_and_the_newest_wins() {
        let namespace = Namespace::new("", "");
        let root = namespace.root_key(GroupId(0));
        let record = |parent: PageKey, token: u32, page: u32, sequence: u64| {
            let record = PageRecord { namespace, parent, key: parent.child(&[token]), tokens: vec![token] };
            RecoveredRecord { page: PageId(page), record, sequence }
        };
        let one = record(root, 1, 5, 9);
        let two = record(one.record.key, 2, 4, 3);
        let three = record(two.record.key, 3, 3, 2);
        let orphan = record(PageKey([7; 32]), 3, 8, 1);
        let old = RecoveredRecord { page: PageId(0), sequence: 1, ..two.clone() };
        let oldest = RecoveredRecord { page: PageId(1), sequence: 0, ..two.clone() };
        let all = [&three, &old, &two, &orphan, &one, &oldest];
        let seen = all.map(|found| Seen::new(&found.record.key, found.sequence, found.page.0));
        assert_eq!(superseded(seen.to_vec()), HashSet::from([0, 1]));
        let kept = vec![three.clone(), two.clone(), orphan.clone(), one.clone()];
        assert_eq!(parents_first(kept), [orphan, one, two, three]);
    }
}
