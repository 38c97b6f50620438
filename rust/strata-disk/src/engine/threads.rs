//! The engine that works everywhere: threads that call preadv and pwritev. Payloads pass the page cache by where the
//! file system takes O_DIRECT; where it refuses, at the probe or later, the page cache serves and `describe` says why.

use super::{Buffer, Io, IoEngine, Lane, Operation, Part, SegmentBytes, SegmentFile};
use crate::config::DirectIo;
use crate::geometry::BLOCK;
use crossbeam_channel::{bounded, select_biased, unbounded, Receiver, Sender};
use std::alloc::{alloc_zeroed, dealloc, Layout};
use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::{Builder, JoinHandle};
use std::time::{Duration, Instant};

/// Reads that may overtake a waiting write.
const MOST_READS_IN_A_ROW: u32 = 16;
/// Buffers that one system call takes; Linux allows 1,024.
const MOST_VECTORS: usize = 1024;

/// Threads that execute blocking I/O.
pub struct ThreadPoolEngine {
    threads: usize,
    reads: Sender<Io>,
    writes: Sender<Io>,
    files: Arc<Files>,
    workers: Mutex<Option<Workers>>,
}

struct Workers {
    /// Dropped to make the workers end.
    _alive: Sender<()>,
    handles: Vec<JoinHandle<()>>,
}

/// What a worker needs to execute an I/O.
struct Files {
    /// Why payloads go through the page cache, if they do.
    cached_because: Mutex<Option<String>>,
    direct: AtomicBool,
}

impl ThreadPoolEngine {
    /// Starts the threads, for payloads of `page_bytes`. `probe` is any file of the file system in question.
    pub fn new(
        threads: usize,
        direct: DirectIo,
        page_bytes: u32,
        probe: &Path,
    ) -> io::Result<ThreadPoolEngine> {
        let refusal = match direct {
            DirectIo::Off => Some("O_DIRECT is switched off".to_owned()),
            DirectIo::Auto if !u64::from(page_bytes).is_multiple_of(BLOCK) => Some(format!(
                "O_DIRECT needs pages of whole 4,096-byte blocks, these have {page_bytes} bytes"
            )),
            DirectIo::Auto => probe_direct(probe).err().map(|error| format!("O_DIRECT is refused: {error}")),
        };
        let files = Arc::new(Files {
            direct: AtomicBool::new(refusal.is_none()),
            cached_because: Mutex::new(refusal),
        });
        let (reads, read_queue) = unbounded();
        let (writes, write_queue) = unbounded();
        let (alive, closed) = bounded(0);
        let handles = (0..threads)
            .map(|number| {
                let worker = Worker {
                    reads: read_queue.clone(),
                    writes: write_queue.clone(),
                    closed: closed.clone(),
                    files: Arc::clone(&files),
                };
                Builder::new().name(format!("strata-disk-{number}")).spawn(move || worker.run())
            })
            .collect::<io::Result<Vec<_>>>()?;
        let workers = Mutex::new(Some(Workers { _alive: alive, handles }));
        Ok(ThreadPoolEngine { threads, reads, writes, files, workers })
    }
}

impl IoEngine for ThreadPoolEngine {
    fn create(&self, path: &Path, bytes: SegmentBytes, front: &[u8]) -> io::Result<SegmentFile> {
        let make = || -> io::Result<SegmentFile> {
            let mut options = OpenOptions::new();
            options.read(true).write(true).create_new(true).mode(0o600);
            let cached = options.open(path)?;
            allocate(&cached, bytes.payloads)?;
            let headers = options.open(Part::Headers.path(path))?;
            allocate(&headers, bytes.headers)?;
            headers.write_all_at(front, 0)?;
            self.files.segment(path, headers, cached)
        };
        make().or_else(|error| {
            self.remove(path)?;
            Err(error)
        })
    }

    fn open(&self, path: &Path, bytes: SegmentBytes) -> io::Result<SegmentFile> {
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
        self.files.segment(path, headers, open(Part::Payloads, bytes.payloads)?)
    }

    fn remove(&self, path: &Path) -> io::Result<()> {
        for part in [Part::Headers, Part::Payloads] {
            match fs::remove_file(part.path(path)) {
                Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
                _ => {}
            }
        }
        Ok(())
    }

    fn sync(&self, file: &SegmentFile) -> io::Result<()> {
        file.cached.sync_data()?;
        file.headers.sync_data()
    }

