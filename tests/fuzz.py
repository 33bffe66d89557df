"""Calls the public functions with hostile arguments: each must return, or refuse by an error that names an argument.

    python tests/fuzz.py [--seconds 60] [--cases N] [--seed N] [--backend simt] [--only NAME ...]

Run by `make fuzz`. Hypothesis changes up to three arguments of a valid call (values, shapes, strides, dtypes, devices,
types), or torch's default dtype. A finding is

- an exception other than ValueError, TypeError or NotImplementedError, or without an argument's name;
- a write out of bounds, or to an argument that is only read;
- a result's token, node or slot that does not exist;
- too much time or memory, or a crash.

It is shrunk and printed; the search continues with other functions, and exits with 1. A child process announces and
makes the calls, so that crashes are reported.
"""

from __future__ import annotations

import argparse
import dataclasses
import faulthandler
import os
import re
import resource
import runpy
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import calls
import calls.adapters
import calls.checkpoints
import torch
from calls import Call, changed, mapped, parts_of, tensors_of
from calls.ops import VOCAB
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from support.devices import default_dtype
from torch import Tensor

import pagedtree as pt
from pagedtree.distributed.group import GroupError
from pagedtree.testing import use_backend

REFUSALS = (ValueError, TypeError, NotImplementedError, GroupError)
GUARD = 256  # bytes around an argument
SECONDS_A_CALL = 30
MEMORY = 4 << 30  # bytes beyond those at the start
ROUND = 500  # calls between checks of the time

INTEGERS = (0, 1, -1, 2, -2, 3, 7, 63, 2**15, 2**31 - 1, 2**31, -(2**31), 2**32, 2**62, 2**63 - 1, -(2**63))
FLOATS = (0.0, -0.0, 1.0, -1.0, 0.5, 1e-45, 1e30, -1e30, float("inf"), float("-inf"), float("nan"))
OTHERS = (None, True, -1, 2**70, 0.5, float("nan"), "", "swor", b"x", [], [1, 2], [[0.5]], (1, 0), {}, object())
DTYPES = (
    torch.float32, torch.float16, torch.bfloat16, torch.float64, torch.float8_e4m3fn, torch.int32, torch.int64,
    torch.int16, torch.uint8, torch.bool, torch.complex64,
)  # fmt: skip
Path_ = tuple[Any, ...]


# ---- paths of a call's values


def places(value: Any, path: Path_ = ()) -> Iterator[Path_]:
    """Yields the paths of all values and their parts."""
    if path:
        yield path
    for key, part in parts_of(value):
        yield from places(part, (*path, key))


def open_places(call: Call) -> Iterator[Path_]:
    """Yields paths that callers control; a TreeBatch's integers are its maker's."""
    for path in places(call.arguments):
        inner = at(call.arguments, path[:-1])
        is_own = dataclasses.is_dataclass(inner) and not isinstance(at(call.arguments, path), Tensor)
        is_params = isinstance(inner, pt.SamplingParams)
        is_meta = isinstance(at(call.arguments, path), Tensor) and at(call.arguments, path).is_meta
        if path[0] not in call.fixed and not is_meta and path != (call.receiver,) and (is_params or not is_own):
            yield path


def at(value: Any, path: Path_) -> Any:
    for key in path:
        value = value[key] if type(value) in (list, tuple, dict) else dict(parts_of(value))[key]
    return value


# ---- hostile values


