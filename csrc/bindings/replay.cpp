#include "bindings/replay.h"

#include <cstddef>
#include <unordered_map>
#include <vector>

namespace pagedtree {

namespace {

// Larger calls are replayed on coarser tiles or a sample.
constexpr int64_t kMostTiles = int64_t{1} << 21;
constexpr int64_t kMostRowTiles = int64_t{1} << 17;
constexpr int64_t kLeastRowTiles = 8;  // per range

// LRU model of L2: a list of blocks from newest to oldest, in which node 0 separates the ends.
class LastRead {
 public:
  void hold(int64_t blocks) { room_ = blocks; }

  // Returns the first of `blocks` new blocks.
  int64_t add(int64_t blocks) {
    const auto first = static_cast<int64_t>(nodes_.size());
    nodes_.resize(nodes_.size() + static_cast<size_t>(blocks));
    return first;
  }

  // Returns true if the block comes from memory.
  bool read(int64_t block) {
    Node& node = at(block);
    const bool is_held = node.is_held;
    if (is_held) {
      unlink(node);
    } else {
      different_ += !node.was_read;
      ++held_;
    }
    Node& ends = nodes_.front();
    node = {0, ends.older, true, true};
    at(ends.older).newer = block;
    ends.older = block;
    if (held_ > room_) {
      Node& oldest = at(ends.newer);
      unlink(oldest);
      oldest.is_held = false;
      --held_;
    }
    return !is_held;
  }

  int64_t different() const { return different_; }

 private:
  struct Node {
    int64_t newer = 0, older = 0;
    bool is_held = false, was_read = false;
  };

  Node& at(int64_t block) { return nodes_[static_cast<size_t>(block)]; }
  void unlink(const Node& node) {
    at(node.newer).older = node.older;
    at(node.older).newer = node.newer;
  }

  std::vector<Node> nodes_{Node{}};
  int64_t room_ = 0, held_ = 0, different_ = 0;
};

class Replayer {
 public:
  Replayer(const WorkShape& work, const int32_t* ranges, const ReplayDevice& device)
      : work_(work), ranges_(ranges), device_(device) {
    sharers_ = planned_sharers(ranges, kMaxPlanRanges);
    num_ranges_ = planned_ranges(ranges, kMaxPlanRanges);
    found_.ctas = num_ranges_ * sharers_;
    find_strides();
    l2_.hold(device.l2_tiles / grain_);
  }

  Replay run() {
    const int32_t at_once = min_of(found_.ctas, device_.num_sms * device_.ctas);
    std::vector<Cta> slots(static_cast<size_t>(at_once));
    for (bool is_done = false; !is_done;) {
      is_done = true;
      for (Cta& cta : slots) {
        while (!find_tile(cta) && started_ < found_.ctas) start_next(cta);
        if (cta.tile >= cta.end) continue;
        consume_tiles(cta);
        is_done = false;
      }
    }
    for (const Cta& cta : slots) finish(cta);
    found_.tiles *= head_stride_ * m_stride_;
    found_.most_tiles *= head_stride_ * m_stride_;
    found_.from_memory *= head_stride_ * m_stride_;
    found_.different = l2_.different() * head_stride_ * grain_;
    return found_;
  }

 private:
  struct Cta {
    bool has_range = false;
    int32_t part = 0;  // of row tiles
    WorkPosition at{}, stop{};
    int32_t tile = 0, end = 0;  // left in the row tile
    int64_t block = 0;          // of KV tile 0
    int64_t tiles = 0;
  };

  void find_strides() {
    int64_t heads = 0, row_tiles = 0, tiles = 0;
    for (int64_t b = 0; b < work_.batch; ++b) {
      const SequenceWork sequence = sequence_work(work_, b, sharers_);
      heads += sequence.m_tiles > 0 ? sequence.row_tiles / sequence.m_tiles : 0;
      row_tiles += sequence.row_tiles;
      tiles = min_of<int64_t>(tiles + int64_t{sequence.row_tiles} * sequence.kv_tiles, int64_t{1} << 60);
    }
    const auto needed = [](int64_t count, int64_t most) { return max_of<int64_t>(ceil_div(count, most), 1); };
    head_stride_ = needed(heads, kMostRowTiles);
    row_tiles /= head_stride_;
    tiles /= head_stride_;
    m_stride_ = min_of(max_of(needed(row_tiles, kMostRowTiles), needed(tiles, kMostTiles)),
                       max_of<int64_t>(row_tiles / (kLeastRowTiles * found_.ctas), 1));
    grain_ = static_cast<int32_t>(min_of<int64_t>(needed(tiles / m_stride_, kMostTiles), INT32_MAX));
  }

