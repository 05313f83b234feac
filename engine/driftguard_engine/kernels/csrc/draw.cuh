// Weights under a law, and drawing a token by them: by one block of DRAW_THREADS threads.
#pragma once

#include "law.cuh"
#include "philox.cuh"

constexpr int DRAW_THREADS = 256;
constexpr int DRAW_WARPS = DRAW_THREADS / WARP;
constexpr int SHARE = TILE / DRAW_THREADS;  // neighbouring elements that one thread holds
static_assert(SHARE == RUN);

// What a pointer that was kept in shared memory no longer tells the compiler, which would load more slowly.
__device__ __forceinline__ void assume_global(const void* at) {
#ifndef DRIFTGUARD_SIMT
    __builtin_assume(__isGlobal(at));
#endif
}

// A row of logits under its law.
template <typename Logit> struct LawfulRow {
    typedef typename Reader<Logit>::Raw Raw;
    const Logit* logits;
    int size;
    bool whole;  // starts on 16 bytes
    float scale, peak;
    float cut;
    int cut_token;

    __device__ __forceinline__ bool is_cut() const { return cut > -INF; }

    // The lowest logit with which `token` has a weight.
    __device__ __forceinline__ float least_kept(int token) const { return token <= cut_token ? cut : next_above(cut); }

    // Whether `least_kept` is the same for all tokens of the tile that begins at `start`.
    __device__ __forceinline__ bool cuts_evenly(int start) const {
        return cut_token < start || cut_token >= start + TILE - 1;
    }

    // Computed also where it is not kept: a warp selects faster than it branches.
    __device__ __forceinline__ float weigh(float logit, float least) const {
        const float weight = weight_of(logit, peak, scale);
        return logit >= least ? weight : 0.0f;
    }

    __device__ __forceinline__ float weigh_token(int token, float logit) const {
        return weigh(logit, least_kept(token));
    }

    __device__ __forceinline__ void weigh_run(int at, float (&weights)[RUN]) const {
        float logits_here[RUN];
        Reader<Logit>::unpack(Reader<Logit>::read(logits, at, size, whole), logits_here);
#pragma unroll
        for (int place = 0; place < RUN; ++place) {
            weights[place] = weigh(logits_here[place], least_kept(at + place));
        }
    }

    // A run of an even tile (`Masses::even`), and its weights.
    __device__ __forceinline__ Raw read(int at) const {
        assume_global(logits);
        return Reader<Logit>::read(logits, at, at + RUN, true);
    }
    __device__ __forceinline__ void weigh_run(const Raw& run, float least, float (&weights)[RUN]) const {
        float logits_here[RUN];
        Reader<Logit>::unpack(run, logits_here);
#pragma unroll
        for (int place = 0; place < RUN; ++place) weights[place] = weigh(logits_here[place], least);
    }
};

// What a token is drawn by: the weights of the target's row, or what its law has above the draft's.
template <typename Logit> struct Masses {
    static constexpr int AHEAD = sizeof(Logit) == 4 ? 2 : 4;  // runs of a row that are under way at a time
    LawfulRow<Logit> target, draft;
    bool residual;
    int certain;  // residual: token that the draft held for certain, -1 where it has logits
    float target_reciprocal, draft_reciprocal;  // 1 where not residual

    __device__ __forceinline__ bool reads_draft() const { return residual && certain < 0; }

    __device__ __forceinline__ float excess(float target_weight, float draft_weight) const {
        return fmaxf(
            __fsub_rn(__fmul_rn(target_weight, target_reciprocal), __fmul_rn(draft_weight, draft_reciprocal)), 0.0f
        );
    }

    __device__ __forceinline__ void run(int at, float (&masses)[RUN]) const {
        target.weigh_run(at, masses);
        if (!residual) return;
        __syncwarp();  // one row after the other: both at a time take more registers than there are
        float other[RUN];
        if (certain < 0) {
            draft.weigh_run(at, other);
        } else {
#pragma unroll
            for (int place = 0; place < RUN; ++place) other[place] = at + place == certain ? 1.0f : 0.0f;
        }
#pragma unroll
        for (int place = 0; place < RUN; ++place) masses[place] = excess(masses[place], other[place]);
    }

    // Of one token: its logit, and the draft's where that is read.
    __device__ __forceinline__ float of_token(int token, float logit, float draft_logit) const {
        const float weight = target.weigh_token(token, logit);
        if (!residual) return weight;
        const float other = certain < 0 ? draft.weigh_token(token, draft_logit) : token == certain ? 1.0f : 0.0f;
        return excess(weight, other);
    }

    // Adds this lane's runs of an even tile, chunk after chunk: nothing is asked between the loads.
    template <bool READS_DRAFT>
    __device__ __forceinline__ void add_even(int start, float (&sums)[RUN]) const {
        const float least = target.least_kept(start), least_of_draft = READS_DRAFT ? draft.least_kept(start) : 0.0f;
        const int first = start + static_cast<int>(threadIdx.x % WARP) * RUN;
#pragma unroll 1
        for (int chunk = 0; chunk < CHUNKS; chunk += AHEAD) {
            typename Reader<Logit>::Raw of_target[AHEAD], of_draft[AHEAD];
#pragma unroll
            for (int ahead = 0; ahead < AHEAD; ++ahead) {
                of_target[ahead] = target.read(first + (chunk + ahead) * CHUNK);
                if (READS_DRAFT) of_draft[ahead] = draft.read(first + (chunk + ahead) * CHUNK);
            }
            __syncwarp();  // else the assembler moves a load down to where it is used
#pragma unroll
            for (int ahead = 0; ahead < AHEAD; ++ahead) {
                float masses[RUN], other[RUN];
                target.weigh_run(of_target[ahead], least, masses);
                if (READS_DRAFT) draft.weigh_run(of_draft[ahead], least_of_draft, other);
#pragma unroll
                for (int place = 0; place < RUN; ++place) {
                    const float mass = READS_DRAFT ? excess(masses[place], other[place])
                                                   : __fmul_rn(masses[place], target_reciprocal);
                    sums[place] = __fadd_rn(sums[place], mass);
                }
            }
        }
    }

    // Whether all tokens of the tile that begins at `start` are treated alike, and read 16 bytes at a time.
    __device__ __forceinline__ bool even(int start) const {
        if (start + TILE > target.size || !target.whole || !target.cuts_evenly(start)) return false;
        if (reads_draft()) return draft.whole && draft.cuts_evenly(start);
        return certain < start || certain >= start + TILE;
    }
};

