"""Drafters for vLLM's `custom_class` method: they propose a tree for each request.

    LLM(model, speculative_config={"method": "custom_class", "num_speculative_tokens": 15,
                                   "model": "pagedtree.integrations.vllm.drafters.NgramTreeDrafter"},
        additional_config={"pagedtree": {"max_branches": 4}})

num_speculative_tokens bounds the nodes of a tree, the root not counted. A drafter's options are the entry "pagedtree"
of additional_config.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from transformers import AutoModelForCausalLM
from vllm.distributed import get_tp_group

from pagedtree import Draft
from pagedtree.distributed import DraftGroup, VocabShards
from pagedtree.generation.drafters import Drafter, EagleDrafter, EagleHead, FeatureRows, MedusaHeads, NgramDrafter
from pagedtree.generation.drafters.bounded import bounded
from pagedtree.generation.drafters.medusa import best_trees
from pagedtree.generation.rules import Sampling
from pagedtree.generation.scheduler import GeneratedSequence
from pagedtree.integrations.transformers import ModelDrafter, tensor_parallel
from pagedtree.integrations.vllm.whole_ends import WholeEnds

__all__ = ["EagleTreeDrafter", "MedusaTreeDrafter", "ModelTreeDrafter", "NgramTreeDrafter", "TreeDrafter"]

Proposal = tuple[list[int], np.ndarray]


class TreeDrafter:
    """Base class: the methods that vLLM calls, and what trees need around them.

    What a class says of itself:

        defaults        its options and their values where additional_config has none
        needs_hidden    `draft` gets the target's last hidden states
        feature_layers  `read` gets the outputs of these decoder layers (0 = the first) at all tokens of each pass; may
                        be set as late as in `load_model`
        on_every_rank   all tensor-parallel ranks call `read` and `draft`, with the same arguments, instead of the first
                        one alone; for drafters that compute over the ranks, as the target's `compute_logits` does. The
                        first one's proposals count.

    Attributes:
        options: `defaults`, with what additional_config gives instead.
        max_nodes: num_speculative_tokens + 1.
        request_ids, hidden: the requests of the batch, in its order, and the hidden state of each; set by the runner
            before `propose`.
        most_tokens: how many tokens the text of each of these requests may have, prompt included; set likewise.
        parents: request id -> int32 [n + 1], the tree of the last proposal, root included; its nodes are in an order in
            which the first n are a tree for any n, since vLLM's scheduler may cut proposals off.
    """

    defaults: ClassVar[dict[str, Any]] = {}
    needs_hidden: bool = False
    feature_layers: Sequence[int] = ()
    on_every_rank: bool = False

    def __init__(self, vllm_config: Any) -> None:
        self.check(vllm_config)
        worker = vllm_config.parallel_config.worker_cls
        if not isinstance(worker, str) or worker == "auto" or worker.startswith("vllm."):
            raise ValueError(
                f"{type(self).__name__}: expected worker_cls = pagedtree.integrations.vllm.worker.TreeGPUWorker"
                f" (on CPUs TreeCPUWorker), got {worker}"
            )
        given = (vllm_config.additional_config or {}).get("pagedtree", {})
        unknown = sorted(set(given) - set(self.defaults))
        if unknown:
            raise ValueError(
                f'additional_config["pagedtree"]: expected options among {sorted(self.defaults)}, got {unknown}'
            )
        self.vllm_config = vllm_config
        self.options = {**self.defaults, **given}
        self.max_nodes = vllm_config.speculative_config.num_speculative_tokens + 1
        self.request_ids: list[str] = []
        self.most_tokens: list[int] = []
        self.hidden: Tensor | None = None
        self.parents: dict[str, np.ndarray] = {}

    @classmethod
    def check(cls, vllm_config: Any) -> None:
        """Raises ValueError, naming the setting, for a configuration that this drafter is not made for.

        Called where vLLM reads its configuration, and again in each worker.
        """

    @property
    def drafts_here(self) -> bool:
        """Whether this rank calls `read` and `draft`."""
        return self.on_every_rank or get_tp_group().rank_in_group == 0

    def load_model(self, target_model: Any) -> None:
        """Called once the target, a model of vLLM, is loaded; on every rank."""

    def forget(self, request_id: str) -> None:
        """The request is finished."""
        self.parents.pop(request_id, None)

    def read(self, request_ids: list[str], tokens: list[np.ndarray], starts: list[int], features: list[Tensor]) -> None:
        """Called after each pass of the target, before `draft`, where the drafter has `feature_layers`.

        Args:
            request_ids: the requests of which the pass has read tokens that are in their texts: known ones, such as
                prompts in chunks, or those of a tree that were accepted. Not all of them get a token by this pass.
            tokens: integer [length of the text so far] of each, prompt included, with what the pass has not read yet.
            starts: the position of the first token of each that was read. It is where the last call ended, but 0 again
                where vLLM reads a request anew after a preemption.
            features: [number of tokens read, layers * H] of each: the residual stream behind each of feature_layers, in
                their order.

        When `draft` is called for a text of n tokens, positions 0 to n - 2 have been here.
        """

    def draft(self, request_ids: list[str], tokens: list[np.ndarray]) -> list[Proposal]:
        """What a drafter implements: a tree for each of these requests, whose last token is known.

        Args:
            request_ids: R of vLLM's names.
            tokens: R arrays, integer [length of the text so far], prompt included; the last token is the root.

        A drafter with `needs_hidden` gets a third argument, by keyword: hidden [R, H], what the target's output layer
        turned into the root, which is the last hidden state at the token before it, in the model's dtype on its device.

        Returns R pairs (draft_tokens, parents): a list of n <= num_speculative_tokens token ids, and int32 [n + 1], the
        parents of the root (-1) and of each draft token: 0 is the root, i the i-th draft token, and
        0 <= parents[i] < i. Without any guess: ([], np.array([-1])). Nodes deeper than the request's text may still
        grow are left out afterwards.

        Called on the first tensor-parallel rank, with `on_every_rank` on all of them.
        """
        raise NotImplementedError

    def propose(
        self,
        sampled_token_ids: list[list[int]],
        num_tokens_no_spec: np.ndarray,
        token_ids_cpu: np.ndarray,
        slot_mappings: Any = None,
    ) -> list[list[int]]:
        """vLLM's hook: draft tokens for each request of the batch, none where it has no new token."""
        self.parents.clear()
        rows = [row for row, new in enumerate(sampled_token_ids) if new]
        # All ranks must agree on the trees. The first one decides.
        proposals: list[Proposal] | None = None
        if self.drafts_here and rows:
            known = [token_ids_cpu[row, : num_tokens_no_spec[row]] for row in rows]
            states: dict[str, Any] = {}
            if self.needs_hidden:
                assert self.hidden is not None
                states["hidden"] = self.hidden if len(rows) == len(sampled_token_ids) else self.hidden[rows]
            proposals = self.draft([self.request_ids[row] for row in rows], known, **states)
            self._check(proposals, len(rows))
            # The last token of a text is generated, but never read.
            rooms = [self.most_tokens[row] - 1 - len(text) for row, text in zip(rows, known, strict=True)]
            proposals = [cut_at(room, *each) for room, each in zip(rooms, proposals, strict=True)]
        proposals = get_tp_group().broadcast_object(proposals, src=0)
        drafts: list[list[int]] = [[] for _ in sampled_token_ids]
        for row, (tokens, parents) in zip(rows, proposals or [], strict=True):
            drafts[row] = tokens
            self.parents[self.request_ids[row]] = parents
        return drafts

    def _check(self, proposals: list[Proposal], count: int) -> None:
        """Raises ValueError where what `draft` returned is not what its docstring says."""
        name = f"{type(self).__name__}.draft"
        if len(proposals) != count:
            raise ValueError(f"{name}: expected a proposal for each of {count} requests, got {len(proposals)}")
        for tokens, parents in proposals:
            if len(tokens) >= self.max_nodes:
                raise ValueError(f"{name}: expected at most {self.max_nodes - 1} draft tokens, got {len(tokens)}")
            nodes = np.arange(len(tokens) + 1)
            if np.shape(parents) != nodes.shape:
                raise ValueError(f"{name}: expected {len(nodes)} parents, the root's included, got {np.shape(parents)}")
            if parents[0] != -1 or np.any((parents[1:] < 0) | (parents[1:] >= nodes[1:])):
                raise ValueError(
                    f"{name}: expected parents[0] = -1 and 0 <= parents[i] < i, got {np.asarray(parents).tolist()}"
                )


