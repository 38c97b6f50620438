/* What a C++ compiler needs to build the kernels: threads as loops over plain memory.
 *
 * For tests and for the fake device only. It says nothing about speed, and it does not cover what only a GPU has: the
 * memory model, and the cache hints (those are checked on the PTX). Each host thread may launch on its own.
 */
#ifndef STRATA_SHIM_THREADS_H
#define STRATA_SHIM_THREADS_H

#include "address.h"

#define __global__
#define __launch_bounds__(...)
#define STRATA_DEVICE static inline

struct strata_shim_index {
    unsigned int x;
};
static thread_local strata_shim_index blockIdx, blockDim, gridDim, threadIdx;

/* Words that this host thread's launch has stored: a word stored twice would leave no trace in the bytes. */
static thread_local strata_u64 strata_shim_stored;

/* Aligned as on the GPU, so that a sanitizer reports a word wider than its address allows. */
typedef strata_u32 strata_word4;
struct alignas(8) strata_word8 {
    strata_u32 values[2];
};
struct alignas(16) strata_word16 {
    strata_u32 values[4];
};
#define STRATA_READ_ONCE(address) (*(address))
#define STRATA_WRITE_ONCE(address, word) (++strata_shim_stored, *(address) = (word))
#define STRATA_READ_SHARED(address) (*(address))

#endif
