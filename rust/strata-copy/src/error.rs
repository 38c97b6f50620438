//! What can go wrong before a byte moves. Failures of one transfer are `TransferError`s in its completion.

use strata_types::{KvShape, LayoutError};
use thiserror::Error;

/// Why there is no arena, no region or no engine.
#[derive(Debug, Error)]
pub enum CopyError {
    /// The system gave no memory.
    #[error("cannot map {bytes} bytes of host memory for --host-memory: {reason}; choose a smaller --host-memory, or raise the limit (ulimit -v, vm.overcommit_memory)")]
    Map {
        /// The size that was asked for.
        bytes: usize,
        /// What the system said.
        reason: std::io::Error,
    },
    /// More than was reserved.
    #[error("cannot grow the host tier to {bytes} bytes: address space for {most} bytes was reserved at the start; restart with the larger --host-memory")]
    Grow {
        /// The size that was asked for.
        bytes: usize,
        /// The most that there is room for.
        most: usize,
    },
    /// The system did not take memory back.
    #[error("the system does not take {bytes} bytes back: {reason}; the pool keeps its size, locked memory (mlock) is one cause")]
    GiveBack {
        /// How much.
        bytes: usize,
        /// What the system said.
        reason: std::io::Error,
    },
    /// A thread could not be started.
    #[error("cannot start copy thread {index} of --copy-threads {threads}: {reason}; choose fewer")]
    Thread {
        /// Which thread.
        index: usize,
        /// How many were asked for.
        threads: usize,
        /// What the system said.
        reason: std::io::Error,
    },
    /// A count outside its range.
    #[error("{flag} must be between 1 and {most}, got {value}")]
    Count {
        /// The setting.
        flag: &'static str,
        /// What it was set to.
        value: usize,
        /// The largest value that works.
        most: usize,
    },
    /// The ends disagree about what a page is.
    #[error(
        "device and host pages differ: {device:?} against {host:?}; build both layouts from one KvShape"
    )]
    Shapes {
        /// The device's shape.
        device: KvShape,
        /// The host's shape.
        host: KvShape,
    },
    /// No page has this shape.
    #[error(transparent)]
    Shape(#[from] LayoutError),
    /// A layout in which two pieces share bytes.
    #[error("the {end} layout lets pieces overlap: a stride of {stride} bytes for items of {extent} bytes")]
    Overlap {
        /// `device` or `host`.
        end: &'static str,
        /// The stride that is too small.
        stride: u64,
        /// The bytes that it has to step over.
        extent: u64,
    },
    /// The pages do not fit the memory.
    #[error("the {end} layout needs {needed} bytes, its memory has {available}: reserve fewer pages")]
    TooSmall {
        /// `device` or `host`.
        end: &'static str,
        /// Bytes up to the end of the last piece.
        needed: u128,
        /// Bytes of the region.
        available: usize,
    },
    /// Device and host share memory.
    #[error("the device and host regions overlap: give each its own memory")]
    SharedMemory,
    /// A span outside a region.
    #[error("bytes {offset}..+{len} are outside a region of {available} bytes")]
    OutOfBounds {
        /// Where the span starts.
        offset: u64,
        /// How long it is.
        len: usize,
        /// Bytes of the region.
        available: usize,
    },
    /// The threads outlived the deadline of `close`.
    #[error(
        "{threads} copy threads did not stop within {seconds} s; they end with the copy that they are in"
    )]
    StillRunning {
        /// How many.
        threads: usize,
        /// The deadline.
        seconds: u64,
    },
}
