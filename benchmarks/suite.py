"""A benchmark of an op: points of a sweep, and ways to solve each, compared before they are timed.

A *peer* is an alternative to the op, the first in the list. `@peer(NAME)` makes one of a function of a problem, which
does one-time work and returns the `Way`. A *problem* has `bytes` and `flops` (lower bounds of every way), `copies` and
`device`.
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
from measure import Timing, interleaved, interleaved_on_gpu, kernel_times, memory_bytes, waits_for_device, warm_seconds

Shape = dict[str, Any]
LEFT_OUT = "only in the headline points, and where it is named"
COMPILES = "compiled for each shape: only where it is named"


def always() -> str | None:
    """Runs wherever pagedtree does."""
    return None


def package(name: str, device: str = "") -> Callable[[], str | None]:
    """Needs a package, on machines with a GPU ("cuda"), without ("cpu") or any ("")."""

    def absent() -> str | None:
        if device and torch.cuda.is_available() != (device == "cuda"):
            return f"measured on machines {'with' if device == 'cuda' else 'without'} a GPU"
        return None if importlib.util.find_spec(name) else f"{name} is not installed"

    return absent


class Mismatch(Exception):
    """A peer's result is not the op's."""


@dataclass
class Way:
    """`run` is timed, on one of the problem's copies of the data.

    plan: work once per step for all layers, timed separately and included in the ratio.
    check: raises Mismatch if the result is not the op's; None: the op's own check does.
    """

    run: Callable[[int], Any]
    plan: Callable[[], Any] | None = None
    check: Callable[[], None] | None = None


@dataclass(frozen=True, eq=False)
class Peer:
    """A way to do any problem of an op.

    when: returns None, or the reason why this machine cannot run it.
    like: the peer with an equal result, if not the op.
    is_other_problem: the op itself, on a problem with another result.
    only_headline: too slow for sweeps unless named.
    compiles: for each shape; on a GPU, and in the headline table, measured only if named.
    synchronises: waits for the device: no CUDA graph can hold it, and on a GPU its time includes launches.
    plans_on_device: on a GPU `plan` is timed as `run` is.
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
    """properties: fields of Peer."""
    return lambda make: Peer(name, make, **properties)


@peer("pagedtree")
def ours(problem: Any) -> Way:
    """For problems with `op(copy)`."""
    return Way(problem.op)


@peer("torch ops")
def torch_ops(problem: Any) -> Way:
    """For problems with `torch_ops(copy)`."""
    return Way(problem.torch_ops)


def result_pairs(ours: Way, theirs: Way) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
    results = (found if isinstance(found, tuple) else (found,) for found in (ours.run(0), theirs.run(0)))
    return zip(("first", "second"), *results, strict=False)


def check_equal(problem: Any, ours: Way, theirs: Way) -> None:
    """Requires equal integers."""
    for name, a, b in result_pairs(ours, theirs):
        if a.shape != b.shape or not torch.equal(a.long(), b.long()):
            raise Mismatch(f"the {name} result differs")


def check_close(problem: Any, ours: Way, theirs: Way) -> None:
    for name, a, b in result_pairs(ours, theirs):
        error = (a.float() - b.float()).abs().max().item()
        if not error <= 0.03:
            raise Mismatch(f"the {name} result differs by {error}")


def check_mean_error(name: str, ours: torch.Tensor, theirs: torch.Tensor, limit: float) -> None:
    """Bounds the error's root mean square relative to the result's."""
    error = ((theirs - ours).square().mean() / ours.square().mean()).sqrt().item()
    if not error <= limit:
        raise Mismatch(f"the root mean square of the {name}'s error is {error:.3f} of that of the {name}")


class Problem:
    bytes: int
    copies, flops = 1, 0

    def __init__(self, shape: Shape, device: torch.device) -> None:
        self.shape, self.device = shape, device
        self.make()

    def make(self) -> None:
        """Draws inputs and sets `bytes`."""
        raise NotImplementedError

    def generator(self) -> torch.Generator:
        return torch.Generator(self.device).manual_seed(0)


