"""The tables of performance.md that show what was predicted from machine code."""

from __future__ import annotations

import json
from typing import Any

from tables import RESULTS, table

FROM = {"memory": "memory", "l2": "L2"}


def speed(row: dict[str, Any]) -> str:
    """TFLOP/s; for a kernel that waits for memory, the share of its bandwidth."""
    share = "" if row["memory_share"] is None else f" ({row['memory_share']:.0%})"
    return f"{row['tflop_per_s']:.0f}{share}"


def busiest(row: dict[str, Any]) -> str:
    """The unit that is taken for the largest share of the time; "memory" is L2 where the data come from there."""
    name = "L2" if (row["binds"], row["source"]) == ("memory", "l2") else row["binds"]
    return f"{name} {row['busy'][row['binds']]:.0%}"


def predicted_for(result: dict[str, Any], name: str) -> str:
    return (
        f"Predicted for {result['rows'][0]['machine']}, commit {result['commit']} (`benchmarks/results/{name}.json`):"
    )


def predicted(result: dict[str, Any], name: str) -> str:
    """Our kernels, beside FlashInfer's where its file of that machine is there."""
    file = RESULTS / f"flashinfer_{name}.json"
    others = json.loads(file.read_text())["rows"] if file.exists() else []
    peers = {(row["instance"], row["mask"]): speed(row) for row in others}
    masks = {"custom": "FlashInfer, tree mask", "causal": "FlashInfer, causal"} if peers else {}
    rows = []
    for row in result["rows"]:
        line = [*row["instance"].split("-"), f"{row['warps']} x {row['ctas']}", str(row["cycles"]), speed(row)]
        rows.append([*line, busiest(row), *(peers.get((row["instance"], mask), "") for mask in masks)])
    header = [
        "dtypes",
        "head dim",
        "rows of a tile",
        "warps x CTAs",
        "cycles a stage",
        "TFLOP/s (bandwidth)",
        "busiest",
    ]
    return predicted_for(result, name) + "\n\n" + table([*header, *masks.values()], rows)


def predicted_others(result: dict[str, Any], name: str) -> str:
    """Only the speed, with one column for each machine."""
    machines = [*dict.fromkeys(row["machine"] for row in result["rows"])]
    found = {(row["instance"], row["machine"]): f"{speed(row)}, {busiest(row)}" for row in result["rows"]}
    instances = [*dict.fromkeys(row["instance"] for row in result["rows"])]
    rows = [[*one.split("-"), *(found.get((one, machine), "") for machine in machines)] for one in instances]
    note = f"Predicted TFLOP/s (bandwidth), busiest unit; commit {result['commit']} (`benchmarks/results/{name}.json`):"
    return note + "\n\n" + table(["dtypes", "head dim", "rows of a tile", *machines], rows)


def published(result: dict[str, Any], name: str) -> str:
    rows = [
        [
            row["kernel"],
            row["machine"],
            str(row["head_dim"]),
            " x ".join(map(str, row["tile"])),
            f"{row['warps']} x {row['ctas']}",
            f"{row['tflop_per_s']:.0f}",
            str(row["published"]),
            f"{row['error']:+.0%}",
            row["where"],
        ]
        for row in sorted(result["rows"], key=lambda row: (row["machine"], row["head_dim"]))
    ]
    header = ["kernel", "machine", "head dim", "tile, rows x keys", "warps x CTAs", "TFLOP/s, predicted", "published"]
    note = f"The model of commit {result['commit']} (`benchmarks/results/{name}.json`):"
    return note + "\n\n" + table([*header, "error", "published where"], rows)


def predicted_verification(result: dict[str, Any], name: str) -> str:
    passes = [
        [
            row["pass"],
            *(str(row[key]) for key in ("instructions", "words", "cycles")),
            FROM[row["source"]],
            busiest(row),
        ]
        for row in result["rows"]
        if row["kernel"] == "draw_rows"
    ]

    def reads(figures: list[float]) -> str:
        least, most = (f"{figure:.2f}" for figure in figures)
        return least if least == most else f"{least} to {most}"

    calls = [[call["call"], reads(call["all_rows"]), reads(call["lazy"])] for call in result["calls"]]
    header = ["pass over a row", "instructions", "loads before first use", "cycles", "reads from", "busiest"]
    return "\n\n".join(
        [
            predicted_for(result, name),
            table(header, passes),
            table(["in reads of all logits", "all rows", "only visited rows"], calls),
        ]
    )


def percent(share: float | None) -> str:
    return "" if share is None else f"{share:.0%}"


UNITS = {
    "memory": "memory", "l2": "L2", "tensor": "tensor", "shared": "shared memory", "issue": "issue",
    "integer": "integer", "float": "float", "mufu": "MUFU",
}  # fmt: skip


def is_latent(row: dict[str, Any]) -> bool:
    return "head_dim_v" in row


