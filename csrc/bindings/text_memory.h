// Searches earlier texts (pagedtree.generation.drafters.TextMemory keeps them).
#pragma once

#include <cstdint>
#include <vector>

#include "bindings/arrays.h"

namespace pagedtree {

// Returns int64 [n, max_ngram + length + 1], n <= most, best row last: the tokens around the places of a chain, then
// -1. tokens, before: [size], the ring, and each place's predecessor in its chain, which begins at `newest` and ends
// before `oldest`, at a negative place, or after max_places. end: the last tokens of a text, at least `context`.
Array<int64_t> former_continuations(const Array<int32_t>& tokens, const Array<int64_t>& before, int64_t newest,
                                    int64_t oldest, const std::vector<int64_t>& end, int64_t context, int64_t max_ngram,
                                    int64_t length, int64_t most, int64_t max_places);

}  // namespace pagedtree
