// What surrounds the matrix products of a layer: ../layers.py, rounded where torch rounds. Rows of activations follow
// one another without gaps, start on 16 bytes and are a multiple of 8 numbers long.
#include "numbers.cuh"
#include "silu.cuh"

constexpr int GATE_THREADS = 256;

// 1 / root of (sum of squares / size + epsilon).
__device__ __forceinline__ float root_mean_square_reciprocal(float squares, int size, float epsilon) {
    return __frcp_rn(__fsqrt_rn(__fadd_rn(__fdiv_rn(squares, static_cast<float>(size)), epsilon)));
}

__device__ __forceinline__ float sum_of_squares(const float (&run)[RUN], float sum) {
#pragma unroll
    for (int place = 0; place < RUN; ++place) sum = __fmaf_rn(run[place], run[place], sum);
    return sum;
}

// run x scale x weight, both products rounded.
template <typename Number>
__device__ __forceinline__ void scale_run(float (&run)[RUN], float scale, const float (&weight)[RUN]) {
#pragma unroll
    for (int place = 0; place < RUN; ++place) run[place] = __fmul_rn(run[place], scale);
    round_run<Number>(run);
#pragma unroll
    for (int place = 0; place < RUN; ++place) run[place] = __fmul_rn(run[place], weight[place]);
    round_run<Number>(run);
}

// Sum over the block, the same bits in every thread.
__device__ __forceinline__ float block_sum(float value) {
    __shared__ float sums[WARP];
    const int lane = threadIdx.x % WARP;
    const float own = sum_by_halves(value);
    if (lane == 0) sums[threadIdx.x / WARP] = own;
    __syncthreads();
    return sum_by_halves(lane < static_cast<int>(blockDim.x) / WARP ? sums[lane] : 0.0f);
}

// A block of whole warps per row. x, added [rows, hidden] or added null: nothing is added. Writes total = x + added
// (which may be x itself; not written where nothing is added) and normed. weight [hidden].
template <typename Number>
__device__ __forceinline__ void add_and_norm(
    const Number* x, const Number* added, const Number* weight, float epsilon, int hidden, Number* total,
    Number* normed
) {
    const i64 row = static_cast<i64>(blockIdx.x) * hidden;
    const int first = static_cast<int>(threadIdx.x) * RUN, apart = static_cast<int>(blockDim.x) * RUN;
    float kept[RUN] = {}, weights[RUN] = {};  // most rows are one run per thread: nothing is read twice
    float squares = 0.0f;
    if (first < hidden) read_run(weight + first, weights);
    for (int at = first; at < hidden; at += apart) {
        float run[RUN];
        read_run(x + row + at, run);
        if (added != nullptr) {
            float other[RUN];
            read_run(added + row + at, other);
#pragma unroll
            for (int place = 0; place < RUN; ++place) run[place] = __fadd_rn(run[place], other[place]);
            round_run<Number>(run);
            write_run(total + row + at, run);
        }
        squares = sum_of_squares(run, squares);
        if (at == first) {
#pragma unroll
            for (int place = 0; place < RUN; ++place) kept[place] = run[place];
        }
    }
    const float scale = root_mean_square_reciprocal(block_sum(squares), hidden, epsilon);
    if (first < hidden) {
        scale_run<Number>(kept, scale, weights);
        write_run(normed + row + first, kept);
    }
    const Number* sums = added != nullptr ? total : x;
    for (int at = first + apart; at < hidden; at += apart) {
        float run[RUN];
        read_run(sums + row + at, run);
        read_run(weight + at, weights);
        scale_run<Number>(run, scale, weights);
        write_run(normed + row + at, run);
    }
}

// run x cos + other x sin, each operation rounded.
template <typename Number>
__device__ __forceinline__ void turn_run(
    const float (&run)[RUN], const float (&other)[RUN], const Number* cos, const Number* sin, float (&turned)[RUN]
) {
    float factor[RUN];
    read_run(sin, factor);
#pragma unroll
    for (int place = 0; place < RUN; ++place) factor[place] = __fmul_rn(other[place], factor[place]);
    round_run<Number>(factor);
    read_run(cos, turned);
#pragma unroll
    for (int place = 0; place < RUN; ++place) turned[place] = __fmul_rn(run[place], turned[place]);
    round_run<Number>(turned);
#pragma unroll
    for (int place = 0; place < RUN; ++place) turned[place] = __fadd_rn(turned[place], factor[place]);
}

