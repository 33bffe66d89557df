"""Drafters for vLLM's `custom_class` method: they propose a tree for each request.

    LLM(model, speculative_config={"method": "custom_class", "num_speculative_tokens": 15,
                                   "model": "pagedtree.integrations.vllm.drafters.NgramTreeDrafter"},
        additional_config={"pagedtree": {"max_branches": 4}})

num_speculative_tokens bounds the nodes of a tree, the root not counted. A drafter's options are the entry "pagedtree"
of additional_config. Any drafter takes the option "tree": "auto" (default) drafts where it is worth the time, and has
those nodes verified that are (`tuned.BatchTuner`); "whole" has every node of every tree verified.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from transformers import AutoModelForCausalLM
from vllm.distributed import get_tp_group

from pagedtree.distributed import DraftGroup, VocabShards
from pagedtree.generation.drafters import EagleDrafter, EagleHead, FeatureRows, MedusaHeads, NgramDrafter, load_drafter
from pagedtree.generation.drafters.base import best_trees
from pagedtree.generation.drafters.bounded import bounded
from pagedtree.generation.rules import Sampling
from pagedtree.integrations.transformers import ModelDrafter, tensor_parallel
from pagedtree.integrations.vllm.proposals import NO_GUESS, Proposal, cut_at, host_proposals, proposals_of
from pagedtree.integrations.vllm.texts import Texts
from pagedtree.integrations.vllm.tuned import BatchTuner, Pass
from pagedtree.integrations.vllm.whole_ends import WholeEnds

__all__ = [
    "EagleTreeDrafter",
    "FolderTreeDrafter",
    "MedusaTreeDrafter",
    "ModelTreeDrafter",
    "NgramTreeDrafter",
    "TreeDrafter",
]

# A proposal as a drafter returns it: draft tokens, parents and, where it knows them, log-probabilities.
Proposed = tuple[list[int], np.ndarray] | tuple[list[int], np.ndarray, np.ndarray | None]


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
        grows_by_level  trees of fewer levels (`limit_depth`) take less time

    Attributes:
        options: `defaults`, with what additional_config gives instead.
        max_nodes: num_speculative_tokens + 1.
        max_depth: the most levels of a tree; by default max_nodes - 1.
        request_ids, hidden: the requests of the batch, in its order, and the hidden state of each; set by the runner
            before `propose`.
        most_tokens: how many tokens the text of each of these requests may have, prompt included; set likewise.
        pass_rows, pass_seconds: how many tokens the pass read, draft tokens included, and what it took; set likewise.
        parents: request id -> int32 [n + 1], the tree of the last proposal, root included; its nodes are in an order in
            which the first n are a tree for any n, since vLLM's scheduler may cut proposals off.
    """

    defaults: ClassVar[dict[str, Any]] = {}
    needs_hidden: bool = False
    feature_layers: Sequence[int] = ()
    on_every_rank: bool = False
    grows_by_level: bool = False

    def __init__(self, vllm_config: Any) -> None:
        self.check(vllm_config)
        worker = vllm_config.parallel_config.worker_cls
        if not isinstance(worker, str) or worker == "auto" or worker.startswith("vllm."):
            raise ValueError(
                f"{type(self).__name__}: expected worker_cls = pagedtree.integrations.vllm.worker.TreeGPUWorker"
                f" (on CPUs TreeCPUWorker), got {worker}"
            )
        given = dict((vllm_config.additional_config or {}).get("pagedtree", {}))
        tree = given.pop("tree", "auto")
        if tree not in ("auto", "whole"):
            raise ValueError(f'additional_config["pagedtree"]: expected tree = "auto" or "whole", got {tree!r}')
        unknown = sorted(set(given) - set(self.defaults))
        if unknown:
            known = sorted({"tree", *self.defaults})
            raise ValueError(f'additional_config["pagedtree"]: expected options among {known}, got {unknown}')
        self.vllm_config = vllm_config
        self.options = {**self.defaults, **given}
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

    def draft(self, request_ids: list[str], tokens: list[np.ndarray]) -> Sequence[Proposed]:
        """Drafts a tree for each of these requests, whose last token is known; this is what a drafter implements.

        Args:
            request_ids: R of vLLM's names.
            tokens: R arrays, integer [length of the text so far], prompt included; the last token is the root.

        A drafter with `needs_hidden` gets a third argument, by keyword: hidden [R, H], what the target's output layer
        turned into the root, which is the last hidden state at the token before it, in the model's dtype on its device.

        Returns R tuples (draft_tokens, parents) or (draft_tokens, parents, log_probs): a list of n <=
        num_speculative_tokens token ids, and int32 [n + 1], the parents of the root (-1) and of each draft token: 0 is
        the root, i the i-th draft token, and 0 <= parents[i] < i. Without any guess: ([], np.array([-1])). Nodes deeper
        than the request's text may still grow are left out afterwards. log_probs: fp32 [n + 1], each node's joint
        log-probability by the drafter, the root's 0; what is accepted corrects them.

        Called on the first tensor-parallel rank, with `on_every_rank` on all of them; where nothing is worth its time,
        not in every step.
        """
        raise NotImplementedError

    def limit_depth(self, levels: int) -> None:
        """Asks for at most so many levels from now on, where fewer take less time; called where `draft` is next."""

    def unread(self, request_ids: list[str], tokens: list[np.ndarray]) -> float:
        """Tells how much more than what every step brings `draft` would read now, in tokens of the target; called where
        proposals are made, with what `draft` may get next.
        """
        return 0.0

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
        request_ids = [self.request_ids[row] for row in rows]
        known = [token_ids_cpu[row, : num_tokens_no_spec[row]] for row in rows]
        # All ranks must agree on the trees, and those that draft on how deep. The first one decides.
        ranks, depth = get_tp_group(), self.max_depth if rows else None
        is_first = ranks.rank_in_group == 0
        if self.is_tuned and is_first and rows:
            if self._tuner is None:
                self._tuner = BatchTuner(self.max_depth, self.grows_by_level)
            passed = Pass(self.request_ids, sampled_token_ids, self.pass_rows, self.pass_seconds)
            depth = self._tuner.plan(passed, request_ids, self.unread(request_ids, known)).depth
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
            proposals = self._checked(self.draft(request_ids, known, **states), len(rows))
            # The last token of a text is generated, but never read.
            rooms = [self.most_tokens[row] - 1 - len(text) for row, text in zip(rows, known, strict=True)]
            proposals = [cut_at(room, each) for room, each in zip(rooms, proposals, strict=True)]
            if self._tuner is not None:
                proposals = self._tuner.keep(proposals)
        proposals = ranks.broadcast_object(proposals, src=0) or [NO_GUESS] * len(rows)
        drafts: list[list[int]] = [[] for _ in sampled_token_ids]
        for row, request_id, proposal in zip(rows, request_ids, proposals, strict=True):
            drafts[row], self.parents[request_id] = proposal.tokens, proposal.parents
        return drafts

    def _checked(self, proposed: Sequence[Proposed], count: int) -> list[Proposal]:
        """Checks what `draft` returned; raises ValueError where it is not what its docstring says."""
        name = f"{type(self).__name__}.draft"
        if len(proposed) != count:
            raise ValueError(f"{name}: expected a proposal for each of {count} requests, got {len(proposed)}")
        proposals = [Proposal(*each) for each in proposed]
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