def bounds(result: dict[str, Any], name: str) -> str:
    """Our kernels: what bounds a tile, and each unit's share of that time."""
    ours = [row for row in result["rows"] if "idea" not in row and not is_latent(row)]
    found = {(row["kernel"], row["dtypes"], row["head_dim"], row["rows"]): row for row in ours}
    rows = []
    for (kernel, *point), row in found.items():
        other = found.get(("mma.sync", *point))
        if kernel != "wgmma" or other is None:
            continue
        size, time = f"{row['tiles']} x {row['tile']}", row["time"] * row["tiles"]
        peer = [str(other["time"] * other["tiles"]), UNITS[other["binds"]]]
        rows.append([*map(str, point), size, str(time), *(percent(row["share"][unit]) for unit in UNITS), *peer])
    header = ["dtypes", "head dim", "rows", "row tiles", "cycles, wgmma", *UNITS.values()]
    note = f"Calculated for {ours[0]['machine']}, commit {result['commit']} (`benchmarks/results/{name}.json`):"
    return note + "\n\n" + table([*header, "cycles, mma.sync", "its busiest"], rows)


def bounds_instructions(result: dict[str, Any], name: str) -> str:
    """Instructions of the loops, beside FlashAttention-3's."""
    rows = []
    for row in sorted(result["rows"], key=lambda row: (row.get("head_dim", 0), row.get("dtypes", ""))):
        if not (work := row.get("work")) or is_latent(row):
            continue
        mine, is_peer = work["consumers_synchronise"], "keys" in row
        line = [row["kernel"] if is_peer else "ours", row["dtypes"], str(row["head_dim"])]
        line += [f"{row['tile']} x {row.get('keys', 64)}", *(f"{work[key]:.0f}" for key in ("wgmma", "others"))]
        line += [f"{work['softmax']:.0f}", f"{'in them' if work['always_rescales'] else '+'} {work['rescale']:.0f}"]
        line += ["" if is_peer else f"+ {work['mask']:.0f}", f"{work['producer_warps']} x {work['producers']:.0f}"]
        line += ["; ".join(f"{count:g}" for count in mine.values())]
        rows.append([*line, f"{row['time']}, {UNITS[row['binds']]}" if is_peer else ""])
    header = [
        "kernel", "dtypes", "head dim", "rows x keys", "wgmma", "others", "of them softmax", "scaling the output",
        "mask", "producers", "barriers; waits; arrivals; fences", "bound, cycles",
    ]  # fmt: skip
    return table(header, rows)


def bounds_latent(result: dict[str, Any], name: str) -> str:
    """Latent rows, beside FlashMLA's kernel: what bounds a tile, and the instructions of the loops."""
    found = [row for row in result["rows"] if is_latent(row)]
    units = {unit: UNITS[unit] for unit in ("memory", "l2", "tensor", "shared", "issue")}
    times, works = [], []
    for row in found:
        size, flops = f"{row['tiles']} x {row['tile']}", f"{row['tflop_per_s']}"
        shares = [percent(row["share"][unit]) for unit in units]
        times.append([row["kernel"], str(row["rows"]), size, str(row["time"] * row["tiles"]), *shares, flops])
        if work := row.get("work"):
            line = [row["kernel"], *(f"{work[key]:.0f}" for key in ("wgmma", "others", "softmax"))]
            line += [f"{'in them' if work['always_rescales'] else '+'} {work['rescale']:.0f}"]
            line += [f"+ {work[key]:.0f}" if key in work else "" for key in ("mask_causal", "mask_tree")]
            line += [f"{work['producer_warps']} x {work['producers']:.0f}" if work["producer_warps"] else ""]
            works.append([*line, "; ".join(f"{count:g}" for count in work["consumers_synchronise"].values())])
    header = ["kernel", "rows", "row tiles", "cycles", *units.values(), "TFLOP/s at most"]
    of_works = [
        "kernel", "wgmma", "others", "of them softmax", "scaling the output", "causal mask", "tree mask", "producers",
        "barriers; waits; arrivals; fences",
    ]  # fmt: skip
    return table(header, times) + "\n\n" + table(of_works, works)


def bounds_ideas(result: dict[str, Any], name: str) -> str:
    swapped, cast = [], []
    for row in result["rows"]:
        line, time = row.get("instance", "").split("-"), [str(row["time"]), UNITS[row["binds"]]]
        if row.get("idea") == "swap-AB":
            swapped.append([*line, *time, percent(row["memory_share"]), percent(row["memory_share_now"])])
        elif row.get("idea") == "multicast":
            l2 = row["cycles"]["l2"]
            cast.append(
                [*line, percent(2 * l2 / row["time_now"]), percent(row["share"]["l2"]), str(row["time_now"]), *time]
            )
    header = ["dtypes", "head dim", "rows"]
    return "\n\n".join(
        [
            table([*header, "cycles", "busiest", "bandwidth at most", "mma.sync, predicted"], swapped),
            table([*header, "L2 now", "L2 with it", "cycles now", "cycles with it", "busiest"], cast),
        ]
    )
