//! Measures copies between a layer-first device pool and a page-first host arena against one `memcpy` of the same
//! bytes, with ordinary and with non-temporal stores. Rounds are interleaved, so that a noisy neighbour slows all of
//! them alike; medians are printed in GB/s of payload, ratios against the faster of the two memcpys.
//!
//! `cargo run --release -p strata-copy --example copy_bandwidth [MiB] [rounds]`

use std::error::Error;
use std::hint::black_box;
use std::sync::Arc;
use std::time::{Duration, Instant};
use strata_copy::{memcpy_baseline, Arena, CopyConfig, CopyEngine, NoThrottle, Region, Stores};
use strata_tier::{completion_queue, CompletionReceiver, Mover};
use strata_types::{
    GroupId, KvLayout, KvShape, LoadTicket, PageId, PageMove, TransferDescriptor, TransferId, TransferKind,
};

const LAYERS: u32 = 30;
const PARTS: u32 = 2;
const PATIENCE: Duration = Duration::from_secs(60);

type Failure = Box<dyn Error>;

/// One piece size: two memories, an engine for each number of threads, and the same pages in random order.
struct Setting {
    device: (Region, KvLayout),
    host: (Region, KvLayout),
    engines: Vec<(CopyEngine, CompletionReceiver)>,
    moves: Vec<PageMove>,
    bytes: usize,
}

impl Setting {
    fn new(piece: u32, wanted_bytes: usize) -> Result<Setting, Failure> {
        let shape = KvShape::new(GroupId(0), LAYERS, PARTS, 16, piece / 16)?;
        let pages = u32::try_from(wanted_bytes / shape.page_bytes())?;
        let region = |layout: KvLayout| -> Result<(Region, KvLayout), Failure> {
            let bytes = usize::try_from(layout.total_bytes())?;
            Ok((Region::from_arena(Arc::new(Arena::new(bytes)?)), layout))
        };
        let device = region(KvLayout::layer_first(shape, pages)?)?;
        let host = region(KvLayout::page_first(shape, pages, 4096)?)?;
        let mut engines = Vec::new();
        for threads in [1, 2] {
            let (sender, receiver) = completion_queue(4);
            let config = CopyConfig {
                device: device.0.clone(),
                device_layout: device.1,
                host: host.0.clone(),
                host_layout: host.1,
                threads,
                queue_capacity: 4,
                throttle: Arc::new(NoThrottle),
            };
            engines.push((CopyEngine::new(config, sender)?, receiver));
        }
        // An odd multiplier walks through a pool in an order that no prefetcher guesses.
        let moves = (0..pages)
            .map(|page| {
                let from = (u64::from(page) * 7919 + 13) % u64::from(pages);
                PageMove { from: PageId(from as u32), to: PageId(page) }
            })
            .collect();
        Ok(Setting { device, host, engines, moves, bytes: pages as usize * shape.page_bytes() })
    }

    fn engine(&self, which: usize, kind: TransferKind) -> Result<f64, Failure> {
        let (engine, completions) = &self.engines[which];
        let ticket = (kind == TransferKind::Load).then(|| Arc::new(LoadTicket::new(LAYERS)));
        let pages = self.moves.clone();
        let (id, group, records) = (TransferId(1), GroupId(0), Vec::new());
        let started = Instant::now();
        engine.submit(TransferDescriptor { id, kind, group, pages, records, ticket })?;
        let done = completions.recv_timeout(PATIENCE)?;
        let seconds = started.elapsed().as_secs_f64();
        done.error.map_or(Ok(seconds), |error| Err(error.into()))
    }

