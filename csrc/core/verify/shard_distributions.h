// Rejection sampling along draft trees with a vocabulary split among ranks. A node's residual after k rejections
// depends on no coin, so round k reduces it for all nodes; then every rank walks alone. Sums are integer, see
// units_of().
#pragma once

#include "core/verify/rejection.h"
#include "core/verify/shards.h"

namespace pagedtree {

// A rank's words in each round, and their reduction.
enum class ResidualRound : int32_t {
  kMasses,    // 2 words per row, sum: target's masses; target and draft at the row's draft token
  kResidual,  // 2 words per row, sum: target and draft after `index` rejections
  kSums,      // 2 words per tree, gathered: residual at the path's end; target's masses there
  kDraw,      // 1 word per tree, sum: the token drawn there
};
constexpr int kResidualWords = 2;

struct ShardEnd {
  int64_t row;  // -1: no draw
  double c;
  double coin;
  int64_t num_tried;  // tried children that drafted a token
};
static_assert(sizeof(ShardEnd) % sizeof(int64_t) == 0);

struct ShardResidualParams {
  ShardRows shard;
  RatioParams ratio;        // verify.logits: row count and vocabulary of all ranks, no data; draft: own columns
  Residual* left;           // [N] parent's residual after rejecting the row's token, written
  const ShardEnd* ends;     // [B], for kSums and kDraw
  const int64_t* received;  // for kResidual [N, 2], for kDraw [ranks, B, 2], else null
  int64_t* words;           // [N, 2], for kSums [B, 2], for kDraw [B]; zeros, written
  ResidualRound round;
  int32_t index;
  int32_t rank, num_ranks;
};

struct ShardWalkParams {
  RatioParams ratio;        // as above
  ShardRow* rows;           // [N] written
  Residual* left;           // [N] written
  const int64_t* masses;    // [N, 2] of kMasses
  const int64_t* received;  // [N, 2] of the last round
  int32_t* tried;           // [N] scratch
  ShardEnd* ends;           // [B] out
  int32_t index;            // of the last round, 0 for kMasses
};

PT_HOST_DEVICE bool is_of_trees(ResidualRound round) {
  return round == ResidualRound::kSums || round == ResidualRound::kDraw;
}
PT_HOST_DEVICE int64_t num_items(const ShardResidualParams& p) {
  return is_of_trees(p.round) ? p.ratio.verify.batch : p.shard.logits.num_rows;
}

// No sequence (-1): nothing to do.
struct ShardItem {
  int64_t row, sequence;
};
PT_HOST_DEVICE ShardItem item_of(const ShardResidualParams& p, int64_t item) {
  if (!is_of_trees(p.round)) return {item, sequence_of(p.shard, item)};
  return {p.ends[item].row, p.ends[item].row < 0 ? -1 : item};
}

// Returns the row of the `index`-th child (from 1) that drafted a token; -1 if none.
PT_HOST_DEVICE int64_t drafted_child(TreeWalk& walk, int64_t index) {
  for (int32_t child = walk.first_child(); child >= 0; child = walk.next_sibling(child)) {
    const int64_t row = walk.rows.begin + child;
    if (draft_token_at(walk.p, row) >= 0 && --index == 0) return row;
  }
  return -1;
}

// Moves `walk` to `row`; false if it is outside the tree.
PT_HOST_DEVICE bool stand_at(TreeWalk& walk, int64_t row) {
  if (row < walk.rows.begin || row - walk.rows.begin >= walk.num_nodes) return false;
  walk.node = static_cast<int32_t>(row - walk.rows.begin);
  return true;
}

// Reads words of kMasses (index 0), or of kResidual after rejection `index` if asked.
PT_HOST_DEVICE void apply_sums(DraftLaw law, const int64_t* words, int32_t index, ShardRow& row) {
  if (index == 0) {
    row.total = mass_of_units(words[0]);
    row.left = {0.0, row.total, 1.0};
  } else if (row.asked) {
    row.left.mass = mass_left(row.left, mass_of_units(words[0]), row.total);
    if (law == DraftLaw::kSwor) row.left.draft_mass = mass_of_units(words[1]);
  }
}

// Stores a node's residual after rejecting its `index`-th drafting child. Untrusted rows may ask without such a child.
PT_HOST_DEVICE void keep_left(Residual* left, TreeWalk& walk, int64_t index, const ShardRow& row) {
  const int64_t child = row.asked ? drafted_child(walk, index) : -1;
  if (child >= 0) left[child] = row.left;
}

// The `Rows` of core/verify/rules.h after all rounds. Sums after a node's last rejection are unused: any positive value
// serves.
class ReducedRows {
 public:
  PT_HOST_DEVICE ReducedRows(const ShardWalkParams& p, int64_t b) : p_(p), b_(b), walk_(p.ratio.verify, b) {
    tried_.ids = p.tried + walk_.rows.begin;
    p_.ends[b] = {-1, 0.0, 0.0, 0};
  }