def hostile_tensor(draw: Callable[..., Any], t: Tensor, keeps_type: bool) -> tuple[str, Any]:
    kinds = ["values", "values", "values", "fill", "shape", "stride", "dtype", "device", "raw bool", "grad"]
    kinds += [] if keeps_type else ["type"]
    kind = draw(st.sampled_from(kinds))
    if kind in ("values", "fill"):
        new = t.clone()
        pool = FLOATS if t.dtype.is_floating_point or t.dtype.is_complex else (*INTEGERS, *range(12))
        flat = new.view(-1) if new.is_contiguous() else new.reshape(-1)
        count = 1 if kind == "fill" else draw(st.integers(1, 4))
        said = []
        for _ in range(count if flat.numel() else 0):
            value = draw(st.sampled_from(pool))
            place = draw(st.integers(0, flat.numel() - 1))
            wrapped = torch.tensor(value).to(torch.float32 if t.dtype.is_floating_point else t.dtype).to(t.dtype)
            if kind == "fill":
                flat.fill_(wrapped)
            else:
                flat[place] = wrapped
            said.append(f"[{place}] = {value}" if kind == "values" else f"all {value}")
        return ", ".join(said), flat.view(t.shape)
    if kind == "shape":
        return hostile_shape(draw, t)
    if kind == "stride":
        how = draw(st.sampled_from(["spread", "expanded", "offset", "transposed"]))
        if how == "spread":
            return how, torch.stack([t, t], -1)[..., 0]
        if how == "expanded" and t.dim() and t.shape[0]:
            return how, t[:1].expand(t.shape)
        if how == "offset":
            memory = torch.empty(t.numel() + 1, dtype=t.dtype)
            return how, memory[1:].copy_(t.reshape(-1)).view(t.shape)
        return "transposed", t.transpose(0, -1).contiguous().transpose(0, -1) if t.dim() else t
    if kind == "dtype":
        dtype = draw(st.sampled_from(DTYPES))
        return str(dtype), t.to(torch.float32).to(dtype) if t.dtype == torch.float8_e4m3fn else t.to(dtype)
    if kind == "device":
        return "meta", t.to("meta")
    if kind == "raw bool" and t.dtype == torch.bool and t.numel():
        byte = draw(st.sampled_from([2, 128, 255]))
        return f"bytes {byte}", torch.full(t.shape, byte, dtype=torch.uint8).view(torch.bool)
    if kind == "grad" and t.dtype.is_floating_point:
        return "requires grad", t.clone().requires_grad_()
    return ("no change", t) if keeps_type else hostile_type(draw, t)


def hostile_shape(draw: Callable[..., Any], t: Tensor) -> tuple[str, Tensor]:
    how = draw(st.sampled_from(["empty", "shorter", "longer", "one", "flat", "more", "fewer", "turned"]))
    dim = draw(st.integers(0, t.dim() - 1)) if t.dim() else 0
    said = f"{how} at {dim}"
    if how == "flat" or not t.dim():
        return "flat", t.reshape(-1)
    if how == "more":
        return said, t.unsqueeze(dim)
    if how == "turned":
        return said, t.movedim(dim, 0)
    if how == "longer" or not t.shape[dim]:
        raw = t.view(torch.uint8) if t.element_size() == 1 else t
        return said, torch.cat([raw, raw], dim).view(t.dtype)
    if how == "fewer":
        return said, t.select(dim, 0).clone()
    size = {"empty": 0, "one": 1}.get(how, t.shape[dim] - 1)
    return said, t.narrow(dim, 0, size).clone()


def hostile_type(draw: Callable[..., Any], value: Any) -> tuple[str, Any]:
    if isinstance(value, Tensor) and draw(st.booleans()):
        return "as a list", value.float().tolist()
    new = draw(st.sampled_from(OTHERS))
    return repr(new), new


def hostile(draw: Callable[..., Any], value: Any, keeps_type: bool) -> tuple[str, Any]:
    """Returns (description, new value)."""
    if isinstance(value, Tensor):
        return hostile_tensor(draw, value, keeps_type)
    if isinstance(value, bool) or value is None:
        return hostile_type(draw, value)
    if isinstance(value, int) and draw(st.integers(0, 3)):
        new = draw(st.one_of(st.sampled_from(INTEGERS), st.integers(-5, 70)))
        return repr(new), new
    if isinstance(value, float) and draw(st.integers(0, 3)):
        new = draw(st.one_of(st.sampled_from(FLOATS), st.floats()))
        return repr(new), new
    if isinstance(value, (list, tuple)) and not hasattr(value, "_replace") and draw(st.booleans()):
        how = draw(st.sampled_from(["shorter", "twice", "empty"]))
        parts = {"shorter": value[:-1], "twice": (*value, *value), "empty": value[:0]}[how]
        return how, type(value)(parts)
    return hostile_type(draw, value)


