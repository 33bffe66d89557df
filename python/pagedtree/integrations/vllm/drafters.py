"""Drafters for vLLM: they propose a tree for each request.

    LLM(model, speculative_config={"method": "custom_class", "num_speculative_tokens": 15,
                                   "model": "pagedtree.integrations.vllm.drafters.NgramTreeDrafter"},
        additional_config={"pagedtree": {"max_branches": 4}})

On model runner V2 the method is "ngram_gpu". num_speculative_tokens bounds the nodes of a tree, excluding the root.
docs/integrations/vllm.md has the options.
"""

from __future__ import annotations

import itertools
import sys
from typing import Any, ClassVar

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from transformers import AutoModelForCausalLM
from vllm.distributed import get_tp_group

from pagedtree import Draft
from pagedtree._arguments import argument_error, refusal
from pagedtree.distributed import DraftGroup, VocabShards
from pagedtree.generation.drafters import EagleDrafter, EagleHead, FeatureRows, MedusaHeads, NgramDrafter, load_drafter
from pagedtree.generation.drafters.base import as_drafter, best_trees
from pagedtree.generation.drafters.limits import Question
from pagedtree.generation.rules import Sampling
from pagedtree.generation.scheduler import GeneratedSequence
from pagedtree.integrations.transformers import ModelDrafter, tensor_parallel
from pagedtree.integrations.vllm.proposals import Proposal, host_proposals, padded
from pagedtree.integrations.vllm.tree_drafter import SECTION, TreeDrafter
from pagedtree.integrations.vllm.whole_ends import WholeEnds
from pagedtree.tree import MAX_NODES

__all__ = [
    "EagleTreeDrafter",
    "FolderTreeDrafter",
    "MedusaTreeDrafter",
    "ModelTreeDrafter",
    "NgramTreeDrafter",
    "TreeDrafter",
]


# The largest values of options, by the limits of the ops.
SIZES = {"depth": MAX_NODES - 1, "width": MAX_NODES}
NGRAMS = {"max_depth": MAX_NODES - 1, "max_branches": MAX_NODES, "min_ngram": 64, "max_ngram": 64}


class WithoutModel(TreeDrafter):
    @classmethod
    def check(cls, vllm_config: Any) -> None:
        size = vllm_config.speculative_config.draft_tensor_parallel_size
        if size is not None:
            raise argument_error("draft_tensor_parallel_size", f"{cls.__name__} has no draft model, got {size}")


class KnowsTexts(TreeDrafter):
    """Base class for a stateful drafter of `generate`, which sees vLLM's requests as its sequences."""

    def __init__(self, vllm_config: Any) -> None:
        super().__init__(vllm_config)
        self.drafter: Any = None  # on the ranks that draft
        self.device = torch.device("cpu")
        self._sequences: dict[str, GeneratedSequence] = {}
        self._indices = itertools.count()

    def begin(self, drafter: Any, target: Any) -> None:
        sampling = Sampling("greedy", None, torch.zeros(1, dtype=torch.int64), vocab_size=self.vocab_size)
        drafter.begin(page_size=16, sampling=sampling)
        # By weight counts, the time per token relative to the target's.
        weights = (weight.numel() for network in drafter.networks for weight in network.parameters())
        of_target = get_tp_group().world_size * sum(weight.numel() for weight in target.parameters())
        self.drafter, self.share = drafter, (drafter.num_weights or sum(weights)) / of_target

    def forget(self, request_id: str) -> None:
        super().forget(request_id)
        if (sequence := self._sequences.pop(request_id, None)) is not None:
            self.drafter.forget(sequence)

    def known(self, request_id: str) -> list[int]:
        sequence = self._sequences.get(request_id)
        return sequence.tokens if sequence is not None else []

    def sequences(self, request_ids: list[str], tokens: list[np.ndarray]) -> list[GeneratedSequence]:
        for request_id, text in zip(request_ids, tokens, strict=True):
            if request_id not in self._sequences:
                index = next(self._indices)
                self._sequences[request_id] = GeneratedSequence(index, group=index, tokens=[], max_length=sys.maxsize)
            self._sequences[request_id].tokens = text.tolist()
        return [self._sequences[request_id] for request_id in request_ids]

    def limit_depth(self, levels: int) -> None:
        self.drafter.limit_depth(levels)

    def draft(self, request_ids: list[str], tokens: list[np.ndarray]) -> list[Proposal]:
        sequences = self.sequences(request_ids, tokens)
        question = Question(self.drafter, sequences, *padded(tokens, self.device))
        return host_proposals(question.answer(), question.confidence())


