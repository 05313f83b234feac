#pragma once

__device__ __forceinline__ float twice(float value) { return __fadd_rn(value, value); }
