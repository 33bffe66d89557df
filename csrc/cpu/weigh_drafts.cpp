// The rows of core/laws.h, one vector after the other, and the rules that are templates over them.
#include "core/block.h"
#include "core/rejection.h"
#include "core/traversal.h"
#include "core/typical.h"
#include "cpu/isa.h"
#include "cpu/tile/law.h"

namespace pagedtree::cpu::PAGEDTREE_ISA {
namespace {

// What is added up at a time, whatever the vector length: token t of a block goes to sum t % kSums.
constexpr int kSums = 16;
static_assert(kSums % kLanes == 0 && kLawBlock % kSums == 0);
typedef double vdouble __attribute__((vector_size(kLanes * 8)));

template <typename T>
inline vfloat probabilities_at(const LogitRow& row, int64_t t) {
  const vfloat q = load_raw<T>(row, t);
  return select((q > 0.0f) & (q <= splat(kMaxFloat)), q, splat(0.0f));
}

struct Sums {
  vdouble parts[kSums / kLanes]{};

  double whole() const {
    double sums[kSums];
    std::memcpy(sums, parts, sizeof(sums));
    for (int half = kSums / 2; half > 0; half /= 2) {
      for (int i = 0; i < half; ++i) sums[i] += sums[i + half];
    }
    return sums[0];
  }
};

class Rows {
 public:
  Rows(const RatioParams& p, LawScratch& scratch)
      : scratch_(scratch), tried_{scratch.tried}, counts_drafts_(p.law != DraftLaw::kOneHot) {}

  static bool leads() { return true; }

  NodeLaws open(const RatioParams& p, int64_t b, int64_t row, bool with_draft) {
    NodeLaws laws{};
    clear_tried();
    laws.draft_is_probs = p.draft_sampling.temperature == nullptr;
    laws.draft_unit = 1.0;
    if (with_draft) {
      const int64_t draft_row = p.draft_rows.data == nullptr ? row : token_at(p.draft_rows, row);
      if (draft_row >= 0 && draft_row < p.draft.num_rows) laws.draft.row = logit_row(p.draft, draft_row);
    }
    if (laws.draft.row.logits != nullptr && !laws.draft_is_probs) {
      laws.draft = law_at(laws.draft.row, law_of(p.draft_sampling, b));
      NodeLaws alone{};
      alone.target = laws.draft;
      laws.draft_unit = 1.0 / sums(alone, 0.0).residual;
    }
    laws.target = law_at(logit_row(p.verify.logits, row), law_of(p.verify.sampling, b));
    laws.total = sums(laws, 0.0).residual;
    return laws;
  }

  double target(const NodeLaws& laws, int64_t token) const {
    return with_logits(laws.target, [&]<typename T>() { return lane(masses_at<T>(laws.target, group(token)), token); });
  }

  double draft(const NodeLaws& laws, int64_t token) const { return draft_mass(laws, token) * laws.draft_unit; }

  double residual(const NodeLaws& laws, double c, int64_t token) const {
    const double mass = target(laws, token);
    if (c == 0.0) return mass;
    return max_of(mass - c * laws.draft_unit * draft_mass(laws, token), 0.0);
  }

  LawSums sums(const NodeLaws& laws, double c) {
    LawSums all;
    const bool with_draft = c != 0.0 && laws.draft.row.logits != nullptr;
    const double factor = with_draft ? c * laws.draft_unit : 0.0;
    for (int64_t begin = 0; begin < laws.target.row.vocab; begin += kLawBlock) {
      const int count = load_block(laws, begin, with_draft);
      Sums residual, draft;
      for (int i = 0; i < count; i += kLanes) {
        const int part = i / kLanes % (kSums / kLanes);
        vdouble mass = __builtin_convertvector(load(scratch_.target + i), vdouble);
        if (with_draft) {
          const vdouble q = __builtin_convertvector(load(scratch_.draft + i), vdouble);
          mass -= factor * q;
          mass = mass > 0.0 ? mass : vdouble{};
          draft.parts[part] += q;
        }
        residual.parts[part] += mass;
      }
      const double sum = residual.whole();
      scratch_.block_sums[begin / kLawBlock] = sum;
      all.residual += sum;
      all.draft += draft.whole();
    }
    all.draft *= laws.draft_unit;
    last_sum_ = all.residual;
    return all;
  }

