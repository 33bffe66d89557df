"""The attention kernels from the PTX that nvcc made of them, interpreted (tools/ptx): right operands, layouts and
modifiers of the inline assembly, which the C++ build of the same sources for simt does not see.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from ptx import warpgroups
from ptx.execute import executed_from_ptx, simt_library
from ptx.interpreter import Block
from ptx.module import Fault

from pagedtree import _C, DraftTree, TreeBatch, tree_attention
from pagedtree.attention import PLAN_SIZE
from pagedtree.check.cases.attention import TILES, WGMMA_TILES, Sizes
from pagedtree.testing import backends, use_backend
from pagedtree.tools.cubin import cuda_library, find_cuobjdump

SIMT = simt_library()
CUDA = cuda_library()
pytestmark = [
    pytest.mark.skipif(SIMT is None or "simt" not in backends(), reason="built without simt"),
    pytest.mark.skipif(CUDA is None or find_cuobjdump() is None, reason="no CUDA library or no cuobjdump"),
]
ARCHITECTURES = _C.build_info()["cuda_architectures"]
HAS_PTX = any(architecture.endswith("+PTX") for architecture in ARCHITECTURES)
pytestmark.append(pytest.mark.skipif(not HAS_PTX, reason="built without PTX: TORCH_CUDA_ARCH_LIST has no +PTX"))
needs_hopper_ptx = pytest.mark.skipif("9.0a+PTX" not in ARCHITECTURES, reason="built without PTX for 9.0a")
FP8 = torch.float8_e4m3fn
HEADS, KV_HEADS = 4, 2
GROUP = HEADS // KV_HEADS
TYPES = [(dtype, fp8) for dtype in (torch.bfloat16, torch.float16) for fp8 in (False, True)]
# By K's head size. Stages that all rows see are copied row by row with the first, by TMA in boxes of 8 slots and of 64
# with the others.
PAGE_SIZES = {64: 20, 128: 24, 256: 128}


def instances(tiles: dict[Sizes, tuple[int, ...]]) -> list:
    """In the core suite every other tile, the tiles in turn with each pair of types."""
    places = [(i, j) for i, rows in enumerate(tiles.values()) for j in range(len(rows))]
    core = [place for place in places if sum(place) % 2 == 0]
    return [
        pytest.param(*types, sizes, rows, marks=[] if (i, j) in core[k :: len(TYPES)] else pytest.mark.slow)
        for k, types in enumerate(TYPES)
        for i, (sizes, of_head) in enumerate(tiles.items())
        for j, rows in enumerate(of_head)
    ]


def ranges(*starts: tuple[int, int, int]) -> torch.Tensor:
    """A plan whose ranges begin there: sequence, row tile, KV tile. One CTA takes each."""
    plan = torch.zeros(PLAN_SIZE, dtype=torch.int32).view(3, -1, 4)
    plan[0, 0, 0] = len(starts)
    plan[0, 1 : 1 + len(starts), :3] = torch.tensor(starts)
    return plan.view(-1)


def check_against_simt(
    kernel: str,
    types: tuple[torch.dtype, bool],
    sizes: Sizes,
    rows: int,
    nodes: int,
    prefix: int,
    page_size: int,
    plans: tuple[torch.Tensor | None, torch.Tensor | None] = (None, None),
    latent: bool = False,
) -> None:
    """A tree over a prefix with the first plan, and a causal chunk with the other, with every optional argument.

    With `latent`, V is a view of K, of 576 or 512 columns for the same instance, and one head.
    """
    (dtype, fp8), (head_dim, head_dim_v) = types, sizes
    tile_dim = 576 if head_dim_v == 512 else head_dim
    generator = torch.Generator().manual_seed(rows)
    trees = TreeBatch.from_trees([DraftTree([-1] + [(i - 1) // 2 for i in range(1, nodes)])])
    length = nodes + prefix
    pages = -(-length // page_size) + 2
    q = torch.randn(nodes, HEADS, head_dim, generator=generator).to(dtype)
    kv_heads = 1 if latent else KV_HEADS
    cache = [torch.randn(pages, page_size, kv_heads, size, generator=generator).to(dtype) for size in sizes]
    scales = {}
    if fp8:
        cache = [side.to(FP8) for side in cache]
        scales = {"k_scale": torch.tensor(0.5), "v_scale": torch.tensor([1.5, 0.75][:kv_heads])}
    if latent:
        cache[1] = cache[0][..., :head_dim_v]
    table = torch.randperm(pages, generator=generator).int()[None]
    common = (q, *cache, table, torch.tensor([length], dtype=torch.int32), trees.cu_nodes)
    options = {"softcap": 0.0 if latent else 20.0, "window": 60, "sinks": torch.randn(HEADS, generator=generator)}
    for mask, plan, extra in [(trees.mask, plans[0], {}), (None, plans[1], options)]:
        arguments = {"plan": plan, "return_lse": True, **scales, **extra}
        with use_backend("simt"):
            expected, expected_lse = tree_attention(*common, mask, **arguments)
        assert SIMT is not None and CUDA is not None
        with executed_from_ptx(SIMT, CUDA, lambda name: "attention" in name and "_kernelI" in name) as executed:
            out, lse = tree_attention(*common, mask, **arguments)
        assert len(executed) == 1 and kernel in executed[0] and f"Li{tile_dim}ELi{rows}ELi{head_dim_v}E" in executed[0]
        assert ("__half" in executed[0], "Float8" in executed[0]) == (dtype == torch.float16, fp8)
        assert (out.float() - expected.float()).abs().max() < 0.02
        assert (lse - expected_lse).abs().max() < 1e-4


@pytest.mark.each_value
@pytest.mark.parametrize(("dtype", "fp8", "sizes", "rows"), instances(TILES))
def test_attention_from_ptx(
    dtype: torch.dtype, fp8: bool, sizes: Sizes, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PAGEDTREE_ENGINE", "mma.sync")
    check_against_simt("16attention_kernel", (dtype, fp8), sizes, rows, rows // GROUP - 1, 75, 16)


@pytest.mark.parametrize(
    ("dtype", "fp8", "sizes", "rows"), instances({(512, 512): TILES[576, 512], (576, 512): TILES[576, 512]})
)
def test_latent_attention_from_ptx(
    dtype: torch.dtype, fp8: bool, sizes: Sizes, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PAGEDTREE_ENGINE", "mma.sync")
    nodes = rows // HEADS - 1
    check_against_simt("16attention_kernel", (dtype, fp8), sizes, rows, nodes, 75 - nodes, 16, latent=True)


@needs_hopper_ptx
@pytest.mark.parametrize(("dtype", "fp8", "sizes", "rows"), instances(WGMMA_TILES))
def test_wgmma_attention_from_ptx(
    dtype: torch.dtype, fp8: bool, sizes: Sizes, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three KV tiles, in the first call all in one CTA, so that its ring of stages wraps; in the second, in pieces.

    Each KV head has all but two rows of a tile; with 64 columns and tiles of 128 rows it has another tile with 40, that
    only one of two warpgroups multiplies.
    """
    monkeypatch.setenv("PAGEDTREE_ENGINE", "wgmma")
    nodes = rows // GROUP - 1 + (21 if (sizes, rows) == ((64, 64), 128) else 0)
    plans = ranges((0, 0, 0)), ranges((0, 0, 0), (0, 0, 1), (0, 1, 2))
    check_against_simt(
        "attention_sm90_kernel", (dtype, fp8), sizes, rows, nodes, 140 - nodes, PAGE_SIZES[sizes[0]], plans
    )


