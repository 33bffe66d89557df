// Measures the pieces of small calls on a Hopper GPU; docs/notes/calibration.md says what each figure means.
//
//   nvcc -O3 -std=c++20 -gencode arch=compute_90a,code=sm_90a -o calibration calibration.cu
//   ./calibration OUT.jsonl
//
// The first line of OUT describes the device, each further one is a figure: its name, value, unit and parameters. A
// line is there as soon as it is measured. Cycles are of an SM's clock; microseconds are times in CUDA graphs.

#include <cooperative_groups.h>

#include <utility>

#include "bench.cuh"
#include "copies.cuh"

namespace calibration {
namespace {

namespace cg = cooperative_groups;

// Clock -----------------------------------------------------------------------------------------------------------

__global__ void spin(long long* cycles, long long duration) {
  const long long began = now(), began_ns = nanoseconds();
  while (now() - began < duration) continue;
  cycles[0] = now() - began;
  cycles[1] = nanoseconds() - began_ns;
  const long long before = nanoseconds();
  long long after = before;
  while (after == before) after = nanoseconds();
  cycles[2] = after - before;
}

void measure_clock(Bench& bench, const char* when) {
  bench.launch({}, spin, bench.cycles, 40'000'000);
  const std::vector<double> found = bench.counted(3);
  bench.figure("clock", found[0] / found[1] * 1e3, "MHz", {{"when", when}});
  bench.figure("step of the timer", found[2], "ns", {{"when", when}});
}

// Code ------------------------------------------------------------------------------------------------------------

// The compiler unrolls no loop much longer than this.
constexpr int kUnrolled = 1024;

// Four chains, so that no instruction waits for the one before it; each has a constant of its own.
template <int kCount, int kFrom>
__device__ __forceinline__ void straight_block(float (&chains)[4], float x) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) chains[i % 4] = fmaf(chains[i % 4], x, float(kFrom + i + 1));
}

template <int kCount, size_t... kBlocks>
__device__ __forceinline__ void straight_blocks(float (&chains)[4], float x, std::index_sequence<kBlocks...>) {
  (straight_block<kCount, kCount* int(kBlocks)>(chains, x), ...);
}

// Straight code of 16 bytes an instruction.
template <int kInstructions>
__global__ void __launch_bounds__(512) straight_code(float x, int turns, long long* cycles, float* sink) {
  constexpr int kBlock = kInstructions < kUnrolled ? kInstructions : kUnrolled;
  float chains[4] = {x, x + 1, x + 2, x + 3};
  float sum = 0;
#pragma unroll 1
  for (int turn = 0; turn < turns; ++turn) {
    __syncthreads();
    const long long begin = now();
    straight_blocks<kBlock>(chains, x, std::make_index_sequence<kInstructions / kBlock>());
    sum = chains[0] + chains[1] + chains[2] + chains[3];
    if (sum == 1e30f) sink[0] = sum;  // the clock is read behind them
    const long long end = now();
    if (threadIdx.x == 0) cycles[blockIdx.x * turns + turn] = end - begin;
  }
  sink[blockIdx.x * blockDim.x + threadIdx.x] = sum;
}

constexpr int kTurns = 3, kInstructionsOfKb = 64;
constexpr int kCodeKb[] = {1, 4, 16, 64, 128, 256, 512};

template <int kSizeKb>
void run_code(Bench& bench, int warps, int ctas) {
  bench.launch({.ctas = ctas, .threads = warps * 32}, straight_code<kSizeKb * kInstructionsOfKb>, 0.5f, kTurns,
               bench.cycles, reinterpret_cast<float*>(bench.sink));
}

