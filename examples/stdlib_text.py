"""Text that comes with every Python: the source of its standard library, split into training and held-out files."""

from __future__ import annotations

import random
import sysconfig
from pathlib import Path

__all__ = ["HELD_OUT", "STDLIB", "held_out_files", "prompts", "read", "training_files"]

STDLIB = Path(sysconfig.get_path("stdlib"))

HELD_OUT = (
    *("argparse.py", "contextlib.py", "csv.py", "fractions.py", "heapq.py", "json/decoder.py", "shlex.py"),
    *("statistics.py", "string.py", "textwrap.py"),
)

# Third-party packages, tests, and modules that are tables rather than code.
_SKIPPED_DIRECTORIES = {"site-packages", "dist-packages", "__pycache__", "encodings", "lib2to3", "pydoc_data"}
_SKIPPED_DIRECTORIES |= {"test", "tests", "idle_test"}
# Written when the interpreter is built: these record the paths of the machine that built it.
_SKIPPED_PREFIXES = ("_sysconfigdata", "config-")


def training_files() -> list[Path]:
    """The library's .py files, held-out ones excluded, in an order that does not depend on the file system."""
    files = []
    for path in STDLIB.rglob("*.py"):
        relative = path.relative_to(STDLIB)
        if any(part in _SKIPPED_DIRECTORIES or part.startswith(_SKIPPED_PREFIXES) for part in relative.parts):
            continue
        if relative.as_posix() not in HELD_OUT:
            files.append(relative.as_posix())
    return [STDLIB / name for name in sorted(files)]


def held_out_files() -> list[Path]:
    # Python 3.14 made a package of string.py.
    return [STDLIB / name for name in HELD_OUT if (STDLIB / name).exists()]


def read(path: Path) -> str:
    return path.read_text(encoding="utf-8", errors="replace")


def prompts(n: int, min_chars: int = 200, max_chars: int = 600, seed: int = 0) -> list[str]:
    """`n` pieces of held-out source, each made of whole lines and `min_chars` to `max_chars` long.

    The lengths differ, as those of requests in a batch do. A prompt ends before its last newline: the tokenizer
    joins a newline with the indentation after it, and that token is for the model to predict.
    """
    rng = random.Random(seed)
    sources = [read(path) for path in held_out_files()]
    found: list[str] = []
    while len(found) < n:
        lines = sources[len(found) % len(sources)].splitlines(keepends=True)
        wanted = rng.randint(min_chars, max_chars)
        prompt = ""
        for line in lines[rng.randrange(len(lines)) :]:
            if len(prompt) + len(line) > wanted:
                break
            prompt += line
        prompt = prompt.rstrip()
        if len(prompt) >= min_chars:
            found.append(prompt)
    return found
