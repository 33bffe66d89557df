// What the rules that weigh the target's law against the draft's have in common. They are written once, as templates
// over a backend's `Rows`, which reads the rows and scans them. On CUDA all threads of a CTA, or of several, run a walk
// together: what the walk computes is the same in each, and one of them writes.
//
// - leads(): whether this thread writes what comes out
// - leads_cta(): whether it writes what laws() and accepted_nodes() hold, which each CTA has for itself
// - sync(): all have read what comes before, and can read what was written
// - laws(): room for the NodeLaws at one node; accepted_nodes(): for verify_typical
// - open(p, b, row, with_draft, laws): finds the laws at a node; no token is tried, sums(laws, 0) is done
// - target(laws, token), draft(laws, token): the mass under the target, the probability under the draft
// - residual(laws, c, token): max(target - c * draft, 0)
// - sums(laws, c): LawSums over all tokens, in the order of LawTable
// - draw(laws, c, u): the first token whose cumulative residual exceeds u times the whole, as sums(laws, c) has just
//   added it
// - entropy(laws): of the target, in nats
// - mark_tried(token), clear_tried(), is_tried(token)
//
// Tried tokens count as nothing in sums and draws: where children were drawn, those that the draft's law gives a
// probability (nothing is left of them, see Residual); under kOneHot all of them.
#pragma once

#include "core/sampling.h"
#include "core/verify/tree_walk.h"

namespace pagedtree {

struct NodeLaws {
  RowLaw target;
  double total;  // of the target's masses
  RowLaw draft;  // row.logits null: of no mass
  bool draft_is_probs;
  double draft_unit;  // a draft's probability is its mass times this
};

struct LawSums {
  double residual = 0.0;
  double draft = 0.0;  // probability of what is not tried; not summed where c is 0
};

// A draft's probabilities times this are taken from the target's masses.
PT_HOST_DEVICE float draft_factor(const NodeLaws& laws, double c) {
  return static_cast<float>(min_of(c * laws.draft_unit, static_cast<double>(kMaxFloat)));
}

template <typename M>
PT_HOST_DEVICE typename M::Float residual_mass(typename M::Float target, typename M::Float factor,
                                               typename M::Float draft) {
  const auto left = M::fma(-factor, draft, target);
  return M::select(left > 0.0f, left, M::splat(0.0f));
}

// The row of the law that the children at `row` were drawn from; of no logits where it is outside.
PT_HOST_DEVICE LogitRow draft_row_of(const RatioParams& p, int64_t row) {
  const int64_t at = p.draft_rows.data == nullptr ? row : token_at(p.draft_rows, row);
  return at >= 0 && at < p.draft.num_rows ? logit_row(p.draft, at) : LogitRow{};
}

// Of a block's masses, token t goes to the partial sum t % kLawSums; these are then added in halves, i and i + half,
// for half = kLawSums / 2 down to 1. All in floats, which is as exact as the masses are.
constexpr int kLawBlock = 1024;
constexpr int kLawSums = 128;
constexpr int kLawRadix = 32;
constexpr int kMaxLawBlocks = kMaxVocab / kLawBlock;
constexpr int kMaxLawGroups = kMaxLawBlocks / kLawRadix;

// The masses of a block's tokens.
struct LawBlock {
  float target[kLawBlock];
  float draft[kLawBlock];
};

template <typename T>
PT_HOST_DEVICE double sum_in_order(const T* masses, int64_t count) {
  double sum = 0.0;
  for (int64_t i = 0; i < count; ++i) sum += static_cast<double>(masses[i]);
  return sum;
}

// Looks for the first of some masses with which their sum exceeds `bound`, one level of sums after the other.
struct MassSearch {
  double bound;
  double before = 0.0;  // the sum of what lies in front of the mass that was picked last