class NgramTreeDrafter(WithoutModel):
    """Prompt lookup in the request's text."""

    defaults: ClassVar[dict[str, Any]] = {"max_depth": None, "max_branches": 4, "min_ngram": 1, "max_ngram": 4}
    largest = NGRAMS

    def __init__(self, vllm_config: Any) -> None:
        super().__init__(vllm_config)
        self.drafter = NgramDrafter(self.max_nodes, **self.options)
        self.max_depth = self.drafter.max_depth

    def limit_depth(self, levels: int) -> None:
        self.drafter.limit_depth(levels)

    def draft(self, request_ids: list[str], tokens: list[np.ndarray]) -> list[Proposal]:
        draft = self.drafter.propose(*padded(tokens, torch.device("cpu")))
        return host_proposals(draft, self.drafter.confidence())

    def draft_on_device(self, tokens: Tensor, lengths: Tensor, hidden: Tensor | None) -> Draft:
        return self.drafter.propose(tokens, lengths)


class ModelTreeDrafter(KnowsTexts):
    """A smaller model with the target's tokenizer.

    transformers runs it in the target's dtype, with a paged cache outside vLLM's memory budget, on the first
    tensor-parallel rank, or split (`pagedtree.distributed.DraftGroup`) over the first draft_tensor_parallel_size ranks.
    """

    defaults: ClassVar[dict[str, Any]] = {"model": None, "depth": 4, "width": 4}
    largest = SIZES
    needed = ("model", "a checkpoint")
    grows_by_level = True

    def __init__(self, vllm_config: Any) -> None:
        super().__init__(vllm_config)
        self.draft_ranks = vllm_config.speculative_config.draft_tensor_parallel_size or 1
        self.on_every_rank = self.draft_ranks > 1  # a draft group hands its proposals to all ranks
        self.max_depth = self.options["depth"]

    @classmethod
    def check(cls, vllm_config: Any) -> None:
        size = vllm_config.speculative_config.draft_tensor_parallel_size
        ranks = vllm_config.parallel_config.tensor_parallel_size
        if size is not None and ranks % size:
            raise refusal("draft_tensor_parallel_size", f"a divisor of tensor_parallel_size = {ranks}", size)

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
        self.begin(as_drafter(self.drafter), target_model)

    def _load(self, group: dist.ProcessGroup | None) -> ModelDrafter:
        dtype = self.vllm_config.model_config.dtype
        try:
            model: Any = AutoModelForCausalLM.from_pretrained(self.options["model"], dtype=dtype)
        except (OSError, ValueError) as error:
            raise ValueError(f"{SECTION}: cannot load model = {self.options['model']!r}: {error}") from error
        model = model.to(self.device).eval()
        if group is not None:
            tensor_parallel(model, group=group, gather_logits=True)
        return ModelDrafter(model, num_nodes=self.max_nodes, depth=self.options["depth"], width=self.options["width"])

    def unread(self, request_ids: list[str], tokens: list[np.ndarray]) -> float:
        counts = [len(self.known(request_id)) for request_id in request_ids]
        return self.share * sum(max(len(text) - n - 1, 0) for text, n in zip(tokens, counts, strict=True))

    def draft(self, request_ids: list[str], tokens: list[np.ndarray]) -> list[Proposal]:
        for request_id, text in zip(request_ids, tokens, strict=True):
            prefix = self.known(request_id)
            if len(prefix) >= len(text) or text[: len(prefix)].tolist() != prefix:
                self.forget(request_id)  # the text was replaced (a session, or the id is used again)
        # The draft model reads its accepted tokens again, in the pass that it needs for the newest one anyway. So its
        # cache needs no compaction, whatever vLLM did to the batch meanwhile.
        return super().draft(request_ids, tokens)


