//! A segment's files and the blocking calls on them, for every engine: creation with all blocks allocated, deletion,
//! sync, preadv and pwritev. Payloads pass the page cache by where the file system takes O_DIRECT; where it refuses,
//! at the probe or later, the page cache serves and `refusal` says why.

use super::{Buffer, Io, Operation, Part, SegmentBytes, SegmentFile};
use crate::config::DirectIo;
use crate::geometry::BLOCK;
use std::alloc::{alloc_zeroed, dealloc, Layout};
use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::Path;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, PoisonError};

/// Buffers that one system call takes; Linux allows 1,024.
const MOST_VECTORS: usize = 1024;

/// The files of a store, as an engine reaches them.
pub(super) struct Files {
    /// Why payloads go through the page cache, if they do.
    cached_because: Mutex<Option<String>>,
    direct: AtomicBool,
}

impl Files {
    /// For payloads of `page_bytes`. `probe` is any file of the file system in question.
    pub fn new(direct: DirectIo, page_bytes: u32, probe: &Path) -> Files {
        let refusal = direct_refusal(direct, page_bytes, probe);
        Files { direct: AtomicBool::new(refusal.is_none()), cached_because: Mutex::new(refusal) }
    }

    /// Why payloads go through the page cache, if they do.
    pub fn refusal(&self) -> Option<String> {
        self.cached_because.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// How payloads travel, for logs.
    pub fn describe(&self) -> String {
        self.refusal().map_or_else(|| "O_DIRECT".to_owned(), |reason| format!("page cache ({reason})"))
    }

    /// `IoEngine::create`.
    pub fn create(&self, path: &Path, bytes: SegmentBytes, front: &[u8]) -> io::Result<SegmentFile> {
        let make = || -> io::Result<SegmentFile> {
            let mut options = OpenOptions::new();
            options.read(true).write(true).create_new(true).mode(0o600);
            let cached = options.open(path)?;
            allocate(&cached, bytes.payloads)?;
            let headers = options.open(Part::Headers.path(path))?;
            allocate(&headers, bytes.headers)?;
            headers.write_all_at(front, 0)?;
            self.segment(path, headers, cached)
        };
        make().or_else(|error| {
            self.remove(path)?;
            Err(error)
        })
    }

    /// `IoEngine::open`.
    pub fn open(&self, path: &Path, bytes: SegmentBytes) -> io::Result<SegmentFile> {
        let open = |part: Part, bytes: u64| -> io::Result<File> {
            let file = OpenOptions::new().read(true).write(true).open(part.path(path))?;
            let found = file.metadata()?.len();
            if found < bytes {
                allocate(&file, bytes)?;
            } else if found > bytes {
                file.set_len(bytes)?;
            }
            Ok(file)
        };
        let headers = open(Part::Headers, bytes.headers)?;
        self.segment(path, headers, open(Part::Payloads, bytes.payloads)?)
    }

    /// `IoEngine::remove`.
    pub fn remove(&self, path: &Path) -> io::Result<()> {
        for part in [Part::Headers, Part::Payloads] {
            match fs::remove_file(part.path(path)) {
                Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
                _ => {}
            }
        }
        Ok(())
    }

    /// `IoEngine::sync`.
    pub fn sync(&self, file: &SegmentFile) -> io::Result<()> {
        file.cached.sync_data()?;
        file.headers.sync_data()
    }

    fn segment(&self, path: &Path, headers: File, cached: File) -> io::Result<SegmentFile> {
        let direct = if self.direct.load(Ordering::Acquire) {
            let mut options = OpenOptions::new();
            options.read(true).write(true).custom_flags(libc::O_DIRECT);
            options.open(path).map_err(|error| self.refuse(&error)).ok()
        } else {
            None
        };
        Ok(SegmentFile { path: path.to_owned(), headers, cached, direct })
    }

    fn refuse(&self, error: &io::Error) {
        self.direct.store(false, Ordering::Release);
        let mut reason = self.cached_because.lock().unwrap_or_else(PoisonError::into_inner);
        reason.get_or_insert_with(|| format!("O_DIRECT is refused: {error}"));
    }

    /// The file that takes an I/O past the page cache; `None` if it has to go through it, or moves nothing.
    pub fn direct<'a>(&self, io: &'a Io) -> Option<&'a File> {
        let (file, part, offset, _) = target(io)?;
        let passes = part == Part::Payloads && !io.buffers.is_empty() && aligned(&io.buffers, offset);
        file.direct.as_ref().filter(|_| passes && self.direct.load(Ordering::Acquire))
    }

    /// Executes an I/O on this thread.
    pub fn execute(&self, io: &Io) -> io::Result<usize> {
        let Some((file, part, offset, call)) = target(io) else { return Ok(0) };
        if part == Part::Headers {
            return transfer_all(&file.headers, offset, &io.buffers, call, 0);
        }
        match self.direct(io).map(|direct| transfer_all(direct, offset, &io.buffers, call, 0)) {
            Some(result) => self.settle(io, result),
            None => transfer_all(&file.cached, offset, &io.buffers, call, 0),
        }
    }

    /// What becomes of an I/O past the page cache that has answered: the page cache serves where O_DIRECT turns out
    /// to be refused, and the rest of a short one is moved. Blocks in these rare cases.
    pub fn settle(&self, io: &Io, result: io::Result<usize>) -> io::Result<usize> {
        let Some((file, _, offset, call)) = target(io) else { return result };
        match result {
            Err(error) if error.raw_os_error() == Some(libc::EINVAL) => {
                self.refuse(&error);
                transfer_all(&file.cached, offset, &io.buffers, call, 0)
            }
            // After a part of a block, O_DIRECT could not go on where it stopped.
            Ok(done) if done > 0 && done < io.bytes() => {
                transfer_all(&file.cached, offset, &io.buffers, call, done)
            }
            result => result,
        }
    }
}

