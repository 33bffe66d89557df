"""Text of every Python: its standard library's source, ten files of which are in no training data."""

from __future__ import annotations

import random
import sysconfig
from pathlib import Path

__all__ = ["STDLIB", "prompts", "read"]

STDLIB = Path(sysconfig.get_path("stdlib"))
HELD_OUT = (
    *("argparse.py", "contextlib.py", "csv.py", "fractions.py", "heapq.py", "json/decoder.py", "shlex.py"),
    *("statistics.py", "string.py", "textwrap.py"),
)


def read(path: Path) -> str:
    return path.read_text(encoding="utf-8", errors="replace")


def prompts(n: int, min_chars: int = 200, max_chars: int = 600, seed: int = 0) -> list[str]:
    """Returns `n` pieces of held-out source of whole lines, `min_chars` to `max_chars` long.

    Lengths differ, as in a batch of requests. A prompt ends before its last newline: the tokenizer joins a newline with
    the indentation after it, and the model should predict that token.
    """
    rng = random.Random(seed)
    # Python 3.14 made a package of string.py.
    sources = [read(STDLIB / name) for name in HELD_OUT if (STDLIB / name).exists()]
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
