// The `Rows` of core/verify/rules.h, read by a whole CTA or a cluster: all threads make each call, and all get the
// result. The CTAs of a cluster walk side by side: each reads a part of a row, and each has the results in its own
// memory. The dtypes of target and draft are known only at run time, so that there is one kernel per rule.
#pragma once

#include "core/verify/rules.h"
#include "core/verify/typical.h"
#include "cuda/filters.cuh"
#include "cuda/options.cuh"

namespace pagedtree::cuda {

// Fewer threads than elsewhere read a row: a walk's state and two distributions need more registers than a thread of
// 512 may have.
constexpr int kRulesThreads = 384;

struct RulesShared {
  RadixShared radix;
  FilterScratch filter;
  NodeDistributions distributions;
  MassTable residuals, drafts;
  float block[kMassBlock / kMassRadix][kMassRadix + 1];  // residuals; one more per row avoids bank conflicts
  double runs[kMassBlock / kMassRadix];                  // the sums of those rows
  int32_t tried[kMaxTreeNodes];
  int16_t parents[kMaxTreeNodes];
  int16_t depths[kMaxTreeNodes];
};
static_assert(sizeof(RulesShared) <= 99 << 10);  // what every GPU from sm_80 on gives

using AnyReader = LogitReader<kAnyDType>;

// The masses of a row's distribution.
struct RowMasses {
  static constexpr int kBatch = 4;  // groups of four that are loaded together
  static constexpr int kSums = 1;   // sums that are found at a time
  using Loaded = Four;

  AnyReader row;
  Scale scale;
  Filter filter;

  __device__ explicit RowMasses(const RowDistribution& distribution)
      : row(distribution.row), scale(distribution.scale), filter(distribution.filter) {
    if (distribution.uniform) row.make_uniform();
  }

  __device__ float at(int64_t token) const {
    const float logit = row.logit(token), x = scale(logit);
    return filter.keeps(token, logit, x) ? mass_of<ScalarMath>(x) : 0.0f;
  }

  __device__ int64_t vocab() const { return row.vocab(); }
  __device__ Loaded load(int64_t token) const { return row.load_four(token); }
  // Zeros past the vocabulary.
  __device__ __forceinline__ void values(int64_t token, const Loaded& loaded, float (&four)[4]) const {
    uint32_t kept = 0;
    if (token < row.vocab()) {
      row.clean_four(token, loaded, four);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float x = scale(four[i]);
        if (filter.keeps(token + i, four[i], x) && has_mass(x)) kept |= 1u << i;
        four[i] = x;
      }
    }
    if (kept == 0) {
      four[0] = four[1] = four[2] = four[3] = 0.0f;
      return;
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) four[i] = kept >> i & 1u ? exp_exact<ScalarMath>(four[i]) : 0.0f;
  }
  __device__ __forceinline__ void values(int64_t token, const Loaded& loaded, float (&sums)[1][4]) const {
    values(token, loaded, sums[0]);
  }
};

// The terms m log m of the masses m.
struct EntropyTerms : RowMasses {
  using RowMasses::RowMasses;
  __device__ __forceinline__ void values(int64_t token, const Loaded& loaded, float (&sums)[1][4]) const {
    RowMasses::values(token, loaded, sums[0]);
#pragma unroll
    for (float& mass : sums[0]) mass = mass > 0.0f ? mass * log_exact<ScalarMath>(mass) : 0.0f;
  }
};

// The masses of a draft's distribution: probabilities as given, or from logits.
struct DraftMasses {
  RowMasses masses;
  bool present, is_probs;

  __device__ explicit DraftMasses(const NodeDistributions& distributions)
      : masses(plain(distributions.draft, distributions.target.row.vocab)),
        present(distributions.draft.row.logits != nullptr),
        is_probs(distributions.draft_is_probs) {}

  // What the compiler knows about a draft's row needs no registers.
  static __device__ RowDistribution plain(RowDistribution distribution, int64_t vocab) {
    distribution.row.vocab = vocab;
    distribution.row.allowed = nullptr;
    distribution.row.allowed_words = nullptr;
    return distribution;
  }
  static __device__ float clean(float q) { return q > 0.0f && q <= kMaxFloat ? q : 0.0f; }
  __device__ float at(int64_t token) const {
    if (!present) return 0.0f;
    return is_probs ? clean(masses.row.raw(token)) : masses.at(token);
  }
  __device__ __forceinline__ void values(int64_t token, const Four& loaded, float (&four)[4]) const {
    if (!is_probs) return masses.values(token, loaded, four);
    masses.row.convert(loaded, four);
#pragma unroll
    for (float& q : four) q = clean(q);
  }
};

