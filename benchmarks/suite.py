"""What a benchmark of an op is: points of a sweep, and the ways to do each, compared before they are timed.

A *peer* is whatever a user could call instead of the op; the op itself is the first in the list. `@peer(NAME)` makes
one of a function of a problem, which does what an engine does once and returns the `Way`. A *problem* has `bytes` and
`flops` (what no way to do it can avoid), `copies` and `device`.
"""

from __future__ import annotations

import faulthandler
import importlib.util
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from measure import (
    Timing,
    interleaved,
    interleaved_on_gpu,
    kernel_times,
    memory_bytes,
    peak_bytes,
    waits_for_device,
    warm_seconds,
)

Shape = dict[str, Any]
LEFT_OUT = "only in the headline points, and where it is named"
COMPILES = "compiled for each shape: only where it is named"


def always() -> str | None:
    """For a peer that runs wherever pagedtree does."""
    return None


def package(name: str, device: str = "") -> Callable[[], str | None]:
    """For a peer of a package, if installed, on machines with a GPU ("cuda"), without one ("cpu") or any ("")."""

    def absent() -> str | None:
        if device and torch.cuda.is_available() != (device == "cuda"):
            return f"measured on machines {'with' if device == 'cuda' else 'without'} a GPU"
        return None if importlib.util.find_spec(name) else f"{name} is not installed"

    return absent


class Mismatch(Exception):
    """A peer's result is not that of the op."""


@dataclass
class Way:
    """How a problem is done: `run` is timed, on one of the problem's copies of the data.

    plan: what an engine does once per step for all layers; timed apart, and included in the ratio.
    check: raises Mismatch where the result is not the op's; None: the op's own check does.
    """

    run: Callable[[int], Any]
    plan: Callable[[], Any] | None = None
    check: Callable[[], None] | None = None


@dataclass(frozen=True, eq=False)
class Peer:
    """A way to do any problem of an op.

    when: None, or why this machine cannot run it.
    like: the peer whose result this one's equals, where that is not the op's.
    is_other_problem: the op itself, on a problem with another result.
    only_headline: too slow for sweeps, which leave it out unless it is named.
    compiles: compiled for each shape: on a GPU, and in the headline table, measured only if it is named.
    synchronises: waits for the device: no CUDA graph can hold it, and on a GPU it is timed with its launches.
    plans_on_device: `plan` does all of its work there: on a GPU it is timed as `run` is.
    """

    name: str
    make: Callable[[Any], Way]
    when: Callable[[], str | None] = always
    like: Peer | None = None
    is_other_problem: bool = False
    only_headline: bool = False
    compiles: bool = False
    synchronises: bool = False
    plans_on_device: bool = False


def peer(name: str, **properties: Any) -> Callable[[Callable[[Any], Way]], Peer]:
    """Makes a peer of the function that it decorates; properties: fields of Peer."""
    return lambda make: Peer(name, make, **properties)


@peer("pagedtree")
def ours(problem: Any) -> Way:
    """The op itself, for problems that have it as `op(copy)`."""
    return Way(problem.op)


@peer("torch ops")
def torch_ops(problem: Any) -> Way:
    """What a few lines of eager torch do, for problems that have them as `torch_ops(copy)`."""
    return Way(problem.torch_ops)


def result_pairs(ours: Way, theirs: Way) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
    """Both ways' results under a name, one tensor or several."""
    results = (found if isinstance(found, tuple) else (found,) for found in (ours.run(0), theirs.run(0)))
    return zip(("first", "second"), *results, strict=False)


def check_equal(problem: Any, ours: Way, theirs: Way) -> None:
    """The same integers."""
    for name, a, b in result_pairs(ours, theirs):
        if a.shape != b.shape or not torch.equal(a.long(), b.long()):
            raise Mismatch(f"the {name} result differs")


def check_close(problem: Any, ours: Way, theirs: Way) -> None:
    for name, a, b in result_pairs(ours, theirs):
        error = (a.float() - b.float()).abs().max().item()
        if not error <= 0.03:
            raise Mismatch(f"the {name} result differs by {error}")