// Mass of the tile that begins at `start`, by one warp, the same in every lane, in the order of `tiles.tile_sums`.
template <typename Logit> __device__ __forceinline__ float mass_of_tile(const Masses<Logit>& masses, int start) {
    float sums[RUN] = {};
    if (!masses.even(start)) {
#pragma unroll 1
        for (int chunk = 0; chunk < CHUNKS; ++chunk) {
            float run[RUN];
            masses.run(start + chunk * CHUNK + static_cast<int>(threadIdx.x % WARP) * RUN, run);
#pragma unroll
            for (int place = 0; place < RUN; ++place) sums[place] = __fadd_rn(sums[place], run[place]);
        }
    } else if (masses.reads_draft()) {
        masses.template add_even<true>(start, sums);
    } else {
        masses.template add_even<false>(start, sums);
    }
    return sum_by_halves(lane_sum(sums));
}

// Of a mass, which is 0 or normal in double: its exponent as it is stored, which is frexp's plus 1022.
__device__ __forceinline__ u32 exponent_of(double mass) { return static_cast<u32>(__double_as_longlong(mass) >> 52); }

// 2 ** (MASS_BITS - e), where e is the largest mass's exponent as frexp counts it.
__device__ __forceinline__ double unit_of(u32 largest_exponent) {
    return __longlong_as_double((MASS_BITS + 1022 + 1023 - static_cast<i64>(largest_exponent)) << 52);
}

// As `pick`, by one warp, the same in every lane: lane l holds the masses l x each ..., as mass_of(index) tells.
template <typename MassOf>
__device__ __forceinline__ int pick_by_warp(int each, const MassOf& mass_of, u64 word) {
    const int lane = threadIdx.x % WARP, first = lane * each;
    u32 largest = 0;
    for (int place = 0; place < each; ++place) largest = max(largest, exponent_of(mass_of(first + place)));
    const double unit = unit_of(__reduce_max_sync(FULL_WARP, largest));
    u64 own = 0;
    for (int place = 0; place < each; ++place) own += __double2ull_rz(__dmul_rn(mass_of(first + place), unit));
    const u64 up_to = sum_up_to(own), total = __shfl_sync(FULL_WARP, up_to, WARP - 1);
    const u64 threshold = __umul64hi(total, word);
    u64 before = up_to - own;
    const u32 holders = __ballot_sync(FULL_WARP, before <= threshold && threshold < up_to);
    int picked = 0;
    for (; picked < each - 1; ++picked) {
        before += __double2ull_rz(__dmul_rn(mass_of(first + picked), unit));
        if (threshold < before) break;
    }
    // No holder: all masses are 0.
    return holders == 0 ? WARP * each - 1 : __shfl_sync(FULL_WARP, first + picked, __ffs(holders) - 1);
}

// What every thread picks from, beside each other: in registers it would take a third of them.
typedef double Held[SHARE][DRAW_THREADS];

struct PickScratch {
    u32 exponents[DRAW_WARPS];
    u64 totals[DRAW_WARPS];
    int picked;
};

