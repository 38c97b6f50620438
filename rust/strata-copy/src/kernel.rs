//! The innermost copy: the bytes of one piece, with ordinary stores or with non-temporal ones, which do not read
//! the destination's cache lines before they overwrite them. After streaming stores `publish` must run on the same
//! thread before another thread is told that the bytes are there.

use std::ptr;

/// Pieces of at least this many bytes are streamed (measured: see `examples/copy_bandwidth.rs`).
pub const STREAMING_FROM_BYTES: usize = 2048;

/// How bytes are written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stores {
    /// Through the cache: `memcpy`.
    Cached,
    /// Around the cache, where the processor can.
    Streaming,
}

impl Stores {
    /// The kind of store that suits pieces of this size.
    pub fn for_piece(bytes: usize) -> Stores {
        if bytes >= STREAMING_FROM_BYTES {
            Stores::Streaming
        } else {
            Stores::Cached
        }
    }
}

/// Copies `bytes` bytes.
///
/// # Safety
/// Both spans are valid for `bytes` bytes and do not overlap; no other thread touches the destination or writes
/// the source meanwhile.
pub(crate) unsafe fn copy_piece(to: *mut u8, from: *const u8, bytes: usize, stores: Stores) {
    #[cfg(target_arch = "x86_64")]
    if stores == Stores::Streaming {
        // SAFETY: the caller's promise; the feature was just found present (SSE2 is part of x86-64).
        unsafe {
            if is_x86_feature_detected!("avx2") {
                x86::stream_avx2(to, from, bytes);
            } else {
                x86::stream_sse2(to, from, bytes);
            }
        }
        return;
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _same_on_this_machine = stores;
    // SAFETY: the caller's promise.
    unsafe { ptr::copy_nonoverlapping(from, to, bytes) };
}

/// How much of the next piece is fetched ahead: the start, until the processor's own prefetcher has caught on.
#[cfg(target_arch = "x86_64")]
const PREFETCH_BYTES: usize = 1024;

/// Asks for the start of a piece that is copied next. Pieces of one transfer lie anywhere, so the processor cannot
/// guess the next one; asking is worth up to 1.5x for pieces of a few KiB.
pub(crate) fn prefetch(from: *const u8, bytes: usize) {
    #[cfg(target_arch = "x86_64")]
    for offset in (0..bytes.min(PREFETCH_BYTES)).step_by(64) {
        use std::arch::x86_64::{_mm_prefetch, _MM_HINT_T0};
        // SAFETY: a hint. It reads nothing that the program can see, and a bad address is ignored.
        unsafe { _mm_prefetch::<_MM_HINT_T0>(from.wrapping_add(offset).cast()) };
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _left_to_the_processor = (from, bytes);
}

/// Orders this thread's streaming stores before whatever it does next.
pub(crate) fn publish() {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: SSE is part of x86-64; the fence touches no memory.
    unsafe {
        std::arch::x86_64::_mm_sfence();
    }
}

#[cfg(target_arch = "x86_64")]
mod x86 {
    use std::arch::x86_64::{
        __m128i, __m256i, _mm256_loadu_si256, _mm256_stream_si256, _mm_loadu_si128, _mm_stream_si128,
    };
    use std::ptr;

    /// Streaming stores that fill whole lines leave the write-combining buffers in one burst.
    const LINE: usize = 64;

    macro_rules! stream {
        ($name:ident, $feature:literal, $vector:ty, $load:ident, $store:ident) => {
            /// # Safety
            /// As `copy_piece`; the processor has the feature.
            #[target_feature(enable = $feature)]
            pub(super) unsafe fn $name(to: *mut u8, from: *const u8, bytes: usize) {
                const WIDTH: usize = size_of::<$vector>();
                const BLOCK: usize = 2 * LINE;
                let head = to.align_offset(LINE).min(bytes);
                let body = (bytes - head) / BLOCK * BLOCK;
                // SAFETY: head + body + tail = bytes, so every access stays inside the caller's two spans; the
                // stores are aligned because `to + head` is at a line's start and a block is two lines.
                unsafe {
                    ptr::copy_nonoverlapping(from, to, head);
                    let mut done = head;
                    while done < head + body {
                        let mut lanes = [$load(from.add(done).cast()); BLOCK / WIDTH];
                        for (index, lane) in lanes.iter_mut().enumerate().skip(1) {
                            *lane = $load(from.add(done + index * WIDTH).cast());
                        }
                        for (index, lane) in lanes.iter().enumerate() {
                            $store(to.add(done + index * WIDTH).cast(), *lane);
                        }
                        done += BLOCK;
                    }
                    ptr::copy_nonoverlapping(from.add(done), to.add(done), bytes - done);
                }
            }
        };
    }

    stream!(stream_avx2, "avx2", __m256i, _mm256_loadu_si256, _mm256_stream_si256);
    stream!(stream_sse2, "sse2", __m128i, _mm_loadu_si128, _mm_stream_si128);
}

/// Copies as many bytes as the shorter span has, in one call: what a transfer of those bytes is measured against.
pub fn memcpy_baseline(to: &mut [u8], from: &[u8], stores: Stores) {
    let bytes = to.len().min(from.len());
    // SAFETY: a mutable and a shared slice never overlap, and both have `bytes` bytes.
    unsafe { copy_piece(to.as_mut_ptr(), from.as_ptr(), bytes, stores) };
    publish();
}

/// Compares two spans with one `memcmp`: what a match of those bytes is measured against.
pub fn memcmp_baseline(one: &[u8], two: &[u8]) -> bool {
    one == two
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_store_copies_exactly_its_bytes_at_every_alignment() {
        let from: Vec<u8> = (0..1200_u32).map(|index| (index * 7 + index / 256) as u8).collect();
        for stores in [Stores::Cached, Stores::Streaming] {
            for start in (0..130).step_by(3) {
                for len in [0, 1, 4, 31, 63, 64, 65, 127, 128, 129, 300, 768, 1024] {
                    let mut to = vec![0xA5_u8; 1200];
                    memcpy_baseline(&mut to[start..start + len], &from[5..5 + len], stores);
                    assert_eq!(to[start..start + len], from[5..5 + len], "{stores:?} {start} {len}");
                    assert!(to[..start].iter().chain(&to[start + len..]).all(|byte| *byte == 0xA5));
                }
            }
        }
    }

    #[cfg(target_arch = "x86_64")]
    #[test]
    fn the_narrow_stores_agree_with_the_wide_ones() {
        let from: Vec<u8> = (0..5000_u32).map(|index| (index ^ (index >> 5)) as u8).collect();
        for len in [1, 64, 100, 128, 191, 4096, 4999] {
            let mut to = vec![0_u8; 5000];
            // SAFETY: two different vectors of 5000 bytes; SSE2 is part of x86-64.
            unsafe { x86::stream_sse2(to.as_mut_ptr().add(1), from.as_ptr(), len) };
            publish();
            assert_eq!((to[0], &to[1..1 + len]), (0, &from[..len]));
        }
    }
}
