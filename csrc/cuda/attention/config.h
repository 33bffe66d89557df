// Tile configurations: each row of kTileShapes is one kernel instance. The host chooses; nothing here needs CUDA.
#pragma once

#include "core/engine.h"
#include "core/head_dims.h"
#include "core/ranges.h"
#include "cuda/tile/variants.h"

namespace pagedtree::cuda {

constexpr int kMaxStages = 4, kMaxWgmmaStages = 8;
constexpr int kLeastTileColumns = 64;  // narrower heads get this size's plan, which their kernel ignores

// A CTA's work: m_tile rows r = token * group_size + head against stages of `keys` keys, by row_warps x key_warps
// warps. With few rows, warps share a stage's keys, each with a softmax state, merged at the end; with many, each has
// 16 or 32 rows. Wide values (kernel_wide.cuh) are divided among column_warps. A stage of mma.sync (kernel.cuh) has K
// and V of the same keys. A stage of wgmma (kernel_sm90.cuh, in 16 bits, filled by producer warps) or of wide values
// has K or V, or both in a latent cache.
struct TileShape {
  int head_dim;    // of Q and K
  int head_dim_v;  // of V
  int m_tile;
  int row_warps;
  int key_warps;
  int keys;
  MatrixEngine engine = MatrixEngine::kMmaSync;
  int column_warps = 1;  // warps with the same rows and separate columns of V

  constexpr bool is_wgmma() const { return engine == MatrixEngine::kWgmma; }
  constexpr bool is_wide() const { return !is_wgmma() && column_warps > 1; }
  // True if V is part of K's stages.
  constexpr bool is_latent() const { return is_wgmma() && column_warps > 1; }
  // True for these head sizes. Wide and latent tiles of 576 columns also accept 512.
  constexpr bool takes(int columns, int columns_v, bool latent) const {
    const bool fits = columns == head_dim || (column_warps > 1 && columns == head_dim_v);
    return columns_v == head_dim_v && fits && (latent || !is_latent());
  }
  constexpr int warps() const { return row_warps * key_warps * column_warps; }  // without producers
  constexpr int producer_warps() const { return is_wgmma() ? 4 : 0; }
  constexpr int threads() const { return (warps() + producer_warps()) * 32; }
  constexpr int warp_rows() const { return m_tile / row_warps; }
  // Returns the keys per stage and warp for softmax. Groups of warps alternate over latent stages.
  constexpr int warp_keys() const { return keys / (is_latent() ? key_warps : key_warps * column_warps); }
  // Returns the CTAs per SM that registers, or with 256 columns shared memory, allow. Small tiles are latency-bound.
  constexpr int max_ctas() const {
    if (is_wgmma()) return m_tile == 64 && head_dim < 256 ? 2 : 1;
    if (threads() > 128) return 1;
    return m_tile > 32 || head_dim > 96 ? 2 : head_dim == 64 ? 4 : 3;
  }

