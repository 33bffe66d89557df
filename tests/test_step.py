"""prepare_step and commit against plain loops, and whole decoding loops over both."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor

from pagedtree import (
    Commit,
    DraftTree,
    TreeBatch,
    Verdict,
    append_kv,
    build_trees,
    commit,
    compact_kv,
    prepare_step,
    slot_mapping,
)
from pagedtree._ops import ops


def int32(values: list, device: torch.device | str = "cpu") -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device=device)


def int64(values: list, device: torch.device | str = "cpu") -> Tensor:
    return torch.tensor(values, dtype=torch.int64, device=device)


@st.composite
def tree_parents(draw: st.DrawFn, max_nodes: int = 20) -> list[int]:
    n = draw(st.integers(1, max_nodes))
    return [-1] + [draw(st.integers(0, i - 1)) for i in range(1, n)]


def batch_of(parents: list[list[int]], device, padding: int = 0, max_depth: int = 19) -> TreeBatch:
    cu_nodes = int32(np.concatenate([[0], np.cumsum([len(p) for p in parents])]).tolist(), device)
    flat = int32([node for p in parents for node in p] + [-1] * padding, device)
    return build_trees(flat, cu_nodes, max_nodes=20, max_depth=max_depth)


# prepare_step ---------------------------------------------------------------------------------------------------------


@given(
    parents=st.lists(st.one_of(tree_parents(), st.lists(st.integers(-2, 9), max_size=8)), max_size=5),
    page_size=st.sampled_from([1, 7, 16, 61]),
    padding=st.integers(0, 4),
    extra=st.integers(-3, 5),
    seed=st.integers(0, 99),
)
def test_prepare_step(backend, device, parents, page_size, padding, extra, seed) -> None:
    rng = np.random.default_rng(seed)
    trees = batch_of(parents, device, padding)
    batch, rows = len(parents), sum(len(p) for p in parents)
    max_pages = -(-100 // page_size)
    table = rng.integers(0, 2**31 // page_size, size=(batch, max_pages + 1))
    start = [int(rng.integers(0, 80)) if rng.random() < 0.9 else -1 for _ in range(batch)]
    total_q = max(0, rows + padding + extra)
    positions, slots, seq_lens = [0] * total_q, [-1] * total_q, [0] * batch
    offsets = [min(int(o), total_q) for o in np.concatenate([[0], np.cumsum([len(p) for p in parents])])]
    depths = trees.depths.tolist()
    for b in range(batch):
        if start[b] < 0:
            continue
        seq_lens[b] = start[b] + offsets[b + 1] - offsets[b]
        for row in range(offsets[b], offsets[b + 1]):
            position = start[b] + row - offsets[b]
            positions[row] = start[b] + max(depths[row], 0)
            slots[row] = int(table[b, position // page_size]) * page_size + position % page_size
    page_table = torch.from_numpy(table.astype(np.int32)).to(device)[:, :max_pages]
    got = prepare_step(trees, page_table, int32(start, device), page_size, total_q=total_q)
    assert [t.dtype for t in got] == [torch.int64, torch.int32, torch.int32, torch.int64]
    assert [t.tolist() for t in got] == [positions, seq_lens, offsets, slots]
    if -1 not in start:  # the slots are those of slot_mapping
        assert torch.equal(got[3], slot_mapping(page_table, got[1], got[2], page_size, total_q=total_q))


def test_prepare_step_bad_values(backend, device) -> None:
    trees = batch_of([[-1, 0, 1], [-1, 0]], device)
    table = int32([[3, -2], [5, 6]], device)
    _, seq_lens, _, slots = prepare_step(trees, table, int32([1, 3], device), 2, total_q=5)
    assert slots.tolist() == [7, -1, -1, 13, -1] and seq_lens.tolist() == [4, 5]  # no page; past the table
    positions, seq_lens, _, slots = prepare_step(trees, table, int32([2**31 - 1, -(2**31)], device), 2, total_q=5)
    assert positions.tolist() == [2**31 - 1, 2**31, 2**31 + 1, 0, 0]
    assert seq_lens.tolist() == [2**31 - 1, 0] and slots.tolist() == [-1] * 5
    for offsets in ([0, 99, 3], [9, -4, 2], [-(2**31), 2**31 - 1, 0], [3, 2, 1]):
        trees.cu_nodes.copy_(int32(offsets, device))
        _, seq_lens, cu_seqlens_q, slots = prepare_step(trees, table, int32([0, 1], device), 2, total_q=5)
        assert all(0 <= offset <= 5 for offset in cu_seqlens_q.tolist())
        assert all(0 <= length <= 6 for length in seq_lens.tolist())
        assert all(-1 <= slot <= 13 for slot in slots.tolist())


def test_prepare_step_refuses(backend, device) -> None:
    trees = batch_of([[-1, 0]], device)
    good = {"trees": trees, "page_table": int32([[0, 1]], device), "start": int32([1], device), "page_size": 2}
    assert prepare_step(**good, total_q=2)[3].tolist() == [1, 2]
    for name, value, message in [
        ("page_table", int32([[0, 1], [2, 3]], device), r"`page_table` must be of shape \[1, \*\], got \[2, 2\]"),
        ("page_table", int64([[0, 1]], device), "`page_table` must be of dtype Int, got Long"),
        ("start", int32([1, 2], device), r"`start` must be of shape \[1\], got \[2\]"),
        ("start", int32([1, 9, 2, 9], device)[::2][:1].expand(2)[:1].double(), "`start` must be of dtype Int"),
        ("page_size", 0, "`page_size` must be in 1..2147483647, got 0"),
        ("total_q", -1, "`total_q` must be at least 0, got -1"),
    ]:
        with pytest.raises(ValueError, match=f"prepare_step: {message}"):
            prepare_step(**{"total_q": 2, **good, name: value})


def test_prepare_step_value_checks(value_checks, device) -> None:
    trees = batch_of([[-1, 0], [-1, 0]], device)
    table = int32([[0, 1], [2, -5]], device)
    for start, total_q, message in [
        ([1, 0], 3, "`cu_nodes` must be at most 3 rows, got 4"),
        ([3, 0], 4, "wide enough for position 4 of sequence 0"),
        ([1, 1], 4, r"`page_table\[1, 1\]` must be a page id"),
    ]:
        with pytest.raises(ValueError, match=f"prepare_step: .*{message}"):
            prepare_step(trees, table, int32(start, device), 2, total_q=total_q)
    assert prepare_step(trees, table, int32([-1, 0], device), 2, total_q=4)[1].tolist() == [0, 2]


# commit ---------------------------------------------------------------------------------------------------------------


def reference_commit(accept_index, num_accepted, tokens, offsets, start, history, lens, eos, node_map) -> dict:
    """The docstring's loop in plain Python; `history` is a list of lists of fixed length."""
    width = len(accept_index[0]) if accept_index else 0

    def padded(values: list[int]) -> list[int]:
        return values + [-1] * (width - len(values))

    out: dict[str, list] = {name: [] for name in Commit._fields}
    history, lens = [row[:] for row in history], lens[:]
    for b, nodes in enumerate(accept_index):
        size = offsets[b + 1] - offsets[b]
        path: list[int] = []
        emitted: list[int] = []
        ended = False
        if size > 0 and start[b] >= 0 and nodes[0] == 0:
            for j in range(min(max(num_accepted[b], 0), width - 1) + 1):
                if ended or tokens[b][j] < 0 or (j > 0 and not nodes[j - 1] < nodes[j] < size):
                    break
                path.append(nodes[j])
                emitted.append(tokens[b][j])
                ended = tokens[b][j] in eos[b]
        present = path[:1]
        for node in path[1:]:
            if node_map[offsets[b] + node] < 0:
                break
            present.append(node_map[offsets[b] + node])
        lacking = emitted[len(present) - 1 : -1] if path else []
        out["start"].append(min(start[b] + len(emitted), 2**31 - 1))
        out["last_token"].append(emitted[-1] if emitted else -1)
        out["finished"].append(ended or not emitted)
        out["num_accepted"].append(max(len(path) - 1, 0))
        out["num_tokens"].append(len(emitted))
        out["accept_rows"].append(padded([offsets[b] + node for node in path]))
        out["draft_accept_index"].append(padded(present))
        out["draft_num_accepted"].append(max(len(present) - 1, 0))
        out["draft_missing"].append(padded(lacking))
        out["draft_num_missing"].append(len(lacking))
        if emitted:
            lens[b] = min(max(lens[b], 0), len(history[b]))
            for token in emitted[: len(history[b]) - lens[b]]:
                history[b][lens[b]] = token
                lens[b] += 1
    return {**out, "history": history, "lens": lens}


