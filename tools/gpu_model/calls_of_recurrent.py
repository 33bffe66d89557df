"""Calls of tree_delta_rule, with one decay for each head and with one for each channel (Kimi Delta Attention)."""

from __future__ import annotations

from functools import partial

from predict_ops import Kernel, Kernels, Launch, OpCall, Phase
from predict_recurrent import COLUMNS, DIM, HEADS, PHASES, WARPS, Phases, group_of, moved_bytes, shared_bytes, trips

CHANNELS_G = 4 * DIM * HEADS  # bytes of a node's decays where each channel has one


def solving(kernel: Kernel, nodes: int) -> list[Phase]:
    """The phases of predict_recurrent.py; keys and state rows of a chunk come from L2."""
    phases, number = Phases(kernel.function), trips(nodes, is_chain=False)
    return [
        Phase(
            name,
            getattr(phases, name),
            number[name],
            warps=1 if name == "solve" else 0,
            source="l2" if name in ("load", "keys") else "memory",
        )
        for name in PHASES
    ]


def walking(kernel: Kernel, nodes: int) -> list[Phase]:
    """The weights by walks up the tree of 8 levels, one warp for each node; then its reads of the state."""
    steps = kernel.loop(own={"LDG.E": 8, "FFMA": 80, "SHFL": 10})
    reads = kernel.loop(own={"SHFL": 8, "LDS": 4, "FFMA": 7}, lacks=("LDG",))
    ancestors = nodes * (min(8, nodes) - 1) / 2
    return [
        Phase("norms", loads=-(-nodes // WARPS), cycles=200 * -(-nodes // WARPS)),
        Phase("walk", kernel.turn(steps, into={"SHFL": (1,)}), ancestors / WARPS, loads=ancestors / WARPS),
        Phase("reads", kernel.turn(reads, into={"SHFL": (1,)}), nodes / WARPS * DIM / 4),
        *(phase for phase in solving(kernel, nodes) if phase.name in ("link", "earlier", "block", "solve")),
    ]


def tree_delta_rule(kernels: Kernels, batch: int, nodes: int, by_channel: bool) -> list[Launch]:
    clear, kernel = kernels("12clear_kernel"), kernels("delta_rule_kernel")
    outputs = batch * nodes * HEADS * DIM
    phases = walking(kernel, nodes) if by_channel else solving(kernel, nodes)
    return [
        Launch(clear, -(-outputs // 256), 256, [Phase("clear", cycles=100)], moved=2 * outputs),
        Launch(
            kernel,
            batch * HEADS * DIM // COLUMNS,
            WARPS * 32,
            [Phase("state", far=2), *phases],
            shared_bytes(nodes, group_of(nodes)),
            moved=bytes_of(batch, nodes, by_channel),
        ),
    ]


def bytes_of(batch: int, nodes: int, by_channel: bool) -> int:
    return moved_bytes(nodes, batch) + (batch * nodes * CHANNELS_G if by_channel else 0)


CALLS = [
    OpCall(
        f"tree_delta_rule{', a decay for each channel' if by_channel else ''}, {nodes} nodes x {batch}",
        partial(tree_delta_rule, batch=batch, nodes=nodes, by_channel=by_channel),
        bytes_of(batch, nodes, by_channel),
    )
    for by_channel in (False, True)
    for nodes in (8, 16, 64)
    for batch in (1, 32)
]
