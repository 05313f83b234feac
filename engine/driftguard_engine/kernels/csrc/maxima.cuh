// The largest of many logits, NaN if any of them is one.
#pragma once

#include "arithmetic.cuh"

#ifdef DRIFTGUARD_SIMT  // run on a CPU, thread by thread: the same in plain C++
__device__ __forceinline__ float max_or_nan(float a, float b) { return a != a || b != b ? a + b : (a > b ? a : b); }
template <float (*value)(u32)> __device__ __forceinline__ u32 max_half(u32 a, u32 b) {
    const float x = value(a), y = value(b);
    return x != x ? a : (y != y || y > x ? b : a);
}
template <float (*value)(u32)> __device__ __forceinline__ u32 max_pair(u32 a, u32 b) {
    return max_half<value>(a & 0xffffu, b & 0xffffu) | max_half<value>(a >> 16, b >> 16) << 16;
}
__device__ __forceinline__ u32 max_bf16_pair(u32 a, u32 b) { return max_pair<bf16_to_float>(a, b); }
__device__ __forceinline__ u32 max_fp16_pair(u32 a, u32 b) { return max_pair<fp16_to_float>(a, b); }
#else
__device__ __forceinline__ float max_or_nan(float a, float b) {
    float larger;
    asm("max.NaN.f32 %0, %1, %2;" : "=f"(larger) : "f"(a), "f"(b));
    return larger;
}
__device__ __forceinline__ u32 max_bf16_pair(u32 a, u32 b) {
    u32 larger;
    asm("max.NaN.bf16x2 %0, %1, %2;" : "=r"(larger) : "r"(a), "r"(b));
    return larger;
}
__device__ __forceinline__ u32 max_fp16_pair(u32 a, u32 b) {
    u32 larger;
    asm("max.NaN.f16x2 %0, %1, %2;" : "=r"(larger) : "r"(a), "r"(b));
    return larger;
}
#endif

template <typename Logit> struct Maximum;

template <> struct Maximum<Bf16> {
    u32 pair = 0xff80ff80u;  // -inf twice: two logits are compared by one instruction
    __device__ __forceinline__ void take(const Half8& raw) {
#pragma unroll
        for (int at = 0; at < 4; ++at) pair = max_bf16_pair(pair, raw.pairs[at]);
    }
    __device__ __forceinline__ float value() const {
        return max_or_nan(__uint_as_float(pair << 16), __uint_as_float(pair & 0xffff0000u));
    }
};

template <> struct Maximum<Fp16> {
    u32 pair = 0xfc00fc00u;
    __device__ __forceinline__ void take(const Half8& raw) {
#pragma unroll
        for (int at = 0; at < 4; ++at) pair = max_fp16_pair(pair, raw.pairs[at]);
    }
    __device__ __forceinline__ float value() const {
        return max_or_nan(fp16_to_float(pair & 0xffffu), fp16_to_float(pair >> 16));
    }
};

template <> struct Maximum<Fp32> {
    float largest = -INF;
    __device__ __forceinline__ void take(const Reader<Fp32>::Raw& raw) {
#pragma unroll
        for (int place = 0; place < RUN; ++place) largest = max_or_nan(largest, raw.logits[place]);
    }
    __device__ __forceinline__ float value() const { return largest; }
};

__device__ __forceinline__ float warp_max_or_nan(float value) {
#pragma unroll
    for (int other = WARP / 2; other > 0; other /= 2) {
        value = max_or_nan(value, __shfl_xor_sync(FULL_WARP, value, other));
    }
    return value;
}
