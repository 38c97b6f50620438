//! Host pages on the heap, and a store with everything that a test needs around it.
#![allow(dead_code, missing_docs, clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::alloc::{alloc_zeroed, dealloc, Layout};
use std::path::Path;
use std::ptr::NonNull;
use std::sync::Arc;
use std::time::{Duration, Instant};
use strata_disk::{
    probe_io_uring, start_engine, DiskConfig, DiskEngine, DiskError, DiskStore, IoEngine, PageMemory,
    Recovered, Recovery,
};
use strata_tier::{completion_queue, CompletionReceiver, Mover, SubmitError};
use strata_types::{
    Fingerprint, GroupId, Namespace, PageId, PageMove, PageRecord, TransferCompletion, TransferDescriptor,
    TransferId, TransferKind,
};

pub const PATIENCE: Duration = Duration::from_secs(30);

/// Contiguous pages from a 4 KiB boundary on.
pub struct HeapPages {
    base: NonNull<u8>,
    layout: Layout,
    page_bytes: usize,
    pages: u32,
}

// SAFETY: a plain heap block; tests touch a page only while no transfer does.
unsafe impl Send for HeapPages {}
// SAFETY: as above.
unsafe impl Sync for HeapPages {}

impl HeapPages {
    pub fn new(pages: u32, page_bytes: usize) -> Arc<HeapPages> {
        let layout = Layout::from_size_align(page_bytes * pages as usize, 4096).unwrap();
        // SAFETY: the size is above zero.
        let base = NonNull::new(unsafe { alloc_zeroed(layout) }).unwrap();
        Arc::new(HeapPages { base, layout, page_bytes, pages })
    }

    pub fn write(&self, page: u32, bytes: &[u8]) {
        assert_eq!(bytes.len(), self.page_bytes);
        let pointer = self.page_ptr(PageId(page)).unwrap();
        // SAFETY: the page is inside the block and no transfer uses it.
        unsafe { pointer.as_ptr().copy_from_nonoverlapping(bytes.as_ptr(), bytes.len()) };
    }

    pub fn read(&self, page: u32) -> Vec<u8> {
        let pointer = self.page_ptr(PageId(page)).unwrap();
        // SAFETY: the page is inside the block and no transfer uses it.
        unsafe { std::slice::from_raw_parts(pointer.as_ptr(), self.page_bytes) }.to_vec()
    }
}

impl Drop for HeapPages {
    fn drop(&mut self) {
        // SAFETY: allocated with this layout in `new`.
        unsafe { dealloc(self.base.as_ptr(), self.layout) }
    }
}

// SAFETY: pages are disjoint stretches of one block that lives as long as the value.
unsafe impl PageMemory for HeapPages {
    fn page_bytes(&self) -> usize {
        self.page_bytes
    }

    fn page_ptr(&self, page: PageId) -> Option<NonNull<u8>> {
        // SAFETY: the offset is inside the block.
        (page.0 < self.pages).then(|| unsafe { self.base.add(page.0 as usize * self.page_bytes) })
    }
}

/// A store and what it is tested with.
pub struct Rig {
    pub store: DiskStore,
    pub memory: Arc<HeapPages>,
    pub completions: CompletionReceiver,
    /// What was found; empty while `recovery` is there.
    pub recovered: Recovered,
    pub recovery: Option<Recovery>,
    pub page_size: u32,
    next: u64,
}

pub fn wait_for(condition: impl Fn() -> bool) {
    let begun = Instant::now();
    while !condition() {
        assert!(begun.elapsed() < PATIENCE, "waited too long");
        std::thread::sleep(Duration::from_millis(1));
    }
}

pub const HOST_PAGES: u32 = 64;

/// What executes I/O: `tests/ring.rs` runs all suites over a ring, where the machine has one; else threads do.
pub fn engine() -> DiskEngine {
    if env!("CARGO_CRATE_NAME") == "ring" {
        DiskEngine::Auto
    } else {
        DiskEngine::Threads
    }
}

pub fn config(root: &Path, cap_bytes: u64, page_size: u32, page_bytes: u32) -> DiskConfig {
    let config = DiskConfig::new(root, cap_bytes, Fingerprint([1; 32]), page_size, page_bytes);
    DiskConfig { engine: engine(), ..config }
}

pub type EngineOf<'a> = &'a dyn Fn(Arc<dyn IoEngine>) -> Arc<dyn IoEngine>;

impl Rig {
    pub fn open(config: DiskConfig) -> Rig {
        Rig::try_open(config, &|engine| engine).unwrap()
    }

