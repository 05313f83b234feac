// K2: accept drafts, by the token rule or by the block rule (`reference/verify.py`), and draw the token that the target
// itself adds; and the draws of the draft. Reads the laws that K1 left. What is drawn by other masses than K1 summed is
// proposed first; only where no token stays do the blocks of a row sum its tiles, and the one that finishes last draws.
#include "draw.cuh"
#include "early.cuh"

// Status of a request: what the host reports instead of tokens.
constexpr int OK = 0, TARGET_HAS_NO_LAW = 1, DRAFT_HAS_NO_LAW = 2;

// That run at a time on a multiprocessor: what registers allow.
constexpr int DRAW_BLOCKS = 3;

constexpr int PROPOSALS = 32;  // as in ../reference/verify.py
static_assert(PROPOSALS % DRAW_WARPS == 0);

template <typename Logit>
__device__ __forceinline__ LawfulRow<Logit> under(const RowLaw& law, const Logit* logits, int size, float scale) {
    return {logits, size, starts_on_16_bytes(logits), scale, law.peak, law.cut, law.cut_token};
}

// Of a request's rows, by step.
struct ChainLaws { RowLaw p[WARP], q[WARP]; };

// One request's part of the arguments.
template <typename Logit> struct Chain {
    const Logit* target;  // [steps, size], rows target_stride apart
    const Logit* draft;   // [steps - 1, size]; null: the draft was certain of every token
    i64 target_stride, draft_stride;
    const i64* tokens;  // [steps - 1]
    int length, size;
    float scale;
    i64 seed, position;
    u32 noise;  // the step's own: see `random_words`
    LawTable p, q;
    i64 p_law, q_law;  // of step 0

    __device__ __forceinline__ int tiles() const { return (size + TILE - 1) / TILE; }
    __device__ __forceinline__ LawfulRow<Logit> target_row(int step, const RowLaw& law) const {
        return under(law, target + step * target_stride, size, scale);
    }
    __device__ __forceinline__ LawfulRow<Logit> draft_row(int step, const RowLaw& law) const {
        return under(law, draft + step * draft_stride, size, scale);
    }
    __device__ __forceinline__ bool known(int step) const { return 0 <= tokens[step] && tokens[step] < size; }
};

// A draft token, and what of its test depends on no law. Lane s of the first warp holds that of step s.
struct Offered {
    int token = -1;  // -1: none, or one that the vocabulary lacks
    float target_logit = 0.0f, draft_logit = 0.0f;
    double uniform = 0.0;
};

template <typename Logit> __device__ __forceinline__ Offered offered_by(const Chain<Logit>& chain) {
    const int step = threadIdx.x;
    Offered offered;
    if (step >= chain.length || !chain.known(step)) return offered;
    offered.token = static_cast<int>(chain.tokens[step]);
    if (chain.scale == 0.0f) return offered;
    offered.target_logit = Reader<Logit>::one(chain.target + step * chain.target_stride, offered.token);
    if (chain.draft != nullptr) {
        offered.draft_logit = Reader<Logit>::one(chain.draft + step * chain.draft_stride, offered.token);
    }
    offered.uniform = uniform_of(random_words(chain.seed, chain.position + step, ACCEPT, chain.noise).first);
    return offered;
}

// Target's p and draft's q of a draft token, times one number for both.
struct Odds { double p, q; };

template <typename Logit>
__device__ __forceinline__ Odds odds_of(const Chain<Logit>& chain, int step, const Offered& offered, const ChainLaws& laws) {
    const double p_weight = chain.target_row(step, laws.p[step]).weigh_token(offered.token, offered.target_logit);
    double q_weight = 1.0, q_normaliser = 1.0;
    if (chain.draft != nullptr) {
        q_weight = chain.draft_row(step, laws.q[step]).weigh_token(offered.token, offered.draft_logit);
        q_normaliser = laws.q[step].normaliser;
    }
    return {__dmul_rn(p_weight, q_normaliser), __dmul_rn(q_weight, laws.p[step].normaliser)};
}

template <typename Logit> struct Scratch {
    ChainLaws laws;
    Masses<Logit> masses;  // what is drawn by: in registers, all of it would be in the way
    PickScratch pick;
    Held held;
    int proposed[DRAW_WARPS];
    int accepted, status;  // by the block rule, before it has decided: drafts that it may accept
    int best[WARP];  // greedy: the target's choice at each step
    double ratios[WARP], excess[WARP];  // block rule: r and e behind so many drafts
    bool last;
};

