//! The engine for io_uring: one thread owns the ring of a store and keeps up to `depth` payload I/Os with the kernel,
//! in whatever order they answer. What it guarantees beyond the contract of engines:
//! - the ring's thread never runs a `then` and never waits without a bound; workers checksum and do what may block;
//! - an I/O past its deadline is cancelled, but its memory stays the kernel's until that has answered;
//! - if the ring's thread should die, the memory of what was in flight is leaked, never reused.
//!
//! Only payloads past the page cache go through the ring. Headers are small and go through the page cache, which
//! workers reach with one call; so does what O_DIRECT turns out to refuse.

use super::files::{open_direct, target, vectors_of, Block, Call, Files};
use super::workers::{abandon, join_all, Workers, MOST_READS_IN_A_ROW};
use super::{Io, IoEngine, Lane, SegmentBytes, SegmentFile};
use crate::config::DiskConfig;
use crossbeam_channel::bounded;
use crossbeam_queue::SegQueue;
use io_uring::{opcode, types, IoUring};
use std::fs::File;
use std::io::{self, Read, Write};
use std::num::NonZeroUsize;
use std::os::fd::{AsRawFd, FromRawFd};
use std::path::Path;
use std::sync::atomic::{fence, AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::{available_parallelism, Builder, JoinHandle};
use std::time::{Duration, Instant};

/// The longest wait for the kernel: what a missed wake-up could cost.
const TICK: Duration = Duration::from_millis(500);
/// The same while the engine stops.
const STOPPING_TICK: Duration = Duration::from_millis(5);
/// The longest that is waited for the first answer of a ring.
const PROBE_LIMIT: Duration = Duration::from_secs(5);
/// Workers of a ring on a machine with one core, so that one that blocks does not stop the others.
const LEAST_WORKERS: usize = 2;
/// After a call that the kernel refused.
const REFUSED_PAUSE: Duration = Duration::from_millis(1);
/// How often a cancel is repeated that did not help.
const CANCEL_AGAIN: Duration = Duration::from_secs(1);

/// Names of completions that are not those of an I/O; I/Os are named by their place.
const BELL: u64 = u64::MAX;
const CANCEL: u64 = u64::MAX - 1;

/// An engine with a ring, its thread, and workers.
pub struct IoUringEngine {
    threads: usize,
    desk: Arc<Desk>,
    workers: Arc<Workers<Work>>,
    thread: Mutex<Option<JoinHandle<()>>>,
}

/// What the ring has seen.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RingGauges {
    /// I/Os with the kernel now.
    pub in_flight: usize,
    /// The most there have been at once.
    pub most_in_flight: usize,
    /// I/Os that answered while one submitted before them had not.
    pub out_of_order: u64,
    /// I/Os that were cancelled at their deadline.
    pub cancelled: u64,
}

/// What a worker does next.
enum Work {
    /// Goes on with a chain, or begins it.
    Pursue(Io),
    /// Looks at what the kernel answered.
    Landed(Io, io::Result<usize>),
}

/// What submitters, workers and the ring's thread share.
struct Desk {
    depth: usize,
    files: Files,
    reads: SegQueue<Io>,
    writes: SegQueue<Io>,
    /// Wakes the ring's thread: an eventfd.
    bell: File,
    /// The ring's thread waits, or is about to.
    parked: AtomicBool,
    stopping: AtomicBool,
    /// The ring's thread is gone.
    ended: AtomicBool,
    /// Chains that have not ended.
    chains: AtomicUsize,
    in_flight: AtomicUsize,
    most_in_flight: AtomicUsize,
    out_of_order: AtomicU64,
    cancelled: AtomicU64,
}

