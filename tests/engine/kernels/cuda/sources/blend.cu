// Parameters of every size, in an order that leaves gaps between them.
#include "shared.cuh"

extern "C" __global__ void blend(
    const float* in, int size, long long shift, float factor, double offset, unsigned count, float* out
) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < size) {
        out[i] = twice(in[i]) * factor + __double2float_rn(offset) + __ll2float_rn(shift);
        if (in == nullptr) out[i] = __uint2float_rn(count);
    }
}
