//! What lies in a root, without opening it: reads only, takes no lock, and works beside a server that uses the root.
//! Then what is being written may count as damaged; everything else is as a restart would find it.

use crate::engine::Part;
use crate::error::at;
use crate::format::{HeaderError, RecordHeader, Superblock};
use crate::root::{check_marked, owner_of, LOCK_FILE, MARKER_DRAFT, MARKER_FILE};
use crate::scan::{list, read_superblock};
use crate::usage::{allocated, disk_usage, is_fingerprint, is_scratch, is_segment};
use crate::DiskError;
use std::fs::{self, File};
use std::io;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use xxhash_rust::xxh3::xxh3_128;

/// Bytes of headers that are read at once.
const CHUNK_BYTES: u64 = 1 << 20;

/// What lies in a root.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Inspection {
    /// Everything in it, as `du` counts.
    pub bytes: u64,
    /// Whether a process owns it now.
    pub in_use: bool,
    /// That process, where the lock file says.
    pub owner: Option<u32>,
    /// What each fingerprint has.
    pub folders: Vec<FolderInspection>,
    /// What is not Strata's: counted against the cap, and left alone.
    pub foreign: Vec<PathBuf>,
}

/// What lies in the folder of one fingerprint.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct FolderInspection {
    /// The fingerprint, 64 hexadecimal digits.
    pub fingerprint: String,
    /// The folder and what is in it, as `du` counts.
    pub bytes: u64,
    /// Tokens of a page; 0 if no segment can be read.
    pub page_size: u32,
    /// Bytes of a page; 0 if no segment can be read.
    pub page_bytes: u32,
    /// Segments that can be read.
    pub segments: u32,
    /// Segments whose first block or whose payloads are missing or damaged.
    pub damaged_segments: u32,
    /// Records with a whole header whose payload is there.
    pub whole: u64,
    /// Records whose header is damaged or whose payload is cut off.
    pub damaged: u64,
    /// Records that were never written, or were cleared.
    pub blank: u64,
    /// The highest sequence of a whole record; higher is newer.
    pub newest_sequence: u64,
    /// Of the whole records, those whose payload was read and has its checksum.
    pub verified: u64,
    /// Of the whole records, those whose payload was read and has another.
    pub corrupt: u64,
}

/// Looks at a root. With `verify` every payload is read, which takes as long as the disk needs for that.
pub fn inspect(root: &Path, verify: bool) -> Result<Inspection, DiskError> {
    check_marked(root)?;
    let (in_use, owner) = owner_of(root)?;
    let bytes = disk_usage(root).map_err(at("survey", root))?;
    let mut found = Inspection { bytes, in_use, owner, ..Inspection::default() };
    for path in entries(root)? {
        let is_folder = fs::symlink_metadata(&path).is_ok_and(|metadata| metadata.is_dir());
        if is_folder && is_fingerprint(&path) {
            found.foreign.extend(entries(&path)?.into_iter().filter(|file| !is_own(file)));
            found.folders.push(inspect_folder(&path, verify)?);
        } else if ![MARKER_FILE, MARKER_DRAFT, LOCK_FILE].map(|name| root.join(name)).contains(&path) {
            found.foreign.push(path);
        }
    }
    Ok(found)
}

/// What is in a folder, by name.
pub(crate) fn entries(folder: &Path) -> Result<Vec<PathBuf>, DiskError> {
    let list = || -> io::Result<Vec<PathBuf>> {
        let mut paths = fs::read_dir(folder)?
            .map(|entry| entry.map(|entry| entry.path()))
            .collect::<io::Result<Vec<_>>>()?;
        paths.sort();
        Ok(paths)
    };
    list().map_err(at("list", folder))
}

/// Whether a file in a fingerprint's folder is the store's.
pub(crate) fn is_own(path: &Path) -> bool {
    (is_segment(path) || is_scratch(path))
        && fs::symlink_metadata(path).is_ok_and(|metadata| metadata.is_file())
}

fn inspect_folder(folder: &Path, verify: bool) -> Result<FolderInspection, DiskError> {
    let fingerprint = folder.file_name().unwrap_or_default().to_string_lossy().into_owned();
    let mut found = FolderInspection { fingerprint, ..FolderInspection::default() };
    found.bytes = fs::symlink_metadata(folder).map_or(0, |metadata| allocated(&metadata));
    for path in entries(folder)? {
        found.bytes += disk_usage(&path).map_err(at("survey", &path))?;
    }
    for (_, path) in list(folder)? {
        let whole = read_superblock(&path)
            .filter(|superblock| superblock.fingerprint.to_hex() == found.fingerprint)
            .is_some_and(|superblock| found.add_segment(&superblock, &path, verify).is_ok());
        if !whole {
            found.damaged_segments += 1;
        }
    }
    Ok(found)
}

impl FolderInspection {
    fn add_segment(&mut self, superblock: &Superblock, path: &Path, verify: bool) -> io::Result<()> {
        let geometry = superblock.geometry;
        let (headers, payloads) = (File::open(Part::Headers.path(path))?, File::open(path)?);
        (self.page_size, self.page_bytes) = (geometry.page_size, geometry.page_bytes);
        self.segments += 1;
        let payload_bytes = payloads.metadata()?.len();
        let slot = geometry.header_slot();
        let most = u32::try_from((CHUNK_BYTES / slot).max(1)).unwrap_or(u32::MAX);
        for first in (0..geometry.records_per_segment).step_by(most as usize) {
            let count = most.min(geometry.records_per_segment - first);
            let mut area = vec![0; count as usize * slot as usize];
            read_what_is_there(&headers, &mut area, geometry.header_offset(first))?;
            for index in first..first + count {
                let header = &area[((index - first) as usize) * slot as usize..][..slot as usize];
                let end = geometry.payload_offset(index) + u64::from(geometry.page_bytes);
                match RecordHeader::decode(header, geometry.page_size) {
                    Err(HeaderError::Blank) => self.blank += 1,
                    Ok(decoded) if end <= payload_bytes && decoded.is_of(superblock) => {
                        self.whole += 1;
                        self.newest_sequence = self.newest_sequence.max(decoded.sequence);
                        if verify {
                            self.verify(superblock, &headers, &payloads, index, header)?;
                        }
                    }
                    _ => self.damaged += 1,
                }
            }
        }
        Ok(())
    }

    /// Reads a payload and compares its checksum. If they differ because somebody writes there, it counts as neither.
    fn verify(
        &mut self,
        superblock: &Superblock,
        headers: &File,
        payloads: &File,
        index: u32,
        header: &[u8],
    ) -> io::Result<()> {
        let geometry = superblock.geometry;
        let mut payload = vec![0; geometry.page_bytes as usize];
        read_what_is_there(payloads, &mut payload, geometry.payload_offset(index))?;
        let sum = RecordHeader::decode(header, geometry.page_size).map(|header| header.payload_checksum);
        if sum == Ok(xxh3_128(&payload)) {
            self.verified += 1;
            return Ok(());
        }
        let mut again = vec![0; header.len()];
        read_what_is_there(headers, &mut again, geometry.header_offset(index))?;
        if again == header {
            self.corrupt += 1;
        }
        Ok(())
    }
}

/// Fills the buffer; what lies beyond the end of the file stays zero.
fn read_what_is_there(file: &File, buffer: &mut [u8], offset: u64) -> io::Result<()> {
    let mut done = 0;
    while done < buffer.len() {
        match file.read_at(&mut buffer[done..], offset + done as u64) {
            Ok(0) => return Ok(()),
            Ok(bytes) => done += bytes,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(())
}
