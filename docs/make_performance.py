"""Writes the tables of performance.md from the JSON files under benchmarks/results/.

python docs/make_performance.py [--check]
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from typing import Any

import predicted_tables as of_code
from tables import DOCS, RESULTS, machine_line, table

sys.path.insert(0, str(RESULTS.parent))

from measure import median_interval


def demo(result: dict[str, Any], name: str) -> str:
    rows = [
        [
            f"{row['sampling']}, {row['drafter']}",
            f"{row['tokens_per_step']:.2f}",
            f"{row['accepted_length']:.2f}",
            f"{row['tokens_per_second']:.0f}",
            f"{row['time_to_first_token_ms']:.0f}",
            {True: "yes", False: "no", None: "lossy" if "typical" in row["drafter"] else "same distribution"}[
                row["identical"]
            ],
        ]
        for row in result["rows"]
    ]
    header = ["run", "tokens/step", "accepted", "tokens/s", "first token, ms", "identical to plain"]
    return machine_line(result["machine"], name) + "\n\n" + table(header, rows)


def family(*prefixes: str, heading: str = "") -> Callable[[dict[str, Any], str], str]:
    """Shows the ops of bench_ops.py whose names begin with one of these: plots, headline points, sweeps."""

    def render(result: dict[str, Any], name: str) -> str:
        rows = [row for row in result["rows"] if row["op"].startswith(prefixes)]
        measured = [row for row in rows if "timings" in row]
        if not measured:
            return ""
        machine = result["machine"]
        rates = ", ".join(f"{rate:.0f} GFLOP/s {key}" for key, rate in machine.get("matmul_gflop_per_s", {}).items())
        note = f"Measured in the same run: {machine['read_gb_per_s']:.1f} GB/s read bandwidth"
        note += f", matmul {rates}." if rates else "."
        parts = [machine_line(machine, name) + f" CPU kernels: {machine['cpu_isa']}. " + note]
        parts += [
            f"![{alt}](img/{name}_{plot}.svg)"
            for plot, alt in PLOTS.items()
            if heading in plot and (DOCS / "img" / f"{name}_{plot}.svg").exists()
        ]
        parts.append("Base and headline points, beside all peers:")
        parts.append(points_table([row for row in measured if row["headline"]]))
        sweeps = [row for row in measured if not row["headline"]]
        if sweeps:
            parts += ["Sweeps, one key of the base at a time:", points_table(sweeps)]
        return "\n\n".join([*parts, *remarks(rows)])

    return render


# Plot -> what it shows.
PLOTS = {
    "attention": "Time of a call against context, tree and batch",
    "attention_roofline": "Achieved arithmetic rate against intensity",
    "verification": "Time of a call against vocabulary and number of nodes",
}


def points_table(rows: list[dict[str, Any]]) -> str:
    peers = list(dict.fromkeys(peer for row in rows for peer in row["ratio"]))
    counted = any(row["notes"].get("accepted") is not None for row in rows)
    computed = any(row["flops"] for row in rows)
    header = ["op", "point", "ms", "spread, ms", *(["GB/s", "GFLOP/s"] if computed else []), "floor, ms"]
    header += [*(["drafts accepted"] if counted else []), *(f"vs {peer}" for peer in peers)]
    body = []
    for row in rows:
        accepted = row["notes"].get("accepted")
        line = [f"`{row['op']}`", row["point"], f"{row['ms']:.3g}", f"{row['spread_ms']:.2g}"]
        line += [f"{row[key]:.3g}" for key in ("gb_per_s", "gflop_per_s")] if computed else []
        line += [f"{row['floor_ms']:.3g}"]
        line += ["" if accepted is None else f"{accepted} of {row['notes']['drafts']}"] if counted else []
        body.append([*line, *(ratio_text(row, peer) for peer in peers)])
    return table(header, body)


def ratio_text(row: dict[str, Any], peer: str) -> str:
    """A peer's time over ours; then "/" and the ratio with what each plans once per step, where that differs."""
    if peer not in row["ratio"]:
        return ""
    alone = f"{row['ratio'][peer]:.2f}"
    planned = f"{row['ratio_with_plan'].get(peer, row['ratio'][peer]):.2f}"
    return f"{alone} x" if alone == planned else f"{alone} / {planned} x"


