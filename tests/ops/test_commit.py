"""commit against plain loops."""

from __future__ import annotations

import pytest
import torch
from step_case import batch_of, commit_arguments, int32, int64

from pagedtree import RequestOptions, Verdict, commit


def test_commit_bad_offsets(backend, device) -> None:
    trees = batch_of([[-1, 0], [-1]], device)
    verdict = Verdict(int32([[0, 1], [0, 1]], device), int32([1, 1], device), int64([[1, 2]] * 2, device), None)
    node_map = int32([0, 1, 0], device)
    for offsets in ([0, 99, 3], [9, -4, 2], [-(2**31), 2**31 - 1, 0], [3, 2, 1]):
        trees.cu_nodes.copy_(int32(offsets, device))
        result = commit(verdict, trees, int32([0, 0], device), node_map=node_map)
        assert all(-1 <= row < 3 for row in result.accept_rows.flatten().tolist())


<<<<<<< HEAD
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
=======
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


def test_two_sequences_have_two_histories(value_checks, device) -> None:
>>>>>>> 7e0eeeab (Tests of the refusals that the table has go)
    arguments = commit_arguments(device)
    arguments["verdict"] = Verdict(*(torch.cat([part, part]) for part in arguments["verdict"]))
    arguments |= {"trees": batch_of([[-1, 0, 0]] * 2, device), "start": int32([4, 4], device)}
    with pytest.raises(ValueError, match="`history_rows` must be another row for each sequence, got 0 twice"):
        commit(**arguments, history_rows=int32([0, 0], device))
    commit(**arguments, history_rows=int32([-1, -1], device))
    assert arguments["history_lens"].tolist() == [3]
