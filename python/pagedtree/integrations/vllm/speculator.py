"""Tree drafters as runner V2's speculators."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import torch
from torch import Tensor
from vllm.utils import torch_utils
from vllm.v1.worker.gpu.spec_decode.speculator import BaseSpeculator

from pagedtree import Draft
from pagedtree._arguments import refusal
from pagedtree.integrations.vllm.features import Accepted, kept_features, kept_rows
from pagedtree.integrations.vllm.tree_drafter import TreeDrafter, read_only


class KeptTrees:
    """The trees of requests, kept on the device by the request's slot.

    Every tree has `num_speculative_tokens` draft tokens; missing ones are children of the root without a token (-1).

    Attributes:
        parents: int32 [max_num_reqs, num_speculative_tokens + 1], the root's included; of a chain at first.
        max_nodes, max_depth: of each tree. accepted: of the last pass.
        draft_token_confidence_probs: fp32 [max_num_reqs, num_speculative_tokens], in the batch's order, with vLLM's
            adaptive verification: each node's probability divided by its predecessor's.
    """

    def __init__(self, req_states: Any, device: torch.device, max_depth: int | None = None) -> None:
        count, num_drafts = req_states.draft_tokens.shape
        self.parents = torch.arange(-1, num_drafts, dtype=torch.int32, device=device).repeat(count, 1)
        self.max_nodes, self.max_depth = num_drafts + 1, max_depth or num_drafts
        self.accepted: Accepted | None = None
        self.draft_token_confidence_probs = torch.zeros((count, num_drafts), device=device, dtype=torch.float32)
        self._nodes = torch.arange(self.max_nodes, device=device, dtype=torch.int64)

    def padded(self, draft: Draft) -> tuple[Tensor, Tensor]:
        """Returns the draft tokens and the parents of trees, padded to the same number of nodes."""
        begin, end = draft.trees.cu_nodes[:-1, None], draft.trees.cu_nodes[1:, None]
        index = begin + self._nodes
        is_node = index < end
        index = index.clamp(max=draft.draft_tokens.shape[0] - 1)
        tokens = draft.draft_tokens[index].masked_fill(~is_node, -1)
        parents = draft.trees.parents[index].masked_fill(~is_node, 0)
        parents[:, 0] = -1
        return tokens[:, 1:], parents

    def keep_confidence(self, log_probs: Tensor) -> None:
        """log_probs: fp32 [R * max_nodes], the nodes' joint ones, in descending order within each tree."""
        joint = log_probs.view(-1, self.max_nodes)
        self.draft_token_confidence_probs[: joint.shape[0]] = (joint[:, 1:] - joint[:, :-1]).exp().nan_to_num(0.0)


