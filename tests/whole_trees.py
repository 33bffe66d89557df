"""What `tree="auto"` drafts goes by the clock, so tests of trees have the drafter's whole tree in each step."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest

__all__ = ["whole_trees"]


@pytest.fixture(autouse=True)
def whole_trees(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Makes tree=None the default of `generate` and `tree_generate` in this process.

    A test file that wants the real default has a fixture of this name that does nothing.
    """
    package = sys.modules.get("pagedtree.integrations.transformers")
    for function in () if package is None else (package.generate, package.tree_generate):
        function = getattr(function, "__wrapped__", function)  # torch.no_grad wraps it
        assert function.__kwdefaults__["tree"] == "auto"
        monkeypatch.setitem(function.__kwdefaults__, "tree", None)
    yield