class MedusaTreeDrafter(WithoutModel):
    """Medusa: heads on the target's last hidden state predict the tokens after the root, one head per tree level.

    Trees come from `pagedtree.best_first_tree`.
    """

    defaults: ClassVar[dict[str, Any]] = {"heads": None}
    needed = ("heads", "a folder")
    needs_hidden = True
    on_every_rank = True
    is_best_first = True

    def load_model(self, target_model: Any) -> None:
        config = self.vllm_config.model_config

        def lm_head(states: Tensor) -> Tensor:
            logits: Tensor = target_model.compute_logits(states.flatten(0, -2))
            return logits.unflatten(0, states.shape[:-1])

        self.heads = MedusaHeads.load(self.options["heads"], lm_head).to(get_tp_group().device, config.dtype).eval()
        hidden_size = config.get_hidden_size()
        if self.heads.hidden_size != hidden_size:
            raise refusal("heads", f"those of a model of hidden size {hidden_size}", self.heads.hidden_size)

        self.max_depth = self._depth = min(self.heads.num_heads, self.max_nodes - 1)

    def limit_depth(self, levels: int) -> None:
        self._depth = levels

    def draft(self, request_ids: list[str], tokens: list[np.ndarray], hidden: Tensor | None = None) -> list[Proposal]:
        return host_proposals(*self._best_trees(hidden))

    def draft_on_device(self, tokens: Tensor, lengths: Tensor, hidden: Tensor | None) -> Draft:
        draft, self.log_probs = self._best_trees(hidden)
        return draft

    def _best_trees(self, hidden: Tensor | None) -> tuple[Draft, Tensor]:
        return best_trees(self.heads(hidden)[:, : self._depth], self.max_nodes)


class FolderTreeDrafter(WithoutModel, KnowsTexts):
    """A head or a block drafter that reads outputs of the target's layers, from a folder of any known format.

    It runs on the first tensor-parallel rank, with a copy of embedding and output layer if the ranks share these,
    outside vLLM's memory budget. Prefix caching must be off.
    """

    defaults: ClassVar[dict[str, Any]] = {"drafter": None, "depth": None, "width": None}
    largest = SIZES
    needed = ("drafter", "a folder")

    def __init__(self, vllm_config: Any) -> None:
        super().__init__(vllm_config)
        if self.options["depth"] is not None:
            self.max_depth = self.options["depth"]

    def make(self, target: WholeEnds) -> Any:
        sizes = {name: self.options[name] for name in ("depth", "width") if self.options[name] is not None}
        drafter = load_drafter(self.options["drafter"], target, num_nodes=self.max_nodes, **sizes)
        if not drafter.feature_layers:
            found = f"one for {type(drafter).__name__}; for Medusa heads there is MedusaTreeDrafter"
            raise refusal("drafter", "a folder of EAGLE-3, P-EAGLE or DFlash", found)
        return drafter

    def load_model(self, target_model: Any) -> None:
        config = self.vllm_config.model_config
        self.device = get_tp_group().device
        drafter = self.make(WholeEnds(target_model, config))
        self.feature_layers, self.grows_by_level = drafter.feature_layers, drafter.grows_by_level
        self.max_depth = drafter.max_depth
        if get_tp_group().rank_in_group == 0:
            self.begin(drafter, target_model)

    def read(self, request_ids: list[str], tokens: list[np.ndarray], starts: list[int], features: list[Tensor]) -> None:
        for request_id, start in zip(request_ids, starts, strict=True):
            if start == 0:
                self.forget(request_id)
        # All of these tokens are known by now, the accepted ones too.
        sequences = self.sequences(request_ids, tokens)
        self.drafter.read(FeatureRows(sequences, starts, [len(part) for part in features], torch.cat(features)))

    def unread(self, request_ids: list[str], tokens: list[np.ndarray]) -> float:
        return self.share * float(self.drafter.unread(self.sequences(request_ids, tokens)))


class EagleTreeDrafter(FolderTreeDrafter):
    """EAGLE-3: a decoder layer on the outputs of three target layers grows a tree, with a separate cache.

    Otherwise as `FolderTreeDrafter`.
    """

    defaults: ClassVar[dict[str, Any]] = {"head": None, "depth": 5, "width": 4}
    largest = SIZES
    needed = ("head", "a folder")
    grows_by_level = True

    def make(self, target: WholeEnds) -> EagleDrafter:
        head = EagleHead.from_pretrained(self.options["head"], target)
        return EagleDrafter(head, num_nodes=self.max_nodes, depth=self.options["depth"], width=self.options["width"])