// Grid: (batch x tokens, any number of blocks that hold (heads + 2 kv_heads) x lanes_per_head threads together). A
// thread takes a run of a head and the run half a head further. lanes_per_head: a power of two, at least dim / 16.
//
// qkv [batch x tokens, (heads + 2 kv_heads) x dim]; head_weight [heads + kv_heads, dim] or null; slots, starts [batch];
// cos, sin [positions, dim]; keys, values [slots x length, kv_heads, dim]; queries [batch x tokens, heads, dim].
// What would lie outside of its slot, or past the tables, is not stored.
template <typename Number>
__device__ __forceinline__ void turn_and_store(
    const Number* __restrict__ qkv, int tokens, int heads, int kv_heads, int dim, int lanes_per_head,
    const Number* __restrict__ head_weight, float epsilon, const i64* __restrict__ slots,
    const i64* __restrict__ starts, const Number* __restrict__ cos, const Number* __restrict__ sin, int positions,
    int length, Number* keys, Number* values, Number* queries
) {
    const int half = dim / 2, all = heads + 2 * kv_heads, turning = heads + kv_heads;
    const int item = static_cast<int>(blockIdx.y * blockDim.x + threadIdx.x);
    const int head = item / lanes_per_head, at = item % lanes_per_head * RUN;
    const bool mine = head < all && at < half;
    const int token = static_cast<int>(blockIdx.x), row = token / tokens;
    const i64 position = starts[row] + token % tokens;
    const bool stored = position >= 0 && position < length && position < positions;
    float low[RUN] = {}, high[RUN] = {};
    if (mine) {
        const Number* from = qkv + (static_cast<i64>(token) * all + head) * dim + at;
        read_run(from, low);
        read_run(from + half, high);
    }
    if (head_weight != nullptr) {  // of the whole grid, so that whole warps shuffle
        float squares = sum_of_squares(high, sum_of_squares(low, 0.0f));
        for (int other = lanes_per_head / 2; other > 0; other /= 2) {
            squares = __fadd_rn(squares, __shfl_xor_sync(FULL_WARP, squares, other));
        }
        if (mine && head < turning) {
            const float scale = root_mean_square_reciprocal(squares, dim, epsilon);
            float weight[RUN];
            read_run(head_weight + head * dim + at, weight);
            scale_run<Number>(low, scale, weight);
            read_run(head_weight + head * dim + at + half, weight);
            scale_run<Number>(high, scale, weight);
        }
    }
    if (!mine || (head >= heads && !stored)) return;
    const i64 place = (slots[row] * length + position) * kv_heads;
    if (head >= turning) {
        Number* to = values + (place + head - turning) * dim + at;
        write_run(to, low);
        write_run(to + half, high);
        return;
    }
    const i64 angle = (stored ? position : 0) * dim + at;
    float turned_low[RUN], turned_high[RUN];
    turn_run(low, high, cos + angle, sin + angle, turned_low);
    turn_run(high, low, cos + angle + half, sin + angle + half, turned_high);
    Number* to = head < heads ? queries + (static_cast<i64>(token) * heads + head) * dim + at
                              : keys + (place + head - heads) * dim + at;
    write_run(to, turned_low);
    write_run(to + half, turned_high);
}

// gate_up [rows, 2 x size] -> gated [rows, size]; a thread for eight numbers.
template <typename Number>
__device__ __forceinline__ void gate(const Number* __restrict__ gate_up, int rows, int size, Number* gated) {
    const u32 item = blockIdx.x * GATE_THREADS + threadIdx.x, runs = static_cast<u32>(size) / RUN;
    const u32 row = item / runs;
    if (row >= static_cast<u32>(rows)) return;
    const int at = static_cast<int>(item % runs) * RUN;
    const Number* from = gate_up + static_cast<i64>(row) * 2 * size + at;
    float first[RUN], second[RUN];
    read_run(from, first);
    read_run(from + size, second);
#pragma unroll
    for (int place = 0; place < RUN; ++place) first[place] = silu(first[place]);
    round_run<Number>(first);
#pragma unroll
    for (int place = 0; place < RUN; ++place) first[place] = __fmul_rn(first[place], second[place]);
    write_run(gated + static_cast<i64>(row) * size + at, first);
}

#define LAYER_KERNELS(SUFFIX, NUMBER)                                                                             \
    extern "C" __global__ void __launch_bounds__(1024) add_and_norm_##SUFFIX(                                     \
        const NUMBER* x, const NUMBER* added, const NUMBER* weight, float epsilon, int hidden, NUMBER* total,     \
        NUMBER* normed                                                                                            \
    ) {                                                                                                           \
        add_and_norm(x, added, weight, epsilon, hidden, total, normed);                                           \
    }                                                                                                             \
    extern "C" __global__ void __launch_bounds__(128) turn_and_store_##SUFFIX(                                    \
        const NUMBER* qkv, int tokens, int heads, int kv_heads, int dim, int lanes_per_head,                      \
        const NUMBER* head_weight, float epsilon, const i64* slots, const i64* starts, const NUMBER* cos,         \
        const NUMBER* sin, int positions, int length, NUMBER* keys, NUMBER* values, NUMBER* queries               \
    ) {                                                                                                           \
        turn_and_store(                                                                                           \
            qkv, tokens, heads, kv_heads, dim, lanes_per_head, head_weight, epsilon, slots, starts, cos, sin,     \
            positions, length, keys, values, queries                                                              \
        );                                                                                                        \
    }                                                                                                             \
    extern "C" __global__ void __launch_bounds__(GATE_THREADS) gate_##SUFFIX(                                     \
        const NUMBER* gate_up, int rows, int size, NUMBER* gated                                                  \
    ) {                                                                                                           \
        gate(gate_up, rows, size, gated);                                                                         \
    }

LAYER_KERNELS(bf16, Bf16)
LAYER_KERNELS(fp16, Fp16)
LAYER_KERNELS(fp32, Fp32)
