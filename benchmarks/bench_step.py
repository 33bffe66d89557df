"""Measures whole steps of a decoder of Llama-3-8B's sizes, and tokens per second: plain, chains, trees.

    python -m pagedtree bench step --device cuda           # random weights of 16 GB, at most four minutes
    python -m pagedtree bench step --device cpu --tiny     # a rehearsal

Acceptance is set, and every token and accepted path is checked (known_text.py). On a GPU a step is one CUDA graph; a
tiny one comes first and finds host reads. Without a GPU fake tensors replace the graph.

Rows of kind "step" have the time by batch, context and nodes, and `bookkeeping_ms`: the step without products and
attention. Other kernels replace our attention at some points. From these and the rows of kind "drafter" `choose_tree`
makes the trees of rows of kind "way": tokens per second against plain decoding and the best chain, for each acceptance
table. In rows of kind "unequal" every other sequence has table c: equal trees, and one budget for the likeliest nodes
of all. The exit status is 1 if a text was wrong.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from attention_problem import paged_tree_causal
from gpu_attention_peers import flash_attention_of_hopper, flashinfer_kernel_tree, triton_unified
from known_text import LARGE_PAGE, LLAMA_8B, PAGE, TINY, Cache, Model, Step, Table, survival
from measure import captured, machine_facts, read_bandwidth, seconds_behind_head_start, seconds_of
from named_trees import likeliest
from row_file import Results
from suite import Peer
from torch._subclasses.fake_tensor import FakeTensorMode

import pagedtree as pt

# a: EAGLE-3 on code and mathematics; b: on chat; c: SmolLM2-135M's head at 975 places of its answers to 15 prompts.
TABLES: dict[str, Table] = {
    "a": [[0.75 - 0.02 * depth, 0.10, 0.04, 0.02] for depth in range(8)],
    "b": [[0.60 - 0.02 * depth, 0.13, 0.06, 0.03] for depth in range(8)],
    "c": [[0.28, 0.10, 0.06, 0.04]] * 8,
}
NODES, FEW_NODES = (1, 2, 4, 6, 8, 12, 16, 24, 32, 48, 64), (1, 8, 16, 32, 64)
LARGE_PAGES_NODES, PEERS_NODES = (1, 16, 64), (16, 64)
ROOM = 1024  # tokens after the context
LEVEL, BLOCK = "EAGLE-3 level", "block drafter"
Row = dict[str, Any]


class Drafter:
    """A drafter's pass over `rows` queries per sequence."""

    def __init__(self, model: Model, layers: int, rows: int, inputs: int, vocab: int) -> None:
        hidden = model.sizes.hidden
        self.model, self.rows, self.width = model, rows, inputs * hidden
        self.layers = [model.layer(self.width if i == 0 else hidden) for i in range(layers)]
        self.head = model.normal(min(vocab, model.sizes.vocab), hidden)

    def call(self, cache: Cache, length: int) -> Callable[[], None]:
        model, rows, batch = self.model, self.rows, cache.batch
        heads, head_dim = model.sizes.heads, model.sizes.head_dim
        pairs, page_table = cache.paged(PAGE)
        lengths, roots = page_table.new_full((batch,), length), torch.zeros_like(page_table[:, 0], dtype=torch.int64)
        offsets = torch.arange(batch + 1, dtype=torch.int32, device=model.device) * rows
        x, logits = model.normal(batch * rows, self.width, std=1.0), model.normal(batch, len(self.head))
        level = {"num_children": rows, "num_frontier": rows}
        state = pt.expand_tree(pt.start_draft(roots, max_kv_nodes=1 + 2 * rows), logits, **level)

        @torch.no_grad()
        def run() -> None:
            y = x[:, : model.sizes.hidden]
            for i, layer in enumerate(self.layers):
                q = F.linear(model.norm(y) if i else x, layer[0])[:, : heads * head_dim].unflatten(1, (heads, head_dim))
                out = pt.tree_attention(q, *pairs[i % len(pairs)], page_table, lengths, offsets, max_seqlen_q=rows)
                y = model.behind_attention(y, out, layer, F.linear)
            logits = F.linear(model.norm(y), self.head)
            if len(self.layers) == 1:
                pt.expand_tree(state, logits, **level)
            else:
                best = logits.float().log_softmax(-1).unflatten(0, (batch, rows)).topk(8)
                pt.best_first_tree(best.values, best.indices, roots, 64)

        return run


def median_seconds(call: Callable[[], None], device: torch.device, repeats: int, reset: Callable[[], None]) -> float:
    if device.type == "cuda":
        sample = partial(seconds_behind_head_start, captured("a step", call))
    else:
        call()
        sample = partial(seconds_of, call, device)
    reset()
    return statistics.median(sample() for _ in range(repeats))


def rated(row: Row, tokens: float, drafting: float) -> Row:
    """tokens: expected of a step of all sequences, instead of the mean of few draws."""
    rate = tokens / (row["ms"] / 1e3 + drafting)
    return row | {"draft_ms": drafting * 1e3, "tokens_per_step": tokens / row["batch"], "tokens_per_second": rate}


