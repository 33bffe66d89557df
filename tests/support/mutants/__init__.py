"""Mistakes once made in the sources, and tests that find them."""

from __future__ import annotations

from support.mutants.attention import ENGINE, JOINED, LATENT_WGMMA, SEGMENTS, WGMMA, WIDE
from support.mutants.mutant import CASES, Mutant, family
from support.mutants.recurrent import DELTA_RULE

__all__ = ["MUTANTS", "Mutant"]

DRAFTS, OPTIONS, HOSTILE = (f"tests/ops/test_{name}.py" for name in ("verify_drafts", "options", "hostile"))
LOGPROBS = "tests/ops/test_token_logprobs.py"
GROWN, SAMPLED = "tests/ops/test_expand_tree.py", "tests/ops/test_sampling.py"
CHOSEN = tuple(
    f"tests/generation/test_{name}.py"
    for name in ("combined_drafter", "tree_tuner", "generate_drafters", "block_drafter")
)
LENGTHS = ("tests/generation/test_length_limits.py",)
PROPOSALS = ("tests/ops/test_ngram_texts.py", "tests/ops/test_proposers.py")
HYBRID = ("tests/generation/test_generate.py", "tests/generation/test_generate_hybrid.py")


def of_options(name: str, line: str, broken: str, tests: tuple[str, ...] = (CASES,)) -> Mutant:
    return Mutant(name, "core/options.h", line, broken, tests)


DRAWS = ("tests/ops/test_sampling_rows.py",)
of_noise = family("core/{}.h", (SAMPLED,), "cpu", "cpu and (chi_square or noise)")
of_drafting = family("cuda/drafting/{}.cu", PROPOSALS, "simt", "simt")
of_fitting = family("cuda/drafting/{}.cu", (CASES,), "simt", "simt and (best_first or select_nodes)")
of_ways = family("cuda/logits/{}.cuh", DRAWS, "simt", "simt")
of_chip = family(
    "cuda/logits/{}.cuh", (CASES, *DRAWS), "simt", "verify_sampled and (simt or clusters) or draws_on_chip"
)
of_states = family("generation/{}.py", HYBRID, "python", "hybrid and not two_ranks")
of_drafts = family("generation/{}.py", CHOSEN, "python", "test")
of_limits = family("generation/{}.py", LENGTHS, "python", "test")


def of_top(name: str, line: str, broken: str, file: str = "cuda/logits/top_tokens.cuh") -> Mutant:
    only = "simt and (expand or logprobs) or test_clusters"
    return Mutant(name, file, line, broken, (GROWN, LOGPROBS, CASES), "simt", only)


def of_rotary(name: str, file: str, line: str, broken: str, backend: str = "cpu") -> Mutant:
    return Mutant(name, file, line, broken, ("tests/ops/test_rope_append.py",), backend, backend)


