// Attention in pieces: SPLIT positions of a sequence for one key head and all query heads and tokens that share it,
// folded into rows, row = token x group + head within the group. What a split holds follows from positions alone, and
// splits are added up in their order, so that a sequence's bits depend neither on the batch nor on the grid.
#pragma once
#include "numbers.cuh"

constexpr int SPLIT = 256;
constexpr int ATTEND_WARPS = 4;
constexpr int ATTEND_THREADS = ATTEND_WARPS * WARP;
constexpr int ROW_TILE = 16;  // folded rows that one warp takes at a time
constexpr int ROOM = ATTEND_WARPS * ROW_TILE * 132;  // floats of a block's shared memory

// B rows of T tokens that continue the sequences in their slots.
struct Sequences {
    const i64* slots;   // [batch]
    const i64* starts;  // [batch]
    int batch, tokens, group, kv_heads, dim, length;  // group: query heads of a key head

    __device__ __forceinline__ int rows() const { return tokens * group; }
    __device__ __forceinline__ int most_splits() const { return (length + SPLIT - 1) / SPLIT; }
    __device__ __forceinline__ int positions(int row) const {
        const i64 end = starts[row] + tokens;
        return static_cast<int>(end < 0 ? 0 : end < length ? end : length);
    }
    __device__ __forceinline__ int splits(int row) const { return (positions(row) + SPLIT - 1) / SPLIT; }
};

// What splits leave of each folded row: the sum of weight x value, not yet divided by that of the weights, which are
// powers of two of score minus maximum. At ((row x kv_heads + kv_head) x most_splits + split) x rows + folded row.
struct Partial {
    float* values;  // [., dim]
    float* maxima;  // [.]
    float* sums;    // [.]
};

struct Piece { int row, kv_head, split; };

// Piece `index` of all that the batch has, counted sequence by sequence; false where there are fewer. By whole warps.
__device__ __forceinline__ bool find_piece(const Sequences& of, int index, Piece& piece) {
    const int lane = threadIdx.x % WARP;
    for (int first = 0; first < of.batch; first += WARP) {
        const int own = first + lane < of.batch ? of.splits(first + lane) * of.kv_heads : 0;
        int sum = own;
#pragma unroll
        for (int apart = 1; apart < WARP; apart *= 2) {
            const int before = __shfl_up_sync(FULL_WARP, sum, apart);
            if (lane >= apart) sum += before;
        }
        const int all = __shfl_sync(FULL_WARP, sum, WARP - 1);
        if (index < all) {
            const int found = __ffs(__ballot_sync(FULL_WARP, sum > index)) - 1;
            const int inside = index - __shfl_sync(FULL_WARP, sum - own, found);
            piece = {first + found, inside % of.kv_heads, inside / of.kv_heads};
            return true;
        }
        index -= all;
    }
    return false;
}

#ifdef DRIFTGUARD_SIMT
__device__ __forceinline__ float fast_power_of_two(float power) {
    return power != power ? power : power < LEAST_POWER ? 0.0f : power_of_two(power);
}
#else
__device__ __forceinline__ float fast_power_of_two(float power) {
    float result;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(power));
    return result;
}
#endif

// 0 for a score of -inf; `maximum` is no less than the score.
__device__ __forceinline__ float weight_against(float score, float maximum) {
    return fast_power_of_two(__fsub_rn(score, maximum == -INF ? 0.0f : maximum));
}

// Shared by every kernel of a program, each of which uses it alone.
__device__ __forceinline__ float* shared_room() {
    __shared__ __align__(16) float room[ROOM];
    return room;
}
struct RowStatistics { float maximum, sum; };
__device__ __forceinline__ RowStatistics* shared_statistics() {
    __shared__ RowStatistics statistics[ATTEND_THREADS];
    return statistics;
}

__device__ __forceinline__ void write_quad(Fp32* to, float4 quad) { *reinterpret_cast<float4*>(to) = quad; }
template <typename Number> __device__ __forceinline__ void write_quad(Number* to, float4 quad) {
    typedef Rounding<Number> R;
    *reinterpret_cast<uint2*>(to) = make_uint2(R::pair(quad.x, quad.y), R::pair(quad.z, quad.w));
}

__device__ __forceinline__ float4 add_scaled(float4 sum, float scale, float4 quad) {
    return make_float4(
        __fmaf_rn(scale, quad.x, sum.x), __fmaf_rn(scale, quad.y, sum.y), __fmaf_rn(scale, quad.z, sum.z),
        __fmaf_rn(scale, quad.w, sum.w)
    );
}

__device__ __forceinline__ float4 divide(float4 quad, float by) {
    return make_float4(__fdiv_rn(quad.x, by), __fdiv_rn(quad.y, by), __fdiv_rn(quad.z, by), __fdiv_rn(quad.w, by));
}

template <typename Number>
__device__ __forceinline__ Number* mixed_at(const Sequences& of, const Piece& piece, int folded, Number* mixed) {
    const int token = folded / of.group, head = piece.kv_head * of.group + folded % of.group;
    return mixed + ((static_cast<i64>(piece.row) * of.tokens + token) * of.group * of.kv_heads + head) * of.dim;
}

// Adds up what `parts` parts of the split's positions left in the room for `tiles` tiles of folded rows from
// first_row on: part p of tile t at ((p x tiles + t) x ROW_TILE + i) x stride. Into the partial, or where the
// split is the sequence's only one, into mixed. By the whole block, after a barrier.
template <typename Number>
__device__ __forceinline__ void write_split(
    const Sequences& of, const Piece& piece, int first_row, int tiles, int parts, int stride, const Partial& partial,
    Number* mixed
) {
    const float* room = shared_room();
    const RowStatistics* statistics = shared_statistics();
    const int quads = of.dim / 4, rows = tiles * ROW_TILE;
    const bool only = of.splits(piece.row) == 1;
    const i64 place =
        ((static_cast<i64>(piece.row) * of.kv_heads + piece.kv_head) * of.most_splits() + piece.split) * of.rows();
    for (int item = threadIdx.x; item < rows * quads; item += ATTEND_THREADS) {
        const int in_tiles = item / quads, at = item % quads * 4, folded = first_row + in_tiles;
        if (folded >= of.rows()) continue;
        float maximum = -INF, sum = 0.0f;
        for (int part = 0; part < parts; ++part) maximum = fmaxf(maximum, statistics[part * rows + in_tiles].maximum);
        float4 values = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        for (int part = 0; part < parts; ++part) {
            const int from = part * rows + in_tiles;
            const float weight = weight_against(statistics[from].maximum, maximum);
            sum = __fmaf_rn(weight, statistics[from].sum, sum);
            values = add_scaled(values, weight, *reinterpret_cast<const float4*>(room + from * stride + at));
        }
        if (only) {
            write_quad(mixed_at(of, piece, folded, mixed) + at, divide(values, sum));
        } else {
            *reinterpret_cast<float4*>(partial.values + (place + folded) * of.dim + at) = values;
            if (at == 0) partial.maxima[place + folded] = maximum, partial.sums[place + folded] = sum;
        }
    }
}
