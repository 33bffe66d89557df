"""Drafters for vLLM's `custom_class` method: they propose a tree for each request.

    LLM(model, speculative_config={"method": "custom_class", "num_speculative_tokens": 15,
                                   "model": "pagedtree.integrations.vllm.drafters.NgramTreeDrafter"},
        additional_config={"pagedtree": {"max_branches": 4}})

num_speculative_tokens bounds the nodes of a tree, the root not counted. A drafter's options are the entry "pagedtree"
of additional_config.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np
import torch
from transformers import AutoModelForCausalLM
from vllm.distributed import get_tp_group
from vllm.platforms import current_platform

from pagedtree import Draft
from pagedtree.generation.drafters import Drafter, NgramDrafter
from pagedtree.generation.rules import Sampling
from pagedtree.generation.scheduler import GeneratedSequence
from pagedtree.integrations.transformers import ModelDrafter

__all__ = ["ModelTreeDrafter", "NgramTreeDrafter", "TreeDrafter"]

Proposal = tuple[list[int], np.ndarray]


class TreeDrafter:
    """Base class: the methods that vLLM calls, and what trees need around them.

    Attributes:
        request_ids: the requests of the batch, in its order; set by the runner before `propose`.
        parents: request id -> int32 [n + 1], the tree of the last proposal, root included; its nodes are in an order in
            which the first n are a tree for any n, since vLLM's scheduler may cut proposals off.
    """

    defaults: ClassVar[dict[str, Any]] = {}

    def __init__(self, vllm_config: Any) -> None:
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
        self.parents: dict[str, np.ndarray] = {}

    def load_model(self, target_model: Any) -> None:
        """Called once the target is loaded."""

    def forget(self, request_id: str) -> None:
        """The request is finished."""
        self.parents.pop(request_id, None)

    def draft(self, request_ids: list[str], tokens: list[np.ndarray]) -> list[Proposal]:
        """What a drafter implements: a tree for each of these requests, whose last token is known.

        Args:
            request_ids: R of vLLM's names.
            tokens: R arrays, integer [length of the text so far], prompt included; the last token is the root.

        Returns R pairs (draft_tokens, parents): a list of n <= num_speculative_tokens token ids, and int32 [n + 1], the
        parents of the root (-1) and of each draft token: 0 is the root, i the i-th draft token, and
        0 <= parents[i] < i. Without any guess: ([], np.array([-1])).

        Called on the first tensor-parallel rank only.
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
        # All ranks must agree on the trees. The first one decides; only it needs a draft model.
        proposals: list[Proposal] | None = None
        if get_tp_group().rank_in_group == 0 and rows:
            known = [token_ids_cpu[row, : num_tokens_no_spec[row]] for row in rows]
            proposals = self.draft([self.request_ids[row] for row in rows], known)
            self._check(proposals, len(rows))
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
        size = vllm_config.speculative_config.draft_tensor_parallel_size
        if size is not None:
            raise ValueError(f"draft_tensor_parallel_size: NgramTreeDrafter has no draft model, got {size}")
        self.drafter = NgramDrafter(self.max_nodes, **self.options)

    def draft(self, request_ids: list[str], tokens: list[np.ndarray]) -> list[Proposal]:
        return proposals_of(self.drafter, tokens, torch.device("cpu"))


class ModelTreeDrafter(TreeDrafter):
    """A smaller model of the target's tokenizer grows a tree of its likeliest continuations.

    Options: model (path or name of a transformers checkpoint; needed); depth and width as in
    `pagedtree.integrations.transformers.ModelDrafter`. The draft model is run by transformers in the target's dtype,
    whole on the first tensor-parallel rank, with a paged cache of its own, which is not part of vLLM's memory budget:
    leave it room.
    """

    defaults: ClassVar[dict[str, Any]] = {"model": None, "depth": 4, "width": 4}

    def __init__(self, vllm_config: Any) -> None:
        super().__init__(vllm_config)
        if not isinstance(self.options["model"], str):
            raise ValueError(
                f'additional_config["pagedtree"]: expected the entry model, a checkpoint, got {self.options["model"]!r}'
            )
        size = vllm_config.speculative_config.draft_tensor_parallel_size
        if size not in (None, 1):
            raise ValueError(f"draft_tensor_parallel_size: expected 1 (the draft model is not split), got {size}")
        self.sequences: dict[str, GeneratedSequence] = {}
        self._next_index = 0

    def load_model(self, target_model: Any) -> None:
        if get_tp_group().rank_in_group != 0:
            return
        config = self.vllm_config.model_config
        self.device = torch.device(current_platform.device_type)
        model: Any = AutoModelForCausalLM.from_pretrained(self.options["model"], dtype=config.dtype)
        model = model.to(self.device).eval()
        self.drafter = ModelDrafter(
            model, num_nodes=self.max_nodes, depth=self.options["depth"], width=self.options["width"]
        )
        seeds = torch.zeros(1, dtype=torch.int64)
        sampling = Sampling("greedy", None, seeds, vocab_size=config.get_vocab_size())
        self.drafter.begin(page_size=16, sampling=sampling)

    def forget(self, request_id: str) -> None:
        super().forget(request_id)
        sequence = self.sequences.pop(request_id, None)
        if sequence is not None:
            self.drafter.forget(sequence)

    def draft(self, request_ids: list[str], tokens: list[np.ndarray]) -> list[Proposal]:
        # What the draft model read of its tree is read again with the accepted tokens, in the pass that it needs for
        # the newest one anyway. So nothing has to be moved in its cache, whatever vLLM did to the batch meanwhile.
        self.drafter.select([self._sequence(*pair) for pair in zip(request_ids, tokens, strict=True)])
        return proposals_of(self.drafter, tokens, self.device)

    def _sequence(self, request_id: str, tokens: np.ndarray) -> GeneratedSequence:
        known, new = self.sequences.get(request_id), tokens.tolist()
        if known is not None and (len(new) <= len(known.tokens) or new[: len(known.tokens)] != known.tokens):
            self.forget(request_id)  # the text was replaced (a session, or the id is used again)
            known = None
        if known is None:
            known = GeneratedSequence(self._next_index, group=self._next_index, tokens=[], max_length=0)
            self._next_index += 1
            self.sequences[request_id] = known
        known.tokens = new
        return known


def proposals_of(drafter: Drafter, known: Sequence[np.ndarray], device: torch.device) -> list[Proposal]:
    """A drafter's proposals, on the host."""
    lengths = [len(tokens) for tokens in known]
    history = np.zeros((len(known), max(lengths)), dtype=np.int64)
    for row, tokens in zip(history, known, strict=True):
        row[: len(tokens)] = tokens
    counts = torch.tensor(lengths, dtype=torch.int32)
    draft = Draft(*drafter.propose(torch.from_numpy(history).to(device), counts.to(device)))
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
