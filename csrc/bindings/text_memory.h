// Looks former texts up; see pagedtree.generation.drafters.TextMemory, which keeps them.
#pragma once

#include <cstdint>
#include <vector>

#include "bindings/arrays.h"

namespace pagedtree {

// int64 [n, max_ngram + length + 1], n <= most, the best row last: what stands around the places of a chain, then -1.
// tokens, before: [size], the ring, and the place before each one in its chain. newest: the chain's first place; it
// ends before the place `oldest`, at a negative one, or after max_places. end: the last tokens of a text, at least
// `context`.
Array<int64_t> former_continuations(const Array<int32_t>& tokens, const Array<int64_t>& before, int64_t newest,
                                    int64_t oldest, const std::vector<int64_t>& end, int64_t context, int64_t max_ngram,
                                    int64_t length, int64_t most, int64_t max_places);

}  // namespace pagedtree
