"""Inputs shared by several families of cases. All are made on the CPU, with fixed seeds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pagedtree import DraftTree
from pagedtree.bits import packed

DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16, "fp8": torch.float8_e4m3fn}
PAGE_SIZES = (1, 7, 16, 61)
LAYOUTS = ("nhd", "hnd", "stacked", "packed", "padded")
MARGINS = {"padded": (16, 16), "sparse": (2, 1)}  # elements around a row; "sparse": odd strides, for the CPU alone


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def normal(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=seeded(seed), dtype=torch.float32)


def uniform(*shape: int, seed: int) -> Tensor:
    return torch.rand(shape, generator=seeded(seed), dtype=torch.float32)


def float32(values: Any) -> Tensor:
    return torch.tensor(values, dtype=torch.float32)


def int32(values: Any) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def int64(values: Any) -> Tensor:
    return torch.tensor(values, dtype=torch.int64)


def offsets(sizes: Sequence[int]) -> Tensor:
    return int32(np.concatenate([[0], np.cumsum(sizes)]).tolist())


def random_tree(seed: int, num_nodes: int, reach: int = 5) -> DraftTree:
    """Returns a tree whose nodes have one of the `reach` preceding nodes as parent."""
    rng = np.random.default_rng(seed)
    return DraftTree([-1, *(int(rng.integers(max(0, i - reach), i)) for i in range(1, num_nodes))])


def path_to(node: int, parents: Sequence[int] | np.ndarray | Tensor) -> list[int]:
    path: list[int] = []
    while node >= 0:
        path.insert(0, node)
        node = int(parents[node])
    return path


def words64(count: int, seed: int = 0) -> Tensor:
    return torch.randint(-(2**63), 2**63 - 1, (count,), generator=seeded(seed))


def streams_of(batch: int) -> dict[str, Any]:
    return {"seeds": words64(batch), "positions": words64(batch, 1) >> 2}


def as_words(bits: np.ndarray | Tensor, words: int | None = None) -> Tensor:
    """Returns bool [n, m] as packed int32 [n, words]; default as many words as the bits need."""
    mask = packed(torch.from_numpy(np.ascontiguousarray(bits, dtype=bool)))
    return mask if words is None else torch.nn.functional.pad(mask, (0, words - mask.shape[1]))


def storage_shape(layout: str, pages: int, page_size: int, heads: int, head_dim: int) -> tuple[int, ...]:
    """Returns K's and V's memory shape in engines' layouts."""
    shapes = {
        "nhd": (2, pages, page_size, heads, head_dim),
        "hnd": (2, pages, heads, page_size, head_dim),
        "stacked": (pages, 2, page_size, heads, head_dim),  # K and V of a page side by side
        "packed": (pages, page_size, heads, 2 * head_dim),  # K and V of a row side by side
    }
    if layout in MARGINS:
        return 2, pages, page_size + 1, heads + 2, head_dim + sum(MARGINS[layout])
    return shapes[layout]


def paged_views(
    pages: int, page_size: int, heads: int, head_dim: int, dtype: torch.dtype, layout: str, seed: int = 0
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns a storage full of numbers, and K and V in it: [pages, page_size, heads, head_dim]."""
    storage = normal(*storage_shape(layout, pages, page_size, heads, head_dim), seed=seed).to(dtype)
    return storage, *views_of(storage, layout)


def views_of(storage: Tensor, layout: str) -> tuple[Tensor, Tensor]:
    """Returns K and V in the storage of `paged_views`."""
    if layout == "hnd":
        k, v = storage.transpose(2, 3).unbind(0)
    elif layout in MARGINS:
        front, back = MARGINS[layout]
        k, v = storage[:, :, 1:, 1:-1, front:-back].unbind(0)
    elif layout == "packed":
        k, v = storage.split(storage.shape[-1] // 2, -1)
    else:
        k, v = storage.unbind(1 if layout == "stacked" else 0)
    return k, v