// What is left of the target's masses, and the drafts' masses; tried tokens count as nothing.
struct ResidualMasses {
  static constexpr int kBatch = 2;
  static constexpr int kSums = 2;
  struct Loaded {
    Four target, draft;
  };

  RowMasses target;
  DraftMasses draft;
  float factor;
  bool with_draft, counts_drafts;
  TriedTokens tried;

  __device__ ResidualMasses(const NodeDistributions& distributions, double c, const TriedTokens& tried_tokens,
                            bool only_drafted)
      : target(distributions.target), draft(distributions), tried(tried_tokens) {
    with_draft = c != 0.0 && draft.present;
    counts_drafts = only_drafted;
    factor = with_draft ? draft_factor(distributions, c) : 0.0f;
    if (counts_drafts && !with_draft) tried.size = 0;
  }

  __device__ int64_t vocab() const { return target.vocab(); }
  __device__ Loaded load(int64_t token) const {
    return {target.load(token), with_draft ? draft.masses.load(token) : Four{}};
  }
  // sums: residuals, drafts.
  __device__ __forceinline__ void values(int64_t token, const Loaded& loaded, float (&sums)[2][4]) const {
    auto& [residuals, drafts] = sums;
    target.values(token, loaded.target, residuals);
#pragma unroll
    for (float& q : drafts) q = 0.0f;
    if (with_draft) {
      draft.values(token, loaded.draft, drafts);
#pragma unroll
      for (int i = 0; i < 4; ++i) residuals[i] = residual_mass<ScalarMath>(residuals[i], factor, drafts[i]);
    }
    if (tried.size == 0) return;
    uint32_t gone = 0;
    for (int32_t at = tried.lower_bound(token); at < tried.size && tried.ids[at] < token + 4; ++at) {
      gone |= 1u << (tried.ids[at] - token);
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (!(gone >> i & 1u) || (counts_drafts && !(drafts[i] > 0.0f))) continue;
      residuals[i] = drafts[i] = 0.0f;
    }
  }
};

// A block's sum from the warp's partial sums, in the order of MassTable: sum i is entry i % 4 of lane i / 4. In each
// step a lane gives another lane the half of the sums that the other continues with.
__device__ __forceinline__ float sum_of_block(const float (&sums)[4]) {
  const bool high = threadIdx.x & 16, odd = threadIdx.x & 8;
  float first = high ? sums[2] : sums[0], second = high ? sums[3] : sums[1];
  first += __shfl_xor_sync(~0u, high ? sums[0] : sums[2], 16);
  second += __shfl_xor_sync(~0u, high ? sums[1] : sums[3], 16);
  float sum = odd ? second : first;
  sum += __shfl_xor_sync(~0u, odd ? first : second, 8);
  for (int lanes = 4; lanes > 0; lanes /= 2) sum += __shfl_xor_sync(~0u, sum, lanes);
  sum += __shfl_xor_sync(~0u, sum, 16);
  return sum + __shfl_xor_sync(~0u, sum, 8);
}

class Rows {
 public:
  __device__ Rows(const RatioParams& p, RulesShared& shared)
      : shared_(shared), tried_{shared.tried}, counts_drafts_(p.law != DraftLaw::kOneHot) {}

  static __device__ bool leads() { return leads_cluster(); }
  static __device__ bool leads_cta() { return threadIdx.x == 0; }
  static __device__ void sync() { ptx::cluster_sync(); }
  __device__ NodeDistributions& distributions() { return shared_.distributions; }
  __device__ AcceptedNodes accepted_nodes() { return {shared_.parents, shared_.depths}; }

  __device__ void open(const RatioParams& p, int64_t b, int64_t row, bool with_draft,
                       NodeDistributions& distributions) {
    clear_tried();
    find_distributions(p, shared_, b, row, with_draft, distributions);
  }

  __device__ void open_again(const RatioParams& p, int64_t b, int64_t row) {
    if (p.verify.options.used) target_row(p, shared_, b, row);
  }

