#include "bindings/explain.h"

#include <vector>

#include "cuda/tree_attention/config.h"

namespace pagedtree {

using namespace cuda;

py::dict explain_attention(const std::vector<int32_t>& query_lens, const std::vector<int32_t>& seq_lens,
                           int32_t num_q_heads, int32_t num_kv_heads, int32_t head_dim, int32_t kv_bytes,
                           int64_t max_seqlen_q, int32_t num_sms, int32_t max_shared_bytes) {
  std::vector<int32_t> offsets{0};
  for (const int32_t n : query_lens) offsets.push_back(offsets.back() + n);
  WorkShape shape{};
  shape.seq_lens = seq_lens.data();
  shape.cu_seqlens_q = offsets.data();
  shape.batch = static_cast<int64_t>(query_lens.size());
  shape.num_tokens = offsets.back();
  shape.max_seq_len = INT32_MAX;
  shape.num_kv_heads = num_kv_heads;
  shape.group_size = num_q_heads / num_kv_heads;
  const TileShape tile = choose_tile(head_dim, max_seqlen_q * shape.group_size);
  shape.m_tile = tile.m_tile;
  const Residency resident = residency(tile, kv_bytes, max_shared_bytes);

  std::vector<int32_t> plan(kPlanSize);
  make_plan(shape, max_ranges(tile, num_sms), kMinRangeCost, plan.data());
  const int32_t num_ranges = plan[0];
  int64_t row_tiles = 0, kv_tiles = 0, cut_row_tiles = 0, pieces = 0;
  for (int64_t b = 0; b < shape.batch; ++b) {
    const SequenceWork work = sequence_work(shape, b);
    row_tiles += work.row_tiles;
    kv_tiles += int64_t{work.row_tiles} * work.kv_tiles;
  }
  WorkPosition before = range_start(shape, plan.data(), num_ranges, 0);
  for (int32_t i = 1; i < num_ranges; ++i) {
    const WorkPosition start = range_start(shape, plan.data(), num_ranges, i);
    if (start.kv_tile > 0) {
      const bool same = before.kv_tile > 0 && before.same_row(start);
      cut_row_tiles += same ? 0 : 1;
      pieces += same ? 1 : 2;
    }
    before = start;
  }

  py::dict result;
  result["m_tile"] = tile.m_tile;
  result["row_warps"] = tile.row_warps;
  result["key_warps"] = tile.key_warps;
  result["keys_per_stage"] = tile.keys;
  result["stages"] = resident.stages;
  result["ctas_per_sm"] = resident.ctas;
  result["shared_bytes"] = resident.shared_bytes;
  result["row_tiles"] = row_tiles;
  result["kv_tiles"] = kv_tiles;
  result["ranges"] = num_ranges;
  result["cut_row_tiles"] = cut_row_tiles;
  result["pieces"] = pieces;
  return result;
}

}  // namespace pagedtree
