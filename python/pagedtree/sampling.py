"""Sampling without drafts."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from pagedtree._arguments import expect_type
from pagedtree._ops import call, ops, register_fake
from pagedtree.options import RequestOptions, option_arguments
from pagedtree.sampling_params import SamplingParams

if TYPE_CHECKING:
    from pagedtree.distributed.shards import VocabShards

__all__ = ["SamplingParams", "sample"]


def sample(
    logits: Tensor,
    params: SamplingParams,
    *,
    seeds: Tensor,
    positions: Tensor,
    grammar_mask: Tensor | None = None,
    options: RequestOptions | None = None,
    shards: VocabShards | None = None,
) -> Tensor:
    """Draws one token per row: int64 [R].

    Args:
        logits: [R, V] float16, bfloat16 or float32, read in their own dtype; row stride >= V, V in 1..2^20.
        params: scalars, or tensors [R].
        seeds: int64 [R], any value; the same seed and position draw the same token from the same logits.
        positions: int32 or int64 [R], the position whose successor is drawn.
        grammar_mask: bool [R, V] or packed int32 [R, ceil(V / 32)], as for `verify_greedy`.
        options: the R requests' options; see `RequestOptions`.
        shards: the vocabulary's parts, of which logits and grammar_mask are this rank's (`pagedtree.distributed`).

    Noise depends only on (seed, position, token), so the result does not depend on batch, slot, threads or instruction
    set, and equals the token of `verify_sampled` at that position:

        philox(block, use) = Philox4x32-10's words, key=seed, counter=(position, block, use)
        exp(word) = -log1p(-(word + 1/2) * 2**-32)
        group, member = divmod(x, 8)
        block, lane = divmod(group, 128)
        least = exp(philox(32 * block + lane % 32, 0)[lane // 32]) / 8
        w = philox(2 * group, 0x80) + philox(2 * group + 1, 0x80)
        has_least = w[0] >> 29
        noise[x] = -log(least if member == has_least else least + exp(w[member + (member < has_least)]))
        token = argmax over kept x of (logits[x] - max) / temperature + noise[x]     # lowest id on ties

    This is a draw from the filtered softmax.

    Sources: the Gumbel-max trick (Gumbel, 1954), Philox (Salmon et al., SC 2011).

    Raises ValueError for wrong shapes, dtypes or devices, TypeError for wrong types.
    """
    expect_type("logits", logits, Tensor)
    expect_type("params", params, SamplingParams)
    if shards is not None:
        from pagedtree.distributed.verify import sample_shards

        return sample_shards(shards, logits, params, seeds, positions, grammar_mask, options)
    return call(
        ops.sample,
        logits,
        *params.on(logits.device),
        seeds=seeds,
        positions=positions,
        grammar_mask=grammar_mask,
        **option_arguments(params, options, logits.device),
    )


register_fake("sample")(lambda logits, **others: logits.new_empty((logits.shape[0],), dtype=torch.int64))
