// `Rows` of core/verify/rules.h for a CTA or cluster: all threads call, and all get the result. The CTAs of a cluster
// walk in parallel, each with a part of a row and all results. Dtypes are runtime values: one kernel per rule.
#pragma once

#include "core/verify/rules.h"
#include "core/verify/typical.h"
#include "cuda/logits/filters.cuh"
#include "cuda/logits/masses.cuh"
#include "cuda/logits/options.cuh"
#include "cuda/verify/near_tree.cuh"

namespace pagedtree::cuda {

// Fewer threads than other kernels: a walk's state and two distributions need registers.
constexpr int kRulesThreads = 192;

struct RulesShared {
  RadixShared radix;
  MassColumns masses;
  NodeDistributions distributions;
  NearTree tree;
  MassTable residuals, drafts;
  float block[kMassBlock / kMassRadix][kMassRadix + 1];  // residuals; padded against bank conflicts
  double runs[kMassBlock / kMassRadix];                  // row sums
  int32_t tried[kMaxTreeNodes];
  int16_t parents[kMaxTreeNodes];
  int16_t depths[kMaxTreeNodes];
};
static_assert(sizeof(RulesShared) <= 99 << 10);  // all GPUs from sm_80

// Masses of a draft's distribution, from probabilities or logits.
struct DraftMasses {
  RowMasses masses;
  bool present, is_probs;

  __device__ explicit DraftMasses(const NodeDistributions& distributions)
      : masses(plain(distributions.draft, distributions.target.row.vocab)),
        present(distributions.draft.row.logits != nullptr),
        is_probs(distributions.draft_is_probs) {}

  // Constants of drafts' rows save registers.
  static __device__ RowDistribution plain(RowDistribution distribution, int32_t vocab) {
    distribution.row.vocab = vocab;
    distribution.row.allowed = nullptr;
    distribution.row.allowed_words = nullptr;
    return distribution;
  }
  static __device__ float clean(float q) { return q > 0.0f && q <= kMaxFloat ? q : 0.0f; }
  __device__ float at(int32_t token) const {
    if (!present) return 0.0f;
    return is_probs ? clean(masses.row.raw(token)) : masses.at(token);
  }
  __device__ __forceinline__ void values(int32_t token, const Four& loaded, float (&four)[4]) const {
    if (!is_probs) return masses.values(token, loaded, four);
    masses.row.convert(loaded, four);
#pragma unroll
    for (float& q : four) q = clean(q);
  }
};

// Returns the bits i < 4 of tried tokens token + i.
__device__ __forceinline__ uint32_t tried_of_four(const TriedTokens& tried, int32_t token) {
  uint32_t bits = 0;
  for (int32_t at = tried.lower_bound(token); at < tried.size && tried.ids[at] < token + 4; ++at) {
    bits |= 1u << (tried.ids[at] - token);
  }
  return bits;
}

// max(m - c q, 0) of the target's masses m and the draft's q, and q; 0 for tried tokens. For the entropy, m log m.
struct ResidualMasses {
  static constexpr int kRows = 2, kBatch = 2, kSums = 2;

  RowMasses target;
  DraftMasses draft;
  float factor;
  bool with_draft, counts_drafts, of_entropy = false;
  TriedTokens tried;
  int only_block = -1;             // -1: all
  float (*block)[kMassRadix + 1];  // residuals of only_block

  __device__ ResidualMasses(const NodeDistributions& distributions, double c, const TriedTokens& tried_tokens,
                            bool only_drafted)
      : target(distributions.target), draft(distributions), tried(tried_tokens) {
    with_draft = c != 0.0 && draft.present;
    counts_drafts = only_drafted;
    factor = with_draft ? draft_factor(distributions, c) : 0.0f;
    if (counts_drafts && !with_draft) tried.size = 0;
  }

