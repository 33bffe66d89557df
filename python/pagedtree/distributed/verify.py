"""The verify ops on a sharded vocabulary; see `protocol` for the words exchanged."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import torch
from torch import Tensor

from pagedtree._arguments import expect_type, refusal
from pagedtree._ops import VerdictTensors, call, empty_verdict, ops, register_fake
from pagedtree.distributed.protocol import END_WORDS, LEFT_WORDS, ROW_WORDS, Round, Weigh, num_digits
from pagedtree.distributed.shards import VocabShards
from pagedtree.options import CHANGES_LOGITS, RequestOptions, option_arguments
from pagedtree.sampling_params import SamplingParams
from pagedtree.tree import MAX_NODES, TreeBatch

__all__ = ["sample_shards", "verify_shards"]

GREEDY = SamplingParams(temperature=0.0)


def sample_shards(
    shards: VocabShards,
    logits: Tensor,
    params: SamplingParams,
    seeds: Tensor,
    positions: Tensor,
    grammar_mask: Tensor | None,
    options: RequestOptions | None,
) -> Tensor:
    """`pagedtree.sample` on vocabulary shards."""
    masked = grammar_mask is not None
    _agree("sample", shards, logits, params, options, seeds=seeds, positions=positions, masked=masked)
    words = _Rows(shards, logits, params, grammar_mask, options, positions).find_winners(seeds)
    return ~words[:, 0] & 0xFFFFFFFF


def verify_shards(
    rule: str,
    shards: VocabShards,
    logits: Tensor,
    draft_tokens: Tensor,
    trees: TreeBatch,
    params: SamplingParams | None,
    *,
    grammar_mask: Tensor | None,
    draft_to_target: Tensor | None,
    tokens_left: Tensor | None,
    options: RequestOptions | None = None,
    draft_params: SamplingParams | None = None,
    **given: Any,
) -> VerdictTensors:
    """`pagedtree.verify_<rule>` on vocabulary shards."""
    op, probs, max_children = f"verify_{rule}", given.get("draft_probs"), given.get("max_children")
    if draft_params is not None:
        raise refusal("draft_params", "None with shards", type(draft_params).__name__)
    if probs is not None:
        expect_type("draft_probs", probs, Tensor)
    paths = {"draft_tokens": draft_tokens, "draft_to_target": draft_to_target}
    compared = given if probs is None else given | {"draft_probs": (probs.shape[0], probs.dtype)}
    compared = {**paths, **compared, "tokens_left": tokens_left, "masked": grammar_mask is not None}
    _agree(op, shards, logits, params, options, trees, **compared)
    if max_children is not None:
        expect_type("max_children", max_children, int)
        if not 0 <= max_children < MAX_NODES:
            raise refusal("max_children", f"0..{MAX_NODES - 1}", max_children)
    rows = _Rows(shards, logits, params or GREEDY, grammar_mask, options, given.get("positions"), trees, **paths)
    if rule != "rejection":
        words = rows.find_winners(given.get("seeds"))
        paths = {"draft_to_target": draft_to_target, "tokens_left": tokens_left}
        where = rows.rows, words, *rows.drafts()
        followed: VerdictTensors = call(ops.follow_shards, *where, last=rows.last, vocab=shards.vocab, **paths)
        return followed
    rows.find_distributions()
    if probs is not None and probs.ndim == 2 and probs.shape[1] == shards.vocab:
        probs = shards.own(probs)
    # Residuals depend on no coin: the ranks compute them for all nodes at once, then each walks alone.
    drafts = {"draft_law": given["draft_law"], "draft_to_target": draft_to_target}
    weighed = _Weighed(rows, drafts, {"draft_probs": probs, "draft_rows": given["draft_rows"]})
    chance = {name: given[name] for name in ("seeds", "positions", "coins", "final_coins")}
    return weighed.verify(max_children, tokens_left=tokens_left, **chance)


def _agree(
    name: str,
    shards: VocabShards,
    logits: Tensor,
    params: SamplingParams | None,
    options: RequestOptions | None,
    trees: TreeBatch | None = None,
    **others: Any,
) -> None:
    """Refuses arguments that differ between ranks."""
    expect_type("shards", shards, VocabShards)
    fits = logits.ndim == 2 and logits.shape[1] == shards.num_tokens
    arguments: dict[str, Any] = {"logits": (logits.dtype, logits.shape[:1], fits)}
    if params is not None:
        arguments |= {field.name: getattr(params, field.name) for field in fields(params)}
        if options is not None:
            expect_type("options", options, RequestOptions)
        # Comparing vocabulary- or text-sized tensors would cost too much.
        large = ("prompt_mask", "output_counts", "allowed_mask", "history")
        arguments |= {
            name: (value.dtype, value.shape) if name in large and value is not None else value
            for name, value in (options or RequestOptions()).tensors().items()
        }
    if trees is not None:
        arguments["trees"] = (trees.max_nodes, trees.max_depth)
        arguments |= {name: getattr(trees, name) for name in ("cu_nodes", "first_child", "next_sibling")}
    try:
        shards._group.agree(name, arguments | others)
    except ValueError:
        if fits:
            raise
    if not fits:
        raise refusal("logits", f"shape [*, {shards.num_tokens}] on rank {shards.rank}", list(logits.shape))


class _Rows:
    """This rank's state of the distributions of N rows, round after round."""

    def __init__(
        self,
        shards: VocabShards,
        logits: Tensor,
        params: SamplingParams,
        grammar_mask: Tensor | None,
        options: RequestOptions | None,
        positions: Tensor | None,
        trees: TreeBatch | None = None,
        **paths: Tensor | None,
    ) -> None:
        self.shards, self.logits, self.params, self.trees, self.mask = shards, logits, params, trees, grammar_mask
        self.num_rows = logits.shape[0]
        self.is_greedy = not isinstance(params.temperature, Tensor) and params.temperature == 0
        self.rows = logits.new_zeros((self.num_rows, ROW_WORDS), dtype=torch.int64)
        self.last = Round.LEARN
        self.received: Tensor | None = None
        self.sampling = params.on(logits.device)
        # Rows under options are in float32, whatever dtype the logits have.
        self.asked = option_arguments(params, options, logits.device)
        self.has_options = any(name in self.asked for name in CHANGES_LOGITS)
        self.has_stops = "stop_ids" in self.asked
        self.positions = positions
        self.paths = paths if trees is None else {**paths, "parents": trees.parents}
        self.part = {name: getattr(shards, name) for name in ("rank", "num_ranks", "first_token", "vocab")}

    def find_distributions(self) -> None:
        """Finds the peaks, and the filters' thresholds where a filter may be on."""
        params, vocab = self.params, self.shards.vocab
        if self.has_stops:
            self.exchange(Round.LEFT)
        self.exchange(Round.PEAK)
        if self.is_greedy:
            return
        digits = range(num_digits(torch.float32 if self.has_options else self.logits.dtype))
        if isinstance(params.top_k, Tensor) or 0 < params.top_k < vocab:
            for digit in digits:
                self.exchange(Round.COUNT, digit)
        if isinstance(params.top_p, Tensor) or params.top_p < 1.0:
            for digit in digits:
                self.exchange(Round.MASS, digit)
            self.exchange(Round.TIES)

    def find_winners(self, seeds: Tensor | None = None) -> Tensor:
        """Returns the words whose first one names each row's token."""
        self.find_distributions()
        if not self.is_greedy:
            self.exchange(Round.RACE, seeds=seeds)
        assert self.received is not None
        return self.received

    def drafts(self) -> tuple[Any, ...]:
        """Returns the drafts and their trees, as ops take them."""
        trees = self.trees
        assert trees is not None
        links = (trees.cu_nodes, trees.depths, trees.first_child, trees.next_sibling, trees.valid)
        return self.paths["draft_tokens"], *links, trees.max_nodes, trees.max_depth

    def exchange(self, round_: Round, digit: int = 0, seeds: Tensor | None = None) -> None:
        words = self.logits.new_zeros((self.num_rows, round_.words), dtype=torch.int64)
        trees = {} if self.trees is None else {"cu_nodes": self.trees.cu_nodes, "depths": self.trees.depths}
        call(
            ops.step_shards, self.logits, self.rows, self.received, words, *self.sampling,
            round=round_, digit=digit, last=self.last, **self.part, **trees, **self.paths, seeds=seeds,
            positions=self.positions, grammar_mask=self.mask, **self.asked,
        )  # fmt: skip
        group, label = self.shards._group, f"the rows' {round_.name.lower()}"
        if round_ == Round.LEARN:
            self.last, self.received = Round.LEARN, None
            return
        if round_ == Round.TIES:
            words = group.every(words, label).flatten(0, 1)
        elif round_ in (Round.LEFT, Round.PEAK, Round.RACE):
            words = group.maximum(words, label)
        else:
            words = group.total(words, label)
        self.last, self.received = round_, words


