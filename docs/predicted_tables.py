"""The tables of predictions.md, which show what was predicted from machine code. No GPU was there."""

from __future__ import annotations

from collections.abc import Callable

from tables import Result, Row, listing, load, pivot

HEAD_DIM = 128
LEAST_FLOOR_US = 0.1  # below it launches are all there is
UNITS = {"l2": "L2", "shared": "shared memory", "issue": "issue slots", "mufu": "MUFU"}


def unit_of(row: Row) -> str:
    """Names what takes the largest share of the time; "memory" is L2 where the data come from there."""
    unit = row["source"] if row["binds"] == "memory" and "source" in row else row["binds"]
    return UNITS.get(unit, unit)


def speed(row: Row) -> str:
    """TFLOP/s; for a kernel that waits for memory, the share of its bandwidth; then the unit that binds."""
    share = "" if row["memory_share"] is None else f" ({row['memory_share']:.0%})"
    return f"{row['tflop_per_s']:.0f}{share}, {unit_of(row)}"


MASKS = {"custom": ", FlashInfer, tree mask", "causal": ", FlashInfer, causal"}


def attention(*names: str) -> Callable[[], str]:
    """Kernels of one head size, with a column for each machine and for each of FlashInfer's kernels there."""

    def shown() -> str:
        results = {name: result for name in names if (result := load(name))}
        rows = [row for result in results.values() for row in result["rows"] if f"-{HEAD_DIM}-" in row["instance"]]
        cells = pivot(
            "dtypes, rows of a tile", rows,
            lambda row: row["instance"].replace(f"-{HEAD_DIM}-", ", "),
            lambda row: row["machine"] + MASKS.get(row.get("mask", ""), ""),
            speed,
        )  # fmt: skip
        kept = ", ".join(f"`{name}.json` (commit {result['commit']})" for name, result in results.items())
        return f"TFLOP/s (share of the bandwidth) and what binds, head size {HEAD_DIM}; {kept}:\n\n{cells}"

    return shown


def verification(*names: str) -> Callable[[], str]:
    """Calls of verify_sampled in reads of all logits, with a column for each machine and way of reading rows."""

    def span(reads: list[float]) -> str:
        return " to ".join(f"{figure:.2f}" for figure in dict.fromkeys(reads))

    def shown() -> str:
        results = {name: result for name in names if (result := load(name))}
        rows = [
            {"machine": call["machine"], "call": call["call"], "way": way, "reads": span(call[key])}
            for result in results.values()
            for call in result["calls"]
            for way, key in (("all rows", "all_rows"), ("visited rows", "lazy"))
        ]
        cells = pivot(
            "reads of all logits",
            rows,
            lambda row: row["call"],
            lambda row: f"{row['machine']}, {row['way']}",
            lambda row: row["reads"],
        )
        kept = ", ".join(f"`{name}.json` (commit {result['commit']})" for name, result in results.items())
        return f"{kept}:\n\n{cells}"

    return shown


def published(result: Result, name: str) -> str:
    """Tells how far the model is off where others have published what they measured."""
    errors = [
        f"{row['kernel']}, {row['machine']}, {row['head_dim']} {row['error']:+.0%}"
        for row in sorted(result["rows"], key=lambda row: (row["kernel"], row["machine"], row["head_dim"]))
    ]
    return f"Errors by kernel, machine and head size (`{name}.json`, commit {result['commit']}): {'; '.join(errors)}."


def bounds(result: Result, name: str) -> str:
    """The least cycles for 64 keys and all rows, by kernel: one head size, and latent rows."""
    rows = [
        row
        for row in result["rows"]
        if row.get("rows") in (64, 256)
        and "idea" not in row
        and ("head_dim_v" in row or row["head_dim"] == HEAD_DIM)
        and row.get("columns", [HEAD_DIM]) == [HEAD_DIM]  # not the build that multiplies 16 columns at a time
    ]
    cells = pivot(
        "dtypes, head size, rows", rows, "{dtypes}, {head_dim}, {rows}".format_map,
        lambda row: row["kernel"], lambda row: f"{row['time'] * row['tiles']}, {unit_of(row)}",
    )  # fmt: skip
    note = f"Cycles of an SM, {rows[0]['machine']}, commit {result['commit']} (`{name}.json`), and what binds:"
    return note + "\n\n" + cells


def calls(result: Result, name: str) -> str:
    """Whole calls; where the engines differ, both values."""
    by_call: dict[str, dict[str, Row]] = {}
    for row in result["rows"]:
        by_call.setdefault(row["call"], {})[row["engine"]] = row

    def time(engine: str) -> Callable[[dict[str, Row]], str]:
        return lambda rows: f"{rows[engine]['us']:.0f} us, {rows[engine]['ratio']:.2f} x" if engine in rows else ""

    def both(key: str, form: str) -> Callable[[dict[str, Row]], str]:
        return lambda rows: " / ".join(dict.fromkeys(format(row[key], form) for row in rows.values()))

    cells = listing(
        by_call.values(),
        {
            "call": lambda rows: next(iter(rows.values()))["call"],
            "mma.sync": time("mma.sync"),
            "wgmma": time("wgmma"),
            "balance": both("balance", ".2f"),
            "idle CTAs": both("idle", ""),
            "KV reads": both("kv_reads", ".2f"),
            "pieces": both("pieces", ""),
            "without a key": both("empty_pieces", ""),
        },
    )
    note = f"Time of a call and its ratio to the floor, {result['rows'][0]['machine']}, commit {result['commit']}"
    return f"{note} (`{name}.json`):\n\n{cells}"


def op_calls(result: Result, name: str) -> str:
    """Whole calls of the other ops, with the launch that takes longest and what takes longest in it."""

    def longest(row: Row) -> str:
        launch = max(row["launches"], key=lambda launch: launch["us"])
        phase = max(launch["cycles"], key=launch["cycles"].__getitem__)
        what = "memory" if launch["us"] == launch["memory_us"] else phase
        return f"`{launch['kernel']}`: {what}"

    cells = listing(
        result["rows"],
        {
            "call": lambda row: row["call"],
            "time": lambda row: f"{row['us']:.1f} us",
            "floor": lambda row: f"{row['floor_us']:.2f} us",
            "over the floor": lambda row: f"{row['ratio']:.1f} x" if row["floor_us"] >= LEAST_FLOOR_US else "",
            "launches": lambda row: str(len(row["launches"])),
            "most of it": longest,
        },
    )
    return f"{result['rows'][0]['machine']} (`{name}.json`):\n\n{cells}"