/// Whether io_uring works here: sets a ring up and reads a block of `path` through it, past the page cache.
pub fn probe_io_uring(path: &Path) -> io::Result<()> {
    let (mut ring, file, mut block) = (new_ring(1)?, open_direct(path)?, Block::new()?);
    ring.submitter().register_enable_rings()?;
    let (descriptor, bytes) = (types::Fd(file.as_raw_fd()), crate::geometry::BLOCK as u32);
    let read = opcode::Read::new(descriptor, block.as_mut_ptr(), bytes).build();
    // SAFETY: `file` is open until the answer is here; `block` is too, and is leaked if none comes.
    unsafe { ring.submission().push(&read) }.map_err(io::Error::other)?;
    wait_for_one(&mut ring, PROBE_LIMIT)?;
    let answer = ring.completion().next().map(|answer| answer.result());
    match answer {
        Some(number) if number < 0 => Err(io::Error::from_raw_os_error(-number)),
        Some(_) => Ok(()),
        None => {
            std::mem::forget(block);
            Err(io::ErrorKind::TimedOut.into())
        }
    }
}

/// A ring that is not yet enabled: the thread that does that becomes its owner.
fn new_ring(depth: usize) -> io::Result<IoUring> {
    // An entry for each I/O, for the cancel of each, and for the bell.
    let entries = u32::try_from(2 * depth + 1).map_err(io::Error::other)?.next_power_of_two();
    // One thread submits and reaps, so that completions need not interrupt it (Linux 6.1); otherwise a plain ring.
    let single =
        IoUring::builder().setup_single_issuer().setup_defer_taskrun().setup_r_disabled().build(entries);
    let ring = single.or_else(|_| IoUring::builder().setup_r_disabled().build(entries))?;
    let parameters = ring.params();
    if !(parameters.is_feature_ext_arg() && parameters.is_feature_nodrop()) {
        return Err(io::Error::new(io::ErrorKind::Unsupported, "Linux 5.11 or newer is needed"));
    }
    Ok(ring)
}

/// Submits what is queued and waits for a completion, at most for `limit`.
fn wait_for_one(ring: &mut IoUring, limit: Duration) -> io::Result<()> {
    let limit = types::Timespec::from(limit);
    let arguments = types::SubmitArgs::new().timespec(&limit);
    match ring.submitter().submit_with_args(1, &arguments) {
        Ok(_) => Ok(()),
        Err(error) if matches!(error.raw_os_error(), Some(libc::ETIME | libc::EINTR)) => Ok(()),
        Err(error) => Err(error),
    }
}

fn eventfd() -> io::Result<File> {
    // SAFETY: eventfd takes no memory; a descriptor that it returns is new, and owned by nobody else.
    unsafe {
        match libc::eventfd(0, libc::EFD_CLOEXEC | libc::EFD_NONBLOCK) {
            -1 => Err(io::Error::last_os_error()),
            descriptor => Ok(File::from_raw_fd(descriptor)),
        }
    }
}

impl IoUringEngine {
    /// Sets the ring up and starts the threads. `probe` is any file of the file system in question.
    pub fn new(config: &DiskConfig, probe: &Path) -> io::Result<IoUringEngine> {
        let ring = new_ring(config.depth)?;
        // Its workers compute where others wait for the disk: more than there are cores only get in each other's way.
        let cores = available_parallelism().map_or(1, NonZeroUsize::get);
        let threads = config.threads.min(cores.max(LEAST_WORKERS));
        let desk = Arc::new(Desk {
            depth: config.depth,
            files: Files::new(config.direct, config.page_bytes, probe),
            reads: SegQueue::new(),
            writes: SegQueue::new(),
            bell: eventfd()?,
            parked: AtomicBool::new(false),
            stopping: AtomicBool::new(false),
            ended: AtomicBool::new(false),
            chains: AtomicUsize::new(0),
            in_flight: AtomicUsize::new(0),
            most_in_flight: AtomicUsize::new(0),
            out_of_order: AtomicU64::new(0),
            cancelled: AtomicU64::new(0),
        });
        let used = Arc::clone(&desk);
        let workers = Arc::new(Workers::start(threads, move |work| match work {
            Work::Pursue(io) => used.pursue(Some(io)),
            Work::Landed(io, result) => {
                let result = used.files.settle(&io, result);
                used.pursue((io.then)(result));
            }
        })?);
        let (owned, told, deadline) = (Arc::clone(&desk), Arc::clone(&workers), config.io_deadline);
        let (enabled, answer) = bounded(1);
        let thread = Builder::new().name("strata-disk-ring".into()).spawn(move || {
            let ready = ring.submitter().register_enable_rings();
            let serves = ready.is_ok();
            if enabled.send(ready).is_ok() && serves {
                RingThread::new(ring, owned, told, deadline).run();
            }
        })?;
        let engine = IoUringEngine { threads, desk, workers, thread: Mutex::new(Some(thread)) };
        answer.recv_timeout(PROBE_LIMIT).map_err(|_| io::ErrorKind::TimedOut)??;
        Ok(engine)
    }

