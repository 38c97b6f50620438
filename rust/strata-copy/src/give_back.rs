//! Memory that goes back to the system while its addresses stay: a pool that shrinks frees what its last pages lay in.
//! Only whole system pages can go; a byte outside the span never changes.

use crate::warm::{pages_span, SYSTEM_PAGE};
use crate::{CopyError, Region};
use std::io;
use std::ops::Range;
use std::ptr::NonNull;
use strata_types::KvLayout;

/// Gives back what `pages` of a pool lie in, wherever whole system pages hold nothing else. Where they are read again
/// before they are written, they hold zeros or what they held.
///
/// # Safety
/// The region is private anonymous memory (an arena, or a large allocation of a CPU allocator). Nobody reads or
/// writes these pages meanwhile, and nobody needs their content.
pub unsafe fn give_back_pages(
    region: &Region,
    layout: &KvLayout,
    pages: Range<u32>,
) -> Result<(), CopyError> {
    for (offset, len) in pages_span(region, layout, pages) {
        let start = region.pointer(offset, len)?;
        // SAFETY: the span is inside the region and holds only these pages; the caller's promise.
        unsafe { give_back(start, len) }.map_err(|reason| CopyError::GiveBack { bytes: len, reason })?;
    }
    Ok(())
}

/// # Safety
/// The span is private anonymous memory that nobody uses meanwhile and whose content nobody needs.
pub(crate) unsafe fn give_back(start: NonNull<u8>, len: usize) -> io::Result<()> {
    let address = start.as_ptr() as usize;
    let first = address.next_multiple_of(SYSTEM_PAGE);
    let last = (address + len) / SYSTEM_PAGE * SYSTEM_PAGE;
    if first >= last {
        return Ok(());
    }
    // SAFETY: `first..last` lies inside the caller's span; private anonymous pages read as zeros afterwards.
    match unsafe { libc::madvise(first as *mut libc::c_void, last - first, libc::MADV_DONTNEED) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}
