"""Declarative config.json formats."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field, fields, replace
from typing import Any

from pagedtree.generation.drafters.checkpoint_config import ConfigEntries


@dataclass(frozen=True)
class Row:
    """An entry of config.json. kind: a method of `ConfigEntries`, called with `bounds`. default: the value without an
    entry, or a function of the values read so far; MISSING: required, but for lists. key: its name. place: the object
    that contains it."""

    kind: str
    default: Any
    key: str
    place: str
    bounds: Mapping[str, Any]

    def read(self, entries: ConfigEntries, found: Mapping[str, Any]) -> Any:
        if self.default is None and self.key not in entries:
            return None
        default = self.default(found) if callable(self.default) else self.default
        has_default = default is not MISSING and default != ()
        return getattr(entries, self.kind)(self.key, *([default] if has_default else []), **self.bounds)


def entry(kind: str, default: Any = MISSING, *, key: str = "", place: str = "", **bounds: Any) -> Any:
    row = Row(kind, default, key, place, bounds)
    return field(default=MISSING if callable(default) else default, metadata={"row": row})


def rows_of(config: type) -> dict[str, Row]:
    rows = {field.name: field.metadata["row"] for field in fields(config) if field.metadata}
    return {name: replace(row, key=row.key or name) for name, row in rows.items()}


def read_rows(config: type, top: ConfigEntries, **places: ConfigEntries) -> dict[str, Any]:
    """Reads the entries of a config in field order. Raises ValueError, naming the entry, for invalid values. top: the
    whole file. places: the objects in it, named as in `Row.place`."""
    values: dict[str, Any] = {}
    for name, row in rows_of(config).items():
        values[name] = row.read(places.get(row.place, top), values)
    return values


def head_dim_of(found: Mapping[str, Any]) -> int | None:
    """Returns the default width of a head; None if hidden_size is not a multiple."""
    hidden, heads = found["hidden_size"], found["num_attention_heads"]
    return hidden // heads if hidden % heads == 0 else None


def check_heads(entries: ConfigEntries, found: Mapping[str, Any]) -> None:
    """Raises ValueError for an odd head_dim, or if num_key_value_heads does not divide num_attention_heads."""
    heads = found["num_attention_heads"]
    if found["head_dim"] % 2:
        entries.refuse(
            "head_dim", f"an even number, as halves are rotated ({found['hidden_size']} / {heads} without it)"
        )
    if heads % found["num_key_value_heads"]:
        entries.refuse("num_key_value_heads", f"a divisor of num_attention_heads {heads}")


def size_of(product: str, values: Mapping[str, Any]) -> int:
    """Returns the value of a product like "2 * hidden_size"."""
    return math.prod(int(factor) if factor.isdecimal() else values[factor] for factor in product.split(" * "))
