//! `Arena`: one anonymous mapping that is the host tier. It starts at a multiple of 2 MiB, never moves, is committed
//! only where it is touched, holds zeros at first, and is given back when dropped. Its size may change at run time
//! within the address space that it reserved: what is cut off goes back to the system at once; what it grows into
//! holds zeros, but for the rest of a system page that a cut went through.

use crate::give_back::give_back;
use crate::CopyError;
use std::io;
use std::ptr::{self, NonNull};
use std::sync::{Mutex, PoisonError};

/// The size of a huge page on the machines that have them.
const HUGE_PAGE: usize = 2 << 20;

/// A span of host memory.
#[derive(Debug)]
pub struct Arena {
    start: NonNull<u8>,
    len: Mutex<usize>,
    capacity: usize,
    mapped: usize,
}

// SAFETY: the mapping belongs to the process, not to a thread; who may touch which bytes when is settled by the
// page pools, and every access goes through `Region`, whose accessors state that contract.
unsafe impl Send for Arena {}
// SAFETY: as above; the length has its own lock.
unsafe impl Sync for Arena {}

impl Arena {
    /// Maps `len` bytes, for good. Fails if the system refuses, or if `len` is 0.
    pub fn new(len: usize) -> Result<Arena, CopyError> {
        Arena::with_capacity(len, len)
    }

    /// Maps `len` bytes that may grow to `capacity`. Address space is all that the difference costs.
    pub fn with_capacity(len: usize, capacity: usize) -> Result<Arena, CopyError> {
        let capacity = capacity.max(len);
        let refuse = |reason| CopyError::Map { bytes: capacity, reason };
        if capacity == 0 {
            return Err(refuse(io::Error::from(io::ErrorKind::InvalidInput)));
        }
        let wide = capacity.checked_next_multiple_of(HUGE_PAGE).and_then(|mapped| {
            // One huge page more than needed, so that an aligned start exists; the ends are given back below.
            mapped.checked_add(HUGE_PAGE).map(|reserved| (mapped, reserved))
        });
        let Some((mapped, reserved)) = wide else {
            return Err(refuse(io::Error::from(io::ErrorKind::OutOfMemory)));
        };
        let protection = libc::PROT_READ | libc::PROT_WRITE;
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
        // SAFETY: an anonymous mapping at an address that the kernel chooses touches nothing that exists.
        let address = unsafe { libc::mmap(ptr::null_mut(), reserved, protection, flags, -1, 0) };
        if address == libc::MAP_FAILED {
            return Err(refuse(io::Error::last_os_error()));
        }
        let Some(reservation) = NonNull::new(address.cast::<u8>()) else {
            return Err(refuse(io::Error::from(io::ErrorKind::OutOfMemory)));
        };
        let before = reservation.as_ptr().align_offset(HUGE_PAGE).min(HUGE_PAGE);
        // SAFETY: `before` is at most HUGE_PAGE, and the reservation is HUGE_PAGE longer than `mapped`.
        let start = unsafe { reservation.add(before) };
        // SAFETY: both spans lie inside the reservation, outside `start..start + mapped`, and are page-aligned;
        // nothing refers to them. The advice changes no content. A refusal of any of the three costs speed or
        // address space, never correctness, so the results are not needed.
        unsafe {
            if before > 0 {
                libc::munmap(address, before);
            }
            let after = reserved - before - mapped;
            if after > 0 {
                libc::munmap(start.as_ptr().add(mapped).cast(), after);
            }
            #[cfg(target_os = "linux")]
            libc::madvise(start.as_ptr().cast(), mapped, libc::MADV_HUGEPAGE);
        }
        Ok(Arena { start, len: Mutex::new(len), capacity, mapped })
    }

    /// Keeps the arena out of processes that this one forks. For memory that a device was told of: after a fork this
    /// process would write to copies of its pages, while the device still reached the old ones.
    pub fn keep_out_of_forks(&self) -> Result<(), CopyError> {
        #[cfg(target_os = "linux")]
        // SAFETY: the span is this arena's own mapping, whole. The advice changes no content and nothing here.
        if unsafe { libc::madvise(self.start.as_ptr().cast(), self.mapped, libc::MADV_DONTFORK) } != 0 {
            let reason = io::Error::last_os_error();
            let told = format!("it cannot be kept out of forked processes (MADV_DONTFORK): {reason}");
            return Err(CopyError::Map { bytes: self.mapped, reason: io::Error::new(reason.kind(), told) });
        }
        Ok(())
    }

    /// The first byte.
    pub fn as_ptr(&self) -> NonNull<u8> {
        self.start
    }

