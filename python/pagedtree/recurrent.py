"""Layers with a recurrent state on draft trees: the gated delta rule, Mamba-2, and the short convolutions before them.

Each sequence has one state; per-node states are never written.
"""

from __future__ import annotations

from typing import Any, Literal

from torch import Tensor

from pagedtree._arguments import expect_type
from pagedtree._ops import call, ops, register_fake
from pagedtree.tree import TreeBatch

__all__ = ["advance_conv", "advance_state", "tree_conv1d", "tree_delta_rule"]


def tree_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor | None,
    state: Tensor,
    state_index: Tensor,
    trees: TreeBatch | None,
    *,
    cu_seqlens: Tensor | None = None,
    scale: float | None = None,
    l2norm: bool = False,
    l2norm_eps: float = 1e-6,
) -> Tensor:
    """Applies the gated delta rule at each node of draft trees, starting from the parent's state.

    Gated DeltaNet has one decay per head, Kimi Delta Attention one per key channel, Mamba-2 no delta (beta None; q = C,
    k = B, v = dt * x, g = dt * A, scale 1; D * x is the caller's). `state` is not changed: see `advance_state`.

    Args:
        q, k: fp16, bf16, on the CPU also fp32 [T, Hk, Dk], last dimension contiguous.
        v: their dtype, [T, H, Dv], last dimension contiguous; H % Hk == 0, and head h reads key head h // (H // Hk). Dk
            and Dv are multiples of 8 up to 256.
        g: fp32 [T, H], any strides, or [T, H, Dk], last dimension contiguous: logarithms of the decays, at most 0 (else
            unspecified but bounded decays); -inf forgets all.
        beta: fp32 [T, H], any strides; None: v is added.
        state: fp32 [slots, H, Dk, Dv], any strides (transformers keeps [H, Dv, Dk]: pass its transpose).
        state_index: int32 [B], the slot of each sequence's state; -1 or outside: zeros.
        trees: the B trees, of at most 256 nodes each; T is their N. None: causal, by cu_seqlens.
        cu_seqlens: int32 [B + 1], first 0, with trees=None: sequences of any length, each row after the one before it.
        scale: of the outputs, default Dk ** -0.5.
        l2norm, l2norm_eps: normalise q and k first: x / sqrt(sum(x ** 2) + l2norm_eps) in fp32; l2norm_eps > 0.

    Returns [T, H, Dv] of v's dtype; 0 for unreachable nodes and rows past the last sequence.

        for b in range(B):
            for n in range(num_nodes[b]):                             # parents come first
                before = state[state_index[b]] if n == 0 else S[parents[n]]
                for h in range(H):
                    decayed = exp(g[n, h])[:, None] * before[h]
                    u = v[n, h] if beta is None else beta[n, h] * (v[n, h] - decayed.T @ k[n, h // (H // Hk)])
                    S[n][h] = decayed + outer(k[n, h // (H // Hk)], u)
                    out[n, h] = scale * S[n][h].T @ q[n, h // (H // Hk)]

    Computed in fp32 without a state per node (docs/notes/recurrent.md); the relative root mean square error against
    float64 is at most 1e-2 (bf16), 2.5e-3 (fp16) or 1e-4 (fp32). Invariant to the batch, the other nodes and the number
    of threads.

    Sources: Gated DeltaNet (Yang et al., 2024), Kimi Linear (Kimi Team, 2025), Mamba-2 (Dao and Gu, 2024).

    Raises ValueError for wrong shapes, dtypes, devices or sizes; with PAGEDTREE_CHECK=1 also for slots outside
    -1..slots - 1 and offsets that descend or pass T.
    """
    tree, rows = _rows(trees, cu_seqlens)
    norm = {"l2norm": l2norm, "l2norm_eps": l2norm_eps}
    return call(ops.tree_delta_rule, q, k, v, g, beta, state, state_index, *tree, **rows, scale=scale, **norm)


