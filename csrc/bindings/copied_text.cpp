// Likelihood of guesses copied from the text (pagedtree.generation.drafters.NgramDrafter).
#include <algorithm>
#include <cmath>
#include <iterator>
#include <utility>
#include <vector>

#include "bindings/arrays.h"
#include "bindings/module.h"

namespace pagedtree {
namespace {

// Probability of a guess by the number of matching tokens before it; times kOthers if another continuation precedes it.
// Only the order matters.
constexpr double kLikely[] = {0.1, 0.3, 0.5, 0.65, 0.75, 0.9, 0.9, 0.9, 0.97}, kOthers = 0.3;

// Returns the number of final tokens of a text of `length` that also precede place `end` (exclusive).
int64_t same_before(const int64_t* text, int64_t length, int64_t end, int64_t longest) {
  int64_t same = 0;
  while (same < longest && same < end && text[end - 1 - same] == text[length - 1 - same]) ++same;
  return same;
}

// Returns int64 [N], the equal tokens before each node and an earlier copy of it: at most `longest` of the text, plus
// drafted ones; 0 at roots and without a copy. And float [N], joint log-probabilities from these.
// tokens: [B, capacity]. lengths: [B]. offsets: [B + 1], parents, draft_tokens: [N or more], of the trees.
std::pair<Array<int64_t>, Array<float>> copied_text(const Array<int64_t>& tokens, const Array<int32_t>& lengths,
                                                    const Array<int32_t>& offsets, const Array<int32_t>& parents,
                                                    const Array<int64_t>& draft_tokens, int64_t longest) {
  const BatchNodes nodes(offsets, parents);
  expect_dims(tokens, "tokens", 2);
  expect_dims(lengths, "lengths", 1);
  expect_dims(draft_tokens, "draft_tokens", 1);
  if (tokens.shape(0) != nodes.num_trees || lengths.shape(0) != nodes.num_trees) {
    throw std::invalid_argument("tokens, lengths: expected one text for each tree");
  }
  if (draft_tokens.shape(0) < nodes.size()) throw std::invalid_argument("draft_tokens: expected one for each node");
  Array<int64_t> same(nodes.size());
  Array<float> log_probs(nodes.size());
  std::vector<double> joint(nodes.size(), 0.0);
  std::vector<int32_t> guesses;
  for (int32_t b = 0; b < nodes.num_trees; ++b) {
    const int64_t* text = tokens.data(b, 0);
    const int64_t length = std::min<int64_t>(lengths.at(b), tokens.shape(1));
    guesses.clear();
    for (int32_t row = nodes.first[b]; row < nodes.first[b + 1]; ++row) {
      same.mutable_at(row) = 0;
      if (nodes.depth[row] == 1) guesses.push_back(row);
    }
    if (guesses.empty()) continue;
    for (int64_t end = 1; end < length; ++end) {
      if (text[end - 1] != text[length - 1]) continue;
      const int64_t here = same_before(text, length, end, longest);
      for (const int32_t row : guesses) {
        if (draft_tokens.at(row) == text[end]) same.mutable_at(row) = std::max(same.at(row), here);
      }
    }
  }
  for (int32_t row = 0; row < nodes.size(); ++row) {
    const int32_t parent = nodes.parent[row];
    if (nodes.depth[row] > 1) same.mutable_at(row) = same.at(parent) + 1;
    if (nodes.depth[row] > 0) {
      const int64_t known = std::min<int64_t>(same.at(row), std::size(kLikely) - 1);
      joint[row] = joint[parent] + std::log(kLikely[known]) + (nodes.rank[row] > 0 ? std::log(kOthers) : 0.0);
    }
    log_probs.mutable_at(row) = static_cast<float>(joint[row]);
  }
  return {same, log_probs};
}

}  // namespace

void bind_copied_text(py::module_& m) {
  m.def("copied_text", &copied_text, py::arg("tokens"), py::arg("lengths"), py::arg("offsets"), py::arg("parents"),
        py::arg("draft_tokens"), py::arg("longest"),
        "How much of the text in front of each guess is that of an earlier copy, and log-probabilities by that.");
}

}  // namespace pagedtree
