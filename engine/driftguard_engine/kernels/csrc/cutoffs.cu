// Where top-k and top-p end: the last logit that stays, its token, and the sum of the weights that stay, for each
// row of a request that asks for it (`distribution._cut`). A block per row.
//
// K1 left the maximum of every 128 logits (a lane's share of a tile). Of n such maxima, n or more logits are at
// least as large as the smallest; so the k largest logits lie in the shares whose maximum is among the k largest, and
// only those are read. The nucleus of top-p is looked for among the likeliest NUCLEUS in the same way (in a row of fewer
// shares, among as many as most of them). Where that was too few, or more than fit, the row is searched whole, by bits.
// Both ways find the same cut: weights are added as integers.
#include "arithmetic.cuh"

constexpr int CUT_THREADS = 512;
constexpr int CUT_WARPS = CUT_THREADS / WARP;
constexpr int CANDIDATES = 4096;
constexpr int EACH = CANDIDATES / CUT_THREADS;
constexpr int NUCLEUS = 512;

// Unsigned, in the order of the numbers; both zeros are the same.
__device__ __forceinline__ u32 key_of(float logit) {
    const u32 bits = __float_as_uint(__fadd_rn(logit, 0.0f));
    return bits >> 31 ? ~bits : bits | 0x80000000u;
}
__device__ __forceinline__ float logit_of(u32 key) {
    return __uint_as_float(key >> 31 ? key & 0x7fffffffu : ~key);
}
constexpr u32 KEY_OF_MINUS_INFINITY = 0x007fffffu;

struct Asked {
    int top_k;     // 0: off
    double top_p;  // 1: off
    __device__ __forceinline__ bool limited() const { return top_k > 0; }
};

struct Cut {
    float logit;
    int token;
    u64 kept;  // sum of the weights that stay, in units of 1 / FIXED_ONE
};

template <typename Logit> struct Row {
    const Logit* logits;
    int size;
    bool whole;
    float scale, peak;
    double normaliser;
    const float* lane_maxima;

    __device__ __forceinline__ u64 weight(u32 key) const { return fixed_weight(weight_of(logit_of(key), peak, scale)); }
};

struct CutScratch {
    u64 entries[CANDIDATES];
    u64 sums[CUT_WARPS];
    u64 total;
    u32 counts[CUT_WARPS];
    u32 filled;
    int below;
    Cut cut;
};

// Sum over the block, the same in every thread.
template <typename Number> __device__ __forceinline__ Number block_sum(Number value, Number* of_warps) {
    value = sum_by_halves(value);
    __syncthreads();
    if (threadIdx.x % WARP == 0) of_warps[threadIdx.x / WARP] = value;
    __syncthreads();
    Number total = 0;
#pragma unroll
    for (int warp = 0; warp < CUT_WARPS; ++warp) total += of_warps[warp];
    return total;
}

// Sum over the threads before this one.
template <typename Number> __device__ __forceinline__ Number sum_before(Number own, Number* of_warps) {
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    Number up_to = own;
#pragma unroll
    for (int below = 1; below < WARP; below *= 2) {
        const Number other = __shfl_up_sync(FULL_WARP, up_to, below);
        if (lane >= below) up_to += other;
    }
    __syncthreads();
    if (lane == WARP - 1) of_warps[warp] = up_to;
    __syncthreads();
    Number before = up_to - own;
    for (int other = 0; other < warp; ++other) before += of_warps[other];
    return before;
}

// Bitonic, ascending, of `size` entries, a power of two.
__device__ inline void sort(u64* entries, int size) {
    for (int run = 2; run <= size; run *= 2) {
        for (int apart = run / 2; apart > 0; apart /= 2) {
            __syncthreads();
            for (int pair = threadIdx.x; pair < size / 2; pair += CUT_THREADS) {
                const int low = pair / apart * 2 * apart + pair % apart, high = low + apart;
                const u64 a = entries[low], b = entries[high];
                if (((low & run) == 0) == (a > b)) entries[low] = b, entries[high] = a;
            }
        }
    }
    __syncthreads();
}

