"""tree_attention with values of another width than the keys, and over latent caches, whose rows are both."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from attention_case import TARGETS, Case, Target, check, once_per_backend, random_tree, target_id
from device_case import to_device

from pagedtree import DraftTree, attention_plan, tree_attention

RNG = np.random.default_rng(11)
CHAIN, BINARY, RANDOM = DraftTree.chain(5), DraftTree.full([2, 2, 2]), random_tree(RNG, 40)
MIXED = [BINARY, "causal", RANDOM, (RANDOM, 6), CHAIN, "causal"]
PREFIXES = [0, 130, 61, 300, 1, 0]
PAIRS = [(192, 128), (512, 512), (576, 512)]
LATENT = [(512, 512), (576, 512)]
FP8 = torch.float8_e4m3fn
# No tile for wgmma has K and V of these sizes apart: mma.sync multiplies whatever the engine is.
once_per_engine = pytest.mark.parametrize(
    "target",
    [pytest.param(target, marks=pytest.mark.slow if "wgmma" in target else []) for target in TARGETS],
    ids=target_id,
    indirect=True,
)


def latent_case(target: Target, prefixes: list[int], kinds: list[Any], **options: Any) -> Case:
    options = {"head_dim": 576, "head_dim_v": 512, "heads": (3, 1), "latent": True, **options}
    return target.case(prefixes, kinds, **options)


@pytest.mark.parametrize("dims", LATENT, ids=str)
def test_bits_do_not_depend_on_pages(target: Target, dims: tuple[int, int]) -> None:
    """Whole boxes of a page are copied at once where the page size allows it, else row by row."""
    generator = torch.Generator("cpu").manual_seed(dims[0])
    length, dtype = 260, target.dtypes[-1]
    rows = torch.randn(length, 1, dims[0], generator=generator, device="cpu").to(dtype)
    q = torch.randn(6, 6, dims[0], generator=generator, device="cpu").to(dtype)
    positions, results = torch.arange(length, device="cpu"), []
    for page_size in (64, 24, 7):
        pages = -(-length // page_size)
        table = torch.randperm(pages + 2, generator=generator, device="cpu")[:pages]
        cache = torch.zeros(pages + 2, page_size, 1, dims[0], dtype=dtype, device="cpu")
        cache[table[positions // page_size], positions % page_size] = rows
        case = q, cache, table.int()[None], torch.tensor([length]).int(), torch.tensor([0, 6]).int()
        q_there, there, *rest = to_device(case, target.device)
        results.append(tree_attention(q_there, there, there[..., :512], *rest, return_lse=True))
    for result in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(result, results[0], strict=True))


def test_every_phase_of_the_length(target: Target) -> None:
    lengths = [*range(15, 18), *range(28, 36), *range(58, 68)]
    trees = [DraftTree([-1, 0, 0, 1, 2, 2]) for _ in lengths]
    check(latent_case(target, lengths, trees, page_size=7, heads=(2, 1), poison=float("nan")).build())


@pytest.mark.parametrize("window", [1, 3, 64, 100, 1000])
@once_per_backend
def test_windows(target: Target, window: int) -> None:
    check(latent_case(target, PREFIXES, MIXED, poison=float("nan")).build(window=window))


@once_per_backend
def test_keys_that_no_row_sees_may_hold_anything(target: Target) -> None:
    """Nodes of a tree that are no ancestors of its newest, behind a window: NaN in the middle of the sequence."""
    for dtype in target.dtypes:
        case = latent_case(target, [300, 200, 100], [(RANDOM, 6), "causal", BINARY], dtype=dtype).build(window=40)
        q, seen = case["q"], {}
        expected = tree_attention(**case)
        for b, (s, n) in enumerate(zip(case["seq_lens"].tolist(), case["cu_seqlens_q"].diff().tolist(), strict=True)):
            seen[b] = s - 60 - n  # keys before it lie outside every window
            for position in range(max(seen[b], 0)):
                page = int(case["page_table"][b, position // 16])
                case["k_cache"][page, position % 16] = float("nan")
        assert q.numel() and torch.equal(tree_attention(**case), expected)


@once_per_engine
@pytest.mark.parametrize("dims", PAIRS, ids=str)
def test_all_options(target: Target, dims: tuple[int, int]) -> None:
    """Sinks, a scale, odd queries' strides, padding; softcap where K and V lie apart."""
    generator = torch.Generator("cpu").manual_seed(5)
    dtype = target.dtypes[-1]
    case = target.case([70, 200], [RANDOM, "causal"], dtype=dtype, head_dim=dims[0], head_dim_v=dims[1], padding=3)
    built = case.build(softcap=15.0, scale=0.3)
    heads = built["q"].shape[1]
    built["sinks"] = torch.randn(heads, generator=generator, device="cpu").to(target.device)
    wide = built["q"].new_zeros((built["q"].shape[0], heads + 1, dims[0] + 3))
    wide[:, 1:, 3:] = built["q"]
    check({**built, "q": wide[:, 1:, 3:]})


