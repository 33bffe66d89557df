"""vLLM's model runner, with trees: depth positions, masks, verification, compaction of the accepted path."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from vllm.v1.outputs import SamplerOutput

from pagedtree import TreeBatch
from pagedtree.integrations.vllm.attention import TreeMask
from pagedtree.integrations.vllm.features import Accepted, check_features, kept_features, kept_rows
from pagedtree.integrations.vllm.limits import check_config, check_request, fit_request
from pagedtree.integrations.vllm.logprobs import sampled_logprobs
from pagedtree.integrations.vllm.options import BatchOptions
from pagedtree.integrations.vllm.proposals import host_trees
from pagedtree.integrations.vllm.scheduler import DraftTrees, tree_of
from pagedtree.integrations.vllm.tree_drafter import read_only
from pagedtree.integrations.vllm.verification import Compactions, choose_tokens, grammar_rows, target_groups


@dataclass
class StepTrees:
    """The trees of R requests, without drafts the root alone. rows: int64 [N], each node's query in the step's batch.
    num_drafts: [R], nodes besides the root."""

    trees: TreeBatch
    rows: Tensor
    num_drafts: np.ndarray


class TreeRunner:
    """Extends these methods of vLLM's model runner (V1):

        _update_states            looks at the parameters of new requests
        _prepare_inputs           chain slots first; then positions become start + depth, and masks are set
        sample_tokens             keeps the grammar's mask
        _sample                   verification, and the accepted rows of all layers moved together
        propose_draft_token_ids   hands the drafter hidden states; keeps the trees of its proposals
        take_draft_token_ids      sends the trees to the scheduler

    It also works without a drafter: the same seeded sampling, one token per step.
    """

    def __init__(self, vllm_config: Any, device: torch.device) -> None:
        check_config(vllm_config)
        super().__init__(vllm_config, device)  # type: ignore[call-arg]
        self._step: StepTrees | None = None
        self._grammar_mask: Tensor | None = None
        self._options = BatchOptions(vllm_config.model_config.get_vocab_size(), device)
        self._proposed: dict[str, np.ndarray] = {}
        self._accepted: Accepted | None = None
        self._begin = 0.0  # of the pass
        self._seeds: dict[str, int] = {}
        # Draws seeds for requests without one. It is equal on all ranks, which draw in the same order.
        self._seed_source = torch.Generator().manual_seed(vllm_config.model_config.seed or 0)

    # Attributes and methods of vLLM's runner.
    input_batch: Any
    requests: dict[str, Any]
    input_ids: Any
    positions: Tensor
    seq_lens: Tensor
    query_start_loc: Any
    device: torch.device
    attn_groups: list[list[Any]]
    drafter: Any
    compilation_config: Any
    kv_cache_config: Any
    vllm_config: Any
    use_aux_hidden_state_outputs: bool
    get_model: Any

    def _update_states(self, scheduler_output: Any) -> Any:
        self._begin = time.perf_counter()
        for request_id in scheduler_output.finished_req_ids:
            self._seeds.pop(request_id, None)
            self._proposed.pop(request_id, None)
            if hasattr(self, "drafter"):
                self.drafter.forget(request_id)
        for request in scheduler_output.scheduled_new_reqs:
            check_request(request.sampling_params)
            fit_request(request.sampling_params)
        result = super()._update_states(scheduler_output)  # type: ignore[misc]
        # Sampling here needs no generators. vLLM would reset them for requests in prefill, which fails on the CPU.
        self.input_batch.generators.clear()
        return result

    def _input_fits_in_drafter(self, common_attn_metadata: Any) -> bool:
        # Proposals may reach past the longest sequence allowed: the scheduler cuts them off.
        return common_attn_metadata is not None

    def _setup_eagle3_aux_hidden_state_outputs(self) -> None:
        # Called once target and drafter are loaded.
        layers = self.drafter.feature_layers if hasattr(self, "drafter") else ()
        check_features(self.vllm_config, self.get_model(), layers)
        self.use_aux_hidden_state_outputs = bool(layers)
        super()._setup_eagle3_aux_hidden_state_outputs()  # type: ignore[misc]

    def _get_eagle3_aux_layers_from_config(self) -> tuple[int, ...]:
        # vLLM counts the residual streams, from the one in front of the first layer on.
        return tuple(layer + 1 for layer in self.drafter.feature_layers)

    def propose_draft_token_ids(
        self,
        scheduler_output: Any,
        sampled_token_ids: Any,
        sampling_metadata: Any,
        hidden_states: Tensor,
        sample_hidden_states: Tensor,
        aux_hidden_states: list[Tensor] | None,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        drafter, accepted = self.drafter, self._accepted
        self._accepted = None
        drafter.request_ids = list(self.input_batch.req_ids)
        drafter.pass_rows = scheduler_output.total_num_scheduled_tokens
        drafter.pass_seconds = time.perf_counter() - self._begin
        drafter.most_tokens = [self._most_tokens(self.requests[request_id]) for request_id in drafter.request_ids]
        if drafter.drafts_here and accepted is not None:
            if drafter.needs_hidden:
                drafter.hidden = sample_hidden_states.index_select(0, accepted.last_rows)
            if aux_hidden_states is not None:
                counts = [scheduler_output.num_scheduled_tokens[request_id] for request_id in drafter.request_ids]
                rows = kept_rows(counts, [len(new) for new in sampled_token_ids], accepted)
                batch = self.input_batch
                lengths = batch.num_tokens_no_spec[: len(rows)].tolist()
                tokens = [read_only(batch.token_ids_cpu[row, :length]) for row, length in enumerate(lengths)]
                starts = batch.num_computed_tokens_cpu[: len(rows)].tolist()
                features = kept_features(aux_hidden_states, drafter.feature_layers, rows)
                drafter.read(drafter.request_ids, tokens, starts, features)
        inputs = scheduler_output, sampled_token_ids, sampling_metadata, hidden_states, sample_hidden_states
        drafts = super().propose_draft_token_ids(*inputs, aux_hidden_states, *args, **kwargs)  # type: ignore[misc]
        drafter.hidden = None
        self._proposed.update(self.drafter.parents)
        return drafts

    def _most_tokens(self, request: Any) -> int:
        limit = self.vllm_config.model_config.max_model_len
        new = request.sampling_params.max_tokens
        return limit if new is None else min(limit, request.num_prompt_tokens + new)

    def take_draft_token_ids(self) -> DraftTrees | None:
        drafts = super().take_draft_token_ids()  # type: ignore[misc]
        if drafts is None:
            return None
        parents = [self._proposed.get(request_id) for request_id in drafts.req_ids]
        return DraftTrees(drafts.req_ids, drafts.draft_token_ids, parents)

    def _prepare_inputs(self, scheduler_output: Any, num_scheduled_tokens: np.ndarray) -> Any:
        result = super()._prepare_inputs(scheduler_output, num_scheduled_tokens)  # type: ignore[misc]
        self._step = self._lay_out_trees(scheduler_output, num_scheduled_tokens, result[0])
        if self._step is not None:
            self._set_positions(self._step)
        self._set_masks(self._step, int(num_scheduled_tokens.sum()))
        return result

    def _lay_out_trees(self, scheduler_output: Any, num_scheduled: np.ndarray, rows: Tensor) -> StepTrees | None:
        """Lays out the trees; None if no request has drafts. rows: vLLM's indices of the root and draft queries."""
        scheduled = scheduler_output.scheduled_spec_decode_tokens
        request_ids = self.input_batch.req_ids
        num_drafts = np.array([len(scheduled.get(request_id, ())) for request_id in request_ids], dtype=np.int64)
        if not num_drafts.any():
            return None
        parents = []
        for request_id, drafts, queries in zip(request_ids, num_drafts, num_scheduled, strict=True):
            if drafts and queries != drafts + 1:
                raise RuntimeError(f"draft trees: {drafts} drafts of request {request_id} among {queries} queries")
            parents.append(tree_of(drafts, self._proposed.get(request_id)))
        return StepTrees(host_trees(parents, self.device), rows.long(), num_drafts)

    def _set_positions(self, step: StepTrees) -> None:
        """Sets rotary positions to start + depth; slots stay a chain's."""
        cu_nodes = step.trees.cu_nodes.long()
        roots = self.positions[step.rows[cu_nodes[:-1]]]
        counts = torch.from_numpy(step.num_drafts + 1).to(self.device)
        self.positions[step.rows] = roots.repeat_interleave(counts, output_size=len(step.rows)) + step.trees.depths

    def _set_masks(self, step: StepTrees | None, num_queries: int) -> None:
        tree = None
        if step is not None:
            mask = step.trees.mask.new_zeros((num_queries, step.trees.mask.shape[1]))
            mask[step.rows] = step.trees.mask
            lens = torch.from_numpy(np.where(step.num_drafts > 0, step.num_drafts + 1, -1).astype(np.int32))
            tree = TreeMask(mask, lens.to(self.device), len(lens))
        for groups in self.attn_groups:
            for group in groups:
                for builder in group.metadata_builders:
                    builder.tree = tree

    def initialize_attn_backend(self, *args: Any, **kwargs: Any) -> Any:
        result = super().initialize_attn_backend(*args, **kwargs)  # type: ignore[misc]
        layers = self.compilation_config.static_forward_context
        target_groups(self.attn_groups, layers, self.vllm_config)
        self._compactions = Compactions(layers, self.kv_cache_config.kv_cache_groups)
        return result

    def sample_tokens(self, grammar_output: Any) -> Any:
        # vLLM would apply the mask to all rows of the logits. Here only visited rows are read.
        self._grammar_mask = None
        if grammar_output is not None:
            batch_ids = self.input_batch.req_ids
            ones = np.ones(len(batch_ids), dtype=np.int64)
            sizes = self._step.num_drafts + 1 if self._step is not None else ones
            self._grammar_mask = torch.from_numpy(grammar_rows(grammar_output, batch_ids, sizes)).to(self.device)
        return super().sample_tokens(None)  # type: ignore[misc]

    def _sample(self, logits: Tensor, spec_decode_metadata: Any) -> SamplerOutput:
        """Chooses tokens for the rows of roots and drafts; requests in prefill have rows, too."""
        step, self._step = self._step, None
        grammar_mask, self._grammar_mask = self._grammar_mask, None
        requests = [self.requests[request_id] for request_id in self.input_batch.req_ids]
        params, options = self._options.step(requests)
        numbers = [self._seed(r.req_id, r.sampling_params.seed) for r in requests]
        seeds = torch.tensor(numbers, dtype=torch.int64).to(self.device)
        last = self.seq_lens[: len(requests)].long() - 1
        trees, draft_tokens, positions = None, None, last
        if step is not None:
            trees, draft_tokens = step.trees, self.input_ids.gpu[step.rows]
            positions = last - torch.from_numpy(step.num_drafts).to(self.device)
        verdict = choose_tokens(
            logits, trees, draft_tokens, params, options, seeds=seeds, positions=positions, grammar_mask=grammar_mask
        )
        tokens = verdict.tokens
        if step is None:
            rows = torch.arange(len(requests), device=self.device, dtype=torch.int64)[:, None]
            self._accepted = Accepted(rows[:, 0])
        else:
            tables, count = self.input_batch.block_table, len(requests)
            self._compactions(lambda i: tables[i].get_device_tensor(count), positions, verdict)
            rows = step.trees.cu_nodes[:-1, None] + verdict.accept_index
            last_rows = rows.gather(1, verdict.num_accepted[:, None].long())[:, 0]
            self._accepted = Accepted(last_rows.long(), step.num_drafts.tolist(), verdict.accept_index)
        logprobs, top_n = None, self.input_batch.max_num_logprobs
        if top_n is not None:
            arguments = {"mode": self.vllm_config.model_config.logprobs_mode, "grammar_mask": grammar_mask}
            logprobs = sampled_logprobs(logits, tokens, rows, top_n, **arguments, requests=requests)
        return SamplerOutput(sampled_token_ids=tokens.int(), logprobs_tensors=logprobs)

    def _seed(self, request_id: str, given: int | None) -> int:
        if given is not None:
            return given
        if request_id not in self._seeds:
            self._seeds[request_id] = int(torch.randint(2**63 - 1, (1,), generator=self._seed_source))
        return self._seeds[request_id]
