// The rules that compare the target's distribution with the draft's. A source that instantiates the walks defines
// PT_WITH_WALKS first and gets their headers, too; so this file has no #pragma once.
//
// DRAFT(op, Params, Name, walk, needs): takes the arguments of verify_rejection. walk(p, b, rows) is a template over a
// backend's `Rows` (core/verify/rules.h), and all that there is of the rule. needs: of RuleNeeds.
// OTHER(op, Params, Name, walk): has its host in torch/verify.cpp.
#define PT_EACH_WALK(DRAFT, OTHER)                                          \
  DRAFT(verify_rejection, RatioParams, Rejection, walk_rejection, kNoNeeds) \
  DRAFT(verify_block, RatioParams, Block, walk_block, kChains)              \
  OTHER(verify_typical, RatioParams, Typical, walk_typical)                 \
  DRAFT(verify_traversal, RatioParams, Traversal, walk_traversal, kDrawn | kFrames)

#if defined(PT_WITH_WALKS)
#include "core/verify/block.h"
#include "core/verify/rejection.h"
#include "core/verify/traversal.h"
#include "core/verify/typical.h"
#endif
