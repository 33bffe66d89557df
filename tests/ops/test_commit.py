"""commit against plain loops."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from step_case import batch_of, commit_arguments, int32, int64, tree_parents
from torch import Tensor

from pagedtree import Commit, RequestOptions, Verdict, commit
from pagedtree.reference import step as loops


def reference_commit(
    accept_index, num_accepted, tokens, offsets, start, history, lens, eos, node_map, tokens_left, history_rows
) -> dict:
    """The loop of the docstring; `history` is a list of lists of fixed length, which stays as it is."""
    history, lens = [row[:] for row in history], lens[:]
    out = loops.commit(
        accept_index, num_accepted, tokens, offsets, start, history, lens, eos, node_map, tokens_left, history_rows
    )
    return {**out._asdict(), "history": history, "lens": lens}


def check_commit(
    device, accept_index, num_accepted, tokens, parents, start, history, lens, eos, per_row_eos, node_map,
    tokens_left=None, history_rows=None,
) -> None:  # fmt: skip
    batch, width = len(parents), len(accept_index[0])
    trees = batch_of(parents, device, max_depth=max(width - 1, 0))
    offsets = trees.cu_nodes.tolist()
    eos_rows = eos if per_row_eos else [eos[0]] * batch
    expected = reference_commit(
        accept_index, num_accepted, tokens, offsets, start, history, lens, eos_rows, node_map, tokens_left, history_rows
    )
    limit = None if tokens_left is None else int32(tokens_left, device)

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
    counts = torch.zeros((batch, 5), dtype=torch.int32, device=device)
    result = commit(
        verdict,
        trees,
        int32(start, device),
        history=wide_history[:, : len(history[0])],
        history_lens=history_lens,
        eos_ids=eos_ids,
        node_map=int32(node_map, device),
        options=RequestOptions(output_counts=counts),
        tokens_left=limit,
        history_rows=None if history_rows is None else int32(history_rows, device),
    )
    for name in Commit._fields:
        assert getattr(result, name).tolist() == expected[name], name
    for said, row, kept in zip(counts.tolist(), tokens, expected["num_tokens"], strict=True):
        assert said == [row[:kept].count(x) for x in range(5)]
    assert wide_history[:, : len(history[0])].tolist() == expected["history"]
    assert (wide_history[:, len(history[0]) :] == 77).all()
    assert history_lens.tolist() == expected["lens"]
    bare = commit(verdict, trees, int32(start, device), eos_ids=eos_ids, tokens_left=limit)
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
    limited=st.booleans(),
    pooled=st.booleans(),
    seed=st.integers(0, 999),
)
def test_commit(backend, device, parents, capacity, per_row_eos, limited, pooled, seed) -> None:
    rng = np.random.default_rng(seed)
    batch = len(parents)
    histories = batch + 2 * pooled
    rows = [int(row) if rng.random() < 0.8 else -1 for row in rng.permutation(histories)[:batch]]
    paths = [path_to(p, int(rng.integers(0, len(p)))) if p else [] for p in parents]
    width = max(len(path) for path in paths) + 1
    check_commit(
        device,
        accept_index=[path + [-1] * (width - len(path)) for path in paths],
        num_accepted=[max(len(path) - 1, 0) for path in paths],
        tokens=[rng.integers(0, 6, size=len(path)).tolist() + [-1] * (width - len(path)) for path in paths],
        parents=parents,
        start=[int(rng.integers(0, 50)) if rng.random() < 0.9 else -1 for _ in paths],
        history=[[90 + i for i in range(capacity)] for _ in range(histories)],
        lens=[int(rng.integers(0, capacity + 1)) for _ in range(histories)],
        eos=rng.choice([-1, 0, 1, 99], size=(batch, int(rng.integers(0, 3)))).tolist(),
        per_row_eos=per_row_eos,
        node_map=[int(rng.integers(-1, 30)) if rng.random() < 0.5 else i for i in range(sum(map(len, parents)))],
        tokens_left=rng.integers(-1, 6, size=batch).tolist() if limited else None,
        history_rows=rows if pooled else None,
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
    tokens_left=st.lists(st.sampled_from([-(2**31), 0, 1, 3, 2**31 - 1]), min_size=2, max_size=2),
    history_rows=st.sampled_from([[-(2**31), 2**31 - 1], [2, 0], [1, -1]]),
)
@example(  # nodes outside their trees, among good values
    accept_index=[[0, 1, 4, 6], [0, 2, 3, 6]],
    first=[0, 0],
    num_accepted=[3, 3],
    tokens=[[1, 1, 1, 1]] * 2,
    start=[0, 0],
    lens=[0, 0],
    node_map=[0, 1, 2, 3, 0, 1, 2],
    tokens_left=[4, 4],
    history_rows=[0, 1],
)
def test_commit_bad_values(
    backend, device, accept_index, first, num_accepted, tokens, start, lens, node_map, tokens_left, history_rows
) -> None:
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
        tokens_left=tokens_left,
        history_rows=history_rows,
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


@pytest.mark.parametrize("history", [True, False])
def test_commit_counts_tokens(backend, device, history) -> None:
    """Once for each time that a token is kept, the bonus and EOS included, whether the history has room or not."""
    batch, vocab = 6, 9
    trees = batch_of([[-1, 0, 1, 2]] * 4 + [[], [-1, 0, 1, 2]], device, max_depth=3)
    verdict = Verdict(
        int32([[0, 1, 2, 3]] * 4 + [[-1] * 4, [0, 1, 2, 3]], device), int32([3, 3, 1, 3, 0, 3], device),
        int64([[5, 5, 2, 5], [1, 7, 3, 7], [4, 4, -1, -1], [8, 9, 2**40, 2**32 + 1], [-1] * 4, [6] * 4], device),
        int32([0] * batch, device),
    )  # fmt: skip
    wide = torch.full((batch, vocab + 4), 70, dtype=torch.int32, device=device)
    counts = wide[:, 2 : 2 + vocab]
    counts[:] = torch.arange(vocab, device=device)
    expected = counts.cpu().clone()
    for b, kept in ((0, [5, 5, 2, 5]), (1, [1, 7]), (2, [4, 4]), (3, [8])):  # 7 ends sequence 1, the last one is idle
        for token in kept:
            expected[b, token] += 1
    start = int32([0, 3, 4, 5, 6, -1], device)
    text = {"history": int64([[0] * 2] * batch, device), "history_lens": int32([1] * batch, device)} if history else {}
    options = RequestOptions(output_counts=counts, prompt_mask=int32([[7]] * batch, device))
    result = commit(verdict, trees, start, eos_ids=int64([7], device), **text, options=options)
    assert result.num_tokens.tolist() == [4, 2, 2, 4, 0, 0]
    assert counts.tolist() == expected.tolist()
    assert (wide[:, :2] == 70).all() and (wide[:, -2:] == 70).all() and (options.prompt_mask == 7).all()
    plain = commit(verdict, trees, start, eos_ids=int64([7], device), options=RequestOptions())
    for a, b in zip(result[:6], plain[:6], strict=True):
        assert torch.equal(a, b)


def test_commit_counts_refuse(backend, device) -> None:
    good = torch.zeros(1, 9, dtype=torch.int32, device=device)
    for counts in (
        good.long(),
        good.float(),
        good[0],
        torch.cat([good, good]),
        torch.zeros(1, 18).int().to(device)[:, ::2],
    ):
        arguments = commit_arguments(device)
        with pytest.raises(ValueError, match="commit: `output_counts` must be"):
            commit(**arguments, options=RequestOptions(output_counts=counts))
        assert not arguments["history"].any() and not counts.any()
    with pytest.raises(ValueError, match=r"commit: `output_counts` must be on .*meta"):
        commit(**commit_arguments(device), options=RequestOptions(output_counts=good.to("meta")))
    with pytest.raises(TypeError, match="options: expected a RequestOptions"):
        commit(**commit_arguments(device), options={"output_counts": good})


def test_commit_refuses(backend, device) -> None:
    verdict = commit_arguments(device)["verdict"]
    for change, message in [
        (
            {"verdict": verdict._replace(tokens=int32([[5, 6]], device))},
            "`tokens` must be of dtype torch.int64, got torch.int32",
        ),
        (
            {"verdict": verdict._replace(tokens=int64([[5]], device))},
            r"`tokens` must be of shape \[1, 2\] .*, got",
        ),
        ({"verdict": verdict._replace(num_accepted=int32([1, 1], device))}, r"`num_accepted` must be of shape \[1\]"),
        (
            {"verdict": verdict._replace(accept_index=int32([0, 2], device))},
            r"`accept_index` must be of shape \[\*, \*\]",
        ),
        ({"trees": batch_of([[-1], [-1]], device)}, r"`cu_nodes` must be of shape \[2\] .*, got \[3\]"),
        ({"start": int64([4], device)}, "`start` must be of dtype torch.int32, got torch.int64"),
        ({"history": None}, "`history_lens` must be given together with `history`, got a tensor"),
        ({"history_lens": None}, "`history_lens` must be given together with `history`, got None"),
        ({"history": int64([[0] * 8] * 2, device)}, r"`history` must be of shape \[1, \*\] .*, got \[2, 8\]"),
        ({"history": int32([[0] * 8], device)}, "`history` must be of dtype torch.int64, got torch.int32"),
        ({"history_lens": int64([3], device)}, "`history_lens` must be of dtype torch.int32, got torch.int64"),
        ({"eos_ids": int32([3], device)}, "`eos_ids` must be of dtype torch.int64, got torch.int32"),
        ({"eos_ids": int64([[3], [4]], device)}, r"`eos_ids` must be of shape \[1, \*\] .*, got \[2, 1\]"),
        ({"eos_ids": int64([[[3]]], device)}, r"`eos_ids` must be of shape \[1, \*\]"),
        ({"node_map": int64([0, 1, 2], device)}, "`node_map` must be of dtype torch.int32, got torch.int64"),
        ({"tokens_left": int64([3], device)}, "`tokens_left` must be of dtype torch.int32, got torch.int64"),
        ({"tokens_left": int32([3, 3], device)}, r"`tokens_left` must be of shape \[1\] .*, got \[2\]"),
        ({"history_rows": int32([0, 0], device)}, r"`history_rows` must be of shape \[1\] .*, got \[2\]"),
        (
            {"history_rows": int32([0], device), "history": None, "history_lens": None},
            "`history_rows` must be None without `history`",
        ),
        (
            {"history_rows": int32([0], device), "history": int64([[0] * 8] * 2, device)},
            r"`history_lens` must be of shape \[2\] .*, got \[1\]",
        ),
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
        ({"history_rows": int32([1], device)}, r"`history_rows\[0\]` must be in -1..0, got 1"),
    ]:
        arguments = {**commit_arguments(device), **change}
        with pytest.raises(ValueError, match=f"commit: .*{message}"):
            commit(**arguments)
        assert not arguments["history"].any()
    arguments = commit_arguments(device)
    assert commit(**arguments).start.tolist() == [6]
    assert arguments["history"].tolist() == [[0, 0, 0, 5, 6, 0, 0, 0]] and arguments["history_lens"].tolist() == [5]
    two = Verdict(*(torch.cat([each, each]) for each in verdict))
    arguments |= {"verdict": two, "trees": batch_of([[-1, 0, 0]] * 2, device), "start": int32([4, 4], device)}
    with pytest.raises(ValueError, match="`history_rows` must be another row for each sequence, got 0 twice"):
        commit(**arguments, history_rows=int32([0, 0], device))
    commit(**arguments, history_rows=int32([-1, -1], device))
    assert arguments["history_lens"].tolist() == [5]
