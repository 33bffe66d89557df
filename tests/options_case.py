"""Batches with request options, and what each op makes of them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from calls import mapped
from torch import Tensor

from pagedtree import (
    RequestOptions,
    SamplingParams,
    TreeBatch,
    build_trees,
    reference,
    verify_block,
    verify_rejection,
    verify_traversal,
)
from pagedtree.check.cases.inputs import as_words
from pagedtree.testing import use_backend

PENALTIES = ("repetition_penalty", "presence_penalty", "frequency_penalty")
PARTS = (
    "repetition", "presence", "frequency", "prompt", "counts", "allowed", "bias", "bad_words", "stops", "grammar",
)  # fmt: skip
TREES = [[-1, 0, 0, 1, 1, 2, 3], [-1], [-1, 0, 1, 2, 3], [], [-1, 0, 0, 0, 2, 2], [-1, 0, 1, 1, 3, 3]]
CHAINS = [[-1, 0, 1, 2], [-1], [-1, 0, 1, 2, 3], [], [-1, 0], [-1, 0, 1]]
HOT = 5  # likely tokens, from which drafts, counts, words and stop ids are taken, so that they meet

SAMPLED = {
    "greedy": SamplingParams(temperature=0.0),
    "sampled": SamplingParams(temperature=0.8),
    "filtered": SamplingParams(temperature=1.3, top_k=9, top_p=0.9, min_p=0.01),
}
WEIGHED = [
    *((verify_rejection, law) for law in ("iid", "swor", "onehot")),
    *((verify_traversal, law) for law in ("iid", "swor")),
]
OF_CHAINS = [(verify_block, "iid"), (verify_block, "onehot")]


@dataclass
class Case:
    """A ragged batch with options; a sequence may be idle, an entry of drafts no draft."""

    logits: Tensor
    drafts: Tensor
    trees: TreeBatch
    seeds: Tensor
    positions: Tensor
    probs: Tensor
    options: RequestOptions | None = None
    penalties: dict[str, Any] = field(default_factory=dict)
    grammar_mask: Tensor | None = None
    draft_to_target: Tensor | None = None
    is_chain: bool = False

    @property
    def streams(self) -> dict[str, Tensor]:
        return {"seeds": self.seeds, "positions": self.positions}

    @property
    def params(self) -> SamplingParams:
        """The penalties alone."""
        return SamplingParams(**self.penalties)

    def applied(self) -> Tensor:
        """The logits after all options, by the reference."""
        at = {"trees": self.trees, "draft_tokens": self.drafts, "positions": self.positions}
        masks = {"grammar_mask": self.grammar_mask, "draft_to_target": self.draft_to_target}
        return reference.apply_options(self.logits, self.params, self.options, **at, **masks)


def batch_of(parents: list[list[int]], device: torch.device | str = "cpu", max_nodes: int = 8) -> TreeBatch:
    """Trees, of no nodes among them."""
    sizes = torch.tensor([0, *map(len, parents)], dtype=torch.int32, device=device)
    flat = torch.tensor([node for tree in parents for node in tree], dtype=torch.int32, device=device)
    return build_trees(flat, sizes.cumsum(0, dtype=torch.int32), max_nodes=max_nodes, max_depth=max_nodes - 1)


class Maker:
    """Draws a case; `parts` are the options in it."""

    def __init__(self, vocab: int, parts: Iterable[str], parents: list[list[int]], seed: int) -> None:
        self.vocab, self.parts, self.parents, self.batch = vocab, set(parts), parents, len(parents)
        self.generator, self.is_flat = torch.Generator().manual_seed(seed), seed % 3 == 2
        self.hot = torch.randperm(vocab, generator=self.generator)[:HOT]

    def rand(self, *shape: int) -> Tensor:
        return torch.rand(shape, generator=self.generator)

    def ints(self, low: int, high: int, *shape: int) -> Tensor:
        return torch.randint(low, high, shape, generator=self.generator)

    def tokens(self, *shape: int) -> Tensor:
        return self.hot[self.ints(0, len(self.hot), *shape)]

    def case(self, dtype: torch.dtype = torch.float32) -> Case:
        rows = sum(map(len, self.parents))
        # Multiples of 1/64: sums with bias are exact in any order, and there are ties.
        logits = (torch.randn(rows, self.vocab, generator=self.generator) * 96).round() / 64
        logits[:, self.hot] += 0 if self.is_flat else 3 + (self.rand(rows, len(self.hot)) * 128).round() / 64
        probs = (logits + torch.randn(logits.shape, generator=self.generator)).softmax(-1)
        drafts = self.tokens(rows)
        drafts[self.rand(rows) < 0.08] = -1
        streams = self.ints(-(2**62), 2**62, self.batch), self.ints(5, 60, self.batch)
        is_chain = self.parents is CHAINS
        found = Case(logits.to(dtype), drafts, batch_of(self.parents), *streams, probs, is_chain=is_chain)
        made: dict[str, Tensor] = {}
        for part in ("prompt", "counts", "allowed", "bias", "stops"):
            if part in self.parts:
                made |= getattr(self, f"_{part}")(found)
        for name in PENALTIES:
            if name.removesuffix("_penalty") in self.parts or {"counts", "prompt"} & self.parts:
                found.penalties[name] = self._penalty(name)
        if "grammar" in self.parts:
            found.grammar_mask = self.rand(rows, self.vocab) < 0.7
        found.options = RequestOptions(**made) if made else None
        self._follow(found)
        if "bad_words" in self.parts:
            found.options = RequestOptions(**made, **self._bad_words(found))
        return found

    def _follow(self, case: Case) -> None:
        """Makes most drafts the likeliest tokens after their parents' paths, so that paths are long."""
        parents = torch.cat([torch.tensor(tree, dtype=torch.int64) for tree in self.parents])
        sequence = torch.repeat_interleave(torch.tensor([len(tree) for tree in self.parents]))
        parents += case.trees.cu_nodes.long()[sequence]
        ranks = [int((parents[:row] == parents[row]).sum()) for row in range(len(parents))]
        for depth in range(1, int(case.trees.depths.max()) + 1):
            best = case.applied().nan_to_num(-torch.inf).topk(min(3, self.vocab)).indices
            for row in (case.trees.depths == depth).nonzero()[:, 0].tolist():
                if self.rand() < 0.8:
                    case.drafts[row] = best[parents[row], ranks[row] % best.shape[1]]

    def _penalty(self, name: str) -> float | Tensor:
        """A number, a tensor for all or one for each sequence, in which some values are off or out of range."""
        kind = int(self.ints(0, 3))
        if name == "repetition_penalty":
            values = torch.tensor([1.3, 1.0, 0.7, float("nan"), -1.0, 2.5])
        else:
            values = torch.tensor([0.5, 0.0, -0.3, float("nan"), 7.0, 1.1])
        return float(values[0]) if kind == 0 else values[:1] if kind == 1 else values[self.ints(0, 6, self.batch)]

    def _prompt(self, case: Case) -> dict[str, Tensor]:
        seen = self.rand(self.batch, self.vocab) < 0.2
        seen[:, self.hot[::2]] = True
        words = as_words(seen)
        words[:, -1] |= -1 << (self.vocab - 1) % 32 << 1 if self.vocab % 32 else 0  # bits past the vocabulary
        return {"prompt_mask": words}

    def _counts(self, case: Case) -> dict[str, Tensor]:
        counts = (self.rand(self.batch, self.vocab) * 1.2).int()
        counts[:, self.hot] = self.ints(0, 4, self.batch, len(self.hot)).int()
        return {"output_counts": counts}

    def _allowed(self, case: Case) -> dict[str, Tensor]:
        allowed = self.rand(self.batch, self.vocab) < 0.6
        allowed[:, self.hot[1:]] = True
        allowed[0] = True
        allowed[4:5] = False  # nothing is left to this sequence
        return {"allowed_mask": as_words(allowed)}

    def _bias(self, case: Case) -> dict[str, Tensor]:
        sizes = self.ints(0, 9, self.batch)
        count = int(sizes.sum())
        tokens = torch.where(self.rand(count) < 0.6, self.tokens(count), self.ints(0, self.vocab, count))
        values = self.ints(-16, 17, count) / 4
        strange = torch.tensor([float("inf"), -float("inf"), float("nan")])
        picks = self.ints(0, 12, count)
        values = torch.where(picks < 3, strange[picks.clamp(max=2)], values)
        outside = torch.tensor([-1, self.vocab, 2**31 - 1, -(2**31)])[self.ints(0, 4, count)]
        tokens = torch.where(self.rand(count) < 0.15, outside, tokens)
        return {"bias_tokens": tokens.int(), "bias_values": values.float(), "cu_bias": offsets(sizes)}

    def _bad_words(self, case: Case) -> dict[str, Tensor]:
        length = 9
        history, lens = self.tokens(self.batch, length), self.ints(0, length + 1, self.batch).int()
        starts = torch.minimum(self.ints(0, length, self.batch).int(), lens)
        words: list[list[list[int]]] = [[] for _ in range(self.batch)]
        for _, b, path in reference.paths_of(case.drafts.numel(), case.drafts.tolist(), case.trees):
            # Words that end as the text does, some of which begin before history_start.
            text = history[b, : lens[b]].tolist() + path
            size = int(self.ints(1, 6))
            if self.rand() < 0.7 and size <= len(text):
                words[b].append([*text[len(text) - size :], int(self.tokens(1))])
        for of_sequence in words:
            of_sequence += [[], [int(self.hot[0])], [int(self.hot[-1]), self.vocab]]
            of_sequence += [self.tokens(int(self.ints(2, 5))).tolist() for _ in range(2)]
        flat = [word for of_sequence in words for word in of_sequence]
        made = {
            "bad_tokens": torch.tensor([x for word in flat for x in word], dtype=torch.int32),
            "cu_bad_words": offsets(torch.tensor([len(word) for word in flat])),
            "cu_bad_seqs": offsets(torch.tensor([len(of_sequence) for of_sequence in words])),
        }
        kind = int(self.ints(0, 4))
        if kind > 0:
            made |= {"history": history, "history_lens": lens}
        if kind > 1:
            made["history_start"] = starts
        return made

    def _stops(self, case: Case) -> dict[str, Tensor]:
        stops = self.tokens(self.batch, 3).int()
        stops[self.rand(self.batch, 3) < 0.3] = -1
        stops[:, 2] = torch.tensor([self.vocab, -5, 2**31 - 1])[self.ints(0, 3, self.batch)].int()
        return {"stop_ids": stops, "min_position": case.positions + self.ints(-1, 5, self.batch)}