class NgramTreeDrafter(TreeDrafter):
    """Prompt lookup: what followed the last n-gram earlier in the request's text, merged into a tree.

    Options: those of `pagedtree.integrations.transformers.NgramDrafter` but `remember`.
    """

    defaults: ClassVar[dict[str, Any]] = {"max_depth": None, "max_branches": 4, "min_ngram": 1, "max_ngram": 4}

    def __init__(self, vllm_config: Any) -> None:
        super().__init__(vllm_config)
        self.drafter = NgramDrafter(self.max_nodes, **self.options)

    @classmethod
    def check(cls, vllm_config: Any) -> None:
        _expect_no_draft_model(cls, vllm_config)

    def draft(self, request_ids: list[str], tokens: list[np.ndarray]) -> list[Proposal]:
        return proposals_of(self.drafter, tokens, torch.device("cpu"))


class ModelTreeDrafter(TreeDrafter):
    """A smaller model of the target's tokenizer grows a tree of its likeliest continuations.

    Options: model (path or name of a transformers checkpoint; needed); depth and width as in
    `pagedtree.integrations.transformers.ModelDrafter`. The draft model is run by transformers in the target's dtype,
    with a paged cache of its own, which is not part of vLLM's memory budget: leave it room.

    It is whole on the first tensor-parallel rank, or split over the first ones: as many as the speculative
    configuration's draft_tensor_parallel_size says, a divisor of tensor_parallel_size. Then
    `pagedtree.integrations.transformers.tensor_parallel` splits it and `pagedtree.distributed.DraftGroup` runs it.
    """

    defaults: ClassVar[dict[str, Any]] = {"model": None, "depth": 4, "width": 4}

    def __init__(self, vllm_config: Any) -> None:
        super().__init__(vllm_config)
        if not isinstance(self.options["model"], str):
            raise ValueError(
                f'additional_config["pagedtree"]: expected the entry model, a checkpoint, got {self.options["model"]!r}'
            )
        self.draft_ranks = vllm_config.speculative_config.draft_tensor_parallel_size or 1
        self.on_every_rank = self.draft_ranks > 1  # a draft group hands its proposals to all ranks
        self.texts = _Texts()
        self.drafter: Any = None  # on the ranks that draft

    @classmethod
    def check(cls, vllm_config: Any) -> None:
        size = vllm_config.speculative_config.draft_tensor_parallel_size
        ranks = vllm_config.parallel_config.tensor_parallel_size
        if size is not None and ranks % size:
            raise ValueError(
                f"draft_tensor_parallel_size: expected a divisor of tensor_parallel_size = {ranks}, got {size}"
            )

    def load_model(self, target_model: Any) -> None:
        ranks = get_tp_group()
        config = self.vllm_config.model_config
        vocab_size = config.get_vocab_size()
        self.device = ranks.device
        if self.draft_ranks > 1:
            # Drafts that are not drawn have no probabilities, so that no columns are ever sent: any split will do.
            columns = len(range(ranks.rank_in_group, vocab_size, ranks.world_size))
            shards = VocabShards(columns, group=ranks.device_group, device=self.device)
            self.drafter = DraftGroup(self._load, self.draft_ranks, shards=shards, device=self.device)
        elif ranks.rank_in_group == 0:
            self.drafter = self._load(None)
        else:
            return
        self.drafter = bounded(self.drafter)  # by the positions of the draft model
        self.drafter.begin(page_size=16, sampling=_greedy(vocab_size))

    def _load(self, group: dist.ProcessGroup | None) -> ModelDrafter:
        """The drafter of this rank, its model split over `group`."""
        dtype = self.vllm_config.model_config.dtype
        model: Any = AutoModelForCausalLM.from_pretrained(self.options["model"], dtype=dtype)
        model = model.to(self.device).eval()
        if group is not None:
            tensor_parallel(model, group=group, gather_logits=True)
        return ModelDrafter(model, num_nodes=self.max_nodes, depth=self.options["depth"], width=self.options["width"])

    def forget(self, request_id: str) -> None:
        super().forget(request_id)
        self.texts.forget(request_id, self.drafter)

    def draft(self, request_ids: list[str], tokens: list[np.ndarray]) -> list[Proposal]:
        for request_id, text in zip(request_ids, tokens, strict=True):
            known = self.texts.known(request_id)
            if len(known) >= len(text) or text[: len(known)].tolist() != known:
                self.forget(request_id)  # the text was replaced (a session, or the id is used again)
        # What the draft model read of its tree is read again with the accepted tokens, in the pass that it needs for
        # the newest one anyway. So nothing has to be moved in its cache, whatever vLLM did to the batch meanwhile.
        self.drafter.select(self.texts.sequences(request_ids, tokens))
        return proposals_of(self.drafter, tokens, self.device)