RULES = [
    Mutant(
        "siblings share one residual", "core/verify/rejection.h",
        "subtract_draft(p, rows, distributions, token, 1.0, left);",
        "if (rank == 0) subtract_draft(p, rows, distributions, token, 1.0, left);",
    ),
    Mutant(
        "the residual is not normalised", "core/verify/rejection.h",
        "u * q * left.mass < r * left.draft_mass", "u * q * distributions.total < r",
    ),
    Mutant(
        "the draft's distribution is not normalised without the tried", "core/verify/rules.h",
        "left.draft_mass = sums.draft;", "left.draft_mass = 1.0;",
    ),
    Mutant("repeated tokens count twice", "core/verify/rejection.h", "token < 0 || rows.is_tried(token)", "token < 0"),
    Mutant(
        "a coin on its bound accepts", "core/verify/rejection.h",
        "u * q * left.mass < r *", "u * q * left.mass <= r *",
    ),
    Mutant(
        "a shared coin on its bound accepts", "core/verify/rejection.h",
        "cumulative > bound", "cumulative >= bound",
    ),
    Mutant("a block's coin on its bound accepts", "core/verify/block.h", "walk.node) < h", "walk.node) <= h"),
    Mutant(
        "a path's coin on its bound accepts", "core/verify/traversal.h",
        "at.node) < at.weight", "at.node) <= at.weight",
    ),
    Mutant(
        "rows of the root for all nodes", "core/verify/rejection.h",
        "rows.open(p, b, walk.row(),", "rows.open(p, b, walk.rows.begin,",
    ),
    Mutant(
        "the bonus from the root's row", "cpu/isa/logits/verify_rules.cpp",
        "logit_row(p.logits, walk.row())", "logit_row(p.logits, walk.rows.begin)",
    ),
    Mutant(
        "drafts drawn with the target's noise", "core/drafting.h",
        "law == GrowthLaw::kCoupled ?", "law != GrowthLaw::kTopK ?",
    ),
    Mutant(
        "cousins draw by the same random numbers", "core/drafting.h",
        "RandomUse::kGumbel : draft_use(f)", "RandomUse::kGumbel : draft_use(0)",
    ),
    Mutant(
        "drafts drawn with their own coins", "cpu/isa/logits/draw_children.cpp",
        "static_cast<uint32_t>(r), draw.use", "static_cast<uint32_t>(r), RandomUse::kCoin",
    ),
    Mutant(
        "the best tokens instead of draws", "cpu/isa/logits/draw_children.cpp",
        "log_exact<ScalarMath>(mass) + noise.of_token(begin + at);", "log_exact<ScalarMath>(mass);",
    ),
    Mutant(
        "joint acceptance as a capped ratio", "core/verify/block.h",
        "return whole > kRounding ? z / whole : 1.0;", "return whole > 0.0 ? min_of(z / weight, 1.0) : 1.0;",
    ),
    Mutant(
        "independent and distinct draws mistaken for each other", "core/verify/rules.h",
        "if (p.law == DraftLaw::kSwor) rows.mark_tried(token);",
        "if (p.law == DraftLaw::kIid) rows.mark_tried(token);",
    ),
    Mutant(
        "the other order of filters", "core/sampling.h",
        "Sampling sampling{0.0f, 0, 1.0f, 0.0f, p.joint};",
        "Sampling sampling{0.0f, 0, 1.0f, 0.0f, !p.joint};",
    ),
    Mutant(
        "coins that reach 1", "core/verify/rules.h",
        "return uniform_of(seed, position, static_cast<uint32_t>(index), RandomUse::kCoin);",
        "return static_cast<float>(uniform_of(seed, position, static_cast<uint32_t>(index), RandomUse::kCoin));",
        (DRAFTS,),
    ),
    Mutant(
        "the first sequence's seed for all", "core/verify/rules.h",
        "static_cast<uint64_t>(p.verify.seeds[b]);", "static_cast<uint64_t>(p.verify.seeds[0]);",
    ),
    Mutant(
        "offsets of 32 bits", "core/sampling.h",
        "static_cast<const char*>(p.data) + row * p.row_stride * bytes",
        "static_cast<const char*>(p.data) + static_cast<uint32_t>(row * p.row_stride * bytes)", (HOSTILE,),
        only="cpu and huge",
    ),
    Mutant(
        "the last block of the vocabulary left out", "cpu/isa/logits/mass_sums.h",
        "block < MassTable::num_blocks(vocab); ++block) {\n    table",
        "block < max_of<int64_t>(vocab / kMassBlock, 1); ++block) {\n    table",
    ),
    Mutant(
        "the last token where nothing is left", "core/verify/rules.h",
        "      rows.clear_tried();\n      left.c = 0.0;", "      return p.verify.logits.vocab - 1;",
    ),
    Mutant(
        "what rounding leaves taken for a residual", "core/verify/rules.h",
        "constexpr double kRounding = 1e-6;", "constexpr double kRounding = 0.0;", (DRAFTS,),
    ),
    Mutant(
        "joint rules with the coins of positions", "core/verify/block.h",
        "distributions.root_position, walk.node)", "position_at(distributions.root_position, walk.depth), 0)",
    ),
    Mutant(
        "the distribution of node n is row n of the draft's", "core/verify/rules.h",
        "p.draft_rows.data == nullptr ? row : integer_at(p.draft_rows, row)", "row",
    ),
    Mutant(
        "a typical bound that lets equals pass", "core/verify/typical.h",
        "!(rows.target(distributions, token) > bound)", "!(rows.target(distributions, token) >= bound)",
    ),
    Mutant("a token too many", "core/tree_walk.h", "p.tokens_left[b], 0", "p.tokens_left[b] + 1, 0"),
    Mutant("a limit that ends no sequence", "core/step.h", "ended = ended || kept == left;", ""),
    of_noise("the first member has the least of a group", "noise", "return words[0] >> 29;", "return 0;"),
    of_noise("the least of eight as the least of one", "noise", " * (1.0f / kNoiseGroup)", ""),
    of_noise("members that share a word", "noise", "member + (member < first())", "member | 1"),
]  # fmt: skip

