// K2: accept drafts up to the first rejection, and draw the token that the target itself adds; and the draws of the
// draft. Reads the laws that K1 left. Several blocks share a row's tiles; the one that finishes last draws.
#include "draw.cuh"

// Status of a request: what the host reports instead of tokens.
constexpr int OK = 0, TARGET_HAS_NO_LAW = 1, DRAFT_HAS_NO_LAW = 2;

// That run at a time on a multiprocessor: what registers allow.
template <typename Logit> constexpr int DRAW_BLOCKS = sizeof(Logit) == 4 ? 2 : 3;

// Laws as K1 writes them, one row after another; `distribution.Laws`.
struct LawTable {
    const float* tile_maxima;
    const double* tile_masses;
    const float* peaks;
    const double* normalisers;
    const float* cuts;
    const int* cut_tokens;

    __device__ __forceinline__ bool has_law(i64 law) const { return peaks[law] > -INF && peaks[law] < INF; }

    template <typename Logit>
    __device__ __forceinline__ LawfulRow<Logit> row(const Logit* logits, int size, float scale, i64 law) const {
        return {logits, size, starts_on_16_bytes(logits), scale, peaks[law], cuts[law], cut_tokens[law]};
    }
};

// One request's part of the arguments.
template <typename Logit> struct Chain {
    const Logit* target;  // [steps, size], rows target_stride apart
    const Logit* draft;   // [steps - 1, size]; null: the draft was certain of every token
    i64 target_stride, draft_stride;
    const i64* tokens;  // [steps - 1]
    int length, size;
    float scale;
    i64 seed, position;
    LawTable p, q;
    i64 p_law, q_law;  // of step 0

    __device__ __forceinline__ LawfulRow<Logit> target_row(int step) const {
        return p.row(target + step * target_stride, size, scale, p_law + step);
    }
    __device__ __forceinline__ LawfulRow<Logit> draft_row(int step) const {
        return q.row(draft + step * draft_stride, size, scale, q_law + step);
    }
    __device__ __forceinline__ bool known(int step) const { return 0 <= tokens[step] && tokens[step] < size; }

    // u q(x) < p(x), multiplied out; `step` below the length.
    __device__ __forceinline__ bool passes(int step) const {
        if (!known(step)) return false;
        const int token = static_cast<int>(tokens[step]);
        const LawfulRow<Logit> here = target_row(step);
        const double p_weight = here.weight_at(token);
        double q_weight = 1.0, q_normaliser = 1.0;
        if (draft != nullptr) {
            const LawfulRow<Logit> there = draft_row(step);
            q_weight = there.weight_at(token);
            q_normaliser = q.normalisers[q_law + step];
        }
        const double uniform = uniform_of(random_words(seed, position + step, ACCEPT).first);
        return __dmul_rn(uniform, __dmul_rn(q_weight, p.normalisers[p_law + step])) < __dmul_rn(p_weight, q_normaliser);
    }
};

struct Scratch {
    PickScratch pick;
    union { TileScratch tile; Held held; };
    int accepted, status;
    int best[WARP];  // greedy: the target's choice at each step
    bool last;
};

// By the whole block: is this the last of `blocks` to come here? What the others wrote can then be read.
__device__ __forceinline__ bool arrives_last(u32* arrivals, u32 blocks, Scratch& scratch) {
    __syncthreads();
    if (threadIdx.x == 0) {
        __threadfence();
        scratch.last = atomicAdd(arrivals, 1u) == blocks - 1;
        if (scratch.last) *arrivals = 0;
        __threadfence();
    }
    __syncthreads();
    return scratch.last;
}

// Tiles first, first + apart, ... of the row by this block, one after another, into tile_masses.
template <typename Logit>
__device__ __forceinline__ void sum_tiles(
    const Masses<Logit>& masses, int size, int first, int apart, float* tile_masses, TileScratch& scratch
) {
    const int tiles = (size + TILE - 1) / TILE;
#pragma unroll 1
    for (int tile = first; tile < tiles; tile += apart) {
        const float mass = mass_of_tile(masses, tile * TILE, scratch);
        if (threadIdx.x == 0) tile_masses[tile] = mass;
    }
}

