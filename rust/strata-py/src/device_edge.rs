//! Who moves pages between device and host: copy threads, or an executor in Python with a device of its own.

use crate::error::{Failure, Outcome};
use crate::host_arena::HostMemory;
use crate::options::Options;
use crate::runtime::WARM_BYTES;
use std::sync::Arc;
use strata_copy::{warm, CopyConfig, CopyEngine, Region, Throttle};
use strata_tier::{CompletionSender, Mover, TransferQueue};
use strata_types::KvLayout;

/// The Mover of the edge.
pub enum DeviceEdge {
    /// Threads that copy between two spans of this process's memory.
    Threads(Arc<CopyEngine>),
    /// An executor that takes what is queued.
    Executor(Arc<TransferQueue>),
}

impl DeviceEdge {
    /// Starts the copy threads over memory of which the part that is used first is mapped by then.
    pub fn threads(
        options: &Options,
        (device, device_layout): (Region, KvLayout),
        host: &HostMemory,
        throttle: Arc<dyn Throttle>,
        completions: CompletionSender,
    ) -> Outcome<DeviceEdge> {
        let region = host.region();
        let warming = start_warming([
            (device.clone(), device_layout, options.device_pages),
            (region.clone(), host.layout, host.pages),
        ]);
        let config = CopyConfig {
            device,
            device_layout,
            host: region,
            host_layout: host.layout,
            threads: options.copy_threads,
            backup_niceness: options.backup_niceness,
            queue_capacity: 1024,
            throttle,
        };
        let copies = CopyEngine::new(config, completions)?;
        if let Some(warming) = warming {
            // Done before the first request: it would take a core from it. A panic there costs only warmth.
            let _panicked = warming.join();
        }
        Ok(DeviceEdge::Threads(Arc::new(copies)))
    }

    /// Fills an executor's queue. One engine a queue.
    pub fn executor(queue: Arc<TransferQueue>, completions: CompletionSender) -> Outcome<DeviceEdge> {
        match queue.connect(completions) {
            true => Ok(DeviceEdge::Executor(queue)),
            false => Err(Failure::Config("a transfer queue serves one Runtime: make a new one".into())),
        }
    }

    /// As Core's driver knows it.
    pub fn mover(&self) -> Arc<dyn Mover> {
        match self {
            DeviceEdge::Threads(copies) => copies.clone(),
            DeviceEdge::Executor(queue) => queue.clone(),
        }
    }

    /// Completions that nobody was there to read.
    pub fn completions_lost(&self) -> u64 {
        match self {
            DeviceEdge::Threads(copies) => copies.stats().completions_lost,
            DeviceEdge::Executor(queue) => queue.stats().completions_lost,
        }
    }

    /// Takes no more transfers. Copy threads are stopped within a bound; an executor says itself when it is torn down.
    pub fn close(&self) -> Outcome<()> {
        match self {
            DeviceEdge::Threads(copies) => Ok(copies.close()?),
            DeviceEdge::Executor(queue) => {
                queue.close();
                Ok(())
            }
        }
    }
}

/// Maps the pages that will be used first, beside the scan of the disk. None if there is no thread to be had: then the
/// first copies map their own pages.
fn start_warming(pools: [(Region, KvLayout, u32); 2]) -> Option<std::thread::JoinHandle<()>> {
    let work = move || {
        for (region, layout, in_use) in pools {
            let pages = WARM_BYTES / layout.shape.page_bytes() as u64;
            warm(&region, &layout, 0..u32::try_from(pages).unwrap_or(u32::MAX).min(in_use), || true);
        }
    };
    std::thread::Builder::new().name("strata-warm".into()).spawn(work).ok()
}