def check_commit(
    device, accept_index, num_accepted, tokens, parents, start, history, lens, eos, per_row_eos, node_map
) -> None:
    batch, width = len(parents), len(accept_index[0])
    trees = batch_of(parents, device, max_depth=max(width - 1, 0))
    offsets = trees.cu_nodes.tolist()
    eos_rows = eos if per_row_eos else [eos[0]] * batch
    expected = reference_commit(accept_index, num_accepted, tokens, offsets, start, history, lens, eos_rows, node_map)

    def strided(values: list, dtype: torch.dtype) -> Tensor:
        wide = torch.full((len(values), len(values[0]) + 2), 77, dtype=dtype, device=device)
        wide[:, : len(values[0])] = torch.tensor(values, dtype=dtype, device=device).view(len(values), -1)
        return wide

    wide_history, wide_eos = strided(history, torch.int64), strided(eos_rows, torch.int64)
    eos_ids = wide_eos[:, : len(eos_rows[0])] if per_row_eos else int64(eos[0], device)
    verdict = Verdict(
        strided(accept_index, torch.int32)[:, :width],
        int32(num_accepted, device),
        strided(tokens, torch.int64)[:, :width],
        int32([0] * batch, device),
    )
    history_lens = int32(lens, device)
    result = commit(
        verdict,
        trees,
        int32(start, device),
        history=wide_history[:, : len(history[0])],
        history_lens=history_lens,
        eos_ids=eos_ids,
        node_map=int32(node_map, device),
    )
    for name in Commit._fields:
        assert getattr(result, name).tolist() == expected[name], name
    assert wide_history[:, : len(history[0])].tolist() == expected["history"]
    assert (wide_history[:, len(history[0]) :] == 77).all()
    assert history_lens.tolist() == expected["lens"]
    bare = commit(verdict, trees, int32(start, device), eos_ids=eos_ids)
    assert bare[6:] == (None,) * 4
    for mine, same in zip(bare[:6], result[:6], strict=True):
        assert torch.equal(mine, same)
    dtypes = {t.dtype for t in (result.start, result.num_accepted, result.num_tokens, result.draft_accept_index)}
    assert dtypes == {torch.int32} and result.finished.dtype == torch.bool
    assert {t.dtype for t in (result.last_token, result.accept_rows, result.draft_missing)} == {torch.int64}


