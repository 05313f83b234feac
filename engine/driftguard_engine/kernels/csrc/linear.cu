// x W^T for a few tokens, bound by reading W: every weight goes once from memory to registers, 16 bytes at a time. A
// feature is a row of a product's left side, a token a column of the right side; which k of the sum stands in which
// place of a product is free, so a lane's numbers are those that lie together. The warps of a block share the features
// and take turns along k, so that the bits of an output follow from its own weights and its own token alone.
#include "mma.cuh"
#include "silu.cuh"

constexpr int LINEAR_WARPS = 8;
constexpr int LINEAR_THREADS = LINEAR_WARPS * WARP;
constexpr int LINEAR_ROWS = 16;  // of W that a block takes
constexpr int TOKEN_TILE = 8;
constexpr int STEP = 32;   // along k: four lanes x eight numbers, two products
constexpr int STEPS = 4;   // of a warp's turn, all of which it waits for at a time
constexpr int TURN = STEPS * STEP;
constexpr int ROUND = LINEAR_WARPS * TURN;
constexpr int TOKEN_STRIDE = 20;  // floats from one token's sums to the next: no two lanes write to the same bank

// 16 bytes where `real`, else 0. ONCE: nobody on this processor reads them again.
template <bool ONCE> __device__ __forceinline__ uint4 read_quad(const void* from, bool real) {
#ifdef DRIFTGUARD_SIMT
    return real ? *static_cast<const uint4*>(from) : make_uint4(0, 0, 0, 0);
#else
    uint4 quad;
#define READ_QUAD(HINTS)                                                                                          \
    asm volatile("{\n\t.reg .pred real;\n\tsetp.ne.u32 real, %5, 0;\n\tmov.b32 %0, 0;\n\tmov.b32 %1, 0;\n\t"      \
                 "mov.b32 %2, 0;\n\tmov.b32 %3, 0;\n\t@real ld.global.nc" HINTS ".v4.u32 {%0, %1, %2, %3}, [%4];" \
                 "\n\t}"                                                                                          \
                 : "=&r"(quad.x), "=&r"(quad.y), "=&r"(quad.z), "=&r"(quad.w)                                     \
                 : "l"(from), "r"(static_cast<u32>(real)))
    if constexpr (ONCE) {
        READ_QUAD(".L1::no_allocate.L2::128B");
    } else {
        READ_QUAD("");
    }
#undef READ_QUAD
    return quad;
#endif
}

// Rows g and g + 8 of the block's 16 times TILES tiles of tokens: column g of tile t is token 8 t + g.
template <typename Number, int TILES> struct Products {
    const Number *low, *high;      // rows of W
    const Number* tokens[TILES];
    int inner;

    uint4 weights[2][STEPS], values[TILES][STEPS];
    float sums[TILES][4];

    __device__ __forceinline__ void read(int step, int at) {
        const bool real = at < inner;
        weights[0][step] = read_quad<true>(low + at, real);
        weights[1][step] = read_quad<true>(high + at, real);
#pragma unroll
        for (int tile = 0; tile < TILES; ++tile) values[tile][step] = read_quad<false>(tokens[tile] + at, real);
    }

    __device__ __forceinline__ void multiply(int step) {
        const uint4 first = weights[0][step], second = weights[1][step];
#pragma unroll
        for (int tile = 0; tile < TILES; ++tile) {
            const uint4 value = values[tile][step];
            multiply_add<Number>(sums[tile], {first.x, second.x, first.y, second.y}, value.x, value.y);
            multiply_add<Number>(sums[tile], {first.z, second.z, first.w, second.w}, value.z, value.w);
        }
    }

    // A step's place is read for the warp's next turn as soon as it is free: memory is never waited for idly.
    __device__ __forceinline__ void run(int warp, int in_step) {
#pragma unroll
        for (int tile = 0; tile < TILES; ++tile) {
#pragma unroll
            for (int at = 0; at < 4; ++at) sums[tile][at] = 0.0f;
        }
#pragma unroll
        for (int step = 0; step < STEPS; ++step) read(step, warp * TURN + step * STEP + in_step);
#pragma unroll 1
        for (int turn = warp * TURN; turn < inner; turn += ROUND) {
#pragma unroll
            for (int step = 0; step < STEPS; ++step) {
                multiply(step);
                read(step, turn + ROUND + step * STEP + in_step);
            }
        }
    }
};