class MedusaTreeDrafter(TreeDrafter):
    """Medusa: heads on the target's last hidden state guess the tokens after the root, each for its level of the tree.

    Options: heads (folder of `pagedtree.integrations.transformers.MedusaHeads`; needed). Trees are those of
    `pagedtree.best_first_tree`. The heads share the target's output layer, which computes over all tensor-parallel
    ranks; what is the heads' own is on each of them whole.
    """

    defaults: ClassVar[dict[str, Any]] = {"heads": None}
    needs_hidden = True
    on_every_rank = True

    def __init__(self, vllm_config: Any) -> None:
        super().__init__(vllm_config)
        if not isinstance(self.options["heads"], str):
            raise ValueError(
                f'additional_config["pagedtree"]: expected the entry heads, a folder, got {self.options["heads"]!r}'
            )

    @classmethod
    def check(cls, vllm_config: Any) -> None:
        _expect_no_draft_model(cls, vllm_config)

    def load_model(self, target_model: Any) -> None:
        config = self.vllm_config.model_config

        def lm_head(states: Tensor) -> Tensor:
            logits: Tensor = target_model.compute_logits(states.flatten(0, -2))
            return logits.unflatten(0, states.shape[:-1])

        self.heads = MedusaHeads.load(self.options["heads"], lm_head).to(get_tp_group().device, config.dtype).eval()
        hidden_size = config.get_hidden_size()
        if self.heads.hidden_size != hidden_size:
            raise ValueError(
                f"heads: expected those of a model of hidden size {hidden_size}, got {self.heads.hidden_size}"
            )

    def draft(self, request_ids: list[str], tokens: list[np.ndarray], hidden: Tensor | None = None) -> list[Proposal]:
        draft, _ = best_trees(self.heads(hidden), self.max_nodes)
        return host_proposals(draft)


