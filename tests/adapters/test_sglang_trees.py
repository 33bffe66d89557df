"""build_tree_kernel_efficient and move_kv_cache, against SGLang's vectors and plain loops."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from support import seeded
from torch import Tensor

from pagedtree.integrations.sglang import (
    TreeMaskMode,
    build_tree_kernel_efficient,
    build_tree_kernel_efficient_cpu,
    move_kv_cache,
    reconstruct_indices_from_tree_mask,
    tree_mask_words,
)
from pagedtree.testing import backends

FULL, QLEN, PACKED = TreeMaskMode

# From SGLang's test_build_eagle_tree: two sequences, top 4 of 4 levels, the best 7 drafts.
EAGLE = {
    "parent_list": [[-1, 0, 1, 2, 3, 4, 8, 9, 10, 20, 24, 21, 28], [-1, 0, 1, 2, 3, 4, 5, 6, 7, 24, 28, 20, 21]],
    "selected_index": [[0, 1, 4, 8, 20, 24, 36], [0, 4, 5, 6, 7, 24, 36]],
    "seq_lens": [5, 10],
    "positions": [5, 6, 6, 7, 7, 8, 8, 9, 10, 11, 12, 12, 12, 12, 13, 14],
    "next_token": [[1, 3, 4, 5, 6, 7, -1, -1], [1, 2, -1, 6, -1, -1, 7, -1]],
    "next_sibling": [[-1, 2, -1, -1, -1, -1, -1, -1], [-1, -1, 3, 4, 5, -1, -1, -1]],
}
EAGLE_CASE = [EAGLE[name] for name in ("parent_list", "selected_index", "seq_lens")]
EAGLE_LISTS = [EAGLE["positions"], [[*range(8)], [*range(8, 16)]], EAGLE["next_token"], EAGLE["next_sibling"]]
# From SGLang's test_build_eagle_tree_malformed: top 2 of 3 levels, 4 nodes. Parents may follow their children.
MALFORMED_SELECTED = [[4, 2, 0], [2, 4, 0]]
MALFORMED = {
    "chain": [[0, 0, 2, 0, 0], [0, 4, 0, 0, 0]],
    "parent not selected": [[0, 99, 2, 0, 0], [0, 99, 0, 0, 0]],
    "no ancestor selected": [[0, 99, 99, 99, 99], [0, 99, 99, 99, 99]],
    "own ancestor": [[0, 2, 2, 0, 0], [0, 4, 4, 0, 0]],
    "as deep as allowed": [[0, 0, 4, 2, 0], [0, 0, 2, 4, 0]],
}
# Expected levels, first children and next siblings of the last tree but one.
OWN_ANCESTOR = [[[0, 3, 3, 1], [0, 3, 3, 1]], [[3, -1, 1, -1], [3, -1, 1, -1]], [[-1, 2, -1, -1], [-1, 2, -1, -1]]]


@pytest.fixture(params=[name for name in backends() if name != "simt"])
def on_torch_device(request: pytest.FixtureRequest) -> Iterator[None]:
    """Makes tensors on each device, without a backend."""
    with torch.device(request.param):
        yield


def mask_width(n: int) -> int:
    return 4 if n > 16 else 2 if n > 8 else 1


def build(parent_list, selected, seq_lens, topk, depth, mode, *, dtype=torch.int64, spelling="retrive", spare=0):
    """Returns (mask, positions, index, next_token, next_sibling) of the op on dirty outputs."""
    parent_list, selected, seq_lens = (torch.tensor(x, dtype=dtype) for x in (parent_list, selected, seq_lens))
    bs, n = selected.shape[0], selected.shape[1] + 1
    cells = {FULL: int(seq_lens.sum()) * n + bs * n * n, QLEN: bs * n * n, PACKED: bs * n * mask_width(n)}[mode]
    mask = torch.full((cells + spare,), 1 if mode == FULL else 0, dtype=torch.uint8)
    mask = mask.bool() if mode != PACKED else mask
    positions = torch.full((bs * n,), 77, dtype=dtype)
    outs = {f"{spelling}_{x}": torch.full((bs, n), 77, dtype=dtype) for x in ("index", "next_token", "next_sibling")}
    sizes = {"topk": topk, "depth": depth, "draft_token_num": n, "tree_mask_mode": int(mode)}
    build_tree_kernel_efficient(parent_list, selected, seq_lens, mask, positions, **outs, **sizes)
    return mask, positions, *outs.values()


def tree_cells(mask: Tensor, seq_lens: list[int], n: int, mode: TreeMaskMode) -> Tensor:
    """bool [bs, n, n], by a loop."""
    if mode == QLEN:
        return mask[: len(seq_lens) * n * n].view(len(seq_lens), n, n)
    out, begin = torch.zeros(len(seq_lens), n, n, dtype=torch.bool), 0
    for b, s in enumerate(seq_lens):
        for i, j in itertools.product(range(n), range(n)):
            if mode == FULL:
                out[b, i, j] = mask[begin + i * (s + n) + s + j]
            else:
                out[b, i, j] = mask[(b * n + i) * mask_width(n) + j // 8] >> (j % 8) & 1
        begin += (s + n) * n
    return out


def reference(parent_list, selected, topk, depth):
    """Returns (levels, next_token, next_sibling, sees) by SGLang's definition: a node climbs while parents exist."""
    bs, n = len(selected), len(selected[0]) + 1
    parents = np.full((bs, n), -1)
    for b, i in itertools.product(range(bs), range(1, n)):
        group = selected[b][i - 1] // topk
        parent = parent_list[b][group] if group else None
        parents[b, i] = 0 if group == 0 else selected[b].index(parent) + 1 if parent in selected[b] else -1
    levels = np.zeros((bs, n), dtype=int)
    sees = np.zeros((bs, n, n), dtype=bool)
    first, sibling = np.full((bs, n), -1), np.full((bs, n), -1)
    for b, i in itertools.product(range(bs), reversed(range(n))):
        node = i
        while node > 0 and levels[b, i] < depth:
            sees[b, i, node] = True
            levels[b, i] += 1
            node = parents[b, node]
        sees[b, i, 0] = True
        if parents[b, i] >= 0:
            sibling[b, i], first[b, parents[b, i]] = first[b, parents[b, i]], i
    return levels, first.tolist(), sibling.tolist(), sees


