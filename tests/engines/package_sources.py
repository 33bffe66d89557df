"""Reads the sources of an installed engine without an import."""

from __future__ import annotations

import ast
import importlib.util
import inspect
from pathlib import Path
from typing import Any

import pytest

__all__ = ["Sources", "attributes_of", "own_parameters"]


class Sources:
    """The files of package `name`; without them the test module is skipped."""

    def __init__(self, name: str) -> None:
        spec = importlib.util.find_spec(name)
        if spec is None or not spec.submodule_search_locations:
            pytest.skip(f"{name} is not installed: make test-engines ENGINE={name}", allow_module_level=True)
        self.folder = Path(next(iter(spec.submodule_search_locations)))

    def text(self, path: str) -> str:
        return (self.folder / path).read_text(encoding="utf-8")

    def definition(self, path: str, name: str, *, last: bool = False) -> Any:
        """Returns the class or function `name` (or "Class.method"); `last` skips overloads."""
        node: Any = ast.parse(self.text(path))
        for part in name.split("."):
            found = [child for child in node.body if getattr(child, "name", None) == part]
            assert found, f"{path} defines no {name}"
            node = found[-1 if last else 0]
        return node

    def parameters(self, path: str, name: str, *, last: bool = False) -> dict[str, Any]:
        """Names and defaults, without *args and **kwargs."""
        arguments = self.definition(path, name, last=last).args
        names = [argument.arg for argument in arguments.args]
        defaults = [ast.literal_eval(value) for value in arguments.defaults]
        positional = dict(zip(names, [inspect.Parameter.empty] * (len(names) - len(defaults)) + defaults, strict=True))
        keywords = zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
        return positional | {argument.arg: ast.literal_eval(value) for argument, value in keywords if value is not None}

    def members(self, path: str, *names: str) -> set[str]:
        """Fields, methods and attributes that methods set."""
        found = set()
        for node in (inner for name in names for inner in ast.walk(self.definition(path, name))):
            if isinstance(node, ast.AnnAssign | ast.Assign):
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                targets = [part for target in targets for part in getattr(target, "elts", [target])]
                found |= {getattr(target, "id", getattr(target, "attr", "")) for target in targets}
            elif isinstance(node, ast.FunctionDef):
                found.add(node.name)
        return found


def attributes_of(tree: ast.AST, variable: str) -> set[str]:
    return {
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute)
        and variable in (getattr(node.value, "id", None), getattr(node.value, "attr", None))
    }


def own_parameters(function: Any) -> dict[str, Any]:
    """Returns `Sources.parameters` of our function."""
    variadic = inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD
    return {p.name: p.default for p in inspect.signature(function).parameters.values() if p.kind not in variadic}
