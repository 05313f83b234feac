// Attention of float32, and of head dimensions that attention.cu does not take: any multiple of 16 up to 256. A thread
// scores whole keys; then it takes one number of the head, of every value or of some.
#include "splits.cuh"

constexpr int MOST_DIM = 256;

// The block's room: queries [ROW_TILE, dim], later the sums of each part of the positions [., ROW_TILE, dim]; scores
// and then weights [ROW_TILE, SPLIT].
constexpr int QUERIES = 0, SCORES = ROW_TILE * MOST_DIM;
static_assert(SCORES + ROW_TILE * SPLIT <= ROOM);

template <typename Number>
__device__ __forceinline__ void read_queries(
    const Sequences& of, const Piece& piece, int first_row, const Number* queries
) {
    float* room = shared_room() + QUERIES;
    const int runs = of.dim / RUN;
    for (int item = threadIdx.x; item < ROW_TILE * runs; item += ATTEND_THREADS) {
        const int folded = first_row + item / runs, at = item % runs * RUN;
        float run[RUN] = {};
        if (folded < of.rows()) read_run(mixed_at(of, piece, folded, queries) + at, run);
#pragma unroll
        for (int place = 0; place < RUN; ++place) room[item / runs * of.dim + at + place] = run[place];
    }
}

// keys: of the split's positions, `apart` numbers from one to the next.
template <typename Number>
__device__ __forceinline__ void score(const Number* keys, i64 apart, int dim, int count, float scale) {
    const float* queries = shared_room() + QUERIES;
    for (int position = threadIdx.x; position < count; position += ATTEND_THREADS) {
        float scores[ROW_TILE] = {};
#pragma unroll 1
        for (int at = 0; at < dim; at += RUN) {
            float key[RUN];
            read_run(keys + position * apart + at, key);
#pragma unroll
            for (int row = 0; row < ROW_TILE; ++row) {
                float query[RUN];
                read_run(reinterpret_cast<const Fp32*>(queries + row * dim + at), query);
#pragma unroll
                for (int place = 0; place < RUN; ++place) {
                    scores[row] = __fmaf_rn(query[place], key[place], scores[row]);
                }
            }
        }
#pragma unroll
        for (int row = 0; row < ROW_TILE; ++row) {
            shared_room()[SCORES + row * SPLIT + position] = __fmul_rn(scores[row], scale);
        }
    }
}

// Scores to weights, a warp per row; 0 for what the row does not see. `seen`: how many of the split's positions the
// first token sees; each `group` rows further it is one more.
__device__ __forceinline__ void weigh(int first_row, int group, i64 seen, int count) {
    const int lane = threadIdx.x % WARP;
#pragma unroll 1
    for (int row = threadIdx.x / WARP; row < ROW_TILE; row += ATTEND_WARPS) {
        float* scores = shared_room() + SCORES + row * SPLIT;
        const int own = static_cast<int>(min(seen + (first_row + row) / group, static_cast<i64>(count)));
        float maximum = -INF, sum = 0.0f;
        for (int position = lane; position < own; position += WARP) maximum = fmaxf(maximum, scores[position]);
#pragma unroll
        for (int other = WARP / 2; other > 0; other /= 2) {
            maximum = fmaxf(maximum, __shfl_xor_sync(FULL_WARP, maximum, other));
        }
        for (int position = lane; position < count; position += WARP) {
            const float weight = position < own ? weight_against(scores[position], maximum) : 0.0f;
            scores[position] = weight;
            sum = __fadd_rn(sum, weight);
        }
        sum = sum_by_halves(sum);
        for (int part = lane; part < ATTEND_THREADS / ROW_TILE; part += WARP) {  // the first part has it all
            shared_statistics()[part * ROW_TILE + row] = {maximum, part == 0 ? sum : 0.0f};
        }
    }
}

// Part p of the sums takes positions p, p + parts, ...
template <typename Number>
__device__ __forceinline__ void mix(const Number* values, i64 apart, int dim, int count, int parts) {
    const float* weights = shared_room() + SCORES;
    for (int item = threadIdx.x; item < parts * dim; item += ATTEND_THREADS) {
        const int part = item / dim, at = item % dim;
        float mixed[ROW_TILE] = {};
#pragma unroll 4
        for (int position = part; position < count; position += parts) {
            const float value = Reader<Number>::one(values + position * apart, at);
#pragma unroll
            for (int row = 0; row < ROW_TILE; ++row) {
                mixed[row] = __fmaf_rn(weights[row * SPLIT + position], value, mixed[row]);
            }
        }
#pragma unroll
        for (int row = 0; row < ROW_TILE; ++row) {
            shared_room()[QUERIES + (part * ROW_TILE + row) * dim + at] = mixed[row];
        }
    }
}

// As `attend` of attention.cu, of `of.dim` numbers per head.
template <typename Number>
__device__ __forceinline__ void attend_by_fma(
    const Number* __restrict__ queries, const Number* __restrict__ keys, const Number* __restrict__ values,
    const Sequences& of, float scale, const Partial& partial, Number* mixed
) {
    const i64 apart = static_cast<i64>(of.kv_heads) * of.dim;
    const int parts = max(1, ATTEND_THREADS / of.dim);
    Piece piece;
#pragma unroll 1
    for (int index = blockIdx.x; find_piece(of, index, piece); index += gridDim.x) {
        const int first = piece.split * SPLIT, count = min(SPLIT, of.positions(piece.row) - first);
        const i64 place = (of.slots[piece.row] * of.length + first) * apart + piece.kv_head * of.dim;
#pragma unroll 1
        for (int first_row = 0; first_row < of.rows(); first_row += ROW_TILE) {
            read_queries(of, piece, first_row, queries);
            __syncthreads();
            score(keys + place, apart, of.dim, count, scale);
            __syncthreads();
            weigh(first_row, of.group, of.starts[piece.row] + 1 - first, count);
            __syncthreads();
            mix(values + place, apart, of.dim, count, parts);
            __syncthreads();
            write_split(of, piece, first_row, 1, parts, of.dim, partial, mixed);
            __syncthreads();
        }
    }
}

#define ATTEND_BY_FMA(SUFFIX, NUMBER)                                                                             \
    extern "C" __global__ void __launch_bounds__(ATTEND_THREADS) attend_by_fma_##SUFFIX(                          \
        const NUMBER* queries, const NUMBER* keys, const NUMBER* values, const i64* slots, const i64* starts,     \
        int batch, int tokens, int group, int kv_heads, int dim, int length, int, float scale,                    \
        float* partial_values, float* partial_maxima, float* partial_sums, NUMBER* mixed                          \
    ) {                                                                                                           \
        const Sequences of = {slots, starts, batch, tokens, group, kv_heads, dim, length};                        \
        const Partial partial = {partial_values, partial_maxima, partial_sums};                                   \
        attend_by_fma(queries, keys, values, of, scale, partial, mixed);                                          \
    }

ATTEND_BY_FMA(bf16, Bf16)
ATTEND_BY_FMA(fp16, Fp16)
ATTEND_BY_FMA(fp32, Fp32)
