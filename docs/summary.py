"""The two tables at the head of performance.md: how fast each part is beside the fastest other way to its result."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from real_tables import QUANTISED, rows_of
from tables import Result, Row, fastest_other, field, listing, load, op_name, over_floor, threads_of

COLUMNS = ("measured", "point", "ours", "over the fastest peer", "which", "floor / time", "machine")
Line = tuple[str, ...]  # of these columns

# What, the file, the op, the point.
OPS = [
    ("attention over trees", "ops_avx512", "tree_attention", "base"),
    ("attention of single tokens", "ops_avx512", "tree_attention", "batch 8, length 2048, tree chain 1"),
    ("latent attention", "latent_cpu", "latent_attention", "base"),
    ("recurrent layer, trees", "recurrent_cpu", "recurrent_step", "base"),
    ("recurrent layer, a prompt", "recurrent_cpu_prompts", "recurrent_prefill", "base"),
    ("verification, greedy", "ops_avx512", "verify_greedy", "base"),
    ("verification, sampled", "ops_avx512", "verify_sampled", "base"),
    ("verification, rejection", "ops_avx512", "verify_rejection", "tree chain 32"),
    ("best drafts of a model", "ops_avx512", "expand_tree", "base"),
    ("accepted keys and values moved", "ops_avx512", "compact_kv", "base"),
]
# Rows of headline.py that say how fast a step on a GPU is.
GPU_POINTS = (
    *("one sequence, L 8k, T 16", "R 64, 256 MB", "R 64, 1 GB", "R 256, 256 MB", "prefill, empty prefix"),
    *("latent, R 512", "greedy, a path", "sampled, a path, top-p 0.9", "sampled, all rows, temperature 0.8"),
    "rejection",
)


def times(ratio: float) -> str:
    return f"{ratio:.{2 if ratio < 10 else 1 if ratio < 100 else 0}f} x"


def machine_of(machine: dict[str, Any]) -> str:
    return f"{machine['processor']}, {machine['cpu_isa']}, {threads_of(machine)}"


def op_lines() -> Iterator[Line]:
    for what, name, op, point in OPS:
        if result := load(name):
            row = next(row for row in result["rows"] if (row["op"], row["point"]) == (op, point))
            (ratio, peer), machine = fastest_other(row), machine_of(result["machine"])
            yield what, f"`{op}`, {point}", f"{row['ms']:.3g} ms", times(ratio), peer, over_floor(row), machine


def fastest(rows: list[Row]) -> Row:
    return max(rows, key=lambda row: row["over_plain"][1])


def is_our_way(way: str) -> bool:
    return not way.startswith(("transformers", "OpenVINO", "llama.cpp", "vLLM"))


def real_lines(result: Result) -> Iterator[Line]:
    """Whole generations of the real model, over all its prompts: plain decoding, then the fastest way of all."""
    for batch in (1, 16):
        rows = [row for row in rows_of(result) if (row["kind"], row["sequences"]) == ("all", batch)]
        rows = [row for row in rows if not row["way"].endswith(QUANTISED)]
        own = [row for row in rows if is_our_way(row["way"])]
        others = [row for row in rows if not is_our_way(row["way"]) and "our " not in row["way"]]
        for ours, peers in (
            ([row for row in own if row["way"] == "plain"], [row for row in others if "," not in row["way"]]),
            (own, others),
        ):
            if ours and peers:
                mine, peer = fastest(ours), fastest(peers)
                rate = f"{mine['tokens_per_second'][1]:.0f} tokens/s"
                ratio = times(mine["over_plain"][1] / peer["over_plain"][1])
                what, machine = f"generate, {mine['way']}", machine_of(result["machine"])
                yield what, f"SmolLM2, batch {batch}", rate, ratio, peer["way"], "", machine


def measured() -> str:
    result = load("real_cpu")
    lines = dict.fromkeys([*op_lines(), *(real_lines(result) if result else ())])  # plain may be the fastest way, too
    rows = [dict(zip(COLUMNS, line, strict=True)) for line in lines]
    return listing(rows, {title: field(title) for title in COLUMNS})


def on_gpu(result: Result, name: str) -> str:
    machine = result["machine"]
    columns = {
        "op": op_name,
        "point": field("point"),
        machine["cuda"]: lambda row: f"{row['ms'] * 1e3:.0f} us",
        "over the fastest peer": lambda row: times(fastest_other(row)[0]),
        "which": lambda row: fastest_other(row)[1],
        "floor / time": over_floor,
    }
    rows = [row for row in result["rows"] if row["point"] in GPU_POINTS]
    return f"{machine['cuda']}, {machine['date']}, commit {machine['commit']}:\n\n{listing(rows, columns)}"
