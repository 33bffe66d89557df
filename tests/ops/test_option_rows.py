"""Options of selected sequences equal `RequestOptions.from_lists` of the selected lists."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from pagedtree import RequestOptions
from pagedtree.options import OptionRows

VOCAB, IDLE = 40, 5
CPU = torch.device("cpu")
PROMPTS = [[1, 2, 3], [5], [7, 7, 8, 9], [39], [0, 4]]
OUTPUTS = [[2, 2], [6, 5, 39], [], [1], [4, 4, 4, 0]]
LISTS: dict[str, list[Any]] = {
    "allowed": [None, [1, 2], range(VOCAB), [], None],
    "bias": [{3: 1.5, 4: -2.0}, None, {}, {39: -np.inf}, {0: 0.5}],
    "bad_words": [[[1], [2, 3, 4]], [], None, [[5, 6]], [[7], [8], [9, 1]]],
    "stop_ids": [[1, 2], [], None, [3], [0]],
    "min_positions": [3, 0, 0, 9, 2],
}


def texts_of(rows: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns texts in buffers that other tokens fill up, and their lengths."""
    texts = [[*PROMPTS[row], *OUTPUTS[row]] if row != IDLE else [] for row in rows]
    history = torch.tensor([(text + [17] * 9)[:9] for text in texts], dtype=torch.int64).view(len(rows), 9)
    return history, torch.tensor([len(text) for text in texts], dtype=torch.int32)


def expected(rows: list[int], names: set[str]) -> RequestOptions:
    idle = {"prompts": [], "outputs": [], "min_positions": 0}
    lists = {"prompts": PROMPTS, "outputs": OUTPUTS, **{name: LISTS[name] for name in names}}
    values = {name: [*of, idle.get(name)] for name, of in lists.items()}
    return RequestOptions.from_lists(VOCAB, **{name: [of[row] for row in rows] for name, of in values.items()})


def check(options: RequestOptions, wanted: RequestOptions) -> None:
    for name, tensor in wanted.tensors().items():
        found = getattr(options, name)
        assert (found is None) == (tensor is None), name
        if found is not None:  # buffers may be larger
            found = found[tuple(slice(size) for size in tensor.shape)]
            behind = torch.arange(9)[: found.shape[-1]] >= wanted.history_lens[:, None] if name == "history" else None
            assert torch.equal(found if behind is None else found.masked_fill(behind, 0), tensor), name


@pytest.mark.parametrize("left_out", [set(), {"bad_words"}, {"bias"}, {"allowed", "stop_ids", "min_positions"}])
def test_selections(left_out) -> None:
    names = {*LISTS} - left_out
    lists = {"prompts": PROMPTS, **{name: LISTS[name] for name in names}}
    rows = OptionRows(VOCAB, lists, list(map(len, PROMPTS)), has_counts=True, device=CPU)
    assert rows.is_used and rows.idle_row == IDLE and rows.tail == (2 if "bad_words" in names else 0)
    for numbers in ([0, 1, 2, 3, 4], [3], [4, 1, 4], [2, 0], []):
        options = rows.of(numbers, *texts_of(numbers))
        check(options, expected(numbers, names))
        assert rows.of(numbers, *texts_of(numbers)).output_counts is options.output_counts  # `commit` updates them
    buffers = rows.buffers(4)
    check(rows.with_text(buffers, *texts_of([IDLE] * 4)), expected([IDLE] * 4, names))
    for numbers in ([2, 0, IDLE, IDLE], [4, 3, 1, 0], [1, IDLE, IDLE, IDLE]):
        history, lengths = texts_of(numbers)
        rows.refresh(buffers, numbers, texts_of([*range(IDLE + 1)])[0], lengths.tolist())
        check(rows.with_text(buffers, history, lengths), expected(numbers, names))


def test_unused_options_make_no_tensor() -> None:
    rows = OptionRows(VOCAB, {}, [1, 2], has_counts=False, device=CPU)
    assert not rows.is_used and rows.of([0, 1], *texts_of([0, 1])) is None and rows.buffers(2) is None
    biased = OptionRows(VOCAB, {"bias": [{3: 1.0}]}, [1], has_counts=False, device=CPU).of([0], *texts_of([0]))
    counted = OptionRows(VOCAB, {}, [3, 1], has_counts=True, device=CPU).of([1, 0], *texts_of([1, 0]))
    for options, names in ((biased, {"bias_tokens", "bias_values", "cu_bias"}), (counted, {"output_counts"})):
        assert {name for name, tensor in options.tensors().items() if tensor is not None} == names


def test_tokens_that_the_model_does_not_predict_are_not_counted() -> None:
    rows = OptionRows(VOCAB, {}, [1], has_counts=True, device=CPU)
    options = rows.of([0], torch.tensor([[1, VOCAB, 5, 10**6]]), torch.tensor([4]))
    assert options.output_counts.nonzero().tolist() == [[0, 5]]
