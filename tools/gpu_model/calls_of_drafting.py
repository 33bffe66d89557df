"""Calls of expand_tree, rerank_tree and medusa_propose, followed through csrc/cuda/drafting."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

from predict_ops import DIGIT, Kernel, Kernels, Launch, OpCall, Phase, sorting, words_of

VOCAB = 128256  # logits in bf16
CHILDREN, FRONTIER = 8, 8  # of a node that is expanded, of a level
THREADS, TREE_THREADS = 512, 256
BEST_BYTES = 12288 + 8192 + 4 * 256 * 16 + 400  # of BestShared
SUM_BYTES = 8 * 32 + 8


# What a turn of a pass over a row likes: the fewest loads of its words. Cleaning takes a loop of a batch's words.
WORDS, CLEAN = {"LDG.E.128": 12}, {"LD.E.U16": (4,)}


def top_phases(
    kernel: Kernel, vocab: int, threads: int = THREADS, source: str = "memory", clean: Mapping[str, tuple[int]] = CLEAN
) -> list[Phase]:
    """top_tokens(): all logits are counted by their first digit, few by the next ones. Each pass cleans each word,
    unless the row is known to be clean."""
    turns = words_of(vocab, threads)
    counts = [kernel.loop(own={"LDG.E.128": 4, "HMNMX2": 1}, whole={"ATOMS": 4}, number=i) for i in (-3, -2, -1)]
    return [
        Phase(
            "count", kernel.turn(counts[0], {**WORDS, "ATOMS": 100}, {**clean, "ATOMS": (4, 2)}), turns, source=source
        ),
        Phase("count few", kernel.turn(counts[1], WORDS, clean), turns),
        Phase("digits", cycles=2 * DIGIT),
        Phase("list", kernel.turn(counts[2], WORDS, clean), turns),
    ]


def expand_tree(kernels: Kernels, batch: int, nodes: int) -> list[Launch]:
    kernel, grow = kernels("expand_top_kernel", "DTypeE2"), kernels("11grow_kernel")
    sums = kernel.loop(own={"LD.E.U16": 1, "FFMA": 9})
    phases = [
        Phase("begin", loads=2),
        *top_phases(kernel, VOCAB),
        sorting(CHILDREN),
        Phase("sum", kernel.turn(sums, {"LDG": -50, "FFMA": 40}), VOCAB / THREADS),
        Phase("sum of blocks", cycles=4 * 700),
    ]
    rows = batch * nodes
    return [
        Launch(kernel, rows, THREADS, phases, BEST_BYTES + SUM_BYTES, moved=2 * rows * VOCAB),
        Launch(grow, batch, TREE_THREADS, grow_phases(grow, nodes), BEST_BYTES),
    ]


def grow_phases(kernel: Kernel, nodes: int) -> list[Phase]:
    """The candidates so far are copied, the children linked, the best of them chosen."""
    enter = kernel.loop(own={"STG": 8, "LDG": 8, "CALL": 1})
    return [
        Phase("candidates", loads=2),
        Phase("children", loads=2),
        Phase("digits", cycles=4 * DIGIT, loads=3),
        sorting(FRONTIER),
        Phase("frontier", kernel.turn(enter), turns=nodes, warps=1),
        Phase("masks", loads=2),
    ]


def rerank_tree(kernels: Kernels, batch: int, candidates: int, nodes: int) -> list[Launch]:
    """The best candidates are found by up to four digits, then numbered in their order."""
    count, pack, rerank = kernels("12count_kernel"), kernels("11pack_kernel"), kernels("13rerank_kernel")
    turns = -(-candidates // TREE_THREADS)
    chosen = [
        Phase("begin", loads=2),
        Phase("digits", cycles=4 * DIGIT, loads=5 * turns),
        Phase("number", loads=turns, barriers=3 * turns),
        Phase("write", loads=4 * turns),
    ]
    return [
        Launch(count, batch, TREE_THREADS, [Phase("count", loads=1 + turns, barriers=2)], 400),
        Launch(pack, 1, TREE_THREADS, [Phase("pack", loads=1, barriers=2, cycles=300)], 400),
        Launch(rerank, batch, TREE_THREADS, chosen, BEST_BYTES),
    ]


def medusa_propose(kernels: Kernels, batch: int, heads: int, nodes: int) -> list[Launch]:
    top, pack, fill = kernels("medusa_top_kernel", "DTypeE2"), kernels("11pack_kernel"), kernels("fill_tree_kernel")
    rows = batch * heads
    phases = [Phase("begin", loads=1), *top_phases(top, VOCAB), sorting(10)]
    return [
        Launch(top, rows, THREADS, phases, BEST_BYTES, moved=2 * rows * VOCAB),
        Launch(pack, 1, TREE_THREADS, [Phase("pack", loads=1, barriers=2, cycles=300)], 400),
        Launch(fill, batch, TREE_THREADS, [Phase("fill", loads=3)]),
    ]


EXPAND = [(1, 1), (1, FRONTIER), (8, FRONTIER), (32, FRONTIER)]
CALLS = [
    *(
        OpCall(
            f"expand_tree, {nodes} node{'s' * (nodes > 1)} x {batch}",
            partial(expand_tree, batch=batch, nodes=nodes),
            2 * nodes * batch * VOCAB,
        )
        for batch, nodes in EXPAND
    ),
    *(
        OpCall(
            f"rerank_tree, 60 of 456 x {batch}",
            partial(rerank_tree, batch=batch, candidates=456, nodes=60),
            batch * (456 * 16 + 60 * 24),
        )
        for batch in (1, 32)
    ),
    *(
        OpCall(
            f"medusa_propose, 4 heads x {batch}",
            partial(medusa_propose, batch=batch, heads=4, nodes=64),
            2 * 4 * batch * VOCAB,
        )
        for batch in (1, 32)
    ),
]
