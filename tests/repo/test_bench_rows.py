"""The rows with targets, and the processes and files that keep each row: what judges and guards a run on a GPU."""

from __future__ import annotations

import contextlib
import importlib
import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
MACHINE = {"read_gb_per_s": 4000.0, "matmul_gflop_per_s": {"bfloat16": 7e5}}


@pytest.fixture
def benchmarks(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    monkeypatch.delenv("COMMIT", raising=False)
    return importlib.import_module


def row_of(name, ms, *, gb_per_s=2000.0, **ratio):
    return {
        "op": "tree_attention", "point": name, "ms": ms, "floor_ms": ms / 2, "gb_per_s": gb_per_s,
        "gflop_per_s": 4e5, "plan_ms": 0.0, "ratio": ratio,
        "ratio_with_plan": {peer: 3 * value for peer, value in ratio.items()},
    }  # fmt: skip


# Rows and targets -----------------------------------------------------------------------------------------------------


def test_sizes_of_the_rows(benchmarks):
    """What the names promise: batch, keys, nodes, rows of a KV head, bytes of K and V, the ragged lengths' sum."""
    headline, peers = benchmarks("headline"), benchmarks("attention_peers")
    nodes_of = benchmarks("named_trees").nodes_of
    shapes = {row.name: {**peers.OP.base, **row.shape} for row in headline.ATTENTION}
    for name, shape in shapes.items():
        heads, kv_heads = (int(count) for count in shape["heads"].split("/"))
        if name.startswith("R ") and "fp8" not in name:
            rows, size = name.removeprefix("R ").split(", ")
            assert nodes_of(shape["tree"]) * heads // kv_heads == int(rows)
            assert peers.kv_bytes_of(shape) == {"256 MB": 1 << 28, "1 GB": 1 << 30}[size]
        if name.startswith("B "):
            assert name == f"B {shape['batch']}, L {shape['length'] // 1024}k, T {nodes_of(shape['tree'])}"
    latent = benchmarks("latent_peers")
    for row in headline.LATENT:
        if row.op == "latent_attention" and "R " in row.name:
            shape = {**latent.OP.base, **row.shape}
            rows = nodes_of(shape["tree"]) * int(shape["heads"].split("/")[0])
            assert rows == int(row.name.split("R ")[1].split(",")[0])
    ragged, uniform = (sum(peers.lengths_of(shapes[f"{kind}, 53k keys"])) for kind in ("ragged", "uniform"))
    assert ragged == 4641 + 45118 + 1730 + 1696 and abs(ragged - uniform) < 4


def test_figures_and_verdicts(benchmarks):
    headline = benchmarks("headline")
    bf16 = row_of("R 16, 256 MB", 0.1, gb_per_s=3600.0, **{
        "FlashInfer (custom mask)": 1.3, "FlashInfer's kernel (custom mask)": 1.2, "SDPA on gathered KV": 9.0,
        "pagedtree causal": 1 / 1.01, "flash-attn 3 (causal)": 0.9,
    })  # fmt: skip
    both = "FlashInfer (custom mask) or FlashInfer's kernel (custom mask)"
    judged = headline.judged(bf16, [], MACHINE, "cuda", counts=True)
    assert [(entry["target"], round(entry["measured"], 3), entry["met"]) for entry in judged] == [
        (f"x as fast as {both} >= 1.25", 1.2, False),  # the faster of the two counts
        (f"x as fast, plans included, as {both} >= 2", 3.6, True),
        ("x as fast as SDPA on gathered KV or FlexAttention or Triton unified >= 2", 9.0, True),
        ("x the time of pagedtree causal <= 1.02", 1.01, True),
        ("x as fast as FlashInfer or flash-attn 3 >= 1", 0.9, False),
    ]
    assert headline.judged(bf16, [], MACHINE, "cpu", counts=True) == []
    assert {entry["met"] for entry in headline.judged(bf16, [], MACHINE, "cuda", counts=False)} == {None}
    fp8 = row_of("R 16, fp8", 0.05)
    assert headline.judged(fp8, [], MACHINE, "cuda", counts=True)[0]["met"] is None  # nothing to compare with
    entry = headline.judged(fp8, [bf16], MACHINE, "cuda", counts=True)[0]
    assert entry["measured"] == pytest.approx(2.0) and entry["met"]
    ragged, uniform = row_of("ragged, 53k keys", 0.12), row_of("uniform, 53k keys", 0.1)
    entry = headline.judged(ragged, [uniform], MACHINE, "cuda", counts=True)[0]
    assert entry["measured"] == pytest.approx(1.2) and not entry["met"]
    one = row_of("B 1, L 8k, T 16", 0.0125) | {"plan_ms": 0.005}
    call, plan, *_ = headline.judged(one, [], MACHINE, "cuda", counts=True)
    assert call == {"target": "us <= 14, stretch 11", "bound": 14, "measured": pytest.approx(12.5), "met": True}
    assert plan["measured"] == pytest.approx(5) and not plan["met"]
    large = row_of("R 16, 1 GB", 0.1, gb_per_s=3600.0)
    assert headline.judged(large, [], MACHINE, "cuda", counts=True)[0]["measured"] == pytest.approx(0.9)
    compute = row_of("R 256, 256 MB", 0.1)
    assert headline.judged(compute, [], MACHINE, "cuda", counts=True)[0]["measured"] == pytest.approx(400)
    # By rate: 0.7 of the other row's, which may be missing.
    wide, narrow = row_of("latent, batch 4, L 4k, T 8", 0.2), row_of("one KV head, 128 query heads", 0.1)
    (rate, _) = headline.judged(wide | {"gflop_per_s": 2.8e5}, [narrow], MACHINE, "cpu", counts=True)
    assert rate["measured"] == pytest.approx(0.7) and rate["met"]
    assert headline.judged(wide, [], MACHINE, "cpu", counts=True)[0]["met"] is None
    greedy = row_of("greedy, 2048 rows", 0.1)
    assert headline.judged(greedy, [], MACHINE, "cuda", counts=True)[0]["measured"] == pytest.approx(2.0)
    failed = {"op": "tree_attention", "point": "R 16, 1 GB", "failed": "its process ended"}
    assert {entry["met"] for entry in headline.judged(failed, [], MACHINE, "cuda", counts=True)} == {None}


# Files and processes --------------------------------------------------------------------------------------------------

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
        for op in ("first", "second") for name in names
    ]  # fmt: skip
    results = row_file.Results.start(tmp_path / "rows.json", "ops", {"cores": 2})
    row_file.run_apart(points, results, tmp_path / "worker.py", [])
    rows = json.loads((tmp_path / "rows.json").read_text())["rows"]
    assert [(row["op"], row["point"]) for row in rows] == [(point.op.name, point.name) for point in points]
    assert [row["point"] for row in rows if "failed" in row] == ["dies", "dies"]
    assert rows[1]["failed"] == rows[3]["failed_beside_peers"] == "its process ended with status 9"
    assert {row["pid"] for row in rows[:5] if "pid" in row}.isdisjoint(row["pid"] for row in rows[5:] if "pid" in row)


