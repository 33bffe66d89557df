"""What tests of packed weights share."""

from __future__ import annotations

import pytest
from torch import nn

from pagedtree.integrations.transformers.packed_weights import MIN_ELEMENTS, PackedLinear

__all__ = ["OWN_MIN_ELEMENTS", "linear_layers", "of_any_size", "packed_layers"]

OWN_MIN_ELEMENTS = dict(MIN_ELEMENTS)


@pytest.fixture(autouse=True)
def of_any_size(monkeypatch):
    """Small models are packed, too."""
    for dtype in MIN_ELEMENTS:
        monkeypatch.setitem(MIN_ELEMENTS, dtype, 1)


def packed_layers(model):
    return {name for name, module in model.named_modules() if type(module) is PackedLinear}


def linear_layers(model):
    return {name for name, module in model.named_modules() if isinstance(module, nn.Linear)}
