"""n-gram trees of repetitive texts equal plain loops, in linear work."""

from __future__ import annotations

import shutil
import subprocess
from array import array
from collections.abc import Callable
from pathlib import Path
from random import Random

import pytest
import torch
from support import int32
from support.batches import packed_trees

from pagedtree import ngram_propose
from pagedtree.reference.drafting import ngram_tree

ROOT = Path(__file__).resolve().parents[2]


def random_tokens(length: int, low: int, high: int) -> list[int]:
    return Random(length).choices(range(low, high), k=length)


def fibonacci_word(length: int) -> list[int]:
    """Repeats every part soon, without a period."""
    short, word = [0], [0, 1]
    while len(word) < length:
        short, word = word, word + short
    return word[:length]


def with_errors(tokens: list[int]) -> list[int]:
    return [2 if i % 53 == 50 else token for i, token in enumerate(tokens)]


TEXTS: dict[str, Callable[[int], list[int]]] = {
    "one token": lambda length: [1] * length,
    "two in turn": lambda length: [i % 2 for i in range(length)],
    "a period of 7": lambda length: ([0, 1, 0, 0, 1, 1, 0] * length)[:length],
    "a period of 67": lambda length: (random_tokens(67, 0, 2) * length)[:length],
    "a period with separators": lambda length: ([0, 1, -1, 0, 1, 1, -1, 1, 0, 1] * length)[:length],
    "a period with errors": lambda length: with_errors([i % 3 for i in range(length)]),
    "runs": lambda length: [int(token == 0) for token in random_tokens(length, 0, 30)],
    "Fibonacci": fibonacci_word,
    "2 tokens": lambda length: random_tokens(length, 0, 2),
    "3 tokens and separators": lambda length: random_tokens(length, -1, 3),
}
OPTIONS = [
    {"max_nodes": 16, "max_depth": 4},
    {"max_nodes": 40, "max_depth": 12, "max_ngram": 64, "max_branches": 3},
    {"max_nodes": 60, "max_depth": 70, "max_ngram": 64, "min_ngram": 2},
    {"max_nodes": 30, "max_depth": 3, "max_ngram": 9, "min_ngram": 9, "max_branches": 30},
    {"max_nodes": 30, "max_depth": 1, "max_ngram": 40, "min_ngram": 3},
]


@pytest.mark.each_value
@pytest.mark.usefixtures("on_device")
@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: ",".join(map(str, options.values())))
@pytest.mark.parametrize("kind", TEXTS)
def test_repeated_texts(backend: str, kind: str, options: dict[str, int]) -> None:
    width = 330
    text = TEXTS[kind](width)
    lengths = [width, width - 1, 70, 2]
    # Extra texts: another kind; the last tokens at its end; separators; nothing.
    extras = [TEXTS["runs"](270), text[-270:], text[:270], [-1] * 270]
    extras[2][::40] = [-1] * 7
    history = torch.tensor([text, text, text[::-1], text])
    for extra in (None, extras):
        tensor = None if extra is None else torch.tensor(extra)
        draft = ngram_propose(history, int32(lengths), extra=tensor, **options)
        expected = [
            ngram_tree(row[:length], extra=() if extra is None else extra[b], **options)
            for b, (row, length) in enumerate(zip(history.tolist(), lengths, strict=True))
        ]
        assert packed_trees(draft) == expected


@pytest.mark.usefixtures("on_device")
@pytest.mark.parametrize("ctas", [1, 2, 4])
@pytest.mark.parametrize("batch", [1, 3])
def test_clusters_do_not_matter(backend: str, monkeypatch: pytest.MonkeyPatch, batch: int, ctas: int) -> None:
    """Without clusters one CTA has the whole text."""
    monkeypatch.setenv("PAGEDTREE_SIMT_DEVICE", f"132:227:{ctas}")
    width, breadth = 8191, 2053  # odd: every other row is off 16-byte alignment
    text = random_tokens(width * 3, -1, 60)
    rows = [text[b * width :][:width] for b in range(batch)]
    extras = [random_tokens(breadth, 0, 40) for _ in range(batch)]
    lengths = [width, width - 1, 4097][:batch]
    options = {"max_nodes": 200, "max_depth": 40, "max_ngram": 6, "max_branches": 60}
    history, extra = torch.tensor(rows), torch.tensor(extras)
    draft = ngram_propose(history, int32(lengths), extra=extra, **options)
    assert packed_trees(draft) == [
        ngram_tree(row[:length], extra=other, **options)
        for row, length, other in zip(rows, lengths, extras, strict=True)
    ]


def test_rows_that_are_too_long(device: torch.device) -> None:
    """Positions are int32."""
    history, extra = (torch.empty(0, 2**30, dtype=torch.int64, device=device) for _ in range(2))
    lengths = torch.empty(0, dtype=torch.int32, device=device)
    ngram_propose(history, lengths, max_nodes=2, max_depth=1, extra=extra[:, 1:])
    with pytest.raises(ValueError, match=r"history: expected less than 2\^31 tokens per row, extra included, got 2"):
        ngram_propose(history, lengths, max_nodes=2, max_depth=1, extra=extra)


@pytest.fixture(scope="module")
def blocks_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., int]:
    """Counts basic blocks by ngram_work.cpp."""
    compiler = shutil.which("c++")
    if compiler is None:
        pytest.skip("no C++ compiler")
    program = tmp_path_factory.mktemp("work") / "ngram_work"
    source = Path(__file__).with_name("ngram_work.cpp")
    options = ["-std=c++20", "-O1", "-fsanitize-coverage=trace-pc", f"-I{ROOT / 'csrc'}"]
    subprocess.run([compiler, *options, str(source), "-o", str(program)], check=True)

    def count(text: list[int], max_ngram: int, max_depth: int) -> int:
        arguments = [str(program), str(max_ngram), str(max_depth)]
        return int(subprocess.check_output(arguments, input=array("q", text).tobytes()))

    return count


@pytest.mark.parametrize("kind", TEXTS)
def test_the_work_is_linear(blocks_of: Callable[..., int], kind: str) -> None:
    """A comparison per n-gram length or continuation token would exceed 100 basic blocks per token."""
    text = TEXTS[kind](20_000)
    for max_ngram in (4, 64):
        assert 0 < blocks_of(text, max_ngram, 40) < 60 * 2 * len(text)


def test_a_full_tree_ends_the_search(blocks_of: Callable[..., int]) -> None:
    """Eight branches of greatest depth suffice despite spare nodes."""
    text = TEXTS["2 tokens"](20_000)
    assert 0 < blocks_of(text, max_ngram=4, max_depth=4) < len(text) / 4
