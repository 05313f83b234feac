// What the splits of a sequence left, added up in their order: a block per key head and folded row.
#include "splits.cuh"

__device__ __forceinline__ float block_maximum(float value) {
    __shared__ float room[ATTEND_WARPS];
#pragma unroll
    for (int other = WARP / 2; other > 0; other /= 2) value = fmaxf(value, __shfl_xor_sync(FULL_WARP, value, other));
    if (threadIdx.x % WARP == 0) room[threadIdx.x / WARP] = value;
    __syncthreads();
    value = room[0];
    for (int warp = 1; warp < ATTEND_WARPS; ++warp) value = fmaxf(value, room[warp]);
    return value;
}

// Grid: (key heads x folded rows, batch). Groups of dim / 4 threads take every so many splits, and are then added up.
template <typename Number>
__device__ __forceinline__ void combine_splits(const Sequences& of, const Partial& partial, Number* mixed) {
    const int row = static_cast<int>(blockIdx.y), splits = of.splits(row);
    if (splits <= 1) return;
    const int folded = static_cast<int>(blockIdx.x) % of.rows();
    const Piece piece = {row, static_cast<int>(blockIdx.x) / of.rows(), 0};
    const i64 first =
        (static_cast<i64>(row) * of.kv_heads + piece.kv_head) * of.most_splits() * of.rows() + folded;
    float maximum = -INF;
    for (int split = threadIdx.x; split < splits; split += ATTEND_THREADS) {
        maximum = fmaxf(maximum, partial.maxima[first + static_cast<i64>(split) * of.rows()]);
    }
    maximum = block_maximum(maximum);

    const int quads = of.dim / 4, groups = ATTEND_THREADS / quads;
    const int group = static_cast<int>(threadIdx.x) / quads, at = static_cast<int>(threadIdx.x) % quads * 4;
    float4 values = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    float sum = 0.0f;
    for (int split = group; split < splits && group < groups; split += groups) {
        const i64 from = first + static_cast<i64>(split) * of.rows();
        const float weight = weight_against(partial.maxima[from], maximum);
        sum = __fmaf_rn(weight, partial.sums[from], sum);
        values = add_scaled(values, weight, *reinterpret_cast<const float4*>(partial.values + from * of.dim + at));
    }
    __shared__ float4 room[ATTEND_THREADS];
    __shared__ float sums[ATTEND_THREADS];
    room[threadIdx.x] = values, sums[threadIdx.x] = sum;
    __syncthreads();
    if (group > 0) return;
    for (int other = 1; other < groups; ++other) {
        values = add_scaled(values, 1.0f, room[other * quads + threadIdx.x]);
        sum = __fadd_rn(sum, sums[other * quads]);
    }
    write_quad(mixed_at(of, piece, folded, mixed) + at, divide(values, sum));
}

#define COMBINE_SPLITS(SUFFIX, NUMBER)                                                                            \
    extern "C" __global__ void __launch_bounds__(ATTEND_THREADS) combine_splits_##SUFFIX(                         \
        const i64* starts, int batch, int tokens, int group, int kv_heads, int dim, int length,                   \
        float* partial_values, float* partial_maxima, float* partial_sums, NUMBER* mixed                          \
    ) {                                                                                                           \
        const Sequences of = {nullptr, starts, batch, tokens, group, kv_heads, dim, length};                      \
        combine_splits(of, {partial_values, partial_maxima, partial_sums}, mixed);                                \
    }

COMBINE_SPLITS(bf16, Bf16)
COMBINE_SPLITS(fp16, Fp16)
COMBINE_SPLITS(fp32, Fp32)
