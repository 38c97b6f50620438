//! The innermost copy: the bytes of pieces, four in step, with ordinary stores or with non-temporal ones, which do not read
//! the destination's cache lines before they overwrite them. After streaming stores `publish` must run on the same
//! thread before another thread is told that the bytes are there.

use std::ptr;

/// Pieces of at least this many bytes are streamed (`strata bench copy` measures it).
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

/// Pieces that are copied in step: so many streams keep more of the memory busy than one (measured: 1.1x).
const LANES: usize = 4;
/// Pieces of a multiple of this are cut into it, so that lanes stay close together.
const LANE_BYTES: usize = 4096;

/// One lane each: where it reads and where it writes.
#[derive(Clone, Copy)]
struct Lanes {
    from: [*const u8; LANES],
    to: [*mut u8; LANES],
    count: usize,
}

impl Lanes {
    /// The next pieces, as many as there are lanes or are left.
    fn take(pieces: &mut impl Iterator<Item = (*const u8, *mut u8)>) -> Option<Lanes> {
        let mut lanes = Lanes { from: [ptr::null(); LANES], to: [ptr::null_mut(); LANES], count: 0 };
        for (from, to) in pieces.take(LANES) {
            (lanes.from[lanes.count], lanes.to[lanes.count]) = (from, to);
            lanes.count += 1;
        }
        (lanes.count > 0).then_some(lanes)
    }
}

/// Copies pieces of `piece` bytes each, given as (from, to).
///
/// # Safety
/// All spans are valid for `piece` bytes and no destination overlaps another span; no other thread touches the
/// destinations or writes the sources meanwhile.
pub(crate) unsafe fn copy_pieces(
    pieces: impl Iterator<Item = (*const u8, *mut u8)>,
    piece: usize,
    stores: Stores,
) {
    let bytes = if piece.is_multiple_of(LANE_BYTES) { LANE_BYTES } else { piece };
    let mut cut = pieces.flat_map(|(from, to)| {
        (0..piece).step_by(bytes.max(1)).map(move |at| (from.wrapping_add(at), to.wrapping_add(at)))
    });
    let mut coming = Lanes::take(&mut cut);
    while let Some(lanes) = coming {
        coming = Lanes::take(&mut cut);
        let next = coming.map_or([ptr::null(); LANES], |lanes| lanes.from);
        // SAFETY: the caller's promise; a cut piece ends inside the whole one.
        unsafe { copy_in_step(&lanes, bytes, stores, next) };
    }
}

/// Copies a block of each lane in turn where that is faster. `next` is where this thread reads after them, or nulls.
///
/// # Safety
/// As `copy_pieces`, for the lanes in use.
unsafe fn copy_in_step(lanes: &Lanes, bytes: usize, stores: Stores, next: [*const u8; LANES]) {
    #[cfg(target_arch = "x86_64")]
    if stores == Stores::Streaming
        && lanes.count == LANES
        && bytes.is_multiple_of(x86::BLOCK)
        && lanes.to.iter().all(|to| to.align_offset(x86::LINE) == 0)
        && is_x86_feature_detected!("avx2")
    {
        // SAFETY: the caller's promise; the feature was just found present, `to` and `bytes` are whole blocks.
        unsafe { x86::stream_in_step(lanes, bytes, next) };
        return;
    }
    for lane in 0..lanes.count {
        let after = if lane + 1 < lanes.count { lanes.from[lane + 1] } else { next[0] };
        // SAFETY: the caller's promise.
        unsafe { copy_piece(lanes.to[lane], lanes.from[lane], bytes, stores, after) };
    }
}