/// The segment, the file of it, the place in that and the call of an I/O that moves anything.
pub(super) fn target(io: &Io) -> Option<(&SegmentFile, Part, u64, Call)> {
    match &io.operation {
        Operation::Hop => None,
        Operation::Read { file, part, offset } => Some((file, *part, *offset, Call::Read)),
        Operation::Write { file, part, offset } => Some((file, *part, *offset, Call::Write)),
    }
}

/// The buffers as system calls want them.
pub(super) fn vectors_of(buffers: &[Buffer]) -> Vec<libc::iovec> {
    buffers
        .iter()
        .map(|buffer| libc::iovec { iov_base: buffer.pointer.as_ptr().cast(), iov_len: buffer.length })
        .collect()
}

/// Why payloads of `page_bytes` cannot pass the page cache by on the file system of `probe`, if so.
pub(super) fn direct_refusal(direct: DirectIo, page_bytes: u32, probe: &Path) -> Option<String> {
    match direct {
        DirectIo::Off => Some("O_DIRECT is switched off".to_owned()),
        DirectIo::Auto if !u64::from(page_bytes).is_multiple_of(BLOCK) => {
            Some(format!("O_DIRECT needs pages of whole 4,096-byte blocks, these have {page_bytes} bytes"))
        }
        DirectIo::Auto => probe_direct(probe).err().map(|error| format!("O_DIRECT is refused: {error}")),
    }
}

/// Which way bytes move.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Call {
    /// Into the buffers.
    Read,
    /// Out of them.
    Write,
}

