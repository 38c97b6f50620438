//! Memory that is mapped before it is needed. A first touch costs a page fault and a cleared page, several times what
//! the copy itself costs, and a load would pay it while a request waits.

use crate::Region;
use std::ops::Range;
use strata_types::KvLayout;

/// What a page of the system is at least.
pub(crate) const SYSTEM_PAGE: usize = 4096;
/// What is mapped between two looks at whether to go on: some 20 ms.
const CHUNK: usize = 64 << 20;

/// Maps the memory of these pages of a pool for as long as `go_on` says so: a pool must not be shrunk while this
/// runs. Best effort: where the system cannot do it, the first copies pay as they would have. Takes about a third of
/// a second a GiB, so it belongs on a thread of its own.
pub fn warm(region: &Region, layout: &KvLayout, pages: Range<u32>, go_on: impl Fn() -> bool) {
    for (offset, len) in pages_span(region, layout, pages) {
        for done in (0..len).step_by(CHUNK) {
            if !go_on() {
                return;
            }
            populate(region, offset + done as u64, CHUNK.min(len - done));
        }
    }
}

/// The spans (offset, length) that hold these pages and no other, cut to the layout and the region.
pub(crate) fn pages_span(region: &Region, layout: &KvLayout, pages: Range<u32>) -> Vec<(u64, usize)> {
    let shape = layout.shape;
    let (first, last) = (pages.start.min(layout.pages), pages.end.min(layout.pages));
    if first >= last {
        return Vec::new();
    }
    let span = |start: u64| {
        let stride = layout.page_stride;
        let len = (u64::from(last - first) * stride).min((region.len() as u64).saturating_sub(start));
        (start, len as usize)
    };
    if layout.page_stride >= shape.page_bytes() as u64 {
        // Page-first: neighbouring pages are one span.
        return vec![span(layout.offset(0, 0, first))];
    }
    (0..shape.layers)
        .flat_map(|layer| (0..shape.parts).map(move |part| (layer, part)))
        .map(|(layer, part)| span(layout.offset(layer, part, first)))
        .collect()
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
    use std::sync::atomic::{AtomicU32, Ordering::Relaxed};
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
            let rounds = AtomicU32::new(0);
            warm(&region, &layout, 0..99, || rounds.fetch_add(1, Relaxed) < 99);
            assert!(rounds.into_inner() > 0);
            warm(&region, &layout, 9..99, || true);
            // SAFETY: as above.
            assert!(unsafe { region.bytes(0, region.len()) }.unwrap().iter().all(|byte| *byte == 7));
        }
    }
}
