"""Writes the tables of performance.md from the JSON files under benchmarks/results/.

python docs/make_performance.py [--check]
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

DOCS = Path(__file__).parent
RESULTS = DOCS.parent / "benchmarks" / "results"


def table(header: list[str], rows: list[list[str]]) -> str:
    lines = [header, ["---", *["---:"] * (len(header) - 1)], *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def machine_line(machine: dict[str, Any], name: str) -> str:
    return (
        f"{machine['processor']}, {machine['threads']} threads, torch {machine['torch']}, {machine['date']},"
        f" commit {machine['commit']}, load average {machine['load']:.1f} at the start"
        f" (`benchmarks/results/{name}.json`)."
    )


def demo(result: dict[str, Any], name: str) -> str:
    rows = [
        [
            f"{row['sampling']}, {row['drafter']}",
            f"{row['tokens_per_step']:.2f}",
            f"{row['accepted_length']:.2f}",
            f"{row['tokens_per_second']:.0f}",
            f"{row['time_to_first_token_ms']:.0f}",
            {True: "yes", False: "no", None: "lossy" if "typical" in row["drafter"] else "same law"}[row["identical"]],
        ]
        for row in result["rows"]
    ]
    header = ["run", "tokens/step", "accepted", "tokens/s", "first token, ms", "identical to plain"]
    return machine_line(result["machine"], name) + "\n\n" + table(header, rows)


def attention(result: dict[str, Any], name: str) -> str:
    machine, rows = result["machine"], result["rows"]
    peers = list(dict.fromkeys(name for row in rows for name in row["timings"] if name != "pagedtree"))
    header = ["shape", "ms", "GB/s", "of read bandwidth", "GFLOP/s", "of the floor", *(f"vs {peer}" for peer in peers)]
    body = [
        [
            row["shape"],
            f"{row['ms']:.2f}",
            f"{row['gb_per_s']:.1f}",
            f"{100 * row['bandwidth_fraction']:.0f} %",
            f"{row['gflop_per_s']:.0f}",
            f"{100 * row['floor_fraction']:.0f} %",
            *(f"{row['ratio'][peer]:.2f} x" if peer in row["ratio"] else "absent" for peer in peers),
        ]
        for row in rows
    ]
    arguments = machine["arguments"]
    rates = ", ".join(f"{rate:.0f} GFLOP/s {dtype}" for dtype, rate in machine["matmul_gflop_per_s"].items())
    note = (
        f"{arguments['heads']} query and {arguments['kv_heads']} KV heads of {arguments['head_dim']},"
        f" {arguments['dtype']}, pages of {arguments['page_size']}. A ratio is the peer's time over ours. Measured in"
        f" the same run: {machine['read_gb_per_s']:.1f} GB/s read bandwidth,"
        f" matmul {rates}. CPU kernels: {machine['cpu_isa']}."
    )
    return machine_line(machine, name) + "\n" + note + "\n\n" + table(header, body)


def verification(result: dict[str, Any], name: str) -> str:
    machine, rows = result["machine"], result["rows"]
    peers = list(dict.fromkeys(name for row in rows for name in row["ratio"]))
    header = ["rule", "drafts accepted", "ms", "spread, ms", "over the floor", *(f"vs {peer}" for peer in peers)]
    body = [
        [
            row["rule"],
            "" if row["accepted"] is None else f"{row['accepted']} of {row['drafts']}",
            f"{row['ms']:.2f}",
            f"{row['timings']['pagedtree']['spread'] * 1e3:.2f}",
            f"{row['over_floor']:.2f} x",
            *(f"{row['ratio'][peer]:.1f} x" if peer in row["ratio"] else "" for peer in peers),
        ]
        for row in rows
    ]
    arguments = machine["arguments"]
    note = (
        f"{arguments['batch']} trees of {arguments['nodes']} nodes, V {arguments['vocab']}, {arguments['dtype']}."
        f" The floor is the time to read the logits of all nodes once at {machine['read_gb_per_s']:.1f} GB/s, measured"
        " in the same run; verification reads the visited rows only. A ratio is the peer's time over ours. CPU kernels:"
        f" {machine['cpu_isa']}."
    )
    return machine_line(machine, name) + "\n" + note + "\n\n" + table(header, body)


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


def times(result: dict[str, Any], name: str) -> str:
    rows = [[row["stage"], f"{row['seconds']:.0f} s"] for row in result["rows"]]
    return machine_line(result["machine"], name) + "\n\n" + table(["stage", "time"], rows)


# Marker: (name of the files, one a machine or only one, and how they are shown).
SECTIONS = {
    "demo": ("demo", demo),
    "rules": ("rules", rules),
    "attention": ("tree_attention", attention),
    "verification": ("verify", verification),
    "kernels": ("kernels", kernels),
    "build": ("build", times),
}


def filled(text: str) -> str:
    for marker, (name, render) in SECTIONS.items():
        files = sorted(RESULTS.glob(f"{name}*.json"))
        content = "\n\n".join(render(json.loads(file.read_text()), file.stem) for file in files) or "not measured"
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
