"""The packed pass of a transformers model, as its attention layers see it, with masks by transformers' functions."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor
from transformers.masking_utils import causal_mask_function

from pagedtree._arguments import refusal
from pagedtree.generation.paged_step import PagedStep

UNLIMITED = 1 << 30


class PackedMask:
    """The masks of a packed pass: one tensor per window, which no layer reads. From `tokens`, bool [1, T], transformers
    makes the layers' masks by `of_layers`; `window_of` finds their windows."""

    def __init__(self, num_tokens: int, device: torch.device) -> None:
        self.tokens = torch.ones((1, num_tokens), dtype=torch.bool, device=device)
        self._masks: dict[int, Tensor] = {}

    def of_layers(self, mask_function: Callable[..., Any], local_size: int | None) -> Tensor:
        """Returns a layer's mask, bool [1, 1, 1, 1]; raises ValueError unless it is causal or a sliding window."""
        if mask_function is not causal_mask_function and not _is_window(mask_function, local_size or UNLIMITED):
            raise refusal("model", "causal layers, some with a sliding window", "one that asks for another mask")
        window = local_size or 0
        if window not in self._masks:
            self._masks[window] = self.tokens.new_ones((1, 1, 1, 1))
        return self._masks[window]

    @property
    def of_all_layers(self) -> Tensor:
        """Returns the mask of a model with one 4-D mask for all layers."""
        return self.of_layers(causal_mask_function, None)

    @property
    def has_windows(self) -> bool:
        return any(window > 0 for window in self._masks)

    def window_of(self, mask: Tensor | None) -> int:
        """Returns the window (0 = none) of a layer's mask; raises ValueError for any but ours."""
        for window, tensor in self._masks.items():
            if mask is not None and mask.data_ptr() == tensor.data_ptr() and mask.dtype == tensor.dtype:
                return window
        found = f"{'none' if mask is None else 'another one'}: a bias of the layer's own, or a mask that it makes"
        raise refusal("model", "layers that hand the attention_mask of transformers to the attention as it is", found)


def _is_window(mask_function: Callable[..., Any], window: int) -> bool:
    """Returns whether the function shows each query itself and the `window` - 1 keys before it."""
    if _holds_tensor(mask_function):
        return False  # asked about tokens that are not there it would fail, which a GPU cannot catch
    around = sorted({0, 1, window - 1, window, window + 1, 2 * window - 1, 2 * window, 3 * window})
    kv = torch.tensor(around, dtype=torch.int64)
    q = kv[:, None]
    zero = torch.zeros((), dtype=torch.int64)
    visible = mask_function(zero, zero, q, kv)
    return torch.equal(visible.expand(len(around), -1), (kv <= q) & (q - kv < window))


def _holds_tensor(value: Any) -> bool:
    """Returns whether a mask function or one of its parts looks up tokens: their padding, block or sequence."""
    if isinstance(value, (tuple, list)):
        return any(map(_holds_tensor, value))
    closure = getattr(value, "__closure__", None) or ()
    return isinstance(value, Tensor) or any(_holds_tensor(cell.cell_contents) for cell in closure)


class PackedPass:
    """Where the layers write and read keys and values, and their masks."""

    def __init__(self, step: PagedStep) -> None:
        self.step, self.mask = step, PackedMask(step.slots.shape[0], step.slots.device)

    @contextmanager
    def active(self) -> Iterator[None]:
        """Makes this the pass of "pagedtree" models inside the block."""
        token = current_pass.set(self)
        _running.append(self)
        try:
            yield
        finally:
            _running.remove(self)
            current_pass.reset(token)


current_pass: ContextVar[PackedPass | None] = ContextVar("pagedtree_pass", default=None)
# The passes of all threads. torch.compile guards this list, but cannot trace a context variable.
_running: list[PackedPass] = []


def running_pass() -> PackedPass | None:
    return current_pass.get() if _running else None