// The weights of one row as what to draw by.
template <typename Logit> __device__ __forceinline__ Masses<Logit> weights_of(const LawfulRow<Logit>& row) {
    return {row, row, false, -1, 1.0f, 1.0f};
}

// Lane s of the first warp decides step s. Leaves the number of accepted drafts and the status in the scratch.
template <typename Logit> __device__ __forceinline__ void accept(const Chain<Logit>& chain, Scratch& scratch) {
    if (threadIdx.x >= WARP) return;
    const int step = threadIdx.x;
    const bool drafted = step < chain.length;
    const bool no_target = step <= chain.length && !chain.p.has_law(chain.p_law + step);
    const bool reads_draft = drafted && chain.scale != 0.0f && chain.draft != nullptr && chain.known(step);
    const bool no_draft = reads_draft && !chain.q.has_law(chain.q_law + step);
    const u32 without_target = __ballot_sync(FULL_WARP, no_target);
    const u32 without_draft = __ballot_sync(FULL_WARP, no_draft);
    bool passes = false;
    if (drafted && (without_target | without_draft) == 0) {
        passes = chain.scale != 0.0f ? chain.passes(step)
                                     : chain.known(step) && chain.tokens[step] == scratch.best[step];
    }
    const u32 stopped = __ballot_sync(FULL_WARP, !passes);  // step `length` always stops
    if (step == 0) {
        scratch.accepted = __ffs(stopped) - 1;
        scratch.status = without_target != 0 ? TARGET_HAS_NO_LAW : without_draft != 0 ? DRAFT_HAS_NO_LAW : OK;
    }
}

// The target's choice at each step of a greedy request, a warp per step.
template <typename Logit> __device__ __forceinline__ void choose(const Chain<Logit>& chain, Scratch& scratch) {
    const int tiles = (chain.size + TILE - 1) / TILE;
    for (int step = threadIdx.x / WARP; step <= chain.length; step += DRAW_WARPS) {
        const i64 law = chain.p_law + step;
        const int best = argmax_of(
            chain.target + step * chain.target_stride, chain.size, chain.p.peaks[law], chain.p.tile_maxima + law * tiles
        );
        if (threadIdx.x % WARP == 0) scratch.best[step] = best;
    }
    __syncthreads();
}

// By the first thread: accepted drafts, the target's own token, -1 to the end; or -1 alone, and the reason.
template <typename Logit>
__device__ __forceinline__ void emit(
    const Chain<Logit>& chain, int steps, const Scratch& scratch, int own, i64* tokens, int* accepted, int* status
) {
    if (threadIdx.x != 0) return;
    const int kept = scratch.status == OK ? scratch.accepted : -1;
    for (int step = 0; step < steps; ++step) {
        tokens[step] = step < kept ? chain.tokens[step] : step == kept ? own : -1;
    }
    *accepted = kept, *status = scratch.status;
}

// What the target's own token is drawn by. After the last draft nothing was rejected, and an id that the vocabulary
// lacks was no draw from q: both leave p itself.
template <typename Logit> __device__ __forceinline__ Masses<Logit> own_masses(const Chain<Logit>& chain, int step) {
    Masses<Logit> masses = weights_of(chain.target_row(step));
    masses.residual = step < chain.length && chain.known(step);
    if (masses.residual) {
        masses.target_reciprocal = static_cast<float>(1.0 / chain.p.normalisers[chain.p_law + step]);
        if (chain.draft != nullptr) {
            masses.draft = chain.draft_row(step);
            masses.draft_reciprocal = static_cast<float>(1.0 / chain.q.normalisers[chain.q_law + step]);
        } else {
            masses.certain = static_cast<int>(chain.tokens[step]);
        }
    }
    return masses;
}

