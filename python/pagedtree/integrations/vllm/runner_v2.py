"""vLLM's model runner V2, with trees."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from vllm.utils import torch_utils
from vllm.v1.worker.gpu.input_batch import get_num_sampled_and_rejected
from vllm.v1.worker.gpu.metrics.logits import get_num_nans
from vllm.v1.worker.gpu.sample.output import SamplerOutput
from vllm.v1.worker.gpu.spec_decode.dflash.speculator import DFlashSpeculator
from vllm.v1.worker.gpu.spec_decode.utils import DraftTokensHandler
from vllm.v1.worker.gpu.structured_outputs import grammar_invalid_drafts

from pagedtree import TreeBatch, build_trees
from pagedtree._arguments import refusal
from pagedtree.integrations.vllm.attention import TreeMask
from pagedtree.integrations.vllm.device_sampling import DeviceSampling
from pagedtree.integrations.vllm.dflash import DFlashTreeSpeculator
from pagedtree.integrations.vllm.features import Accepted, check_features
from pagedtree.integrations.vllm.limits import check_config, check_drafter, check_request, fit_request
from pagedtree.integrations.vllm.scheduler import DraftTrees
from pagedtree.integrations.vllm.speculator import KeptTrees, TreeSpeculator
from pagedtree.integrations.vllm.tree_drafter import TreeDrafter
from pagedtree.integrations.vllm.verification import Compactions, choose_tokens, grammar_rows, target_groups


class StepTrees(NamedTuple):
    """The trees of one step, without drafts the root alone. draft_tokens: int64 [N], -1 at nodes without a draft."""

    trees: TreeBatch
    draft_tokens: Tensor


class TreeRunnerV2:
    """Extends these methods of vLLM's model runner V2:

        load_model            the drafter takes the speculator's place
        initialize_kv_cache   gives the builders of attention metadata the buffers of the masks
        add_requests          looks at the parameters of new requests
        prepare_attn          chain slots first; then positions become start + depth, and masks are set
        sample                verification, and the accepted rows of all layers moved together
        take_draft_token_ids  sends the trees to the scheduler if there are grammars

    The speculative configuration is vLLM's for n-grams (`limits.METHODS`) or for DFlash (`DFlashTreeSpeculator`).
    Nothing here waits for the device; the drafter may.
    """

    def __init__(self, vllm_config: Any, device: torch.device) -> None:
        check_config(vllm_config)
        super().__init__(vllm_config, device)  # type: ignore[call-arg]
        self._step: StepTrees | None = None
        self.drafter: TreeDrafter | None = None
        theirs, self.speculator = self.speculator, None
        if self.speculative_config is None:
            return
        if self.speculative_config.method != "dflash":
            self.drafter = check_drafter(self.speculative_config.model)(vllm_config)
        elif type(theirs) is DFlashSpeculator:
            self.speculator = DFlashTreeSpeculator(vllm_config, self.req_states, device)
        else:
            raise refusal("draft trees", "a model for vLLM's DFlashSpeculator", type(theirs).__name__)

    # Attributes and methods of vLLM's runner.
    vllm_config: Any
    speculative_config: Any
    device: torch.device
    model: Any
    sampler: Any
    req_states: Any
    block_tables: Any
    attn_groups: list[list[Any]]
    compilation_config: Any
    kv_cache_config: Any
    max_num_tokens: int
    max_num_reqs: int
    vocab_size: int
    use_aux_hidden_state_outputs: bool
    draft_tokens_handler: Any
    speculator: KeptTrees | None
    _masks: TreeMask

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        super().load_model(*args, **kwargs)  # type: ignore[misc]
        self._sampling = DeviceSampling(self.sampler, self.device)
        if self.drafter is not None:
            self.drafter.load_model(self.model)
            layers = self.drafter.feature_layers
            check_features(self.vllm_config, self.model, layers)
            if layers:
                # vLLM counts the residual streams, from the one in front of the first layer on.
                self.model.set_aux_hidden_state_layers(tuple(layer + 1 for layer in layers))
                self.use_aux_hidden_state_outputs = True
            self.speculator = TreeSpeculator(self.drafter, self.req_states, self.device)
        if self.speculator is not None:
            self.draft_tokens_handler = _DraftTreesHandler(self.speculator.parents, self.device)

    def initialize_kv_cache(self, *args: Any, **kwargs: Any) -> None:
        super().initialize_kv_cache(*args, **kwargs)  # type: ignore[misc]
        layers = self.compilation_config.static_forward_context
        groups = target_groups(self.attn_groups, layers, self.vllm_config)
        self._compactions = Compactions(layers, self.kv_cache_config.kv_cache_groups)
        if self.speculator is None:
            return
        # Captured graphs see the masks of a step in these.
        words = (self.speculator.max_nodes + 31) // 32
        mask = torch.zeros((self.max_num_tokens, words), dtype=torch.int32, device=self.device)
        lens = torch.full((self.max_num_reqs,), -1, dtype=torch.int32, device=self.device)
        self._masks = TreeMask(mask, lens)
        for group in groups:
            for builder in group.metadata_builders:
                builder.tree = self._masks

    def finish_requests(self, scheduler_output: Any) -> None:
        super().finish_requests(scheduler_output)  # type: ignore[misc]
        if self.drafter is not None:
            for request_id in scheduler_output.finished_req_ids:
                self.drafter.forget(request_id)

    def add_requests(self, scheduler_output: Any) -> None:
        for request in scheduler_output.scheduled_new_reqs:
            check_request(request.sampling_params, is_v2=True)
            fit_request(request.sampling_params)
        super().add_requests(scheduler_output)  # type: ignore[misc]
        for request in scheduler_output.scheduled_new_reqs:
            self._sampling.add_request(self.req_states.req_id_to_index[request.req_id], request.sampling_params)

    def prepare_attn(self, input_batch: Any) -> Any:
        result = super().prepare_attn(input_batch)  # type: ignore[misc]
        self._step = None
        if self.speculator is not None:
            self._masks.tree_lens.fill_(-1)
            self._masks.num_reqs = input_batch.num_reqs_after_padding
            if input_batch.num_draft_tokens > 0:
                self._step = self._lay_out_trees(input_batch)
        return result

    def prepare_dummy_attn(self, *args: Any, **kwargs: Any) -> Any:
        self._forget_batch()
        return super().prepare_dummy_attn(*args, **kwargs)  # type: ignore[misc]

    def capture_model(self, *args: Any, **kwargs: Any) -> Any:
        self._forget_batch()
        return super().capture_model(*args, **kwargs)  # type: ignore[misc]

    def _forget_batch(self) -> None:
        if self.speculator is not None:
            self._masks.tree_lens.fill_(-1)
            self._masks.num_reqs = None

    def _lay_out_trees(self, batch: Any) -> StepTrees:
        assert self.speculator is not None
        rows, slots, node = batch.logits_indices, batch.expanded_idx_mapping, batch.expanded_local_pos
        trees = build_trees(
            self.speculator.parents[slots, node.long()],
            batch.cu_num_logits,
            max_nodes=self.speculator.max_nodes,
            max_depth=self.speculator.max_depth,
        )
        roots = batch.positions[rows] - node
        # Behind a prompt's tokens vLLM may schedule drafts that nobody has made.
        is_draft = (node == 0) | (roots >= self.req_states.prefill_len.gpu[slots])
        draft_tokens = batch.input_ids[rows].masked_fill(~is_draft, -1).long()
        self._set_positions(batch, roots + trees.depths.clamp(min=0))
        self._set_masks(batch, trees)
        batch.input_ids.clamp_(min=0)
        return StepTrees(trees, draft_tokens)

    def _set_positions(self, batch: Any, positions: Tensor) -> None:
        batch.positions.index_copy_(0, batch.logits_indices, positions)

    def _set_masks(self, batch: Any, trees: TreeBatch) -> None:
        mask, lens = self._masks.tree_mask, self._masks.tree_lens
        mask[: batch.num_tokens].zero_()
        mask.index_copy_(0, batch.logits_indices, trees.mask)
        counts = batch.cu_num_logits[1:] - batch.cu_num_logits[:-1]
        lens[: batch.num_reqs] = counts.masked_fill(counts == 1, -1)

    def sample(
        self, hidden_states: Tensor, input_batch: Any, grammar_output: Any
    ) -> tuple[SamplerOutput, Tensor, Tensor]:
        """Chooses tokens for the rows of roots and drafts; requests in prefill have rows, too."""
        step, self._step = self._step, None
        batch = input_batch
        logits = self.model.compute_logits(hidden_states[batch.logits_indices])
        offsets = batch.cu_num_logits
        draft_tokens, grammar_mask = step.draft_tokens if step is not None else None, None
        if grammar_output is not None and grammar_output.structured_output_request_ids:
            drafts = batch.num_draft_tokens_per_req
            sizes = np.ones(batch.num_reqs, dtype=np.int32) if drafts is None else drafts + 1
            rows = grammar_rows(grammar_output, batch.req_ids, sizes)
            grammar_mask = torch_utils.async_tensor_h2d(rows, device=self.device)
            if len(rows) != len(logits):  # vLLM's adaptive verification took the last nodes of some trees away
                begin = torch_utils.async_tensor_h2d(np.cumsum(sizes) - sizes, device=self.device)
                begin = begin.repeat_interleave(offsets[1:] - offsets[:-1], output_size=len(logits))
                grammar_mask = grammar_mask[begin + batch.expanded_local_pos]
            # Where the scheduler did not know the drafts, the mask holds for the root alone.
            unknown = grammar_invalid_drafts(
                batch, grammar_output.structured_output_request_ids, grammar_output.num_acceptable_drafts
            )
            if unknown is not None and draft_tokens is not None:
                draft_tokens = draft_tokens.masked_fill(unknown, -1)
        roots = batch.positions[batch.logits_indices[offsets[:-1].long()]]
        trees, seeds = step.trees if step is not None else None, self._sampling.seeds(batch)
        params, options = self._sampling.step(batch)
        verdict = choose_tokens(
            logits, trees, draft_tokens, params, options, seeds=seeds, positions=roots, grammar_mask=grammar_mask
        )
        num_sampled, num_rejected = get_num_sampled_and_rejected(
            verdict.num_accepted + 1, batch.seq_lens, offsets, batch.idx_mapping, self.req_states.prefill_len.gpu
        )
        last = verdict.accept_index.gather(1, verdict.num_accepted[:, None].long())[:, 0]
        accepted = Accepted((offsets[:-1] + last).long())
        if step is not None:
            tables, count = self.block_tables.input_block_tables, batch.num_reqs
            self._compactions(lambda group: tables[group][:count], roots, verdict)
            accepted.num_drafts, accepted.accept_index = batch.num_draft_tokens_per_req, verdict.accept_index
        if self.speculator is not None:
            self.speculator.accepted = accepted
        output = SamplerOutput(
            sampled_token_ids=verdict.tokens,
            logprobs_tensors=self._sampling.logprobs(logits, batch, verdict, grammar_mask),
            num_nans=get_num_nans(logits) if self.sampler.compute_nans else None,
            num_sampled=num_sampled,
            num_rejected=num_rejected,
        )
        return output, num_sampled, num_rejected


class _DraftTreesHandler(DraftTokensHandler):
    """Also sends parents, int32 [max_num_reqs, k + 1], to a scheduler that needs draft tokens."""

    def __init__(self, parents: Tensor, device: torch.device) -> None:
        super().__init__(device)
        self._parents = parents

    def set_draft_tokens(self, input_batch: Any, draft_tokens: Tensor) -> None:
        count = draft_tokens.shape[1]
        if input_batch.has_structured_output_reqs:
            parents = self._parents[input_batch.idx_mapping, : count + 1]
            draft_tokens = torch.cat([draft_tokens, parents], dim=1)
        super().set_draft_tokens(input_batch, draft_tokens)
        self.num_draft_tokens = count

    def get_draft_tokens(self) -> DraftTrees:
        message = super().get_draft_tokens()
        parents: list[Any] = [None] * len(message.req_ids)
        tokens = message.draft_token_ids
        if self.draft_tokens_np is not None:
            parents = [*self.draft_tokens_np[:, self.num_draft_tokens :]]
            tokens = [row[: self.num_draft_tokens] for row in tokens]
        return DraftTrees(message.req_ids, tokens, parents)
