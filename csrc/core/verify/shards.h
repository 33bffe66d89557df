// Rows of logits whose vocabulary is split among ranks, by ranges of columns. Each round reduces every rank's columns
// to a few integer words, and these over all ranks. Integers make results independent of the split.
// peak -> top-k threshold, digit by digit -> top-p threshold, digit by digit -> ties -> race
#pragma once

#include "core/options.h"
#include "core/verify/rules.h"

namespace pagedtree {

// Words per row of a rank in each round, and their reduction.
enum class ShardRound : int32_t {
  kNone,
  kPeak,   // 2 words, maximum: largest logit with its token; NaN flag
  kCount,  // kShardBins words, sum: token counts by a digit of the key, for top_k
  kMass,   // kShardBins words, sum: weights by a digit of the key, for top_p
  kTies,   // 1 word, gathered: tokens at the threshold
  kRace,   // 1 word, maximum: the best score with its token
  kLeft,   // 1 word, maximum: nonzero if forbidding the stop ids leaves a token; comes first, if used
};

constexpr int kShardDigitBits = 4;  // fewer bins: fewer words in all, but more rounds
constexpr int kShardBins = 1 << kShardDigitBits;

PT_HOST_DEVICE constexpr int64_t words_of(ShardRound round) {
  return round == ShardRound::kPeak ? 2 : round == ShardRound::kCount || round == ShardRound::kMass ? kShardBins : 1;
}

// Digits that can differ between a dtype's keys: sign, exponent and mantissa.
PT_HOST_DEVICE constexpr int digits_of(DType dtype) {
  const int bits = dtype == DType::kFloat32 ? 32 : dtype == DType::kFloat16 ? 1 + 8 + 10 : 1 + 8 + 7;
  return ceil_div(bits, kShardDigitBits);
}

// Completes a key from its first digits; the other bits follow from the logit's sign.
PT_HOST_DEVICE uint32_t whole_key(uint32_t digits, int count) {
  const int rest = 32 - kShardDigitBits * count;
  if (rest == 0) return digits;
  const bool negative = digits >> (kShardDigitBits * count - 1) == 0;
  return digits << rest | (negative ? (1u << rest) - 1 : 0u);
}

// Packs a value and a token so that larger values, then lower tokens, compare greater.
PT_HOST_DEVICE int64_t ranked_word(float value, int64_t token) {
  const uint64_t key = order_key<ScalarMath>(value + 0.0f) ^ 0x80000000u;  // -0 ties with +0
  return static_cast<int64_t>(key << 32 | static_cast<uint32_t>(~static_cast<uint32_t>(token)));
}
PT_HOST_DEVICE float value_of_word(int64_t word) {
  return logit_of_key<ScalarMath>(static_cast<uint32_t>(static_cast<uint64_t>(word) >> 32) ^ 0x80000000u);
}
PT_HOST_DEVICE int32_t token_of_word(int64_t word) { return static_cast<int32_t>(~word); }

// 2^42 units at mass 1: the largest vocabulary adds up without overflow, and the rounding is below a float's precision.
constexpr double kUnitMass = 4398046511104.0;
constexpr int kHalfUnits = 21;  // per half of the integer
template <typename M>
PT_HOST_DEVICE void units_of(typename M::Float mass, typename M::Uint& high, typename M::Uint& low) {
  constexpr float kHalf = 1 << kHalfUnits;
  const auto scaled = mass * kHalf;
  high = M::to_uint(scaled);
  low = M::to_uint((scaled - M::to_float(high)) * kHalf);
}
PT_HOST_DEVICE uint64_t units_of(float mass) {
  uint32_t high, low;
  units_of<ScalarMath>(mass, high, low);
  return (uint64_t{high} << kHalfUnits) + low;
}
PT_HOST_DEVICE double mass_of_units(int64_t units) { return static_cast<double>(units) / kUnitMass; }

// Limits draft probabilities, which are invalid above 1.
template <typename M>
PT_HOST_DEVICE typename M::Float at_most_one(typename M::Float mass) {
  return M::select(mass < 1.0f, mass, M::splat(1.0f));
}

// Equal on all ranks except `tie_end` and `own_units`.
struct ShardRow {
  Peak peak;
  Filter filter;
  uint64_t target;    // count or mass to reach at the threshold
  uint64_t above;     // count or mass above `key`
  uint64_t ties;      // kept tokens at the threshold, 0: all
  int64_t own_units;  // target's masses in own columns
  double total;       // target's masses on all ranks
  Residual left;      // after the rejections so far
  uint32_t key;       // known digits of the threshold
  int32_t num_digits;
  uint8_t searching;  // a threshold is searched; not bool: a caller's rows may hold any byte
  uint8_t asked;      // the residual after a rejection was requested
  uint8_t no_stops;   // stop ids are forbidden before the minimum position
};
static_assert(sizeof(ShardRow) % sizeof(int64_t) == 0);

struct ShardRows {
  LogitsParams logits;      // N rows of own columns, possibly none
  SamplingParams sampling;  // of B
  OptionsParams options;    // of B
  const int32_t* cu_nodes;  // [B + 1], null: row n is sequence n
  ShardRow* rows;           // [N] written
  int64_t batch;
  int64_t first_token;  // id of the first column
  int64_t vocab;        // of all ranks
  DType key_dtype;      // dtype of order keys: fp32 under options
};

struct ShardStepParams {
  ShardRows shard;
  const int32_t* depths;    // [N] null without trees
  const int64_t* seeds;     // [B], like the next only for kRace
  Integers positions;       // [B]
  const int64_t* received;  // [N, words_of(last)], after kTies [ranks, N]; null at the start
  int64_t* words;           // [N, words_of(round)] out
  ShardRound last;          // round of the received words
  ShardRound round;
  int32_t digit;
  int32_t rank;
};

PT_HOST_DEVICE int64_t sequence_of(const ShardRows& s, int64_t n) {
  return s.cu_nodes == nullptr ? n : sequence_of_row(s.cu_nodes, s.batch, n);
}

// Returns the depth of a walk's visit, -1 if none is possible. A root is visited whatever its `depths` entry.
PT_HOST_DEVICE int32_t depth_of(const ShardStepParams& p, int64_t n, int64_t b) {
  const bool is_root = p.depths == nullptr || n == p.shard.cu_nodes[b];
  return is_root ? 0 : p.depths[n];
}

PT_HOST_DEVICE bool is_uniform(const ShardRow& row) { return row.peak.logit == -kInfinity; }

// Returns true if the filters may have a threshold.
PT_HOST_DEVICE bool is_filtered(const ShardRow& row, const Sampling& sampling) {
  return sampling.temperature != 0.0f && !is_uniform(row);
}

// Tokens are numbered by this rank's columns.
PT_HOST_DEVICE RowDistribution shard_distribution(const ShardRows& s, const LogitRow& logits, const ShardRow& row,
                                                  const Sampling& sampling) {
  const int32_t token = clamp_to(row.peak.token, 0, static_cast<int32_t>(s.vocab) - 1);  // rows are not trusted
  const Peak peak{row.peak.logit, token - static_cast<int32_t>(s.first_token), row.peak.has_nan};
  RowDistribution found = row_distribution(logits, sampling, peak, [&](const Scale&) { return row.filter; });
  if (found.uniform && sampling.temperature == 0.0f) found.filter.tie_end = 1 - static_cast<int32_t>(s.first_token);
  return found;
}

// Tokens that a search reads, by mass or count.
struct ShardView {
  Scale scale;
  float min_x;
  float min_logit;
  bool by_mass;
};

PT_HOST_DEVICE ShardView view_of(const ShardRow& row, const Sampling& sampling, ShardRound round) {
  const bool by_mass = round == ShardRound::kMass;
  return {.scale = {row.peak.logit, inverse_temperature(sampling.temperature)},
          .min_x = max_of(sampling.joint ? -kInfinity : row.filter.min_x, by_mass ? kWeightless : -kInfinity),
          .min_logit = by_mass && !sampling.joint ? row.filter.min_logit : -kInfinity,
          .by_mass = by_mass};
}

PT_HOST_DEVICE RowOptions shard_options(const ShardRows& s, int64_t n, int64_t b, const ShardRow& row,
                                        bool finds_left) {
  return {s.options, b, n, finds_left || row.no_stops ? Stops::kForbid : Stops::kAllow};
}

// Returns true if the started round reads the row's logits.
PT_HOST_DEVICE bool reads_row(const ShardStepParams& p, const Sampling& sampling, const ShardRow& row,
                              int64_t kept_ties) {
  if (kept_ties > 0) return true;
  switch (p.round) {
    case ShardRound::kLeft:
    case ShardRound::kPeak:
      return true;
    case ShardRound::kCount:
    case ShardRound::kMass:
      return row.searching;
    case ShardRound::kTies:
      return row.ties != 0;
    case ShardRound::kRace:
      return sampling.temperature != 0.0f;
    case ShardRound::kNone:
      break;
  }
  return false;
}

PT_HOST_DEVICE void begin_round(const ShardStepParams& p, const Sampling& sampling, ShardRow& row) {
  if (p.digit == 0 && (p.round == ShardRound::kCount || p.round == ShardRound::kMass)) {
    const bool wanted = p.round == ShardRound::kMass ? sampling.top_p < 1.0f : sampling.cuts_by_count(p.shard.vocab);
    row.searching = wanted && is_filtered(row, sampling);
    row.key = 0;
    row.num_digits = 0;
    row.above = 0;
  }
}

// Ends the search, with `at` the count or mass of the tokens at the threshold.
PT_HOST_DEVICE void end_search(const ShardStepParams& p, const Sampling& sampling, uint64_t at, ShardRow& row) {
  const float logit = logit_of_key<ScalarMath>(whole_key(row.key, digits_of(p.shard.key_dtype)));
  row.searching = false;
  if (p.last == ShardRound::kCount) {
    row.filter.min_logit = logit;
  } else if (logit >= row.filter.min_logit) {
    row.filter.min_logit = logit;
    const uint64_t weight = weight_of<ScalarMath>(view_of(row, sampling, p.last).scale(logit));
    if (weight == 0) return;  // below the search's bounds
    row.ties = ceil_div(row.target - row.above, weight);
    if (row.ties == at / weight) row.ties = 0;
  }
}

PT_HOST_DEVICE uint64_t sum_of_bins(const int64_t* bins) {
  uint64_t sum = 0;
  for (int bin = 0; bin < kShardBins; ++bin) sum += static_cast<uint64_t>(bins[bin]);
  return sum;
}

// Returns the highest bin at which the sum from the top reaches `target`, else the lowest. Adds higher bins to `above`.
PT_HOST_DEVICE uint32_t find_bin(const int64_t* bins, uint64_t target, uint64_t& above) {
  uint32_t bin = kShardBins - 1;
  for (; bin > 0 && above + static_cast<uint64_t>(bins[bin]) < target; --bin) above += static_cast<uint64_t>(bins[bin]);
  return bin;
}

// Applies the reduced words. After kTies with a partial tie, returns this rank's kept ties; else -1.
PT_HOST_DEVICE int64_t apply(const ShardStepParams& p, int64_t n, const Sampling& sampling, ShardRow& row) {
  const int64_t* words = p.received + n * words_of(p.last);
  switch (p.last) {
    case ShardRound::kNone:
      break;
    case ShardRound::kLeft:
      row.no_stops = words[0] != 0;
      break;
    case ShardRound::kPeak:
      row.peak = {.logit = value_of_word(words[0]), .token = token_of_word(words[0]), .has_nan = words[1] != 0};
      row.filter = {.min_x = min_p_bound(sampling.min_p)};
      break;
    case ShardRound::kCount:
    case ShardRound::kMass: {
      if (!row.searching) break;
      const bool is_first = row.num_digits == 0;
      row.num_digits = min_of(row.num_digits, INT32_MAX - 1) + 1;  // rows are not trusted
      if (is_first) {
        const uint64_t all = sum_of_bins(words);
        row.target =
            p.last == ShardRound::kMass ? top_p_mass(sampling.top_p, all) : static_cast<uint64_t>(sampling.top_k);
        row.searching = p.last == ShardRound::kMass || row.target < all;
        if (!row.searching) break;
      }
      const uint32_t bin = find_bin(words, row.target, row.above);
      row.key = row.key << kShardDigitBits | bin;
      if (row.num_digits == digits_of(p.shard.key_dtype)) {
        end_search(p, sampling, static_cast<uint64_t>(words[bin]), row);
      }
      break;
    }
    case ShardRound::kTies: {
      if (row.ties == 0) break;
      uint64_t before = 0;
      for (int32_t rank = 0; rank < p.rank; ++rank) {
        before += static_cast<uint64_t>(p.received[rank * p.shard.logits.num_rows + n]);
      }
      const uint64_t own = static_cast<uint64_t>(p.received[p.rank * p.shard.logits.num_rows + n]);
      const uint64_t kept = row.ties > before ? min_of(row.ties - before, own) : 0;
      row.ties = 0;
      return static_cast<int64_t>(kept);
    }
    case ShardRound::kRace:  // last round: follow_tree() reads its words
      break;
  }
  return -1;
}

// ---- trees with a known token per row

struct ShardFollowParams {
  VerifyParams verify;      // logits: row count and vocabulary of all ranks, no data
  const ShardRow* rows;     // [N]
  const int64_t* received;  // [N, words_of(last)] of kPeak, for greedy rows, or of kRace
  ShardRound last;
};

PT_HOST_DEVICE int64_t num_items(const ShardFollowParams& p) { return p.verify.batch; }

PT_HOST_DEVICE void follow_tree(const ShardFollowParams& p, int64_t b) {
  TreeWalk walk(p.verify, b);
  for (bool more = walk.num_nodes > 0; more;) {
    const int64_t* words = p.received + walk.row() * words_of(p.last);
    const Peak& peak = p.rows[walk.row()].peak;
    const bool at_peak = p.last == ShardRound::kPeak;
    const float most = at_peak ? value_of_word(words[0]) : peak.logit;
    if (most == -kInfinity || (at_peak ? words[1] != 0 : peak.has_nan)) walk.status |= kBadRow;
    const int32_t told = token_of_word(words[0]);
    // Bad offsets may lead to a row of no sequence, which has no words.
    const int32_t token = clamp_to<int32_t>(told, 0, static_cast<int32_t>(p.verify.logits.vocab) - 1);
    if (token != told) walk.status |= kMalformedTree;
    walk.emit(token);
    int32_t child = walk.child_with(token);
    if (child >= 0 && p.verify.depths[walk.rows.begin + child] < 0) {  // row left out of the rounds, see depth_of
      walk.status |= kMalformedTree;
      child = -1;
    }
    more = walk.descend(child);
  }
  walk.finish();
}

}  // namespace pagedtree
