//! What sets engines apart: how many I/Os a ring has in flight and in what order they answer, deadlines, which engine
//! is picked and what it says when it is refused, and the emulation of a slow disk.
#![allow(clippy::unwrap_used, clippy::panic)]
mod common;

use common::{chain, config, pattern, HeapPages, Rig, PATIENCE};
use std::fs::File;
use std::io::{self, Write};
use std::num::NonZeroU64;
use std::os::fd::{AsRawFd, FromRawFd};
use std::path::Path;
use std::sync::mpsc::{channel, Receiver, Sender};
use std::sync::Arc;
use std::time::{Duration, Instant};
use strata_disk::{
    probe_io_uring, start_engine, Buffer, DirectIo, DiskConfig, DiskEngine, DiskError, Health, Io, IoEngine,
    IoUringEngine, Lane, Operation, PageMemory, Part, SegmentFile, ThreadPoolEngine, ThrottledEngine,
};
use strata_types::{PageId, TransferKind};
use tempfile::TempDir;

const BLOCK: usize = 4096;

/// A ring, unless this machine (a container with seccomp, an old kernel) has none: then there is nothing to test.
fn ring(depth: usize, io_deadline: Duration) -> Option<(IoUringEngine, TempDir)> {
    let root = tempfile::tempdir().unwrap();
    let file = root.path().join("probe");
    std::fs::write(&file, [0; BLOCK]).unwrap();
    if let Err(error) = probe_io_uring(&file) {
        eprintln!("this machine has no io_uring to test: {error}");
        return None;
    }
    let config = DiskConfig { depth, io_deadline, threads: 2, ..config(root.path(), 1 << 20, 16, 4096) };
    Some((IoUringEngine::new(&config, &file).unwrap(), root))
}

/// A file that answers a read when a test says so: a pipe, which the ring cannot tell from a slow disk.
struct Pipe {
    segment: Arc<SegmentFile>,
    end: File,
}

impl Pipe {
    fn new() -> Pipe {
        let mut ends = [0; 2];
        // SAFETY: pipe2 writes two descriptors, which are new and owned by nobody else.
        let (reader, end) = unsafe {
            assert_eq!(libc::pipe2(ends.as_mut_ptr(), libc::O_CLOEXEC), 0);
            (File::from_raw_fd(ends[0]), File::from_raw_fd(ends[1]))
        };
        let copy = || reader.try_clone().unwrap();
        let segment =
            SegmentFile { path: "pipe".into(), headers: copy(), cached: copy(), direct: Some(copy()) };
        Pipe { segment: Arc::new(segment), end }
    }

    /// Reads one block into a page; `sender` hears which and what came of it.
    fn read(&self, memory: &Arc<HeapPages>, page: u32, sender: &Sender<(u32, io::Result<usize>)>) -> Io {
        let operation = Operation::Read { file: Arc::clone(&self.segment), part: Part::Payloads, offset: 0 };
        let (held, sender) = (Arc::clone(memory), sender.clone());
        // SAFETY: the page lives as long as `held`, which the `then` below owns, and tests look at it only after that.
        let buffers = vec![unsafe { Buffer::new(memory.page_ptr(PageId(page)).unwrap(), BLOCK) }];
        let then = Box::new(move |result: io::Result<usize>| {
            drop(held);
            sender.send((page, result)).unwrap();
            None
        });
        Io { lane: Lane::Read, operation, buffers, started: None, then }
    }

    fn answer(&mut self, byte: u8) {
        self.end.write_all(&[byte; BLOCK]).unwrap();
    }
}

fn wait_for(condition: impl Fn() -> bool) {
    let begun = Instant::now();
    while !condition() {
        assert!(begun.elapsed() < PATIENCE, "waited too long");
        std::thread::sleep(Duration::from_millis(1));
    }
}

#[test]
fn a_ring_keeps_its_depth_in_flight_and_takes_answers_in_any_order() {
    let Some((engine, _root)) = ring(24, PATIENCE) else { return };
    let (sender, answers) = channel();
    let memory = HeapPages::new(40, BLOCK);
    let mut pipes: Vec<Pipe> = (0..40).map(|_| Pipe::new()).collect();
    for (page, pipe) in pipes.iter().enumerate() {
        engine.submit(pipe.read(&memory, page as u32, &sender));
    }
    wait_for(|| engine.gauges().in_flight == 24);
    // The last that was submitted of those in flight answers first.
    for page in (0..24).rev() {
        pipes[page as usize].answer(page as u8);
        let (answered, result) = answers.recv_timeout(PATIENCE).unwrap();
        assert_eq!((answered, result.unwrap()), (page, BLOCK));
        assert!(memory.read(page) == [page as u8; BLOCK]);
    }
    wait_for(|| engine.gauges().in_flight == 16);
    let gauges = engine.gauges();
    assert_eq!((gauges.most_in_flight, gauges.out_of_order), (24, 23), "never past its depth");
    for page in 24..40 {
        pipes[page as usize].answer(page as u8);
        assert_eq!(answers.recv_timeout(PATIENCE).unwrap().0, page);
    }
    assert_eq!(engine.gauges().out_of_order, 23, "these answered in their order");
    assert!(engine.stop(PATIENCE));
}

