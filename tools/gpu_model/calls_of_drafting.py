"""Calls of expand_tree, rerank_tree and medusa_propose, followed through csrc/cuda/drafting."""

from __future__ import annotations

import math
from functools import partial

from predict_calls import L2_BYTES
from predict_ops import BARRIER, DIGIT, MEETING, Kernel, Kernels, Launch, OpCall, Phase, words_of

VOCAB = 128256  # logits in bf16
CHILDREN, FRONTIER = 8, 8  # of a node that is expanded, of a level
THREADS = 256  # of a row, and of a tree
LIST_BYTES = 400 + 3 * 256 * 16 + 4 * 256 * 16 + 8 * 1024  # of BestShared
TOP_BYTES = LIST_BYTES + 2 * 4 * 512 + 64 + 8 * 512  # of TopShared
SUM_BYTES = 128 * 17 * 4 + 8 * 1024  # of SumShared
RANK, SHARED = 10, 30  # cycles: for each value that rank_among() looks at; of dependent access to shared memory

# What a turn of a pass over a row likes: the fewest loads of its words.
WORDS = {"LDG.E.128": 12}


def ctas_of_row(rows: int, vocab: int) -> int:
    """As launch_rows() chooses, where the GPU grants clusters of 16."""
    ctas = 1
    while 2 * ctas <= min(16, vocab // 4096) and 2 * ctas * rows <= 132:
        ctas *= 2
    return ctas


def meeting(ctas: int, number: int = 1) -> dict[str, int]:
    return {"meetings": number} if ctas > 1 else {"barriers": number}


def top_phases(
    kernel: Kernel, vocab: int, count: int, ctas: int, threads: int = THREADS, source: str = "memory"
) -> list[Phase]:
    """find_candidates() and list_top(): two values for each token that is wanted are ranked, then the candidates, of
    which a third more are expected than are wanted. In a cluster few warps have more than one thread with some."""
    values, candidates, hits = 2 * count, math.ceil(1.4 * count), 1 if ctas > 1 else math.ceil(2 * count / 8)
    peak = kernel.loop(own={"LDG.E.128": 8, "HMNMX2": 2}, lacks=("VOTE", "ATOMS"))
    return [
        Phase("meet", **meeting(ctas)),
        Phase("groups' peaks", kernel.turn(peak, WORDS), words_of(vocab // ctas, threads), source=source),
        Phase("groups", **meeting(ctas), cycles=5 * 25 + BARRIER + 6 * SHARED),
        Phase("threshold", cycles=RANK * values + 2 * SHARED, barriers=1),
        Phase("candidates", loads=hits, cycles=hits * 8 * 20 + (MEETING if ctas > 1 else 2 * SHARED)),
        Phase("list", **meeting(ctas), cycles=RANK * candidates + BARRIER),
    ]


def sum_phases(kernel: Kernel, vocab: int, ctas: int, threads: int = THREADS) -> list[Phase]:
    """sum_exp_of_blocks(): sixteen lanes take a block. The partial sums of each block are added by one thread, then the
    sums of the blocks."""
    blocks, groups = -(-vocab // 1024), threads // 16
    rounds, warps = -(-blocks // (groups * ctas)), min(-(-blocks // ctas // 2), threads // 32)
    partial, sums = kernel.loop(own={"LD.E.U16": 16, "FFMA": 100}), kernel.loop(own={"DADD": 16, "LDS": 16})
    total = kernel.loop(own={"DADD": 32, "LDS": 16}, number=-1)
    return [
        Phase("sum", kernel.turn(partial), 4 * rounds, warps=warps, loads=rounds),
        Phase("sums of blocks", kernel.turn(sums), 1, warps=-(-blocks // ctas // 32), barriers=2),
        Phase("sum of all", kernel.turn(total), blocks / 32, warps=1, cycles=200),
    ]


def expand_tree(kernels: Kernels, batch: int, nodes: int) -> list[Launch]:
    kernel, grow = kernels("expand_top_kernel", "DTypeE2"), kernels("11grow_kernel")
    rows = batch * nodes
    ctas = ctas_of_row(rows, VOCAB)
    phases = [
        Phase("begin", cycles=100),
        *top_phases(kernel, VOCAB, CHILDREN, ctas),
        *sum_phases(kernel, VOCAB, ctas),
        Phase("write", near=2, barriers=1),
    ]
    # Where L2 does not hold the rows of all CTAs, they come from memory twice.
    reads = 2 if 2 * min(rows, 264) * VOCAB > L2_BYTES["H200 SXM"] else 1
    return [
        Launch(kernel, rows * ctas, THREADS, phases, TOP_BYTES + SUM_BYTES, moved=reads * 2 * rows * VOCAB),
        Launch(grow, batch, THREADS, grow_phases(grow, nodes), LIST_BYTES + 2048, early=True),
    ]


def grow_phases(kernel: Kernel, nodes: int) -> list[Phase]:
    """The candidates so far are copied, the children linked and ranked, while others enter the frontier."""
    return [
        Phase("candidates, scores", loads=1),
        Phase("children", loads=1),
        Phase("rank", barriers=2, cycles=max(RANK * nodes * CHILDREN, 3 * 330 + 10 * nodes)),
        Phase("masks", loads=2),
    ]


def rerank_tree(kernels: Kernels, batch: int, candidates: int, nodes: int) -> list[Launch]:
    """The best candidates are found by up to four digits, then numbered in their order."""
    count, pack, rerank = kernels("12count_kernel"), kernels("11pack_kernel"), kernels("13rerank_kernel")
    turns = -(-candidates // THREADS)
    chosen = [
        Phase("begin", loads=2),
        Phase("digits", cycles=4 * DIGIT, loads=5 * turns),
        Phase("number", loads=turns, barriers=3 * turns),
        Phase("write", loads=4 * turns),
    ]
    return [
        Launch(count, batch, THREADS, [Phase("count", loads=1 + turns, barriers=2)], 400),
        Launch(pack, 1, THREADS, [Phase("pack", loads=1, barriers=2, cycles=300)], 400, early=True),
        Launch(rerank, batch, THREADS, chosen, LIST_BYTES, early=True),
    ]


def medusa_propose(kernels: Kernels, batch: int, heads: int, nodes: int) -> list[Launch]:
    top, pack, fill = kernels("medusa_top_kernel", "DTypeE2"), kernels("11pack_kernel"), kernels("fill_tree_kernel")
    rows = batch * heads
    ctas = ctas_of_row(rows, VOCAB)
    phases = [Phase("begin", loads=1), *top_phases(top, VOCAB, 10, ctas), Phase("write", near=1)]
    return [
        Launch(top, rows * ctas, THREADS, phases, TOP_BYTES, moved=2 * rows * VOCAB),
        Launch(pack, 1, THREADS, [Phase("pack", loads=1, barriers=2, cycles=300)], 400, early=True),
        Launch(fill, batch, THREADS, [Phase("fill", loads=3)], early=True),
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