class EagleTreeDrafter(TreeDrafter):
    """EAGLE-3: a decoder layer on outputs of three of the target's layers grows a tree, with a cache of its own.

    Options: head (folder of a checkpoint as SGLang and vLLM load it; needed); depth and width as in
    `pagedtree.integrations.transformers.EagleDrafter`. The head is whole on the first tensor-parallel rank, with a copy
    of the target's embedding and output layer where the ranks share these. The copies and the head's cache are not part
    of vLLM's memory budget. Prefix caching must be off.
    """

    defaults: ClassVar[dict[str, Any]] = {"head": None, "depth": 5, "width": 4}

    def __init__(self, vllm_config: Any) -> None:
        super().__init__(vllm_config)
        if not isinstance(self.options["head"], str):
            raise ValueError(
                f'additional_config["pagedtree"]: expected the entry head, a folder, got {self.options["head"]!r}'
            )
        self.texts = _Texts()
        self.drafter: Any = None  # on the ranks that draft

    @classmethod
    def check(cls, vllm_config: Any) -> None:
        _expect_no_draft_model(cls, vllm_config)

    def load_model(self, target_model: Any) -> None:
        config = self.vllm_config.model_config
        self.device = get_tp_group().device
        head = EagleHead.from_pretrained(self.options["head"], WholeEnds(target_model, config))
        self.feature_layers = head.feature_layers
        if get_tp_group().rank_in_group != 0:
            return
        self.drafter = EagleDrafter(
            head, num_nodes=self.max_nodes, depth=self.options["depth"], width=self.options["width"]
        )
        self.drafter.begin(page_size=16, sampling=_greedy(config.get_vocab_size()))

    def forget(self, request_id: str) -> None:
        super().forget(request_id)
        self.texts.forget(request_id, self.drafter)

    def read(self, request_ids: list[str], tokens: list[np.ndarray], starts: list[int], features: list[Tensor]) -> None:
        for request_id, start in zip(request_ids, starts, strict=True):
            if start == 0:
                self.forget(request_id)
        # All of these tokens are known by now, the accepted ones too.
        sequences = self.texts.sequences(request_ids, tokens)
        self.drafter.read(FeatureRows(sequences, starts, [len(part) for part in features], torch.cat(features)))

    def draft(self, request_ids: list[str], tokens: list[np.ndarray]) -> list[Proposal]:
        self.drafter.select(self.texts.sequences(request_ids, tokens))
        return proposals_of(self.drafter, tokens, self.device)


