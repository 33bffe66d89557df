// Checks of values in tensors, under PAGEDTREE_CHECK=1 only: they copy to the host, which synchronises.
#pragma once

#include <torch/csrc/stable/ops.h>

#include "torch/check.h"

namespace pagedtree::ops {

template <typename T>
std::vector<T> host_values(const Tensor& t) {
  const Tensor host = torch::stable::contiguous(torch::stable::to(t, torch::stable::Device(torch::headeronly::kCPU)));
  const T* values = const_pointer<T>(host);
  return std::vector<T>(values, values + host.numel());
}

inline std::string at(const std::string& name, int64_t index) { return name + "[" + std::to_string(index) + "]"; }

// cu_*: first 0, never descending, last at most `limit`.
inline void check_offsets(const Check& check, const std::vector<int32_t>& offsets, const std::string& name,
                          int64_t limit) {
  check.that(offsets.front() == 0, at(name, 0), "0", offsets.front());
  for (size_t i = 1; i < offsets.size(); ++i) {
    check.that(offsets[i] >= offsets[i - 1], name, "non-descending", Check::text(offsets));
  }
  check.that(offsets.back() <= limit, name, "at most " + std::to_string(limit) + " rows", offsets.back());
}

// Positions [begin, end) of sequence b lie on pages of the table, all of them in 0..num_pages - 1.
inline void check_pages(const Check& check, const std::vector<int32_t>& table, int64_t max_pages, int64_t page_size,
                        int64_t b, int64_t begin, int64_t end, int64_t num_pages) {
  if (begin >= end) return;
  check.that(end <= max_pages * page_size, "page_table",
             "wide enough for position " + std::to_string(end - 1) + " of sequence " + std::to_string(b),
             std::to_string(max_pages) + " pages of " + std::to_string(page_size));
  for (int64_t i = begin / page_size; i <= (end - 1) / page_size; ++i) {
    const int32_t page = table[b * max_pages + i];
    check.that(page >= 0 && page < num_pages, "page_table[" + std::to_string(b) + ", " + std::to_string(i) + "]",
               "a page id in 0.." + std::to_string(num_pages - 1), page);
  }
}

// The path of sequence b: 0 first (or -1: no tree), then ascending node ids.
inline void check_path(const Check& check, const std::vector<int32_t>& accept_index, int64_t path_width, int64_t b,
                       int32_t num_accepted) {
  check.that(num_accepted >= 0 && num_accepted < max_of<int64_t>(path_width, 1), at("num_accepted", b),
             "in 0.." + std::to_string(path_width - 1), num_accepted);
  for (int64_t j = 0; j <= num_accepted && j < path_width; ++j) {
    const int32_t node = accept_index[b * path_width + j];
    const std::string name = "accept_index[" + std::to_string(b) + ", " + std::to_string(j) + "]";
    if (j == 0) {
      check.that(node == 0 || (node == -1 && num_accepted == 0), name, "0, the root", node);
    } else {
      check.that(node > accept_index[b * path_width + j - 1], name, "greater than the node before it", node);
    }
  }
}

}  // namespace pagedtree::ops