def path_to(parents: list[int], node: int) -> list[int]:
    path = []
    while node >= 0:
        path.append(node)
        node = parents[node]
    return path[::-1]


@given(
    parents=st.lists(st.one_of(tree_parents(), st.just([])), min_size=1, max_size=4),
    capacity=st.sampled_from([0, 3, 40]),
    per_row_eos=st.booleans(),
    seed=st.integers(0, 999),
)
def test_commit(backend, device, parents, capacity, per_row_eos, seed) -> None:
    rng = np.random.default_rng(seed)
    batch = len(parents)
    paths = [path_to(p, int(rng.integers(0, len(p)))) if p else [] for p in parents]
    width = max(len(path) for path in paths) + 1
    check_commit(
        device,
        accept_index=[path + [-1] * (width - len(path)) for path in paths],
        num_accepted=[max(len(path) - 1, 0) for path in paths],
        tokens=[rng.integers(0, 6, size=len(path)).tolist() + [-1] * (width - len(path)) for path in paths],
        parents=parents,
        start=[int(rng.integers(0, 50)) if rng.random() < 0.9 else -1 for _ in paths],
        history=[[90 + i for i in range(capacity)] for _ in paths],
        lens=[int(rng.integers(0, capacity + 1)) for _ in paths],
        eos=rng.choice([-1, 0, 1, 99], size=(batch, int(rng.integers(0, 3)))).tolist(),
        per_row_eos=per_row_eos,
        node_map=[int(rng.integers(-1, 30)) if rng.random() < 0.5 else i for i in range(sum(map(len, parents)))],
    )


