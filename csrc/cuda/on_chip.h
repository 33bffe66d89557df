// Ops over rows of logits in kernels for Hopper alone. Each returns false if other kernels must do all of the work.
#pragma once

#include "core/backend.h"
#include "core/drafting.h"
#include "core/verify/rules.h"

namespace pagedtree::cuda {

#define PT_RULE(op, Params, Name, ...) k##Name,
enum class Rule : int32_t { PT_EACH_WALK(PT_RULE, PT_RULE) };
#undef PT_RULE

#if defined(PAGEDTREE_HAS_SM90A)
// Walk trees. A tree with a row of which more tokens may be kept than fit has the status kLeftToOthers then.
bool walk_on_chip(const VerifyParams& p, const ExecContext& ctx);
template <Rule kRule>
bool rules_on_chip(const RatioParams& p, const ExecContext& ctx);

// Samples rows. A row of which more tokens may be kept than fit has a negative token then.
bool sample_on_chip(const SampleParams& p, const ExecContext& ctx);

// Writes the children of all frontier nodes, for law "topk".
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
