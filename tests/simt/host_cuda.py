"""A pytest plugin for `run_host_cuda.sh`: Torch's "cuda" in host memory (host_cuda.cpp)."""

from __future__ import annotations

import ctypes
import functools
import os

ctypes.CDLL(os.environ["HOST_CUDA"], ctypes.RTLD_GLOBAL)  # Torch queries hooks once, early

import torch  # noqa: E402

ANSWERS = {
    torch: {"compile": functools.partial(torch.compile, backend="aot_eager")},  # inductor would target a GPU
    torch.cuda: {
        "_exchange_device": lambda device: 0,
        "_initialized": True,
        "_lazy_init": lambda: None,
        "_maybe_exchange_device": lambda device: 0,
        "current_device": lambda: 0,
        "default_generators": (torch.Generator(),),
        "device_count": lambda: 1,
        "is_available": lambda: True,
        "is_current_stream_capturing": lambda: False,
        "is_initialized": lambda: True,
        "synchronize": lambda device=None: None,
    },
    torch._C: {
        "_cuda_getDevice": lambda: 0,
        "_cuda_setDevice": lambda device: None,
    },
}
for module, answers in ANSWERS.items():
    for name, answer in answers.items():
        setattr(module, name, answer)
