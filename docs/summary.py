"""The summary of performance.md: each part against its fastest peer."""

from __future__ import annotations

from collections.abc import Iterator

from real_tables import rows_of
from tables import Result, Row, fastest_other, field, listing, load, over_floor

COLUMNS = ("measured", "ours", "vs fastest peer", "floor / time")
Line = tuple[str, str, str, str]  # of these columns

# Title, file, op, point.
OPS = [
    ("attention over trees", "ops_avx512", "tree_attention", "base"),
    ("attention of single tokens", "ops_avx512", "tree_attention", "batch 8, length 2048, tree chain 1"),
    ("latent attention", "ops_amx", "latent_attention", "base"),
    ("recurrent layer, trees", "ops_amx", "recurrent_step", "base"),
    ("recurrent layer, a prompt", "ops_amx", "recurrent_prefill", "base"),
    ("verification, greedy", "ops_avx512", "verify_greedy", "base"),
    ("verification, sampled", "ops_avx512", "verify_sampled", "base"),
    ("verification, rejection", "ops_avx512", "verify_rejection", "tree chain 32"),
]


def times(ratio: float) -> str:
    return f"{ratio:.{2 if ratio < 10 else 1 if ratio < 100 else 0}f} x"


def op_lines() -> Iterator[Line]:
    for what, name, op, point in OPS:
        row = next(row for row in load(name)["rows"] if (row["op"], row["point"]) == (op, point))
        ratio, peer = fastest_other(row)
        yield what, f"{row['ms']:.3g} ms", f"{times(ratio)} {peer}", over_floor(row)


def fastest(rows: list[Row]) -> Row:
    return max(rows, key=lambda row: row["over_plain"][1])


def is_our_way(way: str) -> bool:
    return not way.startswith(("transformers", "OpenVINO", "llama.cpp", "vLLM"))


def real_lines(result: Result) -> Iterator[Line]:
    """Yields generations of the real model over all prompts: plain decoding, then the fastest way."""
    for batch in (1, 16):
        rows = [row for row in rows_of(result) if (row["kind"], row["sequences"]) == ("all", batch)]
        own = [row for row in rows if is_our_way(row["way"])]
        others = [row for row in rows if not is_our_way(row["way"]) and "our " not in row["way"]]
        for ours, peers in (
            ([row for row in own if row["way"] == "plain"], [row for row in others if "," not in row["way"]]),
            (own, others),
        ):
            mine, peer = fastest(ours), fastest(peers)
            rate = f"{mine['tokens_per_second'][1]:.0f} tokens/s"
            ratio = mine["over_plain"][1] / peer["over_plain"][1]
            gain = f"{times(ratio)} {peer['way']}"
            yield f"generate, {mine['way']} (SmolLM2, batch {batch})", rate, gain, ""


def measured() -> str:
    lines = dict.fromkeys([*op_lines(), *real_lines(load("real_cpu"))])  # plain decoding may be the fastest way, too
    rows = [dict(zip(COLUMNS, line, strict=True)) for line in lines]
    return listing(rows, {title: field(title) for title in COLUMNS})
