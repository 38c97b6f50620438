//! The suite that every Mover passes, over the page sizes and payload sizes that differ in kind.
#![allow(clippy::unwrap_used, clippy::panic)]
mod common;

use common::{config, HeapPages};
use std::sync::Arc;
use std::time::Duration;
use strata_disk::{DirectIo, DiskStore};
use strata_tier::conformance::{run_all, MoverHarness};
use strata_tier::{completion_queue, CompletionReceiver, Mover};
use strata_types::{PageId, TransferKind};
use tempfile::TempDir;

struct Harness {
    store: DiskStore,
    memory: Arc<HeapPages>,
    completions: CompletionReceiver,
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
    let (store, recovery) = DiskStore::open(config, memory.clone(), sender).unwrap();
    recovery.wait(Duration::from_secs(30)).unwrap();
    Harness { store, memory, completions, page_size, page_bytes, _root: root }
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