  int64_t draw(const NodeLaws& laws, double c, double u) {
    const double bound = u * last_sum_;
    int64_t block = 0;
    double before = 0.0, sum = 0.0;  // of the block, of all up to its end
    for (int64_t i = 0; i * kLawBlock < laws.target.row.vocab && !(sum > bound && sum > 0.0); ++i) {
      if (!(scratch_.block_sums[i] > 0.0)) continue;
      block = i;
      before = sum;
      sum += scratch_.block_sums[i];
    }
    const bool with_draft = c != 0.0 && laws.draft.row.logits != nullptr;
    const double factor = with_draft ? c * laws.draft_unit : 0.0;
    const int count = load_block(laws, block * kLawBlock, with_draft);
    // Rounding may leave the sum of single tokens below the block's: then the last one of any mass.
    int64_t token = 0;
    for (int i = 0; i < count; ++i) {
      double mass = scratch_.target[i];
      if (with_draft) mass -= factor * scratch_.draft[i];
      if (!(mass > 0.0)) continue;
      token = block * kLawBlock + i;
      before += mass;
      if (before > bound) break;
    }
    return token;
  }

  double entropy(const NodeLaws& laws) {
    double sum = 0.0;
    for (int64_t begin = 0; begin < laws.target.row.vocab; begin += kLawBlock) {
      const int count = load_block(laws, begin, false);
      Sums parts;
      for (int i = 0; i < count; i += kLanes) {
        const vfloat mass = load(scratch_.target + i);
        const vfloat log = select(mass > 0.0f, log_exact<VectorMath>(mass), splat(0.0f));
        parts.parts[i / kLanes % (kSums / kLanes)] +=
            __builtin_convertvector(mass, vdouble) * __builtin_convertvector(log, vdouble);
      }
      sum += parts.whole();
    }
    return static_cast<double>(log_exact<ScalarMath>(static_cast<float>(laws.total))) - sum / laws.total;
  }

  static void sync() {}
  AcceptedNodes accepted_nodes() { return {scratch_.parents, scratch_.depths}; }
  TraversalFrame* frames() { return scratch_.frames; }

  void mark_tried(int64_t token) { tried_.insert(token); }
  void clear_tried() { tried_.size = 0; }
  bool is_tried(int64_t token) const { return tried_.contains(token); }

 private:
  static int64_t group(int64_t token) { return token - token % kLanes; }
  static double lane(vfloat values, int64_t token) { return static_cast<double>(values[token % kLanes]); }

  RowLaw law_at(const LogitRow& row, const Law& law) {
    return with_logits(row.dtype, [&]<typename T>() { return find_law<T>(row, law, scratch_.filter); });
  }

  static double draft_mass(const NodeLaws& laws, int64_t token) {
    if (laws.draft.row.logits == nullptr) return 0.0;
    if (laws.draft_is_probs) {
      return with_logits(laws.draft.row.dtype,
                         [&]<typename T>() { return lane(probabilities_at<T>(laws.draft.row, group(token)), token); });
    }
    return with_logits(laws.draft, [&]<typename T>() { return lane(masses_at<T>(laws.draft, group(token)), token); });
  }

  template <typename At>
  static void fill(float* block, int64_t begin, int64_t end, const At& at) {
    for (int64_t t = begin; t < end; t += kLanes) store(block + (t - begin), at(t));
  }

  // Returns how many tokens are there, filled up with zeros to a multiple of kSums.
  int load_block(const NodeLaws& laws, int64_t begin, bool with_draft) {
    const int64_t end = min_of(begin + kLawBlock, laws.target.row.vocab);
    const int count = static_cast<int>(ceil_div<int64_t>(end - begin, kSums) * kSums);
    std::memset(scratch_.target + count - kSums, 0, kSums * sizeof(float));
    std::memset(scratch_.draft + count - kSums, 0, kSums * sizeof(float));
    with_logits(laws.target, [&]<typename T>() {
      fill(scratch_.target, begin, end, [&](int64_t t) { return masses_at<T>(laws.target, t); });
    });
    if (with_draft && laws.draft_is_probs) {
      with_logits(laws.draft.row.dtype, [&]<typename T>() {
        fill(scratch_.draft, begin, end, [&](int64_t t) { return probabilities_at<T>(laws.draft.row, t); });
      });
    } else if (with_draft) {
      with_logits(laws.draft, [&]<typename T>() {
        fill(scratch_.draft, begin, end, [&](int64_t t) { return masses_at<T>(laws.draft, t); });
      });
    }
    if (counts_drafts_ && !with_draft) return count;
    for (int32_t i = tried_.lower_bound(begin); i < tried_.size && tried_.ids[i] < begin + kLawBlock; ++i) {
      const int64_t at = tried_.ids[i] - begin;
      if (counts_drafts_ && !(scratch_.draft[at] > 0.0f)) continue;
      scratch_.target[at] = scratch_.draft[at] = 0.0f;
    }
    return count;
  }

  LawScratch& scratch_;
  TriedTokens tried_;
  bool counts_drafts_;
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
