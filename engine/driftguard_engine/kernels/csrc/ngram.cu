// Drafts without a model (`ngram.reference`): what followed the same few tokens earlier in the sequence. A block per row.
#include "arithmetic.cuh"

constexpr int LOOKUP_THREADS = 512;
constexpr int LOOKUP_WARPS = LOOKUP_THREADS / WARP;

// How many tokens before `end` equal those before `length`, one by one backwards: at most `most`, all before `end`.
template <typename Id> __device__ __forceinline__ int tokens_equal(const Id* row, int end, int length, int most) {
    int equal = 0;
    while (equal < most && equal < end && row[end - 1 - equal] == row[length - 1 - equal]) ++equal;
    return equal;
}

// The largest over the block, the same in every thread.
__device__ __forceinline__ u64 block_max(u64 value, u64* of_warps) {
#pragma unroll
    for (int other = WARP / 2; other > 0; other /= 2) {
        const u64 theirs = __shfl_xor_sync(FULL_WARP, value, other);
        value = theirs > value ? theirs : value;
    }
    if (threadIdx.x % WARP == 0) of_warps[threadIdx.x / WARP] = value;
    __syncthreads();
#pragma unroll
    for (int warp = 0; warp < LOOKUP_WARPS; ++warp) value = of_warps[warp] > value ? of_warps[warp] : value;
    return value;
}

// Grid: batch blocks of LOOKUP_THREADS threads.
//
// token_ids [slots, .], rows `row_stride` elements apart; slots [batch]: the row of each sequence, lengths [batch]. An
// earlier match of the last n tokens, min_tokens <= n <= max_tokens, ends at `end` < length; the largest n counts, then
// the last end. Writes draft_tokens [batch, drafts], what followed it and, past the sequence's end, follows again; -1
// where nothing matches.
template <typename Id>
__device__ __forceinline__ void look_up(
    const Id* __restrict__ token_ids, i64 row_stride, const i64* __restrict__ slots, const i64* __restrict__ lengths,
    int min_tokens, int max_tokens, int drafts, i64* draft_tokens
) {
    __shared__ u64 of_warps[LOOKUP_WARPS];
    const i64 request = blockIdx.x;
    const Id* row = token_ids + slots[request] * row_stride;
    const int length = static_cast<int>(lengths[request]);
    u64 best = 0;  // tokens that are equal, then the end
    for (int end = 1 + static_cast<int>(threadIdx.x); end < length; end += LOOKUP_THREADS) {
        const int equal = tokens_equal(row, end, length, max_tokens);
        const u64 here = static_cast<u64>(equal) << 32 | static_cast<u32>(end);
        if (equal >= min_tokens && here > best) best = here;
    }
    best = block_max(best, of_warps);
    const int end = static_cast<int>(best & 0xffffffffu), period = length - end;
    for (int step = threadIdx.x; step < drafts; step += LOOKUP_THREADS) {
        draft_tokens[request * drafts + step] = best != 0 ? static_cast<i64>(row[end + step % period]) : -1;
    }
}

#define LOOK_UP(SUFFIX, ID)                                                                                       \
    extern "C" __global__ void __launch_bounds__(LOOKUP_THREADS) look_up_ngrams_##SUFFIX(                         \
        const ID* token_ids, i64 row_stride, const i64* slots, const i64* lengths, int min_tokens,                \
        int max_tokens, int drafts, i64* draft_tokens                                                             \
    ) {                                                                                                           \
        look_up(token_ids, row_stride, slots, lengths, min_tokens, max_tokens, drafts, draft_tokens);             \
    }

LOOK_UP(int32, int)
LOOK_UP(int64, i64)
