"""Reference of the ops with a recurrent state, in float64 and with one state per node."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

import torch
from torch import Tensor

from pagedtree.tree import TreeBatch


def _sequences(trees: TreeBatch | None, cu_seqlens: Tensor | None) -> Iterator[list[tuple[int, int]]]:
    """Lists the reachable rows of each sequence and their parents' rows, -1 for none, parents first."""
    offsets = (trees.cu_nodes if trees is not None else cu_seqlens).tolist()  # type: ignore[union-attr]
    for begin, end in pairwise(offsets):
        if trees is None:
            yield [(row, row - 1 if row > begin else -1) for row in range(begin, end)]
            continue
        parents, depths = trees.parents.tolist(), trees.depths.tolist()
        above = {begin: -1} if begin < end else {}
        for row in range(begin + 1, end):
            if depths[row] >= 0 and begin + parents[row] in above:
                above[row] = begin + parents[row]
        yield list(above.items())


def delta_rule_states(
    k: Tensor, v: Tensor, g: Tensor, beta: Tensor | None, state: Tensor, slot: int,
    rows: Sequence[tuple[int, int]], eps: float | None,
) -> dict[int, Tensor]:  # fmt: skip
    """Returns the state [H, Dk, Dv] after each row of one sequence. eps: for the keys' norms, None: no norms."""
    slots, heads, key_dim, value_dim = state.shape
    empty = torch.zeros(heads, key_dim, value_dim, dtype=torch.float64)
    states = {-1: state[slot].double() if 0 <= slot < slots else empty}
    for row, parent in rows:
        key = _heads(k[row], heads, eps)
        decay = g[row].double().exp().reshape(heads, -1, 1)
        decayed = torch.where(decay == 0, 0.0, decay * states[parent])
        if beta is None:
            update = v[row].double()
        else:
            update = beta[row].double()[:, None] * (v[row].double() - torch.einsum("hkv,hk->hv", decayed, key))
        states[row] = decayed + torch.einsum("hk,hv->hkv", key, update)
    return states


def _heads(x: Tensor, heads: int, eps: float | None) -> Tensor:
    x = x.double()
    if eps is not None:
        x = x / (x.square().sum(-1, keepdim=True) + eps).sqrt()
    return x.repeat_interleave(heads // x.shape[0], dim=0)


def tree_delta_rule(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor | None, state: Tensor, state_index: Tensor,
    trees: TreeBatch | None, *, cu_seqlens: Tensor | None = None, scale: float | None = None, l2norm: bool = False,
    l2norm_eps: float = 1e-6,
) -> Tensor:  # fmt: skip
    eps = l2norm_eps if l2norm else None
    out = torch.zeros(v.shape, dtype=torch.float64)
    factor = q.shape[-1] ** -0.5 if scale is None else scale
    for slot, rows in zip(state_index.tolist(), _sequences(trees, cu_seqlens), strict=True):
        states = delta_rule_states(k, v, g, beta, state, slot, rows, eps)
        for row, _ in rows:
            out[row] = factor * torch.einsum("hkv,hk->hv", states[row], _heads(q[row], v.shape[1], eps))
    return out


def _paths(
    trees: TreeBatch | None, cu_seqlens: Tensor | None, accept_index: Tensor | None, num_accepted: Tensor | None
) -> Iterator[list[tuple[int, int]]]:
    """Lists the rows that advance each sequence's state, and their parents; empty for an invalid path."""
    for b, rows in enumerate(_sequences(trees, cu_seqlens)):
        if trees is None or accept_index is None or num_accepted is None:
            yield rows
            continue
        accepted, begin, above = int(num_accepted[b]), int(trees.cu_nodes[b]), dict(rows)
        nodes = [-1] if accepted < 0 else accept_index[b, : accepted + 1].tolist()
        path = [begin + node for node in nodes]
        links = list(zip(path, [-1, *path], strict=False))
        is_path = len(path) == accepted + 1 and all(row in above and above[row] == parent for row, parent in links)
        yield links if is_path else []


def advance_state(
    state: Tensor, state_index: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor | None, trees: TreeBatch | None,
    accept_index: Tensor | None = None, num_accepted: Tensor | None = None, *, cu_seqlens: Tensor | None = None,
    l2norm: bool = False, l2norm_eps: float = 1e-6,
) -> Tensor:  # fmt: skip
    eps = l2norm_eps if l2norm else None
    out = state.double()
    paths = _paths(trees, cu_seqlens, accept_index, num_accepted)
    for slot, rows in zip(state_index.tolist(), paths, strict=True):
        if rows and 0 <= slot < len(state):
            out[slot] = delta_rule_states(k, v, g, beta, state, slot, rows, eps)[rows[-1][0]]
    return out


def tree_conv1d(
    x: Tensor, weight: Tensor, bias: Tensor | None, conv_state: Tensor, state_index: Tensor, trees: TreeBatch | None,
    *, cu_seqlens: Tensor | None = None, activation: str | None = None,
) -> Tensor:  # fmt: skip
    out, width = torch.zeros(x.shape, dtype=torch.float64), weight.shape[1]
    for slot, rows in zip(state_index.tolist(), _sequences(trees, cu_seqlens), strict=True):
        has_state = 0 <= slot < len(conv_state)
        past = conv_state[slot].double() if has_state else torch.zeros(conv_state.shape[1:], dtype=torch.float64)
        inputs = {-1: past}
        for row, parent in rows:
            inputs[row] = torch.cat([inputs[parent], x[row].double()[:, None]], 1)
            total = (weight.double() * inputs[row][:, -width:]).sum(1)
            out[row] = total if bias is None else total + bias.double()
    return torch.nn.functional.silu(out) if activation == "silu" else out


def advance_conv(
    conv_state: Tensor, state_index: Tensor, x: Tensor, trees: TreeBatch | None, accept_index: Tensor | None = None,
    num_accepted: Tensor | None = None, *, cu_seqlens: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Returns the new states, of their dtype."""
    out = conv_state.clone()
    paths = _paths(trees, cu_seqlens, accept_index, num_accepted)
    for slot, rows in zip(state_index.tolist(), paths, strict=True):
        if rows and 0 <= slot < len(conv_state):
            columns = x[[row for row, _ in rows]].T
            out[slot] = torch.cat([conv_state[slot], columns], 1)[:, columns.shape[1] :]
    return out
