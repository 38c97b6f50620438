//! Deletes what Strata wrote into a root, and nothing else: only in a folder that is marked and that no process uses.
//! Records hold users' text; headers go before payloads. What a purge leaves, because it is not Strata's, it names.

use crate::error::at;
use crate::inspect::{entries, is_own};
use crate::root::{check_marked, lock, LOCK_FILE, MARKER_DRAFT, MARKER_FILE};
use crate::usage::{disk_usage, is_fingerprint, HEADERS};
use crate::DiskError;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

/// What a purge did.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Purged {
    /// Bytes that were given back, as `du` counts.
    pub bytes: u64,
    /// Segments and other files that were deleted.
    pub files: u64,
    /// Fingerprints whose folders were emptied.
    pub fingerprints: Vec<String>,
    /// What is not Strata's and was left.
    pub left: Vec<PathBuf>,
}

/// Purges a root, or one fingerprint of it, named by its first digits.
pub fn purge(root: &Path, fingerprint: Option<&str>) -> Result<Purged, DiskError> {
    check_marked(root)?;
    let _locked = lock(root)?;
    let size = || disk_usage(root).map_err(at("survey", root));
    let before = size()?;
    let mut purged = Purged::default();
    for folder in choose(root, fingerprint)? {
        empty(&folder, &mut purged)?;
    }
    if fingerprint.is_none() {
        // The marker before the lock: what is left if this process dies here is still seen to be Strata's own.
        for name in [MARKER_DRAFT, MARKER_FILE, LOCK_FILE] {
            delete(&root.join(name), &mut purged)?;
        }
        let is_named = |path: &PathBuf| purged.left.iter().any(|left| left.starts_with(path));
        let others: Vec<PathBuf> = entries(root)?.into_iter().filter(|path| !is_named(path)).collect();
        purged.left.extend(others);
        // Stays while anything is left in it.
        if purged.left.is_empty() && fs::remove_dir(root).is_ok() {
            purged.bytes = before;
            return Ok(purged);
        }
    }
    purged.bytes = before.saturating_sub(size()?);
    Ok(purged)
}

/// The folders that are meant.
fn choose(root: &Path, fingerprint: Option<&str>) -> Result<Vec<PathBuf>, DiskError> {
    let is_folder = |path: &PathBuf| {
        is_fingerprint(path) && fs::symlink_metadata(path).is_ok_and(|metadata| metadata.is_dir())
    };
    let mut folders: Vec<PathBuf> = entries(root)?.into_iter().filter(is_folder).collect();
    let Some(digits) = fingerprint else { return Ok(folders) };
    folders.retain(|folder| name_of(folder).starts_with(&digits.to_ascii_lowercase()));
    if digits.is_empty() || folders.len() != 1 {
        let (root, named, found) = (root.to_owned(), digits.to_owned(), folders.len());
        return Err(DiskError::UnknownFingerprint { root, named, found });
    }
    Ok(folders)
}

fn name_of(folder: &Path) -> String {
    folder.file_name().unwrap_or_default().to_string_lossy().into_owned()
}

/// Deletes a fingerprint's files, headers first, and the folder if nothing else is in it.
fn empty(folder: &Path, purged: &mut Purged) -> Result<(), DiskError> {
    let (own, others): (Vec<_>, Vec<_>) = entries(folder)?.into_iter().partition(|path| is_own(path));
    let is_headers = |path: &&PathBuf| path.extension().is_some_and(|extension| extension == HEADERS);
    let (headers, payloads): (Vec<_>, Vec<_>) = own.iter().partition(is_headers);
    for path in headers.into_iter().chain(payloads) {
        delete(path, purged)?;
    }
    purged.fingerprints.push(name_of(folder));
    purged.left.extend(others);
    match fs::remove_dir(folder) {
        Err(error) if error.kind() != io::ErrorKind::DirectoryNotEmpty => {
            Err(at("delete the folder", folder)(error))
        }
        _ => Ok(()),
    }
}

fn delete(path: &Path, purged: &mut Purged) -> Result<(), DiskError> {
    match fs::remove_file(path) {
        Ok(()) => purged.files += 1,
        Err(error) if error.kind() == io::ErrorKind::NotFound => {}
        Err(error) => return Err(at("delete", path)(error)),
    }
    Ok(())
}