    /// What the ring has seen so far.
    pub fn gauges(&self) -> RingGauges {
        RingGauges {
            in_flight: self.desk.in_flight.load(Ordering::Relaxed),
            most_in_flight: self.desk.most_in_flight.load(Ordering::Relaxed),
            out_of_order: self.desk.out_of_order.load(Ordering::Relaxed),
            cancelled: self.desk.cancelled.load(Ordering::Relaxed),
        }
    }
}

impl IoEngine for IoUringEngine {
    fn create(&self, path: &Path, bytes: SegmentBytes, front: &[u8]) -> io::Result<SegmentFile> {
        self.desk.files.create(path, bytes, front)
    }

    fn open(&self, path: &Path, bytes: SegmentBytes) -> io::Result<SegmentFile> {
        self.desk.files.open(path, bytes)
    }

    fn remove(&self, path: &Path) -> io::Result<()> {
        self.desk.files.remove(path)
    }

    fn sync(&self, file: &SegmentFile) -> io::Result<()> {
        self.desk.files.sync(file)
    }

    fn submit(&self, io: Io) {
        self.desk.chains.fetch_add(1, Ordering::SeqCst);
        if self.desk.files.direct(&io).is_some() {
            self.desk.put(io);
        } else if let Err(Work::Pursue(io) | Work::Landed(io, _)) =
            self.workers.put(io.lane, Work::Pursue(io))
        {
            abandon(io);
            self.desk.chains.fetch_sub(1, Ordering::SeqCst);
        }
    }

    fn depth(&self) -> usize {
        self.desk.depth
    }

    fn describe(&self) -> String {
        let (depth, threads) = (self.desk.depth, self.threads);
        format!("io_uring, depth {depth}, {}, {threads} workers", self.desk.files.describe())
    }

    fn stop(&self, deadline: Duration) -> bool {
        let until = Instant::now() + deadline;
        self.desk.stopping.store(true, Ordering::SeqCst);
        self.desk.wake();
        let thread = self.thread.lock().unwrap_or_else(PoisonError::into_inner).take();
        join_all(thread.into_iter().collect(), deadline)
            && self.workers.stop(until.saturating_duration_since(Instant::now()))
    }
}

impl Drop for IoUringEngine {
    fn drop(&mut self) {
        self.desk.stopping.store(true, Ordering::SeqCst);
        self.desk.wake();
    }
}

impl Desk {
    /// Follows a chain on this thread up to the next I/O that is the ring's.
    fn pursue(&self, mut next: Option<Io>) {
        while let Some(mut io) = next {
            if self.files.direct(&io).is_some() {
                return self.put(io);
            }
            io.start();
            let result = self.files.execute(&io);
            next = (io.then)(result);
        }
        self.chains.fetch_sub(1, Ordering::SeqCst);
    }

    fn put(&self, io: Io) {
        let queue = if io.lane == Lane::Read { &self.reads } else { &self.writes };
        queue.push(io);
        fence(Ordering::SeqCst);
        if self.ended.load(Ordering::SeqCst) {
            self.refuse_queued();
        } else if self.parked.swap(false, Ordering::SeqCst) {
            self.wake();
        }
    }

    fn wake(&self) {
        // Fails only if the counter is full, and then the bell rings already.
        let _rings = (&self.bell).write(&1_u64.to_ne_bytes());
    }

    fn is_empty(&self) -> bool {
        self.reads.is_empty() && self.writes.is_empty()
    }

