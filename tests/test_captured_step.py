"""One decode step, drafting to commit, in fixed buffers: captured in a CUDA graph where there is a GPU, and replayed.

Elsewhere the step is called again and again, which shows that nothing in it depends on the host.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from pagedtree import (
    SamplingParams,
    append_kv,
    commit,
    compact_kv,
    ngram_propose,
    prepare_step,
    tree_attention,
    verify_sampled,
)

BATCH, VOCAB, HEADS, KV_HEADS, DIM = 3, 17, 4, 2, 64
PAGE_SIZE, MAX_PAGES, CAPACITY = 4, 40, 120
MAX_NODES, MAX_DEPTH = 9, 4


class Engine:
    """A toy model and all that a step reads and writes, in buffers that stay where they are."""

    def __init__(self, device: torch.device, seed: int) -> None:
        generator = torch.Generator().manual_seed(0)

        def weights(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator).to(torch.bfloat16).to(device)

        self.queries, self.keys = weights(VOCAB, HEADS, DIM), weights(VOCAB, KV_HEADS, DIM)
        self.values, self.head = weights(VOCAB, KV_HEADS, DIM), weights(HEADS * DIM, VOCAB) / 4
        self.caches = [
            torch.zeros(BATCH * MAX_PAGES, PAGE_SIZE, KV_HEADS, DIM, dtype=torch.bfloat16, device=device)
            for _ in range(2)
        ]
        order = torch.randperm(BATCH * MAX_PAGES, generator=generator).int()
        self.page_table = order.view(BATCH, MAX_PAGES).to(device)
        prompt = torch.randint(VOCAB, (BATCH, 6), generator=torch.Generator().manual_seed(seed))
        self.history = torch.full((BATCH, CAPACITY), -1, dtype=torch.int64, device=device)
        self.history[:, :6] = prompt.to(device)
        self.history_lens = torch.tensor([1, 4, 6], dtype=torch.int32, device=device)
        self.start = self.history_lens - 1  # the tokens before it are taken for read
        self.seeds = torch.arange(BATCH, device=device) + seed
        self.temperature = torch.full((BATCH,), 0.4, device=device)
        self.accepted = torch.zeros((), dtype=torch.int64, device=device)

    def load(self, other: Engine) -> None:
        for name, tensor in vars(other).items():
            mine = vars(self)[name]
            for to, source in zip(mine, tensor, strict=True) if isinstance(tensor, list) else [(mine, tensor)]:
                to.copy_(source)

    def step(self) -> None:
        draft = ngram_propose(self.history, self.history_lens, max_nodes=MAX_NODES, max_depth=MAX_DEPTH)
        trees, tokens = draft.trees, draft.draft_tokens
        total = tokens.shape[0]
        _, seq_lens, cu_seqlens_q, slots = prepare_step(trees, self.page_table, self.start, PAGE_SIZE, total_q=total)
        ids = tokens.clamp(min=0)
        append_kv(self.keys[ids], self.values[ids], *self.caches, slots)
        out = tree_attention(
            self.queries[ids], *self.caches, self.page_table, seq_lens, cu_seqlens_q, trees.mask,
            max_seqlen_q=MAX_NODES,
        )  # fmt: skip
        logits = out.flatten(1) @ self.head
        params = SamplingParams(temperature=self.temperature, top_p=0.9)
        verdict = verify_sampled(logits, tokens, trees, params, seeds=self.seeds, positions=self.start.long())
        compact_kv(self.caches, self.page_table, self.start, verdict.accept_index, verdict.num_accepted)
        committed = commit(verdict, trees, self.start, history=self.history, history_lens=self.history_lens)
        self.start.copy_(committed.start)
        self.accepted += committed.num_accepted.sum()


def captured(engine: Engine, device: torch.device) -> Callable[[], None]:
    """Replays `engine.step`, which may change the engine's state while it is captured."""
    if device.type != "cuda":
        return engine.step
    engine.step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        engine.step()
    return graph.replay


@pytest.mark.parametrize("seeds", [(1, 2)])
def test_replays_equal_eager_steps(backend, device, seeds):
    """Other prompts, lengths, trees, seeds and temperatures go through one captured step."""
    engine = Engine(device, seeds[0])
    replay = captured(engine, device)
    for seed in seeds:
        eager = Engine(device, seed)
        engine.load(eager)
        for i in range(12):
            for one in (eager, engine):
                one.temperature.fill_(0.0 if i % 5 == 4 else 0.4)
            eager.step()
            replay()
        assert engine.history.equal(eager.history) and engine.history_lens.equal(eager.history_lens)
        assert engine.start.equal(eager.start) and engine.accepted.equal(eager.accepted)
        for mine, other in zip(engine.caches, eager.caches, strict=True):
            assert mine.equal(other)
        assert int(eager.accepted) > 0 and int(eager.start.min()) > 12