// Cycles an instruction of a warp: in its first turn, with its code in memory or in L2 alone, and in a later turn.
template <int kSizeKb>
void measure_code(Bench& bench, int warps, int ctas) {
  std::vector<double> first[2], later;
  for (int repeat = 0; repeat < 5; ++repeat) {
    for (const bool from_memory : {false, true}) {
      // The instruction caches of all SMs are filled with other code.
      kSizeKb == 512 ? run_code<256>(bench, 1, bench.multiprocessors())
                     : run_code<512>(bench, 1, bench.multiprocessors());
      if (from_memory) bench.forget_data();
      run_code<kSizeKb>(bench, warps, ctas);
      const std::vector<double> found = bench.counted(ctas * kTurns);
      std::vector<double> of_ctas[2];
      for (int i = 0; i < ctas * kTurns; i += kTurns) {
        of_ctas[0].push_back(found[i]);
        of_ctas[1].push_back(found[i + kTurns - 1]);
      }
      first[from_memory].push_back(median(of_ctas[0]));
      later.push_back(median(of_ctas[1]));
    }
  }
  const std::pair<const char*, std::vector<double>> states[] = {
      {"memory", first[1]}, {"L2", first[0]}, {"warm", later}};
  for (const auto& [state, values] : states) {
    bench.figure("code", median(values) / (kSizeKb * kInstructionsOfKb), "cycles an instruction",
                 {{"kb", kSizeKb}, {"warps", warps}, {"ctas", ctas}, {"from", state}});
  }
}

template <size_t... kAt>
void measure_codes(Bench& bench, std::index_sequence<kAt...>) {
  (run_code<kCodeKb[kAt]>(bench, 1, 1), ...);  // the driver loads them
  for (const int ctas : {1, bench.multiprocessors()}) {
    for (const int warps : {1, 4, 16}) (measure_code<kCodeKb[kAt]>(bench, warps, ctas), ...);
  }
}

// Dependent loads -------------------------------------------------------------------------------------------------

constexpr int kLine = 32;  // words of 4 bytes

// A cycle through all lines: a linear congruence of full period, as `lines` is a power of two.
__global__ void link_lines(uint32_t* words, uint32_t lines) {
  for (uint32_t i = blockIdx.x * blockDim.x + threadIdx.x; i < lines; i += gridDim.x * blockDim.x) {
    words[int64_t{i} * kLine] = ((i * 1664525u + 1013904223u) & (lines - 1)) * kLine;
  }
}

__global__ void follow_lines(const uint32_t* words, int before, int steps, long long* cycles, uint32_t* sink) {
  uint32_t at = 0;
  for (int i = 0; i < before; ++i) at = __ldcg(words + at);
  const long long begin = now();
#pragma unroll 1
  for (int i = 0; i < steps; ++i) at = __ldcg(words + at);
  sink[0] = at;
  cycles[0] = now() - begin;
}

// A warp follows four lines, then all warps of the CTA learn where it is.
__global__ void __launch_bounds__(512) follow_and_tell(const uint32_t* words, long long* cycles, uint32_t* sink) {
  __shared__ uint32_t told;
  uint32_t at = 0;
  const long long spent = cycles_of<64>([&](int) {
    if (threadIdx.x < 32) {
#pragma unroll
      for (int i = 0; i < 4; ++i) at = __ldcg(words + at);
      told = at;
    }
    __syncthreads();
    at = told;
    __syncthreads();
  });
  if (threadIdx.x == 0) cycles[0] = spent;
  sink[threadIdx.x] = at;
}

void measure_loads(Bench& bench) {
  auto* words = reinterpret_cast<uint32_t*>(bench.data);
  for (const int kb : {16, 4 * 1024, 16 * 1024, 1024 * 1024}) {
    const uint32_t lines = kb * 8;
    bench.launch({.ctas = 1024, .threads = 256}, link_lines, words, lines);
    bench.forget_data();
    // Beyond the size of L2 no line is met twice.
    const int before = kb > 64 * 1024 ? 0 : lines;
    bench.launch({}, follow_lines, words, before, 2000, bench.cycles, bench.sink);
    bench.figure("dependent load", bench.counted(1)[0] / 2000, kCycles,
                 {{"kb", kb}, {"from", before ? "L2" : "memory"}});
  }
  bench.launch({.ctas = 64, .threads = 256}, link_lines, words, 128u);
  bench.launch({.threads = 512}, follow_and_tell, words, bench.cycles, bench.sink);
  bench.figure("four loads, then told to the CTA", bench.counted(1)[0] / 64, kCycles, {{"warps", 16}});
}