ON_PATH = "at.go_up()) count += at.token() == token;"
PENALISED = "penalised<ScalarMath>(penalties, {}, count_of(token, may_be_on_path), in_prompt(token))"
REQUESTS = [
    of_options("drafts of the path are not counted", ON_PATH, "at.go_up()) count += 0;"),
    of_options(
        "the root counted once more", ON_PATH,
        ON_PATH + "\n    if (may_be_on_path && node != 0) count += PathPlace{o, root, 0}.token() == token;",
    ),
    of_options(
        "the node itself is not on its path", "PathPlace path() const { return {o, root, node}; }",
        "PathPlace path() const { return {o, root, node == 0 ? 0 : o.parents[root + node]}; }",
    ),
    of_options("bias after penalties", PENALISED.format("biased"), PENALISED.format("biased - bias") + " + bias"),
    of_options(
        "frequency counts once", "M::fma(M::splat(penalties.frequency), count,",
        "M::fma(M::splat(penalties.frequency), M::select(said, M::splat(1.0f), M::splat(0.0f)),",
    ),
    of_options(
        "frequency is rounded once", "logit = logit - M::fma(M::splat(penalties.frequency), count, M::splat(0.0f));",
        "logit = M::fma(M::splat(-penalties.frequency), count, logit);", (OPTIONS,),
    ),
    of_options(
        "the prompt counts as output", "return M::select(said, logit - penalties.presence, logit);",
        "return M::select(said | in_prompt, logit - penalties.presence, logit);",
    ),
    of_options(
        "negative logits are divided, too", "M::select(logit > 0.0f, logit / penalties.repetition,",
        "M::select(logit > -1e30f, logit / penalties.repetition,",
    ),
    of_options(
        "biased tokens may come though they are forbidden", "if (!is_allowed(row, column) || raw == -kInfinity)",
        "if (raw == -kInfinity)",
    ),
    of_options("the first sequence's options for all", "sequence(b), root(row)", "sequence(0), root(row)"),
    of_options("words begin before history_start", "} else if (left > start) {", "} else if (left > 0) {"),
    of_options("words do not end in the path", "if (!at.at_root()) {\n        token", "if (false) {\n        token"),
    of_options("stop ids one token too late", "+ 1) < o.min_position[sequence]", "+ 1) <= o.min_position[sequence]"),
    of_options(
        "the root's position for all nodes", "o.cu_nodes == nullptr || node == 0 ? 0 : o.depths[root + node];", "0;"
    ),
    of_options(
        "stop ids forbidden though nothing else is left",
        "return r_.stops == Stops::kForbid || writer_.any_finite(is_stop);", "return true;",
    ),
    Mutant(
        "a token listed twice is biased once", "cpu/isa/logits/options.cpp",
        "scratch.bias[column] += value == value", "scratch.bias[column] = value == value",
    ),
    Mutant(
        "one row's bias on the next", "cpu/isa/logits/options.cpp",
        "[&](int64_t column, float) { scratch.bias[column] = 0.0f; }", "[&](int64_t, float) {}",
    ),
    Mutant(
        "a NaN under options is not told", "cpu/isa/logits/peak.h",
        "peak.has_nan = lane_bits(nan) != 0;\n  int64_t best", "int64_t best",
    ),
    Mutant(
        "the last row's biases and drafts on this one", "cpu/isa/logits/options.cpp",
        "scratch.patched[scratch.columns[i] / 32] = 0;", "scratch.patched[scratch.columns[i] / 32] |= 0;",
    ),
    Mutant(
        "penalties that raise logits taken for those that lower them", "cpu/isa/logits/options.cpp",
        "scratch.lowers = penalties.repetition >= 1.0f && penalties.presence >= 0.0f && penalties.frequency >= 0.0f;",
        "scratch.lowers = true;",
    ),
    Mutant(
        "blocks of biased tokens not looked at", "cpu/isa/logits/peak.h",
        "a.most[block] = max_of(a.most[block], value);", "",
    ),
    Mutant(
        "biased tokens not among the largest logits", "cpu/isa/logits/peak.h",
        "peak = max_of(peak, value);", "", (OPTIONS,),
    ),
    Mutant(
        "too few logits above the bounds of others", "cpu/isa/logits/filter.h",
        "if (list.size >= top_k || least == -kMaxFloat || scale(least) < view.min_x) break;", "break;", (OPTIONS,),
    ),
    Mutant(
        "bounds of penalties that raise logits", "cpu/isa/logits/adjusted_row.h",
        "reads_all_ = least == -kInfinity || !a_.lowers;", "reads_all_ = least == -kInfinity;",
    ),
    Mutant(
        "adjusted blocks of the row before", "cpu/isa/logits/options.cpp",
        "std::fill_n(scratch.is_kept, num_blocks, false);", "",
    ),
    Mutant(
        "vectors of biased tokens left out", "cpu/isa/logits/adjusted_row.h",
        "word * 32 < count * kLanes && a_.num_patched > 0;", "word < 0;",
    ),
    Mutant(
        "tokens behind EOS are counted", "core/step.h",
        "count_tokens(p, b, kept)", "count_tokens(p, b, kept == 0 ? 0 : p.num_accepted[b] + 1)",
    ),
    Mutant("a threshold's own mass above it", "cpu/isa/logits/filter.h", "if (!reached) cut.above", "cut.above"),
    Mutant(
        "top-p of the blocks' peaks alone", "cpu/isa/logits/sampling.cpp",
        "mass_ = mass_of_all<T>(view_);", "mass_ = mass_of_peaks();", (SAMPLED,),
    ),
    Mutant("ranks without ties", "cpu/isa/logits/logprobs.cpp", ">= splat(logit)", "> splat(logit)"),
    Mutant(
        "log-probabilities of what filters drop", "core/logprobs.h",
        "logit == -kInfinity || !distribution.filter.keeps(token, logit, x)", "logit == -kInfinity",
    ),
]  # fmt: skip