class NgramTreeDrafter(TreeDrafter):
    """Prompt lookup: what followed the last n-gram earlier in the request's text, merged into a tree.

    Options: those of `pagedtree.integrations.transformers.NgramDrafter` but `remember`.
    """

    defaults: ClassVar[dict[str, Any]] = {"max_depth": None, "max_branches": 4, "min_ngram": 1, "max_ngram": 4}

    def __init__(self, vllm_config: Any) -> None:
        super().__init__(vllm_config)
        self.drafter = self.make()
        self.max_depth = self.drafter.max_depth

    def make(self) -> NgramDrafter:
        return NgramDrafter(self.max_nodes, **self.options)

    @classmethod
    def check(cls, vllm_config: Any) -> None:
        _expect_no_draft_model(cls, vllm_config)

    def limit_depth(self, levels: int) -> None:
        self.drafter.limit_depth(levels)

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
    grows_by_level = True

    def __init__(self, vllm_config: Any) -> None:
        super().__init__(vllm_config)
        if not isinstance(self.options["model"], str):
            raise ValueError(
                f'additional_config["pagedtree"]: expected the entry model, a checkpoint, got {self.options["model"]!r}'
            )
        self.draft_ranks = vllm_config.speculative_config.draft_tensor_parallel_size or 1
        self.on_every_rank = self.draft_ranks > 1  # a draft group hands its proposals to all ranks
        self.texts = Texts()
        self.drafter: Any = None  # on the ranks that draft
        self.max_depth = self.options["depth"]

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
        self.share = _share_of(getattr(self.drafter, "num_weights", 0), target_model)

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

    def limit_depth(self, levels: int) -> None:
        self.drafter.limit_depth(levels)

    def unread(self, request_ids: list[str], tokens: list[np.ndarray]) -> float:
        known = [len(self.texts.known(request_id)) for request_id in request_ids]
        return self.share * sum(max(len(text) - n - 1, 0) for text, n in zip(tokens, known, strict=True))

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

        self.max_depth = self._depth = min(self.heads.num_heads, self.max_nodes - 1)

    def limit_depth(self, levels: int) -> None:
        self._depth = levels

    def draft(self, request_ids: list[str], tokens: list[np.ndarray], hidden: Tensor | None = None) -> list[Proposal]:
        draft, log_probs = best_trees(self.heads(hidden)[:, : self._depth], self.max_nodes)
        return host_proposals(draft, log_probs.cpu().numpy())


