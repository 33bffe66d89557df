"""The interface of a language model that the engine runs, or that a drafter drafts with."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from pagedtree.generation.paged_step import PagedStep
from pagedtree.generation.scheduler import GeneratedSequence

__all__ = ["PackedModel", "PassOutput"]


class PassOutput(NamedTuple):
    """The results of a pass over T packed tokens.

    Attributes:
        logits: [R, V], at the rows that were asked for.
        hidden: [R, H], what the output layer read there, if it was asked for, else None.
        features: [T, len(feature_layers) * H], at all tokens, the layers side by side in the order in which they were
            asked for; None without feature_layers.
    """

    logits: Tensor
    hidden: Tensor | None = None
    features: Tensor | None = None


class PackedModel(Protocol):
    """A language model that reads packed tokens; its attention layers call `PagedStep.attend`.

    Attributes:
        device: where its weights are.
        vocab_size: it reads the token ids 0..vocab_size - 1.
        num_logits: columns of its logits, padding of the vocabulary included.
        hidden_size: of what its decoder layers give for a token.
        num_weights: parameters, all in all.
        num_positions: positions that it is made for, None = any number. has_position_table: whether it cannot read
            others, as models with a learned embedding of each position.
        is_recurrent: whether it has recurrent layers; these call `PagedStep.recurrent`.
    """

    @property
    def device(self) -> torch.device: ...

    @property
    def vocab_size(self) -> int: ...

    @property
    def num_logits(self) -> int: ...

    @property
    def hidden_size(self) -> int: ...

    @property
    def num_weights(self) -> int: ...

    @property
    def num_positions(self) -> int | None: ...

    @property
    def has_position_table(self) -> bool: ...

    @property
    def is_recurrent(self) -> bool: ...

    def check_sequences(self, name: str, sequences: Iterable[GeneratedSequence]) -> bool:
        """Tells whether all of these sequences are long, for models that read long texts another way than short ones.

        Raises ValueError, with the model's `name`, for sequences that cannot be in one pass.
        """

    def use(self, is_long: bool | None = None) -> AbstractContextManager[None]:
        """Inside the block `run` may be called. is_long: what `check_sequences` said, None if it was not asked."""

    def run(
        self,
        input_ids: Tensor,
        positions: Tensor,
        step: PagedStep,
        rows: Tensor | None = None,
        needs_hidden: bool = False,
        feature_layers: Sequence[int] = (),
    ) -> PassOutput:
        """Runs one pass over packed tokens, int64 [T]: logits at `rows` (int64 [R], None = all), what the output
        layer read there if `needs_hidden`, and at all tokens what these decoder layers gave (see
        `Drafter.feature_layers`). Raises ValueError for a model that cannot be run so, or lacks such layers.
        """

    def new_hidden(self, num_rows: int) -> Tensor:
        """Zeros [num_rows, H] in the form of what the output layer reads."""