def remarks(rows: list[dict[str, Any]]) -> list[str]:
    """Where a peer is faster, what memory the calls took, which points and peers were left out."""
    found = []
    behind = [
        f"`{row['op']}`, {row['point']}: {ratio:.2f} x {peer}"
        for row in rows
        for peer, ratio in row.get("ratio", {}).items()
        if ratio < 1 and not peer.startswith("pagedtree")
    ]
    if behind:
        found.append("A peer is faster at: " + "; ".join(behind) + ".")
    memory = [row for row in rows if row.get("peak_bytes")]
    if memory:
        peers = list(dict.fromkeys(peer for row in memory for peer in row["peak_bytes"]))
        body = [
            [
                f"`{row['op']}`",
                row["point"],
                *(f"{row['peak_bytes'][p] / 1e6:.3g}" if p in row["peak_bytes"] else "" for p in peers),
            ]
            for row in memory
        ]
        found += ["Memory that a call took from torch's allocator at most, its result included, in MB:",
                  table(["op", "point", *peers], body)]  # fmt: skip
    skipped = [f"`{row['op']}`, {row['point']} ({row['skipped']})" for row in rows if "skipped" in row]
    if skipped:
        found.append("Not measured: " + "; ".join(skipped) + ".")
    absent = {peer: reason for row in rows if row.get("headline") for peer, reason in row.get("absent", {}).items()}
    if absent:
        found.append("Absent: " + "; ".join(f"{peer} ({reason})" for peer, reason in absent.items()) + ".")
    return found


def rules(result: dict[str, Any], name: str) -> str:
    def interval(figures: list[float] | None, sign: str = "") -> str:
        return "" if figures is None else f"{figures[0]:{sign}.3f} ({figures[1]:{sign}.3f} to {figures[2]:{sign}.3f})"

    machine, rows = result["machine"], result["rows"]
    arguments = machine["arguments"]
    note = (
        f"{arguments['prompts']} prompts, {arguments['max_new_tokens']} tokens each, temperature"
        f" {arguments['temperature']}, top-p {arguments['top_p']}; commit {machine['commit']}"
        f" (`benchmarks/results/{name}.json`). In parentheses: 95 % intervals, by bootstrap over the prompts. The last"
        " column compares rules on the same trees."
    )
    header = ["drafts", "rule", "trees", "accepted draft tokens", "more than rejection"]
    body = [
        [
            f"{row['shape']}, {row['law']}",
            row["rule"] + (" (lossy)" if row["rule"] == "typical" else ""),
            str(row["trees"]),
            interval(row["accepted"]),
            interval(row["over_rejection"], "+"),
        ]
        for row in rows
    ]
    return note + "\n\n" + table(header, body)


def kernels(result: dict[str, Any], name: str) -> str:
    machine, rows = result["machine"], result["rows"]
    architectures = list(rows[0]["registers"])
    header = ["head dim", "rows of a tile", "cache", "warps (rows x keys)", "keys a stage", "stages", "shared memory"]
    header += ["CTAs an SM", *(f"registers {architecture}" for architecture in architectures)]
    body = [
        [
            *(str(row[key]) for key in ("head_dim", "m_tile", "cache", "warps", "keys_per_stage", "stages")),
            f"{row['shared_bytes'] / 1024:.0f} KB",
            str(row["ctas_per_sm"]),
            *(str(row["registers"][architecture]) for architecture in architectures),
        ]
        for row in rows
    ]
    note = (
        f"nvcc for {', '.join(machine['architectures'])}, {machine['date']}, commit {machine['commit']}"
        f" (`benchmarks/results/{name}.json`); the whole library has {machine['library_bytes'] / 1e6:.1f} MB."
        " Kernels for fp16 are as those for bf16. Stages and CTAs as with 227 KB of shared memory for a CTA (Hopper)."
    )
    return note + "\n\n" + table(header, body)