class _Texts:
    """The texts of vLLM's requests as the sequences that drafters know; `TreeDrafter` knows where they end."""

    def __init__(self) -> None:
        self._sequences: dict[str, GeneratedSequence] = {}
        self._next_index = 0

    def known(self, request_id: str) -> list[int]:
        """The text at the last call of `sequences`."""
        sequence = self._sequences.get(request_id)
        return sequence.tokens if sequence is not None else []

    def sequences(self, request_ids: list[str], tokens: list[np.ndarray]) -> list[GeneratedSequence]:
        for request_id, text in zip(request_ids, tokens, strict=True):
            if request_id not in self._sequences:
                index = self._next_index
                self._sequences[request_id] = GeneratedSequence(index, group=index, tokens=[], max_length=sys.maxsize)
                self._next_index += 1
            self._sequences[request_id].tokens = text.tolist()
        return [self._sequences[request_id] for request_id in request_ids]

    def forget(self, request_id: str, drafter: Any) -> None:
        sequence = self._sequences.pop(request_id, None)
        if sequence is not None:
            drafter.forget(sequence)


def _greedy(vocab_size: int) -> Sampling:
    """What drafters that do not draw need to know of sampling."""
    return Sampling("greedy", None, torch.zeros(1, dtype=torch.int64), vocab_size=vocab_size)


def _expect_no_draft_model(drafter: type[TreeDrafter], vllm_config: Any) -> None:
    size = vllm_config.speculative_config.draft_tensor_parallel_size
    if size is not None:
        raise ValueError(f"draft_tensor_parallel_size: {drafter.__name__} has no draft model, got {size}")


def proposals_of(drafter: Drafter, known: Sequence[np.ndarray], device: torch.device) -> list[Proposal]:
    """A drafter's proposals for these texts, on the host."""
    lengths = [len(tokens) for tokens in known]
    history = np.zeros((len(known), max(lengths)), dtype=np.int64)
    for row, tokens in zip(history, known, strict=True):
        row[: len(tokens)] = tokens
    counts = torch.tensor(lengths, dtype=torch.int32)
    return host_proposals(Draft(*drafter.propose(torch.from_numpy(history).to(device), counts.to(device))))


def cut_at(most_depth: int, tokens: list[int], parents: np.ndarray) -> Proposal:
    """The tree without nodes that are deeper."""
    depths = np.zeros(len(parents), dtype=np.int64)
    for node in range(1, len(parents)):
        depths[node] = depths[parents[node]] + 1
    if depths.max() <= most_depth:
        return tokens, parents
    return present_nodes(np.where(depths <= most_depth, [-1, *tokens], -1), parents, depths)


def host_proposals(draft: Draft) -> list[Proposal]:
    """The trees of a batch, on the host."""
    offsets = draft.trees.cu_nodes.tolist()
    tokens, parents, depths = (t.cpu().numpy() for t in (draft.draft_tokens, draft.trees.parents, draft.trees.depths))
    return [
        present_nodes(tokens[begin:end], parents[begin:end], depths[begin:end])
        for begin, end in itertools.pairwise(offsets)
    ]


def present_nodes(tokens: np.ndarray, parents: np.ndarray, depths: np.ndarray) -> Proposal:
    """The tree without nodes that have no token, and without those below them: vLLM's model would read every one."""
    if len(tokens) == 0:
        return [], np.full(1, -1, dtype=np.int32)
    new_index = np.full(len(tokens), -1, dtype=np.int32)
    kept = [0]
    new_index[0] = 0
    for node in range(1, len(tokens)):
        if tokens[node] >= 0 and depths[node] > 0 and new_index[parents[node]] >= 0:
            new_index[node] = len(kept)
            kept.append(node)
    return tokens[kept[1:]].tolist(), np.array([-1, *(new_index[parents[node]] for node in kept[1:])], dtype=np.int32)
