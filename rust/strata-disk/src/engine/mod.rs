//! What executes I/O for the store. An engine is handed chains: an `Io` whose `then` looks at the result and returns
//! the next `Io`, or none. One contract for a thread pool, a ring and the fakes:
//! - `submit` never blocks and never fails; the store bounds what is outstanding;
//! - each `Io` is executed once and its `then` called once, on a thread of the engine's that may block, after the
//!   kernel has let go of its buffers; reads go before writes, but writes do not starve;
//! - `Io::start` is called when the kernel is handed the I/O, so that waiting in a queue is not taken for a slow disk;
//! - a result shorter than the buffers means that the file ends there, or that the system took no more.

mod choice;
mod faulty;
mod files;
mod recording;
mod ring;
mod threads;
mod throttled;
mod workers;

pub use choice::{start_engine, RingProbe};
pub use faulty::{Fault, FaultyEngine};
pub use recording::{Fate, LoggedWrite, RecordingEngine, Replay};
pub use ring::{probe_io_uring, IoUringEngine, RingGauges};
pub use threads::ThreadPoolEngine;
pub use throttled::ThrottledEngine;

use crate::usage::{HEADERS, PAYLOADS};
use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};
use std::ptr::NonNull;
use std::sync::Arc;
use std::time::Duration;

/// Which queue an I/O waits in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Lane {
    /// Somebody waits for these bytes.
    Read,
    /// Nobody does.
    Write,
}

/// Which of a segment's two files.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Part {
    /// Superblock and headers: small, through the page cache.
    Headers,
    /// Payloads: large, past the page cache where the file system and the buffers allow.
    Payloads,
}

impl Part {
    /// The path of this part of the segment whose payloads lie at `segment`.
    pub fn path(self, segment: &Path) -> PathBuf {
        segment.with_extension(if self == Part::Headers { HEADERS } else { PAYLOADS })
    }
}

/// Bytes of a segment's two files.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SegmentBytes {
    /// Of the headers.
    pub headers: u64,
    /// Of the payloads.
    pub payloads: u64,
}

/// An open segment.
#[derive(Debug)]
pub struct SegmentFile {
    /// Where its payloads are; the headers lie beside them.
    pub path: PathBuf,
    /// The headers.
    pub headers: File,
    /// The payloads, through the page cache.
    pub cached: File,
    /// The payloads, past the page cache, where the file system takes it.
    pub direct: Option<File>,
}

/// What an I/O does.
#[derive(Clone, Debug)]
pub enum Operation {
    /// Nothing: brings `then` onto a thread of the engine's.
    Hop,
    /// Fills the buffers from a file.
    Read {
        /// The segment.
        file: Arc<SegmentFile>,
        /// Which file of it.
        part: Part,
        /// Where in that.
        offset: u64,
    },
    /// Writes the buffers to a file.
    Write {
        /// The segment.
        file: Arc<SegmentFile>,
        /// Which file of it.
        part: Part,
        /// Where in that.
        offset: u64,
    },
}

/// A stretch of memory that the kernel reads or writes. Valid until the `then` of its `Io` has run.
#[derive(Debug)]
pub struct Buffer {
    pointer: NonNull<u8>,
    length: usize,
}

// SAFETY: a Buffer is an address and a length; whoever makes one promises (see `new`) that any thread may use it.
unsafe impl Send for Buffer {}

impl Buffer {
    /// A stretch of memory.
    ///
    /// # Safety
    /// Until the `then` of the `Io` that it goes into has run, the bytes must stay valid for reads from any thread
    /// (and for writes if the `Io` reads into them), and nobody else may write them (or touch them, respectively).
    pub unsafe fn new(pointer: NonNull<u8>, length: usize) -> Buffer {
        Buffer { pointer, length }
    }

    /// Where it starts.
    pub fn pointer(&self) -> NonNull<u8> {
        self.pointer
    }

    /// Its bytes.
    pub fn len(&self) -> usize {
        self.length
    }

    /// Whether it is empty.
    pub fn is_empty(&self) -> bool {
        self.length == 0
    }
}

/// Looks at the number of bytes that were moved and says what comes next.
pub type Then = Box<dyn FnOnce(io::Result<usize>) -> Option<Io> + Send>;

/// Is told that the kernel has an I/O now.
pub type Started = Box<dyn FnOnce() + Send>;

/// One I/O of a chain.
pub struct Io {
    /// The queue it waits in.
    pub lane: Lane,
    /// What it does.
    pub operation: Operation,
    /// With which memory, in order.
    pub buffers: Vec<Buffer>,
    /// Whom to tell when it starts.
    pub started: Option<Started>,
    /// What comes after.
    pub then: Then,
}

impl Io {
    /// Brings `then` onto a thread of the engine's.
    pub fn hop(lane: Lane, then: impl FnOnce() -> Option<Io> + Send + 'static) -> Io {
        let then = Box::new(move |_| then());
        Io { lane, operation: Operation::Hop, buffers: Vec::new(), started: None, then }
    }

    /// The kernel is handed it now.
    pub fn start(&mut self) {
        if let Some(started) = self.started.take() {
            started();
        }
    }

    /// Bytes of all buffers.
    pub fn bytes(&self) -> usize {
        self.buffers.iter().map(Buffer::len).sum()
    }
}

/// Executes I/O; see the module for the contract.
pub trait IoEngine: Send + Sync {
    /// Creates a segment with all its blocks allocated, private, the headers beginning with `front`, all else zero.
    /// `path` is that of its payloads. Leaves no file behind when it fails. Blocks.
    fn create(&self, path: &Path, bytes: SegmentBytes, front: &[u8]) -> io::Result<SegmentFile>;

    /// Opens a segment and makes its files as long as they should be. Blocks.
    fn open(&self, path: &Path, bytes: SegmentBytes) -> io::Result<SegmentFile>;

    /// Deletes what there is of a segment, headers first. Blocks.
    fn remove(&self, path: &Path) -> io::Result<()>;

    /// Makes everything that was written to a segment safe against power loss. Blocks.
    fn sync(&self, file: &SegmentFile) -> io::Result<()>;

    /// Queues the head of a chain.
    fn submit(&self, io: Io);

    /// Chains that it is worth to keep going at once.
    fn depth(&self) -> usize;

    /// What it is, for logs: `threads x4, O_DIRECT`.
    fn describe(&self) -> String;

    /// Finishes what is queued and ends its threads; false if they did not end in time.
    fn stop(&self, deadline: Duration) -> bool;
}