/// Repeats the call until all is moved, the file ends or an error comes; the first `done` bytes are there already.
fn transfer_all(
    file: &File,
    offset: u64,
    buffers: &[Buffer],
    call: Call,
    mut done: usize,
) -> io::Result<usize> {
    let mut vectors = vectors_of(buffers);
    let total: usize = buffers.iter().map(|buffer| buffer.length).sum();
    let mut first = skip(&mut vectors, 0, done);
    while done < total {
        let count = (vectors.len() - first).min(MOST_VECTORS) as libc::c_int;
        let (descriptor, at) = (file.as_raw_fd(), (offset + done as u64) as libc::off_t);
        let front = &vectors[first..];
        // SAFETY: the vectors describe live buffers of this Io (`Buffer::new`), `count` of them from `front` on, and
        // the descriptor is open as long as `file` is borrowed.
        let moved = unsafe {
            match call {
                Call::Read => libc::preadv(descriptor, front.as_ptr(), count, at),
                Call::Write => libc::pwritev(descriptor, front.as_ptr(), count, at),
            }
        };
        if moved < 0 {
            let error = io::Error::last_os_error();
            match error.kind() {
                io::ErrorKind::Interrupted => continue,
                // A part is there: the caller counts what is whole, and the next call would say what is wrong.
                _ if done > 0 => return Ok(done),
                _ => return Err(error),
            }
        }
        if moved == 0 {
            return Ok(done);
        }
        done += moved as usize;
        first = skip(&mut vectors, first, moved as usize);
    }
    Ok(done)
}

/// Steps over `moved` bytes; returns the first vector with bytes left.
fn skip(vectors: &mut [libc::iovec], mut first: usize, mut moved: usize) -> usize {
    while let Some(vector) = vectors.get_mut(first) {
        if moved < vector.iov_len {
            vector.iov_base = vector.iov_base.cast::<u8>().wrapping_add(moved).cast();
            vector.iov_len -= moved;
            break;
        }
        moved -= vector.iov_len;
        first += 1;
    }
    first
}

fn aligned(buffers: &[Buffer], offset: u64) -> bool {
    let block = BLOCK as usize;
    offset.is_multiple_of(BLOCK)
        && buffers.iter().all(|buffer| {
            buffer.pointer.addr().get().is_multiple_of(block) && buffer.length.is_multiple_of(block)
        })
}

/// Allocates every block, so that a later write cannot meet a full disk.
fn allocate(file: &File, bytes: u64) -> io::Result<()> {
    loop {
        // SAFETY: posix_fallocate takes a descriptor, which `file` keeps open, and no memory.
        match unsafe { libc::posix_fallocate(file.as_raw_fd(), 0, bytes as libc::off_t) } {
            0 => return Ok(()),
            libc::EINTR => {}
            error => return Err(io::Error::from_raw_os_error(error)),
        }
    }
}

/// A block of memory as O_DIRECT wants it.
pub(super) struct Block {
    pointer: NonNull<u8>,
}

impl Block {
    const LAYOUT: Layout = match Layout::from_size_align(BLOCK as usize, BLOCK as usize) {
        Ok(layout) => layout,
        Err(_) => panic!("BLOCK is a power of two"),
    };

    /// A block of zeros.
    pub fn new() -> io::Result<Block> {
        // SAFETY: the layout has a size above zero.
        let pointer = NonNull::new(unsafe { alloc_zeroed(Self::LAYOUT) });
        Ok(Block { pointer: pointer.ok_or(io::ErrorKind::OutOfMemory)? })
    }

    /// Where it starts.
    pub fn as_mut_ptr(&mut self) -> *mut u8 {
        self.pointer.as_ptr()
    }
}

impl Drop for Block {
    fn drop(&mut self) {
        // SAFETY: allocated with this layout in `new`.
        unsafe { dealloc(self.pointer.as_ptr(), Self::LAYOUT) }
    }
}

/// Opens a file to be read past the page cache.
pub(super) fn open_direct(path: &Path) -> io::Result<File> {
    OpenOptions::new().read(true).custom_flags(libc::O_DIRECT).open(path)
}

/// Reads one block past the page cache, as payloads will be.
fn probe_direct(path: &Path) -> io::Result<()> {
    let (file, mut block) = (open_direct(path)?, Block::new()?);
    // SAFETY: the block has BLOCK bytes, and the call is over when it returns.
    let read = unsafe { libc::pread(file.as_raw_fd(), block.as_mut_ptr().cast(), BLOCK as usize, 0) };
    if read < 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(())
}