@given(
    accept_index=st.lists(st.lists(st.integers(-2, 6), min_size=4, max_size=4), min_size=2, max_size=2),
    first=st.lists(st.sampled_from([0, 0, 0, -1, 3]), min_size=2, max_size=2),
    num_accepted=st.lists(st.sampled_from([-7, 0, 2, 3, 4, 2**31 - 1]), min_size=2, max_size=2),
    tokens=st.lists(
        st.lists(st.sampled_from([1, 1, 1, 2**62, 2, -1, -(2**63)]), min_size=4, max_size=4), min_size=2, max_size=2
    ),
    start=st.lists(st.sampled_from([-(2**31), -1, 0, 2**31 - 1]), min_size=2, max_size=2),
    lens=st.lists(st.sampled_from([-(2**31), -1, 2, 5, 2**31 - 1]), min_size=2, max_size=2),
    node_map=st.lists(st.sampled_from([-(2**31), -1, 0, 3, 2**31 - 1]), min_size=7, max_size=7),
)
@example(  # nodes outside their trees, among good values
    accept_index=[[0, 1, 4, 6], [0, 2, 3, 6]],
    first=[0, 0],
    num_accepted=[3, 3],
    tokens=[[1, 1, 1, 1]] * 2,
    start=[0, 0],
    lens=[0, 0],
    node_map=[0, 1, 2, 3, 0, 1, 2],
)
def test_commit_bad_values(backend, device, accept_index, first, num_accepted, tokens, start, lens, node_map) -> None:
    check_commit(
        device,
        accept_index=[[f, *nodes[1:]] for f, nodes in zip(first, accept_index, strict=True)],
        num_accepted=num_accepted,
        tokens=tokens,
        parents=[[-1, 0, 0, 1], [-1, 0, 1]],
        start=start,
        history=[[0] * 5, [0] * 5],
        lens=lens,
        eos=[[2, -1]] * 2,
        per_row_eos=False,
        node_map=node_map,
    )


def test_eos_shared_and_of_each_sequence(backend, device) -> None:
    trees = batch_of([[-1, 0, 1]] * 2, device)
    verdict = Verdict(int32([[0, 1, 2]] * 2, device), int32([2, 2], device), int64([[5, 6, 7]] * 2, device), None)
    for eos_ids, num_tokens in [
        ([6], [2, 2]),
        ([-1, 7], [3, 3]),
        ([[5, -1], [9, 6]], [1, 2]),
        ([[], []], [3, 3]),
        ([], [3, 3]),
    ]:
        result = commit(verdict, trees, int32([4, 8], device), eos_ids=int64(eos_ids, device))
        assert result.num_tokens.tolist() == num_tokens
        assert result.start.tolist() == [4 + num_tokens[0], 8 + num_tokens[1]]
        assert result.last_token.tolist() == [4 + count for count in num_tokens]
        assert result.finished.tolist() == [int64(eos_ids).numel() > 0] * 2


