// Copies from global to shared memory that go on while the thread does something else, and take no registers.
#pragma once

#include "arithmetic.cuh"

#ifdef DRIFTGUARD_SIMT  // run on a CPU, thread by thread: the copy is there at once
__device__ __forceinline__ void copy_16_bytes(void* to, const void* from) {
    *static_cast<uint4*>(to) = *static_cast<const uint4*>(from);
}
__device__ __forceinline__ void await_copies() {}
#else
// Both on 16 bytes. Passes by the first-level cache: what is copied is read once.
__device__ __forceinline__ void copy_16_bytes(void* to, const void* from) {
    const u32 shared = static_cast<u32>(__cvta_generic_to_shared(to));
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(shared), "l"(from) : "memory");
}
// Until this thread's copies are there, for this thread to read.
__device__ __forceinline__ void await_copies() { asm volatile("cp.async.wait_all;" ::: "memory"); }
#endif