// One number of the block's sums, in the order of the warps.
template <int TOKENS>
__device__ __forceinline__ float sum_of_warps(
    const float (&sums)[LINEAR_WARPS][TOKENS][TOKEN_STRIDE], int token, int row
) {
    float total = sums[0][token][row];
#pragma unroll
    for (int warp = 1; warp < LINEAR_WARPS; ++warp) total = __fadd_rn(total, sums[warp][token][row]);
    return total;
}

template <typename Number> __device__ __forceinline__ float rounded(float value) {
    return Rounding<Number>::low(Rounding<Number>::pair(value, value));
}

template <typename Number>
__device__ __forceinline__ float with_bias(float value, const Number* bias, int feature) {
    return rounded<Number>(bias == nullptr ? value : __fadd_rn(value, Reader<Number>::one(bias, feature)));
}

// Grid: a block for every 16 rows of weight, or gated, for every 8 pairs of them.
//
// x [count, inner], count at most 8 TILES, inner a multiple of 8; weight [size, inner], bias [size] or null: writes
// y [count, size], rows y_stride apart. GATED: weight [2 size, inner], bias [2 size]: silu(first half) x second half,
// rounded as apart.
template <typename Number, int TILES, bool GATED>
__device__ __forceinline__ void linear(
    const Number* x, const Number* weight, const Number* bias, int count, int inner, int size, i64 y_stride,
    Number* y
) {
    constexpr int FEATURES = GATED ? LINEAR_ROWS / 2 : LINEAR_ROWS;
    __shared__ float sums[LINEAR_WARPS][TILES * TOKEN_TILE][TOKEN_STRIDE];
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, group = lane / 4, in_step = lane % 4 * RUN;
    const int first = static_cast<int>(blockIdx.x) * FEATURES;
    Products<Number, TILES> own;
    // Past the ends the last ones stand in: what comes of them is not written.
    const int row = min(first + group, size - 1), other = GATED ? size + row : min(first + 8 + group, size - 1);
    own.low = weight + static_cast<i64>(row) * inner;
    own.high = weight + static_cast<i64>(other) * inner;
#pragma unroll
    for (int tile = 0; tile < TILES; ++tile) {
        own.tokens[tile] = x + static_cast<i64>(min(tile * TOKEN_TILE + group, count - 1)) * inner;
    }
    own.inner = inner;
    own.run(warp, in_step);
#pragma unroll
    for (int tile = 0; tile < TILES; ++tile) {
#pragma unroll
        for (int at = 0; at < 4; ++at) {
            sums[warp][tile * TOKEN_TILE + lane % 4 * 2 + at % 2][group + at / 2 * 8] = own.sums[tile][at];
        }
    }
    __syncthreads();
#pragma unroll 1
    for (int item = threadIdx.x; item < count * FEATURES; item += LINEAR_THREADS) {
        const int token = item / FEATURES, in_block = item % FEATURES, feature = first + in_block;
        if (feature >= size) continue;
        float value = with_bias(sum_of_warps(sums, token, in_block), bias, feature);
        if constexpr (GATED) {
            const float factor = with_bias(sum_of_warps(sums, token, in_block + FEATURES), bias, size + feature);
            value = __fmul_rn(rounded<Number>(silu(value)), factor);
        }
        y[token * y_stride + feature].bits = static_cast<u16>(Rounding<Number>::pair(value, value));
    }
}

#define LINEAR_KERNEL(NAME, TILES, GATED, NUMBER, SUFFIX, BLOCKS)                                                 \
    extern "C" __global__ void __launch_bounds__(LINEAR_THREADS, BLOCKS) NAME##_##TILES##_##SUFFIX(               \
        const NUMBER* x, const NUMBER* weight, const NUMBER* bias, int count, int inner, int size, i64 y_stride,  \
        NUMBER* y                                                                                                 \
    ) {                                                                                                           \
        linear<NUMBER, TILES, GATED>(x, weight, bias, count, inner, size, y_stride, y);                           \
    }
#define LINEAR_KERNELS(TILES, BLOCKS)                                                                             \
    LINEAR_KERNEL(linear, TILES, false, Bf16, bf16, BLOCKS)                                                       \
    LINEAR_KERNEL(linear, TILES, false, Fp16, fp16, BLOCKS)                                                       \
    LINEAR_KERNEL(linear_gated, TILES, true, Bf16, bf16, BLOCKS)                                                  \
    LINEAR_KERNEL(linear_gated, TILES, true, Fp16, fp16, BLOCKS)

LINEAR_KERNELS(1, 3)
LINEAR_KERNELS(2, 2)
LINEAR_KERNELS(4, 1)
