// The largest and the smallest of many logits, NaN if any of them is one.
#pragma once

#include "arithmetic.cuh"

#ifdef DRIFTGUARD_SIMT  // run on a CPU, thread by thread: the same in plain C++
constexpr u32 NOT_A_NUMBER = 0x7fffffffu;  // whatever bits a NaN has, these come out
__device__ __forceinline__ float max_or_nan(float a, float b) {
    return a != a || b != b ? __uint_as_float(NOT_A_NUMBER) : (a > b ? a : b);
}
template <float (*value)(u32)> __device__ __forceinline__ u32 max_half(u32 a, u32 b) {
    const float x = value(a), y = value(b);
    return x != x || y != y ? NOT_A_NUMBER >> 16 : (x > y ? a : b);
}
template <float (*value)(u32)> __device__ __forceinline__ u32 max_pair(u32 a, u32 b) {
    return max_half<value>(a & 0xffffu, b & 0xffffu) | max_half<value>(a >> 16, b >> 16) << 16;
}
template <float (*value)(u32)> __device__ __forceinline__ u32 min_pair(u32 a, u32 b) {
    constexpr u32 SIGNS = 0x80008000u;
    return max_pair<value>(a ^ SIGNS, b ^ SIGNS) ^ SIGNS;
}
__device__ __forceinline__ u32 max_of_pairs(Bf16, u32 a, u32 b) { return max_pair<bf16_to_float>(a, b); }
__device__ __forceinline__ u32 min_of_pairs(Bf16, u32 a, u32 b) { return min_pair<bf16_to_float>(a, b); }
__device__ __forceinline__ u32 max_of_pairs(Fp16, u32 a, u32 b) { return max_pair<fp16_to_float>(a, b); }
__device__ __forceinline__ u32 min_of_pairs(Fp16, u32 a, u32 b) { return min_pair<fp16_to_float>(a, b); }
#else
__device__ __forceinline__ float max_or_nan(float a, float b) {
    float larger;
    asm("max.NaN.f32 %0, %1, %2;" : "=f"(larger) : "f"(a), "f"(b));
    return larger;
}
#define OF_PAIRS(NAME, LOGIT, OPERATION)                                      \
    __device__ __forceinline__ u32 NAME(LOGIT, u32 a, u32 b) {                \
        u32 found;                                                            \
        asm(OPERATION " %0, %1, %2;" : "=r"(found) : "r"(a), "r"(b));         \
        return found;                                                         \
    }
OF_PAIRS(max_of_pairs, Bf16, "max.NaN.bf16x2")
OF_PAIRS(min_of_pairs, Bf16, "min.NaN.bf16x2")
OF_PAIRS(max_of_pairs, Fp16, "max.NaN.f16x2")
OF_PAIRS(min_of_pairs, Fp16, "min.NaN.f16x2")
#endif

__device__ __forceinline__ float low_of_pair(Bf16, u32 pair) { return bf16_to_float(pair); }
__device__ __forceinline__ float high_of_pair(Bf16, u32 pair) { return __uint_as_float(pair & 0xffff0000u); }
__device__ __forceinline__ float low_of_pair(Fp16, u32 pair) { return fp16_to_float(pair & 0xffffu); }
__device__ __forceinline__ float high_of_pair(Fp16, u32 pair) { return fp16_to_float(pair >> 16); }

template <typename Logit> constexpr u32 PAIR_OF_INFINITIES = 0;
template <> constexpr u32 PAIR_OF_INFINITIES<Bf16> = 0x7f807f80u;
template <> constexpr u32 PAIR_OF_INFINITIES<Fp16> = 0x7c007c00u;

// Of 16 bits: two logits are compared by one instruction.
template <typename Logit> struct Extremes {
    u32 highest = PAIR_OF_INFINITIES<Logit> | 0x80008000u, lowest = PAIR_OF_INFINITIES<Logit>;
    __device__ __forceinline__ void take(const Half8& raw) {
#pragma unroll
        for (int at = 0; at < 4; ++at) {
            highest = max_of_pairs(Logit{}, highest, raw.pairs[at]);
            lowest = min_of_pairs(Logit{}, lowest, raw.pairs[at]);
        }
    }
    __device__ __forceinline__ float largest() const {
        return max_or_nan(low_of_pair(Logit{}, highest), high_of_pair(Logit{}, highest));
    }
    __device__ __forceinline__ float smallest() const {
        return -max_or_nan(-low_of_pair(Logit{}, lowest), -high_of_pair(Logit{}, lowest));
    }
};

template <> struct Extremes<Fp32> {
    float highest = -INF;
    __device__ __forceinline__ void take(const Reader<Fp32>::Raw& raw) {
#pragma unroll
        for (int place = 0; place < RUN; ++place) highest = max_or_nan(highest, raw.logits[place]);
    }
    __device__ __forceinline__ float largest() const { return highest; }
    __device__ __forceinline__ float smallest() const { return -INF; }  // not looked for: it could be anything
};

// The largest of what `max_or_nan` returned to each lane. Its bits are ordered as the numbers are, NaN above all: one
// instruction, where five exchanges would wait for one another.
__device__ __forceinline__ float warp_max_or_nan(float value) {
    const int bits = static_cast<int>(__float_as_uint(value));
    const u32 ordered = bits ^ (bits >> 31 | 1 << 31);  // unsigned: of an int it would be the largest signed number
    const u32 largest = __reduce_max_sync(FULL_WARP, ordered);
    return __uint_as_float(largest ^ (static_cast<int>(~largest) >> 31 | 1 << 31));
}