@dataclass(frozen=True)
class Op:
    """The measurement of one op.

    base: the shape from which sweeps start; an axis varies one of its keys. threads: 0 for the run's own.
    headline: more points, as differences from the base; these and the base have all peers. quick: a smaller point.
    problem: makes the inputs of a shape; adjacent points of equal shapes may share them.
    memory: bytes of a point with its peers.
    check: raises Mismatch if a peer's result differs; arguments: the problem, the op's way, the peer's.
    unsupported: reason why the op has no such shape on this device, or None.
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
        return getattr(self.problem, "inputs", self.problem)


@dataclass(frozen=True)
class Point:
    op: Op
    shape: Shape = field(compare=False)
    is_headline: bool
    title: str = ""

    @property
    def name(self) -> str:
        if self.title:
            return self.title
        changed = [f"{key} {value}" for key, value in self.shape.items() if self.op.base[key] != value]
        return ", ".join(changed) or "base"


def points(op: Op, axes: Iterable[str] | None = None, given: dict[str, list[Any]] | None = None) -> list[Point]:
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
    """bandwidth, flop_rate: the device's bytes and flops per second, measured in this run.

    peers: names, or parts of them; None: all. without_compiled: omits peers that compile.
    """

    device: torch.device
    seconds: float
    bandwidth: float
    flop_rate: float
    peers: list[str] | None = None
    min_repeats: int = 5
    without_compiled: bool = False

    def wants(self, peer: Peer, point: Point) -> str | None:
        """Returns the reason to omit the peer."""
        if self.peers is not None:
            wanted = any(name.lower() in peer.name.lower() for name in self.peers)
            return None if wanted else "not asked for"
        if self.without_compiled and peer.compiles:
            return COMPILES
        return LEFT_OUT if peer.only_headline and not point.is_headline else None


def measured(point: Point, settings: Settings) -> dict[str, Any]:
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
        if device.type == "cuda":
            run = ready[op.peers[0]].run
            row |= {"warm_ms": warm_seconds(lambda: run(0)) * 1e3, "kernels": kernel_times(lambda: run(0))}
    finally:
        torch.set_num_threads(default_threads)
    row |= figures(problem, timings, plans, settings)
    return row | {"eager": eager, "absent": absent, "wrong": wrong}


def lacking_memory(needed: int, device: torch.device) -> str | None:
    if device.type == "cuda":
        torch.cuda.empty_cache()  # frees earlier points' memory
    free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else memory_bytes()
    if needed <= 0.85 * free:
        return None
    return f"takes {needed / 1e9:.1f} GB with all peers, {free / 1e9:.1f} GB are free"


def prepared(point: Point, problem: Any, settings: Settings) -> tuple[dict[Peer, Way], dict[str, str], dict[str, str]]:
    """Returns peers with the op's results, reasons of absent ones, and mismatches."""
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
            except Exception as error:  # named, not hidden
                reason = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:200]}"
        if reason is not None and reason != "not asked for":
            absent[peer.name] = reason
    return ready, absent, wrong


def why_eager(peer: Peer, way: Way) -> str | None:
    """Returns the reason not to use a graph."""
    if peer.synchronises:
        return "it waits for the device"
    way.run(0)  # first-time work may wait
    return "torch saw it wait for the device" if waits_for_device(lambda: way.run(0)) else None


def timed(
    problem: Any, ready: dict[Peer, Way], settings: Settings, eager: dict[str, str]
) -> tuple[dict[str, Timing], dict[str, Timing]]:
    runs = {peer.name: lambda i, run=way.run: run(i % problem.copies) for peer, way in ready.items()}
    plans = {peer: lambda i, plan=way.plan: plan() for peer, way in ready.items() if way.plan}
    options = {"budget": settings.seconds, "min_repeats": settings.min_repeats}
    planning = {"budget": settings.seconds / 4, "min_repeats": min(settings.min_repeats, 3)}
    if settings.device.type != "cuda":
        planned = {peer.name: plan for peer, plan in plans.items()}
        return interleaved(runs, **options), interleaved(planned, **planning) if plans else {}
    timings = interleaved_on_gpu(runs, copies=problem.copies, eager=eager, **options)
    on_device = {peer.name: plan for peer, plan in plans.items() if peer.plans_on_device}
    # Other plans include work of the host: timed by its clock until the device is done.
    on_host = {
        peer.name: lambda i, plan=plan: (plan(i), torch.cuda.synchronize())
        for peer, plan in plans.items()
        if not peer.plans_on_device
    }
    times = interleaved_on_gpu(on_device, copies=1, **planning) if on_device else {}
    return timings, times | (interleaved(on_host, **planning) if on_host else {})


def figures(problem: Any, timings: dict[str, Timing], plans: dict[str, Timing], settings: Settings) -> dict[str, Any]:
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
        "ratio": {peer: timing.median / ours.median for peer, timing in others},
        "ratio_with_plan": {peer: planned(peer) / planned(name) for peer, _ in others},
        "notes": getattr(problem, "notes", {}),
        "timings": {peer: asdict(timing) for peer, timing in timings.items()},
        "plans": {peer: asdict(timing) for peer, timing in plans.items()},
    }


def run_all(chosen: Sequence[Point], settings: Settings, row_limit: float | None = None) -> Iterator[dict[str, Any]]:
    """Yields a row for each point.

    A point that exceeds `row_limit` seconds ends the process, as a hanging kernel cannot be stopped.
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
    """A bar on a terminal, elsewhere a line per point."""

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
