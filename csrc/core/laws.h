// What the rules that weigh the target's law against the draft's have in common. They are written once, as templates
// over a backend's `Rows`, which reads the rows and scans them; on CUDA all threads of a CTA run a walk together.
//
//   bool leads()                                       whether this thread writes what comes out
//   NodeLaws open(p, b, row, with_draft)               the laws at a node; no token is tried; sums(laws, 0) is done
//   double target(laws, token), draft(laws, token)     mass under the target, probability under the draft
//   double residual(laws, c, token)                    max(target - c * draft, 0)
//   LawSums sums(laws, c)                              over all tokens; 1024 at a time, in an order that never changes
//   int64_t draw(laws, c, u)                           the first token whose cumulative residual, as sums(laws, c)
//   added
//                                                      it last, exceeds u times the whole
//   double entropy(laws)                               of the target, in nats
//   void mark_tried(token), clear_tried(), bool is_tried(token)
//   void sync()                                        what the leader wrote can be read
//   AcceptedNodes accepted_nodes(), TraversalFrame* frames()      room for verify_typical and verify_traversal
//
// Tried tokens count as nothing in sums and draws: where children were drawn, those that the draft's law gives a
// probability (nothing is left of them, see Residual); under kOneHot all of them.
#pragma once

#include "core/sampling.h"
#include "core/verify.h"

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
  double mass;
  double draft_mass;
};

// The child's token is rejected; `weight` is 1 where the law as a whole is what is taken from.
template <typename Rows>
PT_HOST_DEVICE void subtract_draft(const RatioParams& p, Rows& rows, const NodeLaws& laws, int64_t token, double weight,
                                   Residual& left) {
  if (left.draft_mass > 0.0) left.c += left.mass / (weight * left.draft_mass);
  if (p.law == DraftLaw::kSwor) rows.mark_tried(token);
  const LawSums sums = rows.sums(laws, left.c);
  left.mass = sums.residual;
  if (p.law == DraftLaw::kSwor) left.draft_mass = sums.draft;
}

// Draws from what is left, from the target's own law where nothing is.
template <typename Rows>
PT_HOST_DEVICE int64_t draw_rest(const RatioParams& p, int64_t b, int64_t position, Rows& rows, const NodeLaws& laws,
                                 const Residual& left) {
  double c = left.c;
  if (!(left.mass > 0.0)) {
    rows.clear_tried();
    c = 0.0;
    rows.sums(laws, c);
  }
  return rows.draw(laws, c, final_coin_of(p, b, position));
}

}  // namespace pagedtree
