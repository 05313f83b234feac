// row_cutoffs with readers that count how many logits they read.
#include "../../../engine/driftguard_engine/kernels/csrc/arithmetic.cuh"

static u64 logits_read;

template <typename Logit> struct Counted : Logit {};

template <typename Logit> struct Reader<Counted<Logit>> {
    typedef typename Reader<Logit>::Raw Raw;
    static Raw read(const Counted<Logit>* row, int at, int size, bool whole) {
        logits_read += min(RUN, size - at);
        return Reader<Logit>::read(row, at, size, whole);
    }
    static void unpack(const Raw& raw, float (&logits)[RUN]) { Reader<Logit>::unpack(raw, logits); }
    static float one(const Counted<Logit>* row, int at) {
        ++logits_read;
        return Reader<Logit>::one(row, at);
    }
};

#include "../../../engine/driftguard_engine/kernels/csrc/cutoffs.cu"

template <typename Logit> constexpr u32 KEY_SPACING<Counted<Logit>> = KEY_SPACING<Logit>;
template <typename Logit> constexpr bool HAS_VALUE_BINS<Counted<Logit>> = HAS_VALUE_BINS<Logit>;

ROW_CUTOFFS(counted_row_cutoffs_bf16, Counted<Bf16>)
ROW_CUTOFFS(counted_row_cutoffs_fp16, Counted<Fp16>)
ROW_CUTOFFS(counted_row_cutoffs_fp32, Counted<Fp32>)

extern "C" __global__ void take_count(u64* count) { *count = logits_read, logits_read = 0; }