// Returns whether this block is to draw the row's token, of all that share the row: exactly one is. `of_tiles` are then
// the masses of its tiles: uncut those that K1 summed; a residual's, or those of a row with a cut, are summed anew into
// `of_tiles.anew`. Where p = q up to rounding leaves a residual empty, p is what to draw from.
template <typename Logit>
__device__ __forceinline__ bool sum_shared(
    Masses<Logit>& masses, TileMasses& of_tiles, int size, float* tile_masses, u32* arrivals, Scratch& scratch
) {
    const int tiles = (size + TILE - 1) / TILE;
    const double* const summed = of_tiles.summed;
    int first = static_cast<int>(blockIdx.y), apart = static_cast<int>(gridDim.y);
    if (!masses.residual && !masses.target.is_cut() && blockIdx.y != 0) return false;
#pragma unroll 1  // twice only where the residual is empty
    while (masses.residual || masses.target.is_cut()) {
        of_tiles.summed = nullptr;
        sum_tiles(masses, size, first, apart, tile_masses, scratch.tile);
        if (apart > 1 && !arrives_last(arrivals, gridDim.y, scratch)) return false;
        __syncthreads();
        bool some = !masses.residual;
        for (int tile = threadIdx.x; tile < tiles; tile += DRAW_THREADS) some = some || of_tiles.anew[tile] > 0.0f;
        if (__syncthreads_or(some)) break;
        masses = weights_of(masses.target);
        of_tiles.summed = summed;
        first = 0, apart = 1;  // by this block alone
    }
    return true;
}

// Grid: (batch, blocks per row), DRAW_THREADS threads. At most 31 drafts.
//
// target_logits [batch, steps, size], draft_logits [batch, steps - 1, size] or null, rows *_stride elements apart;
// draft_tokens [batch, steps - 1]; lengths, scales, seeds, positions [batch]; laws of the target's rows at
// request x steps + step, of the draft's at request x (steps - 1) + step. tile_masses [batch, tiles]: scratch.
// arrivals [batch]: zero, and left zero. Writes tokens [batch, steps], accepted [batch], status [batch].
template <typename Logit>
__device__ __forceinline__ void verify_chain(
    const Logit* __restrict__ target_logits, i64 target_stride, const Logit* __restrict__ draft_logits,
    i64 draft_stride, const i64* __restrict__ draft_tokens, const int* __restrict__ lengths,
    const float* __restrict__ scales, const i64* __restrict__ seeds, const i64* __restrict__ positions, int steps,
    int size, const LawTable& p, const LawTable& q, float* tile_masses, u32* arrivals, i64* tokens, int* accepted,
    int* status
) {
    __shared__ Scratch scratch;
    const i64 request = blockIdx.x;
    const i64 first_target = request * steps, first_draft = request * (steps - 1);
    const Chain<Logit> chain = {
        target_logits + first_target * target_stride,
        draft_logits == nullptr ? nullptr : draft_logits + first_draft * draft_stride,
        target_stride, draft_stride, draft_tokens + first_draft, lengths[request], size, scales[request],
        seeds[request], positions[request], p, q, first_target, first_draft,
    };
    const bool greedy = chain.scale == 0.0f;
    if (greedy && blockIdx.y != 0) return;
    if (greedy) choose(chain, scratch);
    accept(chain, scratch);
    __syncthreads();
    int own = -1;
    if (scratch.status != OK || greedy) {
        if (blockIdx.y != 0) return;
        if (scratch.status == OK) own = scratch.best[scratch.accepted];
    } else {
        const int step = scratch.accepted, tiles = (size + TILE - 1) / TILE;
        float* const anew = tile_masses + request * tiles;
        Masses<Logit> masses = own_masses(chain, step);
        TileMasses of_tiles = {p.tile_masses + (first_target + step) * tiles, anew};
        if (!sum_shared(masses, of_tiles, size, anew, arrivals + request, scratch)) return;
        const RandomWords words = random_words(chain.seed, chain.position + step, RESIDUAL);
        own = draw(of_tiles, masses, size, words, scratch.held, scratch.pick);
    }
    emit(chain, steps, scratch, own, tokens + first_target, accepted + request, status + request);
}

