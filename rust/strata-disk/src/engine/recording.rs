//! An engine that wraps another and writes down every change of the disk, in the order in which they start, and the
//! replay of that log into a fresh root, up to any point and with any loss: what a crash would have left.

use super::{Io, IoEngine, Operation, Part, SegmentBytes, SegmentFile};
use crate::root::MARKER_FILE;
use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;
use xxhash_rust::xxh3::xxh3_64_with_seed;

/// What a disk writes whole or not at all.
const SECTOR: u64 = 512;

/// One change of the disk.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum LoggedWrite {
    /// A file of zeros came to be.
    Create {
        /// The file.
        path: PathBuf,
        /// Its bytes.
        bytes: u64,
    },
    /// Bytes were written.
    Write {
        /// The file.
        path: PathBuf,
        /// Where in it.
        offset: u64,
        /// What.
        bytes: Vec<u8>,
    },
    /// A file was deleted.
    Remove {
        /// The file.
        path: PathBuf,
    },
    /// Everything before, in this segment, became safe against power loss.
    Sync {
        /// The segment's payloads; its headers are meant too.
        path: PathBuf,
    },
}

type Log = Arc<Mutex<Vec<LoggedWrite>>>;

/// Wraps an engine and remembers what it changed.
pub struct RecordingEngine {
    inner: Arc<dyn IoEngine>,
    log: Log,
}

impl RecordingEngine {
    /// Records what `inner` is given.
    pub fn new(inner: Arc<dyn IoEngine>) -> RecordingEngine {
        RecordingEngine { inner, log: Log::default() }
    }

    /// The changes so far.
    pub fn log(&self) -> Vec<LoggedWrite> {
        self.log.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

fn note(log: &Log, change: LoggedWrite) {
    log.lock().unwrap_or_else(PoisonError::into_inner).push(change);
}

fn wrap(log: &Log, mut io: Io) -> Io {
    if let Operation::Write { file, part, offset } = &io.operation {
        let mut bytes = Vec::with_capacity(io.bytes());
        for buffer in &io.buffers {
            // SAFETY: the buffers of an Io stay valid until its `then` has run, and of a write nobody changes them.
            bytes.extend_from_slice(unsafe {
                std::slice::from_raw_parts(buffer.pointer().as_ptr(), buffer.len())
            });
        }
        note(log, LoggedWrite::Write { path: part.path(&file.path), offset: *offset, bytes });
    }
    let (log, then) = (Arc::clone(log), io.then);
    io.then = Box::new(move |result| then(result).map(|next| wrap(&log, next)));
    io
}

impl IoEngine for RecordingEngine {
    fn create(&self, path: &Path, bytes: SegmentBytes, front: &[u8]) -> io::Result<SegmentFile> {
        let file = self.inner.create(path, bytes, front)?;
        let headers = Part::Headers.path(path);
        note(&self.log, LoggedWrite::Create { path: path.to_owned(), bytes: bytes.payloads });
        note(&self.log, LoggedWrite::Create { path: headers.clone(), bytes: bytes.headers });
        note(&self.log, LoggedWrite::Write { path: headers, offset: 0, bytes: front.to_vec() });
        Ok(file)
    }

    fn open(&self, path: &Path, bytes: SegmentBytes) -> io::Result<SegmentFile> {
        self.inner.open(path, bytes)
    }

    fn remove(&self, path: &Path) -> io::Result<()> {
        for path in [Part::Headers, Part::Payloads].map(|part| part.path(path)) {
            if path.try_exists()? {
                note(&self.log, LoggedWrite::Remove { path });
            }
        }
        self.inner.remove(path)
    }

    fn sync(&self, file: &SegmentFile) -> io::Result<()> {
        self.inner.sync(file)?;
        note(&self.log, LoggedWrite::Sync { path: file.path.clone() });
        Ok(())
    }

    fn submit(&self, io: Io) {
        self.inner.submit(wrap(&self.log, io));
    }

    fn depth(&self) -> usize {
        self.inner.depth()
    }

    fn describe(&self) -> String {
        format!("{}, recorded", self.inner.describe())
    }

    fn stop(&self, deadline: Duration) -> bool {
        self.inner.stop(deadline)
    }
}

/// What a crash left of one change.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fate {
    /// All of it.
    Whole,
    /// Nothing.
    Lost,
    /// Of a write, so many bytes.
    Front(usize),
    /// Of a write, about half of its sectors; which ones, this seed decides.
    Sectors(u64),
}

/// Rebuilds a root as a crash would have left it.
pub struct Replay<'a> {
    /// What was recorded.
    pub log: &'a [LoggedWrite],
    /// The root that was recorded.
    pub from: &'a Path,
    /// A fresh folder.
    pub to: &'a Path,
}

impl Replay<'_> {
    /// Applies changes, each an index into the log, in the order in which they are given: a process that dies leaves
    /// them in the order of the log and tears the last one; a power loss may reorder, tear and lose all that no sync
    /// made safe. Changes of a file whose creation was lost are lost with it.
    pub fn apply(&self, changes: impl IntoIterator<Item = (usize, Fate)>) -> io::Result<()> {
        fs::create_dir_all(self.to)?;
        fs::copy(self.from.join(MARKER_FILE), self.to.join(MARKER_FILE))?;
        for (index, fate) in changes {
            match self.log.get(index) {
                Some(change) if fate != Fate::Lost => self.change(change, fate)?,
                _ => {}
            }
        }
        Ok(())
    }

    fn change(&self, change: &LoggedWrite, fate: Fate) -> io::Result<()> {
        let done = match change {
            LoggedWrite::Create { path, bytes } => File::create(self.target(path)?)?.set_len(*bytes),
            LoggedWrite::Write { path, offset, bytes } => self.write(path, *offset, bytes, fate),
            LoggedWrite::Remove { path } => fs::remove_file(self.target(path)?),
            LoggedWrite::Sync { .. } => Ok(()),
        };
        match done {
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
            done => done,
        }
    }

    fn write(&self, path: &Path, offset: u64, bytes: &[u8], fate: Fate) -> io::Result<()> {
        let file = OpenOptions::new().write(true).open(self.target(path)?)?;
        let seed = match fate {
            Fate::Whole | Fate::Lost => return file.write_all_at(bytes, offset),
            Fate::Front(length) => return file.write_all_at(&bytes[..length.min(bytes.len())], offset),
            Fate::Sectors(seed) => seed,
        };
        let mut at = 0;
        while at < bytes.len() {
            let sector = (offset + at as u64) / SECTOR;
            let end = (((sector + 1) * SECTOR - offset) as usize).min(bytes.len());
            if xxh3_64_with_seed(&sector.to_le_bytes(), seed) & 1 == 0 {
                file.write_all_at(&bytes[at..end], offset + at as u64)?;
            }
            at = end;
        }
        Ok(())
    }

    fn target(&self, path: &Path) -> io::Result<PathBuf> {
        let target = self.to.join(path.strip_prefix(self.from).map_err(io::Error::other)?);
        if let Some(folder) = target.parent() {
            fs::create_dir_all(folder)?;
        }
        Ok(target)
    }
}