@needs_hopper_ptx
@pytest.mark.parametrize("dtype", [torch.bfloat16, pytest.param(torch.float16, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("sizes", "page_size"), [((576, 512), 20), pytest.param((512, 512), 64, marks=pytest.mark.slow)]
)
def test_latent_wgmma_attention_from_ptx(
    dtype: torch.dtype, sizes: Sizes, page_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three stages: both groups of warps have one, then the first has the last. In pieces, one stage alone."""
    monkeypatch.setenv("PAGEDTREE_ENGINE", "wgmma")
    plans = ranges((0, 0, 0)), ranges((0, 0, 0), (0, 0, 2))
    check_against_simt("attention_sm90_kernel", (dtype, False), sizes, 64, 15, 125, page_size, plans, latent=True)


def test_a_wrong_instruction_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """V's matrices read without `.trans`: the result differs."""
    untransposed = Block.do_ldmatrix
    monkeypatch.setattr(
        Block,
        "do_ldmatrix",
        lambda self, name, operands: untransposed(self, tuple(part for part in name if part != "trans"), operands),
    )
    with pytest.raises(AssertionError):
        test_attention_from_ptx(torch.bfloat16, False, (128, 128), 16, monkeypatch)


def first_wait_only(right: Callable) -> Callable:
    """No thread waits for an mbarrier whose first phase has ended: as if its parity were not looked at."""

    def do_mbarrier(self: Block, name: tuple[str, ...], operands: tuple) -> None:
        if name[1] == "try_wait" and all(self.barriers[int(i)].phase for i in self.address(operands[1])[self.mask]):
            return self.put(operands[0], np.ones(self.n, bool))
        return right(self, name, operands)

    return do_mbarrier


WRONG = {
    "stride": (warpgroups, "operand_addresses", lambda right: lambda d, *rest: right(d - (32 << 32), *rest)),
    "K-major": (warpgroups, "operand_addresses", lambda right: lambda d, outer, _: right(d, outer, False)),
    "rows": (
        Block,
        "_issue",
        lambda right: lambda self, name, o: right(self, name, ([o[0][i ^ 2] for i in range(len(o[0]))], *o[1:])),
    ),
    "slots": (Block, "_box", lambda right: lambda self, tensor, at: right(self, tensor, [at[0], at[1] ^ 8, *at[2:]])),
    "parity": (Block, "do_mbarrier", first_wait_only),
}


@needs_hopper_ptx
@pytest.mark.parametrize("bug", WRONG)
def test_wrong_wgmma_is_noticed(bug: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Half the stride in descriptors, V read K-major, rows of accumulators changed over, other slots of a page loaded
    by TMA, phases not waited for.
    """
    place, name, change = WRONG[bug]
    monkeypatch.setattr(place, name, change(getattr(place, name)))
    with pytest.raises((AssertionError, Fault)):
        test_wgmma_attention_from_ptx(torch.bfloat16, False, (128, 128), 64, monkeypatch)
