"""Disables `tree="auto"`, which follows the clock, in tests of trees."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest

__all__ = ["whole_trees"]


@pytest.fixture(autouse=True)
def whole_trees() -> Iterator[None]:
    """Makes tree=None the default of `generate` and `tree_generate`; an empty fixture of this name restores it."""
    package = sys.modules.get("pagedtree.integrations.transformers")
    functions = () if package is None else (package.generate, package.tree_generate)
    # torch.no_grad wraps one.
    defaults = [getattr(function, "__wrapped__", function).__kwdefaults__ for function in functions]
    for keywords in defaults:
        assert keywords["tree"] == "auto"
        keywords["tree"] = None
    yield
    for keywords in defaults:
        keywords["tree"] = "auto"