def check_mean_error(name: str, ours: torch.Tensor, theirs: torch.Tensor, limit: float) -> None:
    """Relates the root mean squares of the error and of the result."""
    error = ((theirs - ours).square().mean() / ours.square().mean()).sqrt().item()
    if not error <= limit:
        raise Mismatch(f"the root mean square of the {name}'s error is {error:.3f} of that of the {name}")


class Problem:
    """The inputs of a shape."""

    bytes: int
    copies, flops = 1, 0

    def __init__(self, shape: Shape, device: torch.device) -> None:
        self.shape, self.device = shape, device
        self.make()

    def make(self) -> None:
        """Draws the inputs, and sets `bytes`."""
        raise NotImplementedError

    def generator(self) -> torch.Generator:
        return torch.Generator(self.device).manual_seed(0)


@dataclass(frozen=True)
class Op:
    """How one op is measured.

    base: the shape that the sweeps start from; an axis varies one of its keys over further values. threads: 0 for the
    run's own.
    headline: more points, of which each says what differs from the base. The base and these are measured beside all
        peers. quick: a smaller point for a first look.
    problem: makes the inputs of a shape; equal shapes of neighbouring points may get the same ones.
    memory: bytes that a point takes, its peers included.
    check: raises Mismatch where a peer's result is not the op's; takes the problem, the op's way and the peer's.
    unsupported: why the op itself has no such shape on this device, or None.
    """

    name: str
    base: Shape
    axes: dict[str, Sequence[Any]]
    quick: Shape
    problem: Callable[[Shape, torch.device], Any]
    memory: Callable[[Shape], int]
    peers: Sequence[Peer] = (ours, torch_ops)
    check: Callable[[Any, Way, Way], None] = check_equal
    headline: Sequence[Shape] = ()
    unsupported: Callable[[Shape, torch.device], str | None] = lambda shape, device: None

    @property
    def inputs(self) -> Any:
        """Ops for which this is equal take the same inputs for equal shapes."""
        return getattr(self.problem, "inputs", self.problem)


@dataclass(frozen=True)
class Point:
    op: Op
    shape: Shape = field(compare=False)
    is_headline: bool
    title: str = ""

    @property
    def name(self) -> str:
        """The title, or what differs from the base."""
        if self.title:
            return self.title
        changed = [f"{key} {value}" for key, value in self.shape.items() if self.op.base[key] != value]
        return ", ".join(changed) or "base"


def points(op: Op, axes: Iterable[str] | None = None, given: dict[str, list[Any]] | None = None) -> list[Point]:
    """The base, the headline points and the sweeps; of some axes only; or all combinations of the given values."""
    if given is not None:
        shapes = [op.base]
        for key, values in given.items():
            if key in op.base:
                shapes = [{**shape, key: value} for shape in shapes for value in values]
        return [Point(op, shape, True) for shape in shapes]
    found = [Point(op, op.base, True), *(Point(op, {**op.base, **change}, True) for change in op.headline)]
    for axis, values in op.axes.items():
        if axes is None or axis in axes:
            found += [Point(op, {**op.base, axis: value}, False) for value in values]
    return found


@dataclass
class Settings:
    """What is known of a run. bandwidth, flop_rate: the device's bytes and flops per second, measured in this run.

    cpu_time: seconds are the process's own, on a machine that other programs use; for one thread.
    peers: names, or parts of them, of those wanted; None: all. without_compiled: leave out those that compile.
    is_rehearsal: headline rows in small sizes, whose memory nobody wants to know.
    """

    device: torch.device
    seconds: float
    bandwidth: float
    flop_rate: float
    peers: list[str] | None = None
    min_repeats: int = 5
    without_compiled: bool = False
    cpu_time: bool = False
    is_rehearsal: bool = False

    def wants(self, peer: Peer, point: Point) -> str | None:
        """Why the peer is not asked at this point, or None."""
        if self.peers is not None:
            wanted = any(name.lower() in peer.name.lower() for name in self.peers)
            return None if wanted else "not asked for"
        if self.without_compiled and peer.compiles:
            return COMPILES
        return LEFT_OUT if peer.only_headline and not point.is_headline else None


