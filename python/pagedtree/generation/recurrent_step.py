"""The recurrent layers' part of a packed pass."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

from pagedtree import TreeBatch, advance_conv, advance_state, tree_conv1d, tree_delta_rule
from pagedtree._arguments import refusal
from pagedtree.generation.recurrent_states import RecurrentStates


@dataclass
class RecurrentStep:
    """The rows of one packed pass: first prefill rows, then rows of trees.

    Prefill rows update the states in the pass. Each layer keeps its inputs at the trees' rows, from which `advance`
    applies the accepted paths.

    Attributes:
        states: of every sequence.
        read_index: int32 [R], states of the sequences in prefill. cu_seqlens: int32 [R + 1], their rows, num_read in
            all.
        tree_index: int32 [B], states of the trees' sequences. trees: B of them; their rows follow.
        is_generated: bool [T], rows of generated or drafted tokens, also of restored ones.
        layers_run: layer_idx of the layers that have run in this pass.
    """

    states: RecurrentStates
    read_index: Tensor
    cu_seqlens: Tensor
    num_read: int
    tree_index: Tensor
    trees: TreeBatch
    is_generated: Tensor
    layers_run: set[int] = field(default_factory=set)
    _advances: list[tuple[Any, ...]] = field(default_factory=list)  # op, name of the state, inputs, options

    @classmethod
    def of(
        cls,
        states: RecurrentStates,
        state_index: Tensor,
        prompt_lens: Tensor,
        trees: TreeBatch,
        cu_seqlens_q: Tensor,
        positions: Tensor,
        num_read: int = 0,
    ) -> RecurrentStep:
        """Returns the step of R sequences that read num_read tokens, and B trees. state_index: int32 and prompt_lens:
        int64 [R + B]. cu_seqlens_q: int32 [R + B + 1]. positions: int64 [T]."""
        first = state_index.shape[0] - trees.batch_size
        rows = torch.arange(positions.shape[0], dtype=torch.int32, device=positions.device)
        # The sequence of each row; padding after the trees belongs to the last.
        owner = torch.searchsorted(cu_seqlens_q[1:], rows, right=True).clamp(max=state_index.shape[0] - 1)
        return cls(
            states,
            read_index=state_index[:first],
            cu_seqlens=cu_seqlens_q[: first + 1],
            num_read=num_read,
            tree_index=state_index[first:],
            trees=trees,
            is_generated=positions >= prompt_lens[owner],
        )

    def convolve(
        self, layer: int, x: Tensor, weight: Tensor, bias: Tensor | None, activation: Literal["silu"] | None
    ) -> Tensor:
        """Applies the short convolution of layer `layer`: x [T, C], weight [C, W], bias [C] or None -> [T, C]. Raises
        ValueError if a layer runs twice: it has one state."""
        if layer in self.layers_run:
            raise refusal("model", "each recurrent layer to run once in a pass", f"layer_idx {layer} again")
        self.layers_run.add(layer)
        name = (layer, "conv")
        state = self.states.tensor(name, (x.shape[1], weight.shape[1] - 1), x.dtype)
        out = []
        if self.num_read:
            read, cu_seqlens = x[: self.num_read], self.cu_seqlens
            out.append(
                tree_conv1d(
                    read, weight, bias, state, self.read_index, None, cu_seqlens=cu_seqlens, activation=activation
                )
            )
            advance_conv(state, self.read_index, read, None, cu_seqlens=cu_seqlens)
        if self.trees.batch_size:
            rows = self._tree_rows(x)
            out.append(tree_conv1d(rows, weight, bias, state, self.tree_index, self.trees, activation=activation))
            self._advances.append((advance_conv, name, (rows,), {}))
        return torch.cat(out) if len(out) > 1 else out[0]

    def delta_rule(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor | None, *, l2norm: bool, scale: float
    ) -> Tensor:
        """Applies the recurrence of layer `layer` to all T rows. Arguments and result are as in `tree_delta_rule`."""
        name = (layer, "state")
        state = self.states.tensor(name, (v.shape[1], k.shape[2], v.shape[2]), torch.float32)
        out, n = [], self.num_read
        if n:
            tokens = k[:n], v[:n], g[:n], None if beta is None else beta[:n]
            index, cu_seqlens = self.read_index, self.cu_seqlens
            out.append(
                tree_delta_rule(q[:n], *tokens, state, index, None, cu_seqlens=cu_seqlens, scale=scale, l2norm=l2norm)
            )
            advance_state(state, index, *tokens, None, cu_seqlens=cu_seqlens, l2norm=l2norm)
        if self.trees.batch_size:
            rows = self._tree_rows
            nodes = rows(k), rows(v), rows(g), None if beta is None else rows(beta)
            out.append(tree_delta_rule(q[n:], *nodes, state, self.tree_index, self.trees, scale=scale, l2norm=l2norm))
            self._advances.append((advance_state, name, nodes, {"l2norm": l2norm}))
        return torch.cat(out) if len(out) > 1 else out[0]

    def advance(self, accept_index: Tensor, num_accepted: Tensor) -> None:
        """Applies the accepted paths of a verdict, accept_index int32 [B, S] and num_accepted int32 [B]."""
        for advance, name, inputs, options in self._advances:
            state = self.states[name]  # may have moved since the pass
            advance(state, self.tree_index, *inputs, self.trees, accept_index, num_accepted, **options)
        self._advances.clear()

    def _tree_rows(self, rows: Tensor) -> Tensor:
        """Returns a copy of the trees' rows; a view would keep the prefill rows alive until `advance`."""
        return rows[self.num_read :].clone() if self.num_read else rows
