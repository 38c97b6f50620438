//! An engine that wraps another and makes chosen I/Os go wrong: for tests of everything above it. Works on the chain,
//! not on the system calls, so that it wraps every engine.

use super::{Io, IoEngine, Operation, SegmentBytes, SegmentFile};
use std::collections::VecDeque;
use std::io;
use std::path::Path;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// How long a held I/O waits for a test that forgot it.
const PATIENCE: Duration = Duration::from_secs(60);

/// What happens to one I/O.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Fault {
    /// Nothing.
    None,
    /// It fails with this error number and moves nothing.
    Error(i32),
    /// It moves at most this many bytes.
    Short(usize),
    /// This bit of its bytes is flipped after a read.
    FlipBit(usize),
    /// It answers so much later.
    Slow(Duration),
    /// It answers after `release`.
    Hold,
}

/// Wraps an engine. Scripts are followed in the order in which I/Os start; past their end everything goes well.
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
    create_error: Option<i32>,
    sync_error: Option<i32>,
    held: usize,
    releases: u64,
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

    /// With what error number segments are created, until told otherwise.
    pub fn on_create(&self, error: Option<i32>) {
        self.script.state().create_error = error;
    }

    /// With what error number segments are synced, until told otherwise.
    pub fn on_sync(&self, error: Option<i32>) {
        self.script.state().sync_error = error;
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
}

impl Script {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn hold(&self) {
        let mut state = self.state();
        state.held += 1;
        let before = state.releases;
        let wait = self.released.wait_timeout_while(state, PATIENCE, |state| state.releases == before);
        let (mut state, _) = wait.unwrap_or_else(PoisonError::into_inner);
        state.held -= 1;
    }

    /// Takes the next fault of the script and builds it into the I/O, and into those that follow it.
    fn wrap(self: &Arc<Self>, mut io: Io) -> Io {
        let fault = match io.operation {
            Operation::Hop => Fault::None,
            Operation::Read { .. } => self.state().reads.pop_front().unwrap_or(Fault::None),
            Operation::Write { .. } => self.state().writes.pop_front().unwrap_or(Fault::None),
        };
        match fault {
            Fault::Error(_) => io.buffers.clear(),
            Fault::Short(bytes) => truncate(&mut io, bytes),
            _ => {}
        }
        let flipped = match fault {
            Fault::FlipBit(bit) => locate(&io, bit),
            _ => None,
        };
        let (script, then) = (Arc::clone(self), io.then);
        io.then = Box::new(move |result| {
            let result = match fault {
                Fault::Error(number) => Err(io::Error::from_raw_os_error(number)),
                Fault::Slow(span) => {
                    std::thread::sleep(span);
                    result
                }
                Fault::Hold => {
                    script.hold();
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
    byte: std::ptr::NonNull<u8>,
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

fn truncate(io: &mut Io, mut bytes: usize) {
    for buffer in &mut io.buffers {
        buffer.length = buffer.length.min(bytes);
        bytes -= buffer.length;
    }
}

fn scripted(error: Option<i32>) -> io::Result<()> {
    error.map_or(Ok(()), |number| Err(io::Error::from_raw_os_error(number)))
}

impl IoEngine for FaultyEngine {
    fn create(&self, path: &Path, bytes: SegmentBytes, front: &[u8]) -> io::Result<SegmentFile> {
        scripted(self.script.state().create_error)?;
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
        self.inner.stop(deadline)
    }
}
