// Runs small kernels, correct or with one planted bug, to prove that simt finds them.
//
//   simt_selftest list                    names the bugs
//   simt_selftest NAME forward|reverse|random:SEED
//
// Exit status 0: nothing found; 1: simt or a wrong result revealed the bug ("CAUGHT: ..."). Sanitizers end the program.
#include <algorithm>
#include <bit>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "attention.cuh"
#include "cluster.cuh"
#include "cuda/tile/launch.cuh"
#include "hopper.cuh"
#include "reduce.cuh"

namespace probe {
namespace {

using pagedtree::cuda::launch;
using pagedtree::simt::Error;

struct Named {
  const char* name;
  Bug bug;
};
constexpr Named kBugs[] = {
    {"none", Bug::kNone},
    {"no_wait", Bug::kNoWait},
    {"short_wait", Bug::kShortWait},
    {"no_commit", Bug::kNoCommit},
    {"no_barrier_before_read", Bug::kNoBarrierBeforeRead},
    {"no_barrier_before_refill", Bug::kNoBarrierBeforeRefill},
    {"table_overrun", Bug::kTableOverrun},
    {"foreign_page", Bug::kForeignPage},
    {"other_swizzle", Bug::kOtherSwizzle},
    {"no_swizzle", Bug::kNoSwizzle},
    {"tail_not_zeroed", Bug::kTailNotZeroed},
    {"divergent_barrier", Bug::kDivergentBarrier},
    {"shuffle_lacks_lanes", Bug::kShuffleLacksLanes},
    {"early_exit", Bug::kEarlyExit},
    {"misaligned_copy", Bug::kMisalignedCopy},
    {"shared_too_small", Bug::kSharedTooSmall},
    {"no_reduction_barrier", Bug::kNoReductionBarrier},
    {"merge_by_first", Bug::kMergeByFirst},
    {"merge_race", Bug::kMergeRace},
    {"no_cluster_start", Bug::kNoClusterStart},
    {"no_cluster_barrier", Bug::kNoClusterBarrier},
    {"no_cluster_end", Bug::kNoClusterEnd},
    {"no_empty_wait", Bug::kNoEmptyWait},
    {"no_full_wait", Bug::kNoFullWait},
    {"short_expect", Bug::kShortExpect},
    {"no_wgmma_wait", Bug::kNoWgmmaWait},
    {"buffer_back_early", Bug::kBufferBackEarly},
    {"unawaited_load", Bug::kUnawaitedLoad},
    {"no_phase_flip", Bug::kNoPhaseFlip},
    {"stage_back_early", Bug::kStageBackEarly},
    {"other_stride", Bug::kOtherStride},
    {"no_proxy_fence", Bug::kNoProxyFence},
    {"swapped_rows", Bug::kSwappedRows},
};

template <typename T>
float value(T x) {
  return pagedtree::ptx::detail::to_float(std::bit_cast<uint16_t>(x), T());
}
template <typename T>
T rounded(float x) {
  if constexpr (std::is_same_v<T, __half>) {
    return __float2half(x);
  } else {
    return __float2bfloat16(x);
  }
}

// `error > limit` would accept NaN.
void expect_below(double error, double limit, const char* kernel) {
  if (!(error < limit)) throw Error(std::string("wrong result of ") + kernel + ": error " + std::to_string(error));
}

template <typename T = Element>
std::vector<T> random_elements(size_t count, std::mt19937& random, float scale = 1.0f) {
  std::normal_distribution<float> normal;
  std::vector<T> elements(count);
  for (T& x : elements) x = rounded<T>(normal(random) * scale);
  return elements;
}

void run_attention(Bug bug, int context, int nodes) {
  const int keys = context + nodes, used = (keys + kPageSize - 1) / kPageSize, pool = 2 * used + 3;
  constexpr size_t kPage = kPageSize * kDim;
  std::mt19937 random(static_cast<unsigned>(context * 100 + nodes));
  const auto q = random_elements(static_cast<size_t>(nodes) * kDim, random);
  std::vector<Element> k(static_cast<size_t>(pool) * kPage, std::bit_cast<Element>(uint16_t{0xffff})), v = k, out = q;
  std::vector<int32_t> ids(static_cast<size_t>(pool));
  for (int i = 0; i < pool; ++i) ids[static_cast<size_t>(i)] = i;
  std::shuffle(ids.begin(), ids.end() - 1, random);  // the last page is another sequence's
  const std::vector<int32_t> pages(ids.begin(), ids.begin() + used);
  const auto row_of = [&](int key) {
    return (static_cast<size_t>(pages[static_cast<size_t>(key / kPageSize)]) * kPageSize +
            static_cast<size_t>(key % kPageSize)) *
           kDim;
  };
  for (int key = 0; key < keys; ++key) {  // NaN stays behind the last key
    const auto k_row = random_elements(kDim, random), v_row = random_elements(kDim, random);
    std::copy(k_row.begin(), k_row.end(), k.begin() + static_cast<std::ptrdiff_t>(row_of(key)));
    std::copy(v_row.begin(), v_row.end(), v.begin() + static_cast<std::ptrdiff_t>(row_of(key)));
  }
  std::vector<uint64_t> sees(static_cast<size_t>(nodes));
  for (size_t i = 0; i < sees.size(); ++i) sees[i] = uint64_t{1} << i | (i > 0 ? sees[random() % i] : 0);
#if defined(__SANITIZE_ADDRESS__)
  for (size_t i = static_cast<size_t>(used); i < ids.size(); ++i) {  // other sequences' pages
    for (auto* pool_data : {k.data(), v.data()}) {
      __asan_poison_memory_region(pool_data + static_cast<size_t>(ids[i]) * kPage, kPage * sizeof(Element));
    }
  }
#endif
  const double scale = 1 / std::sqrt(double{kDim});
  const AttentionParams params{q.data(),   k.data(),     v.data(),
                               out.data(), pages.data(), sees.data(),
                               context,    nodes,        static_cast<float>(scale * M_LOG2E),
                               bug};
  const size_t shared = sizeof(AttentionShared) - (bug == Bug::kSharedTooSmall ? 1024 : 0);
  launch(attention, dim3(1), dim3(kWarps * 32), shared, nullptr, params);

  double worst = 0;
  for (int t = 0; t < nodes; ++t) {
    std::vector<double> weights(static_cast<size_t>(keys), 0.0);
    double sum = 0;
    for (int key = 0; key < keys; ++key) {
      if (key >= context && (sees[static_cast<size_t>(t)] >> (key - context) & 1) == 0) continue;
      double score = 0;
      for (size_t d = 0; d < kDim; ++d) {
        score += double{value(q[static_cast<size_t>(t) * kDim + d])} * value(k[row_of(key) + d]);
      }
      sum += weights[static_cast<size_t>(key)] = std::exp(score * scale);
    }
    for (size_t d = 0; d < kDim; ++d) {
      double reference = 0;
      for (int key = 0; key < keys; ++key) {
        const double weight = weights[static_cast<size_t>(key)];
        if (weight != 0) reference += weight / sum * value(v[row_of(key) + d]);
      }
      const double error = std::fabs(reference - value(out[static_cast<size_t>(t) * kDim + d]));
      if (!(error <= worst)) worst = error;
    }
  }
#if defined(__SANITIZE_ADDRESS__)
  for (auto* pool_data : {&k, &v})
    __asan_unpoison_memory_region(pool_data->data(), pool_data->size() * sizeof(Element));
#endif
  expect_below(worst, 0.02, "attention");
}

void run_reduce(Bug bug) {
  constexpr int kCount = 10007, kBlocks = 7;
  std::mt19937 random(1);
  std::vector<int32_t> values(kCount);
  unsigned expected = 0;
  for (int32_t& x : values) expected += static_cast<unsigned>(x = static_cast<int32_t>(random() % 1000));
  const auto arrived = std::make_unique<unsigned>(0), sum = std::make_unique<unsigned>(0);
  std::vector<unsigned> partials(kBlocks, 0);
  launch(reduce, dim3(kBlocks), dim3(kReduceThreads), sizeof(ReduceShared), nullptr,
         ReduceParams{values.data(), kCount, arrived.get(), partials.data(), sum.get(), bug});
  if (*sum != expected || *arrived != 0) throw Error("wrong result of reduce: " + std::to_string(*sum));
}

void run_cluster(Bug bug) {
  constexpr unsigned kClusters = 3, kCtas = 4;
  std::mt19937 random(1);
  std::vector<int32_t> values(1003);
  unsigned expected = 0;
  for (int32_t& x : values) expected += static_cast<unsigned>(x = static_cast<int32_t>(random() % 1000));
  std::vector<unsigned> sums(kClusters * kCtas, 0);
  pagedtree::cuda::launch_clusters(sum_in_cluster, dim3(kClusters * kCtas), dim3(kClusterThreads), kCtas,
                                   sizeof(ClusterShared), nullptr,
                                   ClusterParams{values.data(), static_cast<int>(values.size()), sums.data(), bug});
  for (const unsigned sum : sums) {
    if (sum != expected) throw Error("wrong result of sum_in_cluster: " + std::to_string(sum));
  }
}

template <typename T, bool kCopies>
void run_hopper(Bug bug) {
  constexpr int kTiles = 5, kNumKeys = kTiles * kHopperKeys, kPool = 2 * kNumKeys / kHopperPage;
  std::mt19937 random(1);
  const auto q = random_elements<T>(64 * 128, random, 0.3f),
             k = random_elements<T>(kPool * kHopperPage * 128, random, 0.3f),
             v = random_elements<T>(k.size(), random, 0.3f);
  std::vector<int32_t> pages(kNumKeys / kHopperPage);
  for (size_t i = 0; i < pages.size(); ++i) pages[i] = static_cast<int32_t>((i * 7 + 3) % kPool);
  std::vector<float> out(64 * 128, NAN);
  const auto map = [](const std::vector<T>& data, uint32_t rows, uint64_t count) {
    return pagedtree::ptx::TensorMap{data.data(),
                                     sizeof(T),
                                     {128, rows, 1, 1, count},
                                     {256, 256 * rows, 256 * rows, 256 * rows},
                                     {64, rows, 1, 1, 1}};
  };
  launch(hopper<T, kCopies>, dim3(1), dim3(kConsumers + 32), sizeof(HopperShared<T>), nullptr, map(q, 64, 1),
         map(k, kHopperPage, kPool), map(v, kHopperPage, kPool),
         HopperParams<T>{q.data(), k.data(), v.data(), out.data(), pages.data(), kTiles, bug});
  double worst = 0, size = 0;
  for (size_t r = 0; r < 64; ++r) {
    double reference[128] = {};
    for (size_t key = 0; key < kNumKeys; ++key) {
      const size_t at = (static_cast<size_t>(pages[key / kHopperPage]) * kHopperPage + key % kHopperPage) * 128;
      double score = 0;
      for (size_t d = 0; d < 128; ++d) score += double{value(q[r * 128 + d])} * value(k[at + d]);
      score = value(rounded<T>(static_cast<float>(score)));
      for (size_t d = 0; d < 128; ++d) reference[d] += score * value(v[at + d]);
    }
    for (size_t d = 0; d < 128; ++d) {
      const double error = std::fabs(reference[d] - out[r * 128 + d]);
      if (!(error <= worst)) worst = error;
      size = std::max(size, std::fabs(reference[d]));
    }
  }
  expect_below(worst, 0.02 * size, "hopper");
}

void run(Bug bug) {
  const bool all = bug == Bug::kNone;
  if (all || bug < Bug::kNoReductionBarrier) {
    // Tails in the first tile, the last, at a tile's end; a table that ends inside a tile.
    for (const int context : {40, 300, 240, 3}) run_attention(bug, context, 16);
  }
  if (all || (bug >= Bug::kNoReductionBarrier && bug < Bug::kNoClusterStart)) run_reduce(bug);
  if (all || (bug >= Bug::kNoClusterStart && bug < Bug::kNoEmptyWait)) run_cluster(bug);
  if (all || (bug >= Bug::kNoEmptyWait && bug < Bug::kNoPhaseFlip)) run_hopper<__nv_bfloat16, false>(bug);
  if (all || bug >= Bug::kNoPhaseFlip) run_hopper<__half, true>(bug);
}

}  // namespace
}  // namespace probe

int main(int argc, char** argv) {
  const std::string name = argc > 1 ? argv[1] : "list";
  if (name == "list") {
    for (const auto& entry : probe::kBugs) std::puts(entry.name);
    return 0;
  }
  setenv("PAGEDTREE_SIMT_ORDER", argc > 2 ? argv[2] : "forward", 1);
  for (const auto& entry : probe::kBugs) {
    if (name != entry.name) continue;
    try {
      probe::run(entry.bug);
    } catch (const std::exception& e) {
      std::printf("CAUGHT: %s\n", e.what());
      return 1;
    }
    return 0;
  }
  std::fprintf(stderr, "no bug of the name %s\n", name.c_str());
  return 2;
}
