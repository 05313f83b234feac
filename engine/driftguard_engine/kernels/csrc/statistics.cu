// K1: one pass over every row of logits. A warp takes one tile after another, and leaves of each its maximum and the sum
// of its weights against that maximum; as it weighs a tile, the next one is copied to where it has been read. The last
// warp of a row adds the tiles up to the row's law, in an order that does not depend on which warp is last.
#include "async_copy.cuh"
#include "maxima.cuh"

constexpr int STATISTICS_WARPS = 2;

// Written by other blocks of the same launch: read past the first-level cache, which is not coherent.
template <typename Number> __device__ __forceinline__ Number fresh(const Number* at) {
    return *static_cast<const volatile Number*>(at);
}

struct TileStatistics { float maximum, lane_maximum, sum; };

// A tile in shared memory. Each lane copies and reads its own runs alone, so that no lane waits for another's.
template <typename Logit> struct TileBuffer {
    typename Reader<Logit>::Raw runs[CHUNKS][WARP];
};

// A tile of a row.
template <typename Logit> struct Tile {
    typedef typename Reader<Logit>::Raw Raw;
    const Logit* row;
    int size, start;  // of the row; the tile's first element
    bool whole;       // the row starts on 16 bytes

    __device__ __forceinline__ bool full() const { return whole && start + TILE <= size; }
    // This lane's run of a chunk.
    __device__ __forceinline__ int at(int chunk) const {
        return start + chunk * CHUNK + static_cast<int>(threadIdx.x % WARP) * RUN;
    }
    // How many of this lane's runs are copied: those that are whole, the first ones.
    __device__ __forceinline__ int copied() const {
        return whole ? max(0, min(CHUNKS, (size - RUN - at(0)) / CHUNK + (size - RUN >= at(0)))) : 0;
    }
    __device__ __forceinline__ void copy(TileBuffer<Logit>& buffer, int chunk) const {
        u8* const to = reinterpret_cast<u8*>(&buffer.runs[chunk][threadIdx.x % WARP]);
        const u8* const from = reinterpret_cast<const u8*>(row + at(chunk));
#pragma unroll
        for (int bytes = 0; bytes < static_cast<int>(sizeof(Raw)); bytes += 16) copy_16_bytes(to + bytes, from + bytes);
    }
    __device__ __forceinline__ Raw run(const TileBuffer<Logit>& buffer, int chunk, int copied) const {
        return chunk < copied ? buffer.runs[chunk][threadIdx.x % WARP] : Reader<Logit>::read(row, at(chunk), size, whole);
    }
};

// Statistics of the tile in the buffer, into which the runs of the next one are copied, `next_copied` of them.
// `scale` 0: greedy, which needs no sum. FULL: all runs of this one are in the buffer.
template <bool FULL, typename Logit>
__device__ __forceinline__ TileStatistics tile_statistics(
    const Tile<Logit>& tile, const Tile<Logit>& next, int next_copied, TileBuffer<Logit>& buffer, float scale
) {
    const int lane = threadIdx.x % WARP, copied = FULL ? CHUNKS : tile.copied();
    Maximum<Logit> best;
#pragma unroll 4
    for (int chunk = 0; chunk < CHUNKS; ++chunk) {
        if (FULL || tile.at(chunk) < tile.size) {
            best.take(FULL ? buffer.runs[chunk][lane] : tile.run(buffer, chunk, copied));
        }
    }
    const float lane_maximum = best.value();
    const float maximum = warp_max_or_nan(lane_maximum);

    const float peak = maximum == -INF ? 0.0f : maximum;
    float sums[RUN] = {};
#pragma unroll 4
    for (int chunk = 0; chunk < CHUNKS; ++chunk) {
        if (scale != 0.0f && (FULL || tile.at(chunk) < tile.size)) {
            float logits[RUN];
            Reader<Logit>::unpack(FULL ? buffer.runs[chunk][lane] : tile.run(buffer, chunk, copied), logits);
#pragma unroll
            for (int place = 0; place < RUN; ++place) {
                sums[place] = __fadd_rn(sums[place], weight_of(logits[place], peak, scale));
            }
        }
        if (chunk < next_copied) next.copy(buffer, chunk);
    }
    return {maximum, lane_maximum, scale == 0.0f ? 0.0f : tile_sum(sums)};
}

// By one warp. Tile masses are products of two float32, exact in double; masses: lane l adds tiles l, l + 32, ...
__device__ __forceinline__ void row_law(
    int tiles, float scale, const float* maxima, const float* sums, float* peak, double* normaliser, double* masses
) {
    const int lane = threadIdx.x % WARP;
    float largest = -INF;
    for (int tile = lane; tile < tiles; tile += WARP) largest = max_or_nan(largest, fresh(maxima + tile));
    largest = warp_max_or_nan(largest);
    double total = 0.0;
    for (int tile = lane; tile < tiles; tile += WARP) {
        const double weight = weight_of(fresh(maxima + tile), largest, scale);
        const double mass = __dmul_rn(fresh(sums + tile), weight);
        masses[tile] = mass;
        total = __dadd_rn(total, mass);
    }
    total = sum_by_halves(total);
    if (lane == 0) *peak = largest, *normaliser = total;
}

// Which tile of which row; `unit` counts all tiles of all rows.
struct Place {
    int row, request, step, tile;

    static __device__ __forceinline__ Place of(int unit, int tiles, int steps) {
        const int row = unit / tiles, request = row / steps;
        return {row, request, row - request * steps, unit - row * tiles};
    }
};