    /// The pieces of a load by one kind of store on this thread; then, apart, reading them layer by layer.
    fn pieces(&self, stores: Stores) -> Result<(f64, f64), Failure> {
        let shape = self.device.1.shape;
        let bytes = shape.piece_bytes();
        let (mut copying, mut reading) = (0.0, 0.0);
        for layer in 0..LAYERS {
            let started = Instant::now();
            for PageMove { from, to } in &self.moves {
                for part in 0..PARTS {
                    // SAFETY: the engines are idle, so this thread is the only user of both memories.
                    let (target, source) = unsafe {
                        (
                            self.device.0.bytes_mut(self.device.1.offset(layer, part, to.0), bytes)?,
                            self.host.0.bytes(self.host.1.offset(layer, part, from.0), bytes)?,
                        )
                    };
                    memcpy_baseline(target, source, stores);
                }
            }
            copying += started.elapsed().as_secs_f64();
            let started = Instant::now();
            let layer_bytes = usize::try_from(self.device.1.layer_stride)?;
            // SAFETY: as above.
            let read = unsafe { self.device.0.bytes(self.device.1.offset(layer, 0, 0), layer_bytes)? };
            black_box(read.chunks_exact(8).fold(0_u64, |sum, word| {
                sum.wrapping_add(u64::from_le_bytes(word.try_into().unwrap_or_default()))
            }));
            reading += started.elapsed().as_secs_f64();
        }
        Ok((copying, reading))
    }

    fn whole(&self, stores: Stores) -> Result<f64, Failure> {
        // SAFETY: the engines are idle, so this thread is the only user of both memories.
        let (target, source) =
            unsafe { (self.device.0.bytes_mut(0, self.bytes)?, self.host.0.bytes(0, self.bytes)?) };
        let started = Instant::now();
        memcpy_baseline(target, source, stores);
        Ok(started.elapsed().as_secs_f64())
    }
}

fn median(mut seconds: Vec<f64>) -> f64 {
    seconds.sort_by(f64::total_cmp);
    seconds[seconds.len() / 2]
}

const COLUMNS: [&str; 10] = [
    "memcpy",
    "memcpy nt",
    "load 1t",
    "load 2t",
    "backup 1t",
    "backup 2t",
    "pieces",
    "pieces nt",
    "+read",
    "+read nt",
];

fn round(setting: &Setting) -> Result<[f64; COLUMNS.len()], Failure> {
    let (plain, plain_read) = setting.pieces(Stores::Cached)?;
    let (streamed, streamed_read) = setting.pieces(Stores::Streaming)?;
    Ok([
        setting.whole(Stores::Cached)?,
        setting.whole(Stores::Streaming)?,
        setting.engine(0, TransferKind::Load)?,
        setting.engine(1, TransferKind::Load)?,
        setting.engine(0, TransferKind::Backup)?,
        setting.engine(1, TransferKind::Backup)?,
        plain,
        streamed,
        plain + plain_read,
        streamed + streamed_read,
    ])
}

fn main() -> Result<(), Failure> {
    let mut arguments = std::env::args().skip(1);
    let mebibytes: usize = arguments.next().map_or(Ok(192), |text| text.parse())?;
    let rounds: usize = arguments.next().map_or(Ok(7), |text| text.parse())?;
    print!("{:>7}", "piece");
    for column in COLUMNS {
        print!(" {column:>16}");
    }
    println!();
    for piece in [768, 2 << 10, 4 << 10, 12 << 10, 32 << 10, 64 << 10] {
        let setting = Setting::new(piece, mebibytes << 20)?;
        // Touches every page, so that no round pays for page faults.
        round(&setting)?;
        let mut seconds = vec![Vec::new(); COLUMNS.len()];
        for _ in 0..rounds.max(1) {
            for (column, value) in seconds.iter_mut().zip(round(&setting)?) {
                column.push(value);
            }
        }
        let rates: Vec<f64> =
            seconds.into_iter().map(|column| setting.bytes as f64 / median(column) / 1e9).collect();
        let best = rates[0].max(rates[1]);
        print!("{piece:>7}");
        for rate in rates {
            print!(" {rate:>9.2} ({:.2})", rate / best);
        }
        println!();
    }
    Ok(())
}
