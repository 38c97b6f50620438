//! An engine that wraps another and makes chosen I/Os go wrong: for tests of everything above it. Works on the chain,
//! not on the system calls, so that it wraps every engine.

use super::{Buffer, Io, IoEngine, Operation, SegmentBytes, SegmentFile, Then};
use crate::geometry::BLOCK;
use crate::usage::{is_segment, PAYLOADS};
use std::collections::VecDeque;
use std::fs;
use std::io;
use std::path::Path;
use std::ptr::NonNull;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// How long a held I/O waits for a test that forgot it.
const PATIENCE: Duration = Duration::from_secs(60);

/// What happens to one I/O.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// Nothing.
    None,
    /// It fails with this error number and moves nothing.
    Error(i32),
    /// It moves at most this many bytes, and says so.
    Short(usize),
    /// It moves at most this many bytes, and says that it moved all: what a disk does that loses its power, or lies.
    Torn(usize),
    /// This bit of its bytes is flipped on the way: after a read, before a write. What a write writes from stays.
    FlipBit(usize),
    /// It answers so much later.
    Slow(Duration),
    /// It answers after `release`, and occupies its thread until then.
    Hold,
    /// It does not answer, and occupies no thread, until `release_lost`, if ever.
    Lose,
}

/// Wraps an engine. Scripts are followed in the order in which I/Os start; past their end everything goes well, or as
/// `on_all_reads` and `on_all_writes` say.
pub struct FaultyEngine {
    inner: Arc<dyn IoEngine>,
    script: Arc<Script>,
}

#[derive(Default)]
struct Script {
    state: Mutex<State>,
    released: Condvar,
}

#[derive(Default)]
struct State {
    reads: VecDeque<Fault>,
    writes: VecDeque<Fault>,
    all_reads: Option<Fault>,
    all_writes: Option<Fault>,
    create_error: Option<i32>,
    room: Option<usize>,
    sync_error: Option<i32>,
    held: usize,
    /// How often held I/Os were released: one that was chosen before a release does not hold after it.
    releases: u64,
    lost: Vec<(Then, io::Result<usize>)>,
    lost_releases: u64,
}

/// What happens to an I/O, and which releases it has missed.
#[derive(Clone, Copy)]
struct Chosen {
    fault: Fault,
    releases: u64,
    lost_releases: u64,
}

impl FaultyEngine {
    /// Passes everything on until told otherwise.
    pub fn new(inner: Arc<dyn IoEngine>) -> FaultyEngine {
        FaultyEngine { inner, script: Arc::default() }
    }

    /// What happens to the next reads.
    pub fn on_reads(&self, faults: impl IntoIterator<Item = Fault>) {
        self.script.state().reads.extend(faults);
    }

    /// What happens to the next writes: of a spill, first the clearing of an old header, then payload, then header.
    pub fn on_writes(&self, faults: impl IntoIterator<Item = Fault>) {
        self.script.state().writes.extend(faults);
    }

    /// What happens to every read past the script, until told otherwise.
    pub fn on_all_reads(&self, fault: Option<Fault>) {
        self.script.state().all_reads = fault;
    }

    /// What happens to every write past the script, until told otherwise.
    pub fn on_all_writes(&self, fault: Option<Fault>) {
        self.script.state().all_writes = fault;
    }

    /// With what error number segments are created, until told otherwise.
    pub fn on_create(&self, error: Option<i32>) {
        self.script.state().create_error = error;
    }

    /// For how many segments of all fingerprints the disk has room, until told otherwise.
    pub fn on_room(&self, segments: Option<usize>) {
        self.script.state().room = segments;
    }

    /// With what error number segments are synced, until told otherwise.
    pub fn on_sync(&self, error: Option<i32>) {
        self.script.state().sync_error = error;
    }

