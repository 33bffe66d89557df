"""What would falsify figures: a wrong peer, a slower point; what would lose a run: a process that dies."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.fixture
def benchmarks(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module


def test_a_peer_with_another_result_is_not_timed(benchmarks):
    suite = benchmarks("suite")

    class Doubling(suite.Problem):
        """Twice a vector."""

        copies = 2

        def make(self):
            self.data, self.seen = torch.arange(self.shape["size"]), []
            self.bytes = 8 * self.shape["size"]

        def op(self, copy):
            self.seen.append(copy)
            return 2 * self.data

        def torch_ops(self, copy):
            return self.data + self.data

    planner = suite.peer("planner")(lambda problem: suite.Way(problem.torch_ops, lambda: sum(range(20000))))
    wrong = suite.peer("wrong")(lambda problem: suite.Way(lambda copy: problem.data))
    broken = suite.peer("broken")(lambda problem: problem.shape["width"])
    peers = [suite.ours, suite.torch_ops, planner, wrong, broken]
    op = suite.Op("double", {"size": 8}, {}, {}, Doubling, memory=lambda shape: 100 * shape["size"], peers=peers)
    settings = suite.Settings(torch.device("cpu"), 0.001, bandwidth=1e9, flop_rate=1e9, min_repeats=3)
    row = suite.measured(suite.points(op)[0], settings)
    assert row["wrong"] == {"wrong": "the first result differs"} and row["absent"] == {"broken": "KeyError: 'width'"}
    assert set(row["timings"]) == {"pagedtree", "torch ops", "planner"} and set(row["plans"]) == {"planner"}
    times, plan = row["timings"], row["plans"]["planner"]["median"]
    assert row["ratio"]["torch ops"] == times["torch ops"]["median"] * 1e3 / row["ms"]
    assert row["ratio_with_plan"]["planner"] == pytest.approx((times["planner"]["median"] + plan) * 1e3 / row["ms"])
    assert row["floor_ms"] == pytest.approx(64 / 1e9 * 1e3) and row["bound"] == "memory"


def test_a_slower_point_is_found(benchmarks, tmp_path, capsys):
    def result(**times):
        rows = [
            {"op": op, "shape": {}, "timings": {"pagedtree": {"median": median, "spread": spread}}}
            for op, (median, spread) in times.items()
        ]
        return json.dumps({"machine": {"processor": "x"}, "rows": rows})

    (tmp_path / "old.json").write_text(result(a=(1.0, 0.01), b=(1.0, 0.01)))
    (tmp_path / "new.json").write_text(result(a=(1.2, 0.01), b=(1.2, 0.3)))  # b is within its spread
    assert benchmarks("compare").main([str(tmp_path / f"{name}.json") for name in ("old", "new")]) == 1
    assert [line for line in capsys.readouterr().out.splitlines() if "SLOWER" in line] == [
        "SLOWER 1.20 x: a {}: 1000.000 ms, now 1200.000 ms"
    ]


def test_a_queue_is_answered_whole_each_turn(benchmarks, tmp_path, monkeypatch):
    """At most so many prompts at once by each way that can; further turns are added, and its rows are no batch's."""
    bench, rows = benchmarks("bench_real"), benchmarks("real_rows")
    seen = []

    def generate(model, batch, max_sequences, **_):
        seen.append((max_sequences, *(tokens[0] for tokens in batch)))
        return [torch.tensor([*tokens, 7]) for tokens in batch], SimpleNamespace(tokens_per_step=1.0)

    monkeypatch.setattr(bench, "generate", generate)
    monkeypatch.setattr(bench, "chat_ids", lambda tokenizer, prompt: [len(prompt)])
    ways = object.__new__(bench.Ways)
    ways.model, ways.tokenizer, ways.count, ways.sequences, ways.alone = (
        torch.nn.Linear(1, 1),
        None,
        4,
        8,
        {"llama.cpp"},
    )
    ways.model.dtype = torch.bfloat16
    ways.every = dict.fromkeys(("plain", "n-gram auto", "transformers", "llama.cpp"), lambda batch: ways.ours(batch))
    facts = dict.fromkeys((*rows.CONDITIONS, "commit"), 1) | {"versions": {}}
    args = SimpleNamespace(kinds=["queue"], prompts=5, ways=None, missing=True, device="cpu", json=tmp_path / "real")
    for _ in range(2):  # the second time nothing is missing
        table = rows.Table.opened(args.json, facts)
        bench.measured(ways, args, table, SimpleNamespace(show=print, clear=print, done=0))
    assert len(seen) == 2 * bench.TURNS and len({*seen}) == bench.TURNS and {most for most, *_ in seen} == {8}
    assert len({tuple(sorted(prompts)) for _, *prompts in seen}) == 1 and len(seen[0]) == 1 + 15
    kinds = [(row["kind"], row["way"], row["texts_equal"]) for row in table.rows()]
    assert kinds == [("queue", "plain", "45/45"), ("queue", "n-gram auto", "45/45")]


# Takes the points that the file lacks, as bench_ops does; dies where a point's name says so.
WORKER = """
import json, os, sys
path, op = sys.argv[sys.argv.index("--into") + 1], sys.argv[sys.argv.index("--ops") + 1]
result = json.load(open(path))
done = [row["point"] for row in result["rows"] if row["op"] == op]
for name in [name for name in ("a", "dies", "b", "dies beside peers", "c") if name not in done]:
    if name == "dies" or name == "dies beside peers" and "--peers" not in sys.argv:
        os._exit(9)
    result["rows"].append({"op": op, "point": name, "pid": os.getpid()})
    json.dump({key: result[key] for key in ("benchmark", "machine", "rows")}, open(path, "w"))
    if "--first" in sys.argv:
        break
"""


def test_a_process_that_dies_loses_its_row_alone(benchmarks, tmp_path):
    row_file = benchmarks("row_file")
    (tmp_path / "worker.py").write_text(WORKER)
    names = ("a", "dies", "b", "dies beside peers", "c")
    points = [
        SimpleNamespace(op=SimpleNamespace(name=op), name=name, shape={}, is_headline=True)
        for op in ("first", "second")
        for name in names
    ]
    results = row_file.Results.start(tmp_path / "rows.json", "ops", {"cores": 2})
    row_file.run_apart(points, results, tmp_path / "worker.py", [])
    rows = json.loads((tmp_path / "rows.json").read_text())["rows"]
    assert [(row["op"], row["point"]) for row in rows] == [(point.op.name, point.name) for point in points]
    assert [row["point"] for row in rows if "failed" in row] == ["dies", "dies"]
    assert rows[1]["failed"] == rows[3]["failed_beside_peers"] == "its process ended with status 9"
    assert {row["pid"] for row in rows[:5] if "pid" in row}.isdisjoint(row["pid"] for row in rows[5:] if "pid" in row)