// What came before it here is seen by whoever reads behind a later one: a release and an acquire (PTX ISA, 8.10).
__device__ __forceinline__ u32 add_in_order(u32* at, u32 more) {
#ifdef DRIFTGUARD_SIMT
    return atomicAdd(at, more);
#else
    u32 before;
    asm volatile("atom.add.acq_rel.gpu.global.u32 %0, [%1], %2;" : "=r"(before) : "l"(at), "r"(more) : "memory");
    return before;
#endif
}

// By the whole block: is this the last of `blocks` to come here? What the others wrote can then be read.
__device__ __forceinline__ bool arrives_last(u32* arrivals, u32 blocks, bool& last) {
    __syncthreads();
    if (threadIdx.x == 0) {
        last = add_in_order(arrivals, 1u) == blocks - 1;
        if (last) *arrivals = 0;
    }
    __syncthreads();
    return last;
}

// A warp of this block takes the tiles of `part`, of `parts` blocks that share the row, one after another.
template <typename Logit>
__device__ __forceinline__ void sum_tiles(const Masses<Logit>& masses, int tiles, int part, int parts, float* tile_masses) {
    const int first = part + static_cast<int>(threadIdx.x / WARP) * parts;
#pragma unroll 1
    for (int tile = first; tile < tiles; tile += parts * DRAW_WARPS) {
        const float mass = mass_of_tile(masses, tile * TILE);
        if (threadIdx.x % WARP == 0) tile_masses[tile] = mass;
    }
}

// The weights of one row as what to draw by.
template <typename Logit> __device__ __forceinline__ Masses<Logit> weights_of(const LawfulRow<Logit>& row) {
    return {row, row, false, -1, 1.0f, 1.0f};
}

// Lane s of the first warp decides step s. Leaves the number of accepted drafts and the status in the scratch.
template <bool BLOCK, typename Logit>
__device__ __forceinline__ void accept(const Chain<Logit>& chain, const Offered& offered, Scratch<Logit>& scratch) {
    if (threadIdx.x >= WARP) return;
    const int step = threadIdx.x;
    const bool known = offered.token >= 0;
    const bool no_target = step <= chain.length && !scratch.laws.p[step].exists();
    const bool reads_draft = known && chain.scale != 0.0f && chain.draft != nullptr;
    const bool no_draft = reads_draft && !scratch.laws.q[step].exists();
    const u32 without_target = __ballot_sync(FULL_WARP, no_target);
    const u32 without_draft = __ballot_sync(FULL_WARP, no_draft);
    const bool lawful = (without_target | without_draft) == 0;
    bool passed = false;
    Odds odds = {0.0, 0.0};
    if (known && lawful && chain.scale == 0.0f) passed = offered.token == scratch.best[step];
    if (known && lawful && chain.scale != 0.0f) {
        odds = odds_of(chain, step, offered, scratch.laws);
        passed = BLOCK || __dmul_rn(offered.uniform, odds.q) < odds.p;
    }
    const u32 stopped = __ballot_sync(FULL_WARP, !passed);  // step `length` always stops
    if (step == 0) {
        scratch.accepted = __ffs(stopped) - 1;
        scratch.status = without_target != 0 ? TARGET_HAS_NO_LAW : without_draft != 0 ? DRAFT_HAS_NO_LAW : OK;
    }
    if (!BLOCK) return;
    double ratio = 1.0;
    if (step == 0) scratch.ratios[0] = ratio;
    for (int count = 1; count <= chain.length; ++count) {
        const double above = __dmul_rn(ratio, __shfl_sync(FULL_WARP, odds.p, count - 1));
        const double below = __shfl_sync(FULL_WARP, odds.q, count - 1);
        ratio = above < below ? above / below : above > 0.0 ? 1.0 : 0.0;
        if (step == 0) scratch.ratios[count] = ratio;
    }
}

