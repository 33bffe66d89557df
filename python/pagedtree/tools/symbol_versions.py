"""System requirements of a shared library. Imports nothing of the package, whose libraries need not be built."""

from __future__ import annotations

import re
from pathlib import Path

__all__ = ["symbol_versions"]


def symbol_versions(library: Path) -> dict[str, str]:
    """Returns the newest GLIBC, GLIBCXX, CXXABI and GCC versions that a shared library requires, if any."""
    newest: dict[str, tuple[int, ...]] = {}
    # They stand in the dynamic string table, which holds each name once, between zero bytes.
    for name, version in re.findall(rb"(?<=\0)(GLIBC|GLIBCXX|CXXABI|GCC)_([0-9.]+)(?=\0)", library.read_bytes()):
        number = tuple(int(part) for part in version.split(b"."))
        newest[name.decode()] = max(newest.get(name.decode(), (0,)), number)
    return {name: ".".join(map(str, number)) for name, number in sorted(newest.items())}
