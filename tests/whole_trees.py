"""What `tree="auto"` drafts goes by the clock, so tests of trees have the drafter's whole tree in each step."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest

__all__ = ["whole_trees"]


@pytest.fixture(autouse=True)
def whole_trees() -> Iterator[None]:
    """Makes tree=None the default of `generate` and `tree_generate` in this process.

    A test file that wants the real default has a fixture of this name that does nothing.
    """
    package = sys.modules.get("pagedtree.integrations.transformers")
    functions = () if package is None else (package.generate, package.tree_generate)
    # torch.no_grad wraps one of them.
    defaults = [getattr(function, "__wrapped__", function).__kwdefaults__ for function in functions]
    for keywords in defaults:
        assert keywords["tree"] == "auto"
        keywords["tree"] = None
    yield
    for keywords in defaults:
        keywords["tree"] = "auto"