def measured(point: Point, settings: Settings) -> dict[str, Any]:
    """The row of a point, or the reason where the point does not fit."""
    op, device = point.op, settings.device
    row: dict[str, Any] = {"op": op.name, "point": point.name, "shape": point.shape, "headline": point.is_headline}
    reason = op.unsupported(point.shape, device) or lacking_memory(op.memory(point.shape), device)
    if reason is not None:
        return row | {"skipped": reason}
    default_threads = torch.get_num_threads()
    torch.set_num_threads(point.shape.get("threads") or default_threads)
    try:
        problem = op.problem(point.shape, device)
        ready, absent, wrong = prepared(point, problem, settings)
        eager = {}
        if device.type == "cuda":
            eager = {peer.name: reason for peer, way in ready.items() if (reason := why_eager(peer, way))}
        timings, plans = timed(problem, ready, settings, eager)
        peaks = {}
        if point.is_headline and not settings.is_rehearsal:
            peaks = {peer.name: peak_bytes(lambda way=way: way.run(0), device) for peer, way in ready.items()}
        if device.type == "cuda":
            run = ready[op.peers[0]].run
            row |= {"warm_ms": warm_seconds(lambda: run(0)) * 1e3, "kernels": kernel_times(lambda: run(0))}
    finally:
        torch.set_num_threads(default_threads)
    row |= figures(problem, timings, plans, settings)
    return row | {"peak_bytes": peaks, "eager": eager, "absent": absent, "wrong": wrong}


def lacking_memory(needed: int, device: torch.device) -> str | None:
    if device.type == "cuda":
        torch.cuda.empty_cache()  # what earlier points held is free, too
    free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else memory_bytes()
    if needed <= 0.85 * free:
        return None
    return f"takes {needed / 1e9:.1f} GB with all peers, {free / 1e9:.1f} GB are free"


def prepared(point: Point, problem: Any, settings: Settings) -> tuple[dict[Peer, Way], dict[str, str], dict[str, str]]:
    """Peers that can run, whose results are the op's; why the others are absent; and those whose results differ."""
    first, *others = point.op.peers
    ready, absent, wrong = {first: first.make(problem)}, {}, {}
    for peer in others:
        reason = settings.wants(peer, point) or peer.when()
        if reason is None:
            try:
                theirs = peer.make(problem)
                if theirs.check is not None:
                    theirs.check()
                elif not peer.is_other_problem:
                    point.op.check(problem, peer.like.make(problem) if peer.like else ready[first], theirs)
                ready[peer] = theirs
            except Mismatch as mismatch:
                wrong[peer.name] = str(mismatch)
            except Exception as error:  # one that cannot do this shape is named, not hidden
                reason = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:200]}"
        if reason is not None and reason != "not asked for":
            absent[peer.name] = reason
    return ready, absent, wrong


def why_eager(peer: Peer, way: Way) -> str | None:
    """Why a peer is called on a GPU instead of replayed from a graph, or None."""
    if peer.synchronises:
        return "it waits for the device"
    way.run(0)  # what it does once may wait
    return "torch saw it wait for the device" if waits_for_device(lambda: way.run(0)) else None


