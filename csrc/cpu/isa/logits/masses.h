// The distribution of a row, and token masses under target and draft.
#pragma once

#include "core/verify/rules.h"
#include "cpu/isa/logits/filter.h"

namespace pagedtree::cpu::PAGEDTREE_ISA {

static inline RowDistribution find_distribution(const LogitRow& row, const Sampling& sampling, FilterScratch& scratch) {
  return with_logits(row.dtype, [&]<typename T>() {
    return row_distribution(row, sampling, find_peak<T>(row, scratch.peaks),
                            [&](const Scale& scale) { return find_filter<T>(row, sampling, scale, scratch); });
  });
}

// Handles uniform rows as a separate logit type.
template <typename Body>
static inline auto with_logits(const RowDistribution& distribution, const Body& body) {
  if (distribution.uniform) return body.template operator()<UniformLogit>();
  return with_logits(distribution.row.dtype, body);
}

// Requires t to be a multiple of kLanes.
static inline __attribute__((always_inline)) vfloat masses_of(const RowDistribution& distribution, vfloat logit,
                                                              int64_t t) {
  const vfloat x = distribution.scale(logit);
  const vint kept = kept_lanes(distribution.filter, logit, x, t) & (logit > splat(-kInfinity));
  return select(kept, mass_of<VectorMath>(x), splat(0.0f));
}

template <typename T>
static inline vfloat masses_at(const RowDistribution& distribution, int64_t t) {
  return masses_of(distribution, load_logits<T>(distribution.row, t), t);
}

// Reads invalid probabilities as 0.
template <typename T>
static inline vfloat probabilities_at(const LogitRow& row, int64_t t) {
  const vfloat q = load_raw<T>(row, t);
  return select((q > 0.0f) & (q <= splat(kMaxFloat)), q, splat(0.0f));
}

static inline float mass_at(const RowDistribution& distribution, int64_t token) {
  return with_logits(distribution,
                     [&]<typename T>() { return masses_at<T>(distribution, token - token % kLanes)[token % kLanes]; });
}

static inline float draft_mass(const NodeDistributions& distributions, int64_t token) {
  const LogitRow& row = distributions.draft.row;
  if (row.logits == nullptr) return 0.0f;
  if (!distributions.draft_is_probs) return mass_at(distributions.draft, token);
  return with_logits(row.dtype,
                     [&]<typename T>() { return probabilities_at<T>(row, token - token % kLanes)[token % kLanes]; });
}

// Writes at(t) for a block's tokens, and zeros up to a multiple of kMassSums. Returns the padded count.
template <typename At>
static inline int fill_block(float* block, int64_t begin, int64_t vocab, const At& at) {
  const int64_t end = min_of(begin + kMassBlock, vocab);
  const int count = static_cast<int>(ceil_div<int64_t>(end - begin, kMassSums) * kMassSums);
  std::memset(block + count - kMassSums, 0, kMassSums * sizeof(float));
  for (int64_t t = begin; t < end; t += kLanes) store(block + (t - begin), at(t));
  return count;
}

static inline int load_masses(const RowDistribution& distribution, int64_t begin, float* block) {
  return with_logits(distribution, [&]<typename T>() {
    BlockReader<T> logits(distribution.row);
    logits.open(begin, least_kept(distribution.filter, distribution.scale));
    const auto fill = [&](const auto& at) { return fill_block(block, begin, distribution.row.vocab, at); };
    if (logits.reads_all()) return fill([&](int64_t t) { return masses_of(distribution, logits.known(t), t); });
    return fill([&](int64_t t) { return logits.may_reach(t) ? masses_of(distribution, logits(t), t) : vfloat{}; });
  });
}

// Sets target masses to 0 unless `with_target`. Tried tokens count as 0, with `only_drafted` only if drafted.
static inline int load_block(const NodeDistributions& distributions, int64_t begin, bool with_target, bool with_draft,
                             const TriedTokens& tried, bool only_drafted, MassBlock& block) {
  const int64_t vocab = distributions.target.row.vocab;
  const int count = with_target ? load_masses(distributions.target, begin, block.target)
                                : fill_block(block.target, begin, vocab, [](int64_t) { return vfloat{}; });
  if (with_draft && distributions.draft_is_probs) {
    with_logits(distributions.draft.row.dtype, [&]<typename T>() {
      fill_block(block.draft, begin, distributions.draft.row.vocab,
                 [&](int64_t t) { return probabilities_at<T>(distributions.draft.row, t); });
    });
  } else if (with_draft) {
    load_masses(distributions.draft, begin, block.draft);
  }
  if (only_drafted && !with_draft) return count;
  for (int32_t i = tried.lower_bound(begin); i < tried.size && tried.ids[i] < begin + kMassBlock; ++i) {
    const int64_t at = tried.ids[i] - begin;
    if (only_drafted && !(block.draft[at] > 0.0f)) continue;
    block.target[at] = block.draft[at] = 0.0f;
  }
  return count;
}

static inline vfloat residuals_at(const MassBlock& block, vfloat factor, int i) {
  return residual_mass<VectorMath>(load(block.target + i), factor, load(block.draft + i));
}

}  // namespace pagedtree::cpu::PAGEDTREE_ISA
