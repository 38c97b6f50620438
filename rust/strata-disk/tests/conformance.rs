//! The suite that every Mover passes, over the page sizes and payload sizes that differ in kind.
#![allow(clippy::unwrap_used, clippy::panic)]
mod common;

use common::{config, HeapPages};
use std::sync::{Arc, Mutex};
use std::time::Duration;
use strata_disk::{probe_io_uring, start_engine, DirectIo, DiskStore, Fault, FaultyEngine};
use strata_tier::conformance::{run_all, run_under_faults, FaultyHarness, MoverHarness};
use strata_tier::{completion_queue, CompletionReceiver, Mover};
use strata_types::{PageId, TransferKind};
use tempfile::TempDir;

struct Harness {
    store: DiskStore,
    memory: Arc<HeapPages>,
    completions: CompletionReceiver,
    engine: Arc<FaultyEngine>,
    page_size: u32,
    page_bytes: u32,
    _root: TempDir,
}

fn harness(page_size: u32, page_bytes: u32, direct: DirectIo) -> Harness {
    let root = tempfile::tempdir().unwrap();
    let mut config = config(root.path(), 64 << 20, page_size, page_bytes);
    config.direct = direct;
    let (sender, completions) = completion_queue(16);
    let memory = HeapPages::new(16, page_bytes as usize);
    // Faults here are to be met, not to take the store out of service.
    config.max_failures = u32::MAX;
    let (asked, made) = (config.clone(), Mutex::new(None));
    let (store, recovery) = DiskStore::open_with(config, memory.clone(), sender, |file| {
        let engine = Arc::new(FaultyEngine::new(start_engine(&asked, file, probe_io_uring)?));
        *made.lock().unwrap() = Some(Arc::clone(&engine));
        Ok(engine)
    })
    .unwrap();
    recovery.wait(Duration::from_secs(30)).unwrap();
    let engine = made.into_inner().unwrap().unwrap();
    Harness { store, memory, completions, engine, page_size, page_bytes, _root: root }
}

impl MoverHarness for Harness {
    fn mover(&self) -> &dyn Mover {
        &self.store
    }
    fn completions(&self) -> &CompletionReceiver {
        &self.completions
    }
    fn edge(&self) -> (TransferKind, TransferKind) {
        (TransferKind::Spill, TransferKind::Prefetch)
    }
    fn layers(&self) -> u32 {
        1
    }
    fn page_size(&self) -> usize {
        self.page_size as usize
    }
    fn pages(&self) -> u32 {
        16
    }
    fn write_upper(&mut self, page: PageId, bytes: &[u8]) {
        self.memory.write(page.0, bytes);
    }
    fn read_upper(&self, page: PageId) -> Vec<u8> {
        self.memory.read(page.0)
    }
    fn page_bytes(&self) -> usize {
        self.page_bytes as usize
    }
}

impl FaultyHarness for Harness {
    type Fault = Fault;
    fn inject(&mut self, fault: Fault) {
        self.engine.on_all_reads(Some(fault));
        self.engine.on_all_writes(Some(fault));
    }
    fn is_hanging(&self) -> bool {
        self.engine.held() + self.engine.lost() > 0
    }
    fn heal(&mut self) {
        self.engine.heal();
        self.engine.release();
        self.engine.release_lost();
    }
}

#[test]
fn every_fault_costs_pages_and_nothing_else() {
    let faults = [
        Fault::Error(libc::EIO),
        Fault::Error(libc::ENOSPC),
        Fault::Short(0),
        Fault::Short(100),
        Fault::Short(9000),
        Fault::Torn(0),
        Fault::Torn(512),
        Fault::Torn(9000),
        Fault::FlipBit(0),
        Fault::FlipBit(7 * 1000),
        Fault::FlipBit(8 * 9000),
        Fault::Slow(Duration::from_millis(3)),
    ];
    let hangs = [Fault::Hold, Fault::Lose];
    for (page_size, page_bytes, direct) in
        [(16, 8192, DirectIo::Auto), (16, 8192, DirectIo::Off), (1, 1000, DirectIo::Auto)]
    {
        run_under_faults(&faults, &hangs, || harness(page_size, page_bytes, direct));
    }
}

#[test]
fn pages_of_whole_blocks_past_the_page_cache() {
    run_all(|| harness(16, 737_280, DirectIo::Auto));
    run_all(|| harness(1, 4096, DirectIo::Auto));
}

#[test]
fn pages_of_whole_blocks_through_the_page_cache() {
    run_all(|| harness(16, 8192, DirectIo::Off));
}

#[test]
fn pages_of_odd_sizes() {
    run_all(|| harness(1, 1000, DirectIo::Auto));
    run_all(|| harness(16, 46_084, DirectIo::Auto));
    run_all(|| harness(100, 4100, DirectIo::Off));
}
