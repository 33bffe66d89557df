"""What would falsify a benchmark's figures unseen: wrong peers, warm caches, floors, ratios, what two results say."""

from __future__ import annotations

import importlib
import json
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.fixture
def suite(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("suite")


class Doubling:
    """A problem: twice a vector."""

    copies, flops = 2, 0

    def __init__(self, shape, device):
        self.data = torch.arange(shape["size"], device=device)
        self.bytes = 8 * shape["size"]
        self.seen = []

    def op(self, copy):
        self.seen.append(copy)
        return 2 * self.data

    def torch_ops(self, copy):
        return self.data + self.data


def peer_named(title, *, result=lambda problem: 2 * problem.data, **attributes):
    class Peer:
        name = title
        absent = staticmethod(lambda: None)

        def __init__(self, problem):
            self.problem = problem

        def run(self, copy):
            return result(self.problem)

    for key, value in attributes.items():
        setattr(Peer, key, value)
    return Peer


@pytest.fixture
def op(suite):
    def check(problem, ours, theirs):
        if not torch.equal(ours.run(0), theirs.run(0)):
            raise suite.Mismatch("other numbers")

    return suite.Op(
        name="double", base={"size": 8}, axes={}, quick={}, problem=Doubling, peers=[suite.Ours, suite.TorchOps],
        memory=lambda shape: 100 * shape["size"], check=check,
    )  # fmt: skip


@pytest.fixture
def settings(suite):
    return suite.Settings(torch.device("cpu"), 0.001, bandwidth=1e9, flop_rate=1e9, min_repeats=3)


def test_a_row_has_times_floor_and_ratios(suite, op, settings):
    row = suite.measured(suite.points(op)[0], settings)
    assert set(row["timings"]) == {"pagedtree", "torch ops"}
    assert all(timing["repeats"] >= 3 for timing in row["timings"].values())
    ours, theirs = (row["timings"][name]["median"] for name in ("pagedtree", "torch ops"))
    assert row["ratio"] == {"torch ops": theirs / ours} and row["ms"] == ours * 1e3
    assert row["floor_ms"] == pytest.approx(64 / 1e9 * 1e3) and row["bound"] == "memory"
    assert row["absent"] == {} and row["wrong"] == {}
    json.dumps(row)


def test_copies_of_the_data_take_turns(suite, op, settings):
    problems = []

    def make(shape, device):
        problems.append(Doubling(shape, device))
        return problems[-1]

    suite.measured(suite.Point(replace(op, problem=make), op.base, False), settings)
    assert problems[0].seen[-3:] in ([0, 1, 0], [1, 0, 1])  # how many there are depends on their times


def test_a_peer_with_another_result_is_not_timed(suite, op, settings):
    op = replace(op, peers=[suite.Ours, peer_named("wrong", result=lambda problem: problem.data)])
    row = suite.measured(suite.points(op)[0], settings)
    assert row["wrong"] == {"wrong": "other numbers"} and set(row["timings"]) == {"pagedtree"}


def test_plans_are_timed_apart_and_included(suite, op, settings):
    op = replace(op, peers=[suite.Ours, peer_named("planner", plan=lambda self: sum(range(20000)))])
    row = suite.measured(suite.points(op)[0], settings)
    assert set(row["plans"]) == {"planner"} and row["plan_ms"] == 0.0
    assert row["ratio_with_plan"]["planner"] > row["ratio"]["planner"]
    times = row["timings"]["planner"]["median"] + row["plans"]["planner"]["median"]
    assert row["ratio_with_plan"]["planner"] == pytest.approx(times * 1e3 / row["ms"])


def result_of(times: dict[str, tuple[float, float]], peer: float = 1.0) -> dict:
    """A result with one point for each key: (median, spread)."""
    rows = [
        {
            "op": op,
            "shape": {"batch": 1},
            "timings": {
                "pagedtree": {"median": median, "spread": spread, "repeats": 5},
                "torch ops": {"median": peer, "spread": 0.0, "repeats": 5},
            },
        }
        for op, (median, spread) in times.items()
    ]
    return {"machine": {"processor": "x", "threads": 2}, "rows": [*rows, {"op": "big", "skipped": "memory"}]}


@pytest.mark.parametrize(
    "new, status, text",
    [
        ({"a": (1.04, 0.0), "b": (2.0, 0.1)}, 0, "2 points in both"),
        ({"a": (1.2, 0.01), "b": (2.0, 0.1)}, 1, "SLOWER 1.20 x: a"),  # beyond spread and tolerance
        ({"a": (1.2, 0.3), "b": (2.0, 0.1)}, 0, "2 points in both"),  # within the spread
        ({"a": (0.5, 0.0)}, 0, "1 of the old ones are gone"),
        ({"c": (9.0, 0.0)}, 2, ""),
    ],
)
def test_compare_fails_on_regressions(suite, tmp_path, capsys, new, status, text):
    paths = tmp_path / "old.json", tmp_path / "new.json"
    paths[0].write_text(json.dumps(result_of({"a": (1.0, 0.01), "b": (2.0, 0.1)})))
    paths[1].write_text(json.dumps(result_of(new, peer=1.5)))
    assert importlib.import_module("compare").main([str(path) for path in paths]) == status
    out = capsys.readouterr().out
    assert text in out
    if status < 2:
        assert "peers take 1.50 x" in out


def test_what_benchmarks_write_does_not_make_a_checkout_dirty(suite, monkeypatch, tmp_path):
    measure = importlib.import_module("measure")
    results, code = tmp_path / "benchmarks" / "results", tmp_path / "code.py"
    results.mkdir(parents=True)
    for path in (results / "ops.json", code):
        path.write_text("1\n")
    git = ["git", "-c", "user.name=nobody", "-c", "user.email=nobody@example.org"]
    for arguments in (["init", "-q"], ["add", "-A"], ["commit", "-q", "-m", "first"]):
        subprocess.run([*git, *arguments], cwd=tmp_path, check=True)
    monkeypatch.setattr(measure, "RESULTS", results)
    clean = measure.commit()
    assert clean and not clean.endswith("-dirty")
    (results / "ops.json").write_text("2\n")
    assert measure.commit() == clean
    code.write_text("2\n")
    assert measure.commit() == f"{clean}-dirty"


def test_a_step_of_the_host_benchmark_calls_all_of_its_ops(suite, monkeypatch):
    """In both forms the same, for each layer: what is left out would make the step look cheap."""
    bench_host = importlib.import_module("bench_host")
    made: dict[str, int] = {}

    class Counter(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if func.namespace == "pagedtree":
                made[func._schema.name] = made.get(func._schema.name, 0) + 1
            return func(*args, **(kwargs or {}))

    with torch.inference_mode():
        step = bench_host.Step()
        for prepared in (False, True):
            made.clear()
            with Counter():
                step.run(prepared)
            ops = {name.partition("::")[2]: count for name, count in made.items()}
            assert ops.pop("append_kv") == ops.pop("_attend" if prepared else "tree_attention") == bench_host.LAYERS
            assert ops.pop("_prepare_attention", 0) == prepared
            compaction = "_compact" if prepared else "compact_kv"
            assert ops == dict.fromkeys(("prepare_step", "attention_plan", "verify_greedy", "commit", compaction), 1)
