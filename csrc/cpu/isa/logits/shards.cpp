// Scans of a rank's columns, see core/verify/shards.h and shard_distributions.h.
#include "cpu/isa.h"
#include "cpu/isa/logits/masses.h"
#include "cpu/isa/logits/options.h"
#include "cpu/isa/logits/race.h"

namespace pagedtree::cpu::PAGEDTREE_ISA {
namespace {

// Counts the next digit of the view's tokens whose keys begin with the known digits.
template <typename T>
inline void tabulate(const LogitRow& row, const ShardView& view, uint32_t found, int digit, int64_t* bins) {
  const int shift = 32 - kShardDigitBits * (digit + 1);
  BlockReader<T> logits(row);
  for (int64_t t = 0; t < row.vocab; t += kLanes) {
    if (t % kPeakBlock == 0) logits.open(t, view.min_logit);
    const vfloat logit = logits(t);
    const vfloat x = view.scale(logit);
    const vuint digits = order_key<VectorMath>(logit) >> shift;
    vint seen = (logit > splat(-kInfinity)) & (logit >= splat(view.min_logit)) & (x >= splat(view.min_x));
    if (digit > 0) seen &= (digits >> kShardDigitBits) == splat(found);
    uint32_t lanes = lane_bits(seen);
    if (lanes == 0) continue;
    const vuint weight = view.by_mass ? weight_of<VectorMath>(x) : splat(1u);
    for (; lanes != 0; lanes &= lanes - 1) {
      const int i = __builtin_ctz(lanes);
      bins[digits[i] % kShardBins] += weight[i];
    }
  }
}

inline int64_t race_word(const ShardStepParams& p, const RowDistribution& distribution, int64_t b, int32_t depth) {
  const int64_t first = p.shard.first_token;
  const uint64_t seed = static_cast<uint64_t>(p.seeds[b]);
  const uint64_t position = static_cast<uint64_t>(integer_at(p.positions, b)) + static_cast<uint64_t>(int64_t{depth});
  const Winner best = with_logits(distribution, [&]<typename T>() {
    return race<T>(distribution.row, distribution.scale, distribution.filter, nullptr, seed,
                   static_cast<int64_t>(position), first);
  });
  return ranked_word(best.score, first + best.token);
}

struct Units {
  vuint high{}, low{};

  void add(vfloat mass) {
    vuint more_high, more_low;
    units_of<VectorMath>(mass, more_high, more_low);
    high += more_high;
    low += more_low;
  }
  // Sums at most one block, or a lane overflows.
  uint64_t whole() const {
    uint64_t sum = 0;
    for (int i = 0; i < kLanes; ++i) sum += (uint64_t{high[i]} << kHalfUnits) + low[i];
    return sum;
  }
};

class ShardDistributions {
 public:
  ShardDistributions(const ShardResidualParams& p, int64_t n, int64_t b, RowScratch& scratch)
      : p_(p), n_(n), b_(b), scratch_(scratch), block_(scratch.block), tried_{scratch.tried} {
    distributions_.target =
        shard_distribution(p.shard, logit_row(p.shard.logits, n), p.shard.rows[n], sampling_of(p.shard.sampling, b));
    distributions_.draft_is_probs = true;
    distributions_.draft_unit = 1.0;
    if (p.ratio.law != DraftLaw::kOneHot) distributions_.draft.row = draft_row_of(p.ratio, n);
  }

  const NodeDistributions& distributions() const { return distributions_; }

  // Sums the residual at c, and the draft. The first `num_tried` children count as tried.
  void sum(TreeWalk& walk, double c, int64_t num_tried, int64_t* words) {
    start_scan(walk, c, num_tried);
    uint64_t left = 0, drafts = 0;
    for (int64_t begin = 0; begin < distributions_.target.row.vocab; begin += kMassBlock) {
      Units of_left, of_drafts;
      const int count = load(begin);
      for (int i = 0; i < count; i += kLanes) {
        of_left.add(PAGEDTREE_ISA::load(block_.target + i));
        if (with_draft_) of_drafts.add(at_most_one<VectorMath>(PAGEDTREE_ISA::load(block_.draft + i)));
      }
      left += of_left.whole();
      drafts += of_drafts.whole();
    }
    words[0] = static_cast<int64_t>(left);
    words[1] = static_cast<int64_t>(drafts);
  }

  // Returns the first token whose cumulative residual units exceed `bound`.
  int64_t draw(TreeWalk& walk, double c, int64_t num_tried, uint64_t bound) {
    start_scan(walk, c, num_tried);
    for (int64_t begin = 0; begin < distributions_.target.row.vocab; begin += kMassBlock) {
      const int count = load(begin);
      for (int i = 0; i < count; ++i) {
        const uint64_t units = units_of(block_.target[i]);
        if (bound < units) return begin + i;
        bound -= units;
      }
    }
    return distributions_.target.row.vocab - 1;  // unreachable: the bound is below the sum
  }

 private:
  void start_scan(TreeWalk& walk, double c, int64_t num_tried) {
    if (p_.shard.options.used) {
      const RowOptions options = shard_options(p_.shard, n_, b_, p_.shard.rows[n_], false);
      distributions_.target.row = adjust_row(options, logit_row(p_.shard.logits, n_), *scratch_.adjusted);
    }
    tried_.size = 0;
    mark_tried(p_.shard, walk, num_tried, tried_);
    with_draft_ = c != 0.0 && distributions_.draft.row.logits != nullptr;
    factor_ = with_draft_ ? draft_factor(distributions_, c) : 0.0f;
  }

