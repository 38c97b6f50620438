/* The address rule: (layer, part, page) -> byte offset, the one extra arithmetic operation of a copy.
 *
 * It is the same rule as strata_types::KvLayout::offset, stated for kernels: NVRTC, nvcc, and any C or C++ compiler
 * take this file as it is. It includes nothing. strata-copy's tests compile it and compare the two rules.
 *
 * Any page size from 1 and any piece that is a multiple of 4 bytes work, since all strides are in bytes. Offsets are
 * 64-bit throughout: a pool may be larger than 4 GiB, and so may a stride.
 */
#ifndef STRATA_ADDRESS_H
#define STRATA_ADDRESS_H

#if defined(__CUDACC__) || defined(__HIP__)
#define STRATA_FUNCTION static __host__ __device__ __forceinline__
#else
#define STRATA_FUNCTION static inline
#endif

typedef unsigned int strata_u32;
typedef unsigned long long strata_u64;

/* Offsets would wrap silently on a compiler with other widths: an array of size -1 does not compile. */
typedef char strata_u32_has_32_bits[sizeof(strata_u32) == 4 ? 1 : -1];
typedef char strata_u64_has_64_bits[sizeof(strata_u64) == 8 ? 1 : -1];

/* Where the pieces of a pool lie. Five 64-bit words in this order: pass it to a kernel by value. */
typedef struct strata_layout {
    strata_u64 base;         /* offset of (layer 0, part 0, page 0) */
    strata_u64 layer_stride; /* bytes from one layer to the next */
    strata_u64 part_stride;  /* bytes from one part to the next */
    strata_u64 page_stride;  /* bytes from one page to the next */
    strata_u64 piece_bytes;  /* contiguous bytes of one page in one layer and part */
} strata_layout;

/* Offset of one piece from the start of the tier's memory. The caller keeps the indices inside the shape. */
STRATA_FUNCTION strata_u64 strata_offset(strata_layout layout, strata_u32 layer, strata_u32 part, strata_u32 page) {
    return layout.base + (strata_u64)layer * layout.layer_stride + (strata_u64)part * layout.part_stride +
           (strata_u64)page * layout.page_stride;
}

#endif
