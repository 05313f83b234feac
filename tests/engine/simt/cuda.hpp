// What CUDA C++ knows without an include. Included inside the namespace that also holds the kernels, so that
// its names hide those of the C library. Approximate functions (__expf and the like) are left out: the CPU
// does not give their bits. Site parameters are never passed; they name the line of the call.

#define __global__ __attribute__((used))
#define __device__
#define __host__
#define __constant__ static
#define __shared__ static __attribute__((section("simt_shared")))
#define __forceinline__ inline __attribute__((always_inline))
#define __noinline__ __attribute__((noinline))
#define __launch_bounds__(...)
#define __cluster_dims__(...)
#define __grid_constant__
#define __align__(bytes) __attribute__((aligned(bytes)))

constexpr int warpSize = 32;
using dim3 = simt::Index;

// --- vectors --------------------------------------------------------------------------------------------

#define SIMT_VECTORS(scalar, name, align2, align4)                                                            \
  struct alignas(align2) name##2 { scalar x, y; };                                                            \
  struct name##3 { scalar x, y, z; };                                                                         \
  struct alignas(align4) name##4 { scalar x, y, z, w; };                                                      \
  inline name##2 make_##name##2(scalar x, scalar y) { return {x, y}; }                                        \
  inline name##3 make_##name##3(scalar x, scalar y, scalar z) { return {x, y, z}; }                           \
  inline name##4 make_##name##4(scalar x, scalar y, scalar z, scalar w) { return {x, y, z, w}; }
SIMT_VECTORS(float, float, 8, 16)
SIMT_VECTORS(int, int, 8, 16)
SIMT_VECTORS(unsigned, uint, 8, 16)
SIMT_VECTORS(short, short, 4, 8)
SIMT_VECTORS(unsigned short, ushort, 4, 8)
SIMT_VECTORS(signed char, char, 2, 4)
SIMT_VECTORS(unsigned char, uchar, 2, 4)
SIMT_VECTORS(double, double, 16, 16)
SIMT_VECTORS(long long, longlong, 16, 16)
SIMT_VECTORS(unsigned long long, ulonglong, 16, 16)
#undef SIMT_VECTORS

// --- barriers and fences --------------------------------------------------------------------------------

using simt::Site;
using ull = unsigned long long;

inline void __syncthreads(const Site& site = Site::current()) { simt::barrier("__syncthreads", simt::Vote::none, 0, site); }
inline int __syncthreads_or(int predicate, const Site& site = Site::current()) {
  return simt::barrier("__syncthreads_or", simt::Vote::any, predicate, site);
}
inline int __syncthreads_and(int predicate, const Site& site = Site::current()) {
  return simt::barrier("__syncthreads_and", simt::Vote::all, predicate, site);
}
inline int __syncthreads_count(int predicate, const Site& site = Site::current()) {
  return simt::barrier("__syncthreads_count", simt::Vote::count, predicate, site);
}
inline void __threadfence() { simt::maybe_yield(); }
inline void __threadfence_block() { simt::maybe_yield(); }
inline void __threadfence_system() { simt::maybe_yield(); }
inline void __nanosleep(unsigned) { simt::maybe_yield(); }
[[noreturn]] inline void __trap(const Site& site = Site::current()) {
  simt::fail("__trap() at %s:%u", site.file_name(), site.line());
}

// --- warps ----------------------------------------------------------------------------------------------