__device__ __forceinline__ int power_of_two_from(int count) {
    int size = 1;
    while (size < count) size *= 2;
    return size;
}

// The `rank`-th largest of the shares' maxima (1 is the largest); -inf where the row has fewer.
template <typename Logit> __device__ __forceinline__ float bound_by_shares(const Row<Logit>& row, int shares, int rank, u64* entries) {
    if (rank > shares) return -INF;
    const int size = power_of_two_from(shares);
    for (int share = threadIdx.x; share < size; share += CUT_THREADS) {
        entries[share] = share < shares ? static_cast<u64>(~key_of(row.lane_maxima[share])) : ~0ull;
    }
    sort(entries, size);
    const float bound = logit_of(~static_cast<u32>(entries[rank - 1]));
    __syncthreads();
    return bound;
}

// Every logit from the bound on, as (key descending, token ascending), into the entries. Returns how many there
// are, which may be more than fit.
template <typename Logit>
__device__ __forceinline__ u32 gather(const Row<Logit>& row, int shares, float bound, CutScratch& scratch) {
    if (threadIdx.x == 0) scratch.filled = 0;
    __syncthreads();
    for (int unit = threadIdx.x; unit < shares * CHUNKS; unit += CUT_THREADS) {
        const int share = unit / CHUNKS;
        if (row.lane_maxima[share] < bound) continue;
        const int at = share / WARP * TILE + unit % CHUNKS * CHUNK + share % WARP * RUN;
        if (at >= row.size) continue;
        float logits[RUN];
        Reader<Logit>::unpack(Reader<Logit>::read(row.logits, at, row.size, row.whole), logits);
#pragma unroll
        for (int place = 0; place < RUN; ++place) {
            if (logits[place] >= bound && logits[place] > -INF) {
                const u32 slot = atomicAdd(&scratch.filled, 1u);
                if (slot < CANDIDATES) {
                    scratch.entries[slot] = static_cast<u64>(~key_of(logits[place])) << 32 | static_cast<u32>(at + place);
                }
            }
        }
    }
    __syncthreads();
    return scratch.filled;
}

// Among the sorted entries; false where the nucleus may reach beyond them. `complete`: there is nothing beyond.
template <typename Logit>
__device__ __forceinline__ bool cut_among(const Row<Logit>& row, const Asked& asked, int filled, bool complete, CutScratch& scratch) {
    const int first = threadIdx.x * EACH;
    u64 held[EACH];
    u64 own = 0;
#pragma unroll
    for (int place = 0; place < EACH; ++place) {
        if (first + place < filled) own += row.weight(~static_cast<u32>(scratch.entries[first + place] >> 32));
        held[place] = own;
    }
    const u64 before = sum_before(own, scratch.sums);
#pragma unroll
    for (int place = 0; place < EACH; ++place) held[place] += before;

    const int limit = asked.limited() && asked.top_k < filled ? asked.top_k : filled;
    if (threadIdx.x == 0) scratch.below = 0;
#pragma unroll
    for (int place = 0; place < EACH; ++place) {
        if (first + place == limit - 1) scratch.total = held[place];
    }
    __syncthreads();
    int count = limit;
    if (asked.top_p < 1.0) {
        const double total = asked.limited() ? static_cast<double>(scratch.total) : __dmul_rn(row.normaliser, FIXED_ONE);
        const double goal = __dmul_rn(asked.top_p, total);
        int below = 0;
#pragma unroll
        for (int place = 0; place < EACH; ++place) {
            below += first + place < limit && static_cast<double>(held[place]) < goal;
        }
        atomicAdd(&scratch.below, below);
        __syncthreads();
        if (scratch.below == limit && !asked.limited() && !complete) return false;
        count = scratch.below + 1 < limit ? scratch.below + 1 : limit;
    }
#pragma unroll
    for (int place = 0; place < EACH; ++place) {
        if (first + place == count - 1) {
            const u64 entry = scratch.entries[first + place];
            scratch.cut = {logit_of(~static_cast<u32>(entry >> 32)), static_cast<int>(entry & 0xffffffffu), held[place]};
        }
    }
    __syncthreads();
    return true;
}