    /// Everything goes well from now on; what is held or lost stays so.
    pub fn heal(&self) {
        let mut state = self.script.state();
        (state.reads, state.writes) = Default::default();
        (state.all_reads, state.all_writes) = (None, None);
        (state.create_error, state.room, state.sync_error) = (None, None, None);
    }

    /// I/Os that are held now.
    pub fn held(&self) -> usize {
        self.script.state().held
    }

    /// Lets all held I/Os answer.
    pub fn release(&self) {
        self.script.state().releases += 1;
        self.script.released.notify_all();
    }

    /// I/Os that are lost now.
    pub fn lost(&self) -> usize {
        self.script.state().lost.len()
    }

    /// Lets all lost I/Os answer after all; what comes after them is executed. Returns how many there were.
    pub fn release_lost(&self) -> usize {
        let lost = {
            let mut state = self.script.state();
            state.lost_releases += 1;
            std::mem::take(&mut state.lost)
        };
        let count = lost.len();
        for (then, result) in lost {
            if let Some(next) = then(result) {
                self.submit(next);
            }
        }
        count
    }
}

impl Script {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn hold(&self, before: u64) {
        let mut state = self.state();
        state.held += 1;
        let wait = self.released.wait_timeout_while(state, PATIENCE, |state| state.releases == before);
        let (mut state, _) = wait.unwrap_or_else(PoisonError::into_inner);
        state.held -= 1;
    }

    /// Takes a lost I/O in, unless it has been released since it was chosen.
    fn lose(&self, then: Then, result: io::Result<usize>, before: u64) -> Option<(Then, io::Result<usize>)> {
        let mut state = self.state();
        if state.lost_releases != before {
            return Some((then, result));
        }
        state.lost.push((then, result));
        None
    }

    fn choose(&self, operation: &Operation) -> Chosen {
        let mut guard = self.state();
        let state = &mut *guard;
        let fault = match operation {
            Operation::Hop => None,
            Operation::Read { .. } => state.reads.pop_front().or(state.all_reads),
            Operation::Write { .. } => state.writes.pop_front().or(state.all_writes),
        };
        let (releases, lost_releases) = (state.releases, state.lost_releases);
        Chosen { fault: fault.unwrap_or(Fault::None), releases, lost_releases }
    }

    /// Takes the next fault of the script and builds it into the I/O, and into those that follow it.
    fn wrap(self: &Arc<Self>, mut io: Io) -> Io {
        let Chosen { fault, releases, lost_releases } = self.choose(&io.operation);
        let asked = io.bytes();
        let mut flipped = None;
        match fault {
            Fault::Error(_) => {
                io.operation = Operation::Hop;
                io.buffers.clear();
            }
            Fault::Short(bytes) | Fault::Torn(bytes) => truncate(&mut io, bytes),
            Fault::FlipBit(bit) if matches!(io.operation, Operation::Write { .. }) => {
                flip_on_the_way(&mut io, bit);
            }
            Fault::FlipBit(bit) => flipped = locate(&io, bit),
            _ => {}
        }
        let (script, mut then) = (Arc::clone(self), io.then);
        io.then = Box::new(move |mut result| {
            if fault == Fault::Lose {
                (then, result) = script.lose(then, result, lost_releases)?;
            }
            let result = match fault {
                Fault::Error(number) => Err(io::Error::from_raw_os_error(number)),
                Fault::Torn(_) => result.map(|_| asked),
                Fault::Slow(span) => {
                    std::thread::sleep(span);
                    result
                }
                Fault::Hold => {
                    script.hold(releases);
                    result
                }
                _ => result,
            };
            if let Some(Bit { byte, mask }) = flipped {
                // SAFETY: `byte` lies in a buffer of this Io, which stays valid and ours until `then` has run.
                unsafe { *byte.as_ptr() ^= mask };
            }
            then(result).map(|next| script.wrap(next))
        });
        io
    }
}

struct Bit {
    byte: NonNull<u8>,
    mask: u8,
}

// SAFETY: the address comes from a Buffer of the same Io, with the same promise.
unsafe impl Send for Bit {}

