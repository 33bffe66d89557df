// How likely guesses are that are copied from the text itself; see pagedtree.generation.drafters.NgramDrafter.
#pragma once

#include <cstdint>
#include <utility>

#include "bindings/arrays.h"

namespace pagedtree {

// For the guesses of what comes behind texts: int64 [N], how many tokens in front of each node are the same as in front
// of an earlier copy of it, at most `longest` of the text's own and each drafted one (0 at roots, and for what has no
// copy); and float [N], joint log-probabilities by that.
// tokens: [B, capacity]. lengths: [B]. offsets: [B + 1], parents, draft_tokens: [N or more], of the trees.
std::pair<Array<int64_t>, Array<float>> copied_text(const Array<int64_t>& tokens, const Array<int32_t>& lengths,
                                                    const Array<int32_t>& offsets, const Array<int32_t>& parents,
                                                    const Array<int64_t>& draft_tokens, int64_t longest);

}  // namespace pagedtree
