"""Descriptors and shared-memory addresses of wgmma kernels, traced on simt, equal CuTe's.

A stage holds K or V of 64 or 128 keys, eight keys' rows at a time, in panels of 64 columns; latent panels follow one
another. tests/cute/vectors.npz.xz (`make witness`) has each step's descriptor and each 16 bytes' address.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import product

import numpy as np
import pytest
import torch
from support.doubles import cute_vectors, simt_library

from pagedtree import tree_attention
from pagedtree.check.case import environment
from pagedtree.check.cases.attention import WGMMA_TILES, Sizes
from pagedtree.testing import backends, use_backend

CUTE = cute_vectors()
SIMT = simt_library()
pytestmark = pytest.mark.skipif(SIMT is None or "simt" not in backends(), reason="built without simt")
PANEL = 64 * 128
KEYS = {(64, True): 64, (64, False): 64, (128, True): 128, (128, False): 64}  # by rows and few columns
WGMMA, COMMIT, TMA, COPY = range(4)  # kinds in csrc/simt/ptx_sm90_simt.cpp
LEFT_IN_REGISTERS, N_MAJOR = 1, 2

Words = list[tuple[int, ...]]  # kind, thread, up to four numbers
INSTANCES = [
    pytest.param(sizes, rows, dtype, fp8, marks=[] if core else pytest.mark.slow)
    for sizes, tiles in [*WGMMA_TILES.items(), ((576, 512), (64,))]
    for rows, (dtype, fp8) in product(tiles, product((torch.bfloat16, torch.float16), (False, True)))
    for core in [dtype == torch.bfloat16 and fp8 <= (sizes[0] == 576) and rows == tiles[-1]]
]


@contextmanager
def refused_maps() -> Iterator[None]:
    library = ctypes.CDLL(str(SIMT))
    library.pagedtree_simt_refuse_maps(1)
    try:
        yield
    finally:
        library.pagedtree_simt_refuse_maps(0)


def written_down(sizes: Sizes, rows: int, dtype: torch.dtype, fp8: bool) -> Words:
    """Traces one tile, two stages (all rows see the first), and two keys.

    Each 16 bytes of a key begin with its number, their index and 1 for V.
    """
    (head_dim, head_dim_v), latent, keys = sizes, sizes[0] != sizes[1], KEYS[rows, sizes[0] < 256]
    halves = torch.zeros(2, 3, keys, 1, head_dim, dtype=torch.int16)
    halves[..., 0::8] = torch.arange(keys, dtype=torch.int16)[:, None, None]
    halves[..., 1::8] = torch.arange(head_dim // 8, dtype=torch.int16)
    halves[1, ..., 2::8] = 1
    caches = torch.zeros(halves.shape).to(torch.float8_e4m3fn) if fp8 else halves.view(dtype)
    k_cache, v_cache = caches[0], caches[0][..., :head_dim_v] if latent else caches[1]
    q = torch.zeros(rows // 16, 16, head_dim, dtype=dtype)
    page_table, ends = torch.arange(3, dtype=torch.int32)[None], torch.tensor([0, rows // 16], dtype=torch.int32)
    seq_lens = torch.tensor([2 * keys + 2], dtype=torch.int32)
    library, found = ctypes.CDLL(str(SIMT)), ctypes.c_void_p()
    library.pagedtree_simt_traced.restype = ctypes.c_size_t
    library.pagedtree_simt_trace(1)
    try:
        with use_backend("simt"), environment("PAGEDTREE_ENGINE", "wgmma"):
            tree_attention(q, k_cache, v_cache, page_table, seq_lens, ends, max_seqlen_q=rows // 16)
        count = library.pagedtree_simt_traced(ctypes.byref(found))
        words = (ctypes.c_uint64 * (6 * count)).from_address(found.value or 0)
        return [tuple(words[i : i + 6]) for i in range(0, len(words), 6)]
    finally:
        library.pagedtree_simt_trace(0)


def multiplications(words: Words) -> list[Words]:
    """Returns each committed wgmma group as (left, right, columns, form)."""
    open_groups: dict[int, Words] = {}
    groups = []
    for kind, thread, *numbers in words:
        if kind == WGMMA:
            open_groups.setdefault(thread, []).append(tuple(numbers))
        elif kind == COMMIT and thread in open_groups:  # skips empty groups
            groups.append(open_groups.pop(thread))
    assert not open_groups
    return groups


def begin_of(descriptors: list[int], steps: np.ndarray, apart: bool, faults: list[str]) -> int:
    """Returns a matrix's start; `apart`: the leading offset matters."""
    fields = np.array([[(d >> shift & 0x3FFF) * 16 for shift in (0, 16, 32)] for d in descriptors])
    begin = int(fields[0, 0] - steps[0, 0])
    fields[:, 0] -= begin
    compared = [0, 1, 2] if apart else [0, 2]
    if fields.shape != steps.shape or (fields != steps)[:, compared].any():
        faults.append(f"descriptors {fields.tolist()} instead of {steps.tolist()}")
    if any(d >> 62 != 1 or d >> 49 & 7 for d in descriptors) or begin % 1024:
        faults.append(f"no 128-byte swizzle, or a matrix that begins at {begin}")
    return begin