def by_batch(rows: list[dict[str, Any]], show: Callable[[dict[str, Any]], str]) -> str:
    batches = sorted({row["batch"] for row in rows})
    found = {(row["name"], row["batch"]): show(row) for row in rows}
    labels = dict.fromkeys(name for name, _ in found)
    cells = [[label, *(found.get((label, batch), "") for batch in batches)] for label in labels]
    return table(["sequences", *map(str, batches)], cells)


def end_to_end(result: dict[str, Any], name: str) -> str:
    rows, arguments = result["rows"], result["machine"]["arguments"]
    dtype = result["machine"].get("dtype", "fp32")
    note = f" {arguments['max_new_tokens']} tokens per sequence, {arguments['rounds']} rounds, greedy, {dtype}."
    parts = [machine_line(result["machine"], name) + note]
    if (DOCS / "img" / f"{name}.svg").exists():
        parts.append(f"![Tokens per second against the number of sequences](img/{name}.svg)")
    parts += [
        "Tokens per second of all sequences, and over plain decoding in the same round:",
        by_batch(rows, lambda row: f"{row['tokens_per_second']:.0f} ({row['over_plain']:.2f} x)"),
    ]
    different = [
        f"{row['name']}, {row['batch']}" + (f" ({row['difference']})" if "difference" in row else "")
        for row in rows
        if not row["identical"]
    ]
    parts.append(f"Other texts than plain decoding's: {'; '.join(different) or 'none'}.")
    if absent := result["machine"].get("absent"):
        parts.append("Absent: " + "; ".join(f"{name} ({reason})" for name, reason in absent.items()) + ".")
    return "\n\n".join(parts)


def over_best_fixed(row: dict[str, Any], rows: list[dict[str, Any]]) -> str:
    """Chosen trees over the best, by its median, of plain decoding and what the same drafter does without choosing."""
    drafter = row["name"].partition(" tree, auto")[0]
    ways = {f"{drafter} chain": "chain", f"{drafter} tree": "tree"}
    fixed = [other for other in rows if other["batch"] == row["batch"] and other["name"] in ways]
    best = max(fixed, key=lambda other: other["over_plain"][1], default=None)
    if best is None or best["over_plain"][1] < 1.0:
        ratios, way = row["pairs"], "plain"
    else:
        ratios = [chosen / other for chosen, other in zip(row["pairs"], best["pairs"], strict=True)]
        way = ways[best["name"]]
    low, middle, high = median_interval(ratios)
    return f"{middle:.2f} ({low:.2f} to {high:.2f}, {way})"


def chosen_trees(result: dict[str, Any], name: str) -> str:
    rows, arguments = result["rows"], result["machine"]["arguments"]
    chosen = [row for row in rows if "drafted_steps" in row]

    def interval(figures: list[float]) -> str:
        low, middle, high = figures
        return f"{middle:.3f} ({low:.3f} to {high:.3f})"

    parts = [
        machine_line(result["machine"], name) + f" {arguments['max_new_tokens']} tokens per sequence, greedy, fp32.",
        f"Speed over plain decoding in {arguments['pairs']} pairs of other texts each, or as many as make"
        f" {arguments['texts']} texts, median and its 95 % interval; first plain decoding over itself:",
        by_batch(rows, lambda row: interval(row["over_plain"])),
        "Chosen trees over the best of plain decoding, the chain and the fixed tree on the same texts, median of the"
        " pairs, its interval, and which it was:",
        by_batch([row for row in chosen if "auto" in row["name"]], lambda row: over_best_fixed(row, rows)),
        "Time to the first token over plain decoding's:",
        by_batch(chosen, lambda row: interval(row["first_token_over_plain"])),
        "Share of their steps that had drafts:",
        by_batch(chosen, lambda row: f"{row['drafted_steps']:.0%}"),
    ]
    return "\n\n".join(parts)


def kib(size: int) -> str:
    return f"{size / 1024:.3g}" if size < 1000 << 10 else f"{size / 1024:.0f}"


