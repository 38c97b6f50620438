/* The kernels as a shared library, and a launch that runs a grid on the calling thread.
 *
 * python/strata/device/cpu_kernels.py builds and calls it. A seed other than 0 runs the threads of the grid in an order
 * drawn from it: what depends on the order gives other bytes.
 */
#include "transfer.cu"

#include <stdint.h>
#include <utility>
#include <vector>

typedef void (*strata_shim_kernel)(strata_transfer);

static uint64_t strata_shim_random(uint64_t &state) {
    /* splitmix64 */
    uint64_t value = (state += 0x9e3779b97f4a7c15u);
    value = (value ^ (value >> 30)) * 0xbf58476d1ce4e5b9u;
    value = (value ^ (value >> 27)) * 0x94d049bb133111ebu;
    return value ^ (value >> 31);
}

/* Run `kernel` over blocks x threads; returns the words stored. */
extern "C" strata_u64 strata_shim_launch(strata_shim_kernel kernel, const strata_transfer *transfer, strata_u32 blocks,
                                         strata_u32 threads, strata_u64 seed) {
    gridDim.x = blocks;
    blockDim.x = threads;
    strata_shim_stored = 0;
    std::vector<strata_u32> order(seed != 0 ? (strata_u64)blocks * threads : 0);
    uint64_t state = seed;
    for (strata_u32 index = 0; index < order.size(); ++index) {
        order[index] = index;
        std::swap(order[index], order[strata_shim_random(state) % (index + 1)]);
    }
    for (strata_u64 turn = 0; turn < (strata_u64)blocks * threads; ++turn) {
        const strata_u32 index = seed != 0 ? order[turn] : (strata_u32)turn;
        blockIdx.x = index / threads;
        threadIdx.x = index % threads;
        kernel(*transfer);
    }
    return strata_shim_stored;
}
