// Programmatic dependent launch: a kernel begins while the one before it still runs (`loader.BEGIN_EARLY`).
#pragma once

// The next kernel may begin once all blocks of this one have come here, or have ended.
__device__ __forceinline__ void let_the_next_kernel_begin() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;");
#endif
}

// What the kernel before this one writes can be read behind this; what was written before the first of several that
// begin early, at any time.
__device__ __forceinline__ void await_the_kernel_before() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