  constexpr int q_bytes() const { return m_tile * head_dim * 2; }
  // Returns the Q buffers: with many rows, the next tile's Q arrives during this one.
  constexpr int num_qs() const { return is_wgmma() && m_tile > 64 && head_dim < 256 ? 2 : 1; }
  // Returns the bytes for P, exchanged between groups of warps.
  constexpr int weight_bytes() const { return is_latent() ? m_tile * keys * 2 : 0; }
  constexpr int stage_bytes(int kv_bytes) const {
    if (is_wide()) return keys * head_dim * kv_bytes;
    return is_wgmma() ? keys * head_dim * 2 : keys * ((head_dim + head_dim_v) * kv_bytes + 16);
  }
  // Returns the bytes before Q, which is aligned to 128 (wgmma: 1024): iterators, work tiles, and by engine states,
  // bounds, views, windows, barriers, row addresses, maxima, or scores. The kernels assert the size.
  constexpr int header_bytes() const {
    if (is_wgmma()) return is_latent() ? 3072 : keys > kKvTile ? 9216 : m_tile > 64 ? 5120 : 4096;
    if (is_wide()) return 1024 + m_tile * keys * 4;
    const int of_states = key_warps * m_tile * 8, of_views = warps() * 16 + 32 + m_tile * 28;
    return 128 * ceil_div(80 + max_of(of_states, of_views), 128);
  }
  constexpr int out_bytes() const { return is_wgmma() ? 0 : key_warps * m_tile * head_dim_v * 4; }
  constexpr int shared_bytes(int kv_bytes, int stages) const {
    return header_bytes() + num_qs() * q_bytes() + weight_bytes() + stages * stage_bytes(kv_bytes);
  }
  // The output reuses Q and stages. wgmma uses a K and a V while the next K arrives; e4m3 arrives two stages ahead.
  constexpr int min_stages(int kv_bytes) const {
    if (is_wgmma()) return is_latent() ? 2 : kv_bytes == 1 ? 4 : 3;
    const int stages = ceil_div(out_bytes() - q_bytes(), stage_bytes(kv_bytes));
    return stages < 2 ? 2 : stages;
  }
  // Returns the bytes to merge up to `pieces` partial results, each CTA a part of the columns.
  constexpr int join_bytes(int pieces) const {
    const int fours = m_tile * head_dim_v / 4;
    return header_bytes() + 16 * max_of(fours + 3 * min_of(pieces, fours) + m_tile, 2 * pieces);
  }
  constexpr int max_stages() const {
    return is_wgmma() ? min_of(kMaxWgmmaStages, (kWgmmaSharedBytes - shared_bytes(2, 0)) / stage_bytes(2)) : kMaxStages;
  }
};

constexpr TileShape kTileShapes[] = {
    // head_dim, head_dim_v, m_tile, row_warps, key_warps, keys
    {64, 64, 16, 1, 4, 64},
    {64, 64, 32, 1, 4, 64},
    {64, 64, 64, 2, 2, 64},
    {64, 64, 128, 4, 1, 64},
    {96, 96, 16, 1, 4, 64},
    {96, 96, 32, 1, 4, 64},
    {96, 96, 64, 2, 2, 64},
    {96, 96, 128, 4, 1, 32},
    {128, 128, 16, 1, 4, 64},
    {128, 128, 32, 1, 4, 64},
    {128, 128, 64, 2, 2, 64},
    {128, 128, 128, 4, 1, 32},
    // 16 rows of output fill half of the registers, hence 16 rows per warp and stages of half a KV tile.
    {192, 192, 32, 2, 2, 32},
    {192, 192, 64, 4, 1, 32},
    {192, 128, 32, 2, 2, 32},
    {192, 128, 128, 4, 1, 32},
    {256, 256, 32, 2, 2, 32},
    {256, 256, 64, 4, 1, 32},
    // 32 rows of output fill half of the registers, with a quarter of the columns per warp.
    {576, 512, 16, 1, 1, 32, MatrixEngine::kMmaSync, 4},
    {576, 512, 32, 1, 1, 32, MatrixEngine::kMmaSync, 4},
    // A wgmma has 64 rows; smaller tiles would waste it. Stages of 128 keys halve the cost per stage; their scores take
    // half of the registers that the output leaves.
    {64, 64, 64, 4, 1, 64, MatrixEngine::kWgmma},
    {64, 64, 128, 8, 1, 128, MatrixEngine::kWgmma},
    {128, 128, 64, 4, 1, 64, MatrixEngine::kWgmma},
    {128, 128, 128, 8, 1, 128, MatrixEngine::kWgmma},
    {256, 256, 64, 4, 1, 64, MatrixEngine::kWgmma},
    {256, 256, 128, 8, 1, 64, MatrixEngine::kWgmma},
    // Latent rows of 512 or 576 columns: two warpgroups share the columns of V, which is part of K.
    {576, 512, 64, 4, 1, 64, MatrixEngine::kWgmma, 2},
};

struct Residency {
  int ctas;  // per SM
  int stages;
  int shared_bytes;
};

// Returns the most CTAs per SM, then the most stages. An SM has 1 KB more than a CTA may use, less 1 KB per CTA.
constexpr Residency residency(const TileShape& shape, int kv_bytes, int max_shared_bytes) {
  for (int ctas = shape.max_ctas(); ctas >= 1; --ctas) {
    const int budget = (max_shared_bytes + 1024) / ctas - 1024;
    for (int stages = shape.max_stages(); stages >= shape.min_stages(kv_bytes); --stages) {
      const int bytes = shape.shared_bytes(kv_bytes, stages);
      if (bytes <= budget) return {ctas, stages, bytes};
    }
  }
  return {};
}

// Returns the smallest tile of at least `rows` rows, or the largest; ties go to the engine. It must fit with a 16-bit
// cache: a plan does not know the type.
constexpr TileShape choose_tile(MatrixEngine engine, int head_dim, int head_dim_v, bool latent, int64_t rows,
                                int max_shared_bytes) {
  TileShape chosen{};
  if (head_dim < kLeastTileColumns) head_dim = head_dim_v = kLeastTileColumns;
  for (const TileShape& shape : kTileShapes) {
    if (!shape.takes(head_dim, head_dim_v, latent) || residency(shape, 2, max_shared_bytes).ctas < 1) continue;
    if (shape.is_wgmma() && engine != MatrixEngine::kWgmma) continue;
    const bool is_needed = chosen.m_tile == 0 || (chosen.m_tile < rows && shape.m_tile > chosen.m_tile);
    if (is_needed || shape.m_tile == chosen.m_tile) chosen = shape;
  }
  return chosen;
}

constexpr TileShape tile_shape(MatrixEngine engine, int head_dim, int head_dim_v, int m_tile) {
  for (const TileShape& shape : kTileShapes) {
    const bool has_sizes = shape.head_dim == head_dim && shape.head_dim_v == head_dim_v;
    if (shape.engine == engine && has_sizes && shape.m_tile == m_tile) return shape;
  }
  return {};
}

struct ListTile {
  WorkList list;
  TileShape tile;
};

// Returns a list's tile. max_seqlen_q is the host's hint; with segments, the tile depends on the list alone.
template <typename Params>
constexpr ListTile list_tile(const Params& p, WorkList list, int max_shared_bytes) {
  const int64_t all_rows = min_of<int64_t>(p.segment > 0 ? INT32_MAX : p.max_seqlen_q, INT32_MAX) * p.group_size;
  const int64_t rows = list == WorkList::kSmall ? min_of(all_rows, kSmallRows) : all_rows;
  return {list, choose_tile(p.engine, p.head_dim, p.head_dim_v, p.latent, rows, max_shared_bytes)};
}

struct ListTiles {
  ListTile items[2];
  int count;