struct Tally { u32 count; u64 mass; };

// How many logits lie above `key`, and their weight. Never -inf's: `key` is at least its.
template <typename Logit> __device__ __forceinline__ Tally above(const Row<Logit>& row, u32 key, CutScratch& scratch) {
    u32 count = 0;
    u64 mass = 0;
    for (int at = threadIdx.x * RUN; at < row.size; at += CUT_THREADS * RUN) {
        float logits[RUN];
        Reader<Logit>::unpack(Reader<Logit>::read(row.logits, at, row.size, row.whole), logits);
#pragma unroll
        for (int place = 0; place < RUN; ++place) {
            const u32 here = key_of(logits[place]);
            if (here > key) ++count, mass += row.weight(here);
        }
    }
    return {block_sum(count, scratch.counts), block_sum(mass, scratch.sums)};
}

// Largest key such that it and the keys above reach `goal`; -inf's where all together do not.
template <typename Logit, typename Reaches>
__device__ __forceinline__ u32 search(const Row<Logit>& row, const Reaches& reaches, CutScratch& scratch) {
    u32 found = 0;
    for (u32 bit = 0x80000000u; bit != 0; bit >>= 1) {
        const u32 trial = found | bit;
        if (trial <= KEY_OF_MINUS_INFINITY + 1 || reaches(above(row, trial - 1, scratch))) found = trial;
    }
    return found > KEY_OF_MINUS_INFINITY ? found : KEY_OF_MINUS_INFINITY;
}

// Token of the `rank`-th (from 1, by token) logit that has this key.
template <typename Logit> __device__ __forceinline__ int tied_token(const Row<Logit>& row, u32 key, u32 rank, CutScratch& scratch) {
    const int each = (row.size + CUT_THREADS - 1) / CUT_THREADS;
    const int first = threadIdx.x * each, end = min(first + each, row.size);
    u32 own = 0;
    for (int at = first; at < end; ++at) own += key_of(Reader<Logit>::one(row.logits, at)) == key;
    u32 place = sum_before(own, scratch.counts);
    if (place < rank && rank <= place + own) {
        for (int at = first; at < end; ++at) {
            if (key_of(Reader<Logit>::one(row.logits, at)) == key && ++place == rank) scratch.below = at;
        }
    }
    __syncthreads();
    return scratch.below;
}

// Of `ties` equal logits, weighing `weight` each: how many stay until what is held reaches the goal.
__device__ __forceinline__ u32 ties_until(u64 held, u64 weight, u32 ties, double goal) {
    u32 low = 1, high = ties;
    while (low < high) {
        const u32 middle = low + (high - low) / 2;
        if (static_cast<double>(held + middle * weight) < goal) low = middle + 1; else high = middle;
    }
    return low;
}

template <typename Logit> __device__ __forceinline__ void cut_by_search(const Row<Logit>& row, const Asked& asked, CutScratch& scratch) {
    const u32 possible = above(row, KEY_OF_MINUS_INFINITY, scratch).count;
    const u32 limit = asked.limited() && static_cast<u32>(asked.top_k) < possible ? asked.top_k : possible;
    u32 key = search(row, [=](const Tally& tally) { return tally.count >= limit; }, scratch);
    Tally higher = above(row, key, scratch);
    u32 staying = limit - higher.count;
    if (asked.top_p < 1.0) {
        const double total = asked.limited() ? static_cast<double>(higher.mass + staying * row.weight(key))
                                             : __dmul_rn(row.normaliser, FIXED_ONE);
        const double goal = __dmul_rn(asked.top_p, total);
        // The likeliest token always stays, also where its weight is not asked for.
        const u32 last = search(
            row, [=](const Tally& tally) { return tally.count > 0 && static_cast<double>(tally.mass) >= goal; }, scratch
        );
        if (last > key) {
            key = last;
            higher = above(row, key, scratch);
            staying = above(row, key - 1, scratch).count - higher.count;
        }
        if (last >= key) staying = ties_until(higher.mass, row.weight(key), staying, goal);
    }
    const int token = tied_token(row, key, staying, scratch);
    if (threadIdx.x == 0) scratch.cut = {logit_of(key), token, higher.mass + staying * row.weight(key)};
    __syncthreads();
}