  static PT_HOST_DEVICE bool leads() { return true; }
  static PT_HOST_DEVICE void sync() {}
  static PT_HOST_DEVICE void begin(const TreeWalk&) {}
  static PT_HOST_DEVICE void finish(const TreeWalk& walk) { walk.finish(); }
  PT_HOST_DEVICE NodeDistributions& distributions() { return distributions_; }

  PT_HOST_DEVICE void open(const RatioParams&, int64_t, int64_t row, bool, NodeDistributions& distributions) {
    const ShardRow& known = p_.rows[row];
    clear_tried();
    num_rejected_ = 0;
    stand_at(walk_, row);
    distributions = {};
    distributions.target.bad = is_uniform(known) || known.peak.has_nan;
    distributions.total = known.total;
    distributions.draft_unit = 1.0;
    distributions.root_position = root_position_of(p_.ratio.verify, b_);
  }
  PT_HOST_DEVICE double target(const NodeDistributions&, int32_t token) {
    return static_cast<double>(mass_at(token, 32));
  }
  PT_HOST_DEVICE double draft(const NodeDistributions&, int32_t token) {
    return static_cast<double>(mass_at(token, 0));
  }
  PT_HOST_DEVICE double residual(const NodeDistributions& distributions, double c, int32_t token) {
    const float mass = mass_at(token, 32);
    if (c == 0.0) return static_cast<double>(mass);
    return static_cast<double>(residual_mass<ScalarMath>(mass, draft_factor(distributions, c), mass_at(token, 0)));
  }
  PT_HOST_DEVICE MassSums sums(const NodeDistributions& distributions, double c) {
    if (c == 0.0) return {distributions.total};
    const int64_t rejected = drafted_child(walk_, ++num_rejected_);
    if (rejected < 0 || drafted_child(walk_, num_rejected_ + 1) < 0) return {distributions.total, 1.0};
    return {p_.left[rejected].mass, p_.left[rejected].draft_mass};
  }
  PT_HOST_DEVICE int32_t draw(const NodeDistributions&, double c, double u) {
    const bool any = tried_.size > 0;
    p_.ends[b_] = {walk_.row(), c, u, !any ? 0 : p_.ratio.law == DraftLaw::kOneHot ? kMaxTreeNodes : num_rejected_};
    return -1;
  }

  PT_HOST_DEVICE void mark_tried(int32_t token) { tried_.insert(token); }
  PT_HOST_DEVICE void clear_tried() { tried_.size = 0; }
  PT_HOST_DEVICE bool is_tried(int32_t token) const { return tried_.contains(token); }

 private:
  // Returns the target's mass (shift 32) or the draft's (shift 0) of a child's token.
  PT_HOST_DEVICE float mass_at(int32_t token, int shift) {
    const int32_t child = walk_.child_with(token);
    if (child < 0) return 0.0f;
    const uint64_t word = static_cast<uint64_t>(p_.masses[(walk_.rows.begin + child) * kResidualWords + 1]);
    return ScalarMath::bits<float>(static_cast<uint32_t>(word >> shift));
  }