// Grid: (batch, blocks per row), DRAW_THREADS threads. Draws step `step` of each row's drafts from the laws at request x
// law_stride + step; logits [batch, size]. A row without a law gets -1, which verification rejects.
template <typename Logit>
__device__ __forceinline__ void draw_drafts(
    const Logit* __restrict__ logits, i64 row_stride, int size, int law_stride, int step,
    const float* __restrict__ scales, const i64* __restrict__ seeds, const i64* __restrict__ positions,
    const LawTable& laws, float* tile_masses, u32* arrivals, i64* tokens
) {
    __shared__ Scratch scratch;
    const i64 request = blockIdx.x, law = request * law_stride + step;
    const int tiles = (size + TILE - 1) / TILE;
    const Logit* row = logits + request * row_stride;
    const float scale = scales[request];
    int token = -1;
    if (!laws.has_law(law) || scale == 0.0f) {
        if (blockIdx.y != 0) return;
        if (laws.has_law(law) && threadIdx.x < WARP) {
            token = argmax_of(row, size, laws.peaks[law], laws.tile_maxima + law * tiles);
        }
    } else {
        float* const anew = tile_masses + request * tiles;
        Masses<Logit> masses = weights_of(laws.row(row, size, scale, law));
        TileMasses of_tiles = {laws.tile_masses + law * tiles, anew};
        if (!sum_shared(masses, of_tiles, size, anew, arrivals + request, scratch)) return;
        const RandomWords words = random_words(seeds[request], positions[request] + step, DRAFT);
        token = draw(of_tiles, masses, size, words, scratch.held, scratch.pick);
    }
    if (threadIdx.x == 0) tokens[law] = token;
}

#define VERIFICATION(SUFFIX, LOGIT)                                                                                \
    extern "C" __global__ void __launch_bounds__(DRAW_THREADS, DRAW_BLOCKS<LOGIT>) verify_chain_##SUFFIX(          \
        const LOGIT* target_logits, i64 target_stride, const LOGIT* draft_logits, i64 draft_stride,                \
        const i64* draft_tokens, const int* lengths, const float* scales, const i64* seeds, const i64* positions,  \
        int steps, int size, const float* p_tile_maxima, const double* p_tile_masses, const float* p_peaks,        \
        const double* p_normalisers, const float* p_cuts, const int* p_cut_tokens, const float* q_tile_maxima,     \
        const double* q_tile_masses, const float* q_peaks, const double* q_normalisers, const float* q_cuts,       \
        const int* q_cut_tokens, float* tile_masses, u32* arrivals, i64* tokens, int* accepted, int* status        \
    ) {                                                                                                            \
        verify_chain(                                                                                              \
            target_logits, target_stride, draft_logits, draft_stride, draft_tokens, lengths, scales, seeds,        \
            positions, steps, size,                                                                                \
            LawTable{p_tile_maxima, p_tile_masses, p_peaks, p_normalisers, p_cuts, p_cut_tokens},                  \
            LawTable{q_tile_maxima, q_tile_masses, q_peaks, q_normalisers, q_cuts, q_cut_tokens},                  \
            tile_masses, arrivals, tokens, accepted, status                                                        \
        );                                                                                                         \
    }                                                                                                              \
    extern "C" __global__ void __launch_bounds__(DRAW_THREADS, DRAW_BLOCKS<LOGIT>) draw_drafts_##SUFFIX(           \
        const LOGIT* logits, i64 row_stride, int size, int law_stride, int step, const float* scales,              \
        const i64* seeds, const i64* positions, const float* tile_maxima, const double* law_tile_masses,           \
        const float* peaks, const double* normalisers, const float* cuts, const int* cut_tokens,                   \
        float* tile_masses, u32* arrivals, i64* tokens                                                             \
    ) {                                                                                                            \
        draw_drafts(                                                                                               \
            logits, row_stride, size, law_stride, step, scales, seeds, positions,                                  \
            LawTable{tile_maxima, law_tile_masses, peaks, normalisers, cuts, cut_tokens}, tile_masses, arrivals,   \
            tokens                                                                                                 \
        );                                                                                                         \
    }

VERIFICATION(bf16, Bf16)
VERIFICATION(fp16, Fp16)
VERIFICATION(fp32, Fp32)
