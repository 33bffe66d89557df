"""Measurement: interleaved candidates, cold caches, median and spread, facts of the machine."""

from __future__ import annotations

import datetime
import json
import os
import platform
import shutil
import statistics
import subprocess
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from pagedtree import _C
from pagedtree._engine import chosen_engine

os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # else the profiler reports each start and stop

RESULTS = Path(__file__).parent / "results"
MAX_REPEATS = 200


@dataclass
class Timing:
    """Seconds per call: median, and interquartile range."""

    median: float
    spread: float
    repeats: int


def interleaved(
    candidates: dict[str, Callable[[int], object]], *, budget: float, min_repeats: int = 5
) -> dict[str, Timing]:
    """Times candidates in turn for `budget` seconds, so slow spells of the machine affect all alike.

    A candidate gets the repeat's number, which selects a copy of its data that no cache holds.
    """
    for call in candidates.values():
        call(0)  # warm-up: allocations, compilation
    samples = {
        name: lambda repeat, call=call: seconds_of(lambda: call(repeat), CPU) for name, call in candidates.items()
    }
    return _in_turn(samples, budget, min_repeats)


# Cycles of half a millisecond, in which the host queues a graph and two events.
HEAD_START = 1_000_000
# Several times any L2 cache.
FLUSHED_BYTES = 256 << 20
FLUSH = "flush"


def interleaved_on_gpu(
    candidates: dict[str, Callable[[int], object]],
    *,
    copies: int,
    budget: float,
    min_repeats: int = 5,
    eager: Collection[str] = (),
) -> dict[str, Timing]:
    """As `interleaved`, by the GPU's clock. A sample is a CUDA graph of a call on each copy of the data, without
    Python's time. A read of FLUSHED_BYTES before each call evicts data and code from L2; the reads' time is subtracted.

    eager: candidates that wait for the device, which no graph can hold, so their time includes launches. A failed
    capture raises RuntimeError: it spoils later captures of the process (torch 2.11), which must end.
    """
    calls, flush = max(copies, 4), cache_flush()

    def flushed(call: Callable[[int], object]) -> Callable[[], None]:
        def run() -> None:
            for i in range(calls):
                flush()
                call(i % copies)

        return run

    everything = {FLUSH: lambda copy: None, **candidates}
    samples: dict[str, Callable[[int], float]] = {}
    for name, call in everything.items():
        sample = flushed(call) if name in eager else captured(name, flushed(call))
        samples[name] = lambda _, sample=sample: seconds_behind_head_start(sample) / calls
    timings = _in_turn(samples, budget, min_repeats)
    reads = timings.pop(FLUSH).median
    return {name: replace(timing, median=max(timing.median - reads, 1e-9)) for name, timing in timings.items()}