  const ShardWalkParams& p_;
  int64_t b_;
  TreeWalk walk_;
  NodeDistributions distributions_;
  TriedTokens tried_{};
  int64_t num_rejected_ = 0;
};

PT_HOST_DEVICE int64_t num_items(const ShardWalkParams& p) { return p.ratio.verify.batch; }

PT_HOST_DEVICE void walk_tree(const ShardWalkParams& p, int64_t b) {
  TreeWalk walk(p.ratio.verify, b);
  for (int32_t node = 0; node < walk.num_nodes; ++node) {
    walk.node = node;
    ShardRow& row = p.rows[walk.row()];
    apply_sums(p.ratio.law, p.received + walk.row() * kResidualWords, p.index, row);
    keep_left(p.left, walk, p.index, row);
  }
  ReducedRows rows(p, b);
  walk_rejection(p.ratio, b, rows);
  // A cut path ends with an accepted token, or has none: no draw.
  const VerifyParams& verify = p.ratio.verify;
  const int64_t last = b * (verify.max_depth + 1) + verify.num_accepted[b];
  if (verify.accept_index[last] < 0 || verify.tokens[last] >= 0) p.ends[b].row = -1;
}

// This rank's share of the draw at a path's end.
struct ShardDraw {
  bool owns;
  uint64_t bound;  // draws the first token whose cumulative units exceed it
  double c;
  int64_t num_tried;
};

PT_HOST_DEVICE ShardDraw draw_of_shard(const ShardResidualParams& p, int64_t b) {
  const ShardEnd& end = p.ends[b];
  const auto units = [&](int32_t rank, int which) {
    return static_cast<uint64_t>(p.received[(rank * p.ratio.verify.batch + b) * kResidualWords + which]);
  };
  uint64_t totals[kResidualWords]{};
  for (int32_t rank = 0; rank < p.num_ranks; ++rank) {
    for (int which = 0; which < kResidualWords; ++which) totals[which] += units(rank, which);
  }
  // If nothing is left, draws from the target's distribution.
  const double left =
      mass_left(Residual{end.c, 0.0, 0.0}, static_cast<double>(totals[0]), static_cast<double>(totals[1]));
  const bool from_target = !(left > 0.0);
  const int which = from_target ? 1 : 0;
  const uint64_t total = from_target ? totals[1] : totals[0];  // an index would move the array to memory
  if (total == 0) return {};
  const double coin = end.coin > 0.0 ? min_of(end.coin, 1.0) : 0.0;
  const uint64_t drawn = min_of(static_cast<uint64_t>(coin * static_cast<double>(total)), total - 1);
  uint64_t before = 0;
  for (int32_t rank = 0; rank < p.rank; ++rank) before += units(rank, which);
  const bool owns = drawn >= before && drawn - before < units(p.rank, which);
  return {owns, drawn - before, from_target ? 0.0 : end.c, from_target ? 0 : end.num_tried};
}

// Marks tokens of the first `count` drafting children in this rank's columns.
PT_HOST_DEVICE void mark_tried(const ShardRows& shard, TreeWalk& walk, int64_t count, TriedTokens& tried) {
  for (int32_t child = walk.first_child(); child >= 0 && count > 0; child = walk.next_sibling(child)) {
    const int32_t token = draft_token_at(walk.p, walk.rows.begin + child);
    if (token < 0) continue;
    --count;
    const int64_t column = token - shard.first_token;
    if (column >= 0 && column < shard.logits.vocab) tried.insert(column);
  }
}

// Packs masses; only the rank that has the token writes them.
PT_HOST_DEVICE int64_t word_of_masses(float target, float draft) {
  return static_cast<int64_t>(uint64_t{ScalarMath::bits<uint32_t>(target)} << 32 | ScalarMath::bits<uint32_t>(draft));
}

// A rank's sum at a row, if asked.
struct ShardQuestion {
  bool asked;
  double c;
  int64_t num_tried;
};

// Rejects child `index` of row n if another child would be judged after it.
PT_HOST_DEVICE ShardQuestion reject_child(const ShardResidualParams& p, TreeWalk& walk, ShardRow& row) {
  row.asked = row.left.mass > 0.0 && drafted_child(walk, p.index + 1) >= 0;
  if (!row.asked) return {};
  subtract_draft_mass(row.left, 1.0);
  return {true, row.left.c, p.ratio.law == DraftLaw::kSwor ? p.index : 0};
}

}  // namespace pagedtree
