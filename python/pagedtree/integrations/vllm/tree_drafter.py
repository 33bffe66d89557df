"""The base class of drafters for vLLM's runners."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np
from torch import Tensor
from vllm.distributed import get_tp_group

from pagedtree import Draft
from pagedtree.integrations.vllm.limits import check_worker
from pagedtree.integrations.vllm.proposals import NO_GUESS, Proposal, cut_at
from pagedtree.integrations.vllm.tuned import BatchTuner, Pass

__all__ = ["Proposed", "TreeDrafter"]

# A proposal as a drafter returns it: draft tokens, parents and, where it knows them, log-probabilities.
Proposed = tuple[list[int], np.ndarray] | tuple[list[int], np.ndarray, np.ndarray | None]


class TreeDrafter:
    """Base class: the methods that vLLM calls, and the bookkeeping that trees need.

    Class attributes:

        defaults        its options and their default values
        needed          the required option and its meaning, or None
        needs_hidden    `draft` gets the target's last hidden states
        feature_layers  `read` gets the outputs of these decoder layers (0 = the first); `load_model` may still set it
        on_every_rank   all tensor-parallel ranks call `read` and `draft`; the first one's proposals count
        grows_by_level  trees of fewer levels (`limit_depth`) take less time
        is_best_first   `draft_on_device` returns trees of max_nodes nodes in descending order of their joint
                        log-probabilities, left in `log_probs`, fp32 [R * max_nodes] (adaptive verification)

    Attributes:
        options: `defaults`, updated from additional_config.
        max_nodes: num_speculative_tokens + 1. max_depth: maximum levels of a tree; default max_nodes - 1.
        request_ids, hidden, most_tokens: the requests in batch order, their hidden states and maximum lengths, prompts
            included; set before `propose`.
        pass_rows, pass_seconds: tokens that the pass read, drafts included, and its duration.
        parents: request id -> int32 [n + 1], the tree of the last proposal, root included; the first n nodes form
            a tree for any n.
    """

    defaults: ClassVar[dict[str, Any]] = {}
    needed: ClassVar[tuple[str, str] | None] = None
    needs_hidden: bool = False
    feature_layers: Sequence[int] = ()
    on_every_rank: bool = False
    grows_by_level: bool = False
    is_best_first: bool = False
    log_probs: Tensor | None = None

    def __init__(self, vllm_config: Any) -> None:
        self.check(vllm_config)
        check_worker(vllm_config)
        options = dict((vllm_config.additional_config or {}).get("pagedtree", {}))
        # Runner V2 schedules a step before the last one's result is known: the same number of nodes for each request.
        ways = ["whole"] if vllm_config.use_v2_model_runner else ["auto", "whole"]
        tree = options.pop("tree", ways[0])
        if tree not in ways:
            expected = " or ".join(f'"{way}"' for way in ways)
            raise ValueError(f'additional_config["pagedtree"]: expected tree = {expected}, got {tree!r}')
        unknown = sorted(set(options) - set(self.defaults))
        if unknown:
            names = sorted({"tree", *self.defaults})
            raise ValueError(f'additional_config["pagedtree"]: expected options among {names}, got {unknown}')
        self.vllm_config = vllm_config
        self.options = {**self.defaults, **options}
        if self.needed is not None and not isinstance(value := self.options[self.needed[0]], str):
            name, kind = self.needed
            raise ValueError(f'additional_config["pagedtree"]: expected the entry {name}, {kind}, got {value!r}')
        self.max_nodes = vllm_config.speculative_config.num_speculative_tokens + 1
        self.max_depth = self.max_nodes - 1
        self.is_tuned = tree == "auto"
        self._tuner: BatchTuner | None = None
        self.pass_rows, self.pass_seconds = 0, 0.0
        self.request_ids: list[str] = []
        self.most_tokens: list[int] = []
        self.hidden: Tensor | None = None
        self.parents: dict[str, np.ndarray] = {}

    @classmethod
    def check(cls, vllm_config: Any) -> None:
        """Raises ValueError, naming the setting, for an unsupported configuration. Called with vLLM's configuration,
        then in each worker."""

    @property
    def drafts_here(self) -> bool:
        """Returns whether this rank calls `read` and `draft`."""
        return self.on_every_rank or get_tp_group().rank_in_group == 0

    @property
    def on_device(self) -> bool:
        """Returns whether the class drafts by `draft_on_device`."""
        made, drafted = (
            next(owner for owner in type(self).__mro__ if name in vars(owner)) for name in ("draft_on_device", "draft")
        )
        return made is not TreeDrafter and issubclass(made, drafted)

    def load_model(self, target_model: Any) -> None:
        """Called on every rank once the target, a vLLM model, is loaded."""

    def forget(self, request_id: str) -> None:
        """Called when the request is finished."""
        self.parents.pop(request_id, None)

    def read(self, request_ids: list[str], tokens: list[np.ndarray], starts: list[int], features: list[Tensor]) -> None:
        """Called after each target pass, before `draft`, if the drafter has `feature_layers`.

        Args:
            request_ids: requests whose prefill or accepted tokens the pass read; not all get a new token.
            tokens: integer [length of the text so far] of each, prompt and unread tokens included.
            starts: the position of the first token read of each: the end of the last call, or 0 after a preemption.
            features: [number of tokens read, layers * H] of each: the residual stream after each of feature_layers.

        Before `draft` sees a text of n tokens, `read` has seen positions 0 to n - 2.
        """

    def draft(self, request_ids: list[str], tokens: list[np.ndarray]) -> Sequence[Proposed]:
        """Drafts a tree for each request.

        tokens: of R requests, integer [length of the text so far], prompt included; the last token is the root. hidden,
        by keyword, with `needs_hidden`: [R, H], the target's last hidden state before the root, in the model's dtype on
        its device.

        Returns R tuples (draft_tokens, parents) or (draft_tokens, parents, log_probs): a list of n <=
        num_speculative_tokens token ids, and int32 [n + 1], the parents of the root (-1) and of each draft token: 0 is
        the root, i the i-th draft token, and 0 <= parents[i] < i. Without drafts: ([], np.array([-1])). Nodes past the
        request's maximum length are dropped. log_probs: fp32 [n + 1], each node's joint log-probability by the drafter,
        0 for the root.

        Called in steps where drafting pays.
        """
        raise NotImplementedError

    def draft_on_device(self, tokens: Tensor, lengths: Tensor, hidden: Tensor | None) -> Draft:
        """Drafts as `draft` does, for runner V2, without waiting for the device. tokens: int64 [R, L]; lengths: int32
        [R]. Trees of requests in prefill are ignored."""
        raise NotImplementedError

    def limit_depth(self, levels: int) -> None:
        """Limits trees to so many levels, if fewer take less time; called before the next `draft`."""

    def unread(self, request_ids: list[str], tokens: list[np.ndarray]) -> float:
        """Returns how many target tokens `draft` would read beyond a normal step's; called before `draft`."""
        return 0.0

    def propose(
        self,
        sampled_token_ids: list[list[int]],
        num_tokens_no_spec: np.ndarray,
        token_ids_cpu: np.ndarray,
        slot_mappings: Any = None,
    ) -> list[list[int]]:
        """Implements vLLM's hook: draft tokens for each request, none without a new token."""
        self.parents.clear()
        rows = [row for row, new in enumerate(sampled_token_ids) if new]
        request_ids = [self.request_ids[row] for row in rows]
        texts = [token_ids_cpu[row, : num_tokens_no_spec[row]] for row in rows]
        # All ranks must agree on the trees, and drafting ranks on the depth. The first one decides.
        ranks, depth = get_tp_group(), self.max_depth if rows else None
        is_first = ranks.rank_in_group == 0
        if self.is_tuned and is_first and rows:
            if self._tuner is None:
                self._tuner = BatchTuner(self.max_depth, self.grows_by_level)
            passed = Pass(self.request_ids, sampled_token_ids, self.pass_rows, self.pass_seconds)
            depth = self._tuner.plan(passed, request_ids, self.unread(request_ids, texts)).depth
        if self.is_tuned and self.on_every_rank:
            depth = ranks.broadcast_object(depth, src=0)
        proposals: list[Proposal] | None = None
        if self.drafts_here and depth is not None:
            if self.is_tuned:
                self.limit_depth(depth)
            states: dict[str, Any] = {}
            if self.needs_hidden:
                assert self.hidden is not None
                states["hidden"] = self.hidden if len(rows) == len(sampled_token_ids) else self.hidden[rows]
            proposals = self._checked(self.draft(request_ids, texts, **states), len(rows))
            # The last token of a text is generated, but never read.
            rooms = [self.most_tokens[row] - 1 - len(text) for row, text in zip(rows, texts, strict=True)]
            proposals = [cut_at(room, tree) for room, tree in zip(rooms, proposals, strict=True)]
            if self._tuner is not None:
                proposals = self._tuner.keep(proposals)
        proposals = ranks.broadcast_object(proposals, src=0) or [NO_GUESS] * len(rows)
        drafts: list[list[int]] = [[] for _ in sampled_token_ids]
        for row, request_id, proposal in zip(rows, request_ids, proposals, strict=True):
            drafts[row], self.parents[request_id] = proposal.tokens, proposal.parents
        return drafts

    def _checked(self, proposed: Sequence[Proposed], count: int) -> list[Proposal]:
        name = f"{type(self).__name__}.draft"
        if len(proposed) != count:
            raise ValueError(f"{name}: expected a proposal for each of {count} requests, got {len(proposed)}")
        proposals = [Proposal(*fields) for fields in proposed]
        for tokens, parents, log_probs in proposals:
            if len(tokens) >= self.max_nodes:
                raise ValueError(f"{name}: expected at most {self.max_nodes - 1} draft tokens, got {len(tokens)}")
            nodes = np.arange(len(tokens) + 1)
            if np.shape(parents) != nodes.shape:
                raise ValueError(f"{name}: expected {len(nodes)} parents, the root's included, got {np.shape(parents)}")
            if parents[0] != -1 or np.any((parents[1:] < 0) | (parents[1:] >= nodes[1:])):
                raise ValueError(
                    f"{name}: expected parents[0] = -1 and 0 <= parents[i] < i, got {np.asarray(parents).tolist()}"
                )
            if log_probs is not None and np.shape(log_probs) != nodes.shape:
                raise ValueError(
                    f"{name}: expected {len(nodes)} log-probabilities, the root's included, got {np.shape(log_probs)}"
                )
        return proposals
