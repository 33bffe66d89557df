"""step_shards, follow_shards, weigh_shards, walk_shards: sharded vocabularies, where threads play the ranks.

The verify ops drive the four ops; all ranks must return the whole vocabulary's results.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

import pagedtree
from pagedtree import SamplingParams, TreeBatch, sample
from pagedtree.bits import packed, unpacked
from pagedtree.check.case import CPU, Case, Place, Results
from pagedtree.check.cases.inputs import DTYPES, normal, seeded, streams_of, uniform
from pagedtree.check.cases.verification import (
    SAMPLINGS,
    Problem,
    Sampling,
    forest,
    hostile_rows,
    limited,
    problem_of,
    tensors_of,
    with_draft_vocabulary,
)
from pagedtree.distributed import VocabShards

SPLITS = {
    "one rank": [1.0],
    "two ranks": [0.4, 0.6],
    "an empty rank": [0.3, 0.0, 0.7],
    "four ranks": [0.1, 0.2, 0.3, 0.4],
}


class _Meeting:
    def __init__(self, size: int) -> None:
        self.size = size
        self.barrier = threading.Barrier(size, timeout=60)
        self.brought: list[Tensor | None] = [None] * size

    def every(self, rank: int, words: Tensor) -> Tensor:
        """Returns [P, ...]: each rank's contribution."""
        self.brought[rank] = words
        self.barrier.wait()
        gathered = torch.stack([tensor for tensor in self.brought if tensor is not None])
        self.barrier.wait()
        return gathered


class _ThreadGroup:
    """Implements pagedtree.distributed.group.Group between threads instead of processes."""

    def __init__(self, meeting: _Meeting, rank: int) -> None:
        self.meeting, self.rank, self.size = meeting, rank, meeting.size

    def maximum(self, words: Tensor, what: str) -> Tensor:
        return self.meeting.every(self.rank, words).amax(0) if words.numel() else words

    def total(self, words: Tensor, what: str) -> Tensor:
        return self.meeting.every(self.rank, words).sum(0)

    def every(self, words: Tensor, what: str) -> Tensor:
        return self.meeting.every(self.rank, words)

    def agree(self, call: str, arguments: dict[str, Any]) -> None:
        """All ranks pass the same arguments."""


def _shards(meeting: _Meeting, rank: int, sizes: list[int]) -> VocabShards:
    shards = VocabShards.__new__(VocabShards)  # its own constructor wants torch.distributed
    shards._group = _ThreadGroup(meeting, rank)  # type: ignore[assignment]
    shards.rank, shards.num_ranks, shards.sizes = rank, len(sizes), tuple(sizes)
    shards.num_tokens, shards.first_token = sizes[rank], list(accumulate(sizes, initial=0))[rank]
    shards.vocab = sum(sizes)
    return shards


def on_ranks(sizes: list[int], device: torch.device, call: Callable[[VocabShards], Results]) -> Results:
    """Runs call(shards) on each rank, one thread per rank; returns the results, which must all be equal."""
    meeting = _Meeting(len(sizes))
    found: list[Results | BaseException] = [{}] * len(sizes)

    def work(rank: int) -> None:
        try:
            if device.type == "cuda":
                torch.cuda.set_device(device)
            found[rank] = call(_shards(meeting, rank, sizes))
        except BaseException as error:
            found[rank] = error
            meeting.barrier.abort()

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(len(sizes))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    errors = [result for result in found if isinstance(result, BaseException)]
    for error in sorted(errors, key=lambda error: isinstance(error, threading.BrokenBarrierError)):
        raise error
    return {f"{name} on rank {rank}": x for rank, parts in enumerate(found) for name, x in parts.items()}  # type: ignore[union-attr]


