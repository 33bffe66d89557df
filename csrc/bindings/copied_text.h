// Likelihood of guesses copied from the text (pagedtree.generation.drafters.NgramDrafter).
#pragma once

#include <cstdint>
#include <utility>

#include "bindings/arrays.h"

namespace pagedtree {

// Returns int64 [N], the equal tokens before each node and an earlier copy of it: at most `longest` of the text, plus
// drafted ones; 0 at roots and without a copy. And float [N], joint log-probabilities from these.
// tokens: [B, capacity]. lengths: [B]. offsets: [B + 1], parents, draft_tokens: [N or more], of the trees.
std::pair<Array<int64_t>, Array<float>> copied_text(const Array<int64_t>& tokens, const Array<int32_t>& lengths,
                                                    const Array<int32_t>& offsets, const Array<int32_t>& parents,
                                                    const Array<int64_t>& draft_tokens, int64_t longest);

}  // namespace pagedtree
