// The law of a row (`distribution.TokenDistributions`), from what K1 leaves of its tiles.
#pragma once

#include "maxima.cuh"

struct RowLaw {
    double normaliser;
    float peak;
    float cut;  // the lowest logit that stays, up to this token; -INF: all stay
    int cut_token;

    __device__ __forceinline__ bool exists() const { return peak > -INF && peak < INF; }
};

// What a tile weighs against the row's peak: a product of two float32, exact in double.
__device__ __forceinline__ double mass_of(float sum, float maximum, float peak, float scale) {
    return __dmul_rn(sum, weight_of(maximum, peak, scale));
}

// Masses of a row's tiles: as K1 summed them, else as `mass_of_tile` (draw.cuh) did.
struct TileMasses {
    const float* maxima;
    const float* sums;
    float peak, scale;
    const volatile float* anew;  // null: as K1 summed them

    __device__ __forceinline__ double of(int tile) const {
        return anew == nullptr ? mass_of(sums[tile], maxima[tile], peak, scale) : static_cast<double>(anew[tile]);
    }
};

// Laws as K1 and `row_cutoffs` leave them, one row after another.
struct LawTable {
    const float* tile_maxima;  // [., tiles]
    const float* tile_sums;    // [., tiles]
    const float* lane_sums;    // [., tiles x 32]
    const float* cuts;
    const int* cut_tokens;
    const double* kept;  // the normaliser, where there is a cut

    // lawful: this row, as a `LawfulRow` (draw.cuh). anew: null, or the masses of its tiles.
    template <typename Lawful>
    __device__ __forceinline__ TileMasses masses_of(i64 row, const Lawful& lawful, const float* anew) const {
        const i64 first = row * ((lawful.size + TILE - 1) / TILE);
        return {tile_maxima + first, tile_sums + first, lawful.peak, lawful.scale, anew};
    }
};

// The laws of N rows at a time, which takes little longer than one, as if all tokens stayed. By one warp, the same in
// every lane. Lane l adds tiles l, l + 32, ...: the order of `tiles.row_sum`.
template <int N>
__device__ __forceinline__ void uncut_laws_of(
    const LawTable& table, const i64 (&rows)[N], int tiles, float scale, RowLaw (&laws)[N]
) {
    // Of a vocabulary of 131,072 tokens all is read at once: later reads would wait for earlier ones.
    constexpr int AHEAD = 2;
    const int lane = threadIdx.x % WARP;
    float maxima[N][AHEAD], sums[N][AHEAD];
#pragma unroll
    for (int ahead = 0; ahead < AHEAD; ++ahead) {
        const int tile = ahead * WARP + lane;
#pragma unroll
        for (int n = 0; n < N; ++n) {
            const i64 at = rows[n] * tiles + tile;
            maxima[n][ahead] = tile < tiles ? table.tile_maxima[at] : -INF;
            sums[n][ahead] = tile < tiles ? table.tile_sums[at] : 0.0f;
        }
    }
#pragma unroll
    for (int n = 0; n < N; ++n) {
        laws[n] = {0.0, maxima[n][0], -INF, -1};
#pragma unroll
        for (int ahead = 1; ahead < AHEAD; ++ahead) laws[n].peak = max_or_nan(laws[n].peak, maxima[n][ahead]);
    }
#pragma unroll 1
    for (int tile = AHEAD * WARP + lane; tile < tiles; tile += WARP) {
#pragma unroll
        for (int n = 0; n < N; ++n) {
            laws[n].peak = max_or_nan(laws[n].peak, table.tile_maxima[rows[n] * tiles + tile]);
        }
    }
#pragma unroll
    for (int n = 0; n < N; ++n) laws[n].peak = warp_max_or_nan(laws[n].peak);
#pragma unroll
    for (int ahead = 0; ahead < AHEAD; ++ahead) {
#pragma unroll
        for (int n = 0; n < N; ++n) {
            const double mass = mass_of(sums[n][ahead], maxima[n][ahead], laws[n].peak, scale);
            laws[n].normaliser = __dadd_rn(laws[n].normaliser, mass);
        }
    }
#pragma unroll 1
    for (int tile = AHEAD * WARP + lane; tile < tiles; tile += WARP) {
#pragma unroll
        for (int n = 0; n < N; ++n) {
            const i64 at = rows[n] * tiles + tile;
            const double mass = mass_of(table.tile_sums[at], table.tile_maxima[at], laws[n].peak, scale);
            laws[n].normaliser = __dadd_rn(laws[n].normaliser, mass);
        }
    }
#pragma unroll
    for (int other = WARP / 2; other > 0; other /= 2) {
#pragma unroll
        for (int n = 0; n < N; ++n) laws[n].normaliser += __shfl_xor_sync(FULL_WARP, laws[n].normaliser, other);
    }
}

// The same, with the cuts of these rows.
template <int N>
__device__ __forceinline__ void laws_of(
    const LawTable& table, const i64 (&rows)[N], int tiles, float scale, RowLaw (&laws)[N]
) {
    uncut_laws_of(table, rows, tiles, scale, laws);
#pragma unroll
    for (int n = 0; n < N; ++n) {
        laws[n].cut = table.cuts[rows[n]], laws[n].cut_token = table.cut_tokens[rows[n]];
        if (laws[n].cut > -INF) laws[n].normaliser = table.kept[rows[n]];
    }
}
