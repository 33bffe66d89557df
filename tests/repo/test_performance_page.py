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


def keep(folder: Path, **results: dict) -> None:
    for name, result in results.items():
        (folder / f"{name}.json").write_text(json.dumps(result))


def test_pages_show_the_kept_results(docs):
    make_performance = docs("make_performance")
    assert [page.name for page in make_performance.PAGES] == [
        "performance.md",
        "your_model.md",
        "README.md",
    ]
    for page, sections in make_performance.PAGES.items():
        text = page.read_text(encoding="utf-8")
        assert text == make_performance.filled(text, sections), f"{page.name} is out of date: run `make docs`"


def test_page_stays_readable():
    text = (ROOT / "docs" / "performance.md").read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 400
    assert len(text[: text.index("\n## ")].splitlines()) <= 50


def test_sections_without_a_result_say_so(docs, monkeypatch):
    make_performance = docs("make_performance")
    shown = make_performance.kept("nowhere", lambda result, name: f"{result} of {name}")
    assert shown() == "Not measured."
    monkeypatch.setattr(make_performance, "load", lambda name: {"nowhere": 1}[name])
    assert shown() == "1 of nowhere"


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


def test_host_time_has_a_column_for_each_prepared_call(docs):
    rows = [
        {"call": call, "form": form, "us": us}
        for call, form, us in (
            ("SDPA, one key", "", 4.04), ("commit", "", 16.0), ("all, 2 layers", "", 30.0),
            ("all, 2 layers", "prepared", 20.0),
        )
    ]  # fmt: skip
    machine, *lines = docs("measured_tables").host({"machine": MACHINE, "rows": rows}, "host_x").splitlines()
    assert "2 threads" in machine and machine.endswith("(`host_x.json`). Others: `commit` 16.")
    assert lines[1:] == [
        "| us | SDPA, one key | all, 2 layers |", "| --- | ---: | ---: |", "| one by one | 4.04 | 30 |",
        "| prepared |  | 20 |",
    ]  # fmt: skip


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


def real_row(kind: str, sequences: int, way: str, rate: float, over: float, **others) -> dict:
    row = {
        "dtype": "bfloat16", "sequences": sequences, "kind": kind, "way": way,
        "tokens_per_second": [rate / 2, rate, rate * 2], "over_plain": [over / 2, over, over * 2],
        "texts_equal": "16/16",
    }  # fmt: skip
    return row | others


@pytest.fixture
def real_result() -> dict:
    """As bench_real.py writes it."""
    rows = [
        real_row("edits", 1, "plain", 40, 1.0, tokens_per_step=1.0),
        real_row("edits", 1, "n-gram tree", 100, 2.5, texts_equal="15/16", largest_margin=0.125, tokens_per_step=3.5),
        real_row("stories", 1, "plain", 41, 1.0, tokens_per_step=1.0),
        real_row("stories", 1, "n-gram tree", 20, 0.5, texts_equal="12/16", largest_margin=0.5, tokens_per_step=1.25),
        real_row("edits", 8, "n-gram auto", 300, 1.5, over_best=[0.9, 0.97, 1.1]),
        real_row("all", 1, "transformers", 20, 0.5),
        real_row("all", 1, "transformers, prompt lookup", 50, 1.25, over_stock=[2, 2.5, 3]),
        real_row("all", 1, "other, quantised", 500, 9),
        real_row("all", 1, "plain, not packed", 30, 0.75),
        real_row("all", 1, "plain", 40, 1.0),
        real_row("all", 1, "n-gram tree", 100, 2.0),
        real_row("all", 8, "n-gram auto", 200, 1.25, over_best=[0.91, 0.96, 0.99]),
        real_row("all", 16, "vLLM", 250, 0.5),
        real_row("all", 16, "vLLM, our n-gram tree", 500, 1.5, over_stock=[1.5, 2, 2.5]),
        real_row("all", 16, "plain", 200, 1.0),
        real_row("edits", 1, "plain", 7, 1.0, dtype="float32"),
        real_row("edits", 1, "n-gram tree", 9, 1.0, dtype="float32"),
    ]
    return {"machine": MACHINE | {"max_new_tokens": 9, "versions": {"a": "1.2", "b": None}}, "rows": rows}


def test_table_of_the_real_model(docs, real_result):
    text = docs("real_tables").gains(real_result, "real_cpu")
    assert "commit abc" in text and "`real_cpu.json`" in text
    assert "16 prompts of each kind, at most 9 new tokens. a 1.2. Plain" in text
    ways, best, stock = (part.splitlines() for part in text.split("\n\n")[1:4])
    assert ways[0] == "| way | 1 sequence | 8 sequences | 16 sequences |"
    assert "| plain | 40 / - / 41 |  | - / - / - |" in ways
    assert "| n-gram tree | 2.50 / - / 0.50 |  |  |" in ways and "| n-gram auto |  | 1.50 / - / - |  |" in ways
    assert best[2:] == ["| n-gram auto | 0.97 / - / -; all 0.96 (0.91 to 0.99) |"]
    assert stock[2:] == ["| vLLM, our n-gram tree | - / - / -; all 2.00 (1.50 to 2.50) |"]  # of an engine's own drafts
    assert "plain decoding, bfloat16: n-gram tree 27/32 (0.5), n-gram auto 16/16." in text
    assert "plain decoding, float32: n-gram tree 16/16. In parentheses" in text