/// Copies `bytes` bytes. `next` is where this thread reads after them, or null.
///
/// # Safety
/// Both spans are valid for `bytes` bytes and do not overlap; no other thread touches the destination or writes
/// the source meanwhile. `next` is only a hint and may be any address.
unsafe fn copy_piece(to: *mut u8, from: *const u8, bytes: usize, stores: Stores, next: *const u8) {
    #[cfg(target_arch = "x86_64")]
    if stores == Stores::Streaming {
        // SAFETY: the caller's promise; the feature was just found present (SSE2 is part of x86-64).
        unsafe {
            if is_x86_feature_detected!("avx2") {
                x86::stream_avx2(to, from, bytes, next);
            } else {
                x86::stream_sse2(to, from, bytes, next);
            }
        }
        return;
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _same_on_this_machine = stores;
    prefetch(next, bytes.min(AHEAD));
    // SAFETY: the caller's promise.
    unsafe { ptr::copy_nonoverlapping(from, to, bytes) };
}

/// How far ahead of the copy its source is asked for, across the border to the next piece. Pieces of one transfer
/// may lie anywhere, so the processor cannot guess the next one. 1 KiB and 4 KiB measured slower.
const AHEAD: usize = 2048;

/// The same in each of several lanes.
#[cfg(target_arch = "x86_64")]
const AHEAD_IN_STEP: usize = 1024;

/// Asks for `bytes` bytes that are read soon. Into the second-level cache: lines on their way to the first occupy the
/// buffers that streaming stores need, which measured up to 10% slower.
#[inline(always)]
fn prefetch(from: *const u8, bytes: usize) {
    #[cfg(target_arch = "x86_64")]
    for offset in (0..bytes).step_by(64) {
        use std::arch::x86_64::{_mm_prefetch, _MM_HINT_T1};
        // SAFETY: a hint. It reads nothing that the program can see, and a bad address is ignored.
        unsafe { _mm_prefetch::<_MM_HINT_T1>(from.wrapping_add(offset).cast()) };
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
    use super::{Lanes, LANES};
    use std::arch::x86_64::{
        __m128i, __m256i, _mm256_loadu_si256, _mm256_stream_si256, _mm_loadu_si128, _mm_stream_si128,
    };
    use std::ptr;

    /// Streaming stores that fill whole lines leave the write-combining buffers in one burst.
    pub(super) const LINE: usize = 64;
    pub(super) const BLOCK: usize = 2 * LINE;

    /// # Safety
    /// As `copy_in_step`; the processor has AVX2, every lane is in use and starts at a line, `bytes` are whole blocks.
    #[target_feature(enable = "avx2")]
    pub(super) unsafe fn stream_in_step(lanes: &Lanes, bytes: usize, next: [*const u8; LANES]) {
        let ahead = super::AHEAD_IN_STEP.min(bytes);
        let mut done = 0;
        while done < bytes {
            let coming = done + ahead;
            for ((from, to), next) in lanes.from.into_iter().zip(lanes.to).zip(next) {
                let soon = if coming < bytes {
                    from.wrapping_add(coming)
                } else {
                    next.wrapping_add(coming - bytes)
                };
                super::prefetch(soon, BLOCK);
                // SAFETY: `done + BLOCK <= bytes`, and the stores are aligned, by the caller's promise.
                unsafe {
                    let (source, target) = (from.add(done), to.add(done));
                    let lines = [0, 32, 64, 96].map(|at| _mm256_loadu_si256(source.add(at).cast()));
                    for (index, line) in lines.into_iter().enumerate() {
                        _mm256_stream_si256(target.add(32 * index).cast(), line);
                    }
                }
            }
            done += BLOCK;
        }
    }

    macro_rules! stream {
        ($name:ident, $feature:literal, $vector:ty, $load:ident, $store:ident) => {
            /// # Safety
            /// As `copy_piece`; the processor has the feature.
            #[target_feature(enable = $feature)]
            pub(super) unsafe fn $name(to: *mut u8, from: *const u8, bytes: usize, next: *const u8) {
                let ahead = super::AHEAD.min(bytes);
                const WIDTH: usize = size_of::<$vector>();
                let head = to.align_offset(LINE).min(bytes);
                let body = (bytes - head) / BLOCK * BLOCK;
                // SAFETY: head + body + tail = bytes, so every access stays inside the caller's two spans; the
                // stores are aligned because `to + head` is at a line's start and a block is two lines.
                unsafe {
                    ptr::copy_nonoverlapping(from, to, head);
                    let mut done = head;
                    while done < head + body {
                        let coming = done + ahead;
                        let soon = if coming < bytes {
                            from.wrapping_add(coming)
                        } else {
                            next.wrapping_add(coming - bytes)
                        };
                        super::prefetch(soon, BLOCK);
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::memcpy_baseline;

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

    #[test]
    fn pieces_in_step_land_where_they_belong() {
        // Every alignment of the memory to lines is among the starts.
        let from: Vec<u8> = (0..70_000_u32).map(|index| (index * 7 + index / 251) as u8).collect();
        for (piece, count) in [(128, 9), (2048, 11), (4096, 4), (12_288, 3), (100, 6), (4, 5), (0, 3)] {
            for start in [0, 1, 16, 32, 48, 64] {
                let mut to = vec![0xA5_u8; 70_000];
                let base = to.as_mut_ptr();
                let place = |index: usize| start + (count - 1 - index) * (piece + 64);
                let pieces = (0..count)
                    .map(|index| (from[index * piece + 3..].as_ptr(), base.wrapping_add(place(index))));
                // SAFETY: `place` puts every piece into `to`, 64 bytes apart; the sources lie in `from`.
                unsafe { copy_pieces(pieces, piece, Stores::Streaming) };
                publish();
                let mut wanted = vec![0xA5_u8; 70_000];
                for index in 0..count {
                    wanted[place(index)..][..piece].copy_from_slice(&from[index * piece + 3..][..piece]);
                }
                assert!(to == wanted, "{piece} {count} {start}");
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
            unsafe { x86::stream_sse2(to.as_mut_ptr().add(1), from.as_ptr(), len, ptr::null()) };
            publish();
            assert_eq!((to[0], &to[1..1 + len]), (0, &from[..len]));
        }
    }
}