  __device__ double target(const NodeDistributions& distributions, int64_t token) const {
    return static_cast<double>(RowMasses(distributions.target).at(token));
  }
  __device__ double draft(const NodeDistributions& distributions, int64_t token) const {
    return static_cast<double>(DraftMasses(distributions).at(token)) * distributions.draft_unit;
  }
  __device__ double residual(const NodeDistributions& distributions, double c, int64_t token) const {
    const float mass = RowMasses(distributions.target).at(token);
    if (c == 0.0) return static_cast<double>(mass);
    return static_cast<double>(
        residual_mass<ScalarMath>(mass, draft_factor(distributions, c), DraftMasses(distributions).at(token)));
  }

  __device__ __forceinline__ MassSums sums(const NodeDistributions& distributions, double c) {
    const ResidualMasses masses(distributions, c, tried_, counts_drafts_);
    sum_blocks(masses, shared_.residuals, shared_.drafts);
    const int64_t vocab = distributions.target.row.vocab;
    MassSums all{shared_.residuals.total(vocab)};
    if (masses.with_draft) all.draft = shared_.drafts.total(vocab) * distributions.draft_unit;
    return all;
  }

  __device__ __forceinline__ int64_t draw(const NodeDistributions& distributions, double c, double u) {
    const int64_t vocab = distributions.target.row.vocab;
    MassSearch search{u * shared_.residuals.total(vocab)};
    const int64_t begin = shared_.residuals.pick_block(vocab, search) * kMassBlock;
    const ResidualMasses masses(distributions, c, tried_, counts_drafts_);
    for (int i = 4 * static_cast<int>(threadIdx.x); i < kMassBlock; i += 4 * static_cast<int>(blockDim.x)) {
      float sums[2][4];
      masses.values(begin + i, masses.load(begin + i), sums);
#pragma unroll
      for (int j = 0; j < 4; ++j) shared_.block[i / kMassRadix][i % kMassRadix + j] = sums[0][j];
    }
    __syncthreads();
    if (threadIdx.x < kMassBlock / kMassRadix) {
      shared_.runs[threadIdx.x] = sum_in_order(shared_.block[threadIdx.x], kMassRadix);
    }
    __syncthreads();
    const int run = search.pick(shared_.runs, kMassBlock / kMassRadix);
    return begin + run * kMassRadix + search.pick(shared_.block[run], kMassRadix);
  }

  __device__ __forceinline__ double entropy(const NodeDistributions& distributions) {
    sum_blocks(EntropyTerms(distributions.target), shared_.residuals);
    return entropy_of(distributions.total, shared_.residuals.total(distributions.target.row.vocab));
  }

  __device__ void clear_tried() { tried_.size = 0; }
  __device__ bool is_tried(int64_t token) const { return tried_.contains(token); }
  __device__ __forceinline__ void mark_tried(int64_t token) {
    if (tried_.contains(token) || tried_.size == kMaxTreeNodes) return;
    const int32_t at = tried_.lower_bound(token), threads = static_cast<int32_t>(blockDim.x);
    __syncthreads();
    // Later tokens move up by one place, the last of them first.
    for (int32_t end = tried_.size; end > at; end -= threads) {
      const int32_t from = end - 1 - static_cast<int32_t>(threadIdx.x);
      const int32_t id = from >= at ? tried_.ids[from] : 0;
      __syncthreads();
      if (from >= at) tried_.ids[from + 1] = id;
      __syncthreads();
    }
    if (leads_cta()) tried_.ids[at] = static_cast<int32_t>(token);
    ++tried_.size;
    __syncthreads();
  }

 private:
  static __device__ LogitRow target_row(const RatioParams& p, RulesShared& shared, int64_t b, int64_t row) {
    return row_under(p.verify.options, b, row, logit_row(p.verify.logits, row), shared.radix.block);
  }

