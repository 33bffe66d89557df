// Ops on rows of logits on Hopper alone. They return false if other kernels must do the work.
#pragma once

#include "core/drafting.h"
#include "core/ops.h"
#include "core/verify/rules.h"

namespace pagedtree::cuda {

#define PT_RULE(op, Params, Name, ...) k##Name,
enum class Rule : int32_t { PT_EACH_WALK(PT_RULE, PT_RULE) };
#undef PT_RULE

#if defined(PAGEDTREE_HAS_SM90A)
// Walk trees. Trees with a row of too many kept tokens get the status kLeftToOthers.
bool walk_on_chip(const VerifyParams& p, const ExecContext& ctx);
template <Rule kRule>
bool rules_on_chip(const RatioParams& p, const ExecContext& ctx);

// Samples rows. Rows of too many kept tokens get a negative token.
bool sample_on_chip(const SampleParams& p, const ExecContext& ctx);

// Writes the children of all frontier nodes, law "topk".
bool expand_on_chip(const ExpandTreeParams& p, const ExecContext& ctx);
#else
inline bool walk_on_chip(const VerifyParams&, const ExecContext&) { return false; }
template <Rule kRule>
bool rules_on_chip(const RatioParams&, const ExecContext&) {
  return false;
}
inline bool sample_on_chip(const SampleParams&, const ExecContext&) { return false; }
inline bool expand_on_chip(const ExpandTreeParams&, const ExecContext&) { return false; }
#endif

}  // namespace pagedtree::cuda