// Grid: any number of blocks of STATISTICS_WARPS warps, which take the tiles of all rows, fewer than 2**31, in turn.
//
// logits [batch, steps, size], rows `row_stride` elements apart; lengths [batch] or null: only rows up to
// lengths[b] are read. scales [batch], top_k [batch], top_p [batch]. Laws are written at row
// b x law_stride + law_offset + s: tile_maxima, tile_sums, tile_masses [., tiles], peaks, normalisers, cuts,
// cut_tokens [.]; lane_maxima [., tiles x 32] only where top-k or top-p may take tokens away.
// arrivals [batch x steps]: zero, and left zero.
template <typename Logit>
__device__ __forceinline__ void row_statistics(
    const Logit* __restrict__ logits, i64 row_stride, int batch, int steps, int size, const int* __restrict__ lengths,
    const float* __restrict__ scales, const int* __restrict__ top_k, const float* __restrict__ top_p, int law_stride,
    int law_offset, float* tile_maxima, float* tile_sums, double* tile_masses, float* lane_maxima, float* peaks,
    double* normalisers, float* cuts, int* cut_tokens, u32* arrivals
) {
    __shared__ __align__(16) TileBuffer<Logit> buffers[STATISTICS_WARPS];
    TileBuffer<Logit>& buffer = buffers[threadIdx.x / WARP];
    const int tiles = (size + TILE - 1) / TILE, lane = threadIdx.x % WARP;
    const int units = batch * steps * tiles, apart = static_cast<int>(gridDim.x) * STATISTICS_WARPS;
    const auto tile_at = [&](const Place& place) -> Tile<Logit> {
        const Logit* const row = logits + place.row * row_stride;
        return {row, size, place.tile * TILE, starts_on_16_bytes(row)};
    };
    const auto is_read = [&](int unit, const Place& place) {
        return unit < units && (lengths == nullptr || place.step <= lengths[place.request]);
    };

    int unit = static_cast<int>(blockIdx.x) * STATISTICS_WARPS + static_cast<int>(threadIdx.x) / WARP;
    Place place = Place::of(unit, tiles, steps);
    bool reads = is_read(unit, place);
    if (reads) {
        const Tile<Logit> tile = tile_at(place);
        const int copied = tile.copied();
#pragma unroll 4
        for (int chunk = 0; chunk < CHUNKS; ++chunk) {
            if (chunk < copied) tile.copy(buffer, chunk);
        }
    }
    while (unit < units) {
        unit += apart;
        const Place next_place = Place::of(unit, tiles, steps);
        const bool next_reads = is_read(unit, next_place);
        const Tile<Logit> tile = tile_at(place), next = tile_at(next_place);
        const int next_copied = next_reads ? next.copied() : 0;
        await_copies();
        const float scale = reads ? scales[place.request] : 0.0f;
        const i64 law = static_cast<i64>(place.request) * law_stride + law_offset + place.step;
        const TileStatistics found = !reads || tile.full() ? tile_statistics<true>(tile, next, next_copied, buffer, scale)
                                                           : tile_statistics<false>(tile, next, next_copied, buffer, scale);
        const int row = place.row, at = place.tile, request = place.request;
        const bool read = reads;
        place = next_place, reads = next_reads;
        if (!read) continue;

        const bool narrows = scale != 0.0f && ((top_k[request] > 0 && top_k[request] < size) || top_p[request] < 1.0f);
        if (narrows) lane_maxima[(law * tiles + at) * WARP + lane] = found.lane_maximum;
        u32 before = 0;
        if (lane == 0) {
            tile_maxima[law * tiles + at] = found.maximum;
            tile_sums[law * tiles + at] = found.sum;
            __threadfence();
            before = atomicAdd(arrivals + row, 1u);
        }
        if (__shfl_sync(FULL_WARP, before, 0) != static_cast<u32>(tiles - 1)) continue;
        __threadfence();
        __syncwarp();  // the shuffle does not order the other lanes' reads after lane 0's arrival
        row_law(
            tiles, scale, tile_maxima + law * tiles, tile_sums + law * tiles, peaks + law, normalisers + law,
            tile_masses + law * tiles
        );
        if (lane == 0) arrivals[row] = 0, cuts[law] = -INF, cut_tokens[law] = -1;
    }
}

#define ROW_STATISTICS(NAME, LOGIT)                                                                               \
    extern "C" __global__ void __launch_bounds__(STATISTICS_WARPS * WARP, sizeof(LOGIT) == 4 ? 6 : 13) NAME(      \
        const LOGIT* logits, i64 row_stride, int batch, int steps, int size, const int* lengths,                  \
        const float* scales, const int* top_k, const float* top_p, int law_stride, int law_offset,                \
        float* tile_maxima, float* tile_sums, double* tile_masses, float* lane_maxima, float* peaks,              \
        double* normalisers, float* cuts, int* cut_tokens, u32* arrivals                                          \
    ) {                                                                                                           \
        row_statistics(                                                                                           \
            logits, row_stride, batch, steps, size, lengths, scales, top_k, top_p, law_stride, law_offset,        \
            tile_maxima, tile_sums, tile_masses, lane_maxima, peaks, normalisers, cuts, cut_tokens, arrivals      \
        );                                                                                                        \
    }

ROW_STATISTICS(row_statistics_bf16, Bf16)
ROW_STATISTICS(row_statistics_fp16, Fp16)
ROW_STATISTICS(row_statistics_fp32, Fp32)
