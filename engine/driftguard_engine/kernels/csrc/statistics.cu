// K1: one pass over every row of logits. A warp takes one tile after another, and leaves of each its maximum and the sum
// of its weights against that maximum; while it computes, the next tile is on its way. The last warp of a row adds the
// tiles up to the row's law, in an order that does not depend on which warp is last.
#include "async_copy.cuh"
#include "maxima.cuh"

// Written by other blocks of the same launch: read past the first-level cache, which is not coherent.
template <typename Number> __device__ __forceinline__ Number fresh(const Number* at) {
    return *static_cast<const volatile Number*>(at);
}

struct TileStatistics { float maximum, lane_maximum, sum; };

// Two tiles, of which each lane copies and reads its own runs alone: no lane waits for another's.
template <typename Logit> struct TileBuffers {
    typename Reader<Logit>::Raw runs[2][CHUNKS][WARP];
};

// A tile of a row.
template <typename Logit> struct Tile {
    typedef typename Reader<Logit>::Raw Raw;
    const Logit* row;
    int size, start;  // of the row; the tile's first element
    bool whole;       // the row starts on 16 bytes

    // Whether all of its runs are copied.
    __device__ __forceinline__ bool full() const { return whole && start + TILE <= size; }
    // This lane's run of a chunk.
    __device__ __forceinline__ int at(int chunk) const {
        return start + chunk * CHUNK + static_cast<int>(threadIdx.x % WARP) * RUN;
    }
    __device__ __forceinline__ bool is_copied(int chunk) const { return whole && at(chunk) + RUN <= size; }

    __device__ __forceinline__ void copy_run(Raw (&runs)[CHUNKS][WARP], int chunk) const {
        u8* const to = reinterpret_cast<u8*>(&runs[chunk][threadIdx.x % WARP]);
        const u8* const from = reinterpret_cast<const u8*>(row + at(chunk));
#pragma unroll
        for (int bytes = 0; bytes < static_cast<int>(sizeof(Raw)); bytes += 16) copy_16_bytes(to + bytes, from + bytes);
    }
    // Starts to copy the runs that can be copied.
    __device__ __forceinline__ void copy(Raw (&runs)[CHUNKS][WARP]) const {
        if (full()) {
#pragma unroll
            for (int chunk = 0; chunk < CHUNKS; ++chunk) copy_run(runs, chunk);
        } else {
#pragma unroll 1
            for (int chunk = 0; chunk < CHUNKS && is_copied(chunk); ++chunk) copy_run(runs, chunk);
        }
    }

    __device__ __forceinline__ Raw run(const Raw (&runs)[CHUNKS][WARP], int chunk) const {
        return is_copied(chunk) ? runs[chunk][threadIdx.x % WARP] : Reader<Logit>::read(row, at(chunk), size, whole);
    }
};

// `scale` 0: greedy, which needs no sum. FULL: all runs were copied.
template <bool FULL, typename Logit>
__device__ __forceinline__ TileStatistics tile_statistics(
    const Tile<Logit>& tile, const typename Reader<Logit>::Raw (&runs)[CHUNKS][WARP], float scale
) {
    constexpr int UNROLLED = FULL ? CHUNKS : 1;
    const int lane = threadIdx.x % WARP;
    Maximum<Logit> best;
#pragma unroll UNROLLED
    for (int chunk = 0; chunk < CHUNKS; ++chunk) {
        if (FULL || tile.at(chunk) < tile.size) best.take(FULL ? runs[chunk][lane] : tile.run(runs, chunk));
    }
    const float lane_maximum = best.value();
    const float maximum = warp_max_or_nan(lane_maximum);
    if (scale == 0.0f) return {maximum, lane_maximum, 0.0f};

    const float peak = maximum == -INF ? 0.0f : maximum;
    float sums[RUN] = {};
#pragma unroll UNROLLED
    for (int chunk = 0; chunk < CHUNKS; ++chunk) {
        if (FULL || tile.at(chunk) < tile.size) {
            float logits[RUN];
            Reader<Logit>::unpack(FULL ? runs[chunk][lane] : tile.run(runs, chunk), logits);
#pragma unroll
            for (int place = 0; place < RUN; ++place) {
                const float weight = weight_of(logits[place], peak, scale);
                sums[place] = FULL && chunk == 0 ? weight : __fadd_rn(sums[place], weight);
            }
        }
    }
    return {maximum, lane_maximum, tile_sum(sums)};
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

// Where rows of logits lie, and which are read.
template <typename Logit> struct Rows {
    const Logit* logits;
    i64 row_stride;
    int steps, size;
    const int* lengths;

    __device__ __forceinline__ bool is_read(int row) const {
        return lengths == nullptr || row % steps <= lengths[row / steps];
    }
    __device__ __forceinline__ Tile<Logit> tile(int row, int tile) const {
        const Logit* const at = logits + row * row_stride;
        return {at, size, tile * TILE, starts_on_16_bytes(at)};
    }
};

// Grid: any number of blocks of one warp; they take the tiles of all rows, fewer than 2**31, in turn.
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
    __shared__ __align__(16) TileBuffers<Logit> buffers;
    const int tiles = (size + TILE - 1) / TILE, lane = threadIdx.x;
    const Rows<Logit> rows = {logits, row_stride, steps, size, lengths};
    const int units = batch * steps * tiles, apart = static_cast<int>(gridDim.x);
    int held = 0;
    for (int unit = static_cast<int>(blockIdx.x) - apart; unit < units; unit += apart) {
        const int next = unit + apart;
        if (next < units && rows.is_read(next / tiles)) {
            rows.tile(next / tiles, next % tiles).copy(buffers.runs[1 - held]);
        }
        end_copies();
        await_copies<1>();
        const int row = unit / tiles, at = unit % tiles;
        const auto& runs = buffers.runs[held];
        held = 1 - held;
        if (unit < 0 || !rows.is_read(row)) continue;

        const int request = row / steps;
        const i64 law = static_cast<i64>(request) * law_stride + law_offset + row % steps;
        const float scale = scales[request];
        const Tile<Logit> tile = rows.tile(row, at);
        const TileStatistics found = tile.full() ? tile_statistics<true>(tile, runs, scale)
                                                 : tile_statistics<false>(tile, runs, scale);
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
    extern "C" __global__ void __launch_bounds__(WARP) NAME(                                                      \
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