// Barriers and clusters -------------------------------------------------------------------------------------------

constexpr int kExchangeBytes = 32 * 1024;

__global__ void __launch_bounds__(512) exchanges(long long* cycles, uint32_t* sink) {
  __shared__ uint4 rows[kExchangeBytes / 16];
  auto* next = reinterpret_cast<uint32_t*>(rows);
  cg::cluster_group cluster = cg::this_cluster();
  for (int i = threadIdx.x; i < kExchangeBytes / 4; i += blockDim.x) next[i] = (i + 33) % 1024;
  cluster.sync();
  const unsigned neighbour = (cluster.block_rank() + 1) % cluster.num_blocks();
  const volatile uint32_t* mine = next;
  const volatile uint32_t* theirs = cluster.map_shared_rank(next, neighbour);
  const uint4* their_rows = cluster.map_shared_rank(rows, neighbour);
  uint32_t at = 0, sum = 0;
  long long found[5];
  found[0] = cycles_of<64>([](int) { __syncthreads(); });
  found[1] = cycles_of<64>([&](int) { cluster.sync(); });
  found[2] = cycles_of<64>([&](int) { at = mine[at]; });
  found[3] = cycles_of<64>([&](int) { at = theirs[at]; });
  cluster.sync();
  found[4] = cycles_of<8>([&](int turn) {
    for (int i = threadIdx.x; i < kExchangeBytes / 16; i += blockDim.x) sum += their_rows[i].x ^ their_rows[i].w;
    __syncthreads_or(sum == uint32_t(turn) + 1);  // all are there
  });
  if (threadIdx.x == 0 && blockIdx.x == 0) {
    for (int i = 0; i < 5; ++i) cycles[i] = found[i];
  }
  sink[blockIdx.x * blockDim.x + threadIdx.x] = at + sum;
  cluster.sync();  // nobody leaves while its memory is read
}

__global__ void nothing(int* never) {
  if (never) *never = 1;
}

void measure_clusters(Bench& bench) {
  bench.allow(0, exchanges);
  for (const int cluster : {1, 2, 4, 8, 16}) {
    for (int turn = 0; turn < 2; ++turn) {
      bench.launch({.ctas = cluster, .threads = 512, .cluster = cluster}, exchanges, bench.cycles, bench.sink);
    }
    const std::vector<double> found = bench.counted(5);
    bench.figure("__syncthreads", found[0] / 64, kCycles, {{"warps", 16}, {"cluster", cluster}});
    bench.figure("cluster barrier", found[1] / 64, kCycles, {{"warps", 16}, {"cluster", cluster}});
    bench.figure("shared load", found[2] / 64, kCycles, {{"warps", 16}, {"cluster", cluster}});
    bench.figure("neighbour's shared load", found[3] / 64, kCycles, {{"warps", 16}, {"cluster", cluster}});
    bench.figure("neighbour's 32 KB", found[4] / 8, kCycles, {{"warps", 16}, {"cluster", cluster}});
  }
  bench.allow(200 * kKb, nothing);
  for (const int cluster : {2, 4, 8, 16}) {
    for (const int kb : {0, 100, 200}) {
      bench.figure("clusters at once", bench.clusters_at_once({cluster, 512, kb * kKb, cluster}, nothing), "clusters",
                   {{"cluster", cluster}, {"shared kb", kb}});
    }
  }
}

// Tickets ---------------------------------------------------------------------------------------------------------

__device__ uint32_t next_ticket(uint32_t* counter) {
  uint32_t ticket;
  asm volatile("atom.inc.acq_rel.gpu.global.u32 %0, [%1], %2;" : "=r"(ticket) : "l"(counter), "r"(~0u) : "memory");
  return ticket;
}