def distributed(result: dict[str, Any], name: str) -> str:
    machine = result["machine"]
    body = [
        [
            row["rule"],
            *(str(row[key]) for key in ("vocab", "nodes", "ranks", "exchanges")),
            *(kib(row[key]) for key in ("bytes_sent", "bytes_to_gather")),
            *(f"{row[key]:.3g}" for key in ("ms", "gathered_ms")),
        ]
        for row in result["rows"]
        if row["ranks"] > 1
    ]
    header = ["rule", "vocabulary", "nodes", "ranks", "exchanges", "KiB sent", "KiB to gather", "ms", "ms gathered"]
    drafts = [
        [
            row["rule"],
            f"TP {row['draft_ranks']}",
            "yes" if row["identical"] else "no",
            f"{row['accepted']:.2f}",
            f"{row['proposal_ms_per_token']:.2f}",
            *(kib(row[key]) for key in ("bytes_sent", "bytes_to_gather")),
        ]
        for row in machine["drafting"]
    ]
    own = ["rule", "draft on", "text of one process", "accepted", "ms a proposed token", "KiB sent", "KiB to gather"]
    parts = [machine_line(machine, name), "What a rank sends to verify, and how long it takes:", table(header, body)]
    parts += [f"Drafting, the target on TP {machine['arguments']['ranks'][-1]}:", table(own, drafts)]
    return "\n\n".join(parts)


def times(result: dict[str, Any], name: str) -> str:
    rows = [[row["stage"], f"{row['seconds']:.0f} s"] for row in result["rows"]]
    return machine_line(result["machine"], name) + "\n\n" + table(["stage", "time"], rows)


def recurrent(result: dict[str, Any], name: str) -> str:
    """The rows beside their peers, and what each step reads and writes of the states."""
    body = []
    for row in result["rows"]:
        if row.get("headline") and "state_traffic" in row.get("notes", {}):
            traffic = [moved for way in row["notes"]["state_traffic"].values() for moved in way.values()]
            body.append([row["point"], *(f"{moved / 1e6:.1f}" for moved in traffic)])
    parts = [family("recurrent_")(result, name)]
    if body:
        header = ["point", "read", "written", "a state per node: read", "written"]
        parts += ["MB of states that a step moves, counted:", table(header, body)]
    return "\n\n".join(parts)


# Marker: (name of the files, one per machine or only one, and how they are shown).
SECTIONS = {
    "demo": ("demo", demo),
    "rules": ("rules", rules),
    "attention": ("ops", family("tree_attention", heading="attention")),
    "latent": ("latent", family("latent_attention", "tree_attention", heading="latent")),
    "recurrent": ("recurrent_cpu", recurrent),
    "verification": ("ops", family("verify_", "sample", heading="verification")),
    "other": ("ops", family("append_kv", "compact_kv", "merge_states", "build", "expand", "ngram", heading="other")),
    "end-to-end": ("end_to_end", end_to_end),
    "wide": ("wide", end_to_end),
    "chosen-trees": ("chosen_trees", chosen_trees),
    "distributed": ("distributed", distributed),
    "kernels": ("kernels", kernels),
    "predicted": ("predicted", of_code.predicted),
    "predicted-others": ("others_predicted", of_code.predicted_others),
    "published": ("published_predicted", of_code.published),
    "bounds": ("wgmma_bounds", of_code.bounds),
    "bounds-instructions": ("wgmma_bounds", of_code.bounds_instructions),
    "bounds-latent": ("wgmma_bounds", of_code.bounds_latent),
    "bounds-ideas": ("wgmma_bounds", of_code.bounds_ideas),
    "predicted-verification": ("verification_predicted", of_code.predicted_verification),
    "build": ("build", times),
}


def filled(text: str) -> str:
    for marker, (name, render) in SECTIONS.items():
        files = sorted(RESULTS.glob(f"{name}*.json"))
        parts = [render(json.loads(file.read_text()), file.stem) for file in files]
        content = "\n\n".join(part for part in parts if part) or "not measured"
        begin, end = f"<!-- {marker}:begin -->\n", f"\n<!-- {marker}:end -->"
        head, rest = text.split(begin, 1)
        text = head + begin + content + end + rest.split(end, 1)[1]
    return text


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="fail where the page is not up to date")
    page = DOCS / "performance.md"
    text = page.read_text()
    new = filled(text)
    if parser.parse_args().check:
        return int(new != text)
    page.write_text(new)
    return 0


if __name__ == "__main__":
    sys.exit(main())
