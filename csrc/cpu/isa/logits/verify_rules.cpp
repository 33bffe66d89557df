// The rows of core/verify/rules.h, one vector after the other, and the rules that are templates over them.
#include "core/verify/block.h"
#include "core/verify/rejection.h"
#include "core/verify/traversal.h"
#include "core/verify/typical.h"
#include "cpu/isa.h"
#include "cpu/isa/logits/masses.h"

namespace pagedtree::cpu::PAGEDTREE_ISA {
namespace {

// The partial sums of a block.
struct Sums {
  static constexpr int kParts = kLawSums / kLanes;
  static_assert(kLawSums % kLanes == 0);
  vfloat parts[kParts]{};

  float whole() {
    for (int half = kParts / 2; half > 0; half /= 2) {
      for (int i = 0; i < half; ++i) parts[i] += parts[i + half];
    }
    return reduce_add(parts[0]);
  }
};

class Rows {
 public:
  Rows(const RatioParams& p, LawScratch& scratch) : scratch_(scratch), tried_{scratch.tried}, law_(p.law) {}

  static bool leads() { return true; }
  static bool leads_cta() { return true; }
  static void sync() {}
  NodeLaws& laws() { return scratch_.laws; }

  void open(const RatioParams& p, int64_t b, int64_t row, bool with_draft, NodeLaws& laws) {
    clear_tried();
    laws = {};
    laws.draft_is_probs = p.draft_sampling.temperature == nullptr;
    laws.draft_unit = 1.0;
    if (with_draft) laws.draft.row = draft_row_of(p, row);
    if (laws.draft.row.logits != nullptr && !laws.draft_is_probs) {
      laws.draft = law_at(laws.draft.row, law_of(p.draft_sampling, b));
      laws.draft_unit = 1.0 / sum_masses(laws.draft);
    }
    laws.target = law_at(logit_row(p.verify.logits, row), law_of(p.verify.sampling, b));
    laws.total = sum_masses(laws.target);
  }

  double target(const NodeLaws& laws, int64_t token) const { return static_cast<double>(target_mass(laws, token)); }

  double draft(const NodeLaws& laws, int64_t token) const {
    return static_cast<double>(draft_mass(laws, token)) * laws.draft_unit;
  }

  double residual(const NodeLaws& laws, double c, int64_t token) const {
    const float mass = target_mass(laws, token);
    if (c == 0.0) return static_cast<double>(mass);
    return static_cast<double>(residual_mass<ScalarMath>(mass, draft_factor(laws, c), draft_mass(laws, token)));
  }

  LawSums sums(const NodeLaws& laws, double c) {
    const bool with_draft = c != 0.0 && laws.draft.row.logits != nullptr;
    const vfloat factor = splat(with_draft ? draft_factor(laws, c) : 0.0f);
    const bool sums_draft = with_draft && law_ == DraftLaw::kSwor;  // elsewhere a draft's mass stays what it is
    const float* peaks = peaks_of(laws.target);
    LawSums all;
    all.residual = sum_blocks(laws.target.row.vocab, scratch_.residuals, [&](int64_t begin, int64_t block) {
      const bool with_target = may_have_mass(peaks, begin, laws.target);
      if (!with_target && !sums_draft) return 0.0f;
      const int count = load_block(laws, begin, with_target, with_draft);
      if (sums_draft) {
        scratch_.drafts.blocks[block] = sum_of(count, [&](int i) { return load(scratch_.block.draft + i); });
      }
      if (!with_target) return 0.0f;
      if (!with_draft) return sum_of(count, [&](int i) { return load(scratch_.block.target + i); });
      return sum_of(count, [&](int i) { return residuals_at(scratch_.block, factor, i); });
    });
    last_sum_ = all.residual;
    if (sums_draft) all.draft = sum_groups(laws.target.row.vocab, scratch_.drafts) * laws.draft_unit;
    return all;
  }

  int64_t draw(const NodeLaws& laws, double c, double u) {
    MassSearch search{u * last_sum_};
    const int64_t begin = scratch_.residuals.pick_block(laws.target.row.vocab, search) * kLawBlock;
    const bool with_draft = c != 0.0 && laws.draft.row.logits != nullptr;
    const int count = load_block(laws, begin, true, with_draft);
    const vfloat factor = splat(with_draft ? draft_factor(laws, c) : 0.0f);
    for (int i = 0; with_draft && i < count; i += kLanes)
      store(scratch_.block.target + i, residuals_at(scratch_.block, factor, i));
    double runs[kLawBlock / kLawRadix];
    for (int i = 0; i < count; i += kLawRadix) runs[i / kLawRadix] = sum_in_order(scratch_.block.target + i, kLawRadix);
    const int run = search.pick(runs, count / kLawRadix) * kLawRadix;
    return begin + run + search.pick(scratch_.block.target + run, kLawRadix);
  }