fn locate(io: &Io, bit: usize) -> Option<Bit> {
    let mut at = bit / 8;
    for buffer in &io.buffers {
        if at < buffer.len() {
            // SAFETY: `at` is inside the buffer.
            let byte = unsafe { buffer.pointer().add(at) };
            return Some(Bit { byte, mask: 1 << (bit % 8) });
        }
        at -= buffer.len();
    }
    None
}

/// Makes a write write from a copy of its bytes in which one bit differs.
fn flip_on_the_way(io: &mut Io, bit: usize) {
    let (block, length) = (BLOCK as usize, io.bytes());
    let mut copy = vec![0_u8; length + block];
    let start = copy.as_ptr().align_offset(block).min(block);
    let mut at = start;
    for buffer in &io.buffers {
        // SAFETY: the buffers of an Io stay valid until its `then` has run, and of a write nobody changes them.
        let bytes = unsafe { std::slice::from_raw_parts(buffer.pointer().as_ptr(), buffer.len()) };
        copy[at..at + bytes.len()].copy_from_slice(bytes);
        at += bytes.len();
    }
    if let Some(byte) = copy[start..start + length].get_mut(bit / 8) {
        *byte ^= 1 << (bit % 8);
    }
    let pointer = NonNull::from(&mut copy[start]);
    // SAFETY: `copy` moves into the `then` below, its heap block stays where it is until that has run, and has `length`
    // bytes from `start` on.
    io.buffers = vec![unsafe { Buffer::new(pointer, length) }];
    let then = std::mem::replace(&mut io.then, Box::new(|_| None));
    io.then = Box::new(move |result| {
        drop(copy);
        then(result)
    });
}

fn truncate(io: &mut Io, mut bytes: usize) {
    for buffer in &mut io.buffers {
        buffer.length = buffer.length.min(bytes);
        bytes -= buffer.length;
    }
    io.buffers.retain(|buffer| !buffer.is_empty());
    if io.buffers.is_empty() {
        io.operation = Operation::Hop;
    }
}

/// Segments of the root to which `path` belongs, that of payloads in a fingerprint's folder.
fn segments_beside(path: &Path) -> usize {
    let folders = path.parent().and_then(Path::parent).and_then(|root| fs::read_dir(root).ok());
    let files = folders.into_iter().flatten().flatten().filter_map(|folder| fs::read_dir(folder.path()).ok());
    files.flatten().flatten().filter(|file| is_segment(&file.path().with_extension(PAYLOADS))).count() / 2
}

fn scripted(error: Option<i32>) -> io::Result<()> {
    error.map_or(Ok(()), |number| Err(io::Error::from_raw_os_error(number)))
}

impl IoEngine for FaultyEngine {
    fn create(&self, path: &Path, bytes: SegmentBytes, front: &[u8]) -> io::Result<SegmentFile> {
        scripted(self.script.state().create_error)?;
        let room = self.script.state().room;
        scripted(room.filter(|room| segments_beside(path) >= *room).map(|_| libc::ENOSPC))?;
        self.inner.create(path, bytes, front)
    }

    fn open(&self, path: &Path, bytes: SegmentBytes) -> io::Result<SegmentFile> {
        self.inner.open(path, bytes)
    }

    fn remove(&self, path: &Path) -> io::Result<()> {
        self.inner.remove(path)
    }

    fn sync(&self, file: &SegmentFile) -> io::Result<()> {
        scripted(self.script.state().sync_error)?;
        self.inner.sync(file)
    }

    fn submit(&self, io: Io) {
        self.inner.submit(self.script.wrap(io));
    }

    fn depth(&self) -> usize {
        self.inner.depth()
    }

    fn describe(&self) -> String {
        format!("{} with scripted faults", self.inner.describe())
    }

    fn stop(&self, deadline: Duration) -> bool {
        self.release();
        self.inner.stop(deadline) && self.lost() == 0
    }
}