def offsets(sizes: Tensor) -> Tensor:
    return torch.cat([torch.zeros(1, dtype=torch.int64), sizes.cumsum(0)]).int()


def make_case(
    vocab: int,
    parts: Iterable[str],
    *,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    parents: list[list[int]] = TREES,
) -> Case:
    with use_backend("cpu"):  # a case is made on the host, whatever the test's backend
        return Maker(vocab, parts, parents, seed).case(dtype)


def strided(t: Tensor) -> Tensor:
    """The same values in rows that lie further apart, with values between them that would do harm."""
    if t.dim() < 2:
        return t
    fill = {torch.bool: True, torch.int32: -1, torch.int64: -1}.get(t.dtype, 99.0)
    wide = torch.full((t.shape[0], t.shape[1] + 7), fill, dtype=t.dtype, device=t.device)
    wide[:, 3 : 3 + t.shape[1]] = t
    return wide[:, 3 : 3 + t.shape[1]]


# Values of any kind --------------------------------------------------------------------------------------------------

VOCAB = 40
HOSTILE = [-(2**31), -5, -1, 0, 1, 2, 3, 5, 8, 31, 32, 39, 40, 41, 1000, 2**31 - 1]


def hostile_options(case: Case, generator: torch.Generator) -> RequestOptions:
    made = {}
    for name, t in case.options.tensors().items():
        if t is None:
            continue
        if t.dtype == torch.float32:
            strange = torch.tensor([float("nan"), float("inf"), -float("inf"), 3e38, -3e38, 1.0, -2.0])
            made[name] = strange[torch.randint(0, 7, t.shape, generator=generator)].to(t.device)
            continue
        values = torch.tensor(HOSTILE if t.dtype == torch.int32 else [*HOSTILE, -(2**63), 2**63 - 1, 2**32 + 1])
        picked = values[torch.randint(0, len(values), t.shape, generator=generator)].to(t.dtype)
        keep = torch.rand(t.shape, generator=generator) < (0.6 if torch.rand((), generator=generator) < 0.5 else 0)
        made[name] = torch.where(keep.to(t.device), t, picked.to(t.device))
    return RequestOptions(**made)


@cache
def complete_case(seed: int) -> Case:
    for further in range(100):
        case = make_case(VOCAB, PARTS, seed=seed + 1000 * further, parents=CHAINS)
        assert case.options is not None
        if all(t is not None for t in case.options.tensors().values()):
            return case
    raise AssertionError


def good_case(device: torch.device, seed: int = 3) -> Case:
    """One that has every tensor."""
    return mapped(complete_case(seed), lambda t: t.clone().to(device))
