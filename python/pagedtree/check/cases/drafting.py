"""expand_tree, rerank_tree, ngram_propose, medusa_propose."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pagedtree import (
    Draft,
    DraftTree,
    SamplingParams,
    expand_tree,
    medusa_propose,
    ngram_propose,
    reference,
    rerank_tree,
    start_draft,
)
from pagedtree.check.case import Case, Place, Results, within
from pagedtree.check.cases.inputs import DTYPES, float32, int32, int64, normal, random_tree, seeded, words64
from pagedtree.check.cases.verification import SAMPLINGS, hostile_rows
from pagedtree.drafting import DraftState
from pagedtree.reference import drafting as loops
from pagedtree.reference.tree import pack

JOINT = {"temperature": 1.5, "top_k": 9, "top_p": 0.6, "filter_order": "joint"}
SCORES = within(1e-5, 1e-5)  # cumulative log-probabilities, fp32


def cases() -> Iterator[Case]:
    yield from _expansions()
    yield from _rerankings()
    yield from _ngrams()
    yield from _medusas()


# expand_tree ----------------------------------------------------------------------------------------------------------


def _expansions() -> Iterator[Case]:
    for dtype, vocab in (("fp32", 5), ("fp16", 64), ("bf16", 1025), ("bf16", 33_001)):
        logits = torch.randint(-20, 20, (12, vocab + 3), generator=seeded(vocab)).div(4)[:, :vocab]
        logits += torch.arange(vocab, dtype=torch.int64) * (2.0**-9 if dtype == "fp32" else 0.0)
        count = min(4, vocab)
        yield _expansion(f"topk/{dtype}/V {vocab}", logits.to(DTYPES[dtype]), count, count)
    yield _expansion("topk/hostile rows", hostile_rows(130, torch.float32), 5, 5)
    yield _expansion("topk/inactive sequences", hostile_rows(130, torch.bfloat16), 5, 5, active=True)
    yield _expansion("topk/no sequence", torch.zeros(0, 9, dtype=torch.float32), 3, 3)
    rows, plain = normal(2, 1500, seed=5), SAMPLINGS["plain"]
    yield _expansion("swor/more children than threads", rows, 100, 3, law="swor", params=plain)
    for law in ("iid", "swor", "coupled"):
        for dtype, vocab, params in [
            ("fp32", 8, "plain"), ("fp16", 129, "cool"), ("bf16", 1500, "all filters"), ("fp16", 33_001, "top-p"),
        ]:  # fmt: skip
            count = 12 if vocab < 10_000 else 2
            logits = normal(count, vocab + 1, seed=vocab)[:, :vocab] * 3
            yield _expansion(
                f"{law}/{dtype}/V {vocab}", logits.to(DTYPES[dtype]), 6, 3, law=law, params=SAMPLINGS[params]
            )
        ordinary = normal(12, 130, seed=4) * 3
        yield _expansion(f"{law}/inactive sequences", ordinary, 5, 5, law=law, params=SAMPLINGS["top-p"], active=True)
        yield _expansion(f"{law}/joint filters", ordinary.bfloat16(), 5, 5, law=law, params=JOINT)
        for dtype in ("fp32", "bf16"):
            rows = hostile_rows(130, DTYPES[dtype])
            yield _expansion(f"{law}/hostile rows/{dtype}", rows, 5, 5, law=law, params=SAMPLINGS["top-p"])


def _expansion(
    name: str, logits: Tensor, num_children: int, num_frontier: int, *, law: str = "topk",
    params: dict[str, Any] | None = None, active: bool = False,
) -> Case:  # fmt: skip
    """Grows two levels: the root of each sequence, then its frontier, with rows of the same kind."""
    batch = logits.shape[0]
    seeds, positions = words64(batch, 2), words64(batch, 3) >> 2
    present = (torch.arange(batch, dtype=torch.int64) % 3 != 1) if active else None
    second = logits.flip(1).repeat_interleave(num_frontier, 0)

    def run(place: Place) -> Results:
        sampled = {} if params is None else {"params": SamplingParams(**params), **place.put(streams)}
        state = start_draft(place.put(int64(range(batch))), max_kv_nodes=40, active=place.put(present))
        options = {"num_children": num_children, "law": law, **sampled}
        state = expand_tree(state, place.put(logits), num_frontier=num_frontier, **options)
        state = expand_tree(state, place.put(second), **options)
        return state_results(state)

    def by_loops() -> Results:
        roots = start_draft(int64(range(batch)), max_kv_nodes=40, active=present)
        state = grow(roots, logits, num_children, num_frontier, law, params, seeds, positions)
        return state_results(grow(state, second, num_children, 0, law, params, seeds, positions))

    streams = {"seeds": seeds, "positions": positions}
    probs = {f"draft_probs {i}": within(1e-9, 2e-5) for i in range(2)}
    return Case(f"expand_tree/{name}", ("expand_tree",), run, by_loops, compare={"scores": SCORES, **probs})


def state_results(state: DraftState) -> Results:
    names = ("tokens", "parents", "scores", "kv_index", "frontier", "mask")
    results = {name: getattr(state, name) for name in names}
    return results | {f"draft_probs {i}": probs for i, probs in enumerate(state.draft_probs)}


def grow(
    old: DraftState, logits: Tensor, num_children: int, num_frontier: int, law: str, params: dict[str, Any] | None,
    seeds: Tensor, positions: Tensor,
) -> DraftState:  # fmt: skip
    width, vocab = old.num_frontier * num_children, logits.shape[1]
    tokens, parents, scores, kv_index = (
        torch.cat([column, column.new_full((old.batch_size, width), -1)], 1)
        for column in (old.tokens, old.parents, old.scores, old.kv_index)
    )
    scores[:, old.num_candidates :] = -math.inf
    frontier = torch.zeros((old.batch_size, num_frontier), dtype=torch.int32)
    mask = torch.zeros((old.batch_size * num_frontier, old.mask.shape[1]), dtype=torch.int32)
    probs = torch.zeros((old.batch_size, old.num_frontier, vocab), dtype=torch.float32)
    for b in range(old.batch_size):
        for f, parent in enumerate(old.frontier[b].tolist()):
            first = old.num_candidates + f * num_children
            parents[b, first : first + num_children] = parent
            score = float(scores[b, parent])
            if score == -math.inf:
                continue
            kv_index[b, parent] = old.num_kv - old.num_frontier + f
            row = reference.clean_logits(logits[b * old.num_frontier + f])
            if law == "topk":
                logp = torch.log_softmax(torch.from_numpy(row), 0).numpy() if row.max() > -math.inf else row
                children = loops.best_tokens(row.tolist(), num_children)
            else:
                q = reference.distribution(row, **(params or {}))
                if law != "coupled":
                    probs[b, f] = torch.from_numpy(q)
                with np.errstate(divide="ignore"):
                    logp = np.log(q)
                children = drawn(q, num_children, law, int(seeds[b]), int(positions[b]) + old.level, f)
            for k, token in enumerate(children):
                if score + float(logp[token]) >= -torch.finfo(torch.float32).max:
                    tokens[b, first + k] = token
                    scores[b, first + k] = score + float(logp[token])
        new = range(old.num_candidates, old.num_candidates + width)
        if law == "topk":
            order = sorted(new, key=lambda c: (-float(scores[b, c]), c))
        else:
            order = sorted(new, key=lambda c: ((c - old.num_candidates) % num_children, c))
        for g, c in enumerate(order[:num_frontier]):
            frontier[b, g] = c
            if scores[b, c] > -math.inf:
                place, at = b * num_frontier + g, old.num_kv + g
                mask[place] = old.mask[b * old.num_frontier + (c - old.num_candidates) // num_children]
                mask[place, at // 32] |= 1 << at % 32
    draft_probs = (*old.draft_probs, probs) if law in ("iid", "swor") else ()
    return replace(
        old, tokens=tokens, parents=parents, scores=scores, kv_index=kv_index, frontier=frontier, mask=mask,
        level_sizes=(*old.level_sizes, width), num_kv=old.num_kv + num_frontier, law=law, draft_probs=draft_probs,
    )  # fmt: skip


def drawn(q: np.ndarray, count: int, law: str, seed: int, position: int, place: int) -> list[int]:
    """Draws children from distribution q at the frontier node of index `place`."""
    use = reference.GUMBEL if law == "coupled" else reference.draft_use(place)
    if law in ("swor", "coupled"):
        with np.errstate(divide="ignore"):
            scores = np.log(q) + reference.gumbel_noise(seed, position, q.size, use=use)
        return [int(x) for x in np.argsort(-scores, kind="stable") if q[x] > 0][:count]
    words = reference.random_words(seed, position, count, use).astype(np.float64)
    u = words[:, 0] * 2.0**-32 + words[:, 1] * 2.0**-64
    tokens = np.searchsorted(np.cumsum(q), u, side="right")
    return [min(int(x), int(np.flatnonzero(q)[-1])) for x in tokens]


# Drafts ---------------------------------------------------------------------------------------------------------------


def draft_results(draft: Draft) -> Results:
    results = {"draft_tokens": draft.draft_tokens, "parents": draft.trees.parents, "cu_nodes": draft.trees.cu_nodes}
    results["valid"] = draft.trees.valid
    optional = {"node_map": draft.node_map, "draft_probs": draft.draft_probs, "draft_rows": draft.draft_rows}
    return results | {name: x for name, x in optional.items() if x is not None}


def drafts_by_loops(trees: list[tuple[list[int], ...]], rows: int) -> Results:
    """Returns the results for the tokens and parents (and node map) of each tree."""
    if not trees:
        return {"draft_tokens": int64([]), "parents": int32([]), "cu_nodes": int32([0]),
                "valid": torch.zeros(0, dtype=torch.bool)}  # fmt: skip
    cu_nodes, columns = pack(trees, rows)
    results = {"draft_tokens": int64(columns[0]), "parents": int32(columns[1]), "cu_nodes": int32(cu_nodes)}
    results["valid"] = torch.tensor([len(tree[0]) > 0 for tree in trees], dtype=torch.bool)
    return results | ({"node_map": int32(columns[2])} if len(columns) > 2 else {})


def _rerankings() -> Iterator[Case]:
    for count, num_nodes in ((1, 1), (40, 17), (40, 60), (1000, 64), (1000, 1000)):
        yield _reranking(f"{count} candidates, {num_nodes} nodes", count, num_nodes)
    yield _reranking("inactive sequences", 40, 17, active=True)
    yield _reranking("no sequence", 40, 17, batch=0)
    yield _reranking("drawn", 40, 17, law="swor")


def _reranking(
    name: str, count: int, num_nodes: int, *, batch: int = 3, law: str = "topk", active: bool = False
) -> Case:
    parents = [random_tree(b, count, 9).parents.tolist() for b in range(batch)]
    steps = float32([0.0, 0.0, 0.5, 1.0, math.inf])[torch.randint(0, 5, (batch, count), generator=seeded(count))]
    scores = torch.zeros(batch, count, dtype=torch.float32)
    for b in range(batch):
        for c in range(1, count):
            scores[b, c] = scores[b, parents[b][c]] - steps[b, c]
    present = [b != 1 for b in range(batch)] if active else [True] * batch
    index = torch.arange(count, dtype=torch.int64).repeat(batch, 1)

    def run(place: Place) -> Results:
        state = start_draft(torch.zeros(batch, dtype=torch.int64), max_kv_nodes=1)
        state = replace(
            state, tokens=index + 100, parents=int32(parents).view(batch, count), scores=scores,
            kv_index=(index + 1000).int(), level_sizes=(1,) * count, law=law,
        )  # fmt: skip
        mask = torch.tensor(present, dtype=torch.bool) if active else None
        return draft_results(rerank_tree(place.put(state), num_nodes, active=place.put(mask)))

    def by_loops() -> Results:
        trees: list[tuple[list[int], ...]] = []
        for b in range(batch):
            row = scores[b].tolist()
            candidates = [c for c in range(count) if row[c] > -math.inf and present[b]]
            if law == "topk":
                nodes = sorted(sorted(candidates, key=lambda c, row=row: (-row[c], c))[:num_nodes])  # type: ignore[misc]
            else:
                nodes = [c for c in candidates if c < num_nodes]
            above = [nodes.index(parents[b][c]) if c else -1 for c in nodes]
            trees.append(([c + 100 for c in nodes], above, [c + 1000 for c in nodes]))
        results = drafts_by_loops(trees, batch * num_nodes)
        return {"node_map": int32([]), **results}

    return Case(f"rerank_tree/{name}", ("rerank_tree", "build_trees"), run, by_loops)


def _ngrams() -> Iterator[Case]:
    generator = seeded(0)
    for tokens, length in ((2, 30), (4, 200), (9, 700)):
        histories = [torch.randint(-1, tokens, (length,), generator=generator).tolist() for _ in range(4)]
        extra = torch.randint(-1, tokens, (4, 50), generator=generator).tolist()
        yield _ngram(f"{tokens} words/{length} tokens", histories, max_nodes=24, max_depth=5)
        yield _ngram(f"{tokens} words/{length} tokens/extra", histories, extra, max_nodes=60, max_depth=9, max_ngram=2)
    active = [True, False, True, False]
    yield _ngram("inactive sequences", histories, active=active, max_nodes=24, max_depth=5)
    ragged = [[], [5], [5, 5], [1, 2, 3], [1, 2, 7, 8, 2, 7, 9, 1, 2], [3, -1, -1], [6] * 9]
    yield _ngram("ragged", ragged, max_nodes=16, max_depth=4)
    yield _ngram("pool of histories", ragged, [[5]] * 5, rows=[4, 4, -1, 7, 6], max_nodes=16, max_depth=4)
    yield _ngram("one node", ragged, max_nodes=1, max_depth=4)
    yield _ngram("depth 0", ragged, max_nodes=9, max_depth=0)
    yield _ngram("no branch", ragged, max_nodes=9, max_depth=3, max_branches=0)
    yield _ngram("long n-grams", [[1, 2] * 300], max_nodes=1000, max_depth=900, min_ngram=3, max_ngram=64)
    repeated = [[5] * 900, [1, 2, 3] * 300, [0, 0, 1, 0, 1] * 180, ([0] * 40 + [1]) * 22]
    extra = [row[-80:] for row in repeated]
    yield _ngram("repeated texts", repeated, extra, max_nodes=40, max_depth=12, max_ngram=64)
    yield _ngram("no sequence", [], max_nodes=9, max_depth=3)


def _ngram(
    name: str, histories: list[list[int]], extra: list[list[int]] | None = None, active: list[bool] | None = None,
    rows: list[int] | None = None, **options: Any,
) -> Case:  # fmt: skip
    row_texts = dict(enumerate(histories))
    used_texts = list(row_texts.values()) if rows is None else [row_texts.get(row, []) for row in rows]
    width = max(map(len, histories), default=4) + 3
    padded = int64([[*row, *[7] * (width - len(row))] for row in histories]).view(len(histories), width)

    def run(place: Place) -> Results:
        arguments = {
            "extra": None if extra is None else int64(extra),
            "active": None if active is None else torch.tensor(active, dtype=torch.bool),
            "history_rows": None if rows is None else int32(rows),
        }
        text, lengths = place.put((padded, int32([len(row) for row in histories])))
        return draft_results(ngram_propose(text, lengths, **place.put(arguments), **options))

    def by_loops() -> Results:
        texts = [row if active is None or active[b] else [] for b, row in enumerate(used_texts)]
        extra_texts = [[]] * len(used_texts) if extra is None else extra
        trees = [loops.ngram_tree(row, extra=text, **options) for row, text in zip(texts, extra_texts, strict=True)]
        return drafts_by_loops(list(trees), len(used_texts) * options["max_nodes"])

    return Case(f"ngram_propose/{name}", ("ngram_propose", "build_trees"), run, by_loops)


def _medusas() -> Iterator[Case]:
    trees = {
        "paths": DraftTree.from_paths([[0], [1], [7], [0, 0], [0, 3], [7, 2], [0, 3, 1], [7, 2, 5]]),
        "full": DraftTree.full([4, 3, 2]),
        "chain": DraftTree.chain(4),
        "root": DraftTree.chain(0),
    }
    for name, tree in trees.items():
        for dtype, vocab in (("fp32", 9), ("fp16", 130), ("bf16", 33_001)):
            yield _medusa(f"{name}/{dtype}/V {vocab}", tree, vocab, dtype)
    yield _medusa("hostile rows", trees["full"], 40, "fp32", hostile=True)
    yield _medusa("no sequence", trees["full"], 40, "fp32", batch=0)


def _medusa(name: str, tree: DraftTree, vocab: int, dtype: str, *, hostile: bool = False, batch: int = 3) -> Case:
    heads = 4
    logits = torch.randint(-30, 30, (batch, heads, vocab), generator=seeded(vocab)).div(4)
    if hostile:
        logits[:, 0, ::2], logits[1], logits[2, 1, 3:] = math.nan, -math.inf, -math.inf
        logits[0, 1, 5] = math.inf
    logits = logits.to(DTYPES[dtype])
    roots, active = list(range(batch)), [b != 1 for b in range(batch)]

    def run(place: Place) -> Results:
        inputs = place.put((logits, int64(roots), torch.tensor(active, dtype=torch.bool)))
        return draft_results(medusa_propose(inputs[0], tree, root_tokens=inputs[1], active=inputs[2]))

    def by_loops() -> Results:
        drafts = []
        for b in range(batch):
            ranked = [loops.best_tokens(logits[b, h].float().tolist(), 16) for h in range(heads)]
            tokens = [roots[b]]
            for depth, rank in zip(tree.depths[1:].tolist(), tree.child_ranks[1:].tolist(), strict=True):
                best = ranked[depth - 1]
                tokens.append(best[rank] if rank < len(best) else -1)
            drafts.append((tokens, tree.parents.tolist()) if active[b] else ([], []))
        return drafts_by_loops(list(drafts), batch * tree.num_nodes)

    return Case(f"medusa_propose/{name}", ("medusa_propose", "build_trees"), run, by_loops)
