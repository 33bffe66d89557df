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

#include "cuda/tile/launch.cuh"
#include "hopper.cuh"
#include "sums.cuh"

namespace probe {
namespace {

using pagedtree::cuda::launch;
using pagedtree::cuda::launch_clusters;
using pagedtree::simt::Error;

constexpr unsigned kSumCtas = 12;

struct Named {
  const char* name;
  Bug bug;
};
#define PROBE_BUG(name) {#name, Bug::k##name}
constexpr Named kBugs[] = {PROBE_EACH_BUG(PROBE_BUG)};
#undef PROBE_BUG

float value(Element x) { return pagedtree::ptx::detail::to_float(std::bit_cast<uint16_t>(x), x); }

// `error > limit` would accept NaN.
void expect_below(double error, double limit, const char* kernel) {
  if (!(error < limit)) throw Error(std::string("wrong result of ") + kernel + ": error " + std::to_string(error));
}

std::vector<Element> random_elements(size_t count, std::mt19937& random, float scale = 1.0f) {
  std::normal_distribution<float> normal;
  std::vector<Element> elements(count);
  for (Element& x : elements) x = __float2bfloat16(normal(random) * scale);
  return elements;
}

double product(const Element* a, const Element* b) {
  double sum = 0;
  for (int d = 0; d < kDim; ++d) sum += double{value(a[d])} * value(b[d]);
  return sum;
}

void run_scores(Bug bug) {
  constexpr int kTiles = 5, kTableSize = kTiles * kKeys / kPageSize, kPool = 2 * kTableSize;
  std::mt19937 random(1);
  const auto q = random_elements(kRows * kDim, random), k = random_elements(kPool * kPageSize * kDim, random);
  std::vector<int32_t> pages(kTableSize + 2);  // two more entries, which must not be read
  for (int i = 0; i < kTableSize; ++i) pages[static_cast<size_t>(i)] = (i * 7 + 3) % kPool;
  std::vector<float> out(kRows, NAN);
#if defined(__SANITIZE_ADDRESS__)
  __asan_poison_memory_region(&pages[kTableSize], 2 * sizeof(int32_t));
#endif
  const size_t shared = sizeof(ScoresShared) - (bug == Bug::kSharedTooSmall ? 1024 : 0);
  launch(scores, dim3(1), dim3(kWarps * 32), shared, nullptr,
         ScoresParams{q.data(), k.data(), out.data(), pages.data(), kTiles, bug});
#if defined(__SANITIZE_ADDRESS__)
  __asan_unpoison_memory_region(&pages[kTableSize], 2 * sizeof(int32_t));
#endif
  for (size_t row = 0; row < kRows; ++row) {
    double expected = 0;
    for (size_t key = 0; key < kTableSize * kPageSize; ++key) {
      const size_t at = static_cast<size_t>(pages[key / kPageSize]) * kPageSize + key % kPageSize;
      expected += product(&q[row * kDim], &k[at * kDim]);
    }
    expect_below(std::fabs(expected - out[row]), 0.1, "scores");
  }
}

template <typename Launch>
void run_sum(Launch launch_sum, size_t num_sums, Bug bug) {
  std::mt19937 random(1);
  std::vector<int32_t> values(10007);
  unsigned expected = 0;
  for (int32_t& x : values) expected += static_cast<unsigned>(x = static_cast<int32_t>(random() % 1000));
  const auto arrived = std::make_unique<unsigned>(0);
  std::vector<unsigned> partials(kSumCtas), sums(num_sums);
  launch_sum(
      SumParams{values.data(), static_cast<int>(values.size()), arrived.get(), partials.data(), sums.data(), bug});
  for (const unsigned sum : sums) {
    if (sum != expected) throw Error("wrong result of sums: " + std::to_string(sum));
  }
}

template <bool kCopies>
void run_hopper(Bug bug) {
  constexpr int kTiles = 5, kNumKeys = kTiles * kHopperKeys, kPool = 2 * kNumKeys / kHopperPage;
  std::mt19937 random(1);
  const auto q = random_elements(64 * 128, random, 0.3f), k = random_elements(kPool * kHopperPage * 128, random, 0.3f),
             v = random_elements(k.size(), random, 0.3f);
  std::vector<int32_t> pages(kNumKeys / kHopperPage);
  for (size_t i = 0; i < pages.size(); ++i) pages[i] = static_cast<int32_t>((i * 7 + 3) % kPool);
  std::vector<float> out(64 * 128, NAN);
  const auto map = [](const std::vector<Element>& data, uint32_t rows, uint64_t count) {
    return pagedtree::ptx::TensorMap{data.data(),
                                     sizeof(Element),
                                     {128, rows, 1, 1, count},
                                     {256, 256 * rows, 256 * rows, 256 * rows},
                                     {64, rows, 1, 1, 1}};
  };
  launch(hopper<kCopies>, dim3(1), dim3(kConsumers + 32), sizeof(HopperShared), nullptr, map(q, 64, 1),
         map(k, kHopperPage, kPool), map(v, kHopperPage, kPool),
         HopperParams{q.data(), k.data(), v.data(), out.data(), pages.data(), kTiles, bug});
  double worst = 0, size = 0;
  for (size_t r = 0; r < 64; ++r) {
    double reference[128] = {};
    for (size_t key = 0; key < kNumKeys; ++key) {
      const size_t at = (static_cast<size_t>(pages[key / kHopperPage]) * kHopperPage + key % kHopperPage) * 128;
      const double score = value(__float2bfloat16(static_cast<float>(product(&q[r * 128], &k[at]))));
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
  if (all || bug < Bug::kMergeByFirst) run_scores(bug);
  if (all || (bug >= Bug::kMergeByFirst && bug < Bug::kNoClusterStart)) {
    run_sum([](SumParams p) { launch(sum_by_last, dim3(kSumCtas), dim3(32), 0, nullptr, p); }, 1, bug);
  }
  if (all || (bug >= Bug::kNoClusterStart && bug < Bug::kNoEmptyWait)) {
    run_sum(
        [](SumParams p) { launch_clusters(sum_in_cluster, dim3(kSumCtas), dim3(32), 4, sizeof(unsigned), nullptr, p); },
        kSumCtas, bug);
  }
  if (all || (bug >= Bug::kNoEmptyWait && bug < Bug::kNoPhaseFlip)) run_hopper<false>(bug);
  if (all || bug >= Bug::kNoPhaseFlip) run_hopper<true>(bug);
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