inline unsigned __activemask() { return simt::warps[simt::current->warp].alive; }
inline void __syncwarp(unsigned mask = ~0u, const Site& site = Site::current()) {
  simt::in_warp("__syncwarp", simt::Op::sync, mask, 0, 0, site);
}
inline unsigned __ballot_sync(unsigned mask, int predicate, const Site& site = Site::current()) {
  return static_cast<unsigned>(simt::in_warp("__ballot_sync", simt::Op::ballot, mask, predicate != 0, 0, site));
}
inline int __any_sync(unsigned mask, int predicate, const Site& site = Site::current()) {
  return static_cast<int>(simt::in_warp("__any_sync", simt::Op::any, mask, predicate != 0, 0, site));
}
inline int __all_sync(unsigned mask, int predicate, const Site& site = Site::current()) {
  return static_cast<int>(simt::in_warp("__all_sync", simt::Op::all, mask, predicate != 0, 0, site));
}
inline unsigned __reduce_add_sync(unsigned mask, unsigned value, const Site& site = Site::current()) {
  return static_cast<unsigned>(simt::in_warp("__reduce_add_sync", simt::Op::add, mask, value, 0, site));
}
inline unsigned __reduce_min_sync(unsigned mask, unsigned value, const Site& site = Site::current()) {
  return static_cast<unsigned>(simt::in_warp("__reduce_min_sync", simt::Op::minimum, mask, value, 0, site));
}
inline unsigned __reduce_max_sync(unsigned mask, unsigned value, const Site& site = Site::current()) {
  return static_cast<unsigned>(simt::in_warp("__reduce_max_sync", simt::Op::maximum, mask, value, 0, site));
}
// Of signed numbers, as CUDA takes them for an argument that is an int.
constexpr unsigned SIMT_SIGN = 1u << 31;
inline int __reduce_add_sync(unsigned mask, int value, const Site& site = Site::current()) {
  return static_cast<int>(__reduce_add_sync(mask, static_cast<unsigned>(value), site));
}
inline int __reduce_min_sync(unsigned mask, int value, const Site& site = Site::current()) {
  return static_cast<int>(__reduce_min_sync(mask, static_cast<unsigned>(value) ^ SIMT_SIGN, site) ^ SIMT_SIGN);
}
inline int __reduce_max_sync(unsigned mask, int value, const Site& site = Site::current()) {
  return static_cast<int>(__reduce_max_sync(mask, static_cast<unsigned>(value) ^ SIMT_SIGN, site) ^ SIMT_SIGN);
}

template <typename T> uint64_t simt_bits(T value) {
  static_assert(std::is_arithmetic_v<T> && sizeof(T) >= 4, "warps exchange 32 and 64 bits");
  uint64_t bits = 0;
  std::memcpy(&bits, &value, sizeof value);
  return bits;
}
template <typename T>
T simt_shuffle(const char* name, unsigned mask, T value, unsigned source, const Site& site) {
  const uint64_t bits = simt::in_warp(name, simt::Op::shuffle, mask, simt_bits(value), source, site);
  std::memcpy(&value, &bits, sizeof value);
  return value;
}
inline int simt_lane() { return static_cast<int>(simt::current->lane); }
template <typename T>
T __shfl_sync(unsigned mask, T value, int from, int width = 32, const Site& site = Site::current()) {
  const int source = (simt_lane() & ~(width - 1)) | (from & (width - 1));
  return simt_shuffle("__shfl_sync", mask, value, static_cast<unsigned>(source), site);
}
template <typename T>
T __shfl_up_sync(unsigned mask, T value, unsigned delta, int width = 32, const Site& site = Site::current()) {
  const int lane = simt_lane(), from = lane - static_cast<int>(delta);
  return simt_shuffle("__shfl_up_sync", mask, value, static_cast<unsigned>(from < (lane & ~(width - 1)) ? lane : from), site);
}
template <typename T>
T __shfl_down_sync(unsigned mask, T value, unsigned delta, int width = 32, const Site& site = Site::current()) {
  const int lane = simt_lane(), from = lane + static_cast<int>(delta);
  return simt_shuffle("__shfl_down_sync", mask, value, static_cast<unsigned>(from > (lane | (width - 1)) ? lane : from), site);
}
template <typename T>
T __shfl_xor_sync(unsigned mask, T value, int lanes, int width = 32, const Site& site = Site::current()) {
  const int lane = simt_lane(), from = lane ^ lanes;
  return simt_shuffle("__shfl_xor_sync", mask, value, static_cast<unsigned>(from > (lane | (width - 1)) ? lane : from), site);
}
template <typename T> unsigned __match_any_sync(unsigned mask, T value, const Site& site = Site::current()) {
  return static_cast<unsigned>(simt::in_warp("__match_any_sync", simt::Op::match_any, mask, simt_bits(value), 0, site));
}

// --- atomics: other threads may run just before each of them --------------------------------------------

