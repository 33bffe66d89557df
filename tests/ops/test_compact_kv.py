"""compact_kv equals plain loops in every byte of the storage."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from support import int32
from support.batches import compact_arguments, payload, prepared_compact
from torch import Tensor

from pagedtree import PreparedCompaction, compact_kv
from pagedtree._ops import ops
from pagedtree.reference import kv_cache as loops

Compact = Callable[..., Tensor]


@pytest.fixture(params=[compact_kv, prepared_compact], ids=["op", "prepared"])
def compact(request: pytest.FixtureRequest) -> Compact:
    return request.param


@pytest.mark.parametrize("sms", [132, 1])
def test_compact_kv_many_tensors(compact, backend, device, monkeypatch: pytest.MonkeyPatch, sms: int) -> None:
    """On a small GPU a CTA moves rows of several caches, unequal in size."""
    monkeypatch.setenv("PAGEDTREE_SIMT_DEVICE", f"{sms}:227:8")
    rows = [(2, 3), (7,), (2, 160)]
    caches = [payload((4, 4, *rows[i % 3]), torch.int32, i, device) for i in range(300)]
    expected = [cache.clone() for cache in caches]
    table, start, nodes = [[2, 1, 3]], [3], [[0, 2, 5, 6]]
    lengths = loops.compact(expected, table, start, nodes, [3])
    seq_lens = compact(caches, int32(table, device), int32(start, device), int32(nodes, device), int32([3], device))
    assert seq_lens.tolist() == lengths == [7]
    assert all(torch.equal(cache, right) for cache, right in zip(caches, expected, strict=True))
    assert not torch.equal(caches[299], payload((4, 4, 2, 160), torch.int32, 299, device))


def test_a_path_is_moved_once(compact, value_checks, device) -> None:
    arguments = compact_arguments(device)
    assert compact(**arguments).tolist() == [3, 3]
    with pytest.raises(ValueError, match=r"start\[0\]: expected that of a path that has not been moved yet, got 0"):
        compact(**arguments)


def test_prepared_caches_get_a_new_version(device) -> None:
    """Versions rise as by the op; inference tensors have none."""
    arguments = compact_arguments(device)
    caches = arguments.pop("caches")
    with torch.inference_mode():
        caches.append(caches[0].clone())
    with torch.no_grad():
        compact = PreparedCompaction(caches)
        before = [cache._version for cache in caches[:-1]]
        compact(**arguments)
    assert [cache._version for cache in caches[:-1]] == [version + 1 for version in before]


def test_prepared_caches_under_grad_mode_and_compiled(device) -> None:
    """Caches that cannot be prepared are checked by each call."""
    arguments = compact_arguments(device)
    caches = arguments.pop("caches")
    needs_grad = caches[0].clone().requires_grad_()
    with pytest.raises(ValueError, match="compact_kv: cannot write to a leaf tensor that requires grad"):
        PreparedCompaction([needs_grad])(**arguments)

    @torch.compile(fullgraph=True, backend="aot_eager")
    def step(caches: list[Tensor], moves: dict[str, Tensor]) -> Tensor:
        return PreparedCompaction(caches)(**moves)

    twins = [cache.clone() for cache in caches]
    with torch.no_grad():
        assert torch.equal(step(caches, arguments), compact_kv(twins, **arguments))
    assert all(map(torch.equal, caches, twins))


def test_prepared_caches_follow_their_tensors(device) -> None:
    """A prepared call writes exactly as the op, whatever happened to the storage."""
    arguments = compact_arguments(device)
    caches = [cache.clone() for cache in arguments.pop("caches")]
    compact = PreparedCompaction(caches)

    def agree(prepared: PreparedCompaction, others: list[Tensor]) -> bool:
        twins, clones = [cache.clone() for cache in caches], [other.clone() for other in others]
        with torch.inference_mode():
            is_same = torch.equal(prepared(**arguments), compact_kv(twins, **arguments))
        return is_same and all(map(torch.equal, caches, twins)) and all(map(torch.equal, others, clones))

    data, size = [cache.clone() for cache in caches], caches[0].untyped_storage().nbytes()
    for cache in caches:
        cache.untyped_storage().resize_(0)
    with torch.inference_mode(), pytest.raises(ValueError, match=r"caches\[0\]: expected a tensor with memory"):
        compact(**arguments)
    blocks = [torch.zeros_like(cache) for cache in data * 4]  # reuse the freed memory
    for cache, old in zip(caches, data, strict=True):
        cache.untyped_storage().resize_(size)
        cache.copy_(old)
    assert agree(compact, blocks)
    old, caches[1].data = caches[1].data, payload((4, 2, 3), torch.float32, 9, device)
    assert agree(compact, [old])
    caches[0].data = payload((4, 2, 2, 6), torch.float32, 8, device)[..., ::2]
    assert agree(compact, [])
    caches[1].resize_(3, 2, 3)
    with torch.inference_mode(), pytest.raises(ValueError, match=r"caches\[1\]: expected shape \[4, 2, \.\.\.\]"):
        compact(**arguments)
    caches[1].resize_(4, 2, 3)
    twin = copy.deepcopy(compact)
    with torch.inference_mode():
        before = [cache.clone() for cache in caches]
        twin(**arguments)
        assert all(map(torch.equal, caches, before))


def test_prepared_caches_refuse(device) -> None:
    arguments = compact_arguments(device)
    caches = arguments.pop("caches")
    for wrong in (caches[0], [1, 2], [None]):
        with pytest.raises(TypeError, match="caches"):
            PreparedCompaction(wrong)
    with pytest.raises(ValueError, match=r"compact_kv: caches\[1\]: expected shape \[4, 2, \.\.\.\] like caches"):
        PreparedCompaction([caches[0], caches[0][:2]])
    with torch.inference_mode():
        compact = PreparedCompaction(caches)
        with pytest.raises(TypeError, match=r"compact_kv: page_table: expected type Tensor, got list"):
            compact(**{**arguments, "page_table": [[0, 1]]})
        with pytest.raises(RuntimeError, match="caches: expected what its op has prepared, got 1099511627776"):
            ops._compact(*arguments.values(), 2**40)
