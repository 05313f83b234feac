// Where top-k and top-p end: the last logit that stays, its token, and the sum of the weights that stay, for each
// row of a request that asks for it (`distribution._cut`).
//
// K1 left the maximum of every 64 logits (a lane's share of a tile). Of n such maxima, n or more logits are at
// least as large as the smallest; so the k largest logits lie in the shares whose maximum is among the k largest. And
// the tokens below (1 - top_p) x normaliser / V hold less than 1 - top_p together; so the nucleus lies in the shares
// whose maximum weighs more. Where these are at most half of the shares, one block reads only those and sorts what it
// finds.
//
// Elsewhere, or where that was more than fits, the row is read whole, and all blocks of the row add to a histogram; the
// last one to come goes on alone. Of bfloat16 a bin holds equal logits: that their number times their weight is added
// up leaves the search for the last of those that stay. Of other types a bin holds the number and the weights of logits
// whose weights' logarithms are near: those of the bin that holds the cut are gathered and sorted. Only where they are
// more than fit, they are narrowed by a radix select first, over the bits of their keys in which they differ, until they
// fit or are equal.
//
// All ways find the same cut: weights are added as integers.
#include "early.cuh"
#include "law.cuh"

constexpr int CUT_THREADS = 512;
constexpr int CUT_WARPS = CUT_THREADS / WARP;
constexpr int CUT_THREAD_BITS = 9;
static_assert(1 << CUT_THREAD_BITS == CUT_THREADS);
constexpr int CANDIDATES = 4096;
constexpr int EACH = CANDIDATES / CUT_THREADS;

constexpr int DIGIT_BITS = 11;
constexpr int BINS = 1 << DIGIT_BITS;
constexpr int BINS_EACH = BINS / CUT_THREADS;
constexpr int MOST_TILES = 2048;  // of a row

// Of bfloat16, in ascending order: a bin of equal logits for every number from 2 ** -24 to just below 2 ** 8, one for
// each of their negatives, and between them one for zero and what is nearer to it.
constexpr int VALUES = 8192, VALUE_OF_ZERO = VALUES / 2, LOWEST_VALUE = 1;
constexpr u32 BELOW_LEAST_VALUE = ((127 - 24) << 7) - 1;  // as bfloat16
template <typename Logit> constexpr bool HAS_VALUE_BINS = false;
template <> constexpr bool HAS_VALUE_BINS<Bf16> = true;

// times: the bins' distance, a power of two.
template <int TIMES> __device__ __forceinline__ int value_bin(float logit) {
    const u32 bits = __float_as_uint(logit);
    const int place = max(static_cast<int>(bits >> 16 & 0x7fffu) - static_cast<int>(BELOW_LEAST_VALUE), 0);
    return TIMES * VALUE_OF_ZERO + place * ((static_cast<int>(bits) >> 31 & -2 * TIMES) ^ TIMES);
}
__device__ __forceinline__ float value_of(int bin) {
    const u32 place = static_cast<u32>(abs(bin - VALUE_OF_ZERO));
    const u32 magnitude = place == 0 ? 0 : place + BELOW_LEAST_VALUE;
    return __uint_as_float((bin < VALUE_OF_ZERO ? 0x80000000u : 0u) | magnitude << 16);
}
// What is nearer to 0 than 2 ** -24 weighs as much as 0 where the peak is at least as far away as this: the difference
// of both is rounded to the same.
constexpr float LEAST_PEAK_OF_VALUES = 2.0f, MOST_PEAK_OF_VALUES = 256.0f;

constexpr int BINS_PER_OCTAVE = 64;  // of weights; so the lowest bin begins at 2 ** -32

// Unsigned, in the order of the numbers; both zeros are the same.
__device__ __forceinline__ u32 key_of(float logit) {
    const u32 bits = __float_as_uint(__fadd_rn(logit, 0.0f));
    return bits >> 31 ? ~bits : bits | 0x80000000u;
}
__device__ __forceinline__ float logit_of(u32 key) {
    return __uint_as_float(key >> 31 ? key & 0x7fffffffu : ~key);
}
constexpr u32 LEAST_KEY = 0x00800000u, KEY_OF_ZERO = 0x80000000u, KEY_OF_INFINITY = 0xff800000u;
// At least how far apart the keys of two logits are that differ.
template <typename Logit> constexpr u32 KEY_SPACING = 1u;
template <> constexpr u32 KEY_SPACING<Bf16> = 1u << 16;
template <> constexpr u32 KEY_SPACING<Fp16> = 1u << 13;

// Of logits: how many, and the sum of their weights in units of 1 / FIXED_ONE.
struct Tally { u32 count; u64 mass; };

// The cut is the first logit, in the order of likelihood, with which the logits so far reach both.
struct Target {
    u32 count;
    double mass;
    __device__ __forceinline__ bool reached(const Tally& held) const {
        return held.count >= count && static_cast<double>(held.mass) >= mass;
    }
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
    const float* lane_maxima;

    __device__ __forceinline__ u64 weight(float logit) const { return fixed_weight(weight_of(logit, peak, scale)); }

