"""The attention kernel from the PTX that nvcc made of it, interpreted (tests/ptx): right operands, layouts and
modifiers of the inline assembly, which the C++ build of the same sources for simt does not see.
"""

from __future__ import annotations

import pytest
import torch
from ptx.execute import executed_from_ptx, simt_library

from pagedtree import _C, DraftTree, TreeBatch, tree_attention
from pagedtree.cubin import cuda_library, find_cuobjdump
from pagedtree.testing import backends, use_backend

SIMT = simt_library()
CUDA = cuda_library()
pytestmark = [
    pytest.mark.skipif(SIMT is None or "simt" not in backends(), reason="built without simt"),
    pytest.mark.skipif(CUDA is None or find_cuobjdump() is None, reason="no CUDA library or no cuobjdump"),
]
HAS_PTX = any(architecture.endswith("+PTX") for architecture in _C.build_info()["cuda_architectures"])
pytestmark.append(pytest.mark.skipif(not HAS_PTX, reason="built without PTX: TORCH_CUDA_ARCH_LIST has no +PTX"))
FP8 = torch.float8_e4m3fn
TILES = {64: (16, 32, 64, 128), 96: (16, 32, 64, 128), 128: (16, 32, 64, 128), 192: (32, 64), 256: (32, 64)}
TYPES = [(dtype, fp8) for dtype in (torch.bfloat16, torch.float16) for fp8 in (False, True)]
# In the core suite each tile with one pair of types, the pairs in turn over rows and head sizes.
INSTANCES = [
    pytest.param(*types, head_dim, rows, marks=[] if (i + j) % len(TYPES) == k else pytest.mark.slow)
    for k, types in enumerate(TYPES)
    for i, (head_dim, tiles) in enumerate(TILES.items())
    for j, rows in enumerate(tiles)
]


@pytest.mark.parametrize(("dtype", "fp8", "head_dim", "rows"), INSTANCES)
def test_attention_from_ptx(dtype: torch.dtype, fp8: bool, head_dim: int, rows: int) -> None:
    """A tree over a prefix, and a causal chunk; with every optional argument in one of two calls."""
    heads, kv_heads, page_size = 4, 2, 16
    nodes = rows * kv_heads // heads - 1
    generator = torch.Generator().manual_seed(rows)
    trees = TreeBatch.from_trees([DraftTree([-1] + [(i - 1) // 2 for i in range(1, nodes)])])
    length = nodes + 75
    pages = -(-length // page_size) + 2
    q = torch.randn(nodes, heads, head_dim, generator=generator).to(dtype)
    cache = [torch.randn(pages, page_size, kv_heads, head_dim, generator=generator).to(dtype) for _ in range(2)]
    scales = {}
    if fp8:
        cache = [side.to(FP8) for side in cache]
        scales = {"k_scale": torch.tensor(0.5), "v_scale": torch.tensor([1.5, 0.75])}
    table = torch.randperm(pages, generator=generator).int()[None]
    common = (q, *cache, table, torch.tensor([length], dtype=torch.int32), trees.cu_nodes)
    options = {"softcap": 20.0, "window": 60, "sinks": torch.randn(heads, generator=generator)}
    for mask, extra in [(trees.mask, {}), (None, options)]:
        with use_backend("simt"):
            expected, expected_lse = tree_attention(*common, mask, return_lse=True, **scales, **extra)
        assert SIMT is not None and CUDA is not None
        with executed_from_ptx(SIMT, CUDA, lambda name: "attention_kernel" in name) as executed:
            out, lse = tree_attention(*common, mask, return_lse=True, **scales, **extra)
        assert len(executed) == 1 and f"Li{head_dim}ELi{rows}E" in executed[0]
        assert (out.float() - expected.float()).abs().max() < 0.02
        assert (lse - expected_lse).abs().max() < 1e-4


def test_a_wrong_instruction_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """V's matrices read without `.trans`: the result differs."""
    from ptx.interpreter import Block

    untransposed = Block.do_ldmatrix
    monkeypatch.setattr(
        Block,
        "do_ldmatrix",
        lambda self, name, operands: untransposed(self, tuple(part for part in name if part != "trans"), operands),
    )
    with pytest.raises(AssertionError):
        test_attention_from_ptx(torch.bfloat16, False, 128, 16)
