"""Whole decode steps, drafting to commit, captured in a CUDA graph and replayed with other lengths, trees, parameters.

A replay must match the same steps run op by op on the same device, bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from pagedtree import (
    DraftTree,
    SamplingParams,
    TreeBatch,
    Verdict,
    advance_conv,
    advance_state,
    append_kv,
    attention_plan,
    best_first_tree,
    commit,
    compact_kv,
    ngram_propose,
    prepare_step,
    rope_append,
    select_nodes,
    tree_attention,
    tree_conv1d,
    tree_delta_rule,
    verify_greedy,
    verify_rejection,
    verify_sampled,
)
from pagedtree.check.case import Case, Place, Results
from pagedtree.check.cases.inputs import seeded
from pagedtree.testing import use_backend

BATCH, VOCAB, HEADS, KV_HEADS, DIM = 3, 17, 4, 2, 64
LATENT_DIM, LATENT_DIM_V = 576, 512
ROTARY_DIM = 64
KEY_HEADS, STATE_DIM, TAPS = 2, 32, 4  # of the recurrent layer; it has HEADS value heads
PAGE_SIZE, MAX_PAGES, CAPACITY = 4, 40, 120
MAX_NODES, MAX_DEPTH = 9, 4
STEPS = 12
LEVELS, CANDIDATES = 3, 8  # of best-first trees
BUDGET = 20
# (rule, source of the trees, the model's own)
KINDS = [
    ("sampled", "n-gram trees", ""),
    ("rejection", "n-gram trees", ""),
    ("greedy", "trees from the host", ""),
    ("sampled", "n-gram trees", "latent cache"),
    ("greedy", "trees from the host", "latent cache"),
    ("sampled", "best-first trees within a limit", ""),
    ("sampled", "n-gram trees", "recurrent layer"),
    ("greedy", "trees from the host", "recurrent layer"),
]


class RecurrentLayer:
    """A gated delta rule after a short convolution; a token directly determines the inputs of both."""

    def __init__(self, weights: Callable[..., Tensor], seed: int) -> None:
        self.widths = [KEY_HEADS * STATE_DIM] * 2 + [HEADS * STATE_DIM]
        channels = sum(self.widths)
        self.inputs, self.taps = weights(VOCAB, channels), weights(channels, TAPS)
        self.decays = torch.nn.functional.logsigmoid(weights(VOCAB, HEADS).float())
        self.strengths = weights(VOCAB, HEADS).float().sigmoid()
        device = self.inputs.device
        self.slots = torch.randperm(BATCH + 1, generator=seeded(seed))[:BATCH].int().to(device)
        self.state = torch.zeros(BATCH + 1, HEADS, STATE_DIM, STATE_DIM, device=device, dtype=torch.float32)
        self.conv_state = torch.zeros(BATCH + 1, channels, TAPS - 1, dtype=torch.bfloat16, device=device)
        self.memory = [self.slots, self.state, self.conv_state]

    def run(self, ids: Tensor, trees: TreeBatch) -> Tensor:
        mixed = tree_conv1d(self.inputs[ids], self.taps, None, self.conv_state, self.slots, trees, activation="silu")
        q, k, v = (x.unflatten(1, (-1, STATE_DIM)) for x in mixed.split(self.widths, 1))
        self.rows = (k, v, self.decays[ids], self.strengths[ids])
        return tree_delta_rule(q, *self.rows, self.state, self.slots, trees, l2norm=True).flatten(1)

    def advance(self, ids: Tensor, trees: TreeBatch, verdict: Verdict) -> None:
        path = (verdict.accept_index, verdict.num_accepted)
        advance_state(self.state, self.slots, *self.rows, trees, *path, l2norm=True)
        advance_conv(self.conv_state, self.slots, self.inputs[ids], trees, *path)


class Engine:
    """A toy model and all tensors that a step reads and writes, in fixed buffers.

    rule: "sampled", "rejection" or "greedy". source: n-gram trees; trees and drafts that the host copies in before each
    step; or the best nodes of best-first trees, as many of the batch as the host allows.
    part: "latent cache" if K and V are one cache, "recurrent layer" if there is one in addition to attention, or "".
    """

    def __init__(
        self, device: torch.device, seed: int, rule: str = "sampled", source: str = "n-gram trees", part: str = ""
    ) -> None:
        generator = seeded(0)

        def weights(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator, dtype=torch.float32).to(torch.bfloat16).to(device)

        self.rule, self.source, self.latent = rule, source, part == "latent cache"
        latent = self.latent
        kv_heads, dim, dim_v = (1, LATENT_DIM, LATENT_DIM_V) if latent else (KV_HEADS, DIM, DIM)
        self.queries, self.head = weights(VOCAB, HEADS, dim), weights(HEADS * dim_v, VOCAB) / 4
        self.rows = [weights(VOCAB, kv_heads, dim) for _ in range(1 if latent else 2)]  # a token's K and V
        pairs = torch.arange(ROTARY_DIM // 2, dtype=torch.float32) / (ROTARY_DIM // 2)
        angles = torch.arange(CAPACITY, dtype=torch.float32)[:, None] * 100.0**-pairs
        self.cos_sin = torch.cat([angles.cos(), angles.sin()], dim=1).to(device)
        self.caches = [
            torch.zeros(BATCH * MAX_PAGES, PAGE_SIZE, kv_heads, dim, dtype=torch.bfloat16, device=device)
            for _ in self.rows
        ]
        self.sizes: dict[str, Any] = {
            "num_q_heads": HEADS, "num_kv_heads": kv_heads, "head_dim": dim, "head_dim_v": dim_v, "latent": latent,
            "page_size": PAGE_SIZE, "max_seqlen_q": MAX_NODES,
        }  # fmt: skip
        order = torch.randperm(BATCH * MAX_PAGES, generator=generator).int()
        self.page_table = order.view(BATCH, MAX_PAGES).to(device)
        prompt = torch.randint(VOCAB, (BATCH, 6), generator=seeded(seed))
        self.history = torch.full((BATCH, CAPACITY), -1, dtype=torch.int64, device=device)
        self.history[:, :6] = prompt.to(device)
        self.history_lens = torch.tensor([1, 4, 6], dtype=torch.int32, device=device)
        self.start = self.history_lens - 1  # the tokens before it count as read
        self.seeds = torch.arange(BATCH, device=device, dtype=torch.int64) + seed
        self.temperature = torch.full((BATCH,), 0.4, device=device, dtype=torch.float32)
        self.accepted = torch.zeros((), dtype=torch.int64, device=device)
        self.trees = self._trees(seed).to(device)
        self.drafts = torch.zeros(BATCH * MAX_NODES, dtype=torch.int64, device=device)
        self.guesses = weights(VOCAB, LEVELS, VOCAB).float().log_softmax(-1)  # of the tokens after a token
        self.limit = torch.full((1,), BUDGET, dtype=torch.int32, device=device)
        self.recurrent = RecurrentLayer(weights, seed) if part == "recurrent layer" else None
        self.memory = self.recurrent.memory if self.recurrent else []
        self.recurrent_head = weights(HEADS * STATE_DIM, VOCAB)

    @staticmethod
    def _trees(seed: int) -> TreeBatch:
        kinds = [DraftTree.full([8]), DraftTree.full([3, 1]), DraftTree.full([2, 2]), DraftTree.chain(4)]
        shapes = [kinds[(seed + b) % len(kinds)] for b in range(BATCH)]
        with use_backend("cpu"):  # they are made on the host, whatever the backend that is checked
            return TreeBatch.from_trees(shapes, max_nodes=MAX_NODES, max_depth=MAX_DEPTH, capacity=BATCH * MAX_NODES)

    def load(self, other: Engine) -> None:
        for name, tensor in vars(other).items():
            mine = vars(self)[name]
            if isinstance(tensor, TreeBatch):
                mine.copy_(tensor)
            elif isinstance(tensor, list):
                for to, source in zip(mine, tensor, strict=True):
                    to.copy_(source)
            elif isinstance(tensor, Tensor):
                mine.copy_(tensor)

    def prepare(self, i: int) -> None:
        self.temperature.fill_(0.0 if i % 5 == 4 else 0.4)
        self.limit.fill_(BUDGET - i % 7 * 3)
        if self.source == "trees from the host":
            self.trees.copy_(self._trees(i).to(self.trees.device))
            self.drafts.copy_(torch.randint(VOCAB, self.drafts.shape, generator=seeded(i)))

    def draft(self) -> tuple[TreeBatch, Tensor]:
        if self.source == "n-gram trees":
            draft = ngram_propose(self.history, self.history_lens, max_nodes=MAX_NODES, max_depth=MAX_DEPTH)
            return draft.trees, draft.draft_tokens
        last = self.history.gather(1, (self.history_lens.long() - 1)[:, None])[:, 0]
        if self.source == "trees from the host":
            return self.trees, self.drafts.index_copy(0, self.trees.cu_nodes[:-1].long(), last)
        candidates = self.guesses[last].topk(CANDIDATES)
        tokens, trees, joints = best_first_tree(
            candidates.values, candidates.indices, last, MAX_NODES, return_log_probs=True
        )
        selection, node_map = select_nodes(trees, joints.exp(), BUDGET, limit=self.limit)
        return selection, tokens[node_map.clamp(min=0).long()]

    def step(self) -> None:
        trees, tokens = self.draft()
        total = tokens.shape[0]
        positions, seq_lens, cu_seqlens_q, slots = prepare_step(
            trees, self.page_table, self.start, PAGE_SIZE, total_q=total
        )
        plan = attention_plan(seq_lens, cu_seqlens_q, **self.sizes)
        ids = tokens.clamp(min=0)
        q, rows, k_cache = self.queries[ids], [table[ids] for table in self.rows], self.caches[0]
        if self.latent:
            append_kv(rows[0], None, k_cache, None, slots)
            v_cache = k_cache[..., :LATENT_DIM_V]
        else:
            v_cache = self.caches[1]
            rope_append(q, rows[0], rows[1], positions, self.cos_sin, k_cache, v_cache, slots, q_out=q)
        out = tree_attention(
            q, k_cache, v_cache, self.page_table, seq_lens, cu_seqlens_q, trees.mask,
            max_seqlen_q=MAX_NODES, plan=plan,
        )  # fmt: skip
        assert isinstance(out, Tensor)
        logits = out.flatten(1) @ self.head
        if self.recurrent:
            logits += self.recurrent.run(ids, trees) @ self.recurrent_head
        verdict = self.verify(logits, tokens, trees)
        if self.recurrent:
            self.recurrent.advance(ids, trees, verdict)
        compact_kv(self.caches, self.page_table, self.start, verdict.accept_index, verdict.num_accepted)
        committed = commit(verdict, trees, self.start, history=self.history, history_lens=self.history_lens)
        self.start.copy_(committed.start)
        self.accepted += committed.num_accepted.sum()

    def verify(self, logits: Tensor, tokens: Tensor, trees: TreeBatch) -> Verdict:
        if self.rule == "greedy":
            return verify_greedy(logits, tokens, trees)
        params = SamplingParams(temperature=self.temperature, top_p=0.9)
        streams: dict[str, Any] = {"seeds": self.seeds, "positions": self.start}
        if self.rule == "rejection":
            return verify_rejection(logits, tokens, trees, params, draft_law="onehot", **streams)
        return verify_sampled(logits, tokens, trees, params, **streams)

    def results(self) -> Results:
        names = ("history", "history_lens", "start", "accepted")
        tensors = [*self.caches, *self.memory]
        return {name: getattr(self, name).clone() for name in names} | {
            f"memory {i}": tensor.clone() for i, tensor in enumerate(tensors)
        }


def captured(engine: Engine, device: torch.device) -> Callable[[], None]:
    """Replays `engine.step`, or runs it without a GPU. The engine's state may differ afterwards."""
    if device.type != "cuda":
        return engine.step
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):  # libraries allocate at the first call
        engine.step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        engine.step()
    return graph.replay


def steps(device: torch.device, *kind: Any, capture: bool) -> Results:
    """Runs two step sequences, from different prompts, by one captured graph or op by op; kind as for an Engine."""
    engine = Engine(device, 1, *kind)
    replay = captured(engine, device) if capture else engine.step
    results: Results = {}
    for seed in (1, 2):
        engine.load(Engine(device, seed, *kind))
        for i in range(STEPS):
            engine.prepare(i)
            replay()
        results |= {f"{name}, prompt {seed}": tensor for name, tensor in engine.results().items()}
    return results


def cases(place: Place) -> Iterator[Case]:
    for rule, source, part in KINDS:
        yield _case("/".join(filter(None, ["capture", rule, source, part])), place, rule, source, part)


def _case(name: str, place: Place, *kind: Any) -> Case:
    return Case(
        name, (), lambda at: steps(at.device, *kind, capture=True), lambda: steps(place.device, *kind, capture=False),
        always_loops=True, backends=("cuda",), against="the same steps without a graph",
    )  # fmt: skip
