"""sample, verify_greedy, verify_sampled, verify_tokens."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pagedtree import (
    SamplingParams,
    TreeBatch,
    build_trees,
    reference,
    sample,
    verify_greedy,
    verify_sampled,
    verify_tokens,
)
from pagedtree.check.case import Case, Place, Results, environment
from pagedtree.check.cases.inputs import (
    DTYPES,
    as_words,
    float32,
    int32,
    int64,
    normal,
    offsets,
    random_tree,
    seeded,
    streams_of,
    words64,
)
from pagedtree.check.cases.instructions_sm90 import check_applies
from pagedtree.reference.tree import link

Sampling = dict[str, Any]
SAMPLINGS: dict[str, Sampling] = {
    "plain": {},
    "greedy": {"temperature": 0.0},
    "cool": {"temperature": 0.6},
    "hot, top-k": {"temperature": 2.5, "top_k": 7},
    "top-k 1": {"top_k": 1},
    "top-p": {"top_p": 0.9},
    "narrow top-p": {"top_p": 0.35, "temperature": 1.4},
    "tiny top-p": {"top_p": 1e-6},
    "min-p": {"min_p": 0.07},
    "min-p 1": {"min_p": 1.0},
    "top-k 129": {"top_k": 129},
    "top-k 1000": {"top_k": 1000, "top_p": 0.5, "min_p": 1e-3, "temperature": 1.5},
    "all filters": {"top_k": 30, "top_p": 0.8, "min_p": 0.02, "temperature": 1.2},
    "all filters, joint": {"top_k": 30, "top_p": 0.8, "min_p": 0.02, "temperature": 1.2, "filter_order": "joint"},
}
MALFORMED, BAD_ROW = 1, 2


def cases() -> Iterator[Case]:
    for dtype, vocab in [
        ("fp32", 1), ("fp16", 6), ("bf16", 16), ("fp32", 33), ("bf16", 129), ("fp32", 1000), ("fp16", 1025),
        ("bf16", 4001), ("fp16", 4001), ("bf16", 33_001),
    ]:  # fmt: skip
        samplings = SAMPLINGS if vocab < 4000 else FEW_SAMPLINGS
        yield _sample(f"{dtype}/V {vocab}", hostile_rows(vocab, DTYPES[dtype]), samplings)
    yield _sample("no row", torch.zeros(0, 50, dtype=torch.float32), FEW_SAMPLINGS)
    yield _sample("parameters per row", hostile_rows(200, torch.bfloat16), {"tensors": tensors_of(12)})
    for problem in problems():
        yield _walk(problem.name, problem)
        yield _tokens(problem)
    for problem in problems():
        for sampling in ("plain", "all filters"):
            yield _walk(f"{problem.name}/{sampling}", problem, SAMPLINGS[sampling])
    yield _walk("parameters per sequence", forest("", 4), tensors_of(4))
    yield _tokens(forest("large ids", 5), 2**40)
    yield from chip_cases()


def chip_cases() -> Iterator[Case]:
    """Walks and draws by Hopper's kernels, over rows on chip."""
    for dtype, vocab in (("fp16", 40), ("bf16", 4000), ("fp32", 9000)):
        rows = hostile_rows(vocab + 5, DTYPES[dtype])[:, :vocab]
        yield _sample(f"on chip/{dtype}/V {vocab}", rows, SAMPLINGS, on_chip=True)
    packed = forest("packed grammar mask/V 66016", 2, 66_016, nodes=4, masked=True, packed=True)
    names = ("fp16", "30 trees/fp32", "three trees/V 66000", "hostile rows", "1000 nodes", "grammar mask", packed.name)
    for problem in (*problems(), packed):
        if problem.name in names:
            yield _walk(f"on chip/{problem.name}", problem, on_chip=True)
            for sampling in ("plain", "all filters", "top-p"):
                yield _walk(f"on chip/{problem.name}/{sampling}", problem, SAMPLINGS[sampling], on_chip=True)
    yield _walk("on chip/parameters per sequence", forest("", 12), tensors_of(12), on_chip=True)


FEW = ("plain", "tiny top-p", "top-k 129", "top-k 1000", "all filters", "all filters, joint")
FEW_SAMPLINGS = {name: SAMPLINGS[name] for name in FEW}


