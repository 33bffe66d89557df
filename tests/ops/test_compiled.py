"""Every op and whole steps under inductor (dynamic shapes), torch.export and AOTInductor."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import calls
import pytest
import torch
from calls import Call, mapped, tensors_of
from calls.raw import op_names
from support import ROOT, int32, python_blocks
from torch import Tensor, nn

from pagedtree import append_kv, compact_kv
from pagedtree._ops import _overload

NAMES = [name for name in calls.names("calls.ops", "calls.recurrent") if not calls.make(name).is_for_host]


@pytest.fixture(autouse=True)
def nothing_compiled() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


@pytest.mark.parametrize("op", op_names())
def test_written_arguments(op: str) -> None:
    """Inductor of torch 2.13 fails on ops with one result and only None to write to."""
    schema = _overload(op)._schema
    written = [str(argument.type) for argument in schema.arguments if argument.is_write]
    assert len(schema.returns) > 1 or not written or any("Optional" not in kind for kind in written)


@pytest.mark.slow
def test_compaction_of_nothing() -> None:
    """Inductor accepts an empty written list."""
    given = (int32([[1, 3, 0], [4, 2, -1]]), int32([4, 3]), int32([[0, 2, 4], [0, 2, -1]]), int32([2, 1]))
    assert torch.equal(torch.compile(compact_kv, fullgraph=True)([], *given), compact_kv([], *given))


@pytest.mark.parametrize("made", [list, torch.clone])
def test_caches_of_one_tensor(made: Callable[[Tensor], Any]) -> None:
    """torch 2.13 loses dynamic offsets of views made inside or outside compiled code."""
    rows, slots = torch.randn(2, 3, 2, 16), torch.tensor([0, 7, -1])
    expected = torch.randn(2, 6, 4, 2, 16)
    caches = made(expected.clone())

    def step(caches: Any) -> None:
        append_kv(*rows, *caches, slots)

    with torch._inductor.config.patch(fallback_by_default=True):
        torch.compile(step, fullgraph=True, dynamic=True)(caches)
    step(expected)
    assert all(map(torch.equal, caches, expected))


def same(found: list[Tensor], expected: list[Tensor]) -> bool:
    return all(a.dtype == b.dtype and torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_dynamic_shapes(name: str) -> None:
    call = calls.make(name)
    assert same(call.results(torch.compile(call.function, fullgraph=True, dynamic=True)), call.results())


class OfTensors(nn.Module):
    """Wraps calls as a module with their tensors as inputs."""

    def __init__(self, *made: Call) -> None:
        super().__init__()
        self.calls = made

    def tensors(self) -> tuple[Tensor, ...]:
        return tuple(t for call in self.calls for t in tensors_of(call.on_memory(Tensor.clone).arguments))

    def forward(self, *tensors: Tensor) -> list[Tensor]:
        rest, results = iter(tensors), list[Tensor]()
        for call in self.calls:
            arguments = mapped(call.arguments, lambda _: next(rest))
            results += tensors_of([call.function(**arguments), *(arguments[key] for key in call.written)])
        return results

    def exported(self, *, dynamic: bool) -> torch.export.ExportedProgram:
        sizes = tuple({dim: torch.export.Dim.AUTO for dim in range(t.dim())} for t in self.tensors())
        return torch.export.export(self, self.tensors(), dynamic_shapes={"tensors": sizes} if dynamic else None)


@pytest.mark.slow
@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_export(name: str, dynamic: bool) -> None:
    module = OfTensors(calls.make(name))
    assert same(module.exported(dynamic=dynamic).module()(*module.tensors()), module(*module.tensors()))


@pytest.mark.slow
@pytest.mark.parametrize("first", range(0, len(NAMES), 12))
def test_aot_inductor(first: int, tmp_path: Path) -> None:
    """Packages several calls, since one takes a minute; each tensor owns its memory, as torch 2.13 loses an input's
    offset under dynamic shapes."""
    module = OfTensors(*(calls.make(name).mapped(Tensor.clone) for name in NAMES[first : first + 12]))
    package = torch._inductor.aoti_compile_and_package(
        module.exported(dynamic=True), package_path=str(tmp_path / "ops.pt2")
    )
    assert same(torch._inductor.aoti_load_package(package)(*module.tensors()), module(*module.tensors()))


@pytest.mark.slow
@pytest.mark.parametrize("dynamic", [False, True])
def test_the_readmes_step(dynamic: bool) -> None:
    """Trees and tensors are made outside compiled code."""
    lines = python_blocks(ROOT / "README.md")[0].splitlines()
    outside = [line for line in lines if re.search(r"^import|torch\.|TreeBatch", line)]
    step = "\n ".join(line for line in lines if line not in outside)
    names: dict[str, Any] = {}
    exec("\n".join([*outside, f"def step():\n {step}\n return out, verdict, new_lens, k_cache, v_cache"]), names)
    cache = names["k_cache"]._base
    before, expected = cache.clone(), [t.clone() for t in tensors_of(names["step"]())]
    cache.copy_(before)
    assert same([*tensors_of(torch.compile(names["step"], fullgraph=True, dynamic=dynamic)())], expected)


@pytest.mark.slow
def test_the_integration_pages_pass() -> None:
    pytest.importorskip("transformers")
    names: dict[str, Any] = {}
    for block in python_blocks(ROOT / "docs" / "integration.md")[:4]:
        exec(block, names)
    params, texts = names["pt"].SamplingParams(temperature=0.0), []
    for compiled in (False, True):
        server = names["Server"](names["model"], num_pages=16, params=params)
        server.decode()  # allocates the caches
        server.captured = True  # fixed shapes
        if compiled:
            server.run = torch.compile(server.decode, fullgraph=True)
        texts.append([request.tokens for request in names["serve"](server)])
    assert texts[0] == texts[1]