  // Most of a kernel's code. Rules open rows in several places: inlined there, it takes nvcc half a minute.
  static __device__ __attribute__((noinline)) void find_distributions(const RatioParams& p, RulesShared& shared,
                                                                      int64_t b, int64_t row, bool with_draft,
                                                                      NodeDistributions& distributions) {
    const LogitRow draft_row = with_draft ? draft_row_of(p, row) : LogitRow{};
    const bool finds_draft = draft_row.logits != nullptr && p.draft_sampling.temperature != nullptr;
    const LogitRow of_target = target_row(p, shared, b, row);
    __syncthreads();
    if (leads_cta()) {
      distributions.target.row = of_target;
      distributions.draft = {};
      distributions.draft.row = draft_row;
      distributions.draft_is_probs = !finds_draft;
      distributions.draft_unit = 1.0;
    }
    __syncthreads();
    // Finds the draft's distribution if it must be found, then the target's.
#pragma unroll 1
    for (int left_to_find = finds_draft ? 2 : 1; left_to_find > 0; --left_to_find) {
      const bool of_draft = left_to_find == 2;
      RowDistribution& into = of_draft ? distributions.draft : distributions.target;
      const RowDistribution distribution =
          find_distribution(shared, into.row, sampling_of(of_draft ? p.draft_sampling : p.verify.sampling, b));
      sum_blocks(RowMasses(distribution), shared.residuals);
      if (!leads_cta()) continue;
      into = distribution;
      const double total = shared.residuals.total(distribution.row.vocab);
      (of_draft ? distributions.draft_unit : distributions.total) = of_draft ? 1.0 / total : total;
    }
    __syncthreads();
  }

  static __device__ __forceinline__ RowDistribution find_distribution(RulesShared& shared, const LogitRow& row,
                                                                      const Sampling& sampling) {
    AnyReader reader(row);
    const Peak peak = find_peak(reader, shared.radix.block);
    reader.learn(peak);
    return row_distribution(row, sampling, peak, [&](const Scale& scale) {
      return find_filter(reader, sampling, scale, shared.radix, shared.filter);
    });
  }

  // One warp per block: it adds all groups of four tokens of the block. Every CTA gets all sums.
  template <typename Masses, typename... Tables>
  static __device__ __forceinline__ void sum_blocks(const Masses& masses, Tables&... into) {
    MassTable* const tables[Masses::kSums] = {&into...};
    const int64_t vocab = masses.vocab();
    sync();
    // A block is read in groups of kMassSums tokens, some of which are loaded together.
    constexpr int kBatch = Masses::kBatch, kGroups = kMassBlock / kMassSums;
    static_assert(kGroups % kBatch == 0);
    const int lane = static_cast<int>(threadIdx.x % 32), warps_of_cta = static_cast<int>(blockDim.x / 32);
    const int warp = static_cast<int>(ptx::cluster_rank()) * warps_of_cta + static_cast<int>(threadIdx.x / 32);
    const int warps = static_cast<int>(ptx::cluster_size()) * warps_of_cta,
              num_blocks = static_cast<int>(MassTable::num_blocks(vocab));
    float sums[Masses::kSums][4]{};
    int block = warp, group = 0;
#pragma unroll 1
    while (block < num_blocks) {
      int token = block * kMassBlock + group * kMassSums + 4 * lane;
      typename Masses::Loaded loaded[kBatch];
#pragma unroll
      for (int i = 0; i < kBatch; ++i) loaded[i] = masses.load(token + i * kMassSums);
#pragma unroll 1
      for (int i = 0; i < kBatch; ++i, token += kMassSums) {
        float values[Masses::kSums][4];
        masses.values(token, loaded[0], values);
#pragma unroll
        for (int j = 0; j + 1 < kBatch; ++j) loaded[j] = loaded[j + 1];
#pragma unroll
        for (int j = 0; j < 4 * Masses::kSums; ++j) sums[j / 4][j % 4] += values[j / 4][j % 4];
      }
      group += kBatch;
      if (group < kGroups) continue;
#pragma unroll
      for (int k = 0; k < Masses::kSums; ++k) {
        const float sum = sum_of_block(sums[k]);
        float& into = tables[k]->blocks[block];
        if (lane < static_cast<int>(ptx::cluster_size())) *ptx::of_cta(&into, static_cast<uint32_t>(lane)) = sum;
        sums[k][0] = sums[k][1] = sums[k][2] = sums[k][3] = 0.0f;
      }
      block += warps;
      group = 0;
    }
    sync();
    if (threadIdx.x < MassTable::num_groups(vocab)) {
#pragma unroll
      for (MassTable* table : tables) table->add_group(vocab, threadIdx.x);
    }
    __syncthreads();
  }

  RulesShared& shared_;
  TriedTokens tried_;
  bool counts_drafts_;
};

}  // namespace pagedtree::cuda