class Bench:
    def __init__(self, args: argparse.Namespace) -> None:
        self.args, self.device = args, torch.device(args.device)
        self.model = Model(TINY if args.tiny else LLAMA_8B, self.device, max(args.lengths) + ROOM)
        self.drafters = {
            LEVEL: Drafter(self.model, layers=1, rows=8, inputs=2, vocab=32000),
            BLOCK: Drafter(self.model, layers=5, rows=16, inputs=1, vocab=self.model.sizes.vocab),
        }
        self.key, self.cache = (0, 0), None
        self.costs: dict[tuple[int, int], dict[int, float]] = {}  # (batch, length) -> nodes -> seconds
        self.draft_seconds: dict[tuple[str, int, int], float] = {}
        self.absent: dict[str, str] = {}

    def cache_of(self, batch: int, length: int) -> Cache:
        if self.key != (batch, length):
            self.cache = None  # freed before the next one
            torch.cuda.empty_cache()
            self.key, self.cache = (batch, length), Cache(self.model, batch, length + ROOM)
        return self.cache

    def row(self, tree: pt.DraftTree, tables: Sequence[Table], length: int, longer: int = 1, **how: Any) -> Row:
        steps = self.args.steps * longer
        step = Step(self.model, self.cache_of(len(tables), length), tree, tables, length, steps, **how)
        seconds = median_seconds(step.run, self.device, steps, step.reset)
        row = {"batch": len(tables), "length": length, "nodes": tree.num_nodes, "depth": tree.max_depth}
        row |= {"page": step.page, "rule": step.rule, "ms": seconds * 1e3}
        if step.way and step.way.plan:
            row["plan_ms"] = seconds_of(step.way.plan, self.device) * 1e3
        wrong = None if step.is_bare else step.wrong()
        return row | ({"wrong": wrong} if wrong else {})

    def step_row(self, nodes: int, batch: int, length: int, **how: Any) -> Row:
        """The tree hardly matters to the time."""
        tree = pt.DraftTree.chain(nodes - 1) if nodes <= 8 else likeliest(nodes, np.array(TABLES["a"]))
        row = {"kind": "step", "attention": how["peer"].name if "peer" in how else "pagedtree"}
        return row | self.row(tree, [TABLES["a"]] * batch, length, **how)

    def by_peers(self, peers: Sequence[Peer], *where: int, page: int = PAGE) -> Iterator[Row]:
        for peer in peers:
            try:
                if (reason := peer.when()) is None:
                    yield self.step_row(*where, peer=peer, page=page)
            except (RuntimeError, ValueError) as error:
                reason = str(error)[:200]
            if reason:
                self.absent[peer.name] = reason

    def steps(self, batch: int, length: int) -> Iterator[Row]:
        costs = self.costs[batch, length] = {}
        for nodes in NODES if length == self.args.lengths[0] else FEW_NODES:
            where = nodes, batch, length
            if nodes <= self.args.most_nodes:
                bare, row = self.step_row(*where, is_bare=True), self.step_row(*where)
                costs[nodes] = row["ms"] / 1e3
                yield row | {"bookkeeping_ms": bare["ms"], "over_one_node": costs[nodes] / costs[1]}
                yield from self.by_peers([flash_attention_of_hopper], *where)
                if nodes in LARGE_PAGES_NODES:
                    yield self.step_row(*where, page=LARGE_PAGE)
                    yield from self.by_peers([flash_attention_of_hopper], *where, page=LARGE_PAGE)
        for name, drafter in self.drafters.items():
            call = drafter.call(self.cache_of(batch, length), length)
            seconds = median_seconds(call, self.device, self.args.steps, lambda: None)
            self.draft_seconds[name, batch, length] = seconds
            yield {"kind": "drafter", "drafter": name, "batch": batch, "length": length, "ms": seconds * 1e3}

    def cost(self, batch: int, length: int, fixed: float = 0.0) -> Callable[[float], float]:
        """fixed: seconds of drafting."""
        sizes, seconds = zip(*self.costs[batch, length].items(), strict=True)
        return lambda nodes: float(np.interp(nodes, sizes, seconds)) + (fixed if nodes > 1 else 0.0)

    def ways(self, batch: int, length: int, names: Sequence[str], rule: str = "greedy") -> Iterator[Row]:
        measured, most = dict[Any, Row](), max(self.costs[batch, length])
        for name, drafter in product(names, self.drafters):
            table, drafting = TABLES[name], self.draft_seconds[drafter, batch, length]
            level, fixed = (drafting, 0.0) if drafter == LEVEL else (0.0, drafting)
            cost, chains = self.cost(batch, length, fixed), [pt.DraftTree.chain(n) for n in range(min(9, most))]
            rates = [pt.expected_tokens(c, table) / (cost(c.num_nodes) + level * c.max_depth) for c in chains]
            best = pt.choose_tree(table, cost, max_nodes=most, max_depth=8, level_cost=level)
            ways = {"plain": chains[0], "best chain": chains[int(np.argmax(rates))], "chosen tree": best}
            for way, tree in ways.items():
                key = (name if tree.max_depth else None, *tree.parents.tolist())
                if key not in measured:
                    measured[key] = self.row(tree, [table] * batch, length, longer=2, rule=rule)
                row = {"kind": "way", "way": way, "table": name, "drafter": drafter} | measured[key]
                seconds = level * tree.max_depth + (fixed if tree.max_depth else 0.0)
                yield rated(row, pt.expected_tokens(tree, table) * batch, seconds)

    def unequal(self, batch: int, length: int) -> Iterator[Row]:
        tables = [TABLES["ac"[b % 2]] for b in range(batch)]
        level, most = self.draft_seconds[LEVEL, batch, length], max(self.costs[batch, length])
        cost = self.cost(batch, length)
        tree = pt.choose_tree(np.mean(tables, 0), cost, max_nodes=most, max_depth=8, level_cost=level)
        row = {"kind": "unequal", "way": "equal trees"} | self.row(tree, tables, length, longer=2)
        yield rated(row, sum(pt.expected_tokens(tree, table) for table in tables), level * tree.max_depth)
        tree = likeliest(most, np.array(TABLES["a"]))
        gains = np.concatenate([survival(tree, table) for table in tables])
        order = np.argsort(-gains, kind="stable")  # roots first
        tokens, depth = np.cumsum(gains[order]), np.maximum.accumulate(np.tile(tree.depths, batch)[order])
        rates = [tokens[n] / (cost((n + 1) / batch) + level * depth[n]) for n in range(batch - 1, len(order))]
        last = batch - 1 + int(np.argmax(rates))
        row = {"kind": "unequal", "way": "one budget", "budget": last + 1}
        row |= self.row(tree, tables, length, longer=2, budget=last + 1)
        yield rated(row, float(tokens[last]), level * int(depth[last]))

    def rows(self) -> Iterator[Row]:
        """The most valuable come first."""
        *points, last = [(batch, length) for length, batch in product(self.args.lengths, self.args.batches)]
        for point in points:
            yield from self.steps(*point)
            yield from self.ways(*point, [*TABLES])
        length, others = self.args.lengths[0], (flashinfer_kernel_tree, triton_unified, paged_tree_causal)
        batches = [batch for batch in self.args.batches if (batch, length) in self.costs]
        for batch, nodes in product(batches[:2], PEERS_NODES):
            yield from self.by_peers(others, min(nodes, self.args.most_nodes), batch, length)
        for batch in batches[::2]:
            yield from self.ways(batch, length, ["a"], rule="sampled")
        for batch in batches[1:3]:
            yield from self.unequal(batch, length)
        yield from self.steps(*last)
        yield from self.ways(*last, [*TABLES])


