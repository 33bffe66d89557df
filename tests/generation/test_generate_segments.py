"""`generate(segment=...)`: the logits of a request have the same bits in every batch."""

from __future__ import annotations

from collections import defaultdict

import pytest
import torch
from support.models import MODELS, SAMPLING, prompts_of, tiny
from torch import nn

from pagedtree.generation.drafters import NgramDrafter
from pagedtree.integrations.transformers import generate
from pagedtree.testing import backends, use_backend

SEGMENT, LENGTHS = 64, (67, 200, 5, 131)


def row_by_row(model):
    """The model with layers that compute each token by itself, so that others can be felt in attention alone."""
    for layer in model.modules():
        if isinstance(layer, nn.Linear | nn.SiLU) or type(layer).__name__.endswith("RMSNorm"):

            def forward(x, whole=layer.forward):
                rows = [whole(row[None]) for row in x.flatten(0, -2)]
                return torch.cat(rows).unflatten(0, x.shape[:-1]) if rows else whole(x)

            layer.forward = forward
    return model


def logits_of(model, prompts, **options):
    """For each prompt the steps' roots with the logits of their trees."""
    found = defaultdict(list)

    def keep(result):
        cu = result.trees.cu_nodes.tolist()
        for i, sequence in enumerate(result.sequences):
            found[sequence.group].append((int(result.start[i]), result.logits[cu[i] : cu[i + 1]].clone()))

    options = {"tree": None, "segment": SEGMENT, "drafter": NgramDrafter(remember=0), **options}
    generate(model, prompts, max_new_tokens=8, on_step=keep, **options)
    return [found[i] for i in range(len(prompts))]


@pytest.mark.parametrize(
    ("backend", "kind"), [("cpu", "full"), ("cpu", "window"), *[("simt", "full")] * ("simt" in backends())]
)
def test_logits_do_not_depend_on_the_batch(backend, kind):
    """Prompts in other chunks beside them, in other places, with trees and with few running at once."""
    of_model, config, fields = MODELS[kind]
    window = {"sliding_window": 100} if fields else {}
    model = row_by_row(tiny(0, of_model, config, **window).to(torch.float16 if backend == "simt" else torch.float32))
    prompts = [torch.cat([prompt, prompt[:20]]) for prompt in prompts_of(LENGTHS)]  # drafts from the first 20 tokens
    options = {"params": SAMPLING}
    with use_backend(backend):
        alone = [logits_of(model, [prompt], seeds=[i], **options)[0] for i, prompt in enumerate(prompts)]
        for order, limits in (
            ((0, 1, 2, 3), {"max_batch_tokens": 90}),
            ((3, 2, 1, 0), {"max_sequences": 2, "page_size": 8}),
        ):
            batch = logits_of(model, [prompts[i] for i in order], seeds=list(order), **limits, **options)
            for i, steps in zip(order, batch, strict=True):
                assert [start for start, _ in steps] == [start for start, _ in alone[i]]
                assert all(torch.equal(a, b) for (_, a), (_, b) in zip(steps, alone[i], strict=True)), (order, i)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"segment": 96}, "segment: expected a multiple of 64, at least 64, or None, got 96"),
        ({"segment": 0}, "segment: expected a multiple of 64"),
        ({"segment": 64, "tree": "auto"}, "tree: expected None with segment"),
        ({"segment": 64, "tree": None, "share_prefix": True}, "share_prefix: expected None or False with segment"),
    ],
)
def test_refusals(wrong, message):
    with pytest.raises(ValueError, match=message):
        generate(tiny(0), prompts_of([5]), max_new_tokens=1, **wrong)
