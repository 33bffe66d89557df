"""The number of positions of a model, and whether it can read others."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

__all__ = ["has_position_table", "num_positions"]

# Config fields with the number of positions.
FIELDS = ("max_position_embeddings", "max_target_positions")
# Names of position tables in models: GPT-2, OPT and BioGPT, BERT and similar, CTRL.
TABLES = ("wpe", "embed_positions", "position_embeddings", "pos_encoding")


def num_positions(model: Any) -> int | None:
    """Returns the model's number of positions by its config, or None."""
    config = model.config.get_text_config()
    values = (getattr(config, field, None) for field in FIELDS)
    return next((value for value in values if isinstance(value, int) and value > 0), None)


def has_position_table(model: nn.Module) -> bool:
    """Returns whether the model has a table of positions, so that it cannot read past `num_positions`.

    Rotary embeddings are computed for any position.
    """
    count = num_positions(model)
    for module in model.modules():
        for name in TABLES:
            table = getattr(module, name, None)
            rows = table.num_embeddings if isinstance(table, nn.Embedding) else None
            if isinstance(table, Tensor) and table.ndim == 2:
                rows = table.shape[0]
            # OPT and BioGPT begin with some rows that are for no position.
            if rows is not None and rows - getattr(table, "offset", 0) == count:
                return True
    return False