def test_commit_bad_offsets(backend, device) -> None:
    trees = batch_of([[-1, 0], [-1]], device)
    verdict = Verdict(int32([[0, 1], [0, 1]], device), int32([1, 1], device), int64([[1, 2]] * 2, device), None)
    node_map = int32([0, 1, 0], device)
    for offsets in ([0, 99, 3], [9, -4, 2], [-(2**31), 2**31 - 1, 0], [3, 2, 1]):
        trees.cu_nodes.copy_(int32(offsets, device))
        result = commit(verdict, trees, int32([0, 0], device), node_map=node_map)
        assert all(-1 <= row < 3 for row in result.accept_rows.flatten().tolist())


def test_commit_empty(backend, device) -> None:
    trees = batch_of([], device)
    nodes, tokens = torch.zeros((0, 3), dtype=torch.int32), torch.zeros((0, 3), dtype=torch.int64)
    verdict = Verdict(nodes.to(device), int32([], device), tokens.to(device), int32([], device))
    result = commit(verdict, trees, int32([], device), node_map=int32([], device))
    assert [tuple(t.shape) for t in result] == [(0,)] * 5 + [(0, 3)] * 2 + [(0,), (0, 3), (0,)]


def commit_arguments(device) -> dict:
    return {
        "verdict": Verdict(int32([[0, 2]], device), int32([1], device), int64([[5, 6]], device), int32([0], device)),
        "trees": batch_of([[-1, 0, 0]], device, max_depth=1),
        "start": int32([4], device),
        "history": torch.zeros((1, 8), dtype=torch.int64, device=device),
        "history_lens": int32([3], device),
    }


def test_commit_refuses(backend, device) -> None:
    verdict = commit_arguments(device)["verdict"]
    for change, message in [
        ({"verdict": verdict._replace(tokens=int32([[5, 6]], device))}, "`tokens` must be of dtype Long, got Int"),
        (
            {"verdict": verdict._replace(tokens=int64([[5]], device))},
            r"`tokens` must be of shape \[1, 2\], got",
        ),
        ({"verdict": verdict._replace(num_accepted=int32([1, 1], device))}, r"`num_accepted` must be of shape \[1\]"),
        (
            {"verdict": verdict._replace(accept_index=int32([0, 2], device))},
            r"`accept_index` must be of shape \[\*, \*\]",
        ),
        ({"trees": batch_of([[-1], [-1]], device)}, r"`cu_nodes` must be of shape \[2\], got \[3\]"),
        ({"start": int64([4], device)}, "`start` must be of dtype Int, got Long"),
        ({"history": None}, "`history_lens` must be given together with `history`, got a tensor"),
        ({"history_lens": None}, "`history_lens` must be given together with `history`, got None"),
        ({"history": torch.zeros((2, 8), dtype=torch.int64)}, r"`history` must be of shape \[1, \*\], got \[2, 8\]"),
        ({"history": torch.zeros((1, 8), dtype=torch.int32)}, "`history` must be of dtype Long, got Int"),
        ({"history_lens": int64([3], device)}, "`history_lens` must be of dtype Int, got Long"),
        ({"eos_ids": int32([3], device)}, "`eos_ids` must be of dtype Long, got Int"),
        ({"eos_ids": int64([[3], [4]], device)}, r"`eos_ids` must be of shape \[1, \*\], got \[2, 1\]"),
        ({"eos_ids": int64([[[3]]], device)}, r"`eos_ids` must be of shape \[1, \*\]"),
        ({"node_map": int64([0, 1, 2], device)}, "`node_map` must be of dtype Int, got Long"),
    ]:
        arguments = {**commit_arguments(device), **change}
        with pytest.raises(ValueError, match=f"commit: {message}"):
            commit(**arguments)
        assert arguments["history"] is None or not arguments["history"].any()