def test_a_hanging_row_ends_its_process(benchmarks, tmp_path):
    """Another process measures the row after it; the JSON is there throughout."""
    script = tmp_path / "hang.py"
    script.write_text(
        f"import sys; sys.path.insert(0, {str(BENCHMARKS)!r})\n"
        "import time, suite\n"
        "suite.measured = lambda point, settings: time.sleep(60)\n"
        "list(suite.run_all([suite.Point(suite.Op('o', {}, {}, {}, None, [], None, None), {}, True)], None, 0.2))\n"
    )
    ended = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=50)
    assert ended.returncode == 1 and "Timeout" in ended.stderr


def test_a_result_is_never_half_written(benchmarks, tmp_path, monkeypatch):
    measure, target = benchmarks("measure"), tmp_path / "rows.json"
    measure.write_json(target, {"rows": [1]})

    def killed(self, target):
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "replace", killed)
    with pytest.raises(KeyboardInterrupt):
        measure.write_json(target, {"rows": [1, 2]})
    assert json.loads(target.read_text()) == {"rows": [1]}


# The GPU's clock ------------------------------------------------------------------------------------------------------


class Stream:
    """Stands for torch.cuda, as far as timing uses it; notes what is queued, and what a graph holds."""

    def __init__(self):
        self.queued, self.mode = [], "default"
        self.Event = lambda enable_timing: SimpleNamespace(
            record=lambda: self.queued.append("event"), synchronize=lambda: None, elapsed_time=lambda other: 6.0
        )
        self.CUDAGraph = lambda: SimpleNamespace(replay=lambda: self.queued.append("replay"))
        self.get_sync_debug_mode = lambda: self.mode
        self.synchronize = lambda: None

    def _sleep(self, cycles):
        self.queued.append("sleep")

    def set_sync_debug_mode(self, mode):
        self.mode = mode

    def graph(self, graph):
        stream = self

        class Capture:
            def __enter__(self):
                stream.queued.append("capture")

            def __exit__(self, *error):
                pass

        return Capture()


