"""Runs a draft model on fewer ranks than its target; all ranks get its proposals."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from pagedtree._arguments import refusal
from pagedtree.check_draft import as_draft, check_values
from pagedtree.distributed.group import GroupError
from pagedtree.distributed.shards import VocabShards
from pagedtree.drafting import Draft
from pagedtree.tree import TreeBatch, build_trees

__all__ = ["DraftGroup", "DraftStats"]

# failed: 1 + the last rank where drafting failed, 0 = none.
HEADER = ("failed", "rows", "batch_size", "max_nodes", "max_depth", "has_probs", "num_probs", "dtype", "microseconds")
PROBS_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# A drafter's attributes and their defaults.
FACTS = {"max_nodes": 0, "num_positions": None, "needs_hidden": False, "draft_law": "onehot", "is_chain": False}


@dataclass
class DraftStats:
    """Drafting counters and times.

    Attributes:
        proposals: calls of `propose`.
        tokens: draft tokens proposed, of all sequences.
        draft_time: seconds that the draft ranks spent drafting.
        wait_time: seconds that this rank waited for proposals after finishing its own work.
    """

    proposals: int = 0
    tokens: int = 0
    draft_time: float = 0.0
    wait_time: float = 0.0

    @property
    def ms_per_token(self) -> float:
        """Milliseconds of drafting per proposed token."""
        return 1e3 * self.draft_time / max(self.tokens, 1)


class DraftGroup:
    """A drafter on the first `size` ranks of the target's group, whose proposals all ranks receive.

    It implements `pagedtree.generation.drafters.Drafter`, and all ranks of the group construct and call it
    together. Drafting runs in a separate thread between `start` and `propose`, overlapping other work of the target
    such as compacting its cache. Other ranks do only that work.

    Args:
        make: called on the draft ranks with their torch.distributed group, over which the drafter's model is sharded,
            or None where one rank drafts alone; returns the drafter.
        size: number of draft ranks, a divisor of the target's. Above one, a group is created (`dist.new_group`) in
            which all ranks of the world take part.
        shards: the target's vocabulary shards. Where the drafts were drawn ("iid", "swor"), each rank receives its
            columns of the distributions.
        device: device of the tensors and collectives, "cpu" for gloo.

    Attributes:
        drafter: on the draft ranks, the drafter that `make` returned; else None.
        max_nodes, num_positions, needs_hidden, draft_law, is_chain: the drafter's, on all ranks.
        stats: a `DraftStats`.

    A proposal is 9 words, 3 per node and one per sequence, sent from the first rank to each other rank after a check.
    If drafting fails on a draft rank, or its proposal is malformed, that rank raises its error, and all others
    GroupError with its text. Construction fails likewise, on all ranks, if `make` raises or returns no drafter. (Draft
    ranks that wait for each other within `make` do so until their group's timeout.)

    Source: vLLM's draft_tensor_parallel_size, whose measurements this makes repeatable.
    """

    def __init__(
        self,
        make: Callable[[dist.ProcessGroup | None], Any],
        size: int,
        *,
        shards: VocabShards,
        device: torch.device | str = "cpu",
    ) -> None:
        target = shards._group
        if size < 1 or target.size % size:
            raise refusal("size", f"a divisor of the target's {target.size} ranks", size)
        target.agree("DraftGroup", {"size": size})
        self.shards, self.size, self.device = shards, size, torch.device(device)
        self._members = [*range(target.size)] if target.group is None else dist.get_process_group_ranks(target.group)
        self._group = target
        draft_ranks = None if size == 1 else dist.new_group(self._members[:size])
        self.rank, self._first = target.rank, self._members[0]
        self.drafter: Any = None
        facts = self._make(make, draft_ranks)
        self.max_nodes, self.num_positions, self.needs_hidden, self.draft_law, self.is_chain = facts
        self.stats = DraftStats()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="draft") if self.drafter is not None else None
        self._drafting: Future[tuple[Draft, float]] | None = None
        self._refusal: Exception | None = None

    def _make(self, make: Callable[[dist.ProcessGroup | None], Any], draft_ranks: dist.ProcessGroup | None) -> Any:
        """Makes the drafter on the draft ranks; returns the first one's facts, or raises on all ranks."""
        facts: tuple[Any, ...] = ()
        failure: Exception | None = None
        if self.rank < self.size:
            try:
                self.drafter = make(draft_ranks)
                if not callable(getattr(self.drafter, "propose", None)):
                    raise refusal("make", "it to return a drafter", type(self.drafter).__name__, TypeError)
                if getattr(self.drafter, "feature_layers", ()):
                    raise refusal("make", "a drafter without feature_layers, which draft ranks lack")
                facts = tuple(getattr(self.drafter, name, default) for name, default in FACTS.items())
            except Exception as error:
                failure = error
        told = None if failure is None else f"{type(failure).__name__}: {failure}"
        answers: list[Any] = [None] * self._group.size
        with self._group._answered("DraftGroup: making the drafter"):
            dist.all_gather_object(answers, (told, facts), group=self._group.group)
        if failure is not None:
            raise failure
        for rank, (reason, _) in enumerate(answers):
            if reason is not None:
                raise GroupError(f"DraftGroup: make failed on rank {rank} ({reason})")
        return answers[0][1]

    def start(self, tokens: Tensor, lengths: Tensor) -> None:
        """Starts drafting the next proposal."""
        if self._thread is not None and self._drafting is None:
            self._drafting = self._thread.submit(self._draft, tokens, lengths)

    def propose(self, tokens: Tensor, lengths: Tensor) -> Draft:
        """Returns the drafter's proposal; draft_probs are this rank's columns. Its node_map stays with the drafter."""
        self.start(tokens, lengths)
        begin = time.perf_counter()
        draft, seconds, failure = None, 0.0, None
        if self._drafting is not None:
            drafting, self._drafting = self._drafting, None
            try:
                draft, seconds = drafting.result()
            except Exception as error:
                failure = error
        shared = self._share(draft, seconds, failure)
        self.stats.wait_time += time.perf_counter() - begin
        return shared

    def begin(self, *args: Any, **kwargs: Any) -> None:
        """Passes this on to the draft ranks' drafter, as do `select`, `narrow`, `observe` and `forget`.

        The first proposal raises the drafter's errors, on all ranks.
        """
        self._refusal = None
        try:
            self._forward("begin", *args, **kwargs)
        except Exception as error:
            self._refusal = error

    def end(self) -> None:
        """Drops an unused draft, and passes the call on to the drafter."""
        if self._drafting is not None:
            self._drafting.cancel()
            self._drafting = None
        self._forward("end")

    def select(self, sequences: list[Any]) -> None:
        """See `begin`."""
        self._forward("select", sequences)

    def narrow(self, draft: Draft, rows: Tensor) -> None:
        """See `begin`."""
        self._forward("narrow", draft, rows)

    def observe(self, result: Any) -> None:
        """See `begin`."""
        self._forward("observe", result)

    def forget(self, sequence: Any) -> None:
        """See `begin`."""
        self._forward("forget", sequence)

    def _forward(self, name: str, *args: Any, **kwargs: Any) -> None:
        method = getattr(self.drafter, name, None)
        if method is not None:
            method(*args, **kwargs)

    @torch.no_grad()
    def _draft(self, tokens: Tensor, lengths: Tensor) -> tuple[Draft, float]:
        begin = time.perf_counter()
        assert self.drafter is not None
        if self._refusal is not None:
            raise self._refusal
        draft = self._checked(self.drafter.propose(tokens, lengths), lengths.shape[0])
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()
        return draft, time.perf_counter() - begin

    def _checked(self, proposal: Any, batch_size: int) -> Draft:
        """Returns a proposal that can be sent, or an error."""
        draft = as_draft(proposal, batch_size, self.device)
        check_values(draft)
        probs = draft.draft_probs
        if probs is not None and (probs.shape[1] != self.shards.vocab or probs.dtype not in PROBS_DTYPES):
            wanted = f"draft_probs [M, {self.shards.vocab}] in {', '.join(map(str, PROBS_DTYPES))}"
            raise refusal("drafter", wanted, f"{probs.dtype} {list(probs.shape)}")
        return draft

    def _share(self, draft: Draft | None, seconds: float, failure: Exception | None) -> Draft:
        header = self._header(draft, seconds, failure)
        with self._group._answered("DraftGroup: a proposal"):
            dist.all_reduce(header, dist.ReduceOp.MAX, group=self._group.group)
        facts = dict(zip(HEADER, header.tolist(), strict=True))
        if facts["failed"]:
            rank = facts["failed"] - 1
            text: list[Any] = [f"{type(failure).__name__}: {failure}"]
            with self._group._answered("DraftGroup: why drafting failed"):
                dist.broadcast_object_list(text, src=self._members[rank], group=self._group.group)
            if failure is not None:
                raise failure
            raise GroupError(f"DraftGroup: drafting failed on rank {rank} ({text[0]})")
        self.stats.proposals += 1
        self.stats.tokens += facts["rows"] - facts["batch_size"]
        self.stats.draft_time += facts["microseconds"] * 1e-6
        return self._exchange(draft, facts)

    def _header(self, draft: Draft | None, seconds: float, failure: Exception | None) -> Tensor:
        """Returns this rank's part of the header: facts from the first rank, a failure from any rank, else zeros."""
        values = [0] * len(HEADER)
        if failure is not None:
            values[0] = 1 + self.rank
        elif self.rank == 0:
            assert draft is not None
            probs, trees = draft.draft_probs, draft.trees
            of_probs = (0, 0, 0) if probs is None else (1, probs.shape[0], PROBS_DTYPES.index(probs.dtype))
            bounds = trees.batch_size, trees.max_nodes, trees.max_depth
            values = [0, draft.draft_tokens.shape[0], *bounds, *of_probs, round(seconds * 1e6)]
        return torch.tensor(values, device=self.device, dtype=torch.int64)

    def _exchange(self, draft: Draft | None, facts: dict[str, int]) -> Draft:
        rows, batch_size, num_probs = facts["rows"], facts["batch_size"], facts["num_probs"]
        buffer = torch.zeros(3 * rows + batch_size + 1, dtype=torch.int64, device=self.device)
        if self.rank == 0:
            assert draft is not None
            draft_rows = draft.draft_rows
            if draft_rows is None:
                draft_rows = torch.arange(rows, device=self.device, dtype=torch.int64)
            parts = (draft.draft_tokens, draft.trees.parents, draft_rows, draft.trees.cu_nodes)
            buffer = torch.cat([part.long() for part in parts])
        with self._group._answered("DraftGroup: a proposal's nodes"):
            dist.broadcast(buffer, src=self._first, group=self._group.group)
        tokens, parents, draft_rows, cu_nodes = buffer.split([rows, rows, rows, batch_size + 1])
        trees: TreeBatch = build_trees(
            parents.int(), cu_nodes.int(), max_nodes=facts["max_nodes"], max_depth=facts["max_depth"]
        )
        if not facts["has_probs"]:
            return Draft(tokens, trees, None)
        probs = draft.draft_probs if draft is not None and self.rank == 0 else None
        return Draft(tokens, trees, self._columns(probs, num_probs, PROBS_DTYPES[facts["dtype"]]), draft_rows)

    def _columns(self, probs: Tensor | None, num_probs: int, dtype: torch.dtype) -> Tensor:
        """Returns this rank's columns of the distributions, sent by the first rank."""
        group, sizes = self._group, self.shards.sizes
        columns = torch.empty((num_probs, self.shards.num_tokens), dtype=dtype, device=self.device)
        with group._answered("DraftGroup: the drafts' probabilities"):
            if probs is None:
                if columns.numel():
                    dist.recv(columns, src=self._first, group=group.group)
                return columns
            for rank, part in enumerate(probs.split(list(sizes), dim=1)):
                if rank == 0:
                    columns.copy_(part)
                elif part.numel():
                    dist.send(part.contiguous(), dst=self._members[rank], group=group.group)
        return columns
