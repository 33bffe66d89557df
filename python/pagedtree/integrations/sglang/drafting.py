"""EAGLE's drafting steps in SGLang: one attention backend per step."""

from __future__ import annotations

from typing import Any

import torch

from pagedtree.integrations.sglang.attention import PagedTreeBackend, Step, slots_of, width_of

__all__ = ["PagedTreeDraftBackend"]


class PagedTreeDraftBackend:
    """Prepares the steps after the first, by `attn_backends[i]`: `topk` branches per request, which see the prefix and
    their own slots, as pages of one slot."""

    def __init__(self, model_runner: Any, topk: int, num_steps: int) -> None:
        self.topk, self.num_steps = topk, num_steps
        self.attn_backends = [PagedTreeBackend(model_runner) for _ in range(num_steps - 1)]

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        pass

    def init_forward_metadata_out_graph(self, forward_batch: Any, in_capture: bool = False) -> None:
        pass

    def init_forward_metadata_in_graph(self, forward_batch: Any) -> None:
        self._prepare(forward_batch, self.attn_backends[0].max_context_len)

    def init_forward_metadata(self, forward_batch: Any) -> None:
        self._prepare(forward_batch, width_of(self.attn_backends[0], forward_batch))

    def _prepare(self, forward_batch: Any, width: int) -> None:
        lens, topk = forward_batch.seq_lens.long(), self.topk
        prefix = slots_of(self.attn_backends[0], forward_batch, width)
        drafts = forward_batch.out_cache_loc.view(-1, topk, self.num_steps)  # in order of branches, then steps
        table = torch.nn.functional.pad(prefix, (0, self.num_steps)).repeat_interleave(topk, 0)
        lens = lens.repeat_interleave(topk)
        places = lens[:, None] + torch.arange(self.num_steps, device=lens.device, dtype=torch.int64)
        table = table.scatter(1, places, drafts.flatten(0, 1).to(table.dtype))
        offsets = torch.arange(table.shape[0] + 1, dtype=torch.int32, device=lens.device)
        for step, backend in enumerate(self.attn_backends):
            backend.forward_metadata = Step(
                page_table=table,
                seq_lens=(lens + step + 1).int(),
                cu_seqlens_q=offsets,
                tree_mask=None,
                max_seqlen_q=1,
                page_size=1,
            )
