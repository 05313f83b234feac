// Small kernels that the emulator's own tests run: right ones first, then each with one defect.

#define WARP_SUM(value)                                                                                      \
  for (int offset = 16; offset > 0; offset /= 2) value += __shfl_down_sync(0xffffffffu, value, offset)

template <int WARPS> __device__ __forceinline__ float block_sum(float value) {
  __shared__ float partial[WARPS];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  WARP_SUM(value);
  if (lane == 0) partial[warp] = value;
  __syncthreads();
  value = lane < WARPS ? partial[lane] : 0.0f;
  WARP_SUM(value);
  __syncthreads();
  return __shfl_sync(0xffffffffu, value, 0);
}

extern "C" __global__ void __launch_bounds__(256) sum_rows(const float* __restrict__ rows, int columns, float* sums) {
  float value = 0.0f;
  for (int i = threadIdx.x; i < columns; i += blockDim.x) value += rows[blockIdx.x * columns + i];
  value = block_sum<8>(value);
  if (threadIdx.x == 0) sums[blockIdx.x] = value;
}

// The last block to finish adds what all others found.
__device__ unsigned finished = 0;

extern "C" __global__ void sum_all(const unsigned* values, unsigned size, unsigned* partial, unsigned* sum) {
  __shared__ unsigned total;
  __shared__ bool is_last;
  if (threadIdx.x == 0) total = 0;
  __syncthreads();
  for (unsigned i = blockIdx.x * blockDim.x + threadIdx.x; i < size; i += gridDim.x * blockDim.x)
    atomicAdd(&total, values[i]);
  __syncthreads();
  if (threadIdx.x == 0) {
    partial[blockIdx.x] = total;
    __threadfence();
    is_last = atomicAdd(&finished, 1u) == gridDim.x - 1;
  }
  __syncthreads();
  if (is_last && threadIdx.x == 0) {
    unsigned all = 0;
    for (unsigned i = 0; i < gridDim.x; ++i) all += partial[i];
    *sum = all;
    finished = 0;
  }
}

// Rows of a two-dimensional block, turned round through dynamic shared memory.
extern "C" __global__ void reverse(const double* in, double* out) {
  extern __shared__ double held[];
  const int size = blockDim.x * blockDim.y, at = threadIdx.y * blockDim.x + threadIdx.x;
  held[at] = in[at];
  __syncthreads();
  out[at] = held[size - 1 - at];
}

struct Scaled {
  float factor;
  unsigned long long offset;
};

extern "C" __global__ void scale(const float4* in, float4* out, Scaled by) {
  float4 v = in[threadIdx.x];
  v.x = __fmaf_rn(v.x, by.factor, __ull2float_rn(by.offset));
  out[threadIdx.x] = make_float4(v.x, fmaxf(v.y, v.z), __uint_as_float(__float_as_uint(v.z) << 1), -v.w);
}

// Of every size, in an order that leaves gaps between them.
extern "C" __global__ void parameters(
    const float* in, int size, long long shift, float factor, double offset, unsigned, float* out
) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < size) out[i] = in[i] * factor + __double2float_rn(offset) + __ll2float_rn(shift);
}

extern "C" __global__ void warp_votes(const int* in, unsigned* out) {
  const unsigned all = 0xffffffffu, lane = threadIdx.x;
  const int value = in[lane];
  unsigned* mine = out + lane * 11;
  mine[0] = __ballot_sync(all, value > 0);
  mine[1] = __match_any_sync(all, value);
  mine[2] = __reduce_add_sync(all, static_cast<unsigned>(value));
  mine[3] = __reduce_max_sync(all, static_cast<unsigned>(value));
  mine[4] = static_cast<unsigned>(__syncthreads_count(value > 0));
  mine[5] = static_cast<unsigned>(__shfl_xor_sync(all, value, 5));
  mine[6] = static_cast<unsigned>(__shfl_up_sync(all, value, 3, 8));
  // Half of the warp on its own; the others have another mask.
  mine[7] = lane < 16 ? __reduce_min_sync(0x0000ffffu, lane) : __reduce_min_sync(0xffff0000u, lane);
  // An int is compared as a signed number.
  mine[8] = static_cast<unsigned>(__reduce_add_sync(all, value));
  mine[9] = static_cast<unsigned>(__reduce_min_sync(all, value));
  mine[10] = static_cast<unsigned>(__reduce_max_sync(all, value));
}

extern "C" __global__ void many_barriers(float* out, int count) {
  __shared__ float held[256];
  float value = threadIdx.x;
  for (int i = 0; i < count; ++i) {
    held[threadIdx.x] = value;
    __syncthreads();
    value = held[(threadIdx.x + 1) % 256];
    __syncthreads();
  }
  out[threadIdx.x] = value;
}

// --- defects --------------------------------------------------------------------------------------------

extern "C" __global__ void lacks_barrier(const float* in, float* out) {
  __shared__ float held[64];
  held[threadIdx.x] = in[threadIdx.x];
  out[threadIdx.x] = held[63 - threadIdx.x];
}

extern "C" __global__ void lacks_atomic(unsigned* sum) {
  const unsigned old = *sum;
  __threadfence();
  *sum = old + 1;
}

extern "C" __global__ void reads_unset_shared(float* out) {
  __shared__ float held[2];
  if (threadIdx.x == 0) held[0] = 1.0f;
  __syncthreads();
  out[0] = held[0] + held[1];
}

extern "C" __global__ void depends_on_block_order(int* last) { *last = blockIdx.x; }

extern "C" __global__ void barrier_in_branch(int* out) {
  if (threadIdx.x < 40) __syncthreads();  // the line that the test expects
  out[threadIdx.x] = 1;
}

extern "C" __global__ void two_barriers(int* out) {
  if (threadIdx.x < 40)
    __syncthreads();
  else
    __syncthreads();
  out[threadIdx.x] = 1;
}

extern "C" __global__ void shuffle_in_branch(int* out) {
  int value = threadIdx.x;
  if (threadIdx.x < 7) value = __shfl_sync(0xffffffffu, value, 0);
  __syncwarp();
  out[threadIdx.x] = value;
}

extern "C" __global__ void lane_outside_mask(int* out) { out[threadIdx.x] = __shfl_sync(0xffffu, 1, 0); }

extern "C" __global__ void waits_for_other_block(volatile int* flag) {
  if (blockIdx.x == 0) *flag = 1;
  while (*flag < 2) {
  }
}

extern "C" __global__ void reads_at(const int* in, int at, int* out) { out[0] = in[at]; }

extern "C" __global__ void writes_at(int* out, int at) { out[at] = 1; }

extern "C" __global__ void writes_const(const int* out) { const_cast<int*>(out)[0] = 1; }

extern "C" __global__ void overruns_shared(int* out, int at) {
  __shared__ int held[8];
  held[at] = 1;
  __syncthreads();
  out[0] = held[0];
}

extern "C" __global__ void overruns_dynamic(int* out, int at) {
  extern __shared__ int dynamic[];
  dynamic[at] = 1;
  out[0] = dynamic[0];
}

extern "C" __global__ void misaligned(const char* in, float4* out) { out[0] = *reinterpret_cast<const float4*>(in + 4); }

extern "C" __global__ void deep_stack(int* out, int at) {
  volatile int local[100000];
  local[at] = 1;
  out[0] = local[at];
}