#[test]
fn an_io_past_its_deadline_is_cancelled_and_its_chain_goes_on() {
    let Some((engine, _root)) = ring(4, Duration::from_millis(20)) else { return };
    let (sender, answers) = channel();
    let memory = HeapPages::new(2, BLOCK);
    let (stuck, mut fine) = (Pipe::new(), Pipe::new());
    fine.answer(7);
    engine.submit(stuck.read(&memory, 0, &sender));
    engine.submit(fine.read(&memory, 1, &sender));
    let answered = [answers.recv_timeout(PATIENCE).unwrap(), answers.recv_timeout(PATIENCE).unwrap()];
    let of = |page: u32| answered.iter().find(|(answered, _)| *answered == page).unwrap();
    assert_eq!(*of(1).1.as_ref().unwrap(), BLOCK);
    let error = of(0).1.as_ref().unwrap_err();
    assert!(error.kind() == io::ErrorKind::TimedOut && error.to_string().contains("20ms"), "{error}");
    assert_eq!((engine.gauges().cancelled, engine.gauges().in_flight), (1, 0));
    assert!(engine.stop(PATIENCE));
}

#[test]
fn an_engine_that_is_stopped_ends_chains_and_one_with_a_hung_io_says_so() {
    let Some((engine, _root)) = ring(4, PATIENCE) else { return };
    let (sender, answers) = channel();
    let memory = HeapPages::new(2, BLOCK);
    let mut pipe = Pipe::new();
    engine.submit(pipe.read(&memory, 0, &sender));
    wait_for(|| engine.gauges().in_flight == 1);
    assert!(!engine.stop(Duration::from_millis(30)), "the kernel still has an I/O");
    assert!(answers.try_recv().is_err());
    pipe.answer(1);
    assert_eq!(answers.recv_timeout(PATIENCE).unwrap().1.unwrap(), BLOCK);
    let (engine, _root) = ring(4, PATIENCE).unwrap();
    assert!(engine.stop(PATIENCE));
    engine.submit(pipe.read(&memory, 1, &sender));
    assert!(answers.recv_timeout(PATIENCE).unwrap().1.is_err(), "submitted too late");
}

#[test]
fn a_store_over_a_ring_has_16_reads_in_flight() {
    let root = tempfile::tempdir().unwrap();
    let made: std::sync::Mutex<Option<Arc<IoUringEngine>>> = std::sync::Mutex::new(None);
    let config = DiskConfig { engine: DiskEngine::Auto, ..config(root.path(), 64 << 20, 16, 65_536) };
    let asked = config.clone();
    let opened = Rig::try_open(config, &|threads| {
        let file = root.path().join(strata_disk::MARKER_FILE);
        if probe_io_uring(&file).is_err() {
            return threads;
        }
        let engine = Arc::new(IoUringEngine::new(&asked, &file).unwrap());
        *made.lock().unwrap() = Some(Arc::clone(&engine));
        engine
    });
    let mut rig = opened.unwrap();
    let Some(engine) = made.lock().unwrap().take() else { return };
    // No two records are adjacent, so that each is an I/O of its own.
    let (records, places): (_, Vec<u32>) = (chain(1, 64, 16), (0..64).map(|page| 2 * page).collect());
    assert_eq!(rig.spill(&places, &records).error, None);
    let begun = Instant::now();
    while engine.gauges().most_in_flight < 16 {
        assert!(begun.elapsed() < PATIENCE, "{:?}", engine.gauges());
        assert_eq!(rig.prefetch(&places, &records).error, None);
    }
}

fn refused(_: &Path) -> io::Result<()> {
    Err(io::Error::from_raw_os_error(libc::EPERM))
}

fn probe_file(root: &Path) -> std::path::PathBuf {
    let file = root.join("probe");
    std::fs::write(&file, [0; BLOCK]).unwrap();
    file
}

