// Explains the launches of the CUDA attention kernel for given lengths, without a GPU.
#include <pybind11/stl.h>

#include <string>
#include <vector>

#include "bindings/module.h"
#include "bindings/replay.h"
#include "core/engine.h"
#include "cuda/attention/config.h"

namespace pagedtree {

using namespace cuda;

namespace {

// The device, and call properties that tiles do not depend on.
struct Surroundings {
  int64_t kv_tile_bytes;  // per KV head
  int kv_bytes;
  int num_sms;
  int max_shared_bytes;
  int64_t l2_bytes;
};

py::dict explain_launch(const WorkShape& work, const TileShape& tile, const Surroundings& around) {
  std::vector<int32_t> ranges(kListSize);
  const RangeLimits limits = range_limits(tile, around.num_sms, around.max_shared_bytes);
  make_ranges(work, limits, ranges.data());
  const int32_t num_ranges = ranges[0], sharers = ranges[1];
  py::list sequences;
  int64_t row_tiles = 0, kv_tiles = 0, cut_row_tiles = 0, pieces = 0;
  for (int64_t b = 0; b < work.batch; ++b) {
    const SequenceWork sequence = sequence_work(work, b);
    if (sequence.row_tiles > 0) sequences.append(b);
    row_tiles += sequence.row_tiles;
    kv_tiles += int64_t{sequence.row_tiles} * sequence.kv_tiles;
  }
  const auto start_of = [&](int32_t i) { return range_start(work, ranges.data(), num_ranges, i, sharers); };
  WorkPosition before = start_of(0);
  for (int32_t i = 1; i < num_ranges; ++i) {
    const WorkPosition start = start_of(i);
    if (start.kv_tile > 0) {
      const bool same = before.kv_tile > 0 && before.same_row(start);
      const SequenceWork sequence = sequence_work(work, start.sequence, sharers);
      const int64_t rows =
          sequence.tokens.size() * work.group_size - start.row_tile % sequence.m_tiles * sequence.tile_rows;
      const int64_t parts = min_of<int64_t>(sharers, ceil_div<int64_t>(rows, work.m_tile));
      cut_row_tiles += same ? 0 : parts;
      pieces += same ? parts : 2 * parts;
    }
    before = start;
  }

  const Residency resident = residency(tile, around.kv_bytes, around.max_shared_bytes);
  const Replay found =
      replay(work, ranges.data(), {around.num_sms, resident.ctas, around.l2_bytes / around.kv_tile_bytes});
  py::dict result;
  result["sequences"] = py::tuple(sequences);
  result["engine"] = engine_name(tile.engine);
  result["m_tile"] = tile.m_tile;
  result["row_warps"] = tile.row_warps;
  result["key_warps"] = tile.key_warps;
  result["column_warps"] = tile.column_warps;
  result["keys_per_stage"] = tile.keys;
  result["stages"] = resident.stages;
  result["shared_bytes"] = resident.shared_bytes;
  result["ctas_per_sm"] = resident.ctas;
  result["row_tiles"] = row_tiles;
  result["kv_tiles"] = kv_tiles;
  result["sharers"] = sharers;
  result["ranges"] = num_ranges * sharers;
  result["cut_row_tiles"] = cut_row_tiles;
  result["pieces"] = pieces;
  result["balance"] = found.balance();
  result["idle"] = found.idle;
  result["kv_reads"] = found.kv_reads();
  py::dict replayed;  // for sums over all launches
  replayed["tiles"] = found.tiles;
  replayed["most_tiles"] = found.most_tiles;
  replayed["different"] = found.different;
  result["replayed"] = replayed;
  return result;
}

// Returns per launch: sequences, tile, residency on the device, the plan's cuts, and a replay of its CTAs (replay.h).
// The caller checks the arguments.
py::list explain_attention(const std::vector<int32_t>& query_lens, const std::vector<int32_t>& seq_lens,
                           int32_t num_q_heads, int32_t num_kv_heads, int32_t head_dim, int32_t head_dim_v, bool latent,
                           int32_t kv_bytes, int64_t max_seqlen_q, int64_t window, int32_t num_sms,
                           int32_t max_shared_bytes, int64_t l2_bytes, const std::string& engine) {
  std::vector<int32_t> offsets{0};
  for (const int32_t n : query_lens) offsets.push_back(offsets.back() + n);
  AttentionPlanParams params{};
  params.seq_lens = seq_lens.data();
  params.cu_seqlens_q = offsets.data();
  params.batch = static_cast<int64_t>(query_lens.size());
  params.num_tokens = offsets.back();
  params.max_seq_len = INT32_MAX;
  params.max_seqlen_q = max_seqlen_q;
  params.window = window;
  params.num_kv_heads = num_kv_heads;
  params.group_size = num_q_heads / num_kv_heads;
  params.head_dim = head_dim;
  params.head_dim_v = head_dim_v;
  params.latent = latent;
  params.engine = engine_named(engine, "explain: engine: expected mma.sync or wgmma");
  py::list launches;
  if (params.num_tokens == 0) return launches;
  const int64_t tile_bytes = int64_t{kKvTile} * (head_dim + (latent ? 0 : head_dim_v)) * kv_bytes;
  const Surroundings around{tile_bytes, kv_bytes, num_sms, max_shared_bytes, l2_bytes};
  for (const auto& [list, tile] : lists_of(params, max_shared_bytes)) {
    launches.append(explain_launch(work_shape(params, tile.m_tile, list), tile, around));
  }
  return launches;
}

// Returns the engine's tiles as (columns of K, columns of V) -> rows, without tiles only for latent caches.
py::dict attention_tiles(const std::string& engine) {
  const MatrixEngine chosen = engine_named(engine, "attention_tiles: engine: expected mma.sync or wgmma");
  py::dict tiles;
  for (const TileShape& shape : kTileShapes) {
    if (shape.engine != chosen || shape.is_latent()) continue;
    const py::tuple sizes = py::make_tuple(shape.head_dim, shape.head_dim_v);
    tiles[sizes] = (tiles.contains(sizes) ? py::tuple(tiles[sizes]) : py::tuple()) + py::make_tuple(shape.m_tile);
  }
  return tiles;
}

py::tuple head_dims() {
  py::list sizes;
  for (const HeadDims& dims : kHeadDims) sizes.append(py::make_tuple(dims.k, dims.v));
  return py::tuple(sizes);
}

}  // namespace

void bind_explain(py::module_& m) {
  m.def("explain_attention", &explain_attention, py::arg("query_lens"), py::arg("seq_lens"), py::arg("num_q_heads"),
        py::arg("num_kv_heads"), py::arg("head_dim"), py::arg("head_dim_v"), py::arg("latent"), py::arg("kv_bytes"),
        py::arg("max_seqlen_q"), py::arg("window"), py::arg("num_sms"), py::arg("max_shared_bytes"),
        py::arg("l2_bytes"), py::arg("engine"), "The CUDA kernel's tile and cuts for a batch; see pagedtree.explain.");
  m.def("attention_tiles", &attention_tiles, py::arg("engine"),
        "The CUDA kernels' tiles: (head_dim, head_dim_v) -> their rows, without those for latent caches alone.");
  m.attr("HEAD_DIMS") = head_dims();  // supported columns of K and V
}

}  // namespace pagedtree