def check(parents, selected, seq_lens, topk, depth, mode, **options) -> tuple[Tensor, np.ndarray, np.ndarray]:
    """Compares with the reference; returns the mask, levels and visibility."""
    mask, positions, index, *links = build(parents, selected, seq_lens, topk, depth, mode, **options)
    levels, first, sibling, sees = reference(parents, selected, topk, depth)
    bs, n = levels.shape
    assert index.tolist() == np.arange(bs * n).reshape(bs, n).tolist()
    assert positions.tolist() == (levels + np.array(seq_lens)[:, None]).flatten().tolist()
    assert [link.tolist() for link in links] == [first, sibling]
    assert np.array_equal(tree_cells(mask, seq_lens, n, mode).cpu(), sees)
    return mask, levels, sees


@pytest.mark.parametrize("spelling", ["retrive", "retrieve"])
def test_links_of_published_masks(on_torch_device, spelling) -> None:
    """The n-gram drafter's sibling lists ascend, as EAGLE's do."""
    mask = build(*EAGLE_CASE, 4, 4, QLEN)[0]
    outs = [torch.full(shape, 77) for shape in ((16,), (2, 8), (2, 8), (2, 8))]
    names = ["positions", *(f"{spelling}_{x}" for x in ("index", "next_token", "next_sibling"))]
    lens = torch.tensor(EAGLE["seq_lens"])
    form = {"batch_size": 2, "draft_token_num": 8, "verified_seq_len": lens, **dict(zip(names, outs, strict=True))}
    reconstruct_indices_from_tree_mask(mask, **form)
    assert [out.tolist() for out in outs] == EAGLE_LISTS
    with pytest.raises(ValueError, match=r"tree_mask: expected 128 elements of one byte, got 64 of torch\.bool"):
        reconstruct_indices_from_tree_mask(mask[:64], **form)
    assert build_tree_kernel_efficient_cpu is build_tree_kernel_efficient  # SGLang's name on CPUs


@pytest.mark.parametrize("mode", TreeMaskMode)
@pytest.mark.parametrize("spelling", ["retrive", "retrieve"])
def test_published_eagle_tree(on_torch_device, mode, spelling) -> None:
    mask, *lists = build(*EAGLE_CASE, 4, 4, mode, spelling=spelling)
    assert [x.tolist() for x in lists] == EAGLE_LISTS
    assert np.array_equal(tree_cells(mask, EAGLE["seq_lens"], 8, mode).cpu(), reference(*EAGLE_CASE[:2], 4, 4)[3])


@pytest.mark.parametrize("mode", TreeMaskMode)
@pytest.mark.parametrize("name", MALFORMED)
def test_published_malformed_trees(on_torch_device, name, mode) -> None:
    _, levels, _ = check(MALFORMED[name], MALFORMED_SELECTED, [7, 11], 2, 3, mode)
    if name == "own ancestor":
        assert [levels.tolist(), *reference(MALFORMED[name], MALFORMED_SELECTED, 2, 3)[1:3]] == OWN_ANCESTOR