def cache_flush() -> Callable[[], object]:
    """Reads only: writes would reach memory during the next call."""
    data = torch.ones(FLUSHED_BYTES // 8, dtype=torch.int64, device="cuda")
    total = torch.empty((), dtype=torch.int64, device="cuda")
    return lambda: torch.sum(data, 0, out=total)


def captured(name: str, calls: Callable[[], object]) -> Callable[[], object]:
    calls()  # allocations, compilation
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            calls()
    except RuntimeError as error:
        raise RuntimeError(f"{name} was not captured: {str(error).splitlines()[0][:200]}") from error
    return graph.replay


def seconds_behind_head_start(sample: Callable[[], object]) -> float:
    """Keeps the GPU busy until the host has queued the events and the replay: otherwise the time includes some
    microseconds of launch."""
    torch.cuda._sleep(HEAD_START)
    return seconds_on_gpu(sample)


def seconds_on_gpu(call: Callable[[], object]) -> float:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    call()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 1e3


def warm_seconds(call: Callable[[], object], repeats: int = 7) -> float:
    """Times a call with data and code left by the previous one."""
    calls = 32
    replay = captured("a repeated call", lambda: [call() for _ in range(calls)])
    return statistics.median(seconds_behind_head_start(replay) for _ in range(repeats)) / calls


def kernel_times(call: Callable[[], object]) -> dict[str, tuple[int, float]]:
    """Returns numbers and median microseconds by kernel."""
    calls = 5
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        for _ in range(calls):
            call()
        torch.cuda.synchronize()
    found: dict[str, list[float]] = {}
    for event in profiler.events():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            name = event.name.replace("(anonymous namespace)::", "").split("<")[0].split("(")[0]
            name = name.removeprefix("void ").split("::")[-1].strip()
            found.setdefault(name, []).append(event.device_time)
    return {name: (len(times) // calls, statistics.median(times)) for name, times in found.items()}


def waits_for_device(call: Callable[[], object]) -> bool:
    """Returns True if torch detects a wait for the GPU, such as `.tolist()`; other libraries' waits go undetected."""
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        call()
    except RuntimeError as error:
        if "synchronizing" not in str(error):
            raise
        return True
    finally:
        torch.cuda.set_sync_debug_mode(before)
    return False


def _in_turn(samples: dict[str, Callable[[int], float]], budget: float, min_repeats: int) -> dict[str, Timing]:
    """Samples each candidate for an equal share of the budget; one whose single call exceeds its share is called three
    times.
    """
    share = budget / max(len(samples), 1)
    times: dict[str, list[float]] = {name: [] for name in samples}
    for repeat in range(MAX_REPEATS):
        for name, sample in samples.items():
            taken = times[name]
            least = min_repeats if not taken or taken[0] < share else min(min_repeats, 3)
            if len(taken) < least or sum(taken) < share:
                taken.append(sample(repeat))
        if all(len(taken) <= repeat for taken in times.values()):
            break
    return {name: _summary(values) for name, values in times.items()}


def seconds_of(call: Callable[[], object], device: torch.device) -> float:
    if device.type != "cuda":
        begin = time.perf_counter()
        call()
        return time.perf_counter() - begin
    torch.cuda.synchronize()
    return seconds_on_gpu(call)


def _summary(values: list[float]) -> Timing:
    quartiles = statistics.quantiles(values, n=4)
    return Timing(statistics.median(values), quartiles[2] - quartiles[0], len(values))


def median_interval(values: list[float]) -> tuple[float, float, float]:
    """Returns a median within its 95 % interval, by ranks; of fewer than six values, all."""
    ordered, count = sorted(values), len(values)
    below = max(int(count / 2 - 0.98 * count**0.5), 0)
    return ordered[below], statistics.median(ordered), ordered[count - 1 - below]


CPU = torch.device("cpu")


def read_bandwidth(device: torch.device = CPU, repeats: int = 7) -> float:
    """Returns bytes per second, the best of several sums."""
    megabytes = 4096 if device.type == "cuda" else 512
    data = torch.ones(megabytes * 2**20 // 8, dtype=torch.int64, device=device)
    data.sum()
    return data.numel() * 8 / min(seconds_of(data.sum, device) for _ in range(repeats))


def matmul_rate(dtype: torch.dtype = torch.float32, device: torch.device = CPU, repeats: int = 5) -> float:
    size = 8192 if device.type == "cuda" else 1024
    a, b = (torch.randn(size, size, dtype=dtype, device=device) for _ in range(2))
    a @ b
    return 2.0 * size**3 / min(seconds_of(lambda: a @ b, device) for _ in range(repeats))


def memory_bytes(entry: str = "MemAvailable") -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        name, size = line.split(":")
        if name == entry:
            return int(size.split()[0]) * 1024
    raise KeyError(entry)


def commit() -> str | None:
    """Returns the environment's COMMIT, else the checkout's, with "-dirty" for changes outside results and pages.

    COMMIT comes first because a copy of a tree may be in another commit's checkout.
    """

    def git(*arguments: str) -> str:
        run = subprocess.run(["git", *arguments], capture_output=True, text=True, cwd=RESULTS.parent, check=False)
        return run.stdout.strip()

    if "COMMIT" in os.environ or shutil.which("git") is None or not git("rev-parse", "--git-dir"):
        return os.environ.get("COMMIT")

    written = ":(top,exclude)benchmarks/results", ":(top,exclude)docs"
    changed = git("status", "--porcelain", "--untracked-files=no", "--", ":/", *written)
    return git("describe", "--always", "--exclude=*") + ("-dirty" if changed else "") or None


def machine_facts() -> dict[str, Any]:
    model = platform.processor()
    for line in Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []:
        if line.startswith("model name"):
            model = line.split(":", 1)[1].strip()
            break
    return {
        "date": datetime.date.today().isoformat(),
        "commit": commit(),
        "processor": model,
        "cores": os.cpu_count(),
        "memory_gb": memory_bytes("MemTotal") / 1e9,
        "load": os.getloadavg()[0],
        "threads": torch.get_num_threads(),
        "cpu_isa": _C.active_isa(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "cuda": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "engine": chosen_engine() if torch.cuda.is_available() else None,
    }


def write_json(target: Path, content: dict[str, Any]) -> None:
    """Replaces the file at once, so a kill leaves the old one; facts and rows have a line each."""
    target.parent.mkdir(parents=True, exist_ok=True)
    unfinished = target.with_name(f".{target.name}")
    unfinished.write_text(_lines(content, lambda value: _lines(value, json.dumps)) + "\n")
    unfinished.replace(target)


def _lines(value: Any, text: Callable[[Any], str]) -> str:
    """Values of a list or dict have a line each."""
    if value and isinstance(value, dict):
        return "{\n" + ",\n".join(f"{json.dumps(key)}: {text(each)}" for key, each in value.items()) + "\n}"
    if value and isinstance(value, list):
        return "[\n" + ",\n".join(map(text, value)) + "\n]"
    return json.dumps(value)