  // The index of that mass, of the last above zero if there is none: rounding may leave a sum below that of its parts.
  template <typename T>
  PT_HOST_DEVICE int pick(const T* masses, int64_t count) {
    int picked = 0;
    double sum = before;
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

// The sums of a row's blocks, and, added in order, of groups of kLawRadix blocks.
struct LawTable {
  float blocks[kMaxLawBlocks];
  double groups[kMaxLawGroups];

  static PT_HOST_DEVICE int64_t num_blocks(int64_t vocab) { return ceil_div<int64_t>(vocab, kLawBlock); }
  static PT_HOST_DEVICE int64_t num_groups(int64_t vocab) { return ceil_div<int64_t>(num_blocks(vocab), kLawRadix); }
  static PT_HOST_DEVICE int64_t blocks_of_group(int64_t vocab, int64_t group) {
    return min_of<int64_t>(num_blocks(vocab) - group * kLawRadix, kLawRadix);
  }

  PT_HOST_DEVICE void add_group(int64_t vocab, int64_t group) {
    groups[group] = sum_in_order(blocks + group * kLawRadix, blocks_of_group(vocab, group));
  }
  PT_HOST_DEVICE double total(int64_t vocab) const { return sum_in_order(groups, num_groups(vocab)); }

  PT_HOST_DEVICE int64_t pick_block(int64_t vocab, MassSearch& search) const {
    const int64_t group = search.pick(groups, num_groups(vocab));
    return group * kLawRadix + search.pick(blocks + group * kLawRadix, blocks_of_group(vocab, group));
  }
};

// In nats, of a law of `total` mass whose masses m have the sum `terms` of m log m.
PT_HOST_DEVICE double entropy_of(double total, double terms) {
  return static_cast<double>(log_exact<ScalarMath>(static_cast<float>(total))) - terms / total;
}

// A set of at most kMaxTreeNodes tokens, ascending.
struct TriedTokens {
  int32_t* ids;
  int32_t size = 0;

  // Where the first token that is not below `token` stands.
  PT_HOST_DEVICE int32_t lower_bound(int64_t token) const {
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
  PT_HOST_DEVICE bool contains(int64_t token) const {
    const int32_t at = lower_bound(token);
    return at < size && ids[at] == token;
  }
  PT_HOST_DEVICE void insert(int64_t token) {
    if (contains(token) || size == kMaxTreeNodes) return;
    const int32_t at = lower_bound(token);
    for (int32_t i = size; i > at; --i) ids[i] = ids[i - 1];
    ids[at] = static_cast<int32_t>(token);
    ++size;
  }
};

// Position of the root of sequence b plus `depth`, wrapping as integers do.
PT_HOST_DEVICE int64_t position_at(const RatioParams& p, int64_t b, int32_t depth) {
  return static_cast<int64_t>(static_cast<uint64_t>(p.verify.positions[b]) + static_cast<uint64_t>(int64_t{depth}));
}

// The coin of entry `row`; drawn at `position`, number `index`, where none is given.
PT_HOST_DEVICE double coin_of(const RatioParams& p, int64_t b, int64_t row, int64_t position, int32_t index) {
  if (p.coins != nullptr) return static_cast<double>(p.coins[row]);
  const uint64_t seed = static_cast<uint64_t>(p.verify.seeds[b]);
  return uniform_of(seed, position, static_cast<uint32_t>(index), RandomUse::kCoin);
}

PT_HOST_DEVICE double final_coin_of(const RatioParams& p, int64_t b, int64_t position) {
  if (p.final_coins != nullptr) return static_cast<double>(p.final_coins[b]);
  return uniform_of(static_cast<uint64_t>(p.verify.seeds[b]), position, 0, RandomUse::kFinalDraw);
}

// What rejections have left of the target's law at a node: max(target - c * draft, 0), `mass` in all.
//
// Rejecting takes the draft's law away from what is left, both normalised: max(r / mass - q / draft_mass, 0), which is
// proportional to max(r - (mass / draft_mass) q, 0). As r is itself max(m - c q, 0), that is max(m - c' q, 0) with
// c' = c + mass / draft_mass: however many rejections, one coefficient tells it all. Drawing without replacement
// changes `draft_mass` only, since a rejected token that the draft could draw is left with nothing.
struct Residual {
  double c;
  double mass;  // kNotSummed, or what rows.sums() gave last
  double draft_mass;
};
constexpr double kNotSummed = -1.0;

// Sums of differences of floats: less than this part of the target's law is what rounding leaves of nothing.
constexpr double kRounding = 1e-6;

// `mass` is the sum of the residual at `left.c`, of a law of `total` mass.
PT_HOST_DEVICE double mass_left(const Residual& left, double mass, double total) {
  return left.c == 0.0 || mass > kRounding * total ? mass : 0.0;
}

// `weight` is 1 where the law as a whole is what is taken from.
PT_HOST_DEVICE void take_draft(Residual& left, double weight) {
  if (left.draft_mass > 0.0) left.c += left.mass / (weight * left.draft_mass);
}

// The child's token is rejected.
template <typename Rows>
PT_HOST_DEVICE void subtract_draft(const RatioParams& p, Rows& rows, const NodeLaws& laws, int64_t token, double weight,
                                   Residual& left) {
  take_draft(left, weight);
  if (p.law == DraftLaw::kSwor) rows.mark_tried(token);
  const LawSums sums = rows.sums(laws, left.c);
  left.mass = mass_left(left, sums.residual, laws.total);
  if (p.law == DraftLaw::kSwor) left.draft_mass = sums.draft;
}

// Draws from what is left, from the target's own law where nothing is.
template <typename Rows>
PT_HOST_DEVICE int64_t draw_rest(const RatioParams& p, int64_t b, int64_t position, Rows& rows, const NodeLaws& laws,
                                 Residual left) {
  for (int pass = 0; pass < 2 && !(left.mass > 0.0); ++pass) {
    if (left.mass != kNotSummed) {
      rows.clear_tried();
      left.c = 0.0;
    }
    left.mass = mass_left(left, rows.sums(laws, left.c).residual, laws.total);
  }
  return rows.draw(laws, left.c, final_coin_of(p, b, position));
}

}  // namespace pagedtree
