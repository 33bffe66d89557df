"""Mutants of the gated delta rule's CUDA kernels."""

from __future__ import annotations

from support.mutants.mutant import Mutant, family

KERNELS, RECURRENT, DECAYS = (f"tests/ops/test_recurrent{name}.py" for name in ("_kernels", "", "_decays"))
of_delta_rule = family("cuda/recurrent/{}.cuh", (KERNELS, RECURRENT), "simt", "simt and not channel")
of_channel_decays = family("cuda/recurrent/{}.cuh", (DECAYS, KERNELS), "simt", "simt")

DELTA_RULE = [
    of_delta_rule("channels of a state twice", "few_tokens", "state.x[step][half * 2 + 1][n]",
                  "state.x[step][half * 2][n]"),
    of_delta_rule("channels of a state twice, of short trees", "short_tokens", "state.x[step][half * 2 + 1][n])",
                  "state.x[step][half * 2][n])"),
    of_delta_rule("half of a path in lanes", "short_tokens", "mask |= of_mask;", "if (reach == 1) mask |= of_mask;"),
    of_delta_rule("turns that know nothing of those before", "few_tokens", "for (int32_t m = 0; m < begin; m += 4)",
                  "for (int32_t m = begin; m < begin; m += 4)"),
    of_delta_rule("weights of 0 times what is infinite", "few_tokens",
                  "if ((paths[tile] >> (m + j) & 1) == 0) continue;",
                  "for (int w = 0; w < 2; ++w) weights[tile][w].x[j] *= paths[tile] >> (m + j) & 1;"),
    of_delta_rule("an eps of norms that is not read", "numbers", "squares + p.l2norm_eps", "squares + 1e-6f"),
    Mutant(
        "an eps of norms that the CPU does not read", "cpu/isa/recurrent/delta_rule.cpp", "reduce_add(sum) + eps",
        "reduce_add(sum) + 1e-6f + 0.0f * eps", (RECURRENT,), only="eps and cpu",
    ),
    of_delta_rule("weights of keys without beta", "few_tokens", "if (t.p.beta != nullptr) sums", "sums"),
    of_delta_rule("rows behind all trees as they were", "few_tokens", "used.end, p.tokens.num_rows);", "0, 0);"),
    of_delta_rule("a state with the u of few tokens as they were", "few_tokens", "u[e] * factor : 0.0f", "u[e] : 0.0f"),
    of_channel_decays("no token walks", "path_decays", "product < kLeastProduct) ? -1.0f", "false) ? -1.0f"),
    of_channel_decays("products of the token before", "path_decays", "decay * products[parent * kSignChannels",
                      "decay * products[(i - 1) * kSignChannels"),
    of_channel_decays("keys as they are, in turns", "few_tokens", "t.path_decays(other).four(channel)",
                      "Four{{1.0f, 1.0f, 1.0f, 1.0f}}"),
    of_channel_decays("rows that read the state with decays of the first step", "few_tokens",
                      "t.path_decays(second).four(channel)", "t.path_decays(second).four(0)"),
    of_channel_decays("a state without the decays of few tokens", "few_tokens", "decay[j] *= decays.x[j];", ""),
    of_channel_decays("keys as they are, in chunks", "products", "t.path_decays(m).four(channel)",
                      "Four{{1.0f, 1.0f, 1.0f, 1.0f}}"),
    of_channel_decays("a walk that begins with the decays of the token above", "walks",
                      "tokens.rows[token] * p.g_token_stride", "tokens.rows[above] * p.g_token_stride"),
]  # fmt: skip