// The laws of each step: warps in turn take the target's rows and the draft's, several at a time.
template <typename Logit> __device__ __forceinline__ void find_laws(const Chain<Logit>& chain, Scratch<Logit>& scratch) {
    constexpr int AT_A_TIME = 3, PAIRS = DRAW_WARPS / 2;
    const int warp = threadIdx.x / WARP;
    const bool of_draft = warp % 2 != 0;
    const int end = !of_draft ? chain.length + 1 : chain.draft != nullptr && chain.scale != 0.0f ? chain.length : 0;
    const LawTable table = of_draft ? chain.q : chain.p;
#pragma unroll 1
    for (int first = warp / 2; first < end; first += AT_A_TIME * PAIRS) {
        i64 rows[AT_A_TIME];
        RowLaw laws[AT_A_TIME];
#pragma unroll
        for (int n = 0; n < AT_A_TIME; ++n) {
            rows[n] = (of_draft ? chain.q_law : chain.p_law) + min(first + n * PAIRS, end - 1);
        }
        laws_of(table, rows, chain.tiles(), chain.scale, laws);
#pragma unroll
        for (int n = 0; n < AT_A_TIME; ++n) {
            const int step = first + n * PAIRS;
            if (step < end && threadIdx.x % WARP == 0) (of_draft ? scratch.laws.q : scratch.laws.p)[step] = laws[n];
        }
    }
    __syncthreads();
}

// The target's choice at each step of a greedy request, a warp per step.
template <typename Logit> __device__ __forceinline__ void choose(const Chain<Logit>& chain, Scratch<Logit>& scratch) {
    for (int step = threadIdx.x / WARP; step <= chain.length; step += DRAW_WARPS) {
        const float* const tile_maxima = chain.p.tile_maxima + (chain.p_law + step) * chain.tiles();
        const Logit* const logits = chain.target + step * chain.target_stride;
        const int best = argmax_of(logits, chain.size, scratch.laws.p[step].peak, tile_maxima);
        if (threadIdx.x % WARP == 0) scratch.best[step] = best;
    }
    __syncthreads();
}

// A thread per step: accepted drafts, the target's own token, -1 to the end; or -1 alone, and the reason.
template <typename Logit>
__device__ __forceinline__ void emit(
    const Chain<Logit>& chain, int steps, const Scratch<Logit>& scratch, int own, i64* tokens, int* accepted, int* status
) {
    const int step = threadIdx.x, kept = scratch.status == OK ? scratch.accepted : -1;
    if (step < steps) tokens[step] = step < kept ? chain.tokens[step] : step == kept ? own : -1;
    if (step == 0) *accepted = kept, *status = scratch.status;
}

// What the target's own token is drawn by: (r p - q)+, r being 1 by the token rule. After the last draft nothing was
// rejected, and an id that the vocabulary lacks was no draw from q: both leave p itself.
template <bool BLOCK, typename Logit>
__device__ __forceinline__ Masses<Logit> own_masses(const Chain<Logit>& chain, int step, const Scratch<Logit>& scratch) {
    const ChainLaws& laws = scratch.laws;
    Masses<Logit> masses = weights_of(chain.target_row(step, laws.p[step]));
    masses.residual = step < chain.length && chain.known(step);
    if (masses.residual) {
        const double ratio = BLOCK ? scratch.ratios[step] : 1.0;
        masses.target_reciprocal = static_cast<float>(__dmul_rn(1.0 / laws.p[step].normaliser, ratio));
        if (chain.draft != nullptr) {
            masses.draft = chain.draft_row(step, laws.q[step]);
            masses.draft_reciprocal = static_cast<float>(1.0 / laws.q[step].normaliser);
        } else {
            masses.certain = static_cast<int>(chain.tokens[step]);
        }
    }
    return masses;
}

// What a token is drawn by from now on, in every thread.
template <typename Logit, typename Make>
__device__ __forceinline__ void draw_by(const Make& make, Scratch<Logit>& scratch) {
    __syncthreads();  // the masses before may still be read
    if (threadIdx.x == 0) scratch.masses = make();
    __syncthreads();
}

// Whether the masses of tiles are not those that K1 summed: of a residual, or of a row with a cut.
template <typename Logit> __device__ __forceinline__ bool need_sums(const Masses<Logit>& masses) {
    return masses.residual || masses.target.is_cut();
}

