// Explains the launches of the CUDA attention kernel for given lengths, without a GPU.
#pragma once

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cstdint>
#include <string>
#include <vector>

namespace pagedtree {

namespace py = pybind11;

// Returns per launch: sequences, tile, residency on the device, the plan's cuts, and a replay of its CTAs (replay.h).
// The caller checks the arguments.
py::list explain_attention(const std::vector<int32_t>& query_lens, const std::vector<int32_t>& seq_lens,
                           int32_t num_q_heads, int32_t num_kv_heads, int32_t head_dim, int32_t head_dim_v, bool latent,
                           int32_t kv_bytes, int64_t max_seqlen_q, int64_t window, int32_t num_sms,
                           int32_t max_shared_bytes, int64_t l2_bytes, const std::string& engine);

// Returns the engine's tiles as (columns of K, columns of V) -> rows, without tiles only for latent caches.
py::dict attention_tiles(const std::string& engine);

py::tuple head_dims();

}  // namespace pagedtree
