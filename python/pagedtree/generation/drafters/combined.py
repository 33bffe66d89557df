"""A choice between two drafters per sequence and step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pagedtree import Draft
from pagedtree._arguments import refusal
from pagedtree.generation.drafters.base import Drafter, FeatureRows, StepResult, as_drafter
from pagedtree.generation.drafters.limits import Question, part_of, trees_of, values_at
from pagedtree.generation.drafters.ngram import NgramDrafter
from pagedtree.generation.packed_model import PackedModel
from pagedtree.generation.rules import Sampling
from pagedtree.generation.scheduler import GeneratedSequence
from pagedtree.generation.tree_tuner import Odds

# Prior of a model's accepted tokens per step.
UNKNOWN = 1.0
# Weight in steps of the prior, and of the batch average for one sequence: damps lucky copies and single bad drafts.
WEIGHT = 3.0
# A drafter that was not asked for any sequence in this many steps is probed.
LOOK_AFTER = 32


class Answer(NamedTuple):
    """A drafter's trees for these places of the batch. source: has their log-probabilities."""

    places: list[int]
    draft: Draft
    source: Question | NgramDrafter


class CombinedDrafter(Drafter):
    """A choice between two drafters by expected tokens per cost.

    It counts, per sequence, the new tokens that each drafter's tree contained; n-grams, looked up before the choice,
    count per match length. A model's pass takes the same time for one sequence and for all, so the batch decides:

        expected[d][b] = recent average of tokens that trees of drafter d contained for this sequence
        # one drafter everywhere, the other everywhere, or the one with the largest expected[d][b] per sequence:
        chosen = the way with the largest (B + sum(expected)) / (1 + sum(cost of each drafter that is asked))
        trees[b] = chosen[b].propose(tokens[b])

    The choice depends neither on a clock nor on the draws of the chosen tree, so rules stay lossless. A drafter that
    was idle for 32 steps is asked once. Source: the hybrid mode of SuffixDecoding (Oliaro et al., 2024).

    Args:
        drafter, lookup: of the same draft_law. lookup: default chains of 7 tokens, after at most 8 equal ones.
        min_match: 1 to the lookup's max_ngram. Prior: all of a copy after at least so long a match is accepted, nothing
            of others, one token of a model's.
        costs: of a proposal of each, in passes of the target. None: its model's passes times the ratio of weights.
    """

    def __init__(
        self, drafter: Any, lookup: Any = None, *, min_match: int = 4, costs: Sequence[float] | None = None
    ) -> None:
        lookup = NgramDrafter(8, max_branches=1, max_ngram=8) if lookup is None else as_drafter(lookup)
        pair = [as_drafter(drafter), lookup]
        laws = [member.draft_law for member in pair]
        self.is_lookup = [isinstance(member, NgramDrafter) for member in pair]
        if laws[0] != laws[1]:
            beside = "n-grams" if self.is_lookup[1] else type(lookup).__name__
            raise refusal("drafter", f'draft_law "{laws[1]}" beside {beside}', f'"{laws[0]}"')
        most = getattr(lookup, "max_ngram", min_match)
        if not 1 <= min_match <= most:
            raise refusal("min_match", f"1 to the lookup's max_ngram, {most}", min_match)
        if costs is not None and (len(costs) != 2 or not all(0.0 <= cost < float("inf") for cost in costs)):
            raise refusal("costs", "None or two numbers from 0 on", costs)
        self.min_match, self.costs = min_match, costs
        self.both = pair
        self.draft_law = laws[0]
        sizes = [member.max_nodes for member in pair]
        self.max_nodes = max(sizes) if all(sizes) else 0  # else nobody knows
        self._depths = [member.max_depth or max(member.max_nodes - 1, 0) for member in pair]
        self.max_depth = max(self._depths)
        self.is_chain = all(member.is_chain for member in pair)
        self.has_free_guesses = any(self.is_lookup)
        self.needs_hidden = any(member.needs_hidden for member in pair)
        self._layers = [tuple(member.feature_layers) for member in pair]
        self.feature_layers = sum(self._layers, ())
        self._by_level = [member.grows_by_level for member in pair]
        self.grows_by_level = any(self._by_level)
        self._weights = [member.num_weights for member in pair]
        self.num_weights = sum(self._weights)
        self.networks = tuple(network for member in pair for network in member.networks)
        self.model = next((member.model for member in pair if member.model is not None), None)
        self._target_weights = 1
        self._reset()

    def _reset(self) -> None:
        self._levels: int | None = None
        # Tokens that trees contained, by drafter and match length: of all sequences, and of each.
        self._named, self._named_of = Odds(WEIGHT), dict[int, Odds]()
        self._idle = [0, 0]  # steps in which each was asked for nobody
        self._forget_step()

    def _forget_step(self) -> None:
        # The last proposal's: each drafter's answer, its match lengths, and the chosen drafters.
        self._given: list[Answer | None] = [None, None]
        self._kinds: list[list[int]] = [[], []]
        self._chosen: list[int] = []
        self._lengths: list[int] = []  # of the texts; empty once the tokens after them are counted
        self._rows: Tensor | None = None  # its rows in the concatenated drafts; None: one drafter has all

    def check_target(self, model: PackedModel) -> None:
        self._target_weights = max(model.num_weights, 1)
        for drafter in self.both:
            drafter.check_target(model)

    def begin(self, page_size: int, sampling: Sampling) -> None:
        for drafter in self.both:
            drafter.begin(page_size, sampling)
        self._reset()

    def end(self) -> None:
        for drafter in self.both:
            drafter.end()
        self._forget_step()

    def start(self, tokens: Tensor, lengths: Tensor) -> None:
        """Does nothing: each drafter's sequences are not known yet."""

    def propose(self, tokens: Tensor, lengths: Tensor) -> Draft:
        self._forget_step()
        everywhere = list(range(tokens.shape[0]))
        self._kinds = [[-1] * len(everywhere)] * 2
        for which, drafter in enumerate(self.both):
            if isinstance(drafter, NgramDrafter):
                self._ask(which, everywhere, tokens, lengths)
                self._kinds[which] = drafter.same_before().tolist()
        self._lengths = [len(sequence.tokens) for sequence in self._selected]
        self._chosen = self._choose()
        for which, is_lookup in enumerate(self.is_lookup):
            places = [b for b in everywhere if self._chosen[b] == which]
            if places and not is_lookup:
                self._ask(which, places, tokens, lengths)
            self._idle[which] = 0 if places or is_lookup else self._idle[which] + 1
        if len(set(self._chosen)) == 1:
            return self._of(self._chosen[0]).draft
        # Trees are numbered across both drafts; each drafter has only the trees of its own rows.
        trees = {(which, b): i for i, (which, b) in enumerate((w, b) for w in (0, 1) for b in self._of(w).places)}
        indices = [trees[which, b] for b, which in enumerate(self._chosen)]
        combined, self._rows = trees_of([self._of(0).draft, self._of(1).draft], indices)
        return combined

    def _ask(self, which: int, places: list[int], tokens: Tensor, lengths: Tensor) -> None:
        drafter, sequences = self.both[which], [self._selected[b] for b in places]
        if len(places) < tokens.shape[0]:
            rows = torch.tensor(places, dtype=torch.int64).to(tokens.device)
            tokens, lengths = tokens.index_select(0, rows), lengths.index_select(0, rows)
        if isinstance(drafter, NgramDrafter):  # whole copies count; the engine cuts them
            drafter.select(sequences)
            self._given[which] = Answer(places, drafter.propose(tokens, lengths), drafter)
        else:
            question = Question(drafter, sequences, tokens, lengths)
            self._given[which] = Answer(places, question.answer(), question)

    def _of(self, which: int) -> Answer:
        answer = self._given[which]
        assert answer is not None
        return answer

    def _choose(self) -> list[int]:
        size = len(self._selected)
        if self._levels == 0 and not all(self.is_lookup):  # no model may run
            return [self.is_lookup.index(True)] * size
        costs = [self._cost(which) for which in (0, 1)]
        low, high = (0, 1) if costs[0] < costs[1] else (1, 0)
        expected = [[self._expected(which, b) for b in range(size)] for which in (0, 1)]
        better = [high if more > less else low for less, more in zip(expected[low], expected[high], strict=True)]

        def rate(way: list[int]) -> float:
            return (size + sum(expected[d][b] for b, d in enumerate(way))) / (1.0 + sum(costs[d] for d in set(way)))

        choice = max([low] * size, [high] * size, better, key=rate)
        for which in (0, 1):
            if self._idle[which] >= LOOK_AFTER and which not in choice:
                is_copied = [self._kinds[1 - which][b] >= self.min_match for b in range(size)]
                return [1 - which if copied else which for copied in is_copied]
        return choice

    def _cost(self, which: int) -> float:
        if self.costs is not None:
            return self.costs[which]
        levels = self._depths[which] if self._levels is None else min(self._levels, self._depths[which])
        return self._weights[which] / self._target_weights * (levels if self._by_level[which] else 1)

    def _expected(self, which: int, b: int) -> float:
        kind = self._kinds[which][b]
        first = UNKNOWN
        if self.is_lookup[which]:
            first = float(self._depths[which]) if kind >= self.min_match else 0.0
        of_all = self._named.of((which, kind), first)
        odds = self._named_of.get(self._selected[b].index)
        return of_all if odds is None else odds.of((which, kind), of_all)

    def confidence(self) -> Tensor | None:
        """Returns log-probabilities on one scale for copies and a model's drafts."""
        if not self._chosen:
            return None
        if self._rows is None:
            return self._of(self._chosen[0]).source.confidence()
        sizes = [self._of(which).draft.draft_tokens.shape[0] for which in (0, 1)]
        parts = torch.zeros(sum(sizes), dtype=torch.float32).split(sizes)
        for which, part in enumerate(parts):
            log_probs = self._of(which).source.confidence()
            if log_probs is None:
                return None
            part[: len(log_probs)] = log_probs[: len(part)].cpu()
        return values_at(torch.cat(parts), self._rows)

    def narrow(self, draft: Draft, rows: Tensor) -> None:
        if self._rows is None:
            if self._chosen:
                self._of(self._chosen[0]).source.narrow(draft, rows)
            return
        first, rows = [0, self._of(0).draft.draft_tokens.shape[0]], part_of(self._rows, rows)
        for which, is_lookup in enumerate(self.is_lookup):
            if not is_lookup:
                part, own = trees_of([draft], [b for b, index in enumerate(self._chosen) if index == which])
                self._of(which).source.narrow(part, (rows[own] - first[which]).int())

    def read(self, rows: FeatureRows) -> None:
        counts = [len(layers) for layers in self._layers]
        width = rows.features.shape[1] // sum(counts)
        for drafter, features, count in zip(
            self.both, rows.features.split([count * width for count in counts], dim=1), counts, strict=True
        ):
            if count:
                drafter.read(replace(rows, features=features))

    def observe(self, result: StepResult) -> None:
        self._count()
        for drafter in self.both:
            drafter.observe(result)

    def _count(self) -> None:
        for which, answer in enumerate(self._given):
            if answer is None or not self._lengths:
                continue
            places, draft, _ = answer
            offsets = draft.trees.cu_nodes.tolist()
            tokens, parents = draft.draft_tokens.tolist(), draft.trees.parents.tolist()
            for i, b in enumerate(places):
                sequence, (begin, end) = self._selected[b], offsets[i : i + 2]
                children = {(parents[row], tokens[row]): row - begin for row in range(begin + 1, end)}
                node, count = 0, 0
                for token in sequence.tokens[self._lengths[b] :]:
                    if (node := children.get((node, token), -1)) < 0:
                        break
                    count += 1
                kind = which, self._kinds[which][b]
                self._named.add(kind, count)
                self._named_of.setdefault(sequence.index, Odds(WEIGHT)).add(kind, count)
        self._lengths = []

    def limit_depth(self, levels: int | None) -> None:
        self._levels = levels
        for drafter, is_lookup in zip(self.both, self.is_lookup, strict=True):
            if not is_lookup and levels != 0:
                drafter.limit_depth(levels)

    def unread(self, sequences: list[GeneratedSequence]) -> int:
        weighed = sum(w * drafter.unread(sequences) for w, drafter in zip(self._weights, self.both, strict=True))
        return round(weighed / max(self.num_weights, 1))

    def forget(self, sequence: GeneratedSequence) -> None:
        self._named_of.pop(sequence.index, None)
        for drafter in self.both:
            drafter.forget(sequence)