# ---- forbidden effects


class Guarded:
    """Copies tensors between guard bytes; `check` asserts that only allowed ones were written."""

    def __init__(self, call: Call) -> None:
        self.memory: dict[int, Tensor] = {}
        self.arguments = mapped(call.arguments, self._guarded)
        written = {t.untyped_storage().data_ptr() for name in call.written for t in tensors_of(self.arguments[name])}
        self.written = {key for key, t in self.memory.items() if t.untyped_storage().data_ptr() in written}
        self.before = {key: t.clone() for key, t in self.memory.items()}

    def _guarded(self, t: Tensor) -> Tensor:
        if t.device.type != "cpu":
            return t
        storage = t.untyped_storage()
        if storage._cdata not in self.memory:
            memory = torch.full((storage.nbytes() + 2 * GUARD,), 0xA5, dtype=torch.uint8)
            if storage.nbytes():
                memory[GUARD : GUARD + storage.nbytes()] = torch.empty(0, dtype=torch.uint8).set_(storage)
            self.memory[storage._cdata] = memory
        offset = GUARD // t.element_size() + t.storage_offset()
        memory = self.memory[storage._cdata].untyped_storage()
        copy = torch.empty(0, dtype=t.dtype).set_(memory, offset, t.shape, t.stride())
        return copy.requires_grad_() if t.requires_grad else copy

    def check(self) -> None:
        for key, memory in self.memory.items():
            before = self.before[key]
            inside = slice(GUARD, memory.numel() - GUARD) if key in self.written else slice(0, 0)
            before[inside] = memory[inside]
            assert torch.equal(memory, before), "wrote outside of what it may write"


def check_result(result: Any, tokens: Any = None) -> None:
    """Asserts that tokens (of `tokens`, if given) and nodes exist; skips meta results."""
    if any(t.device.type == "meta" for t in tensors_of(result)):
        return
    if isinstance(result, pt.Verdict):
        known = result.tokens < 2 * VOCAB if tokens is None else torch.isin(result.tokens, tokens)
        known &= result.tokens >= 0
        assert (known | (result.tokens == -1)).all(), "a token outside of the vocabulary"
        assert (result.num_accepted >= -1).all() and (result.accept_index >= -1).all(), "a node below -1"
        assert (result.num_accepted < max(result.tokens.shape[1], 1)).all(), "more accepted than a path holds"
    if isinstance(result, pt.Draft):
        trees = result.trees
        assert (trees.cu_nodes.diff() >= 0).all() and trees.cu_nodes[-1] <= trees.parents.shape[0], "offsets of trees"
        assert (trees.parents < trees.max_nodes).all(), "a parent outside of its tree"


def run(call: Call) -> None:
    """Raises AssertionError for a finding."""
    guarded = Guarded(call)
    keys = {str(key) for path in places(call.arguments) for key in path}
    try:
        check_result(call.function(**guarded.arguments), call.arguments.get("tokens"))
    except (MemoryError, torch.OutOfMemoryError):  # a legitimate size
        pass
    except REFUSALS as error:
        words = set(re.findall(r"\w+", str(error)))
        named = words & keys or "meta" in words or any(f"{name}:" in str(error) for name in dir(pt))
        assert named, f"names no argument: {type(error).__name__}: {error}"
    except Exception as error:
        # Torch's refusals to write to such tensors.
        if any(words in str(error) for words in ("requires grad", "more than one element of the written-to tensor")):
            return
        raise AssertionError(f"{type(error).__name__}: {error}") from error
    guarded.check()


# ---- the fuzzer


class Finding(Exception):
    def __init__(self, name: str, text: str) -> None:
        super().__init__(text)
        self.name = name


