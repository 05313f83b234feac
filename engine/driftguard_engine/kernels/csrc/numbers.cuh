// Activations: eight neighbouring numbers at a time, computed with as float32 and rounded to the nearest, as by torch.
#pragma once
#include "arithmetic.cuh"

#ifdef DRIFTGUARD_SIMT
__device__ __forceinline__ u32 bf16_bits(float value) {
    const u32 bits = __float_as_uint(value);
    return value != value ? 0x7fffu : (bits + 0x7fffu + (bits >> 16 & 1u)) >> 16;
}
__device__ __forceinline__ u32 fp16_bits(float value) {
    const u32 bits = __float_as_uint(value) & 0x7fffffffu, sign = __float_as_uint(value) >> 16 & 0x8000u;
    const float magnitude = __uint_as_float(bits);
    if (value != value) return 0x7fffu;
    if (magnitude >= 65520.0f) return sign | 0x7c00u;
    if (magnitude < 0x1p-14f) return sign | __float2uint_rn(__fmul_rn(magnitude, 0x1p24f));
    return sign | (bits + 0xfffu + (bits >> 13 & 1u) - (112u << 23)) >> 13;
}
__device__ __forceinline__ u32 bf16_pair(float low, float high) { return bf16_bits(low) | bf16_bits(high) << 16; }
__device__ __forceinline__ u32 fp16_pair(float low, float high) { return fp16_bits(low) | fp16_bits(high) << 16; }
#else
__device__ __forceinline__ u32 bf16_pair(float low, float high) {
    u32 pair;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
    return pair;
}
__device__ __forceinline__ u32 fp16_pair(float low, float high) {
    u32 pair;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
    return pair;
}
#endif

template <typename Number> struct Rounding;

template <> struct Rounding<Bf16> {
    static __device__ __forceinline__ u32 pair(float low, float high) { return bf16_pair(low, high); }
    static __device__ __forceinline__ float low(u32 pair) { return __uint_as_float(pair << 16); }
    static __device__ __forceinline__ float high(u32 pair) { return __uint_as_float(pair & 0xffff0000u); }
};

template <> struct Rounding<Fp16> {
    static __device__ __forceinline__ u32 pair(float low, float high) { return fp16_pair(low, high); }
    static __device__ __forceinline__ float low(u32 pair) { return fp16_to_float(pair & 0xffffu); }
    static __device__ __forceinline__ float high(u32 pair) { return fp16_to_float(pair >> 16); }
};

// Every address starts on 16 bytes.
template <typename Number> __device__ __forceinline__ void read_run(const Number* from, float (&run)[RUN]) {
    Reader<Number>::unpack(Reader<Number>::read(from, 0, RUN, true), run);
}

// To what can be stored.
template <typename Number> __device__ __forceinline__ void round_run(float (&run)[RUN]) {
#pragma unroll
    for (int place = 0; place < RUN; place += 2) {
        const u32 pair = Rounding<Number>::pair(run[place], run[place + 1]);
        run[place] = Rounding<Number>::low(pair), run[place + 1] = Rounding<Number>::high(pair);
    }
}
template <> __device__ __forceinline__ void round_run<Fp32>(float (&)[RUN]) {}

template <typename Number> __device__ __forceinline__ void write_run(Number* to, const float (&run)[RUN]) {
    typedef Rounding<Number> R;
    *reinterpret_cast<uint4*>(to) = make_uint4(
        R::pair(run[0], run[1]), R::pair(run[2], run[3]), R::pair(run[4], run[5]), R::pair(run[6], run[7])
    );
}
template <> __device__ __forceinline__ void write_run<Fp32>(Fp32* to, const float (&run)[RUN]) {
    float4* words = reinterpret_cast<float4*>(to);
    words[0] = make_float4(run[0], run[1], run[2], run[3]);
    words[1] = make_float4(run[4], run[5], run[6], run[7]);
}
