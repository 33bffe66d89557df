"""Valid calls of every raw op, recorded from `calls`."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import calls
import calls.ops
from calls import Call, tensors_of
from pagedtree.testing import use_backend


@dataclass
class RawCall(Call):
    """A call of an op; absent arguments have defaults; `name` includes an overload: "tree_attention.out"."""

    name: str = ""

    def __call__(self, **changes: Any) -> Any:
        return self.function(**{**self.arguments, **changes})

    def tensors(self) -> dict[str, Tensor]:
        return {name: value for name, value in self.arguments.items() if isinstance(value, Tensor)}

    def tensor_arguments(self) -> list[str]:
        """Lists arguments of type Tensor or optional Tensor."""
        return [argument.name for argument in self.function._schema.arguments if "Tensor" in str(argument.type)]

    def named_results(self) -> dict[str, Tensor]:
        """Returns results and tensor arguments of a copy's call."""
        call = self.on_memory(Tensor.clone)
        found = {"result": call(), **call.arguments}
        return {f"{name}[{i}]": t for name, value in found.items() for i, t in enumerate(tensors_of(value))}


class _Recorder(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.calls: list[RawCall] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        schema = func._schema
        if func.namespace == "pagedtree":
            arguments = {argument.name: value for argument, value in zip(schema.arguments, args, strict=False)}
            name = schema.name.partition("::")[2] + (f".{schema.overload_name}" if schema.overload_name else "")
            self.calls.append(RawCall(func, copy.deepcopy({**arguments, **(kwargs or {})}), name=name))
        return func(*args, **(kwargs or {}))


def _kind(call: RawCall) -> str:
    """Returns a call's present arguments and types, without numbers."""
    return str((call.name, [(key, _form(value)) for key, value in call.arguments.items() if value is not None]))


def _form(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.dtype, value.dim()
    return value if isinstance(value, (bool, str)) else None


@cache
def _taken_down() -> list[RawCall]:
    records: dict[str, RawCall] = {}
    # Only these modules: `generate` reads unwritten pages.
    for name in calls.names("calls.ops", "calls.recurrent"):
        call = calls.make(name)
        with use_backend("cpu"), _Recorder() as recorder:  # where its tensors are
            call.function(**call.arguments)
        for raw in (raw for raw in recorder.calls if not raw.name.startswith("_")):
            records.setdefault(_kind(raw), raw)
    calls.ops.one_rank.cache_clear()
    dist.destroy_process_group()  # other tests make theirs
    return [*records.values()]


def raw_calls(device: torch.device | str = "cpu") -> list[RawCall]:
    """Returns at least one call of each op on `device`."""
    return [call.on_memory(lambda memory: memory.to(device)) for call in copy.deepcopy(_taken_down())]


def raw_call(name: str) -> RawCall:
    """Returns an op's first call."""
    return next(call for call in raw_calls() if call.name == name)


def op_names() -> list[str]:
    """Lists all raw ops but private ones."""
    names = (name.split("::") for name in torch._C._dispatch_get_all_op_names())
    return sorted(name for namespace, name in names if namespace == "pagedtree" and not name.startswith("_"))