  __device__ int32_t vocab() const { return target.vocab(); }
  // The draft's groups follow the target's kBatch.
  template <int kCount>
  __device__ __forceinline__ void load(int token, Four* fours) const {
    target.load<kCount>(token, fours);
    if (with_draft) draft.masses.load<kCount>(token, fours + kBatch);
  }
  // sums: residuals, drafts.
  __device__ __forceinline__ void values(int token, const Four* loaded, float (&sums)[2][4]) const {
    auto& [residuals, drafts] = sums;
    target.values(token, loaded[0], residuals);
#pragma unroll
    for (float& q : drafts) q = 0.0f;
    if (with_draft) {
      draft.values(token, loaded[kBatch], drafts);
#pragma unroll
      for (int i = 0; i < 4; ++i) residuals[i] = residual_mass<ScalarMath>(residuals[i], factor, drafts[i]);
    }
    const uint32_t gone = tried_of_four(tried, token);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (!(gone >> i & 1u) || (counts_drafts && !(drafts[i] > 0.0f))) continue;
      residuals[i] = drafts[i] = 0.0f;
    }
    if (of_entropy) {
#pragma unroll 1
      for (int i = 0; i < 4; ++i) {
        const float mass = residuals[0];
        residuals[0] = residuals[1];
        residuals[1] = residuals[2];
        residuals[2] = residuals[3];
        residuals[3] = mass > 0.0f ? mass * log_exact<ScalarMath>(mass) : 0.0f;
      }
    }
    if (only_block < 0) return;
    float* const into = block[token % kMassBlock / kMassRadix] + token % kMassRadix;
#pragma unroll
    for (int i = 0; i < 4; ++i) into[i] = residuals[i];
  }
};

// Adds a token to a set of tried tokens; returns its size. Not inlined: several callers.
inline __device__ __attribute__((noinline)) int32_t try_token(int32_t* ids, int32_t token, int32_t num_tried) {
  const TriedTokens tried{ids, num_tried};
  if (tried.contains(token) || num_tried == kMaxTreeNodes) return num_tried;
  const int32_t at = tried.lower_bound(token), threads = static_cast<int32_t>(blockDim.x);
  __syncthreads();
  // Shifts later tokens by one, the last ones first.
#pragma unroll 1
  for (int32_t end = num_tried; end > at; end -= threads) {
    const int32_t from = end - 1 - static_cast<int32_t>(threadIdx.x);
    const int32_t id = from >= at ? tried.ids[from] : 0;
    __syncthreads();
    if (from >= at) tried.ids[from + 1] = id;
    __syncthreads();
  }
  if (threadIdx.x == 0) tried.ids[at] = token;
  __syncthreads();
  return num_tried + 1;
}

// Finds a node's distributions, the draft's first in the target's place. find(sampling) returns the mass, or 0.
template <bool kOptions, typename Find>
__device__ __forceinline__ void find_both(const RatioParams& p, int64_t b, int64_t row, bool with_draft,
                                          NodeDistributions& distributions, Find find) {
  const int64_t draft_row = with_draft ? draft_index_of(p, row) : -1;
  const bool finds_draft = draft_row >= 0 && p.draft_sampling.temperature != nullptr;
  const bool leads = threadIdx.x == 0;
  __syncthreads();
  if (leads) {
    distributions.draft = {};
    distributions.draft_is_probs = !finds_draft;
    distributions.draft_unit = 1.0;
    distributions.root_position = root_position_of(p.verify, b);
  }
#pragma unroll 1
  for (bool of_draft = draft_row >= 0;; of_draft = false) {
    if (leads) {
      (of_draft && !finds_draft ? distributions.draft : distributions.target).row =
          kOptions && !of_draft && p.verify.options.used
              ? prepared_row(p.verify.options, p.verify.logits)
              : logit_row(of_draft ? p.draft : p.verify.logits, of_draft ? draft_row : row);
    }
    if (of_draft && !finds_draft) continue;
    __syncthreads();
    const double total = find(of_draft ? p.draft_sampling : p.verify.sampling);
    if (leads) {
      distributions.total = total;
      if (of_draft && total > 0.0) {
        distributions.draft = distributions.target;
        distributions.draft_unit = 1.0 / total;
      }
    }
    __syncthreads();
    if (!of_draft) return;
  }
}

class Rows {
 public:
  __device__ Rows(const RatioParams& p, RulesShared& shared)
      : shared_(shared), tried_{shared.tried}, counts_drafts_(p.law != DraftLaw::kOneHot) {}

  static __device__ bool leads() { return leads_cluster(); }
  static __device__ bool leads_cta() { return threadIdx.x == 0; }
  static __device__ void sync() { ptx::meet_cluster(); }
  __device__ void begin(TreeWalk& walk) const { begin_near(walk, shared_.tree); }
  static __device__ void finish(const TreeWalk& walk) {
    if (leads()) walk.finish();
  }
  __device__ NodeDistributions& distributions() { return shared_.distributions; }
  __device__ AcceptedNodes accepted_nodes() { return {shared_.parents, shared_.depths}; }

  __device__ void open(const RatioParams& p, int64_t b, int64_t row, bool with_draft,
                       NodeDistributions& /*distributions()*/) {
    clear_tried();
    find_distributions(p, b, row, with_draft);
  }

