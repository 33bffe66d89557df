"""Runs functions and tests from the user's source tree of another package: `make test-peers`.

Definitions run with the caller's names for the package's imports, so nothing of it is imported or stored here.
"""

from __future__ import annotations

import ast
import os
import re
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any

import pytest

__all__ = ["PeerSource", "refusing"]


class PeerSource:
    """The source tree PEER_SOURCE; skips the test module unless PEER is `peer`."""

    def __init__(self, peer: str) -> None:
        if os.environ.get("PEER") != peer:
            pytest.skip(f"make test-peers PEER={peer} SOURCE=DIR", allow_module_level=True)
        self.folder = Path(os.environ["PEER_SOURCE"])

    def take(self, path: str, *names: str, known: dict[str, Any]) -> dict[str, Any]:
        """Executes the definitions `names` with the globals `known`, and "cpu" for "cuda"."""
        tree = ast.parse((self.folder / path).read_text(encoding="utf-8").replace('"cuda"', '"cpu"'))
        nodes = [node for node in tree.body if names_of(node) & {*names}]
        missing = {*names}.difference(*map(names_of, nodes))
        assert not missing, f"{path} defines no {', '.join(sorted(missing))}"
        code = compile(ast.Module(nodes, type_ignores=[]), str(self.folder / path), "exec")
        exec(code, known)
        return {name: known[name] for name in names}


def refusing(message: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Expects a failure if our function refuses with such a message."""

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            try:
                return function(*args, **kwargs)
            except (ValueError, NotImplementedError) as error:
                if not re.search(message, str(error)):
                    raise
                pytest.xfail(str(error))

        return call

    return decorate


def names_of(node: ast.stmt) -> set[str]:
    if isinstance(node, ast.Assign):
        return {target.id for target in node.targets if isinstance(target, ast.Name)}
    return {name} if isinstance(name := getattr(node, "name", None), str) else set()
