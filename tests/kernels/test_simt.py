"""simt finds planted bugs in small kernels (tests/simt); its order of execution; refused settings.

Plain runs find bugs that show in some order, AddressSanitizer accesses out of bounds, ThreadSanitizer races in any
order. `make test-simt` builds the sanitized programs.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from pagedtree import append_kv
from pagedtree.testing import backends, use_backend

TREE = Path(__file__).resolve().parents[2] / "build" / f"cmake-{sys.implementation.cache_tag}"
ORDERS = ["forward", "reverse", "random:7"]
WRONG, IN_FLIGHT, RACE = "CAUGHT: wrong result", "exits with cp.async in flight", "ThreadSanitizer: data race"
UNFENCED = "wgmma at hopper.cuh:.*no fence_proxy_async since the write to shared address"

# Bug -> message of a plain run in some order; "": ThreadSanitizer only.
BUGS = {
    "NoWait": WRONG,
    "ShortWait": IN_FLIGHT,
    "NoCommit": IN_FLIGHT,
    "NoBarrierBeforeRead": WRONG,
    "NoBarrierBeforeRefill": WRONG,
    "TableOverrun": WRONG,
    "NoSwizzle": "bank conflicts: ldmatrix takes 8.0",
    "DivergentBarrier": "barrier divergence, others are in __syncthreads at scores.cuh:",
    "ShuffleLacksLanes": "__shfl_xor_sync at scores.cuh:.*warp divergence",
    "EarlyExit": "exits while others wait in __syncthreads",
    "MisalignedCopy": "cp.async at scores.cuh:.*misaligned global address",
    "SharedTooSmall": "the launch asked for less shared memory",
    "MergeByFirst": WRONG,
    "MergeRace": "",
    "NoClusterStart": "mapa at sums.cuh:.*before the cluster met",
    "NoClusterBarrier": WRONG,
    "NoClusterEnd": "mapa at sums.cuh:.*has ended",
    "NoEmptyWait": "more arrivals than the mbarrier was initialised for",
    "ShortExpect": "deadlock: thread 0.. in mbarrier wait at hopper.cuh:",
    "NoWgmmaWait": WRONG,
    "BufferBackEarly": WRONG,
    "UnawaitedLoad": "exit with TMA loads in flight",
    "NoPhaseFlip": "deadlock: thread 128.. in mbarrier wait at hopper.cuh:",
    "StageBackEarly": UNFENCED,  # the refill follows the fence
    "NoProxyFence": UNFENCED,
}
# Found by a sanitizer in any order.
RACES = "NoBarrierBeforeRead NoBarrierBeforeRefill MergeRace NoClusterBarrier BufferBackEarly StageBackEarly"
BY_SANITIZER = {"asan": {"TableOverrun": "AddressSanitizer"}, "tsan": dict.fromkeys(RACES.split(), RACE)}
PROGRAMS = [
    pytest.param("simt_selftest", id="plain"),
    pytest.param("simt_selftest_asan", id="asan", marks=pytest.mark.slow),
    pytest.param("simt_selftest_tsan", id="tsan", marks=pytest.mark.slow),
]


def say(program: str, bug: str, order: str) -> str:
    """Returns the output; "" for no finding."""
    if "simt" not in backends() or not (TREE / program).exists():
        pytest.skip(f"{program} was not built: make test CUDA=1, or make test-simt")
    done = subprocess.run([TREE / program, bug, order], text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    assert (done.returncode != 0) == bool(done.stdout), done.stdout
    return done.stdout


@pytest.mark.parametrize("program", PROGRAMS)
def test_right_kernels_pass(program: str) -> None:
    assert [say(program, "None", order) for order in ORDERS] == [""] * len(ORDERS)
    assert subprocess.check_output([TREE / program, "list"], text=True).split() == ["None", *BUGS]


@pytest.mark.parametrize("bug", BUGS)
@pytest.mark.parametrize("program", PROGRAMS)
def test_planted_bug_is_found(program: str, bug: str) -> None:
    variant = program.removeprefix("simt_selftest").strip("_")
    expected = BY_SANITIZER.get(variant, {}).get(bug)
    if expected:
        assert all(re.search(expected, say(program, bug, order)) for order in ORDERS)
    elif BUGS[bug] and variant != "tsan":
        assert any(re.search(BUGS[bug], say(program, bug, order)) for order in ORDERS)
    elif variant == "tsan":
        assert any(say(program, bug, order) for order in ORDERS)
    else:
        assert [say(program, bug, order) for order in ORDERS] == [""] * len(ORDERS)


@pytest.mark.skipif("simt" not in backends(), reason="built without simt")
@pytest.mark.parametrize("order", ["", "backward", "random:", "random:x", "random:3x"])
def test_unknown_order_is_refused(order: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PAGEDTREE_SIMT_ORDER", order)
    cache, rows = torch.zeros((2, 3, 4, 2, 8)), torch.randn((5, 2, 8))
    with use_backend("simt"), pytest.raises(RuntimeError, match="PAGEDTREE_SIMT_ORDER: expected forward, reverse"):
        append_kv(rows, rows, cache[0], cache[1], torch.arange(5))
    assert not cache.any()


@pytest.mark.parametrize("name", [name for name in ("none", "simt", "cuda") if name not in backends()])
def test_absent_backend_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match=f"got {name}"), use_backend(name):
        pass
