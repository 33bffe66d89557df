"""A pytest plugin: Torch's device "cuda" in the host's memory (simt/host_cuda.cpp). For `run_host_cuda.sh`."""

from __future__ import annotations

import ctypes
import functools
import os

ctypes.CDLL(os.environ["HOST_CUDA"], ctypes.RTLD_GLOBAL)  # Torch asks for a device's hooks only once, early

import torch  # noqa: E402

ANSWERS = {
    torch: {"compile": functools.partial(torch.compile, backend="aot_eager")},  # inductor would compile for a GPU
    torch.cuda: {
        "_initialized": True,
        "_lazy_init": lambda: None,
        "current_device": lambda: 0,
        "default_generators": (torch.Generator(),),
        "device_count": lambda: 1,
        "is_available": lambda: True,
        "is_current_stream_capturing": lambda: False,
        "is_initialized": lambda: True,
        "synchronize": lambda device=None: None,
    },
    torch._C: {
        "_cuda_exchangeDevice": lambda device: 0,
        "_cuda_getDevice": lambda: 0,
        "_cuda_maybeExchangeDevice": lambda device: 0,
        "_cuda_setDevice": lambda device: None,
    },
}
for module, answers in ANSWERS.items():
    for name, answer in answers.items():
        setattr(module, name, answer)