// By the whole block, without the sums of the masses: a token that is drawn by scratch.masses, the same in every block
// that shares the row; -1: none of those proposed stays.
template <typename Logit>
__device__ __forceinline__ int draw_proposed(const LawTable& laws, i64 row, const Noise& noise, Scratch<Logit>& scratch) {
    const LawfulRow<Logit>& target = scratch.masses.target;
    const int tiles = (target.size + TILE - 1) / TILE;
    if (tiles == 1 || !need_sums(scratch.masses)) return -1;
    const TileMasses uncut = laws.masses_of(row, target, nullptr);
    const float* const lane_sums = laws.lane_sums + row * tiles * WARP;
    int token = -1;
#pragma unroll 1
    for (int first = 1; first <= PROPOSALS && token < 0; first += DRAW_WARPS) {
        const int warp = threadIdx.x / WARP;
        const int found = propose(uncut, lane_sums, scratch.masses, noise, first + warp);
        __syncthreads();  // what was proposed before may still be read
        if (threadIdx.x % WARP == 0) scratch.proposed[warp] = found;
        __syncthreads();
#pragma unroll
        for (int other = DRAW_WARPS - 1; other >= 0; --other) {
            if (scratch.proposed[other] >= 0) token = scratch.proposed[other];
        }
    }
    return token;
}

// Returns whether this block is to draw the row's token, of all that share the row: exactly one is. `anew` then holds
// the masses of its tiles, if scratch.masses need it; `summed`: it already does. Where p = q up to rounding leaves a
// residual empty, p is what to draw from.
template <typename Logit>
__device__ __forceinline__ bool sum_shared(int tiles, float* anew, u32* arrivals, bool summed, Scratch<Logit>& scratch) {
    if (!need_sums(scratch.masses) && !summed) return blockIdx.y == 0;
    int part = static_cast<int>(blockIdx.y), parts = static_cast<int>(gridDim.y);
#pragma unroll 1  // twice only where the residual is empty
    while (need_sums(scratch.masses)) {
        if (!summed) {
            sum_tiles(scratch.masses, tiles, part, parts, anew);
            if (parts > 1 && !arrives_last(arrivals, gridDim.y, scratch.last)) return false;
        }
        __syncthreads();
        const volatile float* const found = anew;
        bool some = !scratch.masses.residual;
        for (int tile = threadIdx.x; tile < tiles; tile += DRAW_THREADS) some = some || found[tile] > 0.0f;
        if (__syncthreads_or(some)) break;
        draw_by([&] { return weights_of(scratch.masses.target); }, scratch);
        part = 0, parts = 1, summed = false;  // by this block alone
    }
    return true;
}

// By the block that draws, a token by scratch.masses, behind `sum_shared`.
template <typename Logit>
__device__ __forceinline__ int draw_shared(
    const LawTable& laws, i64 row, const float* anew, const Noise& noise, Scratch<Logit>& scratch
) {
    const float* const summed = need_sums(scratch.masses) ? anew : nullptr;
    return draw(
        laws.masses_of(row, scratch.masses.target, summed), scratch.masses, noise.words(0), scratch.held, scratch.pick
    );
}

// As `sum_shared`, for the block rule: of the masses behind every number of drafts; anew [., tiles].
template <typename Logit>
__device__ __forceinline__ bool sum_all_shared(
    const Chain<Logit>& chain, float* anew, u32* arrivals, Scratch<Logit>& scratch
) {
    const int tiles = chain.tiles(), most = scratch.accepted;
#pragma unroll 1
    for (int count = 0; count <= most; ++count) {
        draw_by([&] { return own_masses<true>(chain, count, scratch); }, scratch);
        if (!need_sums(scratch.masses)) continue;
        sum_tiles(
            scratch.masses, tiles, static_cast<int>(blockIdx.y), static_cast<int>(gridDim.y), anew + count * tiles
        );
    }
    return gridDim.y == 1 || arrives_last(arrivals, gridDim.y, scratch.last);
}

// The longest run that passes u (e + 1 - r) < e, where e is the sum of the masses behind it, or r behind the last draft.
template <typename Logit>
__device__ __forceinline__ void accept_block(int tiles, const float* anew, const Offered& offered, Scratch<Logit>& scratch) {
    const int lane = threadIdx.x % WARP, most = scratch.accepted;
    __syncthreads();
    for (int count = threadIdx.x / WARP; count < most; count += DRAW_WARPS) {
        const volatile float* const found = anew + count * tiles;
        double total = 0.0;
        for (int tile = lane; tile < tiles; tile += WARP) total = __dadd_rn(total, found[tile]);
        total = sum_by_halves(total);
        if (lane == 0) scratch.excess[count] = total;
    }
    __syncthreads();
    if (threadIdx.x < WARP) {
        const double uniform = __shfl_up_sync(FULL_WARP, offered.uniform, 1);  // lane s holds that of the draft of step s
        bool passed = lane == 0;
        if (lane > 0 && lane <= most) {
            const double ratio = scratch.ratios[lane], excess = lane < most ? scratch.excess[lane] : ratio;
            passed = __dmul_rn(uniform, __dadd_rn(excess, __dsub_rn(1.0, ratio))) < excess;
        }
        const u32 runs = __ballot_sync(FULL_WARP, passed);
        if (lane == 0) scratch.accepted = WARP - 1 - __clz(static_cast<int>(runs));
    }
    __syncthreads();
}