#[test]
fn where_io_uring_is_refused_threads_serve_and_say_why() {
    let root = tempfile::tempdir().unwrap();
    let file = probe_file(root.path());
    let auto = DiskConfig { engine: DiskEngine::Auto, ..config(root.path(), 1 << 20, 16, 4096) };
    let engine = start_engine(&auto, &file, refused).unwrap();
    let said = engine.describe();
    assert!(
        said.starts_with("threads x4, ") && said.contains("io_uring is refused: Operation not"),
        "{said}"
    );
    assert!(engine.stop(PATIENCE));
    let asked = DiskConfig { engine: DiskEngine::IoUring, ..auto };
    let error = start_engine(&asked, &file, refused).err().unwrap();
    assert!(matches!(&error, DiskError::Engine { engine: "io_uring", .. }), "{error}");
    for part in ["--disk-engine io_uring", "Operation not permitted", "choose auto or threads"] {
        assert!(error.to_string().contains(part), "{error}");
    }
}

#[test]
fn where_direct_io_is_refused_threads_serve_and_say_why() {
    let root = tempfile::tempdir().unwrap();
    let auto = DiskConfig { engine: DiskEngine::Auto, ..config(root.path(), 1 << 20, 16, 4096) };
    // /proc takes no O_DIRECT on any kernel; tmpfs takes it on new ones.
    let no_direct = Path::new("/proc/self/stat");
    assert!(probe_io_uring(no_direct).is_err());
    let file = probe_file(root.path());
    let odd = DiskConfig { page_bytes: 1000, ..auto.clone() };
    let off = DiskConfig { direct: DirectIo::Off, ..auto.clone() };
    for (config, file, reason) in [
        (&auto, no_direct, "O_DIRECT is refused"),
        (&odd, &file, "these have 1000 bytes"),
        (&off, &file, "switched off"),
    ] {
        let engine = start_engine(config, file, |_| Ok(())).unwrap();
        let said = engine.describe();
        assert!(said.contains("page cache") && said.contains("io_uring serves only"), "{said}");
        assert!(said.starts_with("threads x4") && said.contains(reason), "{said}");
        assert!(engine.stop(PATIENCE));
        let asked = DiskConfig { engine: DiskEngine::IoUring, ..config.clone() };
        let error = start_engine(&asked, file, |_| Ok(())).err().unwrap().to_string();
        assert!(error.contains("--disk-engine") && error.contains(reason), "{error}");
    }
}

fn heard(receiver: &Receiver<u32>) -> u32 {
    receiver.recv_timeout(PATIENCE).unwrap()
}

#[test]
fn a_slow_disk_is_emulated_and_is_no_stalled_one() {
    let root = tempfile::tempdir().unwrap();
    let limit = NonZeroU64::new(1 << 20);
    let slow = DiskConfig {
        engine: DiskEngine::Auto,
        read_bandwidth: limit,
        io_deadline: Duration::from_millis(150),
        ..config(root.path(), 16 << 20, 16, 65_536)
    };
    let mut rig = Rig::open(slow);
    let said = rig.store.describe();
    assert!(said.contains("emulation: reads 1048576 bytes/s, writes unlimited"), "{said}");
    let (records, places): (_, Vec<u32>) = (chain(1, 8, 16), (0..8).map(|page| 2 * page).collect());
    assert_eq!(rig.spill(&places, &records).error, None);
    let begun = Instant::now();
    let moves: Vec<_> = places.iter().map(|place| (*place, 40 + place / 2)).collect();
    rig.submit(TransferKind::Prefetch, &moves, &records);
    let mut stalled = false;
    let done = loop {
        if let Ok(done) = rig.completions.recv_timeout(Duration::from_millis(10)) {
            break done;
        }
        stalled |= rig.store.health() != Health::Up;
    };
    assert_eq!((done.pages_whole, done.error, stalled), (8, None, false), "waiting is not stalling");
    // A lower bound is no race: the emulation's promise is that it never gets faster.
    assert!(begun.elapsed() >= Duration::from_millis(500), "512 KiB at 1 MiB/s took {:?}", begun.elapsed());
    assert!(rig.memory.read(47) == pattern(&records[7], 65_536));
}

#[test]
fn a_throttle_limits_payloads_only_and_submits_at_once() {
    let root = tempfile::tempdir().unwrap();
    let file = probe_file(root.path());
    let inner = Arc::new(ThreadPoolEngine::new(1, DirectIo::Off, 4096, &file).unwrap());
    // A block takes far longer than any test waits.
    let engine = ThrottledEngine::new(inner, NonZeroU64::new(1), None).unwrap();
    let (sender, answers) = channel();
    let (said, later) = channel();
    let (memory, pipe) = (HeapPages::new(1, BLOCK), Pipe::new());
    engine.submit(pipe.read(&memory, 0, &sender));
    engine.submit(Io::hop(Lane::Read, move || {
        said.send(1).unwrap();
        None
    }));
    assert_eq!(heard(&later), 1, "what is not limited is not held up");
    assert!(answers.try_recv().is_err());
    assert!(!engine.stop(Duration::from_millis(20)), "an I/O is still waiting for its turn");
    assert!(pipe.end.as_raw_fd() >= 0);
}
