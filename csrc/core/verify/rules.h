// Common parts of the rules that compare target and draft distributions: templates over a backend's `Rows`, which scans
// rows. On CUDA all threads of one or more CTAs execute a walk: all compute the same, one writes.
//
// - leads(): true for the thread that writes results
// - leads_cta(): true for the thread that writes its CTA's distributions() and accepted_nodes()
// - sync(): orders their reads and writes between threads
// - begin(walk), finish(walk): prepare the walk, and write its end
// - distributions(): of one node; accepted_nodes(): for verify_typical
// - open(p, b, row, with_draft, d): computes a node's distributions d; clears tried tokens, as after sums(d, 0)
// - open_again(p, b, row): makes a row with known distributions readable again
// - target(d, token): mass; draft(d, token): probability
// - residual(d, c, token): max(target - c * draft, 0)
// - sums(d, c): MassSums over all tokens, in the order of MassTable
// - draw(d, c, u): first token whose cumulative residual exceeds u times the total; requires sums(d, c) before
// - entropy(d): the target's, in nats
// - mark_tried(token), clear_tried(), is_tried(token)
//
// Tried tokens count as 0 in sums and draws: under kOneHot all, else those with a draft probability, which have no
// residual left (see Residual).
#pragma once

#include "core/sampling.h"
#include "core/tree_walk.h"

namespace pagedtree {

enum class DraftLaw : int32_t { kIid, kSwor, kOneHot };

// What a rule needs: trees that are chains, children that were drawn, RatioParams::frames.
enum RuleNeeds { kNoNeeds = 0, kChains = 1, kDrawn = 2, kFrames = 4 };

struct TraversalFrame;  // core/verify/traversal.h
struct ListedNode;      // core/verify/block.h

struct RatioParams {
  VerifyParams verify;
  LogitsParams draft;             // [M, V] distributions of the draws; data null under kOneHot
  SamplingParams draft_sampling;  // of B; temperature null: `draft` holds probabilities, else logits
  Integers draft_rows;            // [N] row of `draft` for a node's children; data null: row n
  const float* coins;             // [N] or null
  const float* final_coins;       // [B] or null
  TraversalFrame* frames;         // [B, max_depth + 1] scratch of verify_traversal
  ListedNode* nodes;              // [N] scratch of verify_block on CUDA; nullptr: nodes are read in turn
  DraftLaw law;
  float epsilon, delta;  // of verify_typical
};

struct NodeDistributions {
  RowDistribution target;
  double total;           // sum of the target's masses
  RowDistribution draft;  // row.logits null: no mass
  bool draft_is_probs;
  double draft_unit;      // draft's probability / mass
  int64_t root_position;  // here because GPU walks lack registers to read it again
};

struct MassSums {
  double residual = 0.0;
  double draft = 0.0;  // probability of untried tokens; not summed if c is 0
};

// Returns the factor of the draft's masses in the residual.
PT_HOST_DEVICE float draft_factor(const NodeDistributions& distributions, double c) {
  return static_cast<float>(min_of(c * distributions.draft_unit, static_cast<double>(kMaxFloat)));
}

template <typename M>
PT_HOST_DEVICE typename M::Float residual_mass(typename M::Float target, typename M::Float factor,
                                               typename M::Float draft) {
  const auto left = M::fma(-factor, draft, target);
  return M::select(left > 0.0f, left, M::splat(0.0f));
}

// Returns -1 if out of range.
PT_HOST_DEVICE int64_t draft_index_of(const RatioParams& p, int64_t row) {
  const int64_t at = p.draft_rows.data == nullptr ? row : integer_at(p.draft_rows, row);
  return at >= 0 && at < p.draft.num_rows ? at : -1;
}
PT_HOST_DEVICE LogitRow draft_row_of(const RatioParams& p, int64_t row) {
  const int64_t at = draft_index_of(p, row);
  return at >= 0 ? logit_row(p.draft, at) : LogitRow{};
}

// Addition in a block: token t goes to partial sum t % kMassSums; then partial sums i and i + half are added, for half
// = kMassSums / 2 down to 1. Floats suffice, since masses are no more exact.
constexpr int kMassBlock = 1024;
constexpr int kMassSums = 128;
constexpr int kMassRadix = 32;
constexpr int kMaxMassBlocks = kMaxVocab / kMassBlock;
constexpr int kMaxMassGroups = kMaxMassBlocks / kMassRadix;

struct MassBlock {
  float target[kMassBlock];
  float draft[kMassBlock];
};

template <typename T>
PT_HOST_DEVICE double sum_in_order(const T* masses, int32_t count) {
  double sum = 0.0;
  PT_NO_UNROLL
  for (int32_t i = 0; i < count; ++i) sum += static_cast<double>(masses[i]);
  return sum;
}

// Finds the first mass at which the cumulative sum exceeds `bound`, level by level.
struct MassSearch {
  double bound;
  double before = 0.0;  // sum before the last picked mass

