"""The verify ops on a sharded vocabulary; see `protocol` for the words exchanged."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import torch
from torch import Tensor

from pagedtree._arguments import expect_type
from pagedtree._ops import call, ops, register_fake
from pagedtree.distributed.protocol import END_WORDS, LEFT_WORDS, ROW_WORDS, Round, Weigh, num_digits
from pagedtree.distributed.shards import VocabShards
from pagedtree.options import CHANGES_LOGITS, RequestOptions, option_arguments
from pagedtree.sampling_params import SamplingParams
from pagedtree.tree import MAX_NODES, TreeBatch
from pagedtree.verify import Verdict, empty_verdict

__all__ = ["sample", "verify_greedy", "verify_rejection", "verify_sampled"]

GREEDY = SamplingParams(temperature=0.0)


def sample(
    logits: Tensor,
    params: SamplingParams,
    *,
    seeds: Tensor,
    positions: Tensor,
    shards: VocabShards,
    grammar_mask: Tensor | None = None,
    options: RequestOptions | None = None,
) -> Tensor:
    """Samples as `pagedtree.sample` from vocabulary shards: the same tokens, int64 [R], on every rank.

    Args:
        logits: [R, shards.num_tokens], this rank's columns; see `pagedtree.sample`.
        params, seeds, positions: the same on all ranks.
        shards: each rank's columns.
        grammar_mask: bool [R, num_tokens] or packed int32 [R, ceil(num_tokens / 32)], for this rank's columns.
        options: over the whole vocabulary, the same on all ranks.

    Raises ValueError for wrong shapes, dtypes or devices, and where the ranks' arguments differ; GroupError where a
    rank does not answer.
    """
    masked = grammar_mask is not None
    _agree("sample", shards, logits, params, options=options, seeds=seeds, positions=positions, masked=masked)
    rows = _Rows(shards, logits, params, grammar_mask, options=options, positions=positions)
    words = rows.find_winners(seeds)
    return ~words[:, 0] & 0xFFFFFFFF


def verify_greedy(
    logits: Tensor,
    draft_tokens: Tensor,
    trees: TreeBatch,
    *,
    shards: VocabShards,
    grammar_mask: Tensor | None = None,
    draft_to_target: Tensor | None = None,
    tokens_left: Tensor | None = None,
) -> Verdict:
    """Verifies as `pagedtree.verify_greedy` from vocabulary shards: the same `Verdict` on every rank.

    Args:
        logits: [N, shards.num_tokens], this rank's columns.
        draft_tokens, trees, draft_to_target, tokens_left: see `pagedtree.verify_greedy`; the same on all ranks. Ids
            refer to the whole vocabulary.
        shards: each rank's columns.
        grammar_mask: bool [N, num_tokens] or packed int32 [N, ceil(num_tokens / 32)], for this rank's columns.

    Traffic: 16 bytes per row.

        for each row: words = max over ranks of (largest logit, then lowest id), and whether there is a NaN
        walk the trees as pagedtree.verify_greedy does, on each rank alone

    Raises ValueError for wrong shapes, dtypes or devices, and where the ranks' arguments differ (compared where tensors
    are on the CPU, or with PAGEDTREE_CHECK=1); GroupError where a rank does not answer.
    """
    _agree(
        "verify_greedy", shards, logits, None, trees, draft_tokens, draft_to_target,
        tokens_left=tokens_left, masked=grammar_mask is not None,
    )  # fmt: skip
    rows = _Rows(shards, logits, GREEDY, grammar_mask, trees)
    return rows.follow(rows.find_winners(), draft_tokens, draft_to_target, tokens_left)


def verify_sampled(
    logits: Tensor,
    draft_tokens: Tensor,
    trees: TreeBatch,
    params: SamplingParams,
    *,
    seeds: Tensor,
    positions: Tensor,
    shards: VocabShards,
    grammar_mask: Tensor | None = None,
    draft_to_target: Tensor | None = None,
    tokens_left: Tensor | None = None,
    options: RequestOptions | None = None,
) -> Verdict:
    """Verifies as `pagedtree.verify_sampled` from vocabulary shards: the same `Verdict` on every rank.

    The verdict equals `pagedtree.verify_sampled` on the whole logits bit for bit: noise depends on the token alone,
    filter masses are integers, and every other decision is a maximum.

    Args:
        logits, draft_tokens, trees, shards, grammar_mask, draft_to_target, tokens_left: see `verify_greedy`.
        params, seeds, positions: the same on all ranks.
        options: over the whole vocabulary, the same on all ranks.

    All rows are read at once, so the number of exchanges is fixed. Traffic per row:

        16 bytes for the largest logit
        128 bytes for each digit of the threshold, if there is a top_k, and as many if there is a top_p
            (bfloat16 has 4 digits, float16 5, float32 8, and any dtype 8 under options); 8 bytes for the tokens that
            tie at it
        8 bytes for the winner of the race
        8 bytes to learn whether a non-stop token is left, if options have stop ids

    Host scalars top_k and top_p that filter nothing cost nothing; tensors always count.

    Raises as `verify_greedy`.
    """
    masked = grammar_mask is not None
    _agree(
        "verify_sampled", shards, logits, params, trees, draft_tokens, draft_to_target,
        options=options, seeds=seeds, positions=positions, tokens_left=tokens_left, masked=masked,
    )  # fmt: skip
    rows = _Rows(shards, logits, params, grammar_mask, trees, draft_tokens, draft_to_target, options, positions)
    return rows.follow(rows.find_winners(seeds), draft_tokens, draft_to_target, tokens_left)


def verify_rejection(
    logits: Tensor,
    draft_tokens: Tensor,
    trees: TreeBatch,
    params: SamplingParams,
    *,
    draft_law: str,
    draft_probs: Tensor | None = None,
    draft_rows: Tensor | None = None,
    seeds: Tensor,
    positions: Tensor,
    shards: VocabShards,
    coins: Tensor | None = None,
    final_coins: Tensor | None = None,
    grammar_mask: Tensor | None = None,
    draft_to_target: Tensor | None = None,
    tokens_left: Tensor | None = None,
    max_children: int | None = None,
    options: RequestOptions | None = None,
) -> Verdict:
    """Verifies as `pagedtree.verify_rejection` from vocabulary shards: the same `Verdict` on every rank.

    Rule and coins equal `pagedtree.verify_rejection`. Sums over the vocabulary are integers (units of 2^-42 of the
    likeliest token's mass), so the result does not depend on the split. The unsharded op adds floats: a coin within
    about 1e-6 of a boundary may decide otherwise there.

    Args:
        logits, draft_tokens, trees, shards, grammar_mask, draft_to_target, tokens_left: see `verify_greedy`.
        params, draft_law, draft_rows, seeds, positions, coins, final_coins: see `pagedtree.verify_rejection`; the same
            on all ranks.
        draft_probs: [M, shards.vocab], the same on all ranks, or [M, shards.num_tokens], this rank's columns.
        options: over the whole vocabulary, the same on all ranks.
        max_children: the most children of any node, 0..1023. None: read from the trees, which synchronises on a GPU.

    Residuals depend on no coin, so the ranks compute them for all nodes at once and then walk alone. Traffic: as
    `verify_sampled` without the race, plus 16 bytes per row for the target's mass and the drafts' own probabilities, 16
    bytes per row for each child after the first (not under "onehot"), and 24 bytes per tree for the bonus.

    Raises as `verify_greedy`, and ValueError for draft_probs under "onehot" and their absence elsewhere.
    """
    if draft_probs is not None:
        expect_type("draft_probs", draft_probs, Tensor)
    _agree(
        "verify_rejection", shards, logits, params, trees, draft_tokens, draft_to_target,
        options=options, draft_law=draft_law, seeds=seeds, positions=positions, coins=coins, final_coins=final_coins,
        draft_rows=draft_rows, draft_probs=None if draft_probs is None else (draft_probs.shape[0], draft_probs.dtype),
        max_children=max_children, tokens_left=tokens_left, masked=grammar_mask is not None,
    )  # fmt: skip
    if max_children is not None:
        expect_type("max_children", max_children, int)
        if not 0 <= max_children < MAX_NODES:
            raise ValueError(f"verify_rejection: `max_children` must be in 0..{MAX_NODES - 1}, got {max_children}")
    if draft_probs is not None and draft_probs.ndim == 2 and draft_probs.shape[1] == shards.vocab:
        draft_probs = shards.own(draft_probs)
    rows = _Rows(shards, logits, params, grammar_mask, trees, draft_tokens, draft_to_target, options, positions)
    rows.find_distributions()
    drafts = {"draft_law": draft_law, "draft_to_target": draft_to_target}
    weighed = _Weighed(rows, draft_tokens, drafts, {"draft_probs": draft_probs, "draft_rows": draft_rows})
    return weighed.verify(
        max_children, seeds=seeds, positions=positions, coins=coins, final_coins=final_coins, tokens_left=tokens_left
    )


def _agree(
    name: str,
    shards: VocabShards,
    logits: Tensor,
    params: SamplingParams | None,
    trees: TreeBatch | None = None,
    draft_tokens: Tensor | None = None,
    draft_to_target: Tensor | None = None,
    options: RequestOptions | None = None,
    **others: Any,
) -> None:
    """Refuses wrong types, and arguments that differ between ranks."""
    expect_type("shards", shards, VocabShards)
    expect_type("logits", logits, Tensor)
    if name != "verify_greedy":
        expect_type("params", params, SamplingParams)
    if name != "sample":
        expect_type("trees", trees, TreeBatch)
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
        arguments |= {"draft_tokens": draft_tokens, "draft_to_target": draft_to_target}
        arguments["trees"] = (trees.max_nodes, trees.max_depth)
        arguments |= {name: getattr(trees, name) for name in ("cu_nodes", "first_child", "next_sibling")}
    try:
        shards._group.agree(name, arguments | others)
    except ValueError:
        if fits:
            raise
    if not fits:
        raise ValueError(
            f"{name}: `logits` must be of shape [*, {shards.num_tokens}] on rank {shards.rank}, got"
            f" {list(logits.shape)}"
        )


class _Rows:
    """This rank's state of the distributions of N rows, round after round."""

    def __init__(
        self,
        shards: VocabShards,
        logits: Tensor,
        params: SamplingParams,
        grammar_mask: Tensor | None,
        trees: TreeBatch | None = None,
        draft_tokens: Tensor | None = None,
        draft_to_target: Tensor | None = None,
        options: RequestOptions | None = None,
        positions: Tensor | None = None,
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
        self.paths = {} if trees is None else {
            "draft_tokens": draft_tokens, "draft_to_target": draft_to_target, "parents": trees.parents,
        }  # fmt: skip
        self.part = {
            "rank": shards.rank,
            "num_ranks": shards.num_ranks,
            "first_token": shards.first_token,
            "vocab": shards.vocab,
        }

    def find_distributions(self) -> None:
        """Finds the peaks, and the filters' thresholds where a filter may be on."""
        params, vocab = self.params, self.shards.vocab
        if self.has_stops:
            self._exchange(Round.LEFT)
        self._exchange(Round.PEAK)
        if self.is_greedy:
            return
        digits = range(num_digits(torch.float32 if self.has_options else self.logits.dtype))
        if isinstance(params.top_k, Tensor) or 0 < params.top_k < vocab:
            for digit in digits:
                self._exchange(Round.COUNT, digit)
        if isinstance(params.top_p, Tensor) or params.top_p < 1.0:
            for digit in digits:
                self._exchange(Round.MASS, digit)
            self._exchange(Round.TIES)

    def find_winners(self, seeds: Tensor | None = None) -> Tensor:
        """Returns the words whose first one names each row's token."""
        self.find_distributions()
        if not self.is_greedy:
            self._exchange(Round.RACE, seeds=seeds)
        assert self.received is not None
        return self.received

    def learn(self) -> None:
        self._exchange(Round.LEARN)

    def follow(
        self, words: Tensor, draft_tokens: Tensor, draft_to_target: Tensor | None, tokens_left: Tensor | None
    ) -> Verdict:
        return Verdict(
            *call(
                ops.follow_shards,
                self.rows,
                words,
                *self.tree_arguments(draft_tokens),
                last=self.last,
                vocab=self.shards.vocab,
                draft_to_target=draft_to_target,
                tokens_left=tokens_left,
            )
        )

    def tree_arguments(self, draft_tokens: Tensor) -> tuple[Any, ...]:
        trees = self.trees
        assert trees is not None
        return (
            draft_tokens, trees.cu_nodes, trees.depths, trees.first_child, trees.next_sibling, trees.valid,
            trees.max_nodes, trees.max_depth,
        )  # fmt: skip

    def _exchange(self, round_: Round, digit: int = 0, seeds: Tensor | None = None) -> None:
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

    def __init__(self, rows: _Rows, draft_tokens: Tensor, drafts: dict[str, Any], known: dict[str, Any]) -> None:
        rows.learn()
        self.rows, self.drafts, self.known = rows, drafts, known
        self.trees = rows.tree_arguments(draft_tokens)
        self.left = rows.logits.new_zeros((rows.num_rows, LEFT_WORDS), dtype=torch.int64)

    def verify(self, max_children: int | None, **streams: Tensor | None) -> Verdict:
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
        return Verdict(accept_index, num_accepted, tokens, status)

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


@register_fake("step_shards")
def _step_shards_fake(*args: Any, **kwargs: Any) -> None:
    return None


@register_fake("weigh_shards")
def _weigh_shards_fake(*args: Any, **kwargs: Any) -> None:
    return None


@register_fake("follow_shards")
def _follow_shards_fake(
    rows: Tensor,
    received: Tensor,
    draft_tokens: Tensor,
    cu_nodes: Tensor,
    depths: Tensor,
    first_child: Tensor,
    next_sibling: Tensor,
    valid: Tensor,
    max_nodes: int,
    max_depth: int,
    **others: Any,
) -> tuple[Tensor, ...]:
    return empty_verdict(rows, cu_nodes, max_depth)


@register_fake("walk_shards")
def _walk_shards_fake(
    rows: Tensor,
    left: Tensor,
    masses: Tensor,
    received: Tensor,
    draft_tokens: Tensor,
    cu_nodes: Tensor,
    depths: Tensor,
    first_child: Tensor,
    next_sibling: Tensor,
    valid: Tensor,
    max_nodes: int,
    max_depth: int,
    **others: Any,
) -> tuple[Tensor, ...]:
    return (*empty_verdict(rows, cu_nodes, max_depth), rows.new_empty((cu_nodes.shape[0] - 1, END_WORDS)))
