"""Which caches the kernels for wgmma read by TMA, and by which maps, against libcu++'s make_tma_descriptor.

Its checks run on a CPU; what it says of a list of caches is in tests/cute/vectors.npz.xz (`make witness`).
"""

from __future__ import annotations

import ctypes
import mmap
from typing import Any

import pytest
import torch
from cute_case import VECTORS
from simt_case import intercepted_launches, simt_library

from pagedtree import tree_attention
from pagedtree.check.case import environment
from pagedtree.testing import backends, use_backend

SIMT = simt_library()
pytestmark = pytest.mark.skipif(SIMT is None or "simt" not in backends(), reason="built without simt")
# Addresses alone: nothing is ever written there, and no kernel runs.
NO_RESERVE = 0x4000  # Linux's MAP_NORESERVE
MEMORY = mmap.mmap(-1, 1 << 42, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | NO_RESERVE)


class TensorMap(ctypes.Structure):
    """As csrc/simt/ptx_sm90_simt.h has it."""

    _fields_ = (
        ("base", ctypes.c_uint64), ("element_bytes", ctypes.c_uint32), ("sizes", ctypes.c_uint64 * 4),
        ("strides", ctypes.c_uint64 * 3), ("box", ctypes.c_uint32 * 4), ("unused", ctypes.c_uint8 * 40),
    )  # fmt: skip


class CacheMaps(ctypes.Structure):
    """The kernels' last parameter: csrc/cuda/attention/stage_sm90.cuh."""

    _fields_ = (("k", TensorMap), ("v", TensorMap), ("box", ctypes.c_int), ("unused", ctypes.c_uint8 * 124))


def maps_of(cache: list[int]) -> CacheMaps | None:
    """Those that a call gets for a cache, a row of `maps.caches`; None where the op refuses the cache."""
    address, columns, slots, heads, pages, _, slot_stride, head_stride, page_stride, _ = cache
    launches: list[bytes] = []

    def execute(kernel: Any, grid: Any, block: Any, shared_bytes: int, params: int, param_bytes: int) -> int:
        launches.append(ctypes.string_at(params, param_bytes))
        return 1

    memory = torch.frombuffer(MEMORY, dtype=torch.bfloat16)
    strides = page_stride, slot_stride, head_stride, 1
    k_cache = memory.as_strided((pages, slots, heads, columns), strides, (address - 4096) // 2)
    ends, page_table = torch.tensor([0, 1], dtype=torch.int32), torch.zeros(1, pages, dtype=torch.int32)
    q = torch.zeros(1, 64 * heads, columns).bfloat16()
    assert SIMT is not None
    with use_backend("simt"), intercepted_launches(SIMT, execute), environment("PAGEDTREE_ENGINE", "wgmma"):
        try:
            tree_attention(q, k_cache, k_cache[..., :512], page_table, ends[1:], ends, max_seqlen_q=1)
        except ValueError as error:
            assert "multiples of 16 bytes" in str(error)
            return None
    _, of_attention = launches  # after the plan
    return CacheMaps.from_buffer_copy(of_attention[-ctypes.sizeof(CacheMaps) :])


def test_maps_are_those_of_libcudacxx() -> None:
    """Where a size is 1, its stride means nothing, and libcu++ wants 0; a map for the driver has 16 bytes there."""
    counts = {"made": 0, "refused": 0}
    for cache, (is_made, *words) in zip(VECTORS["maps.caches"].tolist(), VECTORS["maps.made"].tolist(), strict=True):
        maps = maps_of(cache)
        assert (maps is not None and maps.box > 0) == bool(is_made), cache
        counts["made" if is_made else "refused"] += 1
        if maps is None or maps.box == 0:
            continue
        sizes, strides, box = words[:4], words[4:7], words[7:]
        expected = [16 if size == 1 else stride for size, stride in zip(sizes[1:], strides, strict=True)]
        latent = cache[1] == 576
        for found in [maps.k] if latent else [maps.k, maps.v]:
            assert (list(found.sizes), list(found.strides), list(found.box)) == (sizes, expected, box), cache
            assert found.base - ctypes.addressof(ctypes.c_char.from_buffer(MEMORY)) == cache[0] - 4096
            assert (found.element_bytes, maps.box) == (2, box[1])
    assert counts["made"] > 250 and counts["refused"] > 15