  // Returns its index; the last positive mass if rounding made the sum smaller than its parts.
  template <typename T>
  PT_HOST_DEVICE int pick(const T* masses, int32_t count) {
    int picked = 0;
    double sum = before;
    PT_NO_UNROLL
    for (int i = 0; i < count; ++i) {
      const double mass = static_cast<double>(masses[i]);
      if (!(mass > 0.0)) continue;
      picked = i;
      before = sum;
      sum += mass;
      if (sum > bound) break;
    }
    return picked;
  }
};

// Sums of a row's blocks and of groups of kMassRadix blocks, added in order.
struct MassTable {
  float blocks[kMaxMassBlocks];
  double groups[kMaxMassGroups];

  static PT_HOST_DEVICE int32_t num_blocks(int32_t vocab) { return ceil_div(vocab, kMassBlock); }
  static PT_HOST_DEVICE int32_t num_groups(int32_t vocab) { return ceil_div(num_blocks(vocab), kMassRadix); }
  static PT_HOST_DEVICE int32_t blocks_of_group(int32_t vocab, int32_t group) {
    return min_of(num_blocks(vocab) - group * kMassRadix, kMassRadix);
  }

  PT_HOST_DEVICE void add_group(int32_t vocab, int32_t group) {
    groups[group] = sum_in_order(blocks + group * kMassRadix, blocks_of_group(vocab, group));
  }
  PT_HOST_DEVICE double total(int32_t vocab) const { return sum_in_order(groups, num_groups(vocab)); }

  PT_HOST_DEVICE int32_t pick_block(int32_t vocab, MassSearch& search) const {
    const int32_t group = search.pick(groups, num_groups(vocab));
    return group * kMassRadix + search.pick(blocks + group * kMassRadix, blocks_of_group(vocab, group));
  }
};

// Returns the entropy in nats, given total = sum of m and terms = sum of m log m.
PT_HOST_DEVICE double entropy_of(double total, double terms) {
  return static_cast<double>(log_exact<ScalarMath>(static_cast<float>(total))) - terms / total;
}

// Sorted set of at most kMaxTreeNodes tokens.
struct TriedTokens {
  int32_t* ids;
  int32_t size = 0;

