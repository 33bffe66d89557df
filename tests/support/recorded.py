"""CUDA runtime calls by the backend's host code, without a GPU: tests/runtime/recorded.cpp replaces the runtime.

`recorded_once()` runs this file in another process: every op on each kind of device, captured steps, failing calls.
"""

from __future__ import annotations

import ctypes
import fcntl
import itertools
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
LIBRARY = ROOT / "build" / f"cmake-{sys.implementation.cache_tag}" / "libpagedtree_recorded.so"
STEPS = 3
UNKNOWN, ILLEGAL_ADDRESS = 999, 700  # cudaError_t


@dataclass(frozen=True)
class Device:
    """A kind of GPU, from NVIDIA's CUDA programming guide.

    Attributes:
        capability: 90 for 9.0. num_sms: of one such GPU.
        block_kilobytes: shared memory per CTA. sm_threads: per SM.
        largest_cluster: in CTAs, 1 without clusters.
    """

    capability: int
    num_sms: int
    block_kilobytes: int
    sm_threads: int
    largest_cluster: int


DEVICES = [
    Device(80, 108, 163, 2048, 1),
    Device(86, 84, 99, 1536, 1),
    Device(89, 142, 99, 1536, 1),
    Device(90, 132, 227, 2048, 16),
    Device(100, 148, 227, 2048, 16),
    Device(103, 152, 227, 2048, 16),
    Device(120, 188, 99, 1536, 8),
    Device(121, 48, 99, 1536, 8),
]
HOPPER = next(device for device in DEVICES if device.capability == 90)


@dataclass(frozen=True)
class Asked:
    """A runtime call: name, arguments, and "ok", "refused" or "fails"."""

    name: str
    arguments: tuple[str, ...]
    answer: str

    @classmethod
    def read(cls, line: str) -> Asked:
        name, *arguments, answer = line.split()
        return cls(name, tuple(arguments), answer)


@dataclass(frozen=True)
class Launch:
    """A requested launch; `kernel` is the symbol."""

    kernel: str
    grid: tuple[int, ...]
    block: tuple[int, ...]
    shared_bytes: int
    cluster: int
    early: bool
    stream: str

    @classmethod
    def read(cls, asked: Asked) -> Launch:
        kernel, grid, block, shared_bytes, cluster, early, stream = asked.arguments
        sizes = [tuple(map(int, axes.split(","))) for axes in (grid, block)]
        return cls(kernel, sizes[0], sizes[1], int(shared_bytes), int(cluster), early == "1", stream)

    @property
    def threads(self) -> int:
        return self.block[0] * self.block[1] * self.block[2]


@dataclass
class Recorded:
    """One process's record.

    Attributes:
        lines: distinct runtime calls, by capability.
        errors: ops' exceptions, by capability.
        steps: lines of STEPS steps, by kind.
        failures: (op, failing call, exception, whether the runtime's error was read, exception of the repeated call).
        threads: exceptions of concurrent ops on a new device.
        maps: tensor maps made for a cache, again, for a longer one at its address, 4100 others, that one again.
        engines: lines and exception of a call that could use wgmma, by planted condition.
    """

    lines: dict[str, list[str]] = field(default_factory=dict)
    errors: dict[str, list[str]] = field(default_factory=dict)
    steps: dict[str, list[list[str]]] = field(default_factory=dict)
    failures: list[tuple[str, str, str, bool, str]] = field(default_factory=list)
    threads: list[str] = field(default_factory=list)
    maps: list[int] = field(default_factory=list)
    engines: dict[str, tuple[list[str], str]] = field(default_factory=dict)

    def asked(self, capability: int) -> list[Asked]:
        return [Asked.read(line) for line in self.lines[str(capability)]]

    def launches(self, capability: int) -> list[Launch]:
        return [Launch.read(call) for call in self.asked(capability) if call.name == "launch"]