def cases() -> Iterator[Case]:
    for (split, parts), (dtype, vocab) in zip(
        SPLITS.items(), (("fp16", 300), ("fp32", 131), ("bf16", 5000), ("bf16", 37)), strict=True
    ):
        sizes = [int(part * vocab) for part in parts]
        sizes[-1] += vocab - sum(sizes)
        problem = forest("", 5, vocab, dtype, hostile=True)
        yield _verify("greedy", split, problem, sizes)
        for sampling in ("plain", "all filters", "all filters, joint"):
            yield _verify("sampled", f"{split}/{sampling}", problem, sizes, SAMPLINGS[sampling])
            for draft_law in ("iid", "swor", "onehot"):
                name, ordinary = f"{split}/{draft_law}/{sampling}", forest("", 5, vocab, dtype)
                yield _rejection(name, ordinary, SAMPLINGS[sampling], draft_law, sizes)
        yield _sample(split, vocab, DTYPES[dtype], sizes)
    for draft_law in ("iid", "onehot"):
        smaller, masked = with_draft_vocabulary(forest("", 6, 131)), forest("", 6, 131, masked=True)
        yield _rejection(f"draft vocabulary/{draft_law}", smaller, SAMPLINGS["plain"], draft_law, [60, 71])
        ordinary, cool = forest("", 6, 131), SAMPLINGS["cool"]
        yield _rejection(f"given coins/{draft_law}", ordinary, cool, draft_law, [60, 71], coins=True)
        yield _rejection(f"grammar mask/{draft_law}", masked, SAMPLINGS["plain"], draft_law, [60, 71])
    yield _verify("greedy", "draft vocabulary", smaller, [60, 71])
    yield _verify("sampled", "draft vocabulary", smaller, [60, 71], SAMPLINGS["cool"])
    short_problem = limited(forest("", 8, 131))
    yield _verify("greedy", "tokens left", short_problem, [60, 71])
    yield _rejection("tokens left", short_problem, SAMPLINGS["plain"], "iid", [60, 71])
    masked = forest("", 4, 131, masked=True)
    yield _verify("greedy", "grammar mask", masked, [60, 71])
    words = forest("", 4, 131, masked=True, packed=True)
    yield _verify("sampled", "packed grammar mask", words, [60, 71], tensors_of(4))
    yield _rejection("parameters per sequence", masked, tensors_of(4), "iid", [60, 71])
    yield _verify("greedy", "no sequence", problem_of("", []), [20, 20])
    yield _rejection("no sequence", problem_of("", []), SAMPLINGS["plain"], "onehot", [20, 20])
    for sizes in ([0, 1], [2, 0, 3], [20_004, 12_002, 8_003]):
        yield _verify("sampled", f"V {sum(sizes)}", forest("", 4, sum(sizes)), sizes, SAMPLINGS["all filters"])


def _own(options: dict[str, Any], shards: VocabShards) -> dict[str, Any]:
    if "grammar_mask" not in options:
        return options
    mask = options["grammar_mask"]
    if mask.dtype == torch.bool:
        return {**options, "grammar_mask": shards.own(mask).contiguous()}
    return {**options, "grammar_mask": packed(shards.own(unpacked(mask, shards.vocab)))}


def _case(name: str, ops: tuple[str, ...], sizes: list[int], whole: Callable[[Place], Results],
          part: Callable[[Place, VocabShards], Results]) -> Case:  # fmt: skip

    def expected() -> Results:
        return {f"{key} on rank {rank}": x for rank in range(len(sizes)) for key, x in whole(CPU).items()}

    def run(place: Place) -> Results:
        return on_ranks(sizes, place.device, lambda shards: part(place, shards))

    against = "the whole vocabulary on the CPU backend"
    return Case(name, ops, run, expected, always_loops=True, against=against)


def _verify(
    rule: str, name: str, problem: Problem, sizes: list[int], sampling: Sampling | None = None, **drafts: Any
) -> Case:
    """sampling: None for the greedy rule. drafts: more options of the op."""

    def given(place: Place) -> tuple[tuple[Tensor, Tensor, TreeBatch], tuple[SamplingParams, ...], dict[str, Any]]:
        arguments, options = problem.place(place)
        if sampling is None:
            return arguments, (), options
        options |= place.put(drafts | streams_of(problem.batch))
        return arguments, (SamplingParams(**place.put(sampling)),), options

    def whole(place: Place) -> Results:
        arguments, params, options = given(place)
        return getattr(pagedtree, f"verify_{rule}")(*arguments, *params, **options)._asdict()

    def part(place: Place, shards: VocabShards) -> Results:
        (logits, *inputs), params, options = given(place)
        verify = getattr(pagedtree, f"verify_{rule}")
        return verify(shards.own(logits), *inputs, *params, shards=shards, **_own(options, shards))._asdict()

    ops = ("weigh_shards", "walk_shards") if rule == "rejection" else ("follow_shards",)
    return _case(f"shards/{rule}/{name}", ("step_shards", *ops), sizes, whole, part)


def _rejection(
    name: str, problem: Problem, sampling: Sampling, draft_law: str, sizes: list[int], *, coins: bool = False
) -> Case:
    """coins: whether coins are given; else the op draws its own."""
    rows = problem.logits.shape[0]
    probs = (problem.logits.float() + normal(*problem.logits.shape, seed=5)).softmax(-1)
    order = torch.randperm(rows, generator=seeded(6))
    drafts: dict[str, Any] = {"draft_law": draft_law}
    if draft_law != "onehot":
        drafts |= {"draft_probs": probs[order.argsort()], "draft_rows": order}
    if coins:
        drafts |= {"coins": uniform(rows, seed=7), "final_coins": uniform(problem.batch, seed=8)}
    return _verify("rejection", name, problem, sizes, sampling, **drafts)


def _sample(name: str, vocab: int, dtype: torch.dtype, sizes: list[int]) -> Case:
    rows, sampling = hostile_rows(vocab, dtype), SAMPLINGS["all filters"]

    def whole(place: Place) -> Results:
        return {"tokens": sample(place.put(rows), SamplingParams(**sampling), **place.put(streams_of(12)))}

    def part(place: Place, shards: VocabShards) -> Results:
        logits = shards.own(place.put(rows))
        return {"tokens": sample(logits, SamplingParams(**sampling), shards=shards, **place.put(streams_of(12)))}

    return _case(f"shards/sample/{name}", ("step_shards",), sizes, whole, part)
