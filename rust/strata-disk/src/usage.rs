//! What a root occupies, as `du` counts it, and whose it is. Only files that follow the store's own naming ever count
//! as stale; what anybody else put into the root counts against the cap and is left alone.

use crate::root::{LOCK_FILE, MARKER_FILE};
use std::collections::BTreeMap;
use std::fs::{self, Metadata};
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::SystemTime;

/// Extension of files of headers.
pub(crate) const HEADERS: &str = "kh";
/// Extension of files of payloads.
pub(crate) const PAYLOADS: &str = "kv";
/// In a fingerprint's folder: what a trial of a failed disk writes, reads and deletes. A file of headers beside it.
pub(crate) const SCRATCH: &str = "scratch.kv";

/// A segment of another fingerprint.
#[derive(Clone, Debug)]
pub(crate) struct StaleSegment {
    /// Its file of payloads; the headers lie beside it.
    pub path: PathBuf,
    /// What both files occupy.
    pub bytes: u64,
    modified: SystemTime,
}

/// What lies in a root.
#[derive(Clone, Debug, Default)]
pub(crate) struct Usage {
    /// Everything, in bytes of allocated blocks.
    pub total: u64,
    /// What is not the store's.
    pub foreign: u64,
    /// Segments of other fingerprints, oldest first.
    pub stale: Vec<StaleSegment>,
}

/// The bytes of all blocks allocated below and including `path`.
pub fn disk_usage(path: &Path) -> io::Result<u64> {
    let mut total = 0;
    walk(path, &mut |_, metadata| total += allocated(metadata))?;
    Ok(total)
}

/// Looks at a root from the side of the fingerprint whose folder is `own`.
pub(crate) fn survey(root: &Path, own: &Path) -> io::Result<Usage> {
    let mut usage = Usage::default();
    let mut stale: BTreeMap<PathBuf, StaleSegment> = BTreeMap::new();
    walk(root, &mut |path, metadata| {
        let bytes = allocated(metadata);
        usage.total += bytes;
        let folder = path.parent().unwrap_or(root);
        if is_segment(path) && metadata.is_file() && is_fingerprint(folder) && folder.parent() == Some(root) {
            if folder != own {
                let modified = metadata.modified().unwrap_or(SystemTime::UNIX_EPOCH);
                let path = path.with_extension(PAYLOADS);
                let new = StaleSegment { path: path.clone(), bytes: 0, modified };
                let segment = stale.entry(path).or_insert(new);
                segment.bytes += bytes;
                segment.modified = segment.modified.max(modified);
            }
        } else if !is_fixture(root, path, metadata) {
            usage.foreign += bytes;
        }
    })?;
    usage.stale.extend(stale.into_values());
    usage.stale.sort_by(|a, b| (a.modified, &a.path).cmp(&(b.modified, &b.path)));
    Ok(usage)
}

/// The number in the name of either file of a segment.
pub(crate) fn segment_number(path: &Path) -> Option<usize> {
    let (stem, extension) = path.file_name()?.to_str()?.split_once('.')?;
    let digits = stem.strip_prefix("segment-").filter(|_| [HEADERS, PAYLOADS].contains(&extension))?;
    (digits.len() >= 6 && digits.bytes().all(|byte| byte.is_ascii_digit())).then(|| digits.parse().ok())?
}

/// The name of a segment's file of payloads.
pub(crate) fn segment_name(number: usize) -> String {
    format!("segment-{number:06}.{PAYLOADS}")
}

pub(crate) fn is_segment(path: &Path) -> bool {
    segment_number(path).is_some()
}

/// Whether it is either file of a trial.
pub(crate) fn is_scratch(path: &Path) -> bool {
    path.with_extension(PAYLOADS).file_name().is_some_and(|name| name == SCRATCH)
        && path.extension().is_some_and(|extension| extension == HEADERS || extension == PAYLOADS)
}

pub(crate) fn is_fingerprint(path: &Path) -> bool {
    let name = path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
    name.len() == 64 && name.bytes().all(|byte| byte.is_ascii_hexdigit())
}

/// The root itself, its marker, its lock, the folders of fingerprints and a trial's files: covered by the geometry's fixed cost.
fn is_fixture(root: &Path, path: &Path, metadata: &Metadata) -> bool {
    path == root
        || path == root.join(MARKER_FILE)
        || path == root.join(LOCK_FILE)
        || (metadata.is_dir() && is_fingerprint(path) && path.parent() == Some(root))
        || (is_scratch(path) && path.parent().is_some_and(is_fingerprint))
}

pub(crate) fn allocated(metadata: &Metadata) -> u64 {
    metadata.blocks() * 512
}

/// Visits a tree without following links. What vanishes meanwhile occupies nothing.
pub(crate) fn walk(path: &Path, visit: &mut impl FnMut(&Path, &Metadata)) -> io::Result<()> {
    let gone = |error: io::Error| {
        if error.kind() == io::ErrorKind::NotFound {
            Ok(())
        } else {
            Err(error)
        }
    };
    let metadata = match fs::symlink_metadata(path) {
        Ok(metadata) => metadata,
        Err(error) => return gone(error),
    };
    visit(path, &metadata);
    if metadata.is_dir() {
        let entries = match fs::read_dir(path) {
            Ok(entries) => entries,
            Err(error) => return gone(error),
        };
        for entry in entries {
            walk(&entry?.path(), visit)?;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_segments_of_other_fingerprints_are_stale() {
        let folder = tempfile::tempdir().unwrap();
        let root = folder.path();
        let (own, other) = (root.join("a".repeat(64)), root.join("b".repeat(64)));
        fs::create_dir(&own).unwrap();
        fs::create_dir(&other).unwrap();
        fs::create_dir(root.join("photos")).unwrap();
        let files = [
            own.join("segment-000000.kv"),
            other.join("segment-000001.kh"),
            other.join("notes.txt"),
            root.join("photos/segment-000000.kv"),
            root.join(MARKER_FILE),
        ];
        for file in &files {
            fs::write(file, [1; 5000]).unwrap();
        }
        let usage = survey(root, &own).unwrap();
        let stale: Vec<_> = usage.stale.iter().map(|segment| segment.path.clone()).collect();
        assert_eq!(stale, [files[1].with_extension(PAYLOADS)]);
        let foreign: u64 = [&files[2], &files[3], &root.join("photos")]
            .iter()
            .map(|path| allocated(&fs::metadata(path).unwrap()))
            .sum();
        assert_eq!(usage.foreign, foreign);
        assert_eq!(usage.total, disk_usage(root).unwrap());
        assert_eq!(segment_number(Path::new("segment-1000000.kv")), Some(1_000_000));
        assert_eq!(segment_number(Path::new("segment-00.kv")), None);
        assert_eq!(segment_name(3), "segment-000003.kv");
    }
}