def test_short_tables_of_the_real_model(docs, real_result):
    tables, shown = docs("real_tables"), (("plain", "none"), ("n-gram tree", "copies"), ("n-gram auto", "chosen"))
    header, _, *lines = tables.at_once(*shown)(real_result, "x").splitlines()
    assert header.endswith("| edits | summaries with quotations | stories | all three, 8 sequences at once |")
    assert lines == [
        "| none | 40 |  | 41 |  |",
        "| copies | 100 (2.50 x) |  | 20 (0.50 x) |  |",
        "| chosen |  |  |  | 200 (1.25 x) |",
    ]
    real_result["rows"] += [{**row, "kind": "summaries"} for row in real_result["rows"] if row["kind"] == "edits"]
    assert tables.accepted(shown[1])(real_result, "x").splitlines()[-1] == "| copies | 2.50 | 2.50 | 0.25 |"


def test_no_row_is_lost_in_a_table(docs):
    pivot, rows = docs("tables").pivot, [{"a": "x", "b": "y"}, {"a": "x", "b": "y"}]
    with pytest.raises(ValueError, match=r"pivot: .* got two for \('x', 'y'\)"):
        pivot("", rows, *(lambda row, key=key: row[key] for key in ("a", "b", "a")))


def test_summary_compares_with_the_fastest_peer(docs, sweep_result, real_result, tmp_path):
    summary = docs("summary")
    assert summary.lines(tmp_path) == []
    sweep_result["rows"].append(sweep_result["rows"][0] | {"point": "batch 8, length 2048, tree chain 1"})
    for op in ("verify_sampled", "verify_rejection", "expand_tree", "compact_kv"):
        point = "tree chain 32" if op == "verify_rejection" else "base"
        sweep_result["rows"].append(sweep_result["rows"][6] | {"op": op, "point": point})
    keep(tmp_path, ops_avx512=sweep_result, real_cpu=real_result)
    found = summary.lines(tmp_path)
    machine = "x, avx2, 2 threads"
    assert found[0] == ("attention over trees", "`tree_attention`, base", "10 ms", 0.5, "fast", "0.50", machine)
    assert [line[:5] for line in found if not line.floor] == [
        ("generate, plain", "SmolLM2, batch 1", "40 tokens/s", 2.0, "transformers"),
        ("generate, n-gram tree", "SmolLM2, batch 1", "100 tokens/s", 1.6, "transformers, prompt lookup"),
        ("generate, plain", "SmolLM2, batch 16", "200 tokens/s", 2.0, "vLLM"),
    ]
    assert [summary.times(ratio) for ratio in (0.344, 12.44, 5659.7)] == ["0.34 x", "12.4 x", "5660 x"]


@pytest.mark.slow
def test_plots_are_the_same_each_time(docs, sweep_result, real_result, tmp_path):
    pytest.importorskip("matplotlib")
    make_plots = docs("make_plots")
    keep(tmp_path, ops_x=sweep_result, real_cpu=real_result)
    written = make_plots.write(tmp_path, tmp_path)
    assert [path.name for path in written] == ["ops_x_attention.svg", "real_cpu.svg", "overview.svg"]
    first = [path.read_bytes() for path in written]
    assert [path.read_bytes() for path in make_plots.write(tmp_path, tmp_path)] == first
    assert b"context, tokens" in first[0] and b"n-gram auto" in first[1]
    assert b"1.60 x transformers, prompt lookup" in first[2]
    (tmp_path / "real_cpu.json").unlink()
    keep(tmp_path, ops_x=sweep_result | {"rows": sweep_result["rows"][:1]})
    assert make_plots.write(tmp_path, tmp_path) == []


def test_plots_are_of_the_kept_results(docs, tmp_path):
    matplotlib = pytest.importorskip("matplotlib")
    if f"matplotlib=={matplotlib.__version__}\n" not in (ROOT / "requirements-dev.txt").read_text():
        pytest.skip("another matplotlib draws other bytes")
    make_plots = docs("make_plots")
    plots = ("ops_", "real_", "overview", "accepted_length")
    kept = {path.name: path.read_bytes() for path in make_plots.IMAGES.glob("*.svg") if path.stem.startswith(plots)}
    written = {path.name: path.read_bytes() for path in make_plots.write(images=tmp_path)}
    assert kept == written, "docs/img is out of date: run `make docs`"
