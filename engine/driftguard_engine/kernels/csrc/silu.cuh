// x / (1 + e^-x), to a few float32 roundings.
#pragma once
#include "arithmetic.cuh"

constexpr float LOG2_E = 0x1.715476p0f;

__device__ __forceinline__ float silu(float value) {
    const float negative = value < 0.0f ? value : -value;
    const float power = power_of_two(fmaxf(__fmul_rn(negative, LOG2_E), LEAST_POWER));
    return __fdiv_rn(value < 0.0f ? __fmul_rn(value, power) : value, __fadd_rn(1.0f, power));
}
