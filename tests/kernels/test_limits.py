"""CUDA runtime calls by the host code, recorded for each kind of GPU without one (support/recorded.py).

Launches must fit the GPU, the kernel ("too many resources requested"), graph capture and the caller's stream; failed
calls must raise and leave no trace.
"""

from __future__ import annotations

import re
import tempfile
from collections import Counter
from dataclasses import replace
from functools import lru_cache
from pathlib import Path

import pytest
from support.recorded import DEVICES, HOPPER, Asked, Device, Launch, Recorded, recorded_once

from pagedtree import _C
from pagedtree.tools.cubin import Kernel, cuda_library, extract_cubins, find_cuobjdump, read_kernels, read_launch_bounds

LIBRARY = cuda_library()
pytestmark = [
    pytest.mark.skipif(LIBRARY is None, reason="built without CUDA"),
    pytest.mark.skipif(find_cuobjdump() is None, reason="no cuobjdump here"),
]
ARCHITECTURES = [
    "sm_" + architecture.replace("+PTX", "").replace(".", "") for architecture in _C.build_info()["cuda_architectures"]
]
REGISTERS = 65536  # per SM and per CTA
MOST_THREADS, GRID_X, GRID_YZ = 1024, 2**31 - 1, 65535


# Allowed during capture: these neither wait, allocate nor query a stream.
ALLOWED_IN_CAPTURE = {
    "cuTensorMapEncodeTiled",
    "cudaDeviceGetAttribute",
    "cudaDriverGetVersion",
    "cudaFuncGetAttributes",
    "cudaFuncSetAttribute",
    "cudaGetDevice",
    "cudaGetDeviceProperties",
    "cudaGetDriverEntryPointByVersion",
    "cudaOccupancyMaxActiveClusters",
    "launch",
}


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Recorded:
    return recorded_once(tmp_path_factory.getbasetemp())


@lru_cache
def kernels(architecture: str) -> dict[str, Kernel]:
    assert LIBRARY is not None
    return {kernel.symbol: kernel for kernel in read_kernels(LIBRARY) if kernel.architecture == architecture}


@lru_cache
def launch_bounds(architecture: str) -> dict[str, int]:
    assert LIBRARY is not None
    with tempfile.TemporaryDirectory() as folder:
        cubins = extract_cubins(LIBRARY, architecture.removesuffix("a"), Path(folder))
        return {symbol: most for cubin in cubins for symbol, most in read_launch_bounds(cubin).items()}


def architecture_of(device: Device) -> str:
    """Returns the device's architecture, else the build's last, with the same bounds."""
    names = [f"sm_{device.capability}a", f"sm_{device.capability}"]
    return next((architecture for architecture in names if architecture in ARCHITECTURES), ARCHITECTURES[-1])


