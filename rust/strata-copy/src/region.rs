//! `Region`: a span of memory that outlives its users. It hands out pointers only inside its bounds; who may read
//! or write which page at what time is the page pools' business, so touching the bytes is `unsafe`.

use crate::{Arena, CopyError};
use std::any::Any;
use std::fmt;
use std::ptr::NonNull;
use std::sync::Arc;

/// A span of memory and what keeps it alive. Clones share the span.
#[derive(Clone)]
pub struct Region {
    start: NonNull<u8>,
    len: usize,
    _owner: Arc<dyn Any + Send + Sync>,
}

// SAFETY: a Region is an address, a length and a thread-safe owner. Reading or writing through it is unsafe and
// carries the contract that no two threads touch one byte at a time if one of them writes.
unsafe impl Send for Region {}
// SAFETY: as above.
unsafe impl Sync for Region {}

impl Region {
    /// The whole of an arena, up to what it can grow to: the pool that hands out its pages keeps inside its length.
    pub fn from_arena(arena: Arc<Arena>) -> Region {
        Region { start: arena.as_ptr(), len: arena.capacity(), _owner: arena }
    }

    /// Memory that was allocated elsewhere, a tensor for example.
    ///
    /// # Safety
    /// `start..start + len` is one allocation that can be read and written from any thread and stays where it is
    /// for as long as `owner` lives. No Rust reference to it is alive while pages are copied.
    pub unsafe fn from_raw(start: NonNull<u8>, len: usize, owner: Arc<dyn Any + Send + Sync>) -> Region {
        Region { start, len, _owner: owner }
    }

    pub(crate) fn start(&self) -> *mut u8 {
        self.start.as_ptr()
    }

    /// Bytes of the region.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether the region has no bytes.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The address of `len` bytes from `offset`, for a read or write that the kernel or a copy does.
    pub fn pointer(&self, offset: u64, len: usize) -> Result<NonNull<u8>, CopyError> {
        let inside = usize::try_from(offset)
            .ok()
            .filter(|offset| offset.checked_add(len).is_some_and(|end| end <= self.len));
        let Some(inside) = inside else {
            return Err(CopyError::OutOfBounds { offset, len, available: self.len });
        };
        // SAFETY: `inside + len <= self.len`, so the result stays within the allocation.
        Ok(unsafe { self.start.add(inside) })
    }

    /// The bytes at `offset`, read in place.
    ///
    /// # Safety
    /// Nobody writes these bytes while the slice lives.
    pub unsafe fn bytes(&self, offset: u64, len: usize) -> Result<&[u8], CopyError> {
        let start = self.pointer(offset, len)?;
        // SAFETY: in bounds by `pointer`, alive by `_owner`, unwritten by the caller's promise.
        Ok(unsafe { std::slice::from_raw_parts(start.as_ptr(), len) })
    }

    /// The bytes at `offset`, to be written in place.
    ///
    /// # Safety
    /// Nobody else reads or writes these bytes while the slice lives.
    #[allow(clippy::mut_from_ref)]
    pub unsafe fn bytes_mut(&self, offset: u64, len: usize) -> Result<&mut [u8], CopyError> {
        let start = self.pointer(offset, len)?;
        // SAFETY: in bounds by `pointer`, alive by `_owner`, exclusive by the caller's promise.
        Ok(unsafe { std::slice::from_raw_parts_mut(start.as_ptr(), len) })
    }

    /// Whether two regions share a byte.
    pub fn overlaps(&self, other: &Region) -> bool {
        let (one, two) = (self.start.as_ptr() as usize, other.start.as_ptr() as usize);
        one < two.saturating_add(other.len) && two < one.saturating_add(self.len)
    }
}

impl fmt::Debug for Region {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Region").field("len", &self.len).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nothing_outside_the_bounds_is_handed_out() {
        let region = Region::from_arena(Arc::new(Arena::new(100).unwrap()));
        assert!(region.pointer(0, 100).is_ok() && region.pointer(100, 0).is_ok());
        for (offset, len) in [(0, 101), (100, 1), (u64::MAX, 1), (1, usize::MAX), (u64::MAX, usize::MAX)] {
            assert!(region.pointer(offset, len).is_err(), "{offset} {len}");
        }
    }

    #[test]
    fn a_region_keeps_its_owner_alive() {
        let mut owner = Arc::new(vec![5_u8; 64]);
        let start = NonNull::new(Arc::get_mut(&mut owner).unwrap().as_mut_ptr()).unwrap();
        let watch = Arc::downgrade(&owner);
        // SAFETY: the vector lives in the Arc, is never resized and has no other user.
        let region = unsafe { Region::from_raw(start, 64, owner) };
        let clone = region.clone();
        drop(region);
        assert!(watch.upgrade().is_some());
        // SAFETY: nobody writes.
        assert_eq!(unsafe { clone.bytes(60, 4) }.unwrap(), [5; 4]);
        drop(clone);
        assert!(watch.upgrade().is_none());
    }

    #[test]
    fn overlap_is_seen() {
        let arena = Region::from_arena(Arc::new(Arena::new(4096).unwrap()));
        let other = Region::from_arena(Arc::new(Arena::new(4096).unwrap()));
        assert!(arena.overlaps(&arena.clone()) && !arena.overlaps(&other));
    }
}
