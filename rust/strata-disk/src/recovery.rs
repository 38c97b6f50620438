//! What a restart finds: the headers of every segment of our fingerprint, and nothing of the payloads. A header that
//! is damaged, another's, or of a payload beyond the end of its file frees its record; of two records with one key the
//! newer stays, and the older is cleared on disk, so that it cannot come back once the newer is erased.

use crate::config::DiskConfig;
use crate::engine::{Buffer, Io, IoEngine, Lane, Operation, Part, SegmentFile};
use crate::error::at;
use crate::format::{identity, HeaderError, RecordHeader, Superblock};
use crate::geometry::{Geometry, BLOCK};
use crate::segments::{bytes_of, Entry, Slot};
use crate::usage::segment_number;
use crate::DiskError;
use crossbeam_channel::bounded;
use std::collections::HashMap;
use std::fs::{self, File};
use std::io;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::ptr::NonNull;
use std::sync::Arc;
use strata_types::{PageId, PageKey, PageRecord};

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

/// A segment as it was found.
pub(crate) struct FoundSegment {
    pub number: usize,
    pub file: Arc<SegmentFile>,
    pub slots: Vec<Slot>,
}

/// The outcome of a scan.
pub(crate) struct Scan {
    pub superblock: Superblock,
    pub segments: Vec<FoundSegment>,
    pub recovered: Recovered,
    pub next_sequence: u64,
}

/// Reads the headers below `folder`. Segments that the geometry for `available` bytes has no place for are deleted.
pub(crate) fn scan(
    config: &DiskConfig,
    folder: &Path,
    available: u64,
    engine: &dyn IoEngine,
) -> Result<Option<Scan>, DiskError> {
    let files = list(folder)?;
    let Some(superblock) = agree(config, &files, available) else { return Ok(None) };
    let geometry = superblock.geometry;
    let most = geometry.segments_within(available) as usize;
    let mut scan =
        Scan { superblock, segments: Vec::new(), recovered: Recovered::default(), next_sequence: 1 };
    let mut found = Vec::new();
    for (number, path) in files {
        if number >= most || read_superblock(&path) != Some(superblock) {
            engine.remove(&path).map_err(at("delete segment", &path))?;
            continue;
        }
        let Ok((file, slots, records)) = read_segment(&superblock, number, &path, engine) else {
            // Not readable is not found: the store creates the segment anew when it needs it.
            scan.recovered.damaged += geometry.records_per_segment;
            continue;
        };
        scan.recovered.damaged += slots.iter().filter(|slot| **slot == Slot::Stale).count() as u32;
        scan.segments.push(FoundSegment { number, file, slots });
        found.extend(records);
    }
    scan.next_sequence = found.iter().map(|record| record.sequence.saturating_add(1)).max().unwrap_or(1);
    let (kept, superseded) = newest(found);
    scan.recovered.superseded = superseded.len() as u32;
    for page in superseded {
        clear(config, &geometry, &mut scan.segments, page, engine)?;
    }
    scan.recovered.records = parents_first(kept);
    Ok(Some(scan))
}

fn list(folder: &Path) -> Result<Vec<(usize, PathBuf)>, DiskError> {
    let mut files = Vec::new();
    for entry in fs::read_dir(folder).map_err(at("list", folder))? {
        let path = entry.map_err(at("list", folder))?.path();
        if let Some(number) = segment_number(&path) {
            files.push((number, Part::Payloads.path(&path)));
        }
    }
    files.sort();
    files.dedup();
    Ok(files)
}

/// The geometry of the first segment that is ours, if it suits the cap; else the one that suits it best.
fn agree(config: &DiskConfig, files: &[(usize, PathBuf)], available: u64) -> Option<Superblock> {
    let ours = |geometry| Superblock {
        geometry,
        group: config.group,
        shard: config.shard,
        fingerprint: config.fingerprint,
    };
    let inherited = files
        .iter()
        .filter_map(|(_, path)| read_superblock(path))
        .find(|found| {
            *found == ours(found.geometry)
                && (found.geometry.page_size, found.geometry.page_bytes)
                    == (config.page_size, config.page_bytes)
        })
        .filter(|found| found.geometry.still_fits(available));
    inherited.or_else(|| Geometry::choose(config.page_size, config.page_bytes, available).map(ours))
}

fn read_superblock(path: &Path) -> Option<Superblock> {
    let mut block = [0; BLOCK as usize];
    File::open(Part::Headers.path(path)).ok()?.read_exact_at(&mut block, 0).ok()?;
    Superblock::decode(&block).ok()
}

type Found = (Arc<SegmentFile>, Vec<Slot>, Vec<RecoveredRecord>);

