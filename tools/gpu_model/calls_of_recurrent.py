"""Calls of tree_delta_rule: with one decay for each head, of trees up to 64 nodes (csrc/cuda/recurrent/tree.cuh) and of
larger ones (chunk.cuh), and with one for each channel (Kimi Delta Attention). Qwen3-Next's linear attention, in bf16; a
tree has 8 levels of equal size."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

from predict_ops import Kernel, Kernels, Launch, OpCall, Phase
from sass_listing import Instruction
from sass_loops import Loop

HEADS, KEY_HEADS, DIM, LEVELS = 32, 16, 128, 8
TILE, COLUMNS, STEP = 8, 32, 16  # tokens of a tile, columns of a warp or a CTA, channels of a product
STEPS = DIM // STEP


def bytes_of(nodes: int, batch: int, by_channel: bool) -> int:
    """State, q, k, v and outputs, each once; g and beta."""
    of_node = 2 * (2 * KEY_HEADS + 2 * HEADS) * DIM + 4 * HEADS * (1 + (DIM if by_channel else 1))
    return batch * (4 * HEADS * DIM * DIM + nodes * of_node)


# ---- trees up to 64 nodes

TREE_WARPS, STAGES, ROW = 4, 4, DIM + 16  # of a CTA; steps in the ring; elements of a row of keys
TREE_SHARED = 64 * (8 + 8 + 4 + 8 + 4)  # bytes of TreeShared


def tiles_together(nodes: int) -> int:
    return 2 if nodes <= 2 * TILE else 4


def tree_bytes(nodes: int) -> int:
    """As TreeSizes."""
    rows, together = math.ceil(nodes / 16) * 16, tiles_together(nodes) * TILE
    earlier = (nodes - 1) // together * together
    of_warps = TREE_WARPS * 4 * (earlier + STAGES * STEP) * COLUMNS
    return TREE_SHARED + 4 * rows * ROW + 8 * together * (rows + 4) + of_warps


def own_way(kernel: Kernel, outer: Loop, through: Loop) -> list[Instruction]:
    """The longest way through a loop that passes one inside, without what the loops inside do."""
    inside = {x.address for other in kernel.inside(outer) for head in other.body for x in kernel.flow.blocks[head]}
    worth = {"STG": 100, "VOTE": 100, "FFMA": 10, "BAR": 10}

    def weight(x: Instruction) -> float:
        return 100_000 if x.address == through.head else worth.get(x.root, -1)

    return [x for x in kernel.flow.path(outer, weight) if x.address not in inside]


def tree_phases(kernel: Kernel, nodes: int) -> list[Phase]:
    """In a tree of 8 levels, as in a chain, tokens have ancestors in all blocks before."""
    tiles, together = math.ceil(nodes / TILE), tiles_together(nodes)
    groups, read_tiles = math.ceil(tiles / together), together if 2 * tiles > together else together // 2
    (reads,) = (
        loop
        for loop in kernel.loops
        if kernel.own(loop)["HMMA.1688.F32.TF32"] == 16 * read_tiles and kernel.own(loop)["LDGDEPBAR"]
    )
    jobs = kernel.loop(own={"VOTE": 1}, whole={"HMMA": 8}, lacks=("LDGSTS",))
    blocks = kernel.loop(own={"FFMA": 128 * together, "LDS.128": 16}, lacks=("HMMA", "SHFL"))
    own = own_way(kernel, kernel.loop(own={"BAR": 2, "SHFL": 64}, whole={"HMMA": 32}), reads)
    stores = [i for i, x in enumerate(own) if x.root == "STG"]
    if tiles < together:
        own = own[: stores[tiles - 1] + 1] + own[stores[-1] + 1 :]
    step = kernel.turn(reads, likes={"LDGSTS": 40, "HMMA": 9})
    # Pairs of blocks at and before a tile's own.
    pairs = sum(tile // 2 + 1 for tile in range(tiles))
    return [
        Phase("start", far=1),  # the offsets; keys and queries come while paths are linked
        Phase("link", far=1, near=2 * (math.ceil(math.log2(nodes)) + 1)),
        Phase(
            "weigh",
            kernel.turn(jobs, likes={"FFMA": 9, "STS": 9}, into={"HMMA": (STEPS // 4,), "SHF": (2,)}),
            math.ceil(pairs / TREE_WARPS),
        ),
        Phase("read", step, STEPS, source="memory"),
        Phase("read again", step, STEPS * (groups - 1)),
        Phase("earlier", kernel.turn(blocks, likes={"FFMA": 40}), sum(together * group for group in range(groups))),
        Phase("own", own, groups, source="memory"),
    ]


# ---- chunks: larger trees, and decays of channels

WARPS, BLOCK = 8, 8  # of a CTA; tokens that are solved together
READS = COLUMNS // 8  # products of 8 tokens with the state


def group_of(nodes: int) -> int:
    """Tokens that are weighed together, as group_size() chooses for 128 channels."""
    group = WARPS * BLOCK
    while group > BLOCK and (group // 2 >= nodes or chunk_bytes(nodes, group) > 96 << 10):
        group //= 2
    return group


def chunk_bytes(nodes: int, group: int, by_channel: bool = False) -> int:
    """As ChunkSizes."""
    words = math.ceil(nodes / 32)
    floats = DIM * (COLUMNS + 2) + nodes * COLUMNS + 2 * group * (words * 32 + BLOCK + COLUMNS + 8) + nodes * words
    return 6144 + 4 * (floats + (2 * BLOCK * (DIM + 16) if by_channel else 0))


class ChunkLoops:
    """The loops that each phase goes through."""

    def __init__(self, kernel: Kernel) -> None:
        self.kernel, flow = kernel, kernel.flow
        jobs = kernel.loop(whole={"HMMA": 48}, own={"VOTE": 1})
        passes = min((loop for loop in kernel.loops if jobs.body < loop.body), key=lambda loop: len(loop.body))
        solves = kernel.loop(own={"BAR": 2, "FFMA": 28}, lacks=("HMMA",))
        earlier = kernel.loop(own={"FFMA": 2 * BLOCK, "LDS": 8}, lacks=("BAR", "HMMA", "MUFU", "SHFL"))
        self.link = flow.path(kernel.loop(own={"BAR": 2}, lacks=("FFMA",)), by(LDS=40, STS=40))
        self.read = flow.path(jobs, by(HMMA=400, LDG=-3000))
        self.keys = flow.path(jobs, keys_weight)
        self.load = outside(flow.path(passes, by(LDG=40)), flow.path(jobs, by(LDG=40)))
        self.earlier = flow.path(earlier, by(FFMA=400))
        block = outside(flow.path(solves, by(FFMA=40, LDS=40, BAR=40)), self.earlier)
        begin, end = (i for i, x in enumerate(block) if x.root == "BAR")
        self.solve = block[begin + 1 : end]  # by one warp
        self.block = block[: begin + 1] + block[end:]


def by(**worth: int) -> Callable[[Instruction], int]:
    return lambda x: worth.get(x.root, -1)


def outside(way: list[Instruction], other: list[Instruction]) -> list[Instruction]:
    addresses = {x.address for x in other}
    return [x for x in way if x.address not in addresses]


def keys_weight(x: Instruction) -> int:
    """Weighs products with keys: words of 8 bytes are loaded, single elements and the state are not."""
    if x.root == "LDG":
        return 400 if ".64" in x.opcode else -3000
    return {"HMMA": 100, "LDS": -40}.get(x.root, -1)


def solving(loops: ChunkLoops, nodes: int) -> list[Phase]:
    """How often a warp goes through each phase; of those that warps share, the mean."""
    blocks = math.ceil(nodes / BLOCK)
    earlier = min(nodes * (LEVELS - 1) / 2 / BLOCK, blocks * (blocks - 1) / 2)
    return [
        Phase("link", loops.link, math.ceil(math.log2(nodes)) + 1, source="memory"),
        Phase("earlier", loops.earlier, earlier, source="memory"),
        Phase("block", loops.block, blocks, source="memory"),
        Phase("solve", loops.solve, blocks, warps=1, source="memory"),
    ]


def products(loops: ChunkLoops, nodes: int) -> list[Phase]:
    group, blocks = group_of(nodes), math.ceil(nodes / BLOCK)
    parts = WARPS / (group // BLOCK)  # warps that share the products of 8 tokens
    return [
        Phase("load", loops.load, math.ceil(nodes / group)),
        Phase("read", loops.read, READS * math.ceil(nodes / group) / parts, source="memory"),
        Phase("keys", loops.keys, blocks * (blocks + 1) / 2 / (group // BLOCK) / parts),
    ]


def walks(kernel: Kernel, nodes: int) -> list[Phase]:
    """The weights by walks up the tree, one warp for each node; then four warps read the state for 8 nodes."""
    steps = kernel.loop(own={"LDG.E": 8, "FFMA": 80, "SHFL": 10})
    reads = kernel.loop(own={"HMMA": 6, "LDS.128": 2}, lacks=("LDG", "BAR"))
    ancestors, blocks = nodes * (min(LEVELS, nodes) - 1) / 2, math.ceil(nodes / BLOCK)
    return [
        Phase("norms", loads=-(-nodes // WARPS), cycles=200 * -(-nodes // WARPS)),
        Phase("walk", kernel.turn(steps, into={"SHFL": (1,)}), ancestors / WARPS, loads=ancestors / WARPS),
        Phase("reads", kernel.turn(reads), STEPS * blocks, warps=COLUMNS // 8, barriers=2 * blocks),
    ]


# ---- calls


def tree_delta_rule(kernels: Kernels, batch: int, nodes: int, by_channel: bool) -> list[Launch]:
    moved = bytes_of(nodes, batch, by_channel)
    if nodes <= 64 and not by_channel:
        kernel = kernels("tree_delta_rule_kernel", "bfloat16", f"StateWordsE0ELi{tiles_together(nodes)}E")
        ctas = batch * HEADS * DIM // COLUMNS // TREE_WARPS
        return [Launch(kernel, ctas, TREE_WARPS * 32, tree_phases(kernel, nodes), tree_bytes(nodes), moved=moved)]
    clear, kernel = kernels("12clear_kernel"), kernels("17delta_rule_kernel")
    loops, outputs = ChunkLoops(kernel), batch * nodes * HEADS * DIM
    weighing = walks(kernel, nodes) if by_channel else products(loops, nodes)
    return [
        Launch(clear, -(-outputs // 256), 256, [Phase("clear", cycles=100)], moved=2 * outputs),
        Launch(
            kernel,
            batch * HEADS * DIM // COLUMNS,
            WARPS * 32,
            [Phase("state", far=2), *weighing, *solving(loops, nodes)],
            chunk_bytes(nodes, group_of(nodes), by_channel),
            moved=moved,
        ),
    ]


CALLS = [
    OpCall(
        f"tree_delta_rule{', a decay for each channel' if by_channel else ''}, {nodes} nodes x {batch}",
        partial(tree_delta_rule, batch=batch, nodes=nodes, by_channel=by_channel),
        bytes_of(nodes, batch, by_channel),
    )
    for by_channel in (False, True)
    for nodes in ((8, 16, 64) if by_channel else (8, 16, 32, 64, 128))
    for batch in ((1, 32) if by_channel else (1, 8, 32))
]
