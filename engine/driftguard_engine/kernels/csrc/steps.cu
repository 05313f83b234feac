// What a step of decoding does around the passes of the models (../steps.py). Every block is one warp.
//
// The state of S slots: token_ids [S, capacity], all else [S]. Two rows share a slot only where its sequence has ended:
// such rows write nothing to it.
#include "arithmetic.cuh"

constexpr int STEP_THREADS = WARP;

// Positions beside the slot read its nearest.
__device__ __forceinline__ i64 token_at(const i64* token_ids, i64 capacity, i64 slot, i64 position) {
    return token_ids[slot * capacity + max(min(position, capacity - 1), 0ll)];
}

// What a draft model is fed instead of an id that it does not have.
__device__ __forceinline__ i64 known(i64 token, i64 vocabulary) {
    return 0 <= token && token < vocabulary ? token : 0;
}

// Grid: a thread per row. queued [2, batch]: slots, and the most drafts of each row.
//
// Writes the state of each row [batch], fed [batch, drafts + 1]: its first token, and 0 where drafts may follow, because
// the target reads all of it, also where none is fed; and, with a draft model of
// `draft_length` positions, its first inputs: draft_fed [batch, 2], draft_starts [batch], and in draft_chosen [batch]
// which of all fed tokens is the row's newest. draft_fed null: no draft model.
extern "C" __global__ void __launch_bounds__(STEP_THREADS) begin_step(
    const i64* __restrict__ queued, int batch, int drafts, const i64* __restrict__ token_ids, i64 capacity,
    const i64* __restrict__ lengths, const i64* __restrict__ limits, const i64* __restrict__ ended,
    const i64* __restrict__ seeds, const float* __restrict__ scales, const float* __restrict__ top_ps,
    const int* __restrict__ top_ks, i64 draft_length, i64 draft_vocabulary, i64* row_lengths, i64* row_seeds,
    float* row_scales, float* row_top_ps, int* row_top_ks, i64* starts, int* drafted, i64* fed, i64* draft_fed,
    i64* draft_starts, i64* draft_chosen
) {
    const i64 row = static_cast<i64>(blockIdx.x) * STEP_THREADS + threadIdx.x;
    if (row >= batch) return;
    const i64 slot = queued[row], length = lengths[slot];
    const bool over = ended[slot] != 0;
    row_lengths[row] = length, row_seeds[row] = seeds[slot];
    row_scales[row] = scales[slot], row_top_ps[row] = top_ps[slot], row_top_ks[row] = top_ks[slot];
    starts[row] = max(length - 1, 0ll);
    fed[row * (drafts + 1)] = token_at(token_ids, capacity, slot, length - 1);
    for (int draft = 1; draft <= drafts; ++draft) fed[row * (drafts + 1) + draft] = 0;
    i64 most = min(min(queued[batch + row], static_cast<i64>(drafts)), limits[slot] - length - 1);
    if (draft_fed != nullptr) {
        most = min(most, draft_length - length + 1);
        const i64 start = max(min(length, draft_length) - 2, 0ll);
        draft_starts[row] = start;
        draft_chosen[row] = 2 * row + (length > start + 1 ? 1 : 0);
        for (int place = 0; place < 2; ++place) {
            const i64 token = token_at(token_ids, capacity, slot, start + place);
            draft_fed[2 * row + place] = known(token, draft_vocabulary);
        }
    }
    drafted[row] = over ? 0 : static_cast<int>(max(most, 0ll));
}

// Grid: batch blocks, a lane per token. Feeds draft_tokens [batch, drafts] from step `first` on, at most 32 of each row.
//
// The first of them that is absent (-1) ends the row's drafts: lowers drafted [batch]. Writes fed [batch, drafts + 1]
// behind its first token, and the inputs of the draft model's next pass, next [batch] and next_starts [batch]; next
// null: no draft model.
extern "C" __global__ void __launch_bounds__(STEP_THREADS) feed_drafts(
    const i64* __restrict__ draft_tokens, int drafts, int first, int count, const i64* __restrict__ row_lengths,
    i64 draft_length, i64 draft_vocabulary, int* drafted, i64* fed, i64* next, i64* next_starts
) {
    const i64 row = blockIdx.x;
    const int lane = threadIdx.x, step = first + lane;
    const i64 token = lane < count ? draft_tokens[row * drafts + step] : 0;
    if (lane < count) fed[row * (drafts + 1) + 1 + step] = max(token, 0ll);
    const u32 absent = __ballot_sync(FULL_WARP, token < 0);
    if (lane == 0 && absent != 0) drafted[row] = min(drafted[row], first + __ffs(absent) - 1);
    if (lane == count - 1 && next != nullptr) {
        next[row] = known(token, draft_vocabulary);
        next_starts[row] = min(row_lengths[row] + step, draft_length - 1);
    }
}

// Grid: batch blocks, a lane per token; at most 32 steps. tokens [batch, steps], drafted, accepted, status [batch].
//
// Appends the first accepted + 1 tokens of each row to its slot, up to its limit and to the first of eos_ids [ends].
// Writes outputs [batch, 4 + steps]: status, drafted, accepted, appended, then the tokens.
extern "C" __global__ void __launch_bounds__(STEP_THREADS) append_step(
    const i64* __restrict__ slots, const i64* __restrict__ tokens, int steps, const int* __restrict__ drafted,
    const int* __restrict__ accepted, const int* __restrict__ status, const i64* __restrict__ eos_ids, int ends,
    const i64* __restrict__ limits, const i64* __restrict__ heeds_ends, i64* token_ids, i64 capacity, i64* lengths,
    i64* ended, i64* outputs
) {
    const i64 row = blockIdx.x, slot = slots[row], length = lengths[slot];
    const int lane = threadIdx.x;
    const i64 token = lane < steps ? tokens[row * steps + lane] : -1;
    const bool over = ended[slot] != 0, failed = status[row] != 0, heeds = heeds_ends[slot] != 0;
    const i64 room = min(limits[slot], capacity) - length;
    i64 count = over || failed ? 0 : max(min(static_cast<i64>(min(accepted[row] + 1, steps)), room), 0ll);
    bool is_end = false;
    if (heeds && lane < count) {
        for (int end = 0; end < ends; ++end) is_end = is_end || token == eos_ids[end];
    }
    const u32 found = __ballot_sync(FULL_WARP, is_end);
    if (found != 0) count = __ffs(found);
    if (lane < count) token_ids[slot * capacity + length + lane] = max(token, 0ll);
    i64* told = outputs + row * (4 + steps);
    if (lane < steps) told[4 + lane] = token;
    __syncwarp();  // the other lanes have read the slot's state
    if (lane != 0) return;
    told[0] = over ? 0 : status[row], told[1] = drafted[row], told[2] = accepted[row], told[3] = count;
    if (over) return;
    lengths[slot] = length + count;
    ended[slot] = failed || found != 0 || length + count >= limits[slot];
}
