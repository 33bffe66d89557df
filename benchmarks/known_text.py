"""A decoder of Llama's sizes with a known text, and its steps with trees of a set acceptance.

Output projections are small, so the residual stream stays at the token's embedding, and the head's row of `after[t]` is
the embedding of t: the model continues t by after[t], by a margin above all rounding. The drafter puts the right token
at the rank drawn from an acceptance table, or nowhere, and every token is verified.

The text hardly depends on attention, which `python -m pagedtree check` and the tests verify.
"""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from attention_problem import Problem
from suite import Peer
from torch import Tensor

import pagedtree as pt

PAGE, LARGE_PAGE = 16, 128
Table = Sequence[Sequence[float]]  # acceptance by depth and rank, as in `choose_tree`
Product = Callable[[Tensor, Tensor], Tensor]
Sizes = namedtuple("Sizes", "layers hidden heads kv_heads head_dim mlp vocab")
LLAMA_8B = Sizes(32, 4096, 32, 8, 128, 14336, 128256)
TINY = Sizes(2, 128, 4, 2, 128, 256, 1000)


class Model:
    def __init__(self, sizes: Sizes, device: torch.device, max_length: int) -> None:
        self.sizes, self.device, self.dtype = sizes, device, torch.bfloat16
        self.generator = torch.Generator(device).manual_seed(0)
        self.embedding = self.normal(sizes.vocab, sizes.hidden, std=1.0)
        order = torch.randperm(sizes.vocab, generator=self.generator, device=device)
        self.after = order.roll(-1)[order.argsort()]  # one cycle through all tokens
        self.head = torch.empty_like(self.embedding)  # logits: about 20 for after[t], of others N(0, 20 / sqrt(hidden))
        self.head[self.after] = self.embedding * (20 / sizes.hidden)
        self.layers = [self.layer(sizes.hidden, 0.1 / sizes.layers) for _ in range(sizes.layers)]
        self.ones = torch.ones(sizes.hidden, device=device, dtype=self.dtype)
        angles = torch.arange(max_length)[:, None] * 500000 ** -(torch.arange(0, sizes.head_dim, 2) / sizes.head_dim)
        self.cos_sin = torch.cat([angles.cos(), angles.sin()], 1).to(device)

    def layer(self, inputs: int, gain: float = 1.0) -> list[Tensor]:
        """gain: factor of the layer's addition to the residual stream."""
        _, hidden, heads, kv_heads, head_dim, mlp, _ = self.sizes
        qkv, o = self.normal((heads + 2 * kv_heads) * head_dim, inputs), self.normal(hidden, heads * head_dim)
        gate_up, down = self.normal(2 * mlp, hidden), self.normal(hidden, mlp)
        return [qkv, o.mul_(gain), gate_up, down.mul_(gain)]

    def normal(self, *shape: int, std: float | None = None) -> Tensor:
        """std: default 1 / sqrt(the last size)."""
        memory = torch.empty(shape, device=self.device, dtype=self.dtype)
        return memory.normal_(0, shape[-1] ** -0.5 if std is None else std, generator=self.generator)

    def norm(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, x.shape[-1:], self.ones, 1e-5)

    def behind_attention(self, x: Tensor, out: Tensor, layer: list[Tensor], product: Product) -> Tensor:
        x = x + product(out.flatten(1), layer[1])
        gate, up = product(self.norm(x), layer[2]).chunk(2, 1)
        return x + product(F.silu(gate) * up, layer[3])

    def logits(self, tokens: Tensor, attend: Callable[..., Tensor], product: Product) -> Tensor:
        """attend: maps a layer's number, q, k and v to its output."""
        x, kinds = F.embedding(tokens, self.embedding), [self.sizes.heads, self.sizes.kv_heads, self.sizes.kv_heads]
        for i, layer in enumerate(self.layers):
            heads = product(self.norm(x), layer[0]).unflatten(1, (-1, self.sizes.head_dim))
            x = self.behind_attention(x, attend(i, *heads.split(kinds, 1)), layer, product)
        return product(self.norm(x), self.head)


