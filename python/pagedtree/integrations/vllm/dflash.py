"""vLLM's own DFlash speculator, with the likeliest tree instead of a chain."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from vllm.v1.worker.gpu.spec_decode.dflash.speculator import DFlashSpeculator

from pagedtree.generation.drafters.base import best_trees
from pagedtree.integrations.vllm.speculator import KeptTrees


class DFlashTreeSpeculator(KeptTrees, DFlashSpeculator):
    """Makes the likeliest tree (`pagedtree.best_first_tree`) of `num_speculative_tokens` nodes and as many levels from
    one pass of vLLM's block drafter.

    """

    def __init__(self, vllm_config: Any, req_states: Any, device: torch.device) -> None:
        KeptTrees.__init__(self, req_states, device)
        confidence = self.draft_token_confidence_probs
        DFlashSpeculator.__init__(self, vllm_config, device)
        # vLLM would estimate them for a chain.
        self.draft_token_confidence_probs, self.use_acceptance_estimator = confidence, False
        self._batch_parents = torch.empty_like(self.parents)

    def sample_draft(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Returns the draft tokens of the trees, int64 [R * num_speculative_tokens]; safe in a captured graph."""
        logits = self.compute_draft_logits(hidden_states, 0)
        draft, log_probs = best_trees(logits.view(-1, self.num_speculative_steps, logits.shape[-1]), self.max_nodes)
        self.keep_confidence(log_probs)
        tokens, parents = self.padded(draft)
        self._batch_parents[: parents.shape[0]] = parents
        return tokens.flatten()

    def propose(
        self,
        input_batch: Any,
        attn_metadata: Any,
        slot_mappings: Any,
        last_hidden_states: Tensor,
        aux_hidden_states: list[Tensor] | None,
        *args: Any,
        **kwargs: Any,
    ) -> Tensor:
        batch, is_dummy = input_batch, kwargs.get("dummy_run", False)
        if not is_dummy:
            rows = self._chains(batch)
            batch = replace(batch, positions=batch.positions[rows])
            last_hidden_states = last_hidden_states[rows[: last_hidden_states.shape[0]]]
            aux_hidden_states = [stream[rows[: stream.shape[0]]] for stream in aux_hidden_states or ()]
        tokens: Tensor = super().propose(
            batch, attn_metadata, slot_mappings, last_hidden_states, aux_hidden_states, *args, **kwargs
        )
        if not is_dummy:
            self.parents.index_copy_(0, batch.idx_mapping, self._batch_parents[: batch.num_reqs])
        return tokens

    def _chains(self, batch: Any) -> Tensor:
        """Returns the source row of each row of the pass, so that accepted paths follow their roots without gaps."""
        rows = torch.arange(batch.positions.shape[0] + 1, device=self.parents.device, dtype=torch.int64)
        assert self.accepted is not None
        path = self.accepted.accept_index
        if path is not None:
            roots = batch.logits_indices[batch.cu_num_logits[:-1].long()][:, None]
            places = roots + torch.arange(path.shape[1], device=rows.device, dtype=torch.int64)
            # Entries without a node go past the end.
            rows[places.masked_fill(path < 0, rows.shape[0] - 1).flatten()] = (roots + path).flatten()
        return rows[:-1]