    pub fn try_open(config: DiskConfig, wrap: EngineOf<'_>) -> Result<Rig, DiskError> {
        let mut rig = Rig::serving(config, wrap)?;
        if let Some(recovery) = rig.recovery.take() {
            rig.recovered = recovery.wait(PATIENCE)?;
        }
        Ok(rig)
    }

    /// Opens without waiting for recovery.
    pub fn serving(config: DiskConfig, wrap: EngineOf<'_>) -> Result<Rig, DiskError> {
        let (sender, completions) = completion_queue(1024);
        let memory = HeapPages::new(HOST_PAGES, config.page_bytes as usize);
        let (asked, page_size) = (config.clone(), config.page_size);
        let (store, recovery) = DiskStore::open_with(config, memory.clone(), sender, |file| {
            Ok(wrap(start_engine(&asked, file, probe_io_uring)?))
        })?;
        let (recovered, recovery) = (Recovered::default(), Some(recovery));
        Ok(Rig { store, memory, completions, recovered, recovery, page_size, next: 0 })
    }

    pub fn submit(&mut self, kind: TransferKind, moves: &[(u32, u32)], records: &[PageRecord]) -> TransferId {
        self.next += 1;
        let id = TransferId(self.next);
        let pages =
            moves.iter().map(|(from, to)| PageMove { from: PageId(*from), to: PageId(*to) }).collect();
        let records = records.to_vec();
        let transfer = TransferDescriptor { id, kind, group: GroupId(0), pages, records, ticket: None };
        match self.store.submit(transfer) {
            Ok(()) => id,
            Err(SubmitError::Full(_)) => panic!("full"),
            Err(SubmitError::Closed(_)) => panic!("closed"),
        }
    }

    pub fn completion(&self) -> TransferCompletion {
        self.completions.recv_timeout(PATIENCE).expect("a completion for every transfer")
    }

    pub fn run(
        &mut self,
        kind: TransferKind,
        moves: &[(u32, u32)],
        records: &[PageRecord],
    ) -> TransferCompletion {
        let id = self.submit(kind, moves, records);
        let done = self.completion();
        assert_eq!(done.id, id);
        done
    }

    /// Fills host pages `0..` with the records' patterns and spills them to the given records.
    pub fn spill(&mut self, to: &[u32], records: &[PageRecord]) -> TransferCompletion {
        for (page, record) in records.iter().enumerate() {
            self.memory.write(page as u32, &pattern(record, self.memory.page_bytes()));
        }
        let moves: Vec<_> = to.iter().enumerate().map(|(page, to)| (page as u32, *to)).collect();
        self.run(TransferKind::Spill, &moves, records)
    }

    /// Prefetches records into host pages `0..` and proves that whole pages hold their patterns.
    pub fn prefetch(&mut self, from: &[u32], records: &[PageRecord]) -> TransferCompletion {
        let moves: Vec<_> = from.iter().enumerate().map(|(page, from)| (*from, page as u32)).collect();
        for (_, page) in &moves {
            self.memory.write(*page, &vec![0xaa; self.memory.page_bytes()]);
        }
        let done = self.run(TransferKind::Prefetch, &moves, records);
        for (page, record) in records.iter().enumerate().take(done.pages_whole) {
            let wanted = pattern(record, self.memory.page_bytes());
            assert!(self.memory.read(page as u32) == wanted, "page {page} has wrong bytes");
        }
        done
    }

    pub fn erase(&mut self, records: &[u32]) -> TransferCompletion {
        let moves: Vec<_> = records.iter().map(|record| (*record, *record)).collect();
        self.run(TransferKind::Erase, &moves, &[])
    }
}

/// A chain of pages, unlike that of any other seed.
pub fn chain(seed: u32, pages: u32, page_size: u32) -> Vec<PageRecord> {
    let namespace = Namespace::new("tests", "");
    let mut parent = namespace.root_key(GroupId(0));
    (0..pages)
        .map(|page| {
            let tokens: Vec<u32> = (0..page_size).map(|token| seed * 100_000 + page * 300 + token).collect();
            let record = PageRecord { namespace, parent, key: parent.child(&tokens), tokens };
            parent = record.key;
            record
        })
        .collect()
}

/// The bytes that a page of tests has, by its key.
pub fn pattern(record: &PageRecord, bytes: usize) -> Vec<u8> {
    let mut state = u64::from_le_bytes(record.key.0[..8].try_into().unwrap()) | 1;
    let mut out = Vec::with_capacity(bytes + 8);
    while out.len() < bytes {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        out.extend_from_slice(&(state >> 8).to_le_bytes());
    }
    out.truncate(bytes);
    out
}
