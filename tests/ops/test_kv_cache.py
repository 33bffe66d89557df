"""append_kv to fp8 and of no rows; others: `test_cases.py`."""

from __future__ import annotations

import pytest
import torch
from support.batches import FP8, bytes_of
from torch import Tensor

from pagedtree import append_kv


def to_fp8(rows: Tensor, scale: Tensor | None) -> Tensor:
    """Converts as torch does, after the clamp that it lacks."""
    divisor = torch.ones(1) if scale is None else scale.cpu().reshape(-1, 1)
    return (rows.cpu().float() / divisor).clamp(-448, 448).to(FP8).to(rows.device)


@pytest.mark.each_value
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_append_rounds_to_fp8_as_torch(row_isa, device, dtype) -> None:
    if dtype == torch.float32:  # every exponent's deciding bits, then the neighbours of ties
        high = torch.arange(2**16, dtype=torch.int64) << 16
        bits = torch.cat([high + low for low in (0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF)])
        values = (bits - ((bits >> 31) << 32)).to(torch.int32).view(torch.float32)
    else:
        values = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)
    rows = values.view(-1, 1, 128).to(device)
    for scale in (None, 0.3, 3e-5, 700.0, 0.0, -1.7, 1.0 + 2.0**-23, 2.0 - 2.0**-23, 1e-25, 1e-30, 1e25, 3e38):
        scale = None if scale is None else torch.tensor(scale)
        cache = torch.zeros((2, rows.shape[0], 1, 1, 128), dtype=FP8, device=device)
        slots = torch.arange(rows.shape[0], device=device)
        on_device = None if scale is None else scale.to(device)
        append_kv(rows, rows, cache[0], cache[1], slots, k_scale=on_device, v_scale=on_device)
        codes = cache[0].view(torch.uint8).view(-1, 1, 128).cpu()
        expected = to_fp8(rows, scale).view(torch.uint8).view(-1, 1, 128).cpu()
        nan = (expected & 0x7F) == 0x7F
        assert torch.equal((codes & 0x7F) == 0x7F, nan)
        assert torch.equal(codes[~nan], expected[~nan])
        assert torch.equal(bytes_of(cache[0]), bytes_of(cache[1]))


def test_append_nothing(backend, device) -> None:
    """No row, no column, no page, no position, no slot; of K and V, or of a latent cache."""
    for tokens, dim, pages, page_size, slot in (
        (0, 4, 2, 3, 0), (1, 0, 2, 3, 0), (1, 4, 0, 3, 0), (1, 4, 2, 0, 0), (1, 4, 2, 3, -1),
    ):  # fmt: skip
        rows, slots = torch.zeros((tokens, 2, dim), device=device), torch.full((tokens,), slot, device=device)
        cache = torch.ones((pages, page_size, 2, dim), device=device)
        append_kv(rows, rows, cache, cache.clone(), slots)
        append_kv(rows, None, cache, None, slots)
        assert torch.equal(cache, torch.ones_like(cache))