def timed(
    problem: Any, ready: dict[Peer, Way], settings: Settings, eager: dict[str, str]
) -> tuple[dict[str, Timing], dict[str, Timing]]:
    """Times of the calls, and of the plans of those that have one."""
    runs = {peer.name: lambda i, run=way.run: run(i % problem.copies) for peer, way in ready.items()}
    plans = {peer: lambda i, plan=way.plan: plan() for peer, way in ready.items() if way.plan}
    options = {"budget": settings.seconds, "min_repeats": settings.min_repeats}
    planning = {"budget": settings.seconds / 4, "min_repeats": 3}
    if settings.device.type != "cuda":
        clock = time.process_time if settings.cpu_time else time.perf_counter
        planned = {peer.name: plan for peer, plan in plans.items()}
        return interleaved(runs, clock=clock, **options), interleaved(planned, **planning) if plans else {}
    timings = interleaved_on_gpu(runs, copies=problem.copies, eager=eager, **options)
    on_device = {peer.name: plan for peer, plan in plans.items() if peer.plans_on_device}
    # What others plan is work of the host, too: by the clock, until the device is done.
    on_host = {
        peer.name: lambda i, plan=plan: (plan(i), torch.cuda.synchronize())
        for peer, plan in plans.items()
        if not peer.plans_on_device
    }
    times = interleaved_on_gpu(on_device, copies=1, **planning) if on_device else {}
    return timings, times | (interleaved(on_host, **planning) if on_host else {})


def figures(problem: Any, timings: dict[str, Timing], plans: dict[str, Timing], settings: Settings) -> dict[str, Any]:
    """Makes a row's figures: our time, the floor below which no run can be, and the peers' times over ours."""
    (name, ours), *others = timings.items()
    memory, arithmetic = problem.bytes / settings.bandwidth, problem.flops / settings.flop_rate

    def planned(peer: str) -> float:
        return timings[peer].median + (plans[peer].median if peer in plans else 0.0)

    return {
        "bytes": problem.bytes,
        "flops": problem.flops,
        "ms": ours.median * 1e3,
        "spread_ms": ours.spread * 1e3,
        "plan_ms": plans[name].median * 1e3 if name in plans else 0.0,
        "gb_per_s": problem.bytes / ours.median / 1e9,
        "gflop_per_s": problem.flops / ours.median / 1e9,
        "floor_ms": max(memory, arithmetic) * 1e3,
        "bound": "arithmetic" if arithmetic > memory else "memory",
        "ratio": {peer: timing.median / ours.median for peer, timing in others},
        "ratio_with_plan": {peer: planned(peer) / planned(name) for peer, _ in others},
        "notes": getattr(problem, "notes", {}),
        "timings": {peer: asdict(timing) for peer, timing in timings.items()},
        "plans": {peer: asdict(timing) for peer, timing in plans.items()},
    }


def run_all(chosen: Sequence[Point], settings: Settings, row_limit: float | None = None) -> Iterator[dict[str, Any]]:
    """One row for each point, with a bar of what is done and how long the rest will take.

    A point that takes longer than `row_limit` seconds ends the process, as a kernel that hangs cannot be stopped.
    """
    bar = Progress(len(chosen))
    for point in chosen:
        bar.show(f"{point.op.name}: {point.name}")
        if row_limit is not None:
            faulthandler.dump_traceback_later(row_limit, exit=True)
        row = measured(point, settings)
        if row_limit is not None:
            faulthandler.cancel_dump_traceback_later()
        bar.clear()
        bar.done += 1
        yield row


class Progress:
    """A bar on a terminal; on anything else one line per point. The time left is that of the points so far, on
    average."""

    WIDTH = 24

    def __init__(self, total: int) -> None:
        self.total, self.done, self.began = total, 0, time.perf_counter()

    def text(self, label: str, now: float) -> str:
        filled = self.WIDTH * self.done // max(self.total, 1)
        left = (now - self.began) / self.done * (self.total - self.done) if self.done else None
        remaining = "?" if left is None else f"{int(left) // 60}:{int(left) % 60:02d}"
        return f"[{'#' * filled:{self.WIDTH}}] {self.done}/{self.total}, {remaining} left  {label}"

    def show(self, label: str) -> None:
        text = self.text(label, time.perf_counter())
        if sys.stderr.isatty():
            text = f"\r{text[:118]:118}"
        print(text, end="" if sys.stderr.isatty() else "\n", file=sys.stderr, flush=True)

    def clear(self) -> None:
        if sys.stderr.isatty():
            print(f"\r{'':118}\r", end="", file=sys.stderr, flush=True)
