"""Log-probabilities of tokens, straight from logits."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from pagedtree._arguments import expect_type
from pagedtree._ops import call, ops, register_fake
from pagedtree.options import RequestOptions, option_arguments
from pagedtree.sampling_params import SamplingParams

__all__ = ["token_logprobs"]


def token_logprobs(
    logits: Tensor,
    tokens: Tensor,
    *,
    rows: Tensor | None = None,
    params: SamplingParams | None = None,
    options: RequestOptions | None = None,
    top_n: int = 0,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Returns log-probabilities and ranks of R tokens: (logprobs, ranks, top_tokens, top_logprobs).

    Args:
        logits: [N, V] float16, bfloat16 or float32, read in their own dtype; row stride >= V, V in 1..2^20.
        tokens: int32 or int64 [R].
        rows: int32 or int64 [R], the row of logits of each, such as `Commit.accept_rows`; default r.
        params: scalars, or tensors [R]: scores the sampling distribution, penalties and filters included. None: the
            softmax of the logits as they are (options' logits, if there are any).
        options: the R requests' options, without stop ids; output_counts and history must have the tokens of a row's
            path.
        top_n: number of top tokens, 0..min(V, 1024).

    Returns:
        logprobs: float32 [R], natural logarithms; -inf for a token that the filters drop.
        ranks: int64 [R], how many tokens have a logit >= the token's, itself included, before filters, as in vLLM.
        top_tokens: int64 [R, top_n], the largest logits first, the lower id first on ties; -1 if fewer are finite; 0,
            1, 2, ... in a row without a finite logit.
        top_logprobs: float32 [R, top_n]; -inf where the filters drop a token.

    A token outside 0..V-1 has -inf and rank 0; a row out of range likewise, with no top tokens. NaN logits read as
    -inf; a row with no finite logit is uniform.

        x = log_softmax(filtered(logits[rows[r]]))
        logprobs[r] = x[tokens[r]]
        ranks[r] = sum(logits[rows[r]] >= logits[rows[r], tokens[r]])
        top_tokens[r] = argsort(-logits[rows[r]], stable)[:top_n]

    Raises ValueError for wrong shapes, dtypes or devices and a top_n out of range, TypeError for wrong types.
    """
    expect_type("logits", logits, Tensor)
    expect_type("top_n", top_n, int)
    sampling: dict[str, Any] = {}
    if params is not None:
        expect_type("params", params, SamplingParams)
        names = ("temperature", "top_k", "top_p", "min_p", "filter_order")
        sampling = dict(zip(names, params.on(logits.device), strict=True))
    arguments = option_arguments(params or SamplingParams(), options, logits.device)
    logprobs, ranks, top_tokens, top_logprobs = call(
        ops.token_logprobs, logits, tokens, rows=rows, **sampling, top_n=top_n, **arguments
    )
    return logprobs, ranks, top_tokens, top_logprobs


@register_fake("token_logprobs")
def _token_logprobs_fake(logits: Tensor, tokens: Tensor, top_n: int = 0, **others: Any) -> tuple[Tensor, ...]:
    one, top = (tokens.shape[0],), (tokens.shape[0], top_n)
    outputs = (one, torch.float32), (one, torch.int64), (top, torch.int64), (top, torch.float32)
    return tuple(logits.new_empty(shape, dtype=dtype) for shape, dtype in outputs)
