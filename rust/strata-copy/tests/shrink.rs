//! Pools that shrink and grow under an engine: the memory really goes, kept pages keep every byte, and pages that come
//! back are copied as before. In a file of its own, since it reads the memory of its process.
#![cfg(target_os = "linux")]
#![allow(clippy::unwrap_used, clippy::expect_used)]

mod common;

use common::{shape, transfer, PATIENCE};
use std::sync::Arc;
use strata_copy::{give_back_pages, warm, Arena, CopyConfig, CopyEngine, NoThrottle, Region};
use strata_tier::{completion_queue, Mover};
use strata_types::{KvLayout, TransferKind};

const MIB: usize = 1 << 20;
const PAGES: u32 = 512;
const KEPT: u32 = 101;

/// Resident bytes of this process.
fn resident() -> usize {
    let statm = std::fs::read_to_string("/proc/self/statm").unwrap();
    statm.split_whitespace().nth(1).unwrap().parse::<usize>().unwrap() * 4096
}

fn fill(region: &Region, value: u8) {
    // SAFETY: no transfer runs while this is called.
    unsafe { region.bytes_mut(0, region.len()) }.unwrap().fill(value);
}

fn page_is(region: &Region, layout: &KvLayout, page: u32, value: u8) -> bool {
    let (layers, parts, len) = (layout.shape.layers, layout.shape.parts, layout.shape.piece_bytes());
    (0..layers).flat_map(|layer| (0..parts).map(move |part| (layer, part))).all(|(layer, part)| {
        // SAFETY: no transfer runs while this is called.
        let piece = unsafe { region.bytes(layout.offset(layer, part, page), len) }.unwrap();
        piece.iter().all(|byte| *byte == value)
    })
}

#[test]
fn shrunk_pools_free_their_memory_and_grow_again() {
    // 512 pages of 128 KiB: 64 MiB a pool.
    let shape = shape(8, 2, 16, 512);
    let device_layout = KvLayout::layer_first(shape, PAGES).unwrap();
    let host_layout = KvLayout::page_first(shape, PAGES, 4096).unwrap();
    let host_bytes = host_layout.total_bytes() as usize;
    let host_arena = Arc::new(Arena::with_capacity(host_bytes, 4 * host_bytes).unwrap());
    let host = Region::from_arena(Arc::clone(&host_arena));
    let device = Region::from_arena(Arc::new(Arena::new(device_layout.total_bytes() as usize).unwrap()));
    // SAFETY: nobody else knows the arena.
    unsafe { host.bytes_mut(0, host_bytes) }.unwrap().fill(3);
    fill(&device, 5);

    let full = resident();
    // SAFETY: no transfer runs; pages from KEPT on are not looked at before they are written.
    unsafe { host_arena.resize((host_layout.page_stride * u64::from(KEPT)) as usize) }.unwrap();
    let without_host = resident();
    // SAFETY: as above.
    unsafe { give_back_pages(&device, &device_layout, KEPT..PAGES) }.unwrap();
    let without_both = resident();
    // 411 of 512 pages are 51 MiB; system pages at the spans' borders stay.
    assert!(full - without_host > 48 * MIB, "{full} {without_host}");
    assert!(without_host - without_both > 48 * MIB, "{without_host} {without_both}");
    for page in 0..KEPT {
        assert!(page_is(&host, &host_layout, page, 3) && page_is(&device, &device_layout, page, 5), "{page}");
    }

    // SAFETY: growing takes nothing from anybody.
    unsafe { host_arena.resize(host_bytes) }.unwrap();
    warm(&host, &host_layout, KEPT..PAGES, || true);
    assert!(resident() - without_both > 48 * MIB, "warming maps the grown part");
    let (sender, completions) = completion_queue(2);
    let config = CopyConfig {
        device: device.clone(),
        device_layout,
        host: host.clone(),
        host_layout,
        threads: 2,
        backup_niceness: 0,
        queue_capacity: 2,
        throttle: Arc::new(NoThrottle),
    };
    let engine = CopyEngine::new(config, sender).unwrap();
    engine.submit(transfer(1, TransferKind::Backup, &[(7, PAGES - 1)], 8)).unwrap();
    assert_eq!(completions.recv_timeout(PATIENCE).unwrap().error, None);
    engine.submit(transfer(2, TransferKind::Load, &[(PAGES - 1, PAGES - 2), (4, 6)], 8)).unwrap();
    assert_eq!(completions.recv_timeout(PATIENCE).unwrap().error, None);
    assert!(page_is(&host, &host_layout, PAGES - 1, 5) && page_is(&device, &device_layout, PAGES - 2, 5));
    assert!(page_is(&device, &device_layout, 6, 3) && page_is(&host, &host_layout, 4, 3));
}
