//! The host pages that the store reads from and writes into, as its owner lends them.

use std::ptr::NonNull;
use strata_types::PageId;

/// Pages of host memory in page-first order; one page is one record's payload.
///
/// # Safety
/// For as long as the value lives, each pointer that `page_ptr` returns must be valid for reads and writes of
/// `page_bytes` bytes from any thread, two pages must not overlap, and the same page must always give the same
/// pointer. Whoever submits a transfer must leave its pages alone until the completion: a spill's source is not
/// written, a prefetch's destination neither read nor written by anyone else.
///
/// Pages should start at multiples of 4 KiB: others are carried through the page cache instead of O_DIRECT.
pub unsafe trait PageMemory: Send + Sync {
    /// Bytes of each page.
    fn page_bytes(&self) -> usize;

    /// Where a page starts; `None` if there is no such page.
    fn page_ptr(&self, page: PageId) -> Option<NonNull<u8>>;
}