class TreeSpeculator(KeptTrees, BaseSpeculator):
    """Asks a drafter for the trees; without `on_device` by a blocking copy per step."""

    supports_mm_inputs = False
    draft_logits = None

    def __init__(self, drafter: TreeDrafter, req_states: Any, device: torch.device) -> None:
        super().__init__(req_states, device, drafter.max_depth)
        self.drafter, self.req_states, self.device = drafter, req_states, device
        self.enable_adaptive_verification = drafter.vllm_config.speculative_config.enable_adaptive_verification
        if self.enable_adaptive_verification and not (drafter.is_best_first and drafter.on_device):
            wanted = "a drafter whose nodes are in the order of their probabilities, such as MedusaTreeDrafter"
            raise refusal("speculative_config.enable_adaptive_verification", wanted, type(drafter).__name__)

    def init_cudagraph_manager(self, cudagraph_mode: Any) -> None:
        pass

    def capture(self) -> None:
        pass

    def propose(
        self,
        input_batch: Any,
        attn_metadata: Any,
        slot_mappings: Any,
        last_hidden_states: Tensor,
        aux_hidden_states: list[Tensor] | None,
        num_sampled: Tensor,
        num_rejected: Tensor,
        last_sampled: Tensor,
        next_prefill_tokens: Tensor,
        temperature: Tensor,
        seeds: Tensor,
        dp_sync_state: Any = None,
        dummy_run: bool = False,
        skip_attn_for_dummy_run: bool = False,
        mm_inputs: Any = None,
        is_profile: bool = False,
        num_speculative_tokens: int | None = None,
    ) -> Tensor:
        """Returns the draft tokens of each request of the batch, int64 [R, num_speculative_tokens]."""
        count = input_batch.num_reqs
        if dummy_run:
            return self.req_states.draft_tokens[:count]
        assert self.accepted is not None
        hidden = None
        if self.drafter.needs_hidden:
            hidden = last_hidden_states[input_batch.logits_indices[self.accepted.last_rows]]
        if self.drafter.on_device:
            tokens, parents = self._draft_on_device(input_batch, hidden)
        else:
            tokens, parents = self._draft_on_host(input_batch, hidden, aux_hidden_states, num_sampled)
        self.parents.index_copy_(0, input_batch.idx_mapping, parents)
        return tokens

    def _draft_on_device(self, batch: Any, hidden: Tensor | None) -> tuple[Tensor, Tensor]:
        states, slots = self.req_states, batch.idx_mapping
        texts = states.all_token_ids.gpu[:, : _longest(batch)].index_select(0, slots).long()
        lengths = states.total_len.gpu.index_select(0, slots)
        draft = self.drafter.draft_on_device(texts, lengths, hidden)
        if self.enable_adaptive_verification:
            assert self.drafter.log_probs is not None
            self.keep_confidence(self.drafter.log_probs)
        tokens, parents = self.padded(draft)
        return tokens.masked_fill((tokens < 0) | (tokens >= self.drafter.vocab_size), -1), parents

    def _draft_on_host(
        self, batch: Any, hidden: Tensor | None, streams: list[Tensor] | None, num_sampled: Tensor
    ) -> tuple[Tensor, Tensor]:
        drafter, accepted, slots = self.drafter, self.accepted, batch.idx_mapping
        assert accepted is not None
        begin = time.perf_counter()
        states, count = self.req_states, batch.num_reqs
        columns = [num_sampled, states.total_len.gpu[slots], states.num_computed_tokens.gpu[slots]]
        path = accepted.accept_index if accepted.accept_index is not None else num_sampled.new_zeros((count, 1))
        texts = states.all_token_ids.gpu[:, : _longest(batch)].index_select(0, slots)
        # The one time that the host waits for the device.
        host_rows = read_only(torch.cat([torch.stack(columns, dim=1), path.int(), texts], dim=1).cpu().numpy())
        num_new, lengths, computed = (host_rows[:, i].tolist() for i in range(3))
        paths, tokens = host_rows[:, 3 : 3 + path.shape[1]], host_rows[:, 3 + path.shape[1] :]
        new = [[*range(n)] for n in num_new]
        drafter.request_ids = list(batch.req_ids)
        drafter.pass_rows, drafter.pass_seconds = batch.num_tokens, time.perf_counter() - begin
        drafter.most_tokens = states.max_seq_len[batch.idx_mapping_np].clip(max=states.max_model_len).tolist()
        if drafter.drafts_here:
            drafter.hidden = hidden
            if streams is not None:
                on_host = Accepted(accepted.last_rows, accepted.num_drafts, torch.from_numpy(paths))
                rows = kept_rows(batch.num_scheduled_tokens.tolist(), num_new, on_host)
                starts = [end - len(kept) for end, kept in zip(computed, rows, strict=True)]
                so_far = [text[:length] for text, length in zip(tokens, lengths, strict=True)]
                features = kept_features(streams, drafter.feature_layers, rows)
                drafter.read(drafter.request_ids, so_far, starts, features)
        drafts = drafter.propose(new, np.array(lengths), tokens)
        drafter.hidden = None
        trees = [drafter.parents.get(request_id, [-1]) for request_id in drafter.request_ids]
        table = np.full((2, count, self.max_nodes), -1, dtype=np.int64)
        table[1, :, 1:] = 0
        for row, (drafted, parents) in enumerate(zip(drafts, trees, strict=True)):
            table[0, row, 1 : len(drafted) + 1], table[1, row, : len(parents)] = drafted, parents
        device_table = torch_utils.async_tensor_h2d(table, device=self.device)
        return device_table[0, :, 1:], device_table[1].int()


def _longest(batch: Any) -> int:
    return int((batch.num_computed_tokens_np + batch.num_scheduled_tokens).max()) + 1
