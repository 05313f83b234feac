// Copies from global to shared memory that go on while the thread does something else, and take no registers.
#pragma once

#include "arithmetic.cuh"

#ifdef DRIFTGUARD_SIMT  // run on a CPU, thread by thread: the copy is there at once
__device__ __forceinline__ void copy_16_bytes(void* to, const void* from) {
    *static_cast<uint4*>(to) = *static_cast<const uint4*>(from);
}
__device__ __forceinline__ void end_copies() {}
template <int LATER> __device__ __forceinline__ void await_copies() {}
#else
// Both on 16 bytes. Passes by the first-level cache: what is copied is read once.
__device__ __forceinline__ void copy_16_bytes(void* to, const void* from) {
    const u32 shared = static_cast<u32>(__cvta_generic_to_shared(to));
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(shared), "l"(from) : "memory");
}
// Ends a group of this thread's copies, which may be empty.
__device__ __forceinline__ void end_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
// Until this thread's groups but the newest `LATER` are there, for this thread to read.
template <int LATER> __device__ __forceinline__ void await_copies() {
    asm volatile("cp.async.wait_group %0;" ::"n"(LATER) : "memory");
}
#endif
