"""Stands in for torchvision, imported for pictures."""

from __future__ import annotations

import sys
from enum import Enum
from types import ModuleType

__version__ = "0.28.0"
__path__: list[str] = []  # marks a package
InterpolationMode = Enum("InterpolationMode", "NEAREST NEAREST_EXACT BILINEAR BICUBIC BOX HAMMING LANCZOS")


def __getattr__(name: str) -> object:
    if name.startswith("__"):
        raise AttributeError(name)
    return None  # called for pictures alone


for part in ("transforms", "transforms.functional", "transforms.v2", "transforms.v2.functional"):
    module = ModuleType(f"{__name__}.{part}")
    vars(module).update(InterpolationMode=InterpolationMode, __getattr__=__getattr__, __path__=[])
    parent, _, last = module.__name__.rpartition(".")
    setattr(sys.modules[parent], last, module)
    sys.modules[module.__name__] = module
