// What the rules that weigh the target's distribution against the draft's have in common. They are written once, as
// templates over a backend's `Rows`, which reads the rows and scans them. On CUDA all threads of one or more CTAs run a
// walk together: all of them compute the same, and one of them writes.
//
// - leads(): whether this thread writes the results
// - leads_cta(): whether this thread writes distributions() and accepted_nodes(), of which each CTA has its own
// - sync(): waits until all threads have read what was written before, and may read what is written now
// - begin(walk), finish(walk): make the walk ready, and write its end
// - distributions(): room for the NodeDistributions at one node; accepted_nodes(): for verify_typical
// - open(p, b, row, with_draft, d): finds the distributions d at a node; no token is tried, as after sums(d, 0)
// - open_again(p, b, row): makes the row of known distributions readable again, after other rows were open
// - target(d, token), draft(d, token): the mass under the target, the probability under the draft
// - residual(d, c, token): max(target - c * draft, 0)
// - sums(d, c): MassSums over all tokens, in the order of MassTable
// - draw(d, c, u): the first token whose cumulative residual exceeds u times the whole; sums(d, c) must come before
// - entropy(d): entropy of the target's distribution, in nats
// - mark_tried(token), clear_tried(), is_tried(token)
//
// Tried tokens count as 0 in sums and draws. Where children were drawn, this holds for tokens with a probability under
// the draft's distribution (nothing is left of them, see Residual); under kOneHot, for all tried tokens.
#pragma once

#include "core/sampling.h"
#include "core/verify/tree_walk.h"

namespace pagedtree {

// How a node's children were chosen: drawn independently, drawn without replacement, or not drawn at all.
enum class DraftLaw : int32_t { kIid, kSwor, kOneHot };

// What a rule needs: trees that are chains, children that were drawn, RatioParams::frames.
enum RuleNeeds { kNoNeeds = 0, kChains = 1, kDrawn = 2, kFrames = 4 };

struct TraversalFrame;  // core/verify/traversal.h

// Verification that weighs the target's distribution against the draft's.
struct RatioParams {
  VerifyParams verify;
  LogitsParams draft;             // [M, V] the distributions that children were drawn from; data null under kOneHot
  SamplingParams draft_sampling;  // of B; temperature null: `draft` holds probabilities, else logits
  Integers draft_rows;            // [N] the row of `draft` for a node's children, data null: row n
  const float* coins;             // [N] or null
  const float* final_coins;       // [B] or null
  TraversalFrame* frames;         // [B, max_depth + 1] scratch, verify_traversal's
  DraftLaw law;
  float epsilon, delta;  // verify_typical's
};

struct NodeDistributions {
  RowDistribution target;
  double total;           // of the target's masses
  RowDistribution draft;  // row.logits null: no mass
  bool draft_is_probs;
  double draft_unit;      // a draft's probability is its mass times this
  int64_t root_position;  // of the sequence; here because walks on a GPU lack the registers to read it again
};

struct MassSums {
  double residual = 0.0;
  double draft = 0.0;  // probability of all tokens but the tried; not summed if c is 0
};

// The draft's masses times this factor are subtracted from the target's masses.
PT_HOST_DEVICE float draft_factor(const NodeDistributions& distributions, double c) {
  return static_cast<float>(min_of(c * distributions.draft_unit, static_cast<double>(kMaxFloat)));
}

template <typename M>
PT_HOST_DEVICE typename M::Float residual_mass(typename M::Float target, typename M::Float factor,
                                               typename M::Float draft) {
  const auto left = M::fma(-factor, draft, target);
  return M::select(left > 0.0f, left, M::splat(0.0f));
}

// The row of `draft` with the distribution that the children at `row` were drawn from; -1 if it is out of range.
PT_HOST_DEVICE int64_t draft_index_of(const RatioParams& p, int64_t row) {
  const int64_t at = p.draft_rows.data == nullptr ? row : integer_at(p.draft_rows, row);
  return at >= 0 && at < p.draft.num_rows ? at : -1;
}
PT_HOST_DEVICE LogitRow draft_row_of(const RatioParams& p, int64_t row) {
  const int64_t at = draft_index_of(p, row);
  return at >= 0 ? logit_row(p.draft, at) : LogitRow{};
}

// How the masses of a block are added: token t goes to the partial sum t % kMassSums; then partial sums i and i + half
// are added, for half = kMassSums / 2 down to 1. Floats suffice, because the masses are not more exact.
constexpr int kMassBlock = 1024;
constexpr int kMassSums = 128;
constexpr int kMassRadix = 32;
constexpr int kMaxMassBlocks = kMaxVocab / kMassBlock;
constexpr int kMaxMassGroups = kMaxMassBlocks / kMassRadix;

// The masses of a block's tokens.
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

// Finds the first mass at which the cumulative sum exceeds `bound`, going down one level of sums after the other.
struct MassSearch {
  double bound;
  double before = 0.0;  // the sum of the masses before the one that was picked last

