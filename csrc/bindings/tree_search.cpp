#include "bindings/tree_search.h"

#include <algorithm>
#include <utility>

namespace pagedtree {

namespace {

// The best tree of each size over the first levels of [D, R] (Sequoia, Chen et al., 2024).
class Search {
 public:
  Search(const double* levels, int num_ranks, int max_nodes)
      : levels_(levels), num_ranks_(num_ranks), max_nodes_(max_nodes) {}

  // Returns [max_nodes + 1] expected tokens of the best tree with at most so many nodes and `depth` levels.
  std::vector<double> tokens(int depth) {
    // Expected tokens. subtree[n]: n nodes under an accepted root at this level. forest[n]: n nodes below such a node,
    // among children of this rank and up.
    std::vector<double> subtree(max_nodes_ + 1, 1.0), forest, under;
    subtree[0] = 0.0;
    choices_.assign(size_t(depth) * num_ranks_ * (max_nodes_ + 1), 0);
    for (int level = depth - 1; level >= 0; --level) {
      forest.assign(max_nodes_ + 1, 0.0);
      for (int rank = num_ranks_ - 1; rank >= 0; --rank) {
        const double probability = levels_[level * num_ranks_ + rank];
        int32_t* choice = choices_of(level, rank);
        under.assign(max_nodes_ + 1, 0.0);
        for (int n = 1; n <= max_nodes_; ++n) {
          // k nodes for this child, the rest for later ranks, which exist only with this child.
          for (int k = 1; k <= n; ++k) {
            const double value = probability * subtree[k] + forest[n - k];
            if (value > under[n]) under[n] = value, choice[n] = k;
          }
        }
        std::swap(forest, under);
      }
      for (int n = max_nodes_; n > 0; --n) subtree[n] = 1.0 + forest[n - 1];
    }
    return subtree;
  }

  // Returns the best tree with at most `size` nodes and the depth of the last call of `tokens`.
  std::vector<int32_t> parents(int size, int depth) {
    std::vector<int32_t> parents{-1};
    std::vector<std::pair<int32_t, int>> level{{0, size - 1}}, next;  // nodes, numbers of descendants
    for (int i = 0; i < depth; ++i, std::swap(level, next)) {
      next.clear();
      for (auto [node, left] : level) {
        for (int rank = 0; rank < num_ranks_; ++rank) {
          const int32_t count = choices_of(i, rank)[left];
          if (count == 0) break;
          next.emplace_back(static_cast<int32_t>(parents.size()), count - 1);
          parents.push_back(node);
          left -= count;
        }
      }
    }
    return parents;
  }

 private:
  // Returns [max_nodes + 1]: of n nodes below a node of this level, the number under its child of this rank.
  int32_t* choices_of(int level, int rank) {
    return choices_.data() + (size_t(level) * num_ranks_ + rank) * (max_nodes_ + 1);
  }

  const double* levels_;
  int num_ranks_, max_nodes_;
  std::vector<int32_t> choices_;
};

}  // namespace

std::vector<int32_t> best_tree(const Array<double>& levels, const Array<double>& costs, double level_cost) {
  expect_dims(levels, "levels", 2);
  expect_dims(costs, "costs", 1);
  const int max_depth = static_cast<int>(levels.shape(0)), max_nodes = static_cast<int>(costs.shape(0));
  if (max_nodes < 1) throw std::invalid_argument("costs: expected those of at least one node");
  const double* seconds = costs.data();
  Search search(levels.data(), static_cast<int>(levels.shape(1)), max_nodes);
  const py::gil_scoped_release others_run;
  double best_rate = 1.0 / seconds[0];
  int best_depth = 0, best_size = 1;
  // The depth matters only if levels cost something.
  for (int depth = level_cost > 0.0 ? 1 : std::max(max_depth, 1); depth <= max_depth; ++depth) {
    const std::vector<double> tokens = search.tokens(depth);
    for (int size = 2; size <= max_nodes; ++size) {
      const double rate = tokens[size] / (seconds[size - 1] + level_cost * depth);
      if (rate > best_rate * (1.0 + 1e-12)) best_rate = rate, best_size = size, best_depth = depth;
    }
  }
  search.tokens(best_depth);
  return search.parents(best_size, best_depth);
}

}  // namespace pagedtree
