//! The host arena: where it lies, how its pages lie in it, and how Python gets hold of it before there is a `Runtime`,
//! so that a device can be told of the memory before the first transfer.

use crate::error::Outcome;
use crate::options::Options;
use pyo3::prelude::*;
use std::sync::Arc;
use strata_copy::{Arena, Region};
use strata_types::{GroupId, KvLayout, KvShape};

/// Memory through which pages pass between device and disk where there is no host tier.
const STAGING_BYTES: u64 = 64 << 20;
/// Page alignment in the host arena and on disk: what O_DIRECT asks for.
pub const ALIGNMENT: u64 = 4096;

/// The arena and what is known of it.
#[derive(Clone)]
pub struct HostMemory {
    pub arena: Arc<Arena>,
    /// Page-first, for as many pages as the host tier may grow to.
    pub layout: KvLayout,
    /// Pages that are in use at the start.
    pub pages: u32,
    /// Pages that stay without a host tier.
    pub staging_pages: u32,
}

/// The shape of a page.
pub fn shape_of(options: &Options) -> Outcome<KvShape> {
    Ok(KvShape::new(GroupId(0), options.layers, options.parts, options.page_size, options.token_bytes)?)
}

/// Bytes of the first `pages` pages of the host arena.
fn host_bytes(layout: &KvLayout, pages: u32) -> usize {
    let first = KvLayout { pages, ..*layout };
    first.total_bytes().next_multiple_of(ALIGNMENT) as usize
}

impl HostMemory {
    /// Maps the arena that these options ask for. A `fixed` one is never cut nor grown: what a device was told of stays.
    pub fn map(options: &Options, fixed: bool) -> Outcome<HostMemory> {
        let shape = shape_of(options)?;
        // Without a host tier pages pass through a few pages of staging on their way to and from the disk.
        let staging_pages = u32::try_from(STAGING_BYTES / shape.page_bytes() as u64).unwrap_or(1).max(1);
        let pages = match (options.host_pages, fixed) {
            // The host tier may be turned off at run time, and back on.
            (pages, true) => pages.max(staging_pages),
            (0, false) => staging_pages,
            (pages, false) => pages,
        };
        // Address space for all that the host tier may grow to; memory is taken as it is used.
        let layout = KvLayout::page_first(shape, options.host_pages_most.max(pages), ALIGNMENT)?;
        let arena = Arena::with_capacity(host_bytes(&layout, pages), host_bytes(&layout, layout.pages))?;
        if fixed {
            // Copied in a fork, its pages would no longer be those that a device knows.
            arena.keep_out_of_forks()?;
        }
        Ok(HostMemory { arena: Arc::new(arena), layout, pages, staging_pages })
    }

    /// Whether it is what `map` would give for these options, fixed.
    pub fn is_for(&self, options: &Options) -> bool {
        shape_of(options).is_ok_and(|shape| shape == self.layout.shape)
            && options.host_pages.max(self.staging_pages) == self.pages
    }

    /// The arena as a span that keeps itself mapped.
    pub fn region(&self) -> Region {
        Region::from_arena(Arc::clone(&self.arena))
    }
}

/// The memory of the host tier. Mapped for as long as this object or a `Runtime` made with it lives.
#[pyclass(frozen, module = "strata._core")]
pub struct HostArena {
    pub(crate) memory: HostMemory,
}

#[pymethods]
impl HostArena {
    /// Maps the arena of a `Runtime` with these options. Raises CapacityError if the system gives no memory.
    #[new]
    fn new(options: Options) -> Outcome<HostArena> {
        Ok(HostArena { memory: HostMemory::map(&options, true)? })
    }

    /// The address of the first byte: a multiple of 2 MiB.
    #[getter]
    fn address(&self) -> usize {
        self.memory.arena.as_ptr().as_ptr() as usize
    }

    /// Bytes that are in use, without what it could grow to.
    #[getter]
    fn size_bytes(&self) -> usize {
        self.memory.arena.len()
    }

    /// Pages in these bytes, those included through which pages pass without a host tier.
    #[getter]
    fn pages(&self) -> u32 {
        self.memory.pages
    }

    /// Bytes from one page to the next.
    #[getter]
    fn page_stride(&self) -> u64 {
        self.memory.layout.page_stride
    }
}