def recorded_once(temporary: Path) -> Recorded:
    """Returns the record, or skips the test in builds without it; `temporary` is pytest's folder."""
    if not LIBRARY.exists():
        pytest.skip("libpagedtree_recorded.so was not built: make test CUDA=1")
    path = (temporary.parent if "PYTEST_XDIST_WORKER" in os.environ else temporary) / "recorded.json"
    with open(path.with_suffix(".lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not path.exists():
            with tempfile.TemporaryDirectory() as folder:
                done = subprocess.run([sys.executable, __file__, folder], stdout=subprocess.PIPE, check=True)
            path.write_bytes(done.stdout)
    return Recorded(**json.loads(path.read_text()))


# ---- in the other process


def copy_package(folder: Path) -> Path:
    """Copies the package with the recorder as simt; returns its library."""
    package = ROOT / "python" / "pagedtree"
    libraries = folder / "pagedtree" / "lib"
    libraries.mkdir(parents=True)
    for entry in package.iterdir():
        if entry.name != "lib":
            (libraries.parent / entry.name).symlink_to(entry)
    for name in ("libpagedtree_cpu.so", "libpagedtree_torch.so"):  # Torch resolves links, then searches that folder
        shutil.copy(package / "lib" / name, libraries)
    return Path(shutil.copy(LIBRARY, libraries / "libpagedtree_simt.so"))


class Recorder:
    def __init__(self, library: Path) -> None:
        self.library = ctypes.CDLL(str(library))
        self.library.recorded_calls.restype = ctypes.c_char_p
        self.numbers = {device: self.add(device) for device in DEVICES}
        self.found = Recorded(
            lines={str(device.capability): [] for device in DEVICES},
            errors={str(device.capability): [] for device in DEVICES},
        )

    def add(self, device: Device) -> int:
        """Adds an unused device of the kind; returns its number."""
        arguments = (device.capability, device.num_sms, device.block_kilobytes << 10, device.largest_cluster)
        return int(self.library.recorded_add_device(*arguments))

    def run(self, number: int, call: Callable[[], Any]) -> tuple[list[str], str]:
        """Returns the runtime's calls and the exception."""
        from pagedtree.testing import use_backend

        self.library.recorded_use_device(number)
        error = ""
        try:
            with use_backend("simt"):
                call()
        except Exception as raised:
            error = f"{type(raised).__name__}: {raised}"
        lines = self.library.recorded_calls().decode().splitlines()
        return [line for line in lines if not line.startswith("op ")], error

    def run_on_all(self, call: Callable[[], Any]) -> None:
        for device, number in self.numbers.items():
            if os.environ.get("PAGEDTREE_ENGINE") == "wgmma" and device != HOPPER:
                continue
            lines, error = self.run(number, call)
            self.found.lines[str(device.capability)] += lines
            if error:
                self.found.errors[str(device.capability)].append(error)

    @contextmanager
    def beside_cpu(self, run: Callable[[Callable[[], Any]], Any]) -> Iterator[None]:
        """Passes each op to `run`; the CPU backend computes results."""
        from torch.utils._python_dispatch import TorchDispatchMode

        from pagedtree.testing import use_backend

        class Mode(TorchDispatchMode):
            def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
                def call() -> Any:
                    return func(*args, **(kwargs or {}))

                if func.namespace != "pagedtree" or func.__name__.startswith("_"):
                    return call()
                run(call)
                with use_backend("cpu"):
                    return call()

        with Mode():
            yield


def calls_of_rare_kernels() -> Iterator[Callable[[], Any]]:
    """Yields calls of kernels that no other call reaches."""
    import torch
    from calls import raw

    from pagedtree import append_kv, merge_states

    step = raw.raw_call("step_shards")
    plain = dict(itertools.takewhile(lambda item: item[0] != "positions", step.arguments.items()))  # without options
    for dtype in (torch.float16, torch.bfloat16):
        yield partial(step.function, **plain | {"logits": step.arguments["logits"].to(dtype)})
        rows, cache = torch.zeros(2, 1, 9, dtype=dtype)[..., 1:], torch.zeros(1, 4, 1, 8).to(torch.float8_e4m3fn)
        yield partial(append_kv, rows, rows, cache, cache.clone(), torch.zeros(2, dtype=torch.int64))
    for dtype in (torch.float16, torch.float32):
        states = torch.zeros(2, 2, 64, dtype=dtype), torch.zeros(2, 2)
        yield partial(merge_states, *states, *states)


def run_ops(recorder: Recorder) -> None:
    """Runs ops of the tests' calls and of check."""
    import torch
    from calls import raw

    from pagedtree.check.case import Case, Place
    from pagedtree.check.cases import all_cases

    for call in [*raw.raw_calls(), *calls_of_rare_kernels()]:
        recorder.run_on_all(call)
    place = Place(torch.device("cpu"), "simt")
    for case in all_cases(place):
        if isinstance(case, Case) and case.group not in ("instructions", "capture", "shards"):
            with recorder.beside_cpu(recorder.run_on_all), suppress(Exception):  # already recorded
                case.run(place)


def run_instructions(recorder: Recorder) -> None:
    """Runs each instruction, Hopper's on Hopper."""
    import numpy as np
    import torch

    from pagedtree.check.case import Place
    from pagedtree.check.cases import instructions, instructions_sm90

    place = Place(torch.device("cpu"), "simt")
    for table in (instructions.TABLE, instructions_sm90.TABLE):
        if not instructions.has_table("simt", table):  # a build without 9.0a
            continue
        items = instructions._items("simt", table)
        words = np.zeros((items.threads, items.in_words), np.uint32)
        for name in instructions.instruction_names("simt", table):
            run = partial(instructions.run_instruction, name, words, place, table)
            for device, number in recorder.numbers.items():
                if table == instructions.TABLE or device == HOPPER:
                    recorder.found.lines[str(device.capability)] += recorder.run(number, run)[0]


def run_steps(recorder: Recorder) -> None:
    """Runs captured steps on one device."""
    import torch

    from pagedtree.check.cases.capture import KINDS, Engine

    number = recorder.add(HOPPER)
    for kind in KINDS:
        engine = Engine(torch.device("cpu"), 1, *kind)
        steps = recorder.found.steps["/".join(filter(None, kind))] = []
        for i in range(STEPS):
            engine.prepare(i)
            lines: list[str] = []
            with recorder.beside_cpu(lambda call, lines=lines: lines.extend(recorder.run(number, call)[0])):
                engine.step()
            steps.append(lines)


def run_failures(recorder: Recorder) -> None:
    """Runs each op with each of its runtime calls failing."""
    from calls import raw

    for call in raw.raw_calls():
        for i in itertools.count():
            number = recorder.add(HOPPER)  # with unknown attributes
            recorder.library.recorded_fail(i, UNKNOWN)
            lines, error = recorder.run(number, call)
            recorder.library.recorded_fail(-1, UNKNOWN)
            failed = [line for line in lines if line.endswith(" fails")]
            if not failed:
                break
            is_read = recorder.library.recorded_last_error() == 0
            recorder.found.failures.append((call.name, failed[0], error, is_read, recorder.run(number, call)[1]))


def run_threads(recorder: Recorder) -> None:
    """Runs calls concurrently, each time on a new device."""
    from calls import raw

    from pagedtree.testing import use_backend

    def error_of(call: Callable[[], Any]) -> str:
        try:
            call()
        except Exception as raised:
            return f"{type(raised).__name__}: {raised}"
        return ""

    with use_backend("simt"), ThreadPoolExecutor(8) as pool:
        for _ in range(20):
            recorder.library.recorded_use_device(recorder.add(HOPPER))
            recorder.found.threads += filter(None, pool.map(error_of, raw.raw_calls() * 2))
    recorder.library.recorded_calls()


def run_maps(recorder: Recorder) -> None:
    """Uses caches at one address, and at many."""
    import torch

    from pagedtree import tree_attention
    from pagedtree.check.case import environment

    q, memory = torch.zeros(32, 8, 128).bfloat16(), torch.zeros(4200, 64, 1, 128).bfloat16()
    page_table, ends = torch.zeros(1, 1, dtype=torch.int32), torch.tensor([0, 32], dtype=torch.int32)
    number = recorder.add(HOPPER)

    def count(cache: torch.Tensor) -> int:
        call = partial(tree_attention, q, cache, cache, page_table, ends[1:], ends, max_seqlen_q=32)
        lines, _ = recorder.run(number, call)
        return sum(line.startswith("cuTensorMapEncodeTiled") for line in lines)

    with environment("PAGEDTREE_ENGINE", "wgmma"):
        recorder.found.maps = [count(memory[:pages]) for pages in (2, 2, 3)]
        counts = [count(memory[i : i + 3]) for i in range(1, 4101)]
        recorder.found.maps += [sum(counts), count(memory[:3])]


def run_engines(recorder: Recorder, folder: str) -> None:
    """Calls attention in wgmma's tiles, each time on a new device."""
    import torch

    from pagedtree import tree_attention
    from pagedtree._engine import PASSED, facts, store_verdict
    from pagedtree.check.case import environment

    q, cache = torch.zeros(32, 8, 128).bfloat16(), torch.zeros(4, 64, 2, 128).bfloat16()
    page_table, ends = torch.arange(4, dtype=torch.int32)[None], torch.tensor([0, 32], dtype=torch.int32)
    tensors = []  # alive, so that each run needs new maps

    def run(name: str, engine: str, failing: int = -1, error: int = UNKNOWN) -> None:
        number = recorder.add(HOPPER)
        tensors.append((cache.clone(), cache.clone()))
        call = partial(tree_attention, q, *tensors[-1], page_table, ends[1:], ends, max_seqlen_q=32)
        recorder.library.recorded_fail(failing, error)
        with environment("PAGEDTREE_ENGINE", engine):
            recorder.found.engines[name] = recorder.run(number, call)
        recorder.library.recorded_fail(-1, UNKNOWN)

    with environment("PAGEDTREE_CACHE", folder):
        run("auto, not tested", "auto")
        store_verdict(facts("simt", torch.device("cpu")), PASSED)
        recorder.library.recorded_calls()  # drops calls by facts()
        run("auto, passed", "auto")
    run("wgmma", "wgmma")
    names = [Asked.read(line).name for line in recorder.found.engines["wgmma"][0]]
    run("wgmma, no maps", "wgmma", names.index("cuTensorMapEncodeTiled"))
    run("wgmma, an earlier kernel's error", "wgmma", names.index("launch"), ILLEGAL_ADDRESS)


def main(folder: str) -> None:
    library = copy_package(Path(folder))
    sys.path[:1] = [folder, str(ROOT / "tests")]
    import torch

    torch.set_num_threads(1)
    recorder = Recorder(library)
    for run in (run_ops, run_instructions, run_steps, run_failures, run_threads, run_maps):
        run(recorder)
    run_engines(recorder, folder)
    found = recorder.found
    for lists in (found.lines, found.errors):
        for key, rows in lists.items():
            lists[key] = sorted(set(rows))
    print(json.dumps(asdict(found)))


if __name__ == "__main__":
    main(sys.argv[1])