// Grid: (batch, blocks per row), DRAW_THREADS threads. At most 31 drafts.
//
// target_logits [batch, steps, size], draft_logits [batch, steps - 1, size] or null, rows *_stride elements apart;
// draft_tokens [batch, steps - 1]; lengths, scales, seeds, positions [batch]; laws of the target's rows at
// request x steps + step, of the draft's at request x (steps - 1) + step. tile_masses [batch, tiles], by the block rule
// [batch, steps, tiles]: scratch. arrivals [batch]: zero, and left zero. Writes tokens [batch, steps], accepted [batch],
// status [batch].
template <bool BLOCK, typename Logit>
__device__ __forceinline__ void verify(
    const Logit* __restrict__ target_logits, i64 target_stride, const Logit* __restrict__ draft_logits,
    i64 draft_stride, const i64* __restrict__ draft_tokens, const int* __restrict__ lengths,
    const float* __restrict__ scales, const i64* __restrict__ seeds, const i64* __restrict__ positions, int steps,
    int size, const LawTable& p, const LawTable& q, float* tile_masses, u32* arrivals, i64* tokens, int* accepted,
    int* status
) {
    __shared__ Scratch<Logit> scratch;
    const i64 request = blockIdx.x;
    const i64 first_target = request * steps, first_draft = request * (steps - 1);
    const Chain<Logit> chain = {
        target_logits + first_target * target_stride,
        draft_logits == nullptr ? nullptr : draft_logits + first_draft * draft_stride,
        target_stride, draft_stride, draft_tokens + first_draft, lengths[request], size, scales[request],
        seeds[request], positions[request], BLOCK ? static_cast<u32>(positions[request]) : 0, p, q, first_target,
        first_draft,
    };
    const bool greedy = chain.scale == 0.0f;
    if (greedy && blockIdx.y != 0) return;
    const Offered offered = offered_by(chain);
    await_the_kernel_before();
    find_laws(chain, scratch);
    if (greedy) choose(chain, scratch);
    accept<BLOCK>(chain, offered, scratch);
    __syncthreads();
    int own = -1;
    if (scratch.status != OK || greedy) {
        if (blockIdx.y != 0) return;
        if (scratch.status == OK) own = scratch.best[scratch.accepted];
    } else {
        const int tiles = chain.tiles();
        float* anew = tile_masses + request * (BLOCK ? steps : 1) * tiles;
        if (BLOCK) {
            if (!sum_all_shared(chain, anew, arrivals + request, scratch)) return;
            accept_block(tiles, anew, offered, scratch);
            anew += scratch.accepted * tiles;
        }
        draw_by([&] { return own_masses<BLOCK>(chain, scratch.accepted, scratch); }, scratch);
        const int step = scratch.accepted;
        const Noise noise = {seeds[request], positions[request] + step, RESIDUAL, chain.noise};
        own = draw_proposed(p, first_target + step, noise, scratch);
        if (own >= 0) {
            if (!BLOCK && blockIdx.y != 0) return;
        } else {
            if (!sum_shared(tiles, anew, arrivals + request, BLOCK, scratch)) return;
            own = draw_shared(p, first_target + step, anew, noise, scratch);
        }
    }
    emit(chain, steps, scratch, own, tokens + first_target, accepted + request, status + request);
}