  double entropy(const NodeLaws& laws) {
    const float* peaks = peaks_of(laws.target);
    const double terms = sum_blocks(laws.target.row.vocab, scratch_.residuals, [&](int64_t begin, int64_t) {
      if (!may_have_mass(peaks, begin, laws.target)) return 0.0f;
      return sum_of(load_block(laws, begin, true, false), [&](int i) {
        const vfloat mass = load(scratch_.block.target + i);
        return select(mass > 0.0f, mass * log_exact<VectorMath>(mass), splat(0.0f));
      });
    });
    return entropy_of(laws.total, terms);
  }

  AcceptedNodes accepted_nodes() { return {scratch_.parents, scratch_.depths}; }

  void mark_tried(int64_t token) { tried_.insert(token); }
  void clear_tried() { tried_.size = 0; }
  bool is_tried(int64_t token) const { return tried_.contains(token); }

 private:
  RowLaw law_at(const LogitRow& row, const Law& law) {
    peaks_row_ = row;
    return with_logits(row.dtype, [&]<typename T>() { return find_law<T>(row, law, scratch_.filter); });
  }

  // Of the law's row, looked for again if another's came in between. Null where all its tokens have the same mass.
  const float* peaks_of(const RowLaw& law) {
    if (law.uniform) return nullptr;
    const LogitRow& row = law.row;
    if (row.logits != peaks_row_.logits || row.allowed != peaks_row_.allowed ||
        row.allowed_words != peaks_row_.allowed_words) {
      with_logits(row.dtype, [&]<typename T>() { find_peak<T>(row, scratch_.filter.peaks); });
      peaks_row_ = row;
    }
    return scratch_.filter.peaks;
  }

  // Whether the law may have any in the block.
  static bool may_have_mass(const float* peaks, int64_t begin, const RowLaw& law) {
    return peaks == nullptr || PAGEDTREE_ISA::may_have_mass(peaks, begin, law.filter, law.scale);
  }

  // The sum of values(i) over the lanes at i, for `count` tokens of a block.
  template <typename Values>
  static float sum_of(int count, const Values& values) {
    Sums sums;
    for (int begin = 0; begin < count; begin += kLawSums) {
      for (int i = 0; i < Sums::kParts; ++i) sums.parts[i] += values(begin + i * kLanes);
    }
    return sums.whole();
  }

  static double sum_groups(int64_t vocab, LawTable& table) {
    for (int64_t group = 0; group < LawTable::num_groups(vocab); ++group) table.add_group(vocab, group);
    return table.total(vocab);
  }

  // `sum_block` gives a block's sum for its first token and its number.
  template <typename SumBlock>
  static double sum_blocks(int64_t vocab, LawTable& table, const SumBlock& sum_block) {
    for (int64_t block = 0; block < LawTable::num_blocks(vocab); ++block) {
      table.blocks[block] = sum_block(block * kLawBlock, block);
    }
    return sum_groups(vocab, table);
  }

  // Of a law alone: nothing is tried, and draws may follow.
  double sum_masses(const RowLaw& law) {
    const float* peaks = peaks_of(law);
    last_sum_ = sum_blocks(law.row.vocab, scratch_.residuals, [&](int64_t begin, int64_t) {
      if (!may_have_mass(peaks, begin, law)) return 0.0f;
      return sum_of(load_masses(law, begin, scratch_.block.target),
                    [&](int i) { return load(scratch_.block.target + i); });
    });
    return last_sum_;
  }

  int load_block(const NodeLaws& laws, int64_t begin, bool with_target, bool with_draft) {
    const bool only_drafted = law_ != DraftLaw::kOneHot;
    return PAGEDTREE_ISA::load_block(laws, begin, with_target, with_draft, tried_, only_drafted, scratch_.block);
  }

  LawScratch& scratch_;
  TriedTokens tried_;
  DraftLaw law_;
  LogitRow peaks_row_{};  // whose peaks are in the scratch
  double last_sum_ = 0.0;
};

}  // namespace

void verify_rejection(const RatioParams& p, int64_t b, LawScratch& scratch) {
  Rows rows(p, scratch);
  walk_rejection(p, b, rows);
}

void verify_block(const RatioParams& p, int64_t b, LawScratch& scratch) {
  Rows rows(p, scratch);
  walk_block(p, b, rows);
}

void verify_typical(const RatioParams& p, int64_t b, LawScratch& scratch) {
  Rows rows(p, scratch);
  walk_typical(p, b, rows);
}

void verify_traversal(const RatioParams& p, int64_t b, LawScratch& scratch) {
  Rows rows(p, scratch);
  walk_traversal(p, b, rows);
}

}  // namespace pagedtree::cpu::PAGEDTREE_ISA
