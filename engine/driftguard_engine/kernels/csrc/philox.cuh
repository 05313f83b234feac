// Philox4x32-10 (Salmon, Moraes, Dror, Shaw, SC 2011), with the streams of ../philox.py.
#pragma once

#include "arithmetic.cuh"

constexpr u32 DRAFT = 1, ACCEPT = 2, RESIDUAL = 3;

constexpr u32 PROPOSED = 1 << 8, MORE = 1 << 16;

struct RandomWords { u64 first, second; };

// Key = the seed's 64 bits; counter = (the position's 64 bits, purpose, step: 0 by the token rule).
__device__ __forceinline__ RandomWords random_words(i64 seed, i64 position, u32 purpose, u32 step) {
    u32 word0 = static_cast<u32>(position), word1 = static_cast<u32>(static_cast<u64>(position) >> 32);
    u32 word2 = purpose, word3 = step;
    u32 key0 = static_cast<u32>(seed), key1 = static_cast<u32>(static_cast<u64>(seed) >> 32);
#pragma unroll
    for (int round = 0; round < 10; ++round) {
        const u32 high0 = __umulhi(0xD2511F53u, word0), low0 = 0xD2511F53u * word0;
        const u32 high2 = __umulhi(0xCD9E8D57u, word2), low2 = 0xCD9E8D57u * word2;
        word0 = high2 ^ word1 ^ key0, word1 = low2, word2 = high0 ^ word3 ^ key1, word3 = low0;
        key0 += 0x9E3779B9u, key1 += 0xBB67AE85u;
    }
    return {static_cast<u64>(word0) << 32 | word1, static_cast<u64>(word2) << 32 | word3};
}

// The random numbers of one token.
struct Noise {
    i64 seed, position;
    u32 purpose, step;

    // more: 0, or what is added to the purpose.
    __device__ __forceinline__ RandomWords words(u32 more) const {
        return random_words(seed, position, purpose + more, step);
    }
};

// In [0, 1), all 53 bits random.
__device__ __forceinline__ double uniform_of(u64 word) { return static_cast<double>(word >> 11) * 0x1p-53; }