// Grid: (batch, blocks per row), DRAW_THREADS threads. Draws step `step` of each row's drafts from the laws at request x
// law_stride + step; logits [batch, size]. A row without a law gets -1, which verification rejects. block: for the block
// rule.
template <typename Logit>
__device__ __forceinline__ void draw_drafts(
    const Logit* __restrict__ logits, i64 row_stride, int size, int law_stride, int step,
    const float* __restrict__ scales, const i64* __restrict__ seeds, const i64* __restrict__ positions,
    int block, const LawTable& laws, float* tile_masses, u32* arrivals, i64* tokens
) {
    __shared__ Scratch<Logit> scratch;
    const i64 request = blockIdx.x, row = request * law_stride + step;
    const int tiles = (size + TILE - 1) / TILE;
    const Logit* here = logits + request * row_stride;
    const float scale = scales[request];
    await_the_kernel_before();
    RowLaw found[1];
    laws_of(laws, {row}, tiles, scale, found);
    const RowLaw& law = found[0];
    int token = -1;
    if (!law.exists() || scale == 0.0f) {
        if (blockIdx.y != 0) return;
        if (law.exists() && threadIdx.x < WARP) {
            token = argmax_of(here, size, law.peak, laws.tile_maxima + row * tiles);
        }
    } else {
        float* const anew = tile_masses + request * tiles;
        draw_by([&] { return weights_of(under(law, here, size, scale)); }, scratch);
        const u32 of_block = block != 0 ? static_cast<u32>(positions[request]) : 0;
        const Noise noise = {seeds[request], positions[request] + step, DRAFT, of_block};
        token = draw_proposed(laws, row, noise, scratch);
        if (token >= 0) {
            if (blockIdx.y != 0) return;
        } else {
            if (!sum_shared(tiles, anew, arrivals + request, false, scratch)) return;
            token = draw_shared(laws, row, anew, noise, scratch);
        }
    }
    if (threadIdx.x == 0) tokens[row] = token;
}

#define VERIFY(NAME, BLOCK, LOGIT)                                                                                 \
    extern "C" __global__ void __launch_bounds__(DRAW_THREADS, DRAW_BLOCKS) NAME(                                  \
        const LOGIT* target_logits, i64 target_stride, const LOGIT* draft_logits, i64 draft_stride,                \
        const i64* draft_tokens, const int* lengths, const float* scales, const i64* seeds, const i64* positions,  \
        int steps, int size, const float* p_tile_maxima, const float* p_tile_sums, const float* p_lane_sums,       \
        const float* p_cuts, const int* p_cut_tokens, const double* p_kept, const float* q_tile_maxima,            \
        const float* q_tile_sums, const float* q_lane_sums, const float* q_cuts, const int* q_cut_tokens,          \
        const double* q_kept, float* tile_masses, u32* arrivals, i64* tokens, int* accepted, int* status           \
    ) {                                                                                                            \
        verify<BLOCK>(                                                                                             \
            target_logits, target_stride, draft_logits, draft_stride, draft_tokens, lengths, scales, seeds,        \
            positions, steps, size,                                                                                \
            LawTable{p_tile_maxima, p_tile_sums, p_lane_sums, p_cuts, p_cut_tokens, p_kept},                       \
            LawTable{q_tile_maxima, q_tile_sums, q_lane_sums, q_cuts, q_cut_tokens, q_kept},                       \
            tile_masses, arrivals, tokens, accepted, status                                                        \
        );                                                                                                         \
    }

#define DRAW(NAME, LOGIT)                                                                                          \
    extern "C" __global__ void __launch_bounds__(DRAW_THREADS, DRAW_BLOCKS) NAME(                                  \
        const LOGIT* logits, i64 row_stride, int size, int law_stride, int step, const float* scales,              \
        const i64* seeds, const i64* positions, int block, const float* tile_maxima, const float* tile_sums,       \
        const float* lane_sums, const float* cuts, const int* cut_tokens, const double* kept, float* tile_masses,  \
        u32* arrivals, i64* tokens                                                                                 \
    ) {                                                                                                            \
        draw_drafts(                                                                                               \
            logits, row_stride, size, law_stride, step, scales, seeds, positions, block,                           \
            LawTable{tile_maxima, tile_sums, lane_sums, cuts, cut_tokens, kept}, tile_masses, arrivals, tokens     \
        );                                                                                                         \
    }

#define VERIFICATION(SUFFIX, LOGIT)             \
    VERIFY(verify_chain_##SUFFIX, false, LOGIT) \
    VERIFY(verify_block_##SUFFIX, true, LOGIT)  \
    DRAW(draw_drafts_##SUFFIX, LOGIT)

VERIFICATION(bf16, Bf16)
VERIFICATION(fp16, Fp16)
VERIFICATION(fp32, Fp32)
