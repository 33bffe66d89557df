// NumPy arguments of pagedtree._C, and the trees of a batch.
#pragma once

#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <vector>

namespace pagedtree {

namespace py = pybind11;

template <class T>
using Array = py::array_t<T, py::array::c_style | py::array::forcecast>;

template <class T>
void expect_dims(const Array<T>& array, const char* name, int dims) {
  if (array.ndim() != dims) {
    throw std::invalid_argument(std::string(name) + ": expected " + std::to_string(dims) + " dimensions, got " +
                                std::to_string(array.ndim()));
  }
}

// A parent that does not precede its child in the same tree makes that row a root, so no value leads outside the
// arrays.
struct BatchNodes {
  static constexpr int32_t kMaxRanks = 4;

  // offsets: [B + 1]. parents: [N or more], tree-local, -1 at roots.
  BatchNodes(const Array<int32_t>& offsets, const Array<int32_t>& parents) {
    expect_dims(offsets, "offsets", 1);
    expect_dims(parents, "parents", 1);
    const int32_t* begin = offsets.data();
    const int32_t* of_tree = parents.data();
    num_trees = static_cast<int32_t>(offsets.shape(0)) - 1;
    if (num_trees < 0 || begin[0] != 0) throw std::invalid_argument("offsets: expected [B + 1] from 0 on");
    for (int32_t b = 0; b < num_trees; ++b) {
      if (begin[b + 1] < begin[b] || begin[b + 1] > parents.shape(0)) {
        throw std::invalid_argument("offsets: expected ascending numbers up to the length of parents");
      }
    }
    const int32_t count = begin[num_trees];
    first.assign(begin, begin + num_trees + 1);
    parent.resize(count), depth.resize(count), rank.resize(count);
    std::vector<int32_t> num_children(count, 0);
    for (int32_t b = 0; b < num_trees; ++b) {
      for (int32_t row = begin[b]; row < begin[b + 1]; ++row) {
        const int64_t above = int64_t{begin[b]} + of_tree[row];
        const bool is_root = of_tree[row] < 0 || above >= row;
        parent[row] = is_root ? row : static_cast<int32_t>(above);
        depth[row] = is_root ? 0 : depth[above] + 1;
        rank[row] = is_root ? 0 : std::min(num_children[above]++, kMaxRanks - 1);
      }
    }
  }

  int32_t size() const { return static_cast<int32_t>(parent.size()); }

  int32_t num_trees;
  std::vector<int32_t> first;   // first row per tree, then the number of rows
  std::vector<int32_t> parent;  // row; of a root itself
  std::vector<int32_t> depth;   // below the root
  std::vector<int32_t> rank;    // among its siblings, at most kMaxRanks - 1
};

}  // namespace pagedtree
