"""Calls of token_logprobs, and rounds of the ops on a vocabulary in parts, followed through csrc/cuda/logprobs.cu and
shards.cu."""

from __future__ import annotations

import math
from functools import partial

from calls_of_drafting import SHARED, TOP_BYTES, VOCAB, WORDS, ctas_of_row, meeting, top_phases
from predict_ops import DIGIT, Kernel, Kernels, Launch, OpCall, Phase, words_of

THREADS = 384
FILTER_BYTES = 2 * 4 * 256 * 16 + 20000  # of FilterScratch
RANKS = 8  # parts of the vocabulary


def peak(kernel: Kernel, vocab: int) -> Phase:
    """find_peak() over a row that comes from memory."""
    loop = kernel.loop(own={"LDG.E.128": 8, "HMNMX2": 2}, lacks=("ATOMS", "FFMA", "POPC", "VOTE"))
    return Phase("peak", kernel.turn(loop, WORDS), words_of(vocab, THREADS), source="memory")


def token_logprobs(kernels: Kernels, rows: int, top: int) -> list[Launch]:
    """Without filters. A warp adds 512 tokens at a time; then the logits are counted that reach the token's, of which
    there may be some in any word."""
    kernel, ctas = kernels("logprobs_kernel"), ctas_of_row(rows, VOCAB)
    turns = words_of(VOCAB // ctas, THREADS)
    sums = kernel.loop(own={"LDG.E.64": 4, "LD.E.U16": 16, "SHFL": 8}, whole={"FFMA": 30})
    narrow = {"LDG.E.64": 40, "LDG.E.128": -40, "LD": -60, "FFMA": 10}
    reaching = kernel.loop(own={"LDG.E.128": 8, "VOTE": 1}, lacks=("ATOMS", "POPC"))
    phases = [
        Phase("begin", loads=3, **meeting(ctas)),
        peak(kernel, VOCAB // ctas),
        Phase("fold", **meeting(ctas, 2), loads=2, cycles=300),
        Phase("sum", kernel.turn(sums, narrow, {"FFMA": (4,)}), math.ceil(VOCAB / 512 / ctas / (THREADS // 32))),
        Phase("sum of blocks", **meeting(ctas, 2), cycles=(32 + 4) * 8 + 8 * SHARED),
        Phase("rank", kernel.turn(reaching, WORDS, {"LD": (), "": (4, 2)}), turns),
        Phase("fold rank", **meeting(ctas, 2), cycles=300),
    ]
    if top > 0:
        phases += top_phases(kernel, VOCAB, top, ctas, THREADS, "l2")
    shared_bytes = TOP_BYTES + FILTER_BYTES + 5000
    return [Launch(kernel, rows * ctas, THREADS, phases, shared_bytes, moved=2 * rows * VOCAB)]


def shard_round(kernels: Kernels, rows: int, kind: str) -> list[Launch]:
    """A round of step_shards over 1/8 of the vocabulary of each row."""
    kernel, vocab = kernels("step_kernel", "DTypeE2"), VOCAB // RANKS
    turns, begin = words_of(vocab, THREADS), Phase("begin", loads=6, barriers=1)
    if kind == "peak":
        phases = [peak(kernel, vocab), Phase("fold", barriers=3, loads=2, cycles=300)]
    else:
        loop = kernel.loop(own={"LDG.E.128": 8}, whole={"ATOMS": 4})
        counted = kernel.turn(loop, {**WORDS, "ATOMS": 100}, {"LD.E": (), "ATOMS": (4, 2)})
        phases = [Phase("count", counted, turns, source="memory"), Phase("digits", cycles=DIGIT)]
    return [Launch(kernel, rows, THREADS, [begin, *phases], 45000, moved=2 * rows * vocab)]


CALLS = [
    *(
        OpCall(f"token_logprobs, top {top}, {rows} rows", partial(token_logprobs, rows=rows, top=top), 2 * rows * VOCAB)
        for rows in (1, 32, 256)
        for top in (0, 20)
    ),
    *(
        OpCall(
            f"shards, {kind}, {rows} rows of 16k", partial(shard_round, rows=rows, kind=kind), 2 * rows * VOCAB // RANKS
        )
        for kind in ("peak", "a digit")
        for rows in (32, 256)
    ),
]
