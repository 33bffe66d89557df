"""The pages of figures show what was kept: their tables and plots say what a result says, and are up to date."""

from __future__ import annotations

import importlib
import json
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
MACHINE = {
    "processor": "x", "threads": 2, "torch": "2", "date": "2026-01-01", "commit": "abc", "load": 0.1,
    "cpu_isa": "avx2", "read_gb_per_s": 20.0, "matmul_gflop_per_s": {"float32": 100.0},
}  # fmt: skip


@pytest.fixture
def docs(monkeypatch):
    """Imports a module of docs/ by its name."""
    monkeypatch.syspath_prepend(str(ROOT / "docs"))
    return importlib.import_module


def test_pages_show_the_kept_results(docs):
    make_performance = docs("make_performance")
    assert [page.name for page in make_performance.PAGES] == ["performance.md", "your_model.md", "README.md"]
    for page, sections in make_performance.PAGES.items():
        text = page.read_text(encoding="utf-8")
        assert text == make_performance.filled(text, sections), f"{page.name} is out of date: run `make docs`"


def measured_row(op: str, shape: dict, base: dict, seconds: float, **others) -> dict:
    """As bench_ops.py writes it; one peer takes twice, one half the time."""
    timings = {"pagedtree": seconds, "slow": 2 * seconds, "fast": seconds / 2}
    row = {
        "op": op, "point": ", ".join(f"{k} {v}" for k, v in shape.items() if base[k] != v) or "base", "shape": shape,
        "headline": shape == base, "bytes": 10**6, "flops": 10**9, "ms": seconds * 1e3, "spread_ms": 0.1,
        "gb_per_s": 1e-3 / seconds, "gflop_per_s": 1 / seconds, "floor_ms": 5.0, "bound": "memory", "notes": {},
        "ratio": {"pagedtree causal": 0.9, "slow": 2.0, "fast": 0.5}, "ratio_with_plan": {"slow": 2.5, "fast": 0.5},
        "timings": {name: {"median": time, "spread": 0.0, "repeats": 5} for name, time in timings.items()},
        "peak_bytes": {"pagedtree": 2 * 10**6}, "absent": {"another": "not installed"},
    }  # fmt: skip
    return row | others


@pytest.fixture
def sweep_result() -> dict:
    base = {"length": 512, "batch": 1, "tree": "binary 32", "dtype": "bfloat16", "threads": 0}
    changes = [("length", 1024), ("length", 2048), ("batch", 4), ("tree", "chain 1"), ("threads", 1)]
    shapes = [base, *(base | {key: value} for key, value in changes)]
    rows = [measured_row("tree_attention", shape, base, 0.01 * (i + 1)) for i, shape in enumerate(shapes)]
    base = {"batch": 8, "tree": "binary 32", "vocab": 1000}
    shapes = [base, base | {"vocab": 4000}, base | {"tree": "chain 5"}]
    rows += [measured_row("verify_greedy", shape, base, 0.01, flops=0) for shape in shapes]
    rows += [{"op": "tree_attention", "point": "length 8", "shape": {}, "headline": False, "skipped": "too long"}]
    return {"machine": MACHINE, "rows": rows}


def test_tables_of_ops_have_the_headline_and_what_is_worst(docs, sweep_result):
    family = docs("measured_tables").family
    text = family("tree_attention")(sweep_result, "ops_x")
    assert "| `tree_attention` | base | 10 (0.1) | 100 | 0.50 | 0.90 x | 2.00 / 2.50 x | 0.50 x |" in text
    assert "length 1024 |" not in text and "verify_greedy" not in text and "commit abc" in text
    # Of threads 1, the slowest point, the floor is another; the op itself in another mode is no peer.
    worst = "`tree_attention`, tree chain 1 (0.10); `tree_attention`, batch 4 (0.12); `tree_attention`, length 2048"
    assert f"Of all 6 points, furthest from the floor: {worst}" in text
    assert "A peer is faster at: `tree_attention`, base: 0.50 x fast;" in text and "0.90 x pagedtree" not in text
    for row in sweep_result["rows"]:
        row.get("ratio", {}).pop("fast", None)
    text = family("tree_attention", "verify_")(sweep_result, "ops_x")
    assert text.count("0.10);") == 1 and "`verify_greedy`, base (0.50)." in text  # of several ops the worst of each
    assert "A peer is faster at: none." in text and "| `verify_greedy` | base | 10 (0.1) |  | 0.50 |" in text
    assert "| base |" not in family("tree_attention", points=("batch 4",))(sweep_result, "ops_x")