__global__ void take_tickets(uint32_t* counter, bool ordered, long long* cycles, uint32_t* sink) {
  uint32_t ticket = 0;
  const long long spent = cycles_of<32>([&](int) {
    uint32_t* where = counter + (ticket >> 31);  // known only when the one before has come
    ticket = ordered ? next_ticket(where) : atomicAdd(where, 1u);
  });
  cycles[blockIdx.x] = spent;
  sink[blockIdx.x] = ticket;
}

__device__ void raise(uint32_t* flag, uint32_t value) {
  asm volatile("st.release.gpu.global.u32 [%0], %1;" ::"l"(flag), "r"(value) : "memory");
}

__device__ void await(const uint32_t* flag, uint32_t value) {
  uint32_t seen;
  do {
    asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(seen) : "l"(flag) : "memory");
  } while (seen < value);
}

// Two CTAs raise flags for each other in turn.
__global__ void pass_flags(uint32_t* flags, long long* cycles) {
  uint32_t *mine = flags + blockIdx.x * kLine, *theirs = flags + (1 - blockIdx.x) * kLine;
  cycles[blockIdx.x] = cycles_of<64>([&](int i) {
    if (blockIdx.x == 0) raise(mine, i + 1);
    await(theirs, i + 1);
    if (blockIdx.x == 1) raise(mine, i + 1);
  });
}

void measure_tickets(Bench& bench) {
  auto* counters = reinterpret_cast<uint32_t*>(bench.data);
  for (const bool ordered : {false, true}) {
    for (const int ctas : {1, 33, bench.multiprocessors()}) {
      bench.clear(kKb);
      bench.launch({ctas, 1}, take_tickets, counters, ordered, bench.cycles, bench.sink);
      bench.figure("ticket", median(bench.counted(ctas)) / 32, kCycles,
                   {{"ctas", ctas}, {"order", ordered ? "acq_rel" : "relaxed"}});
    }
  }
  bench.clear(kKb);
  bench.launch({2, 1}, pass_flags, counters, bench.cycles);
  bench.figure("flag to another CTA", bench.counted(1)[0] / 128, kCycles, {});
}

// Launches --------------------------------------------------------------------------------------------------------

struct ManyArguments {
  char bytes[3800];
};
__global__ void take_arguments(const __grid_constant__ ManyArguments arguments, int* never) {
  if (never) *never = arguments.bytes[0];
}

template <bool kWaitsFirst>
__global__ void overlapping(int* never) {
  if (kWaitsFirst) asm volatile("griddepcontrol.wait;" ::: "memory");
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
  if (!kWaitsFirst) asm volatile("griddepcontrol.wait;" ::: "memory");
  if (never) *never = 1;
}

// times[0 to 1]: when a kernel of one thread ended; behind them: when each CTA of the next one began.
__global__ void mark_end(long long* times) { times[0] = nanoseconds(); }
__global__ void mark_begin(long long* times) {
  if (threadIdx.x == 0) times[1 + blockIdx.x] = nanoseconds();
}

constexpr Launch kLaunches[] = {{1, 32},          {132, 512},       {132, 512, 200 * kKb}, {264, 256, 100 * kKb},
                                {128, 512, 0, 4}, {128, 512, 0, 8}, {128, 512, 0, 16},     {2048, 256}};
constexpr int kInGraph = 200;

