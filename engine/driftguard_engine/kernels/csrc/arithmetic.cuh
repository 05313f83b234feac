// Types, bits and the arithmetic that the reference (../reference/distribution.py, ../reference/exp2.py) follows bit for bit.
// Nothing is included from outside: no header has to be found when this is compiled on somebody's machine.
#pragma once

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;

#define FULL_WARP 0xffffffffu

constexpr int WARP = 32;
constexpr int RUN = 8;              // neighbouring elements that one lane reads at a time
constexpr int CHUNK = WARP * RUN;   // elements that a warp reads at a time
constexpr int CHUNKS = 8;
constexpr int TILE = CHUNKS * CHUNK;  // elements summed together, in an order that only their index decides

constexpr float INF = __builtin_bit_cast(float, 0x7f800000u);
constexpr float LEAST_POWER = -125.0f;
constexpr float FIXED_ONE = 0x1p40f;  // a weight of 1, where weights are added as integers
constexpr int MASS_BITS = 44;   // of the largest mass among those that an index is picked from

// Logits as they lie in memory, by the bits that hold them.
struct Bf16 { u16 bits; };
struct Fp16 { u16 bits; };
struct Fp32 { float value; };

__device__ __forceinline__ float bf16_to_float(u32 bits) { return __uint_as_float(bits << 16); }

#ifdef DRIFTGUARD_SIMT  // run on a CPU, thread by thread: the same in plain C++
__device__ __forceinline__ float fp16_to_float(u32 bits) {
    // The exponent moves from bias 15 to 127 by a multiplication, which also turns subnormals into normals.
    const u32 sign = (bits & 0x8000u) << 16;
    const u32 rest = bits & 0x7fffu;
    const float magnitude = rest >= 0x7c00u
        ? __uint_as_float(0x7f800000u | ((rest & 0x3ffu) << 13))
        : __fmul_rn(__uint_as_float(rest << 13), 0x1p112f);
    return __uint_as_float(__float_as_uint(magnitude) | sign);
}
#else
__device__ __forceinline__ float fp16_to_float(u32 bits) {
    float value;
    asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(static_cast<u16>(bits)));
    return value;
}
#endif

// Eight neighbouring logits at `at` (a multiple of 8) of a row of `size`; -inf where the row has ended.
// `whole`: the row starts on 16 bytes, so that a run can be read as vectors.
template <typename Logit> struct Reader;

struct Half8 { u32 pairs[4]; };

__device__ __forceinline__ Half8 read_half8(const u16* row, int at, int size, bool whole, u32 minus_infinity) {
    Half8 run;
    if (whole && at + RUN <= size) {
        const uint4 words = *reinterpret_cast<const uint4*>(row + at);
        run.pairs[0] = words.x, run.pairs[1] = words.y, run.pairs[2] = words.z, run.pairs[3] = words.w;
    } else {
#pragma unroll
        for (int pair = 0; pair < 4; ++pair) {
            const int place = at + 2 * pair;
            const u32 low = place < size ? row[place] : minus_infinity;
            const u32 high = place + 1 < size ? row[place + 1] : minus_infinity;
            run.pairs[pair] = low | high << 16;
        }
    }
    return run;
}

template <> struct Reader<Bf16> {
    typedef Half8 Raw;
    static __device__ __forceinline__ Raw read(const Bf16* row, int at, int size, bool whole) {
        return read_half8(reinterpret_cast<const u16*>(row), at, size, whole, 0xff80u);
    }
    static __device__ __forceinline__ void unpack(const Raw& raw, float (&logits)[RUN]) {
#pragma unroll
        for (int pair = 0; pair < 4; ++pair) {
            logits[2 * pair] = __uint_as_float(raw.pairs[pair] << 16);
            logits[2 * pair + 1] = __uint_as_float(raw.pairs[pair] & 0xffff0000u);
        }
    }
    static __device__ __forceinline__ float one(const Bf16* row, int at) { return bf16_to_float(row[at].bits); }
};

template <> struct Reader<Fp16> {
    typedef Half8 Raw;
    static __device__ __forceinline__ Raw read(const Fp16* row, int at, int size, bool whole) {
        return read_half8(reinterpret_cast<const u16*>(row), at, size, whole, 0xfc00u);
    }
    static __device__ __forceinline__ void unpack(const Raw& raw, float (&logits)[RUN]) {
#pragma unroll
        for (int pair = 0; pair < 4; ++pair) {
            logits[2 * pair] = fp16_to_float(raw.pairs[pair] & 0xffffu);
            logits[2 * pair + 1] = fp16_to_float(raw.pairs[pair] >> 16);
        }
    }
    static __device__ __forceinline__ float one(const Fp16* row, int at) { return fp16_to_float(row[at].bits); }
};

