"""The benchmarks' own logic: points, peers that are absent, wrong or slow, rows, comparing two results."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from pagedtree.check.cases import instructions, instructions_sm90

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.fixture
def suite(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("suite")


@pytest.fixture
def bench_ops(suite):
    return importlib.import_module("bench_ops")


@pytest.fixture
def compare(suite):
    return importlib.import_module("compare")


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


def peer_named(title, *, result=lambda problem: 2 * problem.data, reason=None, fails=None, **attributes):
    class Peer:
        name = title

        @staticmethod
        def absent():
            return reason

        def __init__(self, problem):
            if fails:
                raise fails
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
        name="double", base={"size": 8, "kind": "a"}, axes={"size": [4, 16], "kind": ["b"]}, quick={"size": 2},
        problem=Doubling, peers=[suite.Ours, suite.TorchOps], memory=lambda shape: 100 * shape["size"], check=check,
        headline=[{"size": 32, "kind": "b"}],
    )  # fmt: skip


@pytest.fixture
def settings(suite):
    return suite.Settings(torch.device("cpu"), 0.001, bandwidth=1e9, flop_rate=1e9, min_repeats=3)


def test_sweeps_vary_one_key_at_a_time(suite, op):
    names = [point.name for point in suite.points(op)]
    assert names == ["base", "size 32, kind b", "size 4", "size 16", "kind b"]
    assert [point.is_headline for point in suite.points(op)] == [True, True, False, False, False]
    assert [point.name for point in suite.points(op, axes=["kind"])] == ["base", "size 32, kind b", "kind b"]


def test_given_shapes_are_all_combinations(suite, op):
    found = suite.points(op, given={"size": [1, 2], "kind": ["a", "b"], "other": [3]})
    assert [(p.shape["size"], p.shape["kind"]) for p in found] == [(1, "a"), (1, "b"), (2, "a"), (2, "b")]
    assert all(point.is_headline for point in found)


def test_a_row_has_times_floor_and_ratios(suite, op, settings):
    row = suite.measured(suite.points(op)[0], settings)
    assert set(row["timings"]) == {"pagedtree", "torch ops"}
    assert all(timing["repeats"] >= 3 for timing in row["timings"].values())
    ours, theirs = (row["timings"][name]["median"] for name in ("pagedtree", "torch ops"))
    assert row["ratio"] == {"torch ops": theirs / ours} and row["ms"] == ours * 1e3
    assert row["floor_ms"] == pytest.approx(64 / 1e9 * 1e3) and row["bound"] == "memory"
    assert row["absent"] == {} and row["wrong"] == {}
    json.dumps(row)


def test_memory_is_what_a_call_holds_at_most(suite, op, settings):
    measure, device = importlib.import_module("measure"), torch.device("cpu")
    data = torch.zeros(1 << 20)
    assert measure.peak_bytes(lambda: ((data + 1) + 1).sum(), device) == pytest.approx(8 << 20, abs=1024)
    row = suite.measured(suite.points(op)[0], settings)
    assert row["peak_bytes"] == {"pagedtree": 72, "torch ops": 64}  # `2 *` makes a tensor of the 2


def test_copies_of_the_data_take_turns(suite, op, settings):
    problems = []

    def make(shape, device):
        problems.append(Doubling(shape, device))
        return problems[-1]

    suite.measured(suite.Point(replace(op, problem=make), op.base, False), settings)
    assert problems[0].seen[-3:] in ([0, 1, 0], [1, 0, 1])  # how many there are depends on their times


def test_peers_that_cannot_run_are_named(suite, op, settings):
    peers = [
        suite.Ours,
        peer_named("missing", reason="not installed"),
        peer_named("choosy", fails=ValueError("even sizes only\nmore")),
        peer_named("slow", only_headline=True),
    ]
    op = replace(op, peers=peers)
    sweep = suite.measured(suite.points(op)[-1], settings)
    assert sweep["absent"] == {
        "missing": "not installed", "choosy": "ValueError: even sizes only", "slow": suite.LEFT_OUT
    }  # fmt: skip
    assert set(suite.measured(suite.points(op)[0], settings)["timings"]) == {"pagedtree", "slow"}
    asked = suite.measured(suite.points(op)[-1], replace(settings, peers=["SLOW"]))
    assert set(asked["timings"]) == {"pagedtree", "slow"} and asked["absent"] == {}


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


def test_points_that_do_not_fit_are_named(suite, op, settings):
    point = suite.points(replace(op, memory=lambda shape: 1 << 60))[0]
    assert "GB with all peers" in suite.measured(point, settings)["skipped"]
    point = suite.points(replace(op, unsupported=lambda shape, device: "not here"))[0]
    assert suite.measured(point, settings)["skipped"] == "not here"


def test_cpu_time_leaves_out_what_others_take(suite, op, settings, bench_ops, monkeypatch, capsys):
    def waits(problem):
        time.sleep(0.02)
        return 2 * problem.data

    op = replace(op, peers=[suite.Ours, peer_named("waiting", result=waits)])
    by_clock, by_cpu = (
        suite.measured(suite.points(op)[0], replace(settings, cpu_time=cpu_time)) for cpu_time in (False, True)
    )
    assert by_clock["timings"]["waiting"]["median"] >= 0.02 > 2 * by_cpu["timings"]["waiting"]["median"]
    monkeypatch.setattr(sys, "argv", ["bench_ops.py", "--cpu-time", "--threads", "2"])
    with pytest.raises(SystemExit):
        bench_ops.main()
    assert "--cpu-time is for one thread" in capsys.readouterr().err


def test_a_slow_candidate_does_not_take_the_repeats_of_others(suite):
    measure = importlib.import_module("measure")
    clock = {"slow": [1.0] * 9, "fast": [0.001] * 999}
    timings = measure._in_turn({name: lambda i, t=t: t[i] for name, t in clock.items()}, budget=0.4, min_repeats=5)
    assert timings["slow"].repeats == 3 and timings["fast"].repeats == measure.MAX_REPEATS


def test_threads_of_a_point_are_set_for_it_alone(suite, op, settings):
    before, seen = torch.get_num_threads(), []

    def make(shape, device):
        seen.append(torch.get_num_threads())
        return Doubling(shape, device)

    threads = before + 1
    op = replace(op, base=op.base | {"threads": 0}, problem=make)
    for value in (0, threads):
        suite.measured(suite.Point(op, op.base | {"threads": value}, True), settings)
    assert seen == [before, threads] and torch.get_num_threads() == before


def test_progress_tells_the_time_left(suite):
    bar = suite.Progress(4)
    bar.began = 0.0
    assert bar.text("x", 5.0).endswith("0/4, ? left  x")
    bar.done = 1
    assert bar.text("x", 50.0) == f"[{'#' * 6:24}] 1/4, 2:30 left  x"


def test_every_op_has_unique_points_whose_shapes_differ_from_the_base(suite, bench_ops):
    for op in bench_ops.OPS:
        shapes = [json.dumps(point.shape, sort_keys=True) for point in suite.points(op)]
        assert len(set(shapes)) == len(shapes), op.name
        assert op.quick.keys() <= op.base.keys() and all(change.keys() <= op.base.keys() for change in op.headline)
        assert op.axes.keys() <= op.base.keys()
        assert all(op.memory(point.shape) > 0 for point in suite.points(op))


def test_the_command_measures_what_is_asked_for(bench_ops, tmp_path, monkeypatch, capsys):
    target = tmp_path / "out.json"
    shapes = ["tokens=1,8", "head_dim=64"]
    arguments = ["--ops", "append_kv", "merge_states", "--shapes", *shapes, "--seconds", "0.01", "--json", str(target)]
    monkeypatch.setattr(sys, "argv", ["bench_ops.py", *arguments])
    monkeypatch.setattr(bench_ops, "matmul_rate", lambda dtype, device: 1e11)
    monkeypatch.setattr(bench_ops, "read_bandwidth", lambda device: 1e10)
    assert bench_ops.main() == 0
    result = json.loads(target.read_text())
    assert [(row["op"], row["shape"]["tokens"]) for row in result["rows"]] == [
        ("append_kv", 1), ("append_kv", 8), ("merge_states", 1), ("merge_states", 8)
    ]  # fmt: skip
    assert result["machine"]["read_gb_per_s"] == 10.0 and "commit" in result["machine"]
    assert "torch ops" in capsys.readouterr().out


@pytest.mark.parametrize("arguments", [["--shapes", "colour=red"], ["--shapes", "batch"], ["--axes", "colour"]])
def test_unknown_keys_are_refused(bench_ops, monkeypatch, arguments):
    monkeypatch.setattr(sys, "argv", ["bench_ops.py", "--ops", "tree_attention", *arguments])
    with pytest.raises(SystemExit, match="expected"):
        bench_ops.main()


@pytest.mark.parametrize(
    ("capability", "has_code", "reason"),
    [
        ((9, 0), True, None),
        ((9, 0), False, "this build has no code for 9.0a"),
        ((10, 0), True, "only on GPUs of compute capability 9.0"),
    ],
)
def test_wgmma_is_a_peer_where_it_runs(suite, monkeypatch, capability, has_code, reason):
    peer = importlib.import_module("attention_peers").PagedTreeWgmma
    monkeypatch.setattr(instructions_sm90, "backends", lambda: ["cuda"])
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(instructions, "has_table", lambda backend, table: has_code)
    assert peer.absent() == reason


def test_values_with_a_comma_and_a_blank_stay_whole(bench_ops):
    op = next(op for op in bench_ops.OPS if op.name == "sample")
    values = bench_ops.given_values(op, ["variant=top-p 0.9,top-k 50, top-p 0.9", "batch=1,2", "page_size=1"])
    assert values == {"variant": ["top-p 0.9", "top-k 50, top-p 0.9"], "batch": [1, 2]}


@pytest.mark.parametrize("name", ["chain 1", "binary 255", "EAGLE-2 60", "Medusa 64", "Sequoia 128", "prefill 512"])
def test_trees_by_name(suite, name):
    tree = importlib.import_module("named_trees").tree_named(name)
    assert tree.num_nodes == int(name.split()[-1])
    bounds = {"EAGLE-2 60": 6, "Medusa 64": 4, "binary 255": 7}
    assert tree.max_depth <= bounds.get(name, tree.num_nodes)


RULES = [("verify_peers", "Problem"), ("ratio_peers", "DrawnProblem")]


@pytest.mark.parametrize(("module", "kind"), RULES)
@pytest.mark.parametrize("tree", ["binary 16", "chain 8"])
def test_drafts_are_accepted_at_a_realistic_rate(suite, module, kind, tree):
    """About seven of ten levels of a path are accepted, under each rule; both chains of torch ops agree."""
    peers, common = importlib.import_module(module), importlib.import_module("verify_peers")
    shape = importlib.import_module("named_trees").tree_named(tree)
    problem = getattr(peers, kind)(32, shape, 300, torch.float32, 1, torch.device("cpu"))
    for rule in peers.RULES:
        if rule.op == "sample" or (rule.op == "verify_block" and tree.startswith("binary")):
            continue
        verification = common.Verification(rule, problem)
        notes = verification.notes
        assert 0.55 < notes["accepted_a_level"] < 0.85, (rule.op, rule.variant)
        assert notes["accepted_length"] == pytest.approx(notes["accepted"] / 32, abs=0.01) and notes["drafts"] > 200
        rule.check(problem)
        if rule.visits:
            common.TorchVisited(verification).check()


def test_visited_rows_are_the_only_ones_of_the_lazy_chain(suite, monkeypatch):
    peers = importlib.import_module("verify_peers")
    problem = peers.Problem(4, importlib.import_module("named_trees").tree_named("binary 32"), 300, torch.float32, 1,
                            torch.device("cpu"))  # fmt: skip
    rule = next(rule for rule in peers.RULES if rule.op == "verify_sampled")
    verification = peers.Verification(rule, problem)
    distribution, rows = peers.torch_distribution, []

    def counting(logits, params):
        rows.append(logits.shape[0])
        return distribution(logits, params)

    monkeypatch.setattr(peers, "torch_distribution", counting)
    paths, _ = peers.TorchVisited(verification).run(0)
    assert sum(rows) == sum(map(len, paths)) and len(rows) == max(map(len, paths))
    rows.clear()
    peers.TorchChain(verification).run(0)
    assert rows == [4 * 32]
    reads_all = next(rule for rule in peers.RULES if rule.op == "sample")
    with pytest.raises(ValueError, match="every row"):
        peers.TorchVisited(peers.Verification(reads_all, problem))


def test_the_lazy_chain_is_compared(suite, monkeypatch):
    peers = importlib.import_module("verify_peers")
    problem = peers.Problem(4, importlib.import_module("named_trees").tree_named("binary 32"), 300, torch.float32, 1,
                            torch.device("cpu"))  # fmt: skip
    chain = peers.TorchVisited(peers.Verification(peers.RULES[0], problem))
    chain.check()
    monkeypatch.setattr(chain, "run", lambda copy: ([[0]] * 4, [[1]] * 4))
    with pytest.raises(suite.Mismatch, match="visited rows"):
        chain.check()


def result_of(times: dict[str, tuple[float, float]], peer: float = 1.0, **machine) -> dict:
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
    return {"machine": {"processor": "x", "threads": 2} | machine, "rows": [*rows, {"op": "big", "skipped": "memory"}]}


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
def test_compare_fails_on_regressions(compare, tmp_path, capsys, new, status, text):
    paths = tmp_path / "old.json", tmp_path / "new.json"
    paths[0].write_text(json.dumps(result_of({"a": (1.0, 0.01), "b": (2.0, 0.1)})))
    paths[1].write_text(json.dumps(result_of(new, peer=1.5)))
    assert compare.main([str(path) for path in paths]) == status
    out = capsys.readouterr().out
    assert text in out
    if status < 2:
        assert "peers take 1.50 x" in out


def test_compare_refuses_another_machine(compare, tmp_path, capsys):
    paths = tmp_path / "old.json", tmp_path / "new.json"
    paths[0].write_text(json.dumps(result_of({"a": (1.0, 0.01)})))
    paths[1].write_text(json.dumps(result_of({"a": (1.0, 0.01)}, threads=1)))
    assert compare.main([str(path) for path in paths]) == 2
    assert "threads 2 and 1" in capsys.readouterr().err


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


@pytest.mark.slow
def test_grammars_are_measured(suite, tmp_path, monkeypatch, capsys):
    pytest.importorskip("xgrammar")
    table = tmp_path / "grammars.json"
    arguments = ["--vocab", "2000", "--tree", "chain 4", "--batch", "2", "--positions", "2", "--pass-ms", "1"]
    monkeypatch.setattr(sys, "argv", ["bench", *arguments, "--repeats", "2", "--budget", "0.1", "--json", str(table)])
    importlib.import_module("bench_grammars").main()
    rows = json.loads(table.read_text())["rows"]
    assert {row["grammar"] for row in rows} == {"JSON schema", "programs"}
    assert {row["beside"] for row in rows if row["what"] == "GrammarMasks"} == {
        "nothing", "the host waits", "matmul on one thread"
    }  # fmt: skip
    assert all(row["filled"] >= 0 and row["waited"] >= 0 for row in rows if row["what"] == "GrammarMasks")


def test_request_options_are_measured(suite, tmp_path, monkeypatch, capsys):
    table = tmp_path / "options.json"
    arguments = ["--batch", "2", "--tree", "chain 4", "--vocab", "1000", "--budget", "0", "--json", str(table)]
    monkeypatch.setattr(sys, "argv", ["bench", *arguments])
    assert importlib.import_module("bench_options").main() == 0
    rows = json.loads(table.read_text())["rows"]
    assert {row["rule"] for row in rows} == {"sampled", "rejection"} and len({row["sampling"] for row in rows}) == 3
    assert all(row["ratio"] == 1 for row in rows if row["options"] == "none")
    assert len({row["options"] for row in rows}) == 9 and all(row["median"] > 0 for row in rows)


def test_host_time_is_measured(suite, tmp_path, monkeypatch, capsys):
    table = tmp_path / "host.json"
    monkeypatch.setattr(sys, "argv", ["bench", "--seconds", "0", "--json", str(table)])
    monkeypatch.setattr("torch.set_num_threads", lambda count: None)
    assert importlib.import_module("bench_host").main() == 0
    rows = json.loads(table.read_text())["rows"]
    assert all(row["us"] > 0 and row["repeats"] >= 3 for row in rows)
    prepared = {row["call"] for row in rows if row["form"] == "prepared"}
    assert prepared == {
        "tree_attention", "tree_attention, out given", "compact_kv, 64 caches", "all ops of a step, 32 layers"
    } <= {row["call"] for row in rows if row["form"] == ""}  # fmt: skip


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