class _Weighed:
    """Drafts weighed against the distributions of their rows."""

    def __init__(self, rows: _Rows, drafts: dict[str, Any], known: dict[str, Any]) -> None:
        rows.exchange(Round.LEARN)
        self.rows, self.drafts, self.known = rows, drafts, known
        self.trees = rows.drafts()
        self.left = rows.logits.new_zeros((rows.num_rows, LEFT_WORDS), dtype=torch.int64)

    def verify(self, max_children: int | None, **streams: Tensor | None) -> VerdictTensors:
        trees, group = self.rows.trees, self.rows.shards._group
        assert trees is not None
        received = masses = group.total(self._weigh(Weigh.MASSES), "the drafts' masses")
        index = 0
        if self.drafts["draft_law"] != "onehot":
            bound = _max_children(trees) if max_children is None else max_children
            for index in range(1, bound):
                received = group.total(self._weigh(Weigh.RESIDUAL, received, index=index), "what rejections leave")
        *verdict, ends = call(
            ops.walk_shards, self.rows.rows, self.left, masses, received, *self.trees,
            index=index, vocab=self.rows.shards.vocab, **self.drafts, **streams,
        )  # fmt: skip
        sums = group.every(self._weigh(Weigh.SUMS, ends=ends), "what is left at the ends").flatten(0, 1)
        bonus = group.total(self._weigh(Weigh.DRAW, sums, ends=ends), "the bonus")
        accept_index, num_accepted, tokens, status = verdict
        at = num_accepted.long()[:, None]
        draws = ends[:, :1] >= 0
        tokens = tokens.scatter(1, at, torch.where(draws, bonus, tokens.gather(1, at)))
        return accept_index, num_accepted, tokens, status

    def _weigh(
        self, round_: Weigh, received: Tensor | None = None, *, ends: Tensor | None = None, index: int = 0
    ) -> Tensor:
        rows = self.rows
        items = rows.num_rows if ends is None else ends.shape[0]
        words = rows.logits.new_zeros((items, round_.words), dtype=torch.int64)
        call(
            ops.weigh_shards, rows.logits, rows.rows, self.left, ends, received, words, *self.trees, *rows.sampling,
            round=round_, index=index, **rows.part, **self.drafts, **self.known, grammar_mask=rows.mask,
            positions=rows.positions, parents=rows.paths["parents"], **rows.asked,
        )  # fmt: skip
        return words


def _max_children(trees: TreeBatch) -> int:
    """Returns the most children of any node; reads the trees."""
    node = (trees.depths > 0).nonzero()[:, 0]
    if node.numel() == 0:
        return 0
    tree = torch.searchsorted(trees.cu_nodes, node.int(), right=True) - 1
    parent = trees.cu_nodes.long()[tree] + trees.parents[node]
    count = int(torch.bincount(parent.clamp(min=0, max=trees.depths.shape[0] - 1)).max())
    return min(count, trees.max_nodes - 1)  # malformed trees may name more


for _name in ("step_shards", "weigh_shards"):
    register_fake(_name)(lambda **others: None)
register_fake("follow_shards")(empty_verdict)


@register_fake("walk_shards")
def _walk_shards_fake(rows: Tensor, cu_nodes: Tensor, max_depth: int, **others: Any) -> tuple[Tensor, ...]:
    return (*empty_verdict(cu_nodes, max_depth), rows.new_empty((cu_nodes.shape[0] - 1, END_WORDS)))
