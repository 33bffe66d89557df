"""Passes of `generate` run below autograd, and leave nothing of that behind."""

from __future__ import annotations

import pytest
import torch
from torch import nn

pytest.importorskip("transformers")

from generate_case import generated, greedy, prompts_of, tiny

from pagedtree.integrations.transformers import NgramDrafter

pytestmark = pytest.mark.usefixtures("one_thread")

AUTOGRAD = torch._C.DispatchKey.AutogradFunctionality


def is_below_autograd():
    return torch._C._dispatch_tls_is_dispatch_key_excluded(AUTOGRAD)


class OwnTensor(torch.Tensor):
    """A weight of a type that may do what autograd's dispatch finds."""


@pytest.mark.parametrize("is_plain", [True, False])
def test_only_passes_of_plain_weights_are_below_autograd(is_plain):
    model, prompts, inside, outside = tiny(0), prompts_of((5, 17)), set(), set()
    expected = [greedy(model, prompt) for prompt in prompts]
    if not is_plain:
        norm = model.model.norm
        norm.weight = nn.Parameter(norm.weight.detach().as_subclass(OwnTensor))
    model.model.layers[0].register_forward_pre_hook(lambda *_: inside.add(is_below_autograd()))
    texts, _ = generated(model, NgramDrafter(), prompts, on_step=lambda _: outside.add(is_below_autograd()))
    assert texts == expected
    assert inside == {is_plain} and outside == {False} and not is_below_autograd()


def test_what_a_pass_gives_can_be_trained_with():
    model, seen = tiny(0), []
    generated(model, None, prompts_of((5,)), 2, on_step=lambda result: seen.append(result.logits))
    scale = torch.ones(seen[0].shape[-1], requires_grad=True)
    (seen[0] * scale).sum().backward()
    torch.testing.assert_close(scale.grad, seen[0].sum(0))
    model(prompts_of((5,))[0][None]).logits.sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_a_pass_that_fails_leaves_nothing_behind():
    model = tiny(0)

    def stop(*_):
        raise KeyError("stop")

    model.model.layers[1].register_forward_pre_hook(stop)
    with pytest.raises(KeyError, match="stop"):
        generated(model)
    assert not is_below_autograd()