    // Of the weight's logarithm: it never falls as the logit rises. The weight may, being rounded more often.
    __device__ __forceinline__ u32 bin(float logit) const {
        const float rounder = 0x1.8p23f / BINS_PER_OCTAVE;  // adding it leaves the nearest bin in the low bits
        const float difference = fmaxf(__fsub_rn(logit, peak), least_difference(scale));
        const u32 found = __float_as_uint(__fmaf_rn(difference, scale, rounder));
        return max(static_cast<int>(found - __float_as_uint(rounder)) + BINS - 1, 0);
    }
};

struct KeyRange {
    u32 low, high;  // both inside

    __device__ __forceinline__ float least() const { return logit_of(low); }
    // -0 is equal to 0, whose key is the next one.
    __device__ __forceinline__ float most() const { return logit_of(high == KEY_OF_ZERO - 1 ? high - 1 : high); }
    // Whether all logits inside are equal.
    template <typename Logit> __device__ __forceinline__ bool holds_one() const { return high - low < KEY_SPACING<Logit>; }
};

struct Bins {
    u32 counts[BINS];
    u32 low_masses[BINS], high_masses[BINS];  // shared memory adds 32 bits at once, 64 bits only by trying again

    __device__ __forceinline__ void add(u32 bin, u64 mass) {
        const u32 low = static_cast<u32>(mass);
        const u32 high = static_cast<u32>(mass >> 32) + (atomicAdd(low_masses + bin, low) > ~low);
        if (high != 0) atomicAdd(high_masses + bin, high);
        atomicAdd(counts + bin, 1u);
    }
    __device__ __forceinline__ Tally of(int bin) const {
        return {counts[bin], static_cast<u64>(high_masses[bin]) << 32 | low_masses[bin]};
    }
    __device__ __forceinline__ void set(int bin, const Tally& tally) {
        counts[bin] = tally.count;
        low_masses[bin] = static_cast<u32>(tally.mass), high_masses[bin] = static_cast<u32>(tally.mass >> 32);
    }
};

struct CutScratch {
    union {  // the bins are read before anything is gathered
        u64 entries[CANDIDATES];
        Bins bins;
        u32 values[VALUES];
    };
    u32 ties[MOST_TILES];  // of each tile
    int lowest, highest;  // bins of values that are counted
    u64 sums[CUT_WARPS];
    u32 counts[CUT_WARPS];
    int wanted[CUT_THREADS];  // shares to read
    // What is asked for, of which total top-p takes its part, and the least key that may stay.
    int top_k;  // 0: off
    double top_p;  // 1: off
    double total;
    u32 least;
    // What is looked for, in which range, and what the row holds above the range and in it.
    Target target;
    KeyRange range;
    Tally above, inside;
    u32 filled;
    bool complete, found, last;
    bool valued, unvalued;  // the values hold the row; they do not tell what is asked
    u32 bin;
    Cut cut;
};

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

