// Attention of bf16 and fp16 by tensor cores, from memory to registers without a stop: a key is read as a column of a
// product's right side, a value as a row of it. The warps of a block share a split's positions in chunks of 16.
#include "mma.cuh"
#include "splits.cuh"

constexpr int POSITIONS = 16;  // that a warp takes at a time

// The low or high halves of two words, the first one below.
__device__ __forceinline__ u32 pair_of(u32 first, u32 second, int half) {
    return __byte_perm(first, second, half == 0 ? 0x5410u : 0x7632u);
}

template <typename Number, int DIM> struct Attention {
    static constexpr int KEY_BLOCKS = DIM / 32;    // 4 lanes x 8 numbers
    static constexpr int VALUE_BLOCKS = DIM / 64;  // 8 lanes x 8 numbers
    static constexpr int STRIDE = DIM + 4;

    const Number *keys, *values;  // at the first position of the split, for the key head
    i64 apart;                    // numbers from one position to the next
    int count;                    // positions of the split

    u32 query[2][KEY_BLOCKS][4];
    uint4 key[2][KEY_BLOCKS], value[4][VALUE_BLOCKS];
    float mixed[DIM / 8][4];
    float maximum[2], sum[2];
    int limit[2];  // the last position that each of the two rows sees

    // Past the split's end its last position stands in: its weight is 0.
    __device__ __forceinline__ i64 offset(int position) const {
        return (position < count ? position : count - 1) * apart;
    }

    __device__ __forceinline__ void read_query(int which, const Number* row) {
        const int lane = threadIdx.x % WARP;
#pragma unroll
        for (int block = 0; block < KEY_BLOCKS; ++block) {
            uint4 words = make_uint4(0, 0, 0, 0);
            if (row != nullptr) words = *reinterpret_cast<const uint4*>(row + block * 32 + lane % 4 * 8);
            query[which][block][0] = words.x, query[which][block][1] = words.y;
            query[which][block][2] = words.z, query[which][block][3] = words.w;
        }
    }

    __device__ __forceinline__ void read_keys(int chunk) {
        const int lane = threadIdx.x % WARP;
#pragma unroll
        for (int column = 0; column < 2; ++column) {
            const Number* from = keys + offset(chunk * POSITIONS + column * 8 + lane / 4) + lane % 4 * 8;
#pragma unroll
            for (int block = 0; block < KEY_BLOCKS; ++block) {
                key[column][block] = *reinterpret_cast<const uint4*>(from + block * 32);
            }
        }
    }

    __device__ __forceinline__ void read_values(int chunk) {
        const int lane = threadIdx.x % WARP;
#pragma unroll
        for (int place = 0; place < 4; ++place) {
            const int position = chunk * POSITIONS + place / 2 * 8 + lane % 4 * 2 + place % 2;
            const Number* from = values + offset(position);
#pragma unroll
            for (int block = 0; block < VALUE_BLOCKS; ++block) {
                value[place][block] = *reinterpret_cast<const uint4*>(from + block * 64 + lane / 4 * 8);
            }
        }
    }

    // Products of the queries with the keys: of rows g and g + 8 with positions 8 column + 2c, + 1.
    __device__ __forceinline__ void score(float (&scores)[2][4]) const {
#pragma unroll
        for (int column = 0; column < 2; ++column) {
#pragma unroll
            for (int at = 0; at < 4; ++at) scores[column][at] = 0.0f;
#pragma unroll
            for (int block = 0; block < KEY_BLOCKS; ++block) {
                const u32(&low)[4] = query[0][block], (&high)[4] = query[1][block];
                const uint4 words = key[column][block];
                multiply_add<Number>(scores[column], {low[0], high[0], low[1], high[1]}, words.x, words.y);
                multiply_add<Number>(scores[column], {low[2], high[2], low[3], high[3]}, words.z, words.w);
            }
        }
    }

    // Scores to rounded weights, as the left side of the product with the values; moves what was summed to the new
    // maxima.
    __device__ __forceinline__ void weigh(int chunk, float scale, float (&scores)[2][4], u32 (&weights)[4]) {
        const int first = chunk * POSITIONS + threadIdx.x % 4 * 2;
#pragma unroll
        for (int row = 0; row < 2; ++row) {
            float largest = maximum[row];
#pragma unroll
            for (int at = 0; at < 4; ++at) {
                float& own = scores[at / 2][row * 2 + at % 2];
                own = first + at / 2 * 8 + at % 2 <= limit[row] ? __fmul_rn(own, scale) : -INF;
                largest = fmaxf(largest, own);
            }
            largest = fmaxf(largest, __shfl_xor_sync(FULL_WARP, largest, 1));
            largest = fmaxf(largest, __shfl_xor_sync(FULL_WARP, largest, 2));
            const float correction = weight_against(maximum[row], largest);
            maximum[row] = largest;
            sum[row] = __fmul_rn(sum[row], correction);
#pragma unroll
            for (int column = 0; column < 2; ++column) {
                float weight[2];
#pragma unroll
                for (int at = 0; at < 2; ++at) weight[at] = weight_against(scores[column][row * 2 + at], largest);
                const u32 pair = Rounding<Number>::pair(weight[0], weight[1]);
                weights[column * 2 + row] = pair;
                sum[row] = __fadd_rn(sum[row], __fadd_rn(Rounding<Number>::low(pair), Rounding<Number>::high(pair)));
            }
#pragma unroll
            for (int tile = 0; tile < DIM / 8; ++tile) {
                mixed[tile][row * 2] = __fmul_rn(mixed[tile][row * 2], correction);
                mixed[tile][row * 2 + 1] = __fmul_rn(mixed[tile][row * 2 + 1], correction);
            }
        }
    }

    // Column g of tile 8 block + j is number 64 block + 8 g + j of the head, so that a lane's sums are neighbours.
    __device__ __forceinline__ void mix(const u32 (&weights)[4]) {
#pragma unroll
        for (int block = 0; block < VALUE_BLOCKS; ++block) {
#pragma unroll
            for (int j = 0; j < 8; ++j) {
                u32 word[4];
#pragma unroll
                for (int place = 0; place < 4; ++place) {
                    const uint4 words = value[place][block];
                    word[place] = j / 2 == 0 ? words.x : j / 2 == 1 ? words.y : j / 2 == 2 ? words.z : words.w;
                }
                multiply_add<Number>(
                    mixed[block * 8 + j], weights, pair_of(word[0], word[1], j % 2), pair_of(word[2], word[3], j % 2)
                );
            }
        }
    }

    // Chunks part, part + parts, ... of the split.
    __device__ __forceinline__ void run(int part, int parts, float scale) {
#pragma unroll
        for (int tile = 0; tile < DIM / 8; ++tile) {
#pragma unroll
            for (int at = 0; at < 4; ++at) mixed[tile][at] = 0.0f;
        }
        maximum[0] = maximum[1] = -INF;
        sum[0] = sum[1] = 0.0f;
        int chunk = part;
        if (chunk * POSITIONS < count) read_keys(chunk), read_values(chunk);
        while (chunk * POSITIONS < count) {
            const int next = chunk + parts;
            const bool more = next * POSITIONS < count;
            float scores[2][4];
            u32 weights[4];
            score(scores);
            if (more) read_keys(next);
            weigh(chunk, scale, scores, weights);
            mix(weights);
            if (more) read_values(next);
            chunk = next;
        }
    }

    // Rows g and g + 8 of the warp's place in the room.
    __device__ __forceinline__ void leave() {
        const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
#pragma unroll
        for (int row = 0; row < 2; ++row) {
            const int in_room = warp * ROW_TILE + lane / 4 + row * 8;
            float total = sum[row];
            total = __fadd_rn(total, __shfl_xor_sync(FULL_WARP, total, 1));
            total = __fadd_rn(total, __shfl_xor_sync(FULL_WARP, total, 2));
            if (lane % 4 == 0) shared_statistics()[in_room] = {maximum[row], total};
            float* to = shared_room() + in_room * STRIDE;
#pragma unroll
            for (int tile = 0; tile < DIM / 8; tile += 4) {
#pragma unroll
                for (int at = 0; at < 2; ++at) {
                    const int place = tile / 8 * 64 + (lane % 4 * 2 + at) * 8 + tile % 8;
                    *reinterpret_cast<float4*>(to + place) = make_float4(
                        mixed[tile][row * 2 + at], mixed[tile + 1][row * 2 + at], mixed[tile + 2][row * 2 + at],
                        mixed[tile + 3][row * 2 + at]
                    );
                }
            }
        }
    }
};