template <typename T, typename F> T simt_atomic(T* place, F change) {
  static_assert(sizeof(T) >= 4, "atomics work on 32 and 64 bits");
  simt::maybe_yield();
  const T old = *place;
  *place = change(old);
  return old;
}
#define SIMT_ATOMICS(T)                                                                                      \
  inline T atomicMax(T* p, T v) { return simt_atomic(p, [=](T old) { return old < v ? v : old; }); }         \
  inline T atomicMin(T* p, T v) { return simt_atomic(p, [=](T old) { return v < old ? v : old; }); }         \
  inline T atomicOr(T* p, T v) { return simt_atomic(p, [=](T old) { return old | v; }); }                    \
  inline T atomicAnd(T* p, T v) { return simt_atomic(p, [=](T old) { return old & v; }); }                   \
  inline T atomicXor(T* p, T v) { return simt_atomic(p, [=](T old) { return old ^ v; }); }
#define SIMT_EXCHANGES(T)                                                                                    \
  inline T atomicExch(T* p, T v) { return simt_atomic(p, [=](T) { return v; }); }                            \
  inline T atomicCAS(T* p, T was, T v) { return simt_atomic(p, [=](T old) { return old == was ? v : old; }); }
SIMT_ATOMICS(int) SIMT_ATOMICS(unsigned) SIMT_ATOMICS(ull) SIMT_ATOMICS(long long)
SIMT_EXCHANGES(int) SIMT_EXCHANGES(unsigned) SIMT_EXCHANGES(ull)
#undef SIMT_ATOMICS
#undef SIMT_EXCHANGES
inline float atomicExch(float* p, float v) { return simt_atomic(p, [=](float) { return v; }); }
inline float atomicAdd(float* p, float v) { return simt_atomic(p, [=](float old) { return old + v; }); }
inline double atomicAdd(double* p, double v) { return simt_atomic(p, [=](double old) { return old + v; }); }
inline unsigned atomicAdd(unsigned* p, unsigned v) { return simt_atomic(p, [=](unsigned old) { return old + v; }); }
inline ull atomicAdd(ull* p, ull v) { return simt_atomic(p, [=](ull old) { return old + v; }); }
inline int atomicAdd(int* p, int v) {
  return simt_atomic(p, [=](int old) { return static_cast<int>(static_cast<unsigned>(old) + static_cast<unsigned>(v)); });
}
inline unsigned atomicSub(unsigned* p, unsigned v) { return simt_atomic(p, [=](unsigned old) { return old - v; }); }
inline int atomicSub(int* p, int v) { return atomicAdd(p, static_cast<int>(0u - static_cast<unsigned>(v))); }
inline unsigned atomicInc(unsigned* p, unsigned most) {
  return simt_atomic(p, [=](unsigned old) { return old >= most ? 0 : old + 1; });
}

// --- loads and stores with cache hints ------------------------------------------------------------------

template <typename T> T __ldg(const T* p) { return *p; }
template <typename T> T __ldca(const T* p) { return *p; }
template <typename T> T __ldcg(const T* p) { return *p; }
template <typename T> T __ldcs(const T* p) { return *p; }
template <typename T> T __ldcv(const T* p) { return *p; }
template <typename T> T __ldlu(const T* p) { return *p; }
template <typename T> void __stwb(T* p, T v) { *p = v; }
template <typename T> void __stcg(T* p, T v) { *p = v; }
template <typename T> void __stcs(T* p, T v) { *p = v; }
template <typename T> void __stwt(T* p, T v) { *p = v; }

// --- arithmetic: round to nearest, never contracted -----------------------------------------------------

inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fsub_rn(float a, float b) { return a - b; }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline float __frcp_rn(float a) { return 1.0f / a; }
inline float __fsqrt_rn(float a) { return std::sqrt(a); }
inline float __fmaf_rn(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
inline double __dadd_rn(double a, double b) { return a + b; }
inline double __dsub_rn(double a, double b) { return a - b; }
inline double __dmul_rn(double a, double b) { return a * b; }
inline double __ddiv_rn(double a, double b) { return a / b; }
inline double __drcp_rn(double a) { return 1.0 / a; }
inline double __dsqrt_rn(double a) { return std::sqrt(a); }
inline double __fma_rn(double a, double b, double c) { return __builtin_fma(a, b, c); }
inline float __saturatef(float a) { return a > 0 ? (a < 1 ? a : 1.0f) : 0.0f; }

// Of two zeros the positive one is larger; a NaN loses to any number.
template <typename T> T simt_fmax(T a, T b) { return a != a ? b : b != b ? a : a == b ? (std::signbit(a) ? b : a) : a > b ? a : b; }
template <typename T> T simt_fmin(T a, T b) { return a != a ? b : b != b ? a : a == b ? (std::signbit(a) ? a : b) : a < b ? a : b; }
inline float fmaxf(float a, float b) { return simt_fmax(a, b); }
inline float fminf(float a, float b) { return simt_fmin(a, b); }
inline double fmax(double a, double b) { return simt_fmax(a, b); }
inline double fmin(double a, double b) { return simt_fmin(a, b); }
inline float fmax(float a, float b) { return simt_fmax(a, b); }
inline float fmin(float a, float b) { return simt_fmin(a, b); }
inline float max(float a, float b) { return simt_fmax(a, b); }
inline float min(float a, float b) { return simt_fmin(a, b); }
inline double max(double a, double b) { return simt_fmax(a, b); }
inline double min(double a, double b) { return simt_fmin(a, b); }
inline double max(float a, double b) { return simt_fmax<double>(a, b); }
inline double max(double a, float b) { return simt_fmax<double>(a, b); }
inline double min(float a, double b) { return simt_fmin<double>(a, b); }
inline double min(double a, float b) { return simt_fmin<double>(a, b); }
template <typename A, typename B>
  requires std::is_integral_v<A> && std::is_integral_v<B>
constexpr std::common_type_t<A, B> max(A a, B b) {
  using T = std::common_type_t<A, B>;
  return static_cast<T>(a) < static_cast<T>(b) ? static_cast<T>(b) : static_cast<T>(a);
}
template <typename A, typename B>
  requires std::is_integral_v<A> && std::is_integral_v<B>
constexpr std::common_type_t<A, B> min(A a, B b) {
  using T = std::common_type_t<A, B>;
  return static_cast<T>(b) < static_cast<T>(a) ? static_cast<T>(b) : static_cast<T>(a);
}
using std::abs, std::ceil, std::floor, std::fma, std::isfinite, std::isinf, std::isnan, std::rint, std::round,
    std::signbit, std::sqrt, std::trunc;

// --- bits -----------------------------------------------------------------------------------------------

template <typename To, typename From> To simt_cast(From value) { return std::bit_cast<To>(value); }
inline unsigned __float_as_uint(float a) { return simt_cast<unsigned>(a); }
inline int __float_as_int(float a) { return simt_cast<int>(a); }
inline float __uint_as_float(unsigned a) { return simt_cast<float>(a); }
inline float __int_as_float(int a) { return simt_cast<float>(a); }
inline long long __double_as_longlong(double a) { return simt_cast<long long>(a); }
inline double __longlong_as_double(long long a) { return simt_cast<double>(a); }
inline int __double2hiint(double a) { return static_cast<int>(simt_cast<ull>(a) >> 32); }
inline int __double2loint(double a) { return static_cast<int>(simt_cast<ull>(a)); }
inline double __hiloint2double(int high, int low) {
  return simt_cast<double>(ull{static_cast<unsigned>(high)} << 32 | static_cast<unsigned>(low));
}
inline unsigned __umulhi(unsigned a, unsigned b) { return static_cast<unsigned>(ull{a} * b >> 32); }
inline int __mulhi(int a, int b) { return static_cast<int>(static_cast<long long>(a) * b >> 32); }
inline ull __umul64hi(ull a, ull b) { return static_cast<ull>(static_cast<unsigned __int128>(a) * b >> 64); }
inline long long __mul64hi(long long a, long long b) { return static_cast<long long>(static_cast<__int128>(a) * b >> 64); }
inline int __popc(unsigned a) { return std::popcount(a); }
inline int __popcll(ull a) { return std::popcount(a); }
inline int __clz(int a) { return std::countl_zero(static_cast<unsigned>(a)); }
inline int __clzll(long long a) { return std::countl_zero(static_cast<ull>(a)); }
inline int __ffs(int a) { return a ? std::countr_zero(static_cast<unsigned>(a)) + 1 : 0; }
inline int __ffsll(long long a) { return a ? std::countr_zero(static_cast<ull>(a)) + 1 : 0; }
inline ull __brevll(ull a) {
  ull result = 0;
  for (int i = 0; i < 64; ++i) result |= (a >> i & 1) << (63 - i);
  return result;
}
inline unsigned __brev(unsigned a) { return static_cast<unsigned>(__brevll(a) >> 32); }
inline unsigned __funnelshift_l(unsigned low, unsigned high, unsigned shift) {
  return static_cast<unsigned>((ull{high} << 32 | low) << (shift & 31) >> 32);
}
inline unsigned __funnelshift_r(unsigned low, unsigned high, unsigned shift) {
  return static_cast<unsigned>((ull{high} << 32 | low) >> (shift & 31));
}
inline unsigned __byte_perm(unsigned a, unsigned b, unsigned selector) {
  const ull bytes = ull{b} << 32 | a;
  unsigned result = 0;
  for (int i = 0; i < 4; ++i) {
    const unsigned pick = selector >> (4 * i) & 15;
    const unsigned byte = bytes >> (8 * (pick & 7)) & 255;
    result |= (pick & 8 ? (byte >> 7) * 255 : byte) << (8 * i);
  }
  return result;
}

// --- conversions: out of range saturates ----------------------------------------------------------------

template <typename To, typename From> To simt_to_integer(From rounded) {
  if (rounded != rounded)  // a NaN: as the instruction set has it
    return sizeof(From) == 4 && sizeof(To) == 4 ? To{0} : static_cast<To>(ull{1} << (8 * sizeof(To) - 1));
  const From end = std::ldexp(From{1}, std::numeric_limits<To>::digits);
  if (rounded >= end) return std::numeric_limits<To>::max();
  if (rounded < (std::is_signed_v<To> ? -end : From{0})) return std::numeric_limits<To>::min();
  return static_cast<To>(rounded);
}
#define SIMT_TO_INTEGER(from, name, To)                                                                      \
  inline To name##_rn(from a) { return simt_to_integer<To>(std::nearbyint(a)); }                             \
  inline To name##_rz(from a) { return simt_to_integer<To>(std::trunc(a)); }                                 \
  inline To name##_rd(from a) { return simt_to_integer<To>(std::floor(a)); }                                 \
  inline To name##_ru(from a) { return simt_to_integer<To>(std::ceil(a)); }
SIMT_TO_INTEGER(float, __float2int, int) SIMT_TO_INTEGER(float, __float2uint, unsigned)
SIMT_TO_INTEGER(float, __float2ll, long long) SIMT_TO_INTEGER(float, __float2ull, ull)
SIMT_TO_INTEGER(double, __double2int, int) SIMT_TO_INTEGER(double, __double2uint, unsigned)
SIMT_TO_INTEGER(double, __double2ll, long long) SIMT_TO_INTEGER(double, __double2ull, ull)
#undef SIMT_TO_INTEGER
inline float __int2float_rn(int a) { return static_cast<float>(a); }
inline float __uint2float_rn(unsigned a) { return static_cast<float>(a); }
inline float __ll2float_rn(long long a) { return static_cast<float>(a); }
inline float __ull2float_rn(ull a) { return static_cast<float>(a); }
inline double __int2double_rn(int a) { return a; }
inline double __uint2double_rn(unsigned a) { return a; }
inline double __ll2double_rn(long long a) { return static_cast<double>(a); }
inline double __ull2double_rn(ull a) { return static_cast<double>(a); }
inline float __double2float_rn(double a) { return static_cast<float>(a); }
inline float simt_next(float a, bool up) { return std::nextafter(a, up ? INFINITY : -INFINITY); }
inline float __double2float_rd(double a) { const auto f = static_cast<float>(a); return f > a ? simt_next(f, false) : f; }
inline float __double2float_ru(double a) { const auto f = static_cast<float>(a); return f < a ? simt_next(f, true) : f; }
inline float __double2float_rz(double a) { return a < 0 ? __double2float_ru(a) : __double2float_rd(a); }