def first_look(device: torch.device) -> None:
    tree, table = likeliest(12, np.array(TABLES["a"])), TABLES["a"]
    for how in ({}, {"rule": "sampled"}, {"budget": 20}):
        with nullcontext() if device.type == "cuda" else FakeTensorMode():
            model = Model(TINY, device, ROOM)
            step = Step(model, Cache(model, 2, ROOM), tree, [table] * 2, length=100, steps=4, **how)
            step.run() if device.type == "cpu" else captured("a tiny step", step.run)()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", choices=["cpu", "cuda"])
    parser.add_argument("--tiny", action="store_true", help="a tiny model and few points: a rehearsal")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 32, 64])
    parser.add_argument("--lengths", type=int, nargs="+", default=[2048, 8192], help="tokens of context")
    parser.add_argument("--seconds", type=float, default=215.0, help="no row begins later (default %(default)s)")
    parser.add_argument("--json", type=Path, default=Path("build/step.json"))
    args = parser.parse_args()
    began, device = time.perf_counter(), torch.device(args.device)
    args.most_nodes, args.steps = 64, 20
    if args.tiny:
        args.batches, args.lengths, args.most_nodes, args.steps = [1, 4], [100, 200], 8, 3
    first_look(device)
    bench = Bench(args)
    weights = 2 * sum(matrix.numel() for layer in (*bench.model.layers, [bench.model.head]) for matrix in layer)
    facts = machine_facts() | {"sizes": bench.model.sizes._asdict(), "weights_gb": weights / 1e9}
    facts |= {"read_gb_per_s": read_bandwidth(device) / 1e9, "tables": TABLES}
    results = Results.start(args.json, "rehearsal" if args.tiny else "step", facts)
    for row in bench.rows():
        results.rows.append(row)
        results.write()
        print(json.dumps(row), flush=True)
        if time.perf_counter() - began > args.seconds:
            print(f"{args.seconds:.0f} seconds are over: the other rows are left out")
            break
    results.finish(absent=bench.absent, seconds=time.perf_counter() - began)
    wrong = [row for row in results.rows if "wrong" in row]
    print(f"{len(results.rows)} rows, {len(wrong)} of a wrong text; absent: {bench.absent}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
