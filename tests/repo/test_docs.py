"""The documents hold: their Python runs, links lead somewhere, generated pages and pictures are up to date."""

from __future__ import annotations

import contextlib
import importlib
import io
import json
import re
from pathlib import Path
from xml.etree import ElementTree

import pytest

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("docs", "examples", "benchmarks", "csrc")
CHECKPOINTS = "examples/checkpoints"
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), *sorted((ROOT / "docs").glob("integrations/*.md"))]
ALL_PAGES = [*ROOT.glob("*.md"), *(page for name in FOLDERS for page in sorted((ROOT / name).rglob("*.md")))]


@pytest.fixture
def scripts(monkeypatch):
    """Makes the modules of docs/ and examples/ importable."""
    for folder in ("docs", "examples"):
        monkeypatch.syspath_prepend(str(ROOT / folder))


def python_blocks(page: Path) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", page.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize(
    "page", [page for page in PAGES if page.name != "api.md"], ids=lambda page: str(page.relative_to(ROOT))
)
def test_python_blocks_run(page, monkeypatch):
    """Each page is one program: its blocks run in order and share their names."""
    monkeypatch.chdir(ROOT)
    names = {}
    for block in python_blocks(page):
        for package in ("transformers", "vllm", "xgrammar"):
            if package in block:
                pytest.importorskip(package)
        if CHECKPOINTS in block and not (ROOT / CHECKPOINTS).exists():
            pytest.skip("the checkpoints are in the repository only")
        with contextlib.redirect_stdout(io.StringIO()):
            exec(compile(block, str(page), "exec"), names)


# What a reader might write instead, by section.
MISTAKES = {
    "positions of a chunk": ("positions = ((seq_lens - counts)[sequence] + column)", "positions = column"),
    "depth positions": ("positions[rows] = root.long()", "rows + root.long()"),
    "tree_lens of causal sequences": ("tree_lens = torch.where(num_nodes > 1, num_nodes, -1)", "tree_lens = num_nodes"),
    "idle is not malformed": ("trees.active & (verdict.status", "(verdict.status"),
    "tree_lens of the shared part": ("tree_lens=torch.zeros(1, dtype=torch.int32),", ""),
    "the old start": ("(draft_caches, draft_table, start,", "(draft_caches, draft_table, 1 + start,"),
    "draft_missing": ("missing, num_missing = committed.draft_missing, committed.draft_num_missing", ""),
    "logits at the root": ("hidden[cu_seqlens_q[1:].long() - 1])", "hidden[cu_seqlens_q[:-1].long()])"),
    "the scale of the heads": ("scale=(NOPE + ROPE) ** -0.5,", ""),
    "the last accepted node": ("hidden = all_hidden[last_rows.clamp(min=0)]", "hidden = all_hidden[:1]"),
}  # fmt: skip


@pytest.mark.parametrize("mistake", MISTAKES)
def test_integration_page_notices_mistakes(mistake):
    """The comparisons with plain decoding can fail: each rule that the page states is needed for them to hold."""
    right, wrong = MISTAKES[mistake]
    program = "\n".join(python_blocks(ROOT / "docs" / "integration.md"))
    assert right in program
    with pytest.raises(AssertionError):
        exec(compile(program.replace(right, wrong), "integration.md", "exec"), {})


def heading_anchors(page: Path) -> set[str]:
    """As GitHub makes them: of headings outside code, numbered where they repeat."""
    text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    anchors: list[str] = []
    for title in re.findall(r"^#+ (.*)$", text, re.MULTILINE):
        kept = "".join(letter for letter in title.lower() if letter.isalnum() or letter in " -_")
        anchors.append(kept.replace(" ", "-"))
    return {f"{name}-{anchors[:i].count(name)}" if name in anchors[:i] else name for i, name in enumerate(anchors)}