ON_CHIP = [
    of_chip("an exchange that is not waited for", "slice",
            "    ptx::mbar_wait(&shared.exchanged[at], turn >> 1 & 1);\n", ""),
    of_chip("tokens of other CTAs that are not waited for", "slice",
            "    ptx::mbar_wait(&shared_.gathered, turns_.lists++ & 1u);\n", ""),
    of_chip("a slice mended before it arrived", "draws_sm90", "    receive();\n    uint64_t", "uint64_t"),
    of_chip("a grammar that forbids other tokens of a slice", "slice", "count_, token_of(0), row", "count_, 0, row"),
]  # fmt: skip

DRAFTED = [
    Mutant(
        "links that lead out of a block are not counted", "cuda/trees.cu",
        "links = parent >= 0 ? 1 : 0;", "links = parent >= block ? 1 : 0;",
        ("tests/ops/test_trees.py",), "simt", "simt",
    ),
    Mutant(
        "broken links taken for roots", "cuda/trees.cu", "constexpr int16_t kNothing = -1, kBrokenLink = -2;",
        "constexpr int16_t kNothing = -1, kBrokenLink = -1;", ("tests/ops/test_trees.py",), "simt", "simt",
    ),
    of_drafting(
        "places of other CTAs are not found", "ngram",
        "threadIdx.x / 32], 0) = count;", "threadIdx.x / 32], 0) = ptx::cluster_rank() == 0 ? count : 0;",
    ),
    of_drafting(
        "older tokens of pairs listed first", "ngram",
        "if (is_newer) places[at++] = place;\n      if (is_older) places[at] = place + 1;",
        "if (is_older) places[at++] = place + 1;\n      if (is_newer) places[at] = place;",
    ),
    of_drafting(
        "long paths are cut every 32 nodes", "ngram",
        "if (lane == 0 && begin > 0 && added > 0) trie.first_child[node - 1] = trie.last_child[node - 1] = node;", "",
    ),
    of_drafting(
        "tokens of half a pair are left out", "ngram",
        "if (newer - 1 == newest) pairs[i].older = text.tokens[newest];", "",
    ),
    of_fitting("the last bin is always kept as a whole", "select_nodes", "while (shared.size != count && shift > 0);",
               "while (shared.size != count && shift > 32);"),
    of_fitting("trees of the first round alone are counted", "select_nodes", "    before += total;\n", ""),
    of_fitting(
        "trees end where their first thread's nodes do", "select_nodes",
        "thread_of_tree == kThreadsOfTree - 1", "thread_of_tree == 0",
    ),
    of_fitting(
        "ties of one lane's nodes are not seen", "best_first",
        "ties = joints[slot] > joint ? false : ties || joints[slot] == joint;", "ties = false;",
    ),
    of_fitting("a parent that is as good as before", "best_first", "    open.set(parent, next.joint);\n", ""),
]  # fmt: skip