  void start_next(Cta& cta) {
    finish(cta);
    cta = {};
    cta.has_range = true;
    const int32_t range = started_ / sharers_;
    cta.part = started_++ % sharers_;
    cta.at = range_start(work_, ranges_, num_ranges_, range, sharers_);
    cta.stop = range_start(work_, ranges_, num_ranges_, range + 1, sharers_);
  }

  void finish(const Cta& cta) {
    if (!cta.has_range) return;
    found_.tiles += cta.tiles;
    found_.most_tiles = max_of(found_.most_tiles, cta.tiles);
    found_.idle += cta.tiles == 0;
  }

  // Moves to the next row tile with a tile; false at the end of the range.
  bool find_tile(Cta& cta) {
    while (cta.tile >= cta.end && cta.at.before(cta.stop)) {
      const SequenceWork sequence = sequence_work(work_, cta.at.sequence, sharers_);
      if (cta.at.row_tile < sequence.row_tiles) begin_row_tile(cta, sequence);
      cta.at = after(cta.at, sequence);
    }
    return cta.tile < cta.end;
  }

  WorkPosition after(const WorkPosition& at, const SequenceWork& sequence) const {
    const int64_t m_tiles = max_of(sequence.m_tiles, 1), m = at.row_tile % m_tiles + m_stride_;
    const int64_t next = m < m_tiles ? at.row_tile + m_stride_ : (at.row_tile / m_tiles + head_stride_) * m_tiles;
    if (next >= sequence.row_tiles) return {at.sequence + 1, 0, 0};
    return {at.sequence, static_cast<int32_t>(next), 0};
  }

  void begin_row_tile(Cta& cta, const SequenceWork& sequence) {
    const auto m = static_cast<uint32_t>(cta.at.row_tile % sequence.m_tiles),
               height = static_cast<uint32_t>(work_.m_tile);
    const uint32_t first_row = m * sequence.tile_rows + static_cast<uint32_t>(cta.part) * height;
    if (first_row >= sequence.rows) return;
    const int32_t end = cta.at.same_row(cta.stop) ? cta.stop.kv_tile : sequence.kv_tiles;
    cta.tile = max_of(cta.at.kv_tile, sequence.first_visible_tile(work_, first_row));
    cta.end = sequence.seq_len > 0 ? min_of(end, sequence.end_visible_tile(work_, first_row + height - 1)) : 0;
    const int32_t head = cta.at.row_tile / sequence.m_tiles;
    const auto [known, is_new] = blocks_.try_emplace(int64_t{cta.at.sequence} << 32 | head, 0);
    if (is_new) known->second = l2_.add(ceil_div(sequence.kv_tiles, grain_));
    cta.block = known->second;
  }

  void consume_tiles(Cta& cta) {
    const int32_t block = cta.tile / grain_;
    const auto next = static_cast<int32_t>(min_of<int64_t>((int64_t{block} + 1) * grain_, cta.end));
    cta.tiles += next - cta.tile;
    cta.tile = next;
    if (l2_.read(cta.block + block)) found_.from_memory += grain_;
  }

  const WorkShape& work_;
  const int32_t* ranges_;
  ReplayDevice device_;
  int64_t head_stride_ = 1, m_stride_ = 1;  // between replayed heads, and replayed row tiles of a head
  int32_t grain_ = 1;                       // KV tiles per read
  LastRead l2_;
  std::unordered_map<int64_t, int64_t> blocks_;  // sequence and KV head -> first block
  int32_t sharers_, num_ranges_;
  int32_t started_ = 0;
  Replay found_;
};

}  // namespace

Replay replay(const WorkShape& work, const int32_t* ranges, const ReplayDevice& device) {
  return Replayer(work, ranges, device).run();
}

}  // namespace pagedtree
