// Weights under a law, and drawing a token by them: by one block of DRAW_THREADS threads.
#pragma once

#include "arithmetic.cuh"
#include "philox.cuh"

constexpr int DRAW_THREADS = 256;
constexpr int DRAW_WARPS = DRAW_THREADS / WARP;
constexpr int SHARE = TILE / DRAW_THREADS;  // neighbouring elements that one thread holds: two runs

// A row of logits under its law (`distribution.Laws`).
template <typename Logit> struct LawfulRow {
    const Logit* logits;
    int size;
    bool whole;  // starts on 16 bytes
    float scale, peak;
    double normaliser;
    float cut;
    int cut_token;

    __device__ __forceinline__ bool is_cut() const { return cut > -INF; }

    __device__ __forceinline__ float weigh(float logit, int token) const {
        const bool kept = logit > cut || (logit == cut && token <= cut_token);
        return kept ? weight_of(logit, peak, scale) : 0.0f;
    }

    __device__ __forceinline__ void weigh_run(int at, float (&weights)[RUN]) const {
        float logits_here[RUN];
        Reader<Logit>::unpack(Reader<Logit>::read(logits, at, size, whole), logits_here);
#pragma unroll
        for (int place = 0; place < RUN; ++place) weights[place] = weigh(logits_here[place], at + place);
    }
};

// What a token is drawn by: the weights of the target's row, or what its law has above the draft's.
template <typename Logit> struct Masses {
    LawfulRow<Logit> target, draft;
    bool residual;
    int certain;  // residual: token that the draft held for certain, -1 where it has logits
    float target_reciprocal, draft_reciprocal;

    __device__ __forceinline__ void run(int at, float (&masses)[RUN]) const {
        target.weigh_run(at, masses);
        if (!residual) return;
        float other[RUN];
        if (certain < 0) {
            draft.weigh_run(at, other);
        } else {
#pragma unroll
            for (int place = 0; place < RUN; ++place) other[place] = at + place == certain ? 1.0f : 0.0f;
        }
#pragma unroll
        for (int place = 0; place < RUN; ++place) {
            const float excess = __fsub_rn(
                __fmul_rn(masses[place], target_reciprocal), __fmul_rn(other[place], draft_reciprocal)
            );
            masses[place] = excess > 0.0f ? excess : 0.0f;
        }
    }
};

// Mass of one tile, by one warp, in the order of `tiles.tile_sums`.
template <typename Logit>
__device__ __forceinline__ float mass_of_tile(const Masses<Logit>& masses, int size, int tile) {
    float sums[RUN] = {};
    const int lane = threadIdx.x % WARP;
#pragma unroll 1
    for (int chunk = 0; chunk < CHUNKS; ++chunk) {
        const int start = tile * TILE + chunk * CHUNK;
        if (start >= size) break;
        float here[RUN];
        masses.run(start + lane * RUN, here);
#pragma unroll
        for (int place = 0; place < RUN; ++place) sums[place] = __fadd_rn(sums[place], here[place]);
    }
    return tile_sum(sums);
}

// Inclusive sum over the warp's lanes.
__device__ __forceinline__ u64 sum_up_to(u64 value) {
    const int lane = threadIdx.x % WARP;
#pragma unroll
    for (int below = 1; below < WARP; below *= 2) {
        const u64 other = __shfl_up_sync(FULL_WARP, value, below);
        if (lane >= below) value += other;
    }
    return value;
}

struct PickScratch {
    double maxima[DRAW_WARPS];
    u64 totals[DRAW_WARPS];
    int picked;
};