fn read_segment(ours: &Superblock, number: usize, path: &Path, engine: &dyn IoEngine) -> io::Result<Found> {
    let geometry = ours.geometry;
    let found_bytes = fs::metadata(path)?.len();
    let file = engine.open(path, bytes_of(&geometry))?;
    let start = geometry.header_offset(0);
    let mut area = vec![0; (geometry.header_bytes() - start) as usize];
    file.headers.read_exact_at(&mut area, start)?;
    let (mut slots, mut records) = (Vec::new(), Vec::new());
    for index in 0..geometry.records_per_segment {
        let start = index as usize * geometry.header_slot() as usize;
        let whole = geometry.payload_offset(index) + u64::from(geometry.page_bytes) <= found_bytes;
        slots.push(match RecordHeader::decode(&area[start..], geometry.page_size) {
            Err(HeaderError::Blank) => Slot::Blank,
            Ok(header) if whole && is_ours(&header, ours) => {
                let entry = Entry {
                    identity: identity(&header.record),
                    checksum: header.payload_checksum.to_le_bytes(),
                };
                let page = PageId(geometry.page(number, index));
                records.push(RecoveredRecord { page, record: header.record, sequence: header.sequence });
                Slot::Whole(entry)
            }
            _ => Slot::Stale,
        });
    }
    Ok((Arc::new(file), slots, records))
}

fn is_ours(header: &RecordHeader, ours: &Superblock) -> bool {
    (header.fingerprint, header.group, header.shard) == (ours.fingerprint, ours.group, ours.shard)
        && header.payload_bytes == u64::from(ours.geometry.page_bytes)
}

/// Splits into the newest record of each key and the pages of the others.
fn newest(found: Vec<RecoveredRecord>) -> (Vec<RecoveredRecord>, Vec<PageId>) {
    let mut best: HashMap<PageKey, RecoveredRecord> = HashMap::with_capacity(found.len());
    let mut superseded = Vec::new();
    for record in found {
        match best.get_mut(&record.record.key) {
            None => {
                best.insert(record.record.key, record);
            }
            Some(held) if held.sequence < record.sequence => {
                superseded.push(held.page);
                *held = record;
            }
            Some(_) => superseded.push(record.page),
        }
    }
    let mut kept: Vec<RecoveredRecord> = best.into_values().collect();
    kept.sort_by_key(|record| (record.sequence, record.page));
    (kept, superseded)
}

/// Puts each record behind its parent. Those whose parent is missing count as beginnings.
fn parents_first(records: Vec<RecoveredRecord>) -> Vec<RecoveredRecord> {
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

/// Clears a header on disk.
fn clear(
    config: &DiskConfig,
    geometry: &Geometry,
    segments: &mut [FoundSegment],
    page: PageId,
    engine: &dyn IoEngine,
) -> Result<(), DiskError> {
    let (number, index) = geometry.locate(page.0);
    let Some(segment) = segments.iter_mut().find(|segment| segment.number == number) else { return Ok(()) };
    let mut zeros = vec![0_u8; geometry.header_slot() as usize];
    let Some(pointer) = NonNull::new(zeros.as_mut_ptr()) else { return Ok(()) };
    // SAFETY: `zeros` moves into the `then` below and its bytes stay where they are until that has run.
    let buffers = vec![unsafe { Buffer::new(pointer, zeros.len()) }];
    let (sender, receiver) = bounded(1);
    let offset = geometry.header_offset(index);
    engine.submit(Io {
        lane: Lane::Write,
        operation: Operation::Write { file: Arc::clone(&segment.file), part: Part::Headers, offset },
        buffers,
        started: None,
        then: Box::new(move |result| {
            // Nobody listens only if the deadline has passed.
            let _late = sender.try_send(result.map(|written| written == zeros.len()));
            None
        }),
    });
    let late = |_| DiskError::Deadline {
        operation: "clearing a superseded record",
        root: config.root.clone(),
        waited: config.io_deadline,
    };
    let whole = receiver.recv_timeout(config.io_deadline).map_err(late)?;
    let path = &segment.file.path;
    if !whole.map_err(at("clear a superseded record of", path))? {
        return Err(at("clear a superseded record of", path)(io::ErrorKind::WriteZero.into()));
    }
    segment.slots[index as usize] = Slot::Blank;
    Ok(())
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
        let all = vec![three.clone(), old, two.clone(), orphan.clone(), one.clone()];
        let (kept, superseded) = newest(all);
        assert_eq!(superseded, [PageId(0)]);
        assert_eq!(parents_first(kept), [orphan, one, two, three]);
    }
}
