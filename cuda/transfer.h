/* The copy loop of all kernels: pages from one layout to another, piece by piece, through registers.
 *
 * Promises: every word of every piece is read once and written once; nothing else is written; the order of threads and
 * blocks does not matter; any number of blocks and threads does the whole work. Word must divide both addresses, all
 * strides and the piece.
 *
 * How threads map to the work: all words of a transfer form one line, [entry][layer][part][word], and the threads of
 * the grid stride over it together. So each access of a warp is contiguous (512 bytes of a piece with 16-byte words),
 * a piece of any size from 4 bytes to 1 MiB and more keeps every thread busy, and what is in flight does not depend on
 * the piece: threads x STRATA_WORDS_IN_FLIGHT x word, 96 KiB a block at 16 bytes. Two blocks have 192 KiB underway;
 * by reckoning, not measurement, a PCIe 5 x16 link holds about 55 GB/s x 2 us = 110 KB, and the rest covers the time in
 * which a thread looks up pages. A warp a piece would have idle lanes below 512 bytes and idle warps where pieces are
 * few. The line is walked by addition with carry (strata_advance): finding the next word costs no division.
 */
#ifndef STRATA_TRANSFER_H
#define STRATA_TRANSFER_H

#include "words.h"

/* Words that a thread reads before it writes the first. With 16-byte words this many, and where they go, fill the 64
 * registers that 1,024 threads leave to each; one more spills. */
#ifndef STRATA_WORDS_IN_FLIGHT
#define STRATA_WORDS_IN_FLIGHT 6
#endif

/* One end of a transfer: memory, where its pieces lie, and its page ids, in the order of the other end's. */
typedef struct strata_side {
    strata_u64 memory; /* address */
    strata_u64 pages;  /* address of `count` page ids of the kernel's index width */
    strata_layout layout;
} strata_side;

/* The one argument of every kernel, passed by value. */
typedef struct strata_transfer {
    strata_side source;
    strata_side destination;
    strata_u32 count;       /* pages */
    strata_u32 parts;       /* parts of a layer */
    strata_u32 layers;      /* layers to move */
    strata_u32 first_layer; /* the first of them */
} strata_transfer;

/* How many values each digit of a place has; the entry is the leading digit and has no bound of its own. */
typedef struct strata_radix {
    strata_u32 words;
    strata_u32 parts;
    strata_u32 layers;
} strata_radix;

/* A word on the line: which page of the transfer, which layer and part, which word of the piece. */
typedef struct strata_place {
    strata_u32 word;
    strata_u32 part;
    strata_u32 layer;
    strata_u32 entry;
} strata_place;

STRATA_DEVICE strata_place strata_place_of(strata_u64 position, strata_radix radix) {
    strata_place place;
    place.word = (strata_u32)(position % radix.words);
    position /= radix.words;
    place.part = (strata_u32)(position % radix.parts);
    position /= radix.parts;
    place.layer = (strata_u32)(position % radix.layers);
    place.entry = (strata_u32)(position / radix.layers);
    return place;
}

STRATA_DEVICE strata_place strata_advance(strata_place place, strata_place step, strata_radix radix) {
    place.word += step.word;
    bool carry = place.word >= radix.words;
    place.word -= carry ? radix.words : 0;
    place.part += step.part + carry;
    carry = place.part >= radix.parts;
    place.part -= carry ? radix.parts : 0;
    place.layer += step.layer + carry;
    carry = place.layer >= radix.layers;
    place.layer -= carry ? radix.layers : 0;
    place.entry += step.entry + carry;
    return place;
}

template <typename Word, typename Index>
STRATA_DEVICE Word *strata_find(const strata_side &side, strata_u32 first_layer, strata_place place) {
    const Index page = STRATA_READ_SHARED((const Index *)side.pages + place.entry);
    const strata_u64 piece = strata_offset(side.layout, first_layer + place.layer, place.part, (strata_u32)page);
    return (Word *)(side.memory + piece) + place.word;
}

/* Move the thread's next STRATA_WORDS_IN_FLIGHT words, `left` at most, and leave `place` behind them. All are read
 * before one is written: a write waits for its word, and the reads behind it would wait too. */
template <typename Word, typename Index>
STRATA_DEVICE void strata_move_batch(const strata_transfer &transfer, strata_radix radix, strata_place step,
                                     strata_place &place, strata_u32 left) {
    Word *to[STRATA_WORDS_IN_FLIGHT];
    Word words[STRATA_WORDS_IN_FLIGHT];
#pragma unroll
    for (strata_u32 slot = 0; slot < STRATA_WORDS_IN_FLIGHT; ++slot) {
        if (slot < left) {
            words[slot] = STRATA_READ_ONCE((strata_find<Word, Index>(transfer.source, transfer.first_layer, place)));
            to[slot] = strata_find<Word, Index>(transfer.destination, transfer.first_layer, place);
        }
        place = strata_advance(place, step, radix);
    }
#pragma unroll
    for (strata_u32 slot = 0; slot < STRATA_WORDS_IN_FLIGHT; ++slot)
        if (slot < left)
            STRATA_WRITE_ONCE(to[slot], words[slot]);
}

template <typename Word, typename Index>
STRATA_DEVICE void strata_move(const strata_transfer &transfer, strata_u32 layers) {
    const strata_radix radix = {(strata_u32)(transfer.source.layout.piece_bytes / sizeof(Word)), transfer.parts, layers};
    const strata_u64 total = (strata_u64)transfer.count * radix.layers * radix.parts * radix.words;
    const strata_u64 threads = (strata_u64)gridDim.x * blockDim.x;
    const strata_u64 thread = (strata_u64)blockIdx.x * blockDim.x + threadIdx.x;
    if (thread >= total)
        return;
    const strata_place step = strata_place_of(threads, radix);
    strata_place place = strata_place_of(thread, radix);
    /* Words that are this thread's: whole batches need no test of each word, the last one may be short. */
    strata_u64 left = (total - thread - 1) / threads + 1;
    for (; left >= STRATA_WORDS_IN_FLIGHT; left -= STRATA_WORDS_IN_FLIGHT)
        strata_move_batch<Word, Index>(transfer, radix, step, place, STRATA_WORDS_IN_FLIGHT);
    strata_move_batch<Word, Index>(transfer, radix, step, place, (strata_u32)left);
}

#endif
