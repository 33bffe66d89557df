// Scans of this rank's columns (core/verify/shards.h, shard_distributions.h): one cluster per row for distributions and
// draws, one CTA per item for residuals.
#include "core/verify/shard_distributions.h"
#include "cuda/backend.h"
#include "cuda/logits/sampling.cuh"
#include "cuda/tile/launch.cuh"
#include "cuda/verify/rules.cuh"

namespace pagedtree::cuda {
namespace {

// ---- distributions and draws

template <DType kDType>
__device__ __forceinline__ void tell(const ShardStepParams& p, int64_t n, int64_t b, const Sampling& sampling,
                                     const LogitRow& of_logits, LogitReader<kDType>& logits, const ShardRow& row,
                                     uint64_t num_ties, int64_t* words, SamplingShared& shared) {
  const bool leads = leads_cluster();
  switch (p.round) {
    case ShardRound::kNone:
      break;
    case ShardRound::kLeft:
    case ShardRound::kPeak: {
      const Peak peak = find_peak(logits, shared.radix.block);
      if (!leads) break;
      if (p.round == ShardRound::kLeft) {
        words[0] = peak.logit > -kInfinity;
        break;
      }
      words[0] = ranked_word(peak.logit, p.shard.first_token + peak.token);
      words[1] = peak.has_nan;
      break;
    }
    case ShardRound::kCount:
    case ShardRound::kMass: {
      if (!row.searching) break;
      // A table digit is two shard digits: a first digit's bin sums 16 bins of the table, a second digit's bin is one.
      static_assert(kDigitBits == 2 * kShardDigitBits);
      const bool first = p.digit % 2 == 0;
      const unsigned bin = threadIdx.x;
      if (bin >= kShardBins || ptx::cluster_rank() != 0) break;
      uint64_t sum = 0;
#pragma unroll 1
      for (unsigned i = 0; i < (first ? kShardBins : 1); ++i) {
        const Totals& totals =
            shared.radix.totals[first ? bin * kShardBins + i : row.key % kShardBins * kShardBins + bin];
        sum += p.round == ShardRound::kMass ? totals.mass : totals.count;
      }
      words[bin] = static_cast<int64_t>(sum);
      break;
    }
    case ShardRound::kTies:
      if (leads && row.ties > 0) words[0] = static_cast<int64_t>(num_ties);
      break;
    case ShardRound::kRace: {
      if (sampling.temperature == 0.0f) {
        if (leads) words[0] = ranked_word(0.0f, row.peak.token);
        break;
      }
      const int32_t depth = depth_of(p, n, b);
      const uint64_t position =
          static_cast<uint64_t>(integer_at(p.positions, b)) + static_cast<uint64_t>(int64_t{depth});
      if (threadIdx.x == 0) {
        shared.distribution = shard_distribution(p.shard, of_logits, row, sampling);
        shared.seed = static_cast<uint64_t>(p.seeds[b]);
        shared.position = static_cast<int64_t>(position);
      }
      __syncthreads();
      const uint64_t best = race_of_kept<kDType>(shared, static_cast<uint32_t>(p.shard.first_token));
      const int64_t word =
          best == 0 ? INT64_MIN : ranked_word(ranked_value(best), p.shard.first_token + ranked_id(best));
      if (leads) words[0] = word;
      break;
    }
  }
}

template <DType kDType>
__device__ __forceinline__ void step_row(const ShardStepParams& p, int64_t n, SamplingShared& shared) {
  const int64_t b = sequence_of(p.shard, n);
  if (b < 0 || depth_of(p, n, b) < 0) return;  // no walk visits this row
  const Sampling sampling = sampling_of(p.shard.sampling, b);
  ShardRow row = p.shard.rows[n];
  const int64_t kept_ties = apply(p, n, sampling, row);
  begin_round(p, sampling, row);
  LogitRow of_logits = logit_row(p.shard.logits, n);
  if (p.shard.options.used && reads_row(p, sampling, row, kept_ties)) {
    const RowOptions options = shard_options(p.shard, n, b, row, p.round == ShardRound::kLeft);
    of_logits = row_under<kDType>(p.shard.options, p.shard.logits, b, n, shared.radix.block, options.stops);
  }
  LogitReader<kDType> logits(of_logits);
  if (p.round > ShardRound::kPeak && p.round != ShardRound::kLeft) logits.apply(row.peak);
  uint64_t num_ties = 0;  // of the cluster's first thread
  if (kept_ties >= 0) row.filter.tie_end = 0;
  const bool by_digit = (p.round == ShardRound::kCount || p.round == ShardRound::kMass) && row.searching;
  if (by_digit || kept_ties > 0 || (p.round == ShardRound::kTies && row.ties > 0)) {
    const ShardView view =
        by_digit ? view_of(row, sampling, p.round) : ShardView{{0.0f, 1.0f}, -kInfinity, -kInfinity, false};
    const LogitItems<LogitReader<kDType>> items{logits, view.scale, view.min_x};
    const uint32_t least = order_key<ScalarMath>(view.min_logit);
    const auto weight = [&](uint32_t key) {
      return key < least ? 0u : weight_of<ScalarMath>(view.scale(logit_of_key<ScalarMath>(key)));
    };
    const uint32_t among = by_digit ? 0 : order_key<ScalarMath>(row.filter.min_logit + 0.0f);
    const Cut cut = find_cut(
        shared.radix, view.by_mass ? shared.masses : nullptr, items, weight, kKeyDigits, among, false,
        [&](const Totals& ties) {
          num_ties = ties.count;
          return kept_ties > 0 ? static_cast<uint64_t>(kept_ties) : 0;
        },
        by_digit ? p.digit / 2 : 0, p.digit % 2 == 0 ? row.key : row.key >> kShardDigitBits);
    if (kept_ties > 0) row.filter.tie_end = static_cast<int32_t>(~cut.key) + 1;
  }
  tell(p, n, b, sampling, of_logits, logits, row, num_ties, p.words + n * words_of(p.round), shared);
  ptx::meet_cluster();  // after all reads of the row
  if (leads_cluster()) p.shard.rows[n] = row;
}

template <DType kDType>
__global__ void __launch_bounds__(kRulesThreads, kRowCtas)
    step_kernel(const __grid_constant__ ShardStepParams p, int64_t first) {
  ptx::meet_cluster();
  step_row<kDType>(p, first + ptx::cluster_index(), ptx::shared<SamplingShared>());
}

// ---- residuals

struct ResidualShared {
  BlockShared block;
  int32_t tried[kMaxTreeNodes];
  int32_t num_tried;
};

struct ShardSums {
  uint64_t left = 0, drafts = 0;
};

class ShardDistributions {
 public:
  __device__ ShardDistributions(const ShardResidualParams& p, int64_t n, int64_t b, ResidualShared& shared)
      : p_(p), n_(n), b_(b), shared_(shared) {
    distributions_.target =
        shard_distribution(p.shard, logit_row(p.shard.logits, n), p.shard.rows[n], sampling_of(p.shard.sampling, b));
    distributions_.draft_is_probs = true;
    distributions_.draft_unit = 1.0;
    if (p.ratio.law != DraftLaw::kOneHot) distributions_.draft.row = draft_row_of(p.ratio, n);
  }

