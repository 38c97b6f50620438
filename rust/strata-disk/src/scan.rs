//! What can be said of a folder in milliseconds, before any header is read: which segments there are, and the geometry
//! that they share. Segments that the store has no place for are deleted here.

use crate::config::DiskConfig;
use crate::engine::{IoEngine, Part};
use crate::error::at;
use crate::format::Superblock;
use crate::geometry::{Geometry, BLOCK};
use crate::usage::segment_number;
use crate::DiskError;
use std::fs::{self, File};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

/// The segments of a folder, by number.
pub(crate) struct Scan {
    pub superblock: Superblock,
    pub files: Vec<(usize, PathBuf)>,
}

/// Lists the segments below `folder`; `None` if no record fits into `available` bytes.
pub(crate) fn scan(
    config: &DiskConfig,
    folder: &Path,
    available: u64,
    engine: &dyn IoEngine,
) -> Result<Option<Scan>, DiskError> {
    let files = list(folder)?;
    let Some(superblock) = agree(config, &files, available) else { return Ok(None) };
    let most = superblock.geometry.segments_within(available) as usize;
    let mut scan = Scan { superblock, files: Vec::new() };
    for (number, path) in files {
        if number < most && read_superblock(&path) == Some(superblock) {
            scan.files.push((number, path));
        } else {
            engine.remove(&path).map_err(at("delete segment", &path))?;
        }
    }
    Ok(Some(scan))
}

/// The files of payloads in a folder, by number; also where only the headers are there.
pub(crate) fn list(folder: &Path) -> Result<Vec<(usize, PathBuf)>, DiskError> {
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

/// The first block of the headers of the segment whose payloads lie at `path`.
pub(crate) fn read_superblock(path: &Path) -> Option<Superblock> {
    let mut block = [0; BLOCK as usize];
    File::open(Part::Headers.path(path)).ok()?.read_exact_at(&mut block, 0).ok()?;
    Superblock::decode(&block).ok()
}
