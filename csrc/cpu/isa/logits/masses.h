// The law of a row of logits, its tokens' masses, and those of a draft's law beside it.
#pragma once

#include "core/verify/rules.h"
#include "cpu/isa/logits/filter.h"

namespace pagedtree::cpu::PAGEDTREE_ISA {

template <typename T>
static inline RowLaw find_law(const LogitRow& row, const Law& law, FilterScratch& scratch) {
  return law_of_row(row, law, find_peak<T>(row, scratch.peaks),
                    [&](const Scale& scale) { return find_filter<T>(row, law, scale, scratch); });
}

// Calls body.template operator()<T>() with the type that logits are stored in.
template <typename Body>
static inline auto with_logits(DType dtype, const Body& body) {
  switch (dtype) {
    case DType::kFloat16:
      return body.template operator()<Float16>();
    case DType::kBFloat16:
      return body.template operator()<BFloat16>();
    default:
      return body.template operator()<float>();
  }
}

// The same for a law, of which a row without finite logits is a type of its own.
template <typename Body>
static inline auto with_logits(const RowLaw& law, const Body& body) {
  if (law.uniform) return body.template operator()<UniformLogit>();
  return with_logits(law.row.dtype, body);
}

// Masses of tokens t .. t + kLanes - 1; t is a multiple of kLanes below the vocabulary.
template <typename T>
static inline vfloat masses_at(const RowLaw& law, int64_t t) {
  const vfloat logit = load_logits<T>(law.row, t);
  const vfloat x = law.scale(logit);
  const vint kept = kept_lanes(law.filter, logit, x, t) & (logit > splat(-kInfinity));
  return select(kept, mass_of<VectorMath>(x), splat(0.0f));
}

// Probabilities as they are given.
template <typename T>
static inline vfloat probabilities_at(const LogitRow& row, int64_t t) {
  const vfloat q = load_raw<T>(row, t);
  return select((q > 0.0f) & (q <= splat(kMaxFloat)), q, splat(0.0f));
}

// Of one token.
static inline float target_mass(const NodeLaws& laws, int64_t token) {
  const int64_t t = token - token % kLanes;
  return with_logits(laws.target,
                     [&]<typename T>() { return masses_at<T>(laws.target, t)[static_cast<int>(token - t)]; });
}

static inline float draft_mass(const NodeLaws& laws, int64_t token) {
  if (laws.draft.row.logits == nullptr) return 0.0f;
  const int64_t t = token - token % kLanes;
  const int lane = static_cast<int>(token - t);
  if (laws.draft_is_probs) {
    return with_logits(laws.draft.row.dtype,
                       [&]<typename T>() { return probabilities_at<T>(laws.draft.row, t)[lane]; });
  }
  return with_logits(laws.draft, [&]<typename T>() { return masses_at<T>(laws.draft, t)[lane]; });
}

// Writes at(t) for the tokens of a block; returns how many, filled up with zeros to a multiple of kLawSums.
template <typename At>
static inline int fill_block(float* block, int64_t begin, int64_t vocab, const At& at) {
  const int64_t end = min_of(begin + kLawBlock, vocab);
  const int count = static_cast<int>(ceil_div<int64_t>(end - begin, kLawSums) * kLawSums);
  std::memset(block + count - kLawSums, 0, kLawSums * sizeof(float));
  for (int64_t t = begin; t < end; t += kLanes) store(block + (t - begin), at(t));
  return count;
}

static inline int load_masses(const RowLaw& law, int64_t begin, float* block) {
  return with_logits(law, [&]<typename T>() {
    return fill_block(block, begin, law.row.vocab, [&](int64_t t) { return masses_at<T>(law, t); });
  });
}

// A block of both laws, the target's as zeros unless `with_target`; tried tokens count as nothing, where `only_drafted`
// those that the draft gives a mass.
static inline int load_block(const NodeLaws& laws, int64_t begin, bool with_target, bool with_draft,
                             const TriedTokens& tried, bool only_drafted, LawBlock& block) {
  const int64_t vocab = laws.target.row.vocab;
  const int count = with_target ? load_masses(laws.target, begin, block.target)
                                : fill_block(block.target, begin, vocab, [](int64_t) { return vfloat{}; });
  if (with_draft && laws.draft_is_probs) {
    with_logits(laws.draft.row.dtype, [&]<typename T>() {
      fill_block(block.draft, begin, laws.draft.row.vocab,
                 [&](int64_t t) { return probabilities_at<T>(laws.draft.row, t); });
    });
  } else if (with_draft) {
    load_masses(laws.draft, begin, block.draft);
  }
  if (only_drafted && !with_draft) return count;
  for (int32_t i = tried.lower_bound(begin); i < tried.size && tried.ids[i] < begin + kLawBlock; ++i) {
    const int64_t at = tried.ids[i] - begin;
    if (only_drafted && !(block.draft[at] > 0.0f)) continue;
    block.target[at] = block.draft[at] = 0.0f;
  }
  return count;
}

static inline vfloat residuals_at(const LawBlock& block, vfloat factor, int i) {
  return residual_mass<VectorMath>(load(block.target + i), factor, load(block.draft + i));
}

}  // namespace pagedtree::cpu::PAGEDTREE_ISA