def random_drafts(rng: np.random.Generator, bs: int, topk: int, depth: int, n: int):
    """Makes `depth` levels of topk x topk drafts, n - 1 of them chosen at random."""
    parents, selected = [], []
    for _ in range(bs):
        groups, alive, nodes = [-1], [*range(topk)], []
        everyone = {x: None for x in range(topk)}
        for level in range(1, depth):
            groups += alive  # group g of topk drafts continues groups[g]
            begin = topk + (level - 1) * topk * topk
            children = {begin + i: alive[i // topk] for i in range(topk * topk)}
            everyone |= children
            alive = sorted(rng.choice([*children], topk, replace=False).tolist())
        while len(nodes) < n - 1:
            ready = [x for x, parent in everyone.items() if x not in nodes and (parent is None or parent in nodes)]
            nodes.append(int(rng.choice(ready)))
        parents.append(groups)
        selected.append(sorted(nodes))
    return parents, selected


@pytest.mark.parametrize(("bs", "topk", "depth", "n"), [(3, 4, 4, 17), (40, 3, 3, 9), (1, 8, 2, 33), (2, 1, 5, 6)])
@pytest.mark.parametrize("mode", TreeMaskMode)
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_random_trees(bs, topk, depth, n, mode, dtype) -> None:
    if mode == PACKED and n > 32:
        pytest.skip("bit-packed masks end at 32 nodes")
    rng = np.random.default_rng(n)
    parents, selected = random_drafts(rng, bs, topk, depth, n)
    seq_lens = rng.integers(0, 20, bs).tolist()
    mask, _, sees = check(parents, selected, seq_lens, topk, depth, mode, dtype=dtype, spare=5)
    if mode == FULL:  # the caller's prefix stays visible
        assert int(mask.sum()) == 5 + n * sum(seq_lens) + sees.sum()
    words = tree_mask_words(mask, torch.tensor(seq_lens), n, mode)
    bits = words.view(bs, n, -1)[..., torch.arange(n) // 32] >> (torch.arange(n) % 32) & 1
    assert np.array_equal(bits.bool(), sees)


def test_random_nonsense(on_torch_device) -> None:
    """Cycles, nodes without a parent, and repeated drafts occur."""
    rng = np.random.default_rng(3)
    bs, topk, depth, n = 300, 2, 4, 7
    selected = rng.integers(0, topk * (topk * (depth - 1) + 1), (bs, n - 1)).tolist()
    parents = rng.integers(-2, topk * (topk * (depth - 1) + 1), (bs, topk * (depth - 1) + 1)).tolist()
    seq_lens = rng.integers(0, 9, bs).tolist()
    _, levels, _ = check(parents, selected, seq_lens, topk, depth, QLEN)
    assert (levels == depth).any() and (np.array(reference(parents, selected, topk, depth)[1])[:, 0] < 0).any()


def test_one_node_and_no_sequence(on_torch_device) -> None:
    mask, positions, index, *links = build([[]], [[]], [7], 1, 1, QLEN)
    assert (mask.tolist(), positions.tolist(), index.tolist()) == ([True], [7], [[0]])
    assert [link.tolist() for link in links] == [[[-1]], [[-1]]]
    empty = torch.zeros(0, 3, dtype=torch.int64)
    outs = [torch.zeros(0, 4, dtype=torch.int64) for _ in range(3)]
    lens, mask = torch.zeros(0, dtype=torch.int64), torch.zeros(0, dtype=torch.bool)
    build_tree_kernel_efficient(torch.zeros(0, 5, dtype=torch.int64), empty, lens, mask, lens, *outs, 2, 3, 4, 0)


def test_packed_mask_of_wider_elements() -> None:
    """SGLang allocates bs * N elements of 8, 16 or 32 bits."""
    parents, selected = random_drafts(np.random.default_rng(2), 2, 3, 3, 12)
    outs = [torch.zeros(2, 12, dtype=torch.int64) for _ in range(3)]
    mask, seq_lens = torch.zeros(24, dtype=torch.uint16), torch.tensor([4, 5])
    case = torch.tensor(parents), torch.tensor(selected), seq_lens
    build_tree_kernel_efficient(*case, mask, torch.zeros(24, dtype=torch.int64), *outs, 3, 3, 12, 2)
    sees = reference(parents, selected, 3, 3)[3]
    assert mask.tolist() == (sees * (1 << np.arange(12))).sum(-1).flatten().tolist()
    assert torch.equal(tree_mask_words(mask, seq_lens, 12, 2).flatten(), mask.int())


# move_kv_cache --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [0, 1, 7, 1023, 1500])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_move_kv_cache(on_device, count, dtype) -> None:
    generator = seeded(count)
    k = [torch.randn(4000, 2, 8, generator=generator) for _ in range(3)]
    v = [torch.randn(4000, 2, 16, generator=generator).bfloat16() for _ in range(3)]
    # Targets and sources overlap within one group.
    slots = torch.randperm(min(4000, max(8, count + count // 2)), generator=generator)
    if count > 1023:
        slots = torch.randperm(4000, generator=generator)
    tgt, src = slots[:count], slots.flip(0)[:count]
    expected = [x.index_copy(0, tgt, x[src]) for x in (*k, *v)]
    move_kv_cache(k, v, tgt.to(dtype), src.to(dtype))
    assert all(torch.equal(x, y) for x, y in zip((*k, *v), expected, strict=True))


def test_move_kv_cache_on_views(on_device) -> None:
    pool = torch.arange(60.0).view(10, 2, 3)
    before = pool.clone()
    padding = torch.tensor([3, 0, 0])  # SGLang pads with moves of slot 0 to itself
    move_kv_cache([pool[:, :1]], [], padding, torch.tensor([5, 0, 0]))
    before[3, 0] = before[5, 0]
    assert torch.equal(pool, before)
    move_kv_cache([pool], [], torch.tensor([3, 10]), torch.tensor([-1, 2]))  # outside: skipped
    assert torch.equal(pool, before)
    move_kv_cache([], [], padding, padding)
