from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from support.attention import Target, check, on_host, once_per_backend
from support.devices import placed

from pagedtree import DraftTree, PreparedAttention, reference, tree_attention

TREE = DraftTree.full([2, 2])
LATENT = {"latent": True, "heads": (4, 1), "head_dim": 192, "head_dim_v": 128}
caches = pytest.mark.parametrize("options", [{}, LATENT], ids=["apart", "latent"])


def small(target: Target, kind: dict[str, Any] | None = None, **options: Any) -> dict[str, Any]:
    return target.case([20, 3], [TREE, "causal"], causal_queries=2, **{"heads": (4, 2), **(kind or {})}).build(
        **options
    )


@once_per_backend
def test_a_latent_cache_is_a_view_in_compiled_code(target: Target) -> None:
    """A copy would be read twice and allow a softcap."""
    case = small(target, LATENT)

    def step(q: torch.Tensor, k: torch.Tensor, softcap: float) -> torch.Tensor:
        return tree_attention(**dict(case, q=q, k_cache=k, v_cache=k[..., :128]), softcap=softcap)

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    with pytest.raises((ValueError, RuntimeError), match="softcap: expected 0 if v_cache is a view of k_cache"):
        compiled(case["q"], case["k_cache"], 5.0)


def ints(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


BAD_VALUES = [
    ({"seq_lens": ints(10**9, -4)}, "page_table"),
    ({"seq_lens": ints(27, 1)}, "seq_lens"),
    ({"tree_lens": ints(-9, 10**9)}, "tree_lens"),
    ({"tree_lens": ints(2**31 - 1, -(2**31))}, "tree_lens"),
    ({"tree_lens": ints(27, 6)}, "lens"),
    ({"tree_lens": ints(3, 5)}, "tree_mask"),
    ({"tree_lens": ints(100, 5), "seq_lens": ints(110, 5), "page_table": torch.ones(2, 9, dtype=torch.int32)}, "mask"),
    ({"page_table": ints(*([99999, -1] * 5)).view(2, 5)}, "page_table"),
    ({"page_table": ints(*([2**31 - 1, -(2**31)] * 5)).view(2, 5)}, "page_table"),
    *(
        ({"cu_seqlens_q": ints(*offsets)}, "cu_seqlens_q")
        for offsets in ((0, 9, 4), (3, 5, 9), (0, 100, 200), (-5, 3, 2**31 - 1), (9, 4, 0))
    ),
]


@pytest.mark.parametrize(("changes", "blamed"), BAD_VALUES)
@caches
def test_bad_values(
    target: Target, changes: dict, blamed: str, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Accesses stay in bounds, by the contract; checked calls name arguments."""
    case = small(target, options) | {name: placed(value) for name, value in changes.items()}
    out, lse = tree_attention(**case, return_lse=True)
    if "cu_seqlens_q" not in changes:
        with torch.device("cpu"):
            expected, expected_lse = reference.tree_attention(**on_host(case))
        unit = {torch.float32: 1e-5, torch.float16: 4e-3}[case["q"].dtype]
        torch.testing.assert_close(out.cpu().double(), expected, atol=unit, rtol=unit)
        torch.testing.assert_close(lse.cpu().double(), expected_lse, atol=1e-5, rtol=1e-5)
    monkeypatch.setenv("PAGEDTREE_CHECK", "1")
    with pytest.raises(ValueError, match=f"tree_attention: [a-z_]*{blamed}.*: expected"):
        tree_attention(**case)


@caches
def test_checked_calls_pass(target: Target, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PAGEDTREE_CHECK", "1")
    case = target.case([20, 3], [TREE, "causal"], causal_queries=2, padding=3, **options).build()
    check(case)
    check(dict(case, tree_mask=None, tree_lens=None))
    check(dict(case, tree_mask=None, tree_lens=ints(-1, -1)))
    with pytest.raises(ValueError, match=r"tree_lens\[0\]: expected -1 without a tree_mask, got 7"):
        tree_attention(**dict(case, tree_mask=None))


def test_checked_queries_need_not_be_keys(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    """A mask over fewer keys than queries, as for shared prefixes, accepts all lengths."""
    monkeypatch.setenv("PAGEDTREE_CHECK", "1")
    case = dict(small(target), tree_lens=ints(0, 0), seq_lens=ints(5, 0))
    case["tree_mask"] = torch.zeros_like(case["tree_mask"])
    check(case)
    without_new = {"tree_lens": ints(3, 0)}  # fewer new keys than queries
    for changes in ({"seq_lens": ints(5, -1)}, {"tree_lens": ints(0, -1)}, {"tree_lens": None}, without_new):
        with pytest.raises(ValueError, match=r"tree_attention: seq_lens\[[01]\]: expected at least"):
            tree_attention(**{**case, **changes})


@once_per_backend
def test_prepared_calls_follow_their_tensors(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    """A prepared call equals the op, result or error, whatever happened to tensors."""
    case = small(target)
    layer = tuple(case.pop(name) for name in ("q", "k_cache", "v_cache"))
    attend = PreparedAttention(**case)

    def agree(prepared: PreparedAttention) -> bool:
        with torch.inference_mode():
            return torch.equal(prepared(*layer), tree_attention(*layer, **case))

    table, lens, mask = case["page_table"], case["seq_lens"], case["tree_mask"]
    old = table.clone()
    table.resize_(2, 4000).fill_(-1)[:, : old.shape[1]] = old
    assert agree(attend)
    lens.data = placed(ints(12, 3))
    assert agree(attend)
    words = mask.clone()
    mask.untyped_storage().resize_(0)
    with torch.inference_mode(), pytest.raises(ValueError, match="tree_mask: expected a tensor with memory"):
        attend(*layer)
    mask.untyped_storage().resize_(words.numel() * 4)
    mask.copy_(words.flip(0))
    assert agree(attend)
    assert agree(copy.copy(attend)) and agree(pickle.loads(pickle.dumps(attend)))
    mask.data = words[:1]
    with torch.inference_mode(), pytest.raises(ValueError, match=r"tree_mask: expected shape \[9, \*\] .*, got"):
        attend(*layer)
    mask.data = words
    monkeypatch.setenv("PAGEDTREE_CHECK", "1")
    lens.fill_(10**9)
    with torch.inference_mode(), pytest.raises(ValueError, match="page_table: expected pages for"):
        attend(*layer)


@once_per_backend
def test_prepared_calls_let_their_tensors_go(target: Target) -> None:
    case = small(target)
    layer = tuple(case.pop(name) for name in ("q", "k_cache", "v_cache"))
    attend = PreparedAttention(**case)
    with torch.inference_mode():
        attend(*layer)
    storage = case.pop("tree_mask").untyped_storage()
    assert torch._C._storage_Use_Count(storage._cdata) > 1
    del attend
    assert torch._C._storage_Use_Count(storage._cdata) == 1


def test_wgmma_on_a_device_without_it(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    if target.backend != "simt":
        pytest.skip("simt only")
    monkeypatch.setenv("PAGEDTREE_ENGINE", "wgmma")
    monkeypatch.setenv("PAGEDTREE_SIMT_DEVICE", "4:163:8")
    with pytest.raises(RuntimeError, match=r"ENGINE=wgmma needs .* 227 KB .* got 9.0 with 163 KB"):
        tree_attention(**small(target))


def test_cache_rows_are_aligned_to_16_bytes(target: Target) -> None:
    """Cache rows are at multiples of 16 bytes."""
    if target.backend == "cpu":
        pytest.skip("the cpu backend takes any")
    case = small(target)
    for name in ("k_cache", "v_cache"):
        shape, memory = case[name].shape, torch.zeros(2 * case[name].numel(), dtype=case["q"].dtype)
        slot = shape[2] * shape[3]
        page = shape[1] * slot
        for strides, offset in (
            ((page, slot, shape[3]), 1),
            ((page + 4, slot, shape[3]), 0),
            ((page + 64, slot + 4, shape[3]), 0),
            ((2 * page, slot + 64, shape[3] + 1), 0),
        ):
            view = memory.as_strided(shape, (*strides, 1), offset)
            with pytest.raises(ValueError, match=f"{name}: expected an address and strides that are multiples of 16"):
                tree_attention(**dict(case, **{name: view}))
