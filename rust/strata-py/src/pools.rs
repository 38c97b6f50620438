//! The memory of the device and host tiers, and its change at run time: memory is there before Core gives pages out,
//! and goes back to the system only once Core has nothing left in it.

use crate::error::{Failure, Outcome};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;
use strata_copy::{give_back_pages, Arena, Region};
use strata_core::DriverHandle;
use strata_types::{KvLayout, TierId};

/// Both pools and where pages lie in them.
pub struct Pools {
    pub device: Region,
    pub device_layout: KvLayout,
    pub arena: Arc<Arena>,
    pub host_layout: KvLayout,
    /// Pages of the arena that stay without a host tier.
    pub staging_pages: u32,
    /// Held while a tier changes: Core and memory must change in step.
    changing: Mutex<()>,
}

/// Bytes that a tier has now, and whether pages beyond it are still in use.
pub type Resized = (u64, bool);

impl Pools {
    /// The pools as they are at the start.
    pub fn new(
        device: Region,
        device_layout: KvLayout,
        arena: Arc<Arena>,
        host_layout: KvLayout,
        staging_pages: u32,
    ) -> Pools {
        Pools { device, device_layout, arena, host_layout, staging_pages, changing: Mutex::new(()) }
    }

    /// The device pool keeps its address and layout, so it can grow back to what it was started with and no further.
    pub fn resize_device(&self, handle: &DriverHandle, bytes: u64, limit: Duration) -> Outcome<Resized> {
        let pages = pages_of(
            bytes,
            self.device_layout.shape.page_bytes() as u64,
            self.device_layout.pages,
            "device",
        )?;
        if pages < 2 {
            let page = self.device_layout.shape.page_bytes();
            return Err(Failure::Config(format!(
                "{bytes} bytes for the device tier hold {pages} pages of {page} bytes: nothing can be computed; give at least two pages"
            )));
        }
        let _one_at_a_time = self.changing.lock().unwrap_or_else(PoisonError::into_inner);
        let timed_out = handle.resize(TierId::DEVICE, pages, limit)?.timed_out;
        if !timed_out {
            // SAFETY: Core has no page beyond `pages` and gives none out until it is told to grow again, which only
            // this method does, one call at a time; the pool is the private anonymous memory of a tensor.
            unsafe { give_back_pages(&self.device, &self.device_layout, pages..self.device_layout.pages)? };
        }
        Ok((u64::from(pages) * self.device_layout.shape.page_bytes() as u64, timed_out))
    }

    /// The host arena grows within the address space that was reserved.
    pub fn resize_host(&self, handle: &DriverHandle, bytes: u64, limit: Duration) -> Outcome<Resized> {
        let stride = host_stride(&self.host_layout);
        let pages = pages_of(bytes, stride, self.host_layout.pages, "host")?;
        let length = u64::from(pages.max(self.staging_pages)) * stride;
        let _one_at_a_time = self.changing.lock().unwrap_or_else(PoisonError::into_inner);
        if length as usize > self.arena.len() {
            // SAFETY: growing touches no byte that anybody uses.
            unsafe { self.arena.resize(length as usize)? };
        }
        let timed_out = handle.resize(TierId::HOST, pages, limit)?.timed_out;
        if !timed_out {
            // SAFETY: Core has no page beyond `pages` and gives none out until it is told to grow again, which only
            // this method does, one call at a time.
            unsafe { self.arena.resize(length as usize)? };
        }
        Ok((u64::from(pages) * stride, timed_out))
    }
}

/// Bytes from one host page to the next.
fn host_stride(layout: &KvLayout) -> u64 {
    layout.offset(0, 0, 1) - layout.offset(0, 0, 0)
}

fn pages_of(bytes: u64, page_bytes: u64, most: u32, tier: &str) -> Outcome<u32> {
    match u32::try_from(bytes / page_bytes) {
        Ok(pages) if pages <= most => Ok(pages),
        _ => Err(Failure::Capacity(format!(
            "{bytes} bytes for the {tier} tier are more than the {} bytes that were reserved when the engine started: \
             give less, or restart with a larger --{tier}-memory",
            u64::from(most) * page_bytes
        ))),
    }
}