STATES = [
    of_states(
        "states that follow the root alone", "recurrent_step",
        "accept_index, num_accepted, **options)", "accept_index, num_accepted.clamp(max=0), **options)",
    ),
    of_states("states that keep what was there before", "recurrent_states", "states[index] = 0", "states[index]"),
    of_states(
        "generated tokens that are read again as prompts", "recurrent_step",
        "is_generated=positions >= prompt_lens[owner]", "is_generated=rows >= cu_seqlens_q[first]",
    ),
    of_states(
        "outcomes with the states of a later token", "scheduler",
        "return sequence.shared_len - sequence.cached", "return len(sequence.tokens) - sequence.cached",
    ),
]  # fmt: skip

CHOICE = [
    of_drafts(
        "a draft model that is told of other sequences' trees", "drafters/model",
        "places[s.index] for s in self._selected", "i for i, s in enumerate(self._selected)",
    ),
    of_drafts(
        "nodes under guesses that nobody verified", "tree_tuner",
        "if nodes.rows is None else nodes.rows.tolist()", "if True else nodes.rows.tolist()",
    ),
    of_drafts(
        "what one sequence wins for all", "tree_tuner",
        "of_all if plan.others_wait else last + (of_all - last) / len(counts)", "of_all",
    ),
    of_drafts("batch sizes that begin with nothing", "tree_tuner", "if self.costs:\n", "if False:\n"),
    of_drafts(
        "states of an earlier batch that are lost", "drafters/medusa",
        "if self._newest is not None and self._newest[0] != indices:", "if False:",
    ),
    of_drafts(
        "features of plain steps that are lost", "drafters/block",
        "self._waiting.sort()\n        self._read_waiting()\n        start", "self._read_waiting()\n        start",
    ),
    of_drafts(
        "what a drafter reads first, laid to its levels", "tree_tuner",
        "drafting - reading, seconds - reading", "drafting, seconds",
    ),
    of_drafts("siblings left out before others", "tree_tuner", "min(least[place], odds[kind])", "odds[kind]"),
    of_drafts("steps without a guess that tell nothing", "tree_tuner", "depths[row] < (plan.depth or 0)", "False"),
    Mutant(
        "drafts that are weighed by another drafter's probabilities", "generation/drafters/limits.py",
        "else d.draft_rows + before", "else d.draft_rows",
        ("tests/generation/test_generate_rules.py",), "python", "two",
    ),
    of_drafts("drafters that cost nothing", "drafters/combined", "(1.0 + sum(costs[d] for d in set(way)))", "1.0"),
    of_drafts(
        "what was counted for one sequence counts for all", "drafters/combined",
        "return of_all if odds is None", "return of_all if True",
    ),
    of_drafts("a drafter that was bad once is never asked again", "drafters/combined", ">= LOOK_AFTER", ">= 10**9"),
]  # fmt: skip