// Grid: batch x steps blocks of CUT_THREADS threads. Arguments as `row_statistics`, after which it runs; normalisers,
// cuts and cut_tokens are written anew for the rows of requests that ask for top-k or top-p.
template <typename Logit>
__device__ __forceinline__ void row_cutoffs(
    const Logit* __restrict__ logits, i64 row_stride, int steps, int size, const int* __restrict__ lengths,
    const float* __restrict__ scales, const int* __restrict__ top_k, const float* __restrict__ top_p, int law_stride,
    int law_offset, const float* __restrict__ lane_maxima, const float* __restrict__ peaks, double* normalisers,
    float* cuts, int* cut_tokens
) {
    __shared__ CutScratch scratch;
    const int request = blockIdx.x / steps, step = blockIdx.x % steps;
    const i64 law = static_cast<i64>(request) * law_stride + law_offset + step;
    const Asked asked = {
        top_k[request] > 0 && top_k[request] < size ? top_k[request] : 0,
        top_p[request] < 1.0f ? static_cast<double>(top_p[request]) : 1.0,
    };
    if (scales[request] == 0.0f || (!asked.limited() && asked.top_p == 1.0)) return;
    if (lengths != nullptr && step > lengths[request]) return;
    if (!(peaks[law] > -INF && peaks[law] < INF)) return;  // no law: verification says so

    const int tiles = (size + TILE - 1) / TILE, shares = tiles * WARP;
    const Logit* at = logits + static_cast<i64>(blockIdx.x) * row_stride;
    const Row<Logit> row = {
        at, size, starts_on_16_bytes(at), scales[request], peaks[law], normalisers[law], lane_maxima + law * shares,
    };
    bool found = false;
    if (shares <= CANDIDATES) {
        // Not by the smallest maxima of all: a short last tile leaves some at -inf.
        const int rank = asked.limited() ? asked.top_k : min(NUCLEUS, shares - shares / 8);
        const float bound = size <= CANDIDATES ? -INF : bound_by_shares(row, shares, rank, scratch.entries);
        const u32 filled = gather(row, shares, bound, scratch);
        if (filled <= CANDIDATES) {
            const int count = static_cast<int>(filled), sorted = power_of_two_from(count);
            for (int slot = count + threadIdx.x; slot < sorted; slot += CUT_THREADS) scratch.entries[slot] = ~0ull;
            sort(scratch.entries, sorted);
            found = cut_among(row, asked, count, bound == -INF, scratch);
        }
    }
    if (!found) cut_by_search(row, asked, scratch);
    if (threadIdx.x == 0) {
        cuts[law] = scratch.cut.logit, cut_tokens[law] = scratch.cut.token;
        normalisers[law] = __dmul_rn(static_cast<double>(scratch.cut.kept), 1.0 / FIXED_ONE);
    }
}

#define ROW_CUTOFFS(NAME, LOGIT)                                                                                  \
    extern "C" __global__ void __launch_bounds__(CUT_THREADS) NAME(                                               \
        const LOGIT* logits, i64 row_stride, int steps, int size, const int* lengths, const float* scales,        \
        const int* top_k, const float* top_p, int law_stride, int law_offset, const float* lane_maxima,           \
        const float* peaks, double* normalisers, float* cuts, int* cut_tokens                                     \
    ) {                                                                                                           \
        row_cutoffs(                                                                                              \
            logits, row_stride, steps, size, lengths, scales, top_k, top_p, law_stride, law_offset, lane_maxima,  \
            peaks, normalisers, cuts, cut_tokens                                                                  \
        );                                                                                                        \
    }

ROW_CUTOFFS(row_cutoffs_bf16, Bf16)
ROW_CUTOFFS(row_cutoffs_fp16, Fp16)
ROW_CUTOFFS(row_cutoffs_fp32, Fp32)
