// The law of a row of logits, and its tokens' masses.
#pragma once

#include "cpu/tile/filter.h"

namespace pagedtree::cpu::PAGEDTREE_ISA {

template <typename T>
static inline RowLaw find_law(const LogitRow& row, const Law& law, FilterScratch& scratch) {
  return law_of_row(row, law, find_peak<T>(row),
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

}  // namespace pagedtree::cpu::PAGEDTREE_ISA