@once_per_engine
@pytest.mark.parametrize(
    ("dims", "per_head"),
    [
        pytest.param(dims, per_head, marks=[] if per_head or dims == PAIRS[-1] else pytest.mark.slow)
        for dims in PAIRS
        for per_head in (False, True)
    ],
    ids=str,
)
def test_fp8(target: Target, dims: tuple[int, int], per_head: bool) -> None:
    dtype = target.dtypes[-1 if per_head else -2]
    case = target.case(
        [100, 61], [RANDOM, "causal"], dtype=dtype, cache_dtype=FP8, head_dim=dims[0], head_dim_v=dims[1]
    ).build()
    count = case["k_cache"].shape[2] if per_head else 1
    scales = torch.tensor([0.5, 1.25], device=target.device)[:count]
    check({**case, "k_scale": scales if per_head else scales[0], "v_scale": scales.flip(0)})


@once_per_engine
@pytest.mark.parametrize("dims", LATENT, ids=str)
def test_fp8_latent(target: Target, dims: tuple[int, int]) -> None:
    """V's scale is K's unless it is given."""
    options: dict[str, Any] = {"cache_dtype": FP8, "head_dim": dims[0], "head_dim_v": dims[1], "poison": float("nan")}
    dtype = target.dtypes[-1 if dims == LATENT[-1] else -2]
    case = latent_case(target, [100, 61], [RANDOM, "causal"], dtype=dtype, **options).build()
    k_scale, v_scale = torch.tensor([0.5, 2.0], device=target.device)
    check({**case, "k_scale": k_scale})
    check({**case, "k_scale": k_scale, "v_scale": v_scale})
    out = tree_attention(**case, k_scale=k_scale)
    assert torch.equal(out, tree_attention(**case, k_scale=k_scale, v_scale=k_scale))


@once_per_backend
def test_a_view_and_a_copy_agree(target: Target) -> None:
    """What a latent call reads once is what two caches hold."""
    case = latent_case(target, PREFIXES, MIXED).build()
    out, lse = tree_attention(**case, return_lse=True)
    copy = {**case, "v_cache": case["v_cache"].clone()}
    again, lse_again = tree_attention(**copy, return_lse=True)
    torch.testing.assert_close(again.float(), out.float(), **target.tolerance)
    torch.testing.assert_close(lse_again, lse, atol=1e-5, rtol=1e-5)


@once_per_backend
def test_views_that_are_not_latent(target: Target) -> None:
    """V may be other columns of K's memory, or another KV head's: it is read for itself, and may have a softcap."""
    case = target.case([70, 20], [RANDOM, "causal"], head_dim=192, head_dim_v=128, heads=(4, 1)).build()
    check({**case, "v_cache": case["k_cache"][..., 64:], "softcap": 20.0})
    two = target.case([70, 20], [RANDOM, "causal"], head_dim=192, head_dim_v=128, heads=(4, 2)).build()
    check({**two, "v_cache": two["k_cache"][..., :128], "softcap": 20.0})


@once_per_backend
def test_plan_and_hint(target: Target) -> None:
    """Long sequences that are cut into pieces; a plan for the call gives the same bits as no plan."""
    prefixes = [700, 3, 400] if target.backend == "cpu" else [300, 3, 200]
    case = latent_case(target, prefixes, [(RANDOM, 16), BINARY, "causal"]).build()
    expected, lse = tree_attention(**case, return_lse=True)
    check(case)
    hint = -(-case["q"].shape[0] // 3)
    plan = attention_plan(
        case["seq_lens"], case["cu_seqlens_q"], num_q_heads=3, num_kv_heads=1, head_dim=576, head_dim_v=512,
        latent=True, page_size=16, max_seqlen_q=hint, tree_lens=case["tree_lens"],
    )  # fmt: skip
    out, planned_lse = tree_attention(**case, plan=plan, return_lse=True)
    assert torch.equal(out, expected) and torch.equal(planned_lse, lse)
    for hint in (0, 40):
        out = tree_attention(**case, max_seqlen_q=hint)
        torch.testing.assert_close(out.float(), expected.float(), **target.tolerance)


@once_per_backend
def test_out_argument(target: Target) -> None:
    case = latent_case(target, [100], [BINARY]).build()
    expected = tree_attention(**case)
    assert expected.shape == (*case["q"].shape[:2], 512)
    wide = case["q"].new_zeros((*case["q"].shape[:2], 515))
    out = tree_attention(**case, out=wide[..., 3:])
    assert out.data_ptr() == wide[..., 3:].data_ptr() and torch.equal(out, expected) and not wide[..., :3].any()
