// The `Rows` of core/verify/rules.h by sequential scans, the rules over them, and verify_sampled.
#define PT_WITH_WALKS
#include "core/verify/table.h"
#include "cpu/isa.h"
#include "cpu/isa/logits/mass_sums.h"
#include "cpu/isa/logits/options.h"

namespace pagedtree::cpu::PAGEDTREE_ISA {

Draw draw_token(const LogitRow& row, const Sampling& sampling, uint64_t seed, int64_t position, FilterScratch& scratch);

namespace {

class Rows {
 public:
  Rows(const RatioParams& p, RowScratch& scratch) : scratch_(scratch), tried_{scratch.tried}, law_(p.law) {}

  static bool leads() { return true; }
  static bool leads_cta() { return true; }
  static void sync() {}
  static void begin(const TreeWalk&) {}
  static void finish(const TreeWalk& walk) { walk.finish(); }
  NodeDistributions& distributions() { return scratch_.distributions; }

  void open(const RatioParams& p, int64_t b, int64_t row, bool with_draft, NodeDistributions& distributions) {
    clear_tried();
    distributions = {};
    distributions.draft_is_probs = p.draft_sampling.temperature == nullptr;
    distributions.draft_unit = 1.0;
    distributions.root_position = root_position_of(p.verify, b);
    if (with_draft) distributions.draft.row = draft_row_of(p, row);
    if (distributions.draft.row.logits != nullptr && !distributions.draft_is_probs) {
      distributions.draft = distribution_at(distributions.draft.row, sampling_of(p.draft_sampling, b));
      distributions.draft_unit = 1.0 / sum_masses(distributions.draft);
    }
    distributions.target = distribution_at(target_row(p, b, row), sampling_of(p.verify.sampling, b));
    distributions.total = sum_masses(distributions.target);
  }

  void open_again(const RatioParams& p, int64_t b, int64_t row) {
    if (!p.verify.options.used) return;
    target_row(p, b, row);
  }

  double target(const NodeDistributions& distributions, int64_t token) const {
    return static_cast<double>(mass_at(distributions.target, token));
  }

  double draft(const NodeDistributions& distributions, int64_t token) const {
    return static_cast<double>(draft_mass(distributions, token)) * distributions.draft_unit;
  }

  double residual(const NodeDistributions& distributions, double c, int64_t token) const {
    const float mass = mass_at(distributions.target, token);
    if (c == 0.0) return static_cast<double>(mass);
    return static_cast<double>(
        residual_mass<ScalarMath>(mass, draft_factor(distributions, c), draft_mass(distributions, token)));
  }

  MassSums sums(const NodeDistributions& distributions, double c) {
    const bool with_draft = c != 0.0 && distributions.draft.row.logits != nullptr;
    const vfloat factor = splat(with_draft ? draft_factor(distributions, c) : 0.0f);
    const bool sums_draft = with_draft && law_ == DraftLaw::kSwor;  // otherwise the draft's mass is constant
    const float* peaks = peaks_of(distributions.target);
    MassSums all;
    all.residual = sum_blocks(distributions.target.row.vocab, scratch_.residuals, [&](int64_t begin, int64_t block) {
      const bool with_target = may_have_mass(peaks, begin, distributions.target);
      if (!with_target && !sums_draft) return 0.0f;
      const int count = load_block(distributions, begin, with_target, with_draft);
      if (sums_draft) {
        scratch_.drafts.blocks[block] = sum_of(count, [&](int i) { return load(scratch_.block.draft + i); });
      }
      if (!with_target) return 0.0f;
      if (!with_draft) return sum_of(count, [&](int i) { return load(scratch_.block.target + i); });
      return sum_of(count, [&](int i) { return residuals_at(scratch_.block, factor, i); });
    });
    last_sum_ = all.residual;
    if (sums_draft) all.draft = sum_groups(distributions.target.row.vocab, scratch_.drafts) * distributions.draft_unit;
    return all;
  }

  int64_t draw(const NodeDistributions& distributions, double c, double u) {
    MassSearch search{u * last_sum_};
    const int64_t begin = scratch_.residuals.pick_block(distributions.target.row.vocab, search) * kMassBlock;
    const bool with_draft = c != 0.0 && distributions.draft.row.logits != nullptr;
    const int count = load_block(distributions, begin, true, with_draft);
    const vfloat factor = splat(with_draft ? draft_factor(distributions, c) : 0.0f);
    for (int i = 0; with_draft && i < count; i += kLanes) {
      store(scratch_.block.target + i, residuals_at(scratch_.block, factor, i));
    }
    double runs[kMassBlock / kMassRadix];
    for (int i = 0; i < count; i += kMassRadix) {
      runs[i / kMassRadix] = sum_in_order(scratch_.block.target + i, kMassRadix);
    }
    const int run = search.pick(runs, count / kMassRadix) * kMassRadix;
    return begin + run + search.pick(scratch_.block.target + run, kMassRadix);
  }