class Cache:
    def __init__(self, model: Model, batch: int, tokens: int) -> None:
        self.batch, rows = batch, batch * -(-tokens // LARGE_PAGE) * LARGE_PAGE
        shape = rows, model.sizes.kv_heads, model.sizes.head_dim
        self.pairs = [[model.normal(*shape, std=1.0) for _ in range(2)] for _ in model.layers]

    def paged(self, page: int) -> tuple[list[list[Tensor]], Tensor]:
        """The page table is random."""
        pairs = [[rows.unflatten(0, (-1, page)) for rows in pair] for pair in self.pairs]
        order = torch.randperm(len(pairs[0][0]), generator=torch.Generator().manual_seed(0))
        return pairs, order.int().view(self.batch, -1).to(self.pairs[0][0].device)


def drawn_ranks(table: Table, depths: int, steps: int, seed: int) -> np.ndarray:
    """Draws [steps, depths + 1]: the right token's rank at each depth; -1: nowhere."""
    generator, ranks = np.random.default_rng(seed), np.full((steps, depths + 1), -1)
    for depth, odds in enumerate(table[:depths], 1):
        found = np.searchsorted(np.cumsum(odds), generator.random(steps), side="right")
        ranks[:, depth] = np.where(found < len(odds), found, -1)
    return ranks


def survival(tree: pt.DraftTree, table: Table) -> list[float]:
    reached = [1.0]
    for parent, depth, rank in zip(tree.parents[1:], tree.depths[1:], tree.child_ranks[1:], strict=True):
        reached.append(reached[parent] * table[depth - 1][rank])
    return reached


@dataclass(eq=False)
class Step:
    """A step with a tree in fixed tensors; over `steps` of them the mean length is about `length`.

    tables: each sequence's acceptance. budget: most verified nodes of all trees, the likeliest. peer: replaces our
    attention and plans once. is_bare: no products and attention, to time the rest.
    """

    model: Model
    cache: Cache
    tree: pt.DraftTree
    tables: Sequence[Table]
    length: int
    steps: int
    rule: str = "greedy"
    page: int = PAGE
    budget: int | None = None
    peer: Peer | None = None
    is_bare: bool = False

    def __post_init__(self) -> None:
        device, sizes, depths = self.model.device, self.model.sizes, self.tree.max_depth
        self.batch, self.nodes = len(self.tables), self.tree.num_nodes
        self.caches, self.page_table = self.cache.paged(self.page)
        self.compact = pt.PreparedCompaction([rows for pair in self.caches for rows in pair])
        self.plan_arguments = {"num_q_heads": sizes.heads, "num_kv_heads": sizes.kv_heads, "head_dim": sizes.head_dim}
        self.plan_arguments |= {"page_size": self.page, "max_seqlen_q": self.nodes}
        self.trees = pt.TreeBatch.from_trees([self.tree] * self.batch, device=device)
        ranks = self.tree.child_ranks.tolist()
        self.depth, self.rank = (torch.tensor(x, device=device) for x in (self.tree.depths.tolist(), ranks))
        walk = [torch.arange(sizes.vocab, device=device)]
        for _ in range(depths):
            walk.append(self.model.after[walk[-1]])
        self.walk = torch.stack(walk)  # [D + 1, V]: the right token at each depth below a root
        hits = [drawn_ranks(table, depths, self.steps, seed) for seed, table in enumerate(self.tables)]
        self.hits = np.stack(hits, 1).tolist()
        self.drawn = torch.tensor(self.hits, device=device)  # [steps, B, D + 1]
        reached = [survival(self.tree, table) for table in self.tables]
        self.survival = torch.tensor(reached, device=device, dtype=torch.float32).flatten()
        self.first_length = max(self.length - int(np.sum(reached) / self.batch * self.steps / 2), 1)
        self.first = torch.arange(self.batch, device=device) * 7 % sizes.vocab
        self.root, self.seeds = self.first.clone(), torch.arange(self.batch, device=device)
        self.start, self.history_lens = (torch.zeros(self.batch, dtype=torch.int32, device=device) for _ in range(2))
        self.history = torch.zeros(self.batch, self.steps * (depths + 1), dtype=torch.int64, device=device)
        self.paths = torch.zeros(self.steps, self.batch, depths + 1, dtype=torch.int32, device=device)
        self.counter = torch.zeros(1, dtype=torch.int64, device=device)
        self.rows = torch.arange(self.budget or self.batch * self.nodes, dtype=torch.int32, device=device)
        if self.is_bare:
            largest = max(len(matrix) for matrix in (self.model.head, *self.model.layers[0]))
            self.blank = self.model.normal(len(self.rows) * largest, std=1.0)
        self.problem = self.of_peer()
        self.way = self.peer.make(self.problem) if self.peer else None
        self.reset()

    def of_peer(self) -> Problem:
        """Makes one layer's problem for peers; the step changes q and seq_lens."""
        p, sizes = Problem.__new__(Problem), self.model.sizes
        p.heads, p.kv_heads, p.head_dim, p.scale = sizes.heads, sizes.kv_heads, sizes.head_dim, sizes.head_dim**-0.5
        p.tree, p.trees, p.is_prefill, p.batch = self.tree, self.trees, False, self.batch
        p.device, p.dtype, p.cache_dtype = self.model.device, self.model.dtype, self.model.dtype
        p.page_size, p.page_table, p.plan_arguments = self.page, self.page_table, self.plan_arguments
        p.lengths, p.max_length = [self.length + self.nodes] * self.batch, self.page_table.shape[1] * self.page
        p.seq_lens = torch.tensor(p.lengths, dtype=torch.int32, device=p.device)
        p.q = self.model.normal(self.batch * self.nodes, p.heads, p.head_dim)
        p.k, p.v = zip(*self.caches, strict=True)
        return p

    def reset(self) -> None:
        self.root.copy_(self.first)
        self.start.fill_(self.first_length)
        for tensor in (self.history, self.history_lens, self.paths, self.counter):
            tensor.zero_()

    def draft(self) -> Tensor:
        right = self.walk[self.depth, self.root[:, None]]  # [B, nodes]
        hit = self.drawn.index_select(0, self.counter % self.steps)[0][:, self.depth]
        return torch.where(self.rank == hit, right, (right + 1 + self.rank) % self.model.sizes.vocab).flatten()

    def attention(self, trees: pt.TreeBatch, seq_lens: Tensor, cu_seqlens_q: Tensor) -> Callable[[int, Tensor], Tensor]:
        if self.way is not None:
            self.problem.seq_lens.copy_(seq_lens)
            return self.by_peer
        plan = pt.attention_plan(seq_lens, cu_seqlens_q, **self.plan_arguments)
        where = self.page_table, seq_lens, cu_seqlens_q, trees.mask
        attend = pt.PreparedAttention(*where, max_seqlen_q=self.nodes, plan=plan)
        return lambda i, q: q if self.is_bare else attend(q, *self.caches[i])

    def by_peer(self, i: int, q: Tensor) -> Tensor:
        self.problem.q = q
        return self.way.run(i)

    def product(self, x: Tensor, matrix: Tensor) -> Tensor:
        return self.blank[: len(x) * len(matrix)].view(len(x), -1) if self.is_bare else F.linear(x, matrix)

    @torch.no_grad()
    def run(self) -> None:
        tokens, trees = self.draft(), self.trees
        if self.budget:
            trees, rows = pt.select_nodes(trees, self.survival, self.budget)
            tokens = tokens[self.rows.copy_(rows).clamp(min=0).long()]
        place = self.page_table, self.start, self.page
        positions, seq_lens, cu_seqlens_q, slots = pt.prepare_step(trees, *place, total_q=len(tokens))
        attend = self.attention(trees, seq_lens, cu_seqlens_q)

        def appended(i: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return attend(i, pt.rope_append(q, k, v, positions, self.model.cos_sin, *self.caches[i], slots))

        logits = self.model.logits(tokens, appended, self.product)
        if self.rule == "greedy":
            verdict = pt.verify_greedy(logits, tokens, trees)
        else:
            params = pt.SamplingParams(temperature=0.8, top_p=0.9)
            verdict = pt.verify_sampled(logits, tokens, trees, params, seeds=self.seeds, positions=self.start)
        done = pt.commit(verdict, trees, self.start, history=self.history, history_lens=self.history_lens)
        self.compact(self.page_table, self.start, verdict.accept_index, done.num_accepted)
        self.paths.index_copy_(0, self.counter % self.steps, verdict.accept_index[None])
        self.start.copy_(done.start)
        self.root.copy_(done.last_token)
        self.counter += 1

    def wrong(self) -> str | None:
        """Returns the first wrong token or path."""
        after, texts, lengths = self.model.after.tolist(), self.history.tolist(), self.history_lens.tolist()
        paths, rows = self.paths.tolist(), self.rows.tolist()
        ranks = zip(self.tree.parents.tolist(), self.tree.child_ranks.tolist(), strict=True)
        children = {place: node for node, place in enumerate(ranks)}
        for b, token in enumerate(self.first.tolist()):
            kept, text = [row - b * self.nodes for row in rows if row // self.nodes == b], []
            for step, hits in enumerate(ranks_of[b] for ranks_of in self.hits):
                path = [0]
                while len(path) < len(hits) and (node := children.get((path[-1], hits[len(path)]))) in kept:
                    path.append(node)
                found, local = [node for node in paths[step][b] if node >= 0], [kept.index(node) for node in path]
                if found != local:
                    return f"sequence {b}, step {step}: expected the path {local}, got {found}"
                for _ in path:
                    token = after[token]
                    text.append(token)
            if texts[b][: lengths[b]] != text:
                return f"sequence {b}: expected the tokens {text}, got {texts[b][: lengths[b]]}"
        return None
