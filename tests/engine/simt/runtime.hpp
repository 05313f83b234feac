// Runs one CUDA kernel on the CPU. Every thread is a fiber; a fiber runs until it meets another thread (a
// barrier, a warp operation, an atomic) or ends, and then a random one of those that can go on runs, so that
// a result that depends on the order of threads differs between seeds. Blocks run one after another, in a
// random order. What would hang or be undefined on a GPU ends the launch with a message.
#pragma once
#include <bit>
#include <cmath>
#include <csetjmp>
#include <csignal>
#include <cstdarg>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <dlfcn.h>
#include <limits>
#include <pthread.h>
#include <source_location>
#include <sys/mman.h>
#include <sys/time.h>
#include <tuple>
#include <type_traits>
#include <ucontext.h>
#include <utility>
#include <vector>

namespace simt {
struct Index { unsigned x, y, z; };
}
static simt::Index threadIdx, blockIdx, blockDim, gridDim;

// The linker names the ends of the section that `__shared__` variables are placed in.
static __attribute__((used, section("simt_shared"))) char simt_shared_is_never_empty[16];
extern "C" char __start_simt_shared[] __attribute__((visibility("hidden")));
extern "C" char __stop_simt_shared[] __attribute__((visibility("hidden")));

namespace simt {

using Site = std::source_location;
constexpr unsigned WARP = 32;
constexpr size_t STACK_BYTES = 256 << 10, PAGE_BYTES = 4096, MOST_SHARED_BYTES = 227 << 10;

// What Python reads after a launch that failed.
struct Report {
  char message[2048];
  char where[160], place[160];  // the thread; what a fault's address is near to
  int signal;
  uint64_t address, instruction;  // of a fault; the instruction relative to this library
};

enum class Op { sync, shuffle, ballot, any, all, match_any, add, minimum, maximum };
enum class Vote { none, any, all, count };
enum class State { ready, in_warp, at_barrier, exited };

struct Fiber {
  jmp_buf place;
  ucontext_t entry;
  char* stack = nullptr;  // its guard page
  bool started = false;
  State state;
  Index index;
  unsigned number, lane, warp;
  const char* waits_in;  // the intrinsic that it waits in, and where
  Site site;
  Op op;
  Vote vote;
  unsigned mask, source;
  int predicate;
  uint64_t value, result;
};

struct Warp {
  Fiber* lanes[WARP];
  unsigned alive, arrived;
};

static std::vector<Fiber*> fibers;  // made once and used by every launch
static std::vector<Warp> warps;
static std::vector<unsigned> ready;
static unsigned threads, at_barrier, exited;
static Fiber* current;
static jmp_buf scheduler, landing;
static void (*kernel)(void**);
static void** arguments;
static Report* report;
static char* dynamic_shared_end;
static uint64_t dynamic_shared_bytes, random_state;
static pthread_t runner;

static uint64_t draw() {  // splitmix64
  uint64_t z = (random_state += 0x9E3779B97F4A7C15u);
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
  z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
  return z ^ (z >> 31);
}

static unsigned below(unsigned size) { return static_cast<unsigned>((draw() >> 32) * size >> 32); }

static void say_where() {
  const Index b = blockIdx, t = threadIdx;
  std::snprintf(report->where, sizeof report->where, "block (%u, %u, %u), thread (%u, %u, %u)", b.x, b.y, b.z,
                t.x, t.y, t.z);
}

[[noreturn]] static void fail(const char* format, ...) {
  va_list rest;
  va_start(rest, format);
  std::vsnprintf(report->message, sizeof report->message, format, rest);
  va_end(rest);
  say_where();
  _longjmp(landing, 1);
}

static void make_ready(Fiber& fiber) {
  fiber.state = State::ready;
  ready.push_back(fiber.number);
}

// Back to the scheduler, which comes back here when this fiber may go on.
[[gnu::noinline]] static void leave() {
  if (!_setjmp(current->place)) _longjmp(scheduler, 1);
}

static void maybe_yield() {
  if (draw() & 1) {
    make_ready(*current);
    leave();
  }
}

// Who waits where, for messages: one line per place.
static void describe(char* text, size_t size) {
  std::vector<bool> told(threads);
  size_t used = 0;
  for (unsigned i = 0; i < threads && used < size; ++i) {
    const Fiber& first = *fibers[i];
    if (told[i]) continue;
    unsigned count = 0;
    for (unsigned j = i; j < threads; ++j) {
      const Fiber& other = *fibers[j];
      const bool same = other.state == first.state &&
                        (first.state == State::exited ||
                         (other.site.line() == first.site.line() && other.waits_in == first.waits_in &&
                          (first.state != State::in_warp || other.mask == first.mask)));
      if (same) told[j] = true, ++count;
    }
    char mask[40] = "";
    if (first.state == State::in_warp) std::snprintf(mask, sizeof mask, " with mask 0x%08x", first.mask);
    char place[400] = "have exited";
    if (first.state != State::exited)
      std::snprintf(place, sizeof place, "wait in %s%s at %s:%u", first.waits_in, mask, first.site.file_name(),
                    first.site.line());
    used += static_cast<size_t>(std::snprintf(text + used, size - used, "\n  %u threads (first: %u) %s", count, i, place));
  }
}

[[noreturn]] static void fail_waiting(const char* problem) {
  char text[1600];
  describe(text, sizeof text);
  fail("%s:%s", problem, text);
}

static uint64_t warp_result(const Warp& warp, const Fiber& lane, unsigned group) {
  uint64_t result = lane.op == Op::minimum ? ~0ull : 0;
  if (lane.op == Op::shuffle)  // a lane that does not take part gives anything
    return group >> lane.source & 1 ? warp.lanes[lane.source]->value : draw();
  for (unsigned i = 0; i < WARP; ++i) {
    if (!(group >> i & 1)) continue;
    const uint64_t value = warp.lanes[i]->value;
    switch (lane.op) {
      case Op::ballot: case Op::any: case Op::all: result |= uint64_t{value != 0} << i; break;
      case Op::match_any: result |= uint64_t{value == lane.value} << i; break;
      case Op::add: result += value; break;
      case Op::minimum: result = value < result ? value : result; break;
      case Op::maximum: result = value > result ? value : result; break;
      default: break;
    }
  }
  if (lane.op == Op::any) return result != 0;
  if (lane.op == Op::all) return result == group;
  return result;
}

// Ends a warp operation once every lane of its mask that has not exited is in it.
static void try_warp(Warp& warp, const Fiber& latest) {
  const unsigned group = latest.mask & warp.alive;
  if ((warp.arrived & group) != group) return;
  for (unsigned i = 0; i < WARP; ++i)
    if (group >> i & 1)
      if (warp.lanes[i]->mask != latest.mask || warp.lanes[i]->waits_in != latest.waits_in) return;
  for (unsigned i = 0; i < WARP; ++i)
    if (group >> i & 1) warp.lanes[i]->result = warp_result(warp, *warp.lanes[i], group);
  for (unsigned i = 0; i < WARP; ++i)
    if (group >> i & 1) make_ready(*warp.lanes[i]);
  warp.arrived &= ~group;
}

[[gnu::noinline]] static uint64_t in_warp(const char* name, Op op, unsigned mask, uint64_t value,
                                          unsigned source, const Site& site) {
  Fiber& fiber = *current;
  if (!(mask >> fiber.lane & 1))
    fail("%s at %s:%u: mask 0x%08x lacks the lane that calls it, %u", name, site.file_name(), site.line(), mask,
         fiber.lane);
  fiber.state = State::in_warp;
  fiber.waits_in = name, fiber.site = site, fiber.op = op, fiber.mask = mask, fiber.value = value;
  fiber.source = source;
  Warp& warp = warps[fiber.warp];
  warp.arrived |= 1u << fiber.lane;
  try_warp(warp, fiber);
  leave();
  return fiber.result;
}

// Unlike a GPU, which lets exited threads pass, all threads of the block must come to the same barrier.
[[gnu::noinline]] static int barrier(const char* name, Vote vote, int predicate, const Site& site) {
  Fiber& fiber = *current;
  fiber.state = State::at_barrier;
  fiber.waits_in = name, fiber.site = site, fiber.vote = vote, fiber.predicate = predicate != 0;
  if (++at_barrier == threads) {
    unsigned count = 0;
    for (unsigned i = 0; i < threads; ++i) {
      const Fiber& other = *fibers[i];
      if (other.vote != vote || other.site.line() != site.line()) fail_waiting("threads meet at different barriers");
      count += static_cast<unsigned>(other.predicate);
    }
    at_barrier = 0;
    for (unsigned i = 0; i < threads; ++i) {
      fibers[i]->result = vote == Vote::any ? count > 0 : vote == Vote::all ? count == threads : count;
      make_ready(*fibers[i]);
    }
  }
  leave();
  return static_cast<int>(fiber.result);
}

static void run_fiber() {
  for (;;) {
    kernel(arguments);
    Fiber& fiber = *current;
    fiber.state = State::exited;
    ++exited;
    Warp& warp = warps[fiber.warp];
    warp.alive &= ~(1u << fiber.lane);
    for (unsigned i = 0; i < WARP; ++i)
      if (warp.arrived >> i & 1) try_warp(warp, *warp.lanes[i]);
    leave();  // the next block's thread goes on here
  }
}

static void prepare_fibers() {
  for (unsigned i = 0; i < threads; ++i) {
    if (i == fibers.size()) {
      Fiber* fiber = new Fiber;
      void* stack = mmap(nullptr, STACK_BYTES, PROT_READ | PROT_WRITE,
                         MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
      if (stack == MAP_FAILED) fail("no memory for the stack of a thread");
      mprotect(stack, PAGE_BYTES, PROT_NONE);
      fiber->stack = static_cast<char*>(stack);
      fibers.push_back(fiber);
    }
    Fiber& fiber = *fibers[i];
    if (fiber.started) continue;
    getcontext(&fiber.entry);
    fiber.entry.uc_stack.ss_sp = fiber.stack + PAGE_BYTES;
    // Tops at different cache sets: a switch touches the top of a stack and little else.
    fiber.entry.uc_stack.ss_size = STACK_BYTES - PAGE_BYTES - i % 61 * 512;
    fiber.entry.uc_link = nullptr;
    makecontext(&fiber.entry, run_fiber, 0);
  }
}

[[gnu::noinline]] static void resume(Fiber& fiber) {
  current = &fiber;
  threadIdx = fiber.index;
  if (_setjmp(scheduler)) return;
  if (fiber.started) _longjmp(fiber.place, 1);
  fiber.started = true;
  setcontext(&fiber.entry);
}

static void poison_shared() {
  static constexpr unsigned char patterns[] = {0x7B, 0xFB, 0xFF};  // large, very negative, NaN
  const int pattern = patterns[below(3)];
  std::memset(__start_simt_shared, pattern, static_cast<size_t>(__stop_simt_shared - __start_simt_shared));
  std::memset(dynamic_shared_end - dynamic_shared_bytes, pattern, dynamic_shared_bytes);
}

static void run_block() {
  poison_shared();
  at_barrier = exited = 0;
  ready.clear();
  warps.assign((threads + WARP - 1) / WARP, Warp{});
  for (unsigned i = 0; i < threads; ++i) {
    Fiber& fiber = *fibers[i];
    fiber.number = i, fiber.lane = i % WARP, fiber.warp = i / WARP;
    fiber.index = {i % blockDim.x, i / blockDim.x % blockDim.y, i / blockDim.x / blockDim.y};
    warps[fiber.warp].lanes[fiber.lane] = &fiber;
    warps[fiber.warp].alive |= 1u << fiber.lane;
    make_ready(fiber);
  }
  while (exited < threads) {
    if (ready.empty()) fail_waiting("threads wait for others that never come");
    const unsigned chosen = below(static_cast<unsigned>(ready.size()));
    Fiber& fiber = *fibers[ready[chosen]];
    ready[chosen] = ready.back();
    ready.pop_back();
    resume(fiber);
  }
}

static void run_grid() {
  const unsigned blocks = gridDim.x * gridDim.y * gridDim.z;
  std::vector<unsigned> order(blocks);
  for (unsigned i = 0; i < blocks; ++i) {
    const unsigned other = below(i + 1);
    order[i] = order[other];
    order[other] = i;
  }
  for (const unsigned block : order) {
    blockIdx = {block % gridDim.x, block / gridDim.x % gridDim.y, block / gridDim.x / gridDim.y};
    run_block();
  }
}

// --- faults ---------------------------------------------------------------------------------------------

static constexpr int CAUGHT[] = {SIGSEGV, SIGBUS, SIGILL, SIGTRAP, SIGFPE, SIGVTALRM};
static struct sigaction before[std::size(CAUGHT)];

static void on_signal(int signal, siginfo_t* info, void* context) {
  if (!pthread_equal(pthread_self(), runner)) {
    if (signal == SIGVTALRM) pthread_kill(runner, signal);
    else for (size_t i = 0; i < std::size(CAUGHT); ++i)
      if (CAUGHT[i] == signal) sigaction(signal, &before[i], nullptr);  // not ours: faults again and is handled
    return;
  }
  const auto& machine = static_cast<ucontext_t*>(context)->uc_mcontext;
#ifdef __x86_64__
  const auto instruction = static_cast<uint64_t>(machine.gregs[REG_RIP]);
#else
  const auto instruction = static_cast<uint64_t>(machine.pc);
#endif
  Dl_info library;
  dladdr(reinterpret_cast<void*>(&run_block), &library);
  report->signal = signal;
  report->address = reinterpret_cast<uint64_t>(info->si_addr);
  report->instruction = instruction - reinterpret_cast<uint64_t>(library.dli_fbase);
  say_where();
  const char* address = static_cast<char*>(info->si_addr);
  if (current && address >= current->stack && address < current->stack + PAGE_BYTES)
    std::snprintf(report->message, sizeof report->message, "the stack of a thread, %zu KiB, is full", STACK_BYTES >> 10);
  if (address >= dynamic_shared_end && address < dynamic_shared_end + PAGE_BYTES)
    std::snprintf(report->place, sizeof report->place, "%td bytes past the end of dynamic shared memory",
                  address - dynamic_shared_end);
  _longjmp(landing, 1);
}

struct Catching {  // signals, for as long as a kernel runs
  stack_t stack_before;
  explicit Catching(double limit_seconds) {
    static char stack[64 << 10];
    const stack_t mine = {stack, 0, sizeof stack};
    sigaltstack(&mine, &stack_before);
    struct sigaction action = {};
    action.sa_sigaction = on_signal;
    action.sa_flags = SA_SIGINFO | SA_ONSTACK | SA_NODEFER;
    for (size_t i = 0; i < std::size(CAUGHT); ++i) sigaction(CAUGHT[i], &action, &before[i]);
    set_timer(limit_seconds);
  }
  ~Catching() {
    set_timer(0);
    for (size_t i = 0; i < std::size(CAUGHT); ++i) sigaction(CAUGHT[i], &before[i], nullptr);
    sigaltstack(&stack_before, nullptr);
  }
  static void set_timer(double seconds) {
    const auto whole = static_cast<time_t>(seconds);
    const itimerval timer = {{0, 0}, {whole, static_cast<suseconds_t>((seconds - static_cast<double>(whole)) * 1e6)}};
    setitimer(ITIMER_VIRTUAL, &timer, nullptr);
  }
};

// --- kernels --------------------------------------------------------------------------------------------

struct Kernel {
  const char* name;
  void (*call)(void**);
  const char* parameters;  // one letter each: p pointer, c pointer to const, f floating, i signed, u unsigned, s other
  const unsigned* sizes;   // in bytes
};

template <typename T> constexpr char letter() {
  if constexpr (std::is_pointer_v<T>) return std::is_const_v<std::remove_pointer_t<T>> ? 'c' : 'p';
  else if constexpr (std::is_floating_point_v<T>) return 'f';
  else if constexpr (std::is_integral_v<T>) return std::is_signed_v<T> ? 'i' : 'u';
  else return 's';
}

template <auto function> struct Call;
template <typename... P, void (*function)(P...)> struct Call<function> {
  static constexpr char letters[] = {letter<P>()..., 0};
  static constexpr unsigned sizes[] = {sizeof(P)..., 0};
  template <size_t... I> static void run(void** values, std::index_sequence<I...>) {
    function(*static_cast<std::remove_const_t<P>*>(values[I])...);
  }
  static void call(void** values) { run(values, std::index_sequence_for<P...>{}); }
  static constexpr Kernel described(const char* name) { return {name, call, letters, sizes}; }
};

inline char* dynamic_shared() { return dynamic_shared_end - dynamic_shared_bytes; }

static bool prepare(const unsigned* grid, const unsigned* block, uint64_t shared_bytes) {
  const auto static_bytes = static_cast<uint64_t>(__stop_simt_shared - __start_simt_shared) - 16;
  if (!dynamic_shared_end) {  // a guard page on either side
    void* pages = mmap(nullptr, (256 << 10) + 2 * PAGE_BYTES, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (pages == MAP_FAILED) fail("no memory for shared memory");
    mprotect(static_cast<char*>(pages) + PAGE_BYTES, 256 << 10, PROT_READ | PROT_WRITE);
    dynamic_shared_end = static_cast<char*>(pages) + PAGE_BYTES + (256 << 10);
  }
  dynamic_shared_bytes = (shared_bytes + 15) / 16 * 16;
  gridDim = {grid[0], grid[1], grid[2]};
  blockDim = {block[0], block[1], block[2]};
  const uint64_t size = uint64_t{block[0]} * block[1] * block[2];
  if (size < 1 || size > 1024 || block[2] > 64) fail("a block has 1 to 1024 threads, got %lu", size);
  if (grid[0] < 1 || grid[1] < 1 || grid[2] < 1 || grid[1] > 65535 || grid[2] > 65535)
    fail("a grid of (%u, %u, %u) blocks cannot be launched", grid[0], grid[1], grid[2]);
  if (static_bytes + shared_bytes > MOST_SHARED_BYTES)
    fail("a block has at most %zu bytes of shared memory, got %lu static and %lu dynamic", MOST_SHARED_BYTES,
         static_bytes, shared_bytes);
  threads = static_cast<unsigned>(size);
  prepare_fibers();
  return true;
}

static int launch(const Kernel& chosen, const unsigned* grid, const unsigned* block, void** values,
                  uint64_t shared_bytes, uint64_t seed, double limit_seconds, Report* result) {
  *result = {};
  report = result, kernel = chosen.call, arguments = values, random_state = seed, runner = pthread_self();
  current = nullptr;
  const Catching catching(limit_seconds);
  if (_setjmp(landing)) {
    for (Fiber* fiber : fibers) fiber->started = false;  // they stopped anywhere
    return 1;
  }
  prepare(grid, block, shared_bytes);
  run_grid();
  return 0;
}

}  // namespace simt
