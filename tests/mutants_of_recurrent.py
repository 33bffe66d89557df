"""Mutants of the gated delta rule's CUDA kernels."""

from __future__ import annotations

from mutant import Mutant


def of_delta_rule(name: str, file: str, line: str, broken: str, only: str = "simt and not channel") -> Mutant:
    tests = ("tests/ops/test_recurrent_kernels.py", "tests/ops/test_recurrent.py")
    return Mutant(name, f"cuda/recurrent/{file}.cuh", line, broken, tests, "simt", only)


def of_channel_decays(name: str, file: str, line: str, broken: str) -> Mutant:
    tests = ("tests/ops/test_recurrent_decays.py", "tests/ops/test_recurrent_kernels.py")
    return Mutant(name, f"cuda/recurrent/{file}.cuh", line, broken, tests, "simt", "simt")


DELTA_RULE = [
    of_delta_rule("the ring a step ahead", "tree", "copies.start((stage + kStages - 1) % kStages);",
                  "copies.start((stage + kStages - 2) % kStages);"),
    of_delta_rule("columns of a state for its channels", "tree", "Copies::kByChannel ? state[n][half * 2 + 1]",
                  "Copies::kByChannel ? state[half * 2 + 1][n]"),
    of_delta_rule("a block without ancestors of the last tile left out", "tree_solve", "all |= mask;", "all = mask;"),
    of_delta_rule("weights of 0 times what is infinite", "tree_solve", "infinite |= 1u << first / kTile;", ";"),
    of_delta_rule("a token's own u in what is left of it", "tree_solve", "near[tile] & ~(1u << (tile * kTile + quad))",
                  "near[tile]"),
    of_delta_rule("an eps of norms that is not read", "numbers", "squares + p.l2norm_eps", "squares + 1e-6f"),
    Mutant(
        "an eps of norms that the CPU does not read", "cpu/isa/recurrent/delta_rule.cpp", "reduce_add(sum) + eps",
        "reduce_add(sum) + 1e-6f + 0.0f * eps", ("tests/ops/test_recurrent.py",), only="eps and cpu",
    ),
    of_delta_rule("weights of keys without beta", "tree", "is_above && t.p.beta != nullptr ? ", "is_above ? "),
    of_delta_rule("rows behind all trees as they were", "tree", "used.end, p.tokens.num_rows);", "0, 0);"),
    of_delta_rule("a state with the u of few tokens before the last weights", "few_tokens",
                  "(is_itself || p.beta == nullptr)", "p.beta == nullptr"),
    of_channel_decays("no token walks", "path_decays", "least < kLeastProduct) ? -1.0f", "false) ? -1.0f"),
    of_channel_decays("products of the token before", "path_decays", "decay * products[parent * kChannels",
                      "decay * products[(i - 1) * kChannels"),
    of_channel_decays("keys over decays of the next step", "tree",
                      "pairs_of(t, token(kSide + half), step).key, kDType), decays[kSide + half]);",
                      "pairs_of(t, token(kSide + half), step).key, kDType), decays_of(t.path_decays<false>("
                      "token(kSide + half)), step + 1));"),
    of_channel_decays("rows that read the state with decays of the first step", "tree", "(tokens[tile]), step + 1);",
                      "(tokens[tile]), 0);"),
    of_channel_decays("keys as they are, in chunks", "products", "path_decays(t, m).four(channel)",
                      "Four{{1.0f, 1.0f, 1.0f, 1.0f}}"),
    of_channel_decays("a walk that begins with the decays of the token above", "walks",
                      "path.row(token) * p.g_token_stride", "path.row(above) * p.g_token_stride"),
]  # fmt: skip