def test_cpp_excerpts_are_lines_of_the_example():
    program = (ROOT / "examples" / "cpp" / "tree_step.cpp").read_text(encoding="utf-8")
    statements = {line.split("//")[0].strip() for line in program.splitlines()}
    text = (ROOT / "docs" / "integration.md").read_text(encoding="utf-8")
    (block,) = re.findall(r"^```cpp\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    assert {line.split("//")[0].strip() for line in block.splitlines()} <= statements


def test_quickstart_is_short():
    lines = [line for line in python_blocks(ROOT / "README.md")[0].splitlines() if line]
    assert len([line for line in lines if not line.startswith("import")]) <= 15


def test_api_reference_is_up_to_date(scripts):
    pytest.importorskip("transformers")
    make_api = importlib.import_module("make_api")
    committed = (ROOT / "docs" / "api.md").read_text(encoding="utf-8")
    assert committed == make_api.api_markdown(), "docs/api.md is out of date: run `make docs`"


def test_api_reference_begins_with_its_contents():
    text = (ROOT / "docs" / "api.md").read_text(encoding="utf-8")
    contents = text[: text.index("\n## ")]
    assert len(re.findall(r"^- \[", contents, re.MULTILINE)) == len(re.findall(r"^## ", text, re.MULTILINE))
    for name in ("TreeBatch", "tree_attention", "verify_sampled", "ModelDrafter", "Traffic"):
        assert f"[`{name}`](#{name.lower()})" in contents
    assert "Traffic.words" in text


def test_pictures_are_up_to_date(scripts):
    make_pictures = importlib.import_module("make_pictures")
    for name, draw in make_pictures.PICTURES.items():
        committed = (ROOT / "docs" / "img" / f"{name}.svg").read_text(encoding="utf-8")
        assert committed == draw(), f"docs/img/{name}.svg is out of date: run `make docs`"


def test_performance_page_shows_the_kept_results(scripts):
    page = ROOT / "docs" / "performance.md"
    text = page.read_text(encoding="utf-8")
    filled = importlib.import_module("make_performance").filled(text)
    assert text == filled, "docs/performance.md is out of date: run `make docs`"


def test_list_of_architectures_shows_the_kept_outcomes(scripts):
    text = (ROOT / "docs" / "transformers.md").read_text(encoding="utf-8")
    filled = importlib.import_module("make_architectures").filled(text)
    assert text == filled, "docs/transformers.md is out of date: run `make docs`"


def test_tests_that_a_page_names_exist():
    named = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", (ROOT / "docs" / "integrations" / "transformers.md").read_text())
    assert len(named) > 20
    for file, name in named:
        assert f"\ndef {name}(" in (ROOT / file).read_text(encoding="utf-8"), f"{file}::{name}"


def measured_row(op: str, shape: dict, base: dict, seconds: float, **others) -> dict:
    """As bench_ops.py writes it; one peer takes twice, one half the time."""
    timings = {"pagedtree": seconds, "slow": 2 * seconds, "fast": seconds / 2}
    row = {
        "op": op, "point": ", ".join(f"{k} {v}" for k, v in shape.items() if base[k] != v) or "base", "shape": shape,
        "headline": shape == base, "bytes": 10**6, "flops": 10**9, "ms": seconds * 1e3, "spread_ms": 0.1,
        "gb_per_s": 1e-3 / seconds, "gflop_per_s": 1 / seconds, "floor_ms": 0.5, "bound": "memory", "notes": {},
        "ratio": {"slow": 2.0, "fast": 0.5}, "ratio_with_plan": {"slow": 2.5, "fast": 0.5},
        "timings": {name: {"median": time, "spread": 0.0, "repeats": 5} for name, time in timings.items()},
        "peak_bytes": {"pagedtree": 2 * 10**6}, "absent": {"another": "not installed"},
    }  # fmt: skip
    return row | others


@pytest.fixture
def sweep_result() -> dict:
    base = {"length": 512, "batch": 1, "tree": "binary 32", "dtype": "bfloat16", "threads": 0}
    changes = [("length", 1024), ("length", 2048), ("batch", 4), ("tree", "chain 1"), ("tree", "Medusa 64")]
    shapes = [base, *(base | {key: value} for key, value in changes)]
    rows = [measured_row("tree_attention", shape, base, 0.01 * (i + 1)) for i, shape in enumerate(shapes)]
    base = {"batch": 8, "tree": "binary 32", "vocab": 1000}
    shapes = [base, base | {"vocab": 4000}, base | {"tree": "chain 5"}]
    rows += [measured_row("verify_greedy", shape, base, 0.01, flops=0) for shape in shapes]
    rows += [{"op": "tree_attention", "point": "length 8", "shape": {}, "headline": False, "skipped": "too long"}]
    machine = {
        "processor": "x", "threads": 2, "torch": "2", "date": "2026-01-01", "commit": "abc", "load": 0.1,
        "cpu_isa": "avx2", "read_gb_per_s": 20.0, "matmul_gflop_per_s": {"float32": 100.0},
    }  # fmt: skip
    return {"machine": machine, "rows": rows}


def test_performance_tables_tell_what_was_measured_and_what_not(scripts, sweep_result):
    family = importlib.import_module("make_performance").family
    text = family("tree_attention", heading="attention")(sweep_result, "ops_x")
    assert "| `tree_attention` | base | 10 | 0.1 | 0.1 | 100 | 0.5 | 2.00 / 2.50 x | 0.50 x |" in text
    assert "| `tree_attention` | length 1024 | 20 |" in text and "verify_greedy" not in text
    assert "A peer is faster at: `tree_attention`, base: 0.50 x fast;" in text
    assert "Not measured: `tree_attention`, length 8 (too long)." in text
    assert "Absent: another (not installed)." in text and "| `tree_attention` | base | 2 |" in text
    assert family("append_kv")(sweep_result, "ops_x") == ""


@pytest.mark.slow
def test_plots_are_the_same_each_time(scripts, sweep_result, tmp_path):
    pytest.importorskip("matplotlib")
    make_plots = importlib.import_module("make_plots")
    (tmp_path / "ops_x.json").write_text(json.dumps(sweep_result))
    written = make_plots.write(tmp_path, tmp_path)
    assert [path.name for path in written] == [f"ops_x_{name}.svg" for name in make_plots.PLOTS]
    first = [path.read_bytes() for path in written]
    assert [path.read_bytes() for path in make_plots.write(tmp_path, tmp_path)] == first
    assert b"context, tokens" in first[0] and b"verify_greedy" in first[2]
    headline = {**sweep_result, "rows": sweep_result["rows"][:1]}
    (tmp_path / "ops_x.json").write_text(json.dumps(headline))
    assert make_plots.write(tmp_path, tmp_path) == []


def test_end_to_end_table_and_plot(scripts, tmp_path):
    names = ("transformers", "pagedtree, plain", "pagedtree, n-gram tree", "pagedtree, n-gram tree, auto")
    rates = {1: (90, 100, 150, 140), 8: (700, 800, 600, 790)}
    rows = [
        {
            "batch": batch, "name": name, "tokens_per_second": rate, "over_plain": rate / of_batch[1],
            "identical": name != "transformers",
        }
        for batch, of_batch in rates.items()
        for name, rate in zip(names, of_batch, strict=True)
    ]  # fmt: skip
    machine = {"processor": "x", "threads": 2, "torch": "2", "date": "2026-01-01", "commit": "abc", "load": 0.1}
    result = {"machine": machine | {"arguments": {"max_new_tokens": 9, "rounds": 3}}, "rows": rows}
    make_performance = importlib.import_module("make_performance")
    text = make_performance.end_to_end(result, "nowhere")
    assert "| pagedtree, n-gram tree | 150 (1.50 x) | 600 (0.75 x) |" in text
    assert "plain decoding's: transformers, 1; transformers, 8." in text and "greedy, fp32" in text
    rows[0]["difference"] = "sequence 0, token 7"
    wide = result | {"machine": result["machine"] | {"dtype": "bf16", "absent": {"B": "not installed"}}}
    text = make_performance.end_to_end(wide, "nowhere")
    assert "transformers, 1 (sequence 0, token 7); transformers, 8." in text
    assert "greedy, bf16" in text and "Absent: B (not installed)." in text
    pytest.importorskip("matplotlib")
    make_plots = importlib.import_module("make_plots")
    (tmp_path / "end_to_end_cpu.json").write_text(json.dumps(result))
    (written,) = make_plots.write(tmp_path, tmp_path)
    assert b"n-gram tree stops paying" in written.read_bytes()

    ratios = {
        "pairs": [0.9, 1.25, 2.0],
        "over_plain": [0.9, 1.25, 2.0],
        "first_token_over_plain": [0.98, 1.01, 1.02],
        "drafted_steps": 0.3,
    }
    rows = [{"batch": batch, "name": name, **ratios} for batch in rates for name in names[1::2]]
    result = {"machine": machine | {"arguments": {"max_new_tokens": 9, "pairs": 4, "texts": 7}}, "rows": rows}
    text = make_performance.chosen_trees(result, "nowhere")
    assert "in 4 pairs of other texts each, or as many as make 7 texts" in text
    for name in names[1::2]:
        assert f"| {name} | 1.250 (0.900 to 2.000) | 1.250 (0.900 to 2.000) |" in text
        assert f"| {name} | 1.010 (0.980 to 1.020) | 1.010 (0.980 to 1.020) |" in text
        assert f"| {name} | 30% | 30% |" in text
    auto = names[-1]
    assert (
        f"| {auto} | 1.25 (0.90 to 2.00, plain) | 1.25 (0.90 to 2.00, plain) |" in text
    )  # no chain or fixed tree is known
    rows += [{"batch": 1, "name": names[2], **ratios | {"pairs": [0.8, 1.0, 1.0]}}]
    assert f"| {auto} | 1.25 (1.12 to 2.00, tree) | 1.25 (0.90 to 2.00, plain) |" in make_performance.chosen_trees(
        result, "nowhere"
    )


def test_predictions_stand_beside_those_of_flashinfer(scripts, tmp_path, monkeypatch):
    predicted_tables = importlib.import_module("predicted_tables")
    monkeypatch.setattr(predicted_tables, "RESULTS", tmp_path)
    row = {
        "machine": "X1", "instance": "bf16-128-16", "warps": 4, "ctas": 2, "cycles": 99, "tflop_per_s": 69.2,
        "memory_share": 0.9, "source": "memory", "binds": "memory", "busy": {"memory": 1.0},
    }  # fmt: skip
    many = row | {"instance": "bf16-128-64", "memory_share": None, "source": "l2"}
    result = {"commit": "abc", "rows": [row, many]}
    alone = predicted_tables.predicted(result, "predicted_x1")
    assert "| bf16 | 128 | 16 | 4 x 2 | 99 | 69 (90%) | memory 100% |\n" in alone and "FlashInfer" not in alone
    peers = [row | {"mask": "custom", "tflop_per_s": 31.0, "memory_share": 0.4}, row | {"mask": "causal"}]
    (tmp_path / "flashinfer_predicted_x1.json").write_text(json.dumps({"rows": peers}))
    text = predicted_tables.predicted(result, "predicted_x1")
    assert "| 69 (90%) | memory 100% | 31 (40%) | 69 (90%) |\n" in text
    assert text.endswith("| 69 | L2 100% |  |  |")


def test_plots_are_of_the_kept_results(scripts, tmp_path):
    matplotlib = pytest.importorskip("matplotlib")
    if f"matplotlib=={matplotlib.__version__}\n" not in (ROOT / "requirements-dev.txt").read_text():
        pytest.skip("another matplotlib draws other bytes")
    make_plots = importlib.import_module("make_plots")
    kept = {
        path.name: path.read_bytes()
        for path in make_plots.IMAGES.glob("*.svg")
        if path.stem.startswith(("ops_", "end_to"))
    }
    written = {path.name: path.read_bytes() for path in make_plots.write(images=tmp_path)}
    assert kept == written, "docs/img is out of date: run `make docs`"


@pytest.mark.parametrize("page", ALL_PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_to_files(page):
    for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8")):
        if link.startswith(("http://", "https://")):
            continue
        path, _, anchor = link.partition("#")
        target = page.parent / path if path else page
        assert target.exists(), f"{page.name} links to {link}"
        assert not anchor or anchor in heading_anchors(target), f"{page.name} links to {link}"


def test_tests_that_pages_name_exist():
    tests = {path.name: path.read_text(encoding="utf-8") for path in (ROOT / "tests").rglob("test_*.py")}
    functions = set(re.findall(r"^def (test_\w+)", "\n".join(tests.values()), re.MULTILINE))
    for page in sorted((ROOT / "docs").glob("integrations/*.md")):
        for name, suffix in re.findall(r"\b(test_\w+)(\.py)?\b", page.read_text(encoding="utf-8")):
            assert name + ".py" in tests if suffix else name in functions, f"{page.name} names {name}"


STEPS = [
    dict(parents=[-1, 0, 0, 1, 1, 3], tokens=["<root>", "a&b", " c", "\n", "d", "e"], accepted=[1, 3], bonus='"'),
    dict(parents=[-1], tokens=['"'], accepted=[], bonus="\tend"),
    dict(parents=[-1, *range(1023)], tokens=["x"] * 1024, accepted=[0, *range(1, 1024)], bonus="y"),
]


def test_run_picture_shows_every_step(scripts):
    run_picture = importlib.import_module("run_picture")
    steps = [run_picture.StepRecord(**step) for step in STEPS]
    svg = run_picture.draw_run(steps, prompt="line\n<root>", title="A & B")
    elements = ElementTree.fromstring(svg).iter("{http://www.w3.org/2000/svg}text")
    texts = ["".join(element.itertext()) for element in elements]
    for expected in ("A & B", "step 3", "<root>", "a&b", "·c", "⏎", "⇥end", "+1024", "1028 tokens"):
        assert any(expected in text for text in texts), expected
    assert "step 4" not in texts
    assert svg in run_picture.html_page(svg)


def test_run_picture_leaves_out_what_does_not_fit(scripts):
    run_picture = importlib.import_module("run_picture")
    wide = run_picture.StepRecord([-1] + [0] * 30, ["r"] + [f"t{i}" for i in range(30)], [25], "b")
    svg = run_picture.draw_run([wide], max_rows=10)
    drawn = [f"t{i}" for i in range(30) if f">t{i}<" in svg]
    assert drawn == [*(f"t{i}" for i in range(9)), "t24"]  # the accepted node 25 always
    assert ">+20<" in svg