def advance_state(
    state: Tensor,
    state_index: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor | None,
    trees: TreeBatch | None,
    accept_index: Tensor | None = None,
    num_accepted: Tensor | None = None,
    *,
    cu_seqlens: Tensor | None = None,
    l2norm: bool = False,
    l2norm_eps: float = 1e-6,
) -> None:
    """Advances the states by the root and the accepted path of each tree.

    Args:
        state: as in `tree_delta_rule`, written.
        state_index: int32 [B]; no slot may appear twice.
        k, v, g, beta, trees, cu_seqlens, l2norm, l2norm_eps: the arguments of `tree_delta_rule`.
        accept_index: int32 [B, S], rows may be strided, the nodes of the path: [b, 0] = 0, each next one a child of the
            one before; None without trees: the whole sequence is applied.
        num_accepted: int32 [B], 0..S - 1; None without trees.

        for b in range(B):
            for n in accept_index[b, : num_accepted[b] + 1]:
                state[state_index[b]] = S[n]                          # as in tree_delta_rule

    Nothing is written for a sequence with a slot outside 0..slots - 1, without a row, or with a path that does not
    lead from the root from child to child (idle: accept_index[b, 0] = -1).

    Raises ValueError for wrong shapes, dtypes, devices or sizes, before anything is written; with PAGEDTREE_CHECK=1
    also for slots outside -1..slots - 1, paths that do not ascend and offsets that descend or pass T.
    """
    tree, rows = _rows(trees, cu_seqlens)
    path = (accept_index, num_accepted)
    norm = {"l2norm": l2norm, "l2norm_eps": l2norm_eps}
    call(ops.advance_state, state, state_index, k, v, g, beta, *tree, *path, **rows, **norm)


def tree_conv1d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    conv_state: Tensor,
    state_index: Tensor,
    trees: TreeBatch | None,
    *,
    cu_seqlens: Tensor | None = None,
    activation: Literal["silu"] | None = None,
) -> Tensor:
    """Applies the short depthwise convolution before such a layer, along each node's path.

    Args:
        x: fp16, bf16, on the CPU also fp32 [T, C], last dimension contiguous.
        weight: x's dtype or fp32 [C, W], any strides, W at most 16; the last column is the token's own.
        bias: weight's dtype [C], or None.
        conv_state: x's dtype [slots, C, W - 1], any strides: the last inputs of each sequence, newest last.
        state_index: int32 [B], the slot of each sequence; -1 or outside: zeros.
        trees, cu_seqlens: as in `tree_delta_rule`.
        activation: None or "silu".

    Returns [T, C] of x's dtype; 0 for unreachable nodes and rows past the last sequence.

        for n in range(num_nodes[b]):
            inputs = [*conv_state[state_index[b]].T, *(x[m] for m in path(n))][-W:]
            out[n] = activation(bias + sum(weight[:, w] * inputs[w] for w in range(W)))

    Sums are fp32. `conv_state` is not changed: see `advance_conv`.

    Source: Mamba (Gu and Dao, 2023).

    Raises as `tree_delta_rule`.
    """
    tree, rows = _rows(trees, cu_seqlens)
    return call(ops.tree_conv1d, x, weight, bias, conv_state, state_index, *tree, **rows, activation=activation)


def advance_conv(
    conv_state: Tensor,
    state_index: Tensor,
    x: Tensor,
    trees: TreeBatch | None,
    accept_index: Tensor | None = None,
    num_accepted: Tensor | None = None,
    *,
    cu_seqlens: Tensor | None = None,
) -> None:
    """Shifts the inputs of the root and the accepted path of each tree into the states of `tree_conv1d`.

    Args:
        conv_state: as in `tree_conv1d`, written.
        state_index: int32 [B]; no slot may appear twice.
        x, trees, cu_seqlens: the arguments of `tree_conv1d`.
        accept_index, num_accepted: as in `advance_state`.

        for b in range(B):
            path = accept_index[b, : num_accepted[b] + 1]
            conv_state[state_index[b]] = [*conv_state[state_index[b]].T, *(x[n] for n in path)][-(W - 1) :].T

    Nothing is written where `advance_state` would write nothing. Raises as `advance_state`.
    """
    tree, rows = _rows(trees, cu_seqlens)
    call(ops.advance_conv, conv_state, state_index, x, *tree, accept_index, num_accepted, **rows)


def _rows(trees: TreeBatch | None, cu_seqlens: Tensor | None) -> tuple[tuple[Tensor | None, ...], dict[str, Any]]:
    if trees is None:
        return (None, None, None), {"cu_seqlens": cu_seqlens}
    expect_type("trees", trees, TreeBatch)
    return (trees.cu_nodes, trees.parents, trees.depths), {"max_nodes": trees.max_nodes, "cu_seqlens": cu_seqlens}


register_fake("tree_delta_rule")(lambda v, **others: v.new_empty(v.shape))
register_fake("tree_conv1d")(lambda x, **others: x.new_empty(x.shape))
for _name in ("advance_state", "advance_conv"):
    register_fake(_name)(lambda **others: None)