    fn submit(&self, io: Io) {
        let queue = if io.lane == Lane::Read { &self.reads } else { &self.writes };
        if let Err(refused) = queue.send(io) {
            // Every worker is gone: the chain must still end, and it ends here.
            let mut next = Some(refused.0);
            while let Some(io) = next {
                next = (io.then)(Err(io::ErrorKind::BrokenPipe.into()));
            }
        }
    }

    fn depth(&self) -> usize {
        self.threads
    }

    fn describe(&self) -> String {
        let reason = self.files.cached_because.lock().unwrap_or_else(PoisonError::into_inner).clone();
        let way = reason.map_or_else(|| "O_DIRECT".to_owned(), |reason| format!("page cache ({reason})"));
        format!("threads x{}, {way}", self.threads)
    }

    fn stop(&self, deadline: Duration) -> bool {
        let workers = self.workers.lock().unwrap_or_else(PoisonError::into_inner).take();
        let Some(Workers { _alive, handles }) = workers else { return true };
        drop(_alive);
        let until = Instant::now() + deadline;
        while handles.iter().any(|handle| !handle.is_finished()) {
            if Instant::now() >= until {
                return false;
            }
            std::thread::sleep(Duration::from_millis(1));
        }
        handles.into_iter().all(|handle| handle.join().is_ok())
    }
}

struct Worker {
    reads: Receiver<Io>,
    writes: Receiver<Io>,
    closed: Receiver<()>,
    files: Arc<Files>,
}

impl Worker {
    fn run(self) {
        let mut reads_in_a_row = 0;
        while let Some(io) = self.next(reads_in_a_row) {
            reads_in_a_row = if io.lane == Lane::Read { reads_in_a_row + 1 } else { 0 };
            let mut next = Some(io);
            while let Some(io) = next {
                let result = self.files.execute(&io);
                next = (io.then)(result);
            }
        }
    }

    fn next(&self, reads_in_a_row: u32) -> Option<Io> {
        if reads_in_a_row >= MOST_READS_IN_A_ROW {
            if let Ok(io) = self.writes.try_recv() {
                return Some(io);
            }
        }
        select_biased! {
            recv(self.reads) -> io => io.ok(),
            recv(self.writes) -> io => io.ok(),
            recv(self.closed) -> _ => None,
        }
    }
}

impl Files {
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

    fn execute(&self, io: &Io) -> io::Result<usize> {
        let (file, part, offset, call) = match &io.operation {
            Operation::Hop => return Ok(0),
            Operation::Read { file, part, offset } => (file, *part, *offset, Call::Read),
            Operation::Write { file, part, offset } => (file, *part, *offset, Call::Write),
        };
        if part == Part::Headers {
            return transfer_all(&file.headers, offset, &io.buffers, call);
        }
        if let Some(direct) = file.direct.as_ref().filter(|_| aligned(&io.buffers, offset)) {
            if self.direct.load(Ordering::Acquire) {
                match transfer_all(direct, offset, &io.buffers, call) {
                    Err(error) if error.raw_os_error() == Some(libc::EINVAL) => self.refuse(&error),
                    result => return result,
                }
            }
        }
        transfer_all(&file.cached, offset, &io.buffers, call)
    }
}

#[derive(Clone, Copy)]
enum Call {
    Read,
    Write,
}

/// Repeats the call until all is moved, the file ends or an error comes.
fn transfer_all(file: &File, offset: u64, buffers: &[Buffer], call: Call) -> io::Result<usize> {
    let mut vectors: Vec<libc::iovec> = buffers
        .iter()
        .map(|buffer| libc::iovec { iov_base: buffer.pointer.as_ptr().cast(), iov_len: buffer.length })
        .collect();
    let total: usize = buffers.iter().map(|buffer| buffer.length).sum();
    let (mut done, mut first) = (0, 0);
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

/// Reads one block past the page cache, as payloads will be.
fn probe_direct(path: &Path) -> io::Result<()> {
    let file = OpenOptions::new().read(true).custom_flags(libc::O_DIRECT).open(path)?;
    let layout = Layout::from_size_align(BLOCK as usize, BLOCK as usize).map_err(io::Error::other)?;
    // SAFETY: the layout has a size above zero; the block is used by one pread of its size and freed with the same
    // layout, on every path.
    unsafe {
        let block = alloc_zeroed(layout);
        if block.is_null() {
            return Err(io::ErrorKind::OutOfMemory.into());
        }
        let read = libc::pread(file.as_raw_fd(), block.cast(), BLOCK as usize, 0);
        let error = io::Error::last_os_error();
        dealloc(block, layout);
        if read < 0 {
            return Err(error);
        }
    }
    Ok(())
}
