//! The memory of the device and host tiers, and its change at run time: memory is there before Core gives pages out,
//! and goes back to the system only once Core has nothing left in it.

use crate::error::{Failure, Outcome};
use crate::host_arena::HostMemory;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;
use strata_copy::{give_back_pages, Region};
use strata_core::DriverHandle;
use strata_types::{KvLayout, TierId};

/// Both pools and where pages lie in them.
pub struct Pools {
    /// The device pool if this process may give its memory back; a device of its own keeps what it has.
    device: Option<Region>,
    device_layout: KvLayout,
    host: HostMemory,
    /// Held while a tier changes: Core and memory must change in step.
    changing: Mutex<()>,
}

/// Bytes that a tier has now, and whether pages beyond it are still in use.
pub type Resized = (u64, bool);

impl Pools {
    /// The pools as they are at the start. Without `device` both keep their memory whatever their size: a device that
    /// was told of the arena holds on to every byte of it.
    pub fn new(device: Option<Region>, device_layout: KvLayout, host: HostMemory) -> Pools {
        Pools { device, device_layout, host, changing: Mutex::new(()) }
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
        if let (false, Some(device)) = (timed_out, &self.device) {
            // SAFETY: Core has no page beyond `pages` and gives none out until it is told to grow again, which only
            // this method does, one call at a time; the pool is the private anonymous memory of a tensor.
            unsafe { give_back_pages(device, &self.device_layout, pages..self.device_layout.pages)? };
        }
        Ok((u64::from(pages) * self.device_layout.shape.page_bytes() as u64, timed_out))
    }

    /// The host arena grows within the address space that was reserved.
    pub fn resize_host(&self, handle: &DriverHandle, bytes: u64, limit: Duration) -> Outcome<Resized> {
        let stride = self.host.layout.page_stride;
        let pages = pages_of(bytes, stride, self.host.layout.pages, "host")?;
        let length = u64::from(pages.max(self.host.staging_pages)) * stride;
        let _one_at_a_time = self.changing.lock().unwrap_or_else(PoisonError::into_inner);
        if self.device.is_some() && length as usize > self.host.arena.len() {
            // SAFETY: growing touches no byte that anybody uses.
            unsafe { self.host.arena.resize(length as usize)? };
        }
        let timed_out = handle.resize(TierId::HOST, pages, limit)?.timed_out;
        if !timed_out && self.device.is_some() {
            // SAFETY: Core has no page beyond `pages` and gives none out until it is told to grow again, which only
            // this method does, one call at a time.
            unsafe { self.host.arena.resize(length as usize)? };
        }
        Ok((u64::from(pages) * stride, timed_out))
    }
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