def hostile_rows(vocab: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    """Returns ordinary rows, ties, non-finite rows, and magnitudes around 2^-9 and 2^7, the bounds of counting bfloat16
    logits by value."""
    logits = normal(12, vocab + 3, seed=seed) * 4
    logits[1] = 0.25
    logits[2] = logits[2].round()
    logits[3, ::2] = math.nan
    logits[4] = -math.inf
    logits[5, vocab // 2] = math.inf
    logits[6] *= 1e-6
    logits[7, : vocab // 2] = -math.inf
    logits[8] *= 1e-3
    logits[9] += 126
    logits[10] -= 126
    return logits.to(dtype)[:, :vocab]


def tensors_of(batch: int) -> Sampling:
    """Returns parameters that differ for each sequence; some are NaN or out of range."""
    pick = torch.arange(batch, dtype=torch.int64)
    return {
        "temperature": float32([0.7, 0.0, math.nan, 1.0])[pick % 4],
        "top_k": int32([0, 5, -1, 1])[(pick + 1) % 4],
        "top_p": float32([0.9, 1.0, 0.4, math.nan])[(pick + 2) % 4],
        "min_p": float32([0.0, 0.05, math.nan, 0.2])[(pick + 3) % 4],
    }


def sampling_of(sampling: Sampling, b: int) -> Sampling:
    """Returns the parameters of sequence b, as numbers; NaN turns a parameter off."""
    off = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}
    numbers = {name: value[b].item() if isinstance(value, Tensor) else value for name, value in sampling.items()}
    return {name: off[name] if value != value else value for name, value in numbers.items()}


def token_of(row: np.ndarray, sampling: Sampling, seed: int, position: int) -> int:
    p = reference.distribution(row, **sampling)
    if sampling.get("temperature") == 0:
        return int(p.argmax())
    return reference.sample_row(p, seed, position)[0]


@contextmanager
def engine(place: Place, on_chip: bool) -> Iterator[None]:
    """on_chip: within it, Hopper's kernels read the rows that they can."""
    if not on_chip or place.backend == "cpu":
        yield
        return
    check_applies(place)
    with environment("PAGEDTREE_ENGINE", "wgmma"):
        yield


def _sample(name: str, logits: Tensor, samplings: dict[str, Sampling], on_chip: bool = False) -> Case:
    rows = logits.shape[0]
    seeds, positions = words64(rows), words64(rows, 1)

    def run(place: Place) -> Results:
        inputs, streams = place.put(logits), place.put({"seeds": seeds, "positions": positions})
        with engine(place, on_chip):
            return {
                key: sample(inputs, SamplingParams(**place.put(sampling)), **streams)
                for key, sampling in samplings.items()
            }

    def by_loops() -> Results:
        clean = [reference.clean_logits(row) for row in logits]
        columns = [*enumerate(zip(clean, seeds.tolist(), positions.tolist(), strict=True))]
        return {
            key: int64([token_of(row, sampling_of(sampling, i), *stream) for i, (row, *stream) in columns])
            for key, sampling in samplings.items()
        }

    backends = ("simt", "cuda") if on_chip else None
    return Case(f"sample/{name}", ("sample",), run, by_loops, backends=backends)


# Trees to verify ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Problem:
    """A batch of trees with logits and drafts, all on the CPU.

    Attributes:
        parents: of each tree; some trees are malformed.
        logits: [N, V], N counting padding rows.
        drafts: int64 [N].
        allowed: bool [N, V] or None; packed: hand it in as words.
        draft_to_target: int64 [V_draft] or None.
        tokens_left: int32 [B] or None.
    """

    name: str
    parents: list[list[int]]
    logits: Tensor
    drafts: Tensor
    max_nodes: int
    max_depth: int
    allowed: Tensor | None = None
    packed: bool = False
    draft_to_target: Tensor | None = None
    tokens_left: Tensor | None = None

    @property
    def batch(self) -> int:
        return len(self.parents)

    def place(self, place: Place) -> tuple[tuple[Tensor, Tensor, TreeBatch], dict[str, Any]]:
        """Returns (logits, draft_tokens, trees) and the optional tensors, at a place."""
        rows = self.logits.shape[0]
        flat = [parent for tree in self.parents for parent in tree]
        parents = int32(flat + [-1] * (rows - len(flat)))
        cu_nodes = offsets([len(tree) for tree in self.parents])
        trees = build_trees(place.put(parents), place.put(cu_nodes), max_nodes=self.max_nodes, max_depth=self.max_depth)
        mask = self.allowed if self.allowed is None or not self.packed else as_words(self.allowed.numpy())
        options = {"grammar_mask": mask, "draft_to_target": self.draft_to_target, "tokens_left": self.tokens_left}
        arguments: dict[str, Any] = place.put({key: x for key, x in options.items() if x is not None})
        return (place.put(self.logits), place.put(self.drafts), trees), arguments

    def tree(self, b: int) -> Tree:
        """Returns one tree in the plain loops' form: unreachable nodes have no parent, drafts are ids of the target."""
        begin = sum(map(len, self.parents[:b]))
        linked = link(self.parents[b], self.max_nodes, self.max_depth)
        vocab = self.logits.shape[1]
        parents, drafts, rows = [], [], []
        for i, row in enumerate(linked.rows):
            draft = int(self.drafts[begin + i])
            if self.draft_to_target is not None:
                inside = 0 <= draft < self.draft_to_target.shape[0]
                draft = int(self.draft_to_target[draft]) if inside else -1
            parents.append(self.parents[b][i] if row.depth > 0 else -2)
            drafts.append(draft if 0 <= draft < vocab and row.depth > 0 else -1)
            allowed = None if self.allowed is None else self.allowed[begin + i].numpy()
            rows.append(reference.clean_logits(self.logits[begin + i], allowed))
        bad = [bool(self.logits[begin + i].isnan().any()) or rows[i].max() == -np.inf for i in range(len(linked.rows))]
        return Tree(parents, drafts, rows, bad, linked.valid, [row.depth for row in linked.rows], begin)


@dataclass(frozen=True)
class Tree:
    parents: list[int]
    drafts: list[int]
    rows: list[np.ndarray]  # clean logits
    bad: list[bool]  # rows with NaN, or without a finite logit
    valid: bool
    depths: list[int]
    begin: int


def verdict_by_loops(problem: Problem, decide: Callable[[int, Tree], tuple[Sequence[int], Sequence[int]]]) -> Results:
    """decide(b, tree) gives the path and the tokens after each of its nodes."""
    width = problem.max_depth + 1
    columns: tuple[list, list, list, list] = ([], [], [], [])
    for b in range(problem.batch):
        tree = problem.tree(b)
        path, tokens = decide(b, tree) if tree.rows else ([], [])
        status = (not tree.valid) * MALFORMED + any(tree.bad[node] for node in path) * BAD_ROW
        limit = width if problem.tokens_left is None else max(int(problem.tokens_left[b]), 0)
        path, tokens = path[:limit], tokens[:limit]
        padded = [[*values, *[-1] * (width - len(values))] for values in (path, tokens)]
        for column, value in zip(columns, (padded[0], max(len(path) - 1, 0), padded[1], status), strict=True):
            column.append(value)
    return {
        "accept_index": int32(columns[0]).view(problem.batch, width),
        "num_accepted": int32(columns[1]),
        "tokens": int64(columns[2]).view(problem.batch, width),
        "status": int32(columns[3]),
    }


def forest(name: str, batch: int, vocab: int = 40, dtype: str = "bf16", nodes: int = 9, **options: Any) -> Problem:
    """Returns random trees whose drafts are mostly the likeliest tokens of their parents' rows."""
    parents = [random_tree(b, nodes).parents.tolist() for b in range(batch)]
    return problem_of(name, parents, vocab, dtype, **options)


def problem_of(
    name: str, parents: list[list[int]], vocab: int = 40, dtype: str = "bf16", padding: int = 0, masked: bool = False,
    forbidden_row: int = 4, seed: int = 0, max_nodes: int | None = None, max_depth: int | None = None,
    hostile: bool = False, **options: Any,
) -> Problem:  # fmt: skip
    generator = seeded(seed)
    sizes = [len(tree) for tree in parents]
    rows = sum(sizes) + padding
    logits = torch.randn(rows, vocab + 3, generator=generator, dtype=torch.float32)[:, :vocab] * 2
    if hostile:
        logits[1::5, ::2] = math.nan
        logits[3::7] = -math.inf
        logits[2::6, vocab // 2] = math.inf
        logits[4::9] = 1.5
    logits = logits.to(DTYPES[dtype])
    allowed = torch.rand(rows, vocab + 3, generator=generator, dtype=torch.float32)[:, 3:] < 0.8 if masked else None
    if allowed is not None and 0 <= forbidden_row < rows:
        allowed[forbidden_row] = False
    clean = logits.float().nan_to_num(-math.inf, 1e30)
    clean = clean if allowed is None else clean.masked_fill(~allowed, -math.inf)
    best = clean.topk(min(3, vocab), dim=1).indices
    above = [
        begin + min(max(parent, 0), size - 1)
        for begin, tree, size in zip(offsets(sizes).tolist(), parents, sizes, strict=False)
        for parent in tree
    ]
    pick = (torch.rand(rows, generator=generator, dtype=torch.float32) ** 3 * best.shape[1]).long()
    drafts = best[torch.tensor(above + [0] * padding, dtype=torch.int64), pick] if rows else int64([])
    draws = torch.rand(rows, generator=generator, dtype=torch.float32)
    outside = torch.where(draws < 0.08, vocab + 5, drafts + 2**32)
    drafts = torch.where(draws < 0.05, -1, torch.where(draws < 0.1, outside, drafts))
    depth = max((row.depth for tree in parents for row in link(tree, 1024, 1023).rows), default=0)
    return Problem(
        name, parents, logits, drafts, max(sizes, default=1) if max_nodes is None else max_nodes,
        depth if max_depth is None else max_depth, allowed, **options,
    )  # fmt: skip


def problems() -> Iterator[Problem]:
    yield forest("one tree", 1)
    yield forest("fp16", 2, dtype="fp16")
    yield forest("30 trees/fp32", 30, dtype="fp32")
    yield forest("long rows", 3, 4001, nodes=4)
    yield forest("one tree/V 66001", 1, 66_001, masked=True)
    yield forest("three trees/V 66000", 3, 66_000, hostile=True)
    yield forest("one token", 2, 1)
    yield forest("hostile rows", 12, hostile=True)
    yield forest("grammar mask", 6, masked=True)
    yield forest("packed grammar mask", 6, 1061, masked=True, packed=True)
    yield problem_of("ragged", [[-1], [-1, 0, 1, 2, 3], [], [-1, 0, 0, 0]], padding=3)
    yield problem_of("malformed", [[-1, 0, 5, 1], [-1, 0, -1], [3, 0, 1], [-1, 0, 1, 2, 3]], max_nodes=4, max_depth=2)
    yield problem_of("no sequence", [])
    yield problem_of("1000 nodes", [random_tree(7, 1000, 30).parents.tolist()], 17)
    yield problem_of("chain of 1024", [list(range(-1, 1023))], 3)
    yield with_draft_vocabulary(forest("draft vocabulary", 5))
    yield with_draft_vocabulary(forest("draft vocabulary, int32", 5), torch.int32)
    yield replace(forest("no draft vocabulary", 2), draft_to_target=int64([]))
    yield limited(forest("tokens left", 10, hostile=True))


def limited(problem: Problem) -> Problem:
    return replace(problem, tokens_left=torch.arange(problem.batch, dtype=torch.int32) % 5 - 1)


def with_draft_vocabulary(problem: Problem, dtype: torch.dtype = torch.int64) -> Problem:
    """Returns the same drafts as ids of a smaller vocabulary; missing drafts get an outside or unmapped id."""
    vocab = problem.logits.shape[1]
    target_ids = torch.randperm(vocab, generator=seeded(8))[: vocab * 2 // 3]
    to_target = torch.cat([target_ids, int64([vocab, -3])])
    ids = {int(x): i for i, x in enumerate(target_ids)}
    outside_ids = [vocab + 2, -1, len(target_ids), len(target_ids) + 1]
    drafts = int64([ids.get(int(x), outside_ids[i % 4]) for i, x in enumerate(problem.drafts)])
    return replace(problem, drafts=drafts.to(dtype), draft_to_target=to_target.to(dtype))


def _walk(name: str, problem: Problem, sampling: Sampling | None = None, on_chip: bool = False) -> Case:
    """sampling: of verify_sampled; None: verify_greedy."""
    streams = streams_of(problem.batch)
    op = "verify_greedy" if sampling is None else "verify_sampled"

    def run(place: Place) -> Results:
        arguments, options = problem.place(place)
        with engine(place, on_chip):
            if sampling is None:
                return verify_greedy(*arguments, **options)._asdict()
            options |= place.put(streams)
            return verify_sampled(*arguments, SamplingParams(**place.put(sampling)), **options)._asdict()

    def decide(b: int, tree: Tree) -> tuple[list[int], list[int]]:
        numbers = sampling_of(SAMPLINGS["greedy"] if sampling is None else sampling, b)
        seed, position = (int(stream[b]) for stream in streams.values())
        return reference.walk(
            tree.parents, tree.drafts, lambda node, depth: token_of(tree.rows[node], numbers, seed, position + depth)
        )

    backends = ("simt", "cuda") if on_chip else None
    return Case(f"{op}/{name}", (op,), run, lambda: verdict_by_loops(problem, decide), backends=backends)


def _tokens(problem: Problem, shift: int = 0) -> Case:
    """The likeliest token of each node, of some none; ids are larger than the problem's by `shift`."""
    tokens = problem.logits.float().nan_to_num(-math.inf, 1e30).argmax(1)
    tokens[3::7] = -5
    marks = torch.where(tokens < 0, math.nan, 0.0)  # of rows that set the status
    marked = replace(problem, logits=marks[:, None].expand(problem.logits.shape), allowed=None)
    given = tokens.int() if shift == 0 else torch.where(tokens < 0, tokens, tokens + shift)

    def run(place: Place) -> Results:
        (_, drafts, trees), options = marked.place(place)
        return verify_tokens(place.put(given), drafts + shift, trees, **options)._asdict()

    def decide(b: int, tree: Tree) -> tuple[list[int], list[int]]:
        path, found = reference.walk(tree.parents, tree.drafts, lambda node, _: int(tokens[tree.begin + node]))
        return path, [token + shift if token >= 0 else -1 for token in found]

    return Case(f"verify_tokens/{problem.name}", ("verify_tokens",), run, lambda: verdict_by_loops(marked, decide))
