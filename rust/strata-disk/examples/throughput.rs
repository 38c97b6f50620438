//! Read and write speed of the store beside bare pread and pwrite of the same sizes, interleaved:
//! `cargo run --release -p strata-disk --example throughput -- ROOT [pages] [page_bytes] [threads] [rounds]`.
//! ROOT must be on the disk in question; it is created, and deleted again. Nothing is read from the page cache.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

#[path = "../tests/common/mod.rs"]
mod common;

use common::{chain, config, Rig, HOST_PAGES};
use std::fs::{self, File, OpenOptions};
use std::os::fd::AsRawFd;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::time::Instant;
use strata_disk::{DirectIo, DiskConfig, PageMemory};
use strata_types::{PageId, PageRecord, TransferKind};

struct Job {
    pages: u32,
    page_bytes: u32,
    threads: usize,
    rounds: usize,
}

fn main() {
    let mut arguments = std::env::args().skip(1);
    let root = PathBuf::from(arguments.next().expect("a folder on the disk to measure"));
    let mut number = |default: u64| arguments.next().map_or(default, |text| text.parse().expect("a number"));
    let job = Job {
        pages: number(640) as u32,
        page_bytes: number(737_280) as u32,
        threads: number(4) as usize,
        rounds: number(5) as usize,
    };
    fs::create_dir_all(&root).unwrap();
    println!("{} pages of {} bytes, {} threads, GB/s", job.pages, job.page_bytes, job.threads);
    for direct in [DirectIo::Auto, DirectIo::Off] {
        measure(&root, direct, &job);
    }
    fs::remove_dir_all(&root).unwrap();
}

fn measure(root: &Path, direct: DirectIo, job: &Job) {
    let gigabytes = f64::from(job.pages) * f64::from(job.page_bytes) / 1e9;
    let store_root = root.join("store");
    let cap = u64::from(job.pages + job.pages / 4 + 8) * (u64::from(job.page_bytes) + 8192) + (8 << 20);
    let store_config =
        DiskConfig { direct, threads: job.threads, ..config(&store_root, cap, 16, job.page_bytes) };
    let mut rig = Rig::open(store_config);
    println!("\n{}", rig.store.describe());
    let records = chain(1, job.pages, 16);
    let raw = root.join("raw");
    let mut samples: [Vec<f64>; 4] = Default::default();
    for _ in 0..job.rounds {
        let speeds = [
            timed(gigabytes, || store(&mut rig, &store_root, TransferKind::Spill, &records)),
            timed(gigabytes, || bare(&rig, &raw, direct, job, true)),
            timed(gigabytes, || store(&mut rig, &store_root, TransferKind::Prefetch, &records)),
            timed(gigabytes, || bare(&rig, &raw, direct, job, false)),
        ];
        samples.iter_mut().zip(speeds).for_each(|(list, speed)| list.push(speed));
    }
    let medians = samples.map(|mut list| {
        list.sort_by(f64::total_cmp);
        list[list.len() / 2]
    });
    println!("write: store {:.2}  bare {:.2}  ratio {:.2}", medians[0], medians[1], medians[0] / medians[1]);
    println!("read:  store {:.2}  bare {:.2}  ratio {:.2}", medians[2], medians[3], medians[2] / medians[3]);
    drop(rig);
    fs::remove_dir_all(&store_root).unwrap();
    fs::remove_file(&raw).unwrap();
}

fn timed(gigabytes: f64, mut work: impl FnMut()) -> f64 {
    let begun = Instant::now();
    work();
    gigabytes / begun.elapsed().as_secs_f64()
}

/// All pages through the store, 16 a transfer, all transfers at once; writes end with a sync.
fn store(rig: &mut Rig, root: &Path, kind: TransferKind, records: &[PageRecord]) {
    let places: Vec<u32> = (0..records.len() as u32).collect();
    let mut outstanding = 0;
    for (places, records) in places.chunks(16).zip(records.chunks(16)) {
        let host = |place: &u32| place % HOST_PAGES;
        let moves: Vec<_> = match kind {
            TransferKind::Spill => places.iter().map(|place| (host(place), *place)).collect(),
            _ => places.iter().map(|place| (*place, host(place))).collect(),
        };
        rig.submit(kind, &moves, records);
        outstanding += 1;
        // Four transfers use all the host pages there are.
        if outstanding == 4 {
            assert_eq!(rig.completion().error, None);
            outstanding -= 1;
        }
    }
    for _ in 0..outstanding {
        assert_eq!(rig.completion().error, None);
    }
    if kind == TransferKind::Spill {
        rig.store.sync().unwrap();
        forget(root);
    }
}

/// The same bytes in one file with nothing around them.
fn bare(rig: &Rig, path: &Path, direct: DirectIo, job: &Job, write: bool) {
    let mut options = OpenOptions::new();
    options.read(true).write(true).create(true);
    if direct == DirectIo::Auto {
        options.custom_flags(libc::O_DIRECT);
    }
    let file = options.open(path).unwrap();
    if file.metadata().unwrap().len() == 0 {
        // SAFETY: posix_fallocate takes a descriptor, which `file` keeps open, and no memory.
        let result = unsafe {
            libc::posix_fallocate(file.as_raw_fd(), 0, i64::from(job.pages) * i64::from(job.page_bytes))
        };
        assert_eq!(result, 0);
    }
    std::thread::scope(|scope| {
        for thread in 0..job.threads as u32 {
            let (file, memory) = (&file, &rig.memory);
            scope.spawn(move || {
                for page in (thread..job.pages).step_by(job.threads) {
                    let pointer = memory.page_ptr(PageId(page % HOST_PAGES)).unwrap().as_ptr().cast();
                    let offset = i64::from(page) * i64::from(job.page_bytes);
                    let (fd, bytes) = (file.as_raw_fd(), job.page_bytes as usize);
                    // SAFETY: the page has `page_bytes` bytes; threads write the same bytes or none of them looks.
                    let moved = unsafe {
                        if write {
                            libc::pwrite(fd, pointer, bytes, offset)
                        } else {
                            libc::pread(fd, pointer, bytes, offset)
                        }
                    };
                    assert_eq!(moved, bytes as isize);
                }
            });
        }
    });
    if write {
        file.sync_data().unwrap();
        drop_cache(&file);
    }
}

/// Drops the page cache of everything below a folder.
fn forget(folder: &Path) {
    for entry in fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            forget(&path);
        } else {
            drop_cache(&File::open(path).unwrap());
        }
    }
}

fn drop_cache(file: &File) {
    // SAFETY: posix_fadvise takes a descriptor, which `file` keeps open, and no memory.
    unsafe { libc::posix_fadvise(file.as_raw_fd(), 0, 0, libc::POSIX_FADV_DONTNEED) };
}
