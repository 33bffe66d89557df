"""Whole decoding loops over prepare_step and commit, also compiled."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from step_case import batch_of, int32, int64
from torch import Tensor

from pagedtree import (
    DraftTree,
    TreeBatch,
    Verdict,
    append_kv,
    commit,
    compact_kv,
    prepare_step,
    slot_mapping,
)


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


def test_idle_trees(backend, device) -> None:
    """Finished sequences stay in the batch: with no nodes, or with a negative start in a batch of fixed shape."""
    fixed = TreeBatch.from_trees([DraftTree.chain(1)] * 2, device=device)
    verdict = Verdict(int32([[0, 1]] * 2, device), int32([1, 1], device), int64([[3, 4]] * 2, device), None)
    lens = int32([2, 2], device)
    history = torch.zeros((2, 6), dtype=torch.int64, device=device)
    result = commit(verdict, fixed, int32([-1, 1], device), history=history, history_lens=lens)
    assert result.start.tolist() == [-1, 3] and result.finished.tolist() == [True, False]
    assert result.last_token.tolist() == [-1, 4] and lens.tolist() == [2, 4]
    assert history.tolist() == [[0] * 6, [0, 0, 3, 4, 0, 0]]