def test_commit_value_checks(value_checks, device) -> None:
    verdict = commit_arguments(device)["verdict"]
    for change, message in [
        ({"verdict": verdict._replace(num_accepted=int32([2], device))}, r"`num_accepted\[0\]` must be in 0..1, got 2"),
        ({"verdict": verdict._replace(accept_index=int32([[0, 3]], device))}, "must be a node of a tree of 3, got 3"),
        ({"verdict": verdict._replace(accept_index=int32([[1, 2]], device))}, r"`accept_index\[0, 0\]` must be 0"),
        ({"verdict": verdict._replace(accept_index=int32([[0, 0]], device))}, "must be greater than the node before"),
        ({"history_lens": int32([9], device)}, r"`history_lens\[0\]` must be in 0..8, got 9"),
        ({"node_map": int32([0, 1], device)}, "`cu_nodes` must be at most 2 rows, got 3"),
    ]:
        arguments = {**commit_arguments(device), **change}
        with pytest.raises(ValueError, match=f"commit: .*{message}"):
            commit(**arguments)
        assert not arguments["history"].any()
    arguments = commit_arguments(device)
    assert commit(**arguments).start.tolist() == [6]
    assert arguments["history"].tolist() == [[0, 0, 0, 5, 6, 0, 0, 0]] and arguments["history_lens"].tolist() == [5]


# Whole loops ----------------------------------------------------------------------------------------------------------


def next_token(prefix: list[int]) -> int:
    """The target model: a function of the whole prefix, 0 (EOS) now and then."""
    value = 7
    for token in prefix:
        value = (value * 31 + token + 1) % 1000003
    return value % 13


def draft(rng: np.random.Generator, prefix: list[int], num_nodes: int) -> tuple[list[int], list[int]]:
    """A random tree, parents and tokens, whose tokens are often right."""
    parents, tokens, paths = [-1], [prefix[-1]], [prefix]
    for _ in range(1, num_nodes):
        parent = int(rng.integers(max(0, len(parents) - 3), len(parents)))
        right = next_token(paths[parent])
        taken = {tokens[i] for i in range(1, len(parents)) if parents[i] == parent}
        token = right if rng.random() < 0.7 and right not in taken else int(rng.integers(0, 13))
        parents.append(parent)
        tokens.append(token)
        paths.append([*paths[parent], token])
    return parents, tokens


def choose(rng: np.random.Generator, parents: list[int], more: float) -> list[int]:
    """Nodes of a subtree with the root, parents first but otherwise in any order."""
    chosen = [0]
    while len(chosen) < len(parents) and rng.random() < more:
        ready = [i for i in range(len(parents)) if i not in chosen and parents[i] in chosen]
        chosen.append(int(rng.choice(ready)))
    return chosen


def follow(prefix: list[int], parents: list[int], tokens: list[int]) -> tuple[list[int], list[int]]:
    """Greedy verification of one tree: the nodes of the path, and the tokens after each."""
    nodes, emitted = [0], [next_token(prefix)]
    while True:
        step = [i for i in range(len(parents)) if parents[i] == nodes[-1] and tokens[i] == emitted[-1]]
        if not step:
            return nodes, emitted
        nodes.append(step[0])
        emitted.append(next_token(prefix + emitted))