void measure_gaps(Bench& bench) {
  int* never = nullptr;
  for (const Launch& how : kLaunches) {
    bench.figure(
        "kernel in a graph", bench.graph_us(kInGraph, [&] { bench.launch(how, nothing, never); }), kUs,
        {{"ctas", how.ctas}, {"threads", how.threads}, {"shared kb", how.shared / kKb}, {"cluster", how.cluster}});
  }
  bench.figure("kernel in a graph, 3800 bytes of arguments",
               bench.graph_us(kInGraph, [&] { bench.launch({132, 512}, take_arguments, ManyArguments{}, never); }), kUs,
               {{"ctas", 132}, {"threads", 512}});
  bench.figure("graph of one kernel", bench.graph_us(1, [&] { bench.launch({}, nothing, never); }), kUs, {});
  for (const Launch& size : {Launch{1, 32}, Launch{132, 512}}) {
    for (const bool overlaps : {false, true}) {
      Launch how = size;
      how.overlaps = overlaps;
      const auto measure = [&](auto kernel, const char* waits) {
        bench.figure("dependent kernel in a graph", bench.graph_us(kInGraph, [&] { bench.launch(how, kernel, never); }),
                     kUs, {{"ctas", how.ctas}, {"overlaps", int(overlaps)}, {"waits", waits}});
      };
      measure(overlapping<true>, "first");
      measure(overlapping<false>, "last");
    }
  }
}

// From the end of a kernel to the first instruction of the next one's first and last CTA, in a graph.
void measure_first_instructions(Bench& bench) {
  bench.allow(200 * kKb, mark_begin);
  for (const Launch& how : kLaunches) {
    if (how.ctas >= kMaxCycles || how.cluster > 1) continue;
    bench.graph_us(1, [&] {
      bench.launch({}, nothing, static_cast<int*>(nullptr));
      bench.launch({1, 1}, mark_end, bench.cycles);
      bench.launch(how, mark_begin, bench.cycles);
    });
    const std::vector<double> times = bench.counted(1 + how.ctas);
    const auto [first, last] = std::minmax_element(times.begin() + 1, times.end());
    for (const auto& [which, time] : {std::pair{"first", *first}, {"last", *last}}) {
      bench.figure("first instruction", time - times[0], "ns",
                   {{"cta", which}, {"ctas", how.ctas}, {"threads", how.threads}, {"shared kb", how.shared / kKb}});
    }
  }
}

// Reading ---------------------------------------------------------------------------------------------------------

// The slowest CTA's cycles, from its first load to the last byte.
double cycles_of_reading(Bench& bench, int64_t bytes, int ctas, bool from_memory) {
  std::vector<double> found;
  for (int repeat = 0; repeat < 6; ++repeat) {
    if (from_memory) bench.forget_data();
    bench.launch({ctas, 512}, read_all, reinterpret_cast<const uint4*>(bench.data), bytes / 16, bench.sink,
                 bench.cycles);
    const std::vector<double> of_ctas = bench.counted(ctas);
    if (repeat > 0) found.push_back(*std::max_element(of_ctas.begin(), of_ctas.end()));
  }
  return median(found);
}

void measure_reading(Bench& bench) {
  const auto measure = [&](int64_t kb, int ctas, bool from_memory) {
    bench.figure("reading", cycles_of_reading(bench, kb * kKb, ctas, from_memory), kCycles,
                 {{"kb", kb}, {"ctas", ctas}, {"from", from_memory ? "memory" : "L2"}});
  };
  for (const int ctas : {1, 4, 16}) measure(1100, ctas, false);  // a row tile's pieces of a long sequence
  for (const bool from_memory : {false, true}) {
    for (const int ctas : {1, 4, 16, 64, 128}) measure(256, ctas, from_memory);  // a row of logits
  }
  for (const int ctas : {1, 4, 16, bench.multiprocessors(), 2 * bench.multiprocessors()}) {
    measure(int64_t{ctas} * 3 * 1024, ctas, true);
  }
}

// Arithmetic ------------------------------------------------------------------------------------------------------

struct Counter {
  uint32_t words[4];
};

__device__ Counter philox(Counter c, uint32_t key) {
  uint32_t first = key, second = key;
#pragma unroll
  for (int round = 0; round < 10; ++round) {
    const uint64_t left = uint64_t{0xD2511F53u} * c.words[0], right = uint64_t{0xCD9E8D57u} * c.words[2];
    c = {uint32_t(right >> 32) ^ c.words[1] ^ first, uint32_t(right), uint32_t(left >> 32) ^ c.words[3] ^ second,
         uint32_t(left)};
    first += 0x9E3779B9u;
    second += 0xBB67AE85u;
  }
  return c;
}

