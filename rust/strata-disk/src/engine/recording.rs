//! An engine that wraps another and writes down every change of the disk, in the order in which they start, and the
//! replay of any prefix of that log into a fresh root: what a crash at that moment would have left.

use super::{Io, IoEngine, Operation, Part, SegmentBytes, SegmentFile};
use crate::root::MARKER_FILE;
use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

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
    /// Applies the first `count` changes for which `keep` holds. Of the last one only `torn` bytes, if given: a dying
    /// process tears its last write; a power loss also loses (`keep`) any of those that no sync made safe.
    pub fn apply(&self, count: usize, torn: Option<usize>, keep: impl Fn(usize) -> bool) -> io::Result<()> {
        fs::create_dir_all(self.to)?;
        fs::copy(self.from.join(MARKER_FILE), self.to.join(MARKER_FILE))?;
        for (index, change) in self.log.iter().enumerate().take(count) {
            if keep(index) {
                self.change(change, torn.filter(|_| index + 1 == count))?;
            }
        }
        Ok(())
    }

    fn change(&self, change: &LoggedWrite, torn: Option<usize>) -> io::Result<()> {
        match change {
            LoggedWrite::Create { path, bytes } => {
                let path = self.target(path)?;
                File::create(path)?.set_len(*bytes)
            }
            LoggedWrite::Write { path, offset, bytes } => {
                let file = OpenOptions::new().write(true).open(self.target(path)?)?;
                let length = torn.unwrap_or(bytes.len()).min(bytes.len());
                file.write_all_at(&bytes[..length], *offset)
            }
            LoggedWrite::Remove { path } => fs::remove_file(self.target(path)?),
            LoggedWrite::Sync { .. } => Ok(()),
        }
    }

    fn target(&self, path: &Path) -> io::Result<PathBuf> {
        let target = self.to.join(path.strip_prefix(self.from).map_err(io::Error::other)?);
        if let Some(folder) = target.parent() {
            fs::create_dir_all(folder)?;
        }
        Ok(target)
    }
}