def faults_of(words: Words, sizes: Sizes, rows: int) -> list[str]:
    head_dim, head_dim_v = sizes
    latent, keys = head_dim != head_dim_v, KEYS[rows, head_dim < 256]
    of_keys = "_128" if keys == 128 else ""
    q_steps, k_steps = (
        CUTE[f"{name}.steps"].astype(np.int64).reshape(-1, 3) for name in (f"q_{head_dim}", f"k_{head_dim}{of_keys}")
    )
    v_steps = CUTE[f"v_{head_dim_v}{of_keys}.steps"].astype(np.int64).reshape(-1, keys // 16, 3)
    chunks = CUTE[f"k_{head_dim}{of_keys}.chunks"].astype(np.int64).reshape(keys, -1)
    v_chunks = CUTE[f"v_{head_dim_v}{of_keys}.chunks"].astype(np.int64).reshape(keys, -1)
    faults: list[str] = []
    if (chunks[:, : head_dim_v // 8] != v_chunks).any():
        faults.append("K and V lie in different ways")
    columns = {"K": set[int](), "V": set[int]()}
    for group in multiplications(words):
        left, right = [x[0] for x in group], [x[1] for x in group]
        if any(x[3] & N_MAJOR for x in group):
            panel = (right[0] & 0x3FFF) * 16 - min(columns["K"]) if latent else 0
            of_group = v_steps[panel % (head_dim // 64 * PANEL) // (4 * PANEL)] if latent else v_steps[0]
            columns["V"].add(begin_of(right, of_group, group[0][2] > 64, faults))
        else:
            columns["K"].add(begin_of(right, k_steps, True, faults))
            if not group[0][3] & LEFT_IN_REGISTERS:
                begin_of(left, q_steps, True, faults)
        if len({x[2:] for x in group}) != 1:
            faults.append("multiplications of several forms")
    filled = {"K": set[int](), "V": set[int]()}
    for kind, _, *numbers in words:
        if kind == TMA:  # to, panel, eight slots, page; a row's first 16 bytes are unswizzled
            to, column, slot = numbers[0], numbers[1] * 64, numbers[2] * 8
            place = int(chunks[slot, column // 8])
        elif kind == COPY:
            to = numbers[0]
            key, chunk, is_v, _ = np.array(numbers[1:2], np.uint64).view(np.uint16).tolist()
            if not numbers[1]:  # zeros for invisible keys; K's key 0
                continue
            place = int(chunks[key, chunk])
            filled["V" if is_v and not latent else "K"].add(to - place)
            continue
        else:
            continue
        if to - place not in columns["K"] | columns["V"]:
            faults.append(f"TMA of slot {slot}, column {column} to {to}, where no matrix has them")
    for name in "KV":
        if filled[name] - columns[name]:
            faults.append(f"{name} is copied to stages at {sorted(filled[name])}, and read at {sorted(columns[name])}")
    return faults


@pytest.mark.parametrize(("sizes", "rows", "dtype", "fp8"), INSTANCES)
def test_the_kernels_agree_with_cute(sizes: Sizes, rows: int, dtype: torch.dtype, fp8: bool) -> None:
    words = written_down(sizes, rows, dtype, fp8)
    kinds = {kind for kind, *_ in words}
    assert kinds == {WGMMA, COMMIT, COPY} | (set() if fp8 else {TMA})
    assert faults_of(words, sizes, rows) == []
    if not fp8:
        with refused_maps():
            by_copies = written_down(sizes, rows, dtype, fp8)
        assert {kind for kind, *_ in by_copies} == {WGMMA, COMMIT, COPY} and faults_of(by_copies, sizes, rows) == []