// First index whose cumulative mass exceeds word / 2**64 of the total (`inverse_cdf.pick`), in integers: exact,
// so that it does not matter how the masses are shared out. Thread t holds masses t x SHARE ...; zero beyond.
__device__ inline int pick(const double (&masses)[SHARE], u64 word, PickScratch& scratch) {
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    double largest = 0.0;
#pragma unroll
    for (int place = 0; place < SHARE; ++place) largest = masses[place] > largest ? masses[place] : largest;
#pragma unroll
    for (int other = WARP / 2; other > 0; other /= 2) {
        const double theirs = __shfl_xor_sync(FULL_WARP, largest, other);
        largest = theirs > largest ? theirs : largest;
    }
    __syncthreads();  // the scratch may still be read from the time before
    if (lane == 0) scratch.maxima[warp] = largest;
    if (threadIdx.x == 0) scratch.picked = TILE - 1;
    __syncthreads();
#pragma unroll
    for (int other = 0; other < DRAW_WARPS; ++other) {
        largest = scratch.maxima[other] > largest ? scratch.maxima[other] : largest;
    }

    // 2 ** (MASS_BITS - e), where e is the largest mass's exponent as frexp counts it; masses are normal in double.
    const i64 exponent = (__double_as_longlong(largest) >> 52 & 0x7ff) - 1022;
    const double unit = __longlong_as_double((MASS_BITS - exponent + 1023) << 52);
    u64 own = 0;
#pragma unroll
    for (int place = 0; place < SHARE; ++place) own += __double2ull_rz(__dmul_rn(masses[place], unit));
    const u64 up_to = sum_up_to(own);
    if (lane == WARP - 1) scratch.totals[warp] = up_to;
    __syncthreads();
    u64 before = up_to - own, total = 0;
#pragma unroll
    for (int other = 0; other < DRAW_WARPS; ++other) {
        if (other < warp) before += scratch.totals[other];
        total += scratch.totals[other];
    }
    const u64 threshold = __umul64hi(total, word);
    if (before <= threshold && threshold < before + own) {
#pragma unroll
        for (int place = 0; place < SHARE; ++place) {
            const u64 mass = __double2ull_rz(__dmul_rn(masses[place], unit));
            if (before <= threshold && threshold < before + mass) scratch.picked = threadIdx.x * SHARE + place;
            before += mass;
        }
    }
    __syncthreads();
    return scratch.picked;
}

// Masses of a row's tiles: as K1 summed them, else as `mass_of_tile` did.
struct TileMasses {
    const double* summed;  // null: `anew` counts
    const volatile float* anew;
    __device__ __forceinline__ double of(int tile) const {
        return summed != nullptr ? summed[tile] : static_cast<double>(anew[tile]);
    }
};

// The tile by words.second, the token in it by words.first.
template <typename Logit>
__device__ __forceinline__ int draw(
    const TileMasses& tile_masses, const Masses<Logit>& masses, int size, const RandomWords& words, PickScratch& scratch
) {
    const int tiles = (size + TILE - 1) / TILE, first = threadIdx.x * SHARE;
    int start = 0;
#pragma unroll 1  // one copy of `pick`: it is long, and called once per launch
    for (int inside = 0; inside < 2; ++inside) {
        double held[SHARE];
        if (inside == 0) {
#pragma unroll
            for (int place = 0; place < SHARE; ++place) {
                held[place] = first + place < tiles ? tile_masses.of(first + place) : 0.0;
            }
        } else {
            float run[RUN];
#pragma unroll
            for (int half = 0; half < SHARE / RUN; ++half) {
                masses.run(start + first + half * RUN, run);
#pragma unroll
                for (int place = 0; place < RUN; ++place) held[half * RUN + place] = run[place];
            }
        }
        const int picked = pick(held, inside == 0 ? words.second : words.first, scratch);
        start = inside == 0 ? picked * TILE : start + picked;
    }
    return start;
}

// By one warp: the lowest token whose logit is the row's maximum. -1 where there is none (NaN).
template <typename Logit>
__device__ __forceinline__ int argmax_of(const Logit* row, int size, float peak, const float* tile_maxima) {
    const int lane = threadIdx.x % WARP;
    const int tiles = (size + TILE - 1) / TILE;
    int tile = -1;
    for (int first = 0; first < tiles && tile < 0; first += WARP) {
        const u32 found = __ballot_sync(FULL_WARP, first + lane < tiles && tile_maxima[first + lane] == peak);
        if (found != 0) tile = first + __ffs(found) - 1;
    }
    if (tile < 0) return -1;
    const bool whole = starts_on_16_bytes(row);
#pragma unroll 1
    for (int chunk = 0; chunk < CHUNKS; ++chunk) {
        const int at = tile * TILE + chunk * CHUNK + lane * RUN;
        float logits[RUN];
        Reader<Logit>::unpack(Reader<Logit>::read(row, at, size, whole), logits);
        int place = RUN;
#pragma unroll
        for (int other = RUN - 1; other >= 0; --other) place = logits[other] == peak ? other : place;
        const u32 found = __ballot_sync(FULL_WARP, place < RUN);
        if (found != 0) {
            const int holder = __ffs(found) - 1;
            return __shfl_sync(FULL_WARP, at + place, holder);
        }
    }
    return -1;
}