@pytest.mark.parametrize("page_size", [1, 7, 16])
def test_decoding_loop(backend, device, page_size) -> None:
    """Target and draft cache hold tokens as payload: after each step they must read as the history does."""
    rng = np.random.default_rng(page_size)
    prompts = [[3, 1, 4], [1], [5, 9, 2, 6, 5, 3], [8, 9]]
    batch, limit, width, max_nodes = len(prompts), 60, 24, 14
    max_pages = -(-(limit + 2 * max_nodes) // page_size)
    pages = rng.permutation(batch * max_pages).reshape(batch, max_pages)
    page_table = torch.from_numpy(pages.astype(np.int32)).to(device)
    draft_table = page_table.flip(0).contiguous()
    caches = [torch.full((batch * max_pages, page_size, 1, 1), -1.0, device=device) for _ in range(2)]
    draft_caches = [torch.full_like(cache, -1.0) for cache in caches]

    def write(caches: list[Tensor], table: Tensor, b: int, position: int, tokens: list[int]) -> None:
        lens, rows = int32([position + len(tokens)], device), torch.tensor(tokens, dtype=torch.float32, device=device)
        slots = slot_mapping(table[b : b + 1], lens, int32([0, len(tokens)], device), page_size)
        append_kv(rows.view(-1, 1, 1), -rows.view(-1, 1, 1), *caches, slots)

    def read(caches: list[Tensor], table: Tensor, b: int, length: int) -> list[int]:
        slots = slot_mapping(table[b : b + 1], int32([length], device), int32([0, length], device), page_size)
        k, v = (cache.flatten()[slots] for cache in caches)
        assert torch.equal(k, -v)
        return k.int().tolist()

    history = torch.zeros((batch, limit), dtype=torch.int64, device=device)
    for b, prompt in enumerate(prompts):
        history[b, : len(prompt)] = int64(prompt, device)
        write(caches, page_table, b, 0, prompt[:-1])
        write(draft_caches, draft_table, b, 0, prompt[:-1])
    history_lens = int32([len(prompt) for prompt in prompts], device)
    start, finished, steps, lacked = history_lens - 1, [False] * batch, 0, 0
    while not all(finished):
        steps += 1
        texts = [history[b, : history_lens[b]].tolist() for b in range(batch)]
        parents: list[list[int]] = []
        node_map, nodes, emitted, flat = [], [], [], []
        for b in range(batch):
            if finished[b] or len(texts[b]) + max_nodes > limit:
                parents.append([])
                nodes.append([])
                emitted.append([])
                continue
            grown, tokens = draft(rng, texts[b], max_nodes)
            # The draft model fed the inner nodes only, in an order of its own.
            fed = choose(rng, grown, 0.7)
            write(draft_caches, draft_table, b, int(start[b]), [tokens[i] for i in fed])
            kept = choose(rng, grown, 0.95)
            parents.append([-1] + [kept.index(grown[i]) for i in kept[1:]])
            node_map += [fed.index(i) if i in fed else -1 for i in kept]
            mine = [tokens[i] for i in kept]
            flat += mine
            path, after = follow(texts[b], parents[b], mine)
            nodes.append(path)
            emitted.append(after)
        trees = batch_of(parents, device, padding=3)
        node_map += [-1] * 3
        _, seq_lens, cu_seqlens_q, slots = prepare_step(trees, page_table, start, page_size, total_q=len(flat) + 3)
        assert torch.equal(seq_lens, start + cu_seqlens_q.diff())
        rows = torch.tensor(flat + [99.0] * 3, device=device).view(-1, 1, 1)
        append_kv(rows, -rows, *caches, slots)
        verdict = Verdict(
            int32([path + [-1] * (width - len(path)) for path in nodes], device),
            int32([max(len(path) - 1, 0) for path in nodes], device),
            int64([after + [-1] * (width - len(after)) for after in emitted], device),
            int32([0] * batch, device),
        )
        result = commit(
            verdict,
            trees,
            start,
            history=history,
            history_lens=history_lens,
            eos_ids=int64([0], device),
            node_map=int32(node_map, device),
        )
        new_lens = compact_kv(caches, page_table, start, verdict.accept_index, result.num_accepted)
        assert torch.equal(new_lens, result.start)
        draft_lens = compact_kv(draft_caches, draft_table, start, result.draft_accept_index, result.draft_num_accepted)
        assert torch.equal(draft_lens + result.draft_num_missing, result.start)
        for b, tokens in enumerate(result.draft_missing.tolist()):
            missing = tokens[: int(result.draft_num_missing[b])]
            lacked += len(missing)
            write(draft_caches, draft_table, b, int(draft_lens[b]), missing)
        start, finished = result.start, result.finished.tolist()
        for b in range(batch):
            text = history[b, : history_lens[b]].tolist()
            assert int(start[b]) == len(text) - 1
            assert read(caches, page_table, b, len(text) - 1) == text[:-1]
            assert read(draft_caches, draft_table, b, len(text) - 1) == text[:-1]
            if parents[b]:
                assert int(result.last_token[b]) == text[-1]
    plain = []
    for prompt in prompts:
        text = prompt[:]
        while len(text) == len(prompt) or (text[-1] != 0 and len(text) < limit):
            text.append(next_token(text))
        plain.append(text)
    for b, text in enumerate(plain):
        assert history[b, : history_lens[b]].tolist() == text[: int(history_lens[b])]
        assert int(history_lens[b]) == len(text) or int(history_lens[b]) + max_nodes > limit
    assert steps < max(len(text) for text in plain) and lacked > 0


# torch ----------------------------------------------------------------------------------------------------------------


def test_opcheck(backend, device) -> None:
    arguments = commit_arguments(device)
    trees, verdict, start = arguments["trees"], arguments["verdict"], arguments["start"]
    table = int32([[0, 1, 2, 3]], device)
    torch.library.opcheck(ops.prepare_step.default, (trees.cu_nodes, trees.depths, table, start, 2), {"total_q": 4})
    positional = (verdict.accept_index, verdict.num_accepted, verdict.tokens, trees.cu_nodes, start)
    written = {"history": arguments["history"], "history_lens": arguments["history_lens"]}
    torch.library.opcheck(ops.commit.default, positional)
    optional = {"eos_ids": int64([[2]], device), "node_map": int32([0, 1, 2], device)}
    torch.library.opcheck(ops.commit.default, positional, {**written, **optional})


def test_compile(backend, device) -> None:
    def step(parents, cu_nodes, table, start, accept_index, num_accepted, tokens, history, history_lens):
        trees = build_trees(parents, cu_nodes, max_nodes=4, max_depth=1)
        prepared = prepare_step(trees, table, start, 2, total_q=4)
        verdict = Verdict(accept_index, num_accepted, tokens, num_accepted * 0)
        result = commit(verdict, trees, start, history=history, history_lens=history_lens)
        return prepared, result, history + 1

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    results = []
    for run in (step, compiled):
        arguments = commit_arguments(device)
        verdict, history, lens = arguments["verdict"], arguments["history"], arguments["history_lens"]
        prepared, result, more = run(
            int32([-1, 0, 0, -1], device),
            int32([0, 3], device),
            int32([[4, 5, 6, 7]], device),
            arguments["start"],
            *verdict[:3],
            history,
            lens,
        )
        assert isinstance(result, Commit) and result.draft_missing is None
        results.append([*prepared, *result[:6], more, history, lens])
    assert all(torch.equal(eager, other) for eager, other in zip(*results, strict=True))
    assert results[1][-2].tolist() == [[0, 0, 0, 5, 6, 0, 0, 0]]


def test_idle_trees(backend, device) -> None:
    """Finished sequences stay in the batch with no nodes, or with a negative start in a batch of fixed shape."""
    fixed = TreeBatch.from_trees([DraftTree.chain(1)] * 2, device=device)
    verdict = Verdict(int32([[0, 1]] * 2, device), int32([1, 1], device), int64([[3, 4]] * 2, device), None)
    lens = int32([2, 2], device)
    history = torch.zeros((2, 6), dtype=torch.int64, device=device)
    result = commit(verdict, fixed, int32([-1, 1], device), history=history, history_lens=lens)
    assert result.start.tolist() == [-1, 3] and result.finished.tolist() == [True, False]
    assert result.last_token.tolist() == [-1, 4] and lens.tolist() == [2, 4]
    assert history.tolist() == [[0] * 6, [0, 0, 3, 4, 0, 0]]