template <> struct Reader<Fp32> {
    struct Raw { float logits[RUN]; };
    static __device__ __forceinline__ Raw read(const Fp32* row, int at, int size, bool whole) {
        Raw run;
        if (whole && at + RUN <= size) {
            const float4* words = reinterpret_cast<const float4*>(row + at);
            const float4 low = words[0], high = words[1];
            run.logits[0] = low.x, run.logits[1] = low.y, run.logits[2] = low.z, run.logits[3] = low.w;
            run.logits[4] = high.x, run.logits[5] = high.y, run.logits[6] = high.z, run.logits[7] = high.w;
        } else {
#pragma unroll
            for (int place = 0; place < RUN; ++place) {
                run.logits[place] = at + place < size ? row[at + place].value : -INF;
            }
        }
        return run;
    }
    static __device__ __forceinline__ void unpack(const Raw& raw, float (&logits)[RUN]) {
#pragma unroll
        for (int place = 0; place < RUN; ++place) logits[place] = raw.logits[place];
    }
    static __device__ __forceinline__ float one(const Fp32* row, int at) { return row[at].value; }
};

template <typename Logit> __device__ __forceinline__ bool starts_on_16_bytes(const Logit* row) {
    return (reinterpret_cast<u64>(row) & 15) == 0;
}

// The next larger float32 after a number that is not NaN; after +inf, NaN.
__device__ __forceinline__ float next_above(float value) {
    const u32 bits = __float_as_uint(value);
    return __uint_as_float(value == 0.0f ? 1u : value > 0.0f ? bits + 1 : bits - 1);
}

// 2 ** power for power in [LEAST_POWER, 0], relative error below 2**-23; exactly 1 at 0.
__device__ __forceinline__ float power_of_two(float power) {
    const float rounder = 0x1.8p23f;  // adding it leaves the nearest integer in the low bits
    const float shifted = __fadd_rn(power, rounder);
    const float fraction = __fsub_rn(power, __fsub_rn(shifted, rounder));
    float result = 0x1.5bba14p-10f;
    result = __fmaf_rn(result, fraction, 0x1.3cea88p-7f);
    result = __fmaf_rn(result, fraction, 0x1.c6b752p-5f);
    result = __fmaf_rn(result, fraction, 0x1.ebf9bcp-3f);
    result = __fmaf_rn(result, fraction, 0x1.62e42ap-1f);
    result = __fmaf_rn(result, fraction, 1.0f);
    return __uint_as_float(__float_as_uint(result) + (__float_as_uint(shifted) << 23));
}

// How far below the peak a logit counts at most (a number below 0): scaled, from -125 to -62.5, so that no weight is
// subnormal. Without a division, because it is a power of two times a constant.
__device__ __forceinline__ float least_difference(float scale) {
    const u32 exponent = __float_as_uint(scale) & 0x7f800000u;
    return __fmul_rn(0.5f * LEAST_POWER, __uint_as_float(0x7f000000u - exponent));
}

// 2 ** (difference x scale) of a difference from `least_difference` to 0, relative error below 2**-18; exactly 1 at 0.
// The arithmetic of `exp2.fused_exp2`. Its polynomial is shorter than the one above: what weighs a whole vocabulary is
// limited by instructions.
__device__ __forceinline__ float weight_at(float difference, float scale) {
    const float rounder = 0x1.8p23f;  // adding it leaves the nearest integer in the low bits
    const float shifted = __fmaf_rn(difference, scale, rounder);
    const float fraction = __fmaf_rn(difference, scale, __fsub_rn(rounder, shifted));
    float result = 0x1.3a0514p-7f;
    result = __fmaf_rn(result, fraction, 0x1.c9fc68p-5f);
    result = __fmaf_rn(result, fraction, 0x1.ec036ep-3f);
    result = __fmaf_rn(result, fraction, 0x1.62e12cp-1f);
    result = __fmaf_rn(result, fraction, 1.0f);
    return __uint_as_float(__float_as_uint(result) + (__float_as_uint(shifted) << 23));
}

// 2 ** ((logit - peak) x scale) of a logit up to the peak. The peak is subtracted before multiplying: logit x scale
// overflows where this does not.
__device__ __forceinline__ float weight_of(float logit, float peak, float scale) {
    return weight_at(fmaxf(__fsub_rn(logit, peak), least_difference(scale)), scale);
}

__device__ __forceinline__ u64 fixed_weight(float weight) {
    return __float2ull_rz(__fmul_rn(weight, FIXED_ONE));
}

// Sum over the warp, by halves: lane i and lane i + 16, then + 8, ... The same bits in every lane.
template <typename Number> __device__ __forceinline__ Number sum_by_halves(Number value) {
#pragma unroll
    for (int other = WARP / 2; other > 0; other /= 2) value += __shfl_xor_sync(FULL_WARP, value, other);
    return value;
}

// Sum of a lane's eight accumulators; by halves over the lanes, that is a tile's: the order of `tiles.tile_sums`.
__device__ __forceinline__ float lane_sum(const float (&sums)[RUN]) {
    const float a = __fadd_rn(sums[0], sums[4]), b = __fadd_rn(sums[1], sums[5]);
    const float c = __fadd_rn(sums[2], sums[6]), d = __fadd_rn(sums[3], sums[7]);
    return __fadd_rn(__fadd_rn(a, c), __fadd_rn(b, d));
}

// Inclusive sum over the warp's lanes.
template <typename Number> __device__ __forceinline__ Number sum_up_to(Number value) {
    const int lane = threadIdx.x % WARP;
#pragma unroll
    for (int below = 1; below < WARP; below *= 2) {
        const Number other = __shfl_up_sync(FULL_WARP, value, below);
        if (lane >= below) value += other;
    }
    return value;
}
