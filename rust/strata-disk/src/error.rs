//! Why a store could not be opened, synced or closed. Transfers fail with `TransferError` instead.

use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;
use thiserror::Error;

/// What a message says about the owner of a lock.
pub(crate) fn owner_text(pid: Option<u32>) -> String {
    pid.map_or_else(|| "another process".to_owned(), |pid| format!("process {pid}"))
}

/// What the disk tier refuses.
#[derive(Debug, Error)]
pub enum DiskError {
    /// A field of the configuration makes no sense.
    #[error("disk store: {field} = {value}: {remedy}")]
    Config {
        /// The field.
        field: &'static str,
        /// Its value.
        value: String,
        /// What to do.
        remedy: &'static str,
    },
    /// Another process owns the root.
    #[error(
        "disk root {root} is in use by {}: serve with the disk tier off, or choose another --disk-path",
        owner_text(*.pid)
    )]
    Locked {
        /// The root.
        root: PathBuf,
        /// Its owner, where the lock file says.
        pid: Option<u32>,
    },
    /// The root was there, and now neither it nor its file system is.
    #[error(
        "disk root {root} is gone, and so is the file system that it was on: \
         mount it again, or start with another --disk-path"
    )]
    Unmounted {
        /// The root.
        root: PathBuf,
    },
    /// The folder holds other people's files.
    #[error(
        "{root} is not empty and not a Strata disk root (it holds {found:?} but no {marker}): \
         choose an empty folder for --disk-path"
    )]
    NotARoot {
        /// The folder.
        root: PathBuf,
        /// One thing it holds.
        found: String,
        /// The file that would make it a root.
        marker: &'static str,
    },
    /// The folder is no root at all.
    #[error(
        "{root} is no Strata disk root, it has no file {marker}: name the folder that --disk-path names"
    )]
    NotMarked {
        /// The folder.
        root: PathBuf,
        /// The file that would make it a root.
        marker: &'static str,
    },
    /// A fingerprint was named that is not there, or by too few digits.
    #[error(
        "{found} fingerprints of disk root {root} begin with {named:?}: \
         give more digits of exactly one that `strata inspect` lists"
    )]
    UnknownFingerprint {
        /// The root.
        root: PathBuf,
        /// What was named.
        named: String,
        /// How many begin like that.
        found: usize,
    },
    /// The root has another format.
    #[error(
        "disk root {root} has format {found:?}, this build reads {expected:?}: \
         choose another --disk-path, or delete that folder"
    )]
    Format {
        /// The root.
        root: PathBuf,
        /// What its marker says.
        found: String,
        /// What it should say.
        expected: String,
    },
    /// Not even one record fits.
    #[error(
        "disk root {root} may hold {cap_bytes} bytes, of which {foreign_bytes} are taken by files that are not \
         Strata's; one record of {page_bytes} bytes needs {needed_bytes} in all: \
         raise --disk-capacity to at least {needed_bytes}, or turn the disk tier off with 0"
    )]
    CapTooSmall {
        /// The root.
        root: PathBuf,
        /// The cap.
        cap_bytes: u64,
        /// What files of others take.
        foreign_bytes: u64,
        /// A page's bytes.
        page_bytes: u32,
        /// The least cap that works.
        needed_bytes: u64,
    },
    /// Recovery is still looking at what lies in the root.
    #[error(
        "disk root {root} is still being recovered: set another --disk-capacity when the last batch has arrived"
    )]
    Recovering {
        /// The root.
        root: PathBuf,
    },
    /// The memory has pages of another size.
    #[error("host pages have {memory_bytes} bytes, records {page_bytes}: both must describe one KV shape")]
    PageBytes {
        /// Bytes of a page of memory.
        memory_bytes: usize,
        /// Bytes of a record's payload.
        page_bytes: u32,
    },
    /// The engine that was asked for does not work here.
    #[error("--disk-engine {engine} cannot serve disk root {root}: {reason}: choose auto or threads")]
    Engine {
        /// The engine.
        engine: &'static str,
        /// The root.
        root: PathBuf,
        /// Why not.
        reason: String,
    },
    /// The system refused.
    #[error("{operation} {path}: {source}")]
    Io {
        /// What was being done.
        operation: &'static str,
        /// To what.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
    },
    /// The kernel did not answer in time.
    #[error("{operation} of disk root {root} did not finish within {waited:?}: the device may hang")]
    Deadline {
        /// What was being done.
        operation: &'static str,
        /// The root.
        root: PathBuf,
        /// How long it was waited for.
        waited: Duration,
    },
}

/// Names the operation and the path of an I/O error.
pub(crate) fn at<'a>(operation: &'static str, path: &'a Path) -> impl FnOnce(io::Error) -> DiskError + 'a {
    move |source| DiskError::Io { operation, path: path.to_owned(), source }
}
