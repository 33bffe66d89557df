"""The interface of language models."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from pagedtree.generation.paged_step import PagedStep


class PassOutput(NamedTuple):
    """The results of a pass over T packed tokens: logits [R, V] and, if requested, the output layer's input, hidden [R,
    H], at the requested rows, and features [T, len(feature_layers) * H] at all tokens, layers concatenated in the
    requested order, or None."""

    logits: Tensor
    hidden: Tensor | None = None
    features: Tensor | None = None


class PackedModel(Protocol):
    """A language model that reads packed tokens; its attention layers call `PagedStep.attend`.

    Attributes:
        device: device of its weights. num_weights: total number of parameters.
        vocab_size: valid token ids are 0..vocab_size - 1.
        num_logits: columns of its logits, vocabulary padding included.
        hidden_size: width of its decoder layers' outputs.
        num_positions: positions it is made for, None = unlimited.
        is_recurrent: whether it has recurrent layers; these call `PagedStep.recurrent`.
    """

    device: torch.device
    vocab_size: int
    num_logits: int
    hidden_size: int
    num_weights: int
    num_positions: int | None
    is_recurrent: bool

    def use(self) -> AbstractContextManager[None]:
        """Returns a context in which `run` may be called."""

    def run(
        self,
        input_ids: Tensor,
        positions: Tensor,
        step: PagedStep,
        rows: Tensor | None = None,
        needs_hidden: bool = False,
        feature_layers: Sequence[int] = (),
    ) -> PassOutput:
        """Runs one pass over packed tokens, int64 [T], with logits at `rows`, int64 [R], None = all. feature_layers: as
        in `Drafter`. Raises ValueError if the model lacks such layers or cannot run this pass."""

    def new_hidden(self, num_rows: int) -> Tensor:
        """Returns zeros [num_rows, H] in dtype and device of `PassOutput.hidden`."""
