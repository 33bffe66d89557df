"""Times of traced CTAs, from a library built with -DPAGEDTREE_TRACE (variants/trace)."""

from __future__ import annotations

import collections
import ctypes
from pathlib import Path

import numpy as np

import pagedtree

# In the order of TraceEvent in csrc/cuda/attention/trace.cuh.
NAMES = [
    "walk begins", "walk ends", "slot wanted", "slot empty", "slot started", "used wanted", "used", "Q started",
    "tile wanted", "tile given", "K there", "turn got", "scores there", "weighed", "values done", "output begins",
    "output ends", "joined",
]  # fmt: skip
TRACED = 6000
Trace = np.dtype([("events", "<u8", (3, 3, TRACED)), ("counts", "<u4", (3, 3))], align=True)


def take() -> np.ndarray:
    trace = np.zeros((), Trace)
    library = ctypes.CDLL(str(Path(pagedtree.__file__).parent / "lib" / "libpagedtree_cuda.so"))
    if status := library.pagedtree_copy_trace(trace.ctypes.data_as(ctypes.c_void_p)):
        raise RuntimeError(f"CUDA: error {status}")
    return trace


def show(trace: np.ndarray) -> None:
    """The longest sum comes first."""
    ctas, roles = ("first", "middle", "last"), ("group 0", "group 1", "producers")
    for cta, role in np.ndindex(3, 3):
        words = trace["events"][cta, role, : trace["counts"][cta, role]]
        events, times = words >> 56, (words & (2**56 - 1)).astype(np.int64)
        steps = collections.defaultdict(list)
        for before, event, cycles in zip(events, events[1:], np.diff(times), strict=False):
            steps[f"{NAMES[before]:>13} -> {NAMES[event]:<13}"].append(int(cycles))
        print(f"{ctas[cta]} CTA, {roles[role]}: {len(words)} events")
        for name, cycles in sorted(steps.items(), key=lambda item: -sum(item[1])):
            print(f"  {name} {len(cycles):5} x {np.mean(cycles):8.0f}, most {max(cycles):7}, sum {sum(cycles)} cycles")
