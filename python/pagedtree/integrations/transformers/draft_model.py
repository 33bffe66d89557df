"""The drafter with a transformers draft model."""

from __future__ import annotations

from typing import Any

from pagedtree.generation import drafters
from pagedtree.integrations.transformers.model import TransformersModel

__all__ = ["ModelDrafter"]


# The base class has the docstring.
class ModelDrafter(drafters.ModelDrafter):
    is_capturable = True

    def pack(self, model: Any) -> TransformersModel:
        return TransformersModel(model)
