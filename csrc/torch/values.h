// Checks of values in tensors, only under PAGEDTREE_CHECK=1: copies to the host synchronise.
#pragma once

#include <torch/csrc/stable/ops.h>

#include <numeric>
#include <unordered_map>

#include "torch/check.h"

namespace pagedtree::ops {

inline Tensor host_copy(const Tensor& t) {
  return torch::stable::contiguous(torch::stable::to(t, torch::stable::Device(torch::headeronly::kCPU)));
}

template <typename T>
std::vector<T> host_values(const Tensor& t) {
  const Tensor host = host_copy(t);
  const T* values = const_pointer<T>(host);
  return std::vector<T>(values, values + host.numel());
}

inline std::string at(const std::string& name, int64_t index) { return name + "[" + std::to_string(index) + "]"; }

template <typename T>
void check_range(const Check& check, const Tensor& t, const char* name, int64_t low, int64_t high) {
  const auto values = host_values<T>(t);
  for (size_t i = 0; i < values.size(); ++i) check.in(values[i], at(name, static_cast<int64_t>(i)), low, high);
}

// Requires cu_*: first 0, never descending, last at most `limit`.
inline void check_offsets(const Check& check, const std::vector<int32_t>& offsets, const std::string& name,
                          int64_t limit) {
  check.that(offsets.front() == 0, at(name, 0), "0", offsets.front());
  for (size_t i = 1; i < offsets.size(); ++i) {
    check.that(offsets[i] >= offsets[i - 1], name, "non-descending", Check::text(offsets));
  }
  check.that(offsets.back() <= limit, name, "at most " + std::to_string(limit) + " rows", offsets.back());
}

// Positions [begin, end) of sequence b must have pages in 0..num_pages - 1.
inline void check_pages(const Check& check, const std::vector<int32_t>& table, int64_t max_pages, int64_t page_size,
                        int64_t b, int64_t begin, int64_t end, int64_t num_pages) {
  if (begin >= end) return;
  check.that(end <= max_pages * page_size, "page_table",
             "pages for position " + std::to_string(end - 1) + " of sequence " + std::to_string(b),
             std::to_string(max_pages) + " pages of " + std::to_string(page_size));
  for (int64_t i = begin / page_size; i <= (end - 1) / page_size; ++i) {
    const int32_t page = table[b * max_pages + i];
    check.that(page >= 0 && page < num_pages, "page_table[" + std::to_string(b) + ", " + std::to_string(i) + "]",
               "a page id in 0.." + std::to_string(num_pages - 1), page);
  }
}

// No two sequences may write to one page.
class WritablePages {
 public:
  // Adds positions [begin, end) of sequence b, whose pages are checked.
  void add(const Check& check, const std::vector<int32_t>& table, int64_t max_pages, int64_t page_size, int64_t b,
           int64_t begin, int64_t end) {
    for (int64_t i = begin / page_size; begin < end && i <= (end - 1) / page_size; ++i) {
      const int32_t page = table[b * max_pages + i];
      const auto [owner, is_new] = owners_.emplace(page, b);
      check.that(is_new || owner->second == b, "page_table[" + std::to_string(b) + ", " + std::to_string(i) + "]",
                 "a page that no other sequence writes",
                 std::to_string(page) + ", where sequence " + std::to_string(owner->second) + " writes too");
    }
  }

 private:
  std::unordered_map<int32_t, int64_t> owners_;
};

// Returns the histories' rows in the pool.
inline std::vector<int64_t> check_histories(const Check& check, const Tensor& history, const Tensor& history_lens,
                                            const OptionalTensor& history_rows) {
  const auto lengths = host_values<int32_t>(history_lens);
  std::vector<int64_t> rows(lengths.size());
  std::iota(rows.begin(), rows.end(), 0);
  if (history_rows.has_value()) {
    const auto given = host_values<int32_t>(*history_rows);
    rows.assign(given.begin(), given.end());
  }
  for (size_t b = 0; b < rows.size(); ++b) {
    check.in(rows[b], at("history_rows", static_cast<int64_t>(b)), -1, history.size(0) - 1);
    if (rows[b] < 0) continue;
    check.in(lengths[rows[b]], at("history_lens", rows[b]), 0, history.size(1));
  }
  return rows;
}

// Requires 0 first (or -1: no tree), then ascending node ids.
inline void check_path(const Check& check, const std::vector<int32_t>& accept_index, int64_t path_width, int64_t b,
                       int32_t num_accepted) {
  check.in(num_accepted, at("num_accepted", b), 0, max_of<int64_t>(path_width, 1) - 1);
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