def test_a_graph_is_timed_without_its_launch(benchmarks, monkeypatch):
    measure, stream = benchmarks("measure"), Stream()
    monkeypatch.setattr(torch, "cuda", stream)
    monkeypatch.setattr(measure, "cache_flush", lambda: lambda: stream.queued.append("flush"))
    calls = {name: lambda copy, name=name: stream.queued.append(f"{name} {copy}") for name in ("held", "eager")}
    timings = measure.interleaved_on_gpu(calls, copies=2, budget=0.0, min_repeats=2, eager={"eager": "it waits"})
    # Of four calls, less the time of four reads, which here take as long.
    assert timings.keys() == {"held", "eager"} and timings["held"].median == 1e-9
    held = [step for copy in (0, 1, 0, 1) for step in ("flush", f"held {copy}")]
    begin = stream.queued.index("held 0") - 1
    assert stream.queued[begin : begin + 17] == [*held, "capture", *held] and stream.queued.count("capture") == 2
    # The GPU is busy before the first event is queued, so that it never waits for the launch.
    begin = stream.queued.index("sleep")
    assert stream.queued[begin : begin + 8] == ["sleep", "event", "replay", "event"] * 2
    eager = [step.replace("held", "eager") for step in held]
    assert stream.queued[begin + 8 : begin + 19] == ["sleep", "event", *eager, "event"]


def test_a_repeated_call_and_its_kernels(benchmarks, monkeypatch):
    measure, stream = benchmarks("measure"), Stream()
    monkeypatch.setattr(torch, "cuda", stream)
    assert measure.warm_seconds(lambda: stream.queued.append("call"), repeats=3) == pytest.approx(6e-3 / 32)
    assert stream.queued.count("call") == 64 and stream.queued.count("replay") == 3
    on_gpu, on_host = torch.autograd.DeviceType.CUDA, torch.autograd.DeviceType.CPU
    events = [(f"void pagedtree::cuda::join<int>(Params<{i}>)", on_gpu, i + 1.0) for i in range(10)]
    listed = [
        SimpleNamespace(name=name, device_type=device, device_time=time)
        for name, device, time in [*events, ("cudaLaunchKernel", on_host, 0.0)]
    ]
    profiler = SimpleNamespace(events=lambda: listed)
    monkeypatch.setattr(measure, "profile", lambda **options: contextlib.nullcontext(profiler))
    assert measure.kernel_times(lambda: None) == {"join": (2, 5.5)}


def test_a_capture_that_fails_ends_the_process(benchmarks, monkeypatch):
    measure, stream = benchmarks("measure"), Stream()
    monkeypatch.setattr(torch, "cuda", stream)

    monkeypatch.setattr(measure, "cache_flush", lambda: lambda: None)

    def waits(copy):
        if stream.queued.count("capture") == 2:  # the first graph is that of the reads alone
            raise RuntimeError("operation not permitted when stream is capturing\nmore")

    with pytest.raises(RuntimeError, match=r"chain was not captured: operation not permitted[a-z ]*$"):
        measure.interleaved_on_gpu({"chain": waits}, copies=1, budget=0.0)


def test_peers_that_wait_are_found(benchmarks, monkeypatch):
    suite, stream = benchmarks("suite"), Stream()
    monkeypatch.setattr(torch, "cuda", stream)

    def waits(copy):
        if stream.mode == "error":
            raise RuntimeError("called a synchronizing CUDA operation")

    def breaks(copy):
        if stream.mode == "error":
            raise RuntimeError("out of memory")

    assert suite.why_eager(SimpleNamespace(run=lambda copy: None)) is None
    assert suite.why_eager(SimpleNamespace(run=waits)) == "torch saw it wait for the device"
    assert suite.why_eager(SimpleNamespace(run=waits, synchronises=True)) == "it waits for the device"
    with pytest.raises(RuntimeError, match="out of memory"):
        suite.why_eager(SimpleNamespace(run=breaks))
    assert stream.mode == "default"


def test_peers_that_wait_say_so(benchmarks):
    assert benchmarks("verify_peers").TorchChain.synchronises and benchmarks("draft_peers").PromptLookup.synchronises
    assert not hasattr(benchmarks("suite").TorchOps, "synchronises")


def test_kept_results_have_a_line_for_each_row(benchmarks, tmp_path):
    write_json, results = benchmarks("measure").write_json, sorted((BENCHMARKS / "results").glob("*.json"))
    assert results
    for path in results:
        write_json(tmp_path / "again.json", json.loads(path.read_text()))
        assert (tmp_path / "again.json").read_text() == path.read_text(), f"{path.name} was not written by write_json"
    write_json(tmp_path / "small.json", {"name": "x", "machine": {"threads": 2, "none": {}}, "rows": [{"a": [1]}, {}]})
    lines = ["{", '"name": "x",', '"machine": {', '"threads": 2,', '"none": {}', "},", '"rows": [', '{"a": [1]},']
    assert (tmp_path / "small.json").read_text().splitlines() == [*lines, "{}", "]", "}"]
