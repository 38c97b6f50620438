/* The kernels: load one layer, load all layers, back up all layers; for each width of words and of page ids.
 *
 * NVRTC, nvcc, hipcc and, with -x c++, any C++ compiler take this file. Launch with as many blocks as the transfer may
 * occupy processors and STRATA_THREADS threads a block; python/strata/device/kernels.py has names and arguments.
 * The three do the same to two sides. They are three so that a profile tells them apart and load_layer knows that its
 * layers are one.
 */
#include "transfer.h"

#define STRATA_THREADS 1024
#define STRATA_KERNEL extern "C" __global__ void __launch_bounds__(STRATA_THREADS)

#define STRATA_KERNELS(word_bytes, index_bits)                                                                         \
    STRATA_KERNEL strata_load_layer_w##word_bytes##_i##index_bits(strata_transfer transfer) {                          \
        strata_move<strata_word##word_bytes, strata_u##index_bits>(transfer, 1);                                       \
    }                                                                                                                  \
    STRATA_KERNEL strata_load_all_w##word_bytes##_i##index_bits(strata_transfer transfer) {                            \
        strata_move<strata_word##word_bytes, strata_u##index_bits>(transfer, transfer.layers);                         \
    }                                                                                                                  \
    STRATA_KERNEL strata_back_up_all_w##word_bytes##_i##index_bits(strata_transfer transfer) {                         \
        strata_move<strata_word##word_bytes, strata_u##index_bits>(transfer, transfer.layers);                         \
    }

STRATA_KERNELS(16, 32)
STRATA_KERNELS(16, 64)
STRATA_KERNELS(8, 32)
STRATA_KERNELS(8, 64)
STRATA_KERNELS(4, 32)
STRATA_KERNELS(4, 64)