def faults_of(launch: Launch, kernel: Kernel, bound: int, device: Device) -> list[str]:
    """Lists device limits that the launch breaks."""
    warps = -(-launch.threads // 32)
    reserved = 1024 if int(kernel.architecture[3:].rstrip("a")) >= 90 else 0
    shared_bytes = launch.shared_bytes + max(kernel.shared_bytes - reserved, 0)
    has_clusters = device.largest_cluster > 1
    limits = {
        "threads": 0 < launch.threads <= min(bound, MOST_THREADS),
        "registers": warps * 32 * -(-kernel.registers // 8) * 8 <= REGISTERS,
        "shared memory": shared_bytes <= device.block_kilobytes << 10,
        "grid": 0 < launch.grid[0] <= GRID_X and all(0 < axis <= GRID_YZ for axis in launch.grid[1:]),
        "cluster": launch.cluster == 1 or (has_clusters and launch.cluster <= device.largest_cluster),
        "whole clusters": launch.grid[0] % launch.cluster == 0,
        "early start": not launch.early or device.capability >= 90,
    }
    return [limit for limit, is_kept in limits.items() if not is_kept]


@pytest.mark.parametrize("device", DEVICES, ids=lambda device: str(device.capability))
def test_launches_keep_within_the_device(recorded: Recorded, device: Device) -> None:
    architecture = architecture_of(device)
    of_build, bounds = kernels(architecture), launch_bounds(architecture)
    broken = [
        (launch, faults)
        for launch in recorded.launches(device.capability)
        if (faults := faults_of(launch, of_build[launch.kernel], bounds[launch.kernel], device))
    ]
    assert not broken


@pytest.mark.parametrize("device", DEVICES, ids=lambda device: str(device.capability))
def test_every_kernel_is_launched(recorded: Recorded, device: Device) -> None:
    """Exceptions: wgmma kernels off Hopper, and wide tiles of 113 KB on small SMs."""
    left_out = [] if device == HOPPER else ["_sm90_kernel"]
    if device.block_kilobytes < 113:
        left_out += ["Li576ELi32ELi512E"]
    symbols = {symbol for symbol in kernels(architecture_of(device)) if not any(part in symbol for part in left_out)}
    assert symbols == {launch.kernel for launch in recorded.launches(device.capability)}
    if device.largest_cluster > 1:
        assert Counter(launch.cluster for launch in recorded.launches(device.capability))[device.largest_cluster] > 0


def test_each_broken_limit_would_be_found(recorded: Recorded) -> None:
    """Each change of the launch with most shared memory breaks its limit."""
    architecture = architecture_of(HOPPER)
    launch = max(recorded.launches(90), key=lambda launch: launch.shared_bytes)
    kernel, bound = kernels(architecture)[launch.kernel], launch_bounds(architecture)[launch.kernel]
    assert faults_of(launch, kernel, bound, HOPPER) == []
    threads = launch.block[0]
    wrong = {
        "threads": (launch, kernel, bound - 32, HOPPER),
        "registers": (launch, replace(kernel, registers=REGISTERS // threads + 8), bound, HOPPER),
        "shared memory": (replace(launch, shared_bytes=HOPPER.block_kilobytes * 1024 + 1), kernel, bound, HOPPER),
        "grid": (replace(launch, grid=(1, GRID_YZ + 1, 1)), kernel, bound, HOPPER),
        "cluster": (replace(launch, cluster=32, grid=(32, 1, 1)), kernel, bound, HOPPER),
        "whole clusters": (replace(launch, cluster=8, grid=(12, 1, 1)), kernel, bound, HOPPER),
        "early start": (replace(launch, early=True, shared_bytes=0), kernel, bound, DEVICES[0]),
    }
    for limit, (variant, of_kernel, most, device) in wrong.items():
        assert faults_of(variant, of_kernel, most, device) == [limit]
    static = replace(
        kernel, shared_bytes=kernel.shared_bytes + (HOPPER.block_kilobytes << 10) - launch.shared_bytes + 1
    )
    assert faults_of(launch, static, bound, HOPPER) == ["shared memory"]


def wrong_calls(asked: list[Asked]) -> list[Asked]:
    """Lists refused calls, calls forbidden in capture, and launches off the caller's stream."""
    launches = [call for call in asked if call.name == "launch"]
    elsewhere = [
        call for call in launches if Launch.read(call).stream != "caller" and "instruction" not in call.arguments[0]
    ]
    return [call for call in asked if call.answer != "ok" or call.name not in ALLOWED_IN_CAPTURE] + elsewhere


@pytest.mark.parametrize("device", DEVICES, ids=lambda device: str(device.capability))
def test_calls_are_right_and_could_be_captured(recorded: Recorded, device: Device) -> None:
    """Shared memory beyond 48 KB and clusters beyond 8 CTAs are requested before launches that need them."""
    calls = recorded.asked(device.capability)
    assert len(calls) > 500 and wrong_calls(calls) == []
    # A GPU refuses only fp32 recurrent layers.
    assert all(
        re.search("expected dtype torch.float16 or torch.bfloat16.*got torch.float32$", error)
        for error in recorded.errors[str(device.capability)]
    )


def test_each_wrong_call_would_be_found(recorded: Recorded) -> None:
    launch = next(one for one in recorded.asked(90) if one.name == "launch" and "instruction" not in one.arguments[0])
    wrong = [
        replace(launch, answer="refused"),
        replace(launch, name="cudaMemcpy"),
        replace(launch, arguments=(*launch.arguments[:-1], "other")),
    ]
    assert [wrong_calls([launch, one]) for one in wrong] == [[one] for one in wrong]


def test_a_step_asks_for_the_same_each_time(recorded: Recorded) -> None:
    """Launches ignore tensors' values, so one graph serves all steps."""
    assert len(recorded.steps) == 8
    for kind, (first, *others) in recorded.steps.items():
        launches = [[line for line in step if line.startswith("launch")] for step in (first, *others)]
        assert len(launches[0]) >= 7 and all(step == launches[0] for step in launches), kind
        assert wrong_calls([Asked.read(line) for line in first]) == [], kind
        asks_nothing = {"launch", "cudaGetDevice", "cuTensorMapEncodeTiled"}
        assert all(Asked.read(line).name in asks_nothing for step in others for line in step), kind


def test_failing_cuda_calls_raise(recorded: Recorded) -> None:
    """All raise but clusters of 16 CTAs, whose refusal is cleared; the same call then succeeds."""
    told, refusals = [], []
    for op, line, error, is_read, error_behind in recorded.failures:
        (told if error.startswith("RuntimeError: CUDA: ") else refusals).append(Asked.read(line))
        assert is_read and not error_behind, (op, line, error_behind)
    assert {call.name for call in told} == ALLOWED_IN_CAPTURE - {
        "cuTensorMapEncodeTiled",
        "cudaGetDriverEntryPointByVersion",
        "cudaOccupancyMaxActiveClusters",
    }
    assert {call.name for call in refusals} == {"cudaFuncSetAttribute", "cudaOccupancyMaxActiveClusters"}
    assert len(told) > 200


def test_threads_do_not_take_shared_memory_from_each_other(recorded: Recorded) -> None:
    assert recorded.threads == []


def test_tensor_maps_are_kept_for_the_last_caches(recorded: Recorded) -> None:
    assert recorded.maps == [1, 0, 1, 4100, 1]


def test_auto_takes_wgmma_where_its_self_test_has_passed(recorded: Recorded) -> None:
    kernels_of = {
        name: [Launch.read(Asked.read(line)).kernel for line in lines if line.startswith("launch")]
        for name, (lines, error) in recorded.engines.items()
        if not error
    }
    by_wgmma = {name: any("attention_sm90_kernel" in kernel for kernel in of) for name, of in kernels_of.items()}
    assert by_wgmma == {"auto, not tested": False, "auto, passed": True, "wgmma": True, "wgmma, no maps": True}
    assert kernels_of["auto, passed"] == kernels_of["wgmma"] == kernels_of["wgmma, no maps"]


def test_a_tensor_map_that_the_driver_refuses_is_done_without(recorded: Recorded) -> None:
    lines, _ = recorded.engines["wgmma, no maps"]
    maps = [Asked.read(line) for line in lines if line.startswith("cuTensorMapEncodeTiled")]
    assert [call.answer for call in maps] == ["fails", "ok"]  # K, then V


def test_error_names_the_earlier_kernel(recorded: Recorded) -> None:
    lines, error = recorded.engines["wgmma, an earlier kernel's error"]
    assert lines[-1].endswith("fails")
    assert error.startswith("RuntimeError: CUDA: launch of ") and "planted (in a kernel before" in error
    errors = [error for _, _, error, *_ in recorded.failures if "in a kernel before" in error]
    assert not errors