  // The index of that mass. If there is none, since rounding may make a sum less than its parts, of the last above 0.
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

// The sums of a row's blocks, and of groups of kMassRadix blocks, added in order.
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

// The entropy, in nats, of masses m whose sum is `total` and whose sum of m log m is `terms`.
PT_HOST_DEVICE double entropy_of(double total, double terms) {
  return static_cast<double>(log_exact<ScalarMath>(static_cast<float>(total))) - terms / total;
}

// A set of at most kMaxTreeNodes tokens, ascending.
struct TriedTokens {
  int32_t* ids;
  int32_t size = 0;

  // The index of the first token that is not below `token`.
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

// The position of the root of sequence b; 0 where nothing is drawn.
PT_HOST_DEVICE int64_t root_position_of(const VerifyParams& p, int64_t b) {
  return p.positions.data == nullptr ? 0 : integer_at(p.positions, b);
}

// The position at `depth` below the root, wrapping as integers do.
PT_HOST_DEVICE int64_t position_at(int64_t root, int32_t depth) {
  return static_cast<int64_t>(static_cast<uint64_t>(root) + static_cast<uint64_t>(int64_t{depth}));
}

// The caller's coin for `row`; without coins of the caller, number `index` of those drawn at `position`.
PT_HOST_DEVICE double coin_of(const RatioParams& p, int64_t b, int64_t row, int64_t position, int32_t index) {
  if (p.coins != nullptr) return static_cast<double>(p.coins[row]);
  const uint64_t seed = static_cast<uint64_t>(p.verify.seeds[b]);
  return uniform_of(seed, position, static_cast<uint32_t>(index), RandomUse::kCoin);
}

PT_HOST_DEVICE double final_coin_of(const RatioParams& p, int64_t b, int64_t position) {
  if (p.final_coins != nullptr) return static_cast<double>(p.final_coins[b]);
  return uniform_of(static_cast<uint64_t>(p.verify.seeds[b]), position, 0, RandomUse::kFinalDraw);
}

// What rejections have left of the target's distribution at a node: max(target - c * draft, 0), `mass` in all.
//
// A rejection subtracts the draft's distribution from what is left, both normalised: max(r / mass - q / draft_mass, 0),
// which is proportional to max(r - (mass / draft_mass) q, 0). As r is itself max(m - c q, 0), that is max(m - c' q, 0)
// with c' = c + mass / draft_mass: one coefficient describes any number of rejections. Drawing without replacement
// changes only `draft_mass`, since nothing is left of a rejected token that the draft could draw.
struct Residual {
  double c;
  double mass;  // kNotSummed, or what rows.sums() gave last
  double draft_mass;
};
constexpr double kNotSummed = -1.0;

// A residual below this part of the target's mass counts as 0: rounding may leave that much of nothing.
constexpr double kRounding = 1e-6;

// `mass` is the sum of the residual at `left.c`, `total` that of the target's distribution.
PT_HOST_DEVICE double mass_left(const Residual& left, double mass, double total) {
  return left.c == 0.0 || mass > kRounding * total ? mass : 0.0;
}

// `weight` is the part of the target's distribution that is subtracted from, 1 for all of it.
PT_HOST_DEVICE void take_draft(Residual& left, double weight) {
  if (left.draft_mass > 0.0) left.c += left.mass / (weight * left.draft_mass);
}

// Rejects a child, which drafted `token`.
template <typename Rows>
PT_HOST_DEVICE void subtract_draft(const RatioParams& p, Rows& rows, const NodeDistributions& distributions,
                                   int32_t token, double weight, Residual& left) {
  take_draft(left, weight);
  if (p.law == DraftLaw::kSwor) rows.mark_tried(token);
  const MassSums sums = rows.sums(distributions, left.c);
  left.mass = mass_left(left, sums.residual, distributions.total);
  if (p.law == DraftLaw::kSwor) left.draft_mass = sums.draft;
}

// Draws from what is left, or from the target's own distribution if nothing is left.
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
