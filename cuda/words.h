/* The words that a copy moves, 16, 8 and 4 bytes wide, and how they are read and written on each platform.
 *
 * Every word of a transfer is read once and written once, so keeping it in a cache only drives out what the model
 * uses. CUDA's streaming accesses (ld.global.cs, st.global.cs) are evicted first from L1 and L2; HIP has non-temporal
 * accesses for the same end; a C++ compiler gets plain ones through cuda/shim. Page tables are the opposite: few
 * bytes that many threads read, so they go through the read-only cache.
 */
#ifndef STRATA_WORDS_H
#define STRATA_WORDS_H

#include "address.h"

#if defined(__HIP__)

#define STRATA_DEVICE static __device__ __forceinline__
typedef strata_u32 strata_word4;
typedef strata_u32 strata_word8 __attribute__((ext_vector_type(2)));
typedef strata_u32 strata_word16 __attribute__((ext_vector_type(4)));
#define STRATA_READ_ONCE(address) __builtin_nontemporal_load(address)
#define STRATA_WRITE_ONCE(address, word) __builtin_nontemporal_store(word, address)
#define STRATA_READ_SHARED(address) __ldg(address)

#elif defined(__CUDACC__)

#define STRATA_DEVICE static __device__ __forceinline__
typedef unsigned int strata_word4;
typedef uint2 strata_word8;
typedef uint4 strata_word16;
#define STRATA_READ_ONCE(address) __ldcs(address)
#define STRATA_WRITE_ONCE(address, word) __stcs(address, word)
#define STRATA_READ_SHARED(address) __ldg(address)

#else

#include "shim/threads.h"

#endif

#endif
