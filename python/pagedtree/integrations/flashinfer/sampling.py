"""FlashInfer's verification of draft chains."""

from __future__ import annotations

import torch
from torch import Tensor

from pagedtree import SamplingParams, build_trees, verify_rejection
from pagedtree._arguments import checked, expect_shape, refusal


@checked(integers=("draft_token_ids",), own=("seed", "offset"))
def chain_speculative_sampling(
    draft_probs: Tensor,
    draft_token_ids: Tensor,
    target_probs: Tensor,
    maybe_output_accepted_token_num: Tensor | None = None,
    maybe_output_emitted_draft_token_num: Tensor | None = None,
    deterministic: bool = True,
    generator: torch.Generator | None = None,
    seed: int | None = None,
    offset: int | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Verifies chains of n drafts by rejection sampling (`pagedtree.verify_rejection`, draft_law "iid").

    draft_probs: float [b, n, V], the distributions the drafts were drawn from. draft_token_ids: int [b, n]; an id
    outside 0..V-1 ends the chain. target_probs: float [b, n + 1, V]. generator: draws the coins; default torch's own.
    seed, offset: ints, no tensors, together instead of it. deterministic: no effect, results always repeat.

    Returns (output_token_ids int32 [b, n + 1], accepted, emitted): the drafts before the first rejected one, one token
    of the target, then -1; accepted counts the drafts that would be accepted independently, emitted the ones in the
    output, both added to the given tensors, else int32 [b]. Makes one temporary of target_probs' size. Raises
    ValueError for wrong shapes.
    """
    if draft_token_ids.dim() != 2 or draft_probs.dim() != 3:
        shapes = [*draft_token_ids.shape], [*draft_probs.shape]
        raise refusal("draft_token_ids, draft_probs", "2 and 3 dimensions", f"shapes {shapes}")
    (b, n), vocab = draft_token_ids.shape, draft_probs.shape[2]
    expect_shape([b, n, vocab], draft_probs=draft_probs)
    expect_shape([b, n + 1, vocab], target_probs=target_probs)
    for name, probs in (("draft_probs", draft_probs), ("target_probs", target_probs)):
        if probs.dtype not in (torch.float32, torch.float16, torch.bfloat16, torch.float64):
            raise refusal(name, "fp32, fp16, bf16 or fp64", probs.dtype)
    device = target_probs.device
    expect_shape(
        [b],
        maybe_output_accepted_token_num=maybe_output_accepted_token_num,
        maybe_output_emitted_draft_token_num=maybe_output_emitted_draft_token_num,
    )
    accepted, emitted = (
        torch.zeros(b, dtype=torch.int32, device=device) if total is None else total
        for total in (maybe_output_accepted_token_num, maybe_output_emitted_draft_token_num)
    )
    coins = torch.rand(
        b, n + 2, generator=_seeded(seed, offset, device) or generator, device=device, dtype=torch.float32
    )
    nodes = torch.arange(n + 1, device=device, dtype=torch.int64)
    starts = torch.arange(b + 1, dtype=torch.int32, device=device) * (n + 1)
    trees = build_trees((nodes - 1).int().repeat(b), starts, max_nodes=n + 1, max_depth=n)
    drafts = torch.nn.functional.pad(draft_token_ids.long(), (1, 0))  # the root's is ignored
    begin = torch.arange(b, device=device, dtype=torch.int64)[:, None] * n
    rows = begin + nodes.clamp(max=max(n - 1, 0))  # the last has no children
    streams = torch.zeros(b, dtype=torch.int64, device=device)  # not used: all coins are given
    verdict = verify_rejection(
        target_probs.flatten(0, 1).float().log(),
        drafts.flatten(),
        trees,
        SamplingParams(),
        draft_law="iid",
        draft_probs=draft_probs.flatten(0, 1) if n else draft_probs.new_zeros(1, vocab),
        draft_rows=rows.flatten(),
        seeds=streams,
        positions=streams,
        coins=coins[:, : n + 1].contiguous().flatten(),
        final_coins=coins[:, n + 1].contiguous(),
    )
    ids = draft_token_ids.long()
    at = ids.clamp(0, vocab - 1)[..., None]
    q, p = draft_probs.gather(2, at)[..., 0], target_probs[:, :n].gather(2, at)[..., 0]
    alone = (coins[:, 1 : n + 1] * q < p) & (q > 0) & (ids >= 0) & (ids < vocab)
    return verdict.tokens.int(), accepted.add_(alone.sum(1)), emitted.add_(verdict.num_accepted)


def _seeded(seed: int | None, offset: int | None, device: torch.device) -> torch.Generator | None:
    for name, value in (("seed", seed), ("offset", offset)):
        if isinstance(value, Tensor):
            raise refusal(name, "an int", "a tensor", NotImplementedError)
        if value is not None and not isinstance(value, int):
            raise refusal(name, "an int", type(value).__name__, TypeError)
    if seed is None or offset is None:
        return None
    return torch.Generator(device).manual_seed((seed * 0x9E3779B97F4A7C15 + offset) % 2**63)