  double entropy(const NodeDistributions& distributions) {
    const float* peaks = peaks_of(distributions.target);
    const double terms = sum_blocks(distributions.target.row.vocab, scratch_.residuals, [&](int64_t begin, int64_t) {
      if (!may_have_mass(peaks, begin, distributions.target)) return 0.0f;
      return sum_of(load_block(distributions, begin, true, false), [&](int i) {
        const vfloat mass = load(scratch_.block.target + i);
        return select(mass > 0.0f, mass * log_exact<VectorMath>(mass), splat(0.0f));
      });
    });
    return entropy_of(distributions.total, terms);
  }

  AcceptedNodes accepted_nodes() { return {scratch_.parents, scratch_.depths}; }

  void mark_tried(int64_t token) { tried_.insert(token); }
  void clear_tried() { tried_.size = 0; }
  bool is_tried(int64_t token) const { return tried_.contains(token); }

 private:
  LogitRow target_row(const RatioParams& p, int64_t b, int64_t row) {
    if (p.verify.options.used) peaks_row_ = {};  // another row may have the same address
    return row_under(p.verify.options, b, row, logit_row(p.verify.logits, row), *scratch_.adjusted);
  }

  RowDistribution distribution_at(const LogitRow& row, const Sampling& sampling) {
    peaks_row_ = row;
    return find_distribution(row, sampling, scratch_.filter);
  }

  // Recomputes the peaks if the scratch holds another row's; null for a uniform row.
  const float* peaks_of(const RowDistribution& distribution) {
    if (distribution.uniform) return nullptr;
    const LogitRow& row = distribution.row;
    if (row.logits != peaks_row_.logits || row.allowed != peaks_row_.allowed ||
        row.allowed_words != peaks_row_.allowed_words) {
      with_logits(row.dtype, [&]<typename T>() { find_peak<T>(row, scratch_.filter.peaks); });
      peaks_row_ = row;
    }
    return scratch_.filter.peaks;
  }

  // Like sums() with c = 0 and no tried token: draw() may follow.
  double sum_masses(const RowDistribution& distribution) {
    const float* peaks = peaks_of(distribution);
    last_sum_ = sum_distribution(distribution, peaks, scratch_.residuals, scratch_.block.target);
    return last_sum_;
  }

  int load_block(const NodeDistributions& distributions, int64_t begin, bool with_target, bool with_draft) {
    const bool only_drafted = law_ != DraftLaw::kOneHot;
    return PAGEDTREE_ISA::load_block(distributions, begin, with_target, with_draft, tried_, only_drafted,
                                     scratch_.block);
  }

  RowScratch& scratch_;
  TriedTokens tried_;
  DraftLaw law_;
  LogitRow peaks_row_{};  // row of the peaks in the scratch
  double last_sum_ = 0.0;
};

}  // namespace

// Samples each visited row as `sample` does, while a child drafted the token.
void verify_sampled(const VerifyParams& p, int64_t b, RowScratch& scratch) {
  TreeWalk walk(p, b);
  const Sampling sampling = sampling_of(p.sampling, b);
  const uint64_t seed = p.seeds == nullptr ? 0 : static_cast<uint64_t>(p.seeds[b]);
  const int64_t root = root_position_of(p, b);
  for (bool more = walk.num_nodes > 0; more;) {
    const LogitRow row = row_under(p.options, b, walk.row(), logit_row(p.logits, walk.row()), *scratch.adjusted);
    const Draw draw = draw_token(row, sampling, seed, position_at(root, walk.depth), scratch.filter);
    if (draw.bad) walk.status |= kBadRow;
    walk.emit(draw.token);
    more = walk.descend(walk.child_with(draw.token));
  }
  walk.finish();
}

#define PT_KERNEL(op, Params, name, walk, ...)               \
  void op(const Params& p, int64_t b, RowScratch& scratch) { \
    Rows rows(p, scratch);                                   \
    walk(p, b, rows);                                        \
  }
PT_EACH_WALK(PT_KERNEL, PT_KERNEL)

}  // namespace pagedtree::cpu::PAGEDTREE_ISA
