"""What `python -m pagedtree generate` prints while it decodes, and the rates that it tells."""

from __future__ import annotations

import time

import pytest

pytest.importorskip("transformers")

from tokenizer_case import words

from pagedtree.generation.stats import GenerationStats, SequenceStats
from pagedtree.integrations.transformers.printer import Printer


def stats_of(counts, times, seconds=4.0):
    sequences = [SequenceStats(num_tokens=n, time_to_first_token=t) for n, t in zip(counts, times, strict=True)]
    return GenerationStats(wall_time=seconds, sequences=sequences)


def test_rate_is_that_of_decoding():
    """The prompt is read for 3 s; 10 tokens follow the first one in 1 s."""
    stats = stats_of([11], [3.0])
    assert stats.decode_tokens_per_second == 10.0 and stats.tokens_per_second == 2.75
    assert stats.summary().startswith("11 tokens in 4.00 s: first token after 3000 ms, then 10.0 tokens/s\n")


@pytest.mark.parametrize("num_sequences", [1, 2])
def test_progress_tells_the_rate_of_decoding(capsys, monkeypatch, num_sequences):
    """No rate is told with the first tokens, however long the prompt was read."""
    now = [100.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    printer = Printer(words(9), num_sequences, max_tokens=9 * num_sequences)
    now[0] = 160.0
    for step in ([1], [2, 3, 4, 5], [6, 7, 8, 1]):
        for sequence in range(num_sequences):
            printer.add(sequence, step)
        now[0] += 2.0
    printer.finish()
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == f"{num_sequences} of at most {9 * num_sequences} tokens"
    rate = 8 * num_sequences / 4.0
    assert lines[-1] == f"{9 * num_sequences} of at most {9 * num_sequences} tokens, {rate:.1f} tokens/s"
