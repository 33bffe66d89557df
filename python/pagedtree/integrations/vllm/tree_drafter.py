"""The base class of drafters for vLLM's runners."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from torch import Tensor
from vllm.distributed import get_tp_group

from pagedtree import Draft
from pagedtree._arguments import refusal
from pagedtree.integrations.vllm.own_worker import check_worker
from pagedtree.integrations.vllm.proposals import NO_GUESS, Proposal, cut_at
from pagedtree.integrations.vllm.tuned import BatchTuner, Pass
from pagedtree.tree import MAX_NODES

SECTION = 'additional_config["pagedtree"]'

# A proposal as a drafter returns it: draft tokens, parents and, where it knows them, log-probabilities.
Proposed = tuple[list[int], np.ndarray] | tuple[list[int], np.ndarray, np.ndarray | None]


class TreeDrafter:
    """Base class: the methods that vLLM calls, and the bookkeeping that trees need.

    Class attributes:

        defaults        its options and their default values, of the types that are accepted
        largest         of options that are integers from 1 on
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
    largest: ClassVar[Mapping[str, int]] = {}
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
        self.vllm_config = vllm_config
        self.options = self.options_of(vllm_config)
        self.is_tuned = self.options.pop("tree") == "auto"
        self.vocab_size = vllm_config.model_config.get_vocab_size()
        self.max_nodes = vllm_config.speculative_config.num_speculative_tokens + 1
        self.max_depth = self.max_nodes - 1
        self._tuner: BatchTuner | None = None
        self.pass_rows, self.pass_seconds = 0, 0.0
        self.request_ids: list[str] = []
        self.most_tokens: list[int] = []
        self.hidden: Tensor | None = None
        self.parents: dict[str, np.ndarray] = {}

    @classmethod
    def options_of(cls, vllm_config: Any) -> dict[str, Any]:
        """Returns `defaults` and "tree", updated from additional_config. Raises ValueError, naming the option, for
        unknown ones and other types and values."""
        config = vllm_config.additional_config
        config = config if isinstance(config, dict) else {}
        names = [name for name in config if name != "pagedtree" and isinstance(name, str)]
        if wrong := [name for name in names if difflib.get_close_matches(name.lower(), ["pagedtree"], cutoff=0.8)]:
            raise refusal("additional_config", "pagedtree as the section's name", wrong[0])
        options = config.get("pagedtree", {})
        if not isinstance(options, dict):
            raise refusal(SECTION, "a dictionary of options", f"{options!r:.60}")
        # Runner V2 schedules a step before the last one's result is known: the same number of nodes for each request.
        ways = ["whole"] if vllm_config.use_v2_model_runner else ["auto", "whole"]
        options = {"tree": ways[0], **cls.defaults, **options}
        if options["tree"] not in ways:
            expected = " or ".join(f'"{way}"' for way in ways)
            raise refusal(SECTION, f"tree = {expected}", f"{options['tree']!r:.60}")
        if unknown := sorted({*map(str, options)} - {"tree", *cls.defaults}):
            raise refusal(SECTION, f"options among {sorted({'tree', *cls.defaults})}", unknown)
        for name, default in cls.defaults.items():
            _check_option(name, options[name], default, cls.largest.get(name))
        if "max_ngram" in cls.largest and options["min_ngram"] > options["max_ngram"]:
            raise refusal(SECTION, "min_ngram <= max_ngram", options["min_ngram"])
        if "width" in cls.largest and ((options["depth"] or 1) - 1) * (options["width"] or 1) >= MAX_NODES:
            raise refusal(SECTION, f"(depth - 1) * width < {MAX_NODES}", f"{options['width']} as width")
        if cls.needed is not None:
            (name, kind), value = cls.needed, options[cls.needed[0]]
            if not isinstance(value, str):
                raise refusal(SECTION, f"the entry {name}, {kind}", f"{value!r:.60}")
            if kind == "a folder" and not Path(value).is_dir():
                raise refusal(SECTION, f"{name} to be a folder", repr(value))
        return options

    @classmethod
    def check(cls, vllm_config: Any) -> None:
        """Raises ValueError, naming the setting, for an unsupported configuration."""

    @property
    def drafts_here(self) -> bool:
        return self.on_every_rank or get_tp_group().rank_in_group == 0

    @property
    def on_device(self) -> bool:
        made, drafted = (
            next(owner for owner in type(self).__mro__ if name in vars(owner)) for name in ("draft_on_device", "draft")
        )
        return made is not TreeDrafter and issubclass(made, drafted)

    def load_model(self, target_model: Any) -> None:
        """Called on every rank once the target, a vLLM model, is loaded."""

    def forget(self, request_id: str) -> None:
        self.parents.pop(request_id, None)

    def read(self, request_ids: list[str], tokens: list[np.ndarray], starts: list[int], features: list[Tensor]) -> None:
        """Called after each target pass, before `draft`, if the drafter has `feature_layers`.

        Args:
            request_ids: requests whose prefill or accepted tokens the pass read; not all get a new token.
            tokens: integer [length of the text so far] of each, unread tokens included; read-only.
            starts: the position of the first token read of each: the end of the last call, or 0 after a preemption.
            features: [number of tokens read, layers * H] of each: the residual stream after each of feature_layers.

        Before `draft` sees a text of n tokens, `read` has seen positions 0 to n - 2.
        """

    def draft(self, request_ids: list[str], tokens: list[np.ndarray]) -> Sequence[Proposed]:
        """Drafts a tree for each request.

        tokens: of R requests, integer [length of the text so far], read-only; the last token is the root. hidden, by
        keyword, with `needs_hidden`: [R, H], the target's last hidden states before the roots.

        Returns R tuples (draft_tokens, parents) or (draft_tokens, parents, log_probs): a list of n <=
        num_speculative_tokens token ids, and int32 [n + 1], the parents of the root (-1) and of each draft token: 0 is
        the root, i the i-th draft token, and 0 <= parents[i] < i. Without drafts: ([], np.array([-1])). log_probs: fp32
        [n + 1], each node's joint log-probability by the drafter, 0 for the root.
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
        self.parents.clear()
        rows = [row for row, new in enumerate(sampled_token_ids) if new]
        request_ids = [self.request_ids[row] for row in rows]
        texts = [read_only(token_ids_cpu[row, : num_tokens_no_spec[row]]) for row in rows]
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
            try:
                answer = self.draft([*request_ids], [*texts], **states)
            except Exception as error:
                raise RuntimeError(f"{type(self).__name__}.draft: {type(error).__name__}: {error}") from error
            proposals = self._checked(answer, len(rows))
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
        got = len(proposed) if isinstance(proposed, Sequence) else type(proposed).__name__
        if got != count:
            raise refusal(name, f"a proposal for each of {count} requests", got)
        return [self._checked_tree(name, fields) for fields in proposed]

    def _checked_tree(self, name: str, fields: Any) -> Proposal:
        if not isinstance(fields, tuple) or len(fields) not in (2, 3):
            raise refusal(name, "(draft_tokens, parents) or log_probs, too", f"{fields!r:.60}")
        tokens = _array(f"{name}: draft_tokens", fields[0], np.int64)
        parents = _array(f"{name}: parents", fields[1], np.int64)
        log_probs = None
        if len(tokens) >= self.max_nodes:
            raise refusal(name, f"at most {self.max_nodes - 1} draft tokens", len(tokens))
        nodes = np.arange(len(tokens) + 1)
        if parents.shape != nodes.shape:
            raise refusal(name, f"{len(nodes)} parents, the root's included", parents.shape)
        if parents[0] != -1 or np.any((parents[1:] < 0) | (parents[1:] >= nodes[1:])):
            raise refusal(name, "parents[0] = -1 and 0 <= parents[i] < i", parents.tolist())
        if len(fields) == 3 and fields[2] is not None:
            log_probs = _array(f"{name}: log_probs", fields[2], np.float32)
            if log_probs.shape != nodes.shape or np.isnan(log_probs).any():
                raise refusal(name, f"{len(nodes)} log-probabilities, the root's included", log_probs)
        if len(tokens) and not 0 <= tokens.min() <= tokens.max() < self.vocab_size:
            raise refusal(name, f"draft tokens in 0..{self.vocab_size - 1}", tokens.tolist())
        return Proposal(tokens.tolist(), parents.astype(np.int32), log_probs)


def read_only(array: np.ndarray) -> np.ndarray:
    """Returns a view that drafters cannot write to: it may be vLLM's own text."""
    view = array.view()
    view.flags.writeable = False
    return view


def _array(name: str, values: Any, dtype: type[np.int64] | type[np.float32]) -> np.ndarray:
    try:
        array = values.cpu().numpy() if isinstance(values, Tensor) else np.asarray(values)
    except (TypeError, ValueError):  # lists of different lengths
        array = np.zeros((0, 0))
    kinds = "iu" if dtype is np.int64 else "iuf"
    if array.ndim != 1 or (array.size and array.dtype.kind not in kinds):
        raise refusal(name, "integers" if dtype is np.int64 else "numbers", f"{values!r:.60}")
    return array.astype(dtype)


def _check_option(name: str, value: Any, default: Any, largest: int | None) -> None:
    if largest is not None:
        if (value is not None or default is not None) and not (type(value) is int and 1 <= value <= largest):
            raise refusal(SECTION, f"{name} in 1..{largest}", f"{value!r:.60}")
    elif isinstance(default, (bool, int, float, str)):
        types = (int, float) if isinstance(default, float) else (type(default),)
        if not isinstance(value, types) or isinstance(value, bool) > isinstance(default, bool):
            raise refusal(SECTION, f"{name} of type {types[-1].__name__}", f"{value!r:.60}")