  // Publishes the masses of the children's draft tokens in this rank's columns.
  __device__ void publish_drafts(TreeWalk& walk) const {
    const RowMasses target(distributions_.target);
    const DraftMasses draft(distributions_);
    for (int32_t child = walk.first_child(); child >= 0; child = walk.next_sibling(child)) {
      const int64_t row = walk.rows.begin + child, column = draft_token_at(walk.p, row) - p_.shard.first_token;
      if (column < 0 || column >= p_.shard.logits.vocab) continue;
      p_.words[row * kResidualWords + 1] = word_of_masses(target.at(column), draft.at(column));
    }
  }

  // Sums residuals at c and draft masses, without the first `num_tried` children's tokens. If it draws, writes the
  // first token whose cumulative residual units exceed `bound`.
  __device__ ShardSums sum_residuals(TreeWalk& walk, const ShardQuestion& question, bool draws, uint64_t bound,
                                     int64_t* drawn) {
    const ResidualMasses masses = left_at(walk, question);
    if (draws && threadIdx.x == 0) drawn[0] = p_.shard.first_token;
    ShardSums all;
    uint64_t before = 0;
#pragma unroll 1
    for (int64_t begin = 0; begin < masses.vocab() && before <= bound; begin += 4 * int64_t{blockDim.x}) {
      const int64_t token = begin + 4 * int64_t{threadIdx.x};
      float sums[2][4];
      Four loaded[ResidualMasses::kBatch + 1];
      masses.load<1>(token, loaded);
      masses.values(token, loaded, sums);
      const uint64_t own = units_of_four(sums[0]);
      all.left += own;
      all.drafts += units_of_four(sums[1]);
      if (!draws) continue;
      uint64_t total;
      const uint64_t reached = before + block_scan(shared_.block, own, total);
      if (reached - own <= bound && bound < reached) {
        uint64_t sum = reached - own;
        int i = 0;
        while (i < 3 && (sum += units_of(sums[0][i])) <= bound) ++i;
        drawn[0] = p_.shard.first_token + token + i;
      }
      before += total;
    }
    return {block_sum(shared_.block, all.left), block_sum(shared_.block, all.drafts)};
  }