    fn refuse_queued(&self) {
        while let Some(io) = self.reads.pop().or_else(|| self.writes.pop()) {
            abandon(io);
            self.chains.fetch_sub(1, Ordering::SeqCst);
        }
    }
}

/// An I/O that the kernel has.
struct Flight {
    io: Io,
    /// What the kernel reads to find the buffers.
    vectors: Vec<libc::iovec>,
    number: u64,
    /// When a cancel is due.
    due: Instant,
}

/// The thread that owns the ring.
struct RingThread {
    ring: IoUring,
    desk: Arc<Desk>,
    workers: Arc<Workers<Work>>,
    deadline: Duration,
    flights: Vec<Option<Flight>>,
    free: Vec<usize>,
    landed: Vec<(u64, i32)>,
    launched: u64,
    reads_in_a_row: u32,
    bell_armed: bool,
}

impl RingThread {
    fn new(ring: IoUring, desk: Arc<Desk>, workers: Arc<Workers<Work>>, deadline: Duration) -> RingThread {
        let depth = desk.depth;
        RingThread {
            ring,
            desk,
            workers,
            deadline,
            flights: (0..depth).map(|_| None).collect(),
            free: (0..depth).rev().collect(),
            landed: Vec::with_capacity(2 * depth + 1),
            launched: 0,
            reads_in_a_row: 0,
            bell_armed: false,
        }
    }

    fn run(mut self) {
        loop {
            self.fill();
            let stopping = self.desk.stopping.load(Ordering::SeqCst);
            if stopping && self.desk.chains.load(Ordering::SeqCst) == 0 {
                break;
            }
            self.arm_bell();
            self.wait(if stopping { STOPPING_TICK } else { TICK });
            self.reap();
            self.cancel_late();
        }
        self.desk.ended.store(true, Ordering::SeqCst);
        fence(Ordering::SeqCst);
        self.desk.refuse_queued();
    }

    /// Hands the kernel what is queued, as far as the depth goes.
    fn fill(&mut self) {
        while let Some(place) = self.free.pop() {
            match self.next() {
                Some(io) => self.launch(place, io),
                None => return self.free.push(place),
            }
        }
    }

    fn next(&mut self) -> Option<Io> {
        let desk = &self.desk;
        let io = if self.reads_in_a_row >= MOST_READS_IN_A_ROW {
            desk.writes.pop().or_else(|| desk.reads.pop())
        } else {
            desk.reads.pop().or_else(|| desk.writes.pop())
        }?;
        self.reads_in_a_row = if io.lane == Lane::Read { self.reads_in_a_row + 1 } else { 0 };
        Some(io)
    }

    fn launch(&mut self, place: usize, mut io: Io) {
        let (Some(descriptor), Some((_, _, offset, call))) =
            (self.desk.files.direct(&io).map(|file| types::Fd(file.as_raw_fd())), target(&io))
        else {
            // O_DIRECT was refused since it was queued.
            self.free.push(place);
            return self.hand_over(Work::Pursue(io));
        };
        io.start();
        let vectors = vectors_of(&io.buffers);
        let (front, count) = (vectors.as_ptr(), vectors.len() as u32);
        let entry = match call {
            Call::Read => opcode::Readv::new(descriptor, front, count).offset(offset).build(),
            Call::Write => opcode::Writev::new(descriptor, front, count).offset(offset).build(),
        };
        let due = Instant::now() + self.deadline;
        self.flights[place] = Some(Flight { io, vectors, number: self.launched, due });
        self.launched += 1;
        let flying = self.desk.in_flight.fetch_add(1, Ordering::Relaxed) + 1;
        self.desk.most_in_flight.fetch_max(flying, Ordering::Relaxed);
        if !self.push(&entry.user_data(place as u64)) {
            self.land(place, Err(io::ErrorKind::ResourceBusy.into()));
        }
    }

