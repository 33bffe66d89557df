"""On PYTHONPATH, runs Triton kernels as NumPy on CPU tensors, for vLLM's runner V2."""

from __future__ import annotations

import inspect
import os
from typing import Any

os.environ["TRITON_INTERPRET"] = "1"
# vLLM compiles small C++ functions for minutes while another rank waits, and asks Triton about it.
os.environ["TORCH_COMPILE_DISABLE"] = "1"

import numpy as np
import torch
import triton.language as tl
import triton.runtime.interpreter as interpreter
from triton.backends import Backend, backends
from triton.backends.compiler import GPUTarget
from triton.backends.driver import DriverBase


class CpuDriver(DriverBase):
    """Answers vLLM's questions to a driver."""

    def __init__(self) -> None:
        pass

    @staticmethod
    def is_active() -> bool:
        return True

    def map_python_to_cpp_type(self, ty: str) -> str:
        return ty

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cpu", 0, 1)

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")

    def get_benchmarker(self) -> Any:
        raise NotImplementedError


backends.clear()
backends["cpu"] = Backend(compiler=None, driver=CpuDriver)  # type: ignore[arg-type]


def with_bool_masks(name: str, index: int) -> None:
    """Converts masks to bool, which the interpreter needs and compiled Triton does not."""
    access = getattr(interpreter.InterpreterBuilder, name)

    def wrapped(self: Any, *arguments: Any) -> Any:
        mask = arguments[index]
        is_set = interpreter.TensorHandle(np.asarray(mask.data).astype(bool), mask.dtype)
        return access(self, *arguments[:index], is_set, *arguments[index + 1 :])

    setattr(interpreter.InterpreterBuilder, name, wrapped)


def with_known_builtins(*packages: Any) -> None:
    """Finds builtins once instead of at each launch and call."""
    builtins = {
        package: [pair for pair in inspect.getmembers(package) if tl.core.is_builtin(pair[1])] for package in packages
    }

    def patch_builtin(package: Any, builder: Any, scope: Any) -> None:
        for name, member in builtins[package]:
            if getattr(package, name) is member:
                interpreter._patch_attr(package, name, member, builder, scope)

    interpreter._patch_builtin = patch_builtin


with_known_builtins(tl, tl.core, tl.tensor, tl.math, tl.core.tensor_descriptor_base)
with_bool_masks("create_masked_load", 1)
with_bool_masks("create_masked_store", 2)