// First index whose cumulative mass exceeds word / 2**64 of the total (`inverse_cdf.pick`), in integers: exact,
// so that it does not matter how the masses are shared out. Thread t holds masses t x SHARE ...; zero beyond.
__device__ inline int pick(const Held& held, u64 word, PickScratch& scratch) {
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    u32 largest = 0;
#pragma unroll
    for (int place = 0; place < SHARE; ++place) largest = max(largest, exponent_of(held[place][threadIdx.x]));
    largest = __reduce_max_sync(FULL_WARP, largest);
    __syncthreads();  // the scratch may still be read from the time before
    if (lane == 0) scratch.exponents[warp] = largest;
    if (threadIdx.x == 0) scratch.picked = TILE - 1;
    __syncthreads();
#pragma unroll
    for (int other = 0; other < DRAW_WARPS; ++other) largest = max(largest, scratch.exponents[other]);

    const double unit = unit_of(largest);
    u64 own = 0;
#pragma unroll
    for (int place = 0; place < SHARE; ++place) own += __double2ull_rz(__dmul_rn(held[place][threadIdx.x], unit));
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
            const u64 mass = __double2ull_rz(__dmul_rn(held[place][threadIdx.x], unit));
            if (before <= threshold && threshold < before + mass) scratch.picked = threadIdx.x * SHARE + place;
            before += mass;
        }
    }
    __syncthreads();
    return scratch.picked;
}

// The tile by words.second, the token in it by words.first.
template <typename Logit>
__device__ __forceinline__ int draw(
    const TileMasses& tile_masses, const Masses<Logit>& masses, const RandomWords& words, Held& held,
    PickScratch& scratch
) {
    const int tiles = (masses.target.size + TILE - 1) / TILE, first = threadIdx.x * SHARE;
    int start = 0;
#pragma unroll 1  // one copy of `pick`: it is long
    for (int inside = 0; inside < 2; ++inside) {
        if (inside == 0) {
#pragma unroll 1
            for (int place = 0; place < SHARE; ++place) {
                held[place][threadIdx.x] = first + place < tiles ? tile_masses.of(first + place) : 0.0;
            }
        } else {
            float run[RUN];
            masses.run(start + first, run);
#pragma unroll
            for (int place = 0; place < RUN; ++place) held[place][threadIdx.x] = run[place];
        }
        const int picked = pick(held, inside == 0 ? words.second : words.first, scratch);
        start = inside == 0 ? picked * TILE : start + picked;
    }
    return start;
}

// `verify.propose`, by one warp, the same in every lane. tile_masses, lane_sums [tiles x 32]: of the row, uncut.
template <typename Logit>
__device__ __forceinline__ int propose(
    const TileMasses& tile_masses, const float* lane_sums, const Masses<Logit>& masses, const Noise& noise, int number
) {
    const LawfulRow<Logit>& row = masses.target;
    const RandomWords first = noise.words(number * PROPOSED), more = noise.words(number * PROPOSED + MORE);
    const int tiles = (row.size + TILE - 1) / TILE, lane = threadIdx.x % WARP;
    const auto of_tile = [&](int tile) { return tile < tiles ? tile_masses.of(tile) : 0.0; };
    const int tile = pick_by_warp((tiles + WARP - 1) / WARP, of_tile, first.second);
    const double sum = lane_sums[tile * WARP + lane];
    const int share = pick_by_warp(1, [&](int) { return sum; }, more.second);

    // Two neighbours of the share's tokens in each lane.
    constexpr int EACH = TILE / WARP / WARP;
    const int at = tile * TILE + lane * EACH / RUN * CHUNK + share * RUN + lane * EACH % RUN;
    float logits[EACH], draft_logits[EACH];
    double weights[EACH];
#pragma unroll
    for (int place = 0; place < EACH; ++place) {
        const bool exists = at + place < row.size;
        logits[place] = exists ? Reader<Logit>::one(row.logits, at + place) : -INF;
        // Of every token that may be picked: to ask for that of the one that is would take as long again.
        draft_logits[place] = exists && masses.reads_draft() ? Reader<Logit>::one(masses.draft.logits, at + place) : 0.0f;
    }
#pragma unroll
    for (int place = 0; place < EACH; ++place) {
        weights[place] = logits[place] > -INF ? weight_of(logits[place], row.peak, row.scale) : 0.0f;
    }
    const int within = pick_by_warp(
        EACH, [&](int index) { return index % EACH == 0 ? weights[0] : weights[1]; }, first.first
    );
    const bool second = within % EACH != 0;  // of the lane that holds it; the others' answers are not asked for
    const int token = at + second;
    const float mass = masses.of_token(token, second ? logits[1] : logits[0], second ? draft_logits[1] : draft_logits[0]);
    const float weight = static_cast<float>(second ? weights[1] : weights[0]);
    const double bound = __dmul_rn(uniform_of(more.first), __fmul_rn(weight, masses.target_reciprocal));
    return __shfl_sync(FULL_WARP, bound < mass ? token : -1, within / EACH);
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