  constexpr const ListTile* begin() const { return items; }
  constexpr const ListTile* end() const { return items + count; }
};

// Returns two lists if, for all the host knows, the longest sequences have many rows and others are shorter.
template <typename Params>
constexpr ListTiles lists_of(const Params& p, int max_shared_bytes) {
  const int64_t longest = p.segment > 0 ? p.num_tokens : min_of(p.max_seqlen_q, p.num_tokens);
  const auto tile_of = [&](WorkList list) { return list_tile(p, list, max_shared_bytes); };
  if (p.segment > 0) {
    return {{tile_of(WorkList::kSmall), tile_of(WorkList::kLarge)}, longest * p.group_size <= kSmallRows ? 1 : 2};
  }
  if (longest * p.group_size <= kSmallRows || p.num_tokens >= p.batch * longest) return {{tile_of(WorkList::kAll)}, 1};
  return {{tile_of(WorkList::kSmall), tile_of(WorkList::kLarge)}, 2};
}

// Returns the limits of a plan's kv ranges: at most one per CTA resident with a 16-bit cache, equally many per SM.
// Short ranges pay off: a CTA alone on an SM waits for its keys, which costs more than merging. Small tiles get a CTA
// per KV tile if there are enough.
constexpr int kMinPieceTiles = PAGEDTREE_MIN_PIECE_TILES;
constexpr RangeLimits range_limits(const TileShape& shape, int num_sms, int max_shared_bytes) {
  constexpr int kMinRangeCost = PAGEDTREE_MIN_RANGE_COST, kHeldTiles = PAGEDTREE_HELD_TILES;
  const int ctas = residency(shape, 2, max_shared_bytes).ctas;
  const int32_t most = min_of<int32_t>(num_sms * ctas, kMaxPlanRanges);
  return {most,
          SmallDivisor(num_sms),
          kMinRangeCost,
          kMinPieceTiles,
          static_cast<float>(num_sms * kHeldTiles),
          shape.m_tile <= PAGEDTREE_ROOM_ROWS ? most : 0};
}

// True if the engine has a tile for each of its pairs of head sizes, with 8-bit and 16-bit caches.
constexpr bool every_pair_fits(MatrixEngine engine, int max_shared_bytes) {
  for (const TileShape& shape : kTileShapes) {
    if (shape.engine != engine) continue;
    const TileShape chosen =
        choose_tile(engine, shape.head_dim, shape.head_dim_v, true, shape.m_tile, max_shared_bytes);
    const auto fits = [&](int kv_bytes) { return residency(chosen, kv_bytes, max_shared_bytes).ctas > 0; };
    if (chosen.engine != engine || chosen.m_tile == 0 || !fits(1) || !fits(2)) return false;
    // except for the larger wide tile
    if (chosen.m_tile != shape.m_tile && !shape.is_wide()) return false;
  }
  return true;
}
static_assert(every_pair_fits(MatrixEngine::kMmaSync, 99 << 10), "the least of sm_80 and later");
constexpr bool every_head_has_a_tile() {
  for (const HeadDims& dims : kHeadDims) {
    if (choose_tile(MatrixEngine::kMmaSync, dims.k, dims.v, false, 1, 99 << 10).m_tile == 0) return false;
  }
  return true;
}
static_assert(every_head_has_a_tile(), "kTileShapes lacks a size of core/head_dims.h");
static_assert(every_pair_fits(MatrixEngine::kWgmma, kWgmmaSharedBytes));
// Two CTAs of the larger wide tile per SM overlap copies and computation.
static_assert(residency(tile_shape(MatrixEngine::kMmaSync, 576, 512, 32), 2, kWgmmaSharedBytes).ctas == 2);

}  // namespace pagedtree::cuda
