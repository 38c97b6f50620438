//! Memory that is mapped before it is needed. A first touch costs a page fault and a cleared page, several times what
//! the copy itself costs, and a load would pay it while a request waits.

use crate::Region;
use strata_types::KvLayout;

/// What a page of the system is at least.
const SYSTEM_PAGE: usize = 4096;

/// Maps the memory of a pool's first `pages` pages. Best effort: where the system cannot do it, the first copies pay
/// as they would have. Takes about a third of a second a GiB, so it belongs on a thread of its own.
pub fn warm(region: &Region, layout: &KvLayout, pages: u32) {
    let pages = pages.min(layout.pages);
    let shape = layout.shape;
    if pages == 0 {
        return;
    }
    if layout.page_stride >= shape.page_bytes() as u64 {
        // Page-first: the first pages are one span.
        populate(region, layout.base, layout.page_stride as usize * pages as usize);
        return;
    }
    for layer in 0..shape.layers {
        for part in 0..shape.parts {
            populate(region, layout.offset(layer, part, 0), layout.page_stride as usize * pages as usize);
        }
    }
}

#[cfg(target_os = "linux")]
fn populate(region: &Region, offset: u64, len: usize) {
    let len = len.min(region.len().saturating_sub(offset as usize));
    let Ok(start) = region.pointer(offset, len) else { return };
    let address = start.as_ptr() as usize;
    let first = address.next_multiple_of(SYSTEM_PAGE);
    let last = (address + len) / SYSTEM_PAGE * SYSTEM_PAGE;
    if first < last {
        // SAFETY: the range lies inside the region's mapping; populating maps pages and changes no byte, so it is
        // sound while others read and write them. A refusal leaves everything as it was.
        unsafe { libc::madvise(first as *mut libc::c_void, last - first, libc::MADV_POPULATE_WRITE) };
    }
}

#[cfg(not(target_os = "linux"))]
fn populate(_region: &Region, _offset: u64, _len: usize) {}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Arena;
    use std::sync::Arc;
    use strata_types::{GroupId, KvShape};

    #[test]
    fn warming_changes_no_byte_and_stays_inside() {
        let shape = KvShape::new(GroupId(0), 3, 2, 16, 1024).unwrap();
        for layout in
            [KvLayout::layer_first(shape, 5).unwrap(), KvLayout::page_first(shape, 5, 4096).unwrap()]
        {
            let region = Region::from_arena(Arc::new(Arena::new(layout.total_bytes() as usize).unwrap()));
            // SAFETY: nobody else knows this arena.
            unsafe { region.bytes_mut(0, region.len()) }.unwrap().fill(7);
            warm(&region, &layout, 99);
            // SAFETY: as above.
            assert!(unsafe { region.bytes(0, region.len()) }.unwrap().iter().all(|byte| *byte == 7));
        }
    }
}