// Grid: any number of blocks of ATTEND_THREADS threads. `tiles` (1, 2 or 4) warps share the same positions, for as many
// tiles of folded rows; more rows are read for again.
//
// queries [batch, tokens, heads, DIM]; keys, values [slots x length, kv_heads, DIM]. scale: powers of two per unit of
// score. Writes mixed [batch x tokens, heads x DIM] of the sequences of one split, and the partial of the others.
template <typename Number, int DIM>
__device__ __forceinline__ void attend(
    const Number* __restrict__ queries, const Number* __restrict__ keys, const Number* __restrict__ values,
    const Sequences& of, int tiles, float scale, const Partial& partial, Number* mixed
) {
    const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
    Piece piece;
#pragma unroll 1
    for (int index = blockIdx.x; find_piece(of, index, piece); index += gridDim.x) {
        const int first = piece.split * SPLIT;
        const i64 start = of.starts[piece.row];
        Attention<Number, DIM> own;
        own.apart = static_cast<i64>(of.kv_heads) * DIM;
        const i64 place = (of.slots[piece.row] * of.length + first) * own.apart + piece.kv_head * DIM;
        own.keys = keys + place, own.values = values + place;
        own.count = min(SPLIT, of.positions(piece.row) - first);
#pragma unroll 1
        for (int first_row = 0; first_row < of.rows(); first_row += tiles * ROW_TILE) {
#pragma unroll
            for (int which = 0; which < 2; ++which) {
                const int folded = first_row + warp % tiles * ROW_TILE + which * 8 + lane / 4;
                const bool real = folded < of.rows();
                own.read_query(which, real ? mixed_at(of, piece, folded, queries) : nullptr);
                const i64 last = start + (real ? folded / of.group : 0) - first;
                own.limit[which] = static_cast<int>(min(last, static_cast<i64>(own.count - 1)));
            }
            own.run(warp / tiles, ATTEND_WARPS / tiles, scale);
            own.leave();
            __syncthreads();
            write_split(
                of, piece, first_row, tiles, ATTEND_WARPS / tiles, Attention<Number, DIM>::STRIDE, partial, mixed
            );
            __syncthreads();
        }
    }
}

#define ATTEND(DIM, SUFFIX, NUMBER)                                                                               \
    extern "C" __global__ void __launch_bounds__(ATTEND_THREADS, 2) attend_##DIM##_##SUFFIX(                      \
        const NUMBER* queries, const NUMBER* keys, const NUMBER* values, const i64* slots, const i64* starts,     \
        int batch, int tokens, int group, int kv_heads, int, int length, int tiles, float scale,                  \
        float* partial_values, float* partial_maxima, float* partial_sums, NUMBER* mixed                          \
    ) {                                                                                                           \
        const Sequences of = {slots, starts, batch, tokens, group, kv_heads, DIM, length};                        \
        const Partial partial = {partial_values, partial_maxima, partial_sums};                                   \
        attend<NUMBER, DIM>(queries, keys, values, of, tiles, scale, partial, mixed);                             \
    }

ATTEND(64, bf16, Bf16)
ATTEND(128, bf16, Bf16)
ATTEND(64, fp16, Fp16)
ATTEND(128, fp16, Fp16)