    /// Queues an entry for the kernel; there is room for all that can be outstanding.
    fn push(&mut self, entry: &io_uring::squeue::Entry) -> bool {
        // SAFETY: an entry names nothing; or the bell, which `desk` keeps open; or the vectors, buffers and descriptor
        // of a Flight, which stays in `flights` until its completion and is leaked if that never comes.
        unsafe { self.ring.submission().push(entry) }.is_ok()
    }

    fn arm_bell(&mut self) {
        if !self.bell_armed {
            let bell = types::Fd(self.desk.bell.as_raw_fd());
            let entry = opcode::PollAdd::new(bell, libc::POLLIN as u32).build().user_data(BELL);
            self.bell_armed = self.push(&entry);
        }
    }

    fn wait(&mut self, tick: Duration) {
        self.desk.parked.store(true, Ordering::SeqCst);
        fence(Ordering::SeqCst);
        let more = !self.free.is_empty() && !self.desk.is_empty();
        let now = Instant::now();
        let due = self.flights.iter().flatten().map(|flight| flight.due.saturating_duration_since(now)).min();
        let limit = if more { Duration::ZERO } else { due.map_or(tick, |due| due.min(tick)) };
        if wait_for_one(&mut self.ring, limit).is_err() {
            // Out of memory or of room: what is in flight still answers, and the rest is submitted next time.
            std::thread::sleep(REFUSED_PAUSE);
        }
        self.desk.parked.store(false, Ordering::SeqCst);
    }

    fn reap(&mut self) {
        let mut landed = std::mem::take(&mut self.landed);
        landed.extend(self.ring.completion().map(|answer| (answer.user_data(), answer.result())));
        for (name, result) in landed.drain(..) {
            match name {
                CANCEL => {}
                BELL => {
                    self.bell_armed = false;
                    // Resets the counter; what rang is looked at in the next round, whatever the count was.
                    let _count = (&self.desk.bell).read(&mut [0; 8]);
                }
                place => {
                    let answer = usize::try_from(result);
                    self.land(place as usize, answer.map_err(|_| io::Error::from_raw_os_error(-result)));
                }
            }
        }
        self.landed = landed;
    }

    /// The kernel has let go of an I/O: a worker looks at what came of it.
    fn land(&mut self, place: usize, result: io::Result<usize>) {
        let Some(flight) = self.flights.get_mut(place).and_then(Option::take) else { return };
        self.free.push(place);
        self.desk.in_flight.fetch_sub(1, Ordering::Relaxed);
        if self.flights.iter().flatten().any(|other| other.number < flight.number) {
            self.desk.out_of_order.fetch_add(1, Ordering::Relaxed);
        }
        let result = match result {
            Err(error) if error.raw_os_error() == Some(libc::ECANCELED) => {
                self.desk.cancelled.fetch_add(1, Ordering::Relaxed);
                let limit = self.deadline;
                Err(io::Error::new(io::ErrorKind::TimedOut, format!("no answer within {limit:?}, cancelled")))
            }
            result => result,
        };
        drop(flight.vectors);
        self.hand_over(Work::Landed(flight.io, result));
    }

    fn hand_over(&self, work: Work) {
        let (Work::Pursue(io) | Work::Landed(io, _)) = &work;
        if let Err(Work::Pursue(io) | Work::Landed(io, _)) = self.workers.put(io.lane, work) {
            abandon(io);
            self.desk.chains.fetch_sub(1, Ordering::SeqCst);
        }
    }

    /// Asks the kernel to let go of what is past its deadline. It may not be able to.
    fn cancel_late(&mut self) {
        let now = Instant::now();
        for place in 0..self.flights.len() {
            let Some(flight) = self.flights[place].as_mut().filter(|flight| flight.due <= now) else {
                continue;
            };
            flight.due = now + CANCEL_AGAIN;
            // If there is no room, the next round asks again.
            let _asked = self.push(&opcode::AsyncCancel::new(place as u64).build().user_data(CANCEL));
        }
    }
}

impl Drop for RingThread {
    fn drop(&mut self) {
        // None after `run`; after a panic the kernel may still use their memory.
        self.flights.drain(..).for_each(std::mem::forget);
    }
}
