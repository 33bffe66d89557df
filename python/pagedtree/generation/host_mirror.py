"""Host values mirrored in device tensors."""

from __future__ import annotations

from typing import Any

import torch


class Mirror:
    """A device tensor that mirrors host values and is written only when they change."""

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, fill: int = 0) -> None:
        self.tensor = torch.full(shape, fill, dtype=dtype, device=device)
        self._host = torch.full(shape, fill, dtype=dtype)
        self._fill = fill
        self._values: list[Any] = []

    def set(self, values: list[Any]) -> None:
        """Sets the first rows to values: numbers, or lists that may be shorter than a row. The rest gets the fill."""
        if values == self._values:
            return
        self._host.fill_(self._fill)
        for row, value in enumerate(values):
            if isinstance(value, list):
                self._host[row, : len(value)] = torch.tensor(value, dtype=self._host.dtype)
            else:
                self._host[row] = value
        self.tensor.copy_(self._host)
        self.known(values)

    def known(self, values: list[Any]) -> None:
        """Records values that the device wrote itself."""
        self._values = [list(value) if isinstance(value, list) else value for value in values]