    /// Bytes that are in use.
    pub fn len(&self) -> usize {
        *self.len.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether it was shrunk to nothing.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The most that it can grow to, in bytes.
    pub fn capacity(&self) -> usize {
        self.capacity
    }

    /// Makes the arena `len` bytes long. Growing maps nothing yet: see `warm`. Shrinking gives the memory behind
    /// `len` back at once, huge pages included: one that the cut goes through is split.
    ///
    /// # Safety
    /// Nobody reads or writes the bytes behind the smaller of both lengths meanwhile, and nobody needs their content.
    pub unsafe fn resize(&self, len: usize) -> Result<(), CopyError> {
        if len > self.capacity {
            return Err(CopyError::Grow { bytes: len, most: self.capacity });
        }
        let mut now = self.len.lock().unwrap_or_else(PoisonError::into_inner);
        if len < *now {
            // To the end of the mapping: an earlier cut may have left a part of a system page behind `now`.
            // SAFETY: the span lies inside the mapping, which is private and anonymous; the caller's promise.
            unsafe { give_back(self.start.add(len), self.mapped - len) }
                .map_err(|reason| CopyError::GiveBack { bytes: *now - len, reason })?;
        }
        *now = len;
        Ok(())
    }
}

impl Drop for Arena {
    fn drop(&mut self) {
        // SAFETY: the span was mapped by `new`, is unmapped once, and every `Region` over it holds an `Arc` of it.
        unsafe {
            libc::munmap(self.start.as_ptr().cast(), self.mapped);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_arena_is_aligned_zeroed_and_writable_to_its_end() {
        for len in [1, 4096, HUGE_PAGE - 1, HUGE_PAGE + 1, 5 * HUGE_PAGE] {
            let arena = Arena::new(len).unwrap();
            assert_eq!(arena.len(), len);
            assert_eq!(arena.as_ptr().as_ptr() as usize % HUGE_PAGE, 0);
            // SAFETY: the arena is `len` bytes long and nobody else uses it.
            let bytes = unsafe { std::slice::from_raw_parts_mut(arena.as_ptr().as_ptr(), len) };
            assert!(bytes.iter().all(|byte| *byte == 0));
            bytes.fill(7);
        }
    }

    #[test]
    fn a_shrunk_arena_keeps_its_pages_and_grows_into_zeros() {
        let arena = Arena::with_capacity(HUGE_PAGE, 4 * HUGE_PAGE).unwrap();
        let start = arena.as_ptr();
        let bytes = |from: usize, to: usize| {
            // SAFETY: nobody else knows this arena, its mapping is this long, and no slice outlives its statement.
            unsafe { std::slice::from_raw_parts_mut(start.as_ptr().add(from), to - from) }
        };
        // SAFETY: as above.
        unsafe { arena.resize(4 * HUGE_PAGE) }.unwrap();
        bytes(0, 4 * HUGE_PAGE).fill(9);
        for len in [3 * HUGE_PAGE + 5, HUGE_PAGE + 4097, 0] {
            // SAFETY: as above.
            unsafe { arena.resize(len) }.unwrap();
            assert_eq!((arena.len(), arena.is_empty(), arena.as_ptr()), (len, len == 0, start));
            assert!(bytes(0, len).iter().all(|byte| *byte == 9));
            let first_whole = len.next_multiple_of(4096);
            assert!(bytes(first_whole, 4 * HUGE_PAGE).iter().all(|byte| *byte == 0));
            bytes(0, len).fill(9);
        }
        // SAFETY: as above.
        let message = unsafe { arena.resize(4 * HUGE_PAGE + 1) }.unwrap_err().to_string();
        assert!(message.contains("8388609") && message.contains("--host-memory"), "{message}");
    }

    #[cfg(target_os = "linux")]
    #[test]
    fn a_forked_process_has_no_arena_that_was_kept_out() {
        let end_of_a_child_that_reads = |arena: &Arena| {
            let byte = arena.as_ptr().as_ptr();
            // SAFETY: the child of this process of many threads does nothing but read one byte and end.
            unsafe {
                byte.write(7);
                let child = libc::fork();
                if child == 0 {
                    libc::_exit(i32::from(byte.read_volatile()));
                }
                let mut status = 0;
                assert_eq!(libc::waitpid(child, &mut status, 0), child);
                (libc::WIFEXITED(status).then(|| libc::WEXITSTATUS(status)), byte.read_volatile())
            }
        };
        let arena = Arena::with_capacity(HUGE_PAGE, 2 * HUGE_PAGE).unwrap();
        assert_eq!(end_of_a_child_that_reads(&arena), (Some(7), 7));
        arena.keep_out_of_forks().unwrap();
        assert_eq!(end_of_a_child_that_reads(&arena), (None, 7), "the child found it");
    }

    #[test]
    fn a_refusal_names_the_size_the_flag_and_the_remedy() {
        for len in [0, usize::MAX, usize::MAX / 2] {
            let message = Arena::new(len).unwrap_err().to_string();
            assert!(message.contains(&len.to_string()), "{message}");
            assert!(message.contains("choose a smaller --host-memory"), "{message}");
        }
    }
}