constexpr const char* kArithmetic[] = {"Philox-10 block", "two ex2", "two max.bf16x2", "64-bit division",
                                       "redux",           "shuffle", "shared atomic",  "shared atomic, one bank"};
constexpr int kKinds = std::size(kArithmetic), kTimes = 64;

__global__ void __launch_bounds__(512) arithmetic(uint32_t key, long long divisor, long long* cycles, uint32_t* sink) {
  __shared__ uint32_t counters[2048];
  for (int i = threadIdx.x; i < 2048; i += blockDim.x) counters[i] = 0;
  __syncthreads();
  Counter c{threadIdx.x, key, blockIdx.x, key};
  float f = threadIdx.x, g = key;
  uint32_t m = key, n = key + threadIdx.x;
  long long quotient = divisor * divisor;
  long long found[kKinds];
  found[0] = cycles_of<kTimes>([&](int) { c = philox(c, key); });
  found[1] = cycles_of<kTimes>([&](int) {
    asm volatile("ex2.approx.ftz.f32 %0, %0;\nex2.approx.ftz.f32 %1, %1;" : "+f"(f), "+f"(g));
  });
  found[2] = cycles_of<kTimes>([&](int i) {
    asm volatile("max.NaN.bf16x2 %0, %0, %2;\nmax.NaN.bf16x2 %1, %1, %2;" : "+r"(m), "+r"(n) : "r"(c.words[0] + i));
  });
  found[3] = cycles_of<kTimes>([&](int i) { quotient = quotient / divisor + (1000000007ll << (i % 16)); });
  found[4] = cycles_of<kTimes>([&](int) { m = __reduce_max_sync(~0u, m + threadIdx.x); });
  found[5] = cycles_of<kTimes>([&](int) { n += __shfl_xor_sync(~0u, n, 1); });
  found[6] = cycles_of<kTimes>([&](int) { atomicAdd(&counters[threadIdx.x], 1u); });
  found[7] = cycles_of<kTimes>([&](int) { atomicAdd(&counters[threadIdx.x % 2 * 32], 1u); });
  if (threadIdx.x == 0) {
    for (int i = 0; i < kKinds; ++i) cycles[i] = found[i];
  }
  sink[threadIdx.x] = c.words[0] ^ c.words[1] ^ c.words[2] ^ c.words[3] ^ __float_as_uint(f + g) ^ m ^ n ^
                      uint32_t(quotient) ^ counters[threadIdx.x];
}

void measure_arithmetic(Bench& bench) {
  for (const int warps : {1, 4, 16}) {
    for (int turn = 0; turn < 2; ++turn) {
      bench.launch({1, warps * 32}, arithmetic, 7u, 1000003ll, bench.cycles, bench.sink);
    }
    const std::vector<double> found = bench.counted(kKinds);
    for (int i = 0; i < kKinds; ++i) bench.figure(kArithmetic[i], found[i] / kTimes, kCycles, {{"warps", warps}});
  }
}

void measure_all(const char* path) {
  Bench bench(path);
  bench.describe();
  measure_clock(bench, "before");
  measure_codes(bench, std::make_index_sequence<std::size(kCodeKb)>());
  measure_loads(bench);
  measure_clusters(bench);
  measure_tickets(bench);
  measure_gaps(bench);
  measure_first_instructions(bench);
  measure_reading(bench);
  measure_copies(bench);
  measure_arithmetic(bench);
  measure_clock(bench, "after");
}

}  // namespace
}  // namespace calibration

int main(int count, char** arguments) {
  if (count != 2) {
    fprintf(stderr, "usage: %s OUT.jsonl\n", arguments[0]);
    return 2;
  }
  calibration::measure_all(arguments[1]);
  return 0;
}