def real_row(sequences: int, way: str, rate: float, **others) -> dict:
    """As bench_real.py writes it."""
    rates = {"tokens_per_second": [rate / 2, rate, rate * 2], "over_plain": [rate / 80, rate / 40, rate / 20]}
    return {"dtype": "bfloat16", "sequences": sequences, "kind": "all", "way": way, **rates, **others}


REAL = [
    real_row(1, "transformers", 20), real_row(1, "transformers, prompt lookup", 50),
    real_row(1, "other, quantised", 500), real_row(1, "plain, not packed", 30), real_row(1, "plain", 40),
    real_row(1, "n-gram tree", 100), real_row(8, "n-gram auto", 200), real_row(16, "vLLM", 250),
    real_row(16, "vLLM, our n-gram tree", 500, over_stock=[1.5, 2, 2.5]), real_row(16, "plain", 200),
    real_row(1, "plain", 7, dtype="float32"), real_row(1, "n-gram tree", 9, kind="edits"),
]  # fmt: skip


def test_summary_compares_with_the_fastest_peer(docs, sweep_result, tmp_path):
    summary = docs("summary")
    assert summary.lines(tmp_path) == []
    sweep_result["rows"].append(sweep_result["rows"][0] | {"point": "batch 8, length 2048, tree chain 1"})
    for op in ("verify_sampled", "verify_rejection", "expand_tree", "compact_kv"):
        point = "tree chain 32" if op == "verify_rejection" else "base"
        sweep_result["rows"].append(sweep_result["rows"][6] | {"op": op, "point": point})
    for name, result in (("ops_avx512", sweep_result), ("real_cpu", {"machine": MACHINE, "rows": REAL})):
        (tmp_path / f"{name}.json").write_text(json.dumps(result))
    found = summary.lines(tmp_path)
    machine = "x, avx2, 2 threads"
    assert found[0] == ("attention over trees", "`tree_attention`, base", "10 ms", 0.5, "fast", "0.50", machine)
    assert [line[:5] for line in found if not line.floor] == [
        ("generate, plain", "SmolLM2, batch 1", "40 tokens/s", 2.0, "transformers"),
        ("generate, n-gram tree", "SmolLM2, batch 1", "100 tokens/s", 2.0, "transformers, prompt lookup"),
        ("generate, plain", "SmolLM2, batch 16", "200 tokens/s", 0.8, "vLLM"),
    ]
    assert [summary.times(ratio) for ratio in (0.344, 12.44, 5659.7)] == ["0.34 x", "12.4 x", "5660 x"]


def test_plots_are_of_the_kept_results(docs, tmp_path):
    matplotlib = pytest.importorskip("matplotlib")
    if f"matplotlib=={matplotlib.__version__}\n" not in (ROOT / "requirements-dev.txt").read_text():
        pytest.skip("another matplotlib draws other bytes")
    make_plots = docs("make_plots")
    plots = ("ops_", "real_", "overview", "accepted_length")
    kept = {path.name: path.read_bytes() for path in make_plots.IMAGES.glob("*.svg") if path.stem.startswith(plots)}
    written = {path.name: path.read_bytes() for path in make_plots.write(images=tmp_path)}
    assert kept == written, "docs/img is out of date: run `make docs`"