class FolderTreeDrafter(TreeDrafter):
    """A head or a block drafter that reads outputs of the target's layers, from a folder of any format that is known.

    Options: drafter (folder, of EAGLE-3, P-EAGLE, DFlash or DFlash 2, as `pagedtree.generation.drafters.load_drafter`
    reads it; needed); depth and width as its drafter takes them, default its own. The drafter is whole on the first
    tensor-parallel rank, with a copy of the target's embedding and output layer where the ranks share these. The copies
    and the drafter's cache are not part of vLLM's memory budget. Prefix caching must be off.
    """

    defaults: ClassVar[dict[str, Any]] = {"drafter": None, "depth": None, "width": None}
    folder: ClassVar[str] = "drafter"  # the option that names it

    def __init__(self, vllm_config: Any) -> None:
        super().__init__(vllm_config)
        if not isinstance(self.options[self.folder], str):
            raise ValueError(
                f'additional_config["pagedtree"]: expected the entry {self.folder}, a folder, got'
                f" {self.options[self.folder]!r}"
            )
        self.texts = Texts()
        self.drafter: Any = None  # on the ranks that draft
        if self.options["depth"] is not None:
            self.max_depth = self.options["depth"]

    @classmethod
    def check(cls, vllm_config: Any) -> None:
        _expect_no_draft_model(cls, vllm_config)

    def make(self, target: WholeEnds) -> Any:
        """The drafter; ValueError for one that reads something else of the target."""
        sizes = {name: self.options[name] for name in ("depth", "width") if self.options[name] is not None}
        drafter = load_drafter(self.options["drafter"], target, num_nodes=self.max_nodes, **sizes)
        if not drafter.feature_layers:
            raise ValueError(
                f"drafter: expected a folder of EAGLE-3, P-EAGLE or DFlash, got one for {type(drafter).__name__};"
                " for Medusa heads there is MedusaTreeDrafter"
            )
        return drafter

    def load_model(self, target_model: Any) -> None:
        config = self.vllm_config.model_config
        self.device = get_tp_group().device
        drafter = self.make(WholeEnds(target_model, config))
        self.feature_layers, self.grows_by_level = drafter.feature_layers, drafter.grows_by_level
        self.max_depth = drafter.max_depth
        if get_tp_group().rank_in_group != 0:
            return
        self.drafter = drafter
        self.drafter.begin(page_size=16, sampling=_greedy(config.get_vocab_size()))
        num_weights = sum(weight.numel() for network in drafter.networks for weight in network.parameters())
        self.share = _share_of(num_weights, target_model)

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

    def limit_depth(self, levels: int) -> None:
        self.drafter.limit_depth(levels)

    def unread(self, request_ids: list[str], tokens: list[np.ndarray]) -> float:
        return self.share * float(self.drafter.unread(self.texts.sequences(request_ids, tokens)))

    def draft(self, request_ids: list[str], tokens: list[np.ndarray]) -> list[Proposal]:
        self.drafter.select(self.texts.sequences(request_ids, tokens))
        return proposals_of(self.drafter, tokens, self.device)


class EagleTreeDrafter(FolderTreeDrafter):
    """EAGLE-3: a decoder layer on outputs of three of the target's layers grows a tree, with a cache of its own.

    Options: head (folder of a checkpoint as SGLang and vLLM load it; needed); depth and width as in
    `pagedtree.integrations.transformers.EagleDrafter`. The rest is as in `FolderTreeDrafter`.
    """

    defaults: ClassVar[dict[str, Any]] = {"head": None, "depth": 5, "width": 4}
    folder: ClassVar[str] = "head"
    grows_by_level = True

    def make(self, target: WholeEnds) -> EagleDrafter:
        head = EagleHead.from_pretrained(self.options["head"], target)
        return EagleDrafter(head, num_nodes=self.max_nodes, depth=self.options["depth"], width=self.options["width"])


def _share_of(num_weights: int, target: Any) -> float:
    """Estimates the time to read a token over the target's: as the numbers of weights."""
    return num_weights / (get_tp_group().world_size * sum(weight.numel() for weight in target.parameters()))


def _greedy(vocab_size: int) -> Sampling:
    """Makes the sampling for drafters that do not draw."""
    return Sampling("greedy", None, torch.zeros(1, dtype=torch.int64), vocab_size=vocab_size)


def _expect_no_draft_model(drafter: type[TreeDrafter], vllm_config: Any) -> None:
    size = vllm_config.speculative_config.draft_tensor_parallel_size
    if size is not None:
        raise ValueError(f"draft_tensor_parallel_size: {drafter.__name__} has no draft model, got {size}")