def search(cases: int, seed_: int, only: Sequence[str], say: Callable[[str], None]) -> int:
    """Makes `cases` calls; returns their number, or raises a shrunk Finding."""
    made = 0

    @seed(seed_)
    @settings(
        max_examples=cases,
        deadline=None,
        database=None,
        derandomize=False,
        report_multiple_bugs=False,
        suppress_health_check=list(HealthCheck),
        phases=[Phase.generate, Phase.shrink],
    )
    @given(st.data())
    def hostile_call(data: st.DataObject) -> None:
        nonlocal made
        name = data.draw(st.sampled_from(only))
        call = calls.make(name)
        changes = []
        for _ in range(data.draw(st.integers(1, 3))):
            places_left = list(open_places(call))
            if not places_left:  # all without values
                break
            path = data.draw(st.sampled_from(places_left))
            is_field = dataclasses.is_dataclass(at(call.arguments, path[:-1]))
            said, new = hostile(data.draw, at(call.arguments, path), keeps_type=is_field)
            where = ".".join(map(str, path))
            try:
                call.arguments = changed(call.arguments, path, new)
            except REFUSALS:  # by SamplingParams itself
                continue
            changes.append(f"{where}: {said}")
        default = data.draw(st.sampled_from([torch.float32, torch.bfloat16, torch.float64]))
        text = f"{name}({'; '.join(changes)}), default dtype {default}"
        say(text)
        made += 1
        faulthandler.dump_traceback_later(SECONDS_A_CALL, exit=True)
        try:
            with default_dtype(default):
                run(call)
        except AssertionError as error:
            raise Finding(name, f"{text}\n    {error}") from error.__cause__
        finally:
            faulthandler.cancel_dump_traceback_later()

    hostile_call()
    return made


def limit_memory() -> None:
    size = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    resource.setrlimit(resource.RLIMIT_AS, (size + MEMORY, size + MEMORY))


def work(arguments: argparse.Namespace) -> int:
    """Makes the child's calls, announced in the file `arguments.last`."""
    warnings.simplefilter("ignore")  # values beyond hostile dtypes
    only = list(arguments.only or calls.names())
    for name in only:  # loads libraries before memory counts; valid calls must pass
        run(calls.make(name))
    if not arguments.no_memory_limit:
        limit_memory()
    begin, made, found = time.monotonic(), 0, 0
    with open(arguments.last, "w") as last:

        def say(text: str) -> None:
            last.seek(0)
            last.truncate()
            last.write(text)
            last.flush()

        while only and made < arguments.cases and time.monotonic() - begin < arguments.seconds:
            count = min(ROUND, arguments.cases - made)
            try:
                made += search(count, arguments.seed + made, only, say)
            except Finding as finding:
                print(f"seed {arguments.seed + made}: {finding}", flush=True)
                found += 1
                made += count
                only.remove(finding.name)
        say("")
    seconds = time.monotonic() - begin
    print(f"{made} calls in {seconds:.0f} s, seed {arguments.seed}, backend {arguments.backend}: {found} findings")
    return int(found > 0)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--seconds", type=float, default=60, help="how long (60)")
    parser.add_argument("--cases", type=int, default=10**9, help="at most so many calls")
    parser.add_argument("--seed", type=int, default=time.time_ns() % 10**9, help="default: another one each time")
    parser.add_argument("--backend", default="cpu", choices=["cpu", "simt"])
    parser.add_argument("--only", nargs="+", metavar="NAME", help="of these calls (default all)")
    parser.add_argument("--calls", metavar="FILE", help="Python file with further calls, see calls.valid_call")
    parser.add_argument("--no-memory-limit", action="store_true", help="for AddressSanitizer, which takes terabytes")
    parser.add_argument("--last", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.calls:
        runpy.run_path(arguments.calls)
    if unknown := set(arguments.only or []) - set(calls.names()):
        parser.error(f"--only: expected some of {', '.join(calls.names())}, got {', '.join(sorted(unknown))}")
    if arguments.last:
        torch.set_num_threads(1)
        with use_backend(arguments.backend):
            return work(arguments)
    with tempfile.NamedTemporaryFile("r") as last:
        command = [sys.executable, __file__, *sys.argv[1:], "--seed", str(arguments.seed), "--last", last.name]
        status = subprocess.run(command, check=False).returncode
        text = last.read()
    if text:  # the unfinished call
        print(f"the process ended with status {status} in {text}")
    return min(abs(status), 1)


if __name__ == "__main__":
    sys.exit(main())