  PT_HOST_DEVICE int32_t lower_bound(int32_t token) const {
    int32_t low = 0, high = size;
    while (low < high) {
      const int32_t middle = (low + high) / 2;
      if (ids[middle] < token) {
        low = middle + 1;
      } else {
        high = middle;
      }
    }
    return low;
  }
  PT_HOST_DEVICE bool contains(int32_t token) const {
    const int32_t at = lower_bound(token);
    return at < size && ids[at] == token;
  }
  PT_HOST_DEVICE void insert(int32_t token) {
    const int32_t at = lower_bound(token);
    if ((at < size && ids[at] == token) || size == kMaxTreeNodes) return;
    PT_NO_UNROLL
    for (int32_t i = size; i > at; --i) ids[i] = ids[i - 1];
    ids[at] = token;
    ++size;
  }
};

// Returns 0 without positions, where nothing is drawn.
PT_HOST_DEVICE int64_t root_position_of(const VerifyParams& p, int64_t b) {
  return p.positions.data == nullptr ? 0 : integer_at(p.positions, b);
}

// Wraps around like integers.
PT_HOST_DEVICE int64_t position_at(int64_t root, int32_t depth) {
  return static_cast<int64_t>(static_cast<uint64_t>(root) + static_cast<uint64_t>(int64_t{depth}));
}

// Returns the caller's coin, else coin `index` drawn at `position`.
PT_HOST_DEVICE double coin_of(const RatioParams& p, int64_t b, int64_t row, int64_t position, int32_t index) {
  if (p.coins != nullptr) return static_cast<double>(p.coins[row]);
  const uint64_t seed = static_cast<uint64_t>(p.verify.seeds[b]);
  return uniform_of(seed, position, static_cast<uint32_t>(index), RandomUse::kCoin);
}

PT_HOST_DEVICE double final_coin_of(const RatioParams& p, int64_t b, int64_t position) {
  if (p.final_coins != nullptr) return static_cast<double>(p.final_coins[b]);
  return uniform_of(static_cast<uint64_t>(p.verify.seeds[b]), position, 0, RandomUse::kFinalDraw);
}

// The target's distribution after rejections: max(target - c * draft, 0), with sum `mass`.
//
// A rejection subtracts the normalised draft from the normalised residual: max(r / mass - q / draft_mass, 0),
// proportional to max(r - (mass / draft_mass) q, 0). With r = max(m - c q, 0) this is max(m - c' q, 0), c' = c + mass /
// draft_mass: one coefficient describes all rejections. Drawing without replacement changes only `draft_mass`, since a
// rejected token that the draft could draw has no residual.
struct Residual {
  double c;
  double mass;  // kNotSummed, or the last result of rows.sums()
  double draft_mass;
};
constexpr double kNotSummed = -1.0;

// Smaller parts of the target's mass are rounding errors and count as 0.
constexpr double kRounding = 1e-6;

// Returns `mass`, the sum of the residual at `left.c`, unless it is rounding error.
PT_HOST_DEVICE double mass_left(const Residual& left, double mass, double total) {
  return left.c == 0.0 || mass > kRounding * total ? mass : 0.0;
}

// Subtracts the draft from the part `weight` of the target's distribution.
PT_HOST_DEVICE void subtract_draft_mass(Residual& left, double weight) {
  if (left.draft_mass > 0.0) left.c += left.mass / (weight * left.draft_mass);
}

template <typename Rows>
PT_HOST_DEVICE void subtract_draft(const RatioParams& p, Rows& rows, const NodeDistributions& distributions,
                                   int32_t token, double weight, Residual& left) {
  subtract_draft_mass(left, weight);
  if (p.law == DraftLaw::kSwor) rows.mark_tried(token);
  const MassSums sums = rows.sums(distributions, left.c);
  left.mass = mass_left(left, sums.residual, distributions.total);
  if (p.law == DraftLaw::kSwor) left.draft_mass = sums.draft;
}

// Draws from the residual, or from the target's distribution if nothing is left.
template <typename Rows>
PT_HOST_DEVICE int32_t draw_rest(const RatioParams& p, int64_t b, int64_t position, Rows& rows,
                                 const NodeDistributions& distributions, Residual left) {
  for (int pass = 0; pass < 2 && !(left.mass > 0.0); ++pass) {
    if (left.mass != kNotSummed) {
      rows.clear_tried();
      left.c = 0.0;
    }
    left.mass = mass_left(left, rows.sums(distributions, left.c).residual, distributions.total);
  }
  return rows.draw(distributions, left.c, final_coin_of(p, b, position));
}

}  // namespace pagedtree