LIMITS = [
    of_limits("trees that are not cut", "drafters/limits", "draft.trees.max_depth > min(self._limits)", "False"),
    of_limits("trees of captured steps that are not cut", "fixed_step", "draft.trees.max_depth > 0", "False"),
    of_limits("nodes that reach one token too far", "drafters/limits", "max_length - 2", "max_length - 1"),
    of_limits(
        "trees of a batch cut by the limits of others", "drafters/limits",
        "limits[tree.clamp(max=trees.batch_size - 1)]", "limits[tree.clamp(max=0)]",
    ),
    of_limits(
        "a draft model that is asked past its positions", "drafters/limits",
        "if count is None or s.root < count]", "if True]",
    ),
    of_limits("levels read past the last position", "drafters/model", "self.num_positions - 1)", "self.num_positions)"),
]  # fmt: skip

TOP = [
    of_top("NaN that nobody looks at again", "!(best.logit < stored_.largest())", "false", "cuda/logits/reader.cuh"),
    of_top("a threshold that too few tokens reach", "shared.best[count - 1]", "shared.best[count / 2]"),
    of_top("ties that no search looks at", "if (shared.too_many) {", "if (shared.too_many == 2) {"),
    of_top("groups that share threads", "int apart = 1 << bits >> 1;", "int apart = 16;"),
    of_top("blocks of other CTAs", "block = first + i * blocks.step", "block = blocks.first + i"),
    of_top("partial sums that are loaded twice", "load(token + kAhead * kSumPartials);", "load(token);"),
]

WAYS = [
    of_ways("more noted than there is room for", "race", "count <= RaceCandidates::kMost;", "count > 0;"),
    of_ways("a draw by rounding", "kept_tokens", "if (before >= needed_at_least) flag = kFlag;", ""),
    of_ways("the ties of the k-th left out", "kept_tokens", "(of_warp) & ~kIds;", "(of_warp);"),
    of_ways("a list of notes cut off", "kept_tokens", "place < KeptCandidates::kMost)", "place < 16)"),
    of_ways("ties at a threshold all kept", "filters", "if (ties == cut.at.count) return", "if (ties > 0) return"),
]

ROTARY = [
    of_rotary(
        "columns behind the rotated ones taken from their place",
        "cuda/kv_cache.cu",
        "at < p.rotary_start ? at : at + p.rotary_dim;",
        "at;",
        "simt",
    ),
    of_rotary(
        "sines of the next position",
        "cpu/isa/rotate.cpp",
        "cosines + half * kAngleSize;",
        "cosines + 2 * half * kAngleSize;",
    ),
    of_rotary(
        "rotation the other way",
        "cpu/isa/rotate.cpp",
        "x.second * cos + x.first * sin}",
        "x.second * cos - x.first * sin}",
    ),
]

MUTANTS = TOP + LIMITS + CHOICE + RULES + REQUESTS + DRAFTED + WGMMA + WIDE + LATENT_WGMMA + DELTA_RULE + STATES
MUTANTS += WAYS + ROTARY + ENGINE + JOINED + ON_CHIP + SEGMENTS
