"""Calls of ops that make or choose trees without logits: ngram_propose, select_nodes, best_first_tree, build_trees."""

from __future__ import annotations

from functools import partial

from predict_ops import DIGIT, Kernels, Launch, OpCall, Phase

THREADS = 256  # of ngram_propose
SELECT_THREADS, SELECT_CTAS, SELECT_WARPS = 512, 16, 16  # CTAs: a cluster


def ngram_propose(kernels: Kernels, batch: int, length: int, nodes: int) -> list[Launch]:
    """Places are scarce: each thread looks at its part of the text eight tokens at a time, and few places are found."""
    search, pack, place = kernels("12ngram_kernel"), kernels("11pack_kernel"), kernels("place_tries_kernel")
    looking = search.turn(search.loop(own={"LDG.E.64": 8}))
    phases = [
        Phase("begin", loads=3, near=20, barriers=3),
        Phase("search", looking, turns=length / THREADS / 8, source="memory"),
        Phase("insert", loads=4 * nodes, barriers=4 * nodes, cycles=100 * nodes),
        Phase("write", near=2),
    ]
    return [
        Launch(search, batch, THREADS, phases, 25000, moved=8 * batch * length),
        Launch(pack, 1, THREADS, [Phase("pack", loads=1, barriers=2, cycles=300)], 400),
        Launch(place, batch, THREADS, [Phase("place", loads=2)]),
    ]


def select_nodes(kernels: Kernels, batch: int, nodes: int, ctas: int) -> list[Launch]:
    """Each warp walks its trees three times, 32 nodes at a time; between the walks the best keys are found."""
    kernel = kernels("select_nodes_kernel")
    trees, groups = -(-batch // (SELECT_WARPS * ctas)), -(-nodes // 32)
    turns = trees * groups
    rows = -(-batch * nodes // (SELECT_THREADS * ctas))
    phases = [
        Phase("keys", loads=2 * turns + trees, near=turns, cycles=5 * 100 * turns),
        Phase("digits", cycles=4 * DIGIT, meetings=2 * 4 + 4, loads=5 * rows),
        Phase("count", loads=turns + trees),
        Phase("write", loads=3 * turns + 2 * trees, near=4 * turns),
    ]
    return [Launch(kernel, ctas, SELECT_THREADS, phases, 12288 + 16384 + 400 + SELECT_WARPS * 4096)]


def best_first_tree(kernels: Kernels, batch: int, nodes: int) -> list[Launch]:
    """One warp finds one node after the other."""
    kernel = kernels("best_first_kernel")
    node = kernel.loop(own={"REDUX": 1, "STS": 5, "SHFL": 6})
    phases = [Phase("levels", loads=2), Phase("nodes", kernel.turn(node), turns=nodes, loads=nodes)]
    return [Launch(kernel, batch, 32, [*phases, Phase("write", loads=2 * nodes / 32)], 40000)]


def build_trees(kernels: Kernels, batch: int, nodes: int) -> list[Launch]:
    """A thread links its node to those behind it, one look at shared memory for each."""
    kernel = kernels("build_trees_kernel")
    threads = min(-(-nodes // 32) * 32, 1024)
    phases = [
        Phase("begin", loads=2, barriers=2),
        Phase("depths", near=2 * nodes**0.5),
        Phase("links", cycles=12 * nodes),
    ]
    return [Launch(kernel, batch + 8, threads, [*phases, Phase("write", loads=2)], 12000)]  # 8 clear the padding


CALLS = [
    *(
        OpCall(
            f"ngram_propose, {length // 1024}k tokens x {batch}",
            partial(ngram_propose, batch=batch, length=length, nodes=16),
            8 * batch * length,
        )
        for length in (8192, 131072)
        for batch in (1, 32)
    ),
    *(
        OpCall(
            f"select_nodes, 64 nodes x 256, {name}",
            partial(select_nodes, batch=256, nodes=64, ctas=ctas),
            256 * 64 * 60,
        )
        for name, ctas in (("in a cluster", SELECT_CTAS), ("one CTA", 1))
    ),
    *(
        OpCall(f"best_first_tree, {nodes} nodes x 32", partial(best_first_tree, batch=32, nodes=nodes), 32 * nodes * 40)
        for nodes in (64, 256)
    ),
    *(
        OpCall(
            f"build_trees, {nodes} nodes x {batch}",
            partial(build_trees, batch=batch, nodes=nodes),
            batch * nodes * 40,
        )
        for batch, nodes in ((256, 64), (1, 1024))
    ),
]
