"""Calls of verify_sampled: all rows at once, then a walk along the drawn tokens. The passes are those of
predict_verification.py, lengthened as there; 32 trees of 64 nodes."""

from __future__ import annotations

import math
from functools import partial

from bank_conflicts import mean_passes
from predict_ops import DIGIT, Kernels, Launch, OpCall, Phase, words_of
from predict_verification import CALLS as WAYS
from predict_verification import NODES, PASSES, TREES, VOCAB, beyond, path_of, row_loops, word_of_counter

THREADS = 256  # of a row, where there are more rows than multiprocessors
# Of 64 KB of counters, cleared and added up by words of 16 bytes, and of the weights of their values, reckoned.
COUNTERS = 2 * 64 * 1024 // 128 + 2000
SAMPLING_BYTES = 78400  # of SamplingShared


def verify_sampled(kernels: Kernels, ways: list[str], trees: int) -> list[Launch]:
    kernel, walk = kernels("draw_rows_kernel", "DTypeE2"), kernels("11walk_kernel", "5DTypeE2")
    loops, phases = row_loops(kernel.flow), [Phase("begin", loads=2)]
    for name in ways:
        path, words = path_of(kernel.flow, loops[PASSES[name].loop], PASSES[name])
        counts = PASSES[name].does == "atomic"
        passes = mean_passes(word_of_counter, merges=False) if counts else 0
        turns = beyond(ways) * words_of(VOCAB, THREADS, batch=words)
        phases.append(Phase(name, path, turns, source="memory", passes=passes))
        phases.append(Phase(f"{name}: fold", barriers=4, cycles=200 + (COUNTERS + 2 * DIGIT if counts else 0)))
    rows = trees * NODES
    path = math.ceil(NODES**0.5)  # nodes that are visited
    return [
        Launch(kernel, rows, THREADS, phases, SAMPLING_BYTES, moved=2 * rows * VOCAB),
        Launch(walk, trees, 32, [Phase("walk", loads=4 * path)], SAMPLING_BYTES),
    ]


CALLS = [
    OpCall(
        f"verify_sampled, {call}{kind}, 64 nodes x {trees}",
        partial(verify_sampled, ways=ways, trees=trees),
        2 * trees * NODES * VOCAB,
    )
    for call, both in WAYS.items()
    for kind, ways in zip((", peaked rows", ", flat rows"), both, strict=True)
    for trees in (TREES,)
    if both[0] != both[1] or kind == ", peaked rows"
]
