"""Every public function and op: compiled, on fake tensors, under autograd, with wrong types."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import calls
import pytest
import torch
from calls import Call, mapped, tensors_of
from calls.raw import op_names, raw_calls
from support.devices import default_dtype, slow_on_simt
from torch import Tensor

import pagedtree
from pagedtree._gradients import is_of_integers

pytestmark = pytest.mark.usefixtures("one_rank")
NAMES = calls.names("calls.ops", "calls.recurrent")
TRACEABLE = [name for name in NAMES if not calls.make(name).is_for_host]


def call_on(device: torch.device, name: str) -> Call:
    return calls.make(name).on_memory(lambda memory: memory.to(device))


def form(t: Tensor) -> tuple[Any, ...]:
    return t.shape, t.dtype, t.stride()


def test_every_op_has_a_call() -> None:
    assert {call.name for call in raw_calls()} == set(op_names())


@slow_on_simt
@pytest.mark.parametrize("op", op_names())
def test_opcheck(backend: str, device: torch.device, op: str) -> None:
    """Ops mutate as their schemas say, and fake implementations infer shapes, also symbolic ones."""
    samples = [call for call in raw_calls(device) if call.name == op]
    for call in samples[-1:] if op.endswith("_shards") else samples:
        has_fp8 = any(t.dtype == torch.float8_e4m3fn for t in tensors_of(call.arguments))
        tests = ("test_faketensor",) if has_fp8 else ("test_schema", "test_autograd_registration", "test_faketensor")
        if call is samples[-1]:  # has all arguments
            tests += ("test_aot_dispatch_dynamic",)
        torch.library.opcheck(call.function, (), call.arguments, test_utils=tests)


@pytest.mark.parametrize("name", [name for name in NAMES if name.startswith("sharded_")])
def test_shards_of_the_whole_ops(name: str) -> None:
    """shards= gives the verdict of the name in `distributed`, which refuses to take this rank's columns for all."""
    call, op = calls.make(name), name.removeprefix("sharded_")
    found = getattr(pagedtree, op)(**call.arguments, shards=calls.ops.one_rank())
    assert all(map(torch.equal, tensors_of(found), call.results()))
    with pytest.raises(TypeError, match="shards: expected a VocabShards"):
        getattr(pagedtree.distributed, op)(**call.arguments)


@slow_on_simt
@pytest.mark.parametrize("name", TRACEABLE)
def test_compiled(backend: str, device: torch.device, name: str) -> None:
    call = call_on(device, name)
    torch.compiler.reset()  # one function's cache is smaller than the number of calls
    compiled = torch.compile(call.function, fullgraph=True)
    with torch._inductor.config.patch(fallback_by_default=True):  # torch's ops compile for minutes
        results = call.results(compiled)
    for found, expected in zip(results, call.results(), strict=True):
        assert found.dtype == expected.dtype and torch.equal(found, expected)


@pytest.mark.parametrize("name", NAMES)
def test_under_another_default_dtype(name: str) -> None:
    call = calls.make(name)
    expected = call.results()
    with default_dtype(torch.bfloat16):
        found = call.results()
    assert [*map(form, found)] == [*map(form, expected)] and all(map(torch.equal, found, expected))


@pytest.mark.parametrize("name", TRACEABLE)
def test_gradients(backend: str, device: torch.device, name: str) -> None:
    """Forward works, backward is refused, integer outputs require no grad."""
    call = call_on(device, name)
    arguments = in_graph(call, call.written)
    has_floats = any(t.requires_grad for t in tensors_of(arguments))
    for t in tensors_of([call.function(**arguments), *(arguments[key] for key in call.written)]):
        assert t.requires_grad == (t.is_floating_point() and has_floats)
        if t.requires_grad:
            message = f"^{call.function.__name__}: has no gradient: pagedtree's ops are for inference only"
            with pytest.raises(RuntimeError, match=message):
                t.float().sum().backward(retain_graph=True)
    with torch.no_grad():
        assert not any(t.requires_grad for t in tensors_of(call.function(**in_graph(call))))


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, torch.enable_grad])
@pytest.mark.parametrize("name", [name for name in TRACEABLE if calls.make(name).written])
def test_versions(backend: str, device: torch.device, name: str, mode: Callable[[], Any]) -> None:
    """Exactly the written tensors get a new version."""
    call = call_on(device, name).on_memory(Tensor.clone)
    ids = {id(t) for key in call.written for t in tensors_of(call.arguments[key])}
    tensors = [*tensors_of(call.arguments)]
    before = [t._version for t in tensors]
    with mode():
        call.function(**call.arguments)
    for t, version in zip(tensors, before, strict=True):
        assert (t._version > version) == (id(t) in ids)


def in_graph(call: Call, written: tuple[str, ...] = ()) -> dict[str, Any]:
    """Copies arguments with requires_grad; `written` ones are no leaves, as in-place ops require."""

    def leaf(t: Tensor) -> Tensor:
        return t.requires_grad_() if t.is_floating_point() else t

    arguments = call.on_memory(Tensor.clone).arguments
    for key in arguments:
        if key in written:
            arguments[key] = mapped(arguments[key], lambda t: leaf(t).clone())
        elif key not in call.written:
            arguments[key] = mapped(arguments[key], leaf)
    return arguments


def test_ops_of_integers(device: torch.device) -> None:
    """These ops neither return nor write floats, so need not refuse gradients."""
    of_floats = set()
    for call in raw_calls(device):
        result = call()
        outputs = [
            call.arguments.get(argument.name) for argument in call.function._schema.arguments if argument.is_write
        ]
        if any(t.is_floating_point() for t in tensors_of([result, outputs])):
            of_floats.add(call.name.partition(".")[0])
    assert of_floats == {op for name in op_names() if not is_of_integers(op := name.partition(".")[0])}


@pytest.mark.parametrize("name", [name for name in TRACEABLE if not calls.make(name).receiver])
def test_mixed_devices(name: str) -> None:
    """One meta tensor is refused; else the fake implementation would run."""
    call = calls.make(name)
    count = len([*tensors_of(call.arguments)])
    for key, value in call.arguments.items():
        moved = [*value[:-1], value[-1].to("meta")] if key == "caches" else mapped(value, lambda t: t.to("meta"))
        if 0 < len([*tensors_of(value)]) < count:
            with pytest.raises(ValueError, match=r"\w+: \w+: expected .*(meta|cpu)"):
                call.function(**{**call.arguments, key: moved})


def nearly(value: Any) -> list[Any]:
    """Returns values of other types, also a right one's containers."""
    if isinstance(value, Tensor):
        return [object(), [value], value.tolist(), 2, 2.0]
    if isinstance(value, list) and isinstance(value[0], Tensor):
        return [object(), value[0]]  # iterable of valid tensors
    return [object(), float(value)] if isinstance(value, int) else [object()]


@pytest.mark.parametrize("name", NAMES)
def test_wrong_types(name: str) -> None:
    """The error names the argument, from Python or from the op."""
    call = calls.make(name)
    for key, value in call.arguments.items():
        if isinstance(value, bool) or key == call.receiver:  # all have truth values
            continue
        for wrong in nearly(value):
            with pytest.raises(TypeError, match=rf"\b{key}\b"):
                call.function(**{**call.arguments, key: wrong})
        try:
            call.function(**{**call.arguments, key: None})
        except ValueError:  # required by another argument
            continue
        except TypeError as error:
            assert re.search(rf"\b{key}\b", str(error)), (key, error)
