// What the CUDA attention kernel would do for given lengths; needs no GPU.
#pragma once

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cstdint>
#include <string>
#include <vector>

namespace pagedtree {

namespace py = pybind11;

// For each launch of the kernel: the sequences that it takes, its tile, how that fits on the device, the cuts of the
// plan, and what the CTAs do (replay.h). The caller has checked the arguments.
py::list explain_attention(const std::vector<int32_t>& query_lens, const std::vector<int32_t>& seq_lens,
                           int32_t num_q_heads, int32_t num_kv_heads, int32_t head_dim, int32_t head_dim_v, bool latent,
                           int32_t kv_bytes, int64_t max_seqlen_q, int64_t window, int32_t num_sms,
                           int32_t max_shared_bytes, int64_t l2_bytes, const std::string& engine);

// The engine's tiles: (columns of K, columns of V) -> their rows. Those for latent caches alone are left out.
py::dict attention_tiles(const std::string& engine);

// core/head_dims.h as a tuple of pairs.
py::tuple head_dims();

}  // namespace pagedtree