// Bitonic, ascending, of `size` entries, a power of two. As long as what is compared is near, each warp is by itself.
__device__ inline void sort(u64* entries, int size) {
    __syncthreads();
    for (int run = 2; run <= size; run *= 2) {
        for (int apart = run / 2; apart > 0; apart /= 2) {
            if (run > 2 * WARP && apart >= WARP) __syncthreads(); else __syncwarp();
            for (int pair = threadIdx.x; pair < size / 2; pair += CUT_THREADS) {
                const int low = 2 * pair - (pair & (apart - 1)), high = low + apart;
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

// A lane's shares of two neighbouring tiles are one where maxima are sorted: half as many take half the time.
__device__ __forceinline__ int pairs_of(int shares) { return (shares + 2 * WARP - 1) / (2 * WARP) * WARP; }

// The `rank`-th largest of the maxima of such pairs (1 is the largest).
template <typename Logit>
__device__ __forceinline__ float bound_by_shares(const Row<Logit>& row, int shares, int rank, u64* entries) {
    const int pairs = pairs_of(shares), size = power_of_two_from(pairs);
    for (int pair = threadIdx.x; pair < size; pair += CUT_THREADS) {
        const int share = pair / WARP * 2 * WARP + pair % WARP;
        u32 key = pair < pairs ? key_of(row.lane_maxima[share]) : 0;
        if (pair < pairs && share + WARP < shares) key = max(key, key_of(row.lane_maxima[share + WARP]));
        entries[pair] = pair < pairs ? static_cast<u64>(~key) : ~0ull;
    }
    sort(entries, size);
    const float bound = logit_of(~static_cast<u32>(entries[rank - 1]));
    __syncthreads();
    return bound;
}

// Runs that a thread has under way before it uses the first.
template <typename Logit> constexpr int RUNS_AHEAD = sizeof(Logit) <= 2 ? 2 : 1;

// Calls visit(logits) for every run in [from, to), from a multiple of TILE on.
template <typename Logit, typename Visit>
__device__ __forceinline__ void each_run(const Row<Logit>& row, int from, int to, const Visit& visit) {
    typedef typename Reader<Logit>::Raw Raw;
    constexpr int AHEAD = RUNS_AHEAD<Logit>, STRIDE = CUT_THREADS * RUN;
    const int end = min(to, row.size);
    float logits[RUN];
    int first = from + threadIdx.x * RUN;
    for (; row.whole && first + (AHEAD - 1) * STRIDE + RUN <= end; first += AHEAD * STRIDE) {
        Raw ahead[AHEAD];  // all under way before the first is used
#pragma unroll
        for (int place = 0; place < AHEAD; ++place) {
            const int at = first + place * STRIDE;
            ahead[place] = Reader<Logit>::read(row.logits, at, at + RUN, true);
        }
#pragma unroll
        for (int place = 0; place < AHEAD; ++place) {
            Reader<Logit>::unpack(ahead[place], logits);
            visit(logits);
        }
    }
#pragma unroll 1
    for (; first < end; first += STRIDE) {
        Reader<Logit>::unpack(Reader<Logit>::read(row.logits, first, row.size, row.whole), logits);
        visit(logits);
    }
}

// The next CUT_THREADS shares from `first` on whose maximum is at least `least`, neighbours beside each other, into
// scratch.wanted; how many they are.
template <typename Logit>
__device__ __forceinline__ int wanted_shares(
    const Row<Logit>& row, int first, int shares, float least, CutScratch& scratch
) {
    const int share = first + threadIdx.x, lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    const bool wanted = share < shares && row.lane_maxima[share] >= least;
    const u32 of_warp = __ballot_sync(FULL_WARP, wanted);
    __syncthreads();  // the counts of the call before may still be read
    if (lane == 0) scratch.counts[warp] = __popc(of_warp);
    __syncthreads();
    int before = __popc(of_warp & ((1u << lane) - 1)), total = 0;
    for (int other = 0; other < CUT_WARPS; ++other) {
        if (other < warp) before += scratch.counts[other];
        total += scratch.counts[other];
    }
    if (wanted) scratch.wanted[before] = share;
    __syncthreads();
    return total;
}

// Every logit in the range, as (key descending, token ascending), into the entries, sorted, unless they are more than
// fit; scratch.filled is how many they are.
template <typename Logit> __device__ __forceinline__ void gather(const Row<Logit>& row, CutScratch& scratch) {
    typedef typename Reader<Logit>::Raw Raw;
    constexpr int AHEAD = RUNS_AHEAD<Logit>;
    const float least = scratch.range.least(), most = scratch.range.most();
    const int shares = (row.size + TILE - 1) / TILE * WARP;
    __syncthreads();
    if (threadIdx.x == 0) scratch.filled = 0;
    for (int first = 0; first < shares; first += CUT_THREADS) {
        const int wanted = wanted_shares(row, first, shares, least, scratch);
        // Chunk after chunk of all of them: neighbouring shares are neighbours in memory.
        for (int index = threadIdx.x; index < wanted * CHUNKS; index += AHEAD * CUT_THREADS) {
            Raw ahead[AHEAD];
            int at[AHEAD];
#pragma unroll
            for (int place = 0; place < AHEAD; ++place) {
                const int run = index + place * CUT_THREADS, chunk = run / wanted;
                const int share = run < wanted * CHUNKS ? scratch.wanted[run - chunk * wanted] : shares;
                at[place] = share / WARP * TILE + chunk * CHUNK + share % WARP * RUN;
                if (at[place] < row.size) ahead[place] = Reader<Logit>::read(row.logits, at[place], row.size, row.whole);
            }
#pragma unroll
            for (int place = 0; place < AHEAD; ++place) {
                if (at[place] >= row.size) continue;
                float logits[RUN];
                Reader<Logit>::unpack(ahead[place], logits);
#pragma unroll
                for (int neighbour = 0; neighbour < RUN; ++neighbour) {
                    const float logit = logits[neighbour];
                    if (!(logit >= least && logit <= most)) continue;
                    const u32 slot = atomicAdd(&scratch.filled, 1u);
                    const u64 entry = static_cast<u64>(~key_of(logit)) << 32 | static_cast<u32>(at[place] + neighbour);
                    if (slot < CANDIDATES) scratch.entries[slot] = entry;
                }
            }
        }
    }
    __syncthreads();
    if (scratch.filled > CANDIDATES) return;
    const int filled = static_cast<int>(scratch.filled), sorted = power_of_two_from(filled);
    for (int slot = filled + threadIdx.x; slot < sorted; slot += CUT_THREADS) scratch.entries[slot] = ~0ull;
    sort(scratch.entries, sorted);
}

// The cut among the sorted entries. Where they do not reach the target: false, or the last of them if there is nothing
// below them.
template <typename Logit>
__device__ __forceinline__ bool cut_among(const Row<Logit>& row, bool complete, CutScratch& scratch) {
    const int filled = static_cast<int>(scratch.filled);
    const int first = threadIdx.x * EACH, end = min(first + EACH, filled);
    const auto logit_at = [&](int place) { return logit_of(~static_cast<u32>(scratch.entries[place] >> 32)); };
    u64 own = 0;
#pragma unroll 1
    for (int place = first; place < end; ++place) own += row.weight(logit_at(place));
    Tally held = {scratch.above.count + first, scratch.above.mass + sum_before(own, scratch.sums)};
    if (threadIdx.x == 0) scratch.found = false;
    __syncthreads();
    const Target target = scratch.target;
#pragma unroll 1
    for (int place = first; place < end; ++place) {
        const Tally until = {held.count + 1, held.mass + row.weight(logit_at(place))};
        if (!target.reached(held) && (target.reached(until) || (complete && place == filled - 1))) {
            scratch.found = true;
            scratch.cut = {logit_at(place), static_cast<int>(scratch.entries[place] & 0xffffffffu), until.mass};
        }
        held = until;
    }
    __syncthreads();
    return scratch.found;
}

// The smallest key whose logit is in this bin or a higher one.
template <typename Logit> __device__ __forceinline__ u32 least_key(const Row<Logit>& row, u32 bin) {
    if (bin == 0) return 0;
    u32 below = 0;  // a key of a lower bin
#pragma unroll 1
    for (int shift = 32 - CUT_THREAD_BITS;; shift = max(shift - CUT_THREAD_BITS, 0)) {
        const u32 key = below + (threadIdx.x << shift);
        const int lower = __syncthreads_count(key <= KEY_OF_INFINITY && row.bin(logit_of(key)) < bin);
        below += static_cast<u32>(lower - 1) << shift;
        if (shift == 0) return below + 1;
    }
}

constexpr int BY_WEIGHT = 32;  // in place of a digit's lowest bit: bins of weights

// The lowest bit of the first digit in which keys inside differ.
__device__ __forceinline__ int digit_of(const KeyRange& range) {
    return max(32 - DIGIT_BITS - __clz(static_cast<int>(range.high - range.low)), 0);
}

// The logits of [from, to) in the range, by the bin that bin_of(logit) tells.
template <typename Logit, typename BinOf>
__device__ __forceinline__ void count_bins(
    const Row<Logit>& row, int from, int to, const BinOf& bin_of, CutScratch& scratch
) {
    const float least = scratch.range.least(), most = scratch.range.most();
    __syncthreads();
    for (int bin = threadIdx.x; bin < BINS; bin += CUT_THREADS) scratch.bins.set(bin, {0, 0});
    __syncthreads();
    each_run(row, from, to, [&](const float (&logits)[RUN]) {
#pragma unroll
        for (int place = 0; place < RUN; ++place) {
            if (!(logits[place] >= least && logits[place] <= most)) continue;
            scratch.bins.add(bin_of(logits[place]), row.weight(logits[place]));
        }
    });
    __syncthreads();
}

// Narrows the range to the bin with which the logits reach the target, from the highest on. Where all of them miss it:
// false, or if there is nothing below them, the target becomes their count.
template <typename Logit>
__device__ __forceinline__ bool pick_bin(const Row<Logit>& row, int shift, CutScratch& scratch) {
    const int first = BINS - 1 - threadIdx.x * BINS_EACH;
    Tally own = {0, 0};
#pragma unroll
    for (int place = 0; place < BINS_EACH; ++place) {
        const Tally here = scratch.bins.of(first - place);
        own.count += here.count, own.mass += here.mass;
    }
    Tally held = scratch.above;
    held.count += sum_before(own.count, scratch.counts), held.mass += sum_before(own.mass, scratch.sums);
    const KeyRange range = scratch.range;
    if (threadIdx.x == CUT_THREADS - 1) {
        const Tally all = {held.count + own.count, held.mass + own.mass};
        const bool reached = scratch.target.reached(all), complete = range.low == LEAST_KEY;
        if (!reached && complete) scratch.target = {all.count, 0.0};
        scratch.found = reached || complete;
    }
    __syncthreads();
    const Target target = scratch.target;
#pragma unroll
    for (int place = 0; place < BINS_EACH; ++place) {
        const Tally here = scratch.bins.of(first - place);
        const Tally until = {held.count + here.count, held.mass + here.mass};
        if (!target.reached(held) && target.reached(until)) {
            scratch.above = held, scratch.inside = here, scratch.bin = first - place;
        }
        held = until;
    }
    __syncthreads();
    if (!scratch.found) return false;
    const u32 bin = scratch.bin;
    KeyRange inside;
    if (shift == BY_WEIGHT) {
        inside = {max(least_key(row, bin), range.low), min(least_key(row, bin + 1) - 1, range.high)};
    } else {
        const u32 low = range.low + (bin << shift);
        inside = {low, min(low + ((1u << shift) - 1), range.high)};
    }
    if (threadIdx.x == 0) scratch.range = inside;
    __syncthreads();
    return true;
}

// Adds 1 to the bin of a logit that is at least `least`, in shared memory.
__device__ __forceinline__ void count_value(u32* values, float logit, float least) {
#ifdef DRIFTGUARD_SIMT
    if (logit >= least) atomicAdd(values + value_bin<1>(logit), 1u);
#else
    const u32 at = static_cast<u32>(__cvta_generic_to_shared(values)) + value_bin<4>(logit);
    asm volatile(
        "{ .reg .pred counted; setp.ge.f32 counted, %1, %2; @counted red.shared.add.u32 [%0], 1; }"
        :: "r"(at), "f"(logit), "f"(least) : "memory"
    );
#endif
}

// Calls visit(bin) for every bin of the values that are counted.
template <typename Visit> __device__ __forceinline__ void each_value(const CutScratch& scratch, const Visit& visit) {
    for (int bin = scratch.lowest + threadIdx.x; bin <= scratch.highest; bin += CUT_THREADS) visit(bin);
}

// The logits of [from, to) in the range, by their values.
template <typename Logit>
__device__ __forceinline__ void count_values(const Row<Logit>& row, int from, int to, CutScratch& scratch) {
    const float least = fmaxf(scratch.range.least(), value_of(LOWEST_VALUE));
    each_value(scratch, [&](int bin) { scratch.values[bin] = 0; });
    __syncthreads();
    each_run(row, from, to, [&](const float (&logits)[RUN]) {
#pragma unroll
        for (int place = 0; place < RUN; ++place) count_value(scratch.values, logits[place], least);
    });
    __syncthreads();
}

// What this block counts of a row: all of it, or its part where the row is shared.
struct Part { int from, to; };

__device__ __forceinline__ Part part_of(int size, bool shared) {
    const int blocks = shared ? gridDim.y : 1;
    const int each = (size + blocks * TILE - 1) / (blocks * TILE) * TILE;
    const int from = shared ? static_cast<int>(blockIdx.y) * each : 0;
    return {from, from + each};
}

enum class Narrowed { HERE, BY_ANOTHER_BLOCK, NO };

// Narrows the range to the bin with which the logits reach the target, from the highest on. NO: all of them miss it, or
// the bin holds too many numbers that differ.
template <typename Logit>
__device__ __forceinline__ Narrowed pick_value(const Row<Logit>& row, CutScratch& scratch) {
    const int bins = scratch.highest - scratch.lowest + 1, each = (bins + CUT_THREADS - 1) / CUT_THREADS;
    const int first = scratch.highest - static_cast<int>(threadIdx.x) * each;
    const int last = max(first - each + 1, scratch.lowest);
    const auto tally_of = [&](int bin) -> Tally {
        const u32 count = scratch.values[bin];
        return {count, count == 0 ? 0 : count * row.weight(value_of(bin))};
    };
    Tally own = {0, 0};
#pragma unroll 1
    for (int bin = first; bin >= last; --bin) {
        const Tally here = tally_of(bin);
        own.count += here.count, own.mass += here.mass;
    }
    Tally held = {sum_before(own.count, scratch.counts), sum_before(own.mass, scratch.sums)};
    if (threadIdx.x == CUT_THREADS - 1) {
        const Tally all = {held.count + own.count, held.mass + own.mass};
        scratch.found = scratch.target.reached(all);
    }
    __syncthreads();
    if (!scratch.found) return Narrowed::NO;
    const Target target = scratch.target;
#pragma unroll 1
    for (int bin = first; bin >= last; --bin) {
        const Tally here = tally_of(bin);
        const Tally until = {held.count + here.count, held.mass + here.mass};
        if (!target.reached(held) && target.reached(until)) {
            scratch.above = held, scratch.inside = here, scratch.bin = bin;
        }
        held = until;
    }
    __syncthreads();
    const int bin = static_cast<int>(scratch.bin);
    const bool near_zero = bin == VALUE_OF_ZERO;
    if (near_zero && scratch.inside.count > CANDIDATES) return Narrowed::NO;
    if (threadIdx.x == 0) {
        const float next = value_of(VALUE_OF_ZERO + 1);
        const u32 low = key_of(near_zero ? -next : value_of(bin)), high = key_of(near_zero ? next : value_of(bin));
        scratch.range = {low + near_zero, high - near_zero};
    }
    __syncthreads();
    return Narrowed::HERE;
}

// In global memory, where the blocks that share a row add up the bins of all its logits.
struct SharedBins {
    u32* counts;  // [rows, VALUES]
    u64* masses;  // [rows, BINS]
    u32* arrivals;  // [rows]

    static __device__ __forceinline__ i64 value_at(int bin) { return static_cast<i64>(blockIdx.x) * VALUES + bin; }
    static __device__ __forceinline__ i64 at(int bin) { return static_cast<i64>(blockIdx.x) * BINS + bin; }

    __device__ __forceinline__ void add(const Bins& bins) const {
        for (int bin = threadIdx.x; bin < BINS; bin += CUT_THREADS) {
            const Tally tally = bins.of(bin);
            if (tally.count == 0) continue;
            atomicAdd(counts + value_at(bin), tally.count);
            atomicAdd(masses + at(bin), tally.mass);
        }
        __threadfence();
    }
    __device__ __forceinline__ void add_values(const CutScratch& scratch) const {
        each_value(scratch, [&](int bin) {
            if (scratch.values[bin] != 0) atomicAdd(counts + value_at(bin), scratch.values[bin]);
        });
        __threadfence();
    }
    // Whether this block is the last one; it then sees what the others added.
    __device__ __forceinline__ bool arrives_last(bool& last) const {
        __syncthreads();
        if (threadIdx.x == 0) {
            last = atomicAdd(arrivals + blockIdx.x, 1u) == gridDim.y - 1;
            if (last) arrivals[blockIdx.x] = 0;
        }
        __syncthreads();
        __threadfence();
        return last;
    }
    // Past the first-level cache, which is not coherent.
    __device__ __forceinline__ void read(Bins& bins) const {
        __syncthreads();
        for (int bin = threadIdx.x; bin < BINS; bin += CUT_THREADS) {
            bins.set(bin, {__ldcg(counts + value_at(bin)), __ldcg(masses + at(bin))});
        }
        __syncthreads();
    }
    __device__ __forceinline__ void read_values(CutScratch& scratch) const {
        __syncthreads();
        each_value(scratch, [&](int bin) { scratch.values[bin] = __ldcg(counts + value_at(bin)); });
        __syncthreads();
    }
    __device__ __forceinline__ void clear() const {
        for (int bin = threadIdx.x; bin < BINS; bin += CUT_THREADS) counts[value_at(bin)] = 0, masses[at(bin)] = 0;
    }
    __device__ __forceinline__ void clear_values(const CutScratch& scratch) const {
        each_value(scratch, [&](int bin) { counts[value_at(bin)] = 0; });
    }
};

// `narrow` to a value. NO: that is not known by the bins.
template <typename Logit>
__device__ __forceinline__ Narrowed narrow_to_value(
    const Row<Logit>& row, bool shared, const SharedBins& shared_bins, bool& counted, CutScratch& scratch
) {
    if (row.peak >= MOST_PEAK_OF_VALUES || row.peak < value_of(LOWEST_VALUE)) {
        return shared && blockIdx.y > 0 ? Narrowed::BY_ANOTHER_BLOCK : Narrowed::NO;
    }
    __syncthreads();
    if (threadIdx.x == 0) {
        scratch.range = {scratch.least, KEY_OF_INFINITY};
        scratch.lowest = value_bin<1>(fmaxf(scratch.range.least(), value_of(LOWEST_VALUE)));
        scratch.highest = value_bin<1>(row.peak);
    }
    __syncthreads();
    if (!scratch.valued) {
        const Part part = part_of(row.size, shared);
        count_values(row, part.from, part.to, scratch);
        if (shared) {
            shared_bins.add_values(scratch);
            if (!shared_bins.arrives_last(scratch.last)) return Narrowed::BY_ANOTHER_BLOCK;
            counted = true;
            shared_bins.read_values(scratch);
        }
        if (threadIdx.x == 0) scratch.valued = true;
    }
    const bool zeros = scratch.lowest <= VALUE_OF_ZERO && scratch.highest >= VALUE_OF_ZERO
        && scratch.values[VALUE_OF_ZERO] != 0;
    if (zeros && fabsf(row.peak) < LEAST_PEAK_OF_VALUES) return Narrowed::NO;
    return pick_value(row, scratch);
}

// Narrows the range, to begin with from scratch.least on, until the logits inside fit, or are equal. `shared`: by the
// blocks of the row together, which count it once (`counted`); false where another one of them goes on.
template <typename Logit>
__device__ __forceinline__ bool narrow(
    const Row<Logit>& row, bool shared, const SharedBins& shared_bins, bool& counted, CutScratch& scratch
) {
    if constexpr (HAS_VALUE_BINS<Logit>) {
        __syncthreads();
        if (!scratch.unvalued) {
            const Narrowed narrowed = narrow_to_value(row, shared, shared_bins, counted, scratch);
            if (narrowed != Narrowed::NO) return narrowed == Narrowed::HERE;
            __syncthreads();
            if (threadIdx.x == 0) scratch.unvalued = true;
        }
    }
    // Of what has no value of its own, by digits alone.
    constexpr bool WEIGHS = !HAS_VALUE_BINS<Logit>;
    int shift = BY_WEIGHT;
#pragma unroll 1
    for (;;) {
        __syncthreads();
        if (threadIdx.x == 0 && shift == BY_WEIGHT) {
            scratch.range = {scratch.least, KEY_OF_INFINITY}, scratch.above = {0, 0};
        }
        __syncthreads();
        if (!WEIGHS) shift = digit_of(scratch.range);
        const bool together = WEIGHS && shared && shift == BY_WEIGHT;
        if (shift != BY_WEIGHT) {
            const u32 low = scratch.range.low;
            count_bins(row, 0, row.size, [&](float logit) { return (key_of(logit) - low) >> shift; }, scratch);
        } else if (!(together && counted)) {
            const Part part = part_of(row.size, together);
            count_bins(row, part.from, part.to, [&](float logit) { return row.bin(logit); }, scratch);
        }
        if (together) {
            if (!counted) {
                shared_bins.add(scratch.bins);
                if (!shared_bins.arrives_last(scratch.last)) return false;
                counted = true;
            }
            shared_bins.read(scratch.bins);
        }
        if (!pick_bin(row, shift, scratch)) {
            shared = false;  // rounding left out some of what stays: count all of it, alone
            shift = BY_WEIGHT;
            if (threadIdx.x == 0) scratch.least = LEAST_KEY;
            continue;
        }
        if (scratch.inside.count <= CANDIDATES || scratch.range.template holds_one<Logit>()) return true;
        shift = digit_of(scratch.range);
    }
}

// The cut among equal logits, the only ones in the range: of those that stay, the last by token. mass_only: that is all
// that is asked.
template <typename Logit>
__device__ __forceinline__ void cut_among_ties(const Row<Logit>& row, bool mass_only, CutScratch& scratch) {
    u32 staying = 1;
    {
        const Tally above = scratch.above;
        const u64 weight = scratch.inside.mass / scratch.inside.count;
#pragma unroll 1
        for (u32 most = scratch.inside.count; staying < most;) {
            const u32 middle = staying + (most - staying) / 2;
            const bool reached = scratch.target.reached({above.count + middle, above.mass + middle * weight});
            if (reached) most = middle; else staying = middle + 1;
        }
        if (threadIdx.x == 0) scratch.cut.kept = above.mass + staying * weight;
    }
    if (mass_only) return;
    const float least = scratch.range.least(), most = scratch.range.most();
    const auto inside = [&](float logit) { return logit >= least && logit <= most; };
    const int tiles = (row.size + TILE - 1) / TILE, lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;

    // Of each tile, by a warp: how many there are.
#pragma unroll 1
    for (int tile = warp; tile < tiles; tile += CUT_WARPS) {
        constexpr int AHEAD = 2 * RUNS_AHEAD<Logit>;
        const int first = tile * TILE + lane * RUN;
        float logits[RUN];
        u32 own = 0;
        const auto count = [&] {
#pragma unroll
            for (int place = 0; place < RUN; ++place) own += inside(logits[place]);
        };
        if (row.whole && (tile + 1) * TILE <= row.size) {
#pragma unroll 1
            for (int chunk = 0; chunk < CHUNKS; chunk += AHEAD) {
                typename Reader<Logit>::Raw runs[AHEAD];
#pragma unroll
                for (int ahead = 0; ahead < AHEAD; ++ahead) {
                    const int at = first + (chunk + ahead) * CHUNK;
                    runs[ahead] = Reader<Logit>::read(row.logits, at, at + RUN, true);
                }
#pragma unroll
                for (int ahead = 0; ahead < AHEAD; ++ahead) {
                    Reader<Logit>::unpack(runs[ahead], logits);
                    count();
                }
            }
        } else {
#pragma unroll 1
            for (int at = first; at < min((tile + 1) * TILE, row.size); at += CHUNK) {
                Reader<Logit>::unpack(Reader<Logit>::read(row.logits, at, row.size, row.whole), logits);
                count();
            }
        }
        own = sum_by_halves(own);
        if (lane == 0) scratch.ties[tile] = own;
    }
    __syncthreads();

    // The tile in which the last one that stays lies, and which of its ties that is.
    const int each = (tiles + CUT_THREADS - 1) / CUT_THREADS, first = threadIdx.x * each, end = min(first + each, tiles);
    u32 own = 0;
#pragma unroll 1
    for (int tile = first; tile < end; ++tile) own += scratch.ties[tile];
    u32 passed = sum_before(own, scratch.counts);
#pragma unroll 1
    for (int tile = first; tile < end; ++tile) {
        const u32 here = scratch.ties[tile];
        if (passed < staying && staying <= passed + here) scratch.bin = tile, scratch.filled = staying - passed;
        passed += here;
    }
    __syncthreads();
    if (warp == 0) {
        u32 left = scratch.filled;
#pragma unroll 1
        for (int at = static_cast<int>(scratch.bin) * TILE + lane * RUN; left > 0; at += CHUNK) {
            float logits[RUN];
            Reader<Logit>::unpack(Reader<Logit>::read(row.logits, at, row.size, row.whole), logits);
            u32 here = 0;
#pragma unroll
            for (int place = 0; place < RUN; ++place) here += inside(logits[place]);
            const u32 up_to = static_cast<u32>(sum_up_to(here)), total = __shfl_sync(FULL_WARP, up_to, WARP - 1);
            if (up_to - here < left && left <= up_to) {
                u32 before = up_to - here;
#pragma unroll
                for (int place = 0; place < RUN; ++place) {
                    if (!inside(logits[place]) || ++before != left) continue;
                    scratch.cut.token = at + place, scratch.cut.logit = logits[place];
                }
            }
            left = left <= total ? 0 : left - total;
        }
    }
    __syncthreads();
}

// Sets scratch.range to begin at a key below which nothing can stay, as far as the shares' maxima tell, and with it
// scratch.least, complete and total. True: at most half of the shares reach that key, so that they alone are read.
template <typename Logit>
__device__ __forceinline__ bool few_shares(const Row<Logit>& row, double normaliser, CutScratch& scratch) {
    const int shares = (row.size + TILE - 1) / TILE * WARP;
    u32 least = LEAST_KEY, low = LEAST_KEY;
    bool few = row.size <= CANDIDATES;
    if (!few && scratch.top_k > 0) {
        few = scratch.top_k <= pairs_of(shares) / 2 && pairs_of(shares) <= CANDIDATES;
        if (few && blockIdx.y == 0) {
            low = max(key_of(bound_by_shares(row, shares, scratch.top_k, scratch.entries)), LEAST_KEY);
        }
    } else if (!few) {
        // From a power of two at most as large as the weight, less one bin for rounding.
        const float weight = static_cast<float>(__dmul_rn(1.0 - scratch.top_p, normaliser)) / static_cast<float>(row.size);
        const int power = static_cast<int>(__float_as_uint(weight) >> 23) - 127;
        least = low = max(least_key(row, max(BINS - 2 + power * BINS_PER_OCTAVE, 0)), LEAST_KEY);
        int reaching = 0;
        for (int first = 0; first < shares; first += CUT_THREADS) {
            const int share = first + threadIdx.x;
            reaching += __syncthreads_count(share < shares && key_of(row.lane_maxima[share]) >= low);
        }
        few = reaching <= shares / 2;
    }
    if (threadIdx.x == 0) {
        scratch.range = {low, KEY_OF_INFINITY}, scratch.above = {0, 0}, scratch.filled = 0;
        scratch.least = least, scratch.complete = low == LEAST_KEY;
        scratch.total = __dmul_rn(normaliser, FIXED_ONE);
    }
    __syncthreads();
    return few;
}

// Grid: batch x steps, any number that share a row, blocks of CUT_THREADS threads. Arguments as `row_statistics`,
// after which it runs; cuts, cut_tokens and kept are written for the rows of requests that ask for top-k or top-p.
// arrivals [batch x steps], and where more than one block shares a row bin_counts [batch x steps, VALUES] and bin_masses
// [batch x steps, BINS]: zero, and left zero.
template <typename Logit>
__device__ __forceinline__ void row_cutoffs(
    const Logit* __restrict__ logits, i64 row_stride, int steps, int size, const int* __restrict__ lengths,
    const float* __restrict__ scales, const int* __restrict__ top_ks, const float* __restrict__ top_ps, int law_stride,
    int law_offset, const float* tile_maxima, const float* tile_sums, const float* lane_maxima, float* cuts,
    int* cut_tokens, double* kept, u32* arrivals, u32* bin_counts, u64* bin_masses
) {
    // Not __restrict__: K1 still writes them while this kernel begins, so that no load may move above the wait.
    __shared__ CutScratch scratch;
    let_the_next_kernel_begin();
    await_the_kernel_before();
    const int request = blockIdx.x / steps, step = blockIdx.x % steps;
    const i64 law = static_cast<i64>(request) * law_stride + law_offset + step;
    const int top_k = top_ks[request] > 0 && top_ks[request] < size ? top_ks[request] : 0;
    const double top_p = top_ps[request] < 1.0f ? static_cast<double>(top_ps[request]) : 1.0;
    if (scales[request] == 0.0f || (top_k == 0 && top_p == 1.0)) return;
    if (lengths != nullptr && step > lengths[request]) return;
    const int tiles = (size + TILE - 1) / TILE;
    // Not `of`: a block that is alone may write a cut before others of the row begin.
    RowLaw found[1];
    uncut_laws_of(LawTable{tile_maxima, tile_sums}, {law}, tiles, scales[request], found);
    const RowLaw& uncut = found[0];
    if (!uncut.exists()) return;  // verification says so

    const Logit* at = logits + static_cast<i64>(blockIdx.x) * row_stride;
    const float* maxima = lane_maxima + law * tiles * WARP;
    const Row<Logit> row = {at, size, starts_on_16_bytes(at), scales[request], uncut.peak, maxima};
    if (threadIdx.x == 0) scratch.top_k = top_k, scratch.top_p = top_p, scratch.valued = scratch.unvalued = false;
    __syncthreads();
    const bool alone = few_shares(row, uncut.normaliser, scratch);
    if (alone && blockIdx.y > 0) return;

    const SharedBins shared_bins = {bin_counts, bin_masses, arrivals};
    bool whole = !alone, counted = false, known = false, tied = false;
    // Top-k, then top-p of what it left; in the whole row where the shares were too many, or hold more than fits.
#pragma unroll 1
    for (bool by_count = top_k > 0;;) {
        if (threadIdx.x == 0) {
            // The likeliest token always stays, also where its weight is not asked for.
            scratch.target = by_count ? Target{static_cast<u32>(scratch.top_k), 0.0}
                                      : Target{1, __dmul_rn(scratch.top_p, scratch.total)};
        }
        __syncthreads();
        // What is known of the range is enough again where top-p ends in it too.
        if (!known || scratch.target.reached(scratch.above)) {
            if (whole && !narrow(row, !alone && gridDim.y > 1, shared_bins, counted, scratch)) return;
            // Few equal logits are sorted, unless it is not known yet which shares hold them.
            tied = whole && scratch.range.template holds_one<Logit>()
                && (HAS_VALUE_BINS<Logit> || scratch.inside.count > CANDIDATES);
            if (!tied) gather(row, scratch);
            known = true;
        }
        if (tied) {
            cut_among_ties(row, by_count && scratch.top_p < 1.0, scratch);
        } else if (scratch.filled > CANDIDATES || !cut_among(row, whole || scratch.complete, scratch)) {
            whole = true, known = false;
            continue;
        }
        if (!by_count || scratch.top_p == 1.0) break;
        by_count = false;
        if (threadIdx.x == 0) scratch.total = static_cast<double>(scratch.cut.kept);
    }
    if (counted && HAS_VALUE_BINS<Logit>) shared_bins.clear_values(scratch);
    if (counted && !HAS_VALUE_BINS<Logit>) shared_bins.clear();
    if (threadIdx.x == 0) {
        cuts[law] = scratch.cut.logit, cut_tokens[law] = scratch.cut.token;
        kept[law] = __dmul_rn(static_cast<double>(scratch.cut.kept), 1.0 / FIXED_ONE);
    }
}

#define ROW_CUTOFFS(NAME, LOGIT)                                                                                  \
    extern "C" __global__ void __launch_bounds__(CUT_THREADS, 2) NAME(                                            \
        const LOGIT* logits, i64 row_stride, int steps, int size, const int* lengths, const float* scales,        \
        const int* top_ks, const float* top_ps, int law_stride, int law_offset, const float* tile_maxima,         \
        const float* tile_sums, const float* lane_maxima, float* cuts, int* cut_tokens, double* kept,             \
        u32* arrivals, u32* bin_counts, u64* bin_masses                                                           \
    ) {                                                                                                           \
        row_cutoffs(                                                                                              \
            logits, row_stride, steps, size, lengths, scales, top_ks, top_ps, law_stride, law_offset,             \
            tile_maxima, tile_sums, lane_maxima, cuts, cut_tokens, kept, arrivals, bin_counts, bin_masses         \
        );                                                                                                        \
    }

ROW_CUTOFFS(row_cutoffs_bf16, Bf16)
ROW_CUTOFFS(row_cutoffs_fp16, Fp16)
ROW_CUTOFFS(row_cutoffs_fp32, Fp32)