  int load(int64_t begin) {
    const int count =
        load_block(distributions_, begin, true, with_draft_, tried_, p_.ratio.law != DraftLaw::kOneHot, block_);
    for (int i = 0; with_draft_ && i < count; i += kLanes) {
      store(block_.target + i, residuals_at(block_, splat(factor_), i));
    }
    return count;
  }

  const ShardResidualParams& p_;
  int64_t n_, b_;
  RowScratch& scratch_;
  NodeDistributions distributions_{};
  MassBlock& block_;
  TriedTokens tried_;
  bool with_draft_ = false;
  float factor_ = 0.0f;
};

// Publishes masses of the children's tokens in this rank's columns.
inline void publish_drafts(const ShardResidualParams& p, TreeWalk& walk, const NodeDistributions& distributions) {
  for (int32_t child = walk.first_child(); child >= 0; child = walk.next_sibling(child)) {
    const int64_t row = walk.rows.begin + child, column = draft_token_at(walk.p, row) - p.shard.first_token;
    if (column < 0 || column >= p.shard.logits.vocab) continue;
    p.words[row * kResidualWords + 1] =
        word_of_masses(mass_at(distributions.target, column), draft_mass(distributions, column));
  }
}

}  // namespace

void step_shard(const ShardStepParams& p, int64_t n, RowScratch& scratch) {
  const int64_t b = sequence_of(p.shard, n);
  const int32_t depth = b < 0 ? -1 : depth_of(p, n, b);
  if (depth < 0) return;  // no walk visits this row
  const Sampling sampling = sampling_of(p.shard.sampling, b);
  ShardRow& row = p.shard.rows[n];
  int64_t* words = p.words + n * words_of(p.round);

  const int64_t kept_ties = apply(p, n, sampling, row);
  begin_round(p, sampling, row);
  LogitRow logits = logit_row(p.shard.logits, n);
  if (p.shard.options.used && reads_row(p, sampling, row, kept_ties)) {
    logits = adjust_row(shard_options(p.shard, n, b, row, p.round == ShardRound::kLeft), logits, *scratch.adjusted);
  }
  with_logits(logits.dtype, [&]<typename T>() {
    if (kept_ties >= 0) row.filter.tie_end = ties_of<T>(logits, row.filter.min_logit, kept_ties).end;
    switch (p.round) {
      case ShardRound::kNone:
        break;
      case ShardRound::kLeft:
        words[0] = find_peak<T>(logits, scratch.filter.peaks).logit > -kInfinity;
        break;
      case ShardRound::kPeak: {
        const Peak peak = find_peak<T>(logits, scratch.filter.peaks);
        words[0] = ranked_word(peak.logit, p.shard.first_token + peak.token);
        words[1] = peak.has_nan;
        break;
      }
      case ShardRound::kCount:
      case ShardRound::kMass:
        if (row.searching) tabulate<T>(logits, view_of(row, sampling, p.round), row.key, p.digit, words);
        break;
      case ShardRound::kTies:
        if (row.ties != 0) words[0] = ties_of<T>(logits, row.filter.min_logit, INT64_MAX).count;
        break;
      case ShardRound::kRace:
        words[0] = sampling.temperature == 0.0f
                       ? ranked_word(0.0f, row.peak.token)
                       : race_word(p, shard_distribution(p.shard, logits, row, sampling), b, depth);
        break;
    }
  });
}

void reduce_shard(const ShardResidualParams& p, int64_t item, RowScratch& scratch) {
  const auto [n, b] = item_of(p, item);
  if (b < 0) return;
  TreeWalk walk(p.ratio.verify, b);
  if (!stand_at(walk, n)) return;
  ShardRow& row = p.shard.rows[n];
  int64_t* words = p.words + item * (p.round == ResidualRound::kDraw ? 1 : kResidualWords);
  ShardDistributions shard(p, n, b, scratch);
  switch (p.round) {
    case ResidualRound::kMasses: {
      int64_t sums[kResidualWords];
      shard.sum(walk, 0.0, 0, sums);
      words[0] = row.own_units = sums[0];
      publish_drafts(p, walk, shard.distributions());
      break;
    }
    case ResidualRound::kResidual: {
      apply_sums(p.ratio.law, p.received + n * kResidualWords, p.index - 1, row);
      keep_left(p.left, walk, p.index - 1, row);
      const ShardQuestion question = reject_child(p, walk, row);
      if (question.asked) shard.sum(walk, question.c, question.num_tried, words);
      break;
    }
    case ResidualRound::kSums:
      shard.sum(walk, p.ends[b].c, p.ends[b].num_tried, words);
      words[1] = row.own_units;
      break;
    case ResidualRound::kDraw: {
      const ShardDraw draw = draw_of_shard(p, b);
      if (draw.owns) words[0] = p.shard.first_token + shard.draw(walk, draw.c, draw.num_tried, draw.bound);
      break;
    }
  }
}

}  // namespace pagedtree::cpu::PAGEDTREE_ISA
