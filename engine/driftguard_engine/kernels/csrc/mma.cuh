// Matrix products by tensor cores: 16 x 16 numbers times 16 x 8 numbers, added to 16 x 8 float32.
//
// Lane 4 g + c holds of A: rows g (a[0], a[2]) and g + 8 (a[1], a[3]), columns 2c, 2c + 1 (a[0], a[1]) and 2c + 8,
// 2c + 9 (a[2], a[3]); of B: column g, rows 2c, 2c + 1 (b0) and 2c + 8, 2c + 9 (b1); of the sum: columns 2c, 2c + 1 of
// rows g (sum[0], sum[1]) and g + 8 (sum[2], sum[3]). The lower half of a pair comes first.
#pragma once
#include "numbers.cuh"

#ifdef DRIFTGUARD_SIMT
constexpr int MMA_WARPS = 8;  // of a block, at most

template <typename Number> __device__ __forceinline__ float half_of(u32 pair, int which) {
    return which == 0 ? Rounding<Number>::low(pair) : Rounding<Number>::high(pair);
}

template <typename Number>
__device__ __noinline__ void multiply_add(float (&sum)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    __shared__ u32 held[MMA_WARPS][WARP][6];
    const int lane = threadIdx.x % WARP;
    u32 (*const of)[6] = held[threadIdx.x / WARP];
    for (int at = 0; at < 4; ++at) of[lane][at] = a[at];
    of[lane][4] = b0, of[lane][5] = b1;
    __syncwarp();
    for (int at = 0; at < 4; ++at) {
        const int row = lane / 4, column = lane % 4 * 2 + at % 2;
        for (int k = 0; k < 16; ++k) {
            const int from = k % 8 / 2, upper = k / 8;
            const float left = half_of<Number>(of[row * 4 + from][upper * 2 + at / 2], k % 2);
            sum[at] = __fmaf_rn(left, half_of<Number>(of[column * 4 + from][4 + upper], k % 2), sum[at]);
        }
    }
    __syncwarp();
}
#else
#define MULTIPLY_ADD(NUMBER, TYPE)                                                                                \
    template <>                                                                                                   \
    __device__ __forceinline__ void multiply_add<NUMBER>(float (&sum)[4], const u32 (&a)[4], u32 b0, u32 b1) {    \
        asm volatile("mma.sync.aligned.m16n8k16.row.col.f32." TYPE "." TYPE ".f32 "                               \
                     "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"                            \
                     : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])                                     \
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));                             \
    }
template <typename Number>
__device__ __forceinline__ void multiply_add(float (&sum)[4], const u32 (&a)[4], u32 b0, u32 b1);
MULTIPLY_ADD(Bf16, "bf16")
MULTIPLY_ADD(Fp16, "f16")
#endif