 private:
  static __device__ uint64_t units_of_four(const float (&four)[4]) {
    uint64_t sum = 0;
#pragma unroll
    for (float mass : four) sum += units_of(at_most_one<ScalarMath>(mass));
    return sum;
  }

  __device__ ResidualMasses left_at(TreeWalk& walk, const ShardQuestion& question) {
    if (p_.shard.options.used) {
      const RowOptions options = shard_options(p_.shard, n_, b_, p_.shard.rows[n_], false);
      distributions_.target.row = row_under(p_.shard.options, p_.shard.logits, b_, n_, shared_.block, options.stops);
    }
    TriedTokens tried{shared_.tried};
    if (threadIdx.x == 0) {
      mark_tried(p_.shard, walk, question.num_tried, tried);
      shared_.num_tried = tried.size;
    }
    __syncthreads();
    tried.size = shared_.num_tried;
    return ResidualMasses(distributions_, question.c, tried, p_.ratio.law != DraftLaw::kOneHot);
  }

  const ShardResidualParams& p_;
  int64_t n_, b_;
  ResidualShared& shared_;
  NodeDistributions distributions_{};
};

__device__ __forceinline__ void residual_item(const ShardResidualParams& p, int64_t item, ResidualShared& shared) {
  const bool leads = threadIdx.x == 0;
  const auto [n, b] = item_of(p, item);
  if (b < 0) return;
  TreeWalk walk(p.ratio.verify, b);
  if (!stand_at(walk, n)) return;
  const bool draws = p.round == ResidualRound::kDraw;
  int64_t* words = p.words + item * (draws ? 1 : kResidualWords);
  ShardDistributions shard(p, n, b, shared);
  ShardQuestion question{true, 0.0, 0};
  uint64_t bound = ~uint64_t{0};
  ShardRow row = p.shard.rows[n];
  if (p.round == ResidualRound::kResidual) {
    apply_sums(p.ratio.law, p.received + n * kResidualWords, p.index - 1, row);
    if (leads) keep_left(p.left, walk, p.index - 1, row);
    question = reject_child(p, walk, row);
  } else if (p.round == ResidualRound::kSums) {
    question = {true, p.ends[b].c, p.ends[b].num_tried};
  } else if (draws) {
    const ShardDraw draw = draw_of_shard(p, b);
    question = {draw.owns, draw.c, draw.num_tried};
    bound = draw.bound;
  }
  ShardSums sums;
  if (question.asked) sums = shard.sum_residuals(walk, question, draws, bound, words);
  __syncthreads();  // after all reads of the row
  if (!leads || draws) return;
  words[0] = static_cast<int64_t>(sums.left);
  if (p.round == ResidualRound::kMasses) {
    row.own_units = words[0];
    shard.publish_drafts(walk);
  } else {
    words[1] = p.round == ResidualRound::kSums ? row.own_units : static_cast<int64_t>(sums.drafts);
  }
  if (p.round != ResidualRound::kSums) p.shard.rows[n] = row;
}

__global__ void __launch_bounds__(kRulesThreads, kRowCtas)
    weigh_kernel(const __grid_constant__ ShardResidualParams p, int64_t first) {
  residual_item(p, first + blockIdx.x, ptx::shared<ResidualShared>());
}

}  // namespace

void CudaBackend::step_shards(const ShardStepParams& p, const ExecContext& ctx) const {
  with_logit_dtype(dtype_under(p.shard.options, p.shard.logits.dtype), [&](auto dtype) {
    in_turns(p.shard.options, p.shard.logits.num_rows, [&](int64_t first, int64_t count) {
      launch_rows(step_kernel<dtype>, count, p.shard.logits.vocab, kRulesThreads, sizeof(SamplingShared), ctx.stream, p,
                  first);
    });
  });
}

void CudaBackend::weigh_shards(const ShardResidualParams& p, const ExecContext& ctx) const {
  in_turns(p.shard.options, num_items(p), [&](int64_t first, int64_t count) {
    launch(weigh_kernel, dim3(static_cast<unsigned>(count)), dim3(threads_of_row(p.shard.logits.vocab, kRulesThreads)),
           sizeof(ResidualShared), ctx.stream, p, first);
  });
}

}  // namespace pagedtree::cuda
