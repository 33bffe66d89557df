"""The first screen of performance.md: how fast each part is beside the fastest other way to the same result.

measured() and predicted() are its two tables; make_plots.py draws the first one.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from real_tables import QUANTISED, rows_of
from tables import RESULTS, Result, Row, is_ours, load, over_floor, table, threads_of


class Line(NamedTuple):
    """What was measured, at which point. ratio: ours over the fastest peer, above 1 where ours is faster."""

    what: str
    point: str
    ours: str
    ratio: float
    peer: str
    floor: str  # the floor's time over ours
    machine: str


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


def times(ratio: float) -> str:
    return f"{ratio:.{2 if ratio < 10 else 1 if ratio < 100 else 0}f} x"


def machine_of(machine: dict[str, Any]) -> str:
    return f"{machine['processor']}, {machine['cpu_isa']}, {threads_of(machine)}"


def op_lines(results: Path) -> Iterator[Line]:
    for what, name, op, point in OPS:
        if result := load(name, results):
            row = next(row for row in result["rows"] if (row["op"], row["point"]) == (op, point))
            ratio, peer = min((ratio, peer) for peer, ratio in row["ratio"].items() if not is_ours(peer))
            ours, floor, machine = f"{row['ms']:.3g} ms", f"{over_floor(row):.2f}", machine_of(result["machine"])
            yield Line(what, f"`{op}`, {point}", ours, ratio, peer, floor, machine)


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
                ratio = mine["over_plain"][1] / peer["over_plain"][1]
                what, machine = f"generate, {mine['way']}", machine_of(result["machine"])
                yield Line(what, f"SmolLM2, batch {batch}", rate, ratio, peer["way"], "", machine)


def lines(results: Path = RESULTS) -> list[Line]:
    found = list(op_lines(results))
    if result := load("real_cpu", results):
        found += real_lines(result)
    return list(dict.fromkeys(found))  # plain decoding may be the fastest way, too


def measured() -> str:
    header = ["measured", "point", "ours", "over the fastest peer", "which", "floor / time", "machine"]
    return table(header, [list(line._replace(ratio=times(line.ratio))) for line in lines()])


def predicted_attention(instance: str, ours: dict[str, Row], peers: dict[tuple[str, str], Row]) -> list[str]:
    """A tile of head size 128. Its floor is that of the memory or of the tensor cores."""
    row, (dtypes, _, rows) = ours[instance], instance.split("-")
    small = ours[f"{dtypes}-128-16"]  # waits for memory alone, which gives the rate of one row
    memory = small["tflop_per_s"] / small["memory_share"] * int(rows) / 16
    floor = row["tflop_per_s"] / min(memory, row["tflop_per_s"] / row["busy"]["tensor"])
    beside = [row["tflop_per_s"] / peers[instance, mask]["tflop_per_s"] for mask in ("custom", "causal")]
    what, speed = f"attention, {dtypes}, {rows} rows", f"{row['tflop_per_s']:.0f} TFLOP/s"
    return [what, speed, f"{floor:.2f}", *map(times, beside), row["machine"]]


def span(figures: list[float]) -> str:
    return " to ".join(f"{figure:.2f}" for figure in dict.fromkeys(figures))


def predicted() -> str:
    attention, peers = load("predicted_h200"), load("flashinfer_predicted_h200")
    verification, calls = load("verification_predicted_h200"), load("ops_predicted_h200")
    ours = {row["instance"]: row for row in attention["rows"]}
    flashinfer = {(row["instance"], row["mask"]): row for row in peers["rows"]}
    tiles = ("bf16-128-16", "bf16-128-64", "bf16-128-128", "bf16/fp8-128-16")
    rows = [predicted_attention(instance, ours, flashinfer) for instance in tiles]
    for call in verification["calls"]:
        what, reads = f"verification of all rows, {call['call']}", call["all_rows"]
        floor = span([1 / figure for figure in reversed(reads)])
        rows.append([what, f"{span(reads)} reads of the logits", floor, "", "", call["machine"]])
    row = next(row for row in calls["rows"] if row["call"] == "tree_delta_rule, 32 nodes x 8")
    floor = f"{row['floor_us'] / row['us']:.2f}"
    rows.append(["recurrent layer, 8 trees of 32 nodes", f"{row['us']:.0f} us", floor, "", "", row["machine"]])
    header = ["predicted", "ours", "floor / time", "over FlashInfer, tree mask", "over FlashInfer, causal", "GPU"]
    return table(header, rows)