  __device__ void open_again(const RatioParams& p, int64_t b, int64_t row) {
    prepare_row(p.verify.options, p.verify.logits, b, row, shared_.radix.block);
  }

  __device__ double target(const NodeDistributions& /*distributions()*/, int32_t token) const {
    return static_cast<double>(mass_at(token, false));
  }
  __device__ double draft(const NodeDistributions& distributions, int32_t token) const {
    return static_cast<double>(mass_at(token, true)) * distributions.draft_unit;
  }
  __device__ double residual(const NodeDistributions& distributions, double c, int32_t token) const {
    const float mass = mass_at(token, false);
    if (c == 0.0) return static_cast<double>(mass);
    return static_cast<double>(residual_mass<ScalarMath>(mass, draft_factor(distributions, c), mass_at(token, true)));
  }

  __device__ MassSums sums(const NodeDistributions& /*distributions()*/, double c) {
    return sums_left(c, tried_.size, counts_drafts_, false, -1);
  }
  __device__ int32_t draw(const NodeDistributions& /*distributions()*/, double c, double u) {
    return draw_left(c, u, tried_.size, counts_drafts_);
  }

  __device__ double entropy(const NodeDistributions& distributions) {
    return entropy_of(distributions.total, sums_left(0.0, 0, false, true, -1).residual);
  }

  __device__ void clear_tried() { tried_.size = 0; }
  __device__ bool is_tried(int32_t token) const { return tried_.contains(token); }
  __device__ void mark_tried(int32_t token) { tried_.size = try_token(tried_.ids, token, tried_.size); }

 private:
  // Not inlined: these are most of a kernel's code and have several callers.

  static __device__ __attribute__((noinline)) float mass_at(int32_t token, bool of_draft) {
    const NodeDistributions& distributions = ptx::shared<RulesShared>().distributions;
    const RowDistribution& distribution = of_draft ? distributions.draft : distributions.target;
    if (distribution.row.logits == nullptr) return 0.0f;
    const RowMasses masses(distribution);
    return of_draft && distributions.draft_is_probs ? DraftMasses::clean(masses.row.raw(token)) : masses.at(token);
  }

  static __device__ __attribute__((noinline)) MassSums sums_left(double c, int32_t num_tried, bool counts_drafts,
                                                                 bool of_entropy, int only_block) {
    auto& shared = ptx::shared<RulesShared>();
    const NodeDistributions& distributions = shared.distributions;
    ResidualMasses masses(distributions, c, {shared.tried, num_tried}, counts_drafts);
    masses.of_entropy = of_entropy;
    masses.only_block = only_block;
    masses.block = shared.block;
    sum_blocks(masses, shared.residuals, shared.drafts);
    const int32_t vocab = distributions.target.row.vocab;
    MassSums all{shared.residuals.total(vocab)};
    if (masses.with_draft) all.draft = shared.drafts.total(vocab) * distributions.draft_unit;
    return all;
  }

  static __device__ __attribute__((noinline)) int32_t draw_left(double c, double u, int32_t num_tried,
                                                                bool counts_drafts) {
    auto& shared = ptx::shared<RulesShared>();
    const int32_t vocab = shared.distributions.target.row.vocab;
    MassSearch search{u * shared.residuals.total(vocab)};
    const int block = static_cast<int>(shared.residuals.pick_block(vocab, search));
    sums_left(c, num_tried, counts_drafts, false, block);
    if (threadIdx.x < kMassBlock / kMassRadix) {
      shared.runs[threadIdx.x] = sum_in_order(shared.block[threadIdx.x], kMassRadix);
    }
    __syncthreads();
    const int run = search.pick(shared.runs, kMassBlock / kMassRadix);
    return block * kMassBlock + run * kMassRadix + search.pick(shared.block[run], kMassRadix);
  }

  static __device__ __attribute__((noinline)) void find_distributions(const RatioParams& p, int64_t b, int64_t row,
                                                                      bool with_draft) {
    auto& shared = ptx::shared<RulesShared>();
    prepare_row(p.verify.options, p.verify.logits, b, row, shared.radix.block);
    find_both<true>(p, b, row, with_draft, shared.distributions, [&](const SamplingParams& sampling) {
      find_distribution<kAnyDType>(shared.radix, shared.masses, sampling_of(sampling, b), shared.distributions.target);
      return sums_left(0.0, 0, false, false, -1).residual;
    });
  }

  RulesShared& shared_;
  TriedTokens tried_;
  bool counts_drafts_;
};

}  // namespace pagedtree::cuda
