// K1: one pass over every row of logits. A warp takes one tile, holds it in registers (float32 does not fit, and is read
// twice), and leaves its maximum, the sum of its weights against that maximum, and what each lane added to that. Whoever
// reads the row adds the tiles up (`law.cuh`): to find out here which warp is the row's last would take a fifth of the
// time.
#include "early.cuh"
#include "maxima.cuh"

struct TileStatistics { float maximum, lane_maximum, sum, lane_sum; };

// A run's weights, added to a lane's sums. NEAR: no logit is as far below the peak as `least_difference`.
template <bool NEAR, typename Logit>
__device__ __forceinline__ void add_weights(
    const typename Reader<Logit>::Raw& raw, float peak, float scale, bool first, float (&sums)[RUN]
) {
    float logits[RUN];
    Reader<Logit>::unpack(raw, logits);
#pragma unroll
    for (int place = 0; place < RUN; ++place) {
        const float weight = NEAR ? weight_at(__fsub_rn(logits[place], peak), scale)
                                  : weight_of(logits[place], peak, scale);
        sums[place] = first ? weight : __fadd_rn(sums[place], weight);
    }
}

// `scale` 0: greedy, which needs no sum. FULL: the row starts on 16 bytes and fills the tile, so that nothing stands
// between the loads, and all of them are under way before the first is used.
template <bool FULL, typename Logit>
__device__ __forceinline__ TileStatistics tile_statistics(const Logit* row, int size, int tile, float scale) {
    typedef typename Reader<Logit>::Raw Raw;
    constexpr bool KEPT = sizeof(Raw) <= 16;  // float32 would take all registers
    constexpr int UNROLLED = KEPT ? CHUNKS : 4;
    const int first = tile * TILE + static_cast<int>(threadIdx.x % WARP) * RUN;
    const bool whole = FULL || starts_on_16_bytes(row);
    Raw kept[KEPT ? CHUNKS : 1];
    Extremes<Logit> extremes;
#pragma unroll UNROLLED
    for (int chunk = 0; chunk < CHUNKS; ++chunk) {
        const int at = first + chunk * CHUNK;
        if (FULL || at < size) {
            Raw& raw = kept[KEPT ? chunk : 0];
            raw = Reader<Logit>::read(row, at, FULL ? at + RUN : size, whole);
            if (!KEPT) extremes.take(raw);
        }
    }
    // Not in the loop above, where each maximum would hold up the loads behind it.
#pragma unroll
    for (int chunk = 0; chunk < (KEPT ? CHUNKS : 0); ++chunk) {
        if (FULL || first + chunk * CHUNK < size) extremes.take(kept[chunk]);
    }
    const float lane_maximum = extremes.largest();
    const float maximum = warp_max_or_nan(lane_maximum);
    if (scale == 0.0f) return {maximum, lane_maximum, 0.0f, 0.0f};

    const float peak = maximum == -INF ? 0.0f : maximum;
    const bool near = __fsub_rn(extremes.smallest(), peak) >= least_difference(scale);
    float sums[RUN] = {};
    if (FULL && KEPT && __all_sync(FULL_WARP, near)) {
#pragma unroll
        for (int chunk = 0; chunk < CHUNKS; ++chunk) {
            add_weights<true, Logit>(kept[KEPT ? chunk : 0], peak, scale, chunk == 0, sums);
        }
    } else {
#pragma unroll UNROLLED
        for (int chunk = 0; chunk < CHUNKS; ++chunk) {
            const int at = first + chunk * CHUNK;
            if (FULL || at < size) {
                if (!KEPT) kept[0] = Reader<Logit>::read(row, at, FULL ? at + RUN : size, whole);
                add_weights<false, Logit>(kept[KEPT ? chunk : 0], peak, scale, KEPT && chunk == 0, sums);
            }
        }
    }
    const float of_lane = lane_sum(sums);
    return {maximum, lane_maximum, sum_by_halves(of_lane), of_lane};
}

// Grid: (batch, steps, tiles) blocks of one warp. Two or four in a block take 5% less for a hundred rows or more, and 10%
// longer for a few dozen.
//
// logits [batch, steps, size], rows `row_stride` elements apart; lengths [batch] or null: only rows up to
// lengths[b] are read. scales [batch], top_k [batch], top_p [batch]. Laws are written at row
// b x law_stride + law_offset + s: tile_maxima, tile_sums [., tiles], cuts, cut_tokens [.], for a row of which all tokens
// stay; lane_sums [., tiles x 32], not of greedy rows; lane_maxima [., tiles x 32] only where top-k or top-p may take
// tokens away.
template <typename Logit>
__device__ __forceinline__ void row_statistics(
    const Logit* __restrict__ logits, i64 row_stride, int steps, int size, const int* __restrict__ lengths,
    const float* __restrict__ scales, const int* __restrict__ top_k, const float* __restrict__ top_p, int law_stride,
    int law_offset, float* tile_maxima, float* tile_sums, float* lane_sums, float* lane_maxima, float* cuts,
    int* cut_tokens
) {
    let_the_next_kernel_begin();
    const int tiles = static_cast<int>(gridDim.z), tile = static_cast<int>(blockIdx.z);
    const int lane = static_cast<int>(threadIdx.x);
    const int step = static_cast<int>(blockIdx.y), request = static_cast<int>(blockIdx.x);
    if (lengths != nullptr && step > lengths[request]) return;
    const u32 law = request * law_stride + law_offset + step;
    const float scale = scales[request];

    const Logit* at = logits + (static_cast<i64>(request) * steps + step) * row_stride;
    const bool full = starts_on_16_bytes(at) && (tile + 1) * TILE <= size;
    const TileStatistics found = full ? tile_statistics<true>(at, size, tile, scale)
                                      : tile_statistics<false>(at, size, tile, scale);
    const bool narrows = scale != 0.0f && ((top_k[request] > 0 && top_k[request] < size) || top_p[request] < 1.0f);
    const u32 place = law * tiles + tile;  // a device holds far fewer than 2 ** 27 tiles
    if (narrows) lane_maxima[place * WARP + lane] = found.lane_maximum;
    if (scale != 0.0f) lane_sums[place * WARP + lane] = found.lane_sum;
    if (lane == 0) {
        tile_maxima[place] = found.maximum;
        tile_sums[place] = found.sum;
        if (tile == 0) cuts[law] = -INF, cut_tokens[law] = -1;
    }
}

#define ROW_STATISTICS(NAME, LOGIT)                                                                               \
    extern "C" __global__ void __launch_bounds__(WARP, 32) NAME(                                                  \
        const LOGIT* logits, i64 row_stride, int steps, int size, const int* lengths,                             \
        const float* scales, const int* top_k, const float* top_p, int law_stride, int law_offset,                \
        float* tile_maxima, float* tile_sums, float* lane_sums, float* lane_maxima, float* cuts, int* cut_tokens  \
    ) {                                                                                                           \
        row_statistics(                                                                                           \
            logits, row_stride, steps, size, lengths, scales, top_k, top_p, law_stride, law_offset,               \
            tile_maxima, tile_sums, lane_sums, lane_maxima, cuts, cut_tokens                                      \
        );                                                                                                        \
    }

ROW_STATISTICS(row_statistics_bf16, Bf16)
ROW_STATISTICS(row_statistics_fp16, Fp16)
ROW_STATISTICS(row_statistics_fp32, Fp32)
